"""What a step must get: raises for params, gradients, masters and a state that do not fit each other; changes nothing.

Each check looks at types, shapes and dtypes while a step is traced, so the program is the same without this file.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from jaxmp._src.base import ambient, compat, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.distributed import reduce, whole_leaves
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.loss_scale import static
from jaxmp._src.numerics import casting
from jaxmp._src.programs import frozen_leaves, homogeneity
from jaxmp._src.step import inner_update, masters, scale_reads, scales, state as states
from jaxmp._src.step.heart import Rule
from jaxmp._src.step.state import StepState


def check_rule(rule: Rule, policy: Any) -> None:
    """Raises for a dynamic loss scale that never skips; warns of float16 without a loss scale."""
    if not rule.skip_nonfinite and rule.scales and not isinstance(rule.scaler, static.StaticLossScale):
        raise ValueError("a dynamic loss scale must skip overflows; got skip_nonfinite=False. Leave it out.")
    if rule.scaler is not None and not rule.scales and policy is not None and policy.uses_float16:
        warn(
            "float16-without-loss-scale",
            'float16 without a loss scale: gradients below 6e-8 become zero. Leave loss_scale="auto", or use the '
            'policy "bf16", which needs none.',
        )


def check_init(rule: Rule, params: PyTree) -> None:
    """Raises for fp8 scales that nobody moves, or of which others see a part; warns of idle patterns and lost bits."""
    units = tree_paths.boxed_leaves(params)[0]
    paths = [path for path, _ in units]
    is_part = any(map(_is_masked, jax.tree.leaves(params, is_leaf=_is_masked)))  # inside optax.masked, multi_transform
    if rule.policy is not None and not is_part:
        tree_paths.warn_of_idle("keep_fp32", rule.policy.keep_fp32, paths, of="param")
    if rule.moves_scales is not None:
        _check_whole(params)
        scales.check_scales(rule.moves_scales.recipe, scale_leaves.partition(params)[0])
        return
    of_scales = [scale_leaves.is_scale(path) for path in paths]
    if any(of_scales):
        if rule.policy is None:
            frozen = frozen_leaves.frozen_leaves(rule.optimizer.inner, params)
            of_scales = [is_scale and not stays for is_scale, stays in zip(of_scales, frozen, strict=True)]
        scale_leaves.refuse(path for path, is_scale in zip(paths, of_scales, strict=True) if is_scale)


def _check_whole(params: PyTree) -> None:
    if any(map(_is_masked, jax.tree.leaves(params, is_leaf=_is_masked))):
        raise ValueError(
            "mixed_precision must get all fp8 scales; got a part of the params. Put it around optax.multi_transform."
        )


def check_step(rule: Rule, grads: PyTree, state: Any, params: PyTree, extra: dict[str, Any], *, adds: bool) -> Any:
    """Raises for a state, params or gradients that do not fit each other; warns of gradients that were not scaled.

    Returns the dynamic scale of this state that the step will divide by, or None.
    """
    if not isinstance(state, StepState):
        raise TypeError(
            f"opt_state must be that of tx.init; got {type(state).__name__}. Call tx.update(grads, opt_state, params); "
            f"restore dicts by flax.serialization.from_state_dict(tx.init(params), opt_state)."
        )
    for number in (state.skipped, getattr(state.scaling, "loss_scale", None)):
        states.check_not_stacked(number)
    if adds and scale_reads.holds_gradients(params):
        raise TypeError("the arguments are tx.update(grads, opt_state, params); got gradients as params. Swap them.")
    if adds or not _is_usual(rule, grads, state, params):
        _check_trees(rule, grads, state, params, adds=adds)
    if compat.manual_axes():
        reduce.check_branches(state.optimizer_state)
    if rule.scaler is not None:
        expected = jax.eval_shape(lambda: states.scaling_state(rule.scaler))
        if type(state.scaling) is not type(expected):
            got = [type(x).__name__.removesuffix("State") for x in (state.scaling, expected)]
            raise ValueError(
                f"opt_state must be that of tx; got {got[0]}, and tx has {got[1]}, as of another policy. Call "
                f"jaxmp.checkpoint.convert(opt_state, params, to=tx, policy=...)."
            )
    other_scale = extra.get("loss_scale")
    is_static = isinstance(rule.scaler, static.StaticLossScale)
    is_own = other_scale is None and not static.is_one(rule.scaler) and not ambient.FP8_CALIBRATING.value
    own_scale = state.scaling.loss_scale if is_own and not is_static else None
    used_scale: Any = getattr(state.scaling, "loss_scale", None) if other_scale is None else other_scale
    if state.scaling is not None:
        scale_reads.check_scaled(grads, params, state.scaling.loss_scale, is_checked=is_own, is_static=is_static)
    if rule.scales:
        weights, changed = params, grads
        if rule.moves_scales is not None:
            weights, changed = (scale_leaves.partition(tree)[1] for tree in (params, grads))
        scale_reads.check_not_changed(changed, weights, used_scale)
        if rule.before is not None:
            _check_before(rule.before, grads, state.before_state, params)
    if ambient.now().notes.gathered_params:
        held = dict(extra)
        if rule.scaler is not None:  # what a step tells its optimizer
            held |= {"grads_finite": np.bool_(True), "loss_scale": used_scale, "next_loss_scale": used_scale}
        inner = rule.optimizer.inner
        run = functools.partial(inner_update.update, inner, extra_args=held)
        whole_leaves.check(run, inner.init, grads, state.optimizer_state, params)
    return own_scale


def _check_before(before: Any, grads: PyTree, state: Any, params: PyTree) -> None:
    """Warns, while a step is traced, of `before=` whose result is not proportional to the scaled gradients."""
    if not any(isinstance(g, Tracer) for g in jax.tree.leaves(grads)):
        return
    try:
        degrees = homogeneity.degrees_of(lambda g, s, p: before.update(g, s, p)[0], grads, (state, params))
    except Exception:  # the step itself says what is wrong
        return
    if not all(degree in (1.0, homogeneity.EVERY, homogeneity.UNKNOWN) for degree in degrees):
        scale_reads.warn_of_unread(
            "before= gets scaled gradients, so its result must be proportional to them; got a clip or the like. Put it "
            "inside: jaxmp.mixed_precision(optax.chain(clip, inner), policy)."
        )


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


def _check_trees(rule: Rule, grads: PyTree, state: StepState, params: PyTree, *, adds: bool) -> None:
    """Raises for gradients, params and masters that do not fit each other, by path."""
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if not casting.is_float(g):
            raise TypeError(
                f"gradients must be float arrays; got {getattr(g, 'dtype', type(g).__name__)} at "
                f"{tree_paths.path_str(path)}. Call loss, grads = jaxmp.value_and_grad(...)(...)."
            )
    if params is None and (rule.policy is not None or rule.moves_scales is not None):
        raise ValueError("masters need the params; got None. Call tx.update(grads, opt_state, params).")
    if rule.moves_scales is not None:
        _check_whole(params)
    if rule.policy is not None:
        own = params.fast if isinstance(params, optax.LookaheadParams) else params
        tree_paths.check_same_structure(grads, own, "grads", "params")
        _check_masters(rule, state, params, adds=adds)
    if rule.moves_scales is not None:
        scales.check_scales(rule.moves_scales.recipe, scale_leaves.partition(params)[0], state.fp8_scales)
    tree_paths.check_no_broadcast(grads, params)


def _check_masters(rule: Rule, state: StepState, params: PyTree, *, adds: bool) -> None:
    """Raises for params of other dtypes or shapes than the policy and the masters say, and masters of another kind."""
    policy: Any = rule.policy
    if rule.remainder is not None and (adds or isinstance(params, optax.LookaheadParams)):
        got = "tx.update" if adds else "optax.lookahead"
        raise ValueError(
            f"remainder_bits= needs jaxmp.apply_gradients(tx, ...); got {got}. Call it, or leave remainder_bits=None."
        )
    own = scale_leaves.partition(params)[1] if rule.moves_scales is not None else params
    units, treedef = tree_paths.boxed_leaves(own)
    held = masters.by_unit(treedef, state.master_params, own)
    bits = None if rule.remainder is None else 8 * jnp.dtype(rule.remainder).itemsize
    frozen = None
    for i, ((path, unit), master) in enumerate(zip(units, held, strict=True)):
        expected, has_master = policy.param_dtype_of(path), bool(jax.tree.leaves(master))
        leaves = jax.tree.leaves(unit)
        if leaves and not has_master and not _is_masked(master):
            raise ValueError(
                f"a param and its master must come from one opt_state; got {type(master).__name__} as the master of "
                f"{path}, as of a state of another policy. Restore into a state of that policy, then call "
                f"jaxmp.checkpoint.convert(opt_state, params, to=tx, policy=...)."
            )
        for x in leaves:
            is_trained = False
            if not has_master and x.size and casting.is_low_precision(x.dtype):
                frozen = frozen or frozen_leaves.frozen_leaves(rule.optimizer.inner, _described(own))
                is_trained = not frozen[i]
            if is_trained and casting.is_low_precision(expected):
                raise ValueError(
                    f"16-bit params that are trained must have masters in opt_state; got none for {path}: this state "
                    f"was made for another policy, other keep_fp32, or an optimizer that froze it. Call "
                    f"jaxmp.checkpoint.convert(opt_state, params, to=tx, policy=...), with the params of that state."
                )
            if is_trained or (has_master and x.dtype != expected):
                how = "Call policy.cast_to_param(params32), or pass policy= to TrainState or nnx.Optimizer"
                if adds and x.dtype == jnp.float32:
                    how += ", or add updates by optax.apply_updates: eqx.apply_updates and p + u make float32 params"
                if ambient.AUTOCAST.value[1]:
                    how = "jaxmp.autocast is around the whole step, and casts params: put it around the loss alone"
                raise ValueError(
                    f"params must have the dtypes of the policy; got {x.dtype} at {path}, not {expected}. {how}."
                )
        for x, m in zip(leaves, () if _is_masked(master) else jax.tree.leaves(master), strict=False):
            if jnp.shape(x) != m.shape:
                raise ValueError(
                    f"params must have the shapes of their masters; got {jnp.shape(x)} at {path}, and {m.shape}. Pass "
                    f"those that tx.init got."
                )
            kind = m.dtype if masters.is_remainder(m) else None
            if kind != rule.remainder and (kind is not None or x.dtype == jnp.bfloat16):
                raise ValueError(
                    f"masters must fit remainder_bits={bits}; got {m.dtype} at {path}. Call "
                    f"tx.init(jaxmp.get_master_params(opt_state, params))."
                )


def _described(params: PyTree) -> PyTree:
    """Params as `init` gave them to the optimizer: floats in float32, and nothing of devices."""
    wide = lambda x: jnp.float32 if casting.is_float(x) else x.dtype  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide(x)), params)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
