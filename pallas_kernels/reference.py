"""Every function of this package in plain jax.numpy: the oracle of the kernels, and the backend where they cannot run.

Arithmetic is float32 for inputs of every dtype. Casts to fp8 saturate: they clip first, because a plain cast turns
values beyond the range of e4m3 into NaN. amax is the largest magnitude of the values *before* the scale.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def saturating_cast(x: Float[Array, "..."], dtype: Any) -> Array:
    """`x` in a narrower dtype, rounded to nearest even and saturated; NaN stays NaN."""
    # The dtype of x must represent the largest value of `dtype` exactly.
    limit = x.dtype.type(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def cast_by_selects(weight: Float[Array, "..."], dtype: Any) -> Array:
    """The bits of `saturating_cast`, for a param that is written from its master.

    It does not clamp: XLA for TPU does not make a clamp part of the pass that writes the master and the moments.
    """
    limit = weight.dtype.type(jnp.finfo(dtype).max)
    return jnp.where(weight > limit, limit, jnp.where(weight < -limit, -limit, weight)).astype(dtype)


def largest_magnitude(x: Float[Array, "..."], *, keep: int = 0) -> Float[Array, "..."]:
    """max |x| in float32 over all but the first `keep` axes; inf if any is inf or NaN; 0.0 for an empty array."""
    # NaN becomes inf first, because a MAX may drop NaN.
    magnitude = jnp.abs(x.astype(jnp.float32))
    if not magnitude.size:
        return jnp.zeros(magnitude.shape[:keep], jnp.float32)
    return jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=tuple(range(keep, magnitude.ndim)))


def transpose(x: Array, rows: int = 1) -> Array:
    """The transpose of `x`, read as a matrix whose rows are its first `rows` axes: these axes come last."""
    return jnp.transpose(x, (*range(rows, x.ndim), *range(rows)))


def cast_transpose_amax(
    x: Float[Array, "..."], scale: Float[Array, ""], dtype: Any, rows: int = 1
) -> tuple[Array, Array, Float[Array, ""]]:
    """(q, its transpose, amax of x) with q = fp8(clip(x * scale))."""
    q = saturating_cast(x.astype(jnp.float32) * scale, dtype)
    return q, transpose(q, rows), largest_magnitude(x)


def sums_over_rows(x: Float[Array, "..."], rows: int = 1) -> Float[Array, "..."]:
    """The sums of `x` over its first `rows` axes, in float32."""
    return jnp.sum(x.astype(jnp.float32), axis=tuple(range(rows)))
