"""A sample of the jobs in which every pair of features meets (`make pairs` runs all). A wrong result is detected."""

import numpy as np
import pytest

import pairs

CASES = pairs.cases(times=1)  # every pair once; `make pairs` has it twice, each time with other features
SOME = CASES[::2]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("case", SOME, ids="-".join)
def test_features_work_together(case):
    assert pairs.check(case) < 0.6


def test_every_pair_that_may_stand_together_does():
    pairs_of_all = set().union(*map(pairs.pairs_of, CASES))
    choices = {(feature, choice) for feature, all_of in pairs.FEATURES.items() for choice in all_of}
    assert {choice for pair in pairs_of_all for choice in pair} == choices
    assert (("policy", "fp8"), ("regime", "jit_fsdp")) in pairs_of_all
    assert (("policy", "fp8"), ("optimizer", "split16")) not in pairs_of_all
    assert pairs.cases()[: len(CASES)] == CASES and len(pairs.cases()) < 130
    assert {choice for pair in set().union(*map(pairs.pairs_of, SOME)) for choice in pair} == choices


PLAIN = pairs.Case("fp32", "adamw", "whole", "listed", "policy", "single", "plain")


@pytest.mark.thorough(0)
def test_a_job_that_goes_another_way_is_seen(monkeypatch):
    assert pairs.check(PLAIN) == 0
    job_of, jobs = pairs.job_of, []

    def other_start(case):
        job = job_of(case)
        jobs.append(job)
        if len(jobs) == 2:  # the one on one device, with another step
            return job._replace(step=lambda state, batch, mean: job.step(state, {**batch, "y": 2 * batch["y"]}, mean))
        return job

    monkeypatch.setattr(pairs, "job_of", other_start)
    with pytest.raises(AssertionError, match="^1: .* of the way apart from one device"):
        pairs.check(PLAIN)


def test_a_restored_state_with_other_bits_is_seen(monkeypatch):
    restored = pairs._restored

    def hurt(*job):
        params, opt_state = restored(*job)
        return {**params, "first": {"w": np.nextafter(params["first"]["w"], np.float32(9))}}, opt_state

    monkeypatch.setattr(pairs, "_restored", hurt)
    with pytest.raises(AssertionError, match="^4: restored to other bits"):
        pairs.check(PLAIN)
