"""The launch of a multi-tensor kernel over one bucket of leaves.

A launch has *regions*: leaves of the same kind, cut into blocks of the same size, are one region and share the code of
the arithmetic. All blocks of a launch have consecutive numbers. From its number, a block finds its region, then its
leaf, then its offset in the leaf.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import aligned, groups
from pallas_kernels.leaves import Function, Leaf, Level, Values, shape_of

WIDTH = 8  # bytes of one array that a thread moves at once, or more


class Region(NamedTuple):
    """Blocks of one size over leaves of one kind."""

    start: int  # number of the first block
    level: Level  # the size of the blocks
    leaves: tuple[int, ...]  # numbers of the leaves
    firsts: tuple[int, ...]  # for each leaf its first block, counted from `start`; then the number of blocks
    offsets: tuple[int, ...]  # for each leaf the element where its first block begins
    group: int  # `Leaf.group` of the leaves


class Program(NamedTuple):
    """The static part of a launch; launches with equal programs are traced and compiled once."""

    f: Function  # the arithmetic
    regions: tuple[Region, ...]
    statics: tuple[Any, ...]  # for each leaf (outs, (), kind, group)
    n_sums: int  # the largest number of sums that `f` returns
    name: str  # of the kernel


def n_blocks(regions: Sequence[Region]) -> int:
    """The number of blocks in all regions."""
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
    for (arrays, outs, _, group), members in kinds.items():
        done = dict.fromkeys(members, 0)
        narrowest = min(jnp.dtype(d).itemsize for d in (*(x[0] for x in arrays if x is not None), *outs))
        # With 8 bytes of the narrowest array for each thread, if the blocks have so many.
        wide = [level._replace(vector=max(level.vector, WIDTH // narrowest)) for level in levels]
        wide = [old if new.size % (groups.THREADS * new.vector) else new for old, new in zip(levels, wide, strict=True)]
        for level in wide if group == 1 else _levels_of_groups(group):
            here, firsts, offsets = [], [0], []
            for i in members:
                count = (math.prod(shape_of(bucket[i])) - done[i]) // level.size
                if count:
                    here.append(i)
                    firsts.append(firsts[-1] + count)
                    offsets.append(done[i])
                    done[i] += count * level.size
            if here:
                yield Region(start, level, tuple(here), tuple(firsts), tuple(offsets), group)
                start += firsts[-1]


def _levels_of_groups(group: int) -> tuple[Level, ...]:
    """Blocks of several groups, if they fit into warps, then blocks of one group."""
    wide = (Level(groups.BLOCK, groups.VECTOR),) if groups.fit(group) else ()
    return (*wide, Level(group, group // groups.THREADS)) if group % groups.THREADS == 0 else wide


def takes_groups(group: int, size: int) -> bool:
    """Whether a leaf of this size with these groups can be cut into blocks."""
    levels = _levels_of_groups(group)
    return bool(levels) and size % levels[-1].size == 0


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
    """Runs `program.f` on a bucket; returns the states, writes and outs of each leaf, and `sums`.

    Args:
      packed: float32[1 + scalars]: 1.0 to run and 0.0 to do nothing, then the scalars.
      numbers: float32, the numbers of all leaves, one leaf after the other.
      first_sum: int32[1], the index of the first sum of this launch.
      sums: float32[n_sums * blocks of all launches].
      arrays: for each leaf its reads, states and writes, flat.
      program: the static part.
      interpret: the argument of `pl.kernel`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bucket = [Leaf(*a, *s) for a, s in zip(arrays, program.statics, strict=True)]
    read = [leaf.reads for leaf in bucket]
    fresh = [tuple(lax.empty(shape_of(leaf), d) for d in leaf.outs) for leaf in bucket]
    written = [(leaf.states, leaf.writes, outs) for leaf, outs in zip(bucket, fresh, strict=True)]
    body = functools.partial(_body, program, bucket, bool(interpret))
    functools.update_wrapper(body, _body).__name__ = program.name  # the kernel's name in profiles and programs
    kernel = plgpu.kernel(
        body,
        grid=(n_blocks(program.regions),),
        grid_names=("block",),
        interpret=interpret,
        # The other semantics searches for layouts, which takes ten times as long for many leaves.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def run(refs: Any) -> None:
        kernel(packed, numbers, first_sum, read, *refs)

    written, sums = pl.run_state(run)((written, sums))
    return [(*states, *writes, *outs) for states, writes, outs in written], sums


def _body(
    program: Program, bucket: list[Leaf], interpreted: bool, packed: Any, numbers: Any, first_sum: Any, *refs: Any
) -> None:
    """One block: runs the code of its region."""
    from jax.experimental import pallas as pl

    i = lax.axis_index("block")
    for region in program.regions:
        inside = (i >= region.start) & (i < region.start + region.firsts[-1]) & (packed[0] > 0)
        pl.when(inside)(
            functools.partial(_run, program, bucket, interpreted, region, i, packed, numbers, first_sum, *refs)
        )


def _run(
    program: Program,
    bucket: list[Leaf],
    interpreted: bool,
    region: Region,
    i: Any,
    packed: Any,
    numbers: Any,
    first_sum: Any,
    read: Any,
    written: Any,
    sums: Any,
) -> None:
    """One block of a region: loads from its leaf, calls `f`, stores to its leaf."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    level, some = region.level, bucket[region.leaves[0]]
    n_numbers = numbers.shape[0] // len(bucket)
    j = i - region.start
    which = sum([(j >= first).astype(jnp.int32) for first in region.firsts[1:-1]], jnp.int32(0))

    def place(k: int) -> Any:
        return (j - region.firsts[k]) * level.size + region.offsets[k]

    def load(k: int) -> Any:
        leaf = region.leaves[k]
        access = _Access(level, math.prod(shape_of(bucket[leaf])), region.group, interpreted)
        states, _, _ = written[leaf]
        values = tuple(access.load(ref, place(k)) for ref in (*read[leaf], *states))
        return values, tuple(numbers[leaf * n_numbers + n] for n in range(n_numbers))

    def index() -> Any:
        start = place(0)
        for k in range(1, len(region.leaves)):
            start = jnp.where(which == k, place(k), start)
        if not level.vector:
            return start
        return plgpu.broadcasted_iota(jnp.int32, (level.size,), 0, layout=_layout(level)) + start

    of_leaf = [functools.partial(load, k) for k in range(len(region.leaves))]
    results, own_numbers = lax.switch(which, of_leaf)
    if not level.vector:
        plgpu.commit_smem()  # a barrier: every thread must read the scalar before any thread writes it
    access = _Access(level, math.prod(shape_of(some)), region.group, interpreted)
    loaded = [access.spread(ref, x) for ref, x in zip((*some.reads, *some.states), results, strict=True)]
    values = Values(
        tuple(loaded[: len(some.reads)]),
        tuple(loaded[len(some.reads) :]),
        own_numbers,
        tuple(packed[k] for k in range(1, packed.shape[0])),
        some.kind,
        access.group_max,
        index,
        in_kernel=True,
    )
    new, parts = program.f(values)
    totals = [jnp.sum(part) if level.vector else part for part in parts]
    totals += [jnp.float32(0)] * (program.n_sums - len(totals))

    def store(k: int) -> None:
        leaf = region.leaves[k]
        access = _Access(level, math.prod(shape_of(bucket[leaf])), region.group, interpreted)
        for ref, x in zip([ref for part in written[leaf] for ref in part], new, strict=True):
            access.store(ref, place(k), x)

    lax.switch(which, [functools.partial(store, k) for k in range(len(region.leaves))])
    for n, total in enumerate(totals):
        sums[n * (sums.shape[0] // program.n_sums) + first_sum[0] + i] = total


class _Access(NamedTuple):
    """Reads a block from memory and writes it: as a vector, as a scalar, or as one element for each of its groups."""

    level: Level
    size: int
    group: int
    interpreted: bool  # the interpreter does not know `aligned`, nor the lanes of `groups`

    def load(self, ref: Any, start: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self._is_per_group(ref):
            if self._has_groups():
                return groups.load(self._scales(ref, start), self.group, interpreted=self.interpreted)
            return ref[lax.div(start, jnp.int32(self.group))]
        if not self.level.vector:
            return ref[start]
        block = self._block(ref, start)
        if self.interpreted:
            return plgpu.load(block, layout=_layout(self.level), optimized=False)
        return aligned.load(block, _layout(self.level), self.level.vector)

    def spread(self, ref: Any, loaded: Any) -> Any:
        """What was loaded, one value for each element of the block."""
        if self._is_per_group(ref) and self._has_groups():
            return groups.spread(loaded, _layout(self.level), self.group, interpreted=self.interpreted)
        return loaded

    def store(self, ref: Any, start: Any, x: Any) -> None:
        if self._is_per_group(ref):
            if self._has_groups():
                scales, layout = self._scales(ref, start), _layout(self.level)
                groups.store(scales, x, layout, self.group, interpreted=self.interpreted)
            else:
                ref[lax.div(start, jnp.int32(self.group))] = x
        elif not self.level.vector:
            ref[start] = x.astype(ref.dtype)
        elif self.interpreted:
            self._block(ref, start)[...] = x.astype(ref.dtype)
        else:
            aligned.store(self._block(ref, start), x.astype(ref.dtype), _layout(self.level), self.level.vector)

    def group_max(self, x: Any) -> Any:
        """The maximum of each group; `Values.group_max`."""
        if self._has_groups():
            return groups.maximum(x, _layout(self.level), self.group, interpreted=self.interpreted)
        return jnp.max(x)

    def _has_groups(self) -> bool:
        """Whether a block holds several groups."""
        return self.level.size > self.group > 1

    def _block(self, ref: Any, start: Any) -> Any:
        from jax.experimental import pallas as pl

        return ref.at[pl.ds(pl.multiple_of(start, self.level.size), self.level.size)]

    def _scales(self, ref: Any, start: Any) -> Any:
        from jax.experimental import pallas as pl

        return ref.at[pl.ds(lax.div(start, jnp.int32(self.group)), self.level.size // self.group)]

    def _is_per_group(self, ref: Any) -> bool:
        return self.group > 1 and ref.shape[0] < self.size


def _layout(level: Level) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Layout.WG_STRIDED((level.size,), vec_size=level.vector)
