"""The names of the floating-point formats of low-precision training."""

from typing import Any

import jax.numpy as jnp

# The names of formats in arguments, metrics and names of leaves: all others are read from here.
DTYPES: dict[str, Any] = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e2m1": jnp.float4_e2m1fn,
}


def name_of(dtype: Any) -> str:
    """The name of a dtype's format, such as `"e4m3"`."""
    return next(name for name, known in DTYPES.items() if jnp.dtype(known) == jnp.dtype(dtype))
