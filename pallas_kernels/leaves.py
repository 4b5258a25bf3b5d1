"""The data types of multi-tensor kernels: a leaf as the kernel gets it, and its values as the arithmetic gets them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float


class Leaf(NamedTuple):
    """The arrays of one leaf of the tree; each has the leaf's size, or one element per group."""

    reads: tuple[Array, ...] = ()  # arrays that are only read
    states: tuple[Array, ...] = ()  # arrays that are read and written in place
    writes: tuple[Array, ...] = ()  # arrays that are written in place and never read
    outs: tuple[Any, ...] = ()  # dtypes of new arrays, of the leaf's shape
    numbers: tuple[float, ...] = ()  # numbers of this leaf (weight decay, ...); the same count for all leaves
    kind: Any = None  # other static facts about the leaf for `f`; hashable
    group: int = 1  # how many neighbours share an element of the smaller arrays; it divides the last axis


class Level(NamedTuple):
    """Blocks of `size` elements; each thread has runs of `vector` neighbours (0: a scalar)."""

    size: int
    vector: int


class Values(NamedTuple):
    """The values that `f` gets: a block of a leaf in a kernel, the whole leaf in the reference."""

    reads: tuple[Any, ...]  # values in the arrays' own dtypes
    states: tuple[Any, ...]  # likewise
    numbers: tuple[Any, ...]  # `Leaf.numbers` in float32
    scalars: tuple[Any, ...]  # float32, the same for all leaves
    kind: Any  # `Leaf.kind`
    group_max: Callable[[Any], Any]  # the maximum over each group, in a shape that broadcasts against the values
    index: Callable[[], Any]  # () -> int32, the number of each element within its leaf
    in_kernel: bool  # whether this is a block in a kernel; Mosaic lowers fewer primitives than XLA


# The arithmetic of a kernel: values -> (new states, then writes, then outs; values to sum over all elements of all
# leaves). It may return fewer than `n_sums` values to sum; the other sums are then zero.
Function = Callable[[Values], tuple[Sequence[Any], Sequence[Any]]]


class Result(NamedTuple):
    """The result of a multi-tensor kernel."""

    leaves: list[tuple[Array, ...]]  # for each leaf its states, writes and outs
    sums: tuple[Float[Array, ""], ...]  # float32[] each; undefined if `when` is false


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the leaf, which is that of its largest array."""
    return max((x.shape for x in (*leaf.reads, *leaf.states, *leaf.writes)), key=math.prod)


def signature_of(leaf: Leaf) -> Any:
    """Sizes, dtypes and static facts of a leaf; a kernel treats leaves of equal signature in the same way."""
    arrays = (*leaf.reads, None, *leaf.states, None, *leaf.writes)
    return tuple(x if x is None else (x.size, x.dtype) for x in arrays), leaf.outs, leaf.kind, leaf.group
