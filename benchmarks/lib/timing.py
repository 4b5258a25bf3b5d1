"""Times of programs on one device, each timed as soon as it is built; Python alone until something is measured."""

import functools
import gc
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.lib.record import FAILED, LEFT_OUT, NO_TIME, Record

CACHE = 50 * 2**20  # bytes: the L2 cache of an H100
STAGES = ("trace", "lower", "compile")


def block(result: Any) -> Any:
    """Waits for a result of jax."""
    import jax

    return jax.block_until_ready(result)


class Variant(NamedTuple):
    """One of the programs that are compared.

    Attributes:
      call: queues the program once and returns its result. Its input is larger than the cache, or buffers alternate.
      wait: waits for a result, and so for all earlier calls.
      copies: how many times one call does the work.
      work: the amount of work: the least `bytes` to move, `flops`, `tokens`.
      notes: returns more fields for the row.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = block
    copies: int = 1
    work: Mapping[str, float] = MappingProxyType({})
    notes: Callable[[], dict[str, Any]] = dict


class LeftOut(Exception):
    """Raised to leave out a measurement for a reason that is not a failure."""


class OutOfTime(Exception):
    """Raised to leave a measurement that is too slow to a second run, which is not a failure."""


class DeviceLost(Exception):
    """The device does not answer after a failure: what is left needs a new process."""


class NextProcess(Exception):
    """The next item has to run in a process of its own."""


class Bench:
    """What a section gets: sizes, its time, and the record that it writes rows and items into.

    Attributes:
      tiny: sizes for a CPU.
      kernels: the kernels' backend, "mosaic" or "interpret".
      record: the section's rows and items; an item that is in it already is not run again.
      ends: when the section's time is over, by `time.monotonic`.
      packages: a folder with packages that this interpreter lacks, or None.
      alone: each item gets a process of its own.
    """

    def __init__(
        self, *, tiny: bool, record: Record, seconds: float, packages: Path | None = None, alone: bool = False
    ):
        self.tiny, self.record, self.packages, self.alone = tiny, record, packages, alone
        self._has_run = False
        self.kernels = "interpret" if tiny else "mosaic"
        self.ends = time.monotonic() + seconds

    def out_of_time(self, what: str) -> bool:
        """Whether the section's time is over; then `what` is noted as not run."""
        if time.monotonic() < self.ends:
            return False
        self.record.end(what, NO_TIME, "the section's time was over")
        return True

    def left_out(self, what: str, reason: str) -> None:
        """Notes what cannot be measured here, for a reason that is not a failure."""
        self.record.end(what, LEFT_OUT, reason)
        print(f"left out: {what}: {reason}", flush=True)

    def where_kernels_run(self, job: Callable[[], Any]) -> Callable[[], Any]:
        """`job`, left out where this jax cannot interpret the kernels."""

        def run() -> Any:
            from pallas_kernels import backend

            if self.tiny and (reason := backend.why_no_kernels()):
                raise LeftOut(reason)
            return job()

        return run

    def look_at_device(self, error: Exception) -> None:
        """Looks after an error whether the device still works; a test that only saw wrong numbers did it no harm.

        Raises:
          DeviceLost: it does not work.
        """
        if isinstance(error, AssertionError) or "jax" not in sys.modules:
            return
        import jax.numpy as jnp

        try:
            block(jnp.zeros(8) + 1)
        except Exception as e:
            raise DeviceLost from e

    def check(self, what: str, test: Callable[[], dict[str, Any] | None]) -> None:
        """Runs a test as an item of its own: it raises, or returns the fields of a row.

        Raises:
          NextProcess: an item ran in this process, and each has to be alone.
          DeviceLost: the device no longer works after an error.
        """
        if what in self.record.items or self.out_of_time(what):
            return
        if self.alone and self._has_run:
            raise NextProcess
        self._has_run = True
        self.record.begin(what)
        try:
            fields = test()
        except LeftOut as e:
            self.left_out(what, str(e))
        except OutOfTime as e:
            self.record.end(what, NO_TIME, str(e))
            print(f"no time: {what}: {e}", flush=True)
        except Exception as e:
            self.record.end(what, FAILED, "".join(traceback.format_exception(e)))
            print(f"failed: {what}: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}", flush=True)
            self.look_at_device(e)
        else:
            self.record.end(what, row={"what": what, **fields} if fields else None)
            print(f"{what}: {fields or 'holds'}", flush=True)
        gc.collect()  # what the test left on the device

    def compare(self, what: str, variants: Mapping[str, Callable[[], Variant]]) -> None:
        """Builds, warms up and times each variant as an item of its own, whose row is written before the next is built.

        A build that fails, hangs or is killed costs its own row, and no program is in memory while another is measured.
        """
        for name, build in variants.items():
            self.check(f"{what}, {name}", functools.partial(self._timed, what, name, build))

    def _timed(self, what: str, name: str, build: Callable[[], Variant]) -> dict[str, Any]:
        variant = build()
        for _ in range(2):
            variant.wait(variant.call())
        times = timed(variant, **({"window": 0.0, "rounds": 1} if self.tiny else {"window": 0.05, "rounds": 7}))
        rates = {f"{unit}_per_s": amount / times["us"] * 1e6 for unit, amount in variant.work.items()}
        return {"what": what, "variant": name, **times, **variant.notes(), **rates}


def timed(variant: Variant, *, window: float, rounds: int) -> dict[str, float]:
    """The median, fastest and slowest time over windows of so many seconds, and the host's time, in us.

    A window is many calls with one wait at the end; the first warms up. Where the host's time to queue a call is near
    the whole time, the program waited for Python, and the time is not the kernel's.
    """
    seconds, _ = _window(variant, 1)
    count = max(1, min(1000, round(window / seconds)))
    if window:
        _window(variant, count)
    windows = [_window(variant, count) for _ in range(rounds)]
    each = 1e6 / variant.copies
    times = [whole * each for whole, _ in windows]
    host = statistics.median(queued for _, queued in windows) * each
    return {"us": statistics.median(times), "low_us": min(times), "high_us": max(times), "host_us": host}


def _window(variant: Variant, count: int) -> tuple[float, float]:
    """Seconds per call over `count` calls: until the device has finished, and until the host has queued them."""
    result = None
    started = time.perf_counter()
    for _ in range(count):
        result = variant.call()
    queued = time.perf_counter()
    variant.wait(result)
    return (time.perf_counter() - started) / count, (queued - started) / count


def advanced(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`count` steps of `state = step(state, *others)` in one program."""
    import jax

    return lambda state, *others: jax.lax.fori_loop(0, count, lambda _, state: step(state, *others), state)


def carried(step: Callable[..., Any], state: Any, *others: Any) -> Callable[[], Any]:
    """A call that keeps its result as the next `state`: for programs that donate their state."""
    carry = [state]

    def call() -> Any:
        carry[0] = step(carry[0], *others)
        return carry[0]

    return call


def copies_for(nbytes: int, *, tiny: bool) -> int:
    """The number of buffers of this size that together do not fit into the cache."""
    return 2 if tiny else max(2, -(-4 * CACHE // nbytes))


def planned(compiled: Any) -> dict[str, float]:
    """What XLA's plan of a compiled program takes: "peak_mib" of device memory, "host_mib" of arguments on the host.

    {} if the program has no plan, as one from a cache of another compiler may.
    """
    memory = compiled.memory_analysis()
    if memory is None or not memory.argument_size_in_bytes + memory.host_argument_size_in_bytes:
        return {}
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    host = memory.host_argument_size_in_bytes
    return {"peak_mib": (peak + memory.temp_size_in_bytes) / 2**20, "host_mib": host / 2**20}


def compiled_in_stages(jitted: Any, *arguments: Any) -> tuple[Any, list[float]]:
    """A compiled program, and the seconds of each of `STAGES`."""
    times = [time.perf_counter()]
    traced = jitted.trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    return compiled, [after - before for before, after in itertools.pairwise(times)]
