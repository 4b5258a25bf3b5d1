"""float32 arithmetic that is exact on every backend, computed from the bits of its operands.

A scale decides what a cast keeps, so it must not depend on the device. XLA's float operations do: GPUs divide
approximately, exp2 and log2 miss powers of two, and CPUs read subnormals as zero (`1e-40 > 0` is False there). Integer
operations are exact. A positive float32 is

    x = 2^exponent * significand / 2^23,    2^23 <= significand < 2^24,

its bits are (exponent + 127) * 2^23 + (significand - 2^23), and as int32 they have the same order as the floats.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

INFINITY = np.int32(0x7F800000)  # the exponent field; below it are the finite floats, above it the NaNs
_MAGNITUDE = np.int32(0x7FFFFFFF)
_FRACTION = np.int32(0x007FFFFF)
_ONE = 1 << 23  # the significand of 1


def to_bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """The bits of float32 `x` as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    """The float32 whose bits the int32 are."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """The bits of |x|, to compare and reduce as integers; 0 for NaN, as CUDA's fmaxf ignores it."""
    bits = to_bits(x) & _MAGNITUDE
    return jnp.where(bits > INFINITY, 0, bits)


def is_positive_finite(x: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether 0 < x < inf, also for subnormals."""
    bits = to_bits(x)
    return (bits > 0) & (bits < INFINITY)


def split(x: Float[Array, "..."]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Exponent and significand, as in the module's docstring, of positive finite `x`; subnormals are normalized."""
    bits = to_bits(x)
    lifted = to_bits((bits & _FRACTION).astype(jnp.float32))  # a subnormal is this times 2^-149
    subnormal = bits < _ONE
    field = jnp.where(subnormal, lifted, bits) >> 23
    fraction = jnp.where(subnormal, lifted, bits) & _FRACTION
    return field - jnp.where(subnormal, 127 + 149, 127), fraction | _ONE


def quotient(numerator: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """numerator / x for positive finite float32, rounded to nearest even: inf beyond the range, 0 below 2^-149.

    The backend's quotient, wrong by some units, is only a guess. With integers n and d for the significands and a guess
    q of floor(n 2^s / d), the remainder n 2^s - q d is small, so int32 holds it exactly, even if products overflow.
    """
    exponent_n, n = _split_number(numerator)
    exponent_d, d = split(x)
    below_one = (n < d).astype(jnp.int32)  # n / d is in (1/2, 2)
    field = exponent_n - exponent_d - below_one + 127
    shift = 23 + below_one - jnp.maximum(1 - field, 0)  # subnormals have fewer bits
    guess = np.float32(n) / d.astype(jnp.float32) * _from_exponent(shift)
    q = guess.astype(jnp.int32)
    remainder = lax.shift_left(jnp.full_like(d, n), jnp.maximum(shift, 0)) - q * d
    q, remainder = q + remainder // d, remainder % d
    rounds_up = (2 * remainder > d) | ((2 * remainder == d) & (q & 1 == 1))
    bits = ((jnp.maximum(field, 1) - 1) << 23) + q + rounds_up.astype(jnp.int32)  # a carry moves the exponent
    return from_bits(jnp.where(field > 254, INFINITY, jnp.where(shift < 0, 0, bits)))


def divided_by(x: Float[Array, "..."], divisor: int) -> Float[Array, "..."]:
    """x / divisor, rounded to nearest even, for positive finite float32 and whole numbers up to 63; 0 below 2^-126."""
    exponent, n = split(x)
    octaves = divisor.bit_length() - 1
    below_one = (n << octaves < divisor << 23).astype(jnp.int32)
    numerator = lax.shift_left(n, octaves + below_one)  # the quotient has 24 bits
    q, remainder = numerator // divisor, numerator % divisor
    rounds_up = (2 * remainder > divisor) | ((2 * remainder == divisor) & (q & 1 == 1))
    field = exponent - octaves - below_one + 127
    bits = ((field - 1) << 23) + q + rounds_up.astype(jnp.int32)
    return from_bits(jnp.where(field < 1, 0, bits))


def product(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """float32 x * y, rounded once. x and y may be subnormal; a subnormal product may become zero."""
    (x, rest_x), (y, rest_y) = _normal(x), _normal(y)
    return x * y * rest_x * rest_y


def exponent_of_largest_scale(amax: Float[Array, "..."], limit: float) -> Int[Array, "..."]:
    """The largest integer k with 2^k * amax <= limit, not clamped; `amax` and `limit` positive and finite."""
    exponent_limit, significand_limit = _split_number(limit)
    exponent, significand = split(amax)
    return exponent_limit - exponent - (significand > significand_limit).astype(jnp.int32)


def power_of_two(log2: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^log2 in float32 for whole numbers (others are rounded), clamped to the normal range, 2^-126 to 2^127."""
    return _from_exponent(jnp.round(jnp.asarray(log2, jnp.float32)).astype(jnp.int32))


def normal_power_of_two(log2: Float[Array, "..."]) -> Float[Array, "..."]:
    """`power_of_two` of numbers from -126 to 127, in the fewest operations: each layer in fp8 has six of them.

    Example:
      >>> normal_power_of_two(jnp.array([-1.0, 3.0])).tolist()
      [0.5, 8.0]
    """
    exponent = lax.convert_element_type(lax.round(log2, lax.RoundingMethod.TO_NEAREST_EVEN), jnp.int32)
    return from_bits(lax.shift_left(lax.add(exponent, np.int32(127)), np.int32(23)))


def log2_of_power_of_two(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """log2 of a power of two, in float32, from -126 to 127; rounded down for others. 0 gives -126, inf 127."""
    field = to_bits(jnp.asarray(scale, jnp.float32)) >> 23
    return jnp.clip(field - 127, -126, 127).astype(jnp.float32)


def power_of_two_below(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^floor(log2|x|) for normal float32 x, by its bits; 0 for zeros and subnormals, inf for inf and NaN.

    Example:
      >>> power_of_two_below(jnp.array([3.0, 0.3])).tolist()
      [2.0, 0.25]
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)


def inverse_of_power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / x for float32 powers of two from 2^-126 to 2^126: 2^-k has 254 less the exponent field of 2^k.

    Example:
      >>> float(inverse_of_power_of_two(jnp.float32(8.0)))
      0.125
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(np.uint32(254 << 23) - bits, jnp.float32)


def reciprocal(scale: Float[Array, ""]) -> Float[Array, ""]:
    """1 / scale in float32, from the bits where `scale` is a power of two (GPUs divide approximately).

    Args:
      scale: float32, positive.

    Returns:
      float32: exact for powers of two from 2^-126 to 2^126, the rounded quotient otherwise.

    Example:
      >>> float(reciprocal(jnp.float32(65536.0))) == 2.0**-16
      True
    """
    scale = jnp.asarray(scale, jnp.float32)
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = bits >> 23  # the sign is 0
    is_power_of_two = ((bits & 0x7FFFFF) == 0) & (exponent > 0) & (exponent < 254)
    return jnp.where(is_power_of_two, inverse_of_power_of_two(scale), 1.0 / scale)


def ceil_log2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """log2 of positive normal `x`, rounded up, as a whole number in float32."""
    bits = to_bits(jnp.asarray(x, jnp.float32))
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return exponent.astype(jnp.float32)


def _from_exponent(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    return from_bits((jnp.clip(exponent, -126, 127) + 127) << 23)


def _normal(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(y, rest): x = y * rest, exactly, with y not subnormal."""
    bits = to_bits(x)
    subnormal = bits & INFINITY == 0
    lifted = (bits & _FRACTION).astype(jnp.float32) * np.float32(2.0**-126)
    lifted = from_bits(to_bits(lifted) | (bits & ~_MAGNITUDE))  # the sign, also of -0.0
    return jnp.where(subnormal, lifted, x), jnp.where(subnormal, np.float32(2.0**-23), np.float32(1.0))


def _split_number(x: float) -> tuple[int, int]:
    fraction, exponent = np.frexp(np.float32(x))
    return int(exponent) - 1, int(fraction * (2 * _ONE))
