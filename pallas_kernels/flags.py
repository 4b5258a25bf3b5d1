"""Two flags for each element of each param: kept in a byte, and counted in few launches.

The counts are sums over all elements of all params. On a GPU a sum of a large array is two launches: the blocks of the
first write one number each, the second adds these. If each param ends in a number of its own, a model of 148 params
launches 150 kernels that only count. Inside one device these are a few instead:

    params of the same shape     their flags (of large params: the sums of their rows) are added elementwise
    each shape                   one sum

Added elementwise, nothing is moved or joined. Rows are summed in the optimizer's pass, in one launch.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int8

from pallas_kernels import write_order

Flags = list[Int8[Array, "..."]]

_SECOND = 3  # the bit of the second flag in a byte
_MOST = 2**_SECOND - 1  # so many bytes can be added and still say how many of both flags were set
_SMALL = 2**15  # elements; up to here the flags of a param are written as bytes, and not summed at once
_ROW = 128  # elements that are summed at least, so that the sums are few beside the param


def in_bytes(first: Sequence[Array], second: Sequence[Array | None]) -> Flags:
    """Two flags for each element of each param in an int8, in bits 0 and 3; None stands for no flag set."""
    return [
        x.astype(jnp.int8) if y is None else x.astype(jnp.int8) + 2**_SECOND * y.astype(jnp.int8)
        for x, y in zip(first, second, strict=True)
    ]


def first_of(flags: Flags) -> list[Bool[Array, "..."]]:
    """The first flags of `in_bytes`."""
    return [(x & 1) != 0 for x in flags]


def count(flags: Flags) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many of the first, and of the second flags are set; float32[] each. XLA for CPU counts only if any is set."""
    if not flags:
        return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.platform_dependent(_added(flags, at_most=_MOST), cpu=_count_if_any, default=_count)


def _count_if_any(added: Flags) -> tuple[Array, Array]:
    most = functools.reduce(jnp.maximum, [jnp.max(x, initial=0) for x in added])
    nothing = (jnp.zeros((), jnp.float32),) * 2
    return lax.cond(most > 0, lambda: _count(added), lambda: nothing)


def _count(added: Flags) -> tuple[Array, Array]:
    return count_in_pass([x & _MOST for x in added], [x >> _SECOND for x in added])


def count_in_pass(first: Sequence[Array], second: Sequence[Array | None]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same for flags that are not in bytes. XLA for GPU counts them in the pass over memory that makes them.

    Args:
      first: for each param an array of 0 and 1, or bools.
      second: for each param such an array of the same shape, or None for no flag set.
    """
    if all(y is None for y in second):
        return _sum_of(first, second, _first), jnp.zeros((), jnp.float32)
    if not write_order.is_for_gpu(first):
        return _sum_of(first, second, _first), _sum_of(first, second, _second)
    both = _sum_of(first, second, _as_one)
    return jnp.real(both), jnp.imag(both)


def _first(x: Array, _: Array | None) -> Array:
    return x.astype(jnp.float32)


def _second(_: Array, y: Array | None) -> Array:
    return jnp.zeros((), jnp.float32) if y is None else y.astype(jnp.float32)


def _as_one(x: Array, y: Array | None) -> Array:
    """Two numbers as a complex one: XLA for GPU makes two sums part of one pass only if they are one sum."""
    y = jnp.zeros_like(x) if y is None else y
    return lax.complex(x.astype(jnp.float32), y.astype(jnp.float32))


def _sum_of(first: Sequence[Array], second: Sequence[Array | None], number: Callable[..., Array]) -> Array:
    """The sum of `number(x, y)` over all elements of all params."""
    if not write_order.is_one_pass(first):
        return sum(
            (jnp.sum(number(x, y)) for x, y in zip(first, second, strict=True)), start=jnp.zeros((), jnp.float32)
        )
    # Behind the barrier they are computed once, with the update, and not again where they are added.
    small = [i for i, x in enumerate(first) if x.size <= _SMALL]
    large = [i for i, x in enumerate(first) if x.size > _SMALL]
    bytes_, rows = lax.optimization_barrier(
        (
            in_bytes([first[i] for i in small], [second[i] for i in small]),
            [_row_sums(number(first[i], second[i])) for i in large],
        )
    )
    parts = [number(x & _MOST, x >> _SECOND) for x in _added(bytes_, at_most=_MOST)] + rows
    return sum((jnp.sum(x) for x in _added(parts, at_most=len(parts))), start=jnp.zeros((), jnp.float32))


def _row_sums(x: Array) -> Array:
    """Sums over as few of the last axes of `x` as have `_ROW` elements."""
    n = next((n for n in range(1, x.ndim) if math.prod(x.shape[-n:]) >= _ROW), x.ndim)
    return jnp.sum(x, axis=tuple(range(x.ndim - n, x.ndim)))


def _added(arrays: list[Array], *, at_most: int) -> list[Array]:
    """Sums of arrays of one shape, of no more than `at_most` each."""
    alike: dict[tuple[int, ...], list[Array]] = {}
    for x in arrays:
        alike.setdefault(x.shape, []).append(x)
    return [
        functools.reduce(jnp.add, found[i : i + at_most])
        for found in alike.values()
        for i in range(0, len(found), at_most)
    ]
