"""The leaves of a saved job: under which names Orbax files them, and what they are in the job.

Orbax joins the names of a leaf with dots, and says of a saved tree no more than the names. So the record has, for each
leaf, its tree, its path there, and which part of the path is that of a param (`Leaf`). Where two leaves have one name
for Orbax ({"a.b": x, "a": {"b": y}}), all names of the tree are written with %2E in place of a dot.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.step import state_paths
from jaxmp._src.step.state_paths import StatePath

FORMAT = "format"  # in the record: its number; see `_READERS`
LEAVES = "leaves"  # in the record: {key: [names, role, begins, ends]} of each leaf
ESCAPED = "names_are_escaped"  # in the record, where the names of the tree are written with escapes


class Leaf(NamedTuple):
    """A leaf of a job.

    Attributes:
      key: its name in the record.
      tree: which tree it is in: params, opt_state, or one of `extra`.
      path: its path in this tree; also where the path of its param begins and ends.
    """

    key: str
    tree: str
    path: StatePath

    def __str__(self) -> str:
        return f"{self.tree}/{self.path}" if self.path.names else self.tree


def of_job(job: Mapping[str, PyTree]) -> list[Leaf]:
    """The leaves of {"params", "opt_state", others}, in the order of its leaves.

    Raises:
      ValueError: two leaves with one name, as of the keys 1 and "1"; a name that is no valid Unicode.
    """
    found = []
    for tree in sorted(job):
        raw = [(tree, *names) for names in _raw_names(job[tree])]
        found += [Leaf(_key(names), tree, path) for names, path in zip(raw, _paths(job, tree), strict=True)]
    seen = set()
    for leaf in found:
        try:
            leaf.key.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"names of leaves must be valid Unicode; got {leaf.key!r}. Rename the leaf.") from e
        if leaf.key in seen:
            raise ValueError(
                f"leaves must have different names as text, by which a checkpoint knows them; got two at {leaf}, as of "
                f"the keys 1 and '1'. Rename one."
            )
        seen.add(leaf.key)
    return found


def _paths(job: Mapping[str, PyTree], tree: str) -> list[StatePath]:
    if tree == "opt_state":
        return state_paths.of(job[tree], job["params"])
    paths = of_tree(job[tree])
    if tree == "params":
        return paths
    keys, params = (
        [tree_paths.keys_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(job[name])]
        for name in (tree, "params")
    )
    owners = state_paths.mirrored(keys, params)
    return [StatePath(path.names, path.role, *owners[key]) for path, key in zip(paths, keys, strict=True)]


def of_tree(tree: PyTree) -> list[StatePath]:
    """The paths of the leaves of a tree of params, or of one like it, in its order."""
    paths = [tree_paths.keys_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [StatePath(tuple(key.name for key in keys), begins=0, ends=len(keys)) for keys in paths]


def by_names(tree: PyTree) -> dict[tuple[str, ...], Any]:
    """The leaves of a tree by the names of their paths, without boxes."""
    return dict(zip((path.names for path in of_tree(tree)), jax.tree.leaves(tree), strict=True))


def as_json(leaves: Iterable[Leaf]) -> dict[str, Any]:
    """For the record."""
    return {leaf.key: [list(p.names), p.role, p.begins, p.ends] for leaf in leaves for p in [leaf.path]}


def for_orbax(job: Mapping[str, PyTree]) -> tuple[Any, bool]:
    """(the tree to save, whether its names are escaped): the job as it is, if Orbax can tell all its names apart."""
    names = _raw_names(job)
    if len({".".join(x) for x in names}) == len(names):
        return job, False
    nested: dict[str, Any] = {_escaped(name): {} for name in job}
    for path, x in zip(names, jax.tree.leaves(job), strict=True):
        *above, last = map(_escaped, path)
        node = nested
        for name in above:
            node = node.setdefault(name, {})
        node[last] = x
    return nested, True


def in_order_of(tree: Any, leaves: Sequence[Leaf], values: Sequence[Any], *, escaped: bool) -> list[Any]:
    """`values`, which belong to `leaves`, in the order of the leaves of `tree`, which `for_orbax` made."""
    by_key = {leaf.key: x for leaf, x in zip(leaves, values, strict=True)}
    return [by_key[_key(map(_unescaped, names) if escaped else names)] for names in _raw_names(tree)]


def check_format(about: Mapping[str, Any]) -> None:
    """Raises a ValueError for the record of a format that is not known here."""
    form = about.get(FORMAT, 0)
    if form not in _READERS:
        raise ValueError(
            f"a record must be of a format that this jaxmp reads, up to {NEWEST}; it is of format {form}, written by "
            f"jaxmp {about.get('versions', {}).get('jaxmp', 'of an unknown version')}, and this is jaxmp "
            f"{metadata.version('jaxmp')}. Restore it with that version, or a later one."
        )


def of_saved(tree: Any, about: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of a tree as Orbax describes it, in its order; `about`: the record.

    Raises:
      ValueError: a leaf that the record does not have.
    """
    return _READERS[about.get(FORMAT, 0)](tree, about)


def _of_record(tree: Any, about: Mapping[str, Any]) -> list[Leaf]:
    names = _raw_names(tree)
    names = [tuple(map(_unescaped, x)) for x in names] if about[ESCAPED] else names
    found = []
    for x in names:
        key = _key(x)
        if key not in about[LEAVES]:
            raise ValueError(f"the record of a checkpoint must have all of its leaves; {key} is not in it")
        path, role, begins, ends = about[LEAVES][key]
        found.append(Leaf(key, x[0], StatePath(tuple(path), role, begins, ends)))
    return found


def _of_names(tree: Any, about: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of a tree that was saved before the record had them, or by Orbax alone; see `state_paths.of_names`."""
    names = _raw_names(tree)
    renamed = {"0": "params", "1": "opt_state"} if isinstance(tree, list | tuple) else {}
    trees = [renamed.get(x[0], x[0]) if x else "" for x in names]
    params = {tuple(tree_paths.without_boxes(x[1:])) for x, tree in zip(names, trees, strict=True) if tree == "params"}
    state = iter(
        state_paths.of_names([x[1:] for x, tree in zip(names, trees, strict=True) if tree == "opt_state"], params)
    )
    found = []
    for x, tree in zip(names, trees, strict=True):
        plain = tuple(tree_paths.without_boxes(x))
        key, inside = "/".join(plain) or "<root>", plain[1:]
        if tree == "opt_state":
            path = next(state)
        elif tree == "params":
            path = StatePath(inside, begins=0, ends=len(inside))
        else:
            begins, ends = state_paths.owner_by_names(inside, params, least=0)
            path = StatePath(inside, begins=begins, ends=ends)
        found.append(Leaf(key, tree, path))
    return found


# How the leaves of a saved tree are known, by the format of the record. A format stays here for good.
_READERS: dict[int, Callable[[Any, Mapping[str, Any]], list[Leaf]]] = {
    0: _of_names,  # a record without `format`, or none, as of Orbax alone
    1: _of_record,  # `leaves`: the path of each leaf, and where that of its param begins and ends
}
NEWEST = max(_READERS)


def trees_of(tree: Any, about: Mapping[str, Any]) -> list[str]:
    """The names of the trees of a job as Orbax describes it, also of those without leaves; [] if it is no job."""
    if isinstance(tree, list | tuple):
        return ["params", "opt_state"] if len(tree) == 2 else []
    found = [str(name) for name in tree] if isinstance(tree, Mapping) else []
    return [_unescaped(name) for name in found] if about.get(ESCAPED) else found


def trees(tree: Mapping[str, Any], leaves: Sequence[Leaf], values: Sequence[Any], about: Mapping[str, Any]) -> Any:
    """{name: tree} of all trees of a job but the state, without boxes and escapes; lists as Orbax has them."""
    found = iter(zip(leaves, values, strict=True))

    def visit(node: Any, above: tuple[str, ...]) -> tuple[Any, bool]:
        """(the tree, whether it is a leaf whose last level is that of a box)."""
        if isinstance(node, Mapping):
            inside = {name: visit(node[name], (*above, name)) for name in sorted(node)}
            if list(inside) == ["value"] and inside["value"][1]:
                return inside["value"][0], False
            return {_unescaped(name) if is_escaped else name: x for name, (x, _) in inside.items()}, False
        if isinstance(node, list | tuple):
            return [visit(x, (*above, str(i)))[0] for i, x in enumerate(node)], False
        if node is None:
            return None, False
        leaf, x = next(found)
        return x, len(leaf.path.names) + 1 < len(above) and leaf.tree != "opt_state"

    is_escaped = bool(about.get(ESCAPED))
    made, _ = visit(tree, ())
    made = dict(zip(trees_of(tree, about), made, strict=True)) if isinstance(made, list) else made
    return {name: x for name, x in made.items() if name != "opt_state"}


def _raw_names(tree: Any) -> list[tuple[str, ...]]:
    """The names of all levels above each leaf, those of boxes too."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [tuple(map(tree_paths.name_of, path)) for path, _ in paths]


def _key(names: Iterable[str]) -> str:
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in names) or "<root>"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace(".", "%2E")


def _unescaped(name: str) -> str:
    return name.replace("%2E", ".").replace("%25", "%")
