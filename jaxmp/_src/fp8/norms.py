"""A norm before fp8 layers, computed in the pass that casts its result, so that no 16-bit result is stored.

An fp8 layer casts its input y. If y is the result of a norm of x, a kernel computes the cast from x, the statistics of
its rows, and the norm's weight and bias (`pallas_kernels.norm`). Then nothing else reads y, and XLA does not compute
it. The kernel rounds y to its dtype before the cast, so the layer gets the same numbers. The derivative is still that
of y: the gradient of the norm is flax's own.

A layer gets y as an ordinary array. So a norm tells of its inputs, for this very y at this level of a trace (`told`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxmp._src.base import ambient
from jaxmp._src.fp8 import told
from pallas_kernels import passes
from pallas_kernels.norm import Norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Made:
    """How a norm over the last axis made an array: (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias.

    Attributes:
      x: the input; one of float32, bfloat16, float16.
      weight, bias: of the last axis of x; None without.
      epsilon: as above.
      centers: whether the norm subtracts a mean; var(x) is the mean of x^2 without it.
      fast_variance: whether var(x) is computed as the mean of x^2 minus the square of the mean.
    """

    x: Array
    weight: Array | None
    bias: Array | None
    epsilon: float = dataclasses.field(metadata={"static": True})
    centers: bool = dataclasses.field(metadata={"static": True})
    fast_variance: bool = dataclasses.field(metadata={"static": True})

    of_products: ClassVar[bool] = False

    def plan(self, dtype: Any, rounded: Any, rows: int) -> passes.Pass:
        """See `made.Made`."""
        return Norm(self.centers, self.weight is not None, self.bias is not None).plan(dtype, rounded, rows)

    def arguments(self) -> list[Array]:
        """See `made.Made`. The statistics are flax's expressions, which XLA computes once."""
        wide = self.x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1) if self.centers else None
        if mean is None:
            variance = jnp.mean(lax.square(wide), axis=-1)
        elif self.fast_variance:
            variance = jnp.maximum(0.0, jnp.mean(lax.square(wide), axis=-1) - lax.square(mean))
        else:
            variance = jnp.mean(lax.square(wide - jnp.expand_dims(mean, -1)), axis=-1)
        of_columns = [v.astype(jnp.float32) for v in (self.weight, self.bias) if v is not None]
        return [self.x, *([] if mean is None else [mean]), lax.rsqrt(variance + self.epsilon), *of_columns]


def note(y: Any, made: Made) -> None:
    """Notes in a loss how a norm made `y`, if a kernel can make its cast."""
    vectors = [v for v in (made.weight, made.bias) if v is not None]
    is_last_axis = all(v.shape == jnp.shape(made.x)[-1:] for v in vectors)
    if not ambient.is_in_loss() or not isinstance(y, jax.Array) or not is_last_axis or jnp.ndim(made.x) < 2:
        return
    if y.dtype in passes.DTYPES and jnp.result_type(made.x) in passes.DTYPES:
        told.of(y).made = made


def is_plain(norm: Any, x: Any) -> bool:
    """Whether a norm of flax takes its statistics over the last axis of x, on each device, and has its params there."""
    axes = (*np.ravel(norm.reduction_axes), *np.ravel(norm.feature_axes))
    return norm.axis_name is None and len(axes) == 2 and all(axis in (-1, jnp.ndim(x) - 1) for axis in axes)


def made_by_norm(y: Array, summed: Sequence[int]) -> Made | None:
    """How a norm made `y`, which a layer sums over these axes; None if the layer casts y itself."""
    if not ambient.is_in_loss() or tuple(summed) != (y.ndim - 1,):
        return None
    before = told.before_conversion(y)
    if before is not y and before.dtype != jnp.float32:
        return None  # a float32 result that the layer converted is rounded once, too
    found = told.found(before)
    return None if found is None else found.made
