"""Counts what a step with FSDP exchanges on 8, 64 and 512 H100s; also writes scaling.md."""

import sys
from typing import Any

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import ROOT, markdown, with_versions
from benchmarks.lib.versions import on_h100
from benchmarks.programs import fsdp as fp

SCALING = ROOT / "benchmarks" / "scaling.md"
SCALED = ("fp16, jit with shardings", "fp16, reduced in float16", "fp16, reduced in float32")
DEVICES = (8, 64, 512)
# Published bytes per second in one direction: NVLink 4 of an H100 SXM (900 GB/s in both), and one 400 Gb/s
# InfiniBand adapter for each GPU, as in a DGX H100.
NVLINK, INFINIBAND, GPUS_PER_NODE = 450e9, 50e9, 8


def measure(program: fp.Program, devices: int) -> dict[str, Any]:
    """One row."""
    print(f"compiling for {devices}: {program.name}", file=sys.stderr, flush=True)
    executable = fp.compiled(program, devices)
    memory = executable.memory_analysis()
    report = aot.report(executable)
    hidden, could = fp.overlapped(executable)
    return {
        "program": program.name,
        "devices": devices,
        "policy": program.policy,
        "traffic": fp.traffic(executable, devices),
        "flag_reductions": fp.flag_reductions(executable),
        "overlapped": [hidden, could],
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "largest_copy_bytes": report["largest_copy_bytes"],
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that the programs miss, in words."""
    misses = []
    for row in rows:
        name = f"{row['program']}, {row['devices']} devices"
        if row["policy"] != "fp32" and any("f32" in dtypes.split("+") for dtypes in row["traffic"]["all-gather"]):
            misses.append(f"{name}: gathers in float32")
        if row["flag_reductions"] != 1:
            misses.append(f"{name}: {row['flag_reductions']} all-reduces of flags")
        if row["alias_bytes"] < row["output_bytes"] - 1024:  # without scalars
            misses.append(f"{name}: {row['output_bytes'] - row['alias_bytes']} bytes are not updated in place")
    for program in SCALED:
        sent = {_small(row) for row in rows if row["program"] == program}
        if len(sent) > 1:
            misses.append(f"{program}: all-reduces of {sorted(sent)} bytes, not the same for every number of devices")
    return misses


def _small(row: dict[str, Any]) -> int:
    return sum(entry["bytes"] for entry in row["traffic"].get("all-reduce", {}).values())


def _sent(row: dict[str, Any], kind: str) -> str:
    parts = row["traffic"].get(kind, {})
    return ", ".join(f"{e['count']} x {dtype}, {e['bytes'] / 1e6:.0f} MB" for dtype, e in parts.items()) or "none"


def render(results: dict[str, Any]) -> str:
    """The table of README.md; also writes scaling.md."""
    SCALING.write_text(scaling(results))
    head = ["program, 8 devices", "all-gather", "reduce-scatter", "flags", "hidden", "scratch GB"]
    cells = [head]
    for row in results["rows"]:
        if row["devices"] == 8:
            hidden, could = row["overlapped"]
            scratch = f"{row['temp_bytes'] / 1e9:.2f}"
            moved = (_sent(row, "all-gather"), _sent(row, "reduce-scatter"))
            cells.append([row["program"], *moved, str(row["flag_reductions"]), f"{hidden} of {could}", scratch])
    return markdown(cells)


def seconds(row: dict[str, Any]) -> tuple[float, float]:
    """Times on NVLink, and with InfiniBand between nodes: all bytes over the slowest link of a ring, one way."""
    n = row["devices"]
    gathered, scattered, reduced = (
        sum(e["bytes"] for e in row["traffic"].get(kind, {}).values())
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )
    moved = (gathered + scattered + 2 * reduced) * (n - 1) / n
    return moved / NVLINK, moved / (NVLINK if n <= GPUS_PER_NODE else INFINIBAND)


def scaling(results: dict[str, Any]) -> str:
    """The text of scaling.md: the costs that depend on the number of devices."""
    head = ["program", "devices", "all-gather", "reduce-scatter", "all-reduce, bytes"]
    head += ["args GB", "peak GB", "NVLink ms", "IB ms"]
    cells = [head]
    for row in results["rows"]:
        if row["program"] in SCALED:
            on_nvlink, on_infiniband = seconds(row)
            moved = (_sent(row, "all-gather"), _sent(row, "reduce-scatter"), str(_small(row)))
            sizes = [f"{n / 1e9:.3f}" for n in (row["argument_bytes"], row["argument_bytes"] + row["temp_bytes"])]
            times = (f"{1e3 * on_nvlink:.2f}", f"{1e3 * on_infiniband:.2f}" if row["devices"] > GPUS_PER_NODE else "-")
            cells.append([row["program"], str(row["devices"]), *moved, *sizes, *times])
    return f"""# Communication between devices in a step

`python -m benchmarks h100 fsdp` writes this page from programs compiled for 8, 64 and 512 H100s; nothing was run. The
model is a transformer of width {fp.WIDTH} with {fp.LAYERS} layers and {results["params"] / 1e6:.0f} million params.
Every device has {fp.ROWS} sequences of {fp.LENGTH} tokens. Params, masters and moments are sharded over all devices.

{markdown(cells)}

- Bytes are those of the whole tensors. A ring moves (n - 1) / n of them through each device, so they do not grow with
  the number of devices. The memory of each device (args: params, masters, moments, batch) shrinks.
- args and peak (with XLA's scratch memory) are of one device.
- The all-reduces carry the gradients of the leaves that are not sharded (the gains of norms), the flags, the gradient
  norm and the loss. Without the gradients they carry 20 bytes, for any number of devices. One of them carries all flags
  and amaxes, for any number of leaves. It costs latency, not bandwidth.
- Under plain jit, XLA adds the s32 gather of all tokens of the batch, for the gradient of the embedding.
- The times are bytes divided by published bandwidths: {NVLINK / 1e9:.0f} GB/s for NVLink 4 in one direction and
  {INFINIBAND / 1e9:.0f} GB/s for one 400 Gb/s InfiniBand adapter per GPU. They are lower bounds for a flat ring,
  without latency, congestion and overlap with matmuls.
- At 512 devices the links between nodes bound a step of this size. FSDP within each node and replicas between nodes (a
  mesh with the axes "data" and "fsdp") move the params over NVLink. InfiniBand then carries one all-reduce of each
  device's part of the gradients: `jaxmp.reduce_gradients("data", jnp.float16)`.

{with_versions(f"Command: `{results['command']}`.", results)}
"""


def measure_all() -> dict[str, Any]:
    """All results."""
    about = on_h100(devices=f"{', '.join(map(str, DEVICES))} x H100")
    chosen = [(p, devices) for devices in DEVICES for p in fp.PROGRAMS if devices == 8 or p.name in SCALED]
    rows = [measure(program, devices) for program, devices in chosen]
    return {**about, "params": fp.count(), "rows": rows, "missed": missed(rows)}


BENCHMARK = Benchmark("h100 fsdp", "h100_fsdp.json", measure_all, render)
