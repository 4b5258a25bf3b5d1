"""Compares the plans of jaxmp.memory with XLA's memory analysis.

The steps of `benchmarks/programs/memory.py` are compiled from abstract arguments, for this CPU and for an H100:

    state       planned params and optimizer state, beside the step's arguments; target 5 %
    gradients   beside the outputs of `jaxmp.value_and_grad`; target 5 %
    temp        activations, temporaries and gradients at the peak, without stored arrays, beside the scratch memory of
                the whole step with params and state donated; target 20 %, on the H100

The CPU has no target for temp: there XLA fuses less, and keeps transposed copies of matmuls' operands and float32
copies of 16-bit operands. Models that the planner's rules were not derived from have no target for temp either.
"""

import sys
from typing import Any

import jax

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs.memory import Case, cases

EXACT, NEAR = 0.05, 0.20  # targets, as fractions


def measure(case: Case, *, compiles_for_h100: bool = True) -> dict[str, Any]:
    """The row of one step."""
    print(f"compiling: {case.name}", file=sys.stderr, flush=True)
    planned = case.plan()
    arguments = case.arguments()
    grads: Any = jax.jit(lambda *args: case.gradients(*args)).lower(*arguments).compile().memory_analysis()

    def step(*args: Any) -> Any:
        return case.step(*args)

    on_cpu: Any = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    row = {
        "model": case.model,
        "precision": case.precision,
        "is_known": case.is_known,
        "num_params": planned.num_params,
        "state": planned.stored + planned.batch,
        "state_xla": on_cpu.argument_size_in_bytes,
        "gradients": planned.gradients,
        "gradients_xla": grads.output_size_in_bytes - 4,  # the loss
        "activations": planned.activations,
        "saved": planned.saved,
        "temp": planned.peak - planned.stored - planned.batch,
        "temp_cpu": on_cpu.temp_size_in_bytes,
    }
    if compiles_for_h100:
        there = aot.abstract(aot.mesh(), arguments)
        memory: Any = aot.compile_for(step, *there, donate_argnums=(0, 1)).memory_analysis()
        row["temp_h100"] = memory.temp_size_in_bytes
    return row | {"missed": missed(row)}


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row misses, in words."""
    checks = [("state", "state_xla", EXACT), ("gradients", "gradients_xla", EXACT)]
    checks += [("temp", "temp_h100", NEAR)] if row["is_known"] and "temp_h100" in row else []
    return [
        f"{ours} of {row[ours] / row[theirs]:.2f} of XLA's"
        for ours, theirs, part in checks
        if abs(row[ours] - row[theirs]) > part * row[theirs]
    ]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["model", "precision", "state MB", "of XLA's", "gradients MB", "of XLA's", "activations MB", "temp MB"]
    cells = [[*head, "of XLA's, H100", "of XLA's, CPU", "holds"]]
    for row in results["rows"]:
        parts = [row["model"], row["precision"]]
        for name in ("state", "gradients"):
            parts += [_megabytes(row[name]), f"{row[name] / row[f'{name}_xla']:.3f}"]
        parts += [_megabytes(row["activations"]), _megabytes(row["temp"])]
        parts += [f"{row['temp'] / row[f'temp_{device}']:.2f}" for device in ("h100", "cpu")]
        cells.append([*parts, holds(row) if row["is_known"] else holds(row, has_target=False) or "new to it"])
    return markdown(cells)


def _megabytes(n: int) -> str:
    return f"{n / 1e6:.1f}"


def measure_all() -> dict[str, Any]:
    """All results."""
    return {
        "device": "Compiled for H100 and CPU, not run",
        "versions": versions(H100),
        "rows": [measure(case) for case in cases()],
    }


BENCHMARK = Benchmark("h100 memory", "memory.json", measure_all, render)
