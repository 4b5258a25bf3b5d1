"""The planner (`jaxmp.memory`) against XLA: what is planned beside `compiled.memory_analysis()`.

Compiles the steps of `memory_programs.py` from abstract arguments, for this CPU and, without having one, for an H100
(`h100_aot.py`), and compares:

    state       params and the optimizer's state, beside the step's arguments; target 5 %
    gradients   beside the outputs of `jaxmp.value_and_grad`; target 5 %
    temp        activations, temporaries and gradients at the worst moment, `peak` less what is there anyway, beside the
                scratch memory of the whole step, params and state donated; target 20 %, on the H100

On the CPU nothing is aimed at: XLA fuses less there, keeps transposed copies of operands of matmuls, and float32 copies
of 16-bit ones.

    python benchmarks/memory.py            compile, write the results and the table in README.md; minutes
    python benchmarks/memory.py --table    only the table, from the results that are there

Exit status 1 if a target is missed. A model that the planner's rules were not found on has no target for temp.
"""

import sys
from typing import Any

import jax

from benchmarks.h100.optimizer import versions
from benchmarks.lib import aot
from benchmarks.lib.tables import HERE, holds, markdown, run
from benchmarks.programs.memory import Case, cases

RESULTS = HERE / "results" / "memory.json"
MARKERS = "<!-- memory: written by memory.py -->", "<!-- memory: end -->"
EXACT, NEAR = 0.05, 0.20  # targets, as parts


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
    """What of the targets a row does not meet, in words."""
    checks = [("state", "state_xla", EXACT), ("gradients", "gradients_xla", EXACT)]
    checks += [("temp", "temp_h100", NEAR)] if row["is_known"] and "temp_h100" in row else []
    return [
        f"{ours} of {row[ours] / row[theirs]:.2f} of XLA's"
        for ours, theirs, part in checks
        if abs(row[ours] - row[theirs]) > part * row[theirs]
    ]


def table(results: dict[str, Any]) -> str:
    """The rows as markdown."""
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
    """The results."""
    return {
        "command": "python benchmarks/memory.py",
        "device": "Compiled for H100 and CPU, not run",
        "versions": versions(),
        "rows": [measure(case) for case in cases()],
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, RESULTS, MARKERS, table, measure_all))
