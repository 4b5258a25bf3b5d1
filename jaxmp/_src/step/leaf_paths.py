"""Paths of the leaves of params and of an optimizer's state, without the levels that wrappers add.

The same leaf has different paths in different trees: transforms wrap an optimizer, boxes wrap arrays, and Orbax turns
all of it into nested dicts. The paths differ only in a few known levels, and this file removes these levels. So Adam's
`0/mu/w` is the same leaf in a plain optax state, under `mixed_precision(..., "fp16")` and with fp8.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxmp._src.base import tree_paths

REMAINDERS = ("remainder16", "remainder8")
_WRAPPERS = frozenset({"optimizer_state", "fp8_scales", "guarded", "fp8_rest", "master_inner"})  # the last three: old


def plain_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, boxes removed (also a box that Orbax turned into a dict)."""
    return _shortened(tree, plain)


def essential_leaves(opt_state: Any) -> dict[str, Any]:
    """The leaves of an optimizer's state by path, wrappers of transforms removed."""
    return _shortened(nnx.as_pure(opt_state), essential)


def _shortened(tree: Any, shorten: Callable[[str], str]) -> dict[str, Any]:
    leaves = tree_paths.leaves_by_path(tree)
    short = {shorten(path): x for path, x in leaves.items()}
    return short if len(short) == len(leaves) else leaves


def essential(path: str) -> str:
    """A path without the levels of wrappers and boxes."""
    return plain("/".join(part for part in path.split("/") if part not in _WRAPPERS))


def plain(path: str) -> str:
    """A path without the levels of boxes."""
    return "/".join(tree_paths.without_boxes(path.split("/")))


def param_of(path: str) -> tuple[str, str | None]:
    """(path of the param, kind of remainder or None), from the path of a master in its tree."""
    path = plain(path)
    head, _, last = path.rpartition("/")
    return (head, last) if last in REMAINDERS else (path, None)


def first_paths(leaves: Mapping[str, Any]) -> str:
    """The first paths of `leaves` as a sentence, for the end of an error."""
    if not leaves:
        return "There are no leaves."
    return f"There are {', '.join(list(leaves)[:4])}{', ...' if len(leaves) > 4 else ''}."
