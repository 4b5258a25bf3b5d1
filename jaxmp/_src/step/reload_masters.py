"""Makes masters for params that were replaced by hand: loaded, averaged, clipped.

A step computes the 16-bit params from their masters. So if only the params are replaced, the next step restores the old
values. A master has bits that its param lacks; where the params before are known, unchanged elements keep these bits:

    m' = m           where the new param has the dtype and the value of the one before
    m' = f32(new)    elsewhere
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths, masters as masters_lib, state as states, state_arrays


def reload_master_params(opt_state: Any, params: PyTree, *, before: PyTree | None = None) -> Any:
    """Makes the masters again from the model's params, after only the params were changed; the rest of the state stays.

    Megatron-LM's `reload_model_params`. Without it, the next step would overwrite the new params with the old masters.
    (`jaxmp.linen.TrainState.reload` and `jaxmp.nnx.Optimizer.reload_master_params` do it with the cast.)

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`.
      params: the new params, in float32 (the masters then have full precision) or in the policy's dtypes.
      before: the params that `opt_state` belongs to: where dtype and value of an element stayed, its master keeps
        all its bits, as weights that are clipped after each step need it. None: every master is made from `params`.

    Returns:
      `opt_state` with new masters, each in its own buffer, in the memory and with the sharding of the old one.

    Raises:
      ValueError: a param that is missing, left over, of another shape or no float of 16 or 32 bits, named by path; no
        masters in `opt_state`.

    Example:
      >>> import jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> opt_state = tx.init({"w": jnp.zeros(1)})
      >>> loaded = {"w": jnp.ones(1, jnp.bfloat16)}
      >>> jaxmp.get_master_params(reload_master_params(opt_state, loaded), loaded)
      {'w': Array([1.], dtype=float32)}

    References:
      Megatron-LM, core/optimizer/optimizer.py, `reload_model_params`.
    """
    if not states.with_masters(opt_state):
        raise ValueError("opt_state must keep masters; got none. Pass (opt_state, params) of mixed_precision.")
    new, old = tree_paths.leaves_by_path(params), None if before is None else tree_paths.leaves_by_path(before)
    expected: dict[str, Any] = {}  # float32 masters of their shapes; None where there is none
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    for state in states.with_masters(opt_state):
        for key, x in jax.tree_util.tree_leaves_with_path(state.master_params, is_leaf=is_masked):
            path = leaf_paths.param_of(key)
            expected[path] = expected.get(path) if is_masked(x) else jax.ShapeDtypeStruct(x.shape, jnp.float32)
    check_fits(new, expected if old is None else old, "reload_master_params")

    def new_master(path: str, master: Array) -> Array:
        if old is not None and new[path] is old[path]:
            return master
        new_master = _as_master(_in_float32(new[path]), master)
        if old is None or new[path].dtype != old[path].dtype:
            return new_master
        is_old = jnp.equal(*host_memory.to_device((placed(jnp.asarray(new[path]), old[path]), jnp.asarray(old[path]))))
        old_master, new_master = host_memory.to_device((jnp.asarray(master), new_master))
        return placed(jnp.where(placed(is_old, old_master), old_master, new_master), master)

    def reloaded(state: states.StepState) -> states.StepState:
        if state.master_params is None:
            return state
        of_param = lambda path, x: new_master(leaf_paths.param_of(path), x)  # noqa: E731
        return state._replace(master_params=jax.tree_util.tree_map_with_path(of_param, state.master_params))

    return state_arrays.own_buffers(
        states.map_steps(reloaded, opt_state), (opt_state, params) if old is None else params
    )


def check_fits(new: dict[str, Any], expected: dict[str, Any], caller: str) -> None:
    """Raises a ValueError unless new params have the leaves, shapes and kinds of numbers that are expected, by path.

    A float of 16 or 32 bits takes any such float, which is cast; other numbers must have the very dtype.
    """
    missing = [path for path in expected if path not in new]
    extra = [path for path in new if path not in expected]
    if missing or extra:
        got = f"{missing[0]} is missing" if missing else f"{extra[0]} is none of theirs"
        are_scales = missing and all(map(scale_leaves.is_scale, missing)) and not extra
        fix = "Call jaxmp.fp8.with_scales(params, old_params)." if are_scales else "Pass the whole tree."
        raise ValueError(
            f"{caller}: new params must have the leaves of the old ones; {got}. {leaf_paths.first_paths(new)} {fix}"
        )
    for path, like in expected.items():
        if like is None:
            continue
        x = new[path]
        if not _is_array(x) or np.shape(x) != like.shape:
            got = np.shape(x) if _is_array(x) else type(x).__name__
            raise ValueError(
                f"{caller}: new params must be arrays of the old shapes; got {got} at {path}, expected {like.shape}."
            )
        if x.dtype != like.dtype and not (like.dtype in _FLOATS and x.dtype in _FLOATS):
            wanted = "float32" if like.dtype in _FLOATS else str(like.dtype)
            raise ValueError(f"{caller}: a new param must be {wanted}; got {x.dtype} at {path}. Cast it by x.astype.")


_FLOATS = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _in_float32(x: Any) -> Any:
    """A param, floats in float32; others unchanged."""
    return casting.cast_float(jnp.asarray(x), jnp.float32)


def _as_master(value: Array, master: Array) -> Array:
    """The float32 `value` of a param as the state keeps it, where `master` is."""
    is_split = masters_lib.is_remainder(master)
    return placed(masters_lib.remainder_of(value, master.dtype) if is_split else value, master)


def placed(x: Array, like: Any) -> Array:
    """`x` in the memory of `like` and, outside of a trace, with the sharding that was chosen for it."""
    if isinstance(x, Tracer) or isinstance(like, Tracer | np.ndarray):
        return x if isinstance(like, np.ndarray) else host_memory.as_before(x, like)
    return jax.device_put(x, like.sharding) if like.committed and x.sharding != like.sharding else x
