"""A section of the GPU run: whether results are right, at a glance."""

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.gpu import correctness, models
from benchmarks.lib.timing import Bench


def right(bench: Bench) -> None:
    """One Dense in each precision against float64 in NumPy, both passes; then one test of each file of the kernels'."""
    for precision in ("bf16", *models.RECIPES):
        bench.check(f"Dense 512x256x384, {precision}", functools.partial(_right, precision))
    correctness.run(bench, one_of_each_file=True)


def _right(precision: str) -> dict[str, Any]:
    w, x, g, scales = models.operands(512, 256, 384)
    y, (dw, dx, _) = jax.jit(functools.partial(models.both_passes, precision))(w, x, g, scales)
    w64, x64, g64 = (np.asarray(t, np.float64) for t in (w, x, g))
    pairs = {"y": (y, x64 @ w64), "dw": (dw, x64.T @ g64), "dx": (dx, g64 @ w64.T)}
    gaps = {name: _gap(np.asarray(t, np.float64), exact) for name, (t, exact) in pairs.items()}
    # Rounding alone: in bfloat16 that of the result, half an ulp at most. In fp8 that of both operands, at random: an
    # ulp is 2^-3 of a binade in e4m3 and 2^-2 in e5m2, and the root of the mean square of the error a fifth of it.
    least, most = (0.0, 2.0**-8) if precision == "bf16" else (2.0**-6, 2.0**-3.5)
    wrong = {name: gap for name, gap in gaps.items() if not least <= gap <= most}
    assert not wrong, f"relative gaps from float64 in {precision}: {wrong}; rounding explains {least:.2g} to {most:.2g}"
    return {"variant": precision, **{f"gap_{name}": gap for name, gap in gaps.items()}}


def _gap(x: np.ndarray, by: np.ndarray) -> float:
    return float(np.linalg.norm(x - by) / np.linalg.norm(by))
