"""Masters for params that were replaced by hand: loaded, averaged, clipped.

A step computes the 16-bit params from their masters, so params that were replaced alone would come back in the next
step. `reload_master_params` makes all masters from given params. `follow` knows the params from before, and makes only
the masters of elements that changed: a master has bits that its param lacks, and a param that was not changed keeps
them.

    m' = m           where the param before, in the dtype of the new one, equals the new one
    m' = f32(new)    elsewhere
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths, read_state, state_arrays, state_tuples, write_masters


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
      ValueError: a param that is missing or of another shape, named by path; no masters in `opt_state`.

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
    if not read_state.find(opt_state, state_tuples.MasterState):
        raise ValueError(
            "opt_state must keep masters; got a state without a MasterState. Make it with jaxmp.mixed_precision or "
            "jaxmp.keep_master_params, and pass (opt_state, params) in this order."
        )
    leaves = leaf_paths.plain_leaves(params)
    full = in_float32(leaves)

    def new_master(path: str, master: Array) -> Array:
        if path not in leaves:
            raise ValueError(
                f"each master is made from its param; {path} is not in the params. {leaf_paths.first_paths(leaves)}"
            )
        if np.shape(leaves[path]) != master.shape:
            raise ValueError(
                f"params must have the shapes of the masters; got {np.shape(leaves[path])} at {path}, expected "
                f"{master.shape}."
            )
        return _as_master(full(path), master)

    return _with_masters(opt_state, new_master, foreign=(opt_state, params))


def follow(opt_state: Any, params: PyTree, before: PyTree) -> Any:
    """`opt_state` for `params` in place of `before`: the masters of elements that changed are made from `params`.

    What is no tree of arrays with the paths and shapes of `before` (a tree of shardings, the params of another model)
    can only be looked at, not trained with this state: `opt_state` as it is.
    """
    masters = [x.master_params for x in read_state.find(opt_state, state_tuples.MasterState)]
    if not jax.tree.leaves(masters):
        return opt_state
    new, old = leaf_paths.plain_leaves(params), leaf_paths.plain_leaves(before)
    if {path: _shape(x) for path, x in new.items()} != {path: _shape(x) for path, x in old.items()}:
        return opt_state
    arrays = [*new.values(), *old.values(), *jax.tree.leaves(masters)]
    if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays) or all(new[path] is old[path] for path in new):
        return opt_state
    full, full_before = in_float32(new), in_float32(old)
    stored = stored_kernels.stored_pairs(params)

    def new_master(path: str, master: Array) -> Array:
        if new[path] is old[path] and (path not in stored or new[stored[path]] is old[stored[path]]):
            return master
        if path in stored:
            rounded = stored_kernels.cast(full_before(path), new[stored[path]])
        else:
            rounded = casting.cast_float(full_before(path), jnp.asarray(new[path]).dtype, saturate=True)
        made = _as_master(full(path), master)
        kept = jnp.where(rounded == new[path], host_memory.to_device(jnp.asarray(master)), host_memory.to_device(made))
        return _placed(kept, master)

    return _with_masters(opt_state, new_master, foreign=params)


def in_float32(leaves: dict[str, Any]) -> Callable[[str], Any]:
    """The value of a param by its path: floats in float32, kernels stored in fp8 multiplied out; others unchanged."""
    stored = stored_kernels.pairs(leaves) if any(map(stored_kernels.is_stored, leaves.values())) else {}

    def value(path: str) -> Any:
        x = leaves[path]
        if stored_kernels.is_stored(x) and path in stored:
            return stored_kernels.dequantized(x, leaves[stored[path]], jnp.float32)
        return casting.cast_float(jnp.asarray(x), jnp.float32)

    return value


def _with_masters(opt_state: Any, new_master: Callable[[str, Array], Array], foreign: PyTree) -> Any:
    """`opt_state` with `new_master(path of the param, old master)` in place of each master."""

    def visit(node: Any) -> Any:
        if not isinstance(node, state_tuples.MasterState):
            return node
        made = tree_paths.map_with_path(lambda path, x: new_master(leaf_paths.param_of(path)[0], x), node.master_params)
        return node._replace(master_params=made)

    made = jax.tree.map(visit, opt_state, is_leaf=lambda x: isinstance(x, state_tuples.MasterState))
    return state_arrays.own_buffers(made, foreign)


def _as_master(value: Array, master: Array) -> Array:
    """The float32 `value` of a param as the state keeps it, where `master` is."""
    is_split = write_masters.is_remainder(master)
    return _placed(write_masters.remainder_of(value, master.dtype) if is_split else value, master)


def _placed(x: Array, like: Any) -> Array:
    """`x` in the memory of `like` and, outside of a trace, with the sharding that was chosen for it."""
    if isinstance(x, Tracer) or isinstance(like, Tracer | np.ndarray):
        return x if isinstance(like, np.ndarray) else host_memory.as_before(x, like)
    return jax.device_put(x, like.sharding) if like.committed and x.sharding != like.sharding else x


def _shape(x: Any) -> Any:
    return getattr(x, "shape", None)
