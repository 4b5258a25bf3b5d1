"""Reduces gradients over devices, as an optax transform.

A data-parallel step sums the gradients of its devices. In float16 the sum of finite values can overflow (four times
32768 is inf). In float32 it does not overflow, but moves twice the bytes. FairScale and FSDP divide by about the square
root of the number of devices before the sum and by the rest after it, which avoids both overflow and underflow in
float16.
"""

from typing import Any

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import PyTree

from jaxmp._src.devices import collectives
from jaxmp._src.distributed import gathered_params
from jaxmp._src.fp8 import scale_leaves


class ReducedState(optax.EmptyState):
    """The state of `reduce_gradients`: none, in a type of its own, since this transform may stand before the scale."""


def reduce_gradients(
    axis_name: collectives.AxisName = "auto", dtype: Any = jnp.float32, *, predivide: float | None = None
) -> optax.GradientTransformation:
    """A transform that replaces gradients by their mean over `axis_name`; chain it *before* `mixed_precision`.

        g <- (sum over devices of g_d / predivide) * (predivide / devices)

    Args:
      axis_name: `"auto"` (every axis bound by pmap or shard_map; under plain jit XLA reduces, and this only casts), or
        names.
      dtype: dtype of the sum and of the result: float32 (default, cannot overflow), float16, bfloat16, or None for the
        gradients' own, which moves half the bytes if they are in 16 bits.
      predivide: divisor of the gradients before the sum; None: 1 in float32, otherwise the power of two next to the
        square root of the number of devices (FSDP's rule). On 4 devices this doubles the range of a float16 sum, no
        more: 4 * 32768 / 2 still overflows. With the number of devices as the divisor the sum never overflows, but
        small gradients underflow.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: an axis that is not bound; gradients of params that `jaxmp.fsdp` cuts over one of the axes.

    Example:
      >>> tx = reduce_gradients(dtype=jnp.float32)
      >>> grads, _ = tx.update({"w": jnp.ones(1, jnp.float16)}, tx.init({}))
      >>> grads
      {'w': Array([1.], dtype=float32)}

    References:
      FairScale, fairscale/nn/data_parallel/fully_sharded_data_parallel.py; torch FSDP's gradient_predivide_factor.
    """

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, ReducedState]:
        del params
        axes = collectives.bound_axes(axis_name)
        gathered_params.check_mean(updates, axes)
        factor = predivide_or_rule(predivide, dtype, axes)
        # value_and_grad has already reduced the amaxes of fp8 scales, with MAX.
        amaxes, grads = scale_leaves.partition(updates)
        return scale_leaves.merge(amaxes, collectives.mean_over(grads, axes, dtype=dtype, predivide=factor)), state

    return optax.GradientTransformation(lambda params: ReducedState(), update_fn)


def predivide_factor(axes: tuple[str, ...]) -> float:
    """The divisor of FSDP before a sum over `axes`: a power of two near the square root of the device count."""
    devices = 1
    for axis in axes:
        devices *= lax.axis_size(axis)
    factor = 1
    while devices % factor == 0 and devices / factor > factor:
        factor *= 2
    return float(factor)


def predivide_or_rule(predivide: float | None, dtype: Any, axes: tuple[str, ...]) -> float:
    """`predivide`; if it is None, 1 for sums in float32 and FSDP's rule in 16 bits (or for `dtype=None`)."""
    if predivide is not None:
        return predivide
    in_float32 = dtype is not None and jnp.dtype(dtype).itemsize >= 4
    return 1.0 if in_float32 else predivide_factor(axes)
