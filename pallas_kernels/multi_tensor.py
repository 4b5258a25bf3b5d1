"""One launch for many arrays: the same elementwise arithmetic over all leaves of a tree.

XLA makes at least one kernel for each leaf, so an optimizer's step over 1000 leaves needs 1000 launches. Here a launch
covers a *bucket* of leaves. Its blocks have consecutive numbers, and each block finds the leaf that it belongs to:

    block i -> leaf k, offset o          from sums of sizes, which are known when the kernel is traced
    values  = switch(k: load leaf k at o)
    values' = f(values)                  the code is there once, for any number of leaves
    switch(k: store values' at o)

Only the code of loads and stores is repeated for each leaf, so 32 leaves compile in half a second instead of several
seconds. The leaves are put into buckets so that many buckets are equal (as the layers of a network are), and equal
buckets are traced and compiled once.

A leaf may have any size: whole blocks first, then blocks of 128, then single elements as scalars. A leaf with groups
that share a scale is cut into blocks of 1024 (`groups`), then into blocks of one group. Changed arrays are written in
place (`pl.run_state`). If `when` is false, the kernel reads and writes nothing.

`apply` runs the kernel; `reference` runs the same `f` on whole arrays in jax.numpy.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool

from pallas_kernels import groups, launch, views
from pallas_kernels.leaves import Function, Leaf, Level, Result, Values, shape_of, signature_of
from pallas_kernels.moments import flat_index

UPDATE_LEVELS = (Level(2048, 4), Level(groups.THREADS, 1), Level(1, 0))
READ_LEVELS = (Level(8192, 8), Level(1024, 8), Level(groups.THREADS, 1), Level(1, 0))
MOST = 128  # leaves per launch


# --- the reference -----------------------------------------------------------------------------------------------


def reference(
    f: Function,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    *,
    n_sums: int = 0,
    when: Bool[Array, ""] | None = None,
    only_groups: bool = False,
) -> Result:
    """`f` on each whole leaf, in jax.numpy: the oracle of the kernel's tests, and the code for other devices.

    Arguments as for `apply`; with `only_groups`, leaves without groups move whatever `when` is.
    """
    # The barrier makes XLA compute the scalars once. They depend on all leaves, and without it XLA would compute them
    # again in the kernel of each leaf.
    shared: tuple[Array, ...] = tuple(jnp.asarray(s, jnp.float32) for s in scalars)
    shared, when = lax.optimization_barrier((shared, when))
    arrays = [(leaf.reads, leaf.states, leaf.writes) for leaf in leaves]
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((arrays, shared)))
    of_leaf = _traced_once if is_traced else _of_leaf
    results: list[tuple[Array, ...]] = []
    sums = [jnp.zeros((), jnp.float32)] * n_sums
    for leaf, own in zip(leaves, arrays, strict=True):
        numbers = tuple(jnp.float32(c) for c in leaf.numbers)
        flag = None if only_groups and leaf.group == 1 else when
        new, parts = of_leaf(f, leaf.kind, leaf.group, leaf.outs, own, numbers, shared, flag)
        results.append(new)
        sums = [total + part for total, part in zip(sums, [*parts, *[0.0] * n_sums], strict=False)]
    return Result(results, tuple(sums))


def _of_leaf(
    f: Function, kind: Any, group: int, outs: Any, arrays: Any, numbers: Any, shared: Any, when: Any
) -> tuple[tuple[Array, ...], list[Array]]:
    """New arrays of one leaf, and its sums."""
    shape = shape_of(Leaf(*arrays))
    return views.seen(functools.partial(_seen, f, kind, outs, shape), shape, group, arrays, numbers, shared, when)


def _seen(
    f: Function, kind: Any, outs: Any, shape: Any, view: views.View, arrays: Any, numbers: Any, shared: Any, when: Any
) -> tuple[tuple[Array, ...], list[Array]]:
    reads, states, writes = arrays
    old = (*states, *writes)
    reads, before = view.of_tree((reads, old))
    values = Values(
        reads,
        before[: len(states)],
        numbers,
        shared,
        kind,
        view.group_max,
        lambda: view.of_array(flat_index(shape)),
        in_kernel=False,
    )
    new, parts = f(values)
    dtypes = [x.dtype for x in old] + list(outs)
    new = [x.astype(d) for x, d in zip(new, dtypes, strict=True)]
    if when is not None:
        new[: len(old)] = [jnp.where(when, n, o) for n, o in zip(new, before, strict=False)]
    new = view.undone(new, [x.shape for x in old] + [shape] * len(outs))
    return tuple(new), [jnp.sum(jnp.asarray(part)) for part in parts]


_traced_once = jax.jit(_of_leaf, static_argnums=(0, 1, 2, 3))  # leaves of equal shapes are traced once


# --- buckets -----------------------------------------------------------------------------------------------------


def buckets(signatures: Sequence[Any], most: int) -> list[list[int]]:
    """Indices of the leaves of each launch, at most `most` each, so that as many launches as possible are equal."""
    count = -(-len(signatures) // most)
    kinds: dict[Any, list[int]] = {}
    for i, signature in enumerate(signatures):
        kinds.setdefault(signature, []).append(i)
    equal: list[list[int]] = [[] for _ in range(count)]
    rest: list[int] = []
    for members in kinds.values():
        share = len(members) // count
        for j in range(count):
            equal[j] += members[j * share : (j + 1) * share]
        rest += members[count * share :]
    return [bucket for bucket in equal if bucket] + [rest[i : i + most] for i in range(0, len(rest), most)]


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
    """`f` over all leaves, with at most `MOST` leaves per launch; arguments as for `reference`.

    Args:
      f: hashable, and equal for equal arithmetic: a function of a module, or a `functools.partial` of one.
      leaves: leaves that are not empty. `reference` takes those with groups that do not fill blocks
        (`launch.takes_groups`), and those of 2^31 or more elements.
      scalars: numbers or float32[].
      name: of the kernel.
      n_sums: the largest number of sums that `f` returns.
      when: bool[]; if False, states and writes do not change and are not read.
      levels: block sizes, for leaves without groups.
      interpret: the argument of `pl.kernel`.
    """
    supported = [i for i, leaf in enumerate(leaves) if _why_not(leaf) is None]
    others = [i for i in range(len(leaves)) if i not in set(supported)]
    if others:
        by_xla = reference(f, [leaves[i] for i in others], scalars, n_sums=n_sums, when=when)
        kernels = {"name": name, "n_sums": n_sums, "when": when, "levels": levels, "interpret": interpret}
        by_kernel = (
            apply(f, [leaves[i] for i in supported], scalars, **kernels) if supported else Result([], by_xla.sums)
        )
        by_place = dict(zip((*others, *supported), (*by_xla.leaves, *by_kernel.leaves), strict=True))
        sums = [a + b for a, b in zip(by_xla.sums, by_kernel.sums, strict=True)] if supported else by_xla.sums
        return Result([by_place[i] for i in range(len(leaves))], tuple(sums))
    flag = jnp.ones((), jnp.float32) if when is None else when.astype(jnp.float32)
    packed = jnp.stack([flag, *(jnp.asarray(s, jnp.float32) for s in scalars)])
    flat = [
        leaf._replace(
            **{part: tuple(x.reshape(-1) for x in getattr(leaf, part)) for part in ("reads", "states", "writes")}
        )
        for leaf in leaves
    ]
    members = buckets([signature_of(leaf) for leaf in flat], MOST)
    regions = [tuple(launch.regions([flat[i] for i in bucket], levels)) for bucket in members]
    ends = np.cumsum([0, *(launch.n_blocks(r) for r in regions)])
    # One partial sum for each block; they are added at the end. No operand may be empty: the compiler would crash.
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
            shapes = [x.shape for x in (*leaves[i].states, *leaves[i].writes)]
            shapes += [shape_of(leaves[i])] * len(leaves[i].outs)
            moved[i] = tuple(x.reshape(shape) for x, shape in zip(new, shapes, strict=True))
    totals = jnp.sum(partial.reshape(n_sums, -1), axis=1) if n_sums else ()
    return Result(moved, tuple(totals))


def _why_not(leaf: Leaf) -> str | None:
    """Why the reference takes a leaf; None if the kernel supports it."""
    size = math.prod(shape_of(leaf))
    if leaf.group > 1 and not launch.takes_groups(leaf.group, size):
        return f"its groups of {leaf.group} do not fill blocks"
    return "its elements cannot be counted in 31 bits" if size >= 2**31 else None


def _vector(values: Sequence[Any], dtype: Any) -> Array:
    """A vector of numbers, of which some may be traced."""
    if not any(isinstance(x, Tracer) for x in values):
        return jnp.asarray(np.asarray(values, dtype))
    return jnp.stack([jnp.asarray(x, dtype) for x in values])
