"""Converts float32 arrays to the few bytes that devices send to each other, and back.

    8 bits     codes of blocks of 128 neighbours, and one power of two for each block: x is about code / 2^k, with the
               largest k at which the block still fits the format. 129 bytes for 128 numbers.
    bfloat16   rounded to nearest even
    float32    as it is

If a block has an inf or NaN, all of it becomes NaN: no format may hide an overflow.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.numerics import casting, float_bits

BLOCK = 128
DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32)
_NONFINITE = -128  # in place of the exponent of a block


def encode(x: Float[Array, "*lead n"], dtype: Any) -> tuple[Array, Float[Array, "*lead n"]]:
    """`x` as codes, and the float32 values that they stand for.

    Args:
      x: float32; in 8 bits, n is a multiple of `BLOCK`.
      dtype: one of `DTYPES`.

    Returns:
      (codes: uint8[*lead, n + n / BLOCK], or uint16 or float32[*lead, n]; the values of `decode`).

    Example:
      >>> codes, values = encode(jnp.arange(128.0), jnp.int8)
      >>> codes.shape, codes.dtype.name, values[:3].tolist()
      ((129,), 'uint8', [0.0, 1.0, 2.0])
    """
    if jnp.dtype(dtype) == jnp.float32:
        return x, x
    if jnp.dtype(dtype) == jnp.bfloat16:
        values = jnp.where(jnp.isfinite(x), casting.round_to(x, dtype), x)
        return lax.bitcast_convert_type(values.astype(dtype), jnp.uint16), values  # XLA would widen what is a float
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    largest = jnp.max(float_bits.to_bits(jnp.abs(blocks)), axis=-1)
    is_finite = largest < float_bits.INFINITY
    # Of a block of zeros, any exponent will do.
    amax = float_bits.from_bits(jnp.where((largest > 0) & is_finite, largest, np.float32(1).view(np.int32)))
    limit = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    k = jnp.clip(float_bits.exponent_of_largest_scale(amax, limit), -126, 126)
    scaled = jnp.where(is_finite[..., None], blocks * float_bits.power_of_two(k)[..., None], 0.0)
    rounded = jnp.round(scaled) if dtype == jnp.int8 else casting.round_to(scaled, dtype)
    exponents = jnp.where(is_finite, k, _NONFINITE).astype(jnp.int8)
    codes = lax.bitcast_convert_type(rounded.astype(dtype), jnp.uint8).reshape(x.shape)
    packed = jnp.concatenate([codes, lax.bitcast_convert_type(exponents, jnp.uint8)], axis=-1)
    return packed, _values(rounded, exponents)


def decode(codes: Array, dtype: Any) -> Float[Array, "*lead n"]:
    """The float32 values of the codes of `encode`."""
    if jnp.dtype(dtype) == jnp.float32:
        return codes
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(codes, dtype).astype(jnp.float32)
    n = codes.shape[-1] * BLOCK // (BLOCK + 1)
    numbers = lax.bitcast_convert_type(codes[..., :n], dtype).astype(jnp.float32)
    exponents = lax.bitcast_convert_type(codes[..., n:], jnp.int8)
    return _values(numbers.reshape(*codes.shape[:-1], -1, BLOCK), exponents)


def _values(numbers: Array, exponents: Array) -> Array:
    """Codes [..., blocks, BLOCK] and exponents [..., blocks] as float32[..., n]."""
    inverse = float_bits.power_of_two(-exponents.astype(jnp.float32))
    values = numbers * jnp.where(exponents == _NONFINITE, jnp.nan, inverse)[..., None]
    return values.reshape(*numbers.shape[:-2], -1)
