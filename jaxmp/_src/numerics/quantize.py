"""Casting a tensor to fp8 with one scale, and finding its amax in the same pass.

q = fp8(clip(x * scale)),    amax = max |x|,    x ~ q / scale
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout
from jaxtyping import Array, Float

from jaxmp._src.base import hardware
from jaxmp._src.numerics import casting, float_bits
from pallas_kernels.reference import largest_magnitude as largest_magnitude


def quantize(x: Float[Array, "..."], scale: Float[Array, ""], dtype: Any) -> Array:
    """fp8(x * scale), rounded to nearest even; values beyond the range saturate, NaN stays NaN.

    Args:
      x: floats of any shape.
      scale: float32[], or of a shape that broadcasts against x; multiplies before the cast.
      dtype: an 8-bit float dtype such as `jnp.float8_e4m3fn`.

    Returns:
      An array of `dtype`, of the shape of x.

    Example:
      >>> quantize(jnp.array([1.0, 1000.0]), jnp.float32(2.0), jnp.float8_e4m3fn).tolist()
      [2.0, 448.0]
    """
    return casting.saturating_cast(jnp.asarray(x).astype(jnp.float32) * scale, dtype)


def dequantize(q: Array, scale: Float[Array, ""], dtype: Any) -> Float[Array, "..."]:
    """q / scale in `dtype`: the values of a quantized tensor.

    Use it for a stored q, not for one from the same program, where XLA for GPUs may remove the cast.

    Args:
      q: fp8 of any shape.
      scale: float32[], the scale with which q was quantized.
      dtype: dtype of the result.

    Example:
      >>> dequantize(quantize(jnp.array([1.1]), jnp.float32(2.0), jnp.float8_e4m3fn), jnp.float32(2.0), jnp.float32)
      Array([1.125], dtype=float32)
    """
    return (q.astype(jnp.float32) * float_bits.reciprocal(scale)).astype(dtype)


def stored(q: Array) -> Array:
    """`q`, computed once for both GEMMs that read it, in the layout of the tensor that it was cast from.

    Otherwise XLA casts twice, or casts a weight directly into cuBLASLt's transpose and reads it again for its amax.
    """
    as_is = layout.Layout(tuple(range(q.ndim)))
    pin = hardware.on_fp8_hardware(lambda q: layout.with_layout_constraint(q, as_is), lambda q: q)
    return lax.optimization_barrier(pin(q))


@jax.custom_batching.custom_vmap
def observe(x: Array, scale: Array) -> Array:
    """The amax for each scale: float32 of the shape of `scale`, whose axes are the first axes of x."""
    return largest_magnitude(x, keep=scale.ndim)


@observe.def_vmap
def observe_batch(axis_size: int, in_batched: Any, x: Array, scale: Array) -> tuple[Array, bool]:
    """Under vmap: one amax for the batch if it shares one scale, else one for each member."""
    x_batched, scale_batched = in_batched
    if not scale_batched:
        return observe(jnp.moveaxis(x, 0, scale.ndim), scale), False
    if not x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return observe(x, scale), True
