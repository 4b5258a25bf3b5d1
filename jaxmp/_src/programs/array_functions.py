"""The arguments of a function as named leaves, and the way back: what is looked at, stored, and traced.

An nnx module is taken apart into its variables, so that a leaf of it has a path like any other; a box round an array
adds nothing to the path. Put together again, modules are copies.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp._src.base import tree_paths
from jaxmp._src.programs import jaxprs


class Leaves(NamedTuple):
    """A tree, taken apart.

    Attributes:
      paths: the path of each leaf, such as `0/dense/kernel`.
      values: the leaves: arrays, Python numbers, and whatever else has no leaves of its own.
      rebuild: gives the tree with other values in their places.
      modules: the static part of the nnx modules in it, or None.
    """

    paths: list[str]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    modules: Any


def is_module(x: Any) -> bool:
    """Whether nnx takes `x` apart into variables."""
    return isinstance(x, (nnx.Module, nnx.Rngs, nnx.Optimizer))


def is_array(x: Any) -> bool:
    """Whether `x` is an array, of jax or of numpy."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def leaves_of(tree: Any) -> Leaves:
    """Takes a tree apart."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_module)
    places = [i for i, (_, x) in enumerate(found) if is_module(x)]
    paths = [tree_paths.path_str(path) for path, x in found if not is_module(x)]
    values = [x for _, x in found if not is_module(x)]
    if not places:
        return Leaves(paths, values, lambda given: jax.tree.unflatten(treedef, given), None)
    modules, state = nnx.split([found[i][1] for i in places])  # together: they may share variables
    variables, state_def = jax.tree_util.tree_flatten_with_path(nnx.as_pure(state))
    plain = len(values)
    for path, x in variables:
        k, *rest = path
        outer = tree_paths.path_str(found[places[int(k.key)]][0])
        inner = tree_paths.path_str(rest)
        paths.append(inner if outer == "<root>" else f"{outer}/{inner}")
        values.append(x)

    def rebuild(given: Sequence[Any]) -> Any:
        merged = nnx.merge(modules, jax.tree.unflatten(state_def, given[plain:]), copy=True)
        others = iter(given[:plain])
        by_place = dict(zip(places, merged, strict=True))
        whole = [by_place[i] if i in by_place else next(others) for i in range(len(found))]
        return jax.tree.unflatten(treedef, whole)

    return Leaves(paths, values, rebuild, modules)


class Traced:
    """A function as it was traced.

    What is no input stays what it was: numbers, strings, functions; arrays that `is_input` refuses are constants.

    Args:
      fn: a function of pytrees.
      args: its positional arguments.
      kwargs: its keyword arguments.
      is_input: which leaves are inputs of the jaxpr.
      context: what it is traced in.
      as_traced: the type that an input is traced with, by its own.

    Attributes:
      jaxpr: the jaxpr; `consts`: its constants; `values`: its inputs, with the types `avals`; `paths`: where among the
        arguments they stand, `0/Dense_0/kernel` for the first.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_input: Callable[[Any], bool],
        context: contextlib.AbstractContextManager[Any],
        as_traced: Callable[[Any], Any] = lambda aval: aval,
    ):
        found, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [x for _, x in found]
        places = [i for i, x in enumerate(leaves) if is_input(x)]
        self._out: list[Any] = []
        self._arrays: list[int] = []
        self._treedef: Any = None

        def flat(*values: Any) -> list[Any]:
            given = list(leaves)
            for i, x in zip(places, values, strict=True):
                given[i] = x
            args, kwargs = jax.tree.unflatten(treedef, given)
            self._out, self._treedef = jax.tree.flatten(fn(*args, **kwargs))
            self._arrays = [i for i, x in enumerate(self._out) if isinstance(x, jax.Array)]
            return [self._out[i] for i in self._arrays]

        self.values = [jnp.asarray(leaves[i]) for i in places]
        self.avals = [jax.typeof(x) for x in self.values]
        self.paths = tuple(tree_paths.path_str(found[i][0][1:]) for i in places)
        with context:
            closed = jax.make_jaxpr(flat)(*map(as_traced, self.avals))
        self.jaxpr, self.consts = jaxprs.open_jaxpr(closed)

    def unflatten(self, results: list[Any]) -> Any:
        """What the function returns, from the results of its jaxpr."""
        out = list(self._out)
        for i, x in zip(self._arrays, results, strict=True):
            out[i] = jnp.asarray(x)  # a number that the jaxpr has in itself is no array
        return jax.tree.unflatten(self._treedef, out)
