"""Regions of a trace in which a context variable has another value: the base of every `with` of ours."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def region(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """`variable` is `value` inside; the innermost region counts."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
