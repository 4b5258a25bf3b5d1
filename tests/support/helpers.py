"""Assertions that every test file shares. They look at structure and dtype as well as at values."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]  # of the project


def assert_close(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Two pytrees agree in structure, shapes, dtypes and, within the tolerances, values; NaN equals NaN.

    A Python number among `expected` stands for float32, int32 or bool, as jax reads it.
    """
    for path, a, b in _pairs(actual, expected):
        np.testing.assert_allclose(_wide(a), _wide(b), rtol=rtol, atol=atol, equal_nan=True, err_msg=path)


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Two pytrees agree in structure, shapes, dtypes and every bit but those of NaNs: -0.0 is not 0.0."""
    for path, a, b in _pairs(actual, expected):
        np.testing.assert_array_equal(_bits(a), _bits(b), err_msg=path)


def sqnr(exact: Any, rounded: Any) -> float:
    """Signal to quantization noise, in dB."""
    exact, rounded = np.asarray(exact, np.float64), np.asarray(rounded, np.float64)
    return float(10 * np.log10(np.sum(exact**2) / np.sum((exact - rounded) ** 2)))


def _pairs(actual: Any, expected: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        a, b = _array(a), _array(b)
        assert a.dtype == b.dtype, f"{name or 'the array'} has dtype {a.dtype}, expected {b.dtype}"
        assert a.shape == b.shape, f"{name or 'the array'} has shape {a.shape}, expected {b.shape}"
        pairs.append((name, a, b))
    return pairs


def _array(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, bool | int | float):
        x = np.asarray(x, {bool: bool, int: np.int32, float: np.float32}[type(x)])
    return np.asarray(x)


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biuc" else x.astype(np.float64)  # exact from every float of 64 bits and less


def _bits(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "biu":
        return x
    if x.dtype.kind == "c":
        return np.stack([_bits(x.real), _bits(x.imag)])
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.int64)
    return np.where(np.isnan(x), -1, bits)


def compiled_quickly(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that is started for what it does, not for its last bits: LLVM optimizes nothing."""
    return {**environment, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def shown(parts: Iterable[T], name: str) -> Iterator[T]:
    """The parts of a campaign, with a bar on a terminal: how many are done, and the time left. A log gets nothing."""
    parts = list(parts)
    yield from track(parts, name, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def reductions(text: str) -> list[tuple[str | None, str]]:
    """The all-reduces of a compiled program: `(operator, shape)` each."""
    operators = {}
    for name, body in re.findall(r"^%?([\w.\-]+) \([^)]*\) -> [^{]*\{\n(.*?)^\}", text, re.M | re.S):
        root = re.search(r"ROOT .*? = \S+ (\w+)\(", body)
        operators[name] = root.group(1) if root else None
    found = []
    for line in text.splitlines():
        match = re.search(r" = (\(.*?\)|\S+) all-reduce(?:-start)?\(.*to_apply=%?([\w.\-]+)", line)
        if match:
            found.append((operators[match.group(2)], re.sub(r"\{[^}]*\}", "", match.group(1))))
    return found


def python_blocks(page: Path) -> list[str]:
    """The code, each block at its line, so that an error names it."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return ["\n" * text[: block.start(1)].count("\n") + block[1] for block in found]
