"""Regions of a function in which autocast has other lists, or none: how a `with` gets into a jaxpr.

A jaxpr knows nothing of the Python that made it, except for the name stack of each equation. So a region is a named
scope, `jaxmp.autocast(3)`, whose number stands for its lists; the innermost in the stack counts, and an equation in a
nested function without one is in the region of its caller.
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxmp._src.autocast.cast_lists import OFF, CastLists
from jaxmp._src.base import regions

_SCOPE = re.compile(r"jaxmp\.autocast\((\d+)\)")
_NUMBERED: list[CastLists] = [OFF]

# The lists of the `with` we are in; None outside of all.
_CURRENT: contextvars.ContextVar[CastLists | None] = contextvars.ContextVar("jaxmp_autocast", default=None)
# Whether the Python that runs now is being traced for a rewrite.
_TRACING: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxmp_autocast_tracing", default=False)
# Both, as a part of the key under which `jax.jit` keeps what it traced: it looks different in here.
_KEY = jax.make_user_context(None)


def current() -> CastLists | None:
    """The lists of the innermost region; None outside of all."""
    return _CURRENT.get()


def is_tracing() -> bool:
    """Whether an autocast function is being traced, which then rewrites what is called in it."""
    return _TRACING.get()


@contextlib.contextmanager
def region(lists: CastLists) -> Iterator[None]:
    """What is traced inside runs by `lists`."""
    if lists not in _NUMBERED:
        _NUMBERED.append(lists)
    scope = jax.named_scope(f"jaxmp.autocast({_NUMBERED.index(lists)})")
    with regions.region(_CURRENT, lists), _KEY((lists, is_tracing())), scope:
        yield


@contextlib.contextmanager
def tracing(lists: CastLists) -> Iterator[None]:
    """The trace of a function that will be rewritten by `lists`."""
    with regions.region(_CURRENT, lists), regions.region(_TRACING, True), _KEY((lists, True)):
        yield


@contextlib.contextmanager
def rewritten() -> Iterator[None]:
    """What is traced inside is done: an autocast around it leaves it alone, as the innermost one counts."""
    if not is_tracing():
        yield
        return
    with jax.named_scope("jaxmp.autocast(0)"):
        yield


def lists_of(eqn: Any, lists: CastLists) -> CastLists:
    """The lists of an equation: those of the innermost region it was traced in, else `lists`."""
    numbers = _SCOPE.findall(str(eqn.source_info.name_stack))
    return _NUMBERED[int(numbers[-1])] if numbers else lists


def scope_of(eqn: Any) -> str:
    """The name stack of an equation, without regions."""
    stack = _SCOPE.sub("", str(eqn.source_info.name_stack))
    return "/".join(part for part in stack.split("/") if part)
