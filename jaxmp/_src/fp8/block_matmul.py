"""The matmul of block-scaled fp8: three GEMMs whose operands carry a scale for every few numbers that are summed.

For y = x w with x [M, K], w [K, N], and the gradient g [M, N] of y, Q_A casts in blocks along the axes A (`blocks`):

                          BlockScaling, 1x128 and 128x128       MXFP8, 1x32
    fprop   y  = x w      Q_K(x)   Q_KN(w)                      Q_K(x)   Q_K(w)
    dgrad   dx = g w^T    Q_N(g)   Q_KN(w)^T                    Q_N(g)   Q_N(w)^T
    wgrad   dw = x^T g    Q_M(x)^T Q_M(g)                       Q_M(x)^T Q_M(g)

A block lies along the axis that its GEMM sums over, so the products of one block have one scale. Each tensor is in two
GEMMs that sum over different axes, so it is cast twice, each time from its own precision (casting a cast would round
twice). Only square blocks serve both, so BlockScaling has them for weights. The backward pass keeps the fp8 copies that
it multiplies.

GPUs before Blackwell cannot multiply such blocks, so the products are computed exactly: q * scale_inv is a bfloat16
number if the scale is a power of two, and bfloat16 numbers multiply exactly into a float32 accumulator. (Other scales
need float32.) Only the *stored* q is rounded: a barrier keeps it in memory, because XLA for GPUs deletes a cast to fp8
and back. The numerics are those of the hardware, the speed is that of bfloat16. On Blackwell, MXFP8 goes to
`jax.nn.scaled_matmul`, which cuDNN runs in fp8.

A cast saturates, so a block with an inf would become finite. Its scale_inv is set to NaN, so the step is skipped.

References:
  DeepSeek-V3 Technical Report, 2024, section 3.3; TransformerEngine, Float8BlockScaling and MXFP8BlockScaling; OCP
  Microscaling Formats (MX) Specification v1.0, 2023.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import compat, hardware
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import remat
from jaxmp._src.fp8.blocks import MXFP8, Blocks, BlockScaling, block_amax
from jaxmp._src.fp8.first_derivatives import once

Recipe = BlockScaling | MXFP8
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class _Gemm(NamedTuple):
    """The static part of one matmul."""

    recipe: Recipe
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any


class _Operand(NamedTuple):
    blocks: Blocks  # q [B, ., .], blocked along `axis` at least
    axis: int  # the one that the GEMM sums over


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Recipe,
    out_dtype: Any,
    out_sharding: Any = None,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` with block-scaled operands, forward and backward; see the module's docstring.

    Several contracting (or free, or batch) dimensions count as one, in the order of `dimension_numbers`, and blocks go
    over it. Its last block may be short. The gradients have the dtypes of lhs (activations) and rhs (weights).
    """
    dot = functools.partial(_dot_general, dimension_numbers=dimension_numbers, recipe=recipe, out_dtype=out_dtype)
    if not shardings.is_explicit(lhs) and not shardings.is_explicit(rhs):
        return dot(lhs, rhs)
    plain = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
    sharding: Any = jax.eval_shape(plain, lhs, rhs).sharding
    left_to_xla: Any = jax.sharding.auto_axes(dot, out_sharding=sharding)
    return left_to_xla(lhs, rhs)


def _dot_general(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, recipe: Recipe, out_dtype: Any) -> Array:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]
    gemm = _Gemm(recipe, lhs.dtype, rhs.dtype, jnp.dtype(out_dtype))
    lhs = _three_axes(lhs, lhs_batch, lhs_free, lhs_contract)  # [B, M, K]
    rhs = _three_axes(rhs, rhs_batch, rhs_contract, rhs_free)  # [B, K, N]
    return _dot(gemm, lhs, rhs).reshape(shape)


def _three_axes(x: Array, *groups: Sequence[int]) -> Array:
    order = [i for group in groups for i in group]
    return jnp.transpose(x, order).reshape([math.prod(x.shape[i] for i in group) for group in groups])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(gemm: _Gemm, x: Array, w: Array) -> Array:
    return _forward(gemm, x, w)[0]


def _forward(gemm: _Gemm, x: Array, w: Array) -> tuple[Array, Any]:
    x, w = once(x), once(w)
    with jax.named_scope("jaxmp.fp8_quantize"):
        x_along_k = _quantize(gemm.recipe, x, 2)
        x_along_m = _quantize(gemm.recipe, x, 1)
        if isinstance(gemm.recipe, BlockScaling):
            w_along_k = w_along_n = _quantize(gemm.recipe, w, (1, 2))
        else:
            w_along_k, w_along_n = _quantize(gemm.recipe, w, 1), _quantize(gemm.recipe, w, 2)
    with jax.named_scope("jaxmp.fp8_fprop"):  # [B, M, K] @ [B, K, N] -> [B, M, N]
        y = _matmul(gemm.recipe, _Operand(x_along_k, 2), _Operand(w_along_k, 1), gemm.out_dtype)
    return y, remat.packed((x_along_m, w_along_n))


def _backward(gemm: _Gemm, residuals: tuple[Blocks, Blocks], grad: Array) -> tuple[Array, Array]:
    x, w = remat.unpacked(residuals)
    grad = once(grad)
    with jax.named_scope("jaxmp.fp8_quantize"):
        grad_along_n = _quantize(gemm.recipe, grad, 2, backward=True)
        grad_along_m = _quantize(gemm.recipe, grad, 1, backward=True)
    with jax.named_scope("jaxmp.fp8_dgrad"):  # [B, M, N] @ [B, N, K] -> [B, M, K]
        d_x = _matmul(gemm.recipe, _Operand(grad_along_n, 2), _Operand(w, 2), gemm.lhs_dtype)
    with jax.named_scope("jaxmp.fp8_wgrad"):  # [B, K, M] @ [B, M, N] -> [B, K, N]
        d_w = _matmul(gemm.recipe, _Operand(x, 1), _Operand(grad_along_m, 1), gemm.rhs_dtype)
    return d_x, d_w


_dot.defvjp(_forward, _backward)


def _quantize(recipe: Recipe, x: Array, axis: int | tuple[int, ...], *, backward: bool = False) -> Blocks:
    """`x` in stored blocks; scale_inv is NaN for blocks with an inf."""
    q, scale_inv = recipe.quantize(x, axis=axis, backward=backward)
    axes = axis if isinstance(axis, tuple) else (axis,)
    overflowed = block_amax(x.astype(jnp.float32), axes, recipe.block_size) == jnp.inf
    scale_inv = jnp.where(overflowed, jnp.array(jnp.nan, scale_inv.dtype), scale_inv)
    return Blocks(*remat.named(lax.optimization_barrier((q, scale_inv))))


def _matmul(recipe: Recipe, a: _Operand, b: _Operand, out_dtype: Any) -> Array:
    """The product of a and b, summed over their `axis`, for each of B, in `out_dtype`."""
    is_power_of_two = isinstance(recipe, MXFP8) or recipe.power_of_two
    exact = jnp.bfloat16 if is_power_of_two else jnp.float32
    dimension_numbers = (((a.axis,), (b.axis,)), ((0,), (0,)))

    # cuBLAS rounds the float32 accumulator to bfloat16 when it writes it; float16 would be rounded twice.
    written = jnp.bfloat16 if is_power_of_two and out_dtype == jnp.bfloat16 else jnp.float32

    def in_bfloat16(a: Array, b: Array) -> Array:
        dot = lax.dot_general(a, b, dimension_numbers, precision=lax.Precision.HIGHEST, preferred_element_type=written)
        return dot.astype(out_dtype)

    def in_float32(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimension_numbers, precision=lax.Precision.HIGHEST).astype(out_dtype)

    def emulated(a: Blocks, b: Blocks) -> Array:
        a_values, b_values = recipe.dequantize(*a, dtype=exact), recipe.dequantize(*b, dtype=exact)
        return hardware.on_fp8_hardware(in_bfloat16 if is_power_of_two else in_float32, in_float32)(a_values, b_values)

    def in_blocks(a_blocks: Blocks, b_blocks: Blocks) -> Array:
        a_q, a_scale = (jnp.moveaxis(t, a.axis, 2) for t in a_blocks)
        b_q, b_scale = (jnp.moveaxis(t, b.axis, 2) for t in b_blocks)
        product = _scaled_matmul(a_q, b_q, a_scale, b_scale)
        axes = tuple(compat.varying_axes(a_q) | compat.varying_axes(b_q))
        return compat.as_varying(product, axes).astype(out_dtype)  # scaled_matmul forgets them

    fits = isinstance(recipe, MXFP8) and a.blocks.q.shape[a.axis] % recipe.block_size == 0
    product = hardware.on_block_scaled_hardware(in_blocks, emulated) if fits else emulated
    return product(a.blocks, b.blocks)


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
