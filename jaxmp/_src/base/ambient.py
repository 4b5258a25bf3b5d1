"""Values that a trace uses besides the arguments of its functions: one typed value, and contexts of jax.

jaxmp passes state as arguments. Two kinds of values cannot be passed, because a user's own code (a flax module, a loss
function, an optax chain) stands between the sender and the receiver:

- a region that a user entered by `with`: it applies to all code that is called inside it;
- `Notes`: what the layers of a model tell `value_and_grad`, which traces the loss.

`docs/explanation/step.md` gives the reason for each field.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass
class Notes:
    """What code in a loss noted while the loss was traced.

    Attributes:
      fp8_matmuls: how many matmuls with fp8 scales were traced.
      unmoved_scales: the fp8 layers whose scales are not differentiated.
      gathered_params: `GatheredParams`, which trees of params were gathered from their parts.
    """

    fp8_matmuls: int = 0
    unmoved_scales: dict[str, None] = dataclasses.field(default_factory=dict)
    gathered_params: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ambient:
    """The value in the context variable. Every region replaces some fields, and restores them at its end.

    Attributes:
      autocast_region: the innermost `reach.Region`, which notes whether it reached anything.
      autocast_reached: the lists of all regions that did. The same object everywhere.
      fp8_layers: the interceptor of the innermost `jaxmp.fp8.autocast`. flax calls the interceptors of all regions,
        the outermost first, and only the innermost may answer.
      notes: of the innermost `value_and_grad`.
    """

    autocast_region: Any = None
    autocast_reached: set[Any] = dataclasses.field(default_factory=set)
    fp8_layers: Any = None
    notes: Notes = dataclasses.field(default_factory=Notes)


# Values that are part of the key under which `jax.jit` caches a trace: where they differ, jit traces again.

# (`CastLists` of the innermost `jaxmp.autocast` or None, whether an autocast function is being traced, which will
# rewrite all code that it calls)
AUTOCAST = jax.make_user_context((None, False))
# False in `jaxmp.fp8.autocast(enabled=False)`.
FP8_ENABLED = jax.make_user_context(True)
# Whether `jaxmp.fp8.calibrate` runs: each fp8 tensor is cast with the scale of its own amax.
FP8_CALIBRATING = jax.make_user_context(False)

_NOW: contextvars.ContextVar[Ambient] = contextvars.ContextVar("jaxmp")
_OUTSIDE = Ambient()  # of all regions


def now() -> Ambient:
    """The value where this is called."""
    return _NOW.get(_OUTSIDE)


def is_in_loss() -> bool:
    """Whether a loss of `value_and_grad` is traced or differentiated here."""
    return now().notes is not _OUTSIDE.notes


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """A region with notes of its own."""
    notes = Notes()
    with having(notes=notes):
        yield notes


@contextlib.contextmanager
def having(**fields: Any) -> Iterator[None]:
    """A region in which some fields have other values; the innermost region counts."""
    token = _NOW.set(dataclasses.replace(now(), **fields))
    try:
        yield
    finally:
        _NOW.reset(token)
