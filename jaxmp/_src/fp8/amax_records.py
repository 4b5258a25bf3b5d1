"""The gradient of a scale leaf: a record of its amax that shows what arithmetic was done to it.

A loop may do anything with gradients between `value_and_grad` and the optimizer: clip them by their norm, add those of
microbatches, take a sum over devices, weigh a loss. An amax alone would be spoiled in silence. So the gradient of a
leaf of shape [...] is float32[..., 3], with an amax a as

    (u, v sqrt(a), v a)        u = 2^-64, v = 2^-40

or three zeros for a tensor that was not used. All that loops do with gradients is linear. With weights w_i of records
with the amaxes a_i it gives

    (u W, v W m, v W s)        W = sum w_i,    m = sum w_i sqrt(a_i) / W,    s = sum w_i a_i / W

- *A common factor* (clipping, a sum of equal records) is W. It is divided out.
- *A mean of different amaxes* has s > m^2: s - m^2 is the variance of sqrt(a). The largest of k numbers is at most
  mean + sqrt(k - 1) * standard deviation (Samuelson), so

      a = (m + 8 sqrt(s - m^2))^2

  is never below the largest amax of up to 65 records with equal weights. It costs range, so it is counted.
- *A rounding to bfloat16* gives s - m^2 of either sign, at most 2^-4 s. Below zero, a is bounded by 1.03 max(m^2, s).
  It is counted, too.
- *Anything else* (noise, weight decay on the leaf) gives a smaller s - m^2, or a W that no loop makes. Then the amax
  counts as not observed, and it is counted too.

u and v are small, so a norm over the whole tree does not notice the records; they are powers of two, so an amax that
nobody touched is read bit for bit (a smaller one than 2^-86 as 2^-86).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

_WEIGHT = np.float32(2.0**-64)
_UNIT = np.float32(2.0**-40)
_SMALLEST = np.float32(2.0**-86)
_LARGEST_WEIGHT = np.float32(2.0**32)  # of what a loop may multiply gradients by
_SMALLEST_WEIGHT = np.float32(2.0**-60)
_ROUNDING = np.float32(2.0**-19)  # of the variance, relative to its mean: nine roundings
_NARROW_ROUNDING = np.float32(2.0**-4)  # the same in bfloat16, with that of sums over devices
_DEVIATIONS = np.float32(8.0)  # the largest of 65 numbers


class Observed(NamedTuple):
    """What records say.

    Attributes:
      amax: float32[...], 0.0 where there is none.
      is_used: bool[...], whether the tensor was used, if only with zeros.
      is_spoiled: bool[...], whether the amax is only a bound, or was lost.
    """

    amax: Float[Array, "..."]
    is_used: Bool[Array, "..."]
    is_spoiled: Bool[Array, "..."]


def record(amax: Float[Array, "..."], is_used: Bool[Array, "..."]) -> Float[Array, "... 3"]:
    """The records of amaxes; zeros where `is_used` is False."""
    amax = jnp.where(is_used, jnp.where(amax > 0, jnp.maximum(amax, _SMALLEST), amax), 0.0)
    weight = jnp.where(is_used, _WEIGHT, np.float32(0.0))
    return jnp.stack([weight, jnp.sqrt(amax) * _UNIT, amax * _UNIT], axis=-1)


def is_record(gradient: Any, leaf: Any) -> bool:
    """Whether the gradient of a scale leaf is a record, or an amax as `jax.grad` and programs of one's own give it."""
    return jnp.ndim(gradient) == jnp.ndim(leaf) + 1 and jnp.shape(gradient)[-1] == 3


def observe(pairs: Sequence[tuple[Any, Any]]) -> Observed:
    """What pairs (gradient, scale leaf) say, as [n]. A plain amax of 0 or less says that the tensor was not used."""
    gradients = [jnp.asarray(g, jnp.float32) for g, _ in pairs]
    are_records = [is_record(*pair) for pair in pairs]
    if all(are_records):  # a few operations for any number of leaves
        return read(jnp.concatenate([g.reshape(-1, 3) for g in gradients]))
    found = [
        read(g.reshape(-1, 3)) if its else _plain(g.ravel()) for g, its in zip(gradients, are_records, strict=True)
    ]
    return Observed(*map(jnp.concatenate, zip(*found, strict=True)))


def not_finite_alike(gradients: PyTree, leaves: PyTree) -> list[Array]:
    """For each gradient of a scale leaf an array of the leaf's shape, which is not finite where the gradient is not.

    It has no axis to reduce: the checks of all leaves are then one operation.
    """
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(leaves), strict=True)
    return [g[..., 0] + g[..., 1] + g[..., 2] if is_record(g, leaf) else g for g, leaf in pairs]


def _plain(amax: Float[Array, "n"]) -> Observed:
    return Observed(amax, ~(amax <= 0), jnp.zeros(amax.shape, bool))


def read(records: Float[Array, "... 3"]) -> Observed:
    """What records say, after whatever was done to them."""
    weight, root, amax = (records[..., i] for i in range(3))
    is_used = (weight != 0) | (root != 0) | (amax != 0)
    factor = weight / _WEIGHT
    is_whole = factor == 1
    factor = jnp.where(factor == 0, 1.0, factor)
    mean, root = amax / _UNIT / factor, root / _UNIT / factor
    variance = mean - root * root
    rounding = _ROUNDING * jnp.abs(mean)
    of_mean = root + _DEVIATIONS * jnp.sqrt(jnp.maximum(variance, 0.0))
    bound = jnp.where(variance < 0, root * root * (1 + _NARROW_ROUNDING / 2), of_mean * of_mean)
    is_one = jnp.abs(variance) <= rounding
    found = jnp.where(is_one, jnp.where(is_whole, mean, _without_rounding(mean)), bound)
    is_lost = (variance < -_NARROW_ROUNDING * mean) | (jnp.abs(weight) > _LARGEST_WEIGHT * _WEIGHT)
    is_lost |= jnp.abs(weight) < _SMALLEST_WEIGHT * _WEIGHT
    is_finite = jnp.isfinite(variance)
    # An overflow: inf and NaN stay, for the decision to skip and for the semantics of TransformerEngine.
    amax = jnp.where(is_finite, jnp.where(is_lost, 0.0, found), mean)
    return Observed(jnp.where(is_used, amax, 0.0), is_used, is_used & is_finite & (is_lost | ~is_one))


def _without_rounding(amax: Float[Array, "..."]) -> Float[Array, "..."]:
    """The amax before it was multiplied and divided by a factor; exact if it has 20 bits, as in 16-bit tensors."""
    short = lax.reduce_precision(amax, exponent_bits=8, mantissa_bits=19)
    return jnp.where(jnp.abs(amax - short) <= np.float32(2.0**-22) * amax, short, amax)
