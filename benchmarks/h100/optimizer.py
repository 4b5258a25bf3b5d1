"""Counts kernels, bytes and collectives of the optimizer's side of a step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import PyTree

from benchmarks.lib import aot, trees
from benchmarks.lib.benchmark import Benchmark, Rows
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.timing import STAGES, compiled_in_stages
from benchmarks.lib.versions import on_h100
from benchmarks.programs.h100 import (
    GPT2,
    SMALL,
    Program,
    Target,
    baseline_programs,
    fused_programs,
    jaxmp_programs,
    programs_by_master,
)
from benchmarks.programs.recipes import Step

# --- compiling and counting -------------------------------------------------------------------------------------------


def measure(program: Program) -> dict[str, Any]:
    """Compiles one program and returns its row.

    Params and opt_state are donated, and returned in the same order: XLA pairs donated buffers with results of the same
    shape and dtype in order. With (params, opt_state) -> (opt_state, params) it would copy every param whose shape and
    dtype a moment has too.
    """
    m = aot.mesh(program.devices)
    params = aot.abstract(m, trees.cast(GPT2, program.params_dtype))
    opt_state = aot.abstract(m, jax.eval_shape(program.init, GPT2))
    grads, step = params, program.step
    if "shard_map" in program.mode:
        grads = jax.tree.map(lambda p: aot.spec(m, (program.devices, *p.shape), p.dtype, P("data")), params)
        step = _with_reduction(program.step, m)
    results = None if "shard_map" in program.mode else jax.tree.map(lambda x: x.sharding, (params, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True, out_shardings=results)
    compiled, seconds = compiled_in_stages(jitted, params, opt_state, grads)

    n_params, donated = trees.size(params), trees.nbytes((params, opt_state))
    unread = trees.nbytes(params) if program.writes_params_only else 0
    row = {
        "program": program.name,
        "mode": program.mode,
        "masters": program.masters,
        "clips": program.clips,
        "leaves": len(jax.tree.leaves(params)),
        "params": n_params,
        **aot.report(compiled, n_params, unread_bytes=unread),
        "unread_bytes": unread,
        "donated_bytes": donated,
        "stored_bytes_per_param": round(donated / n_params, 3),
        "rounded_leaves": _rounded_leaves(compiled),
        **{f"{stage}_s": round(s, 1) for stage, s in zip(STAGES, seconds, strict=True)},
    }
    row["packing_bytes_per_param"] = round(row["packing_bytes"] / n_params, 3)
    row["between_bytes_per_param"] = round(row["between_bytes"] / n_params, 3)
    row["small_all_reduces"] = sum(size <= SMALL for size in row["collectives"].get("all-reduce", []))
    row["missed"] = _missed(row, program.target) if program.target else []
    row["target_bytes_per_param"] = program.target.bytes_per_param if program.target else None
    jax.clear_caches()  # so that no program reuses another one's traces
    return row


def _with_reduction(step: Step, m: Mesh) -> Step:
    """`step` inside `jax.shard_map`, after the mean over devices of each device's gradients [1, ...]."""

    def local(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return step(params, opt_state, lax.pmean(jax.tree.map(lambda g: g[0], grads), "data"))

    return jax.shard_map(local, mesh=m, in_specs=(P(), P(), P("data")), out_specs=P())


def _missed(row: dict[str, Any], target: Target) -> list[str]:
    """The parts of `target` that the row misses, in words."""
    copied = row["donated_bytes"] - row["alias_bytes"]
    stored, most_stored = row["stored_bytes_per_param"], target.stored_bytes_per_param
    small, rounded = row["small_all_reduces"], row["rounded_leaves"]
    return failing(
        (
            (row["bytes_per_param"] <= target.bytes_per_param, f"over {target.bytes_per_param} bytes per parameter"),
            (row["kernels"] <= (target.kernels or row["kernels"]), f"over {target.kernels} kernels"),
            (row["largest_copy_bytes"] <= target.largest_copy_bytes, f"a copy of {row['largest_copy_bytes']} bytes"),
            (stored <= (most_stored or stored), f"over {most_stored} bytes stored per parameter"),
            (copied <= SMALL, f"{copied} donated bytes not updated in place"),
            (set(row["collectives"]) <= {"all-reduce"}, f"collectives: {', '.join(row['collectives'])}"),
            (small == target.small_all_reduces, f"{small} small all-reduces, not {target.small_all_reduces}"),
            (rounded >= target.rounded_leaves, f"only {rounded} of {target.rounded_leaves} leaves rounded to 16 bits"),
        )
    )


def _rounded_leaves(compiled: jax.stages.Compiled) -> int:
    """How often the compiled program rounds a float32 tensor to float16 values and continues in float32.

    This counts roundings to integers (of a scaled tensor), reduce-precision, and casts to f16 that are cast back.
    """
    rounded = 0
    for name, lines in aot.computations(compiled).items():
        if name == "ENTRY":
            continue
        narrow = set()
        for out, type_text, op, operands, attributes in aot.parse(lines):
            if op == "round-nearest-even" or (op == "reduce-precision" and "mantissa_bits=10" in attributes):
                rounded += 1
            if op == "convert" and type_text.startswith("f16"):
                narrow.add(out)
            if op == "convert" and type_text.startswith("f32") and operands[0] in narrow:
                rounded += 1
    return rounded


# --- out --------------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The results as markdown: each kind of master, then the other programs."""
    numbers = ["bytes/param", "target", "stored", "kernels", "largest copy"]
    by_master = [["masters", "optimizer", "clips", *numbers, "holds"]]
    others = [["program", "devices", *numbers, "all-reduces", "temp MB", "holds"]]
    for row in results["rows"]:
        target, small = row["target_bytes_per_param"], row["small_all_reduces"]
        big = len(row["collectives"].get("all-reduce", [])) - small
        counts = [
            f"{row['bytes_per_param']:.2f}",
            f"{target}" if target else "",
            f"{row['stored_bytes_per_param']:.2f}",
            str(row["kernels"]),
            f"{row['largest_copy_bytes']} B",
        ]
        end = holds(row, has_target=target is not None)
        if row["masters"]:
            optimizer, clips = row["program"].partition(",")[0], "yes" if row["clips"] else "no"
            by_master.append([row["masters"], optimizer, clips, *counts, end])
        else:
            reduces = f"{small} small" + (f" + {big} for gradients" if big else "")
            others.append([row["program"], row["mode"], *counts, reduces, f"{row['temp_bytes'] / 1e6:.1f}", end])
    return f"{markdown(by_master)}\n\n{markdown(others)}"


def jobs() -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each row."""
    programs = (*programs_by_master(), *jaxmp_programs(), *fused_programs(), *baseline_programs())
    return {program.row: functools.partial(measure, program) for program in programs}


BENCHMARK = Benchmark("h100 optimizer", "h100_optimizer.json", Rows(on_h100, jobs), render)
