"""One loss scale for several optimizers: torch.amp's rule for GANs, multi-task heads and trunk-and-head training.

All losses of a step are multiplied by the same S. Each optimizer skips because of its own gradients only: an overflow
in one head does not stop the other head. S is adjusted once per step, and falls if *any* optimizer overflowed:

    taken_i = finite_i                    S' = adjust(S, finite_1 and finite_2 and ...)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmp._src.devices import collectives
from jaxmp._src.loss_scale import dynamic, protocol, static
from jaxmp._src.step import heart, scale_reads, state as states, state_arrays, transform


class SharedLossScale(NamedTuple):
    """What `shared_loss_scale` returns: three functions.

    Attributes:
      init: `() -> SharedLossScaleState`. Pass the state as `opt_state=` to `value_and_grad`.
      apply_gradients: `(tx, grads, opt_state, params, scale_state, **extra_args) -> (params, opt_state, scale_state)`,
        once for each optimizer.
      update: `scale_state -> scale_state`, once at the end of a step.
    """

    init: Callable[[], states.SharedLossScaleState]
    apply_gradients: Callable[..., tuple[PyTree, Any, states.SharedLossScaleState]]
    update: Callable[[states.SharedLossScaleState], states.SharedLossScaleState]


def shared_loss_scale(loss_scale: Any = "auto", *, axis_name: collectives.AxisName = "auto") -> SharedLossScale:
    """One loss scale for several optimizers; each of them decides about its own skip.

    The state of the scale knows no policy: pass `policy=` to `value_and_grad`.

    Args:
      loss_scale: `"auto"` for `DynamicLossScale()`, or as for `mixed_precision`.
      axis_name: axes over which devices agree; as for `mixed_precision`.

    Returns:
      A `SharedLossScale`.

    Raises:
      TypeError: no loss scale.

    Warns:
      UnreadLossScale: as `jaxmp.apply_gradients`, while a step is traced: gradients that were not scaled by this scale.

    Example:
      >>> import jaxmp
      >>> shared = shared_loss_scale(jaxmp.DynamicLossScale(4.0, hysteresis=1))
      >>> tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=1.0)  # its own scale is not used
      >>> a = b = jnp.ones(1, jnp.float16)
      >>> state_a, state_b, scale_state = tx.init(jnp.ones(1)), tx.init(jnp.ones(1)), shared.init()
      >>> a, state_a, scale_state = shared.apply_gradients(tx, jnp.array([2.0]), state_a, a, scale_state)
      >>> b, state_b, scale_state = shared.apply_gradients(tx, jnp.array([jnp.inf]), state_b, b, scale_state)
      >>> scale_state = shared.update(scale_state)
      >>> float(a[0]), float(b[0]), float(jaxmp.get_loss_scale(scale_state))
      (0.5, 1.0, 2.0)

    References:
      torch.amp.GradScaler with several optimizers.
    """
    is_auto = isinstance(loss_scale, str) and loss_scale == "auto"
    template: Any = dynamic.DynamicLossScale() if is_auto else protocol.as_loss_scale(loss_scale)
    is_dynamic = not isinstance(template, static.StaticLossScale)

    def init() -> states.SharedLossScaleState:
        fresh = states.SharedLossScaleState(states.scaling_state(template), jnp.ones((), bool))
        return state_arrays.own_buffers(fresh, foreign=template)

    def apply_gradients(
        tx: optax.GradientTransformation,
        grads: PyTree,
        opt_state: Any,
        params: PyTree,
        scale_state: states.SharedLossScaleState,
        **extra_args: Any,
    ) -> tuple[PyTree, Any, states.SharedLossScaleState]:
        if not any(state.scaling is not None for state in states.find(opt_state, states.StepState)):
            raise ValueError(
                "tx of a shared loss scale must unscale; got another. Call jaxmp.mixed_precision(inner, policy)."
            )
        own = scale_state.scaling.loss_scale
        scale_reads.check_scaled(grads, params, own, is_checked=not static.is_one(template), is_static=not is_dynamic)
        finite = heart.all_usable(grads, own, axis_name)
        params, opt_state = transform.apply_gradients(
            tx, grads, opt_state, params, loss_scale=own, grads_finite=finite, **extra_args
        )
        return params, opt_state, scale_state._replace(all_grads_finite=scale_state.all_grads_finite & finite)

    def update(scale_state: states.SharedLossScaleState) -> states.SharedLossScaleState:
        scaler = states.scaler_of(template, scale_state.scaling).adjust(scale_state.all_grads_finite)
        scaling = states.scaling_state(scaler)
        if is_dynamic:
            scale_reads.note_update(scaling.loss_scale, before=scale_state.scaling.loss_scale)
        return states.SharedLossScaleState(scaling, jnp.ones_like(scale_state.all_grads_finite))

    return SharedLossScale(init, apply_gradients, update)
