"""Runs a traced function and measures the result of each of its operations, inside jit.

    closed = jax.make_jaxpr(step)(*args)
    look = Look(lambda eqn, operands, results: measure(results[0]))     # float32[n], or None: no interest
    results = look.run(closed, args)                                    # the same results
    look.found, look.places                                             # by operation: the vector, and where it is

It goes into calls, remat, loops and branches. If an operation runs more than once, it keeps the element-wise MAX over
the runs (vectors are >= 0, and 0 means "nothing"). It does not differentiate the function: to measure the backward pass
too, pass a function that contains its derivative. (`taps` is for functions that are differentiated later.) A
`shard_map`, a kernel and a choice by platform are one operation. Values that are computed from constants alone are not
measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, Float

from jaxmp._src.programs import jaxprs, module_paths

Key = tuple[Any, ...]
Found = dict[Key, Float[Array, "n"]]


class Place(NamedTuple):
    """Where an operation is.

    Attributes:
      primitive: jax's name of it.
      path: the innermost module or scope; "" at the top.
      module: the innermost flax module, "" for the root; None outside of all.
      dtype: name of the dtype of its first result.
      backward: whether it is a part of a derivative.
    """

    primitive: str
    path: str
    module: str | None
    dtype: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.primitive} in {self.path or '(top)'}{' (backward)' if self.backward else ''}"


class Look:
    """One run of a function with a look at its operations.

    Args:
      measure: `(eqn, operands, results) -> float32[n] >= 0`, or None where an operation is of no interest.

    Attributes:
      found: what was measured, by operation.
      places: where these operations are.
      modules: paths of the flax modules that have operations.
    """

    def __init__(self, measure: Callable[[Any, list[Any], list[Any]], Array | None]):
        self._measure = measure
        self.found: Found = {}
        self.places: dict[Key, Place] = {}
        self.modules: set[str] = set()

    def run(self, closed: Any, values: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr."""
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        results, self.found = self._run(jaxpr, consts, values, [True] * len(values), "", ())
        return results

    def _run(
        self, jaxpr: Any, consts: Any, values: Sequence[Any], varies: Sequence[bool], base: str, key: Key
    ) -> tuple[list[Any], Found]:
        held = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        varying = {v for v, changes in zip(jaxpr.invars, varies, strict=True) if changes}
        found: Found = {}
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [v.val if isinstance(v, core.Literal) else held[v] for v in eqn.invars]
            given = [not isinstance(v, core.Literal) and v in varying for v in eqn.invars]
            results, seen = self._equation(eqn, operands, given, base, (*key, i))
            held |= dict(zip(eqn.outvars, results, strict=True))
            varying |= set(eqn.outvars) if any(given) else set()
            found |= seen
        return [v.val if isinstance(v, core.Literal) else held[v] for v in jaxpr.outvars], found

    def _equation(
        self, eqn: Any, operands: list[Any], varies: list[bool], base: str, key: Key
    ) -> tuple[list[Any], Found]:
        name, stack = eqn.primitive.name, module_paths.join(base, str(eqn.source_info.name_stack))
        module = module_paths.module_of(stack)
        self.modules |= set() if module is None else {module}
        inside = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
        if eqn.params.get("branches_platforms") is not None:  # the other branches need not compile here
            inside = None
        if inside is not None:
            return inside(eqn, operands, stack, key)
        if name in jaxprs.CALLS:
            jaxpr, consts = jaxprs.functions_of(eqn)[0]
            return self._run(jaxpr, consts, operands, varies, stack, key)
        results = jaxprs.run_as_traced(eqn, operands)
        measured = self._measure(eqn, operands, results) if any(varies) else None
        if measured is None:
            return results, {}
        self.places[key] = Place(
            name, module_paths.path_of(stack), module, results[0].dtype.name, module_paths.is_backward(stack)
        )
        return results, {key: measured}

    def _all(self, function: Any, values: Sequence[Any], stack: str, key: Key) -> tuple[list[Any], Found]:
        jaxpr, consts = function
        return self._run(jaxpr, consts, values, [True] * len(values), stack, key)

    def _scan(self, eqn: Any, operands: list[Any], stack: str, key: Key) -> tuple[list[Any], Found]:
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        first = n_consts + n_carry

        def body(carry: Any, scanned: Any) -> Any:
            values = (*operands[:n_consts], *carry, *scanned)
            results, found = self._all(jaxprs.functions_of(eqn)[0], values, stack, key)
            return tuple(results[:n_carry]), (tuple(results[n_carry:]), found)

        length, reverse = eqn.params["length"], eqn.params["reverse"]
        carry, scanned = tuple(operands[n_consts:first]), tuple(operands[first:])
        carry, (stacked, found) = lax.scan(body, carry, scanned, length=length, reverse=reverse)
        return [*carry, *stacked], {k: jnp.max(x, axis=0, initial=0) for k, x in found.items()}

    def _while(self, eqn: Any, operands: list[Any], stack: str, key: Key) -> tuple[list[Any], Found]:
        test, body = jaxprs.functions_of(eqn)
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]

        def turn(carry: Any) -> tuple[list[Any], Found]:
            return self._all(body, (*operands[first:second], *carry), stack, key)

        def holds(state: Any) -> Any:
            return jaxprs.jaxpr_as_function(*test)(*operands[:first], *state[0])[0]

        def once(state: Any) -> Any:
            results, found = turn(state[0])
            return tuple(results), jax.tree.map(jnp.maximum, state[1], found)

        carry = tuple(operands[second:])
        nothing = _zeros(jax.eval_shape(lambda carry: turn(carry)[1], carry))
        carry, found = lax.while_loop(holds, once, (carry, nothing))
        return list(carry), found

    def _cond(self, eqn: Any, operands: list[Any], stack: str, key: Key) -> tuple[list[Any], Found]:
        index, *given = operands
        branches = [
            lambda *values, n=n, function=function: self._all(function, values, stack, (*key, n))
            for n, function in enumerate(jaxprs.functions_of(eqn))
        ]
        nothing: Found = {}
        for branch in branches:
            nothing |= _zeros(jax.eval_shape(lambda *values, branch=branch: branch(*values)[1], *given))

        def padded(branch: Any) -> Any:
            def run(*values: Any) -> Any:
                results, found = branch(*values)
                return tuple(results), nothing | found

            return run

        results, found = lax.switch(index, [padded(branch) for branch in branches], *given)
        return list(results), found


def _zeros(shapes: Found) -> Found:
    return {key: jnp.zeros(x.shape, x.dtype) for key, x in shapes.items()}
