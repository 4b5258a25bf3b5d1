"""Guards of the optimizer's side of a step: the public `mixed_precision`, its parts, and `apply_gradients`.

Each looks at what it gets, then calls the function of the same name in `step.transform`. A step looks at types, shapes
and dtypes only, so its program is the same without this file.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._src.base import ambient, compat, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives
from jaxmp._src.distributed import reduce
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.guard import (
    argument_kinds,
    averages,
    check_optimizer,
    extra_arguments,
    fp8_scales,
    scale_reads,
    whole_leaves,
)
from jaxmp._src.loss_scale import static
from jaxmp._src.numerics import casting
from jaxmp._src.programs import frozen_leaves
from jaxmp._src.step import masters, shared_scale, state as states, transform
from jaxmp._src.step.heart import Rule
from jaxmp._src.step.state import StepState
from jaxmp._src.step.transform import Transformation


def guarded(make: Callable[..., Any]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """`make`, a function that makes a transform, whose transforms are guarded."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        if kwargs.get("skip_if") is not None:
            kwargs["skip_if"] = functools.partial(_one_bool, kwargs["skip_if"])
        tx: Transformation = make(*args, **kwargs)
        rule = tx.rule
        _look_at_rule(rule, tx.policy)

        def init_fn(params: PyTree) -> Any:
            _look_at_params(rule, params)
            state: Any = tx.init(params)
            _look_at_state(rule, state, params)
            return state

        def looked_at(run: Any, adds: bool, /, grads: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
            scale = _look_at_step(rule, grads, state, params, extra, adds=adds)
            new, after = run(grads, state, params, **extra)
            if scale is not None:
                scale_reads.note_made(after.scaling.loss_scale, before=scale)
            return new, after

        update: Any = functools.partial(looked_at, tx.update, True)
        guarded = Transformation(init_fn, update)
        guarded.step, guarded.rule = functools.partial(looked_at, tx.step, False), rule
        guarded.policy = tx.policy
        return guarded

    return made


mixed_precision = guarded(transform.mixed_precision)
unscale_and_skip = guarded(transform.unscale_and_skip)
keep_master_params = guarded(transform.keep_master_params)


@functools.wraps(transform.apply_gradients)
def apply_gradients(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, **extra_args: Any
) -> tuple[PyTree, Any]:
    is_usual = isinstance(tx, Transformation) and isinstance(opt_state, StepState) and not extra_args
    if not is_usual or scale_reads.holds_gradients(params):
        _look_at_call(tx, grads, opt_state, params, extra_args)
    return transform.apply_gradients(tx, grads, opt_state, params, **extra_args)


@functools.wraps(shared_scale.shared_loss_scale)
def shared_loss_scale(
    loss_scale: Any = "auto", *, axis_name: collectives.AxisName = "auto"
) -> shared_scale.SharedLossScale:
    shared = shared_scale.shared_loss_scale(loss_scale, axis_name=axis_name)
    if isinstance(shared_scale.template_of(loss_scale), static.StaticLossScale):
        return shared

    def apply_gradients(tx: Any, grads: PyTree, opt_state: Any, params: PyTree, scale_state: Any, **extra: Any) -> Any:
        scale_reads.check(grads, scale_state.scaling.loss_scale)
        return shared.apply_gradients(tx, grads, opt_state, params, scale_state, **extra)

    def update(scale_state: Any) -> Any:
        after = shared.update(scale_state)
        scale_reads.note_made(after.scaling.loss_scale, before=scale_state.scaling.loss_scale)
        return after

    return shared._replace(apply_gradients=apply_gradients, update=update)


def _look_at_call(tx: Any, grads: PyTree, opt_state: Any, params: PyTree, extra_args: dict[str, Any]) -> None:
    """Raises for arguments in a wrong order, extra arguments that nobody takes, and transforms around ours."""
    argument_kinds.check(
        "apply_gradients(tx, grads, opt_state, params)",
        tx=("optimizer", tx),
        grads=("tree", grads),
        opt_state=("state", opt_state),
        params=("params", params),
    )
    extra_arguments.check(tx, extra_args)
    if isinstance(tx, Transformation):
        return
    if found := states.find(opt_state, StepState):
        name = "mixed_precision" if found[0].scaling is not None else "keep_master_params"
        raise ValueError(
            f"apply_gradients writes params from their masters, so {name} must stand around the whole optimizer; got a "
            f"transform around or behind it ({type(opt_state).__name__} in its state). What must come first (a mean "
            f"over devices) goes into jaxmp.mixed_precision(inner, policy, before=...); all else (clipping, "
            f"optax.MultiSteps, multi_transform, masked, ema_params) goes inside: "
            f"jaxmp.mixed_precision(optax.chain(clip, inner), policy)."
        )
    tree_paths.check_no_broadcast(grads, params)
    scale_reads.check_not_scaled(grads)


def _look_at_rule(rule: Rule, policy: Any) -> None:
    is_dynamic = rule.scales and not isinstance(rule.scaler, static.StaticLossScale)
    if not rule.skip_nonfinite and is_dynamic:
        raise ValueError(
            "a dynamic loss scale finds its value by overflow, so steps that overflow must be skipped; got "
            "skip_nonfinite=False. Use a static loss_scale (a number) or none, or leave skip_nonfinite=True."
        )
    if rule.scaler is not None and not rule.scales and policy is not None and policy.uses_float16:
        warn(
            "float16-without-loss-scale",
            'float16 without a loss scale: gradients below 6e-8 become zero. Leave loss_scale="auto" for a '
            'DynamicLossScale, or use the policy "bf16", which needs none. get_metrics reports this as unscaled_fp16.',
        )


def _look_at_params(rule: Rule, params: PyTree) -> None:
    """Raises for fp8 scales that nobody moves, or of which others see a part; warns of idle patterns."""
    units = tree_paths.boxed_leaves(params)[0]
    paths = [path for path, _ in units]
    parts = jax.tree.leaves(params, is_leaf=_is_masked)
    is_part = any(map(_is_masked, parts))  # inside optax.masked or multi_transform
    if rule.policy is not None and not is_part:
        tree_paths.warn_of_idle("keep_fp32", rule.policy.keep_fp32, paths, of="param")
    if rule.moves_scales is not None:
        _refuse_part(parts)
        fp8_scales.check(rule.moves_scales.recipe, scale_leaves.partition(params)[0])
        return
    of_scales = [scale_leaves.is_scale(path) for path in paths]
    if any(of_scales):
        if rule.policy is None:
            frozen = frozen_leaves.frozen_leaves(rule.optimizer.inner, params)
            of_scales = [is_scale and not stays for is_scale, stays in zip(of_scales, frozen, strict=True)]
        scale_leaves.refuse(path for path, is_scale in zip(paths, of_scales, strict=True) if is_scale)


def _refuse_part(leaves: list[Any]) -> None:
    """Raises for fp8 scales of a part of the params."""
    if any(map(_is_masked, leaves)):
        raise ValueError(
            "the scales of all fp8 layers must move, also beside frozen weights: gradients go through these layers, "
            "and become zero by a scale that stays. Got a part of the params (optax.MaskedNode() in place of others). "
            "Put mixed_precision around optax.multi_transform, masked or partition, not inside: it keeps scales away "
            "from labels and masks."
        )


def _look_at_state(rule: Rule, state: StepState, params: PyTree) -> None:
    """Raises for an optimizer that unscales itself; warns of one that divides by what underflows."""
    if rule.scaler is not None and states.has_loss_scale(state.optimizer_state):
        raise ValueError(
            "mixed_precision (or unscale_and_skip) must stand once around an optimizer, as it unscales the gradients; "
            "got an optimizer inside of it that holds another. Take one of them away: in "
            "jaxmp.mixed_precision(optax.chain(clip, inner), policy), or as tx= beside policy=, the chain is of optax."
        )
    averages.check(state.optimizer_state)
    if any(getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(state.optimizer_state)):
        check_optimizer.warn_of_underflow(rule.optimizer.inner, params, grad_dtype=jnp.float32)


def _look_at_step(rule: Rule, grads: PyTree, state: Any, params: PyTree, extra: dict[str, Any], *, adds: bool) -> Any:
    """Raises for a state, params or gradients that do not fit each other; warns of gradients that were not scaled.

    Returns the dynamic scale of this state that the step will divide by, or None.
    """
    if not isinstance(state, StepState):
        raise TypeError(
            f"mixed_precision (or a part of it) needs the state that its own init made; got {type(state).__name__}. "
            f"The order is tx.update(grads, opt_state, params) and jaxmp.apply_gradients(tx, grads, opt_state, params)."
        )
    if adds or not _is_usual(rule, grads, state, params):
        _look_at_trees(rule, grads, state, params, adds=adds)
    if compat.manual_axes():
        _look_at_branches(state.optimizer_state)
    is_dynamic = rule.scales and not isinstance(rule.scaler, static.StaticLossScale)
    own_scale = state.scaling.loss_scale if is_dynamic and extra.get("loss_scale") is None else None
    if state.scaling is not None:
        scale_reads.check(grads, state.scaling.loss_scale, is_dynamic=own_scale is not None)
    if rule.scales:
        scale_reads.check_not_changed(grads if rule.moves_scales is None else scale_leaves.partition(grads)[1])
    if ambient.now().notes.gathered_params:
        held = extra | _of_a_step(rule, state, extra)
        of_weights = params if state.master_params is None else casting.cast_floats(params, jnp.float32)
        whole_leaves.check(rule.optimizer.inner, grads, state.optimizer_state, of_weights, held)
    return own_scale


def _is_usual(rule: Rule, grads: PyTree, state: StepState, params: PyTree) -> bool:
    """Whether trees are as the usual policies make them: each param a cast of its float32 master, or float32 without.

    And each gradient of a param's shape. All else is looked at by path.
    """
    own, held = jax.tree.leaves(params), jax.tree.leaves(state.master_params, is_leaf=_is_masked)
    policy = rule.policy if rule.moves_scales is None and rule.remainder is None else None
    if policy is None or jax.tree.structure(grads) != jax.tree.structure(params) or len(own) != len(held):
        return False
    expected = [
        (jnp.float32, p.shape)
        if isinstance(m, optax.MaskedNode)
        else (policy.param_dtype, m.shape if m.dtype == jnp.float32 else None)
        for p, m in zip(own, held, strict=True)
    ]
    return all(
        (p.dtype, p.shape) == wanted and getattr(g, "shape", None) == p.shape and g.dtype in (p.dtype, jnp.float32)
        for g, p, wanted in zip(jax.tree.leaves(grads), own, expected, strict=True)
    )


def _look_at_trees(rule: Rule, grads: PyTree, state: StepState, params: PyTree, *, adds: bool) -> None:
    """Raises for gradients, params and masters that do not fit each other, by path."""
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if not casting.is_float(g):
            _refuse_gradient(path, g)
    if params is None and (rule.policy is not None or rule.moves_scales is not None):
        raise ValueError("master params need the params; got params=None. Call tx.update(grads, opt_state, params)")
    if rule.moves_scales is not None:
        _refuse_part(jax.tree.leaves(params, is_leaf=_is_masked))
    if rule.policy is not None:
        own = params.fast if isinstance(params, optax.LookaheadParams) else params
        tree_paths.check_same_structure(grads, own, "grads", "params")
        _look_at_masters(rule, state, params, adds=adds)
    if rule.moves_scales is not None:
        fp8_scales.check(rule.moves_scales.recipe, scale_leaves.partition(params)[0], state.fp8_scales)
    tree_paths.check_no_broadcast(grads, params)


def _one_bool(skip_if: Any, grads: PyTree, metrics: dict[str, Any]) -> Any:
    """What `skip_if` returned, which must be one bool: a number would skip each step where it is not 0."""
    given = skip_if(grads, metrics)
    x = given if isinstance(given, jax.Array) else np.asarray(given)
    if x.shape != () or x.dtype != np.bool_:
        raise TypeError(
            f"skip_if(grads, metrics) must return one bool, True to skip the step; got {x.dtype}{list(x.shape)}. "
            f"Compare, and reduce: jnp.any(x > limit)."
        )
    return jnp.asarray(x)


def _of_a_step(rule: Rule, state: StepState, extra: dict[str, Any]) -> dict[str, Any]:
    """What a step tells its optimizer beside the user's extra arguments, as far as it is known before the step."""
    if rule.scaler is None:
        return {}
    scale = extra.get("loss_scale")
    scale = state.scaling.loss_scale if scale is None else scale
    return {"grads_finite": jnp.ones((), bool), "loss_scale": scale, "next_loss_scale": scale}


def _refuse_gradient(path: Any, g: Any) -> None:
    raise TypeError(
        f"gradients must be float arrays; got {getattr(g, 'dtype', type(g).__name__)} at {tree_paths.path_str(path)}. "
        + (
            "Differentiate float params only, and keep others outside of the tree."
            if hasattr(g, "dtype")
            else "Pass the gradients alone: loss, grads = jaxmp.value_and_grad(...)(...)."
        )
    )


def _look_at_masters(rule: Rule, state: StepState, params: PyTree, *, adds: bool) -> None:
    """Raises for params of other dtypes or shapes than the policy and the masters say."""
    policy: Any = rule.policy
    if adds and rule.remainder is not None:
        raise ValueError(
            "params with split masters (remainder_bits=) must be written together with them; got tx.update. Call "
            "params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params), and put mixed_precision "
            "around the whole optimizer, not inside optax.multi_transform, masked or MultiSteps."
        )
    if rule.remainder is not None and isinstance(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead has gradients for one of its two copies of the params only, and split masters are "
            "written for all; got remainder_bits= with it. Leave remainder_bits=None."
        )
    own = scale_leaves.partition(params)[1] if rule.moves_scales is not None else params
    units, treedef = tree_paths.boxed_leaves(own)
    suspects = []
    for i, ((path, unit), master) in enumerate(
        zip(units, masters.by_unit(treedef, state.master_params, own), strict=True)
    ):
        expected, is_frozen = policy.param_dtype_of(path), _is_masked(master)
        for x in jax.tree.leaves(unit):
            if not is_frozen and x.dtype != expected:
                raise ValueError(
                    f"params at update must have the dtypes of the policy; got {x.dtype} at {path}, not {expected}. "
                    f"After opt_state = tx.init(params32), train params = policy.cast_to_param(params32); with jaxmp's "
                    f"TrainState.create and nnx.Optimizer, pass policy=, the one that tx was made with."
                )
            if casting.is_low_precision(x.dtype) and not casting.is_low_precision(expected):
                suspects.append((i, path, x.dtype))
        if not is_frozen:
            _look_at_master(rule, path, unit, master)
    frozen = frozen_leaves.frozen_leaves(rule.optimizer.inner, own) if suspects else []
    for i, path, dtype in suspects:
        if not frozen[i]:
            raise ValueError(
                f"a 16-bit param that is trained needs a policy that gives it a master; got {dtype} at {path}, where "
                f"the policy says {policy.param_dtype_of(path)}. Train policy.cast_to_param(params32), choose a 16-bit "
                f"policy, or freeze the leaf with optax.set_to_zero."
            )


def _look_at_master(rule: Rule, path: str, unit: PyTree, master: PyTree) -> None:
    """Raises for a master of another kind than the transform was made for, or of another shape."""
    wanted = None if rule.remainder is None else 8 * jnp.dtype(rule.remainder).itemsize
    start = "start from the float32 masters: jaxmp.get_master_params and jaxmp.wrap_state."
    for param, x in zip(jax.tree.leaves(unit), jax.tree.leaves(master), strict=False):
        if jnp.shape(param) != x.shape:
            raise ValueError(
                f"params must have the shapes of their masters; got {jnp.shape(param)} at {path}, and its master "
                f"has {x.shape}. Pass the params that tx.init got, or make a new state for these by tx.init."
            )
        if masters.is_remainder(x) and x.dtype != rule.remainder:
            raise ValueError(
                f"the state must hold the kind of masters that the transform keeps; got {x.dtype} remainders at "
                f"{path}, with remainder_bits={wanted}. Make tx with remainder_bits={8 * x.dtype.itemsize}; to "
                f"change it, {start}"
            )
        if not masters.is_remainder(x) and rule.remainder is not None and param.dtype == jnp.bfloat16:
            raise ValueError(
                f"the state must hold the kind of masters that the transform keeps; got a {x.dtype} master at "
                f"{path}, with remainder_bits={wanted}. Make tx without remainder_bits; to change it, {start}"
            )


def _look_at_branches(optimizer_state: Any) -> None:
    """Raises for `reduce_gradients` inside a transform that runs it in a branch.

    Before the branch the gradients of a device are its own: what MultiSteps adds up would differ between devices, and
    what apply_if_finite decides too. In pmap, and where jax tracks no axes, MultiSteps decides the same everywhere.
    """
    tracked = any(map(compat.is_tracked, compat.manual_axes()))
    for kind, name in _BRANCHES.items():
        for state in states.find(optimizer_state, kind):
            in_few_bytes = bool(states.find(state, reduce.UnsentState))
            if not in_few_bytes and not states.find(state, reduce.ReducedState):
                continue
            by_device = kind is optax.ApplyIfFiniteState or bool(jax.tree.leaves(getattr(state, "skip_state", ())))
            if tracked or by_device or (in_few_bytes and kind is optax.MultiStepsState):
                raise ValueError(
                    f"reduce_gradients must come before a transform that decides whether to take a step, which must "
                    f"see the same gradients on all devices; got it inside {name}. Put it before: "
                    f"jaxmp.mixed_precision({name}(optimizer, ...), policy, before=jaxmp.reduce_gradients(...))."
                )


_BRANCHES = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyTransformState: "optax.conditionally_transform",
}


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
