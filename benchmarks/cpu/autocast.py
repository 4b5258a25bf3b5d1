"""Times autocast beside the same model uncast and cast by hand.

The transformer of `benchmarks/programs/autocast.py` in the sizes of examples/train.py: loss and gradients. All programs
run in each round, in a different order. Ratios are taken within a round; the table has their medians:

    step        over by hand: the same operations in the same dtypes should take the same time.
    trace,      over uncast: how much longer a user waits with autocast. Autocast traces a jaxpr, plans, and traces the
    lower,      new program; all of this is in `trace`. XLA for CPU takes longer to compile 16-bit code: that is in
    compile     `compile`, also in the row by hand. jax's caches are cleared before each compilation.

Targets: autocast's step takes at most 1.05 of by hand, its trace + lower + compile at most 1.3 of uncast. Other
programs on the machine make the times noisy: the load of the machine is stored with them.
"""

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
from benchmarks.lib.tables import markdown
from benchmarks.lib.versions import CPU, versions
from benchmarks.programs.autocast import AUTOCAST, BY_HAND, UNCAST, Job, example_job, initial, language_job, program

ROUNDS, STEPS, COMPILATIONS = 30, 5, 5
STEP_TARGET, COMPILE_TARGET = 1.05, 1.3
PARTS = ("trace", "lower", "compile")
NAMES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
PROGRAMS = [("fp32", UNCAST), *itertools.product(("bf16", "fp16"), (BY_HAND, AUTOCAST))]


def compile_program(job: Job, name: str, kind: str, variables: Any) -> tuple[Any, list[float]]:
    """The program compiled with empty caches, and the seconds of `PARTS`."""
    shapes = jax.eval_shape(lambda: variables), job.x, job.y
    run = program(job, kind, NAMES[name])
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(run).trace(*shapes)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    return compiled, [after - before for before, after in itertools.pairwise(times)]


def measure(job: Job, *, rounds: int = ROUNDS, steps: int = STEPS, compilations: int = COMPILATIONS) -> list[Any]:
    """One row for each program."""
    rng = np.random.default_rng(0)
    variables = jax.jit(lambda: initial(job))()
    x, y = (jnp.asarray(rng.integers(0, 256, s.shape), s.dtype) for s in (job.x, job.y))
    made: list[Any] = [None] * len(PROGRAMS)
    spent, seconds = np.zeros((compilations, len(PROGRAMS), len(PARTS))), np.zeros((rounds, len(PROGRAMS)))
    for r in range(compilations):
        print(f"compilation {r + 1} of {compilations}", file=sys.stderr, flush=True)
        for i in rng.permutation(len(PROGRAMS)):
            made[i], spent[r, i] = compile_program(job, *PROGRAMS[i], variables)
    for r in range(-2, rounds):  # the first two warm up
        for i in rng.permutation(len(PROGRAMS)):
            before = time.perf_counter()
            for _ in range(steps):
                jax.block_until_ready(made[i](variables, x, y))
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
            **{f"{part}_s": round(float(np.median(spent[:, i, j])), 3) for j, part in enumerate(PARTS)},
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
    return [f"{row['dtype']}: {what}" for holds, what in checks if not holds]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["dtype", "program", "step, ms", "of by hand", "trace s", "lower s", "compile s", "of uncast", "of by hand"]
    cells = [head]
    for row in results["rows"]:
        numbers = [f"{row['step_ms']:.1f}", _text(row["step_over_by_hand"])]
        numbers += [f"{row[f'{part}_s']:.2f}" for part in PARTS]
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
    found = versions(CPU)
    measure_tiny()  # imports and first uses
    before, rows = os.getloadavg()[0], measure(example_job())
    load = f"{before:.1f} to {os.getloadavg()[0]:.1f}"
    missed = [what for row in rows for what in row["missed"]]
    device = f"CPU, {os.cpu_count()} cores, load {load}"
    return {"device": device, "versions": found, "rows": rows, "missed": missed}


BENCHMARK = Benchmark("cpu autocast", "cpu_autocast.json", measure_all, render, measure_tiny)
