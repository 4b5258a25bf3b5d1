"""Checks whether f(part of an array) is the part of f(whole array), from the jaxpr of f.

In `shard_map`, a device has a part of a leaf that is cut. An elementwise operation on the part is right, and so is a
reduction that also reduces over devices. But a norm, a mean or a matrix product of a part differs from that of the
whole leaf, and everything computed from it is wrong:

    g * 0.1                              part of the result
    sum(g * g)                           of this part only
    psum(sum(g * g), "fsdp")             the same on every device
    g + normal(key, g.shape)             the same noise in each part
    g / sqrt(sum(g * g))                 of this part only

A reduction over axes that are not cut is right, for example the mean of each row of an array that is cut by rows. So is
a reduction over groups of neighbours, that is, over the last axis of a part that was reshaped to more axes. If the
rules below do not cover an operation, it is never reported as wrong.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxmp._src.programs import jaxprs


class Value(NamedTuple):
    """What a value is: whole (the same on every device), a part, grouped by a reshape, or local to a part."""

    kind: int  # WHOLE < PART < LOCAL
    dim: int | None = None  # of a part: the axis that is cut, if it is known
    is_grouped: bool = False
    cause: str = ""  # of a local value: what is wrong with it,
    equation: Any = None  # and the equation of the program that made it so
    is_random: bool = False  # of a whole value: random numbers, several


WHOLE, PART, LOCAL = 0, 1, 2
_LOOKS_AT_ALL = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin sort top_k cumsum cumprod cummax "
    "cummin cumlogsumexp dot_general conv_general_dilated cholesky qr eigh svd lu triangular_solve".split()
)
_COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all".split()
)
# Scopes in which groups of neighbours are reduced, or numbers of several devices.
_OWN = ("jaxmp.compress_moments", "jaxmp.reduce_gradients")


def values(program: Any, inputs: Sequence[Value], axis: str) -> list[Value]:
    """What each result of a jaxpr is, from what its inputs are; `axis` is the mesh axis that they are cut over."""
    return _values(jaxprs.open_jaxpr(program), inputs, axis, is_own=False)


def first_other_number(program: Any, other: Any) -> Any:
    """The first equation of `program` with another number in it than in `other`; None if all are equal.

    The two are one function, traced for arrays of two sizes: a number that differs was computed from a size, as the
    divisor of a mean is. If the sizes lead to different operations, it is the first operation that differs.
    """
    pairs = zip_longest(_numbers(*jaxprs.open_jaxpr(program)), _numbers(*jaxprs.open_jaxpr(other)), fillvalue=None)
    for one, two in pairs:
        if one is None or two is None or one[1:] != two[1:]:
            return next(x[0] for x in (one, two) if x is not None)
    return None


def _numbers(jaxpr: Any, consts: Any) -> Iterator[tuple[Any, str, tuple[str | None, ...]]]:
    """(equation, its name, the scalars that are written in it), of all equations, also of inner programs."""
    known = dict(zip(jaxpr.constvars, consts, strict=False))

    def written(v: Any) -> str | None:
        x = v.val if isinstance(v, core.Literal) else known.get(v)
        return None if x is None or isinstance(x, Tracer) or np.ndim(x) else str(x)

    for eqn in jaxpr.eqns:
        if any(scope in str(eqn.source_info.name_stack) for scope in _OWN):
            continue
        yield eqn, eqn.primitive.name, tuple(written(v) for v in eqn.invars)
        for function in jaxprs.functions_of(eqn):
            yield from _numbers(function.jaxpr, function.consts)


def _values(function: Any, inputs: Sequence[Value], axis: str, *, is_own: bool) -> list[Value]:
    def results(_: int, eqn: Any, operands: list[Value]) -> list[Value]:
        own = is_own or any(scope in str(eqn.source_info.name_stack) for scope in _OWN)
        return _results(eqn, operands, axis, own)

    return jaxprs.evaluate(function, inputs, results, lambda x, aval: Value(WHOLE))


def _results(eqn: Any, operands: list[Value], axis: str, is_own: bool) -> list[Value]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    largest = max(operands, key=lambda value: value.kind, default=Value(WHOLE))
    if name in jaxprs.CALLS or name == jaxprs.BY_PLATFORM:
        (inner,) = jaxprs.functions_of(eqn)
        return [
            value._replace(equation=eqn) if value.kind == LOCAL and value not in operands else value
            for value in _values(inner, operands, axis, is_own=is_own)
        ]
    if name == "cond":
        functions = jaxprs.functions_of(eqn)
        branches = [_values(f, f.inputs(operands), axis, is_own=is_own) for f in functions]
        return [max((operands[0], *(b[i] for b in branches)), key=lambda value: value.kind) for i in range(count)]
    if name == "optimization_barrier":
        return operands
    if name in _COLLECTIVES:
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if axis in (names if isinstance(names, tuple | list) else (names,)):
            return [Value(WHOLE)] * count
    if name == "reshape":
        is_split = eqn.outvars[0].aval.ndim > eqn.invars[0].aval.ndim
        return [largest._replace(dim=_dim_after(eqn, operands), is_grouped=is_split or largest.is_grouped)]
    if name in _LOOKS_AT_ALL and largest.kind == PART and not is_own:
        axes, dim = tuple(eqn.params.get("axes", ())), operands[0].dim
        is_of_groups = operands[0].is_grouped and axes == (eqn.invars[0].aval.ndim - 1,)
        leaves_the_cut = name.startswith("reduce_") and len(operands) == 1 and dim is not None and dim not in axes
        if not is_of_groups and not leaves_the_cut:
            return [Value(LOCAL, cause=f"a {name} over a part", equation=eqn)] * count
    if name == "random_bits" and largest.kind == WHOLE:
        return [Value(WHOLE, is_random=v.aval.size > 1) for v in eqn.outvars]
    if any(value.is_random for value in operands):
        if largest.kind == PART:
            return [Value(LOCAL, cause="random numbers that are the same for every part", equation=eqn)] * count
        largest = largest._replace(is_random=True)
    return [largest._replace(dim=_dim_after(eqn, operands)) if largest.kind == PART else largest] * count


def _dim_after(eqn: Any, operands: list[Value]) -> int | None:
    """The axis of the result that is cut; None if it is not known."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    cut = [(v, x.dim) for v, x in zip(eqn.invars, operands, strict=True) if x.kind == PART]
    (v, dim), *others = cut or [(None, None)]
    if v is None or dim is None:
        return None
    before = v.aval.shape
    if name in jaxprs.ELEMENTWISE or name in jaxprs.HANDS_ON:
        return dim if before == shape and all(x.aval.shape == shape and d == dim for x, d in others) else None
    if name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][dim]
    if name == "transpose":
        return eqn.params["permutation"].index(dim)
    if name.startswith("reduce_") and "axes" in eqn.params:
        return dim - sum(a < dim for a in eqn.params["axes"])
    if name in ("reshape", "squeeze") and before[dim] > 1:  # axes of length 1 come and go
        sizes = [n for n in before if n != 1]
        if sizes == [n for n in shape if n != 1]:
            place = sum(n != 1 for n in before[:dim])
            return [i for i, n in enumerate(shape) if n != 1][place]
    return None
