"""Makes masters for params that were replaced by hand: loaded, averaged, clipped.

A step computes the 16-bit params from their masters. So if only the params are replaced, the next step restores the old
values. `reload_master_params` makes all masters from given params. `follow` also gets the old params, and makes only
the masters of elements that changed: a master has bits that its param lacks, and unchanged elements keep these bits.

    m' = m           where the param before, in the dtype of the new one, equals the new one
    m' = f32(new)    elsewhere
"""

from collections.abc import Callable
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


def reload_master_params(opt_state: Any, params: PyTree) -> Any:
    """Makes the masters again from the model's params, after only the params were changed; the rest of the state stays.

    Megatron-LM's `reload_model_params`. Without it, the next step would overwrite the new params with the old masters.
    (`jaxmp.linen.TrainState.replace(params=...)` and `jaxmp.nnx.Optimizer.reload_master_params` do it for you.)

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`.
      params: the new params, in float32 (the masters then have full precision) or in the policy's dtypes.

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
    expected: dict[str, Any] = {}  # float32 masters of their shapes; None where there is none
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    for state in states.with_masters(opt_state):
        for key, x in jax.tree_util.tree_leaves_with_path(state.master_params, is_leaf=is_masked):
            path = leaf_paths.param_of(key)
            expected[path] = expected.get(path) if is_masked(x) else jax.ShapeDtypeStruct(x.shape, jnp.float32)
    full = tree_paths.leaves_by_path(params)
    _check_fits(full, expected, "reload_master_params")

    def new_master(path: str, master: Array) -> Array:
        return _as_master(_in_float32(full[path]), master)

    return _with_masters(opt_state, new_master, foreign=(opt_state, params))


def follow(
    opt_state: Any, params: PyTree, before: PyTree, cast_to_param: Callable[[PyTree], PyTree]
) -> tuple[PyTree, Any]:
    """`(params, opt_state)` for `params` in place of `before`: masters of elements that changed are made from `params`.

    Args:
      opt_state: state of any optimizer; one that is not ours is returned as it is, and `params` too.
      params: the new params, as given; a tree without arrays (of shardings) can only be looked at, and is returned.
      before: the params that `opt_state` belongs to.
      cast_to_param: the cast of the policy.

    Returns:
      The params in the dtypes and containers of those before, and the state that belongs to them.

    Raises:
      ValueError: params that do not fit those before, named by path.
    """
    new, old = tree_paths.leaves_by_path(params), tree_paths.leaves_by_path(before)
    has_values = not new or any(_is_array(x) or isinstance(x, bool | int | float | complex) for x in new.values())
    if not (all(map(_is_array, old.values())) and has_values and states.with_masters(opt_state)):
        return params, opt_state
    _check_fits(new, old, "replace(params=)")
    masters = [x.master_params for x in states.with_masters(opt_state)]
    if jax.tree.structure(params) != jax.tree.structure(before):  # a FrozenDict for a dict, boxes for arrays
        params = jax.tree.unflatten(jax.tree.structure(before), [new[path] for path in old])
    arrays = [*new.values(), *old.values(), *jax.tree.leaves(masters)]
    if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays) or all(new[path] is old[path] for path in new):
        return params, opt_state
    in_old_dtype = lambda path, x: casting.cast_float(x, old[path].dtype, saturate=True)  # noqa: E731
    cast = tree_paths.map_with_path(in_old_dtype, cast_to_param(params))
    if not jax.tree.leaves(masters):
        return cast, opt_state

    def new_master(path: str, master: Array) -> Array:
        if new[path] is old[path]:
            return master
        rounded = casting.cast_float(_in_float32(old[path]), jnp.asarray(new[path]).dtype, saturate=True)
        made = _as_master(_in_float32(new[path]), master)
        kept = jnp.where(rounded == new[path], host_memory.to_device(jnp.asarray(master)), host_memory.to_device(made))
        return _placed(kept, master)

    return cast, _with_masters(opt_state, new_master, foreign=params)


def _check_fits(new: dict[str, Any], expected: dict[str, Any], caller: str) -> None:
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


def _with_masters(opt_state: Any, new_master: Callable[[str, Array], Array], foreign: PyTree) -> Any:
    """`opt_state` with `new_master(path of the param, old master)` in place of each master."""

    def remade(state: states.StepState) -> states.StepState:
        if state.master_params is None:
            return state
        made = jax.tree_util.tree_map_with_path(
            lambda path, x: new_master(leaf_paths.param_of(path), x), state.master_params
        )
        return state._replace(master_params=made)

    made = states.map_steps(remade, opt_state)
    return state_arrays.own_buffers(made, foreign)


def _as_master(value: Array, master: Array) -> Array:
    """The float32 `value` of a param as the state keeps it, where `master` is."""
    is_split = masters_lib.is_remainder(master)
    return _placed(masters_lib.remainder_of(value, master.dtype) if is_split else value, master)


def _placed(x: Array, like: Any) -> Array:
    """`x` in the memory of `like` and, outside of a trace, with the sharding that was chosen for it."""
    if isinstance(x, Tracer) or isinstance(like, Tracer | np.ndarray):
        return x if isinstance(like, np.ndarray) else host_memory.as_before(x, like)
    return jax.device_put(x, like.sharding) if like.committed and x.sharding != like.sharding else x
