"""Convolutions with a kernel of one pixel, which are matmuls at each pixel.

    y[b, i, j, :] = x[b, s i, s j, :] w          strides s

Other convolutions run unchanged, in the dtype of the layer.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array

from jaxmp._src.fp8.matmul import DimensionNumbers

_BY_NAME = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR", "CAUSAL")  # pads nothing around one pixel


def is_matmul(kernel_size: Sequence[int], padding: Any, lhs_dilation: Any, groups: int) -> bool:
    """Whether a convolution is a matmul at each pixel.

    Example:
      >>> is_matmul((1, 1), "SAME", None, 1), is_matmul((3, 3), "SAME", None, 1), is_matmul((1,), 1, None, 1)
      (True, False, False)
    """
    pads_nothing = padding.upper() in _BY_NAME if isinstance(padding, str) else not np.any(np.asarray(padding))
    is_dense = lhs_dilation is None or math.prod(_all(lhs_dilation)) == 1
    return math.prod(kernel_size) == 1 and groups == 1 and bool(pads_nothing) and is_dense


def as_matmul(
    lhs: Array,
    rhs: Array,
    strides: Any,
    padding: Any,
    *,
    lhs_dilation: Any = None,
    feature_group_count: int = 1,
    **kwargs: Any,
) -> tuple[Array, Array, DimensionNumbers]:
    """The operands and dimension numbers of the matmul of flax's call of `lax.conv_general_dilated`.

    `lhs` is [batch, ..., in], `rhs` [1..., in, out]; the dilation of the kernel and the precision do nothing.

    Raises:
      ValueError: a convolution that is no matmul.
    """
    del kwargs
    size = rhs.shape[:-2]
    if not is_matmul(size, padding, lhs_dilation, feature_group_count):
        raise ValueError(
            f"an fp8 convolution must be a matmul at each pixel; got a kernel {size}, {feature_group_count} groups, "
            f"padding {padding!r} and lhs_dilation {lhs_dilation!r}. Leave out conv_general_dilated there."
        )
    steps = _all(1 if strides is None else strides)
    steps = steps * len(size) if len(steps) == 1 else steps
    pixels = lax.slice(lhs, (0,) * lhs.ndim, lhs.shape, (1, *steps, 1))
    return pixels, rhs.reshape(rhs.shape[-2:]), (((lhs.ndim - 1,), (0,)), ((), ()))


def _all(sizes: Any) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)
