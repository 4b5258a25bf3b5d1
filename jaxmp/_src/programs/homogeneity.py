"""Whether values are homogeneous of degree 1 in others, f(s g) = s f(g), by the equations between them.

Each value has a degree: the power of the factor s in this value. A product adds degrees, a root
halves them, a sum needs equal degrees. A clip compares a value of degree 1 with a constant, so its result has none:

    n = sqrt(sum(g^2))                 degree 1
    g / n                              degree 0
    where(n < max_norm, g, ...)        no degree: what it does depends on s

Zeros and infinities have every degree. What keeps a quotient from 0 / 0 counts as nothing: a number of at most 1e-4
that is added or is a lower bound, n + 1e-8, and what is chosen where a value is 0. If the rules below do not cover an
operation, the degree of its result is unknown, and is never reported as wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp._src.base import compat
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import jaxprs

# A degree is a number, or one of these.
EVERY, NONE, UNKNOWN = "every", "none", "unknown"
Degree = float | str


class _Small(float):
    """The degree 0 of a number of at most 1e-4, which is added to a divisor to keep it from 0."""


class _TestOfZero(float):
    """The degree 0 of a bool that says where a value of another degree is 0, or where it is not: `at_zero`."""

    def __new__(cls, at_zero: bool) -> "_TestOfZero":
        test = super().__new__(cls, 0.0)
        test.at_zero = at_zero
        return test

    at_zero: bool


_KEEPS = (
    jaxprs.REARRANGES
    | jaxprs.HANDS_ON
    | frozenset(
        "neg abs convert_element_type reduce_sum reduce_max reduce_min cumsum cummax cummin psum psum_invariant pmax "
        "pmin all_gather all_gather_invariant reduce_scatter ppermute all_to_all broadcast_in_dim slice "
        "optimization_barrier device_put stop_gradient reduce_precision real imag conj sort".split()
    )
)
_JOINS = frozenset({"add", "add_any", "sub", "max", "min", "concatenate", "pad", "rem", "atan2"})
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_INDEXES = frozenset({"gather", "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
_KNOWS_SIZE = frozenset(
    "exp exp2 expm1 log log1p logistic tanh tan sin cos sinh cosh erf erf_inv erfc floor ceil round".split()
)
_LARGE = 2**22  # elements of an array that is looked at


def degrees_while_traced(
    tracers: Sequence[Any], known: Callable[[Any], Degree | None], *, without: Callable[[Any], bool], most: int
) -> tuple[list[Degree], Any]:
    """The degrees of values of the function that is traced, and the equation that left the first one without a degree.

    Args:
      tracers: the values.
      known: the degrees of those from which they may be computed; None for others. Inputs have an unknown degree, and
        so has a value that no known one is in.
      without: whether a value has the degree 0, as params: it does not depend on the factor.
      most: this many equations are looked at; then all that is left is unknown.
    """
    # By tracer: (degree, whether a known value is in it).
    degrees, cause = ByIdentity(), None
    open_ = list(tracers)
    while open_:
        tracer = open_[-1]
        if degrees.get(tracer) is not None:
            open_.pop()
            continue
        degree = known(tracer)
        has_known = degree is not None
        origin = compat.equation_of(tracer)
        if degree is None and not isinstance(constant := compat.closed_over(tracer), Tracer):
            degree = _of_constant(constant) if np.size(constant) <= _LARGE else UNKNOWN
        elif degree is None and without(tracer):
            degree = 0.0
        elif degree is None and (origin is None or most <= 0):
            degree = UNKNOWN
        elif degree is None and origin is not None:
            equation, place = origin
            missing = [x for x in equation.invars if degrees.get(x) is None]
            if missing:
                open_ += missing
                most -= 1
                continue
            operands = [degrees.get(x)[0] for x in equation.invars]
            has_known = any(degrees.get(x)[1] for x in equation.invars)
            degree = _results(0, equation, operands)[place]
            cause = equation if cause is None and degree == NONE and NONE not in operands else cause
        degrees.set(tracer, (degree, has_known))
        open_.pop()
    results = [degrees.get(x) for x in tracers]
    return [degree if has_known else UNKNOWN for degree, has_known in results], cause


def degrees_of(function: Callable[..., Any], inputs: Any, others: Any) -> list[Degree]:
    """The degrees of the results of `function(inputs, *others)` in a factor of `inputs`."""
    program = jax.make_jaxpr(function)(inputs, *others)
    inputs_count = len(jax.tree.leaves(inputs))
    degrees = [1.0] * inputs_count + [0.0] * (len(program.in_avals) - inputs_count)
    return jaxprs.evaluate(jaxprs.open_jaxpr(program), degrees, _results, _of_constant)


def _of_constant(x: Any, aval: Any = None) -> Degree:
    del aval
    try:
        value = np.asarray(x)
        if not value.any() or (value.size == 1 and not np.isfinite(value).all()):
            return EVERY
        return _Small() if value.size == 1 and abs(value.item()) <= 1e-4 else 0.0
    except Exception:  # a tracer, a key
        return 0.0


def _joined(operands: list[Degree], *, is_floor: bool = False) -> Degree:
    if is_floor and not all(isinstance(d, _Small) for d in operands):
        operands = [d for d in operands if not isinstance(d, _Small)]
    degrees = [d for d in operands if d != EVERY]
    if UNKNOWN in degrees:
        return UNKNOWN
    if not degrees:
        return EVERY
    return degrees[0] if all(d == degrees[0] for d in degrees) else NONE


def _results(_: int, eqn: Any, operands: list[Degree]) -> list[Degree]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in jaxprs.CALLS or name == "cond":
        of_functions = [
            jaxprs.evaluate(f, f.inputs(operands), _results, _of_constant) for f in jaxprs.functions_of(eqn)
        ]
        by = operands[0] if name == "cond" else 0.0
        return [_chosen(by, [results[i] for results in of_functions]) for i in range(count)]
    if name == "optimization_barrier":
        return operands
    return [_result(eqn, name, operands)] * count


def _result(eqn: Any, name: str, operands: list[Degree]) -> Degree:
    if name in _KEEPS or name in _JOINS:
        return _joined(operands, is_floor=name in ("add", "add_any", "sub", "max"))
    if name == "clamp" or name in _INDEXES:
        pairs = zip(operands, eqn.invars, strict=True)
        return _joined([d for d, v in pairs if name == "clamp" or jnp.issubdtype(v.aval.dtype, jnp.floating)])
    if name == "select_n":
        return _chosen(operands[0], operands[1:])
    if name in _COMPARES:
        joined = _joined(operands, is_floor=True)
        if joined in (0.0, EVERY):
            return 0.0
        return _test_of_zero(name, *operands) if isinstance(joined, float) else joined
    if name in ("sign", "is_finite"):
        return 0.0 if isinstance(operands[0], float) else operands[0]
    if name.startswith("random_") or name == "threefry2x32":  # a seed of 0 is no zero
        return 0.0
    numbers = [d for d in operands if isinstance(d, float)]
    if UNKNOWN in operands:
        return UNKNOWN
    if NONE in operands:
        return NONE if EVERY not in operands else UNKNOWN
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return EVERY if EVERY in operands else sum(numbers)
    if name == "div":
        return UNKNOWN if operands[1] == EVERY else EVERY if operands[0] == EVERY else numbers[0] - numbers[1]
    power = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "cbrt": 1 / 3}.get(name)
    power = float(eqn.params["y"]) if name == "integer_pow" else power
    if power is not None:
        return EVERY if operands[0] == EVERY else power * numbers[0]
    if EVERY in operands:
        return UNKNOWN
    if all(d == 0 for d in numbers):
        return 0.0
    return NONE if name in _KNOWS_SIZE else UNKNOWN


def _test_of_zero(name: str, left: Degree, right: Degree) -> float:
    """The degree of a comparison of what has another degree, perhaps with 0 or with a small number."""
    if left == EVERY or isinstance(left, _Small):
        name, right = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name), left
    at_zero: dict[str, bool] = {}
    if right == EVERY:
        at_zero = {"eq": True, "le": True, "ne": False, "gt": False}
    elif isinstance(right, _Small):
        at_zero = {"lt": True, "le": True, "gt": False, "ge": False}
    return _TestOfZero(at_zero[name]) if name in at_zero else 0.0


def _chosen(by: Degree, among: list[Degree]) -> Degree:
    """The degree of a value that is chosen: what chooses must not depend on the factor."""
    if isinstance(by, _TestOfZero) and len(among) == 2 and among[by.at_zero] == 0.0:
        among = [among[not by.at_zero]]
    joined = _joined(among)
    if by == NONE and joined != UNKNOWN:
        return EVERY if joined == EVERY else NONE
    return joined if by in (0.0, EVERY) else UNKNOWN
