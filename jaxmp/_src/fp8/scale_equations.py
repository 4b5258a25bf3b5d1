"""The equations from an amax to a scale, which all recipes use, and the formats of fp8.

    scale <= fp8_max / amax

See `recipes` for the power of two that fits, in integer arithmetic.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp._src.numerics import float_bits

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

Format = Literal["HYBRID", "E4M3"]


def scale_from_amax(
    amax: Float[Array, "..."],
    fp8_max: float,
    *,
    fallback: Float[Array, "..."] | float,
    margin: int = 0,
    power_of_two: bool = True,
    overflow: float = _LARGEST_FLOAT32,
) -> Float[Array, "..."]:
    """The largest scale with scale * amax <= fp8_max * 2^-margin, float32, the same on every backend.

    With `power_of_two` the largest power of two that fits, from 2^-126 to 2^127. Otherwise the quotient, rounded to
    nearest as in TransformerEngine: its product with amax may be an ulp above fp8_max, and the cast saturates.
    `fallback` is the scale where `amax` is not positive and finite; `overflow` replaces a quotient of inf.
    """
    amax = jnp.asarray(amax, jnp.float32)
    limit = fp8_max * 2.0**-margin
    if power_of_two:
        scale = float_bits.power_of_two(float_bits.exponent_of_largest_scale(amax, limit))
    else:
        scale = float_bits.quotient(limit, amax)
        scale = jnp.where(jnp.isinf(scale), np.float32(overflow), scale)
    return jnp.where(float_bits.is_positive_finite(amax), scale, jnp.asarray(fallback, jnp.float32))


def saturates(amax: Float[Array, "..."], scale: Float[Array, "..."], fp8_max: float) -> Any:
    """Whether the cast of a tensor with this amax clips, bool[...]."""
    # A scale that is no power of two is rounded, and so is its product with amax: both may be an ulp above.
    return amax * scale > np.float32(fp8_max * (1 + 2.0**-22))


def current_scale(
    amax: Float[Array, "..."],
    dtype: Any,
    *,
    power_of_two: bool,
    amax_epsilon: float = 0.0,
    overflow: float = _LARGEST_FLOAT32,
) -> Float[Array, "..."]:
    """The equation of `CurrentScaling`, for the amax of tensors or of blocks."""
    amax = jnp.asarray(amax, jnp.float32)
    if amax_epsilon > 0:
        amax = jnp.where(amax < np.float32(amax_epsilon), np.float32(amax_epsilon), amax)  # NaN stays
    fp8_max = float(jnp.finfo(dtype).max)
    return scale_from_amax(amax, fp8_max, fallback=1.0, power_of_two=power_of_two, overflow=overflow)


def dtype_of(fp8_format: str, *, backward: bool = False) -> Any:
    """The fp8 dtype of a format: e5m2 for gradients under `"HYBRID"`, otherwise e4m3fn."""
    return jnp.float8_e5m2 if backward and fp8_format == "HYBRID" else jnp.float8_e4m3fn


def check_format(fp8_format: Any) -> None:
    """Raises a ValueError unless `fp8_format` is "HYBRID" or "E4M3"."""
    # No "E5M2": two bits of mantissa are too few for activations and weights; "HYBRID" takes it for gradients.
    if fp8_format not in ("HYBRID", "E4M3"):
        raise ValueError(f'fp8_format must be "HYBRID" or "E4M3"; got {fp8_format!r}')


def check_epsilon(amax_epsilon: Any) -> None:
    """Raises a ValueError unless `amax_epsilon` is a finite number >= 0."""
    if not isinstance(amax_epsilon, (int, float)) or not 0 <= amax_epsilon < math.inf:
        raise ValueError(f"amax_epsilon must be finite and >= 0; 0 is no bound; got {amax_epsilon!r}")
