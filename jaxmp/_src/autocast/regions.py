"""Regions of a function in which autocast has other lists, or none, and how a jaxpr records them.

A jaxpr keeps nothing of the Python code that made it, except for the name stack of each equation. So a region is a
named scope with a number, `jaxmp.autocast(3)`, by which its lists are found again. The innermost region in the stack
counts. An equation in a nested function without a region is in the region of its caller. Numbers stay for the life of a
process, because `jax.jit` caches what it traced: another function may read an equation long after the region ended.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax

from jaxmp._src.autocast.cast_lists import OFF, CastLists
from jaxmp._src.base import ambient
from jaxmp._src.programs import module_paths


class _Numbers:
    """The number of each of the lists that regions had: a few for a program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[CastLists, int] = {}
        self._lists: list[CastLists] = []

    def of(self, lists: CastLists) -> int:
        """The number of lists, the same for equal ones."""
        with self._lock:
            if lists not in self._of:
                self._of[lists] = len(self._lists)
                self._lists.append(lists)
            return self._of[lists]

    def lists(self, number: int) -> CastLists:
        """The lists of a number."""
        return self._lists[number]


_NUMBERS = _Numbers()


def current() -> CastLists | None:
    """The lists of the innermost region; None outside of all."""
    return ambient.AUTOCAST.value[0]


def is_tracing() -> bool:
    """Whether an autocast function is being traced, in which autocast then runs what is called in it."""
    return ambient.AUTOCAST.value[1]


@contextlib.contextmanager
def region(lists: CastLists) -> Iterator[None]:
    """What is traced inside runs by `lists`."""
    scope = _scope(lists) if is_tracing() else contextlib.nullcontext()  # else nobody reads it
    with ambient.AUTOCAST((lists, is_tracing())), scope:
        yield


def tracing(lists: CastLists) -> contextlib.AbstractContextManager[None]:
    """The trace of a function that will run by `lists`."""
    return ambient.AUTOCAST((lists, True))


def done() -> contextlib.AbstractContextManager[Any]:
    """What is traced inside has its dtypes: an autocast around it leaves it alone, as the innermost one counts."""
    return _scope(OFF) if is_tracing() else contextlib.nullcontext()


def _scope(lists: CastLists) -> contextlib.AbstractContextManager[Any]:
    lists = lists._replace(chooser=None, highest_asks=True)  # the function around has the word
    return jax.named_scope(f"{module_paths.REGION}({_NUMBERS.of(lists)})")


def lists_of(eqn: Any, lists: CastLists) -> CastLists:
    """The lists of an equation in a function that runs by `lists`."""
    number, _ = _parts(str(eqn.source_info.name_stack))
    if number is None:
        return lists
    here = _NUMBERS.lists(number)
    return here if lists.highest_asks else here._replace(highest_asks=False)


def is_marked(eqn: Any) -> bool:
    """Whether an equation was traced in a region."""
    return _parts(str(eqn.source_info.name_stack))[0] is not None


def scope_of(stack: str) -> str:
    """A name stack without regions and what autocast reads of modules."""
    return _parts(stack)[1]


@functools.lru_cache(maxsize=4096)
def _parts(stack: str) -> tuple[int | None, str]:
    parts = module_paths.REGIONS.findall(stack)
    return int(parts[-1]) if parts else None, module_paths.without_chosen(module_paths.without_regions(stack))
