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

import argparse
import functools
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h100_aot as aot  # first: it pins the local platform
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

import jaxmp

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h100_optimizer.json"
README = HERE / "README.md"
MARKERS = "<!-- h100_optimizer: written by h100.py -->", "<!-- h100_optimizer: end -->"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "flax", "optax", "jaxmp")
SMALL = 1024  # bytes: what is below is a scalar or a handful of flags, what is above costs bandwidth

LEARNING_RATE, MAX_NORM = 1e-3, 1.0
Step = Callable[[PyTree, Any, PyTree], tuple[PyTree, Any]]  # (params, opt_state, grads) -> (params, opt_state)


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


class ByHandState(NamedTuple):
    """fp16 training as one writes it without a library."""

    masters: PyTree  # float32, as params
    adamw: Any
    scale: Float[Array, ""]
    good_steps: Int[Array, ""]


def by_hand() -> tuple[Callable[[PyTree], ByHandState], Step]:
    """Unscale, clip, AdamW on masters, select old or new, cast: jnp and optax, nothing else."""
    adamw = optax.adamw(LEARNING_RATE)

    def init(params: PyTree) -> ByHandState:
        return ByHandState(params, adamw.init(params), jnp.float32(2.0**16), jnp.int32(0))

    def step(params: PyTree, state: ByHandState, grads: PyTree) -> tuple[PyTree, ByHandState]:
        del params  # the masters are the truth
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
        updates, adamw_state = adamw.update(grads, state.adamw, state.masters)
        new = optax.apply_updates(state.masters, updates), adamw_state
        masters, adamw_state = _select(finite, new, (state.masters, state.adamw))
        grow = finite & (state.good_steps + 1 == 2000)
        scale = state.scale * jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        good_steps = jnp.where(finite & ~grow, state.good_steps + 1, 0)
        params = jax.tree.map(lambda w: w.astype(jnp.float16), masters)
        return params, ByHandState(masters, adamw_state, scale, good_steps)

    return init, step


def flax_dynamic_scale(tx: optax.GradientTransformation) -> tuple[Callable[[PyTree], Any], Step]:
    """flax's recipe for float16 compute: `DynamicScale` round the gradient, float32 params, select."""

    def init(params: PyTree) -> Any:
        return tx.init(params), DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0))

    def step(params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        opt_state, dynamic_scale = state

        def loss_fn(params: PyTree) -> Float[Array, ""]:  # the loss with these gradients
            return sum(map(jnp.vdot, jax.tree.leaves(params), jax.tree.leaves(grads)), jnp.float32(0.0))

        dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(loss_fn)(params)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = _select(finite, new, (params, opt_state))
        return params, (opt_state, dynamic_scale)

    return init, step


def plain(tx: optax.GradientTransformation) -> tuple[Callable[[PyTree], Any], Step]:
    """optax in float32: nothing scaled, nothing skipped."""

    def step(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx.init, step


def _select(finite: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


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


def markdown(cells: list[list[str]]) -> str:
    """A markdown table of its rows, the first being the head, with the columns aligned."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [cells[0], ["-" * w for w in widths], *cells[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def write_between(begin: str, end: str, text: str) -> None:
    """Replaces what stands between two markers in README.md."""
    before, rest = README.read_text().split(begin)
    README.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def write_readme(markers: tuple[str, str], tables: str, results: dict[str, Any]) -> None:
    """Puts tables, and what they were measured with, between their markers in README.md."""
    found = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    write_between(*markers, f"{tables}\n\n{results['device']}; {found}.")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line: `--table` or nothing."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--table", action="store_true", help="only write README.md's tables from the stored results")
    return parser.parse_args()


def versions() -> dict[str, str]:
    """Of everything that the numbers depend on; stops the program where something is missing."""
    try:
        return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES}
    except importlib.metadata.PackageNotFoundError as e:
        raise SystemExit(f"{e.name} is missing: `make h100` installs what this needs, and runs it") from e


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
