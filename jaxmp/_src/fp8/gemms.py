"""The three GEMMs of an fp8 layer, given its tensors in fp8: which form of each tensor they read, and how they sum.

    fprop   y  = x w            fast accumulation
    dgrad   dx = g w^T          full accumulation
    wgrad   dw = x^T g          full accumulation

cuBLASLt multiplies fp8 on Hopper only where the axes that are summed over come last in both operands. With x [M, K],
w [K, N], g [M, N], and t^T for a tensor that was written transposed:

    fprop reads x, w^T          dgrad reads g, w          wgrad reads x^T, g^T

So the GEMMs need each tensor in both forms, and the forward pass keeps x^T and w for the backward pass. The tensors are
padded with zeros (`padding`), and the results are not. Outside CUDA, the same fp8 numbers are multiplied in float32,
without the transposes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmp._src.base import hardware
from jaxmp._src.fp8 import padding
from jaxmp._src.fp8.padding import Zeros
from pallas_kernels import reference


class Gemm(NamedTuple):
    """The static part of one fp8 matmul."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    forward_dtype: Any
    backward_dtype: Any
    holds_log2: bool
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    lhs_sharding: NamedSharding | None = None  # on a mesh with explicit axes
    rhs_sharding: NamedSharding | None = None
    out_sharding: Any = None
    activation: str | None = None  # applied to lhs before the cast
    lhs_zeros: Zeros = ()  # added to lhs before the cast
    rhs_zeros: Zeros = ()
    bias_dtype: Any = None  # of a bias whose gradient is the sum of that of the result; None without one
    by_own_amax: bool = False  # each tensor is cast with the scale of its own amax, not with that of its leaf

    @property
    def rhs_starts(self) -> bool:
        """Whether the GEMM sums over the first axes of rhs (a kernel [K, N]), not over the last."""
        return self.contract[1][:1] == (0,)

    def out_zeros(self, lhs_ndim: int, rhs_ndim: int) -> Zeros:
        """The zeros in the product, and in its gradient."""
        return padding.of_result(self.lhs_zeros, self.rhs_zeros, (lhs_ndim, rhs_ndim), self.contract, self.batch)


class Quantized(NamedTuple):
    """A tensor in fp8, in its own order of axes and perhaps also transposed: [M..., K...] as [K..., M...]."""

    values: Array | None  # None where only the other form is kept
    inv_scale: Float[Array, ""]
    transposed: Array | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return _not_none(self.transposed if self.values is None else self.values).ndim


def is_of_matrices(ndims: tuple[int, int], contract: Any, batch: Any) -> bool:
    """Whether a matmul is lhs [M..., K...] by rhs [K..., N...] or [N..., K...], without batch axes."""
    (lhs, rhs), k = contract, len(contract[0])
    ends = tuple(range(ndims[0] - k, ndims[0]))
    starts_or_ends = (tuple(range(k)), tuple(range(ndims[1] - k, ndims[1])))
    return not batch[0] and 0 < k < min(ndims) and tuple(lhs) == ends and tuple(rhs) in starts_or_ends


def kept(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> tuple[Quantized, Quantized]:
    """lhs and rhs, each only in the form that the backward pass reads."""
    lhs = lhs if lhs.transposed is None else lhs._replace(values=None)
    if gemm.rhs_starts:
        return lhs, rhs._replace(transposed=None)
    return lhs, rhs if rhs.transposed is None else rhs._replace(values=None)


def fprop(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> Array:
    """The product of the forward pass."""
    with jax.named_scope("jaxmp.fp8_fprop"):
        out = _matmul(gemm, lhs, rhs, gemm.contract, gemm.batch, gemm.out_dtype, gemm.out_sharding, fast=True)
        return padding.crop(out, gemm.out_zeros(lhs.ndim, rhs.ndim))


def backprop(gemm: Gemm, lhs: Quantized, rhs: Quantized, grad: Quantized) -> tuple[Array, Array]:
    """Gradients of lhs and rhs; the dimensions of `grad` are (batch, free of lhs, free of rhs)."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = gemm.contract, gemm.batch
    lhs_free = _others(lhs.ndim, lhs_contract, lhs_batch)
    rhs_free = _others(rhs.ndim, rhs_contract, rhs_batch)
    batch = len(lhs_batch)
    grad_batch = tuple(range(batch))
    grad_lhs = tuple(range(batch, batch + len(lhs_free)))
    grad_rhs = tuple(range(batch + len(lhs_free), grad.ndim))
    with jax.named_scope("jaxmp.fp8_dgrad"):
        order = (*lhs_batch, *lhs_free, *(lhs_contract[rhs_contract.index(i)] for i in sorted(rhs_contract)))
        numbers = ((grad_rhs, rhs_free), (grad_batch, rhs_batch))
        d_lhs = _matmul(gemm, grad, rhs, *numbers, gemm.lhs_dtype, _permuted(gemm.lhs_sharding, order), fast=False)
        d_lhs = padding.crop(jnp.transpose(d_lhs, _inverse(order)), gemm.lhs_zeros)
    with jax.named_scope("jaxmp.fp8_wgrad"):
        order = (*rhs_batch, *(rhs_contract[lhs_contract.index(i)] for i in sorted(lhs_contract)), *rhs_free)
        numbers = ((lhs_free, grad_lhs), (lhs_batch, grad_batch))
        d_rhs = _matmul(gemm, lhs, grad, *numbers, gemm.rhs_dtype, _permuted(gemm.rhs_sharding, order), fast=False)
        d_rhs = padding.crop(jnp.transpose(d_rhs, _inverse(order)), gemm.rhs_zeros)
    return d_lhs, d_rhs


def _permuted(sharding: NamedSharding | None, order: tuple[int, ...]) -> NamedSharding | None:
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in order)))


def _inverse(order: tuple[int, ...]) -> list[int]:
    """The permutation that undoes `order`."""
    return [order.index(i) for i in range(len(order))]


def _others(ndim: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in some for some in taken))


def _matmul(
    gemm: Gemm,
    a: Quantized,
    b: Quantized,
    contract: Any,
    batch: Any,
    out_dtype: Any,
    out_sharding: Any,
    *,
    fast: bool,
) -> Array:
    """One GEMM of fp8 operands, unscaled, in `out_dtype`; axes count in the tensors' own order."""
    inv_scale = a.inv_scale * b.inv_scale
    written = accumulator(out_dtype, power_of_two=gemm.holds_log2)
    dot = functools.partial(lax.dot_general, out_sharding=out_sharding)

    def in_fp8(a: Quantized, b: Quantized) -> Array:
        (x, x_axes), (y, y_axes) = (_summed_last(t, axes) for t, axes in zip((a, b), contract, strict=True))
        numbers = ((x_axes, y_axes), batch)
        # Without this, XLA makes one GEMM of those that read one tensor (q, k and v), and copies their other operands
        # beside each other, and their results apart.
        x, y = lax.optimization_barrier((x, y))
        return dot(x, y, dimension_numbers=numbers, precision=algorithm(fast=fast), preferred_element_type=written)

    def in_float32(a: Quantized, b: Quantized) -> Array:  # products of fp8 numbers are exact in float32
        x, y = (_in_own_order(t, axes).astype(jnp.float32) for t, axes in zip((a, b), contract, strict=True))
        return dot(x, y, dimension_numbers=(contract, batch), precision=lax.Precision.HIGHEST).astype(written)

    out = hardware.on_fp8_hardware(in_fp8, in_float32)(a, b)
    return (out * inv_scale.astype(out.dtype)).astype(out_dtype)


def algorithm(*, fast: bool) -> lax.DotAlgorithmPreset:
    """How a GEMM of fp8 operands sums."""
    presets = lax.DotAlgorithmPreset
    return presets.ANY_F8_ANY_F8_F32_FAST_ACCUM if fast else presets.ANY_F8_ANY_F8_F32


def accumulator(out_dtype: Any, *, power_of_two: bool) -> Any:
    """The dtype in which a GEMM writes its result before the unscaling, by scales that are powers of two or not."""
    # A power of two commutes with rounding to bfloat16: the GEMM may write bfloat16, and XLA folds the unscaling into
    # it. Other scales, and the narrow range of float16, need the float32 accumulator.
    return jnp.bfloat16 if power_of_two and jnp.dtype(out_dtype) == jnp.bfloat16 else jnp.float32


def _summed_last(t: Quantized, axes: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """A tensor in the form with the summed axes last, if it has this form; and the positions of these axes."""
    if t.transposed is None or axes != tuple(range(len(axes))):
        return _not_none(t.values), axes
    return t.transposed, tuple(range(t.ndim - len(axes), t.ndim))


def _in_own_order(t: Quantized, axes: tuple[int, ...]) -> Array:
    """The tensor in its own order of axes; if only the transposed form was kept, the GEMM sums over its first axes."""
    if t.values is not None:
        return t.values
    # The barrier keeps XLA from folding the transpose into a matmul, which would sum in another order.
    return lax.optimization_barrier(reference.transpose(_not_none(t.transposed), t.ndim - len(axes)))


def _not_none(x: Array | None) -> Array:
    """`x`, which is not None: `kept` keeps the forms that `backprop` reads."""
    if x is None:
        raise AssertionError("a tensor of an fp8 matmul was dropped that a GEMM reads")
    return x
