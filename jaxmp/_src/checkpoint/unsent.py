"""Takes what the devices have not sent of their gradients (`reduce_gradients(wire_dtype=)`) to another number of them.

Each device has a part e_d of its own, and n devices add (1 / n) sum_d e_d to the next mean of gradients. So that m
devices add the same, each of them gets the mean of the parts. One part alone may be that of the first device of a pmap,
whose number the checkpoint does not tell: the first device gets it, and the others zeros, so it counts at most once.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.checkpoint import job_leaves, placement
from jaxmp._src.step.state_paths import StatePath


def fitted(
    saved: job_leaves.Saved, wanted: Mapping[StatePath, Any], shardings: placement.Shardings
) -> job_leaves.Saved:
    """`saved` with the arrays of each device for as many devices as `wanted` has; arrays, or descriptions of arrays."""
    state = dict(saved.state)
    for path, like in wanted.items():
        x = state.get(path)
        if x is None or placement.axis_of(path) is None or x.shape == like.shape or x.shape[1:] != like.shape[1:]:
            continue
        convert = functools.partial(_converted, devices=like.shape[0])
        if isinstance(x, jax.Array | np.ndarray):
            state[path] = jax.jit(convert, out_shardings=shardings.of(path, like.shape))(x)
        else:
            state[path] = jax.eval_shape(convert, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return saved._replace(state=state)


def _converted(x: Any, devices: int) -> Any:
    if jnp.issubdtype(x.dtype, jnp.integer):  # the device that each part belongs to
        return jnp.arange(devices, dtype=x.dtype)
    if x.shape[0] == 1:
        return jnp.pad(x, [(0, devices - 1), *[(0, 0)] * (x.ndim - 1)])
    return jnp.broadcast_to(jnp.mean(x, axis=0, keepdims=True), (devices, *x.shape[1:]))
