"""Runs a function as one program that is compiled once, although it is another function object at each call.

`jax.jit` knows a function by its identity: a closure that is made anew in each step of a loop is compiled anew, and one
that is kept does not see what has changed in its closure. Here the function is traced at each call, so it always reads
what its closure holds now, and it is compiled only if no equal program was. Arrays in the closure are inputs.

Programs are equal if their jaxprs are, equation by equation. A kept program holds no array of the user: one that may
hold some, in a callback or in the closure of a jitted function, is not kept, and compiled at each call.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import primitives

from jaxmp._src.base import compat
from jaxmp._src.programs import jaxprs
from pallas_kernels.by_platform import platform_of, way_of

_PROGRAMS = 32  # that are kept
_SMALL = 1024  # bytes: an array inside of a program that is compared by its numbers


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a function of pytrees of arrays and numbers, as one program, compiled once.

    Inside another program, and for traced arrays, it is `fn` under `jax.jit`, written out.
    """

    def run(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        if compat.is_in_program() or _any_traced(leaves) or jax.config.jax_disable_jit:
            return jax.jit(fn, inline=True)(*args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, consts = jaxprs.without_constants(closed, closed)
        if _any_traced(consts):  # a derivative may be taken, by rules in the program
            return jax.jit(fn, inline=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), _compiled(jaxpr, platform_of(leaves))(*consts, *leaves))

    return run


def _any_traced(values: Any) -> bool:
    return any(isinstance(x, Tracer) for x in values)


def _compiled(jaxpr: Any, platform: str) -> Callable[..., list[Any]]:
    """A closed jaxpr as a jitted function: the same for equal ones."""
    try:
        plain = _without_rules(jaxpr, platform)
        kept = {} if plain.effects else _kept(_key(plain))
    except _UnknownError:
        plain, kept = jaxpr, {}
    return kept.setdefault("run", jax.jit(jaxprs.jaxpr_as_function(*jaxprs.open_jaxpr(plain))))


@functools.lru_cache(maxsize=_PROGRAMS)
def _kept(key: Hashable) -> dict[str, Any]:
    """What is kept for a program."""
    del key
    return {}


def _without_rules(jaxpr: Any, platform: str) -> Any:
    """A jaxpr without rules for derivatives, vmap and other platforms, which are functions that nobody can compare.

    It computes what `jaxpr` computes, and must be neither differentiated nor mapped.
    """

    def plain(x: Any) -> Any:
        if isinstance(x, tuple):
            return x if hasattr(x, "_fields") else tuple(map(plain, x))
        return _without_rules(x, platform) if _is_jaxpr(x) else x

    def rewritten(eqn: Any) -> Any:
        name, params = eqn.primitive.name, eqn.params
        if name == jaxprs.BY_PLATFORM:
            called = way_of(eqn, platform)
        elif name in _WITH_RULES:
            called = params[_WITH_RULES[name]]
        else:
            params = {name: plain(x) for name, x in params.items()}
            return eqn.replace(params=params | ({"policy": None} if name in jaxprs.REMATS else {}))
        return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": plain(called)})

    opened, _ = jaxprs.open_jaxpr(jaxpr)
    new = opened.replace(eqns=[rewritten(eqn) for eqn in opened.eqns])
    return new if opened is jaxpr else jaxpr.replace(jaxpr=new)


# By primitive, the parameter with what it computes.
_WITH_RULES = {**dict.fromkeys(jaxprs.WITH_OWN_DERIVATIVE, "call_jaxpr"), "custom_vmap_call": "call"}


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or (hasattr(x, "jaxpr") and hasattr(x, "consts"))


class _UnknownError(Exception):
    """Something in a program cannot be compared, or may hold arrays."""


def _key_of(jaxpr: Any) -> Hashable:
    """All that a jaxpr computes, without the names of its variables and its places in the source."""
    numbers: dict[Any, int] = {}

    def made(v: Any) -> Any:
        return numbers.setdefault(v, len(numbers)), v.aval

    def read(v: Any) -> Any:
        return (_key(v.val), v.aval) if isinstance(v, core.Literal) else numbers[v]

    inputs = tuple(made(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    steps = tuple(
        (
            eqn.primitive,
            eqn.ctx,
            tuple(map(read, eqn.invars)),
            tuple((name, _key(x)) for name, x in sorted(eqn.params.items())),
            tuple(map(made, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return len(jaxpr.constvars), inputs, steps, tuple(map(read, jaxpr.outvars))


def _key(x: Any) -> Hashable:
    """A parameter of an equation, or a literal, as what it is compared by."""
    if _is_jaxpr(x):
        jaxpr, consts = jaxprs.open_jaxpr(x)
        return _key_of(jaxpr), tuple(map(_key, consts))
    if isinstance(x, (bool, int, float, complex, np.generic, np.ndarray, jax.Array)):
        return _key_of_number(x)
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((name, _key(value)) for name, value in sorted(x.items()))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple(_key(getattr(x, field.name)) for field in dataclasses.fields(x))
    if not _is_fixed(x):
        raise _UnknownError
    return x


def _key_of_number(x: Any) -> Hashable:
    if isinstance(x, jax.Array):
        if x.nbytes > _SMALL or not x.is_fully_addressable or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise _UnknownError
        return jax.typeof(x), np.asarray(x).tobytes()
    found = np.asarray(x)
    if found.nbytes > _SMALL or found.dtype == object:
        raise _UnknownError
    return type(x), found.dtype, found.shape, found.tobytes()  # by bytes: 0.0 is not -0.0


def _is_fixed(x: Any) -> bool:
    """Whether a parameter never changes and holds no array; if it is equal only to itself, jax has one of its kind."""
    if x is None or isinstance(x, (type, str, bytes, enum.Enum, np.dtype, jax.sharding.Mesh)):
        return True
    if callable(x) or type(x).__hash__ is None:
        return False
    return type(x).__eq__ is not object.__eq__ or type(x).__module__.partition(".")[0] in ("jax", "jaxlib")
