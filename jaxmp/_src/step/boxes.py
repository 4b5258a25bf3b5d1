"""Boxes of nnx around arrays of the optimizer's state: closed while the state is stored, opened for the optimizer.

`optax.masked` and `multi_transform` put `MaskedNode()` into a Variable of params or gradients. State that is stored has
it in place of the Variable (`tree_paths.with_boxes_inside`), and optax would find two structures. So the Variables
stand around such nodes again while the optimizer runs.
"""

import warnings
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths


def closed(state: Any) -> Any:
    """A state that an optimizer returned, as it is stored."""
    return tree_paths.with_boxes_inside(state)


def opened(inner: Any, state: Any, params: PyTree) -> Any:
    """A stored state with its boxes where `inner.init` puts them."""
    if not (_holds(params, nnx.Variable) and _holds(state, optax.MaskedNode)):
        return state
    with warnings.catch_warnings(action="ignore"):
        made = jax.eval_shape(inner.init, params)
    fits = jax.tree.structure(closed(made)) == jax.tree.structure(state)
    return jax.tree.unflatten(jax.tree.structure(made), jax.tree.leaves(state)) if fits else state


def _holds(tree: Any, kind: type) -> bool:
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))
