"""Counts what gradients cost between 8 and 64 H100s: in float32, in 16 bits, and in 8 bits with error feedback.

The optimizer's side of a data-parallel step (mean of the gradients, finite check, AdamW, new 16-bit params) is compiled
for a transformer's embedding and first block, not run. Bytes are those that one device sends in a ring, or to each
other device: (n - 1) / n of what it has, and twice this for an all-reduce.

Targets: 8 bits send at most 2.05 bytes for each param, no gradient of a large param moves in more, one all-reduce
carries all flags, and the state is updated in place.
"""

import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

import jaxmp
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs import fsdp as fp

DEVICES = (8, 64)
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
MOST, SMALL = 2.05, 2**20  # bytes for each param in 8 bits; bytes of means of small params, flags and norms


class Program(NamedTuple):
    """How gradients are averaged: the arguments of `jaxmp.reduce_gradients`."""

    name: str
    dtype: Any = jnp.float32
    wire_dtype: Any = None
    is_8_bits: bool = False


PROGRAMS = (
    Program("float32"),
    Program("bfloat16", jnp.bfloat16),
    Program("bfloat16, then int8", wire_dtype=(jnp.bfloat16, jnp.int8)),
    Program("int8", wire_dtype=jnp.int8, is_8_bits=True),
    Program("float8_e4m3fn", wire_dtype=jnp.float8_e4m3fn, is_8_bits=True),
)


def params32() -> PyTree:
    """The shapes of the params."""
    return {name: x for name, x in fp.params32().items() if name in ("tokens", "norm", "block_0")}


def count() -> int:
    """The number of params."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params32()))


def compiled(program: Program, devices: int) -> Any:
    """The step, compiled for `devices` H100s, each with its own gradients of whole params."""
    mesh, policy, whole = aot.mesh(devices), jaxmp.get_policy("bf16"), params32()
    adamw = optax.adamw(1e-4)
    if program.wire_dtype is None:
        tx = jaxmp.mixed_precision(adamw, policy, before=jaxmp.reduce_gradients("data", program.dtype))
    else:
        reduce = jaxmp.reduce_gradients("data", wire_dtype=program.wire_dtype, devices=devices)
        tx = jaxmp.mixed_precision(optax.chain(reduce, adamw), policy)

    def step(params: PyTree, opt_state: Any, grads: PyTree) -> Any:
        return jaxmp.apply_gradients(tx, jax.tree.map(lambda g: g[0], grads), opt_state, params)

    params = jax.eval_shape(policy.cast_to_param, whole)
    specs = (P(), jaxmp.sharding_of(tx, whole, jax.tree.map(lambda _: P(), whole)))
    state = jax.tree.map(lambda x, s: aot.spec(mesh, x.shape, x.dtype, s), jax.eval_shape(tx.init, whole), specs[1])
    grads = jax.tree.map(lambda x: aot.spec(mesh, (devices, *x.shape), x.dtype, P("data")), params)
    f = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)
    return aot.compile_for(f, aot.abstract(mesh, params), state, grads, donate_argnums=(0, 1))


def measure(program: Program, devices: int) -> dict[str, Any]:
    """One row."""
    print(f"compiling for {devices}: {program.name}", file=sys.stderr, flush=True)
    executable = compiled(program, devices)
    moved: dict[str, dict[str, int]] = {}
    for i in aot.instructions(executable):
        kind = next((kind for kind in KINDS if i.op.startswith(kind)), None)
        if kind is not None:
            own = i.bytes_read * (devices if kind == "all-gather" else 1)
            entry = moved.setdefault(kind, {})
            name = "+".join(sorted(set(i.dtypes)))
            entry[name] = entry.get(name, 0) + own * (2 if kind == "all-reduce" else 1)
    sent = sum(sum(entry.values()) for entry in moved.values()) * (devices - 1) / devices
    memory = executable.memory_analysis()
    row = {
        "program": program.name,
        "devices": devices,
        "traffic": moved,
        "sent_per_param": round(sent / count(), 4),
        "flag_reductions": fp.flag_reductions(executable),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    return row | {"missed": missed(row, program)}


def missed(row: dict[str, Any], program: Program) -> list[str]:
    """The targets that a row misses, in words."""
    found = []
    if program.is_8_bits and row["sent_per_param"] > MOST:
        found.append(f"{row['sent_per_param']} bytes for each param")
    wide = {kind: n for kind, of in row["traffic"].items() for name, n in of.items() if name not in ("u8", "s8")}
    if program.is_8_bits and any(n > SMALL for n in wide.values()):
        found.append(f"moves more than 8 bits: {wide}")
    if row["flag_reductions"] != 1:
        found.append(f"{row['flag_reductions']} all-reduces of flags")
    # The old params are not read, as the loss is no part of this program, so jax leaves them out of its arguments.
    if row["alias_bytes"] < row["output_bytes"] - 2 * count() - 1024:
        found.append(f"{row['output_bytes'] - 2 * count() - row['alias_bytes']} bytes are not updated in place")
    return found


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["gradients in", "devices", "all-to-all MB", "all-gather MB", "all-reduce MB", "bytes a param", "holds"]]
    for row in results["rows"]:
        moved = [_shown(row["traffic"].get(kind, {})) for kind in ("all-to-all", "all-gather", "all-reduce")]
        cells.append([row["program"], str(row["devices"]), *moved, f"{row['sent_per_param']:.2f}", holds(row)])
    return markdown(cells)


def _shown(of: dict[str, int]) -> str:
    return ", ".join(f"{n / 1e6:.0f} ({name})" for name, n in of.items() if n > SMALL) or "-"


def measure_all() -> dict[str, Any]:
    """All results."""
    return {
        "device": f"{' and '.join(map(str, DEVICES))} x H100 (compiled, not run)",
        "versions": versions(H100),
        "params": count(),
        "rows": [measure(program, devices) for devices in DEVICES for program in PROGRAMS],
    }


BENCHMARK = Benchmark("h100 few_bytes", "h100_few_bytes.json", measure_all, render)
