"""flax.nnx: gradients of a scaled loss of a module with state, and undoing the state of a skipped step.

`nnx.Optimizer(model, jaxmp.mixed_precision(...), wrt=nnx.Param)` works unchanged; `cast_to_param` gives the module its
16-bit params after the optimizer was made from float32. nnx modules also have state that changes in the forward pass:
BatchNorm's statistics and the counts of Dropout's keys. `value_and_grad` passes this state through the microbatches and
writes it back into the module; `restore_if_skipped` restores the statistics after a skipped step.
"""

from jaxmp._src.bridges.nnx import (
    Optimizer as Optimizer,
    cast_to_param as cast_to_param,
    restore_if_skipped as restore_if_skipped,
    snapshot as snapshot,
    value_and_grad as value_and_grad,
)
from jaxmp._src.fp8.nnx_layers import (
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8RaggedDot as Fp8RaggedDot,
    Fp8Scale as Fp8Scale,
    to_fp8 as to_fp8,
)
