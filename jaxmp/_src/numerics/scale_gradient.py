"""Scales gradients at chosen points of a model, for models where one scale for the whole loss is not enough.

A loss scale multiplies all gradients by the same number. In a deep float16 model, gradients can overflow in one block
and underflow in another. In such a model, scale gradients at the affected block: multiply by s where the backward pass
enters the block, and by 1 / s where it leaves the block:

    def block(x):
        x = scale_gradient(x, 1 / s)        # last in the backward pass: undoes the factor
        ...
        return scale_gradient(y, s)         # first in the backward pass

The gradient of x does not change. The gradients of the block's own weights are s times as large: divide them by s
before you use them, or write `scale_gradient(w, 1 / s)` where the block reads a weight.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def scale_gradient(x: PyTree, s: float | Float[Array, ""]) -> PyTree:
    """`x` unchanged in the forward pass; in the backward pass its gradient is multiplied by `s`.

        forward: y = x          backward: dx = dtype(f32(dy) * s)

    The product is computed in float32 and rounded once to the gradient's dtype. A product too large for that dtype
    becomes inf, which the loss scaler then finds. With a power of two nothing is rounded: two calls with s and 1 / s
    around a block leave the gradients outside the block bit-equal, as long as nothing in the block over- or underflows.

    For reverse mode only (`jax.grad`, `jax.vjp`); under jit, vmap, scan, remat, pmap and shard_map.

    Args:
      x: a pytree. Only float and complex arrays have a gradient; other leaves are returned as they are.
      s: a finite number, or a float32[] scalar, which may be traced. It gets no gradient. Inside shard_map, pass the
        same value on every device.

    Returns:
      The same tree.

    Raises:
      ValueError: `s` is a number that is not finite, or an array that is not a scalar.

    Example:
      >>> def block(w, x):
      ...     return scale_gradient(scale_gradient(w, 1 / 1024) * scale_gradient(x, 1 / 1024), 1024.0)
      >>> w, x = jnp.array([3.0], jnp.float16), jnp.array([0.5], jnp.float16)
      >>> jax.grad(lambda w, x: jnp.sum(block(w, x)), argnums=(0, 1))(w, x)
      (Array([0.5], dtype=float16), Array([3.], dtype=float16))

    References:
      Zhao et al. 2019, "Adaptive Loss Scaling for Mixed Precision Training" (arXiv 1910.12385): a scale for each layer.
    """
    if isinstance(s, (int, float)) and not math.isfinite(s):
        raise ValueError(
            f"gradients must be scaled by a finite number; got s={s}. To stop a gradient use jax.lax.stop_gradient."
        )
    if jnp.ndim(s) != 0:
        raise ValueError(
            f"gradients are scaled by one number; got s of shape {jnp.shape(s)}. Call jaxmp.scale_gradient on each "
            f"leaf."
        )
    s = jnp.asarray(s, jnp.float32)

    def scaled(leaf: Any) -> Any:
        return _identity(leaf, s) if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact) else leaf

    return jax.tree.map(scaled, x)


@jax.custom_vjp
def _identity(x: Array, s: Float[Array, ""]) -> Array:
    del s
    return x


def _backward(s: Float[Array, ""], gradient: Array) -> tuple[Array, None]:
    with jax.named_scope("jaxmp.scale_gradient"):
        wide = jnp.promote_types(gradient.dtype, jnp.float32)
        return (gradient.astype(wide) * s.astype(wide)).astype(gradient.dtype), None


_identity.defvjp(lambda x, s: (x, s), _backward)
