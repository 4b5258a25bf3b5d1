"""examples/parity.py: what it stores goes on where it stopped, and its summary is what NumPy makes of the runs."""

import concurrent.futures
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

import parity
import train
from helpers import ROOT, compiled_quickly

FLOPS = functools.cache(parity.fp8_flops)
LOSSES = {"bf16": 1.40, "fp8": 1.41, "fp8, E4M3": 1.42}


def invented_run(name, seed, cfg):
    """A run that was not trained: the loss of a policy, other for each seed."""
    loss = LOSSES[name] + 0.01 * seed + 0.001 * (seed * len(name) % 3)
    extra = {"last_in_fp8": loss + 0.002} if "fp8" in name else {}
    return {"policy": name, "seed": seed, "held_out": loss, "last": loss, **extra, "skipped": 0, "seconds": 0.1}


class Here(concurrent.futures.Executor):
    """Runs jobs one after the other in this process, and notes them; interrupted before the one of `stop`."""

    def __init__(self, stop=None):
        self.jobs, self.stop = [], stop

    def submit(self, fn, /, *args):
        future = concurrent.futures.Future()
        if self.stop is not None and len(self.jobs) >= self.stop:
            future.set_exception(KeyboardInterrupt())
        else:
            self.jobs.append(args[:2])
            future.set_result(fn(*args))
        return future


@pytest.fixture
def call(monkeypatch, tmp_path):
    """`call(stop=, **options)`: one call of the script; returns the jobs that it ran and what it printed."""

    def call(stop=None, **options):
        pool, console = Here(stop), Console(file=io.StringIO(), width=150)
        monkeypatch.setattr(parity, "train_one", invented_run)
        monkeypatch.setattr(parity, "fp8_flops", FLOPS)
        monkeypatch.setattr(parity, "pool_of", lambda processes: pool)
        # The order in which futures end is open; here it is the order of the jobs, so that the test says which.
        monkeypatch.setattr(concurrent.futures, "as_completed", iter)
        defaults = {"policies": tuple(LOSSES), "seeds": 4, "steps": 100, "json": tmp_path / "parity.json"}
        try:
            parity.main(parity.Parity(**defaults | options), console)
        except SystemExit as e:
            return pool.jobs, str(e)
        return pool.jobs, console.file.getvalue()

    return call


def test_an_interrupted_call_goes_on_with_what_is_missing(call, tmp_path):
    first, said = call(stop=5)
    assert "interrupted" in said
    stored = json.loads((tmp_path / "parity.json").read_text())
    assert sorted((run["policy"], run["seed"]) for run in stored["runs"]) == sorted(first)
    assert {seed for _, seed in first} == {0, 1}, "all policies proceed alike"

    second, said = call()
    assert "5 runs are in parity.json, 7 are missing" in said
    assert sorted(first + second) == sorted((name, seed) for name in LOSSES for seed in range(4))
    whole = json.loads((tmp_path / "parity.json").read_text())
    assert whole["runs"] == [invented_run(name, seed, None) for name in LOSSES for seed in range(4)]

    third, said = call()
    assert third == [] and json.loads((tmp_path / "parity.json").read_text()) == whole
    assert "fp8, E4M3" in said and "+1.36" in said  # the table: 0.02 - 0.003 / 4 of 1.4158

    more, _ = call(seeds=5, policies=("bf16",))
    assert more == [("bf16", 4)]


@pytest.mark.thorough(0)
def test_another_config_is_refused_until_it_starts_anew(call):
    call()
    jobs, said = call(steps=200)
    assert jobs == [] and "steps was 100, is 200" in said and "--restart" in said
    jobs, _ = call(steps=200, restart=True)
    assert len(jobs) == 12
    assert call(steps=200)[0] == []


def test_steps_that_do_not_fit_are_named(call):
    assert "a multiple of 20, 5 of them or more; got 90" in call(steps=90)[1]


def test_the_summary_pairs_seeds():
    cfg = train.Config()
    runs = [invented_run(name, seed, cfg) for name in LOSSES for seed in range(5)]
    runs = [run for run in runs if (run["policy"], run["seed"]) not in {("bf16", 1), ("fp8", 4)}]
    summary = parity.summarize(runs, cfg)
    loss = {(run["policy"], run["seed"]): run["held_out"] for run in runs}
    shared = [0, 2, 3]
    gaps = np.array([loss["fp8", s] - loss["bf16", s] for s in shared])
    base = np.mean([loss["bf16", s] for s in shared])
    row = summary["fp8"]
    assert (row["baseline"], row["seeds"], row["gaps"]) == ("bf16", 4, 3)
    assert row["mean_gap_percent"] == pytest.approx(100 * gaps.sum() / 3 / base)
    variance = ((gaps - gaps.sum() / 3) ** 2).sum() / 2
    assert row["standard_error_percent"] == pytest.approx(100 * (variance / 3) ** 0.5 / base)
    every = np.mean([loss["fp8", s] for s in range(4)])
    assert row["in_fp8_gaps"] == 4 and row["in_fp8_mean_gap_percent"] == pytest.approx(100 * 0.002 / every)
    assert "mean_gap" not in summary["bf16"] and "in_fp8_mean_gap" not in summary["bf16"]


def test_the_share_of_fp8_counts_every_matmul():
    cfg = dataclasses.replace(train.Config(), width=96, layers=2, seq_len=64)
    blocks, logits, attention = 2 * 12 * 96**2, 96 * 256, 2 * 2 * 64 * 96
    every = blocks + logits + attention
    assert parity.fp8_flops("fp8", cfg) == pytest.approx(100 * blocks / every)
    assert parity.fp8_flops("fp8, first qkv in bf16", cfg) == pytest.approx(100 * (blocks - 3 * 96**2) / every)
    assert parity.fp8_flops("NVFP4, last block in bf16", cfg) == pytest.approx(50 * blocks / every)
    assert parity.fp8_flops("bf16", cfg) == 0


def test_the_layers_that_a_choice_names_stay_in_16_bits():
    cfg = dataclasses.replace(train.Config(), width=32, heads=2, steps=100)
    trainer = parity.trainer_of("fp8, first qkv in bf16", cfg)
    params = jax.eval_shape(trainer.start, jax.random.key(0)).params
    in_fp8 = {f"{b}/{name}" for b in ("Block_0", "Block_1") for name, x in params[b].items() if "Fp8DotGeneral_0" in x}
    assert in_fp8 == {f"Block_{i}/{name}" for i in (0, 1) for name in ("qkv", "out", "up", "down")} - {"Block_0/qkv"}
    assert "Fp8DotGeneral_0" not in params["logits"]


@pytest.mark.thorough(0)
def test_a_run_trains_in_fp8_and_is_evaluated_in_both(monkeypatch):
    monkeypatch.setattr(train, "topics", dict(list(train.topics.items())[:20]))
    cfg = dataclasses.replace(train.Config(), width=32, heads=2, layers=1, seq_len=32, steps=100)
    run = parity.train_one("fp8", 3, cfg)
    assert (run["policy"], run["seed"], run["skipped"]) == ("fp8", 3, 0)
    assert 2 < run["last"] <= run["held_out"] < 4  # it still learns; a guess is 5.5
    assert 0 < abs(run["last_in_fp8"] - run["last"]) < 0.1


@pytest.mark.thorough(0)
def test_processes_train(tmp_path):
    command = [sys.executable, ROOT / "examples" / "parity.py", "--policies", "bf16", "--seeds", "2", "--steps", "100"]
    command += ["--width", "32", "--json", tmp_path / "parity.json"]
    environment = compiled_quickly(os.environ | {"PYTHONPATH": str(ROOT)})
    said = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(2)]
    assert "0 runs are in parity.json, 2 are missing" in said[0].stdout
    assert "2 runs are in parity.json, 0 are missing" in said[1].stdout
    assert len({run["held_out"] for run in json.loads((tmp_path / "parity.json").read_text())["runs"]}) == 2
