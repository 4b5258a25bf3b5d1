"""What every recipe says of itself; the layers, the matmul and the optimizer ask it, and know no recipe by its class.

A new recipe is a class in one file, which says what differs from `Recipe`. `jaxmp/fp8.py` hands it on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxtyping import Array

from jaxmp._src.fp8.gemms import Gemm, Product
from jaxmp._src.fp8.made import Made

Role = Literal["lhs", "rhs", "grad"]


class Cast(NamedTuple):
    """A tensor that was cast for the products that read it.

    Attributes:
      of: by the name of the product, the operand that `Recipe.multiply` takes.
      amax: of the tensor, in the dtype of its scale leaf; None without a leaf.
      sums: of a gradient whose layer has a bias: float32 sums over the rows; else None.
    """

    of: dict[str, Any]
    amax: Array | None = None
    sums: Array | None = None


_PRODUCTS = {"lhs": ("fprop", "wgrad"), "rhs": ("fprop", "dgrad"), "grad": ("dgrad", "wgrad")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the tensors of a matmul are cast to a narrow dtype, and multiplied.

    Attributes:
      dgrad, wgrad: "bfloat16" leaves this product in 16 bits; None: it is as narrow as the forward one.
      has_state: whether its scales come from earlier steps: they are leaves of the params, of the names in `leaves`,
        and the optimizer moves them.
      rounds_at_random: whether a gradient is rounded at random, with a key.
    """

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

    @property
    def folds_axes(self) -> bool:
        """Whether it takes operands of three axes only, lhs [B, M, K] and rhs [B, K, N] (`block_matmul`)."""
        return False

    def cast(
        self,
        gemm: Gemm,
        role: Role,
        x: Array,
        products: Sequence[str],
        *,
        leaf: Array | None = None,
        made: Made | None = None,
        seed: Array | None = None,
    ) -> Cast:
        """`x`, which is lhs, rhs or the gradient of the result in `gemm`, for these products of the three.

        Args:
          gemm: the matmul.
          role: what `x` is.
          x: the tensor in its own dtype.
          products: the names of one or both products that read it.
          leaf: its scale leaf; None without state.
          made: what made lhs or the gradient, if a kernel can compute it.
          seed: uint32[2] for the gradient of a recipe that rounds at random.
        """
        raise NotImplementedError

    def multiply(self, a: Any, b: Any, product: Product) -> Array:
        """The result of a product of two operands, in the order (batch, free axes of a, free axes of b)."""
        raise NotImplementedError

    def dtype(self, *, backward: bool = False) -> Any:
        """The dtype of activations and weights, or of gradients (`backward`)."""
        raise NotImplementedError


def has_state(recipe: Any) -> bool:
    """Whether `recipe` is one with state; False for None, which is no recipe."""
    return isinstance(recipe, Recipe) and recipe.has_state
