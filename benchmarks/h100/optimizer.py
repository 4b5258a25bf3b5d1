"""Counts kernels, bytes and collectives of the optimizer's side of a step.

Each program of `benchmarks/programs/h100.py` is compiled for H100 on the parameter tree of GPT-2 small, some also on
larger trees. The optimizer's side of a step does only a few operations per byte, so its bytes determine its time: it
reads gradients, and writes masters, moments and params.

    float16 params and gradients, float32 masters and two moments, clipping by the global norm, AdamW:
      read the gradients once, for the finite check and the norm            2 bytes per parameter
      read the gradient; read and write master, mu, nu; write param        28
      read the old param, if optax's updates are added to it                2
    bfloat16 params, the master's other 16 bits as remainder:
      read the gradient twice; read and write param, remainder, mu, nu     28
    the same with 8 bits of remainder                                      26
    bfloat16 params, 8 bits of remainder, moments in 8 bits:
      read the gradient twice; read and write param, remainder, mu, nu     14

The targets are in `benchmarks/programs/h100.py`. Rows are measured one by one: `--rows '*remainder*'` chooses some.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import PyTree

from benchmarks.lib import aot, trees
from benchmarks.lib.benchmark import Benchmark, Rows
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs.h100 import (
    GPT2,
    MANY,
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
    shapes = program.tree.shapes
    spread = functools.partial(_abstract, m=m, split="split" in program.mode)
    params = spread(trees.cast(shapes, program.params_dtype))
    opt_state = spread(jax.eval_shape(program.init, shapes))
    grads, step = params, program.step
    if "shard_map" in program.mode:
        grads = jax.tree.map(lambda p: aot.spec(m, (program.devices, *p.shape), p.dtype, P("data")), params)
        step = _with_reduction(program.step, m)
    started = [time.perf_counter()]
    results = None if "shard_map" in program.mode else jax.tree.map(lambda x: x.sharding, (params, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True, out_shardings=results)
    traced = jitted.trace(params, opt_state, grads)
    started.append(time.perf_counter())
    lowered = traced.lower()
    started.append(time.perf_counter())
    compiled = lowered.compile()
    started.append(time.perf_counter())

    n_params, donated = trees.size(params), trees.nbytes((params, opt_state))
    unread = trees.nbytes(params) if program.writes_params_only else 0
    row = {
        "program": program.name,
        "mode": program.mode,
        "tree": program.tree.name,
        "masters": program.masters,
        "clips": program.clips,
        "leaves": len(jax.tree.leaves(params)),
        "params": n_params,
        **aot.report(compiled, n_params, unread_bytes=unread),
        "unread_bytes": unread,
        "donated_bytes": donated,
        "stored_bytes_per_param": round(donated / n_params, 3),
        "rounded_leaves": _rounded_leaves(compiled),
    }
    spent = (after - before for before, after in itertools.pairwise(started))
    row |= {f"{stage}_s": round(s, 1) for stage, s in zip(("trace", "lower", "compile"), spent, strict=True)}
    row["packing_bytes_per_param"] = round(row["packing_bytes"] / n_params, 3)
    row["between_bytes_per_param"] = round(row["between_bytes"] / n_params, 3)
    reduces = row["collectives"].get("all-reduce", [])
    row["small_all_reduces"] = sum(size <= SMALL for size in reduces)
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
    in_place = row["donated_bytes"] - row["alias_bytes"]
    checks = (
        (row["bytes_per_param"] <= target.bytes_per_param, f"over {target.bytes_per_param} bytes per parameter"),
        (row["kernels"] <= (target.kernels or row["kernels"]), f"over {target.kernels} kernels"),
        (row["largest_copy_bytes"] <= target.largest_copy_bytes, f"a copy of {row['largest_copy_bytes']} bytes"),
        (
            row["stored_bytes_per_param"] <= (target.stored_bytes_per_param or row["stored_bytes_per_param"]),
            f"over {target.stored_bytes_per_param} bytes stored per parameter",
        ),
        (in_place <= SMALL, f"{in_place} donated bytes not updated in place"),
        (set(row["collectives"]) <= {"all-reduce"}, f"collectives: {', '.join(row['collectives'])}"),
        (
            row["small_all_reduces"] == target.small_all_reduces,
            f"{row['small_all_reduces']} small all-reduces, not {target.small_all_reduces}",
        ),
        (
            row["rounded_leaves"] >= target.rounded_leaves,
            f"only {row['rounded_leaves']} of {target.rounded_leaves} leaves rounded to 16 bits",
        ),
    )
    return [what for holds, what in checks if not holds]


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


def _abstract(tree: PyTree, m: Mesh, *, split: bool = False) -> PyTree:
    """`tree` on every device of the mesh; with `split`, matrices are split along their first axis (FSDP)."""
    rows = P("data") if split else P()
    return aot.abstract(m, tree, lambda x: rows if len(x.shape) == 2 else P())


def missed_by_many_leaves(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that the fused update on 1000 leaves misses: twice the kernels of 148, twice the time by hand.

    None, if a row is not there.
    """

    def find(program: str, tree: str) -> list[dict[str, Any]]:
        return [r for r in rows if r["program"].startswith(program) and (r["mode"], r["tree"]) == ("1 device", tree)]

    def to_compile(row: dict[str, Any]) -> float:
        return row["trace_s"] + row["lower_s"] + row["compile_s"]

    few, many = (find("jaxmp.fused_adamw, fp16", tree.name) for tree in (GPT2, MANY))
    if not (few and many and find("by hand", MANY.name)):
        return []
    (few,), (many,) = few, many
    own, by_hand = to_compile(many), min(map(to_compile, find("by hand", MANY.name)))
    checks = (
        (
            many["kernels"] <= 2 * few["kernels"],
            f"{many['kernels']} kernels, {few['kernels']} on {few['leaves']} leaves",
        ),
        (own <= 2 * by_hand, f"{own:.0f} s to trace and compile, {by_hand:.0f} s by hand"),
    )
    return [what for holds, what in checks if not holds]


# --- out --------------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The results as markdown: each kind of master, GPT-2 small, then the larger trees."""
    by_master = [row for row in results["rows"] if row.get("masters")]
    rows = [row for row in results["rows"] if row not in by_master]
    return "\n\n".join((_by_master(by_master), _table([r for r in rows if r["tree"] == GPT2.name]), _larger(rows)))


def _by_master(rows: list[dict[str, Any]]) -> str:
    cells = [["masters", "optimizer", "clips", "bytes/param", "target", "stored", "kernels", "largest copy", "holds"]]
    for row in rows:
        cells.append(
            [
                row["masters"],
                row["program"].partition(",")[0],
                "yes" if row["clips"] else "no",
                f"{row['bytes_per_param']:.2f}",
                f"{row['target_bytes_per_param']}",
                f"{row['stored_bytes_per_param']:.2f}",
                str(row["kernels"]),
                f"{row['largest_copy_bytes']} B",
                _holds(row),
            ]
        )
    return markdown(cells)


def _table(rows: list[dict[str, Any]]) -> str:
    head = [
        "program",
        "devices",
        "bytes/param",
        "target",
        "stored",
        "kernels",
        "largest copy",
        "all-reduces",
        "temp MB",
    ]
    cells = [[*head, "holds"]]
    for row in rows:
        target = row["target_bytes_per_param"]
        reduces = row["collectives"].get("all-reduce", [])
        big = len(reduces) - row["small_all_reduces"]
        cells.append(
            [
                row["program"],
                row["mode"],
                f"{row['bytes_per_param']:.2f}",
                f"{target}" if target else "",
                f"{row['stored_bytes_per_param']:.2f}",
                str(row["kernels"]),
                f"{row['largest_copy_bytes']} B",
                f"{row['small_all_reduces']} small" + (f" + {big} for gradients" if big else ""),
                f"{row['temp_bytes'] / 1e6:.1f}",
                _holds(row),
            ]
        )
    return markdown(cells)


def _larger(rows: list[dict[str, Any]]) -> str:
    head = [
        "program",
        "devices",
        "tree",
        "leaves",
        "M params",
        "bytes/param",
        "kernels",
        "trace s",
        "lower s",
        "compile s",
    ]
    cells = [[*head, "holds"]]
    several = {row["program"] for row in rows if row["tree"] != GPT2.name}
    for row in sorted(rows, key=lambda row: row["program"]):
        if row["program"] in several and (row["mode"] == "1 device" or row["tree"] != GPT2.name):
            cells.append(
                [
                    row["program"],
                    row["mode"],
                    row["tree"],
                    str(row["leaves"]),
                    f"{row['params'] / 1e6:.0f}",
                    f"{row['bytes_per_param']:.2f}",
                    str(row["kernels"]),
                    *(f"{row[stage]:.1f}" for stage in ("trace_s", "lower_s", "compile_s")),
                    _holds(row),
                ]
            )
    return markdown(cells)


def _holds(row: dict[str, Any]) -> str:
    return holds(row, has_target=row["target_bytes_per_param"] is not None)


def jobs() -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each row."""
    programs = (*programs_by_master(), *jaxmp_programs(), *fused_programs(), *baseline_programs())
    return {program.row: functools.partial(measure, program) for program in programs}


def about() -> dict[str, Any]:
    """Where the rows are from."""
    return {"device": "H100 (compiled, not run)", "versions": versions(H100)}


BENCHMARK = Benchmark("h100 optimizer", "h100_optimizer.json", Rows(about, jobs, missed_by_many_leaves), render)
