"""Calibration: the scales of all fp8 layers from one batch, before the first step.

Delayed scaling computes its scales from the amaxes of earlier steps, and before the first step there are none. Then all
scales are 1, and a gradient of 1e-6 becomes zero in fp8. Only the last layer gets a gradient that is not zero; in the
next step this layer has a scale, and the layer before it gets a gradient. So with n layers, it takes n steps until a
gradient reaches the first layer.

In `layers.calibrating` each layer casts each tensor with the scale of the tensor's own amax, as current scaling does,
forward and backward. No gradient becomes zero, so one pass observes the amaxes of all layers. The optimizer gets these
amaxes as in a step: as the gradients of the scale leaves, with zeros as all other gradients. Of its results, only the
scale leaves and the amax histories are used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.fp8 import layers, scale_leaves
from jaxmp._src.programs import array_functions
from jaxmp._src.step import argument_kinds, state as states, transform
from jaxmp._src.step.value_and_grad import value_and_grad

_BACKOFF = np.float32(1 / 16)  # of the loss scale, where a gradient overflows


def calibrate(
    fun: Callable[..., Any],
    *args: Any,
    tx: optax.GradientTransformation,
    opt_state: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: str | jmp.Policy | None = None,
    accumulate: int = 1,
    accumulate_argnums: int | Sequence[int] | None = None,
    carry_argnum: int | None = None,
    axis_name: collectives.AxisName = "auto",
    **kwargs: Any,
) -> tuple[PyTree, Any]:
    """Sets the scales of all layers with delayed scaling from one batch, forward and backward, at any depth.

    Call it before the first step, or after weights were loaded that were trained without fp8. Without it, the scales
    are 1 at first: n layers take n steps until a gradient reaches the first layer (`fp8/lost_gradients` of
    `get_metrics` counts those that came as zeros), and weights that were loaded are rounded coarsely.

        params, opt_state = jaxmp.fp8.calibrate(loss_fn, params, batch, tx=tx, opt_state=opt_state)

    It takes the loss function and the arguments of `value_and_grad`, and runs wherever that runs: under jit, pmap,
    shard_map and with shardings. Each tensor is cast with the scale of its own amax. The amaxes (their MAX over devices
    and microbatches) enter the histories as those of one step. Weights, masters, moments, counts and the loss scale
    stay as they are, and what the loss returns beside its value is dropped.

    Args:
      fun: the loss, as for `value_and_grad`.
      *args: its arguments.
      tx: the optimizer: `mixed_precision(...)`, or a chain that holds it.
      opt_state: state of `tx`.
      argnums, has_aux, policy, accumulate, accumulate_argnums, carry_argnum, axis_name: as for `value_and_grad`. The
        arguments in `argnums` are the params of `tx`.
      **kwargs: more arguments of `fun`.

    Returns:
      `(params, opt_state)`: the arguments in `argnums` with new scales, and the state of `tx` with an amax in each
      history.

    Raises:
      TypeError: `opt_state` is no state of an optimizer; arguments in another order.
      ValueError: `opt_state` holds no amax histories (the recipe has no state, or
        the params hold no scales), or holds them inside `optax.MultiSteps`; outside of `jax.jit`, an amax that is not
        finite.

    Example:
      >>> import flax.linen as nn, jaxmp
      >>> model, x = nn.Sequential([nn.Dense(16) for _ in range(5)]), jnp.ones((16, 16)) / 1000
      >>> with jaxmp.fp8.autocast():
      ...     params = jax.jit(model.init)(jax.random.key(0), x)["params"]
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8")
      >>> loss_fn = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)
      >>> params, opt_state = calibrate(loss_fn, params, x, tx=tx, opt_state=tx.init(params), policy="fp8")
      >>> float(jaxmp.get_metrics(opt_state)["fp8/lost_gradients"])
      0.0
    """
    params = _selected(args, argnums)
    argument_kinds.check(
        "calibrate(loss_fn, params, *batch, tx=tx, opt_state=opt_state)",
        loss_fn=("function", fun),
        params=("params", params),
        tx=("optimizer", tx),
        opt_state=("state", opt_state),
    )
    states.check_is_state(opt_state, "calibrate")
    if not states.find(opt_state, states.Fp8State):
        raise ValueError(
            'opt_state must hold amax histories; got none. Call jaxmp.mixed_precision(inner, "fp8").init(params).'
        )
    if not scale_leaves.has_scales(params):
        raise ValueError("params must hold fp8 scales; got none. Pass argnums= of the argument that has them.")
    if any(states.find(steps, states.Fp8State) for steps in states.find(opt_state, optax.MultiStepsState)):
        raise ValueError(
            "mixed_precision must stand around MultiSteps; got it inside. Call mixed_precision(MultiSteps(inner, k), "
            "policy)."
        )
    gradients = value_and_grad(
        fun,
        argnums,
        has_aux,
        policy=policy,
        accumulate=accumulate,
        accumulate_argnums=accumulate_argnums,
        carry_argnum=carry_argnum,
        axis_name=axis_name,
    )

    carried = states.policy_of(opt_state)  # by a TrainState; no part of the pytree that jit takes

    def one_pass(opt_state: Any, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree, Any]:
        """(amaxes, params, opt_state) after a step of the scales."""
        opt_state = opt_state if carried is None else states.with_policy(opt_state, carried)

        def amaxes_at(opt_state: Any) -> PyTree:
            with layers.calibrating():
                return scale_leaves.partition(gradients(*args, opt_state=opt_state, **kwargs)[1])[0]

        amaxes, scaled_by = _finite_amaxes(amaxes_at, opt_state, axis_name)
        observed = jax.tree.map(lambda amax: jnp.where(jnp.isfinite(amax), amax, 0.0), amaxes)  # 0.0: no observation
        params = _selected(args, argnums)
        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), scale_leaves.partition(params)[1])
        with layers.calibrating():
            moved, after = transform.apply_gradients(tx, scale_leaves.merge(observed, zeros), scaled_by, params)
        return amaxes, scale_leaves.partition(moved)[0], states.find(after, states.Fp8State)

    # One program, also where the caller is not inside `jax.jit`: the update of the weights, which nobody reads, is not
    # computed, and no operation is compiled alone.
    inputs = array_functions.Inputs(array_functions.flat_leaves(((opt_state, *args), kwargs)))
    amaxes, scales, histories = jax.jit(lambda values: inputs.call(one_pass, values))(inputs.values)
    _check_finite(amaxes)
    params = _selected(args, argnums)
    scales = tree_paths.leaves_by_path(scales)
    new = tree_paths.map_with_path(lambda path, old: scales.get(path, old), params)
    left = iter(histories)
    return new, jax.tree.map(lambda x: next(left) if _is_fp8(x) else x, opt_state, is_leaf=_is_fp8)


def _selected(args: Sequence[Any], argnums: int | Sequence[int]) -> Any:
    """The arguments that are the params of the optimizer."""
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _is_fp8(x: Any) -> bool:
    return isinstance(x, states.Fp8State)


def _finite_amaxes(
    amaxes_at: Callable[[Any], PyTree], opt_state: Any, axis_name: collectives.AxisName
) -> tuple[PyTree, Any]:
    """The amaxes, and the state with the loss scale that they were computed with: lower where gradients overflow."""
    if not any(_is_scaling(x) for x in jax.tree.leaves(opt_state, is_leaf=_is_scaling)):
        return amaxes_at(opt_state), opt_state

    def at(scale: Float[Array, ""]) -> Any:
        moved = jax.tree.map(
            lambda x: x._replace(loss_scale=scale) if _is_scaling(x) else x, opt_state, is_leaf=_is_scaling
        )
        return states.with_policy(moved, states.policy_of(opt_state))

    def overflows(scale_and_amaxes: tuple[Array, PyTree]) -> Bool[Array, ""]:
        scale, amaxes = scale_and_amaxes
        return ~collectives.all_finite(amaxes, axis_name) & (scale >= 16)

    def lower(scale_and_amaxes: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        scale = scale_and_amaxes[0] * _BACKOFF
        return scale, amaxes_at(at(scale))

    scale = states.loss_scale_of(opt_state)
    scale, amaxes = lax.while_loop(overflows, lower, (scale, amaxes_at(opt_state)))
    return amaxes, at(scale)


def _is_scaling(x: Any) -> bool:
    return isinstance(x, states.LossScaleState) and not isinstance(x, states.NoLossScaleState)


def _check_finite(amaxes: PyTree) -> None:
    for path, amax in tree_paths.leaves_by_path(amaxes).items():
        if isinstance(amax, Tracer) or not amax.is_fully_addressable:
            return
        if not np.all(np.isfinite(amax)):
            raise ValueError(f"amaxes must be finite; got {np.max(amax)} at {path}. Use jaxmp.monitor.first_bad_op.")
