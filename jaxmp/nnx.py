"""flax.nnx: gradients of a scaled loss of a module with state, and steps that can be taken back.

`nnx.Optimizer(model, jaxmp.mixed_precision(...), wrt=nnx.Param)` works as it is; `cast_to_param` gives the module its
16-bit params after the optimizer was made from float32. What nnx adds is state that moves in the forward pass: the
statistics of BatchNorm and the counts of Dropout's keys. `value_and_grad` threads them through the microbatches and
writes them back into the module; `restore_if_skipped` takes the statistics of a skipped step back.
"""

from jaxmp._src.bridges.nnx import (
    Optimizer as Optimizer,
    cast_to_param as cast_to_param,
    restore_if_skipped as restore_if_skipped,
    snapshot as snapshot,
    value_and_grad as value_and_grad,
)
from jaxmp._src.fp8.nnx_gated_mlp import GatedMLP as GatedMLP
from jaxmp._src.fp8.nnx_layers import (
    Fp8ConvGeneralDilated as Fp8ConvGeneralDilated,
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8Einsum as Fp8Einsum,
    Fp8RaggedDot as Fp8RaggedDot,
    Fp8Scale as Fp8Scale,
    to_fp8 as to_fp8,
)
