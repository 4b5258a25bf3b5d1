"""Counts what jaxmp.monitor adds to a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import on_h100

LAYERS, ROWS, COLUMNS = 4, 1024, 4096
LARGEST = ROWS * COLUMNS
PARAMS = LAYERS * (LARGEST + COLUMNS)
STATE_BYTES = 14 * PARAMS  # float16 params, masters and two moments
PARTIAL_SUMS = 2**20  # bytes: 83 octaves in 2048 groups of uint32, and small arrays
KINDS = ("as it is", "step_stats, every 10 steps", "step_stats, every step")


def compile_step(kind: str) -> Any:
    """The optimizer's side of a step, with statistics before it or without.

    A conditional counts as its more expensive branch: the step that is watched.
    """
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


def measure_all() -> dict[str, Any]:
    """All results."""
    rows = []
    for kind in KINDS:
        report = aot.report(compile_step(kind), n_params=PARAMS)
        keys = ("kernels", "bytes_per_param", "temp_bytes", "alias_bytes", "largest_copy_bytes")
        rows.append({"program": kind, **{key: report[key] for key in keys}})
    rows = [row | {"missed": missed(row)} for row in rows]
    return {**on_h100(), "n_params": PARAMS, "rows": rows}


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row misses, in words: all donated buffers are reused, and none is copied."""
    checks = (
        (row["alias_bytes"] >= STATE_BYTES, f"{row['alias_bytes']} donated bytes reused"),
        (row["largest_copy_bytes"] < LARGEST, f"a copy of {row['largest_copy_bytes']} bytes"),
        (row["temp_bytes"] <= 4 * LARGEST + PARTIAL_SUMS, f"{row['temp_bytes']} bytes of scratch"),
    )
    return [f"{row['program']}: {what}" for what in failing(checks)]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["program", "kernels", "B/param", "scratch MB", "reused MB", "holds"]]
    for row in results["rows"]:
        numbers = [f"{row['bytes_per_param']:.1f}", f"{row['temp_bytes'] / 1e6:.1f}", f"{row['alias_bytes'] / 1e6:.1f}"]
        cells.append([row["program"], str(row["kernels"]), *numbers, holds(row)])
    return markdown(cells)


BENCHMARK = Benchmark("h100 monitor", "h100_monitor.json", measure_all, render)
