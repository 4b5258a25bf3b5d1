"""Runs a function by its plan: binds each operation again, with its operands cast as the plan says.

A function casts a value at most once to each dtype, even if many operations read it in that dtype. The casts, binds and
calls are ordinary JAX: they can be differentiated, batched, compiled and rewritten again.

A weight whose gradient is reduced in float32 has a second, float32 array (`_Wide`). An operation that reads the weight
in 16 bits computes with the 16-bit array, and returns a float32 gradient to the other, whose numbers nobody reads. Both
enter the functions inside.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxmp._src.autocast import cast_lists, repeats, roundings
from jaxmp._src.autocast.cast_lists import FLOATS
from jaxmp._src.autocast.planner import FLOAT32, WEIGHTS, Plan, Planner, Step, Value, is_repeated
from jaxmp._src.base import compat, vmap_rules
from jaxmp._src.programs import jaxprs
from pallas_kernels.by_platform import by_platform

_MANY = 32  # steps: a plan of fewer is not searched for layers that it repeats


class PlanRunner:
    """Runs planned functions.

    Args:
      planner: the planner that made the plans; it also plans derivative rules when they run.
      calls: by primitive, `(runner, step, operands, wide) -> results` for operations with functions inside
        (`calls.CALLS`); `wide` has the float32 arrays of some operands.
    """

    def __init__(self, planner: Planner, calls: dict[str, Any]):
        self.planner = planner
        self.calls = calls
        self.programs: dict[int, tuple[Any, Plan]] = {}  # of plans that are called more than once

    def run(self, plan: Plan, consts: Any, values: Any, beside: dict[int, Any] | None = None) -> list[Any]:
        """Runs a function; inputs may come in the dtypes of `plan.inputs` or in those it was traced with.

        `beside` has the float32 arrays of some inputs, by number, which get all of their gradients.
        """
        jaxpr, beside = plan.jaxpr, beside or {}
        held = _Held(dict(zip(jaxpr.constvars, consts, strict=True)))
        given = [cast(x, i.dtype, i) for x, i in zip(values, plan.inputs, strict=True)]
        given = [_with_gradient_to(beside[k], x) if k in beside else x for k, x in enumerate(given)]
        held.add(jaxpr.invars, given, plan.inputs)
        wide = _Wide.of(plan, [beside.get(k, x) for k, x in enumerate(values)])
        if len(plan.steps) >= _MANY and compat.is_staged(values):
            self._run_pieces(plan, consts, held, wide)
        else:
            self._run_steps(plan, plan.steps, [repeats.scope_of(step) for step in plan.steps], held, wide)
        return [held.read(v) for v in jaxpr.outvars]

    def _run_pieces(self, plan: Plan, consts: Any, held: "_Held", wide: "_Wide") -> None:
        functions: dict[Any, Any] = {}
        for first, last, piece in repeats.find(plan, consts, held.dtypes(plan), wide.arrays):
            if piece is None:
                steps = plan.steps[first:last]
                self._run_steps(plan, steps, [repeats.scope_of(step) for step in steps], held, wide)
                continue
            weights = {place: wide.arrays[v] for place, v in piece.wide if v in wide.arrays}
            known = {v: held.known(v) for place, v in piece.wide if place in weights}
            key = piece.key, tuple(zip(weights, known.values(), strict=True))
            if key not in functions:
                functions[key] = self._function(plan, piece, known)
            with jax.named_scope(piece.scope) if piece.scope else contextlib.nullcontext():
                results, made = functions[key](
                    list(weights.values()), *(held.read(v, dtype) for v, dtype in piece.inputs)
                )
            held.add_reads(piece.outputs, results)
            wide.arrays.update((piece.outputs[k][0], x) for k, x in made.items())
            for step in piece.steps:
                held.know(step)

    def _function(self, plan: Plan, piece: "repeats.Piece", weights: dict[Any, Value]) -> Any:
        """The function of a piece; `weights` are those inputs that have float32 arrays."""

        def run(arrays: list[Any], *values: Any) -> tuple[list[Any], dict[int, Any]]:
            """What the piece returns, and the float32 arrays of those of these that are made of weights."""
            held, wide = _Held({}, weights), _Wide(dict(zip(weights, arrays, strict=True)))
            held.add_reads(piece.inputs, values)
            self._run_steps(plan, piece.steps, piece.scopes, held, wide)
            made = {k: wide.arrays[v] for k, (v, _) in enumerate(piece.outputs) if v in wide.arrays}
            return [held.read(v, dtype) for v, dtype in piece.outputs], made

        return jax.jit(run, inline=compat.WRITTEN_OUT)

    def _run_steps(self, plan: Plan, steps: Any, scopes: Any, held: "_Held", wide: "_Wide") -> None:
        for step, scope in zip(steps, scopes, strict=True):
            eqn = step.eqn
            with jaxprs.where(eqn, scope):  # casts, too, have the name of the layer that reads their result
                operands = [
                    held.read(v, dtype) if x is None else x
                    for v, dtype, x in zip(eqn.invars, step.operands, wide.entering(step, held), strict=True)
                ]
                results = self._run_step(step, operands, wide.beside(step, operands))
                pairs = zip(eqn.outvars, results, strict=True)
                results = [roundings.rounded(x) if v in plan.rounded else x for v, x in pairs]
            held.add(eqn.outvars, results, step.results)
            wide.follow(step, held, scope)

    def _run_step(self, step: Step, operands: list[Any], wide: dict[int, Any]) -> list[Any]:
        eqn = step.eqn
        if step.how == "same":
            return operands
        if step.how == "call":
            return self.calls[eqn.primitive.name](self, step, operands, wide)
        if step.how == "written":
            return jaxprs.run_as_traced(jaxprs.without_scope(eqn), operands)
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
        if step.how == "product":
            return [_in_float32(step, operands)]
        if eqn.primitive.name in _SCATTERS:
            return [_scatter(eqn, operands)]
        bound = eqn.primitive.bind(*operands, **_params(step))
        results = list(bound) if eqn.primitive.multiple_results else [bound]
        return [cast(x, v.dtype) for x, v in zip(results, step.results, strict=True)]


class _Wide:
    """The float32 arrays of weights, and of what is made of weights alone."""

    def __init__(self, arrays: dict[Any, Any]):
        self.arrays = arrays

    @classmethod
    def of(cls, plan: Plan, values: Any) -> "_Wide":
        """Those that a function gets."""
        given = zip(plan.jaxpr.invars, values, plan.inputs, strict=True)
        return cls({v: x for v, x, i in given if i.made_of == WEIGHTS and getattr(x, "dtype", None) == FLOAT32})

    def beside(self, step: Step, operands: list[Any]) -> dict[int, Any]:
        """Those of the weights of a step, by operand: of the 16-bit operands, where functions are inside."""
        places = step.weights
        if step.how == "call" and step.eqn.primitive.name in _TAKE_BOTH and self.arrays:
            places = [i for i, x in enumerate(operands) if x.dtype in FLOATS and x.dtype != FLOAT32]
        variables = {i: step.eqn.invars[i] for i in places}
        variables = {i: v for i, v in variables.items() if not isinstance(v, core.Literal)}
        found = {i: self.arrays[v] for i, v in variables.items() if v in self.arrays}
        if step.eqn.primitive.name == "shard_map":  # its transpose sums over devices, also what is made of weights
            inputs = step.inner[0].inputs
            made = {i: _widened(operands[i]) for i in variables if inputs[i].made_of == WEIGHTS}
            return dict(sorted((made | found).items()))
        return found

    def entering(self, step: Step, held: "_Held") -> list[Any]:
        """Those that enter a function in a step in place of what is held; None: what is held enters."""
        variables = [None if isinstance(v, core.Literal) else v for v in step.eqn.invars]
        if step.how != "call" or not self.arrays:
            return [None] * len(variables)
        found = ((i, v) for i, v in enumerate(variables) if v in self.arrays)
        enters = {i for i, v in found if _enters_wide(step, i, held.known(v))}
        return [self.arrays[v] if i in enters else None for i, v in enumerate(variables)]

    def follow(self, step: Step, held: "_Held", scope: str) -> None:
        """Notes the result of a step that was made of weights."""
        eqn = step.eqn
        if not self.arrays or len(step.results) != 1 or step.results[0].made_of != WEIGHTS:
            return
        out, first = eqn.outvars[0], eqn.invars[0]
        if held.read(out).dtype == FLOAT32:
            self.arrays[out] = held.read(out)
        elif not isinstance(first, core.Literal) and first in self.arrays and step.results[0].dtype in FLOATS:
            if step.how == "same" or eqn.primitive.name == "convert_element_type":
                self.arrays[out] = self.arrays[first]
            elif eqn.primitive.name in _MOVES:
                others = (held.read(v) for v in eqn.invars[1:])
                with jaxprs.where(eqn, scope):
                    self.arrays[out] = eqn.primitive.bind(self.arrays[first], *others, **eqn.params)


def _enters_wide(step: Step, i: int, value: Value) -> bool:
    """Whether a weight enters a function in float32, and is cast inside."""
    name = step.eqn.primitive.name
    if name == "scan":  # what every iteration reads does so anyway
        return i < jaxprs.scan_counts(step.eqn)[0]
    is_cast = step.operands[i] != FLOAT32
    if name in jaxprs.JITS | jaxprs.WITH_OWN_DERIVATIVE:
        return is_cast
    return is_cast and name in _TAKE_BOTH and value.dtype == FLOAT32


# Remat keeps what enters, and loops read what they scan: a weight that is stored in 16 bits stays so.
_TAKE_BOTH = jaxprs.REMATS | {"scan", "cond", "shard_map"}


@jax.custom_jvp
def _with_gradient_to(wide: Any, x: Any) -> Any:
    """`x`, whose gradient goes to a float32 array that holds the same."""
    del wide
    return x


@_with_gradient_to.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], lax.convert_element_type(tangents[0], primals[1].dtype)


# Movement of one array: the same equation moves it in any dtype.
_MOVES = jaxprs.REARRANGES | (jaxprs.HANDS_ON - {"name"}) | frozenset({"broadcast_in_dim", "slice", "dynamic_slice"})


class _Held:
    """The values of a function that runs, each cast at most once to each dtype."""

    def __init__(self, values: dict[Any, Any], known: dict[Any, Value] | None = None):
        self._values = values
        self._made: dict[Any, Any] = {}  # by variable and dtype
        self._known: dict[Any, Value] = dict(known or {})

    def add(self, variables: Any, values: Any, known: Any) -> None:
        self._values |= dict(zip(variables, values, strict=True))
        self._known |= dict(zip(variables, known, strict=True))

    def add_reads(self, reads: Any, values: Any) -> None:
        for (v, dtype), x in zip(reads, values, strict=True):
            if dtype is None:
                self._values[v] = x
            else:
                self._made[v, dtype] = x

    def known(self, variable: Any) -> Value:
        return self._known[variable]

    def know(self, step: Step) -> None:
        self._known |= dict(zip(step.eqn.outvars, step.results, strict=True))

    def read(self, atom: Any, dtype: Any = None) -> Any:
        if isinstance(atom, core.Literal):
            return cast(_array_of(atom), dtype)
        if (atom, dtype) in self._made:
            return self._made[atom, dtype]
        if dtype is None or self._values[atom].dtype == dtype:
            return self._values[atom]
        return self._made.setdefault((atom, dtype), cast(self._values[atom], dtype, self._known.get(atom)))

    def dtypes(self, plan: Plan) -> dict[Any, Any]:
        """The dtypes that the variables of a plan have; those held now are its inputs."""
        made = {v: x.dtype for step in plan.steps for v, x in zip(step.eqn.outvars, step.results, strict=True)}
        return {v: getattr(x, "dtype", None) for v, x in self._values.items()} | made


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
    params, dtype = dict(step.eqn.params), FLOAT32 if step.how == "once" else step.results[0].dtype
    is_exact = cast_lists.is_short(step.eqn) or cast_lists.only_sums(step.eqn)
    if is_exact and dtype == FLOAT32 and params["precision"] is None:  # else a GPU and a TPU round the operands
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    is_named = params.get("preferred_element_type") is not None
    if dtype in FLOATS and (is_named or ("preferred_element_type" in params and dtype == FLOAT32)):
        params["preferred_element_type"] = dtype
    return params


def _rounded_once(step: Step, operands: list[Any]) -> Any:
    """Arithmetic of 16-bit arrays with float32 scalars, and sums of 16-bit numbers: in float32, the result rounded."""
    eqn = step.eqn

    def run(*operands: Any) -> Any:
        wide = list(map(_widened, operands))
        out = _scatter(eqn, wide) if eqn.primitive.name in _SCATTERS else eqn.primitive.bind(*wide, **_params(step))
        return cast(out, step.results[0].dtype)

    # A derivative would keep the widened arrays. The checkpoint keeps them in 16 bits, and widens them again.
    return run(*operands) if _is_linear(eqn) else jax.checkpoint(run)(*operands)


def _is_linear(eqn: Any) -> bool:
    """Whether the derivative of an equation reads none of its array operands."""
    if eqn.primitive.name in ("mul", "div"):
        return any(isinstance(v, core.Literal) for v in eqn.invars)
    is_sum = eqn.primitive.name in ("add", "sub", "add_any", "scatter-add", "scatter-sub")
    return is_sum or eqn.outvars[0].aval.dtype not in FLOATS


def _repeated(step: Step, operands: list[Any], wide: dict[int, Any]) -> Any:
    """An operation that repeats a 16-bit operand. Its gradient is summed in float32: in bfloat16, 256 + 1 is 256.

    `wide` has the float32 arrays that get the gradients of some operands, without a rounding.
    """
    eqn, dtype, count = step.eqn, step.results[0].dtype, len(operands)
    places = [*range(count), *wide]

    def tangent_of(k: int, given: Any, tangent: Any) -> Any:
        if k in wide:
            return None
        i, operands = places[k], given[:count]
        if is_repeated(eqn, i):
            operands = list(map(_widened, operands))
            tangent = lax.convert_element_type(tangent, jnp.float32)

        def of_operand(x: Any) -> Any:
            return eqn.primitive.bind(*operands[:i], x, *operands[i + 1 :], **eqn.params)

        _, out = jax.jvp(of_operand, (operands[i],), (tangent,))
        return lax.convert_element_type(out, dtype)

    run = lambda *given: eqn.primitive.bind(*given[:count], **eqn.params)  # noqa: E731
    return _with_tangents(run, tangent_of, [*operands, *wide.values()])


def _with_tangents(run: Any, tangent_of: Any, operands: list[Any]) -> Any:
    """`run(*operands)`, whose tangent is the sum of `tangent_of(i, operands, tangent of i)`; None adds nothing."""
    run = jax.custom_jvp(run)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def derivative(primals: Any, tangents: Any) -> Any:
        moving = ((i, t) for i, t in enumerate(tangents) if not isinstance(t, jax.custom_derivatives.SymbolicZero))
        found = [x for i, t in moving if (x := tangent_of(i, primals, t)) is not None]
        out = run(*primals)
        return out, functools.reduce(lax.add, found) if found else jnp.zeros_like(out)

    return run(*operands)


def _product(step: Step, operands: Any) -> Any:
    """A product in the dtype of its plan, from 16-bit operands."""
    product = functools.partial(step.eqn.primitive.bind, **_params(step))
    return _to_float32(product, *operands) if step.results[0].dtype == FLOAT32 else product(*operands)


def _returning(dtype: Any, step: Step) -> Step:
    return step._replace(results=(step.results[0]._replace(dtype=dtype),))


def _to_float32(product: Any, *operands: Any) -> Any:
    """A product of 16-bit operands that returns float32: XLA for CPU has none for some layouts, and fails."""

    def widened(_: Any, *operands: Any) -> Any:
        return product(*map(_widened, operands))

    return by_platform(product, *operands, cpu=widened, derivative="cpu", maps=True)


def _in_float32(step: Step, operands: list[Any]) -> Any:
    """A product of 16-bit operands that returns float32. Its derivative, too, multiplies 16-bit arrays in bfloat16.

    In float16 a tangent may be too large for 16 bits, as the product itself.
    """
    eqn, dtype = step.eqn, step.lists.dtype
    low = _returning(dtype, step)

    def tangent_of(i: int, operands: Any, tangent: Any) -> Any:
        given = [*operands[:i], tangent, *operands[i + 1 :]]
        if dtype == jnp.bfloat16:
            return _product(low, given).astype(jnp.float32)
        if eqn.primitive.name != "dot_general":  # jax transposes others for operands of one dtype
            given = list(map(_widened, given))
        return eqn.primitive.bind(*given, **_params(step))

    return _with_tangents(lambda *given: _product(step, given), tangent_of, operands)


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, jnp.float32) if x.dtype in FLOATS else x


def _multiplied(step: Step, operands: list[Any], wide: dict[int, Any]) -> Any:
    """A product of 16-bit data with a weight, whose gradient is a product in float32: XLA reduces it in that dtype.

    `wide` has the float32 array that gets the gradient; without one it is rounded.
    """
    eqn, count = step.eqn, len(operands)
    dtype = step.lists.dtype if step.results[0].dtype == FLOAT32 else step.results[0].dtype
    params = _params(_returning(dtype, step))
    types = [jax.typeof(wide.get(i, x)) for i, x in enumerate(operands)]

    def gradient(i: int, operands: Any, g: Any) -> Any:
        others = [x for k, x in enumerate(operands) if k != i]
        if i not in step.weights:
            return compat.transposed(eqn.primitive, g, others, i, types[i], params)
        in_float32 = params | {"preferred_element_type": np.dtype(np.float32)}

        def product(g: Any, *others: Any) -> Any:
            return compat.transposed(eqn.primitive, g, others, i, types[i], in_float32)

        return _to_float32(product, g, *others)

    @jax.custom_vjp
    def run(*given: Any) -> Any:
        return _product(step, given[:count])

    def forward(*given: Any) -> Any:
        kept = [x.value for x in given[:count]]
        moves = [() if x.perturbed else None for x in given]  # both hold no array
        return _product(step, kept), (kept, moves)

    def backward(residuals: Any, g: Any) -> Any:
        kept, moves = residuals
        gets = [i if i < 2 and i not in wide else None for i in range(count)] + list(wide)
        if isinstance(g, jax.custom_derivatives.SymbolicZero):
            return (None,) * len(gets)
        g = cast(g, dtype)
        pairs = zip(gets, moves, strict=True)
        return tuple(None if i is None or moved is None else gradient(i, kept, g) for i, moved in pairs)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*operands, *wide.values())


_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
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
