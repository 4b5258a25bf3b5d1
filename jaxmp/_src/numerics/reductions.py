"""Sums of squares, and whether arrays hold a number that must not enter the optimizer: on a GPU two parts of one sum.

A step needs both for every gradient: the norm for clipping, the flag for the decision to skip. XLA for GPU computes two
sums of one array in one pass over memory. But on a large array, each sum needs a separate launch at the end, which adds
the results of the blocks. One sum of complex numbers needs a single launch for both. Different code asks for the norm
and for the flag, each by its own function below. Both functions write the same sum, and XLA computes equal sums once.
If only one of them is needed, the other costs no time, because the pass is limited by memory. On CPU and TPU this is no
faster, so XLA gets ordinary sums there.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex64, Float, PyTree

from pallas_kernels import backend, reference
from pallas_kernels.by_platform import by_platform
from pallas_kernels.unscale import LARGEST as LARGEST


def sums_of_squares(arrays: Sequence[Float[Array, "..."]]) -> list[Float[Array, ""]]:
    """The sum of the squares of each of several float32 arrays, in float32."""
    on_gpu = lambda _, xs: [jnp.real(_both(x)) for x in xs]  # noqa: E731
    return by_platform(lambda xs: [jnp.sum(x * x) for x in xs], list(arrays), cuda=on_gpu, rocm=on_gpu)


def any_unusable(arrays: Sequence[Float[Array, "..."]]) -> Bool[Array, ""]:
    """Whether a number in one of several float arrays is NaN, inf or 2^48 or more (see `pallas_kernels.unscale`)."""
    return unusable_and_largest(arrays, None)[0]


def unusable_and_largest(
    arrays: Sequence[Float[Array, "..."]], factor: Float[Array, ""] | None
) -> tuple[Bool[Array, ""], Float[Array, ""]]:
    """(`any_unusable`, the largest magnitude) of several float arrays times `factor` (None: 1), in float32.

    The magnitude is inf if a number is inf or NaN, and 0 without numbers. In a program for a GPU it is -1: there the
    flag comes with the sum of squares, and a maximum would be a second reduction of each array.
    """

    def plain(arrays: list[Array], factor: Any) -> tuple[Array, Array]:
        largest = functools.reduce(jnp.maximum, map(reference.largest_magnitude, arrays), jnp.zeros((), jnp.float32))
        largest = largest if factor is None else reference.largest_magnitude(largest * factor)  # rounding keeps order
        return ~(largest < LARGEST), largest

    def on_gpu(_: Any, arrays: list[Array], factor: Any) -> tuple[Array, Array]:
        unscaled = arrays if factor is None else [x.astype(jnp.float32) * factor for x in arrays]
        bad = _any(jnp.imag(_both(x)) > 0 for x in unscaled)
        return bad, jnp.full((), -1, jnp.float32)

    def on_cpu(_: Any, arrays: list[Array], factor: Any) -> tuple[Array, Array]:
        if backend.may_be_split(arrays):  # devices may share them in different ways
            return plain(arrays, factor)
        largest = largest_on_cpu(arrays, factor)
        return ~(largest < LARGEST), largest

    def types(arrays: list[Array], factor: Any) -> tuple[Array, Array]:
        axes = backend.varying_axes_of((arrays, factor))
        return backend.as_varying(jnp.zeros((), bool), axes), backend.as_varying(jnp.zeros((), jnp.float32), axes)

    operands = lax.stop_gradient((list(arrays), factor))
    by_default = lambda _, *operands: plain(*operands)  # noqa: E731
    return by_platform(types, *operands, default=by_default, cuda=on_gpu, rocm=on_gpu, cpu=on_cpu)


def largest_on_cpu(arrays: Sequence[Float[Array, "..."]], factor: Float[Array, ""] | None) -> Float[Array, ""]:
    """The largest magnitude of several float arrays times `factor`, as `unusable_and_largest`.

    Magnitudes are ordered as their bits are, with inf and NaN above all numbers; rounding keeps the order. So integers
    are compared, in the 16 bits of the array, and one number of each group is converted and multiplied.

    XLA for CPU needs a loop for the operands of a reduction, which writes them, and one that reads them. So a few
    arrays of one size, or a few parts of a large one, are joined elementwise before. Small ones come one after the
    other in one array: each loop takes longer to compile than they take to copy.
    """
    alike: dict[tuple[Any, int], list[Array]] = {}
    small: dict[Any, list[Array]] = {}
    for x in arrays:
        if x.size:
            x = x if x.dtype in (jnp.float16, jnp.bfloat16) else x.astype(jnp.float32)
            like = small.setdefault(x.dtype, []) if x.size < _SMALL else alike.setdefault((x.dtype, x.size), [])
            like.append(x.reshape(-1))
    groups = [xs[i : i + _JOINED] for xs in alike.values() for i in range(0, len(xs), _JOINED)]
    maxima = [_largest_of(group, -(-_JOINED // len(group)) if group[0].size >= _LARGE else 1) for group in groups]
    maxima += [_largest_of([jnp.concatenate(xs)], 1) for xs in small.values()]
    if not maxima:
        return jnp.zeros((), jnp.float32)
    return reference.largest_magnitude(jnp.stack(maxima) if factor is None else jnp.stack(maxima) * factor)


_JOINED = 16
_SMALL = 2**12
_LARGE = 2**14


def _largest_of(alike: Sequence[Float[Array, "N"]], count: int) -> Float[Array, ""]:
    """The largest magnitude in arrays of one dtype and size, each cut into `count` parts, in float32; NaN if one is."""
    (dtype,), (size,) = {x.dtype for x in alike}, {x.size for x in alike}
    kind = jnp.dtype(f"int{8 * dtype.itemsize}")
    length = -(-size // count)
    starts = [min(i * length, size - length) for i in range(count)]  # the last part may overlap the one before
    parts = [lax.slice(x, (start,), (start + length,)) for x in alike for start in starts] if count > 1 else alike
    bits = [lax.bitcast_convert_type(x, kind) & np.array(jnp.iinfo(kind).max, kind) for x in parts]
    return lax.bitcast_convert_type(jnp.max(functools.reduce(lax.max, bits)), dtype).astype(jnp.float32)


def any_nonfinite(arrays: Sequence[Array]) -> Bool[Array, ""]:
    """Whether one of several float or complex arrays holds inf or NaN."""
    return _any(jnp.any(~jnp.isfinite(x)) for x in arrays)


def _any(flags: Iterable[Bool[Array, ""]]) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_or, flags, jnp.zeros((), bool))


def _both(x: Float[Array, "..."]) -> Complex64[Array, ""]:
    """(sum of squares, number of elements that are not usable) as one complex number."""
    return jnp.sum(lax.complex(x * x, (~(jnp.abs(x) < LARGEST)).astype(jnp.float32)))


def computed_once(scalars: PyTree) -> PyTree:
    """`scalars` unchanged, but XLA computes them once instead of once in each kernel that reads them.

    A scalar that depends on all n leaves of a tree (a flag, a norm) ends in a chain of n cheap operations. XLA copies
    this chain into the kernel of every leaf that uses the scalar. The program then has n^2 operations, and 1000 leaves
    take minutes to compile.

    Args:
      scalars: any pytree of arrays.

    Example:
      >>> computed_once((jnp.float32(2.0), jnp.array(True)))
      (Array(2., dtype=float32), Array(True, dtype=bool))
    """
    return lax.optimization_barrier(scalars)


def out_of_one_array(scalars: Sequence[Float[Array, ""]]) -> list[Float[Array, ""]]:
    """`scalars` unchanged, but out of one array: XLA for GPU computes what is made of each in one launch for all."""
    together = computed_once(jnp.stack(scalars))
    return [lax.index_in_dim(together, i, keepdims=False) for i in range(len(scalars))]
