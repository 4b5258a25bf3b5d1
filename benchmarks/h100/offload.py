"""Counts of what state in host memory does, in programs compiled for H100s that need not be there.

    python benchmarks/h100_offload.py            compile, check, write the results and README.md's table
    python benchmarks/h100_offload.py --table    only the table, from the results that are there

Each row is `apply_gradients` with fp16 params, masters, clipping and AdamW: copies over the bus and their bytes, host
arrays that are updated where they stand, XLA's scratch on the device, and collectives. Exit status 1 if an array is not
copied in once and out once or not updated where it stands, if a collective is added, or if windows of one leaf take the
scratch of more than four. See `h100_aot` for what such a count can tell, and what not.
"""

import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp
from benchmarks.h100.optimizer import versions
from benchmarks.lib import aot
from benchmarks.lib.tables import HERE, holds, markdown, run

RESULTS = HERE / "results" / "h100_offload.json"
MARKERS = "<!-- h100_offload: written by h100_offload.py -->", "<!-- h100_offload: end -->"

WIDTH, LAYERS = 1024, 8
COUNT = LAYERS * WIDTH * WIDTH
LEAF = 12 * WIDTH * WIDTH  # bytes of one master and its moments
DEVICES = (1, 8)
WINDOWS = (None, LEAF, 2**30)


class HostSharding(NamedSharding):
    """A sharding in pinned host memory, of devices that were only described to XLA, which know no memories."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), "pinned_host"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostSharding) and super().__eq__(other)


class Case(NamedTuple):
    """One program; `window` is in bytes, None for a state on the device without `stream_updates`."""

    devices: int
    window: int | None


def missed(row: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """What a row does not hold to, beside that of a state on the device."""
    bytes_each_way = 0 if row["window_bytes"] is None else 12 * COUNT // row["devices"]
    copies = 0 if row["window_bytes"] is None else 3 * LAYERS
    expected = {
        "copies_in": copies,
        "copies_out": copies,
        "bytes_in": bytes_each_way,
        "bytes_out": bytes_each_way,
        "in_place_bytes": bytes_each_way,
        "collectives": baseline["collectives"],
    }
    found = [f"{name} are {row[name]}, not {n}" for name, n in expected.items() if row[name] != n]
    most = 4 * LEAF // row["devices"] + 2**20
    if row["window_bytes"] == LEAF and row["scratch_bytes"] > most:
        found.append(f"scratch of {row['scratch_bytes']} bytes, over {most}")
    if row["window_bytes"] is not None and row["window_bytes"] > LEAF and row["scratch_bytes"] <= most:
        found.append("all leaves at once take no more scratch than windows of one: these show nothing")
    return found


def measure_all() -> dict[str, Any]:
    """All results."""
    found, rows = versions(), []
    for devices in DEVICES:
        of_these = []
        for window in WINDOWS:
            print(f"compiling for {devices}: windows of {window} bytes", file=sys.stderr, flush=True)
            of_these.append(count(Case(devices, window)))
        rows += [row | {"missed": missed(row, of_these[0])} for row in of_these]
    return {
        "command": "python benchmarks/h100_offload.py",
        "device": f"{' and '.join(map(str, DEVICES))} x H100 (compiled, not run)",
        "versions": found,
        "leaves": LAYERS,
        "params": COUNT,
        "rows": rows,
    }


def table(results: dict[str, Any]) -> str:
    """README.md's table."""
    head = ["devices", "window MiB", "copies in", "MiB in", "copies out", "MiB out", "in place MiB", "scratch MiB"]
    cells = [[*head, "collectives", "holds"]]
    for row in results["rows"]:
        mib = {name: "-" if n is None else f"{n / 2**20:.0f}" for name, n in row.items() if "bytes" in name}
        moved = (str(row["copies_in"]), mib["bytes_in"], str(row["copies_out"]), mib["bytes_out"])
        kept = (mib["in_place_bytes"], mib["scratch_bytes"], str(row["collectives"]))
        cells.append([str(row["devices"]), mib["window_bytes"], *moved, *kept, holds(row)])
    return markdown(cells)


def count(case: Case) -> dict[str, Any]:
    """What a program does, as a row."""
    mesh = aot.mesh(case.devices)
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if case.window is not None:
        inner = jaxmp.offload.stream_updates(inner, window_bytes=case.window)
    tx = jaxmp.mixed_precision(inner, "fp16")
    params32 = {f"layer_{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    opt_state = aot.abstract(mesh, jax.eval_shape(tx.init, params32), partition)
    params = aot.abstract(mesh, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float16), params32), partition)
    if case.window is not None:
        opt_state = opt_state._replace(guarded=jax.tree.map(lambda x: on_host(mesh, x), opt_state.guarded))

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    compiled = aot.compile_for(step, params, opt_state, params, donate_argnums=(0, 1))
    text = compiled.as_text() or ""
    shape, host_shape = r"\w+\[[\d,]*\]\{[\d,]*\}", r"\w+\[[\d,]*\]\{[\d,]*:S\(5\)\}"
    ins = re.findall(rf"= \(({shape}), {host_shape}, .* copy-start\(", text)
    outs = re.findall(rf"= \({host_shape}, ({shape}), .* copy-start\(", text)
    memory: Any = compiled.memory_analysis()
    return {
        "devices": case.devices,
        "window_bytes": case.window,
        "copies_in": len(ins),
        "copies_out": len(outs),
        "bytes_in": sum(map(aot._bytes, ins)),
        "bytes_out": sum(map(aot._bytes, outs)),
        "in_place_bytes": memory.host_alias_size_in_bytes,
        "scratch_bytes": memory.temp_size_in_bytes,
        "collectives": len(re.findall(r" all-reduce(?:-start)?\(| all-gather(?:-start)?\(", text)),
    }


def partition(x: Any) -> PartitionSpec:
    """How an array lies: split along its first axis, as FSDP does it."""
    return PartitionSpec("data") if x.ndim else PartitionSpec()


def on_host(mesh: Mesh, x: Any) -> Any:
    """An abstract array in host memory; scalars stay."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HostSharding(mesh, partition(x))) if x.ndim else x


if __name__ == "__main__":
    sys.exit(run(__doc__, RESULTS, MARKERS, table, measure_all))
