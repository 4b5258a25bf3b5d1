"""Which values of a function are weights: its inputs, and what it makes of inputs alone.

A weight is an input, moved or cast (W^T); elementwise work and reductions of inputs (W * mask, W / |W|); or an input
plus the product of two others (W + A B, as LoRA adds). Everything else is computed from data. A function does not say
which of its inputs are data, so the input of its first layer looks like a weight too; whoever asks takes the operand
that was changed least.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp._src.autocast.cast_lists import FLOATS, MOVES
from jaxmp._src.programs import jaxprs


class Origin(NamedTuple):
    """How a value comes from the inputs of a function alone.

    Attributes:
      inputs: their numbers; none of a constant.
      moved: whether it is an input as it was given, moved and cast or not.
      product: the number of the matmul of two inputs that it is, scaled and moved or not; None if it is none.
      repeated: whether it is an input whose elements were repeated, as those of a bias.
      made_of: the numbers of the matmuls whose products were added to it.
    """

    inputs: frozenset[int]
    moved: bool = True
    product: int | None = None
    repeated: bool = False
    made_of: frozenset[int] = frozenset()

    @property
    def is_weight(self) -> bool:
        """Whether it may be the weight of a matmul."""
        return bool(self.inputs) and self.product is None


CONSTANT = Origin(frozenset())


def number_of_weight(operands: Sequence[Origin | None]) -> int | None:
    """Which of the first two operands of a matmul is the weight: the one less changed, or the second (x @ w)."""
    found = [(not o.moved, -i) for i, o in enumerate(operands[:2]) if o is not None and o.is_weight]
    return -min(found)[1] if found else None


def of_matmul(operands: Sequence[Origin | None], number: int) -> Origin | None:
    """The origin of the result of matmul `number`: a product of two inputs may be added to a weight."""
    lhs, rhs = operands
    if lhs is None or rhs is None or not (lhs.is_weight and rhs.is_weight):
        return None
    return Origin(lhs.inputs | rhs.inputs, moved=False, product=number)


def of_result(eqn: Any, operands: Sequence[Origin | None]) -> Origin | None:
    """The origin of what an equation without functions inside makes; None of what is computed from data."""
    known = [o for o in operands if o is not None]
    if len(known) < len(operands):
        return None
    name = eqn.primitive.name
    moves = name in MOVES or name == "convert_element_type"
    works = name in jaxprs.ELEMENTWISE or moves
    products = {o.product for o in known} - {None}
    of_inputs = Origin(
        frozenset().union(*(o.inputs for o in known)),
        moved=moves and all(o.moved for o in known),
        repeated=any(o.repeated for o in known) or _repeats(eqn),
        made_of=frozenset().union(*(o.made_of for o in known)),
    )
    if not products:
        without_floats = not any(getattr(v.aval, "dtype", None) in FLOATS for v in eqn.invars)
        return of_inputs if works or without_floats or name.startswith("reduce_") else None
    if len(products) > 1 or not works:
        return None
    product = products.pop()
    if not any(o.inputs for o in known if o.product is None):  # scaled by constants, or moved
        return of_inputs._replace(moved=False, product=product)
    return of_inputs._replace(made_of=of_inputs.made_of | {product}) if _is_sum_with_weight(eqn, known) else None


def _repeats(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and 1 <= eqn.invars[0].aval.size < eqn.outvars[0].aval.size


def _is_sum_with_weight(eqn: Any, operands: Sequence[Origin]) -> bool:
    """Whether an equation adds a product to a matrix that is made of other inputs."""
    if eqn.primitive.name not in ("add", "sub", "add_any") or len({v.aval.shape for v in eqn.invars}) > 1:
        return False
    part, weight = operands if operands[1].product is None else operands[::-1]
    return weight.is_weight and not weight.repeated and not part.inputs & weight.inputs
