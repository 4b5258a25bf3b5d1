"""Sums of squares, and whether arrays hold a number that must not enter the optimizer: on a GPU two parts of one sum.

A step needs both for every gradient: the norm for clipping, the flag for the decision to skip. XLA for GPU computes two
sums of one array in one pass over memory. But on a large array, each sum needs a separate launch at the end, which adds
the results of the blocks. One sum of complex numbers needs a single launch for both. Different code asks for the norm
and for the flag, each by its own function below. Both functions write the same sum, and XLA computes equal sums once.
If only one of them is needed, the other costs no time, because the pass is limited by memory. On CPU and TPU this is no
faster, so XLA gets ordinary sums there.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Complex64, Float

from pallas_kernels import backend
from pallas_kernels.by_platform import by_platform
from pallas_kernels.unscale import LARGEST as LARGEST


def sums_of_squares(arrays: Sequence[Float[Array, "..."]]) -> list[Float[Array, ""]]:
    """The sum of the squares of each of several float32 arrays, in float32."""
    on_gpu = lambda _, xs: [jnp.real(_both(x)) for x in xs]  # noqa: E731
    return by_platform(lambda xs: [jnp.sum(x * x) for x in xs], list(arrays), cuda=on_gpu, rocm=on_gpu)


def any_unusable(arrays: Sequence[Float[Array, "..."]]) -> Bool[Array, ""]:
    """Whether a number in one of several float32 arrays is NaN, inf or 2^48 or more (see `pallas_kernels.unscale`)."""
    on_gpu = lambda _, xs: _any(jnp.imag(_both(x)) > 0 for x in xs)  # noqa: E731
    on_cpu = lambda _, xs: any_on_cpu(_is_unusable, xs)  # noqa: E731
    plain = lambda xs: _any(jnp.any(_is_unusable(x)) for x in xs)  # noqa: E731
    return by_platform(plain, lax.stop_gradient(list(arrays)), cuda=on_gpu, rocm=on_gpu, cpu=on_cpu)


def any_on_cpu(test: Callable[[Array], Array], arrays: Sequence[Array]) -> Bool[Array, ""]:
    """Whether `test`, which gives a bool for each number, is true anywhere.

    XLA for CPU needs a loop for the tests of an array, which writes a byte for each, and one to join them. So the tests
    of a few arrays of one shape are joined first, elementwise. (Where devices share arrays, these may be split in
    different ways.)
    """
    if backend.devices_of(arrays) > 1:
        return _any(jnp.any(test(x)) for x in arrays)
    alike: dict[tuple[int, ...], list[Array]] = {}
    for x in arrays:
        alike.setdefault(x.shape, []).append(x)
    groups = [xs[i : i + _JOINED] for xs in alike.values() for i in range(0, len(xs), _JOINED)]
    return _any(jnp.any(functools.reduce(jnp.logical_or, map(test, group))) for group in groups)


_JOINED = 8


def _is_unusable(x: Float[Array, "..."]) -> Bool[Array, "..."]:
    return ~(jnp.abs(x) < LARGEST)


def any_nonfinite(arrays: Sequence[Array]) -> Bool[Array, ""]:
    """Whether one of several float or complex arrays holds inf or NaN."""
    return _any(jnp.any(~jnp.isfinite(x)) for x in arrays)


def _any(found: Iterable[Bool[Array, ""]]) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_or, found, jnp.zeros((), bool))


def _both(x: Float[Array, "..."]) -> Complex64[Array, ""]:
    """(sum of squares, number of elements that are not usable) as one complex number."""
    return jnp.sum(lax.complex(x * x, _is_unusable(x).astype(jnp.float32)))
