"""Faults put into the library, one after the other: `make mutations`. How many of them turn the tests red?

A fault is one line of the library, changed in a copy of the checkout: a decision that ignores a flag, a scale that
falls too late, a SUM in place of a MAX. The tests that are nearest to it run first; if they pass, all of `make test`'s
run. A fault that no test finds is named at the end, and more than two of them are a failure.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 2  # faults that no test finds


class Fault(NamedTuple):
    """`before` stands once in `file`, below `jaxmp/_src` or from the root, and becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    nearest: str  # folders of tests, by spaces


HEART, DYNAMIC, MASTERS = "step/heart.py", "loss_scale/dynamic.py", "step/masters.py"
COLLECTIVES, LISTS, EQUATIONS = "devices/collectives.py", "autocast/cast_lists.py", "fp8/scale_equations.py"
FAULTS = (
    # the decision
    Fault("the loss scale moves on the flag of this device", HEART,
          'bad, unwanted, clamped = common["bad"] != 0, common["unwanted"] != 0, common.get("clamped")',
          'unwanted, clamped = common["unwanted"] != 0, common.get("clamped")', "step suites"),
    Fault("inf in an amax takes the step", HEART, "        bad |= collectives.any_nonfinite(of_scales)\n",
          "        pass\n", "step fp8"),
    Fault("skip_if skips nothing", HEART, "taken & ~unwanted if objections", "taken if objections", "step"),
    Fault("skip_nonfinite=False skips", HEART, "taken = usable if rule.skip_nonfinite else always", "taken = usable",
          "step"),
    Fault("a clamped gradient leaves the scale", HEART, "usable & (clamped == 0)", "usable", "step"),
    Fault("a gradient of 2^48 takes the step", "/pallas_kernels/unscale.py",
          "LARGEST = np.float32(2.0**48)", "LARGEST = np.float32(2.0**60)", "step kernels"),
    Fault("a skipped step moves the optimizer's state", "/pallas_kernels/when.py",
          "    return jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, old)", "    return new", "kernels step"),
    # the rule of the loss scale
    Fault("hysteresis counts one overflow more", DYNAMIC, "falls = self.hysteresis_left <= 1",
          "falls = self.hysteresis_left <= 0",
          "loss_scale"),
    Fault("growth one step late", DYNAMIC, "grows = count >= rule.growth_interval",
          "grows = count > rule.growth_interval", "loss_scale"),
    Fault("no floor of the scale", DYNAMIC, "jnp.float32), self._floor())", "jnp.float32), 0.0)", "loss_scale"),
    Fault("an overflow does not reset the count of good steps", DYNAMIC, "count), rule.count_after_overflow)",
          "count), self.growth_count)", "loss_scale"),
    Fault("each good step refills the hysteresis", DYNAMIC, 'refills = grows if rule.refill == "growth" else True',
          "refills = True", "loss_scale"),
    Fault("gradients are divided by a scale that is not the loss's", HEART,
          "inv_scale = float_bits.reciprocal(used_scale)", "inv_scale = float_bits.reciprocal(used_scale * 2)", "step"),
    # scales of fp8
    Fault("margin is ignored", EQUATIONS, "limit = fp8_max * 2.0**-margin", "limit = fp8_max", "fp8"),
    Fault("an amax of 0 moves the scale", EQUATIONS, "jnp.where(float_bits.is_positive_finite(amax), scale,",
          "jnp.where(amax < jnp.inf, scale,", "fp8"),
    Fault("the history rolls the other way", "fp8/delayed.py", "jnp.roll(filled, -1, axis=0)",
          "jnp.roll(filled, 1, axis=0)", "fp8"),
    Fault("an unused tensor moves its history", "fp8/delayed.py", "jnp.where(used[None], rolled, history)", "rolled",
          "fp8"),
    Fault("gradients are cast to e4m3", EQUATIONS, 'jnp.float8_e5m2 if backward and fp8_format == "HYBRID" else',
          "jnp.float8_e4m3fn if backward else", "fp8"),
    Fault("a spoiled amax counts as it is", "step/scales.py",
          "jnp.where(seen.is_spoiled, jnp.maximum(seen.amax, old.amax_history.max(0)), seen.amax)", "seen.amax",
          "fp8 step"),
    # casts
    Fault("a cast to fp8 does not saturate", "/pallas_kernels/reference.py",
          "return jnp.clip(x, -limit, limit).astype(dtype)", "return x.astype(dtype)", "numerics kernels"),
    Fault("round_to rounds towards zero", "numerics/casting.py", "lax.RoundingMethod.TO_NEAREST_EVEN",
          "lax.RoundingMethod.AWAY_FROM_ZERO", "numerics"),
    # MAX over devices
    Fault("the flags of devices are summed", COLLECTIVES, "lax.pmax(compat.as_varying(x, axes), axes)",
          "lax.psum(compat.as_varying(x, axes), axes)", "devices distributed"),
    Fault("only one axis takes part in the MAX", COLLECTIVES, 'return manual if axis_name == "auto"',
          'return manual[:1] if axis_name == "auto"', "devices suites"),
    Fault("amaxes of microbatches are added", "fp8/gradients.py", "jnp.maximum(so_far, g)", "so_far + g", "fp8 step"),
    # masters
    Fault("params are not written from masters", MASTERS,
          "return Pair(None if like.param is None else reference.cast_by_selects(weight, like.param.dtype), weight)",
          "return Pair(like.param, weight)", "step"),
    Fault("a remainder of 8 bits is cut, not rounded", MASTERS, "short = (short + 0x80) >> 8", "short = short >> 8",
          "step"),
    # digests
    Fault("a digest ignores places", "devices/digests.py", "_mixed(bits ^ _mixed(place + np.uint32(0x9E3779B9)))",
          "_mixed(bits)", "devices checkpoint"),
    # autocast
    Fault("exp runs in 16 bits", LISTS, '*("exp", "exp2", ', '*("exp2", ', "autocast"),
    Fault("sums run in 16 bits", LISTS, '*("reduce_sum", "reduce_prod", ', '*("reduce_prod", ', "autocast"),
    Fault("short products run in 16 bits", LISTS, "SHORT = 4", "SHORT = 0", "autocast"),
)  # fmt: skip


def path_of(fault: Fault) -> str:
    return fault.file[1:] if fault.file.startswith("/") else f"jaxmp/_src/{fault.file}"


def first_failure(fault: Fault) -> str | None:
    """The first test that fails with this fault; None if all pass. A file that cannot be collected is no test."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "jaxmp"
        ignored = shutil.ignore_patterns(".*", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        file = copy / path_of(fault)
        file.write_text(changed(fault, file.read_text()))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        for tests in ([f"tests/{room}" for room in fault.nearest.split()], ["tests", "jaxmp", "pallas_kernels"]):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
            failed = [x for x in ran.stdout.splitlines() if x.startswith(("FAILED", "ERROR")) and "::" in x.split()[1]]
            if failed:
                return failed[0].split(" - ")[0].partition(" ")[2]
            if ran.returncode:
                raise RuntimeError(f"{fault.name}: pytest could not run\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return None


def changed(fault: Fault, text: str) -> str:
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.name}: {fault.before!r} stands {text.count(fault.before)} times in {fault.file}")
    return text.replace(fault.before, fault.after)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="faults whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--json", type=Path, help="where results go")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if (arguments.only or "") in fault.name]
    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for fault, test in zip(faults, pool.map(first_failure, faults), strict=True):
            rows.append({"fault": fault.name, "file": path_of(fault), "found by": test})
            print(f"{fault.name}: {test or 'NOT FOUND'}", flush=True)
    missed = [row["fault"] for row in rows if row["found by"] is None]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults found")
    if arguments.json:
        arguments.json.write_text(json.dumps({"faults": len(rows), "missed": missed, "rows": rows}, indent=2) + "\n")
    return int(len(missed) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
