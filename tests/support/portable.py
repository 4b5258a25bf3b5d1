"""The suite as other machines compile it: `make portable` runs all that `make test` runs, once for each variant.

LLVM forms an FMA from `a * b + c` or not, by the CPU, by its optimizations, and by what else is in a loop; it cuts
loops by the width of vectors, and XLA by the number of threads. No test may depend on any of this, on the order of the
tests, or on the number of pytest's processes.

`--third HASH` runs one variant on a third of the test files, both chosen by the hash, as `.ci/run` does.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Variant(NamedTuple):
    """How the suite is compiled and run."""

    instructions: str  # the newest ones that LLVM may use: SSE4_2 and AVX have no FMA, AVX2 and AVX512 do
    optimized: int | None = None  # whether LLVM optimizes: 0, 1, or as in `make test`
    width: int = 256  # bits of a vector that LLVM prefers
    threads: int | None = None  # of the CPU client
    jobs: int = 2  # pytest's processes
    dist: str = "loadfile"  # keeps the tests of a file in one process; "load" does not
    compilers: str = ""  # a seed: each program is compiled with LLVM's optimizations or without (compilers.py)
    order: int = 0  # the seed of a random order of modules, and of tests within each


VARIANTS = {
    "sse4_2": Variant("SSE4_2", optimized=0, width=128, threads=1, order=1),
    "avx": Variant("AVX", optimized=1, width=256, threads=4, order=2),
    "avx2": Variant("AVX2", optimized=1, width=128, threads=1, order=3),
    "avx512": Variant("AVX512", optimized=1, width=512, threads=4, order=4),
    "avx512-plain": Variant("AVX512", optimized=0, width=512, threads=1, jobs=3, dist="load", order=5),
    "mixed": Variant("AVX512", threads=4, compilers="1", order=6),
}


def environment_of(variant: Variant) -> dict[str, str]:
    """The environment of pytest. `conftest.py` reads it."""
    flags = [f"--xla_cpu_prefer_vector_width={variant.width}"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append(f"--xla_cpu_max_isa={variant.instructions}")
    found = dict(os.environ) | {"XLA_FLAGS": " ".join(flags)}
    if variant.optimized is not None:
        found["JAXMP_TEST_OPTIMIZED"] = str(variant.optimized)
    if variant.threads is not None:
        found["NPROC"] = str(variant.threads)
    if variant.compilers:
        found["JAXMP_TEST_COMPILERS"] = variant.compilers
    if variant.instructions == "SSE4_2":
        found["PYTEST_ADDOPTS"] = "-p without_f16c"
        found["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    return found


def third_of_files(part: int) -> list[str]:
    """A third of the files with tests or doctests, from the root of the project."""
    files = [*ROOT.glob("tests/*/test_*.py"), *ROOT.glob("jaxmp/**/*.py"), *ROOT.glob("pallas_kernels/*.py")]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    return [name for name in names if zlib.crc32(name.encode()) % 3 == part]


def run(name: str, pytest: list[str]) -> dict:
    """Runs the suite in a variant; what ran, and how it went."""
    variant, start = VARIANTS[name], time.monotonic()
    order = ["--random-order-bucket=module", f"--random-order-seed={variant.order}"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(variant.jobs), "--dist", variant.dist, *order, *pytest]
    print(f"=== {name}: {variant}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=environment_of(variant), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    last = lines[-1] if lines else ""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return variant._asdict() | {
        "exit": process.wait(),
        "counts": counts,
        "failed": failed,
        "seconds": round(time.monotonic() - start),
        "load": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def cpu() -> str:
    """The model of this machine's CPU, with what it has of vector instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    model = re.search(r"model name\s*: (.*)", text)
    flags = set(text.split())
    has = [name for name in ("avx", "fma", "avx2", "avx512f") if name in flags]
    return " ".join([model[1] if model else platform.machine(), *has])


def commit() -> str | None:
    """The commit that ran; None outside of git."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--third", metavar="HASH", help="one variant, a third of the files: by this hex number")
    parser.add_argument("--json", type=Path, help="a file of results: a row of a variant is replaced")
    known, pytest = parser.parse_known_args()
    names = known.variants
    if known.third:
        number = int(known.third, 16)
        names = [list(VARIANTS)[number // 3 % len(VARIANTS)]]
        pytest += third_of_files(number % 3)
    exits = []
    for name in names:
        row = run(name, pytest)
        exits.append(row["exit"])
        if known.json:
            found = json.loads(known.json.read_text()) if known.json.exists() else {}
            found[f"{name}, jax {row['jax']}"] = row | {"cpu": cpu(), "commit": commit()}
            known.json.write_text(json.dumps(found, indent=1) + "\n")
    return max(exits, default=0)


if __name__ == "__main__":
    sys.exit(main())
