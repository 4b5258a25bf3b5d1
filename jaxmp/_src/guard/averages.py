"""Refuses a transform behind `ema_params` that may change updates: the average would be of other weights."""

from typing import Any

import jax
import optax
from flax import nnx

from jaxmp._src.step import state as states
from jaxmp._src.step.state import EmaParamsState, ZeroCountState


def check(tree: Any) -> None:
    """Raises a ValueError if, in a chain in `tree`, a transform that may change updates follows `ema_params`."""
    stops = lambda x: _is_plain_tuple(x) or isinstance(x, EmaParamsState)  # noqa: E731
    for chain in filter(_is_plain_tuple, jax.tree.leaves(nnx.as_pure(tree), is_leaf=stops)):
        averaged = [i for i, state in enumerate(chain) if states.find(state, EmaParamsState)]
        later = chain[averaged[0] + 1 :] if averaged else ()
        if averaged and isinstance(chain[averaged[0]], optax.MaskedState | optax.PartitionState):
            later = [x for x in later if not isinstance(x, optax.MaskedState)]  # for the other params
        behind = next(filter(None, map(_changes_updates, later)), None)
        if behind is not None:
            raise ValueError(
                f"ema_params averages the weights plus the updates that it gets, so no transform behind it may change "
                f"updates; got a transform with {behind} behind ema_params in a chain. Put ema_params last: "
                f"jaxmp.mixed_precision(optax.chain(optimizer, ..., jaxmp.ema_params(0.999)), policy)."
            )
        for i in averaged:
            check(chain[i])


def _changes_updates(state: Any) -> str | None:
    """The name of a state of a transform that may change updates, in the state of one transform; or None."""
    if isinstance(state, optax.MaskedState):
        return _changes_updates(state.inner_state)
    if _is_plain_tuple(state):
        return next(filter(None, map(_changes_updates, state)), None)
    return type(state).__name__ if hasattr(state, "_fields") and not isinstance(state, _ONLY_LOOK) else None


# The states of transforms that return the updates that they get. (That of optax.identity is also that of optax.scale.)
_ONLY_LOOK = (EmaParamsState, ZeroCountState, optax.MonitorState, optax.SnapshotState)


def _is_plain_tuple(x: Any) -> bool:
    return type(x) is tuple
