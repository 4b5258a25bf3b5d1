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
SHORT = (("fsdp", 8), ("shard_map", 6))
EIGHT = (
    ("jit", 1), ("fsdp", 8), ("pmap", 3), ("shard_map", 6),
    ("fsdp in shard_map", 4), ("jit", 2), ("pmap", 8), ("fsdp", 3),
)  # fmt: skip


def check_ends_as(found, kind, steps, folder):
    """Within the rounding of the gradients' sums, which differ with the rows of a device.

    Each sum is off by some epsilon of the dtype that its parts are computed in.
    """
    _, twin = lives.live("jit", 1, folder, kind, steps)
    assert found["counts"] == twin["counts"]
    assert kind != "fp16" or steps <= lives.BAD_STEP or found["counts"]["skipped_steps"] == 1
    if kind == "lion":  # a step is a sign
        losses = [lives.held_out_loss(x["masters"]) for x in (found, twin)]
        assert abs(losses[0] - losses[1]) < 1e-3 * losses[1] < 1e-3 * lives.held_out_loss(lives.params_of())
        return
    bound = {"fp32": 8 * jnp.finfo(jnp.float32).eps, "fp16": 2 * jnp.finfo(jnp.float16).eps}
    most = bound.get(kind, 2 * jnp.finfo(jnp.bfloat16).eps)
    for name in ("masters", "moments"):
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(found[name]), jax.tree.leaves(twin[name]), strict=True
        ):
            assert x.dtype == y.dtype == np.float32
            difference = np.abs(np.float64(x) - y).max() / np.abs(y).max()
            assert difference <= most, f"{name}{jax.tree_util.keystr(path)}: {difference:.1e} of the largest"


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("chain", "kind"),
    [(SHORT, "fp16"), *(pytest.param(EIGHT, kind, marks=pytest.mark.thorough(0)) for kind in lives.KINDS)],
    ids=lambda x: x if isinstance(x, str) else f"{len(x)} lives",
)
def test_each_on_other_devices_in_another_way(chain, kind, tmp_path):
    steps = max(STEPS, 6 // len(chain))  # of a life: the batch of `lives.BAD_STEP` is among all
    for number, (way, devices) in enumerate(chain):
        restored, found = lives.live(way, devices, tmp_path / "chain", kind, steps)
        assert restored == number * steps - 1
    check_ends_as(found, kind, len(chain) * steps, tmp_path / "whole")


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kind", ["fp16", "split"])
def test_lives_of_several_processes(kind, tmp_path):
    """4 processes save, 2 go on, of which one is killed in a save; nothing is lost, and 3 and 1 go on from there."""

    def of_processes(count, *, killed=False):
        """The step that all of them restored; with `killed`, how each ended and what it printed."""
        # One device each, so that a few cores are enough.
        workers, logs = processes.start(lives.__file__, tmp_path, count, 1, kind, STEPS, *(["dies"] * killed))
        if killed:
            codes = processes.wait(workers, logs)
            return codes, [(tmp_path / f"{rank}.out").read_text() for rank in range(count)]
        processes.finish(workers, logs)
        told = [(tmp_path / f"{rank}.out").read_text() for rank in range(count)]
        assert not any("Traceback" in text for text in told)  # of what a killed process left
        (restored,) = {int(re.search(r"^restored (.*)$", text, re.M)[1]) for text in told}
        return restored

    steps = tmp_path / "steps"
    assert lives.live("jit", 1, steps, kind, STEPS)[0] == -1
    assert of_processes(4) == 1
    codes, told = of_processes(2, killed=True)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
    assert re.search(r"stopped sending heartbeats\):\s+1\b", told[0]), told[0]  # the number of the process
    last = max(int(x.name) for x in steps.iterdir() if x.name.isdigit())
    assert last in (3, 5)  # 5 if the save was complete before the kill
    assert of_processes(3) == last
    assert of_processes(1) == last + STEPS
    restored, found = lives.live("pmap", 3, steps, kind, STEPS)
    assert restored == last + 2 * STEPS
    check_ends_as(found, kind, last + 1 + 3 * STEPS, tmp_path / "whole")
