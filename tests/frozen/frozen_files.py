"""How runs are kept in `frozen.npz`, and how a run is compared with what is kept of it.

Of each array and each step there is a checksum; of decisions (metrics, counts, scales) each value; of floats, values of
the last step: all elements of small arrays, `SAMPLE` of larger ones.
"""

import dataclasses
import functools
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # and NumPy knows the names of floats of 16 bits and 8
import numpy as np
from frozen_cases import Case
from frozen_runs import LEARNING_RATE, MEASURED, STEPS, Seen

FILE = Path(__file__).parent / "frozen.npz"
SAMPLE = 64


@dataclasses.dataclass
class Kept:
    """What is kept of a run.

    Attributes:
      case: its choices.
      uses: names of canaries.
      names: "kind|path" of each array.
      checksums: uint32[steps, arrays].
      decisions: by name, float64[steps, ...].
      last: by name, (dtype, shape, the bytes of the sample) of each float array after the last step.
    """

    case: Case
    uses: list[str]
    names: list[str]
    checksums: np.ndarray
    decisions: dict[str, np.ndarray]
    last: dict[str, np.ndarray]


def is_decision(name: str) -> bool:
    """Whether an array is what the step decided, and so the same in every program."""
    kind, _, path = name.partition("|")
    return kind in ("metrics", "counts", "fp8 scales") and path.removeprefix("other ") not in MEASURED


def keep(case: Case, uses: list[str], seen: list[Seen]) -> Kept:
    """What is kept of a run."""
    names = sorted(seen[0])
    assert all(sorted(step) == names for step in seen)
    return Kept(
        case,
        uses,
        names,
        np.array([[checksum(name, step[name]) for name in names] for step in seen], np.uint32),
        {name: np.stack([_number(step[name]) for step in seen]) for name in names if is_decision(name)},
        {name: sample(seen[-1][name]) for name in names if not is_decision(name)},
    )


def checksum(name: str, x: np.ndarray) -> int:
    """Of dtype, shape and bytes; all NaNs are one."""
    bits = x.tobytes() if x.dtype.kind in "biu" else np.where(np.isnan(x), np.full_like(x, np.nan), x).tobytes()
    return zlib.crc32(bits, zlib.crc32(f"{name} {x.dtype} {x.shape}".encode()))


def sample(x: np.ndarray) -> np.ndarray:
    """Elements of an array, in its dtype."""
    flat = x.reshape(-1)
    return flat[:: max(1, -(-flat.size // SAMPLE))].copy()


def _number(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


# The file


def write(canary: dict[str, int], runs: list[Kept], path: Path = FILE) -> None:
    """Writes the runs, and the canary of this machine."""
    index, decisions, last = [], [], b""
    for run in runs:
        entry: dict[str, Any] = {"case": list(run.case), "uses": run.uses, "names": run.names}
        entry["decisions"] = [list(x.shape[1:]) for x in run.decisions.values()]
        entry["last"] = [[x.dtype.name, x.size] for x in run.last.values()]
        decisions += [x.reshape(-1) for x in run.decisions.values()]
        last += b"".join(x.tobytes() for x in run.last.values())
        index.append(entry)
    text = json.dumps({"canary": canary, "runs": index}).encode()
    np.savez_compressed(
        path,
        index=np.frombuffer(text, np.uint8),
        checksums=np.concatenate([run.checksums.reshape(-1) for run in runs]),
        decisions=np.concatenate(decisions),
        last=np.frombuffer(last, np.uint8),
    )


class File(NamedTuple):
    """What `frozen.npz` holds."""

    canary: dict[str, int]
    runs: list[Kept]


@functools.cache
def load(path: Path = FILE) -> File:
    """The file."""
    with np.load(path) as arrays:
        index = json.loads(arrays["index"].tobytes())
        checksums, decisions, last = arrays["checksums"], arrays["decisions"], arrays["last"].tobytes()
    runs, at_sum, at_decision, at_last = [], 0, 0, 0
    for entry in index["runs"]:
        names = entry["names"]
        run = Kept(Case(*entry["case"]), entry["uses"], names, np.zeros(()), {}, {})
        count = STEPS * len(names)
        run.checksums = checksums[at_sum : at_sum + count].reshape(STEPS, len(names))
        at_sum += count
        for name, shape in zip(filter(is_decision, names), entry["decisions"], strict=True):
            count = STEPS * int(np.prod(shape))
            run.decisions[name] = decisions[at_decision : at_decision + count].reshape(STEPS, *shape)
            at_decision += count
        floats = [name for name in names if not is_decision(name)]
        for name, (dtype, size) in zip(floats, entry["last"], strict=True):
            run.last[name] = np.frombuffer(last, np.dtype(dtype), size, at_last)
            at_last += run.last[name].nbytes
        runs.append(run)
    return File(index["canary"], runs)


# Comparisons; each returns what differs, in words, at most one line for each kind


def differences(run: Kept, seen: list[Seen], *, bits: bool) -> list[str]:
    """What differs from what was kept: bits, or only decisions, and floats beyond their bounds."""
    return other_bits(run, seen) if bits else other_decisions(run, seen) + far_floats(run, seen)


def other_bits(run: Kept, seen: list[Seen]) -> list[str]:
    """The first step and the paths at which bits differ, by kind."""
    found: dict[str, str] = {}
    for i, step in enumerate(seen):
        for name, expected in zip(run.names, run.checksums[i], strict=True):
            kind, _, path = name.partition("|")
            if name not in step:
                found.setdefault(kind, f"{kind}: {path} is missing after step {i}")
            elif checksum(name, step[name]) != expected:
                more = f", kept {run.decisions[name][i]}, now {step[name]}" if name in run.decisions else ""
                found.setdefault(kind, f"{kind}: other bits after step {i} at {path}{more}")
    return list(found.values())


def other_decisions(run: Kept, seen: list[Seen]) -> list[str]:
    """The first step at which something else was decided, by kind."""
    found: dict[str, str] = {}
    for i, step in enumerate(seen):
        for name, expected in run.decisions.items():
            kind, _, path = name.partition("|")
            if name not in step:
                found.setdefault(kind, f"{kind}: {path} is missing after step {i}")
            elif not np.array_equal(_number(step[name]), expected[i], equal_nan=True):
                found.setdefault(kind, f"{kind}: after step {i} {path} is {step[name]}, kept {expected[i]}")
    return list(found.values())


def far_floats(run: Kept, seen: list[Seen]) -> list[str]:
    """Floats of the last step that are farther from the kept ones than `bound_of` allows, by kind."""
    found: dict[str, str] = {}
    for name, off, allowed in distances(run, seen):
        kind, _, path = name.partition("|")
        if not off <= allowed:
            found.setdefault(kind, f"{kind}: after step {STEPS - 1} {path} is off by {off:.3g}, allowed {allowed:.3g}")
    return list(found.values())


def distances(run: Kept, seen: list[Seen]) -> list[tuple[str, float, float]]:
    """(name, how far it is, how far it may be) of each float array after the last step; inf for another shape."""
    found = []
    for name, expected in run.last.items():
        x = sample(seen[-1][name]) if name in seen[-1] else np.zeros(0, bool)
        if x.dtype != expected.dtype or x.shape != expected.shape:
            found.append((name, np.inf, 0.0))
            continue
        a, b = x.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            off = float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
        found.append((name, np.inf if np.isnan(off) else off, bound_of(run, name)))
    return found


# Bounds for the floats of a program that rounds elsewhere: other orders of sums, an FMA, a pow.
#
# An optimizer makes some twenty operations on an element in a step, each half an ulp of its largest operand. In units
# of the last place of the largest element of the array.
ULPS_PER_STEP = 16
# A gradient of a model depends on params, and a cast of one of them may be rounded the other way: this much of it, in
# the dtype that it is cast to. The model's gradients are sums of few terms of like size.
FLIPPED_CAST = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-4}
# A moment that is stored in few bits may be rounded the other way: this much of the largest element of its block.
FLIPPED_MOMENT = {"bf16_moments": 2.0**-8, "int8": 2.0**-6, "fused_int8": 2.0**-6, "fused_e4m3": 2.0**-4}
CODES = 2  # integers that stand for a moment move by the flip, and by the one that another step left
# What an optimizer makes of a relative change of its gradient, in learning rates: a sign flips whole.
FLIPPED_SIGN = 2.0
SPLIT_UNITS = {"split8": 2.0**-16}  # a master of bfloat16 and 8 bits, of its size


def bound_of(run: Kept, name: str) -> float:
    """How far a float array after the last step may be from the kept one."""
    case, x = run.case, run.last[name]
    if x.dtype.kind in "iu":
        return CODES
    wide = x.astype(np.float64)
    size = float(np.max(np.abs(wide[np.isfinite(wide)]), initial=0.0))
    bound = STEPS * ULPS_PER_STEP * 2.0**-23 * size
    if x.dtype.itemsize < 4:  # a flipped rounding of this array itself
        bound += float(ml_dtypes.finfo(x.dtype).eps) * size
    moved = STEPS * (flipped_cast(case) + FLIPPED_MOMENT.get(case.optimizer, 0.0))
    if name.partition("|")[0] not in ("params", "masters"):
        return bound + moved * size
    if moved and case.optimizer in ("lion", "fused_lion"):
        moved = FLIPPED_SIGN
    return bound + moved * LEARNING_RATE + STEPS * SPLIT_UNITS.get(case.masters, 0.0) * size


def flipped_cast(case: Case) -> float:
    """How far one gradient may be, of its size."""
    dtype = {"fp32": "float32", "fp16": "float16"}.get(case.policy, "bfloat16")
    if case.way == "scaler" and case.scale == "none" and dtype != "float32":
        return FLIPPED_CAST[dtype]  # nothing is unscaled, so the optimizer begins with gradients of 16 bits
    if case.takes_given_gradients:
        return 0.0
    return FLIPPED_CAST["fp8" if case.recipe != "none" else dtype]
