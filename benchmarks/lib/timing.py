"""Times of programs on one device, side by side in one process.

A window is many calls in a row, with one wait at the end. The windows of all variants alternate, so a drifting clock
affects all of them; the median over windows is reported. The input of a call is larger than the GPU's L2 cache (50 MB
on an H100), or several buffers alternate (`copies`).

The time that the host needs to queue a call is reported too. If it is close to the total, the program waited for
Python, and the time is the launch time, not the kernel's.

If a variant fails, its error is recorded and the other variants are measured. This module needs Python alone until
something is measured.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.lib.record import BAD, FAILED, LEFT_OUT, NO_TIME, PASSED, Record

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


class DeviceLost(Exception):
    """The device does not answer after a failure: what is left needs a new process."""


class Bench:
    """What a section gets: sizes, its time, and the record that it writes rows and items into.

    Attributes:
      tiny: sizes for a CPU.
      kernels: the kernels' backend, "mosaic" or "interpret".
      record: the section's rows and items; an item that is in it already is not run again.
      ends: when the section's time is over, by `time.monotonic`.
      packages: a folder with packages that this interpreter lacks, or None.
    """

    def __init__(self, *, tiny: bool, record: Record, seconds: float, packages: Path | None = None):
        self.tiny, self.record, self.packages = tiny, record, packages
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
        """Runs a test as an item of its own: it raises, or returns the fields of a row."""
        if what in self.record.items or self.out_of_time(what):
            return
        self.record.begin(what)
        try:
            fields = test()
        except LeftOut as e:
            self.left_out(what, str(e))
        except Exception as e:
            self.failed(what, e)
        else:
            self.record.rows.extend([{"what": what, **fields}] if fields else [])
            self.record.end(what)
            print(f"{what}: {fields or 'holds'}", flush=True)

    def compare(self, what: str, variants: dict[str, Callable[[], Variant]]) -> None:
        """Builds, warms up and times the variants, each an item, and adds a row for each.

        Timing them together is one more item. A variant in which an earlier process died is left out.
        """
        if what in self.record.items:
            return
        built: dict[str, Variant] = {}
        for name, build in variants.items():
            item = f"{what}, {name}"
            seen = self.record.items.get(item)
            if (seen and seen["state"] in (*BAD, LEFT_OUT)) or self.out_of_time(item):
                continue
            self.record.begin(item)
            try:
                variant = build()
                for _ in range(2):
                    variant.wait(variant.call())
                built[name] = variant
                self.record.end(item)
            except LeftOut as e:
                self.left_out(item, str(e))
            except Exception as e:
                self.failed(item, e)
        if not built:
            return
        self.record.begin(what)
        settings = {"window": 0.0, "rounds": 1} if self.tiny else {"window": 0.05, "rounds": 7}
        try:
            for name, times in side_by_side(built, **settings).items():
                row = {"what": what, "variant": name, **times, **built[name].notes()}
                row |= {f"{unit}_per_s": amount / times["us"] * 1e6 for unit, amount in built[name].work.items()}
                self.record.rows.append(row)
                rates = (f"{row[f'{unit}_per_s']:.3g} {unit}/s" for unit in built[name].work)
                print(f"{what}, {name}: {times['us']:.1f} us", *rates, sep="  ", flush=True)
        except Exception as e:
            self.failed(what, e)
        else:
            self.record.end(what, PASSED)


def side_by_side(variants: dict[str, Variant], *, window: float, rounds: int) -> dict[str, dict[str, float]]:
    """For each variant the median, fastest and slowest time over windows, and the host's time, in us."""
    counts = {}
    for name, variant in variants.items():
        seconds, _ = _window(variant, 1)
        counts[name] = max(1, min(1000, round(window / seconds)))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            found[name].append(_window(variant, counts[name]))
    out = {}
    for name, windows in found.items():
        each = 1e6 / variants[name].copies
        times, host = [t * each for t, _ in windows], [h * each for _, h in windows]
        out[name] = {"us": statistics.median(times), "low_us": min(times), "high_us": max(times)}
        out[name]["host_us"] = statistics.median(host)
    return out


def _window(variant: Variant, count: int) -> tuple[float, float]:
    """Seconds per call over `count` calls: until the device has finished, and until the host has queued them."""
    result = None
    started = time.perf_counter()
    for _ in range(count):
        result = variant.call()
    queued = time.perf_counter()
    variant.wait(result)
    return (time.perf_counter() - started) / count, (queued - started) / count


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
