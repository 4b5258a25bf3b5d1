"""Traces of other systems' real code, in tests/oracles/: each file names its source, commit and columns."""

import functools
import json
from typing import Any

import numpy as np

from helpers import ROOT

_FOLDER = ROOT / "tests" / "oracles"
_WRITTEN_AS_TEXT = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}  # JSON has no such numbers


@functools.cache
def load(name: str) -> Any:
    """`oracles/<name>.json`, with the texts "inf", "-inf" and "nan" as floats. Shared: do not change it."""
    return _with_floats(json.loads((_FOLDER / f"{name}.json").read_text()))


@functools.cache
def load_arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of `oracles/<name>.npz`, by key."""
    with np.load(_FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def name_of(case: dict[str, Any]) -> str:
    """An id for pytest."""
    return case["name"]


def _with_floats(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _with_floats(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_with_floats(value) for value in x]
    return _WRITTEN_AS_TEXT.get(x, x) if isinstance(x, str) else x
