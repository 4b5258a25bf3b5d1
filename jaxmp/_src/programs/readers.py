"""Finds the equation of a program that computes with an input, and does not only move it.

Each input has a mark. Equations that move elements (a reshape, a cast, a gather, a slice) pass on the marks of their
operands. The first equation that computes with a marked value is its reader. The search does not go into functions with
a derivative of their own, because they handle the value themselves. But a function whose backward pass is called
`hands_on` (a gather of sharded params) only moves its operand.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp._src.programs import jaxprs

Marks = frozenset[str]

_MOVES = (
    jaxprs.REARRANGES
    | jaxprs.HANDS_ON
    | frozenset(
        "convert_element_type broadcast_in_dim slice dynamic_slice gather concatenate pad all_gather "
        "all_gather_invariant device_put stop_gradient".split()
    )
)
_COMPUTES = (
    jaxprs.MATMULS
    | jaxprs.RAGGED_MATMULS
    | frozenset("mul div neg add add_any sub integer_pow square max min abs exp log".split())
    | frozenset("reduce_sum reduce_max reduce_min cumsum sort".split())
)


def readers(program: Any, marks: Sequence[Marks]) -> dict[str, Any]:
    """The first equation that computes with each mark; `marks` has those of each input of the jaxpr `program`."""
    found: dict[str, Any] = {}
    _follow(program, marks, found)
    return found


def _follow(program: Any, marks: Sequence[Marks], found: dict[str, Any]) -> list[Marks]:
    jaxpr, _ = jaxprs.open_jaxpr(program)
    nothing: Marks = frozenset()
    known: dict[Any, Marks] = dict(zip(jaxpr.invars, marks, strict=True))
    of = lambda v: nothing if isinstance(v, core.Literal) else known.get(v, nothing)  # noqa: E731
    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        if not any(operands):
            continue
        name = jaxprs.name_of(eqn)
        if name in _COMPUTES:
            for mark in frozenset().union(*operands):
                found.setdefault(mark, eqn)
        elif name in _MOVES or getattr(eqn.params.get("bwd"), "__name__", "") == "hands_on":
            known |= dict.fromkeys(eqn.outvars, frozenset().union(*operands))
        elif name == "optimization_barrier":
            known |= dict(zip(eqn.outvars, operands, strict=True))
        elif name == "select_n":
            known |= dict.fromkeys(eqn.outvars, frozenset().union(*operands[1:]))
        elif name not in jaxprs.WITH_OWN_DERIVATIVE:
            given = operands[1:] if name == "cond" else operands
            for inner, _ in jaxprs.functions_of(eqn):
                if len(inner.invars) == len(given):
                    results = _follow(inner, given, found)
                    known |= dict(zip(eqn.outvars, results, strict=False))
    return [of(v) for v in jaxpr.outvars]
