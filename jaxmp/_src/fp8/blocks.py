"""Block-scaled fp8: every block of elements has its own scale, so an outlier affects only its block.

With B(i) the block of element i, and a = max |x| over the block (without NaNs),

    q_i = cast(x_i * scale_B(i)),    x_i ~ q_i * scale_inv_B(i),    scale_B = 1 / scale_inv_B

`BlockScaling`: blocks of 128 along one axis (activations, gradients) or of 128x128 over two (weights);

    scale = fp8_max / a, rounded down to a power of two;    1 where a is 0 or inf

`MXFP8`: blocks of 32 along the axis that a matrix product sums over; scale_inv is stored in the 8 bits of E8M0, which
has exponents only (byte b is 2^(b - 127)):

    b = 127 + ceil(log2(a / fp8_max)), from 0 to 254;    0 where a is 0, 254 where it is inf

`RowwiseScaling`: one block is all elements that a matrix product sums; the scale is that of `BlockScaling`.

Rounding scale down and rounding scale_inv up are the same. Both are computed from bits (`float_bits`), so all backends
give the same bytes, for subnormal x too. The last block of an axis may be short; it is treated as padded with zeros.

Only the *stored* q is rounded. XLA for GPUs deletes a cast to fp8 and back inside one program, so use `dequantize` for
a q from memory, never for one from the same program. `casting.round_to` rounds and stays in float32.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxmp._src.fp8 import block_matmul, block_shapes, gemms, remat, scale_equations
from jaxmp._src.fp8.block_matmul import BlockRecipe as BlockRecipe, Operand
from jaxmp._src.numerics import casting, float_bits

_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class Blocks(NamedTuple):
    """A tensor in fp8 and the factors of its blocks.

    Attributes:
      q: fp8[*shape].
      scale_inv: one number for each block: the axes of `q`, the blocked ones divided by the size of a block, rounded
        up. float32 of `BlockScaling` and `RowwiseScaling`, float8_e8m0fnu of `MXFP8`.
    """

    q: Float[Array, "..."]
    scale_inv: Float[Array, "..."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fp8Blocks(BlockRecipe):
    """Casts to and from blocks of fp8. The recipes differ in how a block gets its scale."""

    _scale_inv_dtype: ClassVar[Any]

    fp8_format: scale_equations.Format = "E4M3"

    def __post_init__(self) -> None:
        super().__post_init__()
        scale_equations.check_format(self.fp8_format)

    def stored(self, x: Array, axes: tuple[int, ...], *, backward: bool, key: Array | None) -> Any:
        """See `BlockRecipe.stored`."""
        del key
        q, scale_inv = self.quantize(x, axis=axes, backward=backward)
        overflowed = block_shapes.block_amax(casting.widened(x), axes, self.block_size) == jnp.inf
        scale_inv = jnp.where(overflowed, jnp.array(jnp.nan, scale_inv.dtype), scale_inv)
        return Blocks(*remat.named(lax.optimization_barrier((q, scale_inv))))

    def _scales(self, amax: Float[Array, "..."], dtype: Any, input_dtype: Any) -> tuple[Array, Array]:
        """(scale in float32, scale_inv as it is stored) of blocks, for a cast to `dtype` of a tensor in `given`."""
        raise NotImplementedError

    def dtype(self, *, backward: bool = False) -> Any:
        """The fp8 dtype of activations and weights, or of gradients (`backward`).

        Example:
          >>> BlockScaling().dtype().__name__
          'float8_e4m3fn'
        """
        return scale_equations.dtype_of(self.fp8_format, backward=backward)

    def quantize(self, x: Float[Array, "..."], *, axis: int | tuple[int, ...] = -1, backward: bool = False) -> Blocks:
        """`x` in fp8 with a scale for each block.

        Args:
          x: floats of 16 bits or more, of any shape.
          axis: the axis along which elements share a scale; for a matmul, the one that it sums over. Two axes,
            (-2, -1), give square blocks: 128x128 (`BlockScaling`) or 32x32 (`MXFP8`), whose q serves a product and
            its transpose. (`RowwiseScaling`: one block for all rows and columns.)
          backward: whether `x` is a gradient: e5m2 under `"HYBRID"`.

        Returns:
          `Blocks(q, scale_inv)`; scale_inv is float32, or float8_e8m0fnu of `MXFP8`.

        Raises:
          TypeError: `x` is no array of floats of 16 bits or more.
          ValueError: `x` has no such axis.

        Example:
          >>> import jax
          >>> jax.eval_shape(lambda: BlockScaling().quantize(jnp.ones((200, 300)), axis=(-2, -1))).scale_inv.shape
          (2, 3)
          >>> jax.eval_shape(lambda: MXFP8().quantize(jnp.ones((8, 64, 16)), axis=1)).scale_inv.shape
          (8, 2, 16)
        """
        blocked = block_shapes.blocked_axes(x, axis)
        dtype, input_dtype = self.dtype(backward=backward), x.dtype
        x = casting.widened(x)
        scale, scale_inv = self._scales(block_shapes.block_amax(x, blocked, self.block_size), dtype, input_dtype)
        q = casting.saturating_cast(float_bits.product(x, block_shapes.spread(scale, x.shape, self.block_size)), dtype)
        return Blocks(q, scale_inv)

    def dequantize(
        self, q: Float[Array, "..."], scale_inv: Float[Array, "..."], *, dtype: Any = jnp.float32
    ) -> Float[Array, "..."]:
        """q * scale_inv, block by block. Only for a stored `q`: see the module's docstring.

        Args:
          q: fp8 of any shape.
          scale_inv: as `quantize` returns it; its shape says which axes are blocked.
          dtype: of the result; computed in float32, saturated.

        Returns:
          An array of `dtype` in the shape of `q`.

        Raises:
          TypeError: a dtype that `quantize` does not return.
          ValueError: a shape of scale_inv that does not fit `q`.

        Example:
          >>> BlockScaling().dequantize(*BlockScaling().quantize(jnp.array([3.0, 5.0]))).tolist()
          [3.0, 5.0]
        """
        block_shapes.check_stored(q, scale_inv, _FP8, self._scale_inv_dtype, self.block_size)
        if scale_inv.dtype == jnp.float8_e8m0fnu:
            scale_inv = _float_of_e8m0(lax.bitcast_convert_type(scale_inv, jnp.uint8))
        x = float_bits.product(q.astype(jnp.float32), block_shapes.spread(scale_inv, q.shape, self.block_size))
        return casting.saturating_cast(x, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float32Scales(_Fp8Blocks):
    """Blocks whose scale is a float32 number: the equation of `CurrentScaling`, block by block."""

    power_of_two: bool = True
    amax_epsilon: float = 0.0

    _scale_inv_dtype: ClassVar[Any] = jnp.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        scale_equations.check_epsilon(self.amax_epsilon)

    @property
    def exact_dtype(self) -> Any:
        return jnp.bfloat16 if self.power_of_two else jnp.float32

    def _scales(self, amax: Float[Array, "..."], dtype: Any, input_dtype: Any) -> tuple[Array, Array]:
        # A quotient that is inf becomes the largest number of the dtype of x, as in TransformerEngine.
        overflow = min(float(jnp.finfo(input_dtype).max), float(np.finfo(np.float32).max))
        scale = scale_equations.current_scale(
            amax, dtype, power_of_two=self.power_of_two, amax_epsilon=self.amax_epsilon, overflow=overflow
        )
        return scale, float_bits.quotient(1.0, scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(_Float32Scales):
    """fp8 with a float32 scale for each block of 128 or of 128x128; stateless.

    See the module's docstring for the equations. Bit for bit TransformerEngine's Float8BlockScaling, whose layouts for
    cuBLAS (transposed or padded scales) are not made here.

    Args:
      fp8_format: `"E4M3"`, or `"HYBRID"` for e5m2 where `backward`.
      power_of_two: whether scales are powers of two.
      amax_epsilon: the smallest amax of a block, >= 0.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits.

    Raises:
      ValueError: an argument outside its range, named in the message.

    Example:
      >>> recipe = BlockScaling()
      >>> x = jnp.array([[1.0, 1000.0], [0.001, 0.002]])
      >>> q, scale_inv = recipe.quantize(x)
      >>> scale_inv.tolist()
      [[4.0], [7.62939453125e-06]]
      >>> recipe.dequantize(q, scale_inv)[0].tolist()
      [1.0, 1024.0]

    References:
      transformer_engine/common/recipe/recipe_common.cuh; DeepSeek-V3 Technical Report, 2024, section 3.3.
    """

    block_size: ClassVar[int | None] = 128

    @property
    def has_square_weights(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseScaling(_Float32Scales):
    """fp8 with a float32 scale for each token and for each output channel; stateless.

    Each of the three GEMMs of a layer casts both operands with one scale for each row that it sums:

        y  = x w       x by row (token), w by column (output channel)
        dx = g w^T     g by row (token), w by row (input channel)
        dw = x^T g     x by column (input channel), g by column (output channel)

    A GEMM multiplies in fp8 and the scales multiply its result, so it runs on every GPU with fp8 tensor cores. It
    costs a second cast of each tensor, and a read of each tensor for its amaxes.

    Args:
      fp8_format: `"E4M3"`, or `"HYBRID"` for e5m2 where `backward`.
      power_of_two: whether scales are powers of two.
      amax_epsilon: the smallest amax of a row, >= 0.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits: torchao's "rowwise_with_gw_hp" is wgrad.

    Raises:
      ValueError: an argument outside its range, named in the message.

    Example:
      >>> q, scale_inv = RowwiseScaling().quantize(jnp.array([[1.0, 1000.0], [0.001, 0.002]]))
      >>> scale_inv.tolist()
      [[4.0], [7.62939453125e-06]]

    References:
      torchao.float8, recipe "rowwise".
    """

    block_size: ClassVar[int | None] = None
    sums_last: ClassVar[bool] = True

    def multiply(self, a: Operand, b: Operand, product: gemms.Product) -> Array:
        """See `Recipe.multiply`: in fp8, and the scales multiply the result."""
        return block_matmul.multiply_rows(a, b, product, power_of_two=self.power_of_two)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(_Fp8Blocks):
    """fp8 with an E8M0 scale for each block of 32, the OCP microscaling format; stateless.

    See the module's docstring for the equations. Bit for bit the CUDA kernels of TransformerEngine; its JAX helper
    differs for NaN and inf (it makes byte 0 of NaN and 255, which is NaN, of inf).

    Args:
      fp8_format: `"E4M3"`, or `"HYBRID"` for e5m2 where `backward`.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits.

    Raises:
      ValueError: an argument outside its range, named in the message.

    Example:
      >>> q, scale_inv = MXFP8().quantize(jnp.array([[1.0, 1000.0]]))
      >>> scale_inv
      Array([[4]], dtype=float8_e8m0fnu)
      >>> MXFP8().dequantize(q, scale_inv).tolist()
      [[1.0, 1024.0]]

    References:
      OCP Microscaling Formats (MX) Specification v1.0, 2023; transformer_engine/common/util/ptx.cuh.
    """

    block_size: ClassVar[int | None] = 32
    has_hardware: ClassVar[bool] = True
    _scale_inv_dtype: ClassVar[Any] = jnp.float8_e8m0fnu

    def _scales(self, amax: Float[Array, "..."], dtype: Any, input_dtype: Any) -> tuple[Array, Array]:
        del input_dtype
        byte = e8m0_from_amax(amax, float(jnp.finfo(dtype).max))
        return _float_of_e8m0(254 - byte), lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu)  # 1 / 2^(b - 127)


def e8m0_from_amax(amax: Float[Array, "..."], fp8_max: float) -> UInt8[Array, "..."]:
    """The byte b of the smallest scale_inv 2^(b - 127) with amax / scale_inv <= fp8_max.

    0 for amax 0 and smaller exponents, 254 for inf, 255 for NaN.
    """
    amax = jnp.asarray(amax, jnp.float32)
    byte = jnp.clip(127 - float_bits.exponent_of_largest_scale(amax, fp8_max), 0, 254)
    byte = jnp.where(float_bits.is_positive_finite(amax), byte, jnp.where(amax == jnp.inf, 254, 0))
    return jnp.where(jnp.isnan(amax), 255, byte).astype(jnp.uint8)


def _float_of_e8m0(byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2^(byte - 127) in float32, from bits: 2^-127 is subnormal, and 255 is NaN."""
    byte = byte.astype(jnp.int32)
    bits = jnp.where(byte == 0, 1 << 22, byte << 23)
    return float_bits.from_bits(jnp.where(byte == 255, 0x7FC00000, bits))
