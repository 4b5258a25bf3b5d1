"""The last part of a norm and the cast of its result in one pass: the result is not stored, other than in fp8.

    y = (x - mean) inv_std weight + bias        q = fp8(clip(y * scale))        q.T        amax = max |y|

for x [M, N], with `mean` and `inv_std` of each row and `weight` and `bias` of each column: LayerNorm, and RMSNorm
without mean and bias. XLA computes the statistics of the rows, often in the pass that writes x; then it writes y in 16
bits, which the cast reads again: 2 + 2 + 2 + 1 + 1 bytes per element. Here they are 2 + 1 + 1.

y is rounded to the dtype of the norm's result before the cast, so that q and amax are those of the stored y.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes, reference


class Norm(NamedTuple):
    """Which parts a norm has; as a function of (x, [mean,] inv_std, [weight,] [bias]), its result in float32."""

    has_mean: bool
    has_weight: bool
    has_bias: bool

    def __call__(self, x: Array, *vectors: Array) -> Array:
        """The norm of float32 arrays."""
        given = iter(vectors)
        mean = next(given) if self.has_mean else None
        inv_std = next(given)
        weight = next(given) if self.has_weight else None
        return reference.normalized(x, inv_std, mean, weight, next(given) if self.has_bias else None)

    def plan(self, dtype: Any, rounded: Any, rows: int) -> passes.Pass:
        """The pass that casts the norm's result, rounded to `rounded`, to the fp8 `dtype`."""
        return passes.Pass(
            name="norm_cast_transpose_amax",
            compute=self,
            inputs=1,
            values=1,
            dtype=jnp.dtype(dtype),
            wide_dtype=None,
            rows=rows,
            of_rows=1 + self.has_mean,
            of_columns=self.has_weight + self.has_bias,
            rounded=jnp.dtype(rounded),
        )


def norm_cast_transpose_amax(
    x: Float[Array, "M N"],
    inv_std: Float[Array, "M"],
    scale: Float[Array, ""],
    dtype: Any,
    *,
    mean: Float[Array, "M"] | None = None,
    weight: Float[Array, "N"] | None = None,
    bias: Float[Array, "N"] | None = None,
    rounded: Any = None,
    backend: str = "auto",
) -> tuple[Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """fp8(clip(y * scale)), its transpose, and max |y|, with y = (x - mean) inv_std weight + bias, in one read of x.

    Args:
      x: [M, N] float32, bfloat16 or float16; see `cast_transpose_amax` for sizes.
      inv_std: float32[M], for each row 1 / its standard deviation.
      scale: float32[], multiplies y before the cast.
      dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      mean: float32[M]; None: 0.
      weight: float32[N]; None: 1.
      bias: float32[N]; None: 0.
      rounded: the dtype that y is rounded to before the cast; None: that of x.
      backend: see `pallas_kernels.backend`.

    Returns:
      (q [M, N], q.T [N, M], amax float32[]), those of `cast_transpose_amax` for y in the dtype `rounded`.

    Raises:
      TypeError, ValueError: as for `cast_transpose_amax`; a vector of another dtype or length than these.

    Example:
      >>> x, inv_std = jnp.array([[3.0, -4.0]]), jnp.array([0.5])
      >>> q, _, amax = norm_cast_transpose_amax(x, inv_std, jnp.float32(2.0), jnp.float8_e4m3fn)
      >>> q.tolist(), float(amax)
      ([[3.0, -4.0]], 2.0)
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    norm = Norm(mean is not None, weight is not None, bias is not None)
    passes.check("norm_cast_transpose_amax", [x], [scale], dtype)
    of_rows = [jnp.asarray(v) for v in (mean, inv_std) if v is not None]
    of_columns = [jnp.asarray(v) for v in (weight, bias) if v is not None]
    passes.check_vectors("norm_cast_transpose_amax", x, of_rows, of_columns)
    plan = norm.plan(dtype, x.dtype if rounded is None else rounded, rows=1)
    (found,) = passes.run(plan, [x, *of_rows, *of_columns], [scale], backend)
    return found.q, found.q_t, found.amax
