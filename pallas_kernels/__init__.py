"""Pallas kernels for passes over memory that XLA does not fuse; usable without `jaxmp`.

One idea per file:

- `reference`: every function in plain jax.numpy; it is both the oracle of the tests and the "xla" backend;
- `backend`: what this device and this jax version can run, and the argument `backend=`: "auto" (mosaic if it can run,
  else xla), or a name; a named backend that cannot run raises and says why;
- `tiles`: the pass over a matrix that casts, transposes and takes the amax; `passes`: the same for any rank, on meshes
  and under vmap;
- `leaves`, `launch`, `multi_tensor`: a kernel over many leaves of a tree; `tree`: the same for whole trees; `moments`:
  optimizer state in 16 or 8 bits;
- `mosaic`: names of Mosaic GPU that Pallas does not hand on; `aligned`, `groups`, `transposes` work on registers;
- one file for each kernel or family of kernels: `cast_transpose`; `unscale`, `cast`, `update`; `grouped`.

This package is the bottom layer: nothing here imports `jaxmp`, and an import contract checks that.
"""

from pallas_kernels.cast import cast_tree as cast_tree
from pallas_kernels.cast_transpose import cast_transpose_amax as cast_transpose_amax
from pallas_kernels.unscale import gradient_norm as gradient_norm, unscale_and_check as unscale_and_check
from pallas_kernels.update import (
    AdamW as AdamW,
    Lion as Lion,
    Momentum as Momentum,
    Weight as Weight,
    multi_tensor_update as multi_tensor_update,
)
