"""Calls an optimizer whose state was stored with the boxes of nnx inside (`tree_paths.with_boxes_inside`).

`optax.masked` and `multi_transform` put `MaskedNode()` into a Variable of params or gradients, and state that was
stored has it in place of the Variable: optax would find two structures. So the Variables stand around such nodes again
while the optimizer runs.
"""

import warnings
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.step import extra_arguments


def update(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> tuple[PyTree, Any]:
    """`extra_arguments.update` for a state that was stored."""
    as_made = _as_made(inner, state, params)
    new_updates, new = extra_arguments.update(inner, updates, as_made, params, extra_args)
    return new_updates, new if as_made is state else tree_paths.with_boxes_inside(new)


def _as_made(inner: Any, state: Any, params: PyTree) -> Any:
    """`state` with its boxes where `inner.init` puts them."""
    if not (_holds(params, nnx.Variable) and _holds(state, optax.MaskedNode)):
        return state
    with warnings.catch_warnings(action="ignore"):
        made = jax.eval_shape(inner.init, params)
    fits = jax.tree.structure(tree_paths.with_boxes_inside(made)) == jax.tree.structure(state)
    return jax.tree.unflatten(jax.tree.structure(made), jax.tree.leaves(state)) if fits else state


def _holds(tree: Any, kind: type) -> bool:
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))
