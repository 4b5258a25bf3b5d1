"""A section of the GPU run: one small launch of each kernel under compute-sanitizer, where it is installed."""

import functools
import shutil
import subprocess
import sys
import time

from benchmarks.lib.tables import ROOT
from benchmarks.lib.timing import Bench, OutOfTime

TOOLS = ("memcheck", "racecheck")  # accesses outside of arrays; shared memory that is read while it is written
MARGIN = 3.0  # seconds in which a tool that is too slow is ended, before the item's own time is over


def sanitizer(bench: Bench) -> None:
    """Each tool is an item."""
    for tool in TOOLS:
        if shutil.which("compute-sanitizer") is None:
            bench.left_out(tool, "compute-sanitizer is not installed")
        elif bench.tiny:
            bench.left_out(tool, "interpreted kernels launch nothing")
        else:
            bench.check(tool, functools.partial(_run, bench, tool))


def _run(bench: Bench, tool: str) -> None:
    start = "import sys; sys.path.extend(sys.argv[1:2]); from benchmarks.gpu.launches import main; main([])"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [sys.executable, "-c", start, str(bench.packages or ROOT)]
    seconds = max(5.0, min(bench.ends - time.monotonic(), bench.record.limit or float("inf")) - MARGIN)
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as e:
        raise OutOfTime(f"not ready after {seconds:.0f} s") from e
    output = run.stdout + run.stderr
    assert run.returncode == 0, f"exit status {run.returncode}\n{output[-3500:]}"
    assert "ERROR SUMMARY: 0 errors" in output, output[-3500:]
