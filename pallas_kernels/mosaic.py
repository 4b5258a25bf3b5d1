"""Names of Mosaic GPU that `jax.experimental.pallas.mosaic_gpu` does not hand on: the one file that knows them.

Functions in `inline_mgpu` get the registers of an array, and the operations of MLIR work on these. Import this file in
the function that uses it: only jax versions with kernels have all of these names.
"""

from jax.experimental.mosaic.gpu import (
    FragmentedArray,
    c as constant,
    thread_idx,
    utils,
    when,
)
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

__all__ = ["FragmentedArray", "Tiling", "arith", "constant", "ir", "memref", "thread_idx", "utils", "vector", "when"]
