"""Times of programs on one device, side by side in one process.

A window is many calls in a row, with one wait at the end. The windows of all variants alternate, so a drifting clock
affects all of them; the median over windows is reported. The input of a call is larger than the GPU's L2 cache (50 MB
on an H100), or several buffers alternate (`copies`).

The time that the host needs to queue a call is reported too. If it is close to the total, the program waited for
Python, and the time is the launch time, not the kernel's.

If a variant fails, its error is recorded and the other variants are measured.
"""

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

CACHE = 50 * 2**20  # bytes


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
    wait: Callable[[Any], Any] = jax.block_until_ready
    copies: int = 1
    work: Mapping[str, float] = MappingProxyType({})
    notes: Callable[[], dict[str, Any]] = dict


class LeftOut(Exception):
    """Raised to leave out a measurement for a reason that is not a failure."""


class Bench:
    """State that all sections share: sizes, time limits, and the rows."""

    def __init__(self, *, tiny: bool, kernels: str, limit: float):
        """`tiny`: sizes for a CPU; `kernels`: the kernels' backend, "mosaic" or "interpret"; `limit`: in seconds."""
        self.tiny, self.kernels = tiny, kernels
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.section = ""
        self.ends = self.section_ends = time.monotonic() + limit

    def start(self, section: str, budget: float) -> None:
        """Starts a section that may take `budget` seconds."""
        self.section = section
        self.section_ends = min(self.ends, time.monotonic() + budget)

    def leave_out(self, what: str, reason: str | Exception) -> None:
        """Records and prints what is not measured, with a reason or the error."""
        row = {"section": self.section, "what": what}
        if isinstance(reason, Exception):
            row["traceback"] = "".join(traceback.format_exception(reason))[-4000:]
            reason = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}"
        self.left_out.append(row | {"reason": reason})
        print(f"left out: {self.section}, {what}: {reason}", flush=True)

    def compare(self, what: str, variants: dict[str, Callable[[], Variant]]) -> None:
        """Builds, warms up and times the variants, and adds a row for each."""
        built: dict[str, Variant] = {}
        for name, build in variants.items():
            if time.monotonic() > self.section_ends:
                self.leave_out(f"{what}, {name}", "the section's time was over")
                continue
            try:
                variant = build()
                for _ in range(2):
                    variant.wait(variant.call())
                built[name] = variant
            except LeftOut as e:
                self.leave_out(f"{what}, {name}", str(e))
            except Exception as e:
                self.leave_out(f"{what}, {name}", e)
        settings = {"window": 0.0, "rounds": 1} if self.tiny else {"window": 0.05, "rounds": 7}
        for name, times in side_by_side(built, **settings).items():
            row = {"section": self.section, "what": what, "variant": name, **times, **built[name].notes()}
            row |= {f"{unit}_per_s": amount / times["us"] * 1e6 for unit, amount in built[name].work.items()}
            self.rows.append(row)
            rates = (f"{row[f'{unit}_per_s']:.3g} {unit}/s" for unit in built[name].work)
            print(f"{self.section}: {what}, {name}: {times['us']:.1f} us", *rates, sep="  ", flush=True)

    def us(self, what: str, variant: str) -> float | None:
        """The time of a row, or None."""
        return self.value(what, variant, "us")

    def value(self, what: str, variant: str, field: str) -> float | None:
        """A field of a row, or None."""
        return next((r.get(field) for r in self.rows if (r["what"], r["variant"]) == (what, variant)), None)


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
