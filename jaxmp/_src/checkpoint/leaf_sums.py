"""Checksums of a tree's leaves that do not depend on the devices of the leaves.

A checkpoint is written by some devices and read by others, so the checksum of a leaf is a sum over its elements:

    sum over (i, j, ...) of bits(x[i, j, ...]) * r_0(i) * r_1(j) * ...     modulo 2^64

with odd random numbers `r_d(i)`, a hash of (dimension, position). Each device sums over its part, and the parts add up
to the same number for any sharding of the leaf. The product of odd numbers is odd, so a change of one element always
changes the sum. Any other damage leaves the sum unchanged with a probability of about 2^-48.
"""

import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

_BLOCK = 2**16  # elements that are summed at a time
_NARROW = 64  # rows with fewer elements are not summed one by one


def of_leaves(
    leaves: Mapping[str, Any], whole: Callable[[str, tuple[int, ...]], tuple[int, ...]] | None = None
) -> dict[str, str]:
    """{path: checksum} of leaves by path: arrays of jax or NumPy, keys, numbers. All processes of a job call it.

    `whole(path, shape)` is the shape of a leaf without padding: what lies outside does not count.
    """
    leaves = {path: _checked(path, x) for path, x in leaves.items()}
    shapes = {path: x.shape if whole is None else whole(path, x.shape) for path, x in leaves.items()}
    jobs = [(path, shapes[path], part) for path, x in leaves.items() for part in _parts_here(x)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda job: sum_of_part(*job[2], shape=job[1]), jobs)
    totals = dict.fromkeys(leaves, 0)
    for (path, *_), value in zip(jobs, found, strict=True):
        totals[path] += value
    totals = _over_processes(totals)
    for path, x in leaves.items():
        totals[path] += _kind(x.dtype, shapes[path])
    return {path: f"{value % 2**64:016x}" for path, value in totals.items()}


def differing(found: Mapping[str, str], recorded: Mapping[str, str]) -> list[str]:
    """The paths whose checksums differ, or that only one of the two has."""
    return [path for path in dict.fromkeys([*recorded, *found]) if found.get(path) != recorded.get(path)]


def sum_of_part(x: Any, starts: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The sum over the part `x` of an array; `starts` is where it begins in each dimension, `shape` where all ends."""
    x = np.asarray(x() if callable(x) else x)
    bits = _bits(x[tuple(slice(max(end - start, 0)) for start, end in zip(starts, shape, strict=True))])
    return _sum(bits, (*starts, 0) if bits.ndim > len(shape) else starts, 0) % 2**64


def _sum(bits: np.ndarray, starts: tuple[int, ...], dimension: int) -> int:
    """The sum of a part whose first axis is this dimension of the whole."""
    if bits.size == 0:
        return 0
    if bits.ndim == 0:
        return int(bits)
    width = bits.size // bits.shape[0]
    rows, total = max(1, _BLOCK // width), 0
    of_row = np.ones(1, np.uint64)
    if width <= _BLOCK:
        for d, length in enumerate(bits.shape[1:], 1):
            of_row = np.multiply.outer(of_row, _factors(dimension + d, starts[d], length)).reshape(-1)
    for start in range(0, bits.shape[0], rows):
        block = bits[start : start + rows]
        first = _factors(dimension, starts[0] + start, len(block))
        if width > _BLOCK:
            total += int(first[0]) * _sum(block[0], starts[1:], dimension + 1)
        elif width < _NARROW:
            factors = first if bits.ndim == 1 else np.multiply.outer(first, of_row).reshape(-1)
            total += int(np.einsum("i,i->", block.reshape(-1), factors))
        else:
            total += int(np.einsum("i,i->", np.einsum("ij,j->i", block.reshape(len(block), width), of_row), first))
    return total


def _factors(dimension: int, start: int, length: int) -> np.ndarray:
    """Odd random numbers for positions of a dimension: a hash of (dimension, position)."""
    x = np.arange(start, start + length, dtype=np.uint64) + np.uint64((dimension + 1) << 48)
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of SplitMix64
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _bits(x: np.ndarray) -> np.ndarray:
    """The bits of each element as an unsigned integer; two of them for a complex number of 16 bytes."""
    if x.dtype.itemsize == 16:
        return np.ascontiguousarray(x)[..., None].view(np.uint64)
    return x.view(f"u{x.dtype.itemsize}")


def _kind(dtype: Any, shape: tuple[int, ...]) -> int:
    """A number for dtype and shape."""
    return zlib.crc32(f"{dtype.name}{tuple(shape)}".encode()) * 0x9E3779B97F4A7C15


def check_leaf(path: str, x: Any) -> None:
    """Raises a ValueError for a deleted array, and for what is no array of numbers, flags or keys, nor a number."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        raise ValueError(
            f"a checkpoint holds arrays that are there; {path} was deleted: it was donated to a step "
            f"(donate_argnums=), or delete() was called. Save what the step returned, or save before the step."
        )
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        is_saved = isinstance(x, float) or (isinstance(x, int) and -(2**63) <= x < 2**63)
    else:
        is_saved = dtype == jnp.bool_ or any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jax.dtypes.prng_key))
    if not is_saved:
        raise ValueError(
            f"a checkpoint holds arrays and numbers; got {type(x).__name__} at {path}: {x!r:.80}. Put text and other "
            f"values into metadata=, larger integers and complex numbers into an array, or leave them out."
        )


def _checked(path: str, x: Any) -> Any:
    check_leaf(path, x)
    if isinstance(x, jax.Array):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x)


def _parts_here(x: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """[(part, where it begins)] of the parts of a leaf that this process has to sum."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        if jax.process_index():  # each process has it; the first one counts it
            return []
    if not isinstance(x, jax.Array):
        return [(x, (0,) * x.ndim)]
    shards = [s for s in x.addressable_shards if s.replica_id == 0]
    # `s.data` is a new array each time: its copy on the host goes when the sum is taken.
    return [(lambda s=s: np.asarray(s.data), tuple(part.start or 0 for part in s.index)) for s in shards]


def _over_processes(totals: dict[str, int]) -> dict[str, int]:
    if jax.process_count() == 1:
        return totals
    halves = np.array([[v % 2**64 >> 32, v % 2**32] for v in totals.values()], np.uint32).reshape(-1, 2)
    everywhere = np.asarray(multihost_utils.process_allgather(halves)).astype(object)
    summed = everywhere.reshape(-1, len(totals), 2).sum(axis=0)
    return {path: int(high) * 2**32 + int(low) for path, (high, low) in zip(totals, summed, strict=True)}
