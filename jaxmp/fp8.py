"""fp8 training, in one place: recipes, the casts and matmuls, the layers' switch, and the optimizer's part.

    recipe = jaxmp.fp8.DelayedScaling()
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bf16", recipe=recipe)       # or the policy "fp8": float32 params
    with jaxmp.fp8.autocast(recipe):                                           # linen; nnx: jaxmp.nnx.to_fp8(model)
        params32 = model.init(key, x)["params"]

A matmul in fp8 multiplies 8-bit numbers with 3 or 2 bits of mantissa; a scale per tensor moves each tensor into their
range. The *recipe* says how the scale is computed. `DelayedScaling` computes it from the largest magnitudes (amaxes) of
earlier steps. The scales are leaves of the params, their gradients are records of the amaxes, and the histories are in
`opt_state`. So fp8 works in any loop, and clipping, weight decay, Adam and the loss scale do not change the scales.

In this order: `DelayedScaling`, `CurrentScaling`, `RowwiseScaling`, `BlockScaling`, `MXFP8`, `NVFP4`, `Int8` (the
recipes) -> `dot_general`, `einsum`, `ragged_dot`, `quantize`, `dequantize` (what runs) -> `autocast` (where),
`save_quantized` (what remat keeps) -> `freeze` (a base that nobody trains) -> `calibrate` (scales from one batch,
before the first step) -> `get_scales`, `with_scales`, `resize_history` (looking at them, and restoring). `backends`
says which backend runs each of these on this machine.
"""

from jaxmp._src.fp8.backends import backends as backends
from jaxmp._src.fp8.blocks import (
    MXFP8 as MXFP8,
    BlockScaling as BlockScaling,
    RowwiseScaling as RowwiseScaling,
)
from jaxmp._src.fp8.current import CurrentScaling as CurrentScaling
from jaxmp._src.fp8.delayed import DelayedScaling as DelayedScaling
from jaxmp._src.fp8.einsum import einsum as einsum
from jaxmp._src.fp8.int8 import Int8 as Int8
from jaxmp._src.fp8.layers import promote_all_but_kernel as promote_all_but_kernel
from jaxmp._src.fp8.linen_layers import autocast as autocast
from jaxmp._src.fp8.matmul import (
    FallbackWarning as FallbackWarning,
    dot_general as dot_general,
)
from jaxmp._src.fp8.nvfp4 import NVFP4 as NVFP4
from jaxmp._src.fp8.ragged_matmul import ragged_dot as ragged_dot
from jaxmp._src.fp8.remat import save_quantized as save_quantized
from jaxmp._src.fp8.scale_leaves import Scales as Scales, is_scale as is_scale, with_scales as with_scales
from jaxmp._src.numerics.frozen_kernel import freeze as freeze
from jaxmp._src.numerics.quantize import dequantize as dequantize, quantize as quantize
from jaxmp._src.step.calibrate import calibrate as calibrate
from jaxmp._src.step.scales import get_amaxes as get_amaxes, get_scales as get_scales, resize_history as resize_history
