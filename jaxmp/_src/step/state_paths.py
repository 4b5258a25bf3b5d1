"""Where the leaves of an optimizer's state lie: what each is, in which part of the chain, and of which param.

A path has words of optimizers and names of the model (`0/mu/dense/kernel`), and a model may use the same words. So the
two are told apart by structure. What a leaf of a `StepState` is follows from the field that it lies in. Moments and
averages mirror the params: in a subtree of the state, each leaf lies at the path of a param, in the same containers.

The wrappers of a step (`optimizer_state`, `fp8_scales`) add nothing to a path. So Adam's `0/mu/w` is the same leaf in a
plain optax state, under `mixed_precision(..., "fp16")` and with fp8.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.tree_paths import Key
from jaxmp._src.step import leaf_paths, state as states
from pallas_kernels import moments

_WRAPPERS = frozenset({"optimizer_state", "fp8_scales"})
_PARTS = (*moments.Quantized._fields, *leaf_paths.REMAINDERS)  # what an optimizer puts in place of one array
_FIELDS_OF_PARTS = frozenset(Key(name, is_field=True) for name in _PARTS)
_STATES = (states.StepState, states.Fp8State, states.SharedLossScaleState)

INNER, MASTER, SCALE, COUNTER, FP8, FP8_COUNTER = "inner", "master", "scale", "counter", "fp8", "fp8_counter"


@dataclasses.dataclass(frozen=True)
class StatePath:
    """The path of a leaf in a state. Two are equal if they have the same names and the same role.

    Attributes:
      names: its components, without wrappers and boxes.
      role: what the leaf is: INNER (of the wrapped optimizer), MASTER, SCALE, COUNTER, FP8 or FP8_COUNTER.
      begins: where the names of its param begin in `names`; None if the leaf belongs to no param.
      ends: where these names end; behind it are the names of what stands in place of the param's array.
    """

    names: tuple[str, ...]
    role: str = INNER
    begins: int | None = dataclasses.field(default=None, compare=False)
    ends: int | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return "/".join(self.names) or "<root>"

    @property
    def words(self) -> tuple[str, ...]:
        """What belongs to the optimizer, before the names of the param."""
        return self.names if self.begins is None else self.names[: self.begins]

    @property
    def param(self) -> str | None:
        """The path of the param that the leaf belongs to."""
        return None if self.begins is None else "/".join(self.names[self.begins : self.ends]) or "<root>"

    @property
    def part(self) -> tuple[str, ...]:
        """The names of what stands in place of the param's array: `codes`, `scales`, `remainder16`."""
        return () if self.ends is None else self.names[self.ends :]

    @property
    def head(self) -> tuple[str, ...]:
        """Where the step stands in the chain whose master, scale, fp8 history or count this is."""
        if self.role == MASTER:
            return self.words[:-1]
        if self.role in (COUNTER, FP8_COUNTER):
            return self.names[:-1]
        mark = {SCALE: "scaling", FP8: "amax_states"}[self.role]
        return self.names[: len(self.names) - 1 - self.names[::-1].index(mark)]

    def behind(self, words: tuple[str, ...], count: int) -> "StatePath":
        """The path with `words` in place of its first `count` names."""
        moved = [None if at is None else at + len(words) - count for at in (self.begins, self.ends)]
        return StatePath(words + self.names[count:], self.role, *moved)


def leaves(state: Any, params: PyTree) -> dict[StatePath, Any]:
    """The leaves of a state by path. `params`: the params that it was made for, arrays or descriptions."""
    return dict(zip(of(state, params), jax.tree.leaves(state), strict=True))


def map_leaves(f: Callable[[StatePath, Any], Any], state: Any, params: PyTree) -> Any:
    """`state` with `f(path, leaf)` in place of each leaf."""
    found, treedef = jax.tree.flatten(state)
    return treedef.unflatten([f(path, x) for path, x in zip(of(state, params), found, strict=True)])


def of(state: Any, params: PyTree) -> list[StatePath]:
    """The paths of the leaves of a state, in the order of its leaves."""
    known = {tree_paths.keys_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    if is_without_fields(state):
        keys_of_state = (tree_paths.keys_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))
        names = [tuple(key.name for key in keys) for keys in keys_of_state]
        return of_names(names, {tuple(key.name for key in keys) for keys in known})
    found = list(_roles(state, ()))
    owners = mirrored([keys for role, keys, _ in found if role == INNER], known)
    paths = []
    for role, keys, begins in found:
        ends = None
        if role == INNER:
            begins, ends = owners[keys]
        elif begins is not None:
            ends = len(keys) - (keys[begins:] not in known and keys[-1] in _FIELDS_OF_PARTS)
        paths.append(StatePath(tuple(key.name for key in keys), role, begins, ends))
    return paths


def is_without_fields(state: Any) -> bool:
    """Whether no level of a state says that it is a field: so it is where Orbax alone reads it, as dicts and lists."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return not any(isinstance(key, jax.tree_util.GetAttrKey) for path in paths for key in path)


def _roles(tree: Any, head: tuple[Key, ...]) -> Iterator[tuple[str, tuple[Key, ...], int | None]]:
    """(role, levels without wrappers, where the param of a master begins) of each leaf, in the order of the leaves."""
    is_own = lambda x: isinstance(x, _STATES) and x is not tree  # noqa: E731
    if not isinstance(tree, _STATES):
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_own):
            below = (*head, *tree_paths.keys_of(path))
            yield from _roles(x, below) if is_own(x) else [(INNER, below, None)]
        return
    for field, x in zip(tree._fields, tree, strict=True):
        role = _ROLES_OF_FIELDS.get(field)
        below = head if field in _WRAPPERS else (*head, Key(field, is_field=True))
        if role is None:
            yield from _roles(x, below)
            continue
        for path, _ in jax.tree_util.tree_leaves_with_path(x):
            yield role, (*below, *tree_paths.keys_of(path)), len(below) if role == MASTER else None


_ROLES_OF_FIELDS = {
    **dict.fromkeys((*states.COUNTED, "rounding_count"), COUNTER),
    **dict.fromkeys(("saturated_tensors", "unused_tensors", "lost_gradients", "spoiled_tensors"), FP8_COUNTER),
    "scaling": SCALE,
    "master_params": MASTER,
    "amax_states": FP8,
}


def mirrored(
    paths: Collection[tuple[Key, ...]], params: Collection[tuple[Key, ...]]
) -> dict[tuple[Key, ...], tuple[int | None, int | None]]:
    """{path of a leaf: (where the levels of its param begin, and end)}; (None, None) for a leaf of no param.

    The params are mirrored at a node if each leaf below it lies at the path of a param, or is part of what stands there
    in place of the param's array. The outermost such node counts. So in params {"mu": {"w"}, "w"} the leaf `.mu["w"]`
    is the moment of `w`. Lists that an optimizer puts there are found last, in a field.
    """
    known = frozenset(params) - {()}
    lengths = sorted({len(param) for param in known}, reverse=True)

    def end(path: tuple[Key, ...], begins: int, is_part: Callable[[tuple[Key, ...]], bool]) -> int | None:
        ends = (begins + n for n in lengths if begins + n <= len(path))
        return next((i for i in ends if path[begins:i] in known and is_part(path[i:])), None)

    def spans(paths: Collection[tuple[Key, ...]], is_part: Any, is_node: Any) -> dict[Any, Any]:
        outside: set[tuple[Key, ...]] = set()
        found = {path: [end(path, i, is_part) for i in range(len(path))] for path in paths}
        for path, ends in found.items():
            outside.update(path[:i] for i, at in enumerate(ends) if at is None)
        nodes = {
            path: [i for i, at in enumerate(ends) if at is not None and path[:i] not in outside and is_node(path[:i])]
            for path, ends in found.items()
        }
        return {path: (at[0], found[path][at[0]]) for path, at in nodes.items() if at}

    strict = spans(paths, lambda part: not part or (len(part) == 1 and part[0] in _FIELDS_OF_PARTS), lambda _: True)
    rest = [path for path in paths if path not in strict]
    loose = spans(
        rest, lambda part: not any(key.is_field for key in part), lambda node: bool(node) and node[-1].is_field
    )
    return {path: strict.get(path) or loose.get(path) or (None, None) for path in paths}


# States that were saved without saying what is a field: by Orbax alone, or before the record had a format.

_OLD_WRAPPERS = _WRAPPERS | {"guarded", "fp8_rest", "master_inner"}
_OLD_COUNTERS = (*states.COUNTED, "kept_elements")
_FIELDS_OF_SCALES = frozenset({*states.LossScaleState._fields, *states.CustomLossScaleState._fields})


def of_names(paths: Sequence[tuple[str, ...]], params: Collection[tuple[str, ...]]) -> list[StatePath]:
    """The paths of leaves of which only names are known, from the names of the params: the longest end is the param.

    Levels named `value` that look like boxes are removed. A model whose layers are called as the fields of a state is
    read as well as one can; what does not fit is an error of the restore.
    """
    known = {tuple(tree_paths.without_boxes(param)) for param in params}
    found = [_without_wrappers(tuple(tree_paths.without_boxes(path)), known) for path in paths]
    by_names = [_of_mark(path) for path in found]
    heads = {role: {path.head for path in by_names if path.role == role} for role in (SCALE, MASTER, FP8)}
    counters = [
        (SCALE, _OLD_COUNTERS, COUNTER),
        (MASTER, ("rounding_count",), COUNTER),
        (FP8, ("saturated_tensors", "unused_tensors", "lost_gradients", "spoiled_tensors"), FP8_COUNTER),
    ]
    roles: dict[tuple[str, ...], str] = {
        (*head, name): role for mark, names, role in counters for head in heads[mark] for name in names
    }
    return [StatePath(p.names, roles[p.names]) if p.role == INNER and p.names in roles else p for p in by_names]


def owner_by_names(
    names: tuple[str, ...], params: Collection[tuple[str, ...]], least: int
) -> tuple[int | None, int | None]:
    """Where the names of the param of a leaf begin (at `least` or later) and end: the longest end that is a param."""
    ends = [len(names), *([len(names) - 1] if names and names[-1] in _PARTS else [])]
    spans = [(begins, at) for begins in range(least, len(names)) for at in ends if names[begins:at] in params]
    return next((span for span in spans if span[0] < span[1]), (None, None))


def _without_wrappers(names: tuple[str, ...], params: Collection[tuple[str, ...]]) -> StatePath:
    """An inner path; the levels of wrappers are removed where they are not those of a param."""
    begins, ends = owner_by_names(names, params, least=1)
    at = len(names) if begins is None else begins
    kept = tuple(name for name in names[:at] if name not in _OLD_WRAPPERS)
    gone = at - len(kept)
    return StatePath(kept + names[at:], INNER, *(None if x is None else x - gone for x in (begins, ends)))


def _of_mark(path: StatePath) -> StatePath:
    """The path with its role, from the words before the names of its param."""
    words = path.words
    if words[-1:] == ("master_params",):
        return StatePath(path.names, MASTER, len(words), path.ends or len(words))
    if words[-2:-1] == ("master_params",) and words[-1] in leaf_paths.REMAINDERS:  # of a model that is one array
        return StatePath(path.names, MASTER, len(words) - 1, len(words) - 1)
    at = len(path.names) - 3
    if 0 <= at < len(words) and path.names[at] == "amax_states" and path.names[-1] in ("scale", "amax_history"):
        return StatePath(path.names, FP8)
    marks = [i for i, word in enumerate(words) if word == "scaling"]
    if marks and path.names[marks[-1] + 1 : marks[-1] + 2] and path.names[marks[-1] + 1] in _FIELDS_OF_SCALES:
        return StatePath(path.names, SCALE)
    return path
