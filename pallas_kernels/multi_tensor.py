"""One launch for many arrays: the same elementwise arithmetic over all leaves of a tree.

XLA makes a kernel (or more) of each leaf, so that an optimizer's step over 1000 leaves is 1000 launches. Here a launch
covers a *bucket* of leaves. Its blocks are numbered through, and a block finds out which leaf it belongs to:

    block i -> leaf k, offset o          from sums of sizes that are known when the kernel is traced
    values  = switch(k: load leaf k at o)
    values' = f(values)                  stands once, whatever the number of leaves
    switch(k: store values' at o)

Only loads and stores are there once for each leaf: so 32 leaves take half a second to compile, not several. Buckets
are filled so that they look alike (as the layers of a network do), and what looks alike is traced and compiled once.

A leaf of any size is served: a run of whole blocks, then blocks of 128, then single elements as scalars. Arrays that
are changed are written in place (`pl.run_state`); where `when` is false nothing is read and nothing is written.

`apply` runs the kernel, `reference` the same `f` on whole arrays in jax.numpy.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from pallas_kernels import launch
from pallas_kernels.leaves import Function, Leaf, Level, Result, Values, shape_of, signature_of
from pallas_kernels.moments import flat_index

UPDATE_LEVELS = (Level(1, 2048, 4), Level(1, launch.THREADS, 1), Level(1, 1, 0))
READ_LEVELS = (Level(1, 8192, 8), Level(1, 1024, 8), Level(1, launch.THREADS, 1), Level(1, 1, 0))
MOST = 128  # leaves to a launch


# --- the reference -----------------------------------------------------------------------------------------------


def reference(
    f: Function, leaves: Sequence[Leaf], scalars: Sequence[Any], *, n_sums: int = 0, when: Bool[Array, ""] | None = None
) -> Result:
    """`f` on each leaf as a whole, in jax.numpy: what a kernel is tested against, and what runs elsewhere."""
    # Computed once: they come from all leaves, and XLA would copy that whole chain into the kernel of each.
    shared: tuple[Array, ...] = tuple(jnp.asarray(s, jnp.float32) for s in scalars)
    shared, when = lax.optimization_barrier((shared, when))
    found: list[tuple[Array, ...]] = []
    sums = [jnp.zeros((), jnp.float32)] * n_sums
    for leaf in leaves:
        shape = shape_of(leaf)
        grouped = (*shape[:-1], -1, leaf.group) if leaf.group > 1 else shape

        def view(x: Array, shape: tuple[int, ...] = shape, grouped: Any = grouped) -> Array:
            return x.reshape(grouped) if x.shape == shape else x[..., None]

        values = Values(
            tuple(view(x) for x in leaf.reads),
            tuple(view(x) for x in leaf.states),
            tuple(jnp.float32(c) for c in leaf.numbers),
            shared,
            leaf.kind,
            lambda x: jnp.max(x, axis=-1, keepdims=True),
            lambda shape=shape, grouped=grouped: flat_index(shape).reshape(grouped),
        )
        new, parts = f(values)
        old = (*leaf.states, *leaf.writes)
        dtypes = [x.dtype for x in old] + list(leaf.outs)
        shapes = [x.shape for x in old] + [shape] * len(leaf.outs)
        new = [x.astype(d).reshape(s) for x, d, s in zip(new, dtypes, shapes, strict=True)]
        if when is not None:
            new[: len(old)] = [jnp.where(when, n, o) for n, o in zip(new, old, strict=False)]
        found.append(tuple(new))
        sums = [
            total + jnp.sum(jnp.asarray(part)) for total, part in zip(sums, [*parts, *[0.0] * n_sums], strict=False)
        ]
    return Result(found, tuple(sums))


# --- buckets -----------------------------------------------------------------------------------------------------


def buckets(signatures: Sequence[Any], most: int) -> list[list[int]]:
    """Indices of the leaves of each launch, at most `most` each: as many launches that look alike as possible."""
    count = -(-len(signatures) // most)
    kinds: dict[Any, list[int]] = {}
    for i, signature in enumerate(signatures):
        kinds.setdefault(signature, []).append(i)
    alike: list[list[int]] = [[] for _ in range(count)]
    rest: list[int] = []
    for members in kinds.values():
        share = len(members) // count
        for j in range(count):
            alike[j] += members[j * share : (j + 1) * share]
        rest += members[count * share :]
    return [bucket for bucket in alike if bucket] + [rest[i : i + most] for i in range(0, len(rest), most)]


# --- the kernel --------------------------------------------------------------------------------------------------


def apply(
    f: Function,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    *,
    name: str,
    n_sums: int = 0,
    when: Bool[Array, ""] | None = None,
    levels: tuple[Level, ...] = UPDATE_LEVELS,
    interpret: Any = False,
) -> Result:
    """`f` over all leaves in as few launches as `MOST` leaves to a launch allow; arguments as for `reference`.

    Args:
      f: hashable, and equal for equal arithmetic: a function of a module, or a `functools.partial` of one.
      leaves: none of them empty. Those whose group does not fill a warpgroup, and those of 2^31 elements and more, are
        left to `reference`.
      scalars: numbers or float32[].
      name: of the kernel.
      n_sums: how many sums `f` returns at most.
      when: bool[]; False leaves states and writes as they are, without reading them.
      levels: sizes of blocks, for leaves without groups.
      interpret: what `pl.kernel` takes for it.
    """
    served = [i for i, leaf in enumerate(leaves) if _why_not(leaf) is None]
    others = [i for i in range(len(leaves)) if i not in set(served)]
    if others:
        by_xla = reference(f, [leaves[i] for i in others], scalars, n_sums=n_sums, when=when)
        kernels = {"name": name, "n_sums": n_sums, "when": when, "levels": levels, "interpret": interpret}
        by_kernel = apply(f, [leaves[i] for i in served], scalars, **kernels) if served else Result([], by_xla.sums)
        found = dict(zip((*others, *served), (*by_xla.leaves, *by_kernel.leaves), strict=True))
        sums = [a + b for a, b in zip(by_xla.sums, by_kernel.sums, strict=True)] if served else by_xla.sums
        return Result([found[i] for i in range(len(leaves))], tuple(sums))
    flag = jnp.ones((), jnp.float32) if when is None else when.astype(jnp.float32)
    packed = jnp.stack([flag, *(jnp.asarray(s, jnp.float32) for s in scalars)])
    flat = [_flattened(leaf) for leaf in leaves]
    members = buckets([signature_of(leaf) for leaf in flat], MOST)
    regions = [tuple(launch.regions([flat[i] for i in bucket], levels)) for bucket in members]
    ends = np.cumsum([0, *(launch.n_blocks(r) for r in regions)])
    # One for each block, added up in the end. No operand is left empty: the compiler does not survive it.
    partial = jnp.zeros(max(n_sums * ends[-1], 1), jnp.float32)
    moved: list[Any] = [None] * len(leaves)
    for bucket, own_regions, start in zip(members, regions, ends, strict=False):
        statics = tuple((flat[i].outs, (), flat[i].kind, flat[i].group) for i in bucket)
        results, partial = launch.launch(
            packed,
            _vector([x for i in bucket for x in flat[i].numbers or (0.0,)], jnp.float32),
            _vector([start], jnp.int32),
            partial,
            [(flat[i].reads, flat[i].states, flat[i].writes) for i in bucket],
            program=launch.Program(f, own_regions, statics, n_sums, name),
            interpret=interpret,
        )
        for i, new in zip(bucket, results, strict=True):
            moved[i] = _shaped(leaves[i], new)
    totals = jnp.sum(partial.reshape(n_sums, -1), axis=1) if n_sums else ()
    return Result(moved, tuple(totals))


def _why_not(leaf: Leaf) -> str | None:
    """Why a leaf is left to the reference; None if the kernel serves it."""
    if leaf.group > 1 and leaf.group % launch.THREADS:
        return f"its groups of {leaf.group} do not fill a warpgroup"
    return "its elements cannot be counted in 31 bits" if math.prod(shape_of(leaf)) >= 2**31 else None


def _vector(values: Sequence[Any], dtype: Any) -> Array:
    """A vector of known numbers, made of literals: `custom_partitioning` takes no arrays that are constants."""
    return jnp.concatenate([jnp.full(1, x, dtype) for x in values])


def _flattened(leaf: Leaf) -> Leaf:
    reads, states, writes = (tuple(x.reshape(-1) for x in part) for part in (leaf.reads, leaf.states, leaf.writes))
    return leaf._replace(reads=reads, states=states, writes=writes)


def _shaped(leaf: Leaf, new: Sequence[Array]) -> tuple[Array, ...]:
    shapes = [x.shape for x in (*leaf.states, *leaf.writes)] + [shape_of(leaf)] * len(leaf.outs)
    return tuple(x.reshape(shape) for x, shape in zip(new, shapes, strict=True))
