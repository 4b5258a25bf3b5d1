"""Loss scales that never change, and the code with which every loss scale of jaxmp scales and unscales a tree."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.numerics import casting, float_bits, reductions


class Scaling:
    """`scale` and `unscale`, shared by all loss scales of jaxmp."""

    loss_scale: Float[Array, ""]

    def scale(self, tree: PyTree) -> PyTree:
        """Float leaves times the scale, in float32. In float16 a loss of 1 times 65536 would be inf."""
        return jax.tree.map(lambda x: x.astype(jnp.float32) * self.loss_scale if casting.is_float(x) else x, tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Float leaves in float32, times 1 / scale."""
        return unscale(tree, self.loss_scale)


def unscale(tree: PyTree, loss_scale: Float[Array, ""]) -> PyTree:
    """Float leaves of `tree` as float32(leaf) * float32(1 / loss_scale)."""
    # Megatron-LM and torch multiply by the rounded reciprocal, too. It is exact for powers of two.
    inv_scale = reductions.computed_once(float_bits.reciprocal(loss_scale))
    return jax.tree.map(lambda x: x.astype(jnp.float32) * inv_scale if casting.is_float(x) else x, tree)


@jax.tree_util.register_pytree_node_class
class NoOpLossScale(Scaling):
    """No loss scaling: the scale is 1, and `scale` and `unscale` only cast to float32.

    Example:
      >>> float(NoOpLossScale().loss_scale)
      1.0
    """

    @property
    def loss_scale(self) -> Float[Array, ""]:  # type: ignore[override]
        """float32[], always 1."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """`tree` with float leaves in float32."""
        return casting.cast_floats(tree, jnp.float32)

    unscale = scale

    def adjust(self, grads_finite: Bool[Array, ""]) -> Self:
        """Returns itself."""
        del grads_finite
        return self

    def __repr__(self) -> str:
        return "NoOpLossScale()"

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[()]) -> Self:
        del aux, children
        return cls()


@jax.tree_util.register_pytree_node_class
class StaticLossScale(Scaling):
    """A scale that never changes. A step that overflows is still skipped.

    Args:
      scale: positive and finite; with a power of two, scaling rounds nothing.

    Raises:
      ValueError: `scale` is not positive and finite.

    Example:
      >>> scaler = StaticLossScale(128.0)
      >>> scaler.unscale(scaler.scale(jnp.float32(3.0)))
      Array(3., dtype=float32)
    """

    def __init__(self, scale: float | Float[Array, ""]):
        if is_number(scale) and not 0 < scale < math.inf:
            raise ValueError(f"a static loss scale must be positive and finite; got {scale}. For no scaling pass 1.0.")
        self.loss_scale = jnp.asarray(scale, jnp.float32)

    def adjust(self, grads_finite: Bool[Array, ""]) -> Self:
        """Returns itself."""
        del grads_finite
        return self

    def __repr__(self) -> str:
        return f"StaticLossScale({self.loss_scale})"

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.loss_scale,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Self:
        del aux
        new = object.__new__(cls)
        (new.loss_scale,) = children
        return new


def is_one(scaler: Any) -> bool:
    """Whether a loss scale is 1, as far as this is known while a step is traced: nothing has to multiply the loss."""
    if isinstance(scaler, StaticLossScale):
        return not isinstance(scaler.loss_scale, Tracer) and bool(np.all(np.asarray(scaler.loss_scale) == 1))
    return scaler is None or isinstance(scaler, NoOpLossScale)


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number. Only those are validated, so that traced values pass."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)
