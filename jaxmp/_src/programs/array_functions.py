"""The arguments of a function as named leaves, and the way back: used to look at, store and trace them.

An nnx module is taken apart into its variables, so that each of its leaves has a path like any other leaf. A box around
an array adds nothing to the path. Modules that are put together again are copies.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp._src.base import tree_paths
from jaxmp._src.programs import jaxprs


def is_module(x: Any) -> bool:
    """Whether `x` is an nnx object that holds variables and can change them: a module, `Rngs`, an optimizer, a metric.

    jax takes most of them for trees too, but what a function changes in a tree is lost. An `nnx.Variable` is a box
    around one array, a linen module holds no arrays, and modules of other libraries are trees: none is a module here.
    """
    return isinstance(x, nnx.Pytree)


def is_array(x: Any) -> bool:
    """Whether `x` is an array of jax or of numpy."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def with_values(items: Iterable[Any], places: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """A copy of `items` with `values` at `places`."""
    new_items = list(items)
    for i, x in zip(places, values, strict=True):
        new_items[i] = x
    return new_items


class Leaves(NamedTuple):
    """A tree, taken apart.

    Attributes:
      paths: the path of each leaf, such as `0/dense/kernel`.
      values: the leaves: arrays, Python numbers, and all other objects that are no trees.
      rebuild: gives the tree with other values in place of these.
    """

    paths: list[str]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def flat_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Leaves:
    """Takes a tree apart as jax does."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = [tree_paths.path_str(path) for path, _ in leaves]
    return Leaves(paths, [x for _, x in leaves], lambda values: jax.tree.unflatten(treedef, values))


def leaves_of(tree: Any) -> Leaves:
    """Takes a tree and the nnx modules in it apart; leaves of modules come last."""
    outer = flat_leaves(tree, is_module)
    places = [i for i, x in enumerate(outer.values) if is_module(x)]
    if not places:
        return outer
    others = [i for i in range(len(outer.values)) if i not in places]
    paths, values = [outer.paths[i] for i in others], [outer.values[i] for i in others]
    modules, state = nnx.split([outer.values[i] for i in places])  # together: they may share variables
    variables, state_def = jax.tree_util.tree_flatten_with_path(nnx.as_pure(state))
    for (k, *rest), x in variables:
        path, inner = outer.paths[places[int(k.key)]], tree_paths.path_str(rest)
        paths.append(inner if path == "<root>" else f"{path}/{inner}")
        values.append(x)

    def rebuild(values: Sequence[Any]) -> Any:
        merged = nnx.merge(modules, jax.tree.unflatten(state_def, values[len(others) :]), copy=True)
        whole = with_values(outer.values, others, values[: len(others)])
        return outer.rebuild(with_values(whole, places, merged))

    return Leaves(paths, values, rebuild)


class Inputs:
    """Some leaves of the arguments of a call: those that a traced function takes.

    All other leaves (numbers, strings, functions) stay as they are.

    Args:
      leaves: of `(args, kwargs)`.
      is_input: which of the leaves.

    Attributes:
      values: these leaves.
      paths: where they are, without the leading number: `0/dense/kernel` in the first positional argument.
    """

    def __init__(self, leaves: Leaves, is_input: Callable[[Any], bool] = is_array):
        self._leaves = leaves
        self._places = [i for i, x in enumerate(leaves.values) if is_input(x)]
        self.values = [leaves.values[i] for i in self._places]
        self.paths = [leaves.paths[i].partition("/")[2] for i in self._places]

    def call(self, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """`fn(*args, **kwargs)` with `values` in place of these leaves."""
        args, kwargs = self._leaves.rebuild(with_values(self._leaves.values, self._places, values))
        return fn(*args, **kwargs)


class Traced:
    """A function of pytrees as it was traced: a jaxpr of its input leaves.

    Args:
      fn: the function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      is_input: which leaves are inputs of the jaxpr; other arrays become constants.
      context: entered while the function is traced.
      as_traced: gives the type that an input is traced with, from its own type.

    Attributes:
      jaxpr: the jaxpr.
      consts: its constants.
      values: its inputs.
      avals: their own types.
      paths: where they are among the arguments, `0/Dense_0/kernel` in the first.
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
        inputs = Inputs(flat_leaves((args, kwargs)), is_input)
        self._out: list[Any] = []
        self._arrays: list[int] = []
        self._treedef: Any = None

        def flat(*values: Any) -> list[Any]:
            out, self._treedef = jax.tree.flatten(inputs.call(fn, values))
            self._arrays = [i for i, x in enumerate(out) if isinstance(x, jax.Array)]
            self._out = with_values(out, self._arrays, [None] * len(self._arrays))  # no value of this trace is kept
            return [out[i] for i in self._arrays]

        self.values = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in inputs.values]
        self.avals = [jax.typeof(x) for x in self.values]
        self.paths = tuple(inputs.paths)
        with context:
            closed = jax.make_jaxpr(flat)(*map(as_traced, self.avals))
        self.jaxpr, self.consts = jaxprs.open_jaxpr(closed)

    def unflatten(self, results: list[Any]) -> Any:
        """What the function returns, from the results of its jaxpr."""
        # A result that is a number in the jaxpr is no array yet.
        return jax.tree.unflatten(self._treedef, with_values(self._out, self._arrays, map(jnp.asarray, results)))
