"""A gated MLP of flax.nnx in fp8, with the params of three Linear layers."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmp._src.fp8 import layers as layers_lib, recipes
from jaxmp._src.fp8.nnx_layers import Fp8DotGeneral, Fp8Scale as Fp8Scale

_DEFAULT = recipes.DelayedScaling()
_KERNEL_INIT = nnx.initializers.lecun_normal()


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) in fp8 as one operation, without biases, as in Llama; see `jaxmp.fp8.gated_mlp`.

    It casts x once for both layers that read it, and moves about seven eighths of the bytes that three layers move
    beside their matmuls. gate, up and down are `nnx.Linear(..., use_bias=False)` layers as `jaxmp.nnx.to_fp8` makes
    them, so weights and scales of one fit the other. Without fp8, under `jaxmp.fp8.autocast(enabled=False)`, it is
    these three layers.

    Args:
      in_features: of x.
      hidden: features of gate and up.
      features: of the result; None: those of x.
      recipe: a `DelayedScaling` (give the same to `jaxmp.mixed_precision`), or a recipe without state, with which it is
        three layers. `NVFP4()` draws from `rngs`: `nnx.Rngs(params=seed, rounding=seed)`.
      dtype: of x and the result; None: that of x and the kernels, and under autocast its dtype.
      param_dtype: of the kernels.
      kernel_init: as of `nnx.Linear`.
      rngs: for the kernels.

    Example:
      >>> mlp = GatedMLP(32, 64, rngs=nnx.Rngs(0))
      >>> mlp(jnp.ones((16, 32))).shape, mlp.down.kernel.shape, len(nnx.to_flat_state(nnx.state(mlp, Fp8Scale)))
      ((16, 32), (64, 32), 9)
    """

    is_in_fp8: ClassVar[bool] = True  # for autocast

    def __init__(
        self,
        in_features: int,
        hidden: int,
        features: int | None = None,
        *,
        recipe: Any = _DEFAULT,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = _KERNEL_INIT,
        rngs: nnx.Rngs,
    ):
        promote: Any = layers_lib.promote_all_but_kernel

        def layer(inputs: int, outputs: int, name: str) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                promote_dtype=promote,
                dot_general=Fp8DotGeneral(recipe, rngs=rngs, layer=name),
                rngs=rngs,
            )

        self.recipe, self.dtype = recipe, dtype
        self.gate = layer(in_features, hidden, "gate")
        self.up = layer(in_features, hidden, "up")
        self.down = layer(hidden, features or in_features, "down")

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        """The MLP of x."""
        parts: list[Any] = [self.gate, self.up, self.down]
        rngs = self.gate.dot_general.rngs
        return layers_lib.gated_mlp(
            self.recipe,
            [part.dot_general.leaves() for part in parts],
            x,
            [part.kernel.get_value() for part in parts],
            self.dtype,
            key=None if rngs is None else rngs(),
        )
