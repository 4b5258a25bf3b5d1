"""Sections for tests of the GPU run's driver: they use no jax, and crash, hang and miss packages as told."""

import os
import signal
import time
from pathlib import Path

FOLDER = Path(os.environ.get("GPU_SECTIONS_FOLDER", "/nonexistent"))


def device(**about):
    return lambda bench: bench.check("device", lambda: {"versions": {}, "missing": []} | about)


machine = device(device="a fake GPU", platform="gpu", versions={"python": "3"})
only_a_cpu = device(device="cpu", platform="cpu")


def no_jax(bench):
    raise ModuleNotFoundError("No module named 'jax'", name="jax")


def lost_gpu(bench):
    bench.check("device", lambda: 1 / 0)


def sound(bench):
    """Two items, and a line in a file for every run of it."""
    with (FOLDER / "sound").open("a") as file:
        file.write("run\n")
    bench.check("first", lambda: {"us": 2.0, "variant": "mosaic"})
    bench.check("second", lambda: None)


def measured(bench, what, count):
    """Items; each takes a moment, and leaves a line with its process when it is measured."""

    def measure(i):
        time.sleep(0.1)
        with (FOLDER / "measured").open("a") as file:
            file.write(f"{os.getpid()} {what}-{i}\n")
        return {"us": 2.0, "variant": "mosaic"}

    for i in range(count):
        bench.check(f"{what}-{i}", lambda i=i: measure(i))


def many(bench):
    measured(bench, "many", 20)


def alone(bench):
    measured(bench, "alone", 4)


def around(what):
    """A section of `what`, an item before and one after."""

    def section(bench):
        bench.check("before", lambda: None)
        bench.check("in it", what)
        bench.check("after", lambda: None)

    return section


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


crashes = around(crash)
crashes_once = around(lambda: None if (FOLDER / "mended").exists() else crash())
hangs = around(lambda: time.sleep(1000))
fails = around(lambda: 1 / 0)


def builds_for_too_long(bench):
    """Three variants; the second is built for ever, until the file "mended" is there."""
    from benchmarks.lib.timing import Variant

    def build(name):
        with (FOLDER / "built").open("a") as file:
            file.write(f"{name}\n")
        if name == "slow" and not (FOLDER / "mended").exists():
            time.sleep(1000)
        return Variant(lambda: 1.0, wait=lambda result: None)

    bench.compare("it", {name: lambda name=name: build(name) for name in ("fast", "slow", "last")})


@around
def waits_to_be_killed():
    (FOLDER / "pid.new").write_text(str(os.getpid()))
    (FOLDER / "pid.new").rename(FOLDER / "pid")  # whole when it is there: its reader kills at once
    time.sleep(1000)


def loses_its_device(bench):
    from benchmarks.lib.timing import DeviceLost

    def lose():
        bench.record.end("in it", "failed", "CUDA_ERROR_ILLEGAL_ADDRESS")
        raise DeviceLost

    bench.check("before", lambda: None)
    if "in it" not in bench.record.items:
        lose()
    bench.check("after", lambda: None)


def needs_a_package(bench):
    import a_package_that_wheels_bring

    bench.check("has it", lambda: {"value": a_package_that_wheels_bring.VALUE})


def starts_for_too_long(bench):
    time.sleep(1000)
    bench.check("never", lambda: None)


def runs_nothing(bench):
    del bench
