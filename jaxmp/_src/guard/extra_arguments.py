"""Refuses a misspelt extra argument: optax passes on what it does not know, and nobody reads it."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from jaxmp._src.step.transform import Transformation

# What optax's own transforms take, and what a step of jaxmp takes. A loop may pass them to any optimizer.
_CUSTOMARY = ("value", "value_fn", "grad", "grad_fn", "obj_fn", "loss", "losses", "hvp", "loss_scale", "grads_finite")
_OF_EVERY_STATE = ("apply_fn", "params", "tx", "opt_state")  # never passed to a step
_CLOSE = 0.85


def check(tx: Any, names: Iterable[str], *, fields: Iterable[str] = ()) -> None:
    """Raises a TypeError for an extra argument that is almost a known one, or that the optimizer's signature lacks.

    Args:
      tx: an optax transform.
      names: of the arguments that a user passed.
      fields: names that the caller would have taken itself.
    """
    unknown = [name for name in names if name not in _CUSTOMARY]
    if not unknown:
        return
    fields = [name for name in fields if name not in _OF_EVERY_STATE]
    update = tx.rule.optimizer.inner.update if isinstance(tx, Transformation) else tx.update
    parameters = inspect.signature(update).parameters.values()
    taken = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in unknown:
        close = difflib.get_close_matches(name, [*fields, *taken, *_CUSTOMARY], n=1, cutoff=_CLOSE)
        if name in taken or (takes_any and not close):
            continue
        nobody = "which the optimizer does not take" + (", and which is no field of this state" if fields else "")
        hint = f"Did you mean {close[0]}=?" if close else "Leave it out."
        raise TypeError(f"an argument of apply_gradients must be taken by someone; got {name}=, {nobody}. {hint}")
