"""fp8 over the ways to spread a step, alone and under fp16's loss scale; `fp8_job.py` has the models."""

import itertools

import numpy as np
import pytest

import fp8_job
import regimes
from fp8_job import POLICIES, devices_of, make_job
from helpers import assert_close, assert_exact
from regimes import REGIMES

FRAMEWORKS = ("exact", "linen", "nnx")
MATRIX = [(*case, 1) for case in itertools.product(REGIMES, FRAMEWORKS, POLICIES)]
MATRIX += [(regime, "exact", name, 2) for regime, name in itertools.product(REGIMES, POLICIES)]
SAMPLE = (  # each regime in the exact job, and each framework and policy once
    *((regime, "exact", name, 1) for regime, name in zip(REGIMES, itertools.cycle(POLICIES), strict=False)),
    ("pmap", "linen", "fp8", 1),
    ("jit_fsdp", "nnx", "fp16+fp8", 1),
    ("shard_map", "exact", "fp16+fp8", 2),
)
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in SAMPLE else pytest.mark.thorough(0))
    for case in MATRIX
]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("regime_name", "framework", "name", "accumulate"), CASES)
def test_scales_and_histories_are_those_of_one_device(regime_name, framework, name, accumulate):
    job = make_job(framework, name, REGIMES[regime_name].axis_name, accumulate)
    devices = devices_of(regime_name, framework, name, accumulate)
    metrics = regimes.check_run(job, POLICIES[name][1], devices)  # alike on all devices; a skip changes nothing
    single = [copies[0] for copies in devices_of("single", framework, name, 1)]
    for copies, expected in zip(devices, single, strict=True):
        got, want = job.values(copies[0]), make_job(framework, name).values(expected)
        if framework == "exact" and name == "fp8":
            assert_exact(got, want)
        elif framework == "exact":  # gradients of float16 params are rounded to float16 on each device
            assert_exact(got["fp8"], want["fp8"])
        else:  # what is rounded apart in bfloat16 may fall to another neighbour in e5m2
            tolerance = 2.0**-3
            for ours, theirs in zip(got["fp8"].amax_states, want["fp8"].amax_states, strict=True):
                assert_close(ours.amax_history, theirs.amax_history, rtol=tolerance)
    assert metrics[-1]["fp8/unused"] == 0
    assert np.isfinite(metrics[-1]["fp8/max_amax"])


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", POLICIES)
def test_the_data_moves_the_scales(name):
    """What the suite compares is not a state that stands still."""
    job = make_job("exact", name)
    first, *_, last = (job.values(copies[0])["fp8"] for copies in devices_of("single", "exact", name))
    for before, after in zip(first.amax_states, last.amax_states, strict=True):
        assert np.all(before.scale != after.scale)
        assert np.count_nonzero(after.amax_history) == after.amax_history.size - after.scale.size  # slot 0 is free
    assert fp8_job.RECIPE.amax_history_len - 1 == 2
