"""The matmul of operands with a scale for each block of numbers that are summed: its three GEMMs.

For y = x w with x [M, K], w [K, N], and the gradient g [M, N] of y, Q_A casts in blocks along the axes A (`blocks`,
`nvfp4`), and R is a random Hadamard transform over M:

                          BlockScaling       MXFP8, RowwiseScaling     NVFP4
    fprop   y  = x w      Q_K(x)  Q_KN(w)    Q_K(x)  Q_K(w)            Q_K(x)   Q_KN(w)
    dgrad   dx = g w^T    Q_N(g)  Q_KN(w)    Q_N(g)  Q_N(w)            Q_N(g)   Q_KN(w)
    wgrad   dw = x^T g    Q_M(x)  Q_M(g)     Q_M(x)  Q_M(g)            Q_M(Rx)  Q_M(Rg)

A block lies along the axis that its GEMM sums over, so the products of one block have one scale. Each tensor is in two
GEMMs that sum over different axes, so it is cast twice, each time from its original precision (a cast of a cast would
round twice). Only square blocks fit both GEMMs, so BlockScaling and NVFP4 use them for weights. The forward pass keeps
the copies that the backward pass multiplies.

RowwiseScaling has one scale for each whole sum: the GEMM multiplies in fp8, and the scales multiply its result. GPUs
before Blackwell cannot multiply smaller blocks, so jaxmp computes these products exactly: q * scale_inv is a bfloat16
number if the scale is a power of two, or if q has four bits, and bfloat16 numbers multiply exactly into a float32
accumulator. (Other scales need float32.) Only the *stored* q is rounded: a barrier keeps it in memory, because XLA for
GPUs deletes a cast to fp8 and back. The results are those of the hardware; the speed is that of bfloat16. On Blackwell,
MXFP8 and NVFP4 go to `jax.nn.scaled_matmul`, which cuDNN runs in 8 and 4 bits.

A cast saturates, so a block with an inf would become finite. Its scale_inv is set to NaN, so the step is skipped.

References:
  DeepSeek-V3 Technical Report, 2024, section 3.3; TransformerEngine, Float8BlockScaling, MXFP8BlockScaling and
  NVFP4BlockScaling; torchao.float8, recipe "rowwise"; OCP Microscaling Formats (MX) Specification v1.0, 2023.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp._src.base import compat, hardware
from jaxmp._src.fp8 import block_shapes, gemms
from jaxmp._src.fp8.casts import Cast, Tensor
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.recipe import Recipe

_IMPL = "threefry2x32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor as one product reads it.

    Attributes:
      blocks: arrays of three axes [B, ., .], blocked along `axis` at least: q and scale_inv, and perhaps more.
      axis: the one that the product sums over.
    """

    blocks: Any
    axis: int = dataclasses.field(metadata={"static": True})

    def summed_last(self) -> list[Array]:
        """(q, scale_inv) with the summed axis last."""
        return [jnp.moveaxis(x, self.axis, 2) for x in (self.blocks.q, self.blocks.scale_inv)]


# The axis that a product sums over, of lhs [B, M, K], rhs [B, K, N] and the gradient [B, M, N]
_AXES = {"lhs": {"fprop": 2, "wgrad": 1}, "rhs": {"fprop": 1, "dgrad": 2}, "grad": {"dgrad": 2, "wgrad": 1}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRecipe(Recipe):
    """A recipe with a scale for each block of elements that a matrix product sums.

    Attributes:
      block_size: along each blocked axis; None: the whole axis.
      sums_last: whether the summed axis is stored last: where XLA moves fewer bytes so (`make h100`).
      has_hardware: whether `jax.nn.scaled_matmul` takes these blocks.
      has_square_weights: whether weights are cast once, in square blocks that serve a product and its transpose.
      exact_dtype: the narrowest dtype that holds the product of an element and the scale of its block exactly.
    """

    block_size: ClassVar[int | None]
    sums_last: ClassVar[bool] = False
    has_hardware: ClassVar[bool] = False
    folds_axes: ClassVar[bool] = True

    @property
    def has_square_weights(self) -> bool:
        return False

    @property
    def exact_dtype(self) -> Any:
        return jnp.bfloat16

    def before_wgrad(self, x: Array) -> Array:
        """An operand of wgrad, [B, M, .], before its cast."""
        return x

    def stored(self, x: Array, axes: tuple[int, ...], *, backward: bool, key: Array | None) -> Any:
        """`x` in stored blocks along `axes`; the factor of a block with an inf is NaN."""
        raise NotImplementedError

    def values(self, blocks: Any) -> Array:
        """The numbers of a tensor in `exact_dtype`."""
        return self.dequantize(*blocks, dtype=self.exact_dtype)

    def dequantize(self, *args: Any, dtype: Any) -> Array:
        """The numbers of a tensor."""
        raise NotImplementedError

    def cast(self, gemm: Gemm, tensor: Tensor, products: Sequence[str]) -> Cast:
        """See `Recipe.cast`: once for each product, unless square blocks serve both."""
        role, x, *_, seed = tensor
        with jax.named_scope("jaxmp.fp8_quantize"):
            if role == "rhs" and self.has_square_weights:
                blocks = self.stored(x, (1, 2), backward=False, key=None)
                return Cast({name: Operand(blocks, _AXES[role][name]) for name in products})
            backward = role == "grad"
            keys = self._keys(seed) if backward and self.rounds_at_random else {}
            operands = {}
            for name in products:
                axis = _AXES[role][name]
                moved = 2 if self.sums_last else axis
                y = self.before_wgrad(x) if name == "wgrad" else x
                y = jnp.moveaxis(y, axis, moved)
                operands[name] = Operand(self.stored(y, (moved,), backward=backward, key=keys.get(name)), moved)
            return Cast(operands)

    def _keys(self, seed: Array | None) -> dict[str, Array]:
        """One key for each cast of a gradient."""
        if seed is None:
            name = type(self).__name__
            raise ValueError(
                f'{name} needs a key for random rounding. Pass rngs={{"rounding": key}} (linen), '
                f"to_fp8(rngs=nnx.Rngs(rounding=0)) (nnx) or dot_general(key=key)."
            )
        first, second = jax.random.split(jax.random.wrap_key_data(seed, impl=_IMPL))
        return {"dgrad": first, "wgrad": second}

    def multiply(self, a: Operand, b: Operand, product: gemms.Product) -> Array:
        """See `Recipe.multiply`: exactly, or by hardware that multiplies such blocks."""
        return multiply_blocks(self, a, b, product.out_dtype)


def multiply_blocks(recipe: BlockRecipe, a: Operand, b: Operand, out_dtype: Any) -> Array:
    """The product of a and b, summed over their `axis`, for each of B, in `out_dtype`."""
    is_exact_in_16_bits = recipe.exact_dtype == jnp.bfloat16
    # cuBLAS rounds the float32 accumulator to bfloat16 when it writes it; float16 would be rounded twice.
    may_write = is_exact_in_16_bits and out_dtype == jnp.bfloat16
    written = jnp.bfloat16 if may_write else jnp.float32
    dimension_numbers = (((a.axis,), (b.axis,)), ((0,), (0,)))

    def in_bfloat16(a: Array, b: Array) -> Array:
        highest = lax.Precision.HIGHEST
        return lax.dot_general(a, b, dimension_numbers, precision=highest, preferred_element_type=written)

    def in_float32(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimension_numbers, precision=lax.Precision.HIGHEST).astype(written)

    def emulated(a: Any, b: Any) -> Array:
        product = hardware.on_fp8_hardware(in_bfloat16 if is_exact_in_16_bits else in_float32, in_float32)
        return product(recipe.values(a), recipe.values(b))

    def in_blocks(a_blocks: Any, b_blocks: Any) -> Array:
        a_q, a_scale = Operand(a_blocks, a.axis).summed_last()
        b_q, b_scale = Operand(b_blocks, b.axis).summed_last()
        a_scale, b_scale = (
            block_shapes.spread(scale, (*q.shape[:2], scale.shape[2]), recipe.block_size)  # of square blocks, all rows
            for q, scale in ((a_q, a_scale), (b_q, b_scale))
        )
        # A short last block counts as filled with zeros.
        missing = -a_q.shape[2] % (recipe.block_size or 1)
        zeros = (0, 0, missing) if missing else ()
        product = _scaled_matmul(gemms.pad(a_q, zeros), gemms.pad(b_q, zeros), a_scale, b_scale)
        axes = tuple(compat.varying_axes(a_q) | compat.varying_axes(b_q))
        return compat.as_varying(product, axes).astype(written)  # scaled_matmul forgets them

    product = hardware.on_block_scaled_hardware(in_blocks, emulated) if recipe.has_hardware else emulated
    return product(a.blocks, b.blocks).astype(out_dtype)


LAST = (((2,), (2,)), ((0,), (0,)))  # [B, M, K] by [B, N, K]


def multiply_rows(a: Operand, b: Operand, product: gemms.Product, *, power_of_two: bool) -> Array:
    """The product of operands with one scale for each sum."""
    written = gemms.accumulator(product.out_dtype, power_of_two=power_of_two)

    def in_fp8(a: Array, b: Array) -> Array:
        zeros = gemms.zeros_for(a.shape, b.shape, *LAST)
        y = lax.dot_general(
            gemms.pad(a, zeros[0]),
            gemms.pad(b, zeros[1]),
            LAST,
            precision=gemms.algorithm(fast=product.name == "fprop"),
            preferred_element_type=written,
        )
        return y[:, : a.shape[1], : b.shape[1]]

    def in_float32(a: Array, b: Array) -> Array:  # products of fp8 numbers are exact in float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, LAST, precision=lax.Precision.HIGHEST).astype(written)

    (a_q, a_scale), (b_q, b_scale) = a.summed_last(), b.summed_last()
    y = hardware.on_fp8_hardware(in_fp8, in_float32)(a_q, b_q)
    return unscaled(y, a_scale, jnp.swapaxes(b_scale, 1, 2)).astype(product.out_dtype)  # [B, M, 1], [B, 1, N]


def unscaled(product: Array, a: Array, b: Array) -> Array:
    """product a b, by the smaller first: with the larger alone it may be inf."""
    return product * jnp.minimum(a, b) * jnp.maximum(a, b)


@jax.custom_batching.custom_vmap
def _scaled_matmul(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
    return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)  # [B, M, N]


@_scaled_matmul.def_vmap
def _scaled_matmul_batch(axis_size: int, in_batched: Any, *operands: Array) -> tuple[Array, bool]:
    """A vmapped axis joins B; until jax 0.11 scaled_matmul's own rule needs it in all operands."""
    whole = [
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(operands, in_batched, strict=True)
    ]
    product = _scaled_matmul(*(x.reshape(-1, *x.shape[2:]) for x in whole))
    return product.reshape(axis_size, -1, *product.shape[1:]), True
