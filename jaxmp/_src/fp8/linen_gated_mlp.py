"""A gated MLP of flax.linen in fp8, with the params of three Dense layers."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.fp8 import layers, linen_layers, recipes


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) in fp8 as one operation, without biases, as in Llama; see `jaxmp.fp8.gated_mlp`.

    It casts x once for both layers that read it, and moves about seven eighths of the bytes that three layers move
    beside their matmuls. Its params are those of `nn.Dense(..., use_bias=False)` layers with the names gate, up and
    down in `jaxmp.fp8.autocast`, so weights and scales of one fit the other. Without fp8, under
    `jaxmp.fp8.autocast(enabled=False)`, it is these three layers.

    Attributes:
      hidden: features of gate and up.
      features: of the result; None: those of x.
      recipe: a `DelayedScaling` (give the same to `jaxmp.mixed_precision`), or a recipe without state, with which it is
        three layers.
      dtype: of x and the result; None: that of x and the kernels, and under autocast its dtype.
      param_dtype: of the kernels.
      kernel_init: as of `nn.Dense`.

    Example:
      >>> import jax
      >>> params = GatedMLP(64).init(jax.random.key(0), jnp.ones((16, 32)))["params"]
      >>> sorted(params), sorted(params["gate"]), params["down"]["kernel"].shape
      (['down', 'gate', 'up'], ['Fp8DotGeneral_0', 'kernel'], (64, 32))
    """

    hidden: int
    features: int | None = None
    recipe: Any = recipes.DelayedScaling()
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    is_in_fp8: ClassVar[bool] = True  # for autocast

    @nn.compact
    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        """The MLP of x."""
        width = x.shape[-1]
        layer = functools.partial(_Layer, self.recipe, self.kernel_init, self.param_dtype)
        gate = layer(name="gate")(width, self.hidden)
        up = layer(name="up")(width, self.hidden)
        down = layer(name="down")(self.hidden, self.features or width)
        kernels = [kernel for kernel, _ in (gate, up, down)]
        leaves = [scales for _, scales in (gate, up, down)]
        path, key = "/".join(self.path), linen_layers.rounding_key(self)
        with layers.switched(layers.is_enabled() and not self.is_initializing()):  # init often has a batch of one
            return layers.gated_mlp(self.recipe, leaves, x, kernels, self.dtype, layer=path, key=key)


class _Layer(nn.Module):
    """The params of one layer: (kernel, scale leaves)."""

    recipe: Any
    kernel_init: Callable[..., Any]
    param_dtype: Any

    @nn.compact
    def __call__(self, n_inputs: int, n_outputs: int) -> tuple[Array, list[Array]]:
        kernel = self.param("kernel", self.kernel_init, (n_inputs, n_outputs), self.param_dtype)
        return kernel, _Leaves(self.recipe, name="Fp8DotGeneral_0")()


class _Leaves(nn.Module):
    """The scale leaves of one layer, where `Fp8DotGeneral` has them."""

    recipe: Any

    @nn.compact
    def __call__(self) -> list[Array]:
        return linen_layers.leaves_of(self)
