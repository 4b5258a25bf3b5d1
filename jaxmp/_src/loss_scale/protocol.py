"""Loss scaling: the arithmetic alone, without an optimizer.

float16 cannot hold numbers below 6e-8, and most gradients of a trained network are smaller than that. So the loss is
multiplied by a scale S before differentiation, and the gradients are divided by S afterwards: inside the backward pass
they are S times as large. S must be as large as possible, but no gradient may exceed 65504. A *dynamic* scale finds
that value by trial:

    a step with a non-finite gradient is skipped; after `hysteresis` of them  S <- max(S * backoff_factor, min_scale)
    after `growth_interval` steps without one                                 S <- min(S * growth_factor, max_scale)

*Hysteresis* distinguishes a scale that is too large from a single bad batch: the first `hysteresis` - 1 overflows leave
S unchanged, the next one lowers it. Systems differ in when they refill this counter: Megatron-LM when S grows
(`refill="growth"`), apex's kernel at every step without overflow (`refill="step"`). Until then, once the counter is
used up, *each* further overflow lowers S.

Every object here is immutable, is a pytree whose leaves are arrays, and follows jmp's protocol: `.loss_scale`,
`.scale(tree)`, `.unscale(tree)`, `.adjust(grads_finite)`. A user's own class with these four members works as well, if
it is a pytree and `adjust` keeps the dtypes of its leaves.

    Megatron-LM  megatron/core/optimizer/grad_scaler.py     torch   torch/amp/grad_scaler.py
    DeepSpeed    runtime/fp16/loss_scaler.py                apex    csrc/update_scale_hysteresis.cu, apex/amp/scaler.py
    Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740)

jaxmp differs from all of these systems in one point: by default the scale has a lower and an upper bound. In the other
systems it can reach inf or 0 and stay there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

from jaxmp._src.loss_scale.dynamic import DynamicLossScale
from jaxmp._src.loss_scale.static import NoOpLossScale, StaticLossScale, is_number


def as_loss_scale(loss_scale: Any) -> Any:
    """The loss-scale object for None, a number, a scalar array, or an object with jmp's protocol."""
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
    if loss_scale is DynamicScale or isinstance(loss_scale, DynamicScale):
        raise TypeError(
            "loss_scale= takes no DynamicScale of flax; got one. Pass jaxmp.checkpoint.import_loss_scale(scale), which "
            "has its value and its rule, or jaxmp.DynamicLossScale()."
        )
    missing = [n for n in ("loss_scale", "scale", "unscale", "adjust") if not hasattr(loss_scale, n)]
    if missing or isinstance(loss_scale, type):
        raise TypeError(
            f"loss_scale must be 'auto', None, a number or an object with jmp's protocol; got {loss_scale!r}"
            + (", a class: pass an instance of it" if isinstance(loss_scale, type) else f", which lacks .{missing[0]}")
        )
    if any(x is loss_scale for x in jax.tree.leaves(loss_scale)):
        raise TypeError(
            f"a loss scale must be a pytree; got {type(loss_scale).__name__}. Register the class with "
            f"jax.tree_util.register_dataclass."
        )
    return loss_scale


def check_positive(scale: Any) -> None:
    """Raises a ValueError for what scales no loss."""
    if not np.all((np.asarray(scale) > 0) & np.isfinite(scale)):
        raise ValueError(f"a loss scale must be positive and finite; got {scale}. Pass a new one, such as 2.0**16.")


def _from_jmp(scaler: jmp.DynamicLossScale) -> DynamicLossScale:
    # jmp's own class loses `min_loss_scale` in a pytree round trip, and raises on a float16 scale.
    new = DynamicLossScale.preset(
        "torch",
        initial_scale=jnp.asarray(scaler.loss_scale, jnp.float32),
        growth_factor=float(scaler.factor),
        backoff_factor=1.0 / float(scaler.factor),
        growth_interval=int(scaler.period),
        min_scale=float(scaler.min_loss_scale) or None,  # jmp's floor of 0 is none
    )
    new.growth_count = jnp.asarray(scaler.counter, jnp.int32)
    return new
