"""Reads `opt_state`: finds the tuples of state_tuples.py in it, the loss scale, the masters, the metrics.

State is plain arrays in NamedTuples: no objects with behaviour, no Python numbers. So checkpoints,
`flax.serialization`, replication for pmap, shardings, donation and `optax.tree.get(opt_state, "loss_scale")` work as
for any optimizer. The functions here find a state at any depth: inside `optax.chain`, in the `opt_state` of a flax
TrainState, or in an `nnx.Optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree
from optax import contrib

from jaxmp._src.base import ambient, compat, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.distributed import reduce
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.loss_scale import dynamic, static
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths, scale_reads
from jaxmp._src.step.state_tuples import (
    CustomLossScaleState,
    EmaParamsState,
    Fp8State,
    GlobalNormState,
    LossScaleState,
    LowUnscaleState,
    MasterState,
    NoLossScaleState,
    SharedLossScaleState,
    StaticLossScaleState,
    UnscaleState,
    ZeroCountState,
)
from pallas_kernels import moments


def scaling_state(scaler: Any) -> LossScaleState | CustomLossScaleState:
    """The arrays of a loss-scale object, as kept in `opt_state`."""
    loss_scale = jnp.asarray(scaler.loss_scale, jnp.float32)
    if isinstance(scaler, dynamic.DynamicLossScale):
        return LossScaleState(loss_scale, scaler.growth_count, scaler.hysteresis_left)
    if isinstance(scaler, static.StaticLossScale | static.NoOpLossScale):
        kind = NoLossScaleState if isinstance(scaler, static.NoOpLossScale) else StaticLossScaleState
        return kind(loss_scale, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    return CustomLossScaleState(loss_scale, tuple(jnp.asarray(x) for x in jax.tree.leaves(scaler)))


def check_has_scaling(state: Any) -> None:
    """Raises a TypeError if `state` is not what `unscale_and_skip` or `mixed_precision` made."""
    if not hasattr(state, "scaling"):
        raise TypeError(
            f"unscale_and_skip (or mixed_precision) needs the state that its own init made; got "
            f"{type(state).__name__}. The order is tx.update(grads, opt_state, params) and "
            f"jaxmp.apply_gradients(tx, grads, opt_state, params)."
        )


def is_own(scaler: Any) -> bool:
    """Whether a loss-scale object belongs to this library; such an object unscales by 1 / scale only."""
    return isinstance(scaler, dynamic.DynamicLossScale | static.StaticLossScale | static.NoOpLossScale)


def scaler_of(template: Any, state: LossScaleState | CustomLossScaleState) -> Any:
    """The loss-scale object with the rule of `template` and the arrays of `state`."""
    if isinstance(state, CustomLossScaleState):
        leaves: Any = state.scaler_leaves
    elif isinstance(template, dynamic.DynamicLossScale):
        leaves = state
    else:
        leaves = (state.loss_scale,) if isinstance(template, static.StaticLossScale) else ()
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def find(opt_state: Any, kind: type) -> list[Any]:
    """Every state of type `kind` inside `opt_state`, outermost first; wrappers of nnx are removed."""
    return find_boxed(nnx.as_pure(opt_state), kind)


def find_boxed(opt_state: Any, kind: type) -> list[Any]:
    """`find` for what is written back: arrays stay in their boxes (`nnx.Param`), or the state would lose them."""
    return [x for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def check_is_state(opt_state: Any, reader: str) -> None:
    """Raises a TypeError for what cannot be the state of an optimizer: params, a `tx`, a model, a number.

    Every state holds a NamedTuple (optax's convention). `()` stands for no optimizer.
    """
    if isinstance(opt_state, optax.GradientTransformation):
        raise TypeError(f"{reader} reads the state of an optimizer; got the optimizer. Pass tx.init(params).")
    is_namedtuple = lambda x: isinstance(x, tuple) and hasattr(x, "_fields")  # noqa: E731
    is_empty = isinstance(opt_state, tuple) and not opt_state
    if not is_empty and not any(map(is_namedtuple, jax.tree.leaves(nnx.as_pure(opt_state), is_leaf=is_namedtuple))):
        raise TypeError(
            f"{reader} reads the state of an optimizer, as tx.init(params) and apply_gradients return it, or a "
            f"TrainState or nnx.Optimizer that holds one; got {type(opt_state).__name__} without any. Were arguments "
            f"swapped (the order is opt_state, params), or was it restored as plain dicts (restore it with a template)?"
        )


def has_loss_scale(opt_state: Any) -> bool:
    """Whether there is a loss scale in `opt_state`."""
    return bool(_scalings(opt_state))


def _scalings(opt_state: Any) -> list[Any]:
    return find(opt_state, LossScaleState) or find(opt_state, CustomLossScaleState)


def may_scale(opt_state: Any) -> bool:
    """Whether there may be a loss scale other than 1: False only if it is known that there is none."""
    found = _scalings(opt_state)
    return not found or not all(isinstance(x, NoLossScaleState) for x in found)


def check_not_nested(inner_state: Any) -> None:
    """Raises a ValueError if the state of what `unscale_and_skip` is about to wrap holds one of its own."""
    if find(inner_state, UnscaleState):
        raise ValueError(
            "mixed_precision (or unscale_and_skip) must stand once around an optimizer, as it unscales the gradients; "
            "got an optimizer inside of it that holds another. Take one of them away."
        )


def has_masters(opt_state: Any) -> bool:
    """Whether a param has a master in `opt_state`."""
    return any(jax.tree.leaves(state.master_params) for state in find(opt_state, MasterState))


def check_wrappers(opt_state: Any, grads: PyTree = None) -> None:
    """Raises a ValueError for a transform around or behind `mixed_precision` that belongs inside, as its state tells.

    These are `apply_if_finite`, `MultiSteps`, `conditionally_transform` and `conditionally_mask` (of `grads` in 16
    bits), and any state behind it; and around masters, what moves params itself. Inside, it is an error if something
    changes updates behind `ema_params`.
    """
    for kind, name in _MOVERS.items():
        if any(map(has_masters, find(opt_state, kind))):
            raise ValueError(
                f"a transform that moves params itself must stand inside mixed_precision, where it moves the float32 "
                f"masters; got {name} around it: the next step computes the params from their masters, and takes back "
                f"what {name} did. Put it inside: jaxmp.mixed_precision({name}(inner, ...), policy)."
            )
    chains = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_chain) if _is_chain(x)]
    for states in chains:
        wrapped = next(i for i, state in enumerate(states) if find(state, UnscaleState))
        later = [x for x in states[wrapped + 1 :] if not find(x, UnscaleState)]
        behind = [type(x).__name__ for x in later if jax.tree.leaves(x)]
        if behind:
            raise ValueError(
                "a transform with a state must stand inside mixed_precision, where a skipped step does not move its "
                f"state; got {', '.join(behind)} behind it in a chain. Put that transform inside: "
                "jaxmp.mixed_precision(optax.chain(inner, what_follows), policy)."
            )
    if any(find(x, UnscaleState) for x in find(opt_state, optax.ApplyIfFiniteState)):
        raise ValueError(
            "a non-finite gradient must reach mixed_precision: it skips the step, lowers the loss scale and counts the "
            "skip; got optax.apply_if_finite around it, which keeps such a gradient from it. Leave apply_if_finite out "
            "(for max_consecutive_errors= call jaxmp.check_progress(opt_state, max_consecutive_skips=...)), or put it "
            "inside, around the optimizer."
        )
    _check_conditions(opt_state, grads)
    if find(opt_state, EmaParamsState):
        _check_averages(find(opt_state, UnscaleState) or find(opt_state, MasterState))
    for steps in find(opt_state, optax.MultiStepsState):
        scales = [x for state in find(steps, UnscaleState) for x in _scalings(state) if may_scale(x)]
        keeps_nan = not jax.tree.leaves(steps.skip_state)
        if scales and (keeps_nan or not all(isinstance(x, StaticLossScaleState) for x in scales)):
            raise ValueError(
                "mixed_precision must unscale the gradients of each microbatch before they are added, and see each "
                "overflow; got optax.MultiSteps around it, which adds scaled 16-bit gradients, and "
                + (
                    "keeps an inf or NaN in its sum for all later steps"
                    if keeps_nan
                    else "keeps an overflow from the dynamic loss scale, which would never fall"
                )
                + ". Put it inside: jaxmp.mixed_precision(optax.MultiSteps(inner, k), policy), or use "
                "jaxmp.value_and_grad(accumulate=k)."
            )


def _check_averages(tree: Any) -> None:
    """Raises a ValueError if, in a chain in `tree`, a transform that may change updates follows `ema_params`."""
    stops = lambda x: _is_plain_tuple(x) or isinstance(x, EmaParamsState)  # noqa: E731
    for states in filter(_is_plain_tuple, jax.tree.leaves(nnx.as_pure(tree), is_leaf=stops)):
        averaged = [i for i, state in enumerate(states) if find(state, EmaParamsState)]
        later = states[averaged[0] + 1 :] if averaged else ()
        if averaged and isinstance(states[averaged[0]], optax.MaskedState | optax.PartitionState):
            later = [x for x in later if not isinstance(x, optax.MaskedState)]  # for the other params
        behind = next(filter(None, map(_changes_updates, later)), None)
        if behind is not None:
            raise ValueError(
                f"ema_params averages the weights plus the updates that it gets, so no transform behind it may change "
                f"updates; got a transform with {behind} behind ema_params in a chain. Put ema_params last: "
                f"jaxmp.mixed_precision(optax.chain(optimizer, ..., jaxmp.ema_params(0.999)), policy)."
            )
        for i in averaged:
            _check_averages(states[i])


def _changes_updates(state: Any) -> str | None:
    """The name of a state of a transform that may change updates, in the state of one transform; or None."""
    if isinstance(state, optax.MaskedState):
        return _changes_updates(state.inner_state)
    if _is_plain_tuple(state):
        return next(filter(None, map(_changes_updates, state)), None)
    return type(state).__name__ if hasattr(state, "_fields") and not isinstance(state, _ONLY_LOOK) else None


# The states of transforms that return the updates that they get. (That of optax.identity is also that of optax.scale.)
_ONLY_LOOK = (EmaParamsState, ZeroCountState, optax.MonitorState, optax.SnapshotState)


def _check_conditions(opt_state: Any, grads: PyTree) -> None:
    """Raises a ValueError where a step that is left out would return the gradients, or zeros of their dtype."""
    is_low = any(casting.is_float(g) and casting.is_low_precision(g.dtype) for g in jax.tree.leaves(grads))
    for kind, name, is_wrong, why in (
        (optax.ConditionallyTransformState, "optax.conditionally_transform", True, "the gradients themselves"),
        (optax.ConditionallyMaskState, "optax.conditionally_mask", is_low, "updates in the 16 bits of the gradients"),
    ):
        if is_wrong and any(has_masters(x) or (has_loss_scale(x) and may_scale(x)) for x in find(opt_state, kind)):
            raise ValueError(
                f"mixed_precision must see every step, and make float32 updates of scaled gradients; got {name} around "
                f"it, whose other steps return {why} as updates. Put it inside: "
                f"jaxmp.mixed_precision({name}(inner, should_transform_fn), policy)."
            )


def check_branches(opt_state: Any) -> None:
    """Raises a ValueError, where axes are bound, for `reduce_gradients` inside a transform that runs it in a branch.

    Before the branch the gradients of a device are its own: what MultiSteps adds up would differ between devices, and
    what apply_if_finite decides too. In pmap, and where jax tracks no axes, MultiSteps decides the same everywhere.
    """
    if not compat.manual_axes():
        return
    tracked = any(map(compat.is_tracked, compat.manual_axes()))
    for kind, name in _BRANCHES.items():
        for state in find(opt_state, kind):
            in_few_bytes = bool(find(state, reduce.UnsentState))
            if not in_few_bytes and not find(state, reduce.ReducedState):
                continue
            by_device = kind is optax.ApplyIfFiniteState or bool(jax.tree.leaves(getattr(state, "skip_state", ())))
            if tracked or by_device or (in_few_bytes and kind is optax.MultiStepsState):
                raise ValueError(
                    f"reduce_gradients must come before a transform that decides whether to take a step, which must "
                    f"see the same gradients on all devices; got it inside {name}. Put it before: "
                    f"jaxmp.mixed_precision(optax.chain(jaxmp.reduce_gradients(...), {name}(optimizer, ...)), policy)."
                )


_BRANCHES = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyTransformState: "optax.conditionally_transform",
}
_MOVERS = {
    optax.LookaheadState: "optax.lookahead",
    contrib.ScheduleFreeState: "optax.contrib.schedule_free",
    contrib.MechanicState: "optax.contrib.mechanize",
    contrib.SAMState: "optax.contrib.sam",
}


def note_chains(opt_state: Any) -> None:
    """Notes what stands in a chain with another transform: masters before one, a loss scale behind one.

    For `warn_if_followed` and `warn_if_preceded`. An update sees its own state only, and not its chain's.
    """
    for states in filter(_is_plain_tuple, jax.tree.leaves(nnx.as_pure(opt_state), is_leaf=_is_plain_tuple)):
        own = [i for i, state in enumerate(states) if find(state, MasterState)]
        later = states[own[-1] + 1 :] if own else ()
        if own and isinstance(states[own[-1]], optax.MaskedState):  # optax.masked behind it is for the other params
            later = [x for x in later if not isinstance(x, optax.MaskedState)]
        is_followed = any(not _is_plain_tuple(x) or x for x in later)
        for state in find(states, MasterState) if is_followed else ():
            for master in jax.tree.leaves(state.master_params)[:1]:
                ambient.now().followed_masters[id(master)] = master
        is_behind_one = False
        for state in states:
            for scaling in _scalings(find(state, UnscaleState)) if is_behind_one and may_scale(state) else ():
                ambient.now().preceded_scales[id(scaling.loss_scale)] = scaling.loss_scale
            parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, (*_OF_SCALED_GRADIENTS, optax.MaskedState)))
            is_behind_one |= any(type(x) in _OF_SCALED_GRADIENTS for x in parts)
        for state in states:
            note_chains(state)


# The states of transforms that look at the size of gradients: of clipping and weight decay (EmptyState), of moments, of
# noise. That of reduce_gradients is another.
_OF_SCALED_GRADIENTS = (optax.EmptyState, optax.ScaleByAdamState, optax.TraceState, optax.AddNoiseState)


def warn_if_preceded(state: UnscaleState, grads: PyTree) -> None:
    """Warns of a transform before `mixed_precision` that a caller of `tx.update` uses; see `note_chains`.

    With `apply_gradients`, `before_unscaling` looks at what the transform computes. Here nobody can, so a transform
    that does not look at the size of gradients is named too.
    """
    scale = state.scaling.loss_scale
    is_preceded = ambient.now().preceded_scales.pop(id(scale), None) is scale
    if is_preceded and not scale_reads.holds_gradients(grads):
        warn(
            "clipping-before-unscaling",
            "what stands before mixed_precision in a chain gets gradients that are multiplied by the loss scale, so it "
            "must not look at their size: no clipping, no weight decay, no momentum, no noise; got a chain with a "
            "transform before it. Put it inside: jaxmp.mixed_precision(optax.chain(clip, inner), policy). For one that "
            "only scales with its input, call jaxmp.apply_gradients in place of tx.update, which sees that.",
        )


def warn_if_followed(state: Any) -> None:
    """Warns of a transform behind masters, whose work on updates that a caller adds is lost; see `note_chains`."""
    noted = ambient.now().followed_masters
    for part in find(state, MasterState):
        if any(noted.pop(id(x), None) is x for x in jax.tree.leaves(part.master_params)[:1]):
            warn(
                "work-behind-masters",
                "nothing that changes updates may follow mixed_precision (or keep_master_params) in a chain: the next "
                "step computes 16-bit params from their masters, and takes back what follows; got a chain with a "
                "transform behind it. Put that transform inside: "
                "jaxmp.mixed_precision(optax.chain(inner, what_follows), policy).",
            )


def _is_plain_tuple(x: Any) -> bool:
    return type(x) is tuple


def _is_chain(x: Any) -> bool:
    """Whether `x` is the state of an `optax.chain` with `mixed_precision` in it, and not inside of another chain."""
    return type(x) is tuple and any(find(state, UnscaleState) for state in x)


def note_replaced(state: UnscaleState) -> None:
    """Notes that an update took `state` and made another, for `keep_if_skipped`."""
    if isinstance(state.skipped, jax.Array):
        ambient.now().replaced_flags[id(state.skipped)] = state.skipped


def computes_low(opt_state: Any) -> bool:
    """Whether `opt_state` is of a policy with wide params that computes in 16 bits, or is a shared loss scale."""
    return bool(find(opt_state, LowUnscaleState) or find(opt_state, SharedLossScaleState))


def with_policy(opt_state: Any, policy: Any) -> Any:
    """`opt_state` with the policy that its TrainState carries, for `policy_of`.

    The policy is an attribute of the state's tuple, and no part of the pytree: a TrainState holds it as a static field,
    and writes it here whenever it is made, as when jax puts it together in a traced function. So `opt_state` has the
    structure that the optimizer gave it.
    """

    def tag(node: Any) -> Any:
        if not isinstance(node, UnscaleState) or getattr(node, "policy", None) == policy:
            return node
        node = node._replace()
        vars(node)["policy"] = policy
        return node

    return jax.tree.map(tag, opt_state, is_leaf=lambda x: isinstance(x, UnscaleState))


def policy_of(opt_state: Any) -> Any:
    """The policy that was written by `with_policy`, or None."""
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, UnscaleState))
    return next((vars(x)["policy"] for x in found if isinstance(x, UnscaleState) and hasattr(x, "policy")), None)


def made_for(state: UnscaleState, policy: Any) -> UnscaleState:
    """`state` with the policy that its optimizer was made with, for `check_policy`; an attribute, as above."""
    vars(state)["made_for"] = policy
    return state


def check_policy(opt_state: Any, policy: Any) -> None:
    """Raises a ValueError if `policy` has other params or another compute dtype than that of the optimizer.

    `opt_state` is as the optimizer just made it.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, UnscaleState))
    for own in (getattr(state, "made_for", None) for state in states):
        names = ("param_dtype", "keep_fp32", "fp8_weights", "compute_dtype")
        other = next((name for name in names if own and getattr(own, name) != getattr(policy, name)), None)
        if other is not None:
            raise ValueError(
                f"policy= must be the policy that tx was made with, whose masters and loss scale tx has; "
                f"got {other}={getattr(policy, other)!s} in policy and {getattr(own, other)!s} in that of tx. Make one "
                f"policy = jaxmp.get_policy(...), and pass it to mixed_precision and here."
            )


def get_loss_scale(opt_state: Any) -> Float[Array, ""]:
    """The scale for the next loss.

    Args:
      opt_state: state of `mixed_precision` or of a chain that holds one, or of `shared_loss_scale`.

    Returns:
      float32[]; 1.0 for an optimizer without a loss scale, and for `()`. (A test or a program that scales by hand calls
      `get_loss_scale(())` once, so that no update warns of a scale that nobody read.)

    Raises:
      TypeError: `opt_state` is no state of an optimizer (params, a `tx`).
      ValueError: `opt_state` holds several loss scales, as with two `mixed_precision` in one `optax.multi_transform`.

    Example:
      >>> tx = optax.sgd(0.1)
      >>> float(get_loss_scale(tx.init(jnp.ones(2))))
      1.0
    """
    scale = _loss_scale_of(opt_state)
    scale_reads.note_read(scale)
    return scale


def _loss_scale_of(opt_state: Any) -> Float[Array, ""]:
    if hasattr(opt_state, "get_scale"):  # a GradScaler
        return opt_state.get_scale()
    check_is_state(opt_state, "get_loss_scale")
    found = _scalings(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"one loss has one scale; got an opt_state with {len(found)} loss scales, one of each mixed_precision "
            f"(without a loss scale it is 1). Put one mixed_precision around the whole optimizer "
            f"(mixed_precision(optax.multi_transform(...))), which decides for all params, or share one scale with "
            f"jaxmp.shared_loss_scale."
        )
    return found[0].loss_scale if found else jnp.ones((), jnp.float32)


def get_master_params(opt_state: Any, params: PyTree) -> PyTree:
    """The params in float32: the master of a 16-bit param, a float32 param itself.

    Args:
      opt_state: state that `mixed_precision` made for `params`.
      params: the model's params. A frozen leaf has no master and is cast. It need not belong to the optimizer: with
        `wrt=nnx.LoRAParam` they may be those of the whole model, `nnx.state(model, nnx.Param)`.

    Returns:
      The tree of `params`, float leaves in float32.

    Raises:
      TypeError: `opt_state` is no state of an optimizer.
      ValueError: an optimizer's state as `params`; params of another tree; a split master without its bfloat16 param.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> params32 = {"w": jnp.array([1.001])}
      >>> get_master_params(tx.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32))
      {'w': Array([1.001], dtype=float32)}
    """

    def in_float32(param: Any, master: Any) -> Any:  # each may be boxed
        if master is None:
            return casting.cast_floats(param, jnp.float32)
        pairs = zip(jax.tree.leaves(param), jax.tree.leaves(master), strict=True)
        whole = [m if m.dtype == jnp.float32 else moments.join(_upper_half(p), m) for p, m in pairs]
        return jax.tree.unflatten(jax.tree.structure(param), whole)

    if find(params, UnscaleState) or find(params, MasterState):
        raise ValueError("get_master_params takes (opt_state, params); got an opt_state as params. Swap the two.")
    check_is_state(opt_state, "get_master_params")
    masters = masters_of(opt_state, params, may_be_frozen=True)
    if any(map(stored_kernels.is_stored, jax.tree.leaves(params))):
        without = stored_kernels.stored_pairs(params).keys() - tree_paths.leaves_by_path(masters).keys()
        params = stored_kernels.load_weights(params, jnp.float32) if without else params  # fp8(w * scale) is no weight
    return jax.tree.map(in_float32, params, masters, is_leaf=tree_paths.is_box)


def _upper_half(param: Array) -> Array:
    if param.dtype != jnp.bfloat16:
        raise ValueError(
            f"a split master needs the bfloat16 param of the same step; got a param of {param.dtype}. Pass the params "
            f"that apply_gradients returned with this opt_state."
        )
    return param


def masters_of(opt_state: Any, params: PyTree, *, may_be_frozen: bool = False) -> PyTree:
    """The tree of `params` with the master of each leaf, or None if it has none; a box is one leaf.

    `may_be_frozen`: for readers, which may get the params of a whole model of which the optimizer trains a part.
    """
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    found: list[Any] = [None] * len(units)
    for state in find(opt_state, MasterState):
        for i, master in enumerate(masters_by_unit(treedef, state.master_params, params, may_be_frozen)):
            if not isinstance(master, optax.MaskedNode):
                found[i] = master
    return jax.tree.unflatten(treedef, found)


def masters_by_unit(treedef: Any, masters: PyTree, params: PyTree, may_be_frozen: bool = False) -> list[Any]:
    """The masters of a `MasterState`, one for each leaf or box of `params`, whose structure is `treedef`.

    Raises:
      ValueError: the params have other leaves than those that `tx.init` got.
    """
    try:
        return treedef.flatten_up_to(_with_masks_at_leaves(masters, params))
    except ValueError as e:
        is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        known, given = (
            {
                leaf_paths.param_of(tree_paths.path_str(path))[0]: None
                for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
            }
            for tree in (masters, params)
        )
        new, gone = [path for path in given if path not in known], [path for path in known if path not in given]
        if may_be_frozen and new and not gone:
            return _masters_by_path(masters, params)
        if gone and not new and all(map(scale_leaves.is_scale, gone)):
            raise ValueError(
                f"params must have the leaves that tx.init got; the fp8 scale {gone[0]} is in the optimizer's state "
                f"only. The scales of fp8 layers belong to the params of the optimizer: pass nnx.state(model, "
                f"nnx.Any(nnx.LoRAParam, jaxmp.nnx.Fp8Scale)) for wrt=nnx.LoRAParam, or nnx.state(model, nnx.Param)."
            ) from e
        if not new and not gone:
            raise ValueError(
                f"params must have the containers that tx.init got; got the same leaves in others (a FrozenDict for a "
                f"dict, boxes for arrays): {e}. Put them back: flax.core.unfreeze(params), nnx.as_pure(params)."
            ) from e
        is_new = new and not may_be_frozen
        raise ValueError(
            f"params must have the leaves that tx.init got; {(new if is_new else gone)[0]} is "
            + ("in the params only" if is_new else "in the optimizer's state only")
            + ". Make the optimizer last, after the model has all its layers: turn them to fp8 (jaxmp.nnx.to_fp8, or "
            'model.init in jaxmp.autocast("fp8")) and add adapters (nnx.LoRA) before tx.init(params) or nnx.Optimizer.'
        ) from e


def _masters_by_path(masters: PyTree, params: PyTree) -> list[Any]:
    """The masters of the leaves or boxes of `params`, found by path; those without one are frozen."""
    units = jax.tree_util.tree_leaves_with_path(masters, is_leaf=lambda x: hasattr(x, "_fields"))
    by_path = {leaf_paths.plain(tree_paths.path_str(path)): x for path, x in units}
    return [by_path.get(leaf_paths.plain(path), optax.MaskedNode()) for path, _ in tree_paths.boxed_leaves(params)[0]]


def _with_masks_at_leaves(masters: PyTree, params: PyTree) -> PyTree:
    """`masters`, with a mask of a whole subtree (`optax.masked` and labels take prefixes) at each of its units."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731

    def expanded(master: Any, param: Any) -> Any:
        if not is_masked(master):
            return master
        return jax.tree.map(lambda _: optax.MaskedNode(), param, is_leaf=tree_paths.is_box)

    # The remainder of a split master is a NamedTuple in the place of its param.
    return jax.tree.map(expanded, masters, params, is_leaf=lambda x: hasattr(x, "_fields"))


def saturated_masters(opt_state: Any, params: PyTree, like: PyTree) -> list[Array | None]:
    """For each leaf of `like`, a tree of the params' paths, where masters of a float16 param lie beyond its range.

    None: the param is not float16. They are the masters before a step, not after it: this costs no pass over memory.
    """
    if params is None:
        return [None] * len(jax.tree.leaves(like))
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    found: list[Array | None] = []
    for unit, master in zip(units, treedef.flatten_up_to(masters_of(opt_state, params)), strict=True):
        leaves, masters = jax.tree.leaves(unit), jax.tree.leaves(master)
        for p, m in zip(leaves, masters or [None] * len(leaves), strict=True):
            if m is None or p.dtype != jnp.float16:  # bfloat16 has the range of float32
                found.append(None)
            else:
                found.append(jnp.abs(m) > np.float32(jnp.finfo(jnp.float16).max))
    return found


def get_metrics(opt_state: Any) -> dict[str, Array]:
    """What the last step did: a flat dict of scalars, with the same keys for every chain; NaN where not computed.

    Args:
      opt_state: state after `update`, of any optimizer; `()` for none.

    Returns:
      loss_scale: the scale that the *next* step will use; 1.0 where there is none.
      skipped: bool, whether this step was skipped.
      skipped_steps, consecutive_skips: counts.
      growth_count, hysteresis_left: of the loss scale; see `DynamicLossScale`.
      pinned_overflows: overflows in a row with the scale at its floor; see `check_progress`.
      unscaled_fp16: bool, float16 params trained with `loss_scale=None`.
      saturated_params: float16 weights that stood at 65504 in this step because their master is larger.
      kept_elements: elements of the params that this step did not change, because the optimizer made inf or NaN for
        them from finite gradients.
      grad_norm: of the last step taken, before clipping (with `clip_by_global_norm` in the chain).
      zero_grads: exact zeros among its gradients (with `count_zeros` in the chain).
      fp8/min_scale, fp8/max_scale: of all fp8 tensors with delayed scaling, for the next step.
      fp8/max_amax: the largest of the newest amaxes.
      fp8/saturated: fp8 tensors that had values beyond their range in the last step taken.
      fp8/unused: fp8 tensors that were not used in the last step taken, or all zero; a kernel counts only if the
        input of its layer does.
      fp8/lost_gradients: gradients that came to an fp8 layer as zeros in the last step taken, although it ran.

    Raises:
      TypeError: `opt_state` is no state of an optimizer (params, a `tx`, a GradScaler).

    Example:
      >>> metrics = get_metrics(optax.sgd(0.1).init(jnp.ones(2)))
      >>> float(metrics["loss_scale"]), bool(metrics["skipped"]), float(metrics["grad_norm"])
      (1.0, False, nan)
    """
    if hasattr(opt_state, "get_scale"):
        raise TypeError(
            "get_metrics reads the state of an optimizer; got a GradScaler. Use its methods: scaler.get_scale(), "
            "scaler.found_inf() between step and update, scaler.state_dict()."
        )
    check_is_state(opt_state, "get_metrics")
    nan = jnp.full((), jnp.nan, jnp.float32)
    unscale = next(iter(find(opt_state, UnscaleState)), None)
    scale = next(iter(_scalings(opt_state)), None)
    norm = next(iter(find(opt_state, GlobalNormState)), None)
    zeros = next(iter(find(opt_state, ZeroCountState)), None)
    return {
        "loss_scale": jnp.ones((), jnp.float32) if scale is None else scale.loss_scale,
        "skipped": jnp.zeros((), bool) if unscale is None else unscale.skipped,
        "skipped_steps": nan if unscale is None else unscale.skipped_steps,
        "consecutive_skips": nan if unscale is None else unscale.consecutive_skips,
        "growth_count": getattr(scale, "growth_count", nan),
        "hysteresis_left": getattr(scale, "hysteresis_left", nan),
        "pinned_overflows": nan if unscale is None else unscale.pinned_overflows,
        "unscaled_fp16": jnp.zeros((), bool) if unscale is None else unscale.unscaled_fp16,
        "saturated_params": nan if unscale is None else unscale.saturated_params,
        "kept_elements": nan if unscale is None else unscale.kept_elements,
        "grad_norm": nan if norm is None else norm.grad_norm,
        "zero_grads": nan if zeros is None else zeros.zero_grads,
    } | _fp8_metrics(opt_state)


def _fp8_metrics(opt_state: Any) -> dict[str, Array]:
    found = find(opt_state, Fp8State)
    names = ("min_scale", "max_scale", "max_amax", "saturated", "unused", "lost_gradients")
    if not found:
        return {f"fp8/{name}": jnp.full((), jnp.nan, jnp.float32) for name in names}
    # Scales lie along the last axis. The replicas of pmap have an axis before it, which stays.
    scales = jnp.concatenate([group.scale for group in found[0].amax_states], axis=-1)
    newest = jnp.concatenate([group.amax_history[..., -1, :] for group in found[0].amax_states], axis=-1)
    values = (
        jnp.min(scales, axis=-1),
        jnp.max(scales, axis=-1),
        jnp.max(newest, axis=-1),
        found[0].saturated_tensors,
        found[0].unused_tensors,
        found[0].lost_gradients,
    )
    return {f"fp8/{name}": value for name, value in zip(names, values, strict=True)}


def was_skipped(opt_state: Any) -> Bool[Array, ""]:
    """Whether the last update was skipped; False for an optimizer that never skips."""
    if hasattr(opt_state, "found_inf"):  # a GradScaler, between step and update
        return opt_state.found_inf()
    check_is_state(opt_state, "keep_if_skipped(opt_state, new, old)")
    states = find(opt_state, UnscaleState)
    return states[0].skipped if states else jnp.zeros((), bool)


def keep_if_skipped(opt_state: Any, new: PyTree, old: PyTree) -> PyTree:
    """`old` if the last update was skipped, else `new`: for state outside the optimizer.

    A forward pass that overflows leaves inf in the statistics of BatchNorm, and a skipped step should not change
    counters and averages.

    Args:
      opt_state: state *after* the update; or a `GradScaler` after its step and before its update.
      new: tree of arrays after the step (batch_stats, an EMA, a step counter).
      old: the same tree before the step.

    Returns:
      A tree with the containers and dtypes of `old`, bit for bit equal to `old` or `new`.

    Raises:
      TypeError: `opt_state` is no state of an optimizer, as with arguments in another order.
      ValueError: an array of `new` is missing, or has another shape than in `old` (named by path); the state before the
        update.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
      >>> params = jnp.ones(2)
      >>> _, opt_state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
      >>> keep_if_skipped(opt_state, new={"ema": jnp.full(1, jnp.nan)}, old={"ema": jnp.ones(1)})
      {'ema': Array([1.], dtype=float32)}
    """
    skipped = was_skipped(opt_state)
    if jax.tree.structure(new) != jax.tree.structure(old):  # a FrozenDict for a dict, boxes for arrays
        fix = "Pass the whole tree that the step made, with an old one of the same leaves."
        tree_paths.check_same_structure(new, old, "new", "old", fix)
        new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    _check_shapes(new, old)
    if ambient.now().replaced_flags.get(id(skipped)) is skipped:
        raise ValueError(
            "whether a step was skipped stands in the opt_state that its update returned; got the opt_state that the "
            "update was given, which tells of the step before. Pass the new one."
        )

    def pick(old: Any, new: Any) -> Any:  # selected, never multiplied: 0 * NaN is NaN
        new, old = jnp.asarray(new), jnp.asarray(old)
        return jnp.where(skipped, old, new if new.dtype == old.dtype else new.astype(old.dtype))

    return jax.tree.map(pick, old, new)


def _check_shapes(new: PyTree, old: PyTree) -> None:
    if found := tree_paths.first_of_other_shape(old, new):
        path, old_shape, new_shape = found
        raise ValueError(
            f"state that a skipped step restores must keep its shapes; got {new_shape} in new and {old_shape} in old "
            f"at {path}. With accumulate=k, aux of the loss is stacked; BatchNorm's statistics are passed through the "
            f"microbatches by jaxmp.value_and_grad(..., carry_argnum=), see docs/how-to/step/accumulation.md."
        )
