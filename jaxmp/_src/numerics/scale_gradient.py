"""Scales gradients at chosen points of a model, where one scale for the whole loss is not enough.

A loss scale multiplies all gradients by the same power of two. In a deep float16 model one block may overflow while
another underflows. Then scale inside: up where the backward pass enters a block, down where it leaves the block:

    def block(x):
        x = scale_gradient(x, 1 / s)        # last in the backward pass: undoes the scale
        ...
        return scale_gradient(y, s)         # first in the backward pass

The gradient of x does not change, but gradients of the block's weights are s times as large: divide them by s before
you use them, or use `scale_gradient(w, 1 / s)` for the weights too.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def scale_gradient(x: PyTree, s: float | Float[Array, ""]) -> PyTree:
    """`x` itself, bit for bit; in the backward pass its gradient is multiplied by `s`.

        forward: y = x          backward: dx = dtype(f32(dy) * s)

    The product is computed in float32 and rounded once to the gradient's dtype; values beyond its range become inf, and
    the loss scaler sees them. A power of two rounds nothing: with s and 1/s around a block, the gradients outside the
    block do not change, bit for bit, as long as nothing inside overflows or underflows.

    Reverse mode only (`jax.grad`, `jax.vjp`), under any of jit, vmap, scan, remat, pmap and shard_map.

    Args:
      x: pytree; leaves that are no float or complex arrays (integers, keys, Python numbers) do not change.
      s: a finite number, or a float32[] scalar, which may be traced. It gets no gradient. Inside shard_map it must be
        equal on all devices.

    Returns:
      The same tree.

    Raises:
      ValueError: a number that is not finite, or an array that is no scalar.

    Example:
      >>> def block(w, x):
      ...     return scale_gradient(scale_gradient(w, 1 / 1024) * scale_gradient(x, 1 / 1024), 1024.0)
      >>> w, x = jnp.array([3.0], jnp.float16), jnp.array([0.5], jnp.float16)
      >>> jax.grad(lambda w, x: jnp.sum(block(w, x)), argnums=(0, 1))(w, x)
      (Array([0.5], dtype=float16), Array([3.], dtype=float16))

    References:
      Zhao et al. 2019, "Adaptive Loss Scaling for Mixed Precision Training" (arXiv 1910.12385), which chooses a scale
      for each layer.
    """
    if isinstance(s, (int, float)) and not math.isfinite(s):
        raise ValueError(
            f"gradients must be scaled by a finite number; got s={s}. To stop them use jax.lax.stop_gradient."
        )
    if jnp.ndim(s) != 0:
        raise ValueError(
            f"gradients are scaled by one number; got s of shape {jnp.shape(s)}. To scale leaves differently, call "
            f"jaxmp.scale_gradient on each."
        )
    s = jnp.asarray(s, jnp.float32)
    return jax.tree.map(lambda leaf: _identity(leaf, s) if _has_gradient(leaf) else leaf, x)


def _has_gradient(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@jax.custom_vjp
def _identity(x: Array, s: Float[Array, ""]) -> Array:
    del s
    return x


def _forward(x: Array, s: Float[Array, ""]) -> tuple[Array, Float[Array, ""]]:
    return x, s


def _backward(s: Float[Array, ""], gradient: Array) -> tuple[Array, None]:
    with jax.named_scope("jaxmp.scale_gradient"):
        wide = jnp.promote_types(gradient.dtype, jnp.float32)
        return (gradient.astype(wide) * s.astype(wide)).astype(gradient.dtype), None


_identity.defvjp(_forward, _backward)
