"""Guards of the functions that read a state, or choose by it: they raise for what is no state of an optimizer."""

import functools
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.step import state as states
from jaxmp._src.step.state import StepState


def check_is_state(opt_state: Any, reader: str) -> None:
    """Raises a TypeError for what cannot be the state of an optimizer: params, a `tx`, a model, a number.

    Every state holds a NamedTuple (optax's convention). `()` stands for no optimizer.
    """
    if isinstance(opt_state, optax.GradientTransformation):
        raise TypeError(f"{reader} reads the state of an optimizer; got the optimizer. Pass tx.init(params).")
    is_namedtuple = lambda x: isinstance(x, tuple) and hasattr(x, "_fields")  # noqa: E731
    is_empty = isinstance(opt_state, tuple) and not opt_state
    if not is_empty and not any(map(is_namedtuple, jax.tree.leaves(nnx.as_pure(opt_state), is_leaf=is_namedtuple))):
        raise TypeError(
            f"{reader} reads the state of an optimizer, as tx.init(params) and apply_gradients return it, or a "
            f"TrainState or nnx.Optimizer that holds one; got {type(opt_state).__name__} without any. Were arguments "
            f"swapped (the order is opt_state, params), or was it restored as plain dicts (restore it with a template)?"
        )


@functools.wraps(states.get_master_params)
def get_master_params(opt_state: Any, params: PyTree) -> PyTree:
    if states.find(params, StepState):
        raise ValueError("get_master_params takes (opt_state, params); got an opt_state as params. Swap the two.")
    check_is_state(opt_state, "get_master_params")
    return states.get_master_params(opt_state, params)


@functools.wraps(states.get_metrics)
def get_metrics(opt_state: Any) -> dict[str, Array]:
    if hasattr(opt_state, "get_scale"):
        raise TypeError(
            "get_metrics reads the state of an optimizer; got a GradScaler. Use its methods: scaler.get_scale(), "
            "scaler.found_inf() between step and update, scaler.state_dict()."
        )
    check_is_state(opt_state, "get_metrics")
    return states.get_metrics(opt_state)


@functools.wraps(states.keep_if_skipped)
def keep_if_skipped(opt_state: Any, new: PyTree, old: PyTree) -> PyTree:
    if not hasattr(opt_state, "found_inf"):  # of a GradScaler
        check_is_state(opt_state, "keep_if_skipped(opt_state, new, old)")
    if jax.tree.structure(new) != jax.tree.structure(old):
        fix = "Pass the whole tree that the step made, with an old one of the same leaves."
        tree_paths.check_same_structure(new, old, "new", "old", fix)
        new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    if found := tree_paths.first_of_other_shape(old, new):
        path, old_shape, new_shape = found
        raise ValueError(
            f"state that a skipped step restores must keep its shapes; got {new_shape} in new and {old_shape} in old "
            f"at {path}. With accumulate=k, aux of the loss is stacked; BatchNorm's statistics are passed through the "
            f"microbatches by jaxmp.value_and_grad(..., carry_argnum=), see docs/how-to/step/accumulation.md."
        )
    return states.keep_if_skipped(opt_state, new, old)
