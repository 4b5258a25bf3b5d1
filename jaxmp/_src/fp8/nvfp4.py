"""NVFP4: numbers of four bits in blocks of 16, with an e4m3 scale for each block and a float32 scale for the tensor.

e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. With a = max |x| over a block, A = max |x| over the tensor,

    t       = 448 * 6 / A                       float32, the tensor's scale; its inverse is stored
    s_B     = e4m3(a / 6 * t)                   the factor of a block, up to 448
    q_i     = e2m1(x_i / (s_B / t))             saturated
    x_i     ~ q_i * s_B / t

The largest block of a tensor has s_B = 448, so that the factors use the whole range of e4m3. All numbers are computed
from bits (`float_bits`): every backend gives the bytes of TransformerEngine's reference.

Training in four bits needs three more techniques (`NVFP4`'s arguments):

- *stochastic rounding of gradients.* Rounding to nearest would round most elements of a gradient in the same direction
  in each step. With the neighbours l <= |x| <= u in e2m1, |x| becomes u with probability (|x| - l) / (u - l): the mean
  is x. (Where s_B was rounded down, |x| above 6 s_B / t is saturated, as in TransformerEngine: up to 6 % is lost of the
  largest elements of a block.)
- *square blocks of weights*, 16x16: the forward and the backward pass multiply with the same numbers.
- *a random Hadamard transform* for the gradient of weights, dw = x^T g: with an orthogonal matrix R of 16x16 over each
  16 tokens, (R x)^T (R g) = x^T g, and an outlier of one token is spread over 16. R = H diag(d) / 4, H the Hadamard
  matrix of entries +-1, d fixed random signs.

A number of four bits is never NaN. The factor of a block with a NaN or an inf is NaN.

References:
  NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (arXiv 2509.25149); TransformerEngine, NVFP4BlockScaling.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.fp8 import block_shapes, gemms, remat, scale_equations
from jaxmp._src.fp8.block_matmul import BlockRecipe, Operand, unscaled
from jaxmp._src.numerics import casting, float_bits

_E2M1_MAX, _E4M3_MAX = 6, 448
_LARGEST = np.finfo(np.float32).max
_SIZE = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Fp4Blocks(NamedTuple):
    """A tensor in NVFP4.

    Attributes:
      q: float4_e2m1fn[*shape].
      scale_inv: float8_e4m3fn, one factor for each block: the axes of `q`, the blocked ones divided by 16, rounded up.
      tensor_scale_inv: float32[], the factor of all elements.
    """

    q: Float[Array, "..."]
    scale_inv: Float[Array, "..."]
    tensor_scale_inv: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(BlockRecipe):
    """Four-bit matmuls: e2m1 in blocks of 16 with e4m3 scales and a float32 scale for each tensor; stateless.

    See the module's docstring for the equations. On Blackwell the products go to `jax.nn.scaled_matmul`; elsewhere the
    same four-bit numbers are multiplied exactly, in bfloat16 (`jaxmp.fp8.backends` says which). Keep layers that need
    more bits out of it with `filter=`: NVIDIA keeps about one linear layer in six in more bits, most of them at the
    end.

    Args:
      stochastic_rounding: whether gradients are rounded at random, so that the mean is the value, except where a block
        saturates: its e4m3 factor can be up to 6 % too small for its largest element. This needs a key: see
        `jaxmp.fp8.dot_general`, and "rounding" in the layers of linen and nnx.
      hadamard: whether the operands of the weights' gradient go through a random Hadamard transform.
      square_weights: whether weights are cast in blocks of 16x16, which the forward and the backward pass share.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits.

    Example:
      >>> q, scale_inv, tensor_scale_inv = NVFP4().quantize(jnp.array([[1.0, 1000.0]]))
      >>> q.dtype.name, scale_inv.dtype.name, q.astype(float).tolist(), float(scale_inv[0, 0])
      ('float4_e2m1fn', 'float8_e4m3fn', [[0.0, 6.0]], 448.0)

    References:
      NVIDIA 2025 (arXiv 2509.25149); TransformerEngine, NVFP4BlockScaling.
    """

    stochastic_rounding: bool = True
    hadamard: bool = True
    square_weights: bool = True

    block_size: ClassVar[int | None] = _SIZE
    sums_last: ClassVar[bool] = True
    has_hardware: ClassVar[bool] = True

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are rounded at random."""
        return self.stochastic_rounding and bool(self.narrow("grad"))

    @property
    def has_square_weights(self) -> bool:
        """Whether one cast of a weight serves both of its products."""
        return self.square_weights

    def before_wgrad(self, x: Array) -> Array:
        """An operand of wgrad, [B, M, .], before its cast."""
        return hadamard(x) if self.hadamard else x

    def stored(self, x: Array, axes: tuple[int, ...], *, backward: bool, key: Array | None) -> Fp4Blocks:
        """See `BlockRecipe.stored`."""
        del backward
        return Fp4Blocks(*remat.named(lax.optimization_barrier(tuple(self.quantize(x, axis=axes, key=key)))))

    def values(self, blocks: Fp4Blocks) -> Array:
        """The numbers of a tensor, but for its own scale."""
        return in_units_of_the_tensor(blocks.q, blocks.scale_inv, self.exact_dtype)

    def multiply(self, a: Operand, b: Operand, product: gemms.Product) -> Array:
        """See `Recipe.multiply`: the scales of the tensors multiply the result."""
        in_units = super().multiply(a, b, product._replace(out_dtype=jnp.dtype(jnp.float32)))
        y = unscaled(in_units, a.blocks.tensor_scale_inv, b.blocks.tensor_scale_inv)
        return y.astype(product.out_dtype)

    def dtype(self, *, backward: bool = False) -> Any:
        """float4_e2m1fn, for all tensors.

        Example:
          >>> NVFP4().dtype().__name__
          'float4_e2m1fn'
        """
        del backward
        return jnp.float4_e2m1fn

    def quantize(
        self, x: Float[Array, "..."], *, axis: int | tuple[int, ...] = -1, key: Array | None = None
    ) -> Fp4Blocks:
        """`x` in four bits, with a scale for each block and one for the tensor.

        Args:
          x: floats of 16 bits or more, of any shape.
          axis: the axis along which 16 elements share a scale; two axes give blocks of 16x16.
          key: None rounds to nearest even; a key of `jax.random` rounds at random, with the mean of what is not
            saturated.

        Returns:
          `Fp4Blocks(q, scale_inv, tensor_scale_inv)`.

        Raises:
          TypeError: `x` is no array of floats of 16 bits or more.
          ValueError: `x` has no such axis.

        Example:
          >>> shapes = jax.eval_shape(lambda: NVFP4().quantize(jnp.ones((32, 64)), axis=(-2, -1)))
          >>> [t.shape for t in shapes]
          [(32, 64), (2, 4), ()]
        """
        blocked = block_shapes.blocked_axes(x, axis)
        x = casting.widened(x)
        amax = block_shapes.block_amax(x, blocked, _SIZE)
        largest = jnp.max(jnp.where(amax < jnp.inf, amax, 0.0), initial=0.0)
        tensor_scale = scale_equations.scale_from_amax(largest, _E4M3_MAX * _E2M1_MAX, fallback=1.0, power_of_two=False)
        tensor_scale_inv = float_bits.quotient(1.0, tensor_scale)
        sixth = jnp.where(float_bits.is_positive_finite(amax), float_bits.divided_by(amax, _E2M1_MAX), 0.0)
        factor = jnp.minimum(float_bits.product(sixth, tensor_scale), np.float32(_E4M3_MAX))
        scale_inv = casting.saturating_cast(factor, jnp.float8_e4m3fn)
        # Without the barrier XLA fuses the exact division into the cast, and divides for each element, not each block.
        scale = lax.optimization_barrier(_scale_of(scale_inv, tensor_scale_inv))
        y = float_bits.product(x, block_shapes.spread(scale, x.shape, _SIZE))
        y = jnp.clip(y, -_E2M1_MAX, _E2M1_MAX)
        y = y if key is None else stochastically_rounded(y, key)
        not_finite = block_shapes.block_amax(jnp.where(jnp.isfinite(x), 0.0, 1.0), blocked, _SIZE) > 0
        scale_inv = jnp.where(not_finite, jnp.array(jnp.nan, scale_inv.dtype), scale_inv)
        return Fp4Blocks(y.astype(jnp.float4_e2m1fn), scale_inv, tensor_scale_inv)

    def dequantize(
        self,
        q: Float[Array, "..."],
        scale_inv: Float[Array, "..."],
        tensor_scale_inv: Float[Array, ""],
        *,
        dtype: Any = jnp.float32,
    ) -> Float[Array, "..."]:
        """q * scale_inv * tensor_scale_inv, block by block. Only for a stored `q`: see `jaxmp.fp8.BlockScaling`.

        Args:
          q, scale_inv, tensor_scale_inv: as `quantize` returns them.
          dtype: of the result; computed in float32, saturated.

        Returns:
          An array of `dtype` in the shape of `q`.

        Raises:
          TypeError: a dtype that `quantize` does not return.
          ValueError: a shape of scale_inv that does not fit `q`.

        Example:
          >>> NVFP4().dequantize(*NVFP4().quantize(jnp.array([[2.0, 5.25]]))).tolist()
          [[1.75, 5.25]]
        """
        block_shapes.check_stored(q, scale_inv, (jnp.float4_e2m1fn,), jnp.float8_e4m3fn, _SIZE)
        x = float_bits.product(in_units_of_the_tensor(q, scale_inv, jnp.float32), tensor_scale_inv)
        return casting.saturating_cast(x, dtype)


def in_units_of_the_tensor(q: Float[Array, "..."], scale_inv: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """q * scale_inv, which bfloat16 and wider dtypes hold exactly (1 + 3 bits of mantissa, 2^-10 to 2688)."""
    return q.astype(dtype) * block_shapes.spread(scale_inv.astype(dtype), q.shape, _SIZE)


def _scale_of(scale_inv: Float[Array, "..."], tensor_scale_inv: Float[Array, ""]) -> Float[Array, "..."]:
    """1 / (scale_inv * tensor_scale_inv) in float32, at most the largest number, also for 1 / 0."""
    step = float_bits.product(scale_inv.astype(jnp.float32), tensor_scale_inv)
    return jnp.where(
        float_bits.is_positive_finite(step), jnp.minimum(float_bits.quotient(1.0, step), _LARGEST), _LARGEST
    )


def stochastically_rounded(x: Float[Array, "..."], key: Array) -> Float[Array, "..."]:
    """float32 `x` from -6 to 6, rounded at random to a number of e2m1, so that the mean is `x`; still float32.

    Exact up to 2^-24 of the step between two numbers. Numbers of e2m1 do not change.
    """
    magnitude = jnp.abs(x)
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    low = jnp.floor(magnitude / step) * step
    draw = (jax.random.bits(key, x.shape) >> 8).astype(jnp.float32) * np.float32(2.0**-24)  # in [0, 1)
    rounded = jnp.where(draw * step < magnitude - low, low + step, low)
    return jnp.copysign(jnp.minimum(rounded, np.float32(_E2M1_MAX)), x)


def hadamard(x: Float[Array, "B M ..."]) -> Float[Array, "B M16 ..."]:
    """The random Hadamard transform over each 16 rows of axis 1, filled with zeros to a multiple of 16; float32."""
    rows = -(-x.shape[1] // _SIZE) * _SIZE
    padding = [(0, rows - x.shape[1] if axis == 1 else 0) for axis in range(x.ndim)]
    x = jnp.pad(x, padding)
    groups = x.reshape(x.shape[0], rows // _SIZE, _SIZE, *x.shape[2:])
    mixed = jnp.einsum(  # products with +-1/4 are exact in any dtype
        "ij,bgj...->bgi...",
        _transform().astype(x.dtype),
        groups,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return mixed.reshape(x.shape)


def _transform() -> np.ndarray:
    """H diag(d) / 4: orthogonal, with entries of +-1/4."""
    h = np.ones((1, 1), np.float32)
    while len(h) < _SIZE:
        h = np.block([[h, h], [h, -h]])
    return h * np.array(_SIGNS, np.float32) / np.float32(4)
