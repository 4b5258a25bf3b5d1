"""Names for the leaves of a pytree, as a user would write them: `decoder/layer_norm/scale`.

Rules of a policy and messages of errors speak of the same paths. A box around an array (flax's `nn.Partitioned`,
an `nnx.Variable`) adds nothing to the path.
"""

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta


def path_str(path: Iterable[Any]) -> str:
    """A key path of `jax.tree_util` as `a/b/0/c`; the root is `<root>`."""
    names = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value":
            continue  # the content of a box
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                names.append(str(getattr(key, attribute)))
                break
        else:
            names.append(str(key))
    return "/".join(names) or "<root>"


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether `path` fits one of the shell-style `patterns`, upper and lower case alike."""
    lowered = path.lower()
    return any(fnmatch.fnmatchcase(lowered, pattern.lower()) for pattern in patterns)


def is_box(x: Any) -> bool:
    """Whether `x` is a container that flax puts around one array to carry metadata."""
    return isinstance(x, meta.AxisMetadata | nnx.Variable)


def boxed_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """`(path, leaf or whole box)` of each entry of `tree`, and the structure that puts them back together."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
    return [(path_str(path), x) for path, x in found], treedef


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by their paths, in its order; boxes are looked into."""
    return {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map` whose function also gets the path: `f("a/b", leaf, *leaves_of_rest)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, *xs: f(path_str(path), x, *xs), tree, *rest, is_leaf=is_leaf
    )


_VERY_PARAMS = "Pass the tree that jaxmp.value_and_grad returned for these very params."


def check_same_structure(got: Any, expected: Any, got_name: str, expected_name: str, fix: str = _VERY_PARAMS) -> None:
    """Raises a ValueError that names the first path in which two trees differ."""
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
        return  # the same leaves in other containers (boxes, FrozenDict): tree.map says what does not fit
    else:
        difference = "the same paths come in another order"
    raise ValueError(f"{got_name} and {expected_name} must have the same tree structure; {difference}. {fix}")


def check_same_shapes(got: Any, expected: Any, got_name: str, expected_name: str) -> None:
    """Raises a ValueError that names the first path at which two trees of one structure have arrays of other shapes."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=False)
    for (path, x), y in pairs:
        if np.shape(x) != np.shape(y):
            raise ValueError(
                f"{got_name} and {expected_name} must have the same shapes; got {np.shape(x)} and {np.shape(y)} at "
                f"{path_str(path)}. Where params are cut over devices, {got_name} are cut the same way "
                f"(jaxmp.fsdp.reduce_gradients), and tx.init takes them padded (jaxmp.fsdp.pad)."
            )


@contextlib.contextmanager
def explained_by_shapes(grads: Any, params: Any) -> Iterator[None]:
    """Turns an error inside into one that names the first gradient of another shape than its param, if there is one."""
    try:
        yield
    except (TypeError, ValueError):
        check_same_shapes(grads, params, "grads", "params")  # raises in the place of the error, which it has as context
        raise
