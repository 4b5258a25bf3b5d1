"""Calls the update of an optax transform: with the extra arguments that it takes, and with its state in boxes of nnx.

`optax.chain` passes all extra arguments to every transform in it that takes extra arguments at all, and drops them for
the others. So a transform with a fixed list of extra arguments (`optax.contrib.sam`) fails on an argument that it does
not know.

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

OWN = ("grads_finite", "loss_scale", "next_loss_scale", "value")


def update(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> tuple[PyTree, Any]:
    """`inner.update` with those of jaxmp's own extra arguments that it takes, and with all others."""
    while True:
        try:
            return inner.update(updates, state, params, **extra_args)
        except TypeError as e:
            # By a function, or by the `value_fn` of optax's line searches.
            said = "'{}'" if "not consumed by `value_fn`" in str(e) else "unexpected keyword argument '{}'"
            refused = [name for name in OWN if name in extra_args and said.format(name) in str(e)]
            if not refused:
                raise
            extra_args = {name: x for name, x in extra_args.items() if name not in refused}


def update_stored(
    inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, Any]:
    """`update` from a state, and to one, as `tree_paths.with_boxes_inside` stores it."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    if not any(map(is_variable, jax.tree.leaves(params, is_leaf=is_variable))):
        return update(inner, updates, state, params, extra_args)
    moves, new = update(inner, updates, _in_variables(inner, state, params), params, extra_args)
    return moves, tree_paths.with_boxes_inside(new)


def _in_variables(inner: Any, state: Any, params: PyTree) -> Any:
    """A stored state with its Variables where `inner.init` puts them."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    if not any(map(is_masked, jax.tree.leaves(state, is_leaf=is_masked))):
        return state
    with warnings.catch_warnings(action="ignore"):
        expected = jax.eval_shape(inner.init, params)
    fits = jax.tree.structure(tree_paths.with_boxes_inside(expected)) == jax.tree.structure(state)
    return jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(state)) if fits else state
