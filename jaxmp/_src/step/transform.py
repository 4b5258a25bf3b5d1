"""`mixed_precision` and its parts as optax transforms, and `apply_gradients`, the step with them.

A transform holds a `heart.Rule`. Its `update` and its `step` are `heart.step` with this rule: `update` returns what a
caller adds to the params, `step` returns the params themselves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.loss_scale import dynamic, protocol
from jaxmp._src.numerics import casting, float_bits
from jaxmp._src.step import (
    argument_kinds,
    checks,
    heart,
    inner_update,
    masters,
    scale_reads,
    scales,
    state as states,
    state_arrays,
)
from jaxmp._src.step.optimizers import as_transformation, optimizer_of
from jaxmp._src.step.policy import Policy, get_policy
from jaxmp._src.step.state import StepState


class Transformation(optax.GradientTransformationExtraArgs):
    """An optax transform with a `step`, which `apply_gradients` calls.

    Attributes:
      step: `(grads, opt_state, params, **extra_args) -> (params, opt_state)`.
      rule: what it was made with.
      policy: its policy, or None.
    """

    step: Any
    rule: heart.Rule
    policy: Policy | None


def mixed_precision(
    inner: optax.GradientTransformation,
    policy: str | jmp.Policy,
    *,
    loss_scale: Any = "auto",
    axis_name: collectives.AxisName = "auto",
    recipe: scales.Recipe = None,
    before: optax.GradientTransformation | None = None,
    skip_nonfinite: bool = True,
    skip_if: heart.SkipIf | None = None,
    remainder_bits: int | None = None,
    clamp_inf: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes any optax optimizer train in mixed precision: float32 masters, loss scaling, overflows skipped.

        opt_state = tx.init(params32);  params = policy.cast_to_param(params32)
        loss, grads = jaxmp.value_and_grad(loss_fn, policy=policy)(params, batch, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)       # or both lines as jaxmp.apply_gradients

    Args:
      inner: the optimizer. It gets unscaled float32 gradients and float32 params, and its state is float32.
      policy: a name, a jmp string or a policy; see `get_policy`.
      loss_scale: `"auto"` (float16 params: `DynamicLossScale()`; none otherwise), a number (static), None, or an object
        with jmp's protocol.
      axis_name: axes over which devices agree on overflow: `"auto"` for every axis that pmap or shard_map binds, names,
        or None, which is an error inside pmap or shard_map.
      recipe: the fp8 recipe of the model's layers; None for the policy's own. A `DelayedScaling` (or a dict from path
        patterns to recipes) updates the scale leaves of the params; stateless recipes need nothing here.
      before: what must happen to gradients before they are unscaled: `jaxmp.reduce_gradients("data")`. An optax
        transform whose result is proportional to the gradients that it gets, as these are still scaled.
      skip_nonfinite: whether to skip steps with unusable gradients, with any policy; see `unscale_and_skip`.
      skip_if: `(grads, metrics) -> bool[]`, your own reason to skip a step; with `value=`, metrics["loss"] is the loss.
      remainder_bits: None keeps float32 masters. With 16 or 8, bfloat16 params are the upper half of their masters, and
        the state keeps the rest in two bytes or one. For `apply_gradients` only; see `keep_master_params`.
      clamp_inf: None skips a step with an infinite gradient. `jnp.float16` replaces it by 65504 / loss scale and takes
        the step; see `unscale_and_skip`.

    Returns:
      An optax transform. `init` takes params in float32, or as the policy casts them. `update` takes `loss_scale=` and
      `grads_finite=` as extra arguments that replace its own (see `shared_loss_scale`), and passes all others to
      `inner`. With `value=loss`, a loss that is not finite on any device skips the step, and does not lower the scale.

    Raises:
      ValueError, TypeError: each names the rule, what it got, the fix and the path of the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> policy = get_policy("fp16")
      >>> tx = mixed_precision(optax.adamw(1e-3), policy)
      >>> params32 = {"w": jnp.ones((2, 2))}
      >>> opt_state, params = tx.init(params32), policy.cast_to_param(params32)
      >>> grads = {"w": jnp.full((2, 2), 65536.0 * 0.25, jnp.float16)}  # scaled by the loss scale
      >>> params, opt_state = apply_gradients(tx, grads, opt_state, params)
      >>> params["w"][0, 0], float(states.loss_scale_of(opt_state))
      (Array(0.999, dtype=float16), 65536.0)

    References:
      Micikevicius et al. 2018 (arXiv 1710.03740); Megatron-LM's Float16OptimizerWithFloat16Params.
    """
    policy = get_policy(policy)
    if isinstance(loss_scale, str):
        if loss_scale != "auto":
            raise ValueError(
                f'loss_scale must be "auto", None, a number or a loss-scale object; got {loss_scale!r}. For '
                f'another rule: jaxmp.DynamicLossScale.preset("megatron").'
            )
        loss_scale = dynamic.DynamicLossScale() if policy.uses_float16 else None
    recipe = policy.recipe if recipe is None else recipe
    is_delayed = scales.is_delayed(recipe)
    return _transformation(
        heart.Rule(
            optimizer_of(as_transformation(inner)),
            policy=policy,
            scaler=protocol.as_loss_scale(loss_scale),
            moves_scales=scales.update_amax(recipe) if is_delayed else None,
            before=None if before is None else as_transformation(before),
            axis_name=axis_name,
            skip_nonfinite=skip_nonfinite,
            skip_if=skip_if,
            largest=None if clamp_inf is None else largest_of(clamp_inf),
            remainder=masters.remainder_dtype(remainder_bits, policy),
        ),
        policy,
    )


def unscale_and_skip(
    inner: optax.GradientTransformation,
    loss_scale: Any = None,
    *,
    axis_name: collectives.AxisName = "auto",
    skip_nonfinite: bool = True,
    skip_if: heart.SkipIf | None = None,
    policy: Policy | None = None,
    clamp_inf: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it sees unscaled float32 gradients, and no step with an unusable one is taken.

        g = float32(grad) * (1 / S)          taken = every |g| < 2^48, on every device

    So inf and NaN never enter state: squares below 2^96, and sums of 2^30 of them, are finite. A skipped step does not
    change params, the state of `inner` or its counts, bit for bit. It changes the loss scale and the skip counters.

    Args:
      inner: any optax transform. It gets `grads_finite` (bool[], whether the step is taken), `loss_scale` and
        `next_loss_scale` (float32[]) as extra arguments. If the extra argument `grad` holds the gradients of
        `value_and_grad`, as for line searches, `inner` gets it unscaled.
      loss_scale: a loss-scale object (`DynamicLossScale()`, your own, jmp's), a number (static), or None.
      axis_name: axes over which devices agree; `"auto"` means every axis that pmap or shard_map binds.
      skip_nonfinite: whether to skip a step with unusable gradients. False checks nothing and takes every step, as
        Megatron-LM does for bfloat16 without a scaler; inf and NaN then enter the state.
      skip_if: your own reason to skip: `(grads, metrics) -> bool[]`, called with the unscaled gradients of this device
        (without fp8 scales) and `get_metrics` of the state before the step. True on any device skips the step on all
        devices. It does not lower the loss scale; only overflow does. If `update` gets `value=loss`, metrics["loss"]
        is this loss, of this device and step.
      policy: used only to report float16 without a loss scale (a warning, and `unscaled_fp16` in the metrics), and, by
        the type of the state, a loss that does not compute in the 16 bits of the policy (`value_and_grad`).
      clamp_inf: with None, a step with an infinite gradient is skipped. With a float dtype, the one in which gradients
        overflow (jnp.float16), an infinite gradient becomes the largest finite value of that dtype, divided by the
        scale; the step is taken, and the loss scale backs off as in a skipped step. NaN and an infinite amax of fp8
        still skip.

    Returns:
      A transform whose `update(grads, state, params, *, loss_scale=None, grads_finite=None, **extra_args)` takes
      scaled gradients. If `loss_scale` is given, it unscales with that scale and does not change its own. If
      `grads_finite` is given, it checks nothing and uses no collective (see `shared_loss_scale`). If `value`, the loss,
      is given and not finite on any device, no device takes the step. That alone does not lower the loss scale;
      gradients that overflow with the loss do. (`inner` gets `value` too, if it takes it.)

    Raises:
      ValueError: a dynamic scale with `skip_nonfinite=False`: it finds its value by overflowing.
      ValueError: at `init`, an `inner` that unscales already (`mixed_precision` twice).
      ValueError: at `init`, fp8 scales among the params that `inner` would train as weights (named by path).
      ValueError: at `update`, a gradient of another shape that would be repeated to the shape of its param.
      TypeError: `loss_scale` is none of the above; a gradient is not a float array (named by path); `clamp_inf` is not
        a float dtype; `skip_if` returns anything but one bool.

    Warns:
      UnreadLossScale: at `update`, while it is traced: nobody read the loss scale, so the gradients cannot be scaled.
      UserWarning: float16 without a loss scale.

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
    return _transformation(
        heart.Rule(
            optimizer_of(as_transformation(inner)),
            scaler=protocol.as_loss_scale(loss_scale),
            axis_name=axis_name,
            skip_nonfinite=skip_nonfinite,
            skip_if=skip_if,
            largest=None if clamp_inf is None else largest_of(clamp_inf),
        ),
        policy,
    )


def keep_master_params(
    inner: optax.GradientTransformation, policy: str | jmp.Policy, *, remainder_bits: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it updates float32 masters of 16-bit params.

    Args:
      inner: any optax transform.
      policy: which params have 16 bits: `param_dtype`, except those that `keep_fp32` names.
      remainder_bits: None keeps float32 masters. 16 keeps two bytes for each bfloat16 param: the difference between
        its float32 master and the param. 8 keeps one byte, for a master of 24 bits, which every update rounds
        stochastically (see `pallas_kernels.moments`).
        Only `jaxmp.apply_gradients` can write such params.

    Returns:
      A transform with `StepState`. `init(params)` takes the params in float32 (better: the masters then keep the
      exact initial values) or as the policy casts them. `update(grads, state, params)` takes float32 gradients and the
      params as the policy casts them.

    Raises:
      TypeError: a param is neither a float array nor frozen (named by path).
      ValueError: at `update`, a param has another dtype than the policy gives it; grads and params do not match;
        `params` is missing; `remainder_bits` with params that are not bfloat16, or with `optax.apply_updates`.

    Warns:
      UserWarning: at `init`, patterns of `keep_fp32` that fit no param.

    Example:
      >>> tx = keep_master_params(optax.sgd(1.0), "bf16")
      >>> params32 = {"w": jnp.array([1.0])}
      >>> opt_state, params = tx.init(params32), get_policy("bf16").cast_to_param(params32)
      >>> for _ in range(4):  # each step is too small for bfloat16, together they are not
      ...     updates, opt_state = tx.update({"w": jnp.array([-0.002])}, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params["w"][0]), round(float(opt_state.master_params["w"][0]), 4)
      (1.0078125, 1.008)
    """
    policy = get_policy(policy)
    remainder = masters.remainder_dtype(remainder_bits, policy)
    rule = heart.Rule(optimizer_of(as_transformation(inner)), policy=policy, remainder=remainder)
    return _transformation(rule, policy)


def _transformation(rule: heart.Rule, policy: Policy | None) -> Transformation:
    """The optax transform of a rule; `policy` is only said by its state."""
    checks.check_rule(rule, policy)

    def step(grads: PyTree, state: Any, params: PyTree = None, *, adds: bool = False, **extra_args: Any) -> Any:
        scale = checks.check_step(rule, grads, state, params, extra_args, adds=adds)
        new, after = heart.step(rule, grads, state, params, adds=adds, **extra_args)
        if scale is not None:
            scale_reads.note_update(after.scaling.loss_scale, before=scale)
        return new, after

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, StepState]:
        return step(updates, state, params, adds=True, **extra_args)

    transform = Transformation(functools.partial(init, rule, policy), update_fn)
    transform.step, transform.rule, transform.policy = step, rule, policy
    return transform


def init(rule: heart.Rule, policy: Policy | None, params: PyTree) -> StepState:
    """The state before the first step."""
    checks.check_init(rule, params)
    before_state = None if rule.before is None else rule.before.init(params)
    fp8_scales, own = None, params
    if rule.moves_scales is not None:
        of_scales, own = scale_leaves.partition(params)
        fp8_scales = rule.moves_scales.init(of_scales)
    held, weights = None, own
    if rule.policy is not None:
        held, weights = masters.masters_for(rule.optimizer.inner, rule.policy, own, rule.remainder)
    optimizer_state = rule.optimizer.init(weights)
    if rule.scaler is not None and states.has_loss_scale(optimizer_state):
        raise ValueError(
            "mixed_precision must stand once around an optimizer; got two. Call jaxmp.mixed_precision(inner, policy); "
            "with policy= of a TrainState or nnx.Optimizer, which calls it, pass inner alone, all of its chain."
        )
    counts: dict[str, Any] = dict.fromkeys(states.COUNTED)
    if rule.scaler is not None:
        counts = {name: jnp.asarray(x) for name, x in states.COUNTED.items()}
        counts["unscaled_fp16"] = jnp.asarray(policy is not None and policy.uses_float16 and not rule.scales)
    # 16-bit params show by their dtype what the loss should compute in.
    only_computes_low = policy is not None and policy.computes_in_16_bits and policy.param_dtype.itemsize > 2
    kind = states.LowStepState if only_computes_low and rule.scaler is not None else StepState
    fresh = kind(
        scaling=None if rule.scaler is None else states.scaling_state(rule.scaler),
        before_state=before_state,
        master_params=held,
        rounding_count=jnp.zeros((), jnp.int32) if rule.remainder == jnp.int8 else None,
        fp8_scales=fp8_scales,
        optimizer_state=jax.tree.map(casting.strongly_typed, optimizer_state),
        **counts,
    )
    return state_arrays.own_buffers(fresh, (params, rule.scaler))


def apply_gradients(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, **extra_args: Any
) -> tuple[PyTree, Any]:
    """`tx.update` and `optax.apply_updates` in one call: 16-bit params are the rounded masters themselves.

    It is always exact, and moves two bytes per parameter less than the two calls, because it does not read the old
    params. Under `jax.jit`, donate `params` and `opt_state`, and let the step take and return them in the same order:
    XLA pairs donated buffers with results of the same shape in order, and copies a buffer that is paired wrongly.

    Args:
      tx: `mixed_precision(...)`, or any optax transform without one in it.
      grads: as `value_and_grad` returned them, reduced over devices.
      opt_state: state of `tx`.
      params: the model's params.
      **extra_args: passed to `tx.update`.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: a transform around or behind `mixed_precision` (`optax.chain`, `multi_transform`, `MultiSteps`): it
        goes inside, or into `before=`; params have other leaves than those that `tx.init` got; a gradient of another
        shape that would be repeated to the shape of its param.
      TypeError: arguments in another order.

    Warns:
      UnreadLossScale: while a step is traced: `grads` cannot have been scaled by the loss scale in `opt_state`; with or
        without a trace: `grads` were scaled, and `tx` has no loss scale.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = mixed_precision(optax.sgd(1.0), "bf16")
      >>> opt_state, params = tx.init({"w": jnp.ones(1)}), {"w": jnp.ones(1, jnp.bfloat16)}
      >>> params, opt_state = apply_gradients(tx, {"w": jnp.array([0.5])}, opt_state, params)
      >>> params
      {'w': Array([0.5], dtype=bfloat16)}
    """
    is_ours = isinstance(tx, Transformation)
    if not (is_ours and isinstance(opt_state, StepState)) or scale_reads.holds_gradients(params):
        argument_kinds.check(
            "apply_gradients(tx, grads, opt_state, params)",
            tx=("optimizer", tx),
            grads=("tree", grads),
            opt_state=("state", opt_state),
            params=("params", params),
        )
    if is_ours:
        return tx.step(grads, opt_state, params, **extra_args)
    if states.find(opt_state, StepState):
        raise ValueError(
            f"mixed_precision must stand around the whole optimizer; got {type(opt_state).__name__} around its state. "
            f"That goes inside, jaxmp.mixed_precision(optax.chain(clip, inner), policy), and a mean over devices into "
            f"before=."
        )
    tree_paths.check_no_broadcast(grads, params)
    scale_reads.check_not_scaled(grads)
    tx = as_transformation(tx)
    updates, opt_state = inner_update.update(tx, grads, opt_state, params, extra_args)
    return optax.apply_updates(params, updates), opt_state


def unscale(grads: PyTree, opt_state: Any) -> PyTree:
    """The gradients in float32 without the loss scale, to look at: g = float32(grad) / S.

    The update takes the gradients as `value_and_grad` returned them; what changes them (clipping) goes into the
    optimizer. Norms of scaled float16 gradients overflow: take `optax.tree.norm(unscale(grads, opt_state))`.

    Args:
      grads: scaled gradients, as `value_and_grad` returned them.
      opt_state: the state that scaled them, or a TrainState or nnx.Optimizer that holds it.

    Returns:
      The tree of `grads` in float32; the amaxes in place of gradients of fp8 scales stay as they are.

    Raises:
      TypeError: `opt_state` is no state of an optimizer.

    Example:
      >>> import jax.numpy as jnp
      >>> opt_state = mixed_precision(optax.sgd(0.1), "fp16", loss_scale=1024.0).init({"w": jnp.ones(2)})
      >>> unscale({"w": jnp.array([1024.0, 2048.0], jnp.float16)}, opt_state)
      {'w': Array([1., 2.], dtype=float32)}
    """
    states.check_is_state(opt_state, "unscale")
    scale = states.loss_scale_of(getattr(opt_state, "opt_state", opt_state))
    inv_scale = float_bits.reciprocal(scale)

    def unscaled(path: str, g: Any) -> Any:
        return g if scale_leaves.is_scale(path) else g.astype(jnp.float32) * states.beside(inv_scale, g)

    unscaled_grads = tree_paths.map_with_path(unscaled, grads)
    scale_reads.note_unscaled(unscaled_grads, scale)
    return unscaled_grads


def largest_of(dtype: Any) -> float:
    """The largest finite value of a float dtype."""
    try:
        if not isinstance(dtype, bool | int | float):
            return float(jnp.finfo(dtype).max)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"clamp_inf must be a float dtype such as jnp.float16, or None; got {dtype!r}")
