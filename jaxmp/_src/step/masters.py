"""Where the float32 weight of a param is: the only file that knows the kinds of masters.

A 16-bit weight of 1.0 cannot change by 1e-4: the next bfloat16 is 1.0078. So the optimizer keeps a float32 *master* of
each 16-bit param, updates the master, and rounds it to the param of the model:

    m' = m + inner.update(g, s, m)          p' = round(m')

A float32 param is its own master: no copy, the same inner transform. A frozen param (its update is always zero) has no
master. The inner optimizer is initialized from float32 params too, so its moments are float32 for any model.

A step works on `Pair`s, one for each leaf:

    the weight is              Pair
    the param itself           (None, param)
    a float32 master           (16-bit param, master)
    split in two               (bfloat16 param, its remainder: int16 or int8)
    beside an fp8 kernel       (None, master)               the kernel is written last, with its new scale
    nowhere: it is frozen      (param in 16 or 8 bits, None)
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting
from jaxmp._src.programs import frozen_leaves
from jaxmp._src.step import leaf_paths
from jaxmp._src.step.policy import Policy
from pallas_kernels import moments, reference
from pallas_kernels.by_platform import written


class Remainder16(NamedTuple):
    """The float32 master of a bfloat16 param minus the param, in units of the master's last place: int16.

    A separate type: a checkpoint with another kind of masters must not load here by dtype conversion.
    """

    remainder16: Array


class Remainder8(NamedTuple):
    """The same for a master of 24 bits, which every update rounds stochastically: int8."""

    remainder8: Array


class Pair(NamedTuple):
    """A leaf of the model and of the masters; see the module's docstring."""

    param: Any
    master: Any


class Weights(NamedTuple):
    """The params and masters of a step, cut into pairs and put together again.

    Attributes:
      units: the leaves of the params; a box is one.
      treedef: their structure.
      masters: for each unit its master, or `optax.MaskedNode()`; None if no param has one: then none is frozen.
    """

    units: list[Any]
    treedef: Any
    masters: list[Any] | None

    def pairs(self) -> list[Pair]:
        """The pair of each leaf."""
        if self.masters is None:
            return [Pair(None, p) for unit in self.units for p in jax.tree.leaves(unit)]
        pairs = []
        for unit, master in zip(self.units, self.masters, strict=True):
            leaves = jax.tree.leaves(unit)
            if isinstance(master, optax.MaskedNode):
                pairs += [Pair(p, None) if casting.is_low_precision(p.dtype) else Pair(None, p) for p in leaves]
            else:
                pairs += [Pair(p, m) for p, m in zip(leaves, jax.tree.leaves(master), strict=True)]
        return pairs

    def put_back(self, pairs: Sequence[Pair]) -> tuple[PyTree, PyTree | None]:
        """(params, masters) from the pairs after a step."""
        left, units, masters = iter(pairs), [], []
        for unit, master in zip(self.units, self.masters or [optax.MaskedNode()] * len(self.units), strict=True):
            leaves, structure = jax.tree.flatten(unit)
            own = [next(left) for _ in leaves]
            if isinstance(master, optax.MaskedNode):
                units.append(structure.unflatten([q.master if q.param is None else q.param for q in own]))
                masters.append(master)
            else:
                units.append(structure.unflatten([q.param for q in own]))
                masters.append(jax.tree.unflatten(jax.tree.structure(master), [q.master for q in own]))
        return self.treedef.unflatten(units), None if self.masters is None else self.treedef.unflatten(masters)

    def updates(self, pairs: Sequence[Pair], taken: Bool[Array, ""]) -> PyTree:
        """The float32 updates after which params are as in `pairs`, where an own weight is its update already.

        In a step that is not taken, and where nothing changes, an update is -0.0: adding it changes no bit.
        """
        left, units = iter(pairs), []
        for unit, master in zip(self.units, self.masters or [optax.MaskedNode()] * len(self.units), strict=True):
            leaves, structure = jax.tree.flatten(unit)
            moves = []
            for p in leaves:
                new = next(left)
                if isinstance(master, optax.MaskedNode) and new.param is None:
                    moves.append(new.master)
                elif isinstance(master, optax.MaskedNode):  # frozen
                    moves.append(jnp.full(p.shape, -0.0, jnp.float32))
                else:
                    move = casting.round_to(new.master, p.dtype) - p.astype(jnp.float32)
                    moves.append(jnp.where(taken & (move != 0), move, -0.0))
            units.append(structure.unflatten(moves))
        return self.treedef.unflatten(units)

    def by_param(self, masters: PyTree | None) -> PyTree:
        """The tree of the params with the master of each leaf, or None if it has none; a box is one leaf."""
        units = self.masters if masters is None else self.treedef.flatten_up_to(masters)
        units = [None if isinstance(m, optax.MaskedNode) else m for m in units or [None] * len(self.units)]
        return self.treedef.unflatten(units)


def weights_of(params: PyTree, masters: PyTree | None) -> Weights:
    """The weights of a step."""
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    return Weights(units, treedef, None if masters is None else by_unit(treedef, masters, params))


def is_split(pair: Pair) -> bool:
    """Whether the weight is split into the param and a remainder."""
    return pair.param is not None and pair.master is not None and pair.master.dtype in (jnp.int8, jnp.int16)


def weight_of(pair: Pair) -> Array:
    """The weight that the optimizer sees: float32, but for a frozen param, and where no param has a master."""
    if pair.master is None:
        return pair.param
    return moments.join(*pair) if is_split(pair) else pair.master


def stored(weight: Float[Array, "..."], like: Pair, noise: tuple[int, Any] | None = None) -> Pair:
    """The pair that holds another weight.

    `noise`: the numbers of the leaf and of the step, on which the rounding of a master to 24 bits depends.
    """
    if like.master is None:
        return like
    with jax.named_scope("jaxmp.write_params"):
        if is_split(like):
            random = None
            if noise is not None and like.master.dtype == jnp.int8:
                random = moments.split_noise(moments.flat_index(weight.shape), *noise)
            return Pair(*moments.split(weight, like.master.dtype, random))
        return Pair(None if like.param is None else reference.cast_by_selects(weight, like.param.dtype), weight)


def moved(
    pairs: Sequence[Pair], weights: Sequence[Array], updates: Sequence[Array], step: Any, *, apart: bool = False
) -> list[Pair]:
    """The pairs after the updates of their weights in step number `step`.

    `apart`: no equation of the program joins them, so that they can be computed a few at a time.
    """
    new: list[Any] = [
        w  # frozen
        if pair.master is None
        else optax.apply_updates(w, u)  # its own weight, in the dtype of the user's params
        if pair.param is None
        else w + u.astype(jnp.float32)
        for pair, w, u in zip(pairs, weights, updates, strict=True)
    ]
    beside = {i: x for i, x in enumerate(new) if pairs[i].param is not None}
    beside = {i: written(x) for i, x in beside.items()} if apart else written(beside)
    return [stored(beside.get(i, x), pairs[i], (i, step)) for i, x in enumerate(new)]


def chosen(taken: Bool[Array, ""], new: Pair, old: Pair) -> Pair:
    """`new` if `taken`, else `old`, by one select: params are made from the weight that was chosen, and not read.

    The halves of a split weight come back exactly, as it has no further bits.
    """
    if old.master is None:
        return old
    weight = jnp.where(taken, weight_of(new), weight_of(old))
    return stored(written(weight, platform="tpu") if is_split(old) else weight, old)


def is_stale(pair: Pair) -> Bool[Array, "..."]:
    """Where a 16-bit param is not its float32 master, rounded."""
    rounded = casting.round_to(pair.master, pair.param.dtype)
    return (rounded != pair.param.astype(jnp.float32)) & ~jnp.isnan(pair.master)


# Which params have a master


def masters_for(inner: Any, policy: Policy, params: PyTree, remainder: Any) -> tuple[PyTree, PyTree]:
    """(masters, the float32 params that the optimizer starts from) of the params that `init` got.

    Args:
      inner: the optimizer; params that it freezes have no master.
      policy: which params have 16 bits.
      params: in float32, or as the policy casts them.
      remainder: from `remainder_dtype`.
    """
    full = casting.cast_floats(params, jnp.float32)
    masters = _make_masters(inner, policy, params, full)
    weights = view(full, masters)
    return (masters if remainder is None else _split_masters(policy, params, masters, remainder)), weights


def view(params: PyTree, masters: PyTree) -> PyTree:
    """The params that the inner optimizer sees: the master, if there is one, else the param."""
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    pairs = zip(units, treedef.flatten_up_to(masters), strict=True)
    return treedef.unflatten([p if isinstance(m, optax.MaskedNode) else m for p, m in pairs])


def _make_masters(inner: Any, policy: Policy, params: PyTree, full: PyTree) -> PyTree:
    units, treedef = tree_paths.boxed_leaves(params)
    full_units = treedef.flatten_up_to(full)
    frozen = (
        frozen_leaves.frozen_leaves(inner, full) if len(jax.tree.leaves(params)) == len(units) else [False] * len(units)
    )
    masters, rounded = [], []
    for (path, unit), full_unit, is_frozen in zip(units, full_units, frozen, strict=True):
        for x in jax.tree.leaves(unit):
            if not is_frozen and not casting.is_float(x):
                how = "Keep it out of params (in nnx by wrt=nnx.LoRAParam)"
                how = "Write jnp.float32(...)" if isinstance(x, float) else how
                raise TypeError(
                    f"params must be float arrays; got {getattr(x, 'dtype', type(x).__name__)} at {path}. {how}."
                )
        # jax leaves out selections between arrays without elements, so the program does not show which are frozen.
        is_empty = all(casting.is_float(x) and x.size == 0 for x in jax.tree.leaves(unit))
        needs_master = policy.param_dtype_of(path).itemsize <= 2 and (is_empty or not is_frozen)
        masters.append(full_unit if needs_master else optax.MaskedNode())
        rounded += [path] * (not is_frozen and any(casting.is_low_precision(x.dtype) for x in jax.tree.leaves(unit)))
    if rounded:
        warn(
            "masters-from-16-bits",
            f"masters should start from float32 params; got {len(rounded)} in 16 bits, the first at {rounded[0]}. Call "
            f"tx.init(params32) before policy.cast_to_param(params32), and take the params of another state as "
            f"state.master_params. If you have 16 bits only, cast them first: "
            f'jaxmp.get_policy("fp32").cast_to_param(params), or jaxmp.nnx.cast_to_param(model, "fp32").',
        )
    return treedef.unflatten(masters)


def _split_masters(policy: Policy, params: PyTree, masters: PyTree, dtype: Any) -> PyTree:
    """`masters` with a remainder in place of each master of a bfloat16 param."""
    units, treedef = tree_paths.boxed_leaves(params)
    short = [
        jax.tree.map(lambda m: boxed_remainder(m, dtype), m) if policy.param_dtype_of(path) == jnp.bfloat16 else m
        for (path, _), m in zip(units, treedef.flatten_up_to(masters), strict=True)
    ]
    return tree_paths.with_boxes_inside(treedef.unflatten(short))


def by_unit(treedef: Any, masters: PyTree, params: PyTree, may_be_frozen: bool = False) -> list[Any]:
    """The masters of a `StepState`, one for each leaf or box of `params`, whose structure is `treedef`.

    Raises:
      ValueError: the params have other leaves than those that `tx.init` got.
    """
    with contextlib.suppress(ValueError):  # usually no mask stands for a whole subtree
        return treedef.flatten_up_to(masters)
    try:
        return treedef.flatten_up_to(_with_masks_at_leaves(masters, params))
    except ValueError as e:
        is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        known, paths = (
            {
                leaf_paths.param_of(path): None
                for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
            }
            for tree in (masters, params)
        )
        new, gone = [path for path in paths if path not in known], [path for path in known if path not in paths]
        if may_be_frozen and new and not gone:
            units = jax.tree_util.tree_leaves_with_path(masters, is_leaf=lambda x: hasattr(x, "_fields"))
            by_path = {tree_paths.path_str(path): x for path, x in units}
            return [by_path.get(path, optax.MaskedNode()) for path, _ in tree_paths.boxed_leaves(params)[0]]
        if gone and not new and all(map(scale_leaves.is_scale, gone)):
            raise ValueError(
                f"params must have the leaves of tx.init; got no fp8 scale {gone[0]}. Pass nnx.state(model, "
                f"nnx.Any(wrt, jaxmp.nnx.Fp8Scale))."
            ) from e
        if not new and not gone:
            raise ValueError(
                f"params must have the containers of tx.init; got others: {e}. Call flax.core.unfreeze or nnx.as_pure."
            ) from e
        is_new = new and not may_be_frozen
        raise ValueError(
            f"params must have the leaves of tx.init; got {'a new' if is_new else 'no'} "
            f"{(new if is_new else gone)[0]}. Make the optimizer last, after all layers (fp8, LoRA)."
        ) from e


def _with_masks_at_leaves(masters: PyTree, params: PyTree) -> PyTree:
    """`masters`, with a mask of a whole subtree (`optax.masked` and labels take prefixes) at each of its units."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731

    def expanded(master: Any, param: Any) -> Any:
        if not is_masked(master):
            return master
        return jax.tree.map(lambda _: optax.MaskedNode(), param, is_leaf=tree_paths.is_box)

    # The remainder of a split master is a NamedTuple in the place of its param.
    return jax.tree.map(expanded, masters, params, is_leaf=lambda x: hasattr(x, "_fields"))


# Split masters


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
            f'remainder_bits= must go with bfloat16 params; got {jnp.dtype(policy.param_dtype)}. Use the policy "bf16".'
        )
    return jnp.dtype(jnp.int16 if bits == 16 else jnp.int8)


def boxed_remainder(master: Float[Array, "..."], dtype: Any) -> Remainder16 | Remainder8:
    """`remainder_of` as it stands in the state."""
    remainder = remainder_of(master, dtype)
    return Remainder16(remainder) if jnp.dtype(dtype) == jnp.int16 else Remainder8(remainder)


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
