"""Collectives: finite flags, norms, sums and gathered params. No other file calls a collective.

All devices must take the same decision. So a decision has two steps. First, each device reduces its own part to one
small float32 number (1.0 where it found a non-finite value). Then one MAX over the bound axes gives every device the
same number. The values themselves are never reduced to find inf or NaN: MAX drops NaN on CPU and with NCCL, and so does
`jnp.max` of a sharded array under jit; and a sum of float16 overflows on finite values.

Under `jax.pmap` and `jax.shard_map`, `axis_name="auto"` finds the axes. Under plain `jax.jit` with shardings no axes
are bound and there is nothing to do: XLA itself reduces the flag of a sharded array.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import compat
from jaxmp._src.numerics import casting, reductions

AxisName = str | Sequence[str] | None
T = TypeVar("T")


def bound_axes(axis_name: AxisName) -> tuple[str, ...]:
    """The axes over which all devices must take the same decision; a ValueError for None where axes are bound."""
    manual = compat.manual_axes()
    if axis_name is None and manual:
        raise ValueError(
            f'axis_name=None is for no bound axes; {manual} are bound, so devices would diverge. Use axis_name="auto".'
        )
    return manual if axis_name == "auto" else named_axes(axis_name)


def named_axes(axis_name: AxisName) -> tuple[str, ...]:
    """`axis_name` as a tuple (None gives an empty one); a ValueError for a name that is not bound."""
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as e:
            bound = ", ".join(compat.manual_axes()) or "none"
            raise ValueError(
                f"axis name {name!r} is not bound here; bound axes: {bound}. Call this in jax.shard_map; under plain "
                f"jit leave axis_name out."
            ) from e
    return names


def largest_on_any_device(values: T, axes: tuple[str, ...]) -> T:
    """`values`, a tree of n flags or counts, each the largest of any device over `axes`: one MAX of float32[n]."""
    # float32, so that XLA can merge it with other MAXes of float32
    local = [v.astype(jnp.float32) for v in jax.tree.leaves(values)]
    if axes and local:
        largest = max_over(jnp.stack(local), axes)
        local = [largest[i] for i in range(len(local))]
    return jax.tree.unflatten(jax.tree.structure(values), local)


def any_nonfinite(tree: PyTree) -> Bool[Array, ""]:
    """Whether a float or complex leaf of `tree` holds inf or NaN on this device."""
    return reductions.any_nonfinite(
        [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    )


def all_finite(tree: PyTree, axis_name: AxisName = "auto") -> Bool[Array, ""]:
    """Whether every float leaf of `tree` is finite on every device.

    Each device calls `isfinite` on its own leaves. Then the devices take one MAX of a float32 flag over the bound axes.
    A device without leaves takes part.

    Args:
      tree: pytree of arrays; leaves that are not floats are ignored.
      axis_name: `"auto"` (every axis bound by pmap or shard_map), names, or None where no axis is bound.

    Returns:
      bool[], the same on every device.

    Raises:
      ValueError: a name that is not bound, or None where axes are bound.

    Example:
      >>> all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    (bad,) = largest_on_any_device([any_nonfinite(tree)], bound_axes(axis_name))
    return bad == 0


def as_common(counts: T, axis_name: AxisName) -> T:
    """The maximum of each of a tree of counts over the axes over which one varies; the counts if none varies."""
    local, treedef = jax.tree.flatten(counts)
    axes = tuple(a for a in bound_axes(axis_name) if any(a in compat.varying_axes(c) for c in local))
    # Under vmap, on a mesh with explicit axes, only some of them may be split: jax would not stack those.
    return treedef.unflatten(max_over(jnp.stack(local), axes)) if axes else counts


def sum_over(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The sum of `x` over `axes`; `x` if there are no axes."""
    return lax.psum(compat.as_varying(x, axes), axes) if axes else x


def max_over(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The maximum of `x` over `axes`; `x` if there are no axes."""
    # jax requires a value that varies over all of the axes, or over none of them
    return lax.pmax(compat.as_varying(x, axes), axes) if axes else x


def of_all_parts(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """n numbers that are the same on all devices: each device gives every k-th of its own, where jax says it varies."""
    axes = tuple(compat.varying_axes(x))
    if not axes:
        return x
    turn = jnp.arange(x.size) % math.prod(map(lax.axis_size, axes))
    return sum_over(jnp.where(turn == lax.axis_index(axes), x, 0), axes)


def mean_over(tree: PyTree, axes: tuple[str, ...], *, dtype: Any = jnp.float32, predivide: float = 1.0) -> PyTree:
    """The mean of float leaves over `axes`, in `dtype` (None: the leaf's own): sum(x / predivide) * (predivide / n)."""
    size = math.prod(map(lax.axis_size, axes))

    def mean(x: Array) -> Array:
        if not casting.is_float(x):
            return x
        if not axes:
            return x.astype(dtype or x.dtype)
        x = compat.as_varying(_divided(x, dtype, predivide), axes)  # jax sums what varies over all axes, or over none
        return lax.psum(x, axes) * jnp.asarray(predivide / size, x.dtype)

    return jax.tree.map(mean, tree)


def gather_over(x: Array, axis: str, dim: int) -> Array:
    """The parts of `x` of all devices along `axis`, concatenated along dimension `dim`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def mean_part_over(x: Array, axis: str, dim: int, *, dtype: Any, predivide: float) -> Array:
    """This device's part of the mean of `x` over one axis (see `mean_over`); the mean is cut along dimension `dim`."""
    x = _divided(x, dtype, predivide)
    part = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return part * jnp.asarray(predivide / lax.axis_size(axis), x.dtype)


def _divided(x: Array, dtype: Any, predivide: float) -> Array:
    """`x` in `dtype` (None: its own), divided by `predivide`."""
    x = x.astype(dtype or x.dtype)
    if isinstance(predivide, (int, float)) and predivide == 1:
        return x
    return x / jnp.asarray(predivide, x.dtype)
