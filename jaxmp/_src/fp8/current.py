"""Current scaling: the scale of a tensor from its own amax, as the cast needs it.

x is read twice, for its amax and for its cast. `delayed` says how an amax becomes a scale.
"""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxmp._src.fp8 import casts, scale_equations
from jaxmp._src.fp8.casts import Cast, Tensor
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.recipe import TensorRecipe
from jaxmp._src.fp8.scale_equations import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(TensorRecipe):
    """The scale of a tensor from its own amax; no state.

        scale = fp8_max / max(amax, amax_epsilon)

    and 1 where amax is 0, inf or NaN. With `power_of_two=False` bit for bit TransformerEngine's, with
    `power_of_two=True` its option of that name. A matmul takes such scales from 2^-63 to 2^63: of a tensor with an amax
    below 5e-17 more values become 0, and with one above 4e21 the result is NaN. `RowwiseScaling` has float32's range.

    Args:
      fp8_format: `"HYBRID"` (e5m2 for gradients, else e4m3fn) or `"E4M3"`.
      power_of_two: whether scales are powers of two.
      amax_epsilon: the smallest amax, >= 0; it bounds the scale of tensors that are almost zero. 0 is no bound.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits.

    Raises:
      ValueError: an argument outside its range, named in the message.

    Example:
      >>> import jax.numpy as jnp
      >>> CurrentScaling().scale(jnp.array([3.0, 0.0])).tolist()
      [128.0, 1.0]

    References:
      transformer_engine/common/recipe/recipe_common.cuh.
    """

    fp8_format: Format = "HYBRID"
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        scale_equations.check_epsilon(self.amax_epsilon)

    def cast(self, gemm: Gemm, tensor: Tensor, products: Sequence[str]) -> Cast:
        """See `Recipe.cast`: one cast, with the scale of the tensor's own amax, for both products."""
        return Cast(dict.fromkeys(products, casts.by_own_amax(gemm, tensor)))

    def scale(self, amax: Float[Array, "..."], *, backward: bool = False) -> Float[Array, "..."]:
        """The scale for the cast of a tensor.

        Args:
          amax: float32 of any shape, max |x| of each tensor.
          backward: whether the tensors are gradients: e5m2 under `"HYBRID"`.

        Returns:
          float32 of the same shape.

        Example:
          >>> import jax.numpy as jnp
          >>> float(CurrentScaling(power_of_two=False).scale(jnp.float32(3.0)))
          149.3333282470703
        """
        return scale_equations.current_scale(
            amax, self.dtype(backward=backward), power_of_two=self.power_of_two, amax_epsilon=self.amax_epsilon
        )
