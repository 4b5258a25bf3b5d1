"""Counts a whole training step of a GPT-like and a Llama-like stack, and its least time by roofline."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark, Rows
from benchmarks.lib.roofline import IN_16_BITS, IN_FP8, LAUNCH, MEMORY
from benchmarks.lib.tables import markdown
from benchmarks.lib.versions import on_h100
from benchmarks.programs import steps
from benchmarks.programs.fp8_matmuls import FP8_GEMM, GEMM, OPTIONS

ATTENTION = "__cudnn$fmha"
NAMED = 0.02  # of the bytes of the rest
MOST_OF_BY_HAND, FASTER = 1.02, {"GPT": 1.32, "Llama": 1.38}
PARTS = {"norm_1", "norm_2", "mlp"}.union(*(stack.matrices for stack in steps.STACKS))
SHOWN = (steps.BY_HAND, "bf16", "fp8 delayed")  # whose kernels the page names


# --- counting ---------------------------------------------------------------------------------------------------------


def sizes_of(type_text: str) -> list[list[int]]:
    """The shapes in an HLO type."""
    return [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\w+\[([\d,]*)\]", type_text)]


def work_of(text: str, result: str, operands: list[str], attributes: str) -> float:
    """Multiplications and additions of a call `text` with these types; 0 of one that is no GEMM."""
    if text.startswith(GEMM):
        summed = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', attributes)
        axes = [int(i) for i in re.findall(r"\d+", summed.group(1))] if summed else []
        return 2.0 * math.prod(sizes_of(result)[0]) * math.prod(sizes_of(operands[0])[0][axis] for axis in axes)
    if text.startswith(ATTENTION):  # q [B, T, H, D], k [B, S, H, D]
        b, t, h, d = sizes_of(operands[0])[0]
        products = 5 if "Backward" in text else 2
        return products * 2.0 * b * t * sizes_of(operands[1])[0][1] * h * d / 2
    return 0.0


def workspace_of(result: str) -> int:
    """Bytes of a call's result that are its scratch: the last of a tuple, in bytes without a meaning."""
    last = re.search(r", ([su]8\[\d+\])[^,]*\)$", result)
    return aot.nbytes(last.group(1)) if last else 0


def layer_of(op_name: str) -> str:
    """The layer and its part that an operation comes from, such as `layer_0/qkv, backward`, or the optimizer."""
    if f"/{steps.OPTIMIZER}" in op_name:
        return steps.OPTIMIZER
    words = re.findall(r"\w+", op_name) or ["?"]
    layer = next((word for word in words if word.startswith("layer_")), "")
    inside = words[words.index(layer) + 1 :] if layer else []
    part = next((word for word in inside if word in PARTS), words[-1])
    when = ", recomputed" if "rematted_computation" in words else ", backward" if "transpose" in words[:-1] else ""
    return f"{layer}/{part}{when}" if layer else f"{part}{when}"


def counts(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Kernels, bytes and least milliseconds of a program, and the kernels that move most beside the GEMMs.

    Each kernel takes the longer of its bytes and its multiplications, and a launch. GEMMs are the calls of cuBLASLt and
    cuDNN, whose workspaces are not counted.
    """
    types, texts, works, scratch = {}, {}, {}, {}
    for lines in aot.computations(compiled).values():
        for name, type_text, _, operands, attributes in aot.parse(lines):
            types[name] = type_text
            called = re.search(r'custom_call_target="([^"]+)"', attributes)
            read = [types.get(operand, "") for operand in operands]
            works[name] = work_of(called.group(1), type_text, read, attributes) if called else 0.0
            scratch[name] = workspace_of(type_text) if works[name] else 0
            op_name = re.search(r'op_name="([^"]+)"', attributes)
            texts[name] = op_name.group(1) if op_name else ""
    report, runs = aot.report(compiled, every_turn=True), aot.instructions(compiled, every_turn=True)
    moved = {id(i): i.bytes_read + i.bytes_written - scratch[i.name] for i in runs}
    gemms = [i for i in runs if works[i.name]]
    rest = [i for i in runs if not works[i.name]]
    gemm_s = [max(works[i.name] / (IN_FP8 if i.kind == FP8_GEMM else IN_16_BITS), moved[id(i)] / MEMORY) for i in gemms]
    rest_bytes = sum(moved[id(i)] for i in rest)
    launches = report["kernels"]
    parts = {"gemm_ms": sum(gemm_s), "rest_ms": rest_bytes / MEMORY, "launch_ms": launches * LAUNCH}
    largest = sorted(rest, key=lambda i: -moved[id(i)])
    return {
        "kernels": launches,
        "gemms": len(gemms),
        "fp8_gemms": sum(i.kind == FP8_GEMM for i in gemms),
        "gemm_tflop": round(sum(works[i.name] for i in gemms) / 1e12, 3),
        "gemm_mib": aot.mib(sum(moved[id(i)] for i in gemms)),
        "rest_mib": aot.mib(rest_bytes),
        "temp_mib": aot.mib(report["temp_bytes"]),
        "ms": round(1e3 * sum(parts.values()), 3),
        **{name: round(1e3 * seconds, 3) for name, seconds in parts.items()},
        "largest": [
            {"kernel": i.name.lstrip("%"), "layer": layer_of(texts[i.name]), "mib": aot.mib(moved[id(i)])}
            for i in largest
            if moved[id(i)] > NAMED * rest_bytes
        ],
    }


def without_a_device() -> None:
    """Lets jax trace cuDNN's attention where it finds no GPU whose version it could ask for."""
    names = jax.nn.dot_product_attention.__globals__["cudnn_dot_product_attention"].__globals__
    names |= {"check_cudnn_version": lambda: 91000, "check_compute_capability": lambda capability: True}


def measure(step: steps.Step) -> dict[str, Any]:
    """The row of one step."""
    without_a_device()
    m, program = aot.mesh(), steps.program(step)
    state, x = aot.abstract(m, jax.eval_shape(program.init)), aot.abstract(m, steps.example(step))
    outputs = jax.tree.map(lambda x: x.sharding, state), None
    compiled = aot.compile_for(program.run, state, x, donate_argnums=0, out_shardings=outputs, compiler_options=OPTIONS)
    row = {
        "stack": step.stack.kind,
        "width": step.stack.width,
        "framework": step.framework,
        "precision": step.precision,
        "remat": step.remat,
        **counts(compiled),
    }
    jax.clear_caches()  # so that no program reuses another one's traces
    return row


# --- out --------------------------------------------------------------------------------------------------------------


def beside(rows: list[dict[str, Any]], row: dict[str, Any], precision: str) -> dict[str, Any] | None:
    """The row of the same step in another precision."""
    same = ("stack", "framework", "remat")
    others = (r for r in rows if r["precision"] == precision and all(r[key] == row[key] for key in same))
    return next(others, None)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that rows miss, in words, where the rows to compare with are there."""
    out = []
    for row in rows:
        hand, bf16 = beside(rows, row, steps.BY_HAND), beside(rows, row, "bf16")
        if row["precision"] == "bf16" and hand and row["ms"] > MOST_OF_BY_HAND * hand["ms"]:
            out.append(f"{row['row']}: {row['ms'] / hand['ms']:.3f} of by hand, over {MOST_OF_BY_HAND}")
        if row["precision"] != "fp8 delayed" or not hand or not bf16:
            continue
        faster, temp = hand["ms"] / row["ms"], row["temp_mib"] / bf16["temp_mib"]
        if not row["remat"] and faster < FASTER[row["stack"]]:
            out.append(f"{row['row']}: {faster:.2f} times as fast as by hand, below {FASTER[row['stack']]}")
        if row["remat"] and temp > 1:
            out.append(f"{row['row']}: {temp:.2f} of the temp of bf16, over 1")
    return out


def render(results: dict[str, Any]) -> str:
    """The steps; then, of those in linen without remat: what they miss, and their largest kernels."""
    rows = results["rows"]
    head = ["step", "kernels", "GEMMs", "of them fp8", "GEMMs MiB", "GEMMs ms", "rest MiB", "rest ms", "temp MiB", "ms"]
    cells = [[*head, "rest / bf16's", "bf16 / this"]]
    for row in rows:
        bf16 = beside(rows, row, "bf16")
        cells.append(
            [
                row["row"],
                *(str(row[key]) for key in ("kernels", "gemms", "fp8_gemms")),
                f"{row['gemm_mib']:.0f}",
                f"{row['gemm_ms']:.2f}",
                f"{row['rest_mib']:.0f}",
                f"{row['rest_ms']:.2f}",
                f"{row['temp_mib']:.0f}",
                f"{row['ms']:.2f}",
                *((f"{row['rest_mib'] / bf16['rest_mib']:.2f}", f"{bf16['ms'] / row['ms']:.2f}") if bf16 else ("", "")),
            ]
        )
    kernels = [["step", "layer", "kernels", "MiB", "of the rest"]]
    shown = [row for row in rows if (row["framework"], row["remat"]) == ("linen", False)]
    for row in shown:
        if row["precision"] in SHOWN:
            layers: dict[str, list[float]] = {}
            for kernel in row["largest"]:
                layers.setdefault(kernel["layer"], []).append(kernel["mib"])
            for layer, mib in sorted(layers.items(), key=lambda item: -sum(item[1])):
                share = f"{100 * sum(mib) / row['rest_mib']:.0f} %"
                kernels.append([row["row"], layer, str(len(mib)), f"{sum(mib):.0f}", share])
    misses = "\n".join(f"* {what}" for what in missed(shown)) or "* none"
    title = "What misses its target in linen, without remat:"
    return "\n\n".join([markdown(cells), title, misses, markdown(kernels)])


def jobs() -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each row."""
    return {step.row: functools.partial(measure, step) for step in steps.steps()}


BENCHMARK = Benchmark("h100 steps", "h100_steps.json", Rows(on_h100, jobs, missed), render)
