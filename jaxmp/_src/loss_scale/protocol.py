"""Loss scaling: the arithmetic, with no optimizer in sight.

float16 holds nothing below 6e-8, and most gradients of a trained network are smaller than that. So the loss is
multiplied by a scale S before differentiation and the gradients are divided by S after: they travel through float16
2^k times larger than they are. S must be as large as possible without any gradient passing 65504. A *dynamic* scale
finds that value by trial:

    a step with a non-finite gradient is skipped, and (once `hysteresis` of them have come)  S <- max(S * backoff, min)
    after `growth_interval` steps without one                                               S <- min(S * growth, max)

*Hysteresis* tells an S that is too large from a single bad batch: of `hysteresis` overflows only the last one lowers
S. When the count is refilled is where systems differ: Megatron-LM refills it when S grows (`refill="growth"`), apex's
kernel at every good step (`refill="step"`). In between, once the count is used up, *each* further overflow lowers S.

Every object here is immutable and a pytree whose leaves are arrays, and follows jmp's protocol: `.loss_scale`,
`.scale(tree)`, `.unscale(tree)`, `.adjust(grads_finite)`. A class of your own with these four can be used as well.

    Megatron-LM  megatron/core/optimizer/grad_scaler.py     torch   torch/amp/grad_scaler.py
    DeepSpeed    runtime/fp16/loss_scaler.py                apex    csrc/update_scale_hysteresis.cu, apex/amp/scaler.py
    Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740)

Where we differ from all of them: the scale is clamped at both ends by default (theirs reach inf, or 0, and stay).
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.loss_scale.dynamic import DynamicLossScale
from jaxmp._src.loss_scale.static import NoOpLossScale, StaticLossScale, is_number


@runtime_checkable
class LossScale(Protocol):
    """What a loss-scale object must offer: jmp's protocol. Its leaves are arrays that `adjust` keeps in dtype."""

    @property
    def loss_scale(self) -> Any: ...
    def scale(self, tree: PyTree) -> PyTree: ...
    def unscale(self, tree: PyTree) -> PyTree: ...
    def adjust(self, grads_finite: Any) -> Any: ...


def as_loss_scale(loss_scale: Any) -> Any:
    """The loss-scale object that an argument stands for.

    Args:
      loss_scale: None (no scaling), a Python number or scalar array (static), an object of this module, one of jmp
        (taken over with its scale, period, factor and floor), or any object with jmp's protocol.

    Returns:
      An object with `.loss_scale`, `.scale`, `.unscale` and `.adjust`.

    Raises:
      TypeError: none of these.
    """
    if loss_scale is None or isinstance(loss_scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    if isinstance(loss_scale, jmp.StaticLossScale):
        return StaticLossScale(jnp.asarray(loss_scale.loss_scale, jnp.float32))
    if isinstance(loss_scale, jmp.DynamicLossScale):
        return _from_jmp(loss_scale)
    if is_number(loss_scale):
        return StaticLossScale(loss_scale)
    if isinstance(loss_scale, (jax.Array, np.ndarray, np.generic)) and jnp.ndim(loss_scale) == 0:
        return StaticLossScale(jnp.asarray(loss_scale, jnp.float32))
    missing = [n for n in ("loss_scale", "scale", "unscale", "adjust") if not hasattr(loss_scale, n)]
    if missing or isinstance(loss_scale, type):
        raise TypeError(
            f"loss_scale must be 'auto', None, a number or an object with jmp's protocol (.loss_scale, .scale, "
            f".unscale, .adjust); got {loss_scale!r}"
            + (", a class: call it" if isinstance(loss_scale, type) else f", which lacks .{missing[0]}")
        )
    if any(x is loss_scale for x in jax.tree.leaves(loss_scale)):
        raise TypeError(
            f"a loss scale must be a pytree, so that its arrays can live in opt_state; {type(loss_scale).__name__} is "
            f"none. Register it with jax.tree_util.register_dataclass."
        )
    return loss_scale


def _from_jmp(scaler: jmp.DynamicLossScale) -> DynamicLossScale:
    """jmp's rule with our arithmetic: its own loses `min_loss_scale` in a pytree round trip, and fails on float16."""
    new = DynamicLossScale.preset(
        "torch",
        initial_scale=jnp.asarray(scaler.loss_scale, jnp.float32),
        growth_factor=float(scaler.factor),
        backoff_factor=1.0 / float(scaler.factor),
        growth_interval=int(scaler.period),
        min_scale=float(scaler.min_loss_scale),
    )
    new.growth_count = jnp.asarray(scaler.counter, jnp.int32)
    return new
