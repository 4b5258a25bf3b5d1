"""fp8 over the ways to spread a step, alone and under fp16's loss scale; `fp8_job.py` has the model."""

import numpy as np
import pytest

import regimes
from fp8_job import POLICIES, devices_of, make_job
from helpers import assert_exact
from regimes import REGIMES

# The frameworks' own ways into a step are in pairs.py, with fp8 in each regime.
CASES = [(regime, name, 1) for regime in REGIMES for name in POLICIES]
CASES += [("pmap", "fp8", 2), ("shard_map", "fp16+fp8", 2), ("jit_data", "fp8", 2), ("jit_fsdp", "fp16+fp8", 2)]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("regime_name", "name", "accumulate"), CASES)
def test_scales_and_histories_are_those_of_one_device(regime_name, name, accumulate):
    job = make_job(name, accumulate)
    devices = devices_of(regime_name, name, accumulate)
    metrics = regimes.check_run(job, POLICIES[name][1], devices)  # alike on all devices; a skip changes nothing
    for copies, single in zip(devices, devices_of("single", name), strict=True):
        ours, expected = (job.values(device) for device in (copies[0], single[0]))
        if name == "fp16+fp8":  # gradients of float16 params are rounded to float16 on each device
            ours, expected = ours["fp8"], expected["fp8"]
        assert_exact(ours, expected)
    assert metrics[-1]["fp8/unused"] == 0
    assert np.isfinite(metrics[-1]["fp8/max_amax"])


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", POLICIES)
def test_the_data_moves_the_scales(name):
    """What the suite compares is not a state that stands still."""
    job = make_job(name)
    first, *_, last = (job.values(copies[0])["fp8"] for copies in devices_of("single", name))
    for before, after in zip(first.amax_states, last.amax_states, strict=True):
        assert np.all(before.scale != after.scale)
        assert np.count_nonzero(after.amax_history) == after.amax_history.size - after.scale.size  # slot 0 is free
