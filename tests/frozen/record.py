"""Records the frozen numbers, or compares this machine with them.

    python tests/frozen/record.py                          writes tests/frozen/frozen.npz; with --again over an old one
    python tests/frozen/record.py --check                  compares all runs, op by op, and counts those that fall back
    python tests/frozen/record.py --check --isa AVX2       the same on a CPU with FMA; --optimized, --compiled alike

When one may record again stands in `test_frozen.py`.
"""

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import os
import sys
import time


def set_environment(isa: str, optimized: bool) -> None:
    """The settings of the suite; before jax is imported."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 --xla_cpu_max_isa={isa}",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false" if optimized else "true",
    }
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


def recorded(index: int) -> object:
    """What is kept of a run."""
    import frozen_canary
    import frozen_cases
    import frozen_files
    import frozen_runs

    case = frozen_cases.draw()[index]
    seen = frozen_runs.execute(case, compiled=False)
    return frozen_files.keep(case, frozen_canary.uses(case, frozen_runs.primitives_of(case)), seen)


def checked(index: int, compiled: bool) -> tuple[list[str], list[str]]:
    """(canaries that this machine sings otherwise, what differs) of a run."""
    import frozen_canary
    import frozen_files
    import frozen_runs

    file = frozen_files.load()
    run = file.runs[index]
    if frozen_canary.is_silent(run.uses):
        return ["XLA cannot compile it"], []
    off_key = frozen_canary.off_key(run.uses, file.canary)
    seen = frozen_runs.execute(run.case, compiled=compiled)
    bits = frozen_files.differences(run, seen, bits=True)
    wrong = bits if not compiled and not off_key else []
    return off_key + ["bits differ"] * bool(bits), wrong + frozen_files.differences(run, seen, bits=False)


def main() -> int:
    """Records or checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--again", action="store_true", help="overwrite the file")
    parser.add_argument("--check", action="store_true", help="compare with the file")
    parser.add_argument("--compiled", action="store_true", help="with --check: compiled steps, not op by op")
    parser.add_argument("--isa", default="AVX", help="with --check: the CPU's instructions that XLA may use")
    parser.add_argument("--optimized", action="store_true", help="with --check: with LLVM's optimizations")
    parser.add_argument("--every", type=int, default=1, help="with --check: one of so many runs")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    set_environment(arguments.isa, arguments.optimized)
    import frozen_canary
    import frozen_cases
    import frozen_files

    out = frozen_files.FILE
    if not arguments.check and out.exists() and not arguments.again:
        print(f"{out} is there already; --again overwrites it. Read test_frozen.py first: when one may.")
        return 1
    if not arguments.check and (arguments.isa != "AVX" or arguments.optimized):
        print("runs are recorded under the settings of the suite: without --isa and --optimized")
        return 1
    indices = range(0, len(frozen_files.load().runs) if arguments.check else frozen_cases.RUNS, arguments.every)
    one = functools.partial(checked, compiled=arguments.compiled) if arguments.check else recorded
    started, results = time.perf_counter(), {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for i, result in zip(indices, pool.map(one, indices), strict=True):
            results[i] = result
            taken = time.perf_counter() - started
            print(f"\r{len(results)} of {len(indices)} runs, {taken:.0f} s ", end="", flush=True)
    print()
    if not arguments.check:
        canary = {name: frozen_canary.heard(name) for name in frozen_canary.CANARIES}
        frozen_files.write(canary, list(results.values()), out)
        print(f"{out}: {out.stat().st_size:,} bytes")
        return 0
    off_key = collections.Counter(name for names, _ in results.values() for name in names)
    print(f"canaries that sound otherwise here, with their runs: {dict(off_key)}")
    print(f"{sum(bool(names) for names, _ in results.values())} of {len(results)} runs fall back to ulps")
    for i, (_, lines) in results.items():
        print(
            *(f"{frozen_cases.name_of(i, frozen_files.load().runs[i].case)}: {line}\n" for line in lines),
            end="",
            sep="",
        )
    wrong = sum(bool(lines) for _, lines in results.values())
    print(f"{wrong} of {len(results)} runs differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
