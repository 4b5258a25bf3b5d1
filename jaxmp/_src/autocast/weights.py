"""Which values of a function are weights: its inputs, and values that it computes from inputs alone.

A weight is one of these: an input, moved or cast (W^T); a value that any operation except a matmul computes from inputs
(W * mask, W / |W|, qr(W)), also scaled by a computed number (W / sigma); or an input plus the product of two others (W
+ A B, as in LoRA). Everything else is computed from data. A function does not say which of its inputs are data, so the
input of its first layer looks like a weight too. The caller therefore takes the operand that was changed least.

For the same reason, a product of two inputs may be a weight (A B) or a first layer (x W). It counts as a weight if it
is multiplied with a computed value that depends on neither of the two: h (A B).

x w + b, the layer of one row of data, has the form of W + A B, because b has as many rows as x. So has a row from which
a hypernetwork makes a matrix. Such a value (`of_one_row`) is data, except where a matmul uses it as a matrix.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp._src.autocast.cast_lists import MOVES
from jaxmp._src.programs import jaxprs

UNKNOWN = -1  # in place of the inputs of a value in a loop, of which only the loop knows how it is made


class Origin(NamedTuple):
    """How a value comes from the inputs of a function.

    Attributes:
      inputs: the numbers of those on which it depends; none of a constant.
      computed: whether it is computed from data.
      moved: whether it is an input as it was given, moved and cast or not.
      products: the numbers of the matmuls whose product it is, of inputs alone, scaled and moved or not.
      repeated: whether it is an input whose elements were repeated, as those of a bias.
      made_of: the numbers of the matmuls whose products were added to it.
      of_matrices: whether these products are of matrices, or of stacks of them.
      of_one_row: whether a product with an axis of one, as of one row of data, is a part of it.
    """

    inputs: frozenset[int]
    computed: bool = False
    moved: bool = True
    products: frozenset[int] = frozenset()
    repeated: bool = False
    made_of: frozenset[int] = frozenset()
    of_matrices: bool = True
    of_one_row: bool = False

    @property
    def is_of_inputs(self) -> bool:
        """Whether it is an input, or made of inputs by more than a product."""
        return bool(self.inputs) and not self.computed and not self.products

    @property
    def is_table(self) -> bool:
        """Whether an index may choose rows of weights from it."""
        return self.is_of_inputs and not self.of_one_row

    @property
    def is_data(self) -> bool:
        """Whether it is data, unless a matmul uses it as a matrix."""
        return self.computed or self.of_one_row


CONSTANT = Origin(frozenset())

# What a product is after these, with constants, is still that product.
_KEEPS_PRODUCT = (
    jaxprs.REARRANGES
    | jaxprs.HANDS_ON
    | frozenset("convert_element_type broadcast_in_dim slice dynamic_slice mul div neg stop_gradient".split())
)


def computed(operands: Sequence[Origin]) -> Origin:
    """The origin of what is computed from operands of which one may be data."""
    return Origin(_inputs_of(operands), computed=True)


def number_of_weight(eqn: Any, operands: Sequence[Origin]) -> int | None:
    """Which of the first two operands of a matmul is the weight; None of two computed values.

    It is the one less changed, or the second (x @ w); or a product of two inputs, neither of which the other knows.
    """
    fits = [not o.of_one_row or _is_matrix(eqn, i) for i, o in enumerate(operands[:2])]
    found = [(not o.moved, -i) for i, o in enumerate(operands[:2]) if o.is_of_inputs and fits[i]]
    if found:
        return -min(found)[1]
    for i, (weight, data) in enumerate(zip(operands[:2], operands[1::-1], strict=True)):
        apart = UNKNOWN not in data.inputs and not data.inputs & weight.inputs
        if weight.products and weight.of_matrices and fits[i] and data.is_data and apart:
            return i
    return None


def of_matmul(eqn: Any, operands: Sequence[Origin], number: int) -> Origin:
    """The origin of the result of matmul `number`: a product of two inputs may be weights, or be added to a weight."""
    if any(o.computed for o in operands) or not all(o.is_of_inputs or o.products for o in operands):
        return computed(operands)
    return Origin(
        _inputs_of(operands),
        moved=False,
        products=frozenset([number]).union(*(o.products | o.made_of for o in operands)),
        of_matrices=_is_of_matrices(eqn) and all(o.of_matrices for o in operands),
        of_one_row=any(o.of_one_row for o in operands) or any(min(_free(eqn, i), default=1) == 1 for i in (0, 1)),
    )


def of_result(eqn: Any, operands: Sequence[Origin]) -> Origin:
    """The origin of what an equation without matmuls makes."""
    name = eqn.primitive.name
    if name in ("mul", "div") and (scaled := _without_numbers(eqn, operands)):
        operands = scaled
    if any(o.computed for o in operands) or name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        return computed(operands)
    of_inputs = Origin(
        _inputs_of(operands),
        moved=(name in MOVES or name == "convert_element_type") and all(o.moved for o in operands),
        repeated=any(o.repeated for o in operands) or _repeats(eqn),
        made_of=frozenset().union(*(o.made_of for o in operands)),
        of_one_row=any(o.of_one_row for o in operands),
    )
    products = [o for o in operands if o.products]
    others = [o for o in operands if o.inputs and not o.products]
    if not products:
        return of_inputs
    if len(products) == 1 and not others and name in _KEEPS_PRODUCT:
        return products[0]._replace(inputs=of_inputs.inputs)
    if len(products) == 1 and _is_sum_with_weight(eqn, operands):
        return of_inputs._replace(made_of=of_inputs.made_of | products[0].products)
    return computed(operands)


def _inputs_of(operands: Sequence[Origin]) -> frozenset[int]:
    return frozenset().union(*(o.inputs for o in operands))


def _without_numbers(eqn: Any, operands: Sequence[Origin]) -> list[Origin]:
    """The operands that are arrays: what is scaled by a number is what it was."""
    return [o for v, o in zip(eqn.invars, operands, strict=True) if v.aval.shape]


def _free(eqn: Any, i: int) -> list[int]:
    """The sizes of the axes that the result of a `dot_general` has from operand `i` alone."""
    contracted, batch = (numbers[i] for numbers in eqn.params["dimension_numbers"])
    return [n for axis, n in enumerate(eqn.invars[i].aval.shape) if axis not in (*contracted, *batch)]


def _is_matrix(eqn: Any, i: int) -> bool:
    """Whether operand `i` of a matmul has rows and columns there: one row of data has one of them."""
    if eqn.primitive.name != "dot_general":
        return i == 1  # the kernel
    contracted = eqn.params["dimension_numbers"][0][i]
    return min(math.prod(_free(eqn, i)), math.prod(eqn.invars[i].aval.shape[a] for a in contracted)) > 1


def _is_of_matrices(eqn: Any) -> bool:
    """Whether a `dot_general` multiplies matrices, or stacks of them: data often has more axes."""
    (lhs, rhs), (batch, _) = eqn.params["dimension_numbers"]
    return len(lhs) == len(rhs) == 1 and all(v.aval.ndim == len(batch) + 2 for v in eqn.invars[:2])


def _repeats(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and 1 <= eqn.invars[0].aval.size < eqn.outvars[0].aval.size


def _is_sum_with_weight(eqn: Any, operands: Sequence[Origin]) -> bool:
    """Whether an equation adds a product to a matrix that is made of other inputs."""
    if eqn.primitive.name not in ("add", "sub", "add_any") or len({v.aval.shape for v in eqn.invars}) > 1:
        return False
    part, weight = operands if operands[0].products else operands[::-1]
    return weight.is_of_inputs and not weight.repeated and not part.inputs & weight.inputs
