"""Counts of what a look at a step adds, in a program compiled for an H100 that need not be there.

    python benchmarks/h100_monitor.py            compile, check, write the results and README.md's table
    python benchmarks/h100_monitor.py --table    only the table, from the results that are there

Each row is `apply_gradients` with fp16 params, masters, clipping and AdamW; with `step_stats` before it at one step of
ten, and at every step. A conditional counts as its dearer branch: the step that is looked at. Exit status 1 if a
donated buffer is not reused or is copied, or if a look takes more memory than the bits of the largest tensor. See
`h100_aot` for what such a count can tell, and what not.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from benchmarks.h100.optimizer import versions
from benchmarks.lib import aot
from benchmarks.lib.tables import HERE, holds, markdown, run

RESULTS = HERE / "results" / "h100_monitor.json"
MARKERS = "<!-- h100_monitor: written by h100_monitor.py -->", "<!-- h100_monitor: end -->"
LAYERS, ROWS, COLUMNS = 4, 1024, 4096
LARGEST = ROWS * COLUMNS
KINDS = ("as it is", "step_stats, every 10 steps", "step_stats, every step")


def compile_step(kind: str) -> Any:
    """The optimizer's side of a step, with a look before it or without."""
    shapes = {f"layer_{i}": {"kernel": (ROWS, COLUMNS), "bias": (COLUMNS,)} for i in range(LAYERS)}

    def of(dtype: Any) -> Any:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))

    tx = jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-3)), "fp16")

    def step(grads: Any, params: Any, opt_state: Any, i: jax.Array) -> Any:
        when = {KINDS[0]: False, KINDS[1]: i % 10 == 0, KINDS[2]: True}[kind]
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, when=when)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), stats

    count = jax.ShapeDtypeStruct((), jnp.int32)
    args = aot.abstract(
        aot.mesh(1), (of(jnp.float16), of(jnp.float16), jax.eval_shape(tx.init, of(jnp.float32)), count)
    )
    return aot.compile_for(step, *args, donate_argnums=(1, 2))


def measure() -> dict[str, Any]:
    """The rows of the table."""
    n_params, rows = LAYERS * (LARGEST + COLUMNS), []
    for kind in KINDS:
        found = aot.report(compile_step(kind), n_params=n_params)
        row = {"program": kind, **{k: found[k] for k in ("kernels", "bytes_per_param", "temp_bytes", "alias_bytes")}}
        row["largest_copy_bytes"] = found["largest_copy_bytes"]
        rows.append(row)
    return {
        "command": "python benchmarks/h100_monitor.py",
        "device": "H100, compiled for and not run",
        "versions": versions(),
        "n_params": n_params,
        "rows": [row | {"missed": missed(row, rows[0])} for row in rows],
    }


def missed(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What a row does not hold to."""
    checks = (
        (row["alias_bytes"] == plain["alias_bytes"], f"{row['alias_bytes']} donated bytes reused"),
        (row["largest_copy_bytes"] < LARGEST, f"a copy of {row['largest_copy_bytes']} bytes"),
        (row["temp_bytes"] <= 4.1 * LARGEST, f"{row['temp_bytes']} bytes of scratch"),
    )
    return [f"{row['program']}: {what}" for fine, what in checks if not fine]


def table(results: dict[str, Any]) -> str:
    """The rows as markdown."""
    cells = [["program", "kernels", "B/param", "scratch MB", "reused MB", "holds"]]
    for row in results["rows"]:
        numbers = [f"{row['bytes_per_param']:.1f}", f"{row['temp_bytes'] / 1e6:.1f}", f"{row['alias_bytes'] / 1e6:.1f}"]
        cells.append([row["program"], str(row["kernels"]), *numbers, holds(row)])
    return markdown(cells)


if __name__ == "__main__":
    sys.exit(run(__doc__, RESULTS, MARKERS, table, measure))
