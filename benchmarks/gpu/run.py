"""Runs the kernels' tests and times kernels, layers and steps on a GPU, in under 8 minutes.

    make gpu                                                installs what it needs, then runs everything
    python -m benchmarks gpu                                everything: results/gpu_<device>.json, README.md's table
    python -m benchmarks gpu --sections copy,casts          some sections
    python -m benchmarks gpu --tiny --out FOLDER            tiny sizes on a CPU, to test the benchmark itself
    python -m benchmarks gpu --table                        only the table, from the stored results

It runs in the source tree, without installing jaxmp, in any environment with jax 0.11.2 for CUDA, flax and optax. Other
packages that jaxmp and its example need may be on PYTHONPATH, or come as wheels. Wheels are installed into a temporary
folder, without an index:

    pip download --no-deps -d wheels jmp jaxtyping wadler-lindig tyro rich matplotlib ...      (with an index)
    python3 -m benchmarks gpu --wheels wheels                                                  (on the GPU's machine)

Without torch, pytest, tyro, rich or matplotlib, their rows are left out, and the results give the reason.

If a section fails, its error is recorded and the next section starts. Each section has a time limit. On a GPU the
targets are checked: the exit status is 1 if a target is missed or was not measured (except rows of torch, if it is
missing).
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.tables import README, RESULTS, ROOT, markdown, markers, with_versions, write_between
from benchmarks.lib.versions import GPU, versions as versions_of

LIMIT = 440.0  # seconds for everything; a compilation that runs at that time is finished
# Name: (module, time limit in seconds); the most important ones first
SECTIONS = {
    "copy": ("kernels", 15),
    "tests": ("", 110),
    "casts": ("kernels", 30),
    "tree": ("kernels", 75),
    "dense": ("models", 30),
    "llama": ("models", 90),
    "block": ("models", 40),
    "crossover": ("models", 45),
    "example": ("models", 45),
    "offload": ("offload", 60),
}


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for; returns the exit status."""
    options = parse_arguments(arguments)
    if options.table:
        write_table()
        return 0
    prepare(options)
    import jax  # after the environment is set

    from benchmarks.lib.timing import Bench

    device = jax.devices()[0]
    if not options.tiny and device.platform not in ("gpu", "cuda"):
        raise SystemExit(f"this needs an NVIDIA GPU; jax found {device.device_kind}. To run on a CPU, use --tiny.")
    print(f"{device.device_kind}: {', '.join(f'{k} {v}' for k, v in versions().items())}", flush=True)
    started = time.monotonic()
    bench = Bench(tiny=options.tiny, kernels="interpret" if options.tiny else "mosaic", limit=options.limit)
    seconds = {}
    for name in options.sections:
        begun = time.monotonic()
        run_section(bench, name)
        seconds[name] = round(time.monotonic() - begun, 1)
    fastest = max((r["bytes_per_s"] for r in bench.rows if r["section"] == "copy"), default=None)
    for row in bench.rows:
        if fastest and "bytes_per_s" in row:
            row["of_copy"] = row["bytes_per_s"] / fastest
    results = {
        "command": "python -m benchmarks gpu",
        "device": device.device_kind,
        "versions": versions(),
        "seconds": {"all": round(time.monotonic() - started, 1), **seconds},
        "targets": [] if options.tiny else check(bench, options.sections),
        "pays_from": pays_from(bench.rows),
        "rows": bench.rows,
        "left_out": bench.left_out,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "_", device.device_kind).strip("_").lower()
    (options.out / f"gpu_{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    print(tables_of(results))
    if options.out == RESULTS and not options.tiny:
        write_table()
    return 0 if all(target["holds"] is not False for target in results["targets"]) else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; argparse, because this also runs where tyro is missing."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=description)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, without targets and table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install into a temporary folder first")
    parser.add_argument("--limit", type=float, default=LIMIT, help="time limit for everything, in seconds")
    parser.add_argument("--table", action="store_true", help="only write README.md's table, from the stored results")
    options = parser.parse_args(arguments)
    options.sections = options.sections.split(",")
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"sections are {', '.join(SECTIONS)}; got {', '.join(unknown)}")
    if options.tiny and options.out == RESULTS:
        parser.error("--tiny does not measure a GPU: set another folder for its results with --out")
    return options


def prepare(options: argparse.Namespace) -> None:
    """Sets the environment and installs wheels, before jax is imported."""
    if options.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and the tests need memory too
    paths = [str(ROOT)]
    if options.wheels:
        folder = tempfile.mkdtemp(prefix="gpu-wheels-")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", folder]
        subprocess.run([*pip, *map(str, sorted(options.wheels.glob("*.whl")))], check=True)
        paths.append(folder)
    sys.path[1:1] = paths[1:]  # the folder of wheels
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_section(bench: Any, name: str) -> None:
    """Runs a section; an error in it does not stop the others."""
    module, budget = SECTIONS[name]
    bench.start(name, budget)
    if time.monotonic() > bench.ends:
        bench.leave_out("all of it", "the time for the whole run was over")
        return
    try:
        if name == "tests":
            run_tests(bench)
        else:
            getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(bench)
    except Exception as e:
        bench.leave_out("the rest of it", e)


def run_tests(bench: Any) -> None:
    """The kernels' tests, compiled for this GPU."""
    if bench.tiny:
        bench.leave_out("tests", "kernels run on a GPU only")
        return
    files = sorted(map(str, (ROOT / "tests" / "kernels").glob("test_kernels_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mosaic", *files]
    seconds = max(1.0, bench.section_ends - time.monotonic())
    environment = {**os.environ, "JAXMP_TEST_PLATFORM": "cuda"}
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
        output, status = run.stdout + run.stderr, run.returncode
    except subprocess.TimeoutExpired as e:
        seen = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        output, status = f"{seen}\nstopped after {seconds:.0f} s", -1
    summary = (output.strip().splitlines() or ["no output"])[-1]
    row = {"section": "tests", "what": "tests", "variant": "mosaic", "passed": status == 0, "summary": summary}
    bench.rows.append(row if status == 0 else row | {"output": output[-4000:]})
    print(f"tests: {summary}", flush=True)


# --- targets ----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """The least that a measured value has to reach.

    Attributes:
      section: the section that measures it.
      what: the rows with this name.
      of: (variant, field) of the value.
      by: (variant, field) to divide the value by, or None.
      least: the lower bound.
      meaning: the unit of the bound, in words.
    """

    section: str
    what: str
    of: tuple[str, str]
    by: tuple[str, str] | None
    least: float
    meaning: str


def targets() -> list[Target]:
    """All targets."""
    found = [Target("tests", "tests", ("mosaic", "passed"), None, 1, "the kernels' tests pass")]
    of_copy, us = ("mosaic", "of_copy"), ("mosaic", "us")
    for dtype in ("float32", "bfloat16"):
        what = f"cast_transpose_amax, 8192x8192 {dtype}"
        found.append(Target("casts", what, of_copy, None, 0.8, "of the copy bandwidth"))
        found.append(Target("casts", what, ("xla", "us"), us, 1.3, "times as fast as XLA"))
    from benchmarks.gpu.kernels import KINDS

    updates = [f"multi_tensor_update AdamW, {kind}" for kind in KINDS]
    for what in ("unscale_and_check, float16", "unscale_and_check, float32", *updates):
        found.append(Target("tree", what, of_copy, None, 0.85, "of the copy bandwidth"))
    for what in ("unscale_and_check, float32", "gradient_norm, float16", updates[0]):
        found.append(Target("tree", what, ("torch", "us"), us, 1.0, "times as fast as torch"))
    what = "Dense 8192x4096x4096, forward and backward"
    found.append(Target("dense", what, ("bf16", "us"), ("fp8", "us"), 1.5, "times as fast as bf16"))
    what = "training step of a Llama layer, width 4096"
    found.append(Target("llama", what, ("bf16", "us"), ("fp8", "us"), 1.25, "times as fast as bf16"))
    found.append(Target("llama", what, ("bf16", "peak_mib"), ("fp8", "peak_mib"), 1.0, "no more memory than bf16"))
    from benchmarks.gpu.offload import UPDATE

    found.append(Target("offload", UPDATE, ("device", "peak_mib"), ("host", "peak_mib"), 1.2, "times less memory"))
    found.append(Target("offload", UPDATE, ("host", "us"), ("host, skipped", "us"), 5.0, "times faster when skipped"))
    return found


def check(bench: Any, sections: list[str]) -> list[dict[str, Any]]:
    """The targets of these sections, with the measured values; `holds` is None if torch is missing."""
    no_torch = importlib.util.find_spec("torch") is None
    found = []
    for target in targets():
        if target.section not in sections:
            continue
        got = bench.value(target.what, *target.of)
        divisor = bench.value(target.what, *target.by) if target.by else 1.0
        got = None if got is None or divisor is None else got / divisor
        holds = got is not None and got >= target.least
        if got is None and no_torch and target.of[0] == "torch":
            holds = None
        row = {"what": target.what, "wanted": f"{target.least} {target.meaning}", "got": got, "holds": holds}
        found.append(row)
    return found


def pays_from(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The least width above which fp8 is always faster than bf16, and the size of a Llama with that width."""
    from benchmarks.gpu.models import HEAD, LLAMA

    widths = {}
    for row in rows:
        if found := re.fullmatch(re.escape(LLAMA).replace(r"\{\}", r"(\d+)"), row["what"]):
            widths.setdefault(int(found.group(1)), {})[row["variant"]] = row
    measured = {w: by for w, by in widths.items() if {"bf16", "fp8"} <= by.keys()}
    ratios = {w: by["bf16"]["us"] / by["fp8"]["us"] for w, by in sorted(measured.items())}
    width = None
    for w in sorted(ratios, reverse=True):
        if ratios[w] <= 1:
            break
        width = w
    if not ratios:
        return None
    layers = None if width is None else width // HEAD  # as in Llamas: 16 at 2048, 32 at 4096
    params = None if width is None else layers * measured[width]["fp8"]["params"]
    return {"width": width, "layers": layers, "params": params, "bf16_us_over_fp8_us": ratios}


# --- out --------------------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    return versions_of((), optional=GPU)


def tables_of(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["what", "by", "us", "of it host", "GB/s", "of a copy", "bus GB/s", "TFLOP/s", "k tokens/s", "peak MiB"]
    cells = [head]
    for row in results["rows"]:
        if "us" in row:
            cells.append(
                [
                    row["what"],
                    row["variant"],
                    f"{row['us']:.1f}",
                    f"{row['host_us']:.1f}",
                    _number(row, "bytes_per_s", 1e9),
                    f"{row['of_copy']:.0%}" if "of_copy" in row else "",
                    _number(row, "bus_bytes_per_s", 1e9),
                    _number(row, "flops_per_s", 1e12),
                    _number(row, "tokens_per_s", 1e3),
                    _number(row, "peak_mib", 1),
                ]
            )
    parts = [markdown(cells)]
    if results["targets"]:
        words = {True: "yes", False: "no", None: "not measured"}
        checks = [["target", "wanted", "got", "holds"]]
        for t in results["targets"]:
            got = "" if t["got"] is None else f"{float(t['got']):.2f}"
            checks.append([t["what"], t["wanted"], got, words[t["holds"]]])
        parts.append(markdown(checks))
    parts += [row["summary"] for row in results["rows"] if row["section"] == "tests"]
    if results["left_out"]:
        why = [f"* {x['section']}, {x['what']}: {x['reason']}" for x in results["left_out"]]
        parts.append("\n".join(["Left out:", "", *why]))
    return "\n\n".join(parts)


def _number(row: dict[str, Any], field: str, unit: float) -> str:
    return f"{row[field] / unit:.1f}" if field in row else ""


def write_table() -> None:
    """Writes README.md's tables, one for each device with stored results."""
    parts = []
    for path in sorted(RESULTS.glob("gpu_*.json")):
        results = json.loads(path.read_text())
        parts.append(with_versions(tables_of(results), results))
    if parts:
        write_between(*markers("gpu"), "\n\n".join(parts), README)
