"""The three products of each fp8 recipe in NumPy's float64, on numbers that NumPy casts.

The casts are written from the recipes' equations; only the Hadamard transform is jaxmp's (`test_nvfp4` holds it).
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import block_oracle
from jaxmp._src.fp8 import nvfp4
from jaxmp.fp8 import NVFP4, BlockScaling, CurrentScaling, DelayedScaling, Int8

LETTERS = {"lhs": "bmk", "rhs": "bkn", "grad": "bmn"}
PRODUCTS = {"y": ("lhs", "rhs"), "dx": ("grad", "rhs"), "dw": ("lhs", "grad")}
SUMMED = {"y": "k", "dx": "n", "dw": "m"}
NARROW = {"y": None, "dx": "dgrad", "dw": "wgrad"}  # the attribute of a recipe that leaves it in 16 bits


def products(recipe: Any, x: Any, w: Any, g: Any, scales: Sequence[float] = ()) -> list[tuple[Any, Any]]:
    """y, dx, dw for x [B, M, K], w [B, K, N], g [B, M, N] in float64, each with the sum of the magnitudes it adds.

    `scales` are those of x, w and g for a recipe with state.
    """
    tensors = dict(zip(LETTERS, (x, w, g), strict=True))
    given = dict(zip(LETTERS, scales, strict=False))
    found = []
    for name, roles in PRODUCTS.items():
        is_wide = NARROW[name] is not None and getattr(recipe, NARROW[name]) == "bfloat16"
        a, b = (
            np.float64(np.asarray(tensors[role], np.float32).astype(ml_dtypes.bfloat16))
            if is_wide
            else rounded(recipe, role, tensors[role], SUMMED[name], given.get(role))
            for role in roles
        )
        result = LETTERS[{"y": "grad", "dx": "lhs", "dw": "rhs"}[name]]
        subscripts = f"{LETTERS[roles[0]]},{LETTERS[roles[1]]}->{result}"
        found.append(tuple(np.einsum(subscripts, p, q, optimize=True) for p, q in ((a, b), (abs(a), abs(b)))))
    return found


def rounded(recipe: Any, role: str, x: Any, summed: str, scale: float | None) -> Any:
    """What a recipe makes of a tensor for the product that sums over the axis `summed`, in float64."""
    axis, backward = (LETTERS[role].index(summed),), role == "grad"
    if isinstance(recipe, NVFP4):
        x = np.asarray(nvfp4.hadamard(x)) if recipe.hadamard and summed == "m" else x
        return nvfp4_values(x, (1, 2) if recipe.square_weights and role == "rhs" else axis)
    if isinstance(recipe, Int8):
        q, scale_inv = int8_rows(x, axis[0])
        return q * np.float64(scale_inv)
    if isinstance(recipe, DelayedScaling | CurrentScaling):
        return tensor_values(recipe, x, scale, backward=backward)
    axis = (1, 2) if isinstance(recipe, BlockScaling) and role == "rhs" else axis
    q, scale_inv = block_oracle.quantized(recipe, x, axis, backward=backward)
    return np.float64(block_oracle.dequantized(q, scale_inv, axis, recipe.block_size))


def tensor_values(recipe: Any, x: Any, scale: float | None, *, backward: bool) -> Any:
    """x by one scale, in float64; that of its own amax without `scale`."""
    x = np.asarray(x, np.float32)
    dtype = np.dtype(recipe.dtype(backward=backward))
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    if scale is None:
        scale = largest / np.abs(x).max()
        scale = np.ldexp(1.0, np.frexp(scale)[1] - 1) if recipe.power_of_two else scale
    q = np.clip(x * np.float32(scale), -largest, largest).astype(dtype)
    return np.float64(q.astype(np.float32)) * np.float64(np.float32(1) / np.float32(scale))


def int8_rows(x: Any, axis: int) -> tuple[Any, Any]:
    """(q, scale_inv) of `Int8`, in NumPy's float32."""
    amax = np.abs(x).max(axis=axis, keepdims=True)
    scale = np.where(amax > 0, np.float32(127) / np.where(amax > 0, amax, 1), np.float32(1)).astype(np.float32)
    return np.clip(np.round(x * scale), -127, 127).astype(np.int64), (np.float32(1) / scale).astype(np.float32)


def nvfp4_rewritten(x: Any, axis: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """(q, scale_inv, tensor_scale_inv) of finite x by the equations, in NumPy, blocked along the axes `axis`."""
    x = np.asarray(x, np.float32)
    largest = np.finfo(np.float32).max
    amax, padded = abs(x), [-(-n // 16) * 16 if i in axis else n for i, n in enumerate(x.shape)]
    amax = np.pad(amax, [(0, m - n) for m, n in zip(padded, x.shape, strict=True)])
    for i in axis:
        amax = np.maximum.reduceat(amax, np.arange(0, padded[i], 16), axis=i)
    with np.errstate(divide="ignore", over="ignore"):
        scale = min(np.float32(2688) / x.__abs__().max(), largest) if x.any() else np.float32(1)
        inverse = np.float32(1) / scale
        factor = np.minimum(amax / np.float32(6) * scale, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        per_block = np.minimum(np.float32(1) / (factor.astype(np.float32) * inverse), largest)
    q = np.clip(x * block_oracle.spread(per_block, x.shape, axis, 16), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return q, factor, inverse


def nvfp4_values(x: Any, axis: tuple[int, ...]) -> Any:
    """x through NVFP4, in float64."""
    q, factor, inverse = nvfp4_rewritten(x, axis)
    return (
        q.astype(np.float64) * block_oracle.spread(factor.astype(np.float64), x.shape, axis, 16) * np.float64(inverse)
    )


def assert_products(found: Sequence[Any], expected: Sequence[tuple[Any, Any]]) -> None:
    """y, dx, dw are the sums of the oracle up to 1e-6 of the magnitudes summed, then rounded once to their dtype."""
    for name, actual, (exact, magnitude) in zip(("y", "dx", "dw"), found, expected, strict=False):
        actual = np.asarray(actual)
        low, high = ((exact + sign * 1e-6 * magnitude).astype(actual.dtype) for sign in (-1, 1))
        actual = actual.reshape(exact.shape)
        bad = ~((actual >= low) & (actual <= high))
        error = abs(np.float64(actual) - exact) / np.where(magnitude, magnitude, 1)
        assert not bad.any(), f"{name} is off by up to {error[bad].max():.1e} of what it sums"
