"""A chain of lives, each on other devices and in another way, ends where a run ends that nothing interrupted."""

import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lives
import processes

STEPS = 2  # of a life
CHAIN = (
    ("jit", 1), ("fsdp", 8), ("pmap", 3), ("shard_map", 6),
    ("fsdp in shard_map", 4), ("jit", 2), ("pmap", 8), ("fsdp", 3),
)  # fmt: skip


def check_ends_as(ours, kind, steps, folder):
    """Within the rounding of the gradients' sums, which differ with the rows of a device.

    Each sum is off by some epsilon of the dtype that its parts are computed in.
    """
    _, twin = lives.live("jit", 1, folder, kind, steps)
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
    for number, (way, devices) in enumerate(CHAIN):
        restored, ours = lives.live(way, devices, tmp_path / "chain", kind, STEPS)
        assert restored == number * STEPS - 1
    check_ends_as(ours, kind, len(CHAIN) * STEPS, tmp_path / "whole")


@pytest.mark.thorough(0)
def test_lives_of_several_processes(tmp_path):
    """4 processes save, 2 go on, of which one is killed in a save; nothing is lost, and 3 go on from there."""
    kind = "fp16"

    def of_processes(count, *, killed=False):
        """The step that all of them restored; with `killed`, how each ended and what it printed."""
        # One device each, so that a few cores are enough.
        workers, logs = processes.start(lives.__file__, tmp_path, count, 1, kind, STEPS, *(["dies"] * killed))
        if killed:
            codes = processes.wait(workers, logs)
        else:
            processes.finish(workers, logs)
        printed = [(tmp_path / f"{rank}.out").read_text() for rank in range(count)]
        if killed:
            return codes, printed
        assert not any("Traceback" in text for text in printed)  # of what a killed process left
        (restored,) = {int(re.search(r"^restored (.*)$", text, re.M)[1]) for text in printed}
        return restored

    steps = tmp_path / "steps"
    assert lives.live("jit", 1, steps, kind, STEPS)[0] == -1
    assert of_processes(4) == 1
    codes, printed = of_processes(2, killed=True)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
    assert re.search(r"stopped sending heartbeats\):\s+1\b", printed[0]), printed[0]  # the number of the process
    last = max(int(x.name) for x in steps.iterdir() if x.name.isdigit())
    assert last in (3, 5)  # 5 if the save was complete before the kill
    assert of_processes(3) == last
    restored, ours = lives.live("pmap", 3, steps, kind, STEPS)
    assert restored == last + STEPS
    check_ends_as(ours, kind, last + 1 + 2 * STEPS, tmp_path / "whole")
