"""Jaxprs read and put together: what an equation calls, and equations as functions.

Equations that call, branch or loop hold further jaxprs; `functions_of` opens them, whatever their primitive calls them.
"""

from typing import Any

import jax
import jax.extend.core
from jax.extend import core

# Primitives that call one function with their own operands: what is true of a call is true inside.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
)


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def functions_of(eqn: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """The functions inside an equation that calls, branches or loops, each with its constants; else `()`.

    The bodies of reductions, scatters, kernels and the like are none of these.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return tuple(open_jaxpr(branch) for branch in params["branches"])
    if name == "while":
        return open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return (open_jaxpr(params["call_jaxpr"]),)
    if name in CALLS or name in ("scan", "shard_map"):
        return (open_jaxpr(params.get("jaxpr", params.get("call_jaxpr"))),)
    return ()


def function_name(eqn: Any) -> str:
    """What the function that an equation calls is named; the primitive's own name where it has none."""
    return str(eqn.params.get("name", eqn.primitive.name))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a `scan` every iteration reads whole, and how many values it carries.

    Told by shapes, as the parameters that say it differ between versions: what is scanned over has an axis more.
    """
    body: Any = open_jaxpr(eqn.params["jaxpr"])[0]
    stacked = sum(o.aval.ndim > i.aval.ndim for o, i in zip(eqn.outvars, body.outvars, strict=True))
    scanned = sum(o.aval.ndim > i.aval.ndim for o, i in zip(eqn.invars, body.invars, strict=True))
    carried = len(eqn.outvars) - stacked
    return len(eqn.invars) - scanned - carried, carried


def as_function(eqn: Any) -> Any:
    """What an equation does, as a function of its operands that are not literals; rules of its own included."""
    operands = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)))
    names = ("",) * len(operands), ("",) * len(eqn.outvars)
    about = jax.extend.core.DebugInfo("autocast", eqn.primitive.name, *names)
    jaxpr = jax.extend.core.Jaxpr((), operands, eqn.outvars, [eqn], eqn.effects, about)
    run = jax.extend.core.jaxpr_as_fun(_closed(jaxpr, ()))
    places = [operands.index(v) for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)]

    def function(*values: Any) -> list[Any]:
        by_place = dict(zip(places, values, strict=True))
        return run(*(by_place[i] for i in range(len(operands))))

    return function


def jaxpr_as_function(jaxpr: Any, consts: Any) -> Any:
    """A jaxpr with its constants, as a function that returns the list of its results."""
    return jax.extend.core.jaxpr_as_fun(_closed(jaxpr, consts))


def as_program(eqns: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Equations in their order as one function: (function, the variables it takes, those whose values it returns)."""
    made = list(dict.fromkeys(v for eqn in eqns for v in eqn.outvars))
    used = (v for eqn in eqns for v in eqn.invars if not isinstance(v, jax.extend.core.Literal))
    inside = set(made)
    operands = list(dict.fromkeys(v for v in used if v not in inside))
    names = ("",) * len(operands), ("",) * len(made)
    about = jax.extend.core.DebugInfo("windows", "program", *names)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    jaxpr = jax.extend.core.Jaxpr((), operands, made, eqns, effects, about)
    return jax.extend.core.jaxpr_as_fun(_closed(jaxpr, ())), operands, made


def _closed(jaxpr: Any, consts: Any) -> Any:
    return jax.extend.core.ClosedJaxpr(jaxpr, consts)  # pyright: ignore[reportPrivateImportUsage]


def without_constants(like: Any, closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr that takes its constants as its first operands, closed or open as `like` is; and these constants."""
    jaxpr, consts = open_jaxpr(closed)
    names = ("",) * (len(consts) + len(jaxpr.invars)), ("",) * len(jaxpr.outvars)
    about = jax.extend.core.DebugInfo("autocast", jaxpr.debug_info.func_src_info, *names)
    operands = [*jaxpr.constvars, *jaxpr.invars]
    opened = jax.extend.core.Jaxpr((), operands, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, about, jaxpr.is_high)
    return (_closed(opened, ()) if hasattr(like, "consts") else opened), consts


def written(eqn: Any, operands: list[Any]) -> list[Any]:
    """An equation as it was traced, with the rules of its own."""
    run = as_function(eqn)
    return list(run(*(x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, core.Literal))))
