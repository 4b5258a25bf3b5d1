"""The gradient of a scale leaf: a record of its amax that shows what arithmetic was done to it.

A loop may do anything with gradients between `value_and_grad` and the optimizer: clip them by their norm, take a sum
over devices, weigh a loss, add those of microbatches. All that is linear. So the gradient of a leaf of shape [...] is
float32[..., 3], with an amax a as

    (u, v sqrt(a), v a)        u = 2^-64, v = 2^-40

or three zeros for a tensor that was not used. Weights w_i of records with the amaxes a_i give

    (u W, v W m, v W s)        W = sum w_i,    m = sum w_i sqrt(a_i) / W,    s = sum w_i a_i / W

- *A common factor* (clipping, weights of a loss, sums of equal records) is W, and is divided out: s = m^2 is the amax.
- *Anything else* is spoiled, and counted. Of a mean of different amaxes, s > m^2, the largest that is known is
  (s / m)^2, which is at most the largest of them. A rounding to bfloat16 gives s close to m^2. Where the numbers are
  those of no mean (noise, weight decay on the leaf), no amax is known: it is 0.0. The optimizer takes the largest amax
  of the history if that is larger.

Two numbers cannot tell a mean of different amaxes from one amax; so there are three. u and v are small, so a norm over
the whole tree does not notice the records; they are powers of two, so an amax that nobody touched is read bit for bit
(a smaller one than 2^-86 as 2^-86).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

SIZE = 3  # numbers in a record
_WEIGHT = np.float32(2.0**-64)
_UNIT = np.float32(2.0**-40)
_SMALLEST = np.float32(2.0**-86)
_LARGEST_WEIGHT = np.float32(2.0**32)  # of what a loop may multiply gradients by
_SMALLEST_WEIGHT = np.float32(2.0**-60)
_ROUNDING = np.float32(2.0**-19)  # of s - m^2, relative to s: nine roundings
_NARROW_ROUNDING = np.float32(2.0**-4)  # the same in bfloat16, with that of sums over devices


class Observed(NamedTuple):
    """What records say.

    Attributes:
      amax: float32[...], 0.0 where there is none.
      is_used: bool[...], whether the tensor was used, if only with zeros.
      is_spoiled: bool[...], whether the amax may be too small, or was lost.
      is_record: bool[...], False of a plain amax, which does not show what was done to it.
    """

    amax: Float[Array, "..."]
    is_used: Bool[Array, "..."]
    is_spoiled: Bool[Array, "..."]
    is_record: Bool[Array, "..."]


def record(amax: Float[Array, "..."], is_used: Bool[Array, "..."]) -> Float[Array, "... 3"]:
    """The records of amaxes; zeros where `is_used` is False."""
    amax = jnp.where(is_used, jnp.where(amax > 0, jnp.maximum(amax, _SMALLEST), amax), 0.0)
    weight = jnp.where(is_used, _WEIGHT, np.float32(0.0))
    return jnp.stack([weight, jnp.sqrt(amax) * _UNIT, amax * _UNIT], axis=-1)


def is_record(gradient: Any, leaf: Any) -> bool:
    """Whether the gradient of a scale leaf is a record, or an amax as `jax.grad` and programs of one's own give it."""
    return jnp.ndim(gradient) == jnp.ndim(leaf) + 1 and jnp.shape(gradient)[-1] == SIZE


def observe(pairs: Sequence[tuple[Any, Any]]) -> Observed:
    """What pairs (gradient, scale leaf) say, as [n]. A plain amax of 0 or less says that the tensor was not used."""
    gradients = [jnp.asarray(g, jnp.float32) for g, _ in pairs]
    are_records = [is_record(*pair) for pair in pairs]
    if all(are_records):  # a few operations for any number of leaves
        return read(jnp.concatenate([g.reshape(-1, SIZE) for g in gradients]))
    observed = [
        read(g.reshape(-1, SIZE)) if its else Observed(g.ravel(), ~(g.ravel() <= 0), *jnp.zeros((2, g.size), bool))
        for g, its in zip(gradients, are_records, strict=True)
    ]
    return Observed(*map(jnp.concatenate, zip(*observed, strict=True)))


def not_finite_alike(gradients: PyTree, leaves: PyTree) -> list[Array]:
    """For each gradient of a scale leaf an array of the leaf's shape, which is not finite where the gradient is not.

    It has no axis to reduce: the checks of all leaves are then one operation.
    """
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(leaves), strict=True)
    return [g[..., 0] + g[..., 1] + g[..., 2] if is_record(g, leaf) else g for g, leaf in pairs]


def read(records: Float[Array, "... 3"]) -> Observed:
    """What records say, after whatever was done to them."""
    weight, root, amax = (records[..., i] for i in range(SIZE))
    is_used = (weight != 0) | (root != 0) | (amax != 0)
    factor = weight / _WEIGHT
    is_whole = factor == 1
    factor = jnp.where(factor == 0, 1.0, factor)
    s, m = amax / _UNIT / factor, root / _UNIT / factor
    variance = s - m * m
    is_one = jnp.abs(variance) <= _ROUNDING * jnp.abs(s)
    largest = jnp.where(m > 0, jnp.square(s / m), s)
    largest_known = jnp.where(is_one, jnp.where(is_whole, s, _without_rounding(s)), jnp.maximum(largest, s))
    is_lost = (variance < -_NARROW_ROUNDING * s) | (jnp.abs(factor) > _LARGEST_WEIGHT) | (m < 0)
    is_lost |= jnp.abs(weight) < _SMALLEST_WEIGHT * _WEIGHT
    is_finite = jnp.isfinite(variance)
    # An overflow: inf and NaN stay, for the decision to skip and for the semantics of TransformerEngine.
    amax = jnp.where(is_finite, jnp.where(is_lost, 0.0, largest_known), s)
    is_spoiled = is_used & is_finite & (is_lost | ~is_one)
    return Observed(jnp.where(is_used, amax, 0.0), is_used, is_spoiled, jnp.ones(is_used.shape, bool))


def _without_rounding(amax: Float[Array, "..."]) -> Float[Array, "..."]:
    """The amax before it was multiplied and divided by a factor; exact if it has 20 bits, as in 16-bit tensors."""
    short = lax.reduce_precision(amax, exponent_bits=8, mantissa_bits=19)
    return jnp.where(jnp.abs(amax - short) <= np.float32(2.0**-22) * amax, short, amax)
