"""Counts what the matmuls of a mixture of experts multiply and hold in memory, in fp8 and in bfloat16.

One product [8192, 1024] by G experts [1024, 1024], forward and backward, bfloat16 rows and float32 weights, is compiled
for H100: `jaxmp.fp8.ragged_dot`, and `jax.lax.ragged_dot` of weights that are cast to bfloat16. Experts have unequal
numbers of rows, one in eight has none, and one row in 16 belongs to nobody.

    multiplied    multiplications in all three products, over those that the rows need, each by its own expert. From the
                  HLO for XLA's matmuls; from the kernels' parts of tiles and blocks for ours, which have 16, 32 or 128
                  rows: where a group ends within one, it is multiplied for both groups
    scratch       memory beside arguments and results; the cast weights are in it

Targets for fp8: at most 1.1 of the multiplications; scratch at most that of one expert and two casts of the weights.
"""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from jaxmp import fp8
from pallas_kernels import grouped_tiles

ROWS, WIDTH = 8192, 1024
EXPERTS = (1, 8, 32, 128)
PROGRAMS = ("jaxmp.fp8.ragged_dot", "jax.lax.ragged_dot, bf16")
MOST_MULTIPLIED = 1.1


def sizes_of(experts: int) -> list[int]:
    """Rows of each expert: unequal, one in eight without any, 15 of 16 rows in all."""
    weights = np.random.default_rng(0).gamma(4.0, size=experts)
    weights[3::8] = 0
    return np.random.default_rng(1).multinomial(ROWS * 15 // 16, weights / weights.sum()).tolist()


def rows_multiplied(sizes: Sequence[int], tile: int) -> int:
    """Rows of all tiles, or parts or blocks, that have a row of an expert, for each expert."""
    ends = np.cumsum(sizes)
    return sum((-(end // -tile) - (end - size) // tile) * tile for end, size in zip(ends, sizes, strict=True) if size)


def multiplied_by_tiles(sizes: Sequence[int]) -> float:
    """The multiplications of our kernels over those needed."""
    blocks = (grouped_tiles.PART,) * 2 + (grouped_tiles.block_of_rows(ROWS, len(sizes)),)
    return sum(rows_multiplied(sizes, tile) for tile in blocks) / (3 * sum(sizes))


def multiplied_by_xla(compiled: jax.stages.Compiled) -> int:
    """The multiplications of all dots in a program; matmuls of cuBLASLt are not looked at."""
    total = 0
    for lines in aot.computations(compiled).values():
        types: dict[str, list[int]] = {}
        for name, type_text, op, given, attributes in aot.parse(lines):
            types[name] = [int(n) for n in re.findall(r"\d+", type_text.partition("[")[2].partition("]")[0])]
            if op == "dot":
                summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
                axes = [int(i) for i in summed.group(1).split(",")] if summed else []
                total += math.prod(types[name]) * math.prod(types[given[0]][i] for i in axes)
    return total


def step(program: str, x: Any, w: Any, sizes: Any, grad: Any, scales: Any) -> Any:
    """The product, and the gradients of rows, experts and scales."""

    def product(x: Any, w: Any, scales: Any) -> Any:
        if program == PROGRAMS[0]:
            return fp8.ragged_dot(x, w, sizes, recipe=fp8.DelayedScaling(), scales=scales)
        return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes)

    y, vjp = jax.vjp(product, x, w, scales)
    return y, *vjp(grad)


def measure(experts: int, program: str) -> dict[str, Any]:
    """The row of one program."""
    print(f"compiling: {program}, {experts} experts", file=sys.stderr, flush=True)
    m, sizes = aot.mesh(), sizes_of(experts)
    rows, weights = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16), aot.spec(m, (experts, WIDTH, WIDTH), jnp.float32)
    scales = fp8.Scales(*[aot.spec(m, (), jnp.float32)] * 3)
    arguments = rows, weights, aot.spec(m, (experts,), jnp.int32), rows, scales
    compiled = aot.compile_for(lambda *args: step(program, *args), *arguments, keep_unused=True)
    counts = aot.report(compiled)
    ours = program == PROGRAMS[0]
    needed = 3 * sum(sizes) * WIDTH * WIDTH
    multiplied = multiplied_by_tiles(sizes) if ours else multiplied_by_xla(compiled) / needed
    return {
        "experts": experts,
        "program": program,
        "empty": sizes.count(0),
        "multiplied": round(multiplied, 3),
        "by_xla": multiplied_by_xla(compiled) if ours else None,
        "grouped_kernels": len(re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text() or "")),
        **{key: counts[key] for key in ("kernels", "bytes_read", "bytes_written", "temp_bytes")},
    }


def missed(row: dict[str, Any], of_one: int) -> list[str]:
    """The targets that a row of ours misses; `of_one` is the scratch with one expert."""
    if row["program"] != PROGRAMS[0]:
        return []
    found = []
    if row["grouped_kernels"] != 3 or row["by_xla"]:
        found.append(f"{row['grouped_kernels']} kernels, and {row['by_xla']} multiplications by XLA")
    if row["multiplied"] > MOST_MULTIPLIED:
        found.append(f"{row['multiplied']:.2f} of the multiplications, over {MOST_MULTIPLIED}")
    limit = of_one + 2 * row["experts"] * WIDTH * WIDTH
    if row["temp_bytes"] > limit:
        found.append(f"scratch of {row['temp_bytes']} bytes, over {limit}")
    return found


def measure_all() -> dict[str, Any]:
    """All rows."""
    rows = [measure(experts, program) for experts in EXPERTS for program in PROGRAMS]
    for row in rows:
        row["missed"] = missed(row, rows[0]["temp_bytes"])
    return {"device": "H100 (compiled, not run)", "versions": versions(H100), "rows": rows}


def render(results: dict[str, Any]) -> str:
    """The table."""
    head = ["experts", "without rows", "program", "multiplied", "scratch, MiB", "read + written, MiB", "targets"]
    cells = [
        [
            str(row["experts"]),
            str(row["empty"]),
            row["program"],
            f"{row['multiplied']:.2f}",
            f"{row['temp_bytes'] / 2**20:.0f}",
            f"{(row['bytes_read'] + row['bytes_written']) / 2**20:.0f}",
            holds(row, has_target=row["program"] == PROGRAMS[0]),
        ]
        for row in results["rows"]
    ]
    return markdown([head, *cells])


BENCHMARK = Benchmark("h100 experts", "h100_experts.json", measure_all, render)
