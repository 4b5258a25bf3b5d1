"""fp8 training, in one place: recipes, the casts and matmuls, the layers' switch, and the optimizer's part.

    recipe = jaxmp.fp8.DelayedScaling()
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bf16", recipe=recipe)       # or the policy "fp8": float32 params
    with jaxmp.fp8.autocast(recipe):                                           # linen; nnx: jaxmp.nnx.to_fp8(model)
        params32 = model.init(key, x)["params"]

A matmul in fp8 multiplies 8-bit numbers of 3 or 2 bits of mantissa; a scale per tensor moves each tensor into their
range. Where the scale comes from is the *recipe*; with `DelayedScaling` it comes from the largest magnitudes (amaxes)
of earlier steps. The scales are leaves of the params, the amaxes are their gradients, the histories lie in `opt_state`:
so fp8 works in any loop, and never meets clipping, weight decay, Adam or the loss scale.

In this order: `DelayedScaling`, `CurrentScaling`, `BlockScaling`, `MXFP8` (the recipes) -> `dot_general`, `einsum`,
`quantize`, `dequantize` (what runs) -> `autocast` (where) -> `update_amax`, `split_fp8` (how scales move;
`mixed_precision` joins them) -> `get_scales`, `resize_history` (looking at them, and restoring). `backends` says what
serves all this on the machine at hand.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from jaxtyping import Array, Float

from jaxmp._src.bridges import linen_fp8
from jaxmp._src.fp8 import einsum as einsum_lib, layers
from jaxmp._src.fp8.backends import backends as backends
from jaxmp._src.fp8.blocks import MXFP8 as MXFP8, BlockScaling as BlockScaling
from jaxmp._src.fp8.layers import is_enabled as is_enabled, promote_all_but_kernel as promote_all_but_kernel
from jaxmp._src.fp8.matmul import (
    FallbackWarning as FallbackWarning,
    Scales as Scales,
    dot_general as dot_general,
    why_not_fp8 as why_not_fp8,
)
from jaxmp._src.fp8.recipes import (
    AmaxState as AmaxState,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
)
from jaxmp._src.fp8.scale_leaves import is_scale as is_scale
from jaxmp._src.fp8.stored_kernels import load_weights as load_weights
from jaxmp._src.numerics.quantize import dequantize as dequantize, quantize as quantize
from jaxmp._src.step.fp8_scales import (
    get_scales as get_scales,
    resize_history as resize_history,
    split_fp8 as split_fp8,
    update_amax as update_amax,
)
from jaxmp._src.step.states import Fp8State as Fp8State, SplitFp8State as SplitFp8State


@contextlib.contextmanager
def autocast(recipe: Any = None, *, enabled: bool = True, filter: layers.Filter = None) -> Iterator[None]:
    """A region in which linen's Dense, DenseGeneral and Einsum layers run in fp8, or in which no layer does.

    Enter it both where the model is initialized (the layers get their scale leaves there) and where the loss is
    computed; inside the jitted function, or round the call that traces it. Attention's projections are DenseGeneral
    layers. A layer that was given a dot_general of its own keeps it. With `enabled=False`, layers that hold fp8
    dot_generals (of linen and nnx) run in the dtype of their inputs. The innermost region counts.

    Args:
      recipe: the recipe of these layers, default `DelayedScaling()`, or a dict from path globs to several; give the
        same to `jaxmp.mixed_precision`.
      enabled: False switches fp8 off.
      filter: which layers, by `(path, module) -> bool` or path globs such as `("*mlp*",)`; None for all but the first
        and the last layer with weights (embeddings and convolutions count), in the order in which they are called.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(16)])
      >>> with autocast():
      ...     params = model.init(jax.random.key(0), jnp.ones((16, 16)))["params"]
      >>> [name for name, layer in params.items() if "Fp8DotGeneral_0" in layer]
      ['layers_2']
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(layers.switched(enabled))
        recipe = DelayedScaling() if recipe is None else recipe
        layers.check_recipe(recipe)
        stack.enter_context(linen_fp8.intercept_layers(recipe, filter))
        yield


def einsum(
    subscripts: str,
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    *,
    recipe: Any,
    scales: Scales | None = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands as one fp8 `dot_general`.

    Args:
      subscripts: an explicit equation: each label once per operand, and in the result or in both operands.
      lhs, rhs, recipe, scales, preferred_element_type: as for `dot_general`.

    Returns:
      The result, axes in the order of the equation.

    Raises:
      ValueError: an equation that is not one GEMM.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((2, 16, 16)), jnp.ones((16, 4, 16))
      >>> einsum("btd,dhk->bthk", x, w, recipe=CurrentScaling()).shape
      (2, 16, 4, 16)
    """

    dot = functools.partial(dot_general, recipe=recipe, scales=scales, preferred_element_type=preferred_element_type)
    return einsum_lib.einsum_by(dot, subscripts, lhs, rhs)
