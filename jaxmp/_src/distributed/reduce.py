"""Reduces gradients over devices, as an optax transform.

A data-parallel step sums the gradients of its devices. In float16 the sum of finite values can overflow (four times
32768 is inf). In float32 the sum does not overflow, but moves twice the bytes. FairScale and FSDP divide by about the
square root of the number of devices before the sum and by the rest after it, which avoids both overflow and underflow
in float16.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.distributed import gathered_params
from jaxmp._src.fp8 import scale_leaves

_DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))


class ReducedState(optax.EmptyState):
    """The state of `reduce_gradients`: none, in a type of its own, since this transform may stand before the scale."""


def reduce_gradients(
    axis_name: collectives.AxisName = "auto",
    dtype: Any = jnp.float32,
    *,
    predivide: float | None = None,
) -> optax.GradientTransformation:
    """A transform that replaces gradients by their mean over `axis_name`; pass it as `before=` of `mixed_precision`.

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
      An optax transform without state.

    Raises:
      ValueError: another dtype, or a divisor that is not positive and finite. At the update: an axis that is not bound;
        gradients of params that `jaxmp.fsdp` cuts over one of the axes.

    Example:
      >>> tx = reduce_gradients(dtype=jnp.float32)
      >>> grads, _ = tx.update({"w": jnp.ones(1, jnp.float16)}, tx.init({}))
      >>> grads
      {'w': Array([1.], dtype=float32)}

    References:
      FairScale, fairscale/nn/data_parallel/fully_sharded_data_parallel.py; torch FSDP's gradient_predivide_factor.
    """

    check_sum(dtype, predivide)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, ReducedState]:
        del params
        axes = collectives.bound_axes(axis_name)
        for note in gathered_params.notes_of(updates):
            if note.cut and note.axis_name in axes:
                raise ValueError(
                    f"gradients cut over {note.axis_name!r} must not be averaged over it. For it call "
                    f"jaxmp.fsdp.reduce_gradients(grads, layout)."
                )
        factor = predivide_or_rule(predivide, dtype, axes)
        # value_and_grad has already reduced the amaxes of fp8 scales, with MAX.
        amaxes, grads = scale_leaves.partition(updates)
        return scale_leaves.merge(amaxes, collectives.mean_over(grads, axes, dtype=dtype, predivide=factor)), state

    return optax.GradientTransformation(lambda params: ReducedState(), update_fn)


def check_sum(dtype: Any, predivide: float | None) -> None:
    """Raises a ValueError for a dtype of a sum of gradients, or a divisor, with which it is none."""
    if dtype is not None and jnp.dtype(dtype) not in _DTYPES:
        raise ValueError(f"gradients are summed in float32, float16, bfloat16 or None (their own); got {dtype}.")
    if isinstance(predivide, int | float) and not 0 < predivide < math.inf:
        raise ValueError(f"predivide must be positive and finite; got {predivide}. None is FSDP's rule.")


def predivide_or_rule(predivide: float | None, dtype: Any, axes: tuple[str, ...]) -> float:
    """`predivide`; None: 1 in float32, else FSDP's, a power of two near the square root of the number of devices."""
    if predivide is not None:
        return predivide
    in_float32 = dtype is not None and jnp.dtype(dtype).itemsize >= 4
    if in_float32:
        return 1.0
    devices, factor = math.prod(map(lax.axis_size, axes)), 1
    while devices % factor == 0 and devices / factor > factor:
        factor *= 2
    return float(factor)


def check_branches(optimizer_state: Any) -> None:
    """Raises for `reduce_gradients` inside a transform that runs it in a branch; where axes are bound.

    Before the branch the gradients of a device are its own: what MultiSteps adds up would differ between devices, and
    what apply_if_finite decides too. In pmap, and where jax tracks no axes, MultiSteps decides the same everywhere.
    """
    tracked = any(map(compat.is_tracked, compat.manual_axes()))
    for state in tree_paths.nodes_of(optimizer_state, *_BRANCHES):
        by_device = isinstance(state, optax.ApplyIfFiniteState) or jax.tree.leaves(getattr(state, "skip_state", ()))
        reduces = bool(tree_paths.nodes_of(state, ReducedState))
        if reduces and (tracked or by_device):
            name = next(name for kind, name in _BRANCHES.items() if isinstance(state, kind))
            raise ValueError(
                f"reduce_gradients must come before {name}; got it inside. Pass it as before= of jaxmp.mixed_precision."
            )


_BRANCHES = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyTransformState: "optax.conditionally_transform",
}
