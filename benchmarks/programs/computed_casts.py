"""Casts of what the kernel computes from results of matmuls, as fp8 layers run them (`jaxmp._src.fp8.fused_casts`)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes

NAME = "computed_cast_transpose_amax"


def gelu(
    x: Float[Array, "M N"], scale: Float[Array, ""], bias: Float[Array, "N"], backend: str = "auto"
) -> tuple[Array, Array, Array]:
    """(q, q.T, amax) in e4m3 of gelu(x + bias), rounded to bfloat16 first."""
    return _cast(_gelu, [x], [bias], scale, backend)


def silu_gated(
    a: Float[Array, "M N"], b: Float[Array, "M N"], scale: Float[Array, ""], backend: str = "auto"
) -> tuple[Array, Array, Array]:
    """(q, q.T, amax) in e4m3 of silu(a) b, rounded to bfloat16 first."""
    return _cast(_silu_gated, [a, b], [], scale, backend)


def _cast(compute, tensors, vectors, scale, backend) -> tuple[Array, Array, Array]:
    plan = passes.Pass(
        name=NAME,
        compute=compute,
        inputs=len(tensors),
        dtype=jnp.dtype(jnp.float8_e4m3fn),
        rows=1,
        vectors=len(vectors),
        rounded=jnp.dtype(jnp.bfloat16),
    )
    cast = passes.run(plan, [*tensors, *vectors, scale], backend)
    return cast.q, cast.q_t, cast.amax


def _gelu(x: Array, bias: Array) -> Array:
    x = x + bias
    return 0.5 * x * (1 + jnp.tanh(0.7978846 * (x + 0.044715 * (x * x * x))))


def _silu_gated(a: Array, b: Array) -> Array:
    return a / (1 + jnp.exp(-a)) * b
