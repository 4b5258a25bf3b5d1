"""Regions of a function in which autocast has other lists, or none, and how a jaxpr records them.

A jaxpr keeps nothing of the Python code that made it, except for the name stack of each equation. So a region is a
named scope whose name contains its lists: `jaxmp.autocast(bfloat16)`. The innermost region in the stack counts. An
equation in a nested function without a region is in the region of its caller. The name must contain the complete lists,
because `jax.jit` caches what it traced: another rewrite may read an equation long after the end of the region in which
it was traced.
"""

import contextlib
import functools
import urllib.parse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.autocast.cast_lists import OFF, CastLists
from jaxmp._src.base import ambient
from jaxmp._src.programs import module_paths

_GROUPS = ("allow", "force_fp32", "widest")


def current() -> CastLists | None:
    """The lists of the innermost region; None outside of all."""
    return ambient.AUTOCAST.value[0]


def is_tracing() -> bool:
    """Whether an autocast function is being traced, which then rewrites what is called in it."""
    return ambient.AUTOCAST.value[1]


@contextlib.contextmanager
def region(lists: CastLists) -> Iterator[None]:
    """What is traced inside runs by `lists`."""
    with ambient.AUTOCAST((lists, is_tracing())), _scope(lists):
        yield


def tracing(lists: CastLists) -> contextlib.AbstractContextManager[None]:
    """The trace of a function that will be rewritten by `lists`."""
    return ambient.AUTOCAST((lists, True))


def rewritten() -> contextlib.AbstractContextManager[Any]:
    """What is traced inside is done: an autocast around it leaves it alone, as the innermost one counts."""
    return _scope(OFF) if is_tracing() else contextlib.nullcontext()


def _scope(lists: CastLists) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(f"{module_paths.REGION}({to_text(lists)})")


def lists_of(eqn: Any, lists: CastLists) -> CastLists:
    """The lists of an equation: those of the innermost region it was traced in, else `lists`."""
    found = module_paths.REGIONS.findall(str(eqn.source_info.name_stack))
    if not found:
        return lists
    here = from_text(found[-1])
    return here._replace(
        keeps=lists.keeps,
        tells_of_float32=lists.tells_of_float32,
        narrow=lists.narrow,
        highest_asks=lists.highest_asks,
    )


def scope_of(eqn: Any) -> str:
    """The name stack of an equation, without regions and what autocast reads of modules."""
    return module_paths.without_chosen(module_paths.without_regions(str(eqn.source_info.name_stack)))


@functools.lru_cache(maxsize=64)  # a region is entered, and read, for many equations
def to_text(lists: CastLists) -> str:
    """Lists as text without spaces, slashes and parentheses: the dtype, and where they differ from the usual ones.

    `bfloat16`, `off`, `float16;allow=exp+!dot_general;modules=head:off+Block_%2A:bfloat16;products=all`; `!` for names
    that are missing from a list.
    """
    fields = [_dtype_to_text(lists.dtype)]
    for group in _GROUPS:
        names, usual = getattr(lists, group), getattr(OFF, group)
        found = sorted(map(_quote, names - usual)) + sorted(f"!{_quote(name)}" for name in usual - names)
        fields += [f"{group}={'+'.join(found)}"] if found else []
    found = [f"{_quote(pattern)}:{_dtype_to_text(dtype)}" for pattern, dtype in lists.modules.values.items()]
    fields += [f"modules={'+'.join(found)}"] if found else []
    fields += [f"because={_quote(lists.because)}"] if lists.because else []
    fields += [f"products={lists.float32_products}"] if lists.float32_products else []
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
        elif group == "because":
            found[group] = urllib.parse.unquote(names)
        elif group == "products":
            found["float32_products"] = names
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
