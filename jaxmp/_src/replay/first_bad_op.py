"""Runs a function one operation at a time, to find the operation that turns finite numbers into inf or NaN.

Not every inf is a fault: a mask adds -inf to scores, and exp turns it into zeros. So the search starts from the
results. Each value that is not finite carries its *origins*: the operations whose result was worse than their operands
(inf from finite numbers, NaN from inf, or one more bad element of an elementwise operation). An origin counts if it
reaches a result of the function. The first that counts, in the order of the program, is the answer.

Calls, branches and loops first run as a whole. Only if their results are not finite, the search goes inside by the same
rules, in a loop iteration by iteration. Values are freed after their last reader, so the search needs as much memory as
the function without jit, and a little time for each operation: seconds for a model of a few thousand operations.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._src.programs import array_functions, flax_modules, jaxprs
from jaxmp._src.replay import bad_operation, nonfinite

_ENTERED = jaxprs.CALLS | jaxprs.CONTROL_FLOW
_MOST_WALKS = 3  # iterations of one loop that are searched; the first that turns bad has the answer
_NONE: frozenset[int] = frozenset()
_NOTES = {1: "makes NaN from inf", 2: "an operand is infinite from the start: a constant of the program"}


def first_bad_op(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bad_operation.BadOp | None:
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
    return walk(closed, inputs.values, inputs.paths)


def walk(closed: Any, values: list[Any], paths: list[str]) -> bad_operation.BadOp | None:
    """`first_bad_op` of a closed jaxpr, for its inputs and their names."""
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    walker = _Walker()
    taints = []
    for x, path in zip(values, paths, strict=True):
        bad = nonfinite.first_nonfinite({path: x})
        taints.append(_NONE if bad is None else walker.add(_of_argument(x, bad, path)))
    results = walker.run(jaxpr, consts, [jnp.asarray(x) for x in values], taints, bad_operation.Place())
    reached = frozenset().union(*results)
    return walker.origins[min(reached, key=lambda i: (walker.ranks[i], i))] if reached else None


class _Walker:
    """The origins found so far. A taint is the set of origins of a value, empty if it is finite."""

    def __init__(self) -> None:
        self.origins: list[bad_operation.BadOp] = []
        self.ranks: list[int] = []  # 0: from finite numbers; 1: NaN from inf; 2: only from an infinite constant

    def add(self, origin: bad_operation.BadOp, rank: int = 0) -> frozenset[int]:
        self.origins.append(origin)
        self.ranks.append(rank)
        return frozenset({len(self.origins) - 1})

    def run(
        self, jaxpr: Any, consts: Any, values: list[Any], taints: list[frozenset[int]], place: bad_operation.Place
    ) -> list[frozenset[int]]:
        """Runs a function equation by equation; returns the taints of its results."""
        taints = [_NONE] * len(consts) + taints
        given = zip([*consts, *values], taints, strict=True)
        held: dict[Any, tuple[Any, frozenset[int]]] = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))
        last = {v: t for t, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, core.Literal)}
        last |= dict.fromkeys((v for v in jaxpr.outvars if not isinstance(v, core.Literal)), len(jaxpr.eqns))
        for t, eqn in enumerate(jaxpr.eqns):
            read = [_literal(v) if isinstance(v, core.Literal) else held[v] for v in eqn.invars]
            operands, tainted = [x for x, _ in read], [taint for _, taint in read]
            results = _execute(eqn, operands)
            found = self.taints_of(eqn, operands, tainted, results, place)
            held |= dict(zip(eqn.outvars, zip(results, found, strict=True), strict=True))
            for v in (*eqn.invars, *eqn.outvars):
                if not isinstance(v, core.Literal) and last.get(v, -1) <= t:
                    held.pop(v, None)
        return [_NONE if isinstance(v, core.Literal) else held[v][1] for v in jaxpr.outvars]

    def taints_of(
        self,
        eqn: Any,
        operands: list[Any],
        tainted: list[frozenset[int]],
        results: list[Any],
        place: bad_operation.Place,
    ) -> list[frozenset[int]]:
        severities = _severities(results)
        if not any(severities):
            return [_NONE] * len(results)
        inherited = frozenset().union(*tainted)
        name = eqn.primitive.name
        inner = [_NONE] * len(results)
        if name in _ENTERED:
            inner = self.inside(eqn, operands, tainted, place)
        worst = max(_severities(operands), default=0)
        found = []
        for i, severity in enumerate(severities):
            if not severity or inner[i]:
                found.append(inner[i] if severity else _NONE)
                continue
            bad = ~_is_finite(results[i])
            rank = 0 if not worst else 1 if severity > worst else 2
            if rank and jaxprs.is_elementwise(eqn) and (fresh := _fresh(bad, operands)).any():
                bad, rank = fresh, 0
            if rank < 2 or not inherited:
                note = _NOTES.get(rank, "")
                if name in _ENTERED:
                    note = "its result is not finite when compiled as one program; operation by operation it is finite"
                origin = bad_operation.describe(eqn, operands, results, i, place, bad, note)
                found.append(inherited | self.add(origin, rank))
            else:
                found.append(inherited)
        return found

    def inside(self, eqn: Any, operands: list[Any], tainted: list[frozenset[int]], place: Any) -> list[frozenset[int]]:
        """The taints of the results of an equation that calls, branches or loops."""
        functions = jaxprs.functions_of(eqn)
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, functions[0], operands, tainted, place)
        if name == "while":
            return self.loop(eqn, functions, operands, tainted, place)
        if name == "cond":
            branch = min(max(int(operands[0]), 0), len(functions) - 1)
            jaxpr, consts = functions[branch]
            return self.run(jaxpr, consts, operands[1:], tainted[1:], place.inside(eqn))
        jaxpr, consts = functions[0]
        return self.run(jaxpr, consts, operands, tainted, place.inside(eqn))

    def iteration(
        self, body: Any, compiled: Any, values: list[Any], tainted: list[frozenset[int]], walks: list[int], place: Any
    ) -> tuple[list[Any], list[frozenset[int]]]:
        """One run of the body of a loop: (results, their taints)."""
        results = compiled(*values)
        severities = _severities(results)
        inherited = frozenset().union(*tainted)
        taints = [inherited] * len(results)
        if any(severities) and len(walks) < _MOST_WALKS:
            walks.append(len(walks))
            jaxpr, consts = body
            walked = self.run(jaxpr, consts, values, tainted, place)
            taints = [w or inherited for w in walked]
        return results, [t if s else _NONE for t, s in zip(taints, severities, strict=True)]

    def scan(self, eqn: Any, body: Any, operands: list[Any], tainted: list[Any], place: Any) -> list[frozenset[int]]:
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        start = n_consts + n_carry
        carry, taints = operands[n_consts:start], tainted[n_consts:start]
        stacked = [_NONE] * (len(eqn.outvars) - n_carry)
        compiled, walks = _compiled(body), []
        length = eqn.params["length"]
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            values = [*operands[:n_consts], *carry, *(x[i] for x in operands[start:])]
            given = [*tainted[:n_consts], *taints, *tainted[start:]]
            given = [t if s else _NONE for t, s in zip(given, _severities(values), strict=True)]
            results, found = self.iteration(body, compiled, values, given, walks, place.inside(eqn, i))
            carry, taints = results[:n_carry], found[:n_carry]
            stacked = [a | b for a, b in zip(stacked, found[n_carry:], strict=True)]
        return [*taints, *stacked]

    def loop(self, eqn: Any, functions: Any, operands: list[Any], tainted: list[Any], place: Any) -> list[Any]:
        test, body = functions
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        carry, taints = operands[second:], tainted[second:]
        holds, run, walks = _compiled(test), jaxprs.jaxpr_as_function(*body), []
        i = 0

        @jax.jit
        def compiled(going_on: Any, *values: Any) -> list[Any]:
            return jaxprs.rows_going_on(going_on, run(*values), list(values[second - first :]))

        while np.any(going_on := holds(*operands[:first], *carry)[0]):
            values = [*operands[first:second], *carry]
            given = [*tainted[first:second], *taints]
            advance = functools.partial(compiled, going_on)
            carry, taints = self.iteration(body, advance, values, given, walks, place.inside(eqn, i))
            i += 1
        return taints


def _fresh(bad: Any, operands: list[Any]) -> Any:
    """Which of the bad elements of an elementwise operation come from finite ones."""
    for x in operands:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            bad = bad & _is_finite(x)
    return bad


def _is_finite(x: Any) -> Any:
    x = nonfinite.as_wide(nonfinite.on_host_if_small(x))
    return np.isfinite(x) if isinstance(x, np.ndarray) else jnp.isfinite(x)


def _literal(v: Any) -> tuple[Any, frozenset[int]]:
    return jnp.asarray(v.val, v.aval.dtype), _NONE


def _compiled(function: tuple[Any, tuple[Any, ...]]) -> Callable[..., list[Any]]:
    return jax.jit(jaxprs.jaxpr_as_function(*function))


def _execute(eqn: Any, operands: list[Any]) -> list[Any]:
    if "donated_invars" in eqn.params:  # a jit inside must not overwrite values that are read again
        eqn = eqn.replace(params=eqn.params | {"donated_invars": (False,) * len(eqn.invars)})
    given = [x for x, v in zip(operands, eqn.invars, strict=True) if not isinstance(v, core.Literal)]
    return list(jaxprs.as_function(eqn)(*given))


def _severities(values: list[Any]) -> list[int]:
    """For each value: 0 if it is finite, 1 with an inf, 2 with a NaN."""
    found = []
    for x in values:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0
        x = nonfinite.on_host_if_small(x) if is_float else x
        found.append(0 if not is_float else _severity_on_host(x) if isinstance(x, np.ndarray) else _severity(x))
    return [int(x) for x in jax.device_get(found)]


@jax.jit
def _severity(x: Any) -> Any:
    wide = nonfinite.as_wide(x)
    return jnp.where(jnp.any(jnp.isnan(wide)), 2, jnp.where(jnp.all(jnp.isfinite(wide)), 0, 1))


def _severity_on_host(x: np.ndarray) -> int:
    wide = nonfinite.as_wide(x)
    return 2 if np.isnan(wide).any() else 0 if np.isfinite(wide).all() else 1


def _of_argument(x: Any, bad: nonfinite.NonFinite, path: str) -> bad_operation.BadOp:
    return bad_operation.BadOp(
        "argument", path, False, "", (), (), str(x.dtype), tuple(np.shape(x)), bad, float(jnp.finfo(x.dtype).max), None
    )
