"""Unscales the gradients, checks for overflow, decides, and keeps the old state if the step is skipped.

    g      = f32(scaled grads) / S                      with the S that scaled them
    finite = no inf or NaN in g, on any device          one float32 MAX over the bound axes
    u, s'  = inner.update(g, s, params)
    u      = u  if the step is taken, else -0.0         p + (-0.0) is p, bit for bit; -0.0 + 0.0 is not -0.0
    s'     = s' if the step is taken, else s            selected, never multiplied: 0 * NaN is NaN
    S'     = adjust(S, finite)                          the only state that changes in a skipped step

The inner transform always runs, and the step selects its result or the old state: there is no branch on the device, and
the host does not wait. The scale changes after its use, never before (DeepSpeed and mpx unscale with the new scale).

Read it in this order: `unscale_and_skip` (the equations), `decide`, then `ways_to_write`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.loss_scale import protocol, static
from jaxmp._src.numerics import casting
from jaxmp._src.programs import frozen_leaves
from jaxmp._src.step import (
    check_optimizer,
    in_place,
    read_state,
    scale_reads,
    state_arrays,
    state_tuples,
    ways_to_write,
)
from jaxmp._src.step.in_place import as_transformation
from jaxmp._src.step.policy import Policy

SkipIf = Callable[[PyTree, dict[str, Array]], Bool[Array, ""]]


class Rule(NamedTuple):
    """The arguments of `unscale_and_skip` that a decision needs.

    Attributes:
      template: the loss-scale object; the state holds its arrays.
      scales: whether there is a loss scale at all.
      axis_name, skip_nonfinite, skip_if: the arguments themselves.
    """

    template: Any
    scales: bool
    axis_name: collectives.AxisName
    skip_nonfinite: bool
    skip_if: SkipIf | None

    def looks(self, known_finite: Any) -> bool:
        """Whether the gradients must be checked: no `grads_finite` was given, and the step or the scale needs it."""
        return known_finite is None and (self.skip_nonfinite or self.scales)


class Decision(NamedTuple):
    """What was decided about a step. `finite` and `taken` are the same on every device.

    Attributes:
      finite: bool[], no gradient overflowed; the loss scale is adjusted by it.
      taken: bool[], the step is taken.
    """

    finite: Bool[Array, ""]
    taken: Bool[Array, ""]


class _Flags(NamedTuple):
    """What each device found, to be reduced by MAX. None: not needed in this step."""

    overflow: Array
    unwanted: Array
    clamped: Array | None


def unscale_and_skip(
    inner: optax.GradientTransformation,
    loss_scale: Any = None,
    *,
    axis_name: collectives.AxisName = "auto",
    skip_nonfinite: bool = True,
    skip_if: SkipIf | None = None,
    policy: Policy | None = None,
    clamp_inf: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it sees unscaled float32 gradients and no step with a non-finite one is taken.

    The equations stand in the module's docstring. A skipped step does not change params, the state of `inner` or its
    counts, bit for bit. It changes the loss scale and the skip counters.

    If `inner` makes a number non-finite from finite gradients (for example a second moment, the square of 1e20), the
    element of the param that this number belongs to keeps all its old values: weight, master, moments. So non-finite
    values never enter state, and no weight moves by a pair of moments of which only one has taken the gradient.
    `get_metrics` counts these elements as `kept_elements`.

    Args:
      inner: any optax transform. It gets `grads_finite` (bool[], whether the step is taken), `loss_scale` and
        `next_loss_scale` (float32[]) as extra arguments. If the extra argument `grad` holds the gradients of
        `value_and_grad`, as for line searches, `inner` gets it unscaled.
      loss_scale: a loss-scale object (`DynamicLossScale()`, your own, jmp's), a number (static), or None.
      axis_name: axes over which devices agree; `"auto"` means every axis that pmap or shard_map binds.
      skip_nonfinite: whether to skip a step with non-finite gradients. False checks nothing and takes every step, as
        Megatron-LM does for bfloat16 without a scaler; elements that become non-finite keep their old value.
      skip_if: your own reason to skip: `(grads, metrics) -> bool[]`, called with the unscaled gradients of this device
        (without fp8 scales) and `get_metrics` of the state before the step. True on any device skips the step on all
        devices. It does not lower the loss scale; only overflow does.
      policy: used only to report float16 without a loss scale (a warning, and `unscaled_fp16` in the metrics), and, by
        the type of the state, a loss that does not compute in the 16 bits of the policy (`value_and_grad`).
      clamp_inf: with None, a step with an infinite gradient is skipped. With a float dtype, the one in which gradients
        overflow (jnp.float16), an infinite gradient becomes the largest finite value of that dtype, divided by the
        scale; the step is taken, and the loss scale backs off as in a skipped step. NaN and an infinite amax of fp8
        still skip.

    Returns:
      A transform whose `update(grads, state, params, *, loss_scale=None, grads_finite=None, **extra_args)` takes
      scaled gradients. If `loss_scale` is given, it unscales with that scale and does not change its own. If
      `grads_finite` is given, it checks nothing and uses no collective (see `shared_loss_scale`).

    Raises:
      ValueError: a dynamic scale with `skip_nonfinite=False`: it finds its value by overflowing.
      ValueError: at `init`, an `inner` that unscales already (`mixed_precision` twice).
      ValueError: at `init`, fp8 scales among the params that `inner` would train as weights (named by path).
      ValueError: at `update`, a gradient of another shape that would be repeated to the shape of its param.
      TypeError: `loss_scale` is none of the above; a gradient is not a float array (named by path); `clamp_inf` is not
        a float dtype; `skip_if` returns anything but one bool.

    Warns:
      UnreadLossScale: at `update`, while it is traced: nobody read the loss scale, so the gradients cannot be scaled.
      UserWarning: at `update`, a transform follows in the chain, and `value_and_grad` got the state of the chain.
      UserWarning: float16 without a loss scale; at `init`, an `inner` with float16 state and an eps that underflows in
        float16 (see `check_optimizer`).

    Example:
      >>> tx = unscale_and_skip(optax.sgd(1.0), 4.0)
      >>> params = jnp.array([1.0])
      >>> updates, opt_state = tx.update(jnp.array([8.0], jnp.float16), tx.init(params), params)
      >>> updates
      Array([-2.], dtype=float32)
      >>> updates, opt_state = tx.update(jnp.array([jnp.inf], jnp.float16), opt_state, params)
      >>> updates, int(opt_state.skipped_steps)
      (Array([-0.], dtype=float32), 1)
    """
    template = protocol.as_loss_scale(loss_scale)
    scales = not isinstance(template, static.NoOpLossScale)
    if not skip_nonfinite and not isinstance(template, static.NoOpLossScale | static.StaticLossScale):
        raise ValueError(
            "a dynamic loss scale finds its value by overflow, so steps that overflow must be skipped; got "
            "skip_nonfinite=False. Use a static loss_scale (a number) or none, or leave skip_nonfinite=True."
        )
    unscaled_fp16 = policy is not None and policy.uses_float16 and not scales
    if unscaled_fp16:
        warn(
            "float16-without-loss-scale",
            'float16 without a loss scale: gradients below 6e-8 become zero. Leave loss_scale="auto" for a '
            'DynamicLossScale, or use the policy "bf16", which needs none. get_metrics reports this as unscaled_fp16.',
        )
    guarded: Any = as_transformation(inner)
    largest = None if clamp_inf is None else largest_of(clamp_inf)
    rule = Rule(template, scales, axis_name, skip_nonfinite, skip_if)
    # 16-bit params show by their dtype what the loss should compute in.
    only_computes_low = policy is not None and policy.computes_in_16_bits and policy.param_dtype.itemsize > 2
    kind = state_tuples.LowUnscaleState if only_computes_low else state_tuples.UnscaleState

    def init_fn(params: PyTree) -> state_tuples.UnscaleState:
        zero = jnp.zeros((), jnp.int32)
        _check_moves_scales(guarded, params)
        guarded_state = tree_paths.with_boxes_inside(guarded.init(params))
        read_state.check_not_nested(guarded_state)
        if any(getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(guarded_state)):
            check_optimizer.warn_of_underflow(guarded, params, grad_dtype=jnp.float32)
        fresh = kind(
            scaling=read_state.scaling_state(template),
            skipped=jnp.zeros((), bool),
            skipped_steps=zero,
            consecutive_skips=zero,
            pinned_overflows=zero,
            unscaled_fp16=jnp.asarray(unscaled_fp16),
            saturated_params=jnp.zeros((), jnp.float32),
            kept_elements=jnp.zeros((), jnp.float32),
            guarded=jax.tree.map(casting.strongly_typed, guarded_state),
        )
        return read_state.made_for(state_arrays.own_buffers(fresh, (params, template)), policy)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        loss_scale: Float[Array, ""] | None = None,
        grads_finite: Bool[Array, ""] | None = None,
        destination: in_place.Destination | None = None,
        as_made: bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, state_tuples.UnscaleState]:
        _check_gradients(updates)
        tree_paths.check_no_broadcast(updates, params)
        read_state.check_has_scaling(state)
        read_state.check_branches(state)
        if destination is None:
            read_state.warn_if_followed(state)
            read_state.warn_if_preceded(state, updates)
        else:
            destination.arrive(updates)
        scaler = read_state.scaler_of(template, state.scaling)
        own_scale_moves = loss_scale is None and scales
        # The scale that value_and_grad multiplied by: the given one, else that in the state. Without a loss scale the
        # state holds 1, or the scale of an earlier run.
        used_scale = state.scaling.loss_scale if loss_scale is None else loss_scale
        is_dynamic = own_scale_moves and not isinstance(template, static.StaticLossScale)
        if is_dynamic:
            scale_reads.check(updates if destination is None else destination.grads, used_scale)

        grads, clamped = _unscale(updates, scaler if own_scale_moves else None, used_scale, rule, largest)
        way = ways_to_write.way_for(guarded, destination, params, axis_name, as_made=as_made)
        measured = way.measure(grads, look=rule.looks(grads_finite))
        with jax.named_scope("jaxmp.check_finite"):
            decision = decide(rule, grads, state, measured, clamped, grads_finite)

        next_scaler = scaler.adjust(decision.finite) if own_scale_moves else scaler
        next_scaling = read_state.scaling_state(next_scaler) if scales else state.scaling
        extra_args |= {
            "grads_finite": decision.taken,
            "loss_scale": used_scale,
            "next_loss_scale": next_scaling.loss_scale if own_scale_moves else used_scale,
        }
        if _is_scaled(extra_args.get("grad"), updates, destination):  # a line search measures slopes by it
            extra_args["grad"] = static.unscale(extra_args["grad"], used_scale)
        new = way.write(measured, grads.unscaled, state.guarded, params, decision.taken, extra_args)

        read_state.note_replaced(state)
        with jax.named_scope("jaxmp.keep_or_skip"):
            skipped = ~decision.taken
            pinned = (
                scaler.is_pinned(decision.finite)
                if own_scale_moves and hasattr(scaler, "is_pinned")
                else jnp.zeros((), bool)
            )
            if destination is not None:
                destination.note(new.updates)
            scaling = jax.tree.map(state_arrays.in_dtype_of, next_scaling, state.scaling)
            if is_dynamic:
                scale_reads.note_made(scaling.loss_scale, before=used_scale)
            return new.updates, type(state)(
                scaling=scaling,
                skipped=skipped,
                skipped_steps=_count(state.skipped_steps, skipped),
                consecutive_skips=jnp.where(skipped, _count(state.consecutive_skips, skipped), 0),
                pinned_overflows=jnp.where(decision.finite, 0, _count(state.pinned_overflows, pinned)),
                unscaled_fp16=state.unscaled_fp16,
                saturated_params=jnp.where(jnp.isnan(new.saturated), state.saturated_params, new.saturated),
                kept_elements=new.kept,
                guarded=new.state,
            )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_scaled(grad: PyTree, updates: PyTree, destination: in_place.Destination | None) -> bool:
    """Whether the extra argument `grad` of optax's line searches is the very gradients that are unscaled here."""
    here = jax.tree.leaves((updates, () if destination is None else destination.grads))
    return scale_reads.holds_gradients(grad) or any(g is x for g in jax.tree.leaves(grad)[:1] for x in here)


def _unscale(
    updates: PyTree, scaler: Any, used_scale: Float[Array, ""], rule: Rule, largest: float | None
) -> tuple[ways_to_write.Gradients, Bool[Array, ""] | None]:
    """The gradients, scaled and unscaled, and whether one was clamped. Without `scaler`, divides by `used_scale`."""
    given, scaled, clamped = updates, host_memory.to_device(updates), None
    if largest is not None:
        with jax.named_scope("jaxmp.clamp_inf"):
            scaled, clamped = clamp_infinite(scaled, largest)
            given = scaled

    def unscaled() -> PyTree:
        # The `unscale` of a user's own loss-scale object may return 16 bits.
        grads = static.unscale(scaled, used_scale) if scaler is None else scaler.unscale(scaled)
        grads = casting.cast_floats(grads, jnp.float32)
        # The "gradients" of fp8 scales are amaxes; value_and_grad has unscaled them.
        return scale_leaves.map_scales(lambda _, g, given: given.astype(jnp.float32), grads, scaled)

    with jax.named_scope("jaxmp.unscale"):
        grads = unscaled()
    scale = used_scale if read_state.is_own(rule.template) else None
    return ways_to_write.Gradients(given, scaled, grads, unscaled, scale), clamped


def decide(
    rule: Rule,
    grads: ways_to_write.Gradients,
    state: state_tuples.UnscaleState,
    measured: ways_to_write.Measured | None,
    clamped: Bool[Array, ""] | None,
    known_finite: Bool[Array, ""] | None,
) -> Decision:
    """Decides about the step, with at most one MAX over devices.

    Args:
      rule: the arguments of `unscale_and_skip`.
      grads: the gradients, with the amaxes of fp8 scales.
      state: the state before the step.
      measured: what the way to write has measured; None: the gradients are checked here.
      clamped: whether an infinite gradient was clamped; this changes the scale and skips nothing. None: not asked.
      known_finite: the caller's answer, in place of a check; or None.
    """
    looks = rule.looks(known_finite)
    measured_nonfinite = None if measured is None else measured.nonfinite
    only_scales, weights = scale_leaves.partition(grads.unscaled)
    amaxes = jax.tree.leaves(only_scales)

    overflow = jnp.zeros((), bool)
    if looks:
        own = [x for x in amaxes if compat.varying_axes(x)]  # these leaves are split over devices
        if measured_nonfinite is None:
            again = lambda: (scale_leaves.partition(grads.again())[1], own)  # noqa: E731
            overflow = collectives.any_nonfinite((weights, own), again)
        else:
            overflow = collectives.any_nonfinite(own) | measured_nonfinite
    unwanted = jnp.zeros((), bool)
    if rule.skip_if is not None:
        unwanted = _as_flag(rule.skip_if(weights, read_state.get_metrics(state)))
    axes = collectives.bound_axes(rule.axis_name)
    if looks or rule.skip_if is not None:
        found = collectives.largest_on_any_device(_Flags(overflow, unwanted, clamped), axes)
        overflow, unwanted = found.overflow, found.unwanted
        clamped = None if found.clamped is None else found.clamped != 0
    # The cast to fp8 turns inf into a finite number, so an amax can be the only sign of an overflow. Amaxes that are
    # equal on all devices are so because of an earlier MAX. XLA can merge that MAX with the MAX of the flags.
    overflow = (overflow != 0) | (collectives.any_nonfinite(amaxes) if looks else False)

    usable = ~overflow if known_finite is None else jnp.asarray(known_finite, bool)
    finite = usable & ~clamped if looks and clamped is not None else usable
    taken = (usable | (not rule.skip_nonfinite)) & (unwanted == 0)
    if measured is None:  # without this, XLA repeats the computation of both flags in the code of every leaf
        finite, taken = casting.computed_once((finite, taken))
    return Decision(finite, taken)


def _as_flag(given: Any) -> Bool[Array, ""]:
    """What `skip_if` returned, which must be one bool: a number would skip each step where it is not 0."""
    x = given if isinstance(given, jax.Array) else np.asarray(given)
    if x.shape != () or x.dtype != np.bool_:
        raise TypeError(
            f"skip_if(grads, metrics) must return one bool, True to skip the step; got {x.dtype}{list(x.shape)}. "
            f"Compare, and reduce: jnp.any(x > limit)."
        )
    return jnp.asarray(x)


def _check_moves_scales(inner: Any, params: PyTree) -> None:
    """Raises a ValueError if `inner` would train the fp8 scales in the params as weights. (They may be frozen.)"""
    if not any(scale_leaves.is_scale(path) for path, _ in tree_paths.boxed_leaves(params)[0]):
        return
    if read_state.find(jax.eval_shape(inner.init, params), state_tuples.Fp8State):
        return
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    frozen = frozen_leaves.frozen_leaves(inner, params)
    trained = [tree_paths.path_str(path) for path, stays in zip(paths, frozen, strict=True) if not stays]
    scale_leaves.refuse(trained)


def _check_gradients(grads: PyTree) -> None:
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if not casting.is_float(g):
            raise TypeError(
                f"gradients must be float arrays; got {getattr(g, 'dtype', type(g).__name__)} at "
                f"{tree_paths.path_str(path)}. "
                + (
                    "Differentiate float params only, and keep others outside of the tree; with kernels stored in fp8, "
                    "differentiate by jaxmp.value_and_grad."
                    if hasattr(g, "dtype")
                    else "Pass the gradients alone: loss, grads = jaxmp.value_and_grad(...)(...)."
                )
            )


def _count(count: Array, happened: Bool[Array, ""]) -> Array:
    return jnp.where(happened, optax.safe_increment(count), count)


def largest_of(dtype: Any) -> float:
    """The largest finite value of a float dtype."""
    try:
        if not isinstance(dtype, bool | int | float):
            return float(jnp.finfo(dtype).max)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"clamp_inf must be the float dtype in which gradients overflow, such as jnp.float16, or None; got {dtype!r}"
    )


def clamp_infinite(grads: PyTree, largest: float) -> tuple[PyTree, Bool[Array, ""]]:
    """`grads` with infinities at +- `largest`, and whether this device had one. Amaxes of fp8 are not changed."""
    amaxes, grads = scale_leaves.partition(grads)
    found = jnp.zeros((), bool)
    for g in jax.tree.leaves(grads):
        found |= jnp.any(jnp.isinf(g))

    def clamp(g: Array) -> Array:
        limit = np.asarray(min(largest, float(jnp.finfo(g.dtype).max)), g.dtype)
        return jnp.where(jnp.isinf(g), jnp.where(g > 0, limit, -limit), g)

    return scale_leaves.merge(amaxes, jax.tree.map(clamp, grads)), found
