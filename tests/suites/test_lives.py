"""A chain of lives, each on other devices and in another way, ends where a run ends that nothing interrupted."""

import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import lives
import processes
from helpers import assert_moved

STEPS = 2  # of a life
LIFE = r"^restored (\S+) (\S+); saved (\S+) (\S+)$"  # what a process prints
CHAIN = (
    ("jit", 1), ("fsdp", 8), ("pmap", 3), ("shard_map", 6),
    ("fsdp in shard_map", 4), ("jit", 2), ("pmap", 8), ("fsdp", 3),
)  # fmt: skip


def check_ends_as(ours, kind, steps, folder):
    """Within the rounding of the gradients' sums, which differ with the rows of a device.

    Each sum is off by some epsilon of the dtype that its parts are computed in.
    """
    *_, twin = lives.live("jit", 1, folder, kind, steps)
    assert ours["counts"] == twin["counts"]
    assert kind != "fp16" or ours["counts"]["skipped_steps"] == 1
    most = 2 * jnp.finfo({"fp16": jnp.float16, "split": jnp.bfloat16}[kind]).eps
    for name in ("masters", "moments"):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(twin[name])]
        for path, x, y in zip(paths, *map(jax.tree.leaves, (ours[name], twin[name])), strict=True):
            assert x.dtype == y.dtype == np.float32
            difference = np.abs(np.float64(x) - y).max() / np.abs(y).max()
            assert difference <= most, f"{name}{path}: {difference:.1e} of the largest"


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kind", lives.KINDS)
def test_each_on_other_devices_in_another_way(kind, tmp_path):
    saved = None
    for number, (way, devices) in enumerate(CHAIN):
        restored, before, after = lives.live(way, devices, tmp_path / "chain", kind, STEPS)
        assert restored == number * STEPS - 1
        if saved is not None:
            assert_moved(before, saved)
        saved = after
    check_ends_as(saved, kind, len(CHAIN) * STEPS, tmp_path / "whole")


@pytest.mark.thorough(0)
def test_lives_of_several_processes(tmp_path):
    """4 processes save, 2 go on, of which one is killed in a save; nothing is lost, and 3 go on from there.

    Params are cut over all processes, and padded; what an earlier life saved is restored in every bit.
    """
    kind, steps = "fp16", tmp_path / "steps"
    restored, _, ours = lives.live("jit", 1, steps, kind, STEPS)
    assert restored == -1
    saved = {STEPS - 1: helpers.digest(ours)}

    def of_processes(count, *, killed=False):
        """The step that all of them restored, as it was saved."""
        # One device each, so that a few cores are enough.
        workers, logs = processes.start(lives.__file__, tmp_path, count, 1, kind, STEPS, *(["dies"] * killed))
        if killed:
            codes = processes.wait(workers, logs)
            assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
        else:
            processes.finish(workers, logs)
        printed = [(tmp_path / f"{rank}.out").read_text() for rank in range(count)]
        if killed:
            # by the number of the process
            assert re.search(r"stopped sending heartbeats\):\s+1\b", printed[0]), printed[0]
        else:
            assert not any("Traceback" in text for text in printed)  # of what a killed process left
        ((restored, found, last, written),) = {re.search(LIFE, text, re.M).groups() for text in printed}
        assert found == saved[int(restored)]
        saved[int(last)] = written
        return int(restored)

    assert of_processes(4) == 1
    assert of_processes(2, killed=True) == 3
    last = max(int(x.name) for x in steps.iterdir() if x.name.isdigit())
    assert last in (3, 5)  # 5 if the save was complete before the kill
    assert of_processes(3) == last
    restored, before, ours = lives.live("pmap", 3, steps, kind, STEPS)
    assert restored == last + STEPS and helpers.digest(before) == saved[restored]
    check_ends_as(ours, kind, last + 1 + 2 * STEPS, tmp_path / "whole")
