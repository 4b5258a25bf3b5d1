"""flax.linen: fp8 layers, and a TrainState whose step goes through `jaxmp.apply_gradients`.

`Fp8DotGeneral` is for the `dot_general_cls=` of flax's layers; `jaxmp.fp8.autocast` puts it into an unchanged model.

flax's own TrainState works with `mixed_precision` too. jaxmp's TrainState writes 16-bit params directly, passes extra
arguments to the optimizer, and does not change batch_stats and `step` in a skipped step.
"""

from jaxmp._src.bridges.linen import TrainState as TrainState
from jaxmp._src.fp8.linen_layers import (
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8RaggedDot as Fp8RaggedDot,
)
