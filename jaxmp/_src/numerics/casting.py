"""Casts and roundings, for arrays and trees. The face `jaxmp.casting` explains why a rounding needs care under XLA.

`round_to` computes, with q(x) = 2^(max(e(x), e_min) - m), the spacing of a dtype's values near x (e(x): the exponent of
x; e_min: the smallest normal exponent; m: the number of mantissa bits),

    round_to(x) = q(x) * nearest_even(x / q(x))

All three steps are exact in float32, because q is a power of two made from the bits of x. Subnormals of the narrow
dtype are rounded correctly, because the spacing is constant below e_min. (`lax.reduce_precision` flushes those of
float16 to zero.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree, UInt

from jaxmp._src.numerics.float_bits import inverse_of_power_of_two, power_of_two_below
from pallas_kernels import moments, reference


def is_float(x: Any) -> bool:
    """Whether `x` is an array or a `jax.ShapeDtypeStruct` of floats of 16 bits or more."""
    # 8-bit floats mean nothing without their scale, so no function of this file changes them.
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.dtype(dtype).itemsize >= 2


def is_low_precision(dtype: Any) -> bool:
    """Whether `dtype` is a 16-bit float: params of such a dtype need a float32 master."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def cast_float(x: Any, dtype: Any, *, saturate: bool = False) -> Any:
    """`x` in `dtype`, strongly typed, if `is_float(x)`, else `x`; `saturate`: as `saturating_cast`."""
    if not is_float(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype), weak_type=False)
    if x.dtype == dtype:
        return strongly_typed(x)
    return saturating_cast(x, dtype) if saturate else jnp.asarray(x).astype(dtype)


def strongly_typed(x: Any) -> Any:
    """`x` without jax's weak type. The first update would remove it, and the second call would compile again."""
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """`tree` with every float leaf of 16 bits or more cast to `dtype`. All other leaves stay as they are.

    Args:
      tree: any pytree; leaves may be abstract (`jax.ShapeDtypeStruct`).
      dtype: a float dtype. Values outside its range become inf.

    Example:
      >>> cast_floats({"w": jnp.ones(2, jnp.float16), "n": 3}, jnp.float32)
      {'n': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: cast_float(x, dtype), tree)


def saturating_cast(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """`x` in a narrower `dtype`. Values outside its range, inf included, become its largest finite value.

    Args:
      x: floats of any shape.
      dtype: the narrow float dtype.

    Returns:
      An array of `dtype`, of the shape of `x`, rounded to nearest even. NaN stays NaN.

    Example:
      >>> saturating_cast(jnp.array([1e6, -jnp.inf, 0.5]), jnp.float16).tolist()
      [65504.0, -65504.0, 0.5]
    """
    x = jnp.asarray(x)
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if narrow.max >= wide.max and narrow.nmant >= wide.nmant:
        return x.astype(dtype)  # a wider dtype: the cast is exact, and inf stays inf
    if narrow.nmant > wide.nmant or narrow.max > wide.max:  # between float16 and bfloat16: float32 holds both limits
        x = x.astype(jnp.float32)
    return reference.saturating_cast(x, dtype)


def widened(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32. A bfloat16 `x` keeps its rounding, also where XLA computes it in float32.

    XLA may leave out the rounding of a bfloat16 result whose reader casts it to float32, and does so in some programs
    only. (float16 is computed in float16.)
    """
    wide = x.astype(jnp.float32)
    return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7) if x.dtype == jnp.bfloat16 else wide


def round_to(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """float32 `x`, rounded to values that `dtype` can hold, still in float32. XLA cannot remove this rounding.

    The result has the bits of `saturating_cast(x, dtype).astype(float32)` on every backend. (The fnuz formats have no
    -0.0: there the signs of zeros can differ.)

    Args:
      x: float32 of any shape.
      dtype: float16, bfloat16, an 8-bit float, or float32 (which returns `x`).

    Returns:
      float32 of the same shape. NaN stays NaN. Values outside the range, inf included, become the largest finite value.
      Its derivative is that of a cast: 1 within the range.

    Raises:
      TypeError: `x` is not float32.

    Example:
      >>> round_to(jnp.array([0.1, 2.0**-24, 70000.0]), jnp.float16).tolist()
      [0.0999755859375, 5.960464477539063e-08, 65504.0]
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"round_to rounds float32 arrays; got {x.dtype}. Cast it with .astype(jnp.float32).")
    info = jnp.finfo(dtype)
    if info.bits >= 32:
        return x
    limit = np.float32(info.max)
    x = jnp.clip(x, -limit, limit)
    if info.nmant == 7 and info.nexp == 8:  # bfloat16 shares float32's exponents, subnormals included
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # Of two powers of two: the smallest normal number, and the spacing between 1 and 2. Their product is >= 2^-126.
    spacing = jnp.maximum(power_of_two_below(x), np.float32(info.smallest_normal)) * np.float32(2.0**-info.nmant)
    rounded = lax.round(x * inverse_of_power_of_two(spacing), lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return moments.with_derivative_of(x, rounded)  # that of the rounding to an integer is 0, that of a cast 1


def stochastic_round(x: Float[Array, "..."], dtype: Any, bits: UInt[Array, "..."]) -> Float[Array, "..."]:
    """float32 `x`, rounded up or down at random to a value of `dtype`, so that the mean is `x`.

    With low and low + q, the two neighbours of |x| in `dtype`,

        |x| -> low + q  with probability (|x| - low) / q,  else low

    The probability is exact for bfloat16 and for the normal range of float16. For subnormals of float16 the mean is off
    by less than 2^-24 q. A value that `dtype` can hold does not change.

    Args:
      x: float32 of any shape.
      dtype: float16, bfloat16, or float32 (which returns `x`).
      bits: uint32 of the same shape, 32 random bits for each element.

    Returns:
      float32 of the same shape. Finite values outside the range become the largest finite value. inf and NaN do not
      change (`round_to` saturates inf), and zeros keep their signs. The derivative is that of the mean: 1.

    Raises:
      TypeError: `x` is not float32, or `dtype` is another one.

    Example:
      >>> x = jnp.full(4096, 1 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
      >>> rounded = stochastic_round(x, jnp.bfloat16, jax.random.bits(jax.random.key(0), 4096))
      >>> sorted(set(rounded.tolist())), round(float(jnp.mean(rounded == 1.0)), 2)
      ([1.0, 1.0078125], 0.75)

    References:
      Gupta et al. 2015, "Deep Learning with Limited Numerical Precision" (arXiv 1502.02551).
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"stochastic_round rounds float32 arrays; got {x.dtype}. Cast it with .astype(jnp.float32).")
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return moments.to_bfloat16(x, moments.low_bits(bits)).astype(jnp.float32)
    if dtype != jnp.float16:
        raise TypeError(
            f"stochastic_round rounds to float16, bfloat16 or float32; got {jnp.dtype(dtype)}. For 8 bits see "
            f"jaxmp.compress_moments."
        )
    info = jnp.finfo(jnp.float16)
    size = jnp.minimum(jnp.abs(x), np.float32(info.max))
    spacing = jnp.maximum(power_of_two_below(size), np.float32(info.smallest_normal)) * np.float32(2.0**-info.nmant)
    steps = size * inverse_of_power_of_two(spacing)
    low = jnp.floor(steps)
    odds = (steps - low) * np.float32(2.0**24)  # times 2^24; exact
    up = (bits >> 8).astype(jnp.int32).astype(jnp.float32) < odds
    rounded = jnp.minimum(jnp.where(up, low + 1.0, low) * spacing, np.float32(info.max))
    return moments.with_derivative_of(x, jnp.where(jnp.abs(x) < jnp.inf, jnp.copysign(rounded, x), x))
