"""Counts what the matmuls of a mixture of experts multiply and hold in memory, in fp8 and in bfloat16."""

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
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import on_h100
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
    """The multiplications of our kernels over those that rows need: where a group ends within a part, both do it."""
    blocks = (grouped_tiles.PART,) * 2 + (grouped_tiles.block_of_rows(ROWS, len(sizes)),)
    return sum(rows_multiplied(sizes, tile) for tile in blocks) / (3 * sum(sizes))


def multiplied_by_xla(compiled: jax.stages.Compiled) -> int:
    """The multiplications of all dots in a program; matmuls of cuBLASLt are not looked at."""
    total = 0
    for lines in aot.computations(compiled).values():
        types: dict[str, list[int]] = {}
        for name, type_text, op, operands, attributes in aot.parse(lines):
            types[name] = [int(n) for n in re.findall(r"\d+", type_text.partition("[")[2].partition("]")[0])]
            if op == "dot":
                summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
                axes = [int(i) for i in summed.group(1).split(",")] if summed else []
                total += math.prod(types[name]) * math.prod(types[operands[0]][i] for i in axes)
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
    kernels, multiplied, scratch = row["grouped_kernels"], row["multiplied"], row["temp_bytes"]
    most_scratch = of_one + 2 * row["experts"] * WIDTH * WIDTH  # that, and two casts of the weights
    return failing(
        (
            (kernels == 3 and not row["by_xla"], f"{kernels} kernels, and {row['by_xla']} multiplications by XLA"),
            (multiplied <= MOST_MULTIPLIED, f"{multiplied:.2f} of the multiplications, over {MOST_MULTIPLIED}"),
            (scratch <= most_scratch, f"scratch of {scratch} bytes, over {most_scratch}"),
        )
    )


def measure_all() -> dict[str, Any]:
    """All rows."""
    rows = [measure(experts, program) for experts in EXPERTS for program in PROGRAMS]
    for row in rows:
        row["missed"] = missed(row, rows[0]["temp_bytes"])
    return {**on_h100(), "rows": rows}


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
