"""Finds the states of a saved chain where transforms without state were added or removed.

The path of a state counts the transforms before it: `0/mu/w` becomes `1/0/mu/w` if `reduce_gradients` comes first, as
in a job for several devices. Transforms without state have no leaves. So two chains are the same if their paths are
equal after two changes: numbers count only the states that have leaves, and a number without siblings is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp._src.checkpoint import job_leaves
from jaxmp._src.step import state_paths
from jaxmp._src.step.state_paths import StatePath

_Words = tuple[str, ...]


def aligned(saved: job_leaves.Saved, wanted: Mapping[StatePath, Any]) -> job_leaves.Saved:
    """`saved` with the paths of `wanted`, for each part of the state that is the same chain in both."""
    state = saved.state
    for mark in (state_paths.SCALE, state_paths.MASTER, state_paths.FP8):
        state = _with_heads(state, wanted, mark)
    renamed = _renamed(job_leaves.inner_leaves(state), job_leaves.inner_leaves(wanted))
    return saved._replace(state={renamed.get(path, path): x for path, x in state.items()})


def _with_heads(given: Mapping[StatePath, Any], wanted: Mapping[StatePath, Any], mark: str) -> dict[StatePath, Any]:
    """`given` with its loss scales, masters or fp8 histories (and counts beside them) where `wanted` has them."""
    old, new = (_heads(paths, mark) for paths in (given, wanted))
    if old == new or [_names(head) for head in old] != [_names(head) for head in new]:
        return dict(given)
    there = dict(zip(old, new, strict=True))

    def moved(path: StatePath) -> StatePath:
        is_of_mark = path.role == mark or (path.role, _is_rounding(path)) in _BESIDE[mark]
        return path.behind(there[path.head], len(path.head)) if is_of_mark and path.head in there else path

    return {moved(path): x for path, x in given.items()}


# By the role of special leaves: (role, whether it counts roundings) of the counts beside them.
_BESIDE = {
    state_paths.SCALE: {(state_paths.COUNTER, False)},
    state_paths.MASTER: {(state_paths.COUNTER, True)},
    state_paths.FP8: {(state_paths.FP8_COUNTER, False)},
}


def _is_rounding(path: StatePath) -> bool:
    return path.names[-1] == "rounding_count"


def _heads(paths: Iterable[StatePath], mark: str) -> list[_Words]:
    """Where the special leaves of a state stand, in the order of the chain."""
    return sorted({path.head for path in paths if path.role == mark}, key=order)


def _names(head: _Words) -> list[str]:
    return [part for part in head if not part.isdigit()]


def order(parts: Iterable[str]) -> list[tuple[bool, str]]:
    """The key that sorts paths as their states stand in the chain: by numbers, not by digits."""
    return [(part.isdigit(), part.zfill(8)) for part in parts]


def _renamed(given: Mapping[StatePath, Any], wanted: Mapping[StatePath, Any]) -> dict[StatePath, StatePath]:
    """{path in `given`: path in `wanted`} if both are one chain; else nothing."""
    if given.keys() == wanted.keys():
        return {}
    old, new = ({counted: path for path, counted in _counted(paths).items()} for paths in (given, wanted))
    if old.keys() != new.keys() or len(old) != len(given) or len(new) != len(wanted):
        return {}
    return {path: new[counted] for counted, path in old.items()}


def _counted(paths: Iterable[StatePath]) -> dict[StatePath, tuple[_Words, _Words]]:
    """Each path as (its words with the numbers in them counted anew, the names of the param and what follows)."""
    levels: dict[_Words, set[str]] = {}
    for path in paths:
        for i, part in enumerate(path.words):
            levels.setdefault(path.words[:i], set()).add(part)

    def counted(words: _Words) -> _Words:
        kept = []
        for i, part in enumerate(words):
            level = levels[words[:i]]
            if not all(x.isdigit() for x in level):
                kept.append(part)
            elif len(level) > 1:
                kept.append(str(sorted(level, key=int).index(part)))
        return tuple(kept)

    return {path: (counted(path.words), path.names[len(path.words) :]) for path in paths}
