"""A training step, on one page.

    grads, state, params -- scales apart --> measure -> decide -> when(taken, move, stay) -> (params, state)

1.  *Unscale.* g = float32(grad) * (1 / S), with S the very scale that scaled the loss. The reciprocal is exact for
    powers of two.
2.  *Decide.* The step is taken if |g| < 2^48 for all g (no inf, no NaN) on every device, the loss is finite where the
    caller passes it, and `skip_if` does not object.
    Each device reduces its own part to flags, and one MAX gives all devices the same ones. 2^48, because squares and
    sums of 2^30 squares are then finite, so an optimizer makes no inf from them.
3.  *Move.* `when` returns the old values of everything that a step may change, if the step is not taken: params,
    masters, moments, fp8 scales and histories, bit for bit. The optimizer runs once.
4.  *Adjust.* S changes after its use, by overflow alone. Counts follow.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740); Megatron-LM, optimizer/optimizer.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import compat
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import amax_records, scale_leaves
from jaxmp._src.loss_scale import static
from jaxmp._src.numerics import casting, float_bits, reductions
from jaxmp._src.step import masters, optimizers, scales, state as states
from jaxmp._src.step.policy import Policy
from jaxmp._src.step.state import StepState
from pallas_kernels.when import in_dtype_of

SkipIf = Callable[[PyTree, dict[str, Array]], Bool[Array, ""]]


class Rule(NamedTuple):
    """What a transform was made with.

    Attributes:
      optimizer: how weights move.
      policy: which params have masters; None: all params are trained as they are.
      scaler: a loss-scale object, whose arrays the state holds; None: gradients come unscaled, and are not checked.
      moves_scales: `scales.update_amax(recipe)`, or None.
      before: what happens to gradients first, or None.
      axis_name, skip_nonfinite, skip_if: the arguments of `mixed_precision`.
      largest: with `clamp_inf`, the largest finite gradient.
      remainder: the dtype of the remainders of split masters, or None.
    """

    optimizer: optimizers.Optimizer
    policy: Policy | None = None
    scaler: Any = None
    moves_scales: scales.MovesScales | None = None
    before: optax.GradientTransformationExtraArgs | None = None
    axis_name: collectives.AxisName = "auto"
    skip_nonfinite: bool = True
    skip_if: SkipIf | None = None
    largest: float | None = None
    remainder: Any = None

    @property
    def scales(self) -> bool:
        """Whether there is a loss scale."""
        return self.scaler is not None and not isinstance(self.scaler, static.NoOpLossScale)


class Decision(NamedTuple):
    """What was decided about a step, the same on every device.

    Attributes:
      finite: bool[], no gradient overflowed; the loss scale is adjusted by it.
      taken: bool[], the step is taken. NumPy's True where a step is always taken, known while it is traced.
    """

    finite: Any
    taken: Any


def step(
    rule: Rule,
    grads: PyTree,
    state: StepState,
    params: PyTree,
    *,
    adds: bool = False,
    loss_scale: Float[Array, ""] | None = None,
    grads_finite: Bool[Array, ""] | None = None,
    **extra: Any,
) -> tuple[PyTree, StepState]:
    """(params, state) after a step.

    Args:
      rule: what the transform was made with.
      grads: as `value_and_grad` returned them, reduced over devices (or `before` reduces them).
      state: the state before the step.
      params: the params before the step.
      adds: whether the caller adds updates; these come in place of the params.
      loss_scale: unscales in place of the state's own, which then does not change.
      grads_finite: bool[], whether the gradients are usable, if the caller knows.
      **extra: extra arguments for the optimizer. `value` is the loss of this device.
    """
    if adds and isinstance(rule.optimizer, optimizers.Fused):  # it writes params in place, and makes no updates
        rule = rule._replace(optimizer=optimizers.Optax(rule.optimizer.inner))
    original_grads, before_state = grads, state.before_state
    if rule.before is not None:
        grads, before_state = rule.before.update(grads, before_state, params)
    amaxes, grads = _apart(rule, grads)
    scale_params, own_params = _apart(rule, params)

    used_scale = jnp.ones((), jnp.float32) if state.scaling is None else state.scaling.loss_scale
    if rule.scaler is not None and loss_scale is not None:
        used_scale = loss_scale
    own_scale_moves = rule.scales and loss_scale is None
    scaler: Any = states.scaler_of(rule.scaler, cast(Any, state.scaling)) if own_scale_moves else None
    with jax.named_scope("jaxmp.unscale"):
        gradients, clamped = _gradients(rule, grads, state, scaler, used_scale)
    with jax.named_scope("jaxmp.check_finite"):
        loss = extra.get("value")
        decision, measured = decide(rule, gradients, amaxes, scale_params, state, clamped, grads_finite, loss)

    next_scaling: Any = states.scaling_state(scaler.adjust(decision.finite)) if own_scale_moves else state.scaling
    if rule.scaler is not None:
        next_scale = next_scaling.loss_scale if own_scale_moves else used_scale
        extra |= {"grads_finite": decision.taken, "loss_scale": used_scale, "next_loss_scale": next_scale}
    elif grads_finite is not None:
        extra |= {"grads_finite": decision.taken}
    # A line search measures slopes by the extra argument `grad`: here it is the very gradients of this step.
    if any(x is y for x in jax.tree.leaves(extra.get("grad"))[:1] for y in jax.tree.leaves(original_grads)):
        extra["grad"] = gradients.tree()

    weights = masters.weights_of(own_params, state.master_params)
    pairs = weights.pairs()
    number: Any = 0 if state.rounding_count is None else optax.safe_increment(state.rounding_count)
    optimizer_step = optimizers.Step(decision.taken, measured.norm, number, adds, extra)
    beside = _beside(rule, amaxes, scale_params, state, before_state, number, adds=adds)
    moved = rule.optimizer.move(optimizer_step, gradients, state.optimizer_state, pairs, own_params, beside)
    new_scales, fp8_scales, rounding_count, before_state = moved.others

    with jax.named_scope("jaxmp.write_params"):
        new, new_masters = weights.put_back(moved.pairs)
        new = weights.updates(moved.pairs, decision.taken) if adds else new
        if rule.moves_scales is not None:
            as_array = lambda x, p: jnp.full_like(p, x) if isinstance(x, float) else x  # noqa: E731
            new = scale_leaves.merge(jax.tree.map(as_array, new_scales, scale_params), new)
    with jax.named_scope("jaxmp.count"):  # nothing waits for it
        counts = {**measured.counts, **collectives.as_common(dict(moved.counts), rule.axis_name)}
        pinned = scaler.is_pinned(decision.finite) if hasattr(scaler, "is_pinned") else np.bool_(False)
        counts = states.counted(state, decision.finite, decision.taken, pinned, counts)
    return new, type(state)(
        scaling=jax.tree.map(in_dtype_of, next_scaling, state.scaling),
        before_state=before_state,
        master_params=new_masters,
        rounding_count=rounding_count,
        fp8_scales=fp8_scales,
        optimizer_state=moved.state,
        **counts,
    )


def decide(
    rule: Rule,
    gradients: optimizers.Gradients,
    amaxes: PyTree,
    scale_params: PyTree,
    state: StepState,
    clamped: Bool[Array, ""] | None,
    known_finite: Bool[Array, ""] | None,
    loss: Any,
) -> tuple[Decision, optimizers.Measured]:
    """What to do with the step, with at most one MAX over devices; and what was measured.

    Args:
      rule: what the transform was made with.
      gradients: those of this device.
      amaxes: the "gradients" of fp8 scales.
      scale_params: these scales.
      state: the state before the step.
      clamped: whether an infinite gradient was clamped; this changes the scale and skips nothing. None: not asked.
      known_finite: the caller's answer, in place of a check; or None.
      loss: of this device; None: not known.
    """
    looks = known_finite is None and rule.scaler is not None and (rule.skip_nonfinite or rule.scales)
    always = np.bool_(True)  # known while a step is traced
    of_scales = [] if rule.moves_scales is None else amax_records.not_finite_alike(amaxes, scale_params)
    measured = optimizers.Measured(jnp.zeros((), bool))
    if looks or (isinstance(rule.optimizer, optimizers.Fused) and rule.optimizer.inner.measures):
        measured = rule.optimizer.measure(gradients)
    bad = measured.bad if looks else jnp.zeros((), bool)
    if looks and of_scales:  # amaxes of leaves that are split over devices
        bad |= collectives.any_nonfinite([x for x in of_scales if compat.varying_axes(x)])
    objections = []  # these do not lower the loss scale
    if looks and rule.skip_nonfinite and loss is not None:
        objections.append(collectives.any_nonfinite(loss))
    if rule.skip_if is not None:
        metrics = states.get_metrics(state) | ({} if loss is None else {"loss": jnp.asarray(loss)})
        objection = rule.skip_if(gradients.tree(), metrics)
        objection = objection if isinstance(objection, jax.Array) else np.asarray(objection)
        if objection.shape or objection.dtype != bool:  # a number would skip each step where it is not 0
            raise TypeError(
                f"skip_if(grads, metrics) must return one bool; got {objection.dtype}{list(objection.shape)}. Reduce "
                f"it: jnp.any(x > limit)."
            )
        objections.append(jnp.asarray(objection))
    unwanted = functools.reduce(jnp.logical_or, objections, jnp.zeros((), bool))
    if looks or objections:
        flags = {"bad": bad, "unwanted": unwanted} | ({} if clamped is None else {"clamped": clamped})
        flags |= measured.counts
        common = collectives.largest_on_any_device(flags, collectives.bound_axes(rule.axis_name))
        bad, unwanted, clamped = common["bad"] != 0, common["unwanted"] != 0, common.get("clamped")
        measured = measured._replace(counts={name: common[name] for name in measured.counts})
    if looks and of_scales:
        # The cast to fp8 turns inf into a finite number, so an amax can be the only sign of an overflow. Amaxes that
        # are equal on all devices are so because of an earlier MAX. XLA can merge that MAX with the MAX of the flags.
        bad |= collectives.any_nonfinite(of_scales)

    usable = ~bad if looks else always if known_finite is None else jnp.asarray(known_finite, bool)
    finite = usable if clamped is None or not looks else usable & (clamped == 0)
    taken = usable if rule.skip_nonfinite else always
    taken = taken & ~unwanted if objections else taken
    if isinstance(rule.optimizer, optimizers.Fused):
        return Decision(finite, taken), measured
    # Without this, XLA repeats the computation of both flags in the code of every leaf.
    return Decision(*(x if x is always else reductions.computed_once(x) for x in (finite, taken))), measured


def all_usable(grads: PyTree, loss_scale: Float[Array, ""], axis_name: collectives.AxisName) -> Bool[Array, ""]:
    """Whether every gradient is below 2^48 after unscaling, and every amax of fp8 finite, on every device."""
    amaxes, grads = scale_leaves.partition(grads)
    inv_scale = float_bits.reciprocal(loss_scale)
    leaves = optimizers.Gradients(jax.tree.leaves(grads), inv_scale, None).unscaled()
    bad = reductions.any_unusable(leaves) | collectives.any_nonfinite(amaxes)
    (bad,) = collectives.largest_on_any_device([bad], collectives.bound_axes(axis_name))
    return bad == 0


def _apart(rule: Rule, tree: PyTree) -> tuple[PyTree, PyTree]:
    """(the scale leaves of fp8, all others)."""
    return ((), tree) if rule.moves_scales is None else scale_leaves.partition(tree)


def _gradients(
    rule: Rule, grads: PyTree, state: StepState, scaler: Any, used_scale: Float[Array, ""]
) -> tuple[optimizers.Gradients, Bool[Array, ""] | None]:
    """The gradients, and whether one was clamped."""
    leaves, clamped = jax.tree.leaves(grads), None
    if rule.largest is not None:
        with jax.named_scope("jaxmp.clamp_inf"):
            leaves, clamped = clamp_infinite(host_memory.to_device(leaves), rule.largest)
    treedef = jax.tree.structure(grads)
    if rule.scaler is None:
        return optimizers.Gradients(leaves, None, treedef), clamped
    inv_scale = float_bits.reciprocal(used_scale)
    inv_scale = inv_scale if isinstance(rule.optimizer, optimizers.Fused) else reductions.computed_once(inv_scale)
    if scaler is not None and isinstance(state.scaling, states.CustomLossScaleState):  # it unscales by its own rule
        leaves = casting.cast_floats(scaler.unscale(host_memory.to_device(leaves)), jnp.float32)
        inv_scale = jnp.ones((), jnp.float32)
    return optimizers.Gradients(leaves, inv_scale, treedef), clamped


def clamp_infinite(leaves: list[Array], largest: float) -> tuple[list[Array], Bool[Array, ""]]:
    """`leaves` with infinities at +- `largest`, and whether this device had one."""
    is_clamped = jnp.zeros((), bool)
    for g in leaves:
        is_clamped |= jnp.any(jnp.isinf(g))

    def clamp(g: Array) -> Array:
        limit = np.asarray(min(largest, float(jnp.finfo(g.dtype).max)), g.dtype)
        return jnp.where(jnp.isinf(g), jnp.where(g > 0, limit, -limit), g)

    return [clamp(g) for g in leaves], is_clamped


def _beside(
    rule: Rule,
    amaxes: PyTree,
    scale_params: PyTree,
    state: StepState,
    before_state: Any,
    number: Any,
    *,
    adds: bool,
) -> optimizers.Beside:
    """What moves beside the weights: fp8 scales and histories, the count of roundings, the state of `before`."""
    with jax.named_scope("jaxmp.update_amax"):
        observed = None if rule.moves_scales is None else rule.moves_scales.observe(amaxes, scale_params)

    def move(old: PyTree) -> PyTree:
        leaves, histories, count, _ = old
        if rule.moves_scales is not None:
            with jax.named_scope("jaxmp.update_amax"):
                leaves, histories = rule.moves_scales.move(observed, state.fp8_scales, scale_params, adds=adds)
        return leaves, histories, None if count is None else number, before_state

    stay = jax.tree.map(lambda _: -0.0, scale_params) if adds else scale_params
    return optimizers.Beside(move, (stay, state.fp8_scales, state.rounding_count, state.before_state))
