"""Runs a function by its plan: binds each operation again, with its operands cast as the plan says.

A function casts a value at most once to each dtype, even if many operations read it in that dtype. The casts, binds and
calls are ordinary JAX: they can be differentiated, batched, compiled and rewritten again.

A weight whose gradient is reduced in float32 has a second, float32 array (`_Wide`). An operation that reads the weight
in 16 bits computes with the 16-bit array, and returns a float32 gradient to the other, whose numbers nobody reads.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxmp._src.autocast import regions, roundings
from jaxmp._src.autocast.cast_lists import FLOATS
from jaxmp._src.autocast.planner import FLOAT32, WEIGHTS, Plan, Planner, Step, Value, is_repeated
from jaxmp._src.base import compat, vmap_rules
from jaxmp._src.programs import jaxprs
from pallas_kernels.by_platform import by_platform


class PlanRunner:
    """Runs planned functions.

    Args:
      planner: the planner that made the plans; it also plans derivative rules when they run.
      calls: by primitive, `(runner, step, operands) -> results` for operations with functions inside (`calls.CALLS`).
    """

    def __init__(self, planner: Planner, calls: dict[str, Any]):
        self.planner = planner
        self.calls = calls
        self.programs: dict[int, tuple[Any, Plan]] = {}  # of plans that are called more than once

    def run(self, plan: Plan, consts: Any, values: Any) -> list[Any]:
        """Runs a function; inputs may come in the dtypes of `plan.inputs` or in those it was traced with."""
        jaxpr = plan.jaxpr
        held: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        held |= {v: cast(x, i.dtype, i) for v, x, i in zip(jaxpr.invars, values, plan.inputs, strict=True)}
        made: dict[Any, Any] = {}
        wide = _Wide(plan, values)

        def read(atom: Any, dtype: Any, value: Value | None) -> Any:
            if isinstance(atom, core.Literal):
                return cast(_array_of(atom), dtype, value)
            if dtype is None or held[atom].dtype == dtype:
                return held[atom]
            if (atom, dtype) not in made:
                made[atom, dtype] = cast(held[atom], dtype, value)
            return made[atom, dtype]

        known: dict[Any, Value] = dict(zip(jaxpr.invars, plan.inputs, strict=True))
        for step in plan.steps:
            eqn = step.eqn
            operands = [
                read(v, dtype, None if isinstance(v, core.Literal) else known.get(v)) if x is None else x
                for v, dtype, x in zip(eqn.invars, step.operands, wide.entering(step, known), strict=True)
            ]
            # An operation that runs as it was written sets its own name.
            with contextlib.nullcontext() if step.how == "written" else jaxprs.where(eqn, regions.scope_of(eqn)):
                results = self._run_step(step, operands, wide.of_weights(step))
                pairs = zip(eqn.outvars, results, strict=True)
                results = [roundings.rounded(x) if v in plan.rounded else x for v, x in pairs]
            held |= dict(zip(eqn.outvars, results, strict=True))
            known |= dict(zip(eqn.outvars, step.results, strict=True))
            wide.follow(step, held)
        return [read(v, None, None) for v in jaxpr.outvars]

    def _run_step(self, step: Step, operands: list[Any], wide: dict[int, Any]) -> list[Any]:
        eqn = step.eqn
        if step.how == "same":
            return operands
        if step.how == "call":
            return self.calls[eqn.primitive.name](self, step, operands)
        if step.how == "written":
            return jaxprs.run_as_traced(eqn, operands)
        if step.how == "again":
            return [vmap_rules.call(eqn.params["fun"], eqn.params["rule"], *operands)]
        if step.how == "repeat":
            return [_repeated(step, operands, wide)]
        if step.how == "multiply":
            return [_multiplied(step, operands, wide)]
        if callable(step.narrow):
            return [cast(step.narrow(*operands, step.results[0].dtype, eqn.params), step.results[0].dtype)]
        if step.how == "once":
            return [_rounded_once(step, operands)]
        if eqn.primitive.name in _SCATTERS:
            return [_scatter(eqn, operands)]
        bound = eqn.primitive.bind(*operands, **_params(step))
        results = list(bound) if eqn.primitive.multiple_results else [bound]
        return [cast(x, v.dtype) for x, v in zip(results, step.results, strict=True)]


class _Wide:
    """The float32 arrays of weights, and of what is made of weights alone."""

    def __init__(self, plan: Plan, values: Any):
        given = zip(plan.jaxpr.invars, values, plan.inputs, strict=True)
        self._arrays = {v: x for v, x, i in given if i.made_of == WEIGHTS and getattr(x, "dtype", None) == FLOAT32}

    def of_weights(self, step: Step) -> dict[int, Any]:
        """Those of the weights of a step, by operand."""
        variables = {i: step.eqn.invars[i] for i in step.weights}
        return {i: self._arrays[v] for i, v in variables.items() if v in self._arrays}

    def entering(self, step: Step, known: dict[Any, Value]) -> list[Any]:
        """Those that enter a function in a step in place of what is held; None: what is held enters."""
        variables = [None if isinstance(v, core.Literal) else v for v in step.eqn.invars]
        if step.how != "call" or not self._arrays:
            return [None] * len(variables)
        found = ((i, v) for i, v in enumerate(variables) if v in self._arrays)
        enters = {i for i, v in found if _enters_wide(step, i, known[v])}
        return [self._arrays[v] if i in enters else None for i, v in enumerate(variables)]

    def follow(self, step: Step, held: dict[Any, Any]) -> None:
        """Notes the result of a step that was made of weights."""
        eqn = step.eqn
        if not self._arrays or len(step.results) != 1 or step.results[0].made_of != WEIGHTS:
            return
        out, first = eqn.outvars[0], eqn.invars[0]
        if held[out].dtype == FLOAT32:
            self._arrays[out] = held[out]
        elif not isinstance(first, core.Literal) and first in self._arrays and step.results[0].dtype in FLOATS:
            if step.how == "same" or eqn.primitive.name == "convert_element_type":
                self._arrays[out] = self._arrays[first]
            elif eqn.primitive.name in _MOVES:
                others = (held[v] if not isinstance(v, core.Literal) else _array_of(v) for v in eqn.invars[1:])
                with jaxprs.where(eqn, regions.scope_of(eqn)):
                    self._arrays[out] = eqn.primitive.bind(self._arrays[first], *others, **eqn.params)


def _enters_wide(step: Step, i: int, value: Value) -> bool:
    """Whether a weight enters a function in float32, and is cast inside."""
    name = step.eqn.primitive.name
    if name == "scan":  # what every iteration reads does so anyway
        return i < jaxprs.scan_counts(step.eqn)[0]
    # Remat keeps what enters: a weight that is stored in 16 bits stays so.
    is_cast = step.operands[i] != FLOAT32
    return is_cast and (name in jaxprs.JITS or (name in jaxprs.REMATS and value.dtype == FLOAT32))


# Movement of one array: the same equation moves it in any dtype.
_MOVES = jaxprs.REARRANGES | (jaxprs.HANDS_ON - {"name"}) | frozenset({"broadcast_in_dim", "slice", "dynamic_slice"})


def cast(x: Any, dtype: Any, value: Value | None = None) -> Any:
    """`x` in another of autocast's float dtypes; a constant that is too large for it saturates."""
    if dtype is None or getattr(x, "dtype", None) == dtype or dtype not in FLOATS:
        return x
    if not isinstance(x, jax.Array) and np.ndim(x) == 0:  # a literal
        return np.asarray(_saturated(float(x), dtype)).astype(dtype)[()]
    if value is not None and value.const is not None and _saturated(value.const, dtype) != value.const:
        return jnp.full_like(x, _saturated(value.const, dtype), dtype)
    return lax.convert_element_type(x, dtype)


def _array_of(literal: Any) -> Any:
    """A literal with the dtype it was traced in; it may hold a number of Python."""
    return np.asarray(literal.val, literal.aval.dtype)[()]


def _saturated(number: float, dtype: Any) -> float:
    limit = float(jnp.finfo(dtype).max)
    return float(np.clip(number, -limit, limit)) if np.isfinite(number) else number


def _params(step: Step) -> dict[str, Any]:
    """The parameters of an equation that runs in another dtype."""
    params = dict(step.eqn.params)
    if params.get("preferred_element_type") is not None and step.results[0].dtype in FLOATS:
        params["preferred_element_type"] = np.dtype(np.float32) if step.how == "once" else step.results[0].dtype
    return params


def _rounded_once(step: Step, operands: list[Any]) -> Any:
    """Arithmetic of 16-bit arrays with float32 scalars: in float32, and its result is rounded."""
    eqn = step.eqn

    def run(*operands: Any) -> Any:
        wide = [lax.convert_element_type(x, jnp.float32) if x.dtype in FLOATS else x for x in operands]
        out = _scatter(eqn, wide) if eqn.primitive.name in _SCATTERS else eqn.primitive.bind(*wide, **_params(step))
        return cast(out, step.results[0].dtype)

    # A derivative would keep the widened arrays. The checkpoint keeps them in 16 bits, and widens them again.
    return run(*operands) if _is_linear(eqn) else jax.checkpoint(run)(*operands)


def _is_linear(eqn: Any) -> bool:
    """Whether the derivative of an equation reads none of its array operands."""
    if eqn.primitive.name in ("mul", "div"):
        return any(isinstance(v, core.Literal) for v in eqn.invars)
    return eqn.primitive.name in ("add", "sub", "add_any") or eqn.outvars[0].aval.dtype not in FLOATS


def _repeated(step: Step, operands: list[Any], wide: dict[int, Any]) -> Any:
    """An operation that repeats a 16-bit operand. Its gradient is summed in float32: in bfloat16, 256 + 1 is 256.

    `wide` has the float32 arrays that get the gradients of some operands, without a rounding.
    """
    eqn, dtype = step.eqn, step.results[0].dtype

    def of_operand(i: int, operands: Any) -> Any:
        return lambda x: eqn.primitive.bind(*operands[:i], x, *operands[i + 1 :], **eqn.params)

    def tangent_of(i: int, operands: Any, tangent: Any) -> Any:
        if is_repeated(eqn, i):
            operands = [lax.convert_element_type(x, jnp.float32) if x.dtype in FLOATS else x for x in operands]
            tangent = lax.convert_element_type(tangent, jnp.float32)
        _, out = jax.jvp(of_operand(i, operands), (operands[i],), (tangent,))
        return lax.convert_element_type(out, dtype)

    count = len(operands)
    run = jax.custom_jvp(lambda *given: eqn.primitive.bind(*given[:count], **eqn.params))
    places = [*range(count), *wide]

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def derivative(primals: Any, tangents: Any) -> Any:
        is_zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        moved = [i for i, zero in enumerate(is_zero) if not zero and i not in wide]
        found = [tangent_of(places[i], primals[:count], tangents[i]) for i in moved]
        out = run(*primals)
        return out, functools.reduce(lax.add, found) if found else jnp.zeros_like(out)

    return run(*operands, *wide.values())


def _multiplied(step: Step, operands: list[Any], wide: dict[int, Any]) -> Any:
    """A product of 16-bit data with a weight, whose gradient is a product in float32: XLA reduces it in that dtype.

    `wide` has the float32 array that gets the gradient; without one it is rounded.
    """
    eqn, params, count = step.eqn, _params(step), len(operands)
    types = [jax.typeof(wide.get(i, x)) for i, x in enumerate(operands)]

    def gradient(i: int, operands: Any, g: Any) -> Any:
        others = [x for k, x in enumerate(operands) if k != i]
        if i not in step.weights:
            return compat.transposed(eqn.primitive, g, others, i, types[i], params)
        in_float32 = params | {"preferred_element_type": np.dtype(np.float32)}

        def product(g: Any, *others: Any) -> Any:
            return compat.transposed(eqn.primitive, g, others, i, types[i], in_float32)

        def widened(_: Any, *given: Any) -> Any:  # XLA for CPU has no such product for some layouts, and fails
            return product(*(x.astype(jnp.float32) if x.dtype in FLOATS else x for x in given))

        return by_platform(product, g, *others, cpu=widened, derivative="cpu", maps=True)

    @jax.custom_vjp
    def run(*given: Any) -> Any:
        return eqn.primitive.bind(*given[:count], **params)

    def forward(*given: Any) -> Any:
        kept = [x.value for x in given[:count]]
        moves = [() if x.perturbed else None for x in given]  # both hold no array
        return eqn.primitive.bind(*kept, **params), (kept, moves)

    def backward(residuals: Any, g: Any) -> Any:
        kept, moves = residuals
        gets = [i if i < 2 and i not in wide else None for i in range(count)] + list(wide)
        if isinstance(g, jax.custom_derivatives.SymbolicZero):
            return (None,) * len(gets)
        pairs = zip(gets, moves, strict=True)
        return tuple(None if i is None or moved is None else gradient(i, kept, g) for i, moved in pairs)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*operands, *wide.values())


_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": getattr(lax, "scatter_sub", None),
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def _scatter(eqn: Any, operands: list[Any]) -> Any:
    """A new scatter: the jaxpr of the update inside the old one was traced for one dtype."""
    params = eqn.params
    operand, indices, updates = operands
    return _SCATTERS[eqn.primitive.name](
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
