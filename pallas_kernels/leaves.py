"""What a multi-tensor kernel is told of each leaf of a tree, and what its arithmetic gets to see of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float


class Leaf(NamedTuple):
    """What belongs to one leaf of the tree: arrays of the leaf's size, or of one element for each of its groups.

    Attributes:
      reads: arrays that are only read.
      states: arrays that are read and written in place.
      writes: arrays that are written in place and never read.
      outs: dtypes of new arrays, of the leaf's shape.
      numbers: what else differs from leaf to leaf (weight decay, say); equally many for each leaf.
      kind: what `f` has to know of the leaf beyond that; hashable.
      group: how many neighbouring elements share an element of the smaller arrays; 1 where there are none. It divides
        the last axis.
    """

    reads: tuple[Array, ...] = ()
    states: tuple[Array, ...] = ()
    writes: tuple[Array, ...] = ()
    outs: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    kind: Any = None
    group: int = 1


class Level(NamedTuple):
    """A size of blocks: `pieces` times `size` elements, each thread with runs of `vector` neighbours; 0: scalars."""

    pieces: int
    size: int
    vector: int


class Values(NamedTuple):
    """What `f` sees of a leaf: a block of it in a kernel, all of it in the reference.

    Attributes:
      reads, states: the values, in the arrays' own dtypes.
      numbers: those of the leaf, float32.
      scalars: float32, the same for all leaves.
      kind: that of the leaf.
      group_max: the maximum over each group, to be broadcast against the values.
      index: () -> int32, the number of each element within its leaf.
    """

    reads: tuple[Any, ...]
    states: tuple[Any, ...]
    numbers: tuple[Any, ...]
    scalars: tuple[Any, ...]
    kind: Any
    group_max: Callable[[Any], Any]
    index: Callable[[], Any]


# (values) -> (new states, then writes, then outs; values to be summed up, each over all elements of all leaves; fewer
# than `n_sums` where the others are zero)
Function = Callable[[Values], tuple[Sequence[Any], Sequence[Any]]]


class Result(NamedTuple):
    """`leaves`: of each leaf its states, writes and outs; `sums`: float32[] each, undefined where `when` is false."""

    leaves: list[tuple[Array, ...]]
    sums: tuple[Float[Array, ""], ...]


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the leaf: that of its largest array."""
    return max((x.shape for x in (*leaf.reads, *leaf.states, *leaf.writes)), key=math.prod)


def signature_of(leaf: Leaf) -> Any:
    """Leaves of the same signature look alike to a kernel."""
    arrays = (*leaf.reads, None, *leaf.states, None, *leaf.writes)
    return tuple(x if x is None else (x.size, x.dtype) for x in arrays), leaf.outs, leaf.kind, leaf.group
