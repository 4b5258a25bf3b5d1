"""What an H100 (SXM) reaches at best, by which `h100 steps` counts and beside which `make gpu` puts its times."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from benchmarks.lib.tables import RESULTS

MEMORY = 2.9e12  # bytes a second
# Multiplications and additions a second: what cuBLASLt reaches at these sizes, below the data sheet
IN_16_BITS, IN_FP8 = 650e12, 1150e12
LAUNCH = 2e-6  # seconds
COUNTED = RESULTS / "h100_steps.json"
# Their memory, of that of an H100 by the data sheets. Their matmuls are alike.
DEVICES = {"NVIDIA H100 80GB HBM3": 1.0, "NVIDIA H200": 4.8 / 3.35}


def least_us(row: Mapping[str, Any], device: str) -> float | None:
    """The least time of a timed program on this device, in microseconds; None if nothing counts it.

    A kernel takes the longer of its bytes and its multiplications, and a launch.
    A whole step ("step" names the row of `h100 steps`) takes what was counted of it, matmuls ("flops_per_s") their
    multiplications, and all others ("bytes_per_s") their bytes.
    """
    if device not in DEVICES:
        return None
    memory = MEMORY * DEVICES[device]
    if "step" in row:
        counted = _counted().get(row["step"])
        if counted is None or row.get("attention") != "cudnn":
            return None
        return 1e3 * (counted["gemm_ms"] + counted["rest_ms"] * MEMORY / memory + counted["launch_ms"])
    if "flops_per_s" in row:
        return row["flops_per_s"] * row["us"] / (IN_FP8 if row.get("gemms_in") == "fp8" else IN_16_BITS)
    if "bytes_per_s" in row:
        return row["bytes_per_s"] * row["us"] / memory + 1e6 * LAUNCH
    return None


@functools.cache
def _counted() -> dict[str, dict[str, Any]]:
    """The rows of `h100 steps` by name, read once: the report asks for many."""
    return {row["row"]: row for row in json.loads(COUNTED.read_text())["rows"]}
