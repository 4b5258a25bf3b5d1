"""Counts of what state in host memory does, in programs compiled for H100s that need not be there.

    python benchmarks/h100_offload.py        the table, and a check of each line; exit status 1 if one fails

Each line is `apply_gradients` with fp16 params, masters, clipping and AdamW: copies over the bus and their bytes, host
arrays that are updated where they stand, XLA's scratch on the device, and collectives. See `h100_aot` for what such a
count can tell, and what not.
"""

import re
import sys
from typing import Any, NamedTuple

import h100_aot as aot  # first: it pins the platform
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import markdown

import jaxmp

WIDTH, LAYERS = 1024, 8
COUNT = LAYERS * WIDTH * WIDTH


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


def main() -> int:
    """Prints the table; returns the exit status."""
    leaf = 12 * WIDTH * WIDTH  # master and moments
    head = ["devices", "window MiB", "copies in", "MiB in", "copies out", "MiB out", "in place", "scratch MiB"]
    cells = [[*head, "collectives"]]
    failed = []
    scratch = {}
    for case in [Case(n, w) for n in (1, 8) for w in (None, leaf, 2**30)]:
        row = count(case)
        scratch[case] = row["scratch"]
        window = "-" if case.window is None else f"{case.window / 2**20:.0f}"
        mib = [f"{row[field] / 2**20:.0f}" for field in ("bytes_in", "bytes_out", "in_place", "scratch")]
        counts = [str(row[field]) for field in ("in", "out", "collectives")]
        cells.append([str(case.devices), window, counts[0], mib[0], counts[1], mib[1], mib[2], mib[3], counts[2]])
        expected = 0 if case.window is None else 12 * COUNT // case.devices
        ok = row["bytes_in"] == row["bytes_out"] == row["in_place"] == expected
        ok &= row["in"] == row["out"] == (0 if case.window is None else 3 * LAYERS)
        ok &= row["collectives"] == count(Case(case.devices, None))["collectives"]
        failed += [] if ok else [case]
    for n in (1, 8):
        failed += [] if scratch[Case(n, leaf)] <= 4 * leaf // n + 2**20 < scratch[Case(n, 2**30)] else [Case(n, leaf)]
    print(markdown(cells))
    for case in failed:
        print(f"not as it should be: {case}")
    return bool(failed)


def count(case: Case) -> dict[str, Any]:
    """What a program does."""
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
        "in": len(ins),
        "out": len(outs),
        "bytes_in": sum(map(aot._bytes, ins)),
        "bytes_out": sum(map(aot._bytes, outs)),
        "in_place": memory.host_alias_size_in_bytes,
        "scratch": memory.temp_size_in_bytes,
        "collectives": len(re.findall(r" all-reduce(?:-start)?\(| all-gather(?:-start)?\(", text)),
    }


def partition(x: Any) -> PartitionSpec:
    """How an array lies: split along its first axis, as FSDP does it."""
    return PartitionSpec("data") if x.ndim else PartitionSpec()


def on_host(mesh: Mesh, x: Any) -> Any:
    """An abstract array in host memory; scalars stay."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HostSharding(mesh, partition(x))) if x.ndim else x


if __name__ == "__main__":
    sys.exit(main())
