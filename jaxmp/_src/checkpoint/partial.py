"""Restores a checkpoint whose leaves differ from those of the job, where the user allows it.

A leaf that fits the user's patterns may be missing, left over, or of another shape. All other leaves must be in the
checkpoint. The position of a state in a chain changes with the transforms before it (`0/mu/w` becomes `1/0/mu/w` after
a clip). So states are found by what they hold: a *node* is a state of the chain, identified by the names of its leaves.
With `moments=`, all of the inner optimizer's state may differ: a node is continued as a whole, or it starts fresh.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import chain_places, job_leaves
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step import state_paths
from jaxmp._src.step.state_paths import StatePath

MOMENTS = SAME, FIT, RESET = "same", "fit", "reset"  # what of the inner optimizer's state is continued


class Report(NamedTuple):
    """What `restore(partial=, moments=)` did, by path: leaves of params, of the optimizer's state, and of `extra`."""

    fresh: tuple[str, ...] = ()  # not in the checkpoint: as in `params=`, `tx.init` or `extra=`
    left_over: tuple[str, ...] = ()  # in the checkpoint, and not in the job
    moved: tuple[tuple[str, str], ...] = ()  # (where a state stood in the saved chain, where it stands now)


def complete_params(
    saved: job_leaves.Saved, like: PyTree, patterns: Sequence[str]
) -> tuple[job_leaves.Saved, list[str], list[str]]:
    """(`saved` with the params of `like`, params that are fresh, params that are left over)."""
    wanted = tree_paths.leaves_by_path(like)
    fits = {p for p, x in saved.params.items() if p in wanted and tuple(x.shape) == tuple(wanted[p].shape)}
    left = [p for p in saved.params if p not in fits and tree_paths.matches(p, patterns)]
    # Scales stay where the job has none: the histories are in the order of all of them.
    dropped = [p for p in left if not scale_leaves.is_scale(p) or p in wanted]
    params = {p: x for p, x in saved.params.items() if p not in dropped}
    fresh = [p for p in wanted if p not in params and not scale_leaves.is_scale(p) and tree_paths.matches(p, patterns)]
    for path in fresh:
        if isinstance(wanted[path], jax.ShapeDtypeStruct):
            raise ValueError(
                f"a param that starts fresh needs a value; {path} is not in {saved.what}, and params= has only its "
                f"shape. Pass an array for it."
            )
        params[path] = wanted[path]
    gone = {*fresh, *left}
    is_gone = lambda path: path.role == state_paths.MASTER and path.param in gone  # noqa: E731
    state = {path: x for path, x in saved.state.items() if not is_gone(path)}
    return job_leaves.Saved(params, state, saved.what), fresh, [p for p in left if p not in wanted]


def complete_state(
    saved: job_leaves.Saved,
    wanted: Mapping[StatePath, Any],
    patterns: Sequence[str],
    moments: str,
    fresh_params: Collection[str],
    fresh_leaves: Callable[[set[StatePath]], Mapping[StatePath, Any]],
) -> tuple[job_leaves.Saved, Report]:
    """`saved` with the leaves of the inner optimizer's state that `wanted` has, and what was done for that."""
    wanted, given = job_leaves.inner_leaves(wanted), job_leaves.inner_leaves(saved.state)
    patterns = patterns if moments == SAME else ("*",)
    here, there = _Nodes(wanted, patterns), _Nodes({} if moments == RESET else given, patterns)
    pairs = _paired(here, there, saved.what) if moments == SAME else _paired_by_fields(here, there)
    state = {path: x for path, x in saved.state.items() if path not in given}
    fresh: set[StatePath] = set()
    used: set[StatePath] = set()
    for node, leaves in here.leaves.items():
        source = there.leaves.get(pairs.get(node, ()), {})
        found = {path: source[name] for name, path in leaves.items() if name in source}
        fitting = {path for path, at in found.items() if job_leaves.fits(given[at], wanted[path])}
        # A count belongs to the moments beside it: an average of 1,000 steps is not one of none.
        is_whole = all(path in fitting or path.param in fresh_params for path in leaves.values())
        for path in leaves.values():
            may_be_fresh = _fits(path, patterns)
            if moments == SAME:
                is_alike = path in found and tuple(given[found[path]].shape) == tuple(wanted[path].shape)
                keep = is_alike or (path in found and not may_be_fresh)
            else:
                keep = is_whole and path in fitting
            if keep:
                state[path] = given[found[path]]
                used.add(found[path])
            elif may_be_fresh:
                fresh.add(path)
    left = [path for path in given if path not in used]
    for path in left:
        if not _fits(path, patterns):
            state[path] = given[path]  # named by the check of all leaves
    state |= fresh_leaves(fresh)
    moved = tuple(("/".join(old), "/".join(new)) for new, old in pairs.items() if old != new)
    replaced = {
        path
        for path in fresh & given.keys()
        if moments != SAME or tuple(given[path].shape) != tuple(wanted[path].shape)
    }
    left = [path for path in left if path not in replaced and _fits(path, patterns)]
    fresh_here = tuple(str(path) for path in wanted if path in fresh)
    return saved._replace(state=state), Report(fresh_here, tuple(map(str, left)), moved)


def _paired_by_fields(here: "_Nodes", there: "_Nodes") -> dict[tuple[str, ...], tuple[str, ...]]:
    """{a node of the new chain: the node of the saved chain that holds its state}.

    It has the same fields: at the same place, or it is the only one left. Else it stands at the same place and has more
    fields, of which the new node has moments, too.
    """
    alike = [node for node in here.leaves if node in there.leaves and here.fields(node) == there.fields(node)]
    pairs = dict(zip(alike, alike, strict=True))
    rest, others = ([node for node in x.leaves if node not in pairs] for x in (here, there))
    for node in rest:
        news, olds = ([n for n in x if y.fields(n) == here.fields(node)] for x, y in ((rest, here), (others, there)))
        if len(news) == len(olds) == 1:
            pairs[node] = olds[0]
    taken = set(pairs.values())
    for node in rest:
        has_moments = any(path.param is not None for path in here.leaves[node].values())
        if node not in pairs and node in there.leaves and node not in taken and has_moments:
            if here.fields(node) <= there.fields(node):
                pairs[node] = node
    return pairs


def _fits(path: StatePath, patterns: Sequence[str]) -> bool:
    return tree_paths.matches(str(path), patterns)


class _Nodes:
    """The states of a chain: {node: {name of a leaf: path}}, and which leaves each must have."""

    def __init__(self, paths: Iterable[StatePath], patterns: Sequence[str]) -> None:
        self.leaves: dict[tuple[str, ...], dict[str, StatePath]] = {}
        self.required: dict[tuple[str, ...], frozenset[str]] = {}
        for path in paths:
            node, name = _split(path)
            self.leaves.setdefault(node, {})[name] = path
        self.leaves = dict(sorted(self.leaves.items(), key=lambda item: chain_places.order(item[0])))
        for node, found in self.leaves.items():
            required = frozenset(name for name, path in found.items() if not _fits(path, patterns))
            self.required[node] = required

    def fields(self, node: tuple[str, ...]) -> set[tuple[str, ...]]:
        """The names of the fields of a node, which hold trees like the params, or arrays."""
        return {path.words[len(node) :] for path in self.leaves[node].values()}

    def kinds(self) -> dict[frozenset[str], list[tuple[str, ...]]]:
        """{the names that a node must have: the nodes}, in the order of the chain."""
        found: dict[frozenset[str], list[tuple[str, ...]]] = {}
        for node, required in self.required.items():
            if required:
                found.setdefault(required, []).append(node)
            else:  # all of it may be missing: the same names, or fresh
                found.setdefault(frozenset({"", *self.leaves[node]}), []).append(node)
        return found


def _paired(here: _Nodes, there: _Nodes, what: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """{a node of the new chain: the node of the saved chain that holds its state}."""
    pairs = {}
    saved = there.kinds()
    for kind, nodes in here.kinds().items():
        found = saved.get(kind, [])
        if len(found) == len(nodes):
            pairs |= dict(zip(nodes, found, strict=True))
        elif found:
            names = sorted(kind - {""})
            chain, last = (here, nodes[-1]) if len(nodes) > len(found) else (there, found[-1])
            raise ValueError(
                f"partial= finds the states of a chain by the names of their leaves; {what} has {len(found)} with "
                f"{', '.join(names[:3])}, and the new optimizer {len(nodes)}, so nobody can tell which is which. Give "
                f"partial= the whole paths of those that only one of them has, such as "
                f"{f'/{chain.leaves[last][names[0]]}'!r}, and no pattern that fits the others."
            )
    # What may be missing is taken if it is there: from a state with other leaves, too, if that stands at its place.
    taken = set(pairs.values())
    for node in here.leaves.keys() - pairs.keys():
        if not here.required[node] and not there.required.get(node, {""}) and node not in taken:
            pairs[node] = node
    return pairs


def _split(path: StatePath) -> tuple[tuple[str, ...], str]:
    """(node, name in the node) of a leaf: the node ends with the last number before the names of the param."""
    last = max((i + 1 for i, part in enumerate(path.words) if part.isdigit()), default=0)
    return path.names[:last], "/".join(path.names[last:])
