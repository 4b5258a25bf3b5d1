"""Functions in place of functions of jax while autocast traces a user's function: they see what no jaxpr shows.

A jaxpr of a float32 function does not show which dtype its code asked for. So while a trace of any thread runs, a
stand-in is called in place of each of these functions, in every module that holds it under its name: `jnp.einsum`,
`from jax.nn import dot_product_attention`. Outside of a function that autocast traces, it calls the original.
"""

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from jaxmp._src.autocast import regions
from jaxmp._src.autocast.cast_lists import CastLists


class StandIn:
    """What is called in place of `original`; a subclass says what it does in a trace."""

    def __init__(self, original: Any):
        functools.update_wrapper(self, original, updated=())
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lists = regions.current()
        if not regions.is_tracing() or lists is None or lists.dtype is None:
            return self.original(*args, **kwargs)
        return self.call(lists, *args, **kwargs)

    def call(self, lists: CastLists, *args: Any, **kwargs: Any) -> Any:
        """As the original, in a function that is traced for a rewrite by `lists`."""
        raise NotImplementedError

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:  # a jitted function has methods
        return getattr(vars(self)["original"], name)


class Function(NamedTuple):
    """A function of jax with a stand-in.

    Attributes:
      home: the module where it is public, or the class of which it is a method.
      name: its name there.
      stand_in: makes the stand-in of the original.
      in_jax: whether jax's own modules call the stand-in, too.
    """

    home: Any
    name: str
    stand_in: Callable[[Any], StandIn]
    in_jax: bool = True


class _Traces:
    """How many traces run, and what to put back after the last: (module or class, name, original) each."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.replaced: list[tuple[Any, str, Any]] = []


_TRACES = _Traces()


@contextlib.contextmanager
def standing_in(functions: Sequence[Function]) -> Iterator[None]:
    """A trace, in which the stand-ins of `functions` are called: the same ones in every trace."""
    with _TRACES.lock:
        _TRACES.count += 1
        if _TRACES.count == 1:
            _TRACES.replaced = _replace(functions)
    try:
        yield
    finally:
        with _TRACES.lock:
            _TRACES.count -= 1
            if not _TRACES.count:
                for home, name, original in _TRACES.replaced:
                    setattr(home, name, original)


def _replace(functions: Sequence[Function]) -> list[tuple[Any, str, Any]]:
    """Puts the stand-ins in place of the originals, and returns where these were."""
    found: list[tuple[Any, str, Any, Any]] = []
    by_name: dict[str, list[tuple[Function, Any, Any]]] = {}
    for function in functions:
        original = vars(function.home).get(function.name)
        if original is None:  # this version of jax or flax has none
            continue
        stand_in = function.stand_in(original)
        if isinstance(function.home, type):
            found.append((function.home, function.name, original, stand_in))
        else:
            by_name.setdefault(function.name, []).append((function, original, stand_in))
    for name, module in list(sys.modules.items()):
        held = vars(module) if isinstance(module, ModuleType) else {}
        for key in by_name.keys() & held.keys():
            for function, original, stand_in in by_name[key]:
                in_jax = name.startswith("jax.") and module is not function.home
                if held[key] is original and (function.in_jax or not in_jax):
                    found.append((module, key, original, stand_in))
    for home, name, _, stand_in in found:
        setattr(home, name, stand_in)
    return [(home, name, original) for home, name, original, _ in found]
