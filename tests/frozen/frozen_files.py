"""How runs are kept in `frozen.npz`, and how a run is compared with what is kept of it.

Of each array and each step there is a checksum; of decisions (metrics, counts, scales) each value; of floats, values of
the last step: all elements of small arrays, `SAMPLE` of larger ones.
"""

import functools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # and NumPy knows the names of floats of 16 bits and 8
import numpy as np
from frozen_cases import Case
from frozen_runs import LEARNING_RATE, MEASURED, STEPS, Seen

FILE = Path(__file__).parent / "frozen.npz"
SAMPLE = 64


class Kept(NamedTuple):
    """What is kept of a run: its case, the names of its canaries and of its arrays ("kind|path"), and by name

    - checksums: uint32[steps, arrays];
    - decisions: float64[steps, ...];
    - last: a sample of each float array after the last step, in its dtype.
    """

    case: Case
    uses: list[str]
    names: list[str]
    checksums: np.ndarray
    decisions: dict[str, np.ndarray]
    last: dict[str, np.ndarray]


class File(NamedTuple):
    """What `frozen.npz` holds: the canary of the machine that recorded, and the runs."""

    canary: dict[str, int]
    runs: list[Kept]


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


@functools.cache
def load(path: Path = FILE) -> File:
    """The file."""
    with np.load(path) as arrays:
        index = json.loads(arrays["index"].tobytes())
        parts = {name: arrays[name] for name in ("checksums", "decisions", "last")}
    ends = dict.fromkeys(parts, 0)

    def take(name: str, *shape: int) -> np.ndarray:
        """The next elements of an array, in the order in which `write` put them."""
        start = ends[name]
        ends[name] += int(np.prod(shape))
        return parts[name][start : ends[name]].reshape(shape)

    runs = []
    for entry in index["runs"]:
        names = entry["names"]
        decided = [name for name in names if is_decision(name)]
        floats = [name for name in names if not is_decision(name)]
        checksums = take("checksums", STEPS, len(names))
        shapes = zip(decided, entry["decisions"], strict=True)
        decisions = {name: take("decisions", STEPS, *shape) for name, shape in shapes}
        kinds = [(name, np.dtype(dtype), size) for name, (dtype, size) in zip(floats, entry["last"], strict=True)]
        last = {name: take("last", size * dtype.itemsize).view(dtype) for name, dtype, size in kinds}
        runs.append(Kept(Case(*entry["case"]), entry["uses"], names, checksums, decisions, last))
    return File(index["canary"], runs)


def differences(run: Kept, seen: list[Seen], *, bits: bool) -> list[str]:
    """What differs from what was kept, one line for each kind: bits, or decisions and floats beyond their bounds."""
    lines: dict[str, str] = {}
    for kind, text in _other_bits(run, seen) if bits else [*_other_decisions(run, seen), *_far_floats(run, seen)]:
        lines.setdefault(kind, f"{kind.partition('|')[0]}: {text}")
    return list(lines.values())


Differences = Iterator[tuple[str, str]]  # (kind, text), in the order of steps


def _other_bits(run: Kept, seen: list[Seen]) -> Differences:
    for i, step in enumerate(seen):
        for name, expected in zip(run.names, run.checksums[i], strict=True):
            kind, _, path = name.partition("|")
            if name not in step:
                yield kind, f"{path} is missing after step {i}"
            elif checksum(name, step[name]) != expected:
                more = f", kept {run.decisions[name][i]}, now {step[name]}" if name in run.decisions else ""
                yield kind, f"other bits after step {i} at {path}{more}"


def _other_decisions(run: Kept, seen: list[Seen]) -> Differences:
    for i, step in enumerate(seen):
        for name, expected in run.decisions.items():
            kind, _, path = name.partition("|")
            if name not in step:
                yield kind, f"{path} is missing after step {i}"
            elif not np.array_equal(_number(step[name]), expected[i], equal_nan=True):
                yield kind, f"after step {i} {path} is {step[name]}, kept {expected[i]}"


def _far_floats(run: Kept, seen: list[Seen]) -> Differences:
    """Floats after the last step that are farther from the kept ones than `bound_of` allows, or of another shape."""
    for name, expected in run.last.items():
        kind, _, path = name.partition("|")
        x = sample(seen[-1][name]) if name in seen[-1] else np.zeros(0, bool)
        off, allowed = np.inf, 0.0
        if x.dtype == expected.dtype and x.shape == expected.shape:
            a, b = x.astype(np.float64), expected.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                off = float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
            allowed = bound_of(run, name)
        if not off <= allowed:
            yield f"{kind}|floats", f"after step {STEPS - 1} {path} is off by {off:.3g}, allowed {allowed:.3g}"


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
