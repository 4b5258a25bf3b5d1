"""Regions of a function in which autocast has other lists, or none: how a `with` gets into a jaxpr.

A jaxpr knows nothing of the Python that made it, except for the name stack of each equation. So a region is a named
scope that spells its lists out: `jaxmp.autocast(bfloat16)`. The innermost one in the stack counts, and an equation in
a nested function without one is in the region of its caller. The text holds all of it, because `jax.jit` caches what
it traced: an equation may be read long after the region it was traced in, and by another rewrite.
"""

import contextlib
import contextvars
import functools
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp._src.autocast.cast_lists import OFF, CastLists
from jaxmp._src.base import regions
from jaxmp._src.programs import module_paths

_GROUPS = ("allow", "force_fp32", "widest")


class _Ambient(NamedTuple):
    """The region that Python is in.

    Attributes:
      lists: of the innermost `with`, or of the autocast function that is being traced; None outside of all.
      tracing: whether an autocast function is being traced, which then rewrites what is called in it.
    """

    lists: CastLists | None = None
    tracing: bool = False


_OUTSIDE = _Ambient()
# A context variable, because a user's `with` region holds for functions called in it that know nothing of autocast.
_AMBIENT: contextvars.ContextVar[_Ambient] = contextvars.ContextVar("jaxmp_autocast", default=_OUTSIDE)
# The same as a part of the key under which `jax.jit` caches what it traced: it looks different in here.
_KEY = jax.make_user_context(None)


def current() -> CastLists | None:
    """The lists of the innermost region; None outside of all."""
    return _AMBIENT.get().lists


def is_tracing() -> bool:
    """Whether an autocast function is being traced, which then rewrites what is called in it."""
    return _AMBIENT.get().tracing


@contextlib.contextmanager
def _entered(ambient: _Ambient) -> Iterator[None]:
    with regions.region(_AMBIENT, ambient), _KEY(ambient):
        yield


@contextlib.contextmanager
def region(lists: CastLists) -> Iterator[None]:
    """What is traced inside runs by `lists`."""
    with _entered(_Ambient(lists, is_tracing())), _scope(lists):
        yield


def tracing(lists: CastLists) -> contextlib.AbstractContextManager[None]:
    """The trace of a function that will be rewritten by `lists`."""
    return _entered(_Ambient(lists, True))


def rewritten() -> contextlib.AbstractContextManager[Any]:
    """What is traced inside is done: an autocast around it leaves it alone, as the innermost one counts."""
    return _scope(OFF) if is_tracing() else contextlib.nullcontext()


def _scope(lists: CastLists) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(f"{module_paths.REGION}({to_text(lists)})")


def lists_of(eqn: Any, lists: CastLists) -> CastLists:
    """The lists of an equation: those of the innermost region it was traced in, else `lists`."""
    found = module_paths.REGIONS.findall(str(eqn.source_info.name_stack))
    return from_text(found[-1]) if found else lists


def scope_of(eqn: Any) -> str:
    """The name stack of an equation, without regions."""
    stack = module_paths.REGIONS.sub("", str(eqn.source_info.name_stack))
    return "/".join(part for part in stack.split("/") if part)


@functools.lru_cache(maxsize=64)  # a region is entered, and read, for many equations
def to_text(lists: CastLists) -> str:
    """Lists as text without spaces, slashes and parentheses: the dtype, and where they differ from the usual ones.

    `bfloat16`, `off`, `float16;allow=exp+!dot_general;modules=head:off+Block_%2A:bfloat16`; `!` for names that are
    missing from a list.
    """
    fields = [_dtype_to_text(lists.dtype)]
    for group in _GROUPS:
        names, usual = getattr(lists, group), getattr(OFF, group)
        found = sorted(map(_quote, names - usual)) + sorted(f"!{_quote(name)}" for name in usual - names)
        fields += [f"{group}={'+'.join(found)}"] if found else []
    found = [f"{_quote(pattern)}:{_dtype_to_text(dtype)}" for pattern, dtype in lists.modules.values.items()]
    fields += [f"modules={'+'.join(found)}"] if found else []
    return ";".join(fields)


@functools.lru_cache(maxsize=64)
def from_text(text: str) -> CastLists:
    """The lists that `to_text` wrote."""
    dtype, *fields = text.split(";")
    found: dict[str, Any] = {}
    for field in fields:
        group, _, names = field.partition("=")
        if group == "modules":
            pairs = [name.split(":") for name in names.split("+")]
            values = {urllib.parse.unquote(pattern): _dtype_from_text(d) for pattern, d in pairs}
            found[group] = OFF.modules.with_values(values)
        else:
            missing = {urllib.parse.unquote(name[1:]) for name in names.split("+") if name.startswith("!")}
            added = {urllib.parse.unquote(name) for name in names.split("+") if not name.startswith("!")}
            found[group] = getattr(OFF, group) - missing | added
    return CastLists(_dtype_from_text(dtype), **found)


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _dtype_to_text(dtype: Any) -> str:
    return "off" if dtype is None else dtype.name


def _dtype_from_text(text: str) -> Any:
    return None if text == "off" else jnp.dtype(text)
