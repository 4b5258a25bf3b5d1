"""Casts: the roundings of mixed precision, made so that they really happen.

A cast to a narrow dtype and back is how one asks "what would this value be in float16?". XLA for GPUs deletes such a
pair inside one program (`xla_allow_excess_precision`), and with it the answer: `f32(f16(master)) - f32(p)` becomes
`master - p`. `round_to` rounds by arithmetic that no simplifier may remove.

With q(x) = 2^(max(e(x), e_min) - m), the spacing of a dtype's grid round x (e(x): exponent of x, e_min: smallest
normal exponent, m: bits of mantissa),

    round_to(x) = q(x) * nearest_even(x / q(x))

All three steps are exact in float32: q is a power of two made from the bits of x. Subnormals of the narrow dtype come
out right because the spacing stops shrinking at e_min (`lax.reduce_precision` flushes those of float16 to zero).

Casts of *state* saturate: a float32 master of 70000 becomes 65504 in float16, not inf.
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
    """Whether `x` is an array (or an abstract one) of floats of 16 bits or more.

    8-bit floats mean nothing without their scale, so nothing here touches them.

    Example:
      >>> is_float(jnp.ones(2)), is_float(jnp.arange(2)), is_float(2.0), is_float(jax.random.key(0))
      (True, False, False, False)
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.dtype(dtype).itemsize >= 2


def is_low_precision(dtype: Any) -> bool:
    """Whether `dtype` is a float of 16 bits, one whose params need a float32 master.

    Example:
      >>> is_low_precision(jnp.bfloat16), is_low_precision(jnp.float32)
      (True, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def cast_float(x: Any, dtype: Any, *, saturate: bool = False) -> Any:
    """`x` in `dtype`, strongly typed, if it is a float array of 16 bits or more (or an abstract one), else `x` itself.

    Args:
      x: any leaf.
      dtype: a float dtype.
      saturate: whether values beyond the range of `dtype` become its largest finite value, not inf.

    Example:
      >>> x = jnp.float32(70000.0)
      >>> float(cast_float(x, jnp.float16)), float(cast_float(x, jnp.float16, saturate=True))
      (inf, 65504.0)
    """
    if not is_float(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype), weak_type=False)
    if x.dtype == dtype:
        return strongly_typed(x)
    return saturating_cast(x, dtype) if saturate else jnp.asarray(x).astype(dtype)


def strongly_typed(x: Any) -> Any:
    """`x` without jax's weak type: the first update would change a weak type, and cause a recompilation.

    Example:
      >>> jnp.asarray(1.0), strongly_typed(jnp.asarray(1.0))
      (Array(1., dtype=float32, weak_type=True), Array(1., dtype=float32))
    """
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """`tree` with every float leaf of 16 bits or more in `dtype`; other leaves do not change.

    Example:
      >>> cast_floats({"w": jnp.ones(2, jnp.float16), "n": 3}, jnp.float32)
      {'n': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: cast_float(x, dtype), tree)


def saturating_cast(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """`x` in a narrower `dtype`, with values beyond its range (inf too) at its largest finite value; NaN stays NaN.

    Args:
      x: floats of any shape.
      dtype: the narrow float dtype.

    Returns:
      An array of `dtype`, rounded to nearest even.

    Example:
      >>> saturating_cast(jnp.array([1e6, -jnp.inf, 0.5]), jnp.float16).tolist()
      [65504.0, -65504.0, 0.5]
    """
    x = jnp.asarray(x)
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if narrow.max >= wide.max and narrow.nmant >= wide.nmant:
        return x.astype(dtype)  # a widening: exact, and inf stays inf
    if narrow.nmant > wide.nmant or narrow.max > wide.max:  # float16 from or to bfloat16: compare where both are exact
        x = x.astype(jnp.float32)
    return reference.saturating_cast(x, dtype)


def round_to(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """float32 `x`, rounded to the values of `dtype`, still in float32; XLA does not remove the rounding.

    Bit for bit `saturating_cast(x, dtype).astype(float32)`, on every backend (except for the signs of zeros in the
    fnuz formats, which have no -0.0). See the module's docstring.

    Args:
      x: float32 of any shape.
      dtype: float16, bfloat16, an 8-bit float, or float32 (which returns `x`).

    Returns:
      float32 of the same shape. NaN stays NaN; inf and values beyond the range become the largest finite value.

    Raises:
      TypeError: `x` is not float32.

    Example:
      >>> round_to(jnp.array([0.1, 2.0**-24, 70000.0]), jnp.float16).tolist()
      [0.0999755859375, 5.960464477539063e-08, 65504.0]
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"round_to rounds float32 arrays; got {x.dtype}. Cast it with .astype(jnp.float32) first.")
    info = jnp.finfo(dtype)
    if info.bits >= 32:
        return x
    limit = np.float32(info.max)
    x = jnp.clip(x, -limit, limit)
    if info.nmant == 7 and info.nexp == 8:  # bfloat16 shares float32's exponents, subnormals included
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return round_to_grid(x, np.float32(float(info.smallest_normal)), np.float32(2.0**-info.nmant))


def round_to_grid(
    x: Float[Array, "..."], smallest_normal: Float[Array, ""] | np.float32, step: Float[Array, ""] | np.float32
) -> Float[Array, "..."]:
    """float32 `x`, rounded to nearest even on the grid of a format whose numbers may be traced.

    Args:
      x: float32, within the range of the format.
      smallest_normal: float32[], its smallest normal number, a power of two.
      step: float32[], the spacing of its numbers between 1 and 2, a power of two. The product of both is >= 2^-126.

    Returns:
      float32. inf becomes NaN.

    Example:
      >>> round_to_grid(jnp.array([1.1, 2.1]), jnp.float32(2.0**-6), jnp.float32(2.0**-3)).tolist()
      [1.125, 2.0]
    """
    spacing = jnp.maximum(power_of_two_below(x), smallest_normal) * step
    return lax.round(x * inverse_of_power_of_two(spacing), lax.RoundingMethod.TO_NEAREST_EVEN) * spacing


def stochastic_round(x: Float[Array, "..."], dtype: Any, bits: UInt[Array, "..."]) -> Float[Array, "..."]:
    """float32 `x`, rounded up or down at random to a value of `dtype`, so that the mean is `x`.

    With the neighbours low <= |x| <= low + q in `dtype`,

        |x| -> low + q  with the probability (|x| - low) / q,  else low

    which is exact for bfloat16 and for the normal range of float16; for subnormals of float16 the mean is off by less
    than 2^-24 q. A value that `dtype` can hold does not change.

    Args:
      x: float32 of any shape.
      dtype: float16, bfloat16, or float32 (which returns `x`).
      bits: uint32 of the same shape, 32 random bits for each element.

    Returns:
      float32. Finite values stay finite: beyond the range they become the largest finite value. inf and NaN do not
      change (`round_to` saturates inf), and zeros keep their signs.

    Raises:
      TypeError: `x` is not float32, or another `dtype`.

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
        raise TypeError(
            f"stochastic_round rounds float32 arrays; got {x.dtype}. Cast it with .astype(jnp.float32) first."
        )
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return moments.to_bfloat16(x, moments.low_bits(bits)).astype(jnp.float32)
    if dtype != jnp.float16:
        raise TypeError(
            f"stochastic_round rounds to float16, bfloat16 or float32; got {jnp.dtype(dtype)}. Eight bits need a "
            f"scale: see jaxmp.compress_moments."
        )
    info = jnp.finfo(jnp.float16)
    size = jnp.minimum(jnp.abs(x), np.float32(info.max))
    spacing = jnp.maximum(power_of_two_below(size), np.float32(info.smallest_normal)) * np.float32(2.0**-info.nmant)
    steps = size * inverse_of_power_of_two(spacing)
    low = jnp.floor(steps)
    odds = (steps - low) * np.float32(2.0**24)  # of 2^24; exact
    up = (bits >> 8).astype(jnp.int32).astype(jnp.float32) < odds
    rounded = jnp.minimum(jnp.where(up, low + 1.0, low) * spacing, np.float32(info.max))
    return jnp.where(jnp.abs(x) < jnp.inf, jnp.copysign(rounded, x), x)


def computed_once(scalars: PyTree) -> PyTree:
    """Scalars that every leaf of a tree needs, as values that XLA does not compute again for each leaf.

    A scalar from all n leaves (a flag, a norm) ends in a chain of n cheap operations. XLA copies this chain into the
    kernel of every leaf, so the program has n^2 operations: minutes of compilation for 1000 leaves.

    Example:
      >>> computed_once((jnp.float32(2.0), jnp.array(True)))
      (Array(2., dtype=float32), Array(True, dtype=bool))
    """
    return lax.optimization_barrier(scalars)
