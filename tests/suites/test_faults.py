"""A bounded sample of the fault campaign (`make faults`), and that the campaign would see a wrong step."""

import functools

import numpy as np
import pytest

import faults


@pytest.mark.thorough(1)
@pytest.mark.parametrize("regime, precision", faults.WORLDS, ids=lambda x: x)
def test_no_fault_leaves_a_wrong_state(regime, precision):
    done = faults.run(regime, precision, 12, seed=1)
    assert sum(done.values()) == 12 and len(done) >= 3


@functools.cache
def one_fault():
    """A world, the state before a step, its twin, the state after, and the fault in it, of which `check` approves."""
    world = faults.make_world("single", "fp16")
    rng = np.random.default_rng(0)
    fault = faults.Fault(0, 0, 3, "inf")
    before = world.state
    twin = world.step(before, world.shard(faults.batch_of(rng, None, world.limits)))
    after = world.step(before, world.shard(faults.batch_of(rng, fault, world.limits)))
    faults.check(world, before, twin, after, fault)
    return world, before, twin, after, fault


def injured(change):
    """The messages of `check` for a step that should have skipped an inf: `change(state after, state before)`."""
    world, before, twin, after, fault = one_fault()
    with pytest.raises(AssertionError) as caught:
        faults.check(world, before, twin, change(after, twin), fault)
    return str(caught.value)


WRONG = {
    "taken": (lambda after, twin: twin, "1: skipped is False for inf"),
    "params": (lambda after, twin: (twin[0], after[1]), "2: a skipped step changed something"),
    "scale": (
        lambda after, twin: (after[0], after[1]._replace(scaling=after[1].scaling._replace(loss_scale=np.float32(3)))),
        "1: the scale's state is",
    ),
    "moments": (
        lambda after, twin: (after[0], after[1]._replace(optimizer_state=twin[1].optimizer_state)),
        "2: a skipped step changed something",
    ),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_seen(name):
    change, message = WRONG[name]
    assert message in injured(change)
