"""Sums over the iterations of a loop: in float32, as in bfloat16 a sum of ones ends at 256.

    jax.lax.scan(lambda c, x: (c + x, None), xs[0], xs[1:])      what is added to c does not depend on it
    jax.lax.associative_scan(jnp.add, xs)                        runs as it was written

(A stream to which each layer adds what it makes of it is no such sum.)
"""

from typing import Any

import jax
from jax.extend import core

from jaxmp._src.autocast import regions, stand_ins
from jaxmp._src.autocast.cast_lists import OFF, CastLists
from jaxmp._src.programs import jaxprs

_ASSOCIATIVE_SCAN = "associative_scan"


class _AssociativeScan(stand_ins.StandIn):
    """`jax.lax.associative_scan`, of which a jaxpr shows pairs alone."""

    def call(self, lists: CastLists, *args: Any, **kwargs: Any) -> Any:
        """The original, without autocast."""
        del lists
        with regions.region(OFF.off(_ASSOCIATIVE_SCAN)):
            return self.original(*args, **kwargs)


FUNCTIONS = (stand_ins.Function(jax.lax, _ASSOCIATIVE_SCAN, _AssociativeScan, in_jax=False),)

_SAME = jaxprs.REARRANGES | jaxprs.HANDS_ON | {"convert_element_type"}


def find(body: Any, first: int, count: int) -> frozenset[int]:
    """Which of `count` carried values, the inputs of a body from `first` on and its first results, are sums."""
    pairs = zip(body.invars[first : first + count], body.outvars[:count], strict=True)
    return frozenset(i for i, (before, after) in enumerate(pairs) if _is_sum(body, before, after))


def _is_sum(jaxpr: Any, before: Any, after: Any) -> bool:
    """Whether a result of a function is an input and what was added to it."""
    depends = {before}
    added = {before: False}  # of the input, moved or not and with something added or not: whether something was
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not isinstance(v, core.Literal) and v in depends]
        if not operands:
            continue
        depends |= set(eqn.outvars)
        name, operand = eqn.primitive.name, operands[0]
        if operand not in added or len(operands) > 1:
            continue
        if name in _SAME:
            added[eqn.outvars[0]] = added[operand]
        elif name in ("add", "add_any") or (name == "sub" and operand is eqn.invars[0]):
            added[eqn.outvars[0]] = True
        elif name in jaxprs.JITS:
            inner, place = jaxprs.functions_of(eqn)[0][0], eqn.invars.index(operand)
            for v, out in zip(inner.outvars, eqn.outvars, strict=True):
                if _is_sum(inner, inner.invars[place], v):
                    added[out] = True
    return not isinstance(after, core.Literal) and added.get(after, False)
