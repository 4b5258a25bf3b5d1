"""Counts what autocast costs beside the same model cast by hand."""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

import jaxmp
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import markdown
from benchmarks.lib.versions import on_h100
from benchmarks.programs import autocast as programs

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MOVES = {"bitcast", "copy", "reshape", "transpose", "slice", "concatenate"}  # the result of a weight is a weight
MOST = 1.02  # of by hand
TAKES = {"dynamic-slice", "fusion-done"}  # the same, only by the first operand


def cast_elements(compiled: jax.stages.Compiled, weights: Iterable[int]) -> int:
    """The float32 elements of the arguments `weights`, by number, that are cast to 16 bits in all iterations."""
    blocks = aot.computations(compiled)
    numbers = [m for m in map(aot.PARAMETER.search, blocks["ENTRY"]) if m]
    arguments: list[Any] = [False] * len(numbers)
    for number in weights:
        arguments[number] = True
    return _follow("ENTRY", blocks, arguments)[0]


def _follow(block: str, blocks: dict[str, list[str]], arguments: list[Any]) -> tuple[int, Any]:
    """(elements cast, whether the result is a weight: a bool, or a list of these for a tuple)."""
    numbers = {m.group(1): int(m.group(2)) for m in map(aot.PARAMETER.search, blocks[block]) if m}
    is_weight: dict[str, Any] = {name: arguments[number] for name, number in numbers.items()}
    root = next((m.group(1) for line in blocks[block] if (m := re.match(r"\s*ROOT (%\S+) =", line))), "")
    cast = 0
    for name, type_text, op, operands, attributes in aot.parse(blocks[block]):
        weights = [is_weight.get(operand, False) for operand in operands]
        result: Any = False
        if op == "parameter":
            continue
        if op == "tuple":
            result = weights
        elif op == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", attributes).group(1))  # type: ignore
            result = weights[0][index] if isinstance(weights[0], list) else False
        elif op in MOVES:
            result = all(x is True for x in weights)
        elif op in TAKES:
            result = weights[0]
        elif op == "convert" and weights[0] is True and re.match(r"bf16|f16", type_text):
            cast += math.prod(int(d) for d in re.findall(r"\d+", type_text.split("[")[1].split("]")[0]))
        elif inner := re.search(r"(?:calls|body|to_apply)=(%[\w.\-]+)", attributes):
            if op in ("fusion", "fusion-start", "call", "while"):
                inside, result = _follow(inner.group(1), blocks, weights)
                cast += inside * aot.turns(op, attributes)
        is_weight[name] = result
    return cast, is_weight.get(root, False)


def sums_of_shape(compiled: jax.stages.Compiled, shape: tuple[int, ...]) -> list[str]:
    """The dtypes in which sums and matmuls with results of a shape are computed, in all kernels."""
    dtypes = set()
    for lines in aot.computations(compiled).values():
        for _, type_text, op, _, _ in aot.parse(lines):
            name, _, sizes = type_text.partition("[")
            if op in ("add", "dot") and sizes.split("]")[0] == ",".join(map(str, shape)):
                dtypes.add(name)
    return sorted(dtypes)


def measure_logits(name: str) -> dict[str, Any]:
    """The dtypes in which the logits of a cross-entropy are computed, whose program holds its gradient, too.

    One: if their last sum is in 16 bits for some readers and in float32 for others, a loss may be below zero.
    """
    rows, width, classes = 512, 256, 1000

    def loss_fn(w: Any, b: Any, x: Any, labels: Any) -> Any:
        logits = x @ w + b[None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    m = aot.mesh()
    floats = [aot.spec(m, shape, jnp.float32) for shape in ((width, classes), (classes,), (rows, width))]
    step = jax.value_and_grad(jaxmp.autocast(loss_fn, DTYPES[name]), has_aux=True)
    compiled = aot.compile_for(step, *floats, aot.spec(m, (rows,), jnp.int32))
    return {"dtype": name, "computed_in": sums_of_shape(compiled, (rows, classes))}


def kernels_of(variables: PyTree) -> dict[int, int]:
    """The number of elements of each weight named "kernel", by its position among the arguments."""
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


def missed(rows: list[dict[str, Any]], logits: Iterable[dict[str, Any]] = ()) -> list[str]:
    """Where autocast costs more than the cast by hand, or computes a value twice in two dtypes, in words."""
    by_hand = {(row["model"], row["dtype"]): row for row in rows if row["program"] == programs.BY_HAND}
    out = []
    for row in rows:
        if row["program"] == programs.AUTOCAST:
            hand = by_hand[row["model"], row["dtype"]]
            for what in ("kernels", "bytes", "weights_cast"):
                ours, theirs = _cost(row, what), _cost(hand, what)
                if ours > MOST * theirs:
                    out.append(f"{row['model']}, {row['dtype']}: {what.replace('_', ' ')} {ours}, by hand {theirs}")
    for row in logits:
        if len(row["computed_in"]) != 1:
            out.append(f"logits, {row['dtype']}: computed in {', '.join(row['computed_in']) or 'no dtype'}")
    return out


def _cost(row: dict[str, Any], what: str) -> float:
    return row["bytes_read"] + row["bytes_written"] if what == "bytes" else row[what]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["model", "dtype", "program", "kernels", "MB read", "MB written", "converts", "weights cast", "scratch MB"]
    cells = [head]
    for row in results["rows"]:
        sizes = (f"{row[key] / 1e6:.0f}" for key in ("bytes_read", "bytes_written"))
        counts = str(row["converts"]), f"{row['weights_cast']:.2f}", f"{row['temp_bytes'] / 1e6:.0f}"
        cells.append([row["model"], row["dtype"], row["program"], str(row["kernels"]), *sizes, *counts])
    return markdown(cells)


def measure_all() -> dict[str, Any]:
    """All results."""
    about, rows = on_h100(), []
    for job in programs.h100_jobs():
        rows.append(measure(job, programs.UNCAST, "fp32"))
        for name in DTYPES:
            kinds = programs.KINDS if name == "bf16" else programs.KINDS[:-1]
            rows += [measure(job, kind, name) for kind in kinds if kind != programs.UNCAST]
            if name == "bf16" and "scan over 4" in job.name:
                rows.append(measure(job, programs.POWERS, name))
    logits = [measure_logits(name) for name in DTYPES]
    return {**about, "missed": missed(rows, logits), "logits": logits, "rows": rows}


BENCHMARK = Benchmark("h100 autocast", "h100_autocast.json", measure_all, render)
