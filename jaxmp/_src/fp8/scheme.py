"""What every recipe says of itself; the layers, the matmul and the optimizer ask it, and know no recipe by its class.

A new recipe is a class in one file, which says what differs from `Recipe`. `jaxmp/fp8.py` hands it on.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the tensors of a matmul are cast to a narrow dtype, and multiplied.

    Attributes:
      has_state: whether its scales come from earlier steps: they are leaves of the params, of the names in `leaves`,
        and the optimizer moves them.
      rounds_at_random: whether a gradient is rounded at random, with a key.
    """

    @property
    def has_state(self) -> bool:
        return bool(self.leaves())

    @property
    def rounds_at_random(self) -> bool:
        return False

    def leaves(self) -> dict[str, float]:
        """Names and first values of the scale leaves of a layer, in the order lhs, rhs, grad; empty without state."""
        return {}

    def dtype(self, *, backward: bool = False) -> Any:
        """The dtype of activations and weights, or of gradients (`backward`)."""
        raise NotImplementedError


def has_state(recipe: Any) -> bool:
    """Whether `recipe` is one with state; False for None, which is no recipe."""
    return isinstance(recipe, Recipe) and recipe.has_state
