"""The three GEMMs of an fp8 layer, given its tensors in fp8: which form of each tensor they read, and how they sum.

    fprop   y  = x w            fast accumulation
    dgrad   dx = g w^T          full accumulation
    wgrad   dw = x^T g          full accumulation

cuBLASLt multiplies fp8 on Hopper only where the axes that are summed over come last in both operands. With x [M, K],
w [K, N], g [M, N], and t^T for a tensor that was written with its axes turned:

    fprop reads x, w^T          dgrad reads g, w          wgrad reads x^T, g^T

so each is read one way in one product and the other way in another, and what the backward pass keeps is x^T and w. Off
CUDA the same fp8 numbers are multiplied in float32, in the order of their tensors' own axes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxmp import _hardware
from pallas_kernels import reference


class Gemm(NamedTuple):
    """What is fixed about one fp8 matmul when it is traced."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    forward_dtype: Any
    backward_dtype: Any
    holds_log2: bool
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    lhs_spec: tuple[Any, ...] | None  # how lhs lies on a mesh with explicit axes, one entry a dimension; else None
    rhs_spec: tuple[Any, ...] | None
    out_sharding: Any
    turns: bool = False  # whether its tensors are written both ways; see `turns`
    activation: str | None = None  # what lhs goes through before it is cast

    @property
    def summed(self) -> int:
        """How many axes of lhs and rhs are summed over."""
        return len(self.contract[0])

    @property
    def rhs_starts(self) -> bool:
        """Whether the axes that are summed over are the first of rhs (a kernel [K, N]), not the last."""
        return self.contract[1][:1] == (0,)


class Quantized(NamedTuple):
    """A tensor in fp8. One of its two forms may be missing, where no GEMM reads it any more."""

    values: Array | None
    inv_scale: Float[Array, ""]
    turned: Array | None = None  # its rows' axes last; see `Gemm.turns`


def can_turn(ndims: tuple[int, int], contract: Any, batch: Any) -> bool:
    """Whether a matmul is one of matrices as they lie: lhs [M..., K...] by rhs [K..., N...] or [N..., K...].

    Example:
      >>> can_turn((3, 2), ((2,), (0,)), ((), ())), can_turn((2, 2), ((0,), (0,)), ((), ()))
      (True, False)
    """
    (lhs, rhs), k = contract, len(contract[0])
    ends = tuple(range(ndims[0] - k, ndims[0]))
    starts_or_ends = (tuple(range(k)), tuple(range(ndims[1] - k, ndims[1])))
    return not batch[0] and k > 0 and tuple(lhs) == ends and tuple(rhs) in starts_or_ends


def fprop(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> Array:
    """The product."""
    with jax.named_scope("jaxmp.fp8_fprop"):
        if not gemm.turns:
            return _matmul(gemm, lhs, rhs, gemm.contract, gemm.batch, gemm.out_dtype, gemm.out_sharding, fast=True)
        rhs_side = _Side(rhs.values)
        if gemm.rhs_starts:
            rhs_side = _Side(rhs.turned, _there(rhs.turned).ndim - gemm.summed)
        sides = _Side(lhs.values), rhs_side
        return _matmul_of_rows(gemm, lhs, rhs, *sides, gemm.summed, gemm.contract, gemm.out_dtype, fast=True)


def kept(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> tuple[Quantized, Quantized]:
    """Of the tensors of the forward pass, the forms that the backward pass reads."""
    if not gemm.turns:
        return lhs, rhs
    return lhs._replace(values=None), rhs._replace(**{"turned" if gemm.rhs_starts else "values": None})


def backprop(gemm: Gemm, lhs: Quantized, rhs: Quantized, grad: Quantized) -> tuple[Array, Array]:
    """Gradients of lhs and rhs; the result's dimensions are (batch, free of lhs, free of rhs)."""
    if gemm.turns:
        return _backprop_of_rows(gemm, lhs, rhs, grad)
    lhs_values, rhs_values, grad_values = _there(lhs.values), _there(rhs.values), _there(grad.values)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = gemm.contract, gemm.batch
    lhs_free = _others(lhs_values.ndim, lhs_contract, lhs_batch)
    rhs_free = _others(rhs_values.ndim, rhs_contract, rhs_batch)
    batch = len(lhs_batch)
    grad_batch = tuple(range(batch))
    grad_lhs = tuple(range(batch, batch + len(lhs_free)))
    grad_rhs = tuple(range(batch + len(lhs_free), grad_values.ndim))
    with jax.named_scope("jaxmp.fp8_dgrad"):
        order = (*lhs_batch, *lhs_free, *(lhs_contract[rhs_contract.index(i)] for i in sorted(rhs_contract)))
        numbers = ((grad_rhs, rhs_free), (grad_batch, rhs_batch))
        d_lhs = _matmul(gemm, grad, rhs, *numbers, gemm.lhs_dtype, _permuted(gemm.lhs_spec, order), fast=False)
        d_lhs = jnp.transpose(d_lhs, _inverse(order))
    with jax.named_scope("jaxmp.fp8_wgrad"):
        order = (*rhs_batch, *(rhs_contract[lhs_contract.index(i)] for i in sorted(lhs_contract)), *rhs_free)
        numbers = ((lhs_free, grad_lhs), (lhs_batch, grad_batch))
        d_rhs = _matmul(gemm, lhs, grad, *numbers, gemm.rhs_dtype, _permuted(gemm.rhs_spec, order), fast=False)
        d_rhs = jnp.transpose(d_rhs, _inverse(order))
    return d_lhs, d_rhs


def _permuted(spec: tuple[Any, ...] | None, order: tuple[int, ...]) -> PartitionSpec | None:
    return None if spec is None else PartitionSpec(*(spec[i] for i in order))


def _inverse(order: tuple[int, ...]) -> list[int]:
    """The permutation that undoes `order`."""
    return [order.index(i) for i in range(len(order))]


def _others(ndim: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in some for some in taken))


def _backprop_of_rows(gemm: Gemm, lhs: Quantized, rhs: Quantized, grad: Quantized) -> tuple[Array, Array]:
    k = gemm.summed
    free = _there(grad.values).ndim - (_there(lhs.turned).ndim - k)  # how many axes of the result are rhs's
    rows = _there(grad.values).ndim - free
    grad_lhs, grad_rhs = tuple(range(rows)), tuple(range(rows, rows + free))
    rhs_free = tuple(range(k, k + free)) if gemm.rhs_starts else tuple(range(free))
    with jax.named_scope("jaxmp.fp8_dgrad"):
        rhs_side = _Side(rhs.values) if gemm.rhs_starts else _Side(rhs.turned, k)
        d_lhs = _matmul_of_rows(
            gemm, grad, rhs, _Side(grad.values), rhs_side, free, (grad_rhs, rhs_free), gemm.lhs_dtype, fast=False
        )
    with jax.named_scope("jaxmp.fp8_wgrad"):
        sides, numbers = (_Side(lhs.turned, k), _Side(grad.turned, free)), (grad_lhs, grad_lhs)
        if gemm.rhs_starts:
            return d_lhs, _matmul_of_rows(gemm, lhs, grad, *sides, rows, numbers, gemm.rhs_dtype, fast=False)
        d_rhs = _matmul_of_rows(gemm, lhs, grad, *sides, rows, numbers, gemm.rhs_dtype, fast=False, swapped=(k, free))
        return d_lhs, d_rhs


class _Side(NamedTuple):
    """An operand whose last axes are summed over: a tensor as it lies, or turned."""

    array: Any
    columns: int = 0  # how many of its first axes are the tensor's last; 0 for a tensor as it lies

    def as_it_lies(self) -> Array:
        # The barrier keeps XLA from folding the transpose into a matmul, which would sum in another order.
        return lax.optimization_barrier(reference.transpose(self.array, self.columns)) if self.columns else self.array


def _matmul_of_rows(
    gemm: Gemm,
    a: Quantized,
    b: Quantized,
    a_side: _Side,
    b_side: _Side,
    summed: int,
    contract: Any,
    out_dtype: Any,
    *,
    fast: bool,
    swapped: tuple[int, int] | None = None,
) -> Array:
    """A GEMM over the last `summed` axes of both sides; `contract` are these axes of the tensors as they lie.

    With `swapped`, b's axes come first in the result; it is how many axes of a and of b there are.
    """
    last = tuple(tuple(range(side.array.ndim - summed, side.array.ndim)) for side in (a_side, b_side))

    def in_fp8(x: Array, y: Array, dot: Any) -> Array:
        pair, axes = ((y, x), last[::-1]) if swapped else ((x, y), last)
        return dot(*pair, dimension_numbers=(axes, ((), ())))

    def in_float32(x: Array, y: Array, dot: Any) -> Array:
        x, y = a_side._replace(array=x).as_it_lies(), b_side._replace(array=y).as_it_lies()
        out = dot(x, y, dimension_numbers=(contract, ((), ())))
        return reference.transpose(out, swapped[0]) if swapped else out

    inv_scale = a.inv_scale * b.inv_scale
    return _unscaled(gemm, (a_side.array, b_side.array), inv_scale, in_fp8, in_float32, out_dtype, fast=fast)


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
    """One GEMM of fp8 operands, unscaled, in `out_dtype`."""

    def multiply(x: Array, y: Array, dot: Any) -> Array:
        return dot(x, y, dimension_numbers=(contract, batch), out_sharding=out_sharding)

    inv_scale = a.inv_scale * b.inv_scale
    return _unscaled(gemm, (a.values, b.values), inv_scale, multiply, multiply, out_dtype, fast=fast)


def _unscaled(
    gemm: Gemm, operands: Any, inv_scale: Array, in_fp8: Any, in_float32: Any, out_dtype: Any, *, fast: bool
) -> Array:
    """The product of fp8 operands by the hardware's way, times `inv_scale`, in `out_dtype`."""
    presets = lax.DotAlgorithmPreset
    algorithm = presets.ANY_F8_ANY_F8_F32_FAST_ACCUM if fast else presets.ANY_F8_ANY_F8_F32
    # A power of two commutes with rounding to bfloat16, so the GEMM may write that and be unscaled by what XLA folds
    # into it. Any other scale, and the narrow range of float16, need the accumulator itself.
    narrow = gemm.holds_log2 and jnp.dtype(out_dtype) == jnp.bfloat16
    accumulator = jnp.bfloat16 if narrow else jnp.float32
    fp8_dot = functools.partial(lax.dot_general, precision=algorithm, preferred_element_type=accumulator)
    exact_dot = functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST)

    def on_fp8(a: Array, b: Array) -> Array:
        return in_fp8(a, b, fp8_dot)

    def elsewhere(a: Array, b: Array) -> Array:  # products of fp8 numbers are exact in float32
        return in_float32(
            a, b, lambda x, y, **kw: exact_dot(x.astype(jnp.float32), y.astype(jnp.float32), **kw)
        ).astype(accumulator)

    out = _hardware.on_fp8_hardware(on_fp8, elsewhere)(*operands)
    return (out * inv_scale.astype(out.dtype)).astype(out_dtype)


def _there(x: Array | None) -> Array:
    """`x`, which a GEMM reads."""
    assert x is not None  # what `kept` leaves is what `backprop` reads
    return x
