"""What a loop carries in float32: sums over its iterations, as in bfloat16 a sum of ones ends at 256.

    jax.lax.scan(lambda c, x: (c + x, None), xs[0], xs[1:])                 a sum
    jax.lax.scan(lambda c, x: (0.99 * c + 0.01 * x, None), xs[0], xs[1:])   is one, too: computed without a matmul
    jax.lax.scan(lambda h, w: (h + f(h @ w), None), h, ws)                  no sum: the stream of a net
    jax.lax.scan(lambda c, x: (c.at[0].set(x), None), c, xs)                no sum: moved, not computed

What is no sum keeps its dtype, unless a `while` compares floats to know when to stop.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxmp._src.autocast import cast_lists
from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS
from jaxmp._src.autocast.values import DATA, Value
from jaxmp._src.programs import jaxprs

_MOVES = cast_lists.MOVES | cast_lists.EACH_ITS_OWN | jaxprs.HANDS_ON | {"convert_element_type"}
_ARITHMETIC = (cast_lists.FORCE_FP32 | cast_lists.WIDEST) - _MOVES


def carried(values: Sequence[Value], body: jaxprs.Inner) -> list[Value]:
    """What a loop carries: in float32 those values that are sums."""
    added = find(body.jaxpr, body.n_consts, len(values)) if any(v.is_low for v in values) else ()
    carry = [v.holds(v.array, const=None, made_of=DATA, summed=None, is_input=False) for v in values]
    for i, v in enumerate(carry):
        v.dtype = FLOAT32 if i in added and values[i].is_low else v.dtype
    return carry


def find(body: Any, first: int, count: int) -> frozenset[int]:
    """Which of `count` carried values, the inputs of a body from `first` on and its first results, are sums.

    Carried values that are made of one another are one: of two that a loop swaps, each is a sum if one is.
    """
    paths = [_Paths(*(m >> first & (1 << count) - 1 for m in p)) for p in _paths(body)[:count]]
    reached = [p.all for p in paths]
    for k in range(count):
        reached = [r | reached[k] if r >> k & 1 else r for r in reached]
    sums = set()
    for i in range(count):
        circle = [k for k in range(count) if reached[i] >> k & 1 and reached[k] >> i & 1]
        within = sum(1 << k for k in circle)
        if any(paths[k].computed & within for k in circle) and not any(paths[k].product & within for k in circle):
            sums.add(i)
    return frozenset(sums)


def passed(body: jaxprs.Inner) -> frozenset[int]:
    """Which carried values a body returns as they came: it reads them in each turn, as it reads constants."""
    results = _origins(body.jaxpr)[: body.n_carry]
    return frozenset(i for i, origin in enumerate(results) if origin == body.n_consts + i)


class _Paths(NamedTuple):
    """The inputs that a value is made of, as the bits of an int.

    Attributes:
      all: all of them; others are only moved or selected on the way.
      computed: those that an operation computes with on the way.
      product: of these, those that a matmul or convolution takes, or an operation of which autocast knows nothing.
    """

    all: int = 0
    computed: int = 0
    product: int = 0

    def through_arithmetic(self) -> "_Paths":
        return _Paths(self.all, self.all, self.product)

    def through_a_product(self) -> "_Paths":
        return _Paths(self.all, self.all, self.all)

    def with_those_of(self, other: "_Paths") -> "_Paths":
        return _Paths(*(x | y for x, y in zip(self, other, strict=True)))


def _paths(jaxpr: Any) -> list[_Paths]:
    """What each result of a function is made of."""
    paths = {v: _Paths(1 << i) for i, v in enumerate(jaxpr.invars)}

    def look_up(atom: Any) -> _Paths:
        is_float = getattr(atom.aval, "dtype", None) in cast_lists.FLOATS
        return paths.get(atom, _Paths()) if is_float and not isinstance(atom, core.Literal) else _Paths()

    for eqn in jaxpr.eqns:
        paths |= zip(eqn.outvars, _through(eqn, [look_up(v) for v in eqn.invars]), strict=True)
    return [look_up(v) for v in jaxpr.outvars]


def _through(eqn: Any, operands: list[_Paths]) -> list[_Paths]:
    """What each result of an equation is made of."""
    name, functions = eqn.primitive.name, jaxprs.functions_of(eqn)
    if name in jaxprs.CALLS or name in ("cond", "shard_map"):
        by_function = [[_after(p, f.inputs(operands)) for p in _paths(f.jaxpr)] for f in functions]
        return [_of_any(results) for results in zip(*by_function, strict=True)]
    inside = [e for f in functions for e in jaxprs.equations(f.jaxpr)]
    made_of = _of_any(operands)
    if any(map(_is_product, inside or [eqn])):
        made_of = made_of.through_a_product()
    elif name not in _MOVES:
        made_of = made_of.through_arithmetic()
    return [made_of] * len(eqn.outvars)


def _is_product(eqn: Any) -> bool:
    is_known = eqn.primitive.name in _MOVES or eqn.primitive.name in _ARITHMETIC
    return not (is_known or jaxprs.functions_of(eqn) or cast_lists.is_short(eqn))


def _of_any(values: Iterable[_Paths]) -> _Paths:
    return functools.reduce(_Paths.with_those_of, values, _Paths())


def _after(paths: _Paths, operands: list[_Paths]) -> _Paths:
    """What a function's result is made of, where the function gets these operands."""
    made_of = _Paths()
    for i, operand in enumerate(operands):
        if paths.product >> i & 1:
            made_of = made_of.with_those_of(operand.through_a_product())
        elif paths.computed >> i & 1:
            made_of = made_of.with_those_of(operand.through_arithmetic())
        elif paths.all >> i & 1:
            made_of = made_of.with_those_of(operand)
    return made_of


def _origins(jaxpr: Any) -> list[int | None]:
    """Of each result of a function the number of the input that it is, through the functions that it calls."""
    origins: dict[Any, int | None] = {v: i for i, v in enumerate(jaxpr.invars)}

    def look_up(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else origins.get(atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in jaxprs.CALLS - jaxprs.WITH_OWN_DERIVATIVE:
            inner = _origins(jaxprs.functions_of(eqn)[0].jaxpr)
            pairs = zip(eqn.outvars, inner, strict=True)
            origins |= {v: look_up(eqn.invars[i]) for v, i in pairs if i is not None}
    return [look_up(v) for v in jaxpr.outvars]


def stops_by_floats(test: jaxprs.Inner, body: jaxprs.Inner) -> bool:
    """Whether a `while` compares floats to know when to stop: it computes until they converge, so it needs float32.

    Bools that the test reads are followed to where the body makes them. (The test of a token is no such comparison.)
    """
    seen: set[int] = set()

    def follow(jaxpr: Any, outputs: list[Any], first: int) -> bool:
        wanted = {v for v in outputs if not isinstance(v, core.Literal)}
        for eqn in reversed(jaxpr.eqns):
            if not wanted & set(eqn.outvars):
                continue
            floats = [v for v in eqn.invars if getattr(v.aval, "dtype", None) in FLOATS]
            if floats and eqn.primitive.name in _COMPARISONS:
                return True
            for inner in jaxprs.functions_of(eqn) if eqn.primitive.name in jaxprs.CALLS else ():
                if follow(inner.jaxpr, list(filter(_is_bool, inner.jaxpr.outvars)), inner.n_consts):
                    return True
            wanted |= {v for v in eqn.invars if not isinstance(v, core.Literal) and _is_bool(v)}
        carried = [i for i, v in enumerate(jaxpr.invars[first:]) if v in wanted and i not in seen]
        seen.update(carried)
        return bool(carried) and follow(body.jaxpr, [body.jaxpr.outvars[i] for i in carried], body.n_consts)

    return follow(test.jaxpr, list(test.jaxpr.outvars), test.n_consts)


def _is_bool(v: Any) -> bool:
    return getattr(v.aval, "dtype", None) == np.bool_


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
