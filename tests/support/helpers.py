"""Assertions that every test file shares. They look at structure and dtype as well as at values."""

import contextlib
import hashlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
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


# Bits are equal for one of three reasons, and the name of an assertion says which. None of them holds where two
# programs compute the same floats, because LLVM forms an FMA in one and not in the other: `assert_within_ulps`.


def assert_same_program(actual: Any, expected: Any) -> None:
    """Every bit agrees: both are results of one compiled program for equal inputs.

    One program is: called twice; compiled again from the same text; one function run op by op on both sides.
    """
    _assert_bits(actual, expected)


def assert_moved(actual: Any, expected: Any) -> None:
    """Every bit agrees: nothing was computed. Saved, restored, sharded, copied, selected, or left as it was."""
    _assert_bits(actual, expected)


def assert_exact(actual: Any, expected: Any) -> None:
    """Every bit agrees: all arithmetic between them is exact, or is one rounding that a standard defines.

    Integers and bools, factors that are powers of two, casts, maxima, a single IEEE operation, sums without rounding.
    """
    _assert_bits(actual, expected)


def assert_within_ulps(actual: Any, expected: Any, ulps: float, *, of: Any = None) -> None:
    """Two programs computed the same floats: they agree within `ulps` roundings of the operands; the rest exactly.

    Structure, shapes, dtypes, integers, bools, infs and NaNs agree exactly; NaN equals NaN, 0.0 equals -0.0.

    Args:
      actual: a pytree.
      expected: another.
      ulps: how many units in the last place of the operands, in the dtype of the leaf.
      of: the size of the operands: a number, or a tree like `expected` of arrays that broadcast. A sum that cancels is
        much smaller than they are. None: as large as the largest finite element of the leaf.
    """
    pairs = _pairs(actual, expected)
    sizes = jax.tree.leaves(of) if of is not None and not isinstance(of, int | float) else [of] * len(pairs)
    for (path, a, b), size in zip(pairs, sizes, strict=True):
        if not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
            np.testing.assert_array_equal(a, b, err_msg=path)
            continue
        a, b, eps = _wide(a), _wide(b), float(jax.numpy.finfo(a.dtype).eps)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=path)
        size = np.max(np.abs(b[finite]), initial=0.0) if size is None else _wide(np.asarray(size))
        off = np.abs(a[finite] - b[finite]) / np.maximum(np.broadcast_to(np.abs(size), b.shape)[finite], 1e-300) / eps
        worst = float(np.max(off, initial=0.0))
        assert worst <= ulps, f"{path or 'the array'} is off by {worst:.3g} ulps of its operands, more than {ulps}"


def sqnr(exact: Any, rounded: Any) -> float:
    """Signal to quantization noise, in dB."""
    exact, rounded = np.asarray(exact, np.float64), np.asarray(rounded, np.float64)
    return float(10 * np.log10(np.sum(exact**2) / np.sum((exact - rounded) ** 2)))


def _assert_bits(actual: Any, expected: Any) -> None:
    """Two pytrees agree in structure, shapes, dtypes and every bit but those of NaNs: -0.0 is not 0.0."""
    for path, a, b in _pairs(actual, expected):
        np.testing.assert_array_equal(_bits(a), _bits(b), err_msg=path)


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


def digest(tree: Any, read: Callable[[Any], np.ndarray] = np.asarray) -> str:
    """A number for every bit of a tree; `read` takes a leaf to the host."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        found.update(read(x).tobytes())
    return found.hexdigest()[:16]


def compiled_quickly(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that is started for what it does, not for its last bits: LLVM optimizes nothing."""
    return {**environment, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def shown(parts: Iterable[T], name: str) -> Iterator[T]:
    """The parts of a campaign, with a bar on a terminal: how many are done, and the time left. A log gets nothing."""
    parts = list(parts)
    yield from track(parts, name, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def said(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The warnings while a function runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn(*args)
    return [str(w.message) for w in caught]


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


@contextlib.contextmanager
def compilations():
    """Counts the programs that XLA compiles."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        del duration
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
