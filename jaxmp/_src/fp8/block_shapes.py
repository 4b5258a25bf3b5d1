"""Blocks of elements along one axis or two: their amaxes, their factors spread over elements, and checks of both."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.numerics import casting, float_bits


def block_amax(x: Float[Array, "..."], blocked: tuple[int, ...], size: int | None) -> Float[Array, "..."]:
    """max |x| over blocks of `size` (None: all) along the axes `blocked`; ignores NaNs, as CUDA's fmaxf."""
    bits = float_bits.magnitude_bits(x)
    if size is None:
        return float_bits.from_bits(jnp.max(bits, axis=blocked, keepdims=True, initial=0))
    for axis in blocked:
        count = -(-bits.shape[axis] // size)
        padding = [(0, count * size - n if i == axis else 0) for i, n in enumerate(bits.shape)]
        bits = jnp.pad(bits, padding)
        bits = bits.reshape(*bits.shape[:axis], count, size, *bits.shape[axis + 1 :])  # [..., n] -> [..., count, size]
        bits = jnp.max(bits, axis=axis + 1)
    return float_bits.from_bits(bits)


def spread(blocks: Float[Array, "..."], shape: tuple[int, ...], size: int | None) -> Float[Array, "..."]:
    """The numbers of `blocks`, repeated for all elements of each block, in the shape `shape`."""
    for axis, n in enumerate(shape):
        if blocks.shape[axis] != n and size is not None:
            blocks = lax.slice_in_dim(jnp.repeat(blocks, size, axis=axis), 0, n, axis=axis)
    return jnp.broadcast_to(blocks, shape)


def blocked_axes(x: Any, axis: int | tuple[int, ...]) -> tuple[int, ...]:
    """`axis` as one or two different axes of `x`, counted from the front."""
    if not casting.is_float(x):
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"quantize takes an array of floats of 16 bits or more; got {got}. Cast it to float32 first.")
    axis_tuple = axis if isinstance(axis, tuple) else (axis,)
    axes = {i % x.ndim for i in axis_tuple if -x.ndim <= i < x.ndim}
    if len(axes) != len(axis_tuple) or len(axis_tuple) not in (1, 2):
        raise ValueError(f"axis is one axis of x, or two different ones; got {axis!r} for x of shape {x.shape}")
    return tuple(sorted(axes))


def check_stored(q: Any, scale_inv: Any, dtypes: tuple[Any, ...], scale_dtype: Any, size: int | None) -> None:
    """Raises an error unless `q` and `scale_inv` have the dtypes and shapes that `quantize` returns."""
    if q.dtype not in dtypes or scale_inv.dtype != scale_dtype:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(
            f"dequantize takes the {names} and the {jnp.dtype(scale_dtype)} that quantize returns; "
            f"got {q.dtype} and {scale_inv.dtype}"
        )
    fits = len(q.shape) == len(scale_inv.shape) and all(
        m in (n, 1 if size is None else -(-n // size)) for n, m in zip(q.shape, scale_inv.shape, strict=True)
    )
    if not fits:
        block = "all" if size is None else f"every {size}"
        raise ValueError(
            f"each axis of scale_inv is as long as that of q, or one for {block} elements; "
            f"got {scale_inv.shape} for q {q.shape}"
        )
