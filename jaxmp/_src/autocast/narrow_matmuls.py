"""Matmuls of a rewritten function that run narrower than autocast's dtype: found here, chosen and multiplied elsewhere.

Only matmuls with a weight count: an operand that is an input, or is computed from inputs alone (`weights`). Autocast
passes the operations with weights of a function, in the order in which they run, to the chooser of its lists. The
chooser returns a product for a matmul, or the reason why it has none. A place (the number of the equation, of the
function in that equation, of the equation in that function, ...) identifies the matmul for the planner, which makes the
choice a step.

Matmuls of a derivative inside the function stay in autocast's dtype. So do matmuls in a function with a derivative of
its own, because it chooses its dtypes itself. A product has its own derivative, and is differentiated from outside.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax.extend import core

from jaxmp._src.autocast import weights
from jaxmp._src.autocast.cast_lists import EACH_ITS_OWN, FLOATS, CastLists
from jaxmp._src.autocast.planner import Plan, Planner, Step, Value
from jaxmp._src.autocast.weights import Origin
from jaxmp._src.base import vmap_rules
from jaxmp._src.programs import jaxprs, module_paths

Place = tuple[int, ...]


class Operation(NamedTuple):
    """An operation with weights, or a matmul without.

    Attributes:
      place: where it is.
      path: the module, by the path of its params, or the named scope; "" at the top and in the root of a model.
      eqn: the equation as traced.
      weight: which operand is the weight; None of a matmul of two computed values, of a layer, and of a matmul in a
        function with its own derivative.
      in_loop: whether it is in a loop.
      is_layer: whether it is a layer with a narrow product of its own.
      why_not: why it cannot have a product; None if it can.
    """

    place: Place
    path: str
    eqn: Any
    weight: int | None
    in_loop: bool
    is_layer: bool = False
    why_not: str | None = None


class Product(Protocol):
    """A product in place of a `dot_general`; hashable."""

    @property
    def dtype_name(self) -> str:
        """What it multiplies in, for people to read."""
        ...

    @property
    def reason(self) -> str:
        """Why, for people to read."""
        ...

    def __call__(self, lhs: Any, rhs: Any, dtype: Any, params: Any, /) -> Any:
        """The product in `dtype`, by the parameters of the equation; it can be differentiated."""
        ...


class Chooser(Protocol):
    """Who chooses; hashable, because it is in the key of jitted functions."""

    def choose(self, operations: list[Operation]) -> Sequence[Product | str | None]:
        """For each operation its product, or why it has none; None says nothing."""
        ...

    def check_region(self) -> None:
        """Raises a ValueError unless a region in a function that is traced for another rewrite may lose it."""
        ...


def plan(planner: Planner, function: tuple[Any, Any], inputs: tuple[Value, ...], lists: CastLists) -> Plan:
    """The plan of a whole function, with the products that the chooser of `lists` names."""
    found = planner.plan(function, inputs, lists)
    if lists.chooser is None:
        return found
    search = _Search()
    search.walk(found, (), "", in_loop=False)
    operations = search.operations
    choices = zip(operations, lists.chooser.choose(operations), strict=True)
    narrow = frozenset((operation.place, choice) for operation, choice in choices if choice is not None)
    return planner.plan(function, inputs, lists._replace(narrow=narrow)) if narrow else found


class _Search:
    """The operations of a plan, in their order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._inputs = itertools.count()

    def walk(
        self,
        plan: Plan,
        at: Place,
        stack: str,
        *,
        in_loop: bool,
        given: Sequence[Origin] | None = None,
    ) -> list[Origin]:
        """Finds the operations of a function; returns the origins of its results, given those of its inputs."""
        known: dict[Any, Origin] = {v: self._input() for v in plan.jaxpr.constvars}
        for i, (v, value) in enumerate(zip(plan.jaxpr.invars, plan.inputs, strict=True)):
            if given is not None:
                known[v] = given[i]
            else:
                known[v] = Origin(frozenset([weights.UNKNOWN]), computed=True) if value.computed else self._input()
        for i, step in enumerate(plan.steps):
            eqn = step.eqn
            operands = [weights.CONSTANT if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
            full = module_paths.join(stack, str(eqn.source_info.name_stack))
            found = _operation(step, operands)
            if found is not None:
                weight, is_layer, why_not = found
                why_not = why_not or _why_not_at(full)
                chosen = () if weight is None else operands[weight].made_of | operands[weight].products
                for part in chosen:
                    made = self.operations[part]
                    self.operations[part] = made._replace(weight=None, why_not="it makes a part of a weight")
                path = module_paths.path_of(full)
                self.operations.append(Operation((*at, i), path, eqn, weight, in_loop, is_layer, why_not))
            count = len(self.operations)
            inner: list[list[Origin]] = []
            if eqn.primitive.name in jaxprs.WITH_OWN_DERIVATIVE:
                if found is None:
                    self._refuse(step, (*at, i), full, in_loop=in_loop)
            else:
                for k, function in enumerate(step.inner):
                    loops = in_loop or eqn.primitive.name in jaxprs.LOOPS
                    passed = _passed(eqn, operands, function)
                    inner.append(self.walk(function, (*at, i, k), full, in_loop=loops, given=passed))
            results = self._results(step, operands, inner, has_matmuls=len(self.operations) > count)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [weights.CONSTANT if isinstance(v, core.Literal) else known[v] for v in plan.jaxpr.outvars]

    def _refuse(self, step: Step, at: Place, stack: str, *, in_loop: bool) -> None:
        """The matmuls in a function with its own derivative, at any depth."""
        for k, function in enumerate(step.inner):
            for i, inner in enumerate(function.steps):
                name = inner.eqn.primitive.name
                full, place = module_paths.join(stack, str(inner.eqn.source_info.name_stack)), (*at, k, i)
                if name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
                    why_not = _OTHER_PRODUCTS.get(name, _OF_OWN_DERIVATIVE)
                    path = module_paths.path_of(full)
                    self.operations.append(Operation(place, path, inner.eqn, None, in_loop, why_not=why_not))
                self._refuse(inner, place, full, in_loop=in_loop or name in jaxprs.LOOPS)

    def _results(
        self, step: Step, operands: list[Origin], inner: list[list[Origin]], *, has_matmuls: bool
    ) -> Sequence[Origin]:
        eqn, name = step.eqn, step.eqn.primitive.name
        if inner and (name in jaxprs.CALLS or name == "shard_map"):
            return inner[0]
        if name == "dot_general":
            return [weights.of_matmul(eqn, operands, len(self.operations) - 1)]
        if name in EACH_ITS_OWN and len(operands) == len(eqn.outvars):
            return operands
        if has_matmuls or any(map(_has_matmuls, jaxprs.functions_of(eqn))):
            return [weights.computed(operands)] * len(eqn.outvars)
        return [weights.of_result(eqn, operands)] * len(eqn.outvars)

    def _input(self) -> Origin:
        return Origin(frozenset([next(self._inputs)]))


def _passed(eqn: Any, operands: list[Origin], function: Plan) -> list[Origin] | None:
    """The origins of the inputs of a function in an equation; None if they are not known from its operands."""
    if eqn.primitive.name == "while":
        return None
    passed = operands[-len(function.inputs) :] if function.inputs else []
    if eqn.primitive.name == "scan":
        consts, carry = jaxprs.scan_counts(eqn)
        for i in range(consts, consts + carry):
            if function.inputs[i].computed:
                passed[i] = weights.computed([passed[i]])
    return passed


def _has_matmuls(function: tuple[Any, Any]) -> bool:
    """Whether there is a matmul or a convolution in a function, at any depth."""
    return any(
        eqn.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS or any(map(_has_matmuls, jaxprs.functions_of(eqn)))
        for eqn in function[0].eqns
    )


def _operation(step: Step, operands: list[Origin]) -> tuple[int | None, bool, str | None] | None:
    """(weight, is_layer, why_not) of an operation with weights or a matmul; None for others."""
    eqn, name = step.eqn, step.eqn.primitive.name
    if name == vmap_rules.NAME or (name in jaxprs.WITH_OWN_DERIVATIVE and _has_narrow_product(eqn)):
        return None, True, "it is a layer with a rule of its own"
    if name == "gather":  # an embedding
        has_rows = eqn.invars[0].aval.ndim > 1 and eqn.invars[0].aval.dtype in FLOATS
        return (0, False, "it is no matmul") if has_rows and operands[0].is_table else None
    if name not in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        return None
    weight = weights.number_of_weight(eqn, operands)
    if name != "dot_general":
        return weight, False, _OTHER_PRODUCTS.get(name, f"it is a {name}")
    if step.how not in ("bind", "product") or step.group != "allow":
        return weight, False, "it does not run in 16 bits"
    return weight, False, "the function computes both operands" if weight is None else None


_OF_OWN_DERIVATIVE = "it is in a function with its own derivative: call jaxmp.fp8.dot_general there"
_OF_EXPERTS = "it is a ragged_dot: call jaxmp.fp8.ragged_dot"
_OTHER_PRODUCTS = dict.fromkeys(jaxprs.RAGGED_MATMULS, _OF_EXPERTS) | {
    "conv_general_dilated": "it is a convolution: fp8 runs those of one pixel, in flax's layers"
}


def _has_narrow_product(eqn: Any) -> bool:
    """Whether a function in an equation casts below 16 bits, or has a product of jaxmp.fp8, at any depth."""
    for jaxpr, _ in jaxprs.functions_of(eqn):
        for inner in jaxpr.eqns:
            dtypes = (getattr(v.aval, "dtype", None) for v in inner.outvars)
            if any(d is not None and jnp.issubdtype(d, jnp.floating) and d.itemsize < 2 for d in dtypes):
                return True
            if inner.primitive.name == vmap_rules.NAME or _has_narrow_product(inner):
                return True
    return False


def _why_not_at(stack: str) -> str | None:
    if module_paths.is_without_fp8(stack):
        return "jaxmp.fp8.autocast(enabled=False)"
    if module_paths.is_backward(stack) or "jvp(" in stack:
        return "a derivative inside the function: take it outside of autocast"
    return None
