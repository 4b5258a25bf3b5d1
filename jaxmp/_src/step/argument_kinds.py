"""Detects arguments in the wrong order: tells what an argument is, and makes a message with the right order.

The arguments of a step are trees of arrays of the same shapes, so a call with two of them swapped often runs, or fails
in unrelated code. But their kinds can be detected: an optimizer has `init` and `update`, its state holds jaxmp's
tuples, gradients are those that `value_and_grad` returned, a policy is a name or a `jmp.Policy`.
"""

from typing import Any

import jax
import jmp
import numpy as np
import optax

from jaxmp._src.step import scale_reads, state as states

_KINDS = {
    "optimizer": "an optimizer",
    "state": "an optimizer's state",
    "plain state": "an optimizer's state",  # of optax alone; a part of a job's state where it stands elsewhere
    "holder": "a TrainState or nnx.Optimizer",
    "policy": "a policy",
    "dtype": "a dtype",
    "function": "a function",
    "gradients": "the gradients of value_and_grad",
}
# What may stand in a place, by what is wanted there; "other" is a tree, or anything else.
_TAKES = {
    "optimizer": {"optimizer"},
    "state": {"state", "other"},
    "state or holder": {"state", "holder", "other"},
    "params": {"other"},
    "tree": {"gradients", "other"},
    "not a state": set(_KINDS) - {"state"} | {"other"},
    "policy": {"policy", "dtype", "other"},  # the policy says what to write for a dtype
    "function": {"function", "other"},
}


def check(call: str, **arguments: tuple[str, Any]) -> None:
    """Raises a TypeError that names all arguments of a call that are in the place of others.

    Args:
      call: the call as it is written, for the message.
      **arguments: by name of the argument, what is wanted there (a key of `_TAKES`) and what was given.
    """
    kinds = {name: (kind, kind_of(x), x) for name, (kind, x) in arguments.items()}
    wrong = [f"{_text(got, x)} as {name}" for name, (kind, got, x) in kinds.items() if not _fits(got, kind)]
    if wrong:
        is_holder = any(got == "holder" for _, got, _ in kinds.values())
        parts = " Its parts are state.params and state.opt_state." if is_holder else ""
        raise TypeError(f"the arguments are {call}; got {', '.join(wrong)}.{parts}")


def _fits(got: str, kind: str) -> bool:
    return kind != "params" if got == "plain state" else got in _TAKES[kind]


def kind_of(x: Any) -> str:
    """What an argument looks like: a key of `_KINDS`, or "other"."""
    if isinstance(x, str | jmp.Policy):
        return "policy"
    if hasattr(x, "init") and hasattr(x, "update"):
        return "optimizer"
    if hasattr(x, "opt_state") and not isinstance(x, tuple):  # optax.contrib.sam's state has such a field
        return "holder"
    if isinstance(x, np.dtype | type):
        return "dtype"
    if states.find(x, states.StepState):
        return "state"
    if any(map(_is_of_optax, jax.tree.leaves(x, is_leaf=_is_of_optax))):
        return "plain state"
    if scale_reads.holds_gradients(x):
        return "gradients"
    is_tree = jax.tree.structure(x) != jax.tree.structure(0)
    return "function" if callable(x) and not is_tree else "other"


def _is_of_optax(x: Any) -> bool:
    """Whether this is a state of one of optax's transforms: none of its tuples that stand among params."""
    is_tuple = hasattr(x, "_fields") and type(x).__module__.partition(".")[0] == "optax"
    return is_tuple and not isinstance(x, optax.MaskedNode | optax.LookaheadParams)


def _text(kind: str, x: Any) -> str:
    return _KINDS.get(kind, type(x).__name__) + (f" ({x!r})" if isinstance(x, str) else "")
