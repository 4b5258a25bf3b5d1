"""What autocast costs on an H100 beside the same model cast by hand, counted without one.

Compiles the models of `autocast_programs.py`, forward and backward, for H100 (`h100_aot.py`), and reads the final HLO:

    kernels          launched, in all turns of a loop
    read, written    by them
    converts         instructions that change a dtype, wherever they are fused: nearly all are free
    weights cast     elements of kernels (of Dense, Conv, LSTM) that are turned from float32 to 16 bits, in all turns
                     of a loop, over the elements there are: 1 is each weight once
    scratch          memory that XLA plans beside arguments and results; what the backward pass keeps is in it

    python benchmarks/h100_autocast.py            compile, check the targets, write the results and README.md's table
    python benchmarks/h100_autocast.py --table    only the table, from the results that are there

Exit status 1 if a target is missed: neither kernels, nor bytes, nor casts of weights may be more than by hand.
"""

import json
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from benchmarks.h100.optimizer import versions
from benchmarks.lib import aot
from benchmarks.lib.tables import HERE, markdown, parse_arguments, write_readme
from benchmarks.programs import autocast as programs

RESULTS = HERE / "results" / "h100_autocast.json"
MARKERS = "<!-- h100_autocast: written by h100_autocast.py -->", "<!-- h100_autocast: end -->"
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MOVES = {"bitcast", "copy", "reshape", "transpose", "slice", "concatenate"}  # a weight stays one
TAKES = {"dynamic-slice", "fusion-done"}  # and here, whatever the other operands are


def cast_elements(compiled: jax.stages.Compiled, weights: Iterable[int]) -> int:
    """How many float32 elements of the arguments numbered `weights` are converted to 16 bits, loops in all turns."""
    blocks = aot.computations(compiled)
    numbers = [m for m in map(aot.PARAMETER.search, blocks["ENTRY"]) if m]
    arguments: list[Any] = [False] * len(numbers)
    for number in weights:
        arguments[number] = True
    return _follow("ENTRY", blocks, arguments)[0]


def _follow(block: str, blocks: dict[str, list[str]], arguments: list[Any]) -> tuple[int, Any]:
    """(elements cast, whether the result is a weight): True, False, or for a tuple a list of these."""
    numbers = {m.group(1): int(m.group(2)) for m in map(aot.PARAMETER.search, blocks[block]) if m}
    is_weight: dict[str, Any] = {name: arguments[number] for name, number in numbers.items()}
    root = next((m.group(1) for line in blocks[block] if (m := re.match(r"\s*ROOT (%\S+) =", line))), "")
    cast = 0
    for name, type_text, op, operands, attributes in aot.parse(blocks[block]):
        given = [is_weight.get(operand, False) for operand in operands]
        result: Any = False
        if op == "parameter":
            continue
        if op == "tuple":
            result = given
        elif op == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", attributes).group(1))  # type: ignore
            result = given[0][index] if isinstance(given[0], list) else False
        elif op in MOVES:
            result = all(x is True for x in given)
        elif op in TAKES:
            result = given[0]
        elif op == "convert" and given[0] is True and re.match(r"bf16|f16", type_text):
            cast += math.prod(int(d) for d in re.findall(r"\d+", type_text.split("[")[1].split("]")[0]))
        elif inner := re.search(r"(?:calls|body|to_apply)=(%[\w.\-]+)", attributes):
            if op in ("fusion", "fusion-start", "call", "while"):
                found, result = _follow(inner.group(1), blocks, given)
                cast += found * aot.turns(op, attributes)
        is_weight[name] = result
    return cast, is_weight.get(root, False)


def kernels_of(variables: PyTree) -> dict[int, int]:
    """Number among the program's arguments to number of elements, of each weight called "kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {i: x.size for i, (path, x) in enumerate(leaves) if jax.tree_util.keystr(path[-1:]) == "['kernel']"}


def measure(job: programs.Job, kind: str, name: str) -> dict[str, Any]:
    """The row of one program."""
    print(f"compiling: {job.name}, {name}, {kind}", file=sys.stderr, flush=True)
    m = aot.mesh()
    shapes = jax.eval_shape(lambda: programs.initial(job)), job.x, job.y
    run = programs.program(job, kind, DTYPES.get(name, jnp.float32))
    arguments = jax.tree.map(lambda x: aot.spec(m, x.shape, x.dtype), shapes)
    compiled = aot.compile_for(run, *arguments, keep_unused=True)
    counts = aot.report(compiled, every_turn=True)
    weights = kernels_of(shapes[0])
    return {
        "model": job.name,
        "dtype": name,
        "program": kind,
        **{key: counts[key] for key in ("kernels", "bytes_read", "bytes_written")},
        "converts": len(re.findall(r" convert\(", compiled.as_text() or "")),
        "weights_cast": round(cast_elements(compiled, weights) / sum(weights.values()), 3),
        "temp_bytes": counts["temp_bytes"],
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Where autocast costs more than the cast by hand, in words."""
    by_hand = {(row["model"], row["dtype"]): row for row in rows if row["program"] == programs.BY_HAND}
    out = []
    for row in rows:
        if row["program"] == programs.AUTOCAST:
            hand = by_hand[row["model"], row["dtype"]]
            for what in ("kernels", "bytes", "weights_cast"):
                ours, theirs = (
                    r["bytes_read"] + r["bytes_written"] if what == "bytes" else r[what] for r in (row, hand)
                )
                if ours > theirs:
                    out.append(f"{row['model']}, {row['dtype']}: {what.replace('_', ' ')} {ours}, by hand {theirs}")
    return out


def _cost(row: dict[str, Any], what: str) -> float:
    return row["bytes_read"] + row["bytes_written"] if what == "bytes" else row[what]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    head = ["model", "dtype", "program", "kernels", "MB read", "MB written", "converts", "weights cast", "scratch MB"]
    cells = [head]
    for row in rows:
        sizes = (f"{row[key] / 1e6:.0f}" for key in ("bytes_read", "bytes_written"))
        counts = str(row["converts"]), f"{row['weights_cast']:.2f}", f"{row['temp_bytes'] / 1e6:.0f}"
        cells.append([row["model"], row["dtype"], row["program"], str(row["kernels"]), *sizes, *counts])
    return markdown(cells)


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    if parse_arguments(__doc__).table:
        results = json.loads(RESULTS.read_text())
        write_readme(MARKERS, table(results["rows"]), results)
        return 0
    found, rows = versions(), []
    for job in programs.h100_jobs():
        rows.append(measure(job, programs.UNCAST, "fp32"))
        for name in DTYPES:
            kinds = programs.KINDS if name == "bf16" else programs.KINDS[:-1]
            rows += [measure(job, kind, name) for kind in kinds if kind != programs.UNCAST]
            if name == "bf16" and "scan over 4" in job.name:
                rows.append(measure(job, programs.POWERS, name))
    results = {
        "command": "python benchmarks/h100_autocast.py",
        "device": "H100 (compiled, not run)",
        "versions": found,
        "missed": missed(rows),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write_readme(MARKERS, table(rows), results)
    print(table(rows), *results["missed"], sep="\n")
    return 1 if results["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
