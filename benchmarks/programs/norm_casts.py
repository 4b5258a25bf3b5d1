"""The cast of a norm in the kernel that computes it, as fp8 layers run it (`jaxmp._src.fp8.made`)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes

NAME = "computed_cast_transpose_amax"


def normalized(x: Array, inv_std: Array, *others: Array) -> Array:
    """The last steps of flax's norms, for an RMSNorm with (weight), for a LayerNorm with (mean, weight, bias)."""
    if len(others) == 1:
        return x * (inv_std * others[0])
    mean, weight, bias = others
    return (x - mean) * (inv_std * weight) + bias


def cast(
    x: Float[Array, "M N"], scale: Float[Array, ""], inv_std: Float[Array, "M"], *others: Array, backend: str = "auto"
) -> tuple[Array, Array, Array]:
    """(q, q.T, amax) in e4m3 of `normalized` of float32 vectors, rounded to bfloat16 first."""
    rows = len(others) // 3 + 1  # a LayerNorm has a mean, too
    plan = passes.Pass(
        name=NAME,
        compute=normalized,
        inputs=1,
        values=1,
        dtype=jnp.dtype(jnp.float8_e4m3fn),
        wide_dtype=None,
        rows=1,
        of_rows=rows,
        of_columns=len(others) + 1 - rows,
        rounded=jnp.dtype(jnp.bfloat16),
    )
    (found,) = passes.run(plan, [x, inv_std, *others], [scale], backend)
    return found.q, found.q_t, found.amax
