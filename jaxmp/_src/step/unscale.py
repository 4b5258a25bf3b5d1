"""Unscale the gradients, look for overflow, and take back a step that must not happen.

    g      = f32(scaled grads) / S                      with the S that scaled them
    finite = no inf or NaN in g, on any device          one float32 MAX over the bound axes
    u, s'  = inner.update(g, s, params)
    u      = u  if the step is taken, else -0.0         p + (-0.0) is p, bit for bit; -0.0 + 0.0 is not -0.0
    s'     = s' if the step is taken, else s            selected, never multiplied: 0 * NaN is NaN
    S'     = adjust(S, finite)                          moves on a skip too; nothing else does

The inner transform always runs and its result is selected, so that there is no branch on the device and no wait for it
on the host. The scale moves after it was used, never before (DeepSpeed and mpx unscale with the new one).
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.loss_scale import protocol, static
from jaxmp._src.numerics import casting
from jaxmp._src.step import buffers, in_place, probe, state as state_lib, states, ways_to_write
from jaxmp._src.step.in_place import as_transformation
from jaxmp._src.step.policy import Policy

SkipIf = Callable[[PyTree, dict[str, Array]], Bool[Array, ""]]


class Rule(NamedTuple):
    """What `unscale_and_skip` was asked for.

    Attributes:
      template: the loss-scale object, of which the state holds the arrays.
      scales: whether there is a loss scale at all.
      axis_name, skip_nonfinite, skip_if: as given.
    """

    template: Any
    scales: bool
    axis_name: collectives.AxisName
    skip_nonfinite: bool
    skip_if: SkipIf | None

    def looks(self, known_finite: Any) -> bool:
        """Whether the gradients have to be looked at: nobody said whether they are finite, and it matters."""
        return known_finite is None and (self.skip_nonfinite or self.scales)


class Decision(NamedTuple):
    """What is decided about a step: the same on every device.

    Attributes:
      finite: bool[], whether there was no overflow; it moves the loss scale.
      taken: bool[], whether the step is taken.
      saturated: float32[], params at the end of their range.
    """

    finite: Bool[Array, ""]
    taken: Bool[Array, ""]
    saturated: Float[Array, ""]


class _Flags(NamedTuple):
    """What a device finds and all devices agree on by MAX; None: not asked."""

    overflow: Array
    unwanted: Array
    clamped: Array | None
    saturated: Array | None


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

    See the module's docstring for the equations. A step that is skipped leaves params, the state of `inner` and its
    counts as they were, bit for bit; the loss scale and the skip counters move.

    Beyond that, an element of the state or of the update that `inner` itself makes non-finite from finite gradients
    (a second moment that overflows float32, say) keeps its old value: non-finite values never enter state.

    Args:
      inner: any optax transform. It is handed `grads_finite` (bool[], whether the step is taken), `loss_scale` and
        `next_loss_scale` (float32[]) as extra arguments.
      loss_scale: a loss-scale object (`DynamicLossScale()`, your own, jmp's), a number (static), or None.
      axis_name: axes over which devices agree; `"auto"`: every axis that pmap or shard_map binds.
      skip_nonfinite: whether a step with non-finite gradients is skipped. False looks at nothing and takes every step,
        as Megatron-LM does for bfloat16 without a scaler; elements that come out non-finite keep their old value, all
        others move.
      skip_if: a reason of your own: `(grads, metrics) -> bool[]` with the unscaled gradients of this device (without
        fp8 scales) and `get_metrics` of the state before the step. True on any device skips the step on all. It does
        not lower the loss scale, which only overflow does.
      policy: only to report float16 without a loss scale (a warning, and `unscaled_fp16` in the metrics).
      clamp_inf: a float dtype, that in which gradients overflow: jnp.float16. An infinite gradient then counts as the
        largest finite value of that dtype (divided by the scale, as all are), and the step is taken; the loss scale
        backs off as for a skip. A NaN, which has neither sign nor size, still skips, and so does an infinite amax of
        fp8. None skips.

    Returns:
      A transform whose `update(grads, state, params, *, loss_scale=None, grads_finite=None, **extra_args)` takes
      scaled gradients. `loss_scale` and `grads_finite`, where given, stand in for its own: it then unscales with that
      scale, trusts that flag without looking or communicating, and leaves its own scale alone (see
      `shared_loss_scale`).

    Raises:
      ValueError: a dynamic scale with `skip_nonfinite=False`: it finds its value by overflowing.
      TypeError: `loss_scale` is none of the above; gradients that are no floats, named by path; a `clamp_inf` that is
        no float dtype.

    Warns:
      UserWarning: float16 without a loss scale; at `init`, an `inner` whose state is float16 and whose eps underflows
        there (see `check_optimizer`).

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
            "a dynamic loss scale finds its value by overflowing, so its overflows must be skipped; got "
            "skip_nonfinite=False. Use a static loss_scale (a number) or none, or leave skip_nonfinite=True."
        )
    unscaled_fp16 = policy is not None and policy.uses_float16 and not scales
    if unscaled_fp16:
        warnings.warn(
            'float16 without a loss scale: gradients below 6e-8 become zero. Leave loss_scale at "auto" for a '
            'DynamicLossScale, or use the policy "bf16", which needs none. get_metrics names this as unscaled_fp16.',
            stacklevel=3,
        )
    guarded: Any = optax.with_extra_args_support(as_transformation(inner))
    largest = None if clamp_inf is None else largest_of(clamp_inf)
    rule = Rule(template, scales, axis_name, skip_nonfinite, skip_if)

    def init_fn(params: PyTree) -> states.UnscaleState:
        zero = jnp.zeros((), jnp.int32)
        guarded_state = guarded.init(params)
        if any(getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(guarded_state)):
            probe.warn_of_underflow(guarded, params, grad_dtype=jnp.float32, stacklevel=3)
        fresh = states.UnscaleState(
            scaling=state_lib.scaling_state(template),
            skipped=jnp.zeros((), bool),
            skipped_steps=zero,
            consecutive_skips=zero,
            pinned_overflows=zero,
            unscaled_fp16=jnp.asarray(unscaled_fp16),
            saturated_params=jnp.zeros((), jnp.float32),
            guarded=jax.tree.map(casting.strongly_typed, guarded_state),
        )
        return buffers.own_buffers(fresh, (params, template))

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
    ) -> tuple[PyTree, states.UnscaleState]:
        _check_gradients(updates)
        state_lib.check_has_scaling(state)
        scaler = state_lib.scaler_of(template, state.scaling)
        own_scale_moves = loss_scale is None and scales
        # The scale that value_and_grad scaled with: the one given, else the one in the state, which without a scaler is
        # 1 unless the state comes from a run with one.
        used_scale = state.scaling.loss_scale if loss_scale is None else loss_scale

        grads, clamped = _unscale(updates, scaler if own_scale_moves else None, used_scale, rule, largest)
        way = ways_to_write.way_for(guarded, destination, params, axis_name, as_made=as_made)
        measured = way.measure(grads, look=rule.looks(grads_finite))
        with jax.named_scope("jaxmp.check_finite"):
            decision = decide(rule, grads.unscaled, state, params, measured, clamped, grads_finite)

        next_scaler = scaler.adjust(decision.finite) if own_scale_moves else scaler
        next_scaling = state_lib.scaling_state(next_scaler) if scales else state.scaling
        extra_args |= {
            "grads_finite": decision.taken,
            "loss_scale": used_scale,
            "next_loss_scale": next_scaling.loss_scale if own_scale_moves else used_scale,
        }
        new = way.write(measured, grads.unscaled, state.guarded, params, decision.taken, extra_args)

        with jax.named_scope("jaxmp.keep_or_skip"):
            saturated = decision.saturated
            if new.saturated is not None:
                saturated = jnp.where(decision.taken, new.saturated, saturated)
            skipped = ~decision.taken
            pinned = (
                scaler.is_pinned(decision.finite)
                if own_scale_moves and hasattr(scaler, "is_pinned")
                else jnp.zeros((), bool)
            )
            return new.updates, states.UnscaleState(
                scaling=jax.tree.map(buffers.in_dtype_of, next_scaling, state.scaling),
                skipped=skipped,
                skipped_steps=_count(state.skipped_steps, skipped),
                consecutive_skips=jnp.where(skipped, _count(state.consecutive_skips, skipped), 0),
                pinned_overflows=jnp.where(decision.finite, 0, _count(state.pinned_overflows, pinned)),
                unscaled_fp16=state.unscaled_fp16,
                saturated_params=saturated,
                guarded=new.state,
            )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _unscale(
    updates: PyTree, scaler: Any, used_scale: Float[Array, ""], rule: Rule, largest: float | None
) -> tuple[ways_to_write.Gradients, Bool[Array, ""] | None]:
    """(gradients in all forms, whether one was clamped or None). scaler: None to divide by `used_scale`."""
    given, scaled, clamped = updates, host_memory.to_device(updates), None
    if largest is not None:
        with jax.named_scope("jaxmp.clamp_inf"):
            scaled, clamped = clamp_infinite(scaled, largest)
            given = scaled
    with jax.named_scope("jaxmp.unscale"):
        # A user's own loss-scale object has an `unscale` of its own, which may keep 16 bits.
        grads = static.unscale(scaled, used_scale) if scaler is None else scaler.unscale(scaled)
        grads = casting.cast_floats(grads, jnp.float32)
        # The "gradients" of fp8 scales are amaxes, unscaled where the loss was differentiated.
        grads = scale_leaves.map_scales(lambda _, g, given: given.astype(jnp.float32), grads, scaled)
    scale = used_scale if state_lib.is_own(rule.template) else None
    return ways_to_write.Gradients(given, scaled, grads, scale), clamped


def decide(
    rule: Rule,
    grads: PyTree,
    state: states.UnscaleState,
    params: PyTree,
    measured: ways_to_write.Measured | None,
    clamped: Bool[Array, ""] | None,
    known_finite: Bool[Array, ""] | None,
) -> Decision:
    """Whether the step is taken, by at most one MAX over devices.

    Args:
      rule: what was asked for.
      grads: unscaled, with the amaxes of fp8 scales.
      state: before the step.
      params: before the step, or None.
      measured: what the way to write knows of the gradients; None: they are looked at here.
      clamped: whether one was infinite before it was clamped, which moves the scale and skips nothing; or None.
      known_finite: bool[], in place of a look; or None.
    """
    looks = rule.looks(known_finite)
    measured_nonfinite = None if measured is None else measured.nonfinite
    only_scales, grads = scale_leaves.partition(grads)
    amaxes = jax.tree.leaves(only_scales)

    overflow = jnp.zeros((), bool)
    if looks:
        own = [x for x in amaxes if compat.varying_axes(x)]  # of leaves that are split over devices
        overflow = collectives.any_nonfinite((grads, own) if measured_nonfinite is None else own)
        overflow = overflow if measured_nonfinite is None else overflow | measured_nonfinite
    unwanted = jnp.zeros((), bool)
    if rule.skip_if is not None:
        unwanted = jnp.asarray(rule.skip_if(grads, state_lib.get_metrics(state)), bool)
    axes = collectives.bound_axes(rule.axis_name)
    saturated = state.saturated_params
    if looks or rule.skip_if is not None:
        if params is not None and measured_nonfinite is None:
            saturated = state_lib.count_saturated(state, params)
        # A count that is the same everywhere stays out of the MAX: the optimizer waits for that, and XLA would then
        # read all masters once more to have the count in time.
        differs = bool(compat.varying_axes(saturated))
        found = collectives.largest_on_any_device(
            _Flags(overflow, unwanted, clamped, saturated if differs else None), axes
        )
        overflow, unwanted = found.overflow, found.unwanted
        clamped = None if found.clamped is None else found.clamped != 0
        saturated = saturated if found.saturated is None else found.saturated
    # The cast to fp8 turns inf into a finite number, so an amax may be all that tells of an overflow. Those that are
    # the same on every device need no MAX, and without one XLA can join theirs with that of the flags.
    overflow = (overflow != 0) | (collectives.any_nonfinite(amaxes) if looks else False)

    usable = ~overflow if known_finite is None else jnp.asarray(known_finite, bool)
    finite = usable & ~clamped if looks and clamped is not None else usable
    taken = (usable | (not rule.skip_nonfinite)) & (unwanted == 0)
    if measured is None:  # kernels read scalars from memory, once
        finite, taken = casting.computed_once((finite, taken))
    return Decision(finite, taken, saturated)


def _check_gradients(grads: PyTree) -> None:
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if not casting.is_float(g):
            raise TypeError(
                f"gradients must be float arrays; got {getattr(g, 'dtype', type(g).__name__)} at "
                f"{tree_paths.path_str(path)}. Differentiate float params only, and keep others outside of the tree; "
                f"with kernels stored in fp8, differentiate by jaxmp.value_and_grad."
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
        f"clamp_inf is the float dtype in which gradients overflow, such as jnp.float16, or None; got {dtype!r}"
    )


def clamp_infinite(grads: PyTree, largest: float) -> tuple[PyTree, Bool[Array, ""]]:
    """(`grads` with infinities at +- `largest`, whether this device had one). Amaxes of fp8 are left alone."""
    amaxes, grads = scale_leaves.partition(grads)
    found = jnp.zeros((), bool)
    for g in jax.tree.leaves(grads):
        found |= jnp.any(jnp.isinf(g))

    def clamp(g: Array) -> Array:
        limit = np.asarray(min(largest, float(jnp.finfo(g.dtype).max)), g.dtype)
        return jnp.where(jnp.isinf(g), jnp.where(g > 0, limit, -limit), g)

    return scale_leaves.merge(amaxes, jax.tree.map(clamp, grads)), found
