"""Runs a function as one program that is compiled once, although it is another function object at each call.

`jax.jit` knows a function by its identity: a closure that is made anew in each step of a loop is compiled anew, and one
that is kept does not see what has changed in its closure. Here the function is traced and lowered at each call, so it
always reads what its closure holds now. The text of the lowered program is all that XLA sees, so it is compiled only if
no program of equal text was. Arrays in the closure are inputs, and no program keeps them.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.core import Tracer

from jaxmp._src.base import compat
from jaxmp._src.programs import jaxprs

_MOST = 32  # programs that are kept
_LONGEST = 2**24  # characters of a program that is kept: a longer one holds large constants


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a function of pytrees of arrays and numbers, as one program, compiled once.

    Inside another program it is `fn` itself, and for arrays that a derivative or a vmap traces, `jax.jit` of it.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        if compat.is_in_program():
            return fn(*args)
        leaves = jax.tree.leaves(args)
        if _any_traced(leaves) or jax.config.jax_disable_jit:
            return jax.jit(fn, inline=True)(*args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, consts = jaxprs.without_constants(closed, closed)
        if _any_traced(consts):  # a derivative may be taken, by rules in the program
            return jax.jit(fn, inline=True)(*args)
        outputs = _compiled(jaxprs.jaxpr_as_function(*jaxprs.open_jaxpr(jaxpr)), [*consts, *leaves])
        return jax.tree.unflatten(jax.tree.structure(out), outputs)

    return run


def _any_traced(values: Any) -> bool:
    return any(isinstance(x, Tracer) for x in values)


def _compiled(fn: Callable[..., list[Any]], operands: list[Any]) -> list[Any]:
    """`fn(*operands)`."""
    lowered = jax.jit(fn).lower(*operands)
    text = lowered.as_text()
    if "callback" in text or len(text) > _LONGEST:  # the text names a callback by its address
        return lowered.compile()(*operands)
    places = tuple((x.sharding, x.committed) if isinstance(x, jax.Array) else None for x in operands)
    key = hashlib.sha256(text.encode()).digest(), places, jax.config.jax_default_device
    entry = _entry(key)
    if "program" not in entry:
        entry["program"] = lowered.compile()
    return entry["program"](*operands)


@functools.lru_cache(maxsize=_MOST)
def _entry(key: Hashable) -> dict[str, Any]:
    """The place of a program: empty until it was compiled."""
    del key
    return {}
