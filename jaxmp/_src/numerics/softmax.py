"""Softmax and cross-entropy for 16-bit logits: computed in float32, defined for every row.

float16 ends at 65504 and has 11 significant bits: a sum of 70000 ones is inf, and adding 1 to 4096 gives 4096. So
these functions compute in float32. With m, the largest logit of a row,

    s = sum exp(f32(x) - f32(m))    softmax = exp(x - m) / s    log_softmax = x - m - log s

The difference is taken in float32 as well: in float16, 60000 - (-60000) is inf. Gradients have the dtype of the logits
and are rounded once.

A logit of -inf is masked. In a row where every logit is masked, s = 0. The functions treat such a row as an empty sum:
probabilities are 0, log-probabilities -inf, the cross-entropy is 0, and gradients are 0, not NaN. An inf or NaN among
the other logits appears in the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Axis = int | tuple[int, ...]


def softmax(
    x: Float[Array, "..."], axis: Axis = -1, *, where: Bool[Array, "..."] | None = None, dtype: Any = jnp.float32
) -> Float[Array, "..."]:
    """exp(x) / sum exp(x), computed in float32 for every dtype of `x`.

    Args:
      x: logits of any float dtype.
      axis: the axis or axes of the sum.
      where: bools, which elements count, of a shape that broadcasts to that of `x`. The others get 0; their values,
        NaN included, do not matter.
      dtype: the dtype of the result. The arithmetic is always float32.

    Returns:
      An array of `dtype`, of the shape of `x`; zeros in rows where no element counts. Gradients have the dtype of `x`.

    Raises:
      TypeError: `x` is not a float array, or `where` is not boolean.

    Example:
      >>> softmax(jnp.array([6e4, 6e4, -6e4], jnp.float16))
      Array([0.5, 0.5, 0. ], dtype=float32)
      >>> softmax(jnp.array([1.0, 2.0]), where=jnp.array([False, False]))
      Array([0., 0.], dtype=float32)

    References:
      Micikevicius et al. 2018 (arXiv 1710.03740), section 3.3: "large reductions ... should be carried out in FP32".
    """
    with jax.named_scope("jaxmp.softmax"):
        x = jnp.asarray(x)
        counts = _counting(x, where)
        shifted, total = _shifted(x, axis, counts)
        return jnp.where(counts, jnp.exp(shifted) / _nonzero(total), 0.0).astype(dtype)


def softmax_cross_entropy(
    logits: Float[Array, "... classes"],
    labels: Int[Array, "..."] | Float[Array, "... classes"],
    *,
    where: Bool[Array, "..."] | None = None,
    label_smoothing: float | Float[Array, ""] = 0.0,
    dtype: Any = jnp.float32,
) -> Float[Array, "..."]:
    """-sum_c q_c log_softmax(logits)_c, computed in float32: the loss of each row, without an average.

        q = (1 - a) labels + a / (number of classes that count)        a = label_smoothing

    Args:
      logits: floats of any dtype; the last axis holds the classes.
      labels: integers, the class of each row; or floats of the shape of `logits`, a distribution over classes. A class
        of probability 0 adds 0, even if its log-probability is -inf.
      where: bools, which classes count, of a shape that broadcasts to that of `logits`. To ignore whole rows, average
        with `jnp.mean(loss, where=...)`, or mask all classes of these rows: their loss is then 0.
      label_smoothing: a, from 0 to 1.
      dtype: the dtype of the result. Keep float32 for a loss that will be scaled.

    Returns:
      An array of `dtype`, of the shape of `logits` without the last axis. inf where the label is a masked class; NaN
      where the label is not a class (negative labels included). Gradients have the dtype of `logits`.

    Raises:
      TypeError: as for `softmax`; or labels are neither integers nor floats.
      ValueError: labels have another shape; or `label_smoothing` is outside 0 to 1.

    Example:
      >>> logits = jnp.array([[6e4, 0.0, -6e4], [1.0, 1.0, -jnp.inf]], jnp.float16)
      >>> softmax_cross_entropy(logits, jnp.array([1, 0]))
      Array([6.000000e+04, 6.931472e-01], dtype=float32)
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if isinstance(label_smoothing, (int, float)) and not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1; got {label_smoothing}")
    is_class = jnp.issubdtype(labels.dtype, jnp.integer)
    if not is_class and not jnp.issubdtype(labels.dtype, jnp.floating):
        raise TypeError(f"labels must be integers (classes) or floats (a distribution); got {labels.dtype}")
    expected = logits.shape[:-1] if is_class else logits.shape
    if labels.shape != expected:
        raise ValueError(
            f"{'integer' if is_class else 'float'} labels must have shape {expected}; got {labels.shape}, for logits "
            f"of shape {logits.shape}. Pass one integer for each row, or a distribution."
        )
    with jax.named_scope("jaxmp.softmax_cross_entropy"):
        counts = _counting(logits, where)
        shifted, sums = _shifted(logits, -1, counts)
        log_probabilities = jnp.where(counts, shifted - jnp.log(_nonzero(sums)), -jnp.inf)
        target = labels.astype(jnp.float32)
        if is_class:
            classes = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
            target = (classes == labels.astype(jnp.int32)[..., None]).astype(jnp.float32)
        if not (isinstance(label_smoothing, (int, float)) and label_smoothing == 0):
            number = jnp.sum(counts, axis=-1, keepdims=True).astype(jnp.float32)
            target = (1.0 - label_smoothing) * target + label_smoothing * (counts / _nonzero(number))
        unused = (target == 0) & (log_probabilities == -jnp.inf)  # 0 times inf is 0 here
        of_masked = jnp.where(target == 0, 0.0, jnp.inf)
        terms = jnp.where(counts, -target * jnp.where(unused | ~counts, 0.0, log_probabilities), of_masked)
        not_empty = jnp.any(counts, axis=-1, keepdims=True)
        loss = jnp.sum(jnp.where(not_empty, terms, 0.0), axis=-1)
        if is_class:
            loss = jnp.where((labels >= 0) & (labels < logits.shape[-1]), loss, jnp.nan)
        return loss.astype(dtype)


def _counting(x: Array, where: Any) -> Array:
    """bool, of the shape of `x`: which elements count. `where` and a logit of -inf both mask."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"logits must be a float array; got {x.dtype}. Cast them with .astype(jnp.float32).")
    unmasked = x != -jnp.inf
    if where is None:
        return unmasked
    where = jnp.asarray(where)
    if where.dtype != bool:
        raise TypeError(
            f"where must be boolean, True where an element counts; got {where.dtype}. Write where=mask != 0."
        )
    return jnp.broadcast_to(where, x.shape) & unmasked


def _shifted(x: Array, axis: Axis, counts: Array) -> tuple[Array, Array]:
    """float32 (x - m, sum of exp(x - m)), with the largest element m of each row; 0 in a row where nothing counts."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(lax.stop_gradient(wide), axis=axis, keepdims=True, initial=-jnp.inf, where=counts)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)  # for an empty row; an inf in x still shows in the result
    shifted = jnp.where(counts, wide, largest) - largest  # 0 where masked: exp and its derivatives stay finite there
    return shifted, jnp.sum(jnp.where(counts, jnp.exp(shifted), 0.0), axis=axis, keepdims=True)


def _nonzero(total: Array) -> Array:
    return jnp.where(total == 0, 1.0, total)
