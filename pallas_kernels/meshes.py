"""A multi-tensor kernel under plain jit, on leaves that are split over devices.

XLA does not know what a kernel does, and would gather its arrays. `custom_partitioning` tells XLA that a leaf may be
split along any axis, if all its arrays are split in the same way, and that each device runs the kernel on its own part.
The sums of the kernel are added over the mesh axes that split a leaf, and only over these: a replicated leaf counts
once. So one launch takes only leaves that are split over the same axes.

On one device, and inside `jax.shard_map` and `jax.pmap`, arrays are the device's own, and none of this is needed. Under
vmap the reference runs, because a kernel has no rule for it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from pallas_kernels import multi_tensor
from pallas_kernels.leaves import Function, Leaf, Result, shape_of

Spec = tuple[Any, ...]  # for each axis the mesh axes that split it


def apply(
    f: Function,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    *,
    n_sums: int = 0,
    when: Bool[Array, ""] | None = None,
    **kwargs: Any,
) -> Result:
    """`multi_tensor.apply`, also for leaves that are split over devices; same arguments."""
    launch = functools.partial(multi_tensor.apply, f, n_sums=n_sums, **kwargs)
    if kwargs.get("interpret"):
        return launch(leaves, scalars, when=when)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return _on_own_arrays(
            launch, functools.partial(multi_tensor.reference, f, n_sums=n_sums), leaves, scalars, when
        )
    shapes = [shape_of(leaf) for leaf in leaves]
    arrays = [(leaf.reads, leaf.states, leaf.writes) for leaf in leaves]
    flat, treedef = jax.tree.flatten(arrays)
    owners = [k for k, parts in enumerate(arrays) for part in parts for _ in part]

    # Numbers that are arrays are passed with the scalars, because the partitioned function must not close over arrays.
    computed = [x for leaf in leaves for x in leaf.numbers] if _any_array(leaves) else []

    def numbers_of(k: int, packed: Array) -> tuple[Any, ...]:
        size = len(leaves[k].numbers)
        first = 1 + len(scalars) + sum(len(leaf.numbers) for leaf in leaves[:k])
        return tuple(packed[first + i] for i in range(size)) if computed else leaves[k].numbers

    def run(indices: Sequence[int], flat: Sequence[Array], packed: Array) -> Result:
        """Runs the kernel on some of the leaves, with the arrays of this device."""
        parts = treedef.unflatten(flat)
        own = [
            leaf._replace(reads=parts[k][0], states=parts[k][1], writes=parts[k][2], numbers=numbers_of(k, packed))
            for k, leaf in ((k, leaves[k]) for k in indices)
        ]
        return launch(own, [packed[i + 1] for i in range(len(scalars))], when=packed[0] > 0)

    def whole(packed: Array, *flat: Array) -> list[Array]:
        return _flat_result(run(range(len(leaves)), flat, packed))

    def specs_of(operands: Any) -> list[Spec]:
        """How each leaf is split: like the first of its arrays that has all its elements."""
        found: dict[int, Spec] = {}
        for k, operand in zip(owners, operands[1:], strict=True):
            if k not in found and tuple(operand.shape) == shapes[k]:
                found[k] = _even_spec(operand.sharding, shapes[k], leaves[k].group)
        return [found[k] for k in range(len(leaves))]

    def results_of(mesh: Any, specs: Sequence[Spec]) -> list[NamedSharding]:
        out = []
        for k, leaf in enumerate(leaves):
            ndims = [x.ndim for x in (*leaf.states, *leaf.writes)] + [len(shapes[k])] * len(leaf.outs)
            out += [NamedSharding(mesh, PartitionSpec(*specs[k][:n])) for n in ndims]
        return out + [NamedSharding(mesh, PartitionSpec())] * n_sums

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        specs = specs_of(operands)
        mesh = operands[0].sharding.mesh
        alike: dict[tuple[str, ...], list[int]] = {}
        for k, spec in enumerate(specs):
            alike.setdefault(_names(spec), []).append(k)

        def on_device(packed: Array, *flat: Array) -> list[Array]:
            moved: list[Any] = [None] * len(leaves)
            totals = [jnp.zeros((), jnp.float32)] * n_sums
            for names, indices in alike.items():
                result = run(indices, flat, packed)
                for k, new in zip(indices, result.leaves, strict=True):
                    moved[k] = new
                added = [lax.psum(x, names) if names else x for x in result.sums]
                totals = [a + b for a, b in zip(totals, added, strict=True)]
            return _flat_result(Result(moved, tuple(totals)))

        given = [NamedSharding(mesh, PartitionSpec())]
        given += [NamedSharding(mesh, PartitionSpec(*specs[k])) for k in owners]
        return mesh, on_device, results_of(mesh, specs), tuple(given)

    split = custom_partitioning(whole)
    split.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, results: results_of(mesh, specs_of(operands)),
        sharding_rule=_sharding_rule(leaves, shapes, n_sums),
    )
    flag = jnp.ones((), jnp.float32) if when is None else when.astype(jnp.float32)
    packed = jnp.stack([flag, *(jnp.asarray(s, jnp.float32) for s in (*scalars, *computed))])
    plain = functools.partial(_plain, f, leaves, len(scalars), numbers_of, treedef, n_sums, when is not None)
    return _result(_with_rule_for_vmap(lambda *given: list(split(*given)), plain)(packed, *flat), leaves)


def _on_own_arrays(
    launch: Callable[..., Result],
    reference: Callable[..., Result],
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    when: Bool[Array, ""] | None,
) -> Result:
    """`launch`, and `reference` under vmap."""
    flat, treedef = jax.tree.flatten((list(leaves), list(scalars), when))
    places = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]

    def on(apply: Callable[..., Result], *arrays: Array) -> Result:
        given = list(flat)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        own, numbers, flag = treedef.unflatten(given)
        return apply(own, numbers, when=flag)

    run = _with_rule_for_vmap(functools.partial(on, launch), functools.partial(on, reference))
    return run(*(flat[i] for i in places))


def _any_array(leaves: Sequence[Leaf]) -> bool:
    return any(isinstance(x, jax.Array) for leaf in leaves for x in leaf.numbers)


def _plain(
    f: Function,
    leaves: Sequence[Leaf],
    n_scalars: int,
    numbers_of: Callable[[int, Array], tuple[Any, ...]],
    treedef: Any,
    n_sums: int,
    has_when: bool,
    packed: Array,
    *flat: Array,
) -> list[Array]:
    """The reference on flat arrays."""
    own = [
        leaf._replace(reads=r, states=s, writes=w, numbers=numbers_of(k, packed))
        for k, (leaf, (r, s, w)) in enumerate(zip(leaves, treedef.unflatten(flat), strict=True))
    ]
    scalars = [packed[i + 1] for i in range(n_scalars)]
    when = packed[0] > 0 if has_when else None
    return _flat_result(multi_tensor.reference(f, own, scalars, n_sums=n_sums, when=when))


def _with_rule_for_vmap(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, a function of arrays, with `plain` under vmap."""

    @jax.custom_batching.custom_vmap
    def run(*arrays: Array) -> Any:
        return kernel(*arrays)

    @run.def_vmap
    def run_batch(axis_size: int, in_batched: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        out = jax.vmap(plain, [0 if b else None for b in in_batched], axis_size=axis_size)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _flat_result(result: Result) -> list[Array]:
    return [x for leaf in result.leaves for x in leaf] + list(result.sums)


def _result(flat: list[Array], leaves: Sequence[Leaf]) -> Result:
    """The opposite of `_flat_result`."""
    left, found = flat, []
    for leaf in leaves:
        size = len(leaf.states) + len(leaf.writes) + len(leaf.outs)
        found.append(tuple(left[:size]))
        left = left[size:]
    return Result(found, tuple(left))


def _even_spec(sharding: Any, shape: Sequence[int], group: int) -> Spec:
    """The spec of an array, without the axes whose parts would be of different sizes or would cut a group."""
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    even = []
    for axis, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        even.append(entry if size % (parts * (group if axis == len(shape) - 1 else 1)) == 0 else None)
    return tuple(even)


def _names(spec: Spec) -> tuple[str, ...]:
    """The mesh axes that split a leaf."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return tuple(sorted(name for entry in entries for name in entry))


def _sharding_rule(leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]], n_sums: int) -> str:
    """The rule for Shardy, like an einsum: all arrays of a leaf share their axes; arrays by group have another last."""

    def axes(k: int, shape: Sequence[int]) -> str:
        names = [f"l{k}a{i}" for i in range(len(shape))]
        return " ".join(names if tuple(shape) == shapes[k] else [*names[:-1], f"l{k}g"])

    given, made = ["s"], []
    for k, leaf in enumerate(leaves):
        given += [axes(k, x.shape) for x in (*leaf.reads, *leaf.states, *leaf.writes)]
        made += [axes(k, x.shape) for x in (*leaf.states, *leaf.writes)] + [axes(k, shapes[k])] * len(leaf.outs)
    return f"{', '.join(given)} -> {', '.join(made + [''] * n_sums)}"
