"""Clips gradients by their global norm, and counts zeros among them, by the rules of Megatron-LM.

Put these inside `mixed_precision`, where gradients are unscaled and float32:

    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.adamw(1e-3))
    tx = jaxmp.mixed_precision(inner, "fp16")

Megatron's rule differs from optax's in three ways, which change the values of a run:

-   The coefficient is max_norm / (norm + 1e-6). A norm of exactly max_norm is still multiplied by 0.999999.
-   The coefficient is applied only if it is strictly below 1.
-   If the norm overflows float32 on finite gradients, the step is a step of zeros and is not skipped.

With model parallelism each device has a part of the params. The norm is then combined over the model-parallel axes, and
a leaf that every shard has as a whole (`replicated`: biases, norms) counts once. A shared param (tied embeddings) is
one leaf and counts once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import compat
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting, reductions
from jaxmp._src.numerics.frozen_kernel import is_frozen
from jaxmp._src.step.state import GlobalNormState, ZeroCountState

_EPSILON = 1e-6  # Megatron-LM's


def clip_by_global_norm(
    max_norm: float | Float[Array, ""],
    *,
    axis_name: collectives.AxisName = None,
    replicated: PyTree | None = None,
    ord: float = 2,
) -> optax.GradientTransformation:
    """A transform that scales all gradients down if their global norm is too large; Megatron-LM's rule.

        g <- g * c  if c < 1,  c = max_norm / (norm + 1e-6)

    Args:
      max_norm: >= 0, in the units of the gradients. 0 means no clipping; for the Python number 0 the norm is not
        computed.
      axis_name: model-parallel axes (bound by shard_map) over which params are split. Not the data axis: reduce
        gradients over it first. Not needed under plain jit.
      replicated: tree of bools like the params (or a prefix of it, or a function of them): True for leaves that every
        shard along `axis_name` has as a whole. With several axes, the tree of the params' `PartitionSpec`s: a leaf
        counts once along each axis that does not cut it. None: under `jax.shard_map(check_vma=True)`, the leaves that
        jax knows to be equal along an axis; elsewhere no leaves, so that replicated leaves count once for each shard.
      ord: order of the norm: 2, any number > 0, or `math.inf`.

    Returns:
      A transform with `GlobalNormState(grad_norm)`, the norm before clipping; `get_metrics` returns it.

    Raises:
      ValueError: a negative `max_norm`, an axis that is not bound.

    Example:
      >>> tx = clip_by_global_norm(1.0)
      >>> grads, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> [round(float(g), 5) for g in grads], float(opt_state.grad_norm)
      ([0.6, 0.8], 5.0)

    References:
      Megatron-LM, megatron/core/optimizer/clip_grads.py.
    """
    is_number = isinstance(max_norm, (int, float))
    if is_number and not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0 (0 means no clipping); got {max_norm}")
    if is_number and max_norm == 0:
        return optax.identity()

    def init_fn(params: PyTree) -> GlobalNormState:
        del params
        return GlobalNormState(jnp.zeros((), jnp.float32))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, GlobalNormState]:
        del state, params
        norm = global_norm(updates, axis_name=axis_name, replicated=replicated, ord=ord)
        factor = reductions.computed_once(factor_of(norm, max_norm))
        clipped = jax.tree.map(lambda g: (g * factor).astype(g.dtype) if casting.is_float(g) else g, updates)
        clipped = scale_leaves.map_scales(lambda _, g, amax: amax, clipped, updates)  # amaxes are not gradients
        return clipped, GlobalNormState(norm)

    return optax.GradientTransformation(init_fn, update_fn)


def factor_of(norm: Float[Array, ""], max_norm: float | Float[Array, ""]) -> Float[Array, ""]:
    """The factor that reduces gradients of this norm to at most `max_norm`; 1.0 for `max_norm` 0."""
    coefficient = jnp.asarray(max_norm, jnp.float32) / (norm + _EPSILON)
    return jnp.where((coefficient < 1.0) & (jnp.asarray(max_norm) > 0), coefficient, 1.0)


def global_norm(
    tree: PyTree, *, axis_name: collectives.AxisName = None, replicated: PyTree | None = None, ord: float = 2
) -> Float[Array, ""]:
    """The norm of all float leaves of `tree` as one vector: (sum_i |x_i|^ord)^(1/ord), in float32.

    Args:
      tree: pytree of arrays; fp8 scales (`jaxmp.fp8.is_scale`) do not count.
      axis_name: model-parallel axes over which leaves are split.
      replicated: the leaves that every shard has as a whole, as for `clip_by_global_norm`.
      ord: order of the norm; `math.inf` gives the largest magnitude.

    Returns:
      float32[].

    Raises:
      ValueError: `ord` is not > 0; an axis that is not bound.

    Example:
      >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0], jnp.float16)}))
      5.0
    """
    if isinstance(ord, (int, float)) and not ord > 0:
        raise ValueError(f"the order of a norm must be > 0; got {ord}")
    is_max = isinstance(ord, float) and ord == math.inf

    def power(xs: list[Array]) -> list[Float[Array, ""]]:
        xs = [x.astype(jnp.float32) for x in xs]
        if is_max:
            return [jnp.max(jnp.abs(x), initial=0.0) for x in xs]
        return reductions.sums_of_squares(xs) if is_two else [jnp.sum(jnp.abs(x) ** ord) for x in xs]

    is_two = isinstance(ord, int | float) and ord == 2
    largest = lambda values, start: functools.reduce(jnp.maximum, values, start)  # noqa: E731  # NaN if one is
    merge = largest if is_max else sum
    axes = collectives.named_axes(axis_name)
    split, whole = _by_shard(tree, replicated, axes, power)
    total = merge(split, jnp.zeros((), jnp.float32))
    total = collectives.max_over(total, axes) if is_max else collectives.sum_over(total, axes)
    total = merge(whole, total)
    if is_max:
        return total
    return jnp.sqrt(total) if is_two else total ** (1.0 / ord)


def count_zeros(
    *, axis_name: collectives.AxisName = None, replicated: PyTree | None = None, padding: int = 0
) -> optax.GradientTransformation:
    """A transform that counts exact zeros among the gradients, and does not change the gradients.

    Put it after the clipping, as Megatron-LM does. Many zeros in float16 mean that gradients underflow: raise the loss
    scale.

    Args:
      axis_name: model-parallel axes, as for `clip_by_global_norm`.
      replicated: leaves that every shard has as a whole, or the params' `PartitionSpec`s, as for `clip_by_global_norm`.
      padding: number of padding elements, which are always zero; they are subtracted (`padding` of a layout of
        `jaxmp.fsdp.layout_of`).

    Returns:
      A transform with `ZeroCountState(zero_grads)`, float32, exact up to 2^24; `get_metrics` returns it.

    Example:
      >>> tx = count_zeros()
      >>> _, opt_state = tx.update(jnp.array([0.0, 1.0, -0.0]), tx.init(jnp.zeros(3)))
      >>> float(opt_state.zero_grads)
      2.0
    """

    def init_fn(params: PyTree) -> ZeroCountState:
        del params
        return ZeroCountState(jnp.zeros((), jnp.float32))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, ZeroCountState]:
        del state, params
        axes = collectives.named_axes(axis_name)
        zeros_of = lambda xs: [jnp.sum(x == 0).astype(jnp.float32) for x in xs]  # noqa: E731
        split, whole = _by_shard(updates, replicated, axes, zeros_of)
        total = sum(whole, start=collectives.sum_over(sum(split, start=jnp.zeros((), jnp.float32)), axes))
        return updates, ZeroCountState(total - padding if padding else total)

    return optax.GradientTransformation(init_fn, update_fn)


def _by_shard(
    tree: PyTree, replicated: Any, axes: tuple[str, ...], f: Callable[[list[Array]], list[Array]]
) -> tuple[list[Any], list[Any]]:
    """(`f` of the float leaves that are split over shards, `f` of those that every shard has as a whole)."""
    tree = jax.tree.map(lambda x: jnp.asarray(x) if is_frozen(x) else x, tree, is_leaf=is_frozen)
    _, tree = scale_leaves.partition(tree)
    mask = replicated(tree) if callable(replicated) else False if replicated is None else replicated
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    held_by = jax.tree.leaves(jax.tree.broadcast(mask, tree, is_leaf=is_spec), is_leaf=is_spec)
    tracked = [axis for axis in axes if replicated is None and compat.is_tracked(axis)]

    def copied(held: Any, x: Array) -> tuple[str, ...]:
        """The axes along which every shard has all of `x`."""
        if tracked:
            return tuple(axis for axis in tracked if axis not in compat.varying_axes(x))
        if is_spec(held):
            return tuple(axis for axis in axes if axis not in shardings.axes_of(held))
        return axes if held else ()

    leaves = zip(held_by, jax.tree.leaves(tree), strict=True)
    floats = [(copied(held, x), x) for held, x in leaves if casting.is_float(x)]
    parts: tuple[list[Any], list[Any]] = ([], [])
    for (own, _), y in zip(floats, f([x for _, x in floats]), strict=True):
        for axis in () if own == axes else own:  # 0 on the devices that have copies
            y = jnp.where(lax.axis_index(axis) == 0, y, 0.0)
        parts[own == axes].append(y)
    return parts
