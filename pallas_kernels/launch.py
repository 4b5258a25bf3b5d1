"""The launch of a multi-tensor kernel over one bucket of leaves.

Blocks are numbered through over *regions*: leaves of one kind, cut into blocks of one size, share a region and with it
the arithmetic. A block finds its region, then its leaf, then its place.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.leaves import Function, Leaf, Level, Values, shape_of

THREADS = 128  # a warpgroup


class Region(NamedTuple):
    """Blocks of one size over leaves of one kind.

    Attributes:
      start: number of the first block.
      level: the size of blocks.
      leaves: numbers of the leaves.
      firsts: of each leaf the first block, counted from `start`; and the number of blocks.
      offsets: of each leaf the element at which its first block begins.
      group: that of the leaves.
    """

    start: int
    level: Level
    leaves: tuple[int, ...]
    firsts: tuple[int, ...]
    offsets: tuple[int, ...]
    group: int


class Program(NamedTuple):
    """What is fixed about a launch; launches that are equal in it are traced and compiled once.

    Attributes:
      f: the arithmetic.
      regions: see `regions`.
      statics: of each leaf (outs, (), kind, group).
      n_sums: how many sums `f` returns at most.
      name: of the kernel.
    """

    f: Function
    regions: tuple[Region, ...]
    statics: tuple[Any, ...]
    n_sums: int
    name: str


def n_blocks(regions: Sequence[Region]) -> int:
    """How many blocks there are in all."""
    return regions[-1].start + regions[-1].firsts[-1]


def regions(bucket: Sequence[Leaf], levels: Sequence[Level]) -> Iterator[Region]:
    """The regions of a bucket of flat leaves, in order."""
    start = 0
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(bucket):
        arrays = (*leaf.reads, None, *leaf.states, None, *leaf.writes)
        n = math.prod(shape_of(leaf))
        kind = tuple(x if x is None else (x.dtype, x.size == n) for x in arrays), leaf.outs, leaf.kind, leaf.group
        kinds.setdefault(kind, []).append(i)
    for (*_, group), members in kinds.items():
        done = dict.fromkeys(members, 0)
        whole = (Level(2, group, group // THREADS), Level(1, group, group // THREADS))
        for level in levels if group == 1 else whole:
            block = level.pieces * level.size
            here, firsts, offsets = [], [0], []
            for i in members:
                count = (math.prod(shape_of(bucket[i])) - done[i]) // block
                if count:
                    here.append(i)
                    firsts.append(firsts[-1] + count)
                    offsets.append(done[i])
                    done[i] += count * block
            if here:
                yield Region(start, level, tuple(here), tuple(firsts), tuple(offsets), group)
                start += firsts[-1]


@functools.partial(jax.jit, static_argnames=("program", "interpret"))
def launch(
    packed: Array,
    numbers: Array,
    first_sum: Array,
    sums: Array,
    arrays: Sequence[Any],
    *,
    program: Program,
    interpret: Any,
) -> tuple[list[tuple[Array, ...]], Array]:
    """Runs `program.f` on a bucket.

    Args:
      packed: float32[1 + scalars]: whether to run at all, and the scalars.
      numbers: float32, the numbers of the leaves, one leaf after the other.
      first_sum: int32[1], where the sums of this launch begin.
      sums: float32[n_sums * blocks of all launches].
      arrays: of each leaf its reads, states and writes, flat.
      program: all else.
      interpret: what `pl.kernel` takes for it.

    Returns:
      Of each leaf its states, writes and outs; and `sums` with those of this launch.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bucket = [Leaf(*a, *s) for a, s in zip(arrays, program.statics, strict=True)]
    read = [leaf.reads for leaf in bucket]
    fresh = [tuple(lax.empty(shape_of(leaf), d) for d in leaf.outs) for leaf in bucket]
    written = [(leaf.states, leaf.writes, outs) for leaf, outs in zip(bucket, fresh, strict=True)]
    body = functools.partial(_body, program, bucket)
    functools.update_wrapper(body, _body).__name__ = program.name  # as profiles and compiled programs call the kernel
    kernel = plgpu.kernel(
        body,
        grid=(n_blocks(program.regions),),
        grid_names=("block",),
        interpret=interpret,
        # The other semantics infers layouts by a search, which takes ten times as long over many leaves.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def run(refs: Any) -> None:
        kernel(packed, numbers, first_sum, read, *refs)

    written, sums = pl.run_state(run)((written, sums))
    return [(*states, *writes, *outs) for states, writes, outs in written], sums


def _body(program: Program, bucket: list[Leaf], packed: Any, numbers: Any, first_sum: Any, *refs: Any) -> None:
    """One block: the region it is in does the work."""
    from jax.experimental import pallas as pl

    i = lax.axis_index("block")
    for region in program.regions:
        inside = (i >= region.start) & (i < region.start + region.firsts[-1]) & (packed[0] > 0)
        pl.when(inside)(functools.partial(_run, program, bucket, region, i, packed, numbers, first_sum, *refs))


def _run(
    program: Program,
    bucket: list[Leaf],
    region: Region,
    i: Any,
    packed: Any,
    numbers: Any,
    first_sum: Any,
    read: Any,
    written: Any,
    sums: Any,
) -> None:
    """One block of a region: load by leaf, `f`, store by leaf."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    level, block = region.level, region.level.pieces * region.level.size
    some = bucket[region.leaves[0]]
    n_numbers = numbers.shape[0] // len(bucket)
    j = i - region.start
    which = sum([(j >= first).astype(jnp.int32) for first in region.firsts[1:-1]], jnp.int32(0))

    def place(k: int, piece: int) -> Any:
        return (j - region.firsts[k]) * block + (region.offsets[k] + piece * level.size)

    def load(k: int) -> Any:
        leaf = region.leaves[k]
        access = _Access(level, math.prod(shape_of(bucket[leaf])), region.group)
        states, _, _ = written[leaf]
        refs = (*read[leaf], *states)
        values = tuple(tuple(access.load(ref, place(k, piece)) for ref in refs) for piece in range(level.pieces))
        return values, tuple(numbers[leaf * n_numbers + n] for n in range(n_numbers))

    def index(piece: int) -> Any:
        start = place(0, piece)
        for k in range(1, len(region.leaves)):
            start = jnp.where(which == k, place(k, piece), start)
        if not level.vector:
            return start
        return plgpu.broadcasted_iota(jnp.int32, (level.size,), 0, layout=_layout(level)) + start

    of_leaf = [functools.partial(load, k) for k in range(len(region.leaves))]
    pieces, own_numbers = lax.switch(which, of_leaf)
    if not level.vector:
        plgpu.commit_smem()  # a barrier: every thread reads the scalar before one of them writes it
    results: list[tuple[Any, ...]] = []
    totals = [jnp.float32(0)] * program.n_sums
    whole = jnp.max if level.vector else lambda x: x
    add_up = jnp.sum if level.vector else lambda x: x
    for piece, loaded in enumerate(pieces):
        values = Values(
            loaded[: len(some.reads)],
            loaded[len(some.reads) :],
            own_numbers,
            tuple(packed[k] for k in range(1, packed.shape[0])),
            some.kind,
            whole,
            functools.partial(index, piece),
        )
        new, parts = program.f(values)
        results.append(tuple(new))
        for n, part in enumerate(parts):
            totals[n] += add_up(part)

    def store(k: int) -> None:
        leaf = region.leaves[k]
        access = _Access(level, math.prod(shape_of(bucket[leaf])), region.group)
        for piece, new in enumerate(results):
            for ref, x in zip([ref for part in written[leaf] for ref in part], new, strict=True):
                access.store(ref, place(k, piece), x)

    lax.switch(which, [functools.partial(store, k) for k in range(len(region.leaves))])
    for n, total in enumerate(totals):
        sums[n * (sums.shape[0] // program.n_sums) + first_sum[0] + i] = total


class _Access(NamedTuple):
    """How a block is read from and written to memory: as a vector, as a scalar, as its group's one element."""

    level: Level
    size: int
    group: int

    def load(self, ref: Any, start: Any) -> Any:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self._is_per_group(ref):
            return ref[lax.div(start, jnp.int32(self.group))]
        if not self.level.vector:
            return ref[start]
        block = ref.at[pl.ds(pl.multiple_of(start, self.level.size), self.level.size)]
        return plgpu.load(block, layout=_layout(self.level), optimized=False)

    def store(self, ref: Any, start: Any, x: Any) -> None:
        from jax.experimental import pallas as pl

        if self._is_per_group(ref):
            ref[lax.div(start, jnp.int32(self.group))] = x
        elif not self.level.vector:
            ref[start] = x.astype(ref.dtype)
        else:
            ref[pl.ds(pl.multiple_of(start, self.level.size), self.level.size)] = x.astype(ref.dtype)

    def _is_per_group(self, ref: Any) -> bool:
        return self.group > 1 and ref.shape[0] < self.size


def _layout(level: Level) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Layout.WG_STRIDED((level.size,), vec_size=level.vector)
