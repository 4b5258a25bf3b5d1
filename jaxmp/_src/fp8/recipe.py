"""What every recipe says of itself; the layers, the matmul and the optimizer ask it, and know no recipe by its class.

A new recipe is a class in one file, which says what differs from `Recipe`. `jaxmp/fp8.py` hands it on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from jaxtyping import Array

from jaxmp._src.fp8 import gemms, scale_equations
from jaxmp._src.fp8.casts import Cast, Role, Tensor
from jaxmp._src.fp8.gemms import Gemm, Product

_PRODUCTS = {"lhs": ("fprop", "wgrad"), "rhs": ("fprop", "dgrad"), "grad": ("dgrad", "wgrad")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the tensors of a matmul are cast to a narrow dtype, and multiplied.

    Attributes:
      dgrad, wgrad: "bfloat16" leaves this product in 16 bits; None: it is as narrow as the forward one.
      has_state: whether its scales come from earlier steps: they are leaves of the params, of the names in `leaves`,
        and the optimizer moves them.
      rounds_at_random: whether a gradient is rounded at random, with a key.
      has_one_scale: whether each tensor has one scale, as the products of experts need it.
      folds_axes: whether it takes operands of three axes only, lhs [B, M, K] and rhs [B, K, N].
    """

    has_one_scale: ClassVar[bool] = False
    folds_axes: ClassVar[bool] = False

    dgrad: Literal["bfloat16"] | None = None
    wgrad: Literal["bfloat16"] | None = None

    def __post_init__(self) -> None:
        for name in ("dgrad", "wgrad"):
            if getattr(self, name) not in (None, "bfloat16"):
                raise ValueError(
                    f'{name} is None, or "bfloat16" to leave this product in 16 bits; got {getattr(self, name)!r}'
                )

    def narrow(self, role: Role) -> tuple[str, ...]:
        """The products that read a tensor in the narrow dtype."""
        return tuple(name for name in _PRODUCTS[role] if getattr(self, name, None) is None)

    @property
    def has_state(self) -> bool:
        return bool(self.leaves())

    @property
    def rounds_at_random(self) -> bool:
        return False

    def leaves(self) -> dict[str, float]:
        """Names and first values of the scale leaves of a layer, in the order lhs, rhs, grad; empty without state."""
        return {}

    def cast(self, gemm: Gemm, tensor: Tensor, products: Sequence[str]) -> Cast:
        """A tensor of the matmul `gemm`, for these products of the three: one or both that read it."""
        raise NotImplementedError

    def multiply(self, a: Any, b: Any, product: Product) -> Array:
        """The result of a product of two operands, in the order (batch, free axes of a, free axes of b)."""
        raise NotImplementedError

    def dtype(self, *, backward: bool = False) -> Any:
        """The dtype of activations and weights, or of gradients (`backward`)."""
        raise NotImplementedError


class TensorRecipe(Recipe):
    """What the recipes with one scale for each tensor share."""

    has_one_scale: ClassVar[bool] = True

    fp8_format: scale_equations.Format
    power_of_two: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        scale_equations.check_format(self.fp8_format)

    def dtype(self, *, backward: bool = False) -> Any:
        """The fp8 dtype of activations and weights, or of gradients (`backward`).

        Example:
          >>> import jaxmp
          >>> jaxmp.fp8.DelayedScaling().dtype(backward=True).__name__
          'float8_e5m2'
        """
        return scale_equations.dtype_of(self.fp8_format, backward=backward)

    def multiply(self, a: gemms.Quantized, b: gemms.Quantized, product: Product) -> Array:
        """See `Recipe.multiply`."""
        return gemms.multiply(a, b, product, power_of_two=self.power_of_two)


def has_state(recipe: Any) -> bool:
    """Whether `recipe` is one with state; False for None, which is no recipe."""
    return isinstance(recipe, Recipe) and recipe.has_state


def check(recipe: Any) -> None:
    """Raises a TypeError unless `recipe` is one."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"a recipe must be one of jaxmp.fp8, such as DelayedScaling(), or a dict from path patterns to them; got "
            f"{recipe!r}."
        )
