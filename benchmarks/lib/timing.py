"""Times of programs on one device, each timed as soon as it is built.

A window is many calls in a row, with one wait at the end; the first window warms the device up, and the median over the
others is reported, with the fastest and the slowest. The input of a call is larger than the GPU's L2 cache (50 MB on an
H100), or several buffers alternate (`copies`).

The time that the host needs to queue a call is reported too. If it is close to the total, the program waited for
Python, and the time is the launch time, not the kernel's.

A program is timed and its row is written before the next one is built: a build that fails, hangs or is killed costs its
own row, and no program holds memory while another one is measured. This module needs Python alone until something is
measured.
"""

import functools
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.lib.record import FAILED, LEFT_OUT, NO_TIME, Record

CACHE = 50 * 2**20  # bytes


def block(result: Any) -> Any:
    """Waits for a result of jax."""
    import jax

    return jax.block_until_ready(result)


class Variant(NamedTuple):
    """One of the programs that are compared.

    Attributes:
      call: queues the program once and returns its result.
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

    def failed(self, what: str, error: Exception) -> None:
        """Notes an error.

        Raises:
          DeviceLost: the device no longer works.
        """
        self.record.end(what, FAILED, "".join(traceback.format_exception(error)))
        print(f"failed: {what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
        self.look_at_device(error)

    def look_at_device(self, error: Exception) -> None:
        """Looks after an error whether the device still works; a test that only found wrong numbers did it no harm.

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
            self.failed(what, e)
        else:
            self.record.end(what, row={"what": what, **fields} if fields else None)
            print(f"{what}: {fields or 'holds'}", flush=True)
        gc.collect()  # what it held on the device

    def compare(self, what: str, variants: Mapping[str, Callable[[], Variant]]) -> None:
        """Builds, warms up and times each variant as an item of its own, with a row."""
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
    """The median, fastest and slowest time over windows of so many seconds, and the host's time, in us."""
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


def repeated(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`count` calls of `f(*args)` in one program, which returns the last result.

    A call of hundreds of arrays costs the host 1 to 4 ms, more than a pass over a small model costs the device.
    """
    import jax

    def call(*args: Any) -> Any:
        def again(i: Any, before: Any) -> Any:
            del before
            held, _ = jax.lax.optimization_barrier(
                (args, i)
            )  # XLA would move what is the same in each turn to before it
            return f(*held)

        return jax.lax.fori_loop(1, count, again, f(*args))

    return call


def advanced(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`count` steps of `state = step(state, *others)` in one program."""
    import jax

    return lambda state, *others: jax.lax.fori_loop(0, count, lambda _, state: step(state, *others), state)


def carried(step: Callable[..., Any], state: Any, *others: Any) -> Callable[[], Any]:
    """A call that keeps its result as the next `state`: for programs that donate their state."""
    held = [state]

    def call() -> Any:
        held[0] = step(held[0], *others)
        return held[0]

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
