"""What devices tell each other: finite flags, norms and sums. The only file with collectives.

Every device must take the same decision, so a decision is made in two steps: each device looks at its own part and
makes a small float32 number of it (1.0 where it found a non-finite value), then one MAX over the bound axes makes it
common. Values are never reduced to find out: MAX drops NaN on CPU and with NCCL, and so does `jnp.max` of a sharded
array under jit; sums of float16 overflow on finite values.

Under `jax.pmap` and `jax.shard_map` the axes are found by themselves (`axis_name="auto"`). Under plain `jax.jit` with
shardings there are no bound axes and nothing to do: XLA reduces the flag of sharded arrays itself.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import compat
from jaxmp._src.numerics import casting

AxisName = str | Sequence[str] | None
T = TypeVar("T")


def bound_axes(axis_name: AxisName) -> tuple[str, ...]:
    """The axes over which a decision has to be common.

    Args:
      axis_name: `"auto"` for every axis bound by pmap or shard_map where this is called; a name or names; or None for
        none, which is an error where axes are bound: each device would then decide for itself.

    Returns:
      Names, perhaps none.

    Raises:
      ValueError: a name that is not bound, or None where axes are bound.
    """
    manual = compat.manual_axes()
    if axis_name is None and manual:
        raise ValueError(
            f"axis_name=None means that devices do not agree on overflow, but the axes {manual} are bound here (pmap "
            f'or shard_map): they would skip apart and diverge. Use axis_name="auto", or name the axes.'
        )
    return manual if axis_name == "auto" else named_axes(axis_name)


def named_axes(axis_name: AxisName) -> tuple[str, ...]:
    """`axis_name` as a tuple, each name checked to be bound; None is ().

    Raises:
      ValueError: a name that is not bound.
    """
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as e:
            bound = ", ".join(compat.manual_axes()) or "none"
            raise ValueError(
                f"axis name {name!r} is not bound here; bound axes: {bound}. Call this inside "
                f"jax.pmap(..., axis_name={name!r}) or jax.shard_map over a mesh with that axis; under plain jit leave "
                f"axis_name out."
            ) from e
    return names


def largest_on_any_device(values: T, axes: tuple[str, ...]) -> T:
    """`values`, a tree of n flags or counts, each the largest of any device over `axes`: one MAX of float32[n]."""
    # float32, so that XLA can merge it with other MAXes of float32
    local = [v.astype(jnp.float32) for v in jax.tree.leaves(values)]
    if axes and local:
        found = max_over(jnp.stack(local), axes)
        local = [found[i] for i in range(len(local))]
    return jax.tree.unflatten(jax.tree.structure(values), local)


def any_nonfinite(tree: PyTree) -> Bool[Array, ""]:
    """Whether a float or complex leaf of `tree` holds inf or NaN, as this device sees it."""
    found = jnp.zeros((), bool)
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            found = found | jnp.any(~jnp.isfinite(x))
    return found


def all_finite(tree: PyTree, axis_name: AxisName = "auto") -> Bool[Array, ""]:
    """Whether every float leaf of `tree` is finite on every device.

    Each device looks at its own leaves with `isfinite`; then one MAX of a float32 flag over the bound axes. A device
    that holds no leaves takes part.

    Args:
      tree: pytree of arrays; leaves that are not floats are passed over.
      axis_name: `"auto"` (every axis bound by pmap or shard_map), names, or None where no axis is bound.

    Returns:
      bool[], the same on every device.

    Raises:
      ValueError: see `bound_axes`.

    Example:
      >>> all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    (bad,) = largest_on_any_device([any_nonfinite(tree)], bound_axes(axis_name))
    return bad == 0


def as_common(count: Float[Array, ""], axis_name: AxisName) -> Float[Array, ""]:
    """The largest `count` of any device, where devices are known to differ in it; else `count`."""
    return max_over(count, tuple(a for a in bound_axes(axis_name) if a in compat.varying_axes(count)))


def sum_over(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The sum of `x` over `axes`, or `x` where there are none."""
    return lax.psum(compat.as_varying(x, axes), axes) if axes else x


def max_over(x: Float[Array, "..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """The maximum of `x` over `axes`, or `x` where there are none."""
    # jax wants a value that varies over all of the axes, or over none of them
    return lax.pmax(compat.as_varying(x, axes), axes) if axes else x


def mean_over(tree: PyTree, axes: tuple[str, ...], *, dtype: Any = jnp.float32, predivide: float = 1.0) -> PyTree:
    """The mean of float leaves over `axes`: (sum over devices of f(x) / predivide) * (predivide / devices).

    Args:
      tree: pytree of arrays.
      axes: bound axes; without any, `tree` comes back (in `dtype`).
      dtype: dtype in which the sum runs and comes back; None for each leaf's own.
      predivide: what each value is divided by before the sum.
    """
    size = 1
    for axis in axes:
        size *= lax.axis_size(axis)

    def mean(x: Array) -> Array:
        if not casting.is_float(x):
            return x
        if not axes:
            return x.astype(dtype or x.dtype)
        x = _divided(x, dtype, predivide)
        return lax.psum(x, axes) * jnp.asarray(predivide / size, x.dtype)

    return jax.tree.map(mean, tree)


def gather_over(x: Array, axis: str, dim: int) -> Array:
    """The parts of `x` that devices hold along `axis`, put together along dimension `dim`."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def mean_part_over(x: Array, axis: str, dim: int, *, dtype: Any, predivide: float) -> Array:
    """This device's part, along dimension `dim`, of what `mean_over` gives of `x` over one axis."""
    x = _divided(x, dtype, predivide)
    part = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return part * jnp.asarray(predivide / lax.axis_size(axis), x.dtype)


def _divided(x: Array, dtype: Any, predivide: float) -> Array:
    """`x` in `dtype` (None: its own), divided."""
    x = x.astype(dtype or x.dtype)
    if isinstance(predivide, (int, float)) and predivide == 1:
        return x
    return x / jnp.asarray(predivide, x.dtype)
