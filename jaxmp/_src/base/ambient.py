"""What a trace knows beside the arguments of its functions: one typed value, in one context variable.

Arguments are passed. Only two kinds of things cannot be, because a user's own code (a flax module, a loss function, an
optax chain) stands between the one who knows and the one who asks:

- a region that a user entered by `with`, which holds for all code that is called inside of it;
- what `value_and_grad` wants to know of the loss that it traces, and hands on to the gradients' user: `Notes`.

`docs/explanation/step.md` lists each field with its reason.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


class CutParams(NamedTuple):
    """Params that are cut over a mesh axis, as seen at one level of one trace.

    Attributes:
      trace: of `compat.trace_state()`.
      axis_name: the axis.
      structure, shapes: of this device's parts.
    """

    trace: Any
    axis_name: str
    structure: Any
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Notes:
    """What was seen while a loss was traced.

    Attributes:
      fp8_matmuls: how many matmuls with fp8 scales were traced.
      cut_params: which trees of params were gathered from their parts.
    """

    fp8_matmuls: int = 0
    cut_params: list[CutParams] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ambient:
    """The value in the context variable; every region replaces some fields and restores them."""

    notes: Notes = dataclasses.field(default_factory=Notes)


_NOW: contextvars.ContextVar[Ambient] = contextvars.ContextVar("jaxmp")
_OUTSIDE = Ambient()  # of all regions


def now() -> Ambient:
    """The value where this is called."""
    return _NOW.get(_OUTSIDE)


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
