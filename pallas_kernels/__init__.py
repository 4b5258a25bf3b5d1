"""Kernels in Pallas for the passes over memory that XLA does not fuse by itself; usable without `jaxmp`.

One idea to a file:

- `reference`: every function in plain jax.numpy, at once the oracle of the tests and the "xla" backend;
- `backend`: what this device and this jax version can run, and `backend=`: "auto" (mosaic where it can run, else xla)
  or the name of one, which raises where it cannot serve and says why;
- `tiles`: the pass over a matrix that casts, transposes and takes the amax; `passes`: the same for any rank, on meshes
  and under vmap;
- `leaves`, `launch`, `multi_tensor`: a kernel over many leaves of a tree; `meshes`: the same where they are split over
  devices; `tree`: the same for whole trees; `moments`: optimizer state in few bits;
- one file for each kernel or family: `cast_transpose`, `activation`; `unscale`, `cast`, `update`.

It is the bottom layer: nothing here imports `jaxmp`, and an import contract holds that.
"""

from pallas_kernels.activation import (
    activation_cast_transpose_amax as activation_cast_transpose_amax,
    activation_grad_cast_transpose_amax as activation_grad_cast_transpose_amax,
    silu_gated_cast_transpose_amax as silu_gated_cast_transpose_amax,
    silu_gated_grad_cast_transpose_amax as silu_gated_grad_cast_transpose_amax,
)
from pallas_kernels.backend import why_no_kernels as why_no_kernels
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
