"""Takes what the devices have not sent of their gradients (`reduce_gradients(wire_dtype=)`) to another number of them.

Each device has a part e_d of its own, and n devices add (1 / n) sum_d e_d to the next mean of gradients. So that m
devices add the same, each of them gets the mean of the parts; a single array of it says that it belongs to every device
(`reduce.OF_ALL`), as a pmap copies it to all. One part that belongs to the first device is that of a pmap, whose other
parts were not saved: the first device gets it, and the others zeros. That is nearest to the sum of parts that are
roundings, and counts at most once.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.checkpoint import job_leaves, placement
from jaxmp._src.distributed import reduce
from jaxmp._src.step.state_paths import StatePath

_ARRAYS = jax.Array | np.ndarray


def fitted(
    saved: job_leaves.Saved, wanted: Mapping[StatePath, Any], shardings: placement.Shardings
) -> job_leaves.Saved:
    """`saved` with the arrays of each device for as many devices as `wanted` has; arrays, or descriptions of arrays."""
    state = dict(saved.state)
    arrays = [x for path, x in state.items() if placement.axis_of(path) is not None and isinstance(x, _ARRAYS)]
    is_of_all = any(x.shape == (1,) and _is_of_devices(x) and int(np.asarray(x)[0]) == reduce.OF_ALL for x in arrays)
    for path, like in wanted.items():
        x = state.get(path)
        if x is None or placement.axis_of(path) is None or x.shape == like.shape or x.shape[1:] != like.shape[1:]:
            continue
        convert = functools.partial(_converted, devices=like.shape[0], is_of_all=is_of_all)
        if isinstance(x, _ARRAYS):
            state[path] = jax.jit(convert, out_shardings=shardings.of(path, like.shape))(x)
        else:
            state[path] = jax.eval_shape(convert, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return saved._replace(state=state)


def _is_of_devices(x: Any) -> bool:
    """Whether `x` says which device each part belongs to."""
    return jnp.issubdtype(x.dtype, jnp.integer)


def _converted(x: Any, devices: int, is_of_all: bool) -> Any:
    if _is_of_devices(x):
        return jnp.arange(devices, dtype=x.dtype) if devices > 1 else jnp.full(1, reduce.OF_ALL, x.dtype)
    if x.shape[0] == 1 and not is_of_all:
        return jnp.pad(x, [(0, devices - 1), *[(0, 0)] * (x.ndim - 1)])
    return jnp.broadcast_to(jnp.mean(x, axis=0, keepdims=True), (devices, *x.shape[1:]))
