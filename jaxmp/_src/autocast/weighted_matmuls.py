"""The matmuls with weights of a function, in the order in which they run: some of them may run narrower than 16 bits.

A weight is an input of the function, or an array that it closes over, moved and cast or not. What a function computes,
a product of weights or a masked one, is no weight: such matmuls stay in 16 bits. Of two inputs the second is the
weight. A function is run once without arrays to list its matmuls; a chooser returns for each its product, or why it has
none.

Matmuls of a derivative inside the function stay in 16 bits, and so do those in a function with a derivative rule of its
own, because it chooses its dtypes itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from jaxmp._src.autocast.cast_lists import FLOATS, CastLists
from jaxmp._src.autocast.interpreter import At, Place
from jaxmp._src.autocast.values import Value
from jaxmp._src.base import vmap_rules
from jaxmp._src.programs import jaxprs, module_paths


class Operation(NamedTuple):
    """An operation with weights, or a matmul without.

    Attributes:
      place: where it is.
      path: the module, by the path of its params, or the named scope; "" at the top and in the root of a model.
      eqn: the equation as traced.
      weight: which operand is the weight; None if none is.
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


IN_FLOAT64 = "it runs in float64: cast its operands to float32"


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
        """Raises a ValueError unless a region in a function that is traced for another autocast may lose it."""
        ...


def choices(traced: Any, lists: CastLists) -> dict[Place, Product | str]:
    """By place, what the chooser of `lists` says of the operations of a traced function."""
    by_place: dict[Place, Operation] = {}

    def record(eqn: Any, operands: list[Value], choice: Any, results: Any, at: At) -> None:
        del results
        operation = _operation(eqn, operands, choice, at)
        if operation is not None:
            by_place.setdefault(at.place, operation)

    traced.tell(record, lists)
    operations = list(by_place.values())
    chosen = zip(operations, lists.chooser.choose(operations), strict=True)
    return {operation.place: choice for operation, choice in chosen if choice is not None}


def products(traced: Any, lists: CastLists) -> dict[Place, Product]:
    """By place, the products among the choices."""
    return {place: x for place, x in choices(traced, lists).items() if not isinstance(x, str)}


def _operation(eqn: Any, operands: list[Value], choice: Any, at: At) -> Operation | None:
    name = eqn.primitive.name
    path = module_paths.path_of(at.stack)
    if name == vmap_rules.NAME or (name in jaxprs.WITH_OWN_DERIVATIVE and _has_narrow_product(eqn)):
        why_not = "it is a layer with a rule of its own"
        return Operation(at.place, path, eqn, None, at.in_loop, is_layer=True, why_not=why_not)
    if name == "gather":  # an embedding
        has_rows = eqn.invars[0].aval.ndim > 1 and eqn.invars[0].aval.dtype in FLOATS and operands[0].is_input
        return Operation(at.place, path, eqn, 0, at.in_loop, why_not="it is no matmul") if has_rows else None
    if name not in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        return None
    are_inputs = [v.is_input for v in operands[:2]]
    weight = 1 if are_inputs[1] else 0 if are_inputs[0] else None
    why_not = None
    if at.own_derivative:
        weight, why_not = None, "it is in a function with its own derivative: call jaxmp.fp8.dot_general there"
    elif name in jaxprs.RAGGED_MATMULS:
        why_not = "it is a ragged_dot: call jaxmp.fp8.ragged_dot"
    elif name == "conv_general_dilated":
        why_not = "it is a convolution: fp8 runs those of one pixel, in flax's layers"
    elif any(v.aval.dtype == jnp.float64 for v in eqn.invars[:2]):
        why_not = IN_FLOAT64
    elif choice.how not in ("bind", "product") or choice.group != "allow":
        why_not = "it does not run in 16 bits"
    elif weight is None:
        why_not = "the function computes both operands"
    elif module_paths.is_without_fp8(at.stack):
        why_not = "jaxmp.fp8.autocast(enabled=False)"
    elif module_paths.is_backward(at.stack) or "jvp(" in at.stack:
        why_not = "a derivative inside the function: take it outside of autocast"
    return Operation(at.place, path, eqn, weight, at.in_loop, why_not=why_not)


def _has_narrow_product(eqn: Any) -> bool:
    """Whether a function in an equation casts below 16 bits, or has a product of jaxmp.fp8, at any depth."""
    for inner in jaxprs.equations(jaxprs.functions_of(eqn)[0].jaxpr):
        dtypes = jaxprs.dtypes_of(inner.outvars)
        narrow = (d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize < 2)
        if inner.primitive.name == vmap_rules.NAME or any(narrow):
            return True
    return False
