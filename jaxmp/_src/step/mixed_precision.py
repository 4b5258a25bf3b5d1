"""`mixed_precision`: all parts as one optax transform, and `apply_gradients`, the step with it.

    mixed_precision(inner, policy)
        == unscale_and_skip(split_fp8(update_amax(recipe), keep_master_params(inner, policy)), loss_scale)

From the outside to the inside: gradients come scaled and in 16 bits. `unscale_and_skip` unscales them to float32,
decides whether the step is taken, and selects. `keep_master_params` replaces 16-bit params by float32 masters. `inner`
is any optimizer; it does not depend on these steps.
"""

from typing import Any

import jax
import jmp
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.loss_scale import dynamic
from jaxmp._src.numerics import casting
from jaxmp._src.step import (
    argument_kinds,
    before_unscaling,
    extra_arguments,
    fp8_scales,
    in_place,
    master_params,
    read_state,
    scale_reads,
    state_arrays,
    state_tuples,
    unscale,
)
from jaxmp._src.step.policy import get_policy


def mixed_precision(
    inner: optax.GradientTransformation,
    policy: str | jmp.Policy,
    *,
    loss_scale: Any = "auto",
    axis_name: collectives.AxisName = "auto",
    recipe: fp8_scales.Recipe = None,
    skip_nonfinite: bool = True,
    skip_if: unscale.SkipIf | None = None,
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
      skip_nonfinite: whether to skip steps with non-finite gradients, with any policy; see `unscale_and_skip`.
      skip_if: `(grads, metrics) -> bool[]`, your own reason to skip a step.
      remainder_bits: None keeps float32 masters. With 16 or 8, bfloat16 params are the upper half of their masters, and
        the state keeps the rest in two bytes or one. For `apply_gradients` only; see `keep_master_params`.
      clamp_inf: None skips a step with an infinite gradient. `jnp.float16` replaces it by 65504 / loss scale and takes
        the step; see `unscale_and_skip`.

    Returns:
      An optax transform. `init` takes params in float32, or as the policy casts them. `update` takes `loss_scale=` and
      `grads_finite=` as extra arguments that replace its own (see `shared_loss_scale`), and passes all others to
      `inner`.

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
      >>> params["w"][0, 0], float(read_state.get_loss_scale(opt_state))
      (Array(0.999, dtype=float16), 65536.0)

    References:
      Micikevicius et al. 2018 (arXiv 1710.03740); Megatron-LM's Float16OptimizerWithFloat16Params.
    """
    policy = get_policy(policy)
    if isinstance(loss_scale, str):
        if loss_scale != "auto":
            raise ValueError(
                f'loss_scale must be "auto", None, a number or a loss-scale object; got {loss_scale!r}. '
                f'"auto" is dynamic for float16 params; for the rule of another system use, for instance, '
                f'loss_scale=jaxmp.DynamicLossScale.preset("megatron").'
            )
        loss_scale = dynamic.DynamicLossScale() if policy.uses_float16 else None
    chain = master_params.keep_master_params(inner, policy, remainder_bits=remainder_bits)
    recipe = policy.recipe if recipe is None else recipe
    if policy.fp8_weights and not fp8_scales.is_delayed(recipe):
        raise ValueError(
            f"fp8_weights=True stores kernels with the scales of delayed scaling; got the recipe "
            f'{recipe!r}. Pass recipe=jaxmp.fp8.DelayedScaling(), or use the policy "fp8".'
        )
    if fp8_scales.is_delayed(recipe):
        chain = fp8_scales.split_fp8(fp8_scales.update_amax(recipe), chain)
    return unscale.unscale_and_skip(
        chain,
        loss_scale,
        axis_name=axis_name,
        skip_nonfinite=skip_nonfinite,
        skip_if=skip_if,
        policy=policy,
        clamp_inf=clamp_inf,
    )


def apply_gradients(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, **extra_args: Any
) -> tuple[PyTree, Any]:
    """`tx.update` and `optax.apply_updates` in one call: 16-bit params are the rounded masters themselves.

    It is always exact, and moves two bytes per parameter less than the two calls, because it does not read the old
    params. Under `jax.jit`, donate `params` and `opt_state`, and let the step take and return them in the same order:
    XLA pairs donated buffers with results of the same shape in order, and copies a buffer that is paired wrongly.

    Args:
      tx: `mixed_precision(...)`, a chain that ends in it (nothing may follow it), or any optax transform.
      grads: as `value_and_grad` returned them, reduced over devices.
      opt_state: state of `tx`.
      params: the model's params.
      **extra_args: passed to `tx.update`.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: a transform follows `mixed_precision` in a chain, or changes its updates around it
        (`optax.MultiSteps`, `apply_if_finite`, `lookahead`, `contrib.schedule_free`); `tx` moves only some of the fp8
        scales; params have other leaves than those that `tx.init` got; a gradient of another shape that would be
        repeated to the shape of its param; a gradient that `optax.masked` around it returns as an update; a transform
        that may change updates behind `ema_params` in a chain inside.
      TypeError: arguments in another order; an extra argument that no transform of `tx` takes (a misspelt one).

    Warns:
      UserWarning: a transform before `mixed_precision` in a chain that looks at the size of the scaled gradients (a
        clip).
      UnreadLossScale: while a step is traced: `grads` cannot have been scaled by the loss scale in `opt_state`; with or
        without a trace: `grads` were scaled, and `tx` has no loss scale.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = mixed_precision(optax.sgd(1.0), "bf16")
      >>> params = {"w": jnp.ones(1, jnp.bfloat16)}
      >>> params, opt_state = apply_gradients(tx, {"w": jnp.array([0.5])}, tx.init(params), params)
      >>> params
      {'w': Array([0.5], dtype=bfloat16)}
    """
    argument_kinds.check(
        "apply_gradients(tx, grads, opt_state, params)",
        tx=("optimizer", tx),
        grads=("tree", grads),
        opt_state=("state", opt_state),
        params=("params", params),
    )
    extra_arguments.check(tx, extra_args)
    read_state.check_wrappers(opt_state, grads)
    read_state.masters_of(opt_state, params)  # raises for params of another tree
    tree_paths.check_no_broadcast(grads, params)
    fp8_scales.check_moves_all(opt_state, params)
    if not read_state.find(opt_state, state_tuples.UnscaleState):
        scale_reads.check_not_scaled(grads)
    destination = in_place.Destination(params, grads)
    if read_state.find(opt_state, state_tuples.UnscaleState) or read_state.find(opt_state, state_tuples.MasterState):
        extra_args["destination"] = destination
    tx = in_place.as_transformation(tx)
    before = opt_state
    updates, opt_state = extra_arguments.update(tx, grads, opt_state, params, extra_args)
    before_unscaling.check(tx, destination, before, params)
    _check_is_last(destination, updates, opt_state, params)
    if "destination" in extra_args:
        _check_no_gradient(grads, updates)
    if destination.written is not None:
        with jax.named_scope("jaxmp.write_params"):
            return stored_kernels.write(destination.written, read_state.masters_of(opt_state, params)), opt_state
    with jax.named_scope("jaxmp.write_params"):
        units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
        masters = treedef.flatten_up_to(read_state.masters_of(opt_state, params))
        moves = treedef.flatten_up_to(updates)
        new_units = [_moved(p, m, u, destination) for p, m, u in zip(units, masters, moves, strict=True)]
        new_params = treedef.unflatten(new_units)
        return stored_kernels.write(new_params, treedef.unflatten(masters)), opt_state


def _check_no_gradient(grads: PyTree, updates: PyTree) -> None:
    """Raises if an update is the very gradient, scaled as it came: `optax.masked` hands on those that it leaves out."""
    given = {id(g) for g in jax.tree.leaves(grads)}
    path = next((path for path, u in tree_paths.leaves_by_path(updates).items() if id(u) in given), None)
    if path is not None:
        raise ValueError(
            f"the update of a param must come from an optimizer; got the gradient itself as the update of {path}. "
            f"optax.masked hands on the gradients of what it leaves out. To keep a param as it is: "
            f'jaxmp.mixed_precision(optax.multi_transform({{"train": inner, "freeze": optax.set_to_zero()}}, labels), '
            f"policy)."
        )


def _check_is_last(destination: in_place.Destination, updates: PyTree, opt_state: Any, params: PyTree) -> None:
    """Raises if a transform changed updates that are not used: those of params that are written from their masters."""
    treedef = jax.tree.structure(params, is_leaf=tree_paths.is_box)
    masters = treedef.flatten_up_to(read_state.masters_of(opt_state, params))
    unused = [u for u, m in zip(treedef.flatten_up_to(updates), masters, strict=True) if m is not None]
    unused = updates if destination.written is not None else unused
    kinds = (state_tuples.UnscaleState, state_tuples.MasterState)
    if jax.tree.leaves(unused) and not destination.is_last(unused, opt_state, kinds):
        raise ValueError(
            "nothing may follow mixed_precision (or keep_master_params) in a chain: apply_gradients writes params from "
            "their masters, and would ignore what follows; got a chain with a transform behind it, or one around it "
            "that changes its updates. Put that transform inside: jaxmp.mixed_precision(optax.chain(inner, "
            "what_follows), policy)."
        )


def _moved(param: Any, master_param: Any, update: Any, destination: in_place.Destination) -> Any:
    if any(stored_kernels.is_stored(x) for x in jax.tree.leaves(param)):
        return param  # written last, with the new scale
    if master_param is None:
        return jax.tree.map(destination.sum_of, param, update)
    leaves, treedef = jax.tree.flatten(param)  # either may be in a box (nnx.Param)
    new = [master_params.model_param(m, p.dtype) for p, m in zip(leaves, jax.tree.leaves(master_param), strict=True)]
    return treedef.unflatten(new)


def check_trains_casts(opt_state: Any) -> None:
    """Raises a ValueError if `opt_state` has no masters: such an optimizer cannot train params that `policy=` casts."""
    if not read_state.find(opt_state, state_tuples.UnscaleState):
        raise ValueError(
            "policy= casts the params, and only an optimizer with masters can train them; got tx without masters. "
            "Wrap it: tx = jaxmp.mixed_precision(tx, policy)."
        )


def wrap_state(tx: optax.GradientTransformation, inner_state: Any, params: PyTree) -> Any:
    """A state of `tx` that continues where a plain optimizer stopped: `inner_state` moved in, in float32.

    For a run that was trained without jaxmp, in any dtype: 16-bit moments become float32, counts stay. Leaves are
    matched by path, so dicts may have become FrozenDicts (or nnx States) since.

    Args:
      tx: `mixed_precision(inner, policy)`.
      inner_state: state of `inner`, made for the same params.
      params: the model's params; masters start from them. In float32 if you have them.

    Returns:
      `opt_state` for `tx`.

    Raises:
      ValueError: `tx` keeps no masters; a leaf is missing, left over or of another shape (named by path).

    Example:
      >>> import jax.numpy as jnp
      >>> adam, params = optax.adam(1e-3), {"w": jnp.ones(2, jnp.bfloat16)}
      >>> old = adam.init(params)  # bfloat16 moments
      >>> opt_state = wrap_state(mixed_precision(adam, "bf16"), old, params)
      >>> optax.tree.get(opt_state, "mu")["w"].dtype.name
      'float32'
    """
    fresh = tx.init(params)
    if len(read_state.find(fresh, state_tuples.MasterState)) != 1:
        raise ValueError(
            "wrap_state moves a state into one mixed_precision(inner, policy); got a tx that holds none, or several"
        )
    given = tree_paths.leaves_by_path(inner_state)

    def take(path: str, x: Any) -> Any:
        if path not in given:
            raise ValueError(
                f"the state to wrap must come from the same optimizer and params; {path} is missing from it. "
                f"It has {', '.join(sorted(given)[:4])}, ..."
            )
        old = given.pop(path)
        if jax.numpy.shape(old) != x.shape:
            raise ValueError(
                f"the state to wrap must fit the params; got shape {jax.numpy.shape(old)} at {path}, expected {x.shape}"
            )
        return (
            casting.cast_float(jax.numpy.asarray(old), x.dtype)
            if casting.is_float(x)
            else jax.numpy.asarray(old, x.dtype)
        )

    def move_in(node: Any) -> Any:
        if not isinstance(node, state_tuples.MasterState):
            return node
        return node._replace(master_inner=tree_paths.map_with_path(take, node.master_inner))

    moved = jax.tree.map(move_in, fresh, is_leaf=lambda x: isinstance(x, state_tuples.MasterState))
    if given:
        raise ValueError(
            f"the state to wrap must come from the same optimizer and params; got {next(iter(given))}, for which "
            f"mixed_precision's optimizer has no place"
        )
    return state_arrays.own_buffers(moved, foreign=(inner_state, params))
