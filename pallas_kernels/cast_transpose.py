"""Cast to fp8, the same transposed, and the amax, in one read: what a layer needs of each of its tensors.

    q = fp8(clip(x * scale))        q.T        amax = max |x|

XLA does this in two passes, and reads `x` twice: once for the amax and the cast, then `q` for its transpose. Of a
bfloat16 tensor that is 2 + 1 + 1 + 1 bytes an element instead of 2 + 1 + 1; in float32 7 instead of 6, and more where
XLA takes the amax in a pass of its own.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes


def cast_transpose_amax(
    x: Float[Array, "M N"], scale: Float[Array, ""], dtype: Any, *, backend: str = "auto"
) -> tuple[Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """fp8(clip(x * scale)), its transpose, and max |x|, in one read of x.

    Equal to `pallas_kernels.reference.cast_transpose_amax` bit for bit (but for the bits of NaNs) on every backend.

    Args:
      x: [M, N] float32, bfloat16 or float16. The kernel serves multiples of 64; "auto" runs all else by XLA.
      scale: float32[], multiplies before the cast.
      dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      backend: "auto" (the kernel where it can serve, else xla), "xla", "mosaic" or "interpret"; see
        `pallas_kernels.backend`.

    Returns:
      (q [M, N], q.T [N, M], amax float32[]). Beyond the range q saturates, inf too; NaN stays NaN. amax is of x as it
      came, inf if any element is inf or NaN, 0.0 of an empty array. Under plain jit with x split over devices, q is
      split like x, q.T the other way round, and amax is that of the whole; in shard_map and pmap all are the device's.

    Raises:
      TypeError: x, scale or dtype of another dtype than these.
      ValueError: x is no matrix; a backend that cannot serve, and why.

    Example:
      >>> q, q_t, amax = cast_transpose_amax(jnp.array([[1.0, -300.0]]), jnp.float32(2.0), jnp.float8_e4m3fn)
      >>> q.tolist(), q_t.shape, float(amax)
      ([[2.0, -448.0]], (2, 1), 300.0)
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    passes.check("cast_transpose_amax", [x], [scale], dtype)
    plan = passes.Pass("cast_transpose_amax", None, 1, 1, jnp.dtype(dtype), None, rows=1)
    ((q, q_t, amax, _),) = passes.run(plan, [x], [scale], backend)
    return q, q_t, amax
