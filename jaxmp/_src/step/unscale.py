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

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

import pallas_kernels
from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.loss_scale import protocol, static
from jaxmp._src.numerics import casting
from jaxmp._src.programs import windows
from jaxmp._src.step import buffers, in_place, probe, state as states, states as states_lib
from jaxmp._src.step.in_place import as_transformation
from jaxmp._src.step.policy import Policy

SkipIf = Callable[[PyTree, dict[str, Array]], Bool[Array, ""]]


class _Given(NamedTuple):
    """What an optimizer that writes params itself is handed.

    Attributes:
      grads: still to be multiplied by `inv_scale`.
      inv_scale: float32[].
      norm, bad: float32[], bool[], their global norm once multiplied, and whether one on this device is not finite;
        None where nobody asks for either.
    """

    grads: PyTree
    inv_scale: Array
    norm: Array | None = None
    bad: Array | None = None


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

    def init_fn(params: PyTree) -> states_lib.UnscaleState:
        zero = jnp.zeros((), jnp.int32)
        guarded_state = guarded.init(params)
        if any(getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(guarded_state)):
            probe.warn_of_underflow(guarded, params, grad_dtype=jnp.float32, stacklevel=3)
        fresh = states_lib.UnscaleState(
            scaling=states.scaling_state(template),
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
        **extra_args: Any,
    ) -> tuple[PyTree, states_lib.UnscaleState]:
        _check_gradients(updates)
        states.check_has_scaling(state)
        scaler = states.scaler_of(template, state.scaling)
        own_scale_moves = loss_scale is None and scales
        used_scale = state.scaling.loss_scale if loss_scale is None else loss_scale
        held, updates = updates, host_memory.to_device(updates)
        clamped = None
        if largest is not None:
            with jax.named_scope("jaxmp.clamp_inf"):
                updates, clamped = clamp_infinite(updates, largest)
        with jax.named_scope("jaxmp.unscale"):
            # By the scale that value_and_grad scaled with: the one given, else the one in the state, which without a
            # scaler is 1 unless the state comes from a run with one. A user's own object has its own `unscale`.
            grads = scaler.unscale(updates) if own_scale_moves else static.unscale(updates, used_scale)
            grads = casting.cast_floats(grads, jnp.float32)  # that may keep 16 bits
            # The "gradients" of fp8 scales are amaxes, unscaled where the loss was differentiated.
            grads = scale_leaves.map_scales(lambda _, g, given: given.astype(jnp.float32), grads, updates)
        offer = in_place.current() if isinstance(guarded, in_place.InPlace) else None
        given = None
        if offer is not None and offer.is_for(params):
            # Gradients in host memory are copied in twice, a few at a time: here, and when params are written.
            as_came = held if guarded.streams and clamped is None else updates
            given = measure(as_came, grads, used_scale, grads_finite)
        with jax.named_scope("jaxmp.check_finite"):
            finite, taken, saturated = decide(grads, state, params, grads_finite, given, clamped)
        next_scaler = scaler.adjust(finite) if own_scale_moves else scaler
        next_scaling = states.scaling_state(next_scaler) if scales else state.scaling
        extra_args |= {
            "grads_finite": taken,
            "loss_scale": used_scale,
            "next_loss_scale": next_scaling.loss_scale if own_scale_moves else used_scale,
        }
        if offer is None or given is None:
            host_memory.check_on_device(state.guarded)
            new_updates, new_guarded = update_or_keep(grads, state, params, taken, extra_args)
        else:
            new_updates, new_guarded, found = write(offer, given, state, params, taken, extra_args)
            saturated = jnp.where(taken, found, saturated)
        with jax.named_scope("jaxmp.keep_or_skip"):
            skipped = ~taken
            pinned = (
                scaler.is_pinned(finite) if own_scale_moves and hasattr(scaler, "is_pinned") else jnp.zeros((), bool)
            )
            return new_updates, states_lib.UnscaleState(
                scaling=jax.tree.map(buffers.in_dtype_of, next_scaling, state.scaling),
                skipped=skipped,
                skipped_steps=_count(state.skipped_steps, skipped),
                consecutive_skips=jnp.where(skipped, _count(state.consecutive_skips, skipped), 0),
                pinned_overflows=jnp.where(finite, 0, _count(state.pinned_overflows, pinned)),
                unscaled_fp16=state.unscaled_fp16,
                saturated_params=saturated,
                guarded=new_guarded,
            )

    def looks(known_finite: Any) -> bool:
        return known_finite is None and (skip_nonfinite or scales)

    def measure(updates: PyTree, grads: PyTree, used_scale: Array, known_finite: Any) -> _Given:
        """What an optimizer that writes is handed: gradients as they came, if unscaling is all that is left to do."""
        if states.is_own(template):
            given = _Given(updates, casting.reciprocal(used_scale))
        else:
            given = _Given(grads, jnp.ones((), jnp.float32))
        if not guarded.measures and not looks(known_finite):
            return given
        with jax.named_scope("jaxmp.measure_gradients"):
            if host_memory.first_on_host(given.grads) is not None:
                leaves = scale_leaves.partition(given.grads)[1]
                return given._replace(bad=windows.any_nonfinite(leaves, given.inv_scale))
            norm, locally_finite = pallas_kernels.gradient_norm(
                scale_leaves.partition(given.grads)[1], given.inv_scale, backend=guarded.backend
            )
            return given._replace(norm=norm, bad=~locally_finite)

    def write(
        offer: in_place.Offer,
        given: _Given,
        state: states_lib.UnscaleState,
        params: PyTree,
        taken: Array,
        extra_args: Any,
    ) -> tuple[PyTree, Any, Array]:
        """Params go to the offer; the rest is (updates that nobody adds, state, saturated params)."""
        norm = jnp.full((), jnp.nan, jnp.float32) if given.norm is None else given.norm
        with jax.named_scope("jaxmp.optimizer"), in_place.withdrawn():
            step = in_place.Step(given.inv_scale, norm, taken, guarded.backend)
            offer.params, new, found = guarded.write(given.grads, state.guarded, params, step, **extra_args)
            return jax.tree.map(lambda p: jnp.full_like(p, -0.0), params), new, collectives.as_common(found, axis_name)

    def update_or_keep(
        grads: PyTree, state: states_lib.UnscaleState, params: PyTree, taken: Array, extra_args: Any
    ) -> tuple[PyTree, Any]:
        """optax's (updates, state), or where the step is not taken none and the old one."""
        with jax.named_scope("jaxmp.optimizer"), in_place.withdrawn():
            updates, new = guarded.update(grads, state.guarded, params, **extra_args)
        if probe.is_probing():
            return updates, new
        with jax.named_scope("jaxmp.keep_or_skip"):
            updates = jax.tree.map(lambda u: buffers.finite_or(taken, u, -0.0), updates)
            return updates, jax.tree.map(functools.partial(buffers.finite_or, taken), new, state.guarded)

    def decide(
        grads: PyTree,
        state: states_lib.UnscaleState,
        params: PyTree,
        known_finite: Any,
        given: _Given | None,
        clamped: Any,
    ) -> tuple[Array, Array, Array]:
        """(all finite, step is taken, saturated params), the same on every device: at most one MAX.

        given: where an optimizer writes; whether a gradient of this device is not finite is known from it.
        clamped: whether one was infinite before it was clamped, which moves the scale and skips nothing; or None.
        """
        measured_bad = None if given is None else given.bad
        must_look = looks(known_finite)
        only_scales, grads = scale_leaves.partition(grads)
        amaxes = jax.tree.leaves(only_scales)
        own = [x for x in amaxes if compat.varying_axes(x)]  # of leaves that are split over devices
        overflows = jnp.zeros((), bool)
        if must_look:
            overflows = collectives.any_nonfinite((grads, own) if measured_bad is None else own)
            overflows = overflows if measured_bad is None else overflows | measured_bad
        unwanted = jnp.zeros((), bool)
        if skip_if is not None:
            unwanted = jnp.asarray(skip_if(grads, states.get_metrics(state)), bool)
        axes = collectives.bound_axes(axis_name)
        saturated = state.saturated_params
        if must_look or skip_if is not None:
            if params is not None and measured_bad is None:
                saturated = states.count_saturated(state, params)
            # A count that is the same everywhere stays out of the MAX: the optimizer waits for that, and XLA would then
            # read all masters once more to have the count in time.
            differs = bool(compat.varying_axes(saturated))
            flags = [overflows, unwanted] + ([] if clamped is None else [clamped])
            found = collectives.largest_on_any_device(flags + [saturated] * differs, axes)
            overflows, unwanted = found[:2]
            clamped = None if clamped is None else found[2] != 0
            saturated = found[-1] if differs else saturated
        # The cast to fp8 turns inf into a finite number, so an amax may be all that tells of an overflow. Those that
        # are the same on every device need no MAX, and without one XLA can join theirs with that of the flags.
        overflows = (overflows != 0) | (collectives.any_nonfinite(amaxes) if must_look else False)
        usable = ~overflows if known_finite is None else jnp.asarray(known_finite, bool)
        finite = usable & ~clamped if must_look and clamped is not None else usable
        taken = (usable | (not skip_nonfinite)) & (unwanted == 0)
        if given is None:  # kernels read scalars from memory, once
            finite, taken = casting.computed_once((finite, taken))
        return finite, taken, saturated

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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
