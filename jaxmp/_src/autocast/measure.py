"""How much each operation of a program in 16 bits rounds: `explain_autocast(measure=True)`.

The program runs once, operation by operation, with three arrays for each value:

    low      what the program computes
    exact    the same operations in float32: casts to fewer bits change nothing
    near     the operation in its own dtype, of the exact operands, each rounded once to the dtype it has there

    error    |low - exact|     what the result is off, with all that came before
    added    what this operation makes of it: the larger of |near - exact|, what it makes of the rounding of its
             operands and of its own, and of error - error of its operands (or the ratio of both, if less)

as means over the elements, relative to the mean of |exact|, in roundings: half a unit in the last place of the 16-bit
dtype. A matmul of rounded operands adds about one. A difference of near numbers, an exponent of a large number or a sum
that ends in 16 bits adds many; what comes after it is as far off, and adds little. The result of a sum is measured by
the size of what it adds up, as the gradient of a bias before a norm is zero but for roundings. What is infinite or NaN,
and in float32 is not, is off by inf.

A loop is an operation too: its carry gathers what each turn rounds. Loops run turn by turn.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxmp._src.autocast import cast_lists, regions
from jaxmp._src.autocast.cast_lists import FLOAT32
from jaxmp._src.base import vmap_rules
from jaxmp._src.programs import array_functions, jaxprs, module_paths
from pallas_kernels.by_platform import way_here

_FLOAT32_WIDTH = jnp.finfo(FLOAT32).nmant
_SAME_SIZE = cast_lists.MOVES | jaxprs.HANDS_ON | {"convert_element_type", "neg", "reduce_precision"}


class Measured(NamedTuple):
    """Operations of one kind in one module, as they ran; errors are the largest ones, in roundings."""

    module: str
    name: str
    dtype: str
    in_gradient: bool
    count: int = 0
    flops: int = 0
    error: float = 0.0
    added: float = 0.0


class _Value(NamedTuple):
    """A value of the program.

    Attributes:
      low, exact: its two arrays.
      grid: the narrowest dtype it had since it was computed.
      error: how far `low` is off, relative to its scale.
      scale: the mean of |exact|, but of a sum that cancels the size of what it adds up.
    """

    low: Any
    exact: Any
    grid: Any
    error: float = 0.0
    scale: float = 0.0

    def near(self) -> Any:
        """The exact value, rounded once to what it has been rounded to, in the dtype of the program."""
        if not _is_float(self.low):
            return self.low
        return self.exact.astype(self.grid).astype(self.low.dtype)


class Measurement:
    """Runs programs; roundings are those of `dtype` where nothing is narrower."""

    def __init__(self, dtype: Any):
        self._unit = dtype
        self._rows: dict[tuple[str, str, str, bool], Measured] = {}

    def rows(self) -> list[Measured]:
        """What was found, the worst first."""
        return sorted(self._rows.values(), key=lambda row: (-row.added, -row.error))

    def run(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a program in its own dtypes."""
        return [v.low for v in self._run(jaxprs.open_jaxpr(closed), [_value(x) for x in arguments], "")]

    def _run(self, function: Any, inputs: Sequence[_Value], stack: str) -> list[_Value]:
        def equation(_: int, eqn: Any, operands: list[_Value]) -> list[_Value]:
            return self._equation(eqn, operands, module_paths.join(stack, str(eqn.source_info.name_stack)))

        return jaxprs.evaluate(function, inputs, equation, _constant)

    def _equation(self, eqn: Any, operands: list[_Value], stack: str) -> list[_Value]:
        name, functions = eqn.primitive.name, functions_of(eqn)
        if name == jaxprs.BY_PLATFORM:
            closed = jax.make_jaxpr(way_here(eqn))(*(v.low for v in operands))
            return self._run(jaxprs.open_jaxpr(closed), operands, stack)
        if name in jaxprs.CALLS | {vmap_rules.NAME}:
            return self._run(functions[0], operands, stack)
        if name == "cond":
            branch = functions[min(max(int(operands[0].low), 0), len(functions) - 1)]
            return self._run(branch, branch.inputs(operands), stack)
        if name in ("scan", "while") and not (name == "while" and functions[0].jaxpr.outvars[0].aval.ndim):
            out = getattr(self, f"_{name}")(eqn, functions, operands, stack)
        else:
            low = _bind(eqn, [v.low for v in operands])
            out = [_Value(x, y, None) for x, y in zip(low, _exact(eqn, operands, low), strict=True)]
        grid, results = _grid(eqn, operands, [v.low for v in out]), []
        for v in out:
            if _is_float(v.low):
                scale = max(_mean(v.exact), _size(eqn, operands))
                narrow = min(grid, v.low.dtype, key=_width)
                v = _Value(v.low, v.exact, narrow, _off(v.low, v.exact, scale), scale)
            results.append(v)
        if any(_is_float(v.low) for v in results) and name not in cast_lists.MOVES:
            self._count(eqn, operands, results, stack)
        return results

    def _count(self, eqn: Any, operands: list[_Value], out: list[_Value], stack: str) -> None:
        near = _bind(eqn, [v.near() for v in operands])
        grids = [v.grid for v in (*operands, *out) if v.grid is not None and _width(v.grid) < _FLOAT32_WIDTH]
        unit = float(jnp.finfo(min([*grids, self._unit], key=_width)).eps) / 2
        before = max((v.error for v in operands if _is_float(v.low)), default=0.0) / unit
        finite = all(np.isfinite(np.asarray(v.low, np.float32)).all() for v in operands if _is_float(v.low))
        error = added = 0.0
        for v, x in zip(out, near, strict=True):
            if _is_float(v.low):
                off, own = v.error / unit, _off(x, v.exact, v.scale) / unit
                if grids and finite and not np.isfinite(np.asarray(v.low, np.float32)).all():
                    off = own = math.inf  # in float32, too, for the constant that 16 bits have not
                more = min(off - before, off / max(before, 1.0)) if math.isfinite(before) else 0.0
                error, added = max(error, off), max(added, own, more)
        dtypes = [v.low.dtype for v in (*operands, *out) if _is_float(v.low)]
        place = module_paths.path_of(regions.scope_of(stack)) or jaxprs.place_of(eqn).strip(" ()") or "(top)"
        key = place, eqn.primitive.name, min(dtypes, key=_width).name, module_paths.is_backward(stack)
        row = self._rows.get(key, Measured(*key))
        row = row._replace(count=row.count + 1, flops=row.flops + jaxprs.flops_of(eqn))
        self._rows[key] = row._replace(error=max(row.error, error), added=max(row.added, added))

    def _scan(self, eqn: Any, functions: Any, operands: list[_Value], stack: str) -> list[_Value]:
        (body,) = functions
        (consts, carry, scanned), m = body.parts(operands), body.n_carry
        turns = range(eqn.params["length"])
        stacked: list[list[_Value]] = []
        for i in reversed(turns) if eqn.params["reverse"] else turns:
            rows = [v._replace(low=v.low[i], exact=v.exact[i]) for v in scanned]
            out = self._run(body, [*consts, *carry, *rows], stack)
            carry, _ = out[:m], stacked.append(out[m:])
        if not stacked:
            low = _bind(eqn, [v.low for v in operands])
            return [_Value(x, _wide(x), None) for x in low]
        columns = zip(*(stacked[::-1] if eqn.params["reverse"] else stacked), strict=True)
        whole = [(jnp.stack([v.low for v in c]), jnp.stack([v.exact for v in c])) for c in columns]
        return [*carry, *(_Value(low, exact, None) for low, exact in whole)]

    def _while(self, eqn: Any, functions: Any, operands: list[_Value], stack: str) -> list[_Value]:
        test, body = functions
        of_test, carry, _ = test.parts(operands)
        consts, _, _ = body.parts(operands)
        while bool(self._run(test, [*of_test, *carry], stack)[0].low):
            carry = self._run(body, [*consts, *carry], stack)
        return carry


def functions_of(eqn: Any) -> Any:
    """`jaxprs.functions_of`, and the function of a call with a rule for vmap."""
    is_call = eqn.primitive.name == vmap_rules.NAME
    return (jaxprs.Inner(*jaxprs.open_jaxpr(eqn.params["body"])),) if is_call else jaxprs.functions_of(eqn)


def _constant(x: Any, aval: Any) -> _Value:
    return _value(x if array_functions.is_array(x) else np.asarray(x, getattr(aval, "dtype", None)))


def _value(x: Any) -> _Value:
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return _Value(x, _wide(x), x.dtype if _is_float(x) else None, 0.0, _mean(x) if _is_float(x) else 0.0)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(x: Any) -> Any:
    return x.astype(FLOAT32) if _is_float(x) and x.dtype.itemsize < FLOAT32.itemsize else x


def _width(dtype: Any) -> int:
    return jnp.finfo(dtype).nmant


def _bind(eqn: Any, operands: list[Any]) -> list[Any]:
    """The equation, of arrays of the dtypes that it was traced with."""
    return jaxprs.run_as_traced(jaxprs.without_scope(eqn), [jnp.asarray(x) for x in operands])


def _exact(eqn: Any, operands: list[_Value], low: list[Any]) -> list[Any]:
    """The results in float32; of an operation that has no form in it (a kernel), what it computes in its own dtype."""
    name, arrays = eqn.primitive.name, [v.exact for v in operands]
    if not any(map(_is_float, low)):
        return low  # so masks and indices are the same in both
    if name == "reduce_precision":
        return arrays
    params = dict(eqn.params)
    for key in ("new_dtype", "preferred_element_type"):
        if params.get(key) is not None and jnp.issubdtype(params[key], jnp.floating):
            params[key] = FLOAT32
    if name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST) if name in jaxprs.MATMULS else None
    try:
        if name in jaxprs.SCATTERS:
            return [jaxprs.scattered(eqn, arrays)]
        outputs: Any = eqn.primitive.bind(*map(jnp.asarray, arrays), **params)
    except Exception:  # whatever a primitive of others raises for another dtype
        return list(map(_wide, low))
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    return [x if _is_float(x) else y for x, y in zip(outputs, low, strict=True)]


def _grid(eqn: Any, operands: list[_Value], low: list[Any]) -> Any:
    """The narrowest dtype of what an operation only moves or casts; of what it computes, that of its result."""
    name, floats = eqn.primitive.name, [x.dtype for x in low if _is_float(x)]
    if name == "reduce_precision" and eqn.params["mantissa_bits"] == jnp.finfo(jnp.bfloat16).nmant:
        return jnp.dtype(jnp.bfloat16)
    grids = [v.grid for v, a in zip(operands, eqn.invars, strict=True) if not isinstance(a, core.Literal)]
    moved = name in cast_lists.MOVES | jaxprs.HANDS_ON | {"convert_element_type"}
    return min([*(g for g in grids if g is not None and moved), *floats, FLOAT32], key=_width)


def _size(eqn: Any, operands: list[_Value]) -> float:
    """The size that a result has where its operands do not cancel, or have not before."""
    name, floats = eqn.primitive.name, [v for v in operands if _is_float(v.low)]
    if name == "mul":
        return math.prod(v.scale for v in floats)
    if name == "div":
        return floats[0].scale / mean if (mean := _mean(floats[1].exact)) else 0.0
    if name in _SAME_SIZE:
        return max((v.scale for v in floats), default=0.0)
    if name in ("add", "sub", "add_any"):  # of what was left of sums that cancelled
        return max((v.scale for v in floats if v.scale > 8 * _mean(v.exact)), default=0.0)
    if name not in jaxprs.MATMULS | {"reduce_sum", "cumsum", "reduce_window_sum", "scatter-add"}:
        return 0.0
    terms = [operands[-1]] if name == "scatter-add" else floats[:2]
    if name == "dot_general":
        count: float = cast_lists.terms_of(eqn)
    elif name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        count = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    else:
        count = max(1.0, np.size(terms[0].exact) / max(1, math.prod(eqn.outvars[0].aval.shape)))
    return math.sqrt(count) * math.prod(v.scale for v in terms)  # of terms of random signs


def _mean(x: Any) -> float:
    x = np.abs(np.asarray(x, np.float64))
    x = x[np.isfinite(x)]
    return float(x.mean()) if x.size else 0.0


def _off(got: Any, exact: Any, scale: float) -> float:
    """The mean distance, relative to a scale; inf where float32 is finite and the other is not."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    if not np.isfinite(got[finite]).all():
        return math.inf
    distance = float(np.abs(got[finite] - exact[finite]).mean()) if finite.any() else 0.0
    return distance / scale if distance and scale else (math.inf if distance else 0.0)
