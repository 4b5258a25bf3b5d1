"""Masters and params written together: `keep_master_params` under `apply_gradients`.

Every leaf is a pair (param, master): (None, float32 param) if the param is its own master, (16-bit param, float32
master), or (bfloat16 param, remainder), the two halves of one float32. A fused optimizer takes the pairs. Any other
optimizer gets float32 weights, and this file adds its updates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import boxed_state, in_place, kept_elements
from jaxmp._src.step.policy import Policy
from jaxmp._src.step.state_tuples import MasterState
from pallas_kernels import flags, moments, reference, write_order


class Remainder16(NamedTuple):
    """The float32 master of a bfloat16 param minus the param, in units of the master's last place: int16.

    A separate type: a checkpoint with another kind of masters must not load here by dtype conversion.
    """

    remainder16: Array


class Remainder8(NamedTuple):
    """The same for a master of 24 bits, which every update rounds stochastically: int8."""

    remainder8: Array


Pair = tuple[Any, Array]  # (param or None, master)


def write(
    inner: Any, grads: PyTree, state: Any, params: PyTree, step: in_place.Step, extra_args: dict[str, Any]
) -> tuple[PyTree, MasterState, in_place.Counts]:
    """Params and state after a step of `inner`, from scaled gradients, and what was counted.

    Args:
      inner: an optax transform, fused or not.
      grads, params: trees of the same leaves.
      state: a `MasterState`.
      step: the decision.
      extra_args: for an `inner` that takes them.

    Returns:
      (params, state, counts); saturated params are counted only by an `inner` that writes in place.
    """
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    masters = treedef.flatten_up_to(state.master_params)
    if not (isinstance(inner, in_place.InPlace) and inner.streams):
        host_memory.check_on_device(state)
    pairs = [pair for unit, master in zip(units, masters, strict=True) for pair in _pairs(unit, master)]
    count: Any = state.rounding_count
    if count is not None:
        step = step._replace(number=optax.safe_increment(count))
    leaves = jax.tree.leaves(grads)
    with jax.named_scope("jaxmp.update_masters"):
        if isinstance(inner, in_place.InPlace):
            new, inner_state, counts = inner.write(leaves, state.master_inner, params, pairs, step, **extra_args)
        else:
            new, inner_state, kept = by_updates(inner, leaves, state.master_inner, params, pairs, step, extra_args)
            counts = in_place.Counts(jnp.zeros((), jnp.float32), sum(kept, start=jnp.zeros((), jnp.float32)))
    left = iter(new)
    written = [_put_back(unit, master, left) for unit, master in zip(units, masters, strict=True)]
    new_params = treedef.unflatten([unit for unit, _ in written])
    if count is not None:
        count = jnp.where(step.taken, step.number, count)
    return new_params, MasterState(treedef.unflatten([master for _, master in written]), inner_state, count), counts


def _pairs(unit: PyTree, master: PyTree) -> list[Pair]:
    leaves = jax.tree.leaves(unit)
    if isinstance(master, optax.MaskedNode):
        return [(None, p) for p in leaves]
    # A kernel that is stored in fp8 is written last, with the new scale.
    return [
        (None if stored_kernels.is_stored(p) else p, m) for p, m in zip(leaves, jax.tree.leaves(master), strict=True)
    ]


def _put_back(unit: PyTree, master: PyTree, new: Any) -> tuple[PyTree, PyTree]:
    leaves, structure = jax.tree.flatten(unit)
    pairs = [next(new) for _ in leaves]
    if isinstance(master, optax.MaskedNode):
        return structure.unflatten([m for _, m in pairs]), master
    written = [old if p is None else p for old, (p, _) in zip(leaves, pairs, strict=True)]
    return structure.unflatten(written), jax.tree.unflatten(jax.tree.structure(master), [m for _, m in pairs])


def by_updates(
    inner: Any,
    grads: list[Array],
    state: Any,
    params: PyTree,
    pairs: list[Pair],
    step: in_place.Step,
    extra_args: dict[str, Any],
    *,
    leaf_by_leaf: bool = False,
) -> tuple[list[Pair], Any, list[Float[Array, ""]]]:
    """(pairs, state) after a step of any optax transform, and how many elements kept their values.

    That is one count for each weight if they are written `leaf_by_leaf`: then nothing may join the weights. Otherwise
    the counts only have the right sum.
    """
    treedef = jax.tree.structure(params)
    step = step._replace(taken=casting.computed_once(step.taken))
    unscaled = treedef.unflatten([g.astype(jnp.float32) * step.inv_scale for g in grads])

    def update(state: Any, pairs: list[Pair]) -> tuple[PyTree, Any, PyTree]:
        """(weights, state) after the update, and the weights before it."""
        joined = [write_order.alone(moments.join(p, m)) if is_remainder(m) else m for p, m in pairs]
        old_weights = treedef.unflatten(joined)
        moves, new_state = boxed_state.update(inner, unscaled, state, old_weights, extra_args)
        return jax.tree.map(moved, old_weights, moves), new_state, old_weights

    in_order = not leaf_by_leaf and write_order.pays((grads, state, pairs))
    if in_order:
        update = jax.jit(update)  # called three times, traced once
    new_weights, new_state, old_weights = update(state, pairs)
    held = kept_elements.find(params, (new_weights, new_state), (old_weights, state))
    nothing = [None] * treedef.num_leaves
    counts = held.counts() if leaf_by_leaf else [held.count_beside(nothing, step.taken)[0]]
    if in_order:
        held, both, (state, pairs) = held.behind(nothing, (state, pairs))
        new_weights, new_state, old_weights = update(state, pairs)
        counts = [flags.count(both)[0]]
    new_weights = held.keep(new_weights, old_weights, taken=step.taken)

    def after(number: int, pair: Pair, new: Array) -> Pair:
        param, master = pair
        if casting.is_low_precision(new.dtype):  # frozen
            return pair
        if not is_remainder(master):
            return None if param is None else reference.cast_by_selects(new, param.dtype), new
        random = None
        if master.dtype == jnp.int8:
            random = moments.split_noise(moments.flat_index(new.shape), number, step.number)
        new_param, remainder = moments.split(write_order.alone(new), master.dtype, random)
        if write_order.params_last():  # new is the old weight where the step is not taken
            return new_param, remainder
        kept = jnp.where(step.taken, new_param, param), jnp.where(step.taken, remainder, master)
        return write_order.in_one_loop(*kept) if in_order else kept

    new = [after(i, *x) for i, x in enumerate(zip(pairs, jax.tree.leaves(new_weights), strict=True))]
    if in_order:
        new, state = write_order.behind((new, state))
        new_state = update(state, pairs)[1]
    return new, held.keep(new_state, state, taken=step.taken), counts


def moved(weight: Array, move: Array) -> Array:
    """A float32 weight after its update; a weight of another dtype is frozen."""
    return weight + move.astype(jnp.float32) if weight.dtype == jnp.float32 else weight


# --- split masters -----------------------------------------------------------------------------------------------


def remainder_dtype(bits: int | None, policy: Policy) -> Any:
    """The dtype of remainders with this many bits; None for float32 masters.

    Raises:
      ValueError: neither 16 nor 8; params that are not bfloat16.
    """
    if bits is None:
        return None
    if bits not in (8, 16):
        raise ValueError(f"remainder_bits must be None (float32 masters), 16 or 8; got {bits!r}")
    if jnp.dtype(policy.param_dtype) != jnp.bfloat16:
        raise ValueError(
            f"remainder_bits splits the float32 master of a bfloat16 param, which is its upper half; got a policy with "
            f'params in {jnp.dtype(policy.param_dtype)}. Use the policy "bf16", or leave remainder_bits=None.'
        )
    return jnp.dtype(jnp.int16 if bits == 16 else jnp.int8)


def boxed_remainder(master: Float[Array, "..."], dtype: Any) -> Remainder16 | Remainder8:
    """`remainder_of` as it stands in the state."""
    remainder = remainder_of(master, dtype)
    return Remainder16(remainder) if jnp.dtype(dtype) == jnp.int16 else Remainder8(remainder)


def check_masters(masters: PyTree, params: PyTree, dtype: Any) -> None:
    """Raises a ValueError for masters of another kind than the transform was made for, or of another shape."""
    units, treedef = tree_paths.boxed_leaves(params)
    for (path, unit), master in zip(units, treedef.flatten_up_to(masters), strict=True):
        for param, x in zip(jax.tree.leaves(unit), jax.tree.leaves(master), strict=False):
            if jnp.shape(param) != x.shape:
                raise ValueError(
                    f"params must have the shapes of their masters; got {jnp.shape(param)} at {path}, and its master "
                    f"has {x.shape}. Pass the params that tx.init got, or make a new state for these by tx.init."
                )
            if not is_remainder(x) and dtype is not None and param.dtype == jnp.bfloat16:
                raise ValueError(
                    f"the state must hold the kind of masters that the transform keeps; got a {x.dtype} master at "
                    f"{path}, with remainder_bits={8 * jnp.dtype(dtype).itemsize}. Make tx without remainder_bits; to "
                    f"change it, start from the float32 masters: jaxmp.get_master_params and jaxmp.wrap_state."
                )
            if is_remainder(x) and x.dtype != dtype:
                made = None if dtype is None else 8 * jnp.dtype(dtype).itemsize
                raise ValueError(
                    f"the state must hold the kind of masters that the transform keeps; got {x.dtype} remainders at "
                    f"{path}, with remainder_bits={made}. Make tx with remainder_bits={8 * x.dtype.itemsize}; to "
                    f"change it, start from the float32 masters: jaxmp.get_master_params and jaxmp.wrap_state."
                )


def is_remainder(master: Any) -> bool:
    """Whether a master is stored as a remainder."""
    return master.dtype in (jnp.int8, jnp.int16)


def remainder_of(master: Float[Array, "..."], dtype: Any) -> Array:
    """`master` minus bfloat16(master), rounded as a policy casts params, in units of the last place.

    A master midway between two bfloat16 numbers that was rounded down is replaced by the next float32 below: the
    remainder of the midpoint belongs to the upper bfloat16 number.
    """
    bits = lax.bitcast_convert_type(master, jnp.int32)
    param = lax.bitcast_convert_type(casting.saturating_cast(master, jnp.bfloat16).astype(jnp.float32), jnp.int32)
    short = bits - param
    if jnp.dtype(dtype) == jnp.int8:
        short = (short + 0x80) >> 8
    info = jnp.iinfo(dtype)
    return jnp.clip(short, info.min, info.max).astype(dtype)
