"""Zeros that make each side of an fp8 GEMM a multiple of 16, which cuBLASLt needs.

The zeros are added before the cast, so that XLA casts, pads and finds the amax in one pass over the tensor. Afterwards
the results are cut to their size. Neither products nor amaxes change: a zero of one operand is multiplied by a zero of
the other.

A side may have several axes (batch and time); then the axis is padded that needs the fewest zeros. Only tensors that
are whole on a device are padded here: to extend a split axis would move data between devices. For split tensors, XLA
pads the part of each device.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

MULTIPLE = 16

Zeros = tuple[int, ...]  # how many are added at the end of each axis; () for none


def zeros_for(lhs: Sequence[int], rhs: Sequence[int], contract: Any, batch: Any) -> tuple[Zeros, Zeros]:
    """How many zeros lhs and rhs of these shapes get, so that M, K and N are multiples of 16 for each of the batch.

    Example:
      >>> zeros_for((3, 197, 64), (64, 10), ((2,), (0,)), ((), ()))
      ((0, 11, 0), (0, 6))
    """
    lhs_zeros, rhs_zeros = [0] * len(lhs), [0] * len(rhs)
    for axis, count in _longer(lhs, _others(lhs, contract[0], batch[0])):
        lhs_zeros[axis] = count
    for axis, count in _longer(rhs, _others(rhs, contract[1], batch[1])):
        rhs_zeros[axis] = count
    for axis, count in _longer(lhs, contract[0]):
        lhs_zeros[axis] = rhs_zeros[contract[1][contract[0].index(axis)]] = count
    return _or_none(lhs_zeros), _or_none(rhs_zeros)


def of_result(lhs: Zeros, rhs: Zeros, ndims: tuple[int, int], contract: Any, batch: Any) -> Zeros:
    """The zeros in the product of padded tensors, whose axes are (batch, free of lhs, free of rhs)."""
    lhs, rhs = lhs or (0,) * ndims[0], rhs or (0,) * ndims[1]
    free = [lhs[i] for i in _others(lhs, contract[0], batch[0])] + [rhs[i] for i in _others(rhs, contract[1], batch[1])]
    return _or_none([0] * len(batch[0]) + free)


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
    side = math.prod(shape[i] for i in axes)
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


def _others(shape: Sequence[int], *taken: Sequence[int]) -> list[int]:
    return [i for i in range(len(shape)) if not any(i in some for some in taken)]


def _or_none(zeros: Sequence[int]) -> Zeros:
    return tuple(zeros) if any(zeros) else ()
