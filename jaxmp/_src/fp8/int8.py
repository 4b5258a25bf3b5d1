"""Int8: matmuls of 8-bit integers with a scale for each row that a product sums, for hardware without fp8.

With a = max |x| over the elements that a product sums,

    scale = 127 / a        q = round(x * scale)        x ~ q * scale_inv,    scale_inv = 1 / scale

Products of int8 are summed in int32, exactly, and the scales of both operands multiply the sum in float32:

    y[m, n] = scale_inv[m] scale_inv[n] sum_k q[m, k] q[k, n]

An integer is never NaN. The factor of a row with a NaN or an inf is NaN.

References:
  torchao.prototype.quantized_training, int8_mixed_precision_training; Dettmers et al. 2022, LLM.int8()
  (arXiv 2208.07339), without its outlier columns.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.fp8 import block_matmul, block_shapes, gemms, remat, scale_equations
from jaxmp._src.fp8.block_matmul import BlockRecipe, Operand
from jaxmp._src.fp8.blocks import Blocks
from jaxmp._src.numerics import casting, float_bits

_LARGEST = 127
_LONGEST_SUM = (2**31 - 1) // _LARGEST**2  # of products, in int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(BlockRecipe):
    """8-bit integers with a float32 scale for each token and for each output channel; stateless.

    int8 x int8 -> int32 products run on GPUs and TPUs that have no fp8 units (A100, TPU v5e) at twice the rate of
    bfloat16, on newer ones too, and on CPUs. Each of the three products of a layer casts both operands with one scale
    for each sum, as `RowwiseScaling` does. See the module's docstring for the equations.

    Args:
      stochastic_rounding: whether gradients are rounded at random, so that the mean is the value. This needs a key: see
        `jaxmp.fp8.dot_general`, and "rounding" in the layers of linen and nnx.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits; both: only the forward pass is in int8.

    Raises:
      ValueError: an argument outside its range; a product that sums over more than 133,144 elements, whose sum may not
        fit into int32.

    Example:
      >>> q, scale_inv = Int8().quantize(jnp.array([[1.0, 127.0], [0.5, -0.25]]))
      >>> q.tolist(), q.dtype.name
      ([[1, 127], [127, -64]], 'int8')
      >>> Int8().dequantize(q, scale_inv).shape
      (2, 2)
    """

    stochastic_rounding: bool = False

    block_size: ClassVar[int | None] = None
    sums_last: ClassVar[bool] = True

    @property
    def rounds_at_random(self) -> bool:
        """Whether a gradient is rounded at random."""
        return self.stochastic_rounding and bool(self.narrow("grad"))

    def dtype(self, *, backward: bool = False) -> Any:
        """int8, for all tensors.

        Example:
          >>> Int8().dtype().__name__
          'int8'
        """
        del backward
        return jnp.int8

    def quantize(self, x: Float[Array, "..."], *, axis: int | tuple[int, ...] = -1, key: Array | None = None) -> Blocks:
        """`x` in int8, with a scale for each row.

        Args:
          x: floats of 16 bits or more, of any shape.
          axis: the axis along which all elements share a scale; for a matmul, the one that it sums over. Two axes: one
            scale for both.
          key: None rounds to nearest even; a key of `jax.random` rounds at random, with the mean `x`.

        Returns:
          `Blocks(q, scale_inv)`; q int8, scale_inv float32 with axes of size 1.

        Raises:
          TypeError: `x` is no array of floats of 16 bits or more.
          ValueError: `x` has no such axis.

        Example:
          >>> Int8().quantize(jnp.ones((8, 64, 16)), axis=1).scale_inv.shape
          (8, 1, 16)
        """
        blocked = block_shapes.blocked_axes(x, axis)
        x = casting.widened(x)
        is_finite = jnp.all(jnp.isfinite(x), axis=blocked, keepdims=True)
        amax = block_shapes.block_amax(x, blocked, None)
        scale = scale_equations.scale_from_amax(amax, float(_LARGEST), fallback=1.0, power_of_two=False)
        y = float_bits.product(x, jnp.broadcast_to(scale, x.shape))
        y = jnp.round(y) if key is None else jnp.floor(y + jax.random.uniform(key, y.shape))
        y = jnp.clip(jnp.where(is_finite, y, 0.0), -_LARGEST, _LARGEST)
        scale_inv = jnp.where(is_finite, float_bits.quotient(1.0, scale), jnp.nan)
        return Blocks(y.astype(jnp.int8), scale_inv)

    def dequantize(self, q: Array, scale_inv: Float[Array, "..."], *, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        """q * scale_inv.

        Args:
          q: int8 of any shape.
          scale_inv: as `quantize` returns it.
          dtype: of the result; computed in float32, saturated.

        Returns:
          An array of `dtype` in the shape of `q`.

        Example:
          >>> Int8().dequantize(*Int8().quantize(jnp.array([127.0, -64.0]))).tolist()
          [127.0, -64.0]
        """
        block_shapes.check_stored(q, scale_inv, (jnp.int8,), jnp.float32, None)
        return casting.saturating_cast(q.astype(jnp.float32) * scale_inv, dtype)

    def stored(self, x: Array, axes: tuple[int, ...], *, backward: bool, key: Array | None) -> Blocks:
        """See `BlockRecipe.stored`."""
        del backward
        return Blocks(*remat.named(lax.optimization_barrier(tuple(self.quantize(x, axis=axes, key=key)))))

    def multiply(self, a: Operand, b: Operand, product: gemms.Product) -> Array:
        """See `Recipe.multiply`: summed in int32."""
        (a_q, a_scale), (b_q, b_scale) = a.summed_last(), b.summed_last()
        if a_q.shape[2] > _LONGEST_SUM:
            raise ValueError(
                f"Int8 must sum at most {_LONGEST_SUM} products; got {product.name} over {a_q.shape[2]} elements. Use "
                f"RowwiseScaling()."
            )
        y = lax.dot_general(a_q, b_q, block_matmul.LAST, preferred_element_type=jnp.int32)  # [B, M, K] by [B, N, K]
        y = block_matmul.unscaled(y.astype(jnp.float32), a_scale, jnp.swapaxes(b_scale, 1, 2))
        return y.astype(product.out_dtype)
