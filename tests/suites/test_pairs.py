"""A sample of the jobs in which every pair of features meets (`make pairs` runs all). A wrong result is detected."""

import numpy as np
import pytest

import pairs

SAMPLE = (3, 7, 15, 19)  # each framework, fp8, split masters, remat, vmap, microbatches, four regimes


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id="-".join(case), marks=() if i in SAMPLE else pytest.mark.thorough(0))
        for i, case in enumerate(pairs.cases())
    ],
)
def test_features_work_together(number):
    assert pairs.check(pairs.cases()[number]) < 0.6


def test_every_pair_that_may_stand_together_does():
    found = set().union(*map(pairs.pairs_of, pairs.cases()))
    choices = {(feature, choice) for feature, all_of in pairs.FEATURES.items() for choice in all_of}
    assert {pair for two in found for pair in two} == choices
    assert (("policy", "fp8"), ("regime", "jit_fsdp")) in found
    assert (("policy", "fp8"), ("optimizer", "split16")) not in found
    assert len(pairs.cases()) < 130


@pytest.mark.thorough(0)
def test_a_job_that_goes_another_way_is_seen(monkeypatch):
    case = pairs.Case("fp32", "adamw", "whole", "listed", "policy", "single", "plain")
    assert pairs.check(case) == 0
    job_of, made = pairs.job_of, []

    def other_start(case):
        job = job_of(case)
        made.append(job)
        if len(made) == 2:  # the one on one device, with another step
            return job._replace(step=lambda state, batch, mean: job.step(state, {**batch, "y": 2 * batch["y"]}, mean))
        return job

    monkeypatch.setattr(pairs, "job_of", other_start)
    with pytest.raises(AssertionError, match="^1: .* of the way apart from one device"):
        pairs.check(case)


def test_a_restored_state_with_other_bits_is_seen(monkeypatch):
    restored = pairs._restored

    def hurt(*job):
        params, opt_state = restored(*job)
        return {**params, "first": {"w": np.nextafter(params["first"]["w"], np.float32(9))}}, opt_state

    monkeypatch.setattr(pairs, "_restored", hurt)
    with pytest.raises(AssertionError, match="^4: restored to other bits"):
        pairs.check(pairs.Case("fp32", "adamw", "whole", "listed", "policy", "single", "plain"))
