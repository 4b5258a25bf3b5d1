"""Block-scaled fp8 in NumPy, written from the equations in `jaxmp._src.fp8.blocks`; float64 where jaxmp reads bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.fp8 import MXFP8


def quantized(recipe: Any, x: Any, axis: tuple[int, ...], *, backward: bool = False) -> tuple[Any, Any]:
    """(q, scale_inv) of finite x, blocked along `axis`, counted from the front. scale_inv is float32."""
    x, size, dtype = np.asarray(x, np.float32), recipe.block_size, recipe.dtype(backward=backward)
    fp8_max = float(jnp.finfo(dtype).max)
    amax = np.abs(x)
    for i in axis:
        starts = np.arange(0, x.shape[i], size or x.shape[i])
        amax = np.maximum.reduceat(amax, starts, axis=i) if len(starts) else amax
    one = np.where(amax > 0, amax, np.float32(1))
    if isinstance(recipe, MXFP8):
        mantissa, exponent = np.frexp(one.astype(np.float64) / fp8_max)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)  # rounded up
        scale = np.where(amax > 0, np.ldexp(1.0, -np.clip(exponent, -127, 127)), 2.0**127).astype(np.float32)
    else:
        scale = np.where(amax > 0, np.float32(fp8_max) / one, np.float32(1))
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1) if recipe.power_of_two else scale
    scaled = x * spread(scale, x.shape, axis, size)
    return np.clip(scaled, -fp8_max, fp8_max).astype(dtype), np.float32(1) / scale


def dequantized(q: Any, scale_inv: Any, axis: tuple[int, ...], size: int | None) -> Any:
    """q * scale_inv, block by block, in float32."""
    return q.astype(np.float32) * spread(scale_inv, q.shape, axis, size)


def spread(blocks: Any, shape: tuple[int, ...], axis: tuple[int, ...], size: int | None) -> Any:
    """The number of each block, at each element of the block."""
    for i in axis:
        blocks = np.repeat(blocks, size or shape[i], axis=i).take(np.arange(shape[i]), axis=i)
    return blocks
