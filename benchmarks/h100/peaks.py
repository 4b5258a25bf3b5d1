"""Compares the planned peak of 17 models with XLA's for an H100: eleven that the rules were tuned on, and six others.

The steps of `benchmarks/programs/peaks.py` are compiled from abstract arguments, with params and state donated. XLA's
peak is its arguments, its scratch memory, and outputs that reuse no argument. Nothing is run.

Target: a planned peak of 0.95 to 1.10 of XLA's; a plan that is too small costs a run.
"""

import sys
from typing import Any

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs import peaks
from benchmarks.programs.memory import Case

LEAST, MOST = 0.95, 1.10


def compiled_bytes(case: Case) -> int:
    """XLA's peak of one step on an H100."""
    print(f"compiling: {case.name}", file=sys.stderr, flush=True)

    def step(*args: Any) -> Any:
        return case.step(*args)

    there = aot.abstract(aot.mesh(), case.arguments())
    memory: Any = aot.compile_for(step, *there, donate_argnums=(0, 1)).memory_analysis()
    unplaced = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + unplaced


def row(kind: str, case: Case, peak_xla: int) -> dict[str, Any]:
    """The row of one step, whose peak XLA gave."""
    planned = case.plan()
    found = {
        "model": case.model,
        "precision": case.precision,
        "rules": kind,
        "num_params": planned.num_params,
        "stored": planned.stored + planned.batch,
        "peak": planned.peak,
        "peak_xla": peak_xla,
    }
    ratio = planned.peak / peak_xla
    return found | {"missed": [] if LEAST <= ratio <= MOST else [f"{ratio:.2f} of XLA's"]}


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["model", "precision", "rules", "stored MB", "peak MB", "XLA's MB", "ratio", "holds"]]
    for found in results["rows"]:
        sizes = [f"{found[name] / 1e6:.0f}" for name in ("stored", "peak", "peak_xla")]
        ratio = f"{found['peak'] / found['peak_xla']:.2f}"
        cells.append([found["model"], found["precision"], found["rules"], *sizes, ratio, holds(found)])
    return markdown(cells)


def measure_all() -> dict[str, Any]:
    """All results."""
    return {
        "device": "Compiled for H100, not run",
        "versions": versions(H100),
        "rows": [row(kind, case, compiled_bytes(case)) for kind, case in peaks.cases()],
    }


BENCHMARK = Benchmark("h100 peaks", "h100_peaks.json", measure_all, render)
