"""Times of programs on one device, side by side in one process.

Calls are queued many at a time between two waits, and the windows of all variants take turns, so that a clock that
drifts does so for all; reported is the median over windows. What a call reads is larger than the GPU's second-level
cache (50 MB on an H100), or several buffers take turns (`copies`). Beside the time stands what the host took to queue a
call: where it comes close, the program waited for Python, and the time is that of launching, not of the kernel.

A variant that cannot be built or fails is recorded with its error, and the others go on.
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
    """One way to do something.

    Attributes:
      call: queues it once and returns what to wait for.
      wait: waits for that, and so for all that was queued before.
      copies: how often it is done in one call.
      work: what one doing amounts to: `bytes` moved at least, `flops`, `tokens`.
      notes: what else belongs into the row.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    copies: int = 1
    work: Mapping[str, float] = MappingProxyType({})
    notes: Callable[[], dict[str, Any]] = dict


class LeftOut(Exception):
    """Something is not measured here, for a reason that is no failure."""


class Bench:
    """What all sections share: sizes, clocks, and the rows that they write."""

    def __init__(self, *, tiny: bool, kernels: str, limit: float):
        """`tiny`: sizes for a CPU; `kernels`: the backend that kernels run on, "mosaic" or "interpret"; `limit`: s."""
        self.tiny, self.kernels = tiny, kernels
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.section = ""
        self.ends = self.section_ends = time.monotonic() + limit

    def start(self, section: str, budget: float) -> None:
        """Begins a section that may take `budget` seconds."""
        self.section = section
        self.section_ends = min(self.ends, time.monotonic() + budget)

    def leave_out(self, what: str, reason: str | Exception) -> None:
        """Writes down, and says, what is not measured: for a reason, or because it failed."""
        row = {"section": self.section, "what": what}
        if isinstance(reason, Exception):
            row["traceback"] = "".join(traceback.format_exception(reason))[-4000:]
            reason = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}"
        self.left_out.append(row | {"reason": reason})
        print(f"left out: {self.section}, {what}: {reason}", flush=True)

    def compare(self, what: str, variants: dict[str, Callable[[], Variant]]) -> None:
        """Builds, warms up and times the variants of one thing, and adds a row for each."""
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
        """The time of a row, if it is there."""
        return self.value(what, variant, "us")

    def value(self, what: str, variant: str, field: str) -> float | None:
        """A field of a row, if it is there."""
        return next((r.get(field) for r in self.rows if (r["what"], r["variant"]) == (what, variant)), None)


def side_by_side(variants: dict[str, Variant], *, window: float, rounds: int) -> dict[str, dict[str, float]]:
    """Of each variant the median time in us, the fastest and slowest window, and the host's part of it."""
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
    """Seconds for one of `count` calls, and those after which the host had queued them."""
    result = None
    started = time.perf_counter()
    for _ in range(count):
        result = variant.call()
    queued = time.perf_counter()
    variant.wait(result)
    return (time.perf_counter() - started) / count, (queued - started) / count


def carried(step: Callable[..., Any], state: Any, *others: Any) -> Callable[[], Any]:
    """A call that moves `state` on: for programs that are given their buffers to write in."""
    held = [state]

    def call() -> Any:
        held[0] = step(held[0], *others)
        return held[0]

    return call


def copies_for(nbytes: int, *, tiny: bool) -> int:
    """How many buffers of this size it takes to be out of the cache when the first comes round again."""
    return 2 if tiny else max(2, -(-4 * CACHE // nbytes))
