"""Casts a tensor to fp8 with one scale, and finds its amax in the same pass over memory.

q = fp8(clip(x * scale))        amax = max |x|        x is about q / scale
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
    """fp8(x * scale), rounded to nearest even. Values outside the range become the largest finite value.

    Args:
      x: floats of any shape.
      scale: float32[], or of a shape that broadcasts against `x`; it multiplies before the cast.
      dtype: an 8-bit float dtype such as `jnp.float8_e4m3fn`.

    Returns:
      An array of `dtype`, of the shape of `x`. NaN stays NaN.

    Example:
      >>> quantize(jnp.array([1.0, 1000.0]), jnp.float32(2.0), jnp.float8_e4m3fn).tolist()
      [2.0, 448.0]
    """
    return casting.saturating_cast(jnp.asarray(x).astype(jnp.float32) * scale, dtype)


def dequantize(q: Array, scale: Float[Array, ""], dtype: Any) -> Float[Array, "..."]:
    """q / scale in `dtype`: the values that a quantized tensor stands for.

    Call it on a stored array. XLA for GPUs may delete a quantization and a dequantization inside one program.

    Args:
      q: fp8 of any shape.
      scale: float32[], the scale that `q` was quantized with.
      dtype: the dtype of the result.

    Returns:
      An array of `dtype`, of the shape of `q`.

    Example:
      >>> dequantize(quantize(jnp.array([1.1]), jnp.float32(2.0), jnp.float8_e4m3fn), jnp.float32(2.0), jnp.float32)
      Array([1.125], dtype=float32)
    """
    return (q.astype(jnp.float32) * float_bits.reciprocal(scale)).astype(dtype)


def stored(q: Array) -> Array:
    """`q`, computed once for both GEMMs that read it, in the layout of the tensor that it was cast from."""
    # Without this, XLA casts twice; or it casts a weight directly into the transpose that cuBLASLt needs, and reads the
    # weight a second time for its amax.
    as_is = layout.Layout(tuple(range(q.ndim)))
    pin = hardware.on_fp8_hardware(lambda q: layout.with_layout_constraint(q, as_is), lambda q: q)
    return lax.optimization_barrier(pin(q))


@jax.custom_batching.custom_vmap
def observe(x: Array, scale: Array) -> Array:
    """The amax of all values that share a scale: float32 of the shape of `scale`, whose axes lead in `x`."""
    return largest_magnitude(x, keep=scale.ndim)


@observe.def_vmap
def observe_batch(axis_size: int, in_batched: Any, x: Array, scale: Array) -> tuple[Array, bool]:
    """Under vmap: one amax for the whole batch if it shares one scale, else one for each element."""
    x_batched, scale_batched = in_batched
    if not scale_batched:
        return observe(jnp.moveaxis(x, 0, scale.ndim), scale), False
    if not x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return observe(x, scale), True
