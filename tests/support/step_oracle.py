"""One optimizer step in NumPy, from the equations: what must come out, and how far rounding may move it.

    g  = f64(mean over devices) / S              exact: S is a power of two, and the means here are exact
    usable = every |g| < 2^48                    else nothing moves but S
    m' = m + update(g, moments, m)               per element; from usable g no number leaves float32
    p' = round(m')                               to nearest, ties to even; float16 saturates at 65504
    S' = S / 2 after `hysteresis` overflows, 2 S after `growth_interval` good steps, within its bounds

It starts from the state that the program under test had before the step, so errors do not add up over steps. Sums are
taken in float64 and compared within `ULPS` units of the last place of their largest term; copies, selections, counts,
scales and the rounding of params are compared bit for bit. Nothing here was written from jaxmp's code.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
EDGE = 1e-5  # float32 and float64 may disagree about an overflow this near to the largest number
TOO_LARGE = 2.0**48
ULPS = 8 * 2.0**-24  # relative to the largest term of a sum
TINY = 2.0**-125  # XLA's CPU backend takes subnormal numbers as zero


class Hyper(NamedTuple):
    """The optimizer's numbers. `b1` is the decay of SGD's momentum, too."""

    rule: str  # "adam", "sgd" or "lion"
    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


class ScaleRule(NamedTuple):
    """A dynamic loss scale; all numbers are powers of two."""

    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float


class Element(NamedTuple):
    """What an update makes of one leaf, in float64, with bounds of the rounding errors.

    `moments[name]` is (value, largest term); `spread` bounds the error of `update`; where `leaves` is True a number of
    the element may leave the range of float32, or has left it before.
    """

    moments: dict[str, tuple[np.ndarray, np.ndarray]]
    update: np.ndarray
    spread: np.ndarray
    leaves: np.ndarray


def usable(grads: Iterable[np.ndarray]) -> bool:
    """Whether a step may be taken on these unscaled gradients."""
    return all(bool((np.abs(g) < TOO_LARGE).all()) for g in grads)


def next_scale(rule: ScaleRule, scale: float, count: int, left: int, finite: bool) -> tuple[float, int, int]:
    """(scale, good steps, overflows left) after a step."""
    if not finite:
        left = max(left - 1, 0)
        return (max(scale / 2, rule.min_scale), 0, left) if left == 0 else (scale, 0, left)
    if count + 1 == rule.growth_interval:
        return min(scale * 2, rule.max_scale), 0, rule.hysteresis
    return scale, count + 1, left


def _f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sum(*terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sum, largest term)."""
    return sum(terms), np.maximum.reduce([np.abs(t) for t in terms])


def update_of(h: Hyper, g: np.ndarray, moments: dict[str, Any], new: dict[str, Any], w: Any, count: int) -> Element:
    """The update of one leaf from its unscaled gradient, the moments and the master before the step.

    It is computed from `new`, the moments after the step as the program under test stored them, so that their own
    rounding errors are not counted twice. `count`: steps taken, with this one.
    """
    w, old = _f64(w), {name: _f64(x) for name, x in moments.items()}
    decay = h.weight_decay * w
    largest = [np.abs(g), np.abs(decay)]  # every number that float32 must hold
    if h.rule == "adam":
        values = {
            "mu": _sum(h.b1 * old["mu"], (1 - h.b1) * g),
            "nu": _sum(h.b2 * old["nu"], (1 - h.b2) * g * g),
        }
        stored = {name: _f64(new[name]) for name in values}
        root = np.sqrt(stored["nu"] / (1 - h.b2**count)) + h.eps
        direction = stored["mu"] / (1 - h.b1**count) / root
        # b has 24 bits, so b^t has an error of t units, and 1 - b^t few digits at first. A small nu becomes zero.
        digits = sum((1 + count * b**count) / (1 - b**count) for b in (h.b1, h.b2))
        flushed = np.abs(direction) * (stored["nu"] <= 1e3 * TINY) * np.sqrt(1e3 * TINY / (1 - h.b2**count)) / h.eps
        spread = np.abs(direction) * 2.0**-24 * digits + flushed
        largest += [g * g, values["nu"][0] / (1 - h.b2**count), values["mu"][1] / (1 - h.b1**count)]
    elif h.rule == "sgd":
        values = {"trace": _sum(h.b1 * old["trace"], g)}
        direction, spread = _f64(new["trace"]), np.zeros_like(g)
        largest += [values["trace"][1]]
    else:
        values = {"mu": _sum(h.b2 * old["mu"], (1 - h.b2) * g)}
        inside, term = _sum(h.b1 * old["mu"], (1 - h.b1) * g)
        direction = np.sign(inside)
        spread = np.where(np.abs(inside) <= ULPS * term + TINY, 1.0, 0.0)  # the sign is open
    update = -h.learning_rate * (direction + decay)
    spread = h.learning_rate * (spread + ULPS * (np.abs(direction) + np.abs(decay)))
    largest += [np.abs(update), np.abs(w + update), *(np.abs(x) for of_value in values.values() for x in of_value)]
    leaves = np.zeros(g.shape, bool)
    for x in largest:
        leaves |= ~(x < LARGEST * (1 - EDGE))
    return Element(values, update, spread, leaves)


def check_leaf(h: Hyper, g: Any, before: dict[str, Any], after: dict[str, Any], count: int, unit: float) -> np.ndarray:
    """Raises AssertionError where a leaf's master or moments are wrong; returns which elements may leave float32.

    Of these it is only checked that inf and NaN enter a moment. `before` and `after` have "master" and the moments by
    name, in float32; `unit` is the relative spacing of masters beyond float32's: 0, or 2^-15 for masters of 24 bits.
    """
    moments = [name for name in before if name != "master"]
    with np.errstate(all="ignore"):
        want = update_of(h, g, {k: before[k] for k in moments}, {k: after[k] for k in moments}, before["master"], count)
        right = np.ones(g.shape, bool)
        for name, (value, term) in want.moments.items():
            right &= np.abs(_f64(after[name]) - value) <= ULPS * term + TINY
        master, term = _sum(_f64(before["master"]), want.update)
        bound = (ULPS + unit) * np.maximum(term, np.abs(master)) + want.spread + TINY
        right &= np.abs(_f64(after["master"]) - master) <= bound
    entered = ~np.logical_and.reduce([np.isfinite(after[k]) for k in moments])
    bad = np.where(want.leaves, ~np.isfinite(g) & ~entered, ~right)
    if bad.any():
        i = tuple(np.argwhere(bad)[0])
        lines = [f"element {i}: g = {g[i]!r}, step {count}"]
        for name in before:
            value = master[i] if name == "master" else want.moments[name][0][i]
            lines.append(f"  {name}: {before[name][i]!r} -> {after[name][i]!r}, expected {value!r}")
        raise AssertionError("\n".join(lines))
    return want.leaves


def rounded(master: Any, dtype: Any) -> np.ndarray:
    """The param of a master."""
    master = np.asarray(master, np.float32)
    if dtype == np.float16:
        master = np.clip(master, -65504.0, 65504.0)
    return master.astype(dtype)


def check_param(param: Any, master: Any, *, ties_away: bool) -> None:
    """The param is its master, rounded; `ties_away`: split masters round a tie away from zero."""
    param, want = np.asarray(param), rounded(master, np.asarray(param).dtype)
    right = _bits(param) == _bits(want)
    if ties_away:
        tie = (np.asarray(master, np.float32).view(np.uint32) & 0xFFFF) == 0x8000
        up = ((np.asarray(master, np.float32).view(np.uint32) >> 16) + 1).astype(np.uint16)
        right |= tie & (_bits(param) == up)
    assert right.all(), f"params {param[~right]} of the masters {np.asarray(master)[~right]}, expected {want[~right]}"


def _bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])
