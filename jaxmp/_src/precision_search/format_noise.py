"""The error of each format in the tensors of a matmul: noise, and values lost at the ends of its range.

For a tensor x and its rounding q(x),

    noise = sum (x - q(x))^2 / sum x^2        SQNR = -10 log10(noise) dB

The measurements are summed over calls, iterations and steps; the noise is a mean over tensors. Because only sums are
needed, the numbers are returned as gradients: each matmul has a *probe*, a vector of zeros that changes nothing, whose
"gradient" is the measurement. This works in scans, remat and vmap, as for any gradient. It also measures the
cotangents, which exist in the backward pass only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp._src.numerics import float_bits
from jaxmp._src.numerics.quantize import largest_magnitude
from jaxmp._src.precision_search import fake_quantize

FORMATS = ("fp8", "fp16", "bf16")
TENSORS: tuple[str, ...] = ("x", "w", "y", "dy", "dx", "dw")
BACKWARD = ("dy", "dx", "dw")
CAST_TO_FP8 = ("x", "w", "dy")  # the tensors that an fp8 matmul casts; its results have 16 bits
_EXPONENTS = 256  # float32's exponent field
_COUNTS = 3  # calls, elements, elements that are not zero
SIZE = _COUNTS + 4 * len(FORMATS) + _EXPONENTS


class Noise(NamedTuple):
    """The error of one tensor in one format.

    Attributes:
      sqnr: in dB; inf: nothing was lost; -inf: a value became inf or NaN.
      overflow: the share of elements beyond the range.
      underflow: the share of nonzero elements that become zero.
      subnormal: the share of nonzero elements below the smallest normal number, where some or all bits are lost.
    """

    sqnr: float
    overflow: float
    underflow: float
    subnormal: float


def measure(x: Float[Array, "..."], loss_scale: Float[Array, ""], *, backward: bool) -> Float[Array, "n"]:
    """The sums of one tensor, a vector for `read`; vectors of several calls may be added.

    `loss_scale` (float32[]) is for gradients in float16. Gradients (`backward`) are rounded to e5m2 in place of e4m3.
    """
    x = x.astype(jnp.float32)
    largest = largest_magnitude(x)
    unit = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)  # squares of tiny numbers would be zero
    terms = [(x / unit) ** 2, x != 0]
    for name in FORMATS:
        by = fake_quantize.grid(("e5m2" if backward else "e4m3") if name == "fp8" else name)
        by = by._replace(factor=loss_scale if backward and name == "fp16" else by.factor)
        scale = fake_quantize.scale_of(largest, by)
        rounded = fake_quantize.rounded_under(x, scale, by)
        scaled = jnp.abs(x) * scale
        beyond = scaled > by.limit if np.isnan(by.overflow) else scaled >= by.overflow
        lost, small = (rounded == 0) & (x != 0), (scaled < by.smallest_normal) & (x != 0)
        terms += [((rounded - x) / unit) ** 2, beyond, lost, small]
    signal, nonzero, *of_formats = _sums(terms)
    of_formats[::4] = [jnp.where(signal > 0, n / jnp.where(signal > 0, signal, 1), 0) for n in of_formats[::4]]
    histogram = jnp.zeros(_EXPONENTS, jnp.uint32)
    if backward:
        histogram = histogram.at[float_bits.exponent_field(x)].add(np.uint32(1)).at[0].set(0)
    numbers = jnp.stack([jnp.float32(1), jnp.float32(x.size), nonzero, *of_formats])
    return jnp.concatenate([numbers, histogram.astype(jnp.float32)])


def _sums(terms: list[Array]) -> list[Array]:
    """The sum of each tensor, float32[], all in one pass; bools are counted in integers: float32 stops at 2^24."""
    given = [x.astype(jnp.uint32 if x.dtype == bool else x.dtype) for x in terms]
    zeros = [np.zeros((), x.dtype) for x in given]

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    found = jax.lax.reduce(tuple(given), tuple(zeros), add, tuple(range(given[0].ndim)))
    return [x.astype(jnp.float32) for x in found]


@jax.custom_vjp
def _watched(x: Array, probe: Array, probe_of_gradient: Array, loss_scale: Array) -> Array:
    """`x`; the gradients of the probes are the measurements of `x` and of its gradient."""
    del probe, probe_of_gradient, loss_scale
    return x


def _forwards(x: Array, probe: Array, probe_of_gradient: Array, loss_scale: Array) -> tuple[Array, Any]:
    del probe, probe_of_gradient
    return x, (measure(x, loss_scale, backward=False), loss_scale)


def _backwards(residuals: Any, g: Array) -> tuple[Array, Array, Array, Array]:
    measured, loss_scale = residuals
    return g, measured, measure(g, loss_scale, backward=True), jnp.zeros_like(loss_scale)


_watched.defvjp(_forwards, _backwards)


def watched_matmul(
    run: Callable[..., Array], operands: list[Any], weight: int, probes: Float[Array, "6 n"], loss_scale: Any
) -> Array:
    """A matmul, unchanged; the gradients of `probes` (zeros) are the measurements of `TENSORS`.

    `weight` is the number of the operand that is w.
    """
    of = dict(zip(TENSORS, probes, strict=True))
    names = ("w", "x") if weight == 0 else ("x", "w")
    given = (_watched(x, of[name], of[f"d{name}"], loss_scale) for name, x in zip(names, operands, strict=True))
    return _watched(run(*given), of["y"], of["dy"], loss_scale)


def read(measured: np.ndarray) -> dict[str, Noise]:
    """The error in each format, from a sum of vectors of `measure`; empty if nothing was measured."""
    calls, elements, nonzero = (float(v) for v in measured[:_COUNTS])
    if not calls:
        return {}
    by_format = np.asarray(measured[_COUNTS : _COUNTS + 4 * len(FORMATS)], np.float64).reshape(len(FORMATS), 4).tolist()
    return {
        name: Noise(
            decibel(noise / calls),
            overflow / max(elements, 1),
            underflow / max(nonzero, 1),
            subnormal / max(nonzero, 1),
        )
        for name, (noise, overflow, underflow, subnormal) in zip(FORMATS, by_format, strict=True)
    }


def decibel(noise: float) -> float:
    """SQNR of a noise-to-signal ratio; -inf where it is no finite number."""
    if not np.isfinite(noise):
        return -np.inf
    return float(-10 * np.log10(noise)) if noise > 0 else np.inf


def exponents(measured: np.ndarray) -> np.ndarray:
    """How many elements of gradients lie in [2^e, 2^(e+1)), for e from -127 (always 0) to 128 (inf and NaN)."""
    return np.asarray(measured[..., -_EXPONENTS:], np.float64)


def highest_loss_scale(histogram: np.ndarray) -> float:
    """The largest power of two that leaves gradients a factor of 2 below float16's limit, from their `exponents`."""
    finite = np.flatnonzero(histogram[1:-1])
    return 2.0 ** (14 - int(finite[-1] + 1 - 127)) if len(finite) else 1.0


def least_loss_scale(histogram: np.ndarray, max_underflow: float) -> float:
    """The smallest power of two >= 1 with which at most this share of gradients becomes zero in float16."""
    total = histogram.sum()
    lost = np.cumsum(histogram) / total if total else np.zeros(len(histogram))
    first_kept = int(np.argmax(lost > max_underflow)) if (lost > max_underflow).any() else 127
    return 2.0 ** max(0, -25 - (first_kept - 127))
