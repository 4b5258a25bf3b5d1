"""Counts the copies and the scratch memory of a step with its state in host memory."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import on_h100

WIDTH, LAYERS = 1024, 8
COUNT = LAYERS * WIDTH * WIDTH
LEAF = 12 * WIDTH * WIDTH  # bytes of a master and its moments
DEVICES = (1, 8)
WINDOWS = (None, LEAF, 2**30)


class HostSharding(NamedSharding):
    """A sharding in pinned host memory: devices that are only described to XLA list no memories."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), "pinned_host"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostSharding) and super().__eq__(other)


def missed(row: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """The targets that a row misses, in words; `baseline` is the row with the state on the device.

    Each array is copied in once and out once and is updated in place, no collective is added, and windows of one leaf
    need scratch memory for at most four leaves.
    """
    window, scratch, collectives = row["window_bytes"], row["scratch_bytes"], baseline["collectives"]
    copies, nbytes = (0, 0) if window is None else (3 * LAYERS, 12 * COUNT // row["devices"])
    expected = {"copies_in": copies, "copies_out": copies, "bytes_in": nbytes, "bytes_out": nbytes}
    expected |= {"in_place_bytes": nbytes, "collectives": collectives}
    most = 4 * LEAF // row["devices"] + 2**20
    shows_nothing = window is not None and window > LEAF and scratch <= most
    return failing(
        (
            *((row[name] == n, f"{name} are {row[name]}, not {n}") for name, n in expected.items()),
            (window != LEAF or scratch <= most, f"scratch of {scratch} bytes, over {most}"),
            (not shows_nothing, "all leaves at once need no more scratch than windows of one leaf"),
        )
    )


def measure_all() -> dict[str, Any]:
    """All results."""
    rows = []
    for devices in DEVICES:
        of_these = [count(devices, window) for window in WINDOWS]
        rows += [row | {"missed": missed(row, of_these[0])} for row in of_these]
    return {**on_h100(devices="1 and 8 x H100"), "leaves": LAYERS, "params": COUNT, "rows": rows}


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["devices", "window MiB", "copies in", "MiB in", "copies out", "MiB out", "in place MiB", "scratch MiB"]
    cells = [[*head, "collectives", "holds"]]
    for row in results["rows"]:
        mib = {name: "-" if n is None else f"{n / 2**20:.0f}" for name, n in row.items() if "bytes" in name}
        moved = (str(row["copies_in"]), mib["bytes_in"], str(row["copies_out"]), mib["bytes_out"])
        rest = (mib["in_place_bytes"], mib["scratch_bytes"], str(row["collectives"]))
        cells.append([str(row["devices"]), mib["window_bytes"], *moved, *rest, holds(row)])
    return markdown(cells)


def count(devices: int, window: int | None) -> dict[str, Any]:
    """The row of a program; `window` in bytes, None for a state on the device without `stream_updates`."""
    print(f"compiling for {devices}: windows of {window} bytes", file=sys.stderr, flush=True)
    mesh = aot.mesh(devices)
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if window is not None:
        inner = jaxmp.offload.stream_updates(inner, window_bytes=window)
    tx = jaxmp.mixed_precision(inner, "fp16")
    params32 = {f"layer_{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    opt_state = aot.abstract(mesh, jax.eval_shape(tx.init, params32), partition)
    params = aot.abstract(mesh, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float16), params32), partition)
    if window is not None:
        opt_state = jax.tree.map(lambda x: on_host(mesh, x) if x.ndim else x, opt_state)

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    compiled = aot.compile_for(step, params, opt_state, params, donate_argnums=(0, 1))
    text = compiled.as_text() or ""
    shape, host_shape = r"\w+\[[\d,]*\]\{[\d,]*\}", r"\w+\[[\d,]*\]\{[\d,]*:S\(5\)\}"
    ins = re.findall(rf"= \(({shape}), {host_shape}, .* copy-start\(", text)
    outs = re.findall(rf"= \({host_shape}, ({shape}), .* copy-start\(", text)
    memory: Any = compiled.memory_analysis()
    return {
        "devices": devices,
        "window_bytes": window,
        "copies_in": len(ins),
        "copies_out": len(outs),
        "bytes_in": sum(map(aot.nbytes, ins)),
        "bytes_out": sum(map(aot.nbytes, outs)),
        "in_place_bytes": memory.host_alias_size_in_bytes,
        "scratch_bytes": memory.temp_size_in_bytes,
        "collectives": len(re.findall(r" all-reduce(?:-start)?\(| all-gather(?:-start)?\(", text)),
    }


def partition(x: Any) -> PartitionSpec:
    """Arrays are split along their first axis, as in FSDP; scalars are replicated."""
    return PartitionSpec("data") if x.ndim else PartitionSpec()


def on_host(mesh: Mesh, x: Any) -> Any:
    """An abstract array in host memory; scalars stay on the device."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HostSharding(mesh, partition(x))) if x.ndim else x


BENCHMARK = Benchmark("h100 offload", "h100_offload.json", measure_all, render)
