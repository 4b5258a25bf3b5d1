"""Runs a function one operation at a time, to find the operation that turns finite numbers into inf or NaN.

Not every inf is a fault: a mask adds -inf to scores, and exp turns it into zeros. So the search starts from the
results. Each value that is not finite carries its *origins*: the operations whose result was worse than their operands
(inf from finite numbers, NaN from inf, or one more bad element of an elementwise operation). An origin counts if it
reaches a result of the function. The first that counts, in the order of the program, is the answer.

Calls, branches and loops first run as a whole. Only if their results are not finite, the search goes inside by the same
rules, in a loop iteration by iteration. Values are freed after their last reader, so the search needs as much memory as
the function without jit, and a little time for each operation: seconds for a model of a few thousand operations.

For each operation, a jaxpr keeps the traceback of its Python code and a name stack, into which flax writes the names of
its modules, and autodiff the backward pass. The operation that is named runs again with its narrow floats in float32,
to find the result that it would have with more range.
"""

import dataclasses
import functools
import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._src.base import warn
from jaxmp._src.monitor import nonfinite
from jaxmp._src.programs import array_functions, flax_modules, jaxprs, module_paths

_DTYPES = ("preferred_element_type", "new_dtype")  # parameters of primitives that name a result's dtype
_ENTERED = jaxprs.CALLS | jaxprs.CONTROL_FLOW
_MOST_WALKS = 3  # iterations of one loop that are searched; the first that turns bad has the answer
Taint = frozenset[int]  # the origins of a value, by number; empty if it is finite
_NONE: Taint = frozenset()
_NOTES = {1: "makes NaN from inf", 2: "an operand is infinite from the start: a constant of the program"}
_COMPILED = "its result is not finite when compiled as one program; operation by operation it is finite"


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an operation.

    Attributes:
      dtype: its dtype.
      shape: its shape.
      amax: its largest finite magnitude; NaN if there is none.
      finite: whether all of it is finite.

    Example:
      >>> print(Operand("float16", (2, 3), 6e4, True))
      float16[2,3], amax 60000
    """

    dtype: str
    shape: tuple[int, ...]
    amax: float
    finite: bool

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if not np.isnan(self.amax):
            text += f", amax {self.amax:.6g}"
        return text if self.finite else f"{text}, and inf or NaN"


@dataclasses.dataclass(frozen=True)
class BadOp:
    """An operation whose result is not finite although its operands are.

    Attributes:
      primitive: jax's name of it; "argument" if an argument itself is not finite, and `module` is its path; "constant"
        for a result that no operation computes, and `module` is its number.
      module: path of the flax module, the same as of its params (`block_1/Dense_0`), or of the named scope; "" at the
        top.
      backward: whether it belongs to the backward pass.
      source: the line of the user's code, as `file:line (function)`; "" if there is none.
      iterations: the iteration of each loop around it, outermost first.
      operands: its operands.
      dtype: dtype of the result.
      shape: shape of the result.
      first: its first bad element, as from `first_nonfinite`: `index`, `value`, `count`, `size`.
      limit: the largest finite number of the dtype.
      float32_amax: the largest magnitude of the result with operands and result in float32, perhaps inf or NaN; None
        if it was float32 already, or cannot run in float32.
      note: a remark, or "".

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> found = jaxmp.monitor.first_bad_op(lambda x: jnp.sum(x * x), jnp.full(2, 300.0, jnp.float16))
      >>> found.primitive, found.dtype, found.first.index, found.float32_amax
      ('mul', 'float16', (0,), 90000.0)
    """

    primitive: str
    module: str
    backward: bool
    source: str
    iterations: tuple[int, ...]
    operands: tuple[Operand, ...]
    dtype: str
    shape: tuple[int, ...]
    first: nonfinite.NonFinite
    limit: float
    float32_amax: float | None
    note: str = ""

    def where(self) -> str:
        """The operation in a few words."""
        if self.primitive in ("argument", "constant"):
            return f"{self.primitive} {self.first}"
        way = "backward" if self.backward else "forward"
        loops = "".join(f", iteration {i}" for i in self.iterations)
        return f"{self.primitive} in {self.module or '(top)'} ({way}{loops})"

    @property
    def code(self) -> str:
        """The text of the line at `source`; "" if it cannot be read."""
        file, _, rest = self.source.rpartition(":")
        number = rest.split(" ")[0]
        return linecache.getline(file, int(number)).strip() if number.isdigit() else ""

    def __str__(self) -> str:
        if self.primitive in ("argument", "constant"):
            return self.where()
        index = f"[{', '.join(map(str, self.first.index))}]" if self.first.index else ""
        lines = [self.where(), *([f"  at {self.source}"] if self.source else [])]
        lines += [f"    {self.code}"] if self.code else []
        lines += [f"  takes {x}" for x in self.operands]
        lines.append(
            f"  gives {self.dtype}[{','.join(map(str, self.shape))}], {self.first.value} first at {index or '[]'}, "
            f"{self.first.count} of {self.first.size} values not finite"
        )
        if self.float32_amax is not None and np.isfinite(self.float32_amax):
            times = self.float32_amax / self.limit
            lines.append(
                f"  in float32 its largest is {self.float32_amax:.6g}; {self.dtype} ends at {self.limit:.6g}"
                + (f" ({times:.3g} times beyond)" if times >= 1.01 else "")
            )
        elif self.float32_amax is not None:
            lines.append(f"  in float32 it gives {self.float32_amax} too: the range of {self.dtype} is not the cause")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def first_bad_op(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> BadOp | None:
    """The first operation of `fn(*args, **kwargs)` that makes inf or NaN which reaches a result.

    Runs the function operation by operation, outside of jit. To search a backward pass, pass the function that contains
    it: `first_bad_op(jax.grad(loss_fn), params, batch)`.

    Args:
      fn: a function of any arguments, with arrays and nnx modules among them; it may call jitted, rematerialized and
        scanned functions. A `shard_map` and a Pallas kernel count as one operation.
      *args: its arguments, as for a call.
      **kwargs: keyword arguments.

    Returns:
      A `BadOp`, which prints as a report, or None if all results are finite.

    Example:
      >>> def f(x):
      ...     with jax.named_scope("head"):
      ...         return jnp.sum(x * x)
      >>> bad = first_bad_op(f, jnp.full((2, 2), 300.0, jnp.float16))
      >>> bad.where(), bad.operands[0].amax, bad.float32_amax
      ('mul in head (forward)', 300.0, 90000.0)
    """
    inputs = array_functions.Inputs(array_functions.leaves_of((args, kwargs)))
    closed = jax.make_jaxpr(lambda *arrays: inputs.call(flax_modules.named(fn), arrays))(*inputs.values)
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    walker, taints = _Walker(), []
    for x, path in zip(inputs.values, inputs.paths, strict=True):
        bad = nonfinite.first_nonfinite({path: x})
        if bad is None:
            taints.append(_NONE)
            continue
        wide = nonfinite.as_wide(np.asarray(x))
        rank = 0.5 if np.all(np.isfinite(wide) | (wide == -np.inf)) else 0  # a mask is no fault beside an overflow
        taints.append(walker.add(_of_value("argument", x, bad), rank))
    values = [jnp.asarray(x) for x in inputs.values]
    of_results = zip(jaxpr.outvars, walker.run((jaxpr, consts), values, taints, _Place()), strict=True)
    if reached := frozenset().union(*(taint for v, taint in of_results if not _is_no_float(v.aval))):
        return walker.origins[min(reached, key=lambda i: (walker.ranks[i], i))]
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    constants = [v.val if isinstance(v, core.Literal) else known.get(v, 0.0) for v in jaxpr.outvars]
    bad = nonfinite.first_nonfinite(dict(enumerate(constants)))
    return bad and _of_value("constant", np.asarray(constants[int(bad.path)]), bad)


class _Place(NamedTuple):
    """The place of a function: the whole one, or one inside."""

    stack: str = ""  # the name stacks of the equations around it
    source: str = ""  # the innermost of their lines in the user's code
    iterations: tuple[int, ...] = ()  # of the loops around it

    def inside(self, eqn: Any) -> "_Place":
        """The place of an equation, or of the function inside it."""
        stack = module_paths.join(self.stack, str(eqn.source_info.name_stack))
        traceback, others = eqn.source_info.traceback, warn.folders_between()
        frames = (f for f in (traceback.frames if traceback else ()) if not f.file_name.startswith(others))
        line = next((f"{f.file_name}:{f.line_num} ({f.function_name})" for f in frames), self.source)
        return _Place(stack, line, self.iterations)


class _Walker:
    """The origins found so far, and the walk through a program that finds them."""

    def __init__(self) -> None:
        self.origins: list[BadOp] = []
        # 0: from finite numbers; 0.5: an argument with -inf; 1: NaN from inf; 2: only from an infinite constant
        self.ranks: list[float] = []

    def add(self, origin: BadOp, rank: float) -> Taint:
        self.origins.append(origin)
        self.ranks.append(rank)
        return frozenset({len(self.origins) - 1})

    def run(self, function: Any, values: list[Any], taints: list[Taint], place: _Place) -> list[Taint]:
        """Runs a function equation by equation; returns the taints of its results."""

        def equation(_: int, eqn: Any, operands: list[tuple[Any, Taint]]) -> list[tuple[Any, Taint]]:
            values, taints = [x for x, _ in operands], [taint for _, taint in operands]
            if "donated_invars" in eqn.params:  # a jit inside must not overwrite values that are read again
                eqn = eqn.replace(params=eqn.params | {"donated_invars": (False,) * len(eqn.invars)})
            results = jaxprs.run_as_traced(eqn, values)
            return list(zip(results, self.taints_of(eqn, values, taints, results, place), strict=True))

        constant, number = lambda x, aval: (x, _NONE), lambda x, aval: (jnp.asarray(x, aval.dtype), _NONE)
        inputs = list(zip(values, taints, strict=True))
        return [taint for _, taint in jaxprs.evaluate(function, inputs, equation, constant, number, frees=True)]

    def taints_of(
        self, eqn: Any, operands: list[Any], tainted: list[Taint], results: list[Any], place: _Place
    ) -> list[Taint]:
        severities = _severities(results)
        inherited = frozenset().union(*tainted)
        inner = [inherited if _is_no_float(x) else _NONE for x in results]
        if not any(severities):
            return inner
        if is_entered := eqn.primitive.name in _ENTERED:
            inner = self.inside(eqn, operands, tainted, place)
        worst = max(_severities(operands), default=0)
        if any(taint and _is_no_float(x) for x, taint in zip(operands, tainted, strict=True)):
            worst = 2  # a float of which the bits came
        taints = []
        for i, severity in enumerate(severities):
            if not severity or inner[i]:
                taints.append(inner[i] if severity or _is_no_float(results[i]) else _NONE)
                continue
            bad = ~jnp.isfinite(nonfinite.as_wide(results[i]))
            rank = 0 if not worst else 1 if severity > worst else 2
            if rank and jaxprs.is_elementwise(eqn):
                floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.inexact)]
                fresh = functools.reduce(lambda bad, x: bad & jnp.isfinite(nonfinite.as_wide(x)), floats, bad)
                bad, rank = (fresh, 0) if fresh.any() else (bad, rank)  # bad elements that come from finite ones
            if rank < 2 or not inherited:
                result, at = results[i], place.inside(eqn)
                module = module_paths.path_of(at.stack)
                origin = BadOp(
                    primitive=eqn.primitive.name,
                    module=module,
                    backward=module_paths.is_backward(at.stack),
                    source=at.source,
                    iterations=at.iterations,
                    operands=tuple(_operand(x) for x in operands),
                    dtype=str(result.dtype),
                    shape=tuple(result.shape),
                    first=nonfinite.first_of(module, result, bad),
                    limit=float(jnp.finfo(result.dtype).max),
                    float32_amax=_float32_amax(eqn, operands, i),
                    note=_COMPILED if is_entered else _NOTES.get(rank, ""),
                )
                taints.append(inherited | self.add(origin, rank))
            else:
                taints.append(inherited)
        return taints

    def inside(self, eqn: Any, operands: list[Any], tainted: list[Taint], place: _Place) -> list[Taint]:
        """The taints of the results of an equation that calls, branches or loops."""
        functions, name = jaxprs.functions_of(eqn), eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, functions[0], operands, tainted, place.inside(eqn))
        if name == "while":
            return self.loop(functions, operands, tainted, place.inside(eqn))
        function = functions[int(np.clip(operands[0], 0, len(functions) - 1)) if name == "cond" else 0]
        return self.run(function, function.inputs(operands), function.inputs(tainted), place.inside(eqn))

    def scan(self, eqn: Any, body: Any, operands: list[Any], tainted: list[Taint], place: _Place) -> list[Taint]:
        length, n = eqn.params["length"], body.n_carry
        (consts, carry, scanned), (of_consts, taints, of_scanned) = body.parts(operands), body.parts(tainted)
        stacked = [_NONE] * (len(eqn.outvars) - n)
        turn = functools.partial(self.turn, body, jax.jit(jaxprs.jaxpr_as_function(body.jaxpr, body.consts)), [])
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            values = [*consts, *carry, *(x[i] for x in scanned)]
            of_inputs = _of_bad(values, [*of_consts, *taints, *of_scanned])
            results, of_results = turn(values, of_inputs, place._replace(iterations=(*place.iterations, i)))
            carry, taints = results[:n], of_results[:n]
            stacked = [a | b for a, b in zip(stacked, of_results[n:], strict=True)]
        return [*taints, *stacked]

    def loop(self, functions: Any, operands: list[Any], tainted: list[Taint], place: _Place) -> list[Taint]:
        (test, body), walks = functions, []
        of_test, _, _ = test.parts(operands)
        consts, carry, _ = body.parts(operands)
        of_consts, taints, _ = body.parts(tainted)
        holds, run = (jax.jit(jaxprs.jaxpr_as_function(f.jaxpr, f.consts)) for f in functions)

        @jax.jit
        def next_carry(going_on: Any, *values: Any) -> list[Any]:
            return jaxprs.rows_going_on(going_on, run(*values), list(values[body.n_consts :]))

        i = 0
        while np.any(going_on := holds(*of_test, *carry)[0]):
            values, of_values = [*consts, *carry], [*of_consts, *taints]
            compiled = functools.partial(next_carry, going_on)
            at = place._replace(iterations=(*place.iterations, i))
            carry, taints = self.turn(body, compiled, walks, values, of_values, at)
            i += 1
        return taints

    def turn(
        self, body: Any, compiled: Any, walks: list[_Place], values: list[Any], tainted: list[Taint], place: _Place
    ) -> tuple[list[Any], list[Taint]]:
        """One turn of a loop: (what its body returns, the taints of that). `walks` are the turns that were searched."""
        results = compiled(*values)
        severities = _severities(results)
        inherited = frozenset().union(*tainted)
        taints = [inherited] * len(results)
        if any(severities) and len(walks) < _MOST_WALKS:
            walks.append(place)
            taints = [walked or inherited for walked in self.run(body, values, tainted, place)]
        return results, _of_bad(results, taints)


def _severities(values: list[Any]) -> list[int]:
    return [int(x) for x in jax.device_get([nonfinite.severity(x) for x in values])]


def _is_no_float(x: Any) -> bool:
    """Whether a value may hold bits of floats, or a test of them, and so hands on where these come from."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _of_bad(values: list[Any], taints: list[Taint]) -> list[Taint]:
    """The taints of the values that have one: those that are not finite, and bits."""
    pairs = zip(values, taints, strict=True)
    return [t if t and (_is_no_float(x) or nonfinite.severity(x)) else _NONE for x, t in pairs]  # finite: no look


def _of_value(kind: str, x: Any, bad: nonfinite.NonFinite) -> BadOp:
    """An argument, or a constant that the function returns, that is not finite itself."""
    limit = float(jnp.finfo(x.dtype).max)
    return BadOp(kind, bad.path, False, "", (), (), str(x.dtype), tuple(np.shape(x)), bad, limit, None)


def _operand(x: Any) -> Operand:
    if not (jnp.issubdtype(x.dtype, jnp.number) and x.size):
        return Operand(str(x.dtype), tuple(x.shape), float("nan"), True)
    magnitude = np.abs(nonfinite.as_wide(np.asarray(x)))
    finite = np.isfinite(magnitude)
    amax = float(np.max(magnitude, where=finite, initial=0)) if finite.any() else float("nan")
    return Operand(str(x.dtype), tuple(x.shape), amax, bool(finite.all()))


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _float32_amax(eqn: Any, operands: list[Any], which: int) -> float | None:
    if not _is_narrow(eqn.outvars[which].aval.dtype):
        return None
    wide = [x.astype(jnp.float32) if _is_narrow(x.dtype) else x for x in operands]
    if eqn.primitive.name == "reduce_precision":
        return float(np.max(np.abs(np.asarray(wide[0]))))
    params = {
        name: np.dtype(np.float32) if name in _DTYPES and x is not None and _is_narrow(x) else x
        for name, x in eqn.params.items()
    }
    try:
        result = eqn.primitive.bind(*wide, **params)
    except Exception:  # the primitive names its dtype in another way: this number is not known then
        return None
    result = result[which] if eqn.primitive.multiple_results else result
    return float(np.max(np.abs(np.asarray(result))))  # NaN stays NaN
