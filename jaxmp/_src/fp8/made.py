"""How an array that an fp8 layer casts was made, if a kernel can make its cast from what it was made of.

A norm or an activation before a layer is computed in the pass that casts its result. Then nothing else reads the result
in 16 bits, and XLA does not write it. The layer still gets the ordinary array, and the derivative is that of the array.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from jaxtyping import Array

from jaxmp._src.fp8 import activations, norms
from pallas_kernels import passes


class Made(Protocol):
    """What made an array: `norms.Made` or `activations.Made`. A pytree.

    Attributes:
      of_products: whether all its arrays are results of matmuls and biases.
    """

    of_products: ClassVar[bool]

    def plan(self, dtype: Any, rounded: Any, rows: int) -> passes.Pass:
        """The pass that casts the array, which has the dtype `rounded`, to the fp8 `dtype`."""
        ...

    def arguments(self) -> list[Array]:
        """The arguments of the pass, but for the scale."""
        ...


def found(x: Array, summed: Sequence[int]) -> Made | None:
    """What made `x`, which a layer sums over these axes; None if the layer casts `x` itself."""
    return norms.made_by_norm(x, summed) or activations.made_by_activation(x, summed)
