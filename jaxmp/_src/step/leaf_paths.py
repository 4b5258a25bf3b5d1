"""Paths of the leaves of params, as names that a user would write, and of what an optimizer put in their place."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp._src.base import tree_paths

REMAINDERS = ("remainder16", "remainder8")


def param_of(key_path: Iterable[Any]) -> str:
    """The path of the param that a master belongs to, from the key path of the master in its tree."""
    keys = tree_paths.keys_of(key_path)
    if keys and keys[-1] in _FIELDS_OF_REMAINDERS:
        keys = keys[:-1]
    return "/".join(key.name for key in keys) or "<root>"


_FIELDS_OF_REMAINDERS = [tree_paths.Key(name, is_field=True) for name in REMAINDERS]


def first_paths(leaves: Mapping[Any, Any]) -> str:
    """The first paths of `leaves` as a sentence, for the end of an error."""
    if not leaves:
        return "There are no leaves."
    return f"There are {', '.join(map(str, list(leaves)[:4]))}{', ...' if len(leaves) > 4 else ''}."
