"""Names for the leaves of a pytree, as a user would write them (`decoder/layer_norm/scale`), and patterns for names.

Errors and arguments such as `keep_fp32=` use the same paths. A box around an array (flax's `nn.Partitioned`, an
`nnx.Variable`) adds nothing to the path.

All arguments that choose leaves, layers or modules by path use one language of patterns. A pattern
fits a path if it fits the whole path, or a last part of the path that begins at a component. Case does not matter.

    kernel      fits kernel, dense/kernel
    mlp/up      fits mlp/up, block_0/mlp/up
    *           any text, also across /: *norm* fits block_0/LayerNorm_1/scale
    **/         zero or more whole components: block_0/**/up fits block_0/up, block_0/mlp/up
    ? [ab] [!a] one character, as in fnmatch
    /           in front: the whole path only: /head fits head, but not decoder/head
"""

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from flax import nnx
from flax.core import meta

from jaxmp._src.base.warn import warn

# What stands in place of an array: of an optimizer, and of a frozen kernel.
PARTS = frozenset({"remainder16", "remainder8", "codes", "scales", "q", "log2_scale", "guard", "lock"})


def path_str(path: Iterable[Any]) -> str:
    """A key path of `jax.tree_util` as `a/b/0/c`; the root is `<root>`."""
    return "/".join(key.name for key in keys_of(path)) or "<root>"


class Key(NamedTuple):
    """One level of a key path: a field of a NamedTuple or dataclass, or what a dict or sequence files it under."""

    name: str
    is_field: bool


def keys_of(path: Iterable[Any]) -> tuple[Key, ...]:
    """The levels of a key path of `jax.tree_util`, without those of boxes: fields that are named `value`.

    A box holds one array, or what an optimizer put in its place, so its name comes last or before names of that.
    """
    keys = [Key(name_of(key), isinstance(key, jax.tree_util.GetAttrKey)) for key in path]
    own_keys: list[Key] = []
    for key in reversed(keys):
        ends = all(other.name in PARTS for other in own_keys)
        if not (key.name == "value" and ends and key.is_field):
            own_keys.append(key)
    return tuple(own_keys[::-1])


def name_of(key: Any) -> str:
    """One level of a key path as text."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """The patterns of an argument; a single string is one pattern."""
    is_one = isinstance(patterns, str) or not isinstance(patterns, Iterable)
    checked: Any = (patterns,) if is_one else tuple(patterns)
    for pattern in checked:
        if not isinstance(pattern, str):
            raise TypeError(
                f'path patterns must be text or a list of texts, such as "head" or ("*norm*",); got {pattern!r}. "*" '
                f"fits all."
            )
    return checked


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Whether `path` fits one of `patterns`; see the module's docstring."""
    return first_match(path, patterns) is not None


def first_match(path: str, patterns: str | Iterable[str]) -> str | None:
    """The first of `patterns` that `path` fits; None if there is none."""
    rooted = f"/{path}".lower()
    return next((pattern for pattern in patterns_of(patterns) if _compiled(pattern).fullmatch(rooted)), None)


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression for a path in lower case with `/` in front."""
    pieces = re.split(r"(?:^|(?<=/))\*\*/", pattern.lower())
    translated = (fnmatch.translate(piece)[:-2] for piece in pieces)  # without the \Z at the end
    start = "" if pattern.startswith("/") else "(?s:.*/)"
    return re.compile(start + "(?s:.*/)?".join(translated))


def warn_of_idle(argument: str, patterns: str | Iterable[str], paths: Iterable[str], *, of: str) -> bool:
    """Warns of each pattern that fits no path, if there are paths. Returns whether it warned.

    Args:
      argument: the argument that holds the patterns, as the user wrote it: `"keep_fp32"`.
      patterns: the patterns.
      paths: all paths that were seen.
      of: what these paths name, in one word: `"param"`, `"layer"`, `"module"`.
    """
    paths = list(dict.fromkeys(paths))
    examples = [path for path in paths if path] or paths
    shown = ", ".join(map(repr, examples[:3])) + (", ..." if len(examples) > 3 else "")
    idle = [p for p in patterns_of(patterns) if paths and not any(matches(path, p) for path in paths)]
    for pattern in idle:
        close = _close_to(pattern, paths)
        hint = f" Close to it: {', '.join(map(repr, close))}." if close else ""
        warn(
            "pattern-fits-nothing",
            f"{argument}: the pattern {pattern!r} fits no {of}.{hint} Paths here: {shown}.",
        )
    return bool(idle)


class Patterns:
    """The patterns of one argument, for paths that come one by one. Remembers the paths, to warn of idle patterns.

    Equal to others with the same patterns and values.

    Args:
      argument, of: as for `warn_of_idle`.
      given: the patterns, or a dict from patterns to values.
    """

    def __init__(self, argument: str, patterns: str | Iterable[str], *, of: str):
        self.values: dict[str, Any] = (
            dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns_of(patterns))
        )
        self._argument, self._of = argument, of
        self._paths: dict[str, None] = {}

    def first(self, path: str) -> str | None:
        """The first pattern that the path fits; None if there is none."""
        if self.values:
            self._paths[path] = None
        return first_match(path, self.values)

    def warn_of_idle(self) -> bool:
        """Warns of each pattern that no path has fitted, if there were paths. Returns whether it warned."""
        return warn_of_idle(self._argument, self.values, self._paths, of=self._of)

    def with_values(self, values: Mapping[str, Any]) -> "Patterns":
        """Other patterns of the same argument."""
        return Patterns(self._argument, values, of=self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patterns) and list(self.values.items()) == list(other.values.items())

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # jax asks at each call of a jitted function
        return hash(tuple(self.values.items()))


def _close_to(pattern: str, paths: Iterable[str]) -> list[str]:
    """Up to three parts of `paths`, with as many components as the pattern, that look like it mistyped."""
    wanted = pattern.strip("*/").lower()
    count = wanted.count("/") + 1
    close: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for i in range(len(parts) - count + 1):
            part = "/".join(parts[i : i + count])
            is_level = part.lower() == wanted and i + count < len(parts)  # it fits what is below only with "/*"
            close.setdefault(part.lower(), f"{part}/*" if is_level else part)
    return [close[name] for name in difflib.get_close_matches(wanted, close)]


def is_box(x: Any) -> bool:
    """Whether `x` is a container of flax around one array, with metadata."""
    return isinstance(x, meta.AxisMetadata | nnx.Variable)


def with_boxes_inside(tree: Any) -> Any:
    """`tree` with each `nnx.Variable` that holds a tree of arrays replaced by that tree with a Variable for each array.

    Optax maps over a Variable as over any container, so what it puts in place of an array comes to stand inside: a
    NamedTuple, `MaskedNode()`. But nnx.Optimizer writes its state back Variable by Variable, as nnx.State: a NamedTuple
    inside a Variable would come back as a State, and a NamedTuple of Variables stays.
    """

    def pushed(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return x
        leaves, treedef = jax.tree.flatten(x.get_raw_value())
        if treedef == jax.tree.structure(0):  # an array
            return x
        shapes = [np.shape(leaf) for leaf in leaves]  # metadata, such as a sharding, is for the first
        pairs = zip(leaves, shapes, strict=True)
        return treedef.unflatten([x.replace(leaf) if shape == shapes[0] else type(x)(leaf) for leaf, shape in pairs])

    return jax.tree.map(pushed, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def boxed_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """`(path, leaf or whole box)` of each entry of `tree`, and the structure to put them back together."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
    return [(path_str(path), x) for path, x in leaves], treedef


def nodes_of(tree: Any, *kinds: type) -> list[Any]:
    """The outermost nodes of `tree` that are of one of `kinds`, whole: arrays stay in their boxes (`nnx.Param`)."""
    is_one = lambda x: isinstance(x, kinds)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of `tree` by their paths, in its order, without their boxes.

    Raises:
      ValueError: two leaves have one path, as in {"a/b": x, "a": {"b": y}}.
    """
    by_path: dict[str, Any] = {}
    for key_path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        path = path_str(key_path)
        if path in by_path:
            raise ValueError(
                f"leaves must have different paths; got two at {path}. Rename one, or take the / out of a name."
            )
        by_path[path] = x
    return by_path


def leaves_by_names(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of `tree` by the levels of their paths, without their boxes; a ValueError if two are the same."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_names = {tuple(key.name for key in keys_of(path)): x for path, x in leaves}
    if len(by_names) < len(leaves):
        leaves_by_path(tree)  # an error that names the two
    return by_names


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Dicts of dicts, of leaves by the levels of their paths."""
    tree: dict[str, Any] = {}
    for names, x in leaves.items():
        functools.reduce(lambda node, name: node.setdefault(name, {}), names[:-1], tree)[names[-1]] = x
    return tree


def filled(like: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """`like` with the values by the levels of their paths, and its own leaf where there is none."""
    leaves = [values.get(names, x) for names, x in leaves_by_names(like).items()]
    return jax.tree.structure(like).unflatten(leaves)


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map` whose function also gets the path: `f("a/b", leaf, *leaves_of_rest)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, *xs: f(path_str(path), x, *xs), tree, *rest, is_leaf=is_leaf
    )


_VERY_PARAMS = "Pass the tree that jaxmp.value_and_grad returned for these params."


def check_same_structure(got: Any, expected: Any, got_name: str, expected_name: str, fix: str = _VERY_PARAMS) -> None:
    """Raises a ValueError that names the first path where two trees differ."""
    if jax.tree.structure(got) == jax.tree.structure(expected):
        return
    got_paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    expected_paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    only_got = [path for path in got_paths if path not in set(expected_paths)]
    only_expected = [path for path in expected_paths if path not in set(got_paths)]
    if only_got:
        difference = f"{only_got[0]} is in {got_name} only"
    elif only_expected:
        difference = f"{only_expected[0]} is in {expected_name} only"
    elif got_paths == expected_paths:
        return  # the same leaves in other containers (boxes, FrozenDict): tree.map reports what does not fit
    else:
        difference = "they hold the same paths in another order"
    raise ValueError(f"{got_name} and {expected_name} must have the same tree structure; {difference}. {fix}")


def first_of_other_shape(got: Any, expected: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """(path, shape in got, shape in expected) of the first arrays of two trees of one structure that differ in it."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=False)
    return next(((path_str(p), np.shape(x), np.shape(y)) for (p, x), y in pairs if np.shape(x) != np.shape(y)), None)


def check_same_shapes(grads: Any, params: Any) -> None:
    """Raises a ValueError that names the first path where two trees of one structure have arrays of other shapes."""
    if other_shape := first_of_other_shape(grads, params):
        _raise_of_shapes(*other_shape)


def check_no_broadcast(grads: Any, params: Any) -> None:
    """Raises a ValueError for a gradient of another shape that NumPy's rules would repeat to the shape of its param.

    Such a gradient (for example, of a loss that summed an axis) moves all elements alike. Gradients of other shapes may
    be right where they enter a chain: one gradient for each example, or gradients of params that a later transform
    splits over devices.
    """
    if jax.tree.structure(grads) != jax.tree.structure(params):
        return  # reported elsewhere
    for (path, g), p in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True):
        shape, wanted = np.shape(g), np.shape(p)
        if shape != wanted and len(shape) <= len(wanted):
            if all(n in (1, m) for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
                _raise_of_shapes(path_str(path), shape, wanted)


def _raise_of_shapes(path: str, shape: Any, of_param: Any) -> NoReturn:
    raise ValueError(
        f"grads and params must have the same shapes; got {shape} and {of_param} at {path}. For FSDP see "
        f"jaxmp.fsdp.pad and jaxmp.fsdp.reduce_gradients."
    )
