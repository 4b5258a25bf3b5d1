"""What the optimizer's side of one training step costs on an H100, counted without one.

Compiles each program below for H100 (`h100_aot.py`) on the parameter tree of GPT-2 small, and counts kernels, bytes
and collectives in the result. The optimizer's side of a step does a few operations per byte, so its time is its bytes:
gradients in, masters, moments and params out.

    float16 params and gradients, float32 masters and two moments, clipping by the global norm, AdamW:
      look at the gradients once (finite? norm?)                            2 bytes per parameter
      read the gradient, then read and write master, mu, nu; write param   28
      with updates as optax hands them on, read the old param as well       2

    python benchmarks/h100.py            compile, check the targets, write the results and the table in README.md
    python benchmarks/h100.py --table    only the table, from the results that are there

Exit status 1 if a target is missed.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import h100_aot as aot  # first: it pins the local platform
import jax
import jax.numpy as jnp
import optax
import tables
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import PyTree
from recipes import LEARNING_RATE, MAX_NORM, Step, by_hand, flax_dynamic_scale, plain
from tables import HERE, markdown, parse_arguments, write_readme

import jaxmp

RESULTS = HERE / "results" / "h100_optimizer.json"
MARKERS = "<!-- h100_optimizer: written by h100.py -->", "<!-- h100_optimizer: end -->"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "flax", "optax", "jaxmp")
SMALL = 1024  # bytes: what is below is a scalar or a handful of flags, what is above costs bandwidth
versions = functools.partial(tables.versions, PACKAGES, "make h100")


class Target(NamedTuple):
    """What a program may cost; every field is checked."""

    bytes_per_param: float
    small_all_reduces: int  # for flags (and sums), each at most SMALL bytes
    rounded_leaves: int = 0  # leaves for which a rounding to 16 bits has to be in the program


class Program(NamedTuple):
    """One row of the table."""

    name: str
    mode: str  # how many devices, and how they share the work
    step: Step
    init: Callable[[PyTree], Any]  # from float32 params
    devices: int = 1
    params_dtype: Any = jnp.float16
    target: Target | None = None


def gpt2_small() -> PyTree:
    """The parameters of GPT-2 small as flax names them: 148 leaves, 124.4 million values, shapes only."""
    layers, width, vocabulary, positions = 12, 768, 50257, 1024

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(n_in: int, n_out: int) -> PyTree:
        return {"kernel": leaf(n_in, n_out), "bias": leaf(n_out)}

    norm = {"scale": leaf(width), "bias": leaf(width)}
    block = {
        "ln_1": norm,
        "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
        "ln_2": norm,
        "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
    }
    embeddings = {"wte": {"embedding": leaf(vocabulary, width)}, "wpe": {"embedding": leaf(positions, width)}}
    return {**embeddings, **{f"h_{i}": block for i in range(layers)}, "ln_f": norm}


# --- jaxmp ------------------------------------------------------------------------------------------------------------


def jaxmp_programs(n_leaves: int) -> Iterator[Program]:
    """`jaxmp.mixed_precision` in its two forms, on one device and on eight that hold the same params."""
    inner = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    tx = jaxmp.mixed_precision(inner, "fp16")

    def apply(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    def update(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    forms = (
        ("jaxmp.apply_gradients", apply, 30.5, 0),
        ("jaxmp update + optax.apply_updates", update, 32.5, n_leaves),
    )
    for name, step, limit, rounded in forms:
        yield Program(name, "1 device", step, tx.init, target=Target(limit, 0, rounded))
        yield Program(name, "8, jit", step, tx.init, devices=8, target=Target(limit, 0, rounded))
        yield Program(name, "8, shard_map", step, tx.init, devices=8, target=Target(limit, 1, rounded))


# --- what it is measured against --------------------------------------------------------------------------------------


def baseline_programs() -> Iterator[Program]:
    """The same work without jaxmp."""
    adamw = optax.adamw(LEARNING_RATE)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    init, step = by_hand()
    yield Program("by hand: fp16 params, fp32 masters, clip, adamw", "1 device", step, init)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = flax_dynamic_scale(tx)
        yield Program(f"flax DynamicScale, f32 params, {name}", "1 device", step, init, params_dtype=jnp.float32)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = plain(tx)
        yield Program(f"optax.{name}, f32, no scaling", "1 device", step, init, params_dtype=jnp.float32)


# --- compiling and counting -------------------------------------------------------------------------------------------


def measure(program: Program) -> dict[str, Any]:
    """Compiles one program and returns its row.

    Params and opt_state are donated, and come back in the order in which they went in: XLA pairs donated buffers with
    results of the same shape and dtype in order, so that (params, opt_state) -> (opt_state, params) would copy
    wherever a param looks like a moment.
    """
    m = aot.mesh(program.devices)
    shapes = gpt2_small()
    params = _abstract(_cast(shapes, program.params_dtype), m)
    opt_state = _abstract(jax.eval_shape(program.init, shapes), m)
    grads, step = params, program.step
    if "shard_map" in program.mode:
        grads = jax.tree.map(lambda p: aot.spec(m, (program.devices, *p.shape), p.dtype, P("data")), params)
        step = _with_reduction(program.step, m)
    compiled = aot.compile_for(step, params, opt_state, grads, donate_argnums=(0, 1), keep_unused=True)

    n_params, donated = _size(params), _nbytes(params) + _nbytes(opt_state)
    row = {"program": program.name, "mode": program.mode, **aot.report(compiled, n_params)}
    row["donated_bytes"] = donated
    row["packing_bytes_per_param"] = round(row["packing_bytes"] / n_params, 3)
    row["rounded_leaves"] = _rounded_leaves(compiled)
    reduces = row["collectives"].get("all-reduce", [])
    row["small_all_reduces"] = sum(size <= SMALL for size in reduces)
    row["missed"] = _missed(row, program.target) if program.target else []
    row["target_bytes_per_param"] = program.target.bytes_per_param if program.target else None
    return row


def _with_reduction(step: Step, m: Mesh) -> Step:
    """`step` inside `jax.shard_map`, behind the mean over devices of each device's own gradients [1, ...]."""

    def local(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return step(params, opt_state, lax.pmean(jax.tree.map(lambda g: g[0], grads), "data"))

    return jax.shard_map(local, mesh=m, in_specs=(P(), P(), P("data")), out_specs=P())


def _missed(row: dict[str, Any], target: Target) -> list[str]:
    """What of `target` the row does not meet, in words."""
    in_place = row["donated_bytes"] - row["alias_bytes"]
    checks = (
        (row["bytes_per_param"] <= target.bytes_per_param, f"over {target.bytes_per_param} bytes per parameter"),
        (row["largest_copy_bytes"] <= SMALL, f"a copy of {row['largest_copy_bytes']} bytes"),
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
    """How often the program rounds a float32 tensor to float16's grid and goes on in float32.

    Counted is what survives XLA: rounding to integers (on a scaled tensor), reduce-precision, and a cast to f16 that
    is cast back.
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


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)


def _abstract(tree: PyTree, m: Mesh) -> PyTree:
    return jax.tree.map(lambda x: aot.spec(m, x.shape, x.dtype), tree)


def _size(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _nbytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# --- out --------------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a markdown table that also reads well as plain text."""
    head = ["program", "devices", "bytes/param", "target", "kernels", "largest copy", "all-reduces", "temp MB", "holds"]
    cells = [head]
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
                str(row["kernels"]),
                f"{row['largest_copy_bytes']} B",
                f"{row['small_all_reduces']} small" + (f" + {big} for gradients" if big else ""),
                f"{row['temp_bytes'] / 1e6:.1f}",
                "" if target is None else "no: " + "; ".join(row["missed"]) if row["missed"] else "yes",
            ]
        )
    return markdown(cells)


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    if parse_arguments(__doc__).table:
        results = json.loads(RESULTS.read_text())
        write_readme(MARKERS, table(results["rows"]), results)
        return 0

    found = versions()
    shapes = gpt2_small()
    n_leaves = len(jax.tree.leaves(shapes))
    rows = []
    for program in (*jaxmp_programs(n_leaves), *baseline_programs()):
        print(f"compiling: {program.name}, {program.mode}", file=sys.stderr, flush=True)
        rows.append(measure(program))
    results = {
        "command": "python benchmarks/h100.py",
        "device": "H100 (compiled, not run)",
        "tree": {"model": "GPT-2 small", "leaves": n_leaves, "params": _size(shapes)},
        "versions": found,
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    write_readme(MARKERS, table(rows), results)
    print(table(rows))
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
