"""Finds the states of a saved chain where transforms without state were added or removed.

The path of a state counts the transforms before it: `0/mu/w` becomes `1/0/mu/w` if `reduce_gradients` comes first, as
in a job for several devices. Transforms without state have no leaves. So two chains are the same if their paths are
equal after two changes: numbers count only the states that have leaves, and a number without siblings is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp._src.checkpoint import job_leaves
from jaxmp._src.step import leaf_paths
from pallas_kernels import moments

_Path = tuple[str, ...]


def aligned(saved: job_leaves.Saved, structure: Any) -> job_leaves.Saved:
    """`saved` with the paths of `structure`, for each part of the state that is the same chain in both."""
    wanted = leaf_paths.essential_leaves(structure)
    state = saved.state
    for mark in ("scaling", "master_params", "amax_states"):
        state = _with_heads(state, wanted, mark)
    names = _renamed(job_leaves.inner_leaves(state), job_leaves.inner_leaves(wanted), saved.params)
    return saved._replace(state={names.get(path, path): x for path, x in state.items()})


def _with_heads(given: Mapping[str, Any], wanted: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """`given` with its loss scales, masters or fp8 histories (and counts beside them) where `wanted` has them."""
    old, new = (_heads(paths, mark) for paths in (given, wanted))
    if old == new or [_names(head) for head in old] != [_names(head) for head in new]:
        return dict(given)
    there = dict(zip(old, new, strict=True))
    beside = {head: {f"{head}{name}" for name in job_leaves.BESIDE[mark]} for head in old}

    def name(path: str) -> str:
        for head, other in there.items():
            if path.startswith(f"{head}{mark}/") or path in beside[head]:
                return other + path.removeprefix(head)
        return path

    special = job_leaves.special_parts(list(given))
    return {name(path) if path in special else path: x for path, x in given.items()}


def _heads(paths: Iterable[str], mark: str) -> list[str]:
    """What stands before `mark` in the special parts of a state, in the order of the chain."""
    special = job_leaves.special_parts(list(paths))
    found = {f"/{path}".partition(f"/{mark}/")[0] for path in special if f"/{mark}/" in f"/{path}"}
    return [f"{head}/".lstrip("/") for head in sorted(found, key=lambda head: order(head.split("/")))]


def _names(head: str) -> list[str]:
    return [part for part in head.split("/") if part and not part.isdigit()]


def order(parts: Iterable[str]) -> list[tuple[bool, str]]:
    """The key that sorts paths as their states stand in the chain: by numbers, not by digits."""
    return [(part.isdigit(), part.zfill(8)) for part in parts]


def _renamed(given: Mapping[str, Any], wanted: Mapping[str, Any], params: Iterable[str]) -> dict[str, str]:
    """{path in `given`: path in `wanted`} if both are one chain; else nothing."""
    if given.keys() == wanted.keys():
        return {}
    ends = {tuple(path.split("/")) for path in params}
    old, new = ({counted: path for path, counted in _counted(paths, ends).items()} for paths in (given, wanted))
    if old.keys() != new.keys() or len(old) != len(given) or len(new) != len(wanted):
        return {}
    return {path: new[counted] for counted, path in old.items()}


def _counted(paths: Iterable[str], ends: set[_Path]) -> dict[str, _Path]:
    """Each path with the numbers in it counted anew; the path of a param at its end stays."""
    parts = {path: split(tuple(path.split("/")), ends) for path in paths}
    levels: dict[_Path, set[str]] = {}
    for head, _ in parts.values():
        for i, part in enumerate(head):
            levels.setdefault(head[:i], set()).add(part)

    def counted(head: _Path) -> _Path:
        kept = []
        for i, part in enumerate(head):
            level = levels[head[:i]]
            if not all(x.isdigit() for x in level):
                kept.append(part)
            elif len(level) > 1:
                kept.append(str(sorted(level, key=int).index(part)))
        return tuple(kept)

    return {path: (*counted(head), *rest) for path, (head, rest) in parts.items()}


def split(path: _Path, ends: set[_Path]) -> tuple[_Path, _Path]:
    """(what belongs to the chain, the path of the param and what follows it)."""
    core = path[:-1] if path[-1] in moments.Quantized._fields else path
    longest = max((n for n in range(1, len(core)) if core[-n:] in ends), default=0)
    return path[: len(core) - longest], path[len(core) - longest :]
