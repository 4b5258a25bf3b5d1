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

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import compat, hardware
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import blocks as blocks_lib, gemms, nvfp4, padding, remat
from jaxmp._src.fp8.blocks import MXFP8, Blocks, RowwiseScaling
from jaxmp._src.fp8.first_derivatives import in_reverse, once
from jaxmp._src.fp8.nvfp4 import NVFP4, Fp4Blocks
from jaxmp._src.numerics import casting

Recipe = blocks_lib.BlockScaling | RowwiseScaling | MXFP8 | NVFP4
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class _Gemm(NamedTuple):
    """The static part of one matmul."""

    recipe: Recipe
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any


class _Operand(NamedTuple):
    blocks: Blocks | Fp4Blocks  # q [B, ., .], blocked along `axis` at least
    axis: int  # the one that the GEMM sums over


_IMPL = "threefry2x32"


def seed_of(key: Array) -> Array:
    """uint32[2] from a key of any kind, for `dot_general`: arrays of integers go through all transformations."""
    return jax.random.bits(key, (2,), jnp.uint32)


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Recipe,
    out_dtype: Any,
    out_sharding: Any = None,
    seed: Array | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` with block-scaled operands, forward and backward; see the module's docstring.

    Several contracting (or free, or batch) dimensions count as one, in the order of `dimension_numbers`, and blocks go
    over it. Its last block may be short. The gradients have the dtypes of lhs (activations) and rhs (weights).
    `seed` is for stochastic rounding: see `seed_of`.
    """
    dot = functools.partial(_dot_general, dimension_numbers=dimension_numbers, recipe=recipe, out_dtype=out_dtype)
    if not shardings.is_explicit(lhs) and not shardings.is_explicit(rhs):
        return dot(lhs, rhs, seed)
    plain = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
    sharding: Any = jax.eval_shape(plain, lhs, rhs).sharding
    left_to_xla: Any = jax.sharding.auto_axes(dot, out_sharding=sharding)
    return left_to_xla(lhs, rhs, seed)


def _dot_general(
    lhs: Array,
    rhs: Array,
    seed: Array | None,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe,
    out_dtype: Any,
) -> Array:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]
    gemm = _Gemm(recipe, lhs.dtype, rhs.dtype, jnp.dtype(out_dtype))
    lhs = _three_axes(lhs, lhs_batch, lhs_free, lhs_contract)  # [B, M, K]
    rhs = _three_axes(rhs, rhs_batch, rhs_contract, rhs_free)  # [B, K, N]
    return in_reverse(_dot)(gemm, lhs, rhs, seed).reshape(shape)


def _three_axes(x: Array, *groups: Sequence[int]) -> Array:
    order = [i for group in groups for i in group]
    return jnp.transpose(x, order).reshape([math.prod(x.shape[i] for i in group) for group in groups])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(gemm: _Gemm, x: Array, w: Array, seed: Array | None) -> Array:
    del seed
    with jax.named_scope("jaxmp.fp8_quantize"):
        x_along_k = _quantize(gemm.recipe, x, 2)
        w_along_k = _weight(gemm.recipe, w, 1)
    return _fprop(gemm, x_along_k, w_along_k)


def _forward(gemm: _Gemm, x: Array, w: Array, seed: Array | None) -> tuple[Array, Any]:
    recipe = gemm.recipe
    x, w = once(x), once(w)
    with jax.named_scope("jaxmp.fp8_quantize"):
        x_along_k = _quantize(recipe, x, 2)
        x_along_m = _quantize(recipe, _mixed(recipe, x), 1)
        w_along_k = _weight(recipe, w, 1)
        w_along_n = w_along_k._replace(axis=2) if recipe.has_square_weights else _weight(recipe, w, 2)
    kept = remat.packed((x_along_m.blocks, w_along_n.blocks))
    return _fprop(gemm, x_along_k, w_along_k), (kept, seed)


def _fprop(gemm: _Gemm, x: _Operand, w: _Operand) -> Array:
    with jax.named_scope("jaxmp.fp8_fprop"):  # [B, M, K] by [B, K, N]
        return _matmul(gemm.recipe, x, w, gemm.out_dtype, fast=True)


def _backward(gemm: _Gemm, residuals: Any, grad: Array) -> tuple[Array, Array, Any]:
    recipe = gemm.recipe
    kept, seed = residuals
    x_blocks, w_blocks = remat.unpacked(kept)
    grad = once(grad)
    x = _Operand(x_blocks, _axis_of(recipe, 1))
    w = _Operand(w_blocks, 2)
    with jax.named_scope("jaxmp.fp8_quantize"):
        keys = _keys(recipe, seed)
        grad_along_n = _quantize(recipe, grad, 2, backward=True, key=keys[0])
        grad_along_m = _quantize(recipe, _mixed(recipe, grad), 1, backward=True, key=keys[1])
    with jax.named_scope("jaxmp.fp8_dgrad"):  # [B, M, N] by [B, N, K]
        d_x = _matmul(recipe, grad_along_n, w, gemm.lhs_dtype)
    with jax.named_scope("jaxmp.fp8_wgrad"):  # [B, K, M] by [B, M, N]
        d_w = _matmul(recipe, x, grad_along_m, gemm.rhs_dtype)
    no_gradient = None if seed is None else np.zeros(seed.shape, jax.dtypes.float0)
    return d_x, d_w, no_gradient


_dot.defvjp(_forward, _backward)


def _mixed(recipe: Recipe, x: Array) -> Array:
    """An operand of wgrad, [B, M, .], before its cast."""
    return nvfp4.hadamard(x) if isinstance(recipe, NVFP4) and recipe.hadamard else x


def _keys(recipe: Recipe, seed: Array | None) -> tuple[Any, Any]:
    """One key for each cast of a gradient; None rounds to nearest."""
    if not isinstance(recipe, NVFP4) or not recipe.stochastic_rounding:
        return None, None
    if seed is None:
        raise ValueError(
            "NVFP4 rounds gradients at random and needs a key where a matmul is differentiated: give the model's apply "
            'rngs={"rounding": key} (linen), to_fp8(rngs=nnx.Rngs(rounding=0)) (nnx), or jaxmp.fp8.dot_general key=. '
            "Or round to nearest, with NVFP4(stochastic_rounding=False)."
        )
    first, second = jax.random.split(jax.random.wrap_key_data(seed, impl=_IMPL))
    return first, second


def _weight(recipe: Recipe, w: Array, axis: int) -> _Operand:
    """w [B, K, N], cast for a sum over `axis`."""
    if recipe.has_square_weights:
        return _Operand(_stored(recipe, w, (1, 2)), axis)
    return _quantize(recipe, w, axis)


def _quantize(recipe: Recipe, x: Array, axis: int, *, backward: bool = False, key: Array | None = None) -> _Operand:
    """`x` [B, ., .], cast for a sum over `axis`."""
    moved = _axis_of(recipe, axis)
    return _Operand(_stored(recipe, jnp.moveaxis(x, axis, moved), (moved,), backward=backward, key=key), moved)


def _axis_of(recipe: Recipe, axis: int) -> int:
    """The position of the summed axis in what is stored: the last, where XLA moves fewer bytes so (`make h100`)."""
    return 2 if isinstance(recipe, RowwiseScaling | NVFP4) else axis


def _summed_last(t: _Operand) -> list[Array]:
    """(q, scale_inv) with the summed axis last."""
    return [jnp.moveaxis(x, t.axis, 2) for x in (t.blocks.q, t.blocks.scale_inv)]


def _stored(
    recipe: Recipe, x: Array, axes: tuple[int, ...], *, backward: bool = False, key: Array | None = None
) -> Blocks | Fp4Blocks:
    """`x` in stored blocks; scale_inv is NaN for blocks with an inf."""
    if isinstance(recipe, NVFP4):
        return Fp4Blocks(*remat.named(lax.optimization_barrier(tuple(recipe.quantize(x, axis=axes, key=key)))))
    q, scale_inv = recipe.quantize(x, axis=axes, backward=backward)
    overflowed = blocks_lib.block_amax(casting.widened(x), axes, recipe.block_size) == jnp.inf
    scale_inv = jnp.where(overflowed, jnp.array(jnp.nan, scale_inv.dtype), scale_inv)
    return Blocks(*remat.named(lax.optimization_barrier((q, scale_inv))))


def _matmul(recipe: Recipe, a: _Operand, b: _Operand, out_dtype: Any, *, fast: bool = False) -> Array:
    """The product of a and b, summed over their `axis`, for each of B, in `out_dtype`."""
    if isinstance(recipe, RowwiseScaling):
        return _matmul_of_rows(recipe, a, b, out_dtype, fast=fast)
    is_exact_in_16_bits = recipe.exact_dtype == jnp.bfloat16
    # cuBLAS rounds the float32 accumulator to bfloat16 when it writes it; float16 would be rounded twice.
    may_write = is_exact_in_16_bits and out_dtype == jnp.bfloat16 and not isinstance(recipe, NVFP4)
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
        return product(_values(recipe, a), _values(recipe, b))

    def in_blocks(a_blocks: Any, b_blocks: Any) -> Array:
        a_q, a_scale = _summed_last(_Operand(a_blocks, a.axis))
        b_q, b_scale = _summed_last(_Operand(b_blocks, b.axis))
        a_scale, b_scale = (
            blocks_lib.spread(scale, (*q.shape[:2], scale.shape[2]), recipe.block_size)  # of square blocks, all rows
            for q, scale in ((a_q, a_scale), (b_q, b_scale))
        )
        # A short last block counts as filled with zeros.
        missing = -a_q.shape[2] % (recipe.block_size or 1)
        zeros = (0, 0, missing) if missing else ()
        product = _scaled_matmul(padding.pad(a_q, zeros), padding.pad(b_q, zeros), a_scale, b_scale)
        axes = tuple(compat.varying_axes(a_q) | compat.varying_axes(b_q))
        return compat.as_varying(product, axes).astype(written)  # scaled_matmul forgets them

    has_hardware = isinstance(recipe, MXFP8 | NVFP4)
    product = (hardware.on_block_scaled_hardware(in_blocks, emulated) if has_hardware else emulated)(a.blocks, b.blocks)
    if isinstance(a.blocks, Fp4Blocks) and isinstance(b.blocks, Fp4Blocks):
        product = _unscaled(product, a.blocks.tensor_scale_inv, b.blocks.tensor_scale_inv)
    return product.astype(out_dtype)


def _values(recipe: Recipe, t: Any) -> Array:
    """The numbers of a tensor, but for the scale of a whole tensor in NVFP4."""
    if isinstance(t, Fp4Blocks):
        return nvfp4.in_units_of_the_tensor(t.q, t.scale_inv, recipe.exact_dtype)
    return recipe.dequantize(*t, dtype=recipe.exact_dtype)


_LAST = (((2,), (2,)), ((0,), (0,)))  # [B, M, K] by [B, N, K]


def _matmul_of_rows(recipe: RowwiseScaling, a: _Operand, b: _Operand, out_dtype: Any, *, fast: bool) -> Array:
    """The product of operands with one scale for each sum."""
    written = gemms.accumulator(out_dtype, power_of_two=recipe.power_of_two)

    def in_fp8(a: Array, b: Array) -> Array:
        zeros = padding.zeros_for(a.shape, b.shape, *_LAST)
        product = lax.dot_general(
            padding.pad(a, zeros[0]),
            padding.pad(b, zeros[1]),
            _LAST,
            precision=gemms.algorithm(fast=fast),
            preferred_element_type=written,
        )
        return padding.crop(product, padding.of_result(*zeros, (3, 3), *_LAST))

    def in_float32(a: Array, b: Array) -> Array:  # products of fp8 numbers are exact in float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, _LAST, precision=lax.Precision.HIGHEST).astype(written)

    (a_q, a_scale), (b_q, b_scale) = _summed_last(a), _summed_last(b)
    product = hardware.on_fp8_hardware(in_fp8, in_float32)(a_q, b_q)
    return _unscaled(product, a_scale, jnp.swapaxes(b_scale, 1, 2)).astype(out_dtype)  # [B, M, 1], [B, 1, N]


def _unscaled(product: Array, a: Array, b: Array) -> Array:
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
