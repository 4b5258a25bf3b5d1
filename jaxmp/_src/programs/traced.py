"""A function of pytrees, traced as it is: its jaxpr, what to feed it, and how to put its results together."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.base import compat, tree_paths


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
        self.jaxpr, self.consts = compat.open_jaxpr(closed)

    def unflatten(self, results: list[Any]) -> Any:
        """What the function returns, from the results of its jaxpr."""
        out = list(self._out)
        for i, x in zip(self._arrays, results, strict=True):
            out[i] = jnp.asarray(x)  # a number that the jaxpr has in itself is no array
        return jax.tree.unflatten(self._treedef, out)
