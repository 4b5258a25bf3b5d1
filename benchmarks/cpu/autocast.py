"""Times autocast beside the same model uncast and cast by hand."""

import itertools
import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, markdown
from benchmarks.lib.timing import STAGES, compiled_in_stages
from benchmarks.lib.versions import on_cpu
from benchmarks.programs.autocast import AUTOCAST, BY_HAND, UNCAST, Job, example_job, initial, language_job, program

ROUNDS, STEPS, COMPILATIONS = 30, 5, 5
STEP_TARGET, COMPILE_TARGET = 1.05, 1.3
NAMES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
PROGRAMS = [("fp32", UNCAST), *itertools.product(("bf16", "fp16"), (BY_HAND, AUTOCAST))]


def compile_program(job: Job, name: str, kind: str, variables: Any) -> tuple[Any, list[float]]:
    """The program compiled with empty caches, and the seconds of each stage.

    autocast traces a jaxpr, plans, and traces the new program: all of this is in the trace.
    """
    shapes = jax.eval_shape(lambda: variables), job.x, job.y
    jax.clear_caches()
    return compiled_in_stages(jax.jit(program(job, kind, NAMES[name])), *shapes)


def measure(job: Job, *, rounds: int = ROUNDS, steps: int = STEPS, compilations: int = COMPILATIONS) -> list[Any]:
    """One row for each program. All run in each round, in a different order; ratios are taken within a round."""
    rng = np.random.default_rng(0)
    variables = jax.jit(lambda: initial(job))()
    x, y = (jnp.asarray(rng.integers(0, 256, s.shape), s.dtype) for s in (job.x, job.y))
    compiled: list[Any] = [None] * len(PROGRAMS)
    spent, seconds = np.zeros((compilations, len(PROGRAMS), len(STAGES))), np.zeros((rounds, len(PROGRAMS)))
    for r in range(compilations):
        print(f"compilation {r + 1} of {compilations}", file=sys.stderr, flush=True)
        for i in rng.permutation(len(PROGRAMS)):
            compiled[i], spent[r, i] = compile_program(job, *PROGRAMS[i], variables)
    for r in range(-2, rounds):  # the first two warm up
        for i in rng.permutation(len(PROGRAMS)):
            before = time.perf_counter()
            for _ in range(steps):
                jax.block_until_ready(compiled[i](variables, x, y))
            if r >= 0:
                seconds[r, i] = (time.perf_counter() - before) / steps
    total = spent.sum(-1)
    rows = []
    for i, (name, kind) in enumerate(PROGRAMS):
        hand = PROGRAMS.index((name, BY_HAND)) if name != "fp32" else None
        row = {
            "model": job.name,
            "dtype": name,
            "program": kind,
            "step_ms": round(1e3 * float(np.median(seconds[:, i])), 3),
            "step_over_by_hand": _ratio(seconds, i, hand),
            **{f"{part}_s": round(float(np.median(spent[:, i, j])), 3) for j, part in enumerate(STAGES)},
            "compile_over_uncast": _ratio(total, i, 0),
            "compile_over_by_hand": _ratio(total, i, hand),
        }
        rows.append(row | {"missed": missed(row)})
    return rows


def _ratio(seconds: np.ndarray, i: int, j: int | None) -> float | None:
    return None if j is None else round(float(np.median(seconds[:, i] / seconds[:, j])), 3)


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row misses, in words."""
    if row["program"] != AUTOCAST:
        return []
    step, compilation = row["step_over_by_hand"], row["compile_over_uncast"]
    checks = (
        (step <= STEP_TARGET, f"a step of {step} of by hand, over {STEP_TARGET}"),
        (compilation <= COMPILE_TARGET, f"trace + lower + compile of {compilation} of uncast, over {COMPILE_TARGET}"),
    )
    return [f"{row['dtype']}: {what}" for what in failing(checks)]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["dtype", "program", "step, ms", "of by hand", "trace s", "lower s", "compile s", "of uncast", "of by hand"]
    cells = [head]
    for row in results["rows"]:
        numbers = [f"{row['step_ms']:.1f}", _text(row["step_over_by_hand"])]
        numbers += [f"{row[f'{part}_s']:.2f}" for part in STAGES]
        numbers += [_text(row[key]) for key in ("compile_over_uncast", "compile_over_by_hand")]
        cells.append([row["dtype"], row["program"], *numbers])
    return markdown(cells)


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def measure_tiny() -> dict[str, Any]:
    """One round of a tiny transformer."""
    job = language_job("tiny", batch=1, length=8, width=16, layers=1, heads=1, vocabulary=256)
    return {"rows": measure(job, rounds=1, compilations=1)}


def measure_all() -> dict[str, Any]:
    """All results."""
    measure_tiny()  # imports and first uses
    before, rows = os.getloadavg()[0], measure(example_job())
    return {**on_cpu(before), "rows": rows, "missed": [what for row in rows for what in row["missed"]]}


BENCHMARK = Benchmark("cpu autocast", "cpu_autocast.json", measure_all, render, measure_tiny)
