"""What the multi-tensor kernels compute, once more: naive, in NumPy and float64, element by element.

Codes of 8 bits are read by a table of all 256 values, so that nothing here shares arithmetic with the code under test.
"""

import functools
from typing import Any

import ml_dtypes
import numpy as np

GROUP = 256


@functools.cache
def table(dtype: str, *, signed: bool) -> np.ndarray:
    """float64[256]: what each code stands for, by its bits, under the scale 1."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == "uint8":
        return (codes / 255.0) ** 4
    if dtype == "int8":
        fraction = codes.view(np.int8) / 127.0
        return np.sign(fraction) * fraction**2
    values = codes.view(dtype).astype(np.float64) / float(ml_dtypes.finfo(dtype).max)
    return values if signed else values**2


def decoded(codes: Any, scales: Any, *, signed: bool) -> np.ndarray:
    """A moment of 8 bits in float64."""
    codes, scales = np.asarray(codes), np.asarray(scales, np.float64)
    values = table(codes.dtype.name, signed=signed)[codes.view(np.uint8)]
    return values * np.repeat(scales, GROUP, axis=-1)


def neighbours(x: np.ndarray, dtype: str, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The values of `dtype` next to float64 `x` in [-1, 1], below and above."""
    values = table(dtype, signed=signed)
    values = np.unique(values[np.abs(values) <= 1])
    above = np.clip(np.searchsorted(values, x), 0, values.size - 1)
    exact = values[above] == x
    return values[np.maximum(above - ~exact, 0)], values[above]


def joined(param: Any, remainder: Any) -> np.ndarray:
    """The float32 master of a bfloat16 param and its remainder, by integers."""
    remainder = np.asarray(remainder)
    unit = 256 if remainder.dtype == np.int8 else 1
    bits = (np.asarray(param).view(np.uint16).astype(np.int64) << 16) + remainder.astype(np.int64) * unit
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def saturated(x: Any, dtype: Any) -> np.ndarray:
    """float32 `x` clipped to the range of `dtype` and rounded to nearest even."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        return np.clip(np.asarray(x, np.float32), -limit, limit).astype(dtype)


def expert_by_expert(x: Any, w: Any, grad: Any, sizes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The products of experts and their gradients in float32: y, dx, dw. Rows of nobody are zero."""
    x, w, grad = (np.asarray(t, np.float32) for t in (x, w, grad))
    y, d_x, d_w = np.zeros((len(x), w.shape[2]), np.float32), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for e, (end, size) in enumerate(zip(ends, np.asarray(sizes), strict=True)):
        rows = slice(end - size, end)
        y[rows], d_x[rows], d_w[e] = x[rows] @ w[e], grad[rows] @ w[e].T, x[rows].T @ grad[rows]
    return y, d_x, d_w


def adamw(g: Any, moments: Any, scalars: Any, *, b1: float, b2: float, eps: float, nesterov: bool = False) -> Any:
    """Adam's step, and its moments."""
    mu, nu = b1 * moments[0] + (1 - b1) * g, b2 * moments[1] + (1 - b2) * g**2
    ahead = b1 * mu / scalars[2] + (1 - b1) * g / scalars[0] if nesterov else mu / scalars[0]
    return ahead / (np.sqrt(nu / scalars[1]) + eps), (mu, nu)


def lion(g: Any, moments: Any, scalars: Any, *, b1: float, b2: float) -> Any:
    """Lion's step, and its moment."""
    del scalars
    return np.sign(b1 * moments[0] + (1 - b1) * g), (b2 * moments[0] + (1 - b2) * g,)


def momentum(g: Any, moments: Any, scalars: Any, *, decay: float, nesterov: bool) -> Any:
    """The step of SGD with momentum, and its trace."""
    del scalars
    trace = decay * moments[0] + g
    return decay * trace + g if nesterov else trace, (trace,)
