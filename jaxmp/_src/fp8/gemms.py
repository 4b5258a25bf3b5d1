"""The three GEMMs of an fp8 layer, given its tensors in fp8: which form of each tensor they read, and how they sum.

    fprop   y  = x w            fast accumulation
    dgrad   dx = g w^T          full accumulation
    wgrad   dw = x^T g          full accumulation

cuBLASLt multiplies fp8 on Hopper only where the axes that are summed over come last in both operands. With x [M, K],
w [K, N], g [M, N], and t^T for a tensor that was written transposed:

    fprop reads x, w^T          dgrad reads g, w          wgrad reads x^T, g^T

So the GEMMs need each tensor in both forms, and the forward pass keeps x^T and w for the backward pass. The tensors are
padded with zeros, and the results are not. Outside CUDA, the same fp8 numbers are multiplied in float32, without the
transposes.

cuBLASLt needs sides that are multiples of 16. The zeros are added before the cast, so that XLA casts, pads and finds
the amax in one pass over the tensor; afterwards the results are cut to their size. Neither products nor amaxes change:
a zero of one operand is multiplied by a zero of the other. A side may have several axes (batch and time); then the axis
is padded that needs the fewest zeros. Only tensors that are whole on a device are padded here: to extend a split axis
would move data between devices. For split tensors, XLA pads the part of each device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmp._src.base import hardware
from pallas_kernels import reference

MULTIPLE = 16

Zeros = tuple[int, ...]  # how many are added at the end of each axis; () for none


class Gemm(NamedTuple):
    """The static part of one fp8 matmul of lhs and rhs."""

    recipe: Any
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ndims: tuple[int, int]  # of lhs and rhs
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    dgrad_dtype: Any  # in which dgrad is rounded; lhs may be wider (an activation in float32)
    bias_dtype: Any = None  # of a bias whose gradient is the sum of that of the result; None without one
    lhs_sharding: NamedSharding | None = None  # on a mesh with explicit axes
    rhs_sharding: NamedSharding | None = None
    out_sharding: Any = None
    lhs_zeros: Zeros = ()  # added to lhs before the cast
    rhs_zeros: Zeros = ()
    by_own_amax: bool = False  # each tensor is cast with the scale of its own amax, not with that of its leaf
    capability: float | None = None  # of the GPUs that it is traced for: part of the key under which a trace is kept

    def zeros(self, role: str) -> Zeros:
        """The zeros that are added to "lhs", "rhs" or "grad", which has those of the result."""
        if role != "grad":
            return self.lhs_zeros if role == "lhs" else self.rhs_zeros
        if not self.lhs_zeros and not self.rhs_zeros:
            return ()
        lhs, rhs = self.lhs_zeros or (0,) * self.ndims[0], self.rhs_zeros or (0,) * self.ndims[1]
        lhs_free, rhs_free, *_ = _axes_of_gradient(self)
        return _or_none([0] * len(self.batch[0]) + [lhs[i] for i in lhs_free] + [rhs[i] for i in rhs_free])

    def rows(self, role: str) -> int | None:
        """How many first axes of a tensor are rows of a matrix that two GEMMs read, one of them transposed.

        None where no GEMM of cuBLASLt reads both forms: with batch axes, another order of axes, or explicit axes.
        """
        (lhs, rhs), n = self.contract, len(self.contract[0])
        is_lhs_last = tuple(lhs) == tuple(range(self.ndims[0] - n, self.ndims[0]))
        starts_or_ends = tuple(range(n)), tuple(range(self.ndims[1] - n, self.ndims[1]))
        is_of_matrices = not self.batch[0] and 0 < n < min(self.ndims) and is_lhs_last and tuple(rhs) in starts_or_ends
        if not is_of_matrices or {self.lhs_sharding, self.rhs_sharding, self.out_sharding} != {None}:
            return None
        if role == "rhs":
            return n if self.rhs_starts else self.ndims[1] - n
        return self.ndims[0] - n

    @property
    def rhs_starts(self) -> bool:
        """Whether the GEMM sums over the first axes of rhs (a kernel [K, N]), not over the last."""
        return self.contract[1][:1] == (0,)


class Quantized(NamedTuple):
    """A tensor in fp8, in its own order of axes and perhaps also transposed: [M..., K...] as [K..., M...]."""

    values: Any  # None where only the other form is kept
    inv_scale: Float[Array, ""]
    transposed: Any = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return (self.transposed if self.values is None else self.values).ndim


class Product(NamedTuple):
    """One of the three products of a matmul, of operands a and b. Axes count in the tensors' own order.

    Attributes:
      name: "fprop", "dgrad" or "wgrad".
      contract, batch: as in the dimension numbers of `jax.lax.dot_general`.
      out_dtype, out_sharding: of the result.
      order: the axes of the tensor that the result is, or whose gradient it is, in the order of the product.
      zeros: to cut off from the result, in its final order.
    """

    name: str
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    out_dtype: Any
    out_sharding: Any
    order: tuple[int, ...]
    zeros: Zeros

    def ordered(self, y: Array) -> Array:
        """The result `y` of the product in its final order of axes."""
        return jnp.transpose(y, [self.order.index(i) for i in range(y.ndim)])


def fprop(gemm: Gemm) -> Product:
    """y = x w."""
    order = tuple(range(sum(gemm.ndims) - 2 * len(gemm.contract[0]) - len(gemm.batch[0])))
    return Product("fprop", gemm.contract, gemm.batch, gemm.out_dtype, gemm.out_sharding, order, gemm.zeros("grad"))


def dgrad(gemm: Gemm) -> Product:
    """dx = g w^T; the axes of g are (batch, free of lhs, free of rhs)."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = gemm.contract, gemm.batch
    lhs_free, rhs_free, grad_batch, _, grad_rhs = _axes_of_gradient(gemm)
    order = (*lhs_batch, *lhs_free, *[lhs_contract[rhs_contract.index(i)] for i in sorted(rhs_contract)])
    sharding = _permuted(gemm.lhs_sharding, order)
    contract, batch = (grad_rhs, rhs_free), (grad_batch, rhs_batch)
    return Product("dgrad", contract, batch, gemm.dgrad_dtype, sharding, order, gemm.lhs_zeros)


def wgrad(gemm: Gemm) -> Product:
    """dw = x^T g."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = gemm.contract, gemm.batch
    lhs_free, rhs_free, grad_batch, grad_lhs, _ = _axes_of_gradient(gemm)
    order = (*rhs_batch, *[rhs_contract[lhs_contract.index(i)] for i in sorted(lhs_contract)], *rhs_free)
    sharding = _permuted(gemm.rhs_sharding, order)
    contract, batch = (lhs_free, grad_lhs), (lhs_batch, grad_batch)
    return Product("wgrad", contract, batch, gemm.rhs_dtype, sharding, order, gemm.rhs_zeros)


def _axes_of_gradient(gemm: Gemm) -> tuple[tuple[int, ...], ...]:
    """The free axes of lhs and rhs, and the axes of the gradient of the result: (batch, free of lhs, free of rhs)."""
    free = [_others(ndim, *axes) for ndim, *axes in zip(gemm.ndims, gemm.contract, gemm.batch, strict=True)]
    batch, n_lhs, n_rhs = len(gemm.batch[0]), len(free[0]), len(free[1])
    axes = tuple(range(batch + n_lhs + n_rhs))
    return free[0], free[1], axes[:batch], axes[batch : batch + n_lhs], axes[batch + n_lhs :]


def multiplied(product: Product, a: Any, b: Any, multiply: Callable[[Any, Any, Product], Array]) -> Array:
    """The result of a product, in its final order and without the zeros."""
    with jax.named_scope(f"jaxmp.fp8_{product.name}"):
        return crop(product.ordered(multiply(a, b, product)), product.zeros)


def in_bfloat16(product: Product, a: Array, b: Array) -> Array:
    """The result of a product of tensors that are not cast to a narrow dtype and not padded, in its final order."""
    written = jnp.bfloat16 if product.out_dtype == jnp.bfloat16 else jnp.float32
    with jax.named_scope(f"jaxmp.bf16_{product.name}"):
        out = lax.dot_general(
            a.astype(jnp.bfloat16),
            b.astype(jnp.bfloat16),
            (product.contract, product.batch),
            preferred_element_type=written,
            out_sharding=product.out_sharding,
        )
        return product.ordered(out.astype(product.out_dtype))


def _permuted(sharding: NamedSharding | None, order: tuple[int, ...]) -> NamedSharding | None:
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in order)))


def _others(ndim: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    return tuple([i for i in range(ndim) if i not in (*contract, *batch)])


def multiply(a: Quantized, b: Quantized, product: Product, *, power_of_two: bool) -> Array:
    """One GEMM of fp8 operands, unscaled, as a recipe multiplies. `power_of_two`: the scales."""
    inv_scale = a.inv_scale * b.inv_scale
    written = accumulator(product.out_dtype, power_of_two=power_of_two)
    contract, batch = product.contract, product.batch
    dot = functools.partial(lax.dot_general, out_sharding=product.out_sharding)

    def in_fp8(a: Quantized, b: Quantized) -> Array:
        (x, x_axes), (y, y_axes) = _summed_last(a, contract[0]), _summed_last(b, contract[1])
        numbers = ((x_axes, y_axes), batch)
        # Without this, XLA makes one GEMM of those that read one tensor (q, k and v), and copies their other operands
        # beside each other, and their results apart. The scale tells the barriers of one tensor apart. The other
        # operand stays as it is: a weight that is split over devices is gathered once, for fprop and dgrad.
        x, _ = lax.optimization_barrier((x, b.inv_scale))
        return dot(
            x,
            y,
            dimension_numbers=numbers,
            precision=algorithm(fast=product.name == "fprop"),
            preferred_element_type=written,
        )

    def in_float32(a: Quantized, b: Quantized) -> Array:  # products of fp8 numbers are exact in float32
        x, y = _in_own_order(a, contract[0]).astype(jnp.float32), _in_own_order(b, contract[1]).astype(jnp.float32)
        return dot(x, y, dimension_numbers=(contract, batch), precision=lax.Precision.HIGHEST).astype(written)

    out = hardware.on_fp8_hardware(in_fp8, in_float32)(a, b)
    return (out * inv_scale.astype(out.dtype)).astype(product.out_dtype)


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
        return t.values, axes
    return t.transposed, tuple(range(t.ndim - len(axes), t.ndim))


def _in_own_order(t: Quantized, axes: tuple[int, ...]) -> Array:
    """The tensor in its own order of axes; if only the transposed form was kept, the GEMM sums over its first axes."""
    if t.values is not None:
        return t.values
    # The barrier keeps XLA from folding the transpose into a matmul, which would sum in another order.
    return lax.optimization_barrier(reference.transpose(t.transposed, t.ndim - len(axes)))


# --- zeros that make sides multiples of 16 ----------------------------------------------------------------------------


def zeros_for(lhs: Sequence[int], rhs: Sequence[int], contract: Any, batch: Any) -> tuple[Zeros, Zeros]:
    """How many zeros lhs and rhs of these shapes get, so that M, K and N are multiples of 16 for each of the batch.

    Example:
      >>> zeros_for((3, 197, 64), (64, 10), ((2,), (0,)), ((), ()))
      ((0, 11, 0), (0, 6))
    """
    lhs_zeros, rhs_zeros = [0] * len(lhs), [0] * len(rhs)
    for axis, count in _longer(lhs, _others(len(lhs), contract[0], batch[0])):
        lhs_zeros[axis] = count
    for axis, count in _longer(rhs, _others(len(rhs), contract[1], batch[1])):
        rhs_zeros[axis] = count
    for axis, count in _longer(lhs, contract[0]):
        lhs_zeros[axis] = rhs_zeros[contract[1][contract[0].index(axis)]] = count
    return _or_none(lhs_zeros), _or_none(rhs_zeros)


def pad(x: Array, zeros: Zeros) -> Array:
    """`x` with zeros at the end of its axes."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, count, 0) for count in zeros]) if zeros else x


def crop(x: Array, zeros: Zeros) -> Array:
    """`x` without the zeros."""
    if not zeros:
        return x
    return lax.slice(x, (0,) * x.ndim, [size - count for size, count in zip(x.shape, zeros, strict=True)])


def _longer(shape: Sequence[int], axes: Sequence[int]) -> list[tuple[int, int]]:
    """The axis of a side that gets zeros, and how many; nothing for a side that is a multiple already."""
    side = math.prod([shape[i] for i in axes])
    if side % MULTIPLE == 0:  # an empty side, too
        return []
    counts = []
    for place, axis in enumerate(axes):
        rest = side // shape[axis]
        step = MULTIPLE // math.gcd(MULTIPLE, rest)
        count = -shape[axis] % step
        counts.append((count * rest, -place, axis, count))
    *_, axis, count = min(counts)
    return [(axis, count)]


def _or_none(zeros: Sequence[int]) -> Zeros:
    return tuple(zeros) if any(zeros) else ()
