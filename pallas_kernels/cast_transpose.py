"""The cast of a tensor to fp8, the transpose of the cast, and the amax, in one read. An fp8 layer needs all three.

    q = fp8(clip(x * scale))        q.T        amax = max |x|

XLA needs two passes: it reads `x` for the amax and the cast, then `q` for the transpose. For a bfloat16 tensor these
are 2 + 1 + 1 + 1 bytes per element instead of 2 + 1 + 1; for float32, 7 instead of 6; and more if XLA computes the amax
in a separate pass.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes


def cast_transpose_amax(
    x: Float[Array, "M N"], scale: Float[Array, ""], dtype: Any, *, backend: str = "auto"
) -> tuple[Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """fp8(clip(x * scale)), its transpose, and max |x|, in one read of x.

    Equal bit for bit to `pallas_kernels.reference.cast_transpose_amax` on every backend, except for the bits of NaNs.

    Args:
      x: [M, N] float32, bfloat16 or float16. The kernel supports sizes that are multiples of 64; for other sizes "auto"
        uses XLA.
      scale: float32[], multiplies before the cast.
      dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      backend: "auto" (the kernel if it can run, else xla), "xla", "mosaic" or "interpret"; see
        `pallas_kernels.backend`.

    Returns:
      (q [M, N], q.T [N, M], amax float32[]). Values beyond the range, also inf, saturate; NaN stays NaN. amax is that
      of x before the scale; inf if any element is inf or NaN; 0.0 for an empty array. Under plain jit with x split over
      devices, q is split like x, q.T is split like the transpose of x, and amax is that of the whole array. In
      shard_map and pmap all three are those of the device.

    Raises:
      TypeError: x, scale or dtype of another dtype than these.
      ValueError: x is not a matrix; a backend that cannot run, with the reason.

    Example:
      >>> q, q_t, amax = cast_transpose_amax(jnp.array([[1.0, -300.0]]), jnp.float32(2.0), jnp.float8_e4m3fn)
      >>> q.tolist(), q_t.shape, float(amax)
      ([[2.0, -448.0]], (2, 1), 300.0)
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    passes.check("cast_transpose_amax", x, scale, dtype)
    plan = passes.Pass("cast_transpose_amax", None, 1, jnp.dtype(dtype), rows=1)
    return passes.run(plan, [x, scale], backend)[:3]
