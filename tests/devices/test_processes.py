"""Real processes, joined by `jax.distributed`: an overflow in one of them, and a death."""

import itertools
import json
import pickle
import signal

import jax
import numpy as np
import pytest
import safetensors

import jaxmp
import process_worker
import regimes
import resume_worker
from helpers import assert_moved
from processes import HANGS_AFTER, finish, start

PROCESSES = 2


def wait_for_the_kill(workers, logs, folder):
    """Waits until the one process has killed itself, then kills the others."""
    bad = resume_worker.BAD_RANK
    try:
        assert workers[bad].wait(HANGS_AFTER) == -signal.SIGKILL, (folder / f"{bad}.out").read_text()[-3000:]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for log in logs:
            log.close()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The folder that the processes wrote into, and what each saved."""
    folder = tmp_path_factory.mktemp("processes")
    finish(*start(process_worker.__file__, folder, PROCESSES, regimes.DEVICES // PROCESSES))
    return folder, [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("case", process_worker.JOBS, ids=lambda case: case[0])
def test_processes_decide_as_one(traces, case):
    _, traces = traces
    ours, others = np.split(np.arange(regimes.BATCH), PROCESSES)
    assert regimes.BAD_ROW in ours and regimes.BAD_ROW not in others  # the overflow is in the data of one process
    regime_name, framework, dtype, _ = case
    job = regimes.make_job(framework, dtype, regimes.REGIMES[regime_name].axis_name)
    as_state = jax.tree.structure(job.state).unflatten
    by_process = [
        regimes.Trace([[as_state(x) for x in copies] for copies in t[case][0]], t[case][1], [], []) for t in traces
    ]
    by_step = [list(itertools.chain(*devices)) for devices in zip(*(t.devices for t in by_process), strict=True)]
    regimes.check_run(job, dtype, by_step)
    alone = regimes.trace_of(*case)  # one process that has all four devices
    for trace in by_process:
        regimes.check_equal(job, trace, job, alone, regimes.TOLERANCE[dtype])


@pytest.mark.thorough(0)
def test_processes_write_one_model_tensor_by_tensor(traces):
    folder, whole = traces[0], process_worker.weights()
    with safetensors.safe_open(folder / "fp8.safetensors", framework="np") as file:
        assert {k: file.get_slice(k).get_dtype() for k in file.keys()} == {
            "dense.bias": "BF16", "dense.weight": "F8_E4M3", "dense.weight_scale": "F32"
        }  # fmt: skip
    assert_moved(jaxmp.checkpoint.load_safetensors(folder / "model", whole), whole)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(x.name for x in (folder / "model").iterdir()) == [*shards, "model.safetensors.index.json"]
    errors = [(folder / f"{rank}.error").read_text() for rank in range(PROCESSES)]
    assert "Not a directory" in errors[0] and "process 0, which writes, could not write" in errors[1]


@pytest.mark.thorough(0)
def test_4_processes_go_on_as_2_and_as_4_after_one_was_killed_in_a_save(tmp_path):
    """Params are cut over all processes; what an earlier life saved is restored in every bit."""
    lives = []
    for processes, killed_in, steps in ((4, 2, 9), (2, 4, 9), (4, None, 7)):
        (tmp_path / "elastic.json").write_text(json.dumps({"kill_in_save_of": killed_in, "steps": steps}))
        workers, logs = start(resume_worker.__file__, tmp_path, processes, 1)
        if killed_in is None:
            finish(workers, logs)
        else:
            wait_for_the_kill(workers, logs, tmp_path)
        lives.append((tmp_path / "0.log").read_text().splitlines())
        (tmp_path / "0.log").write_text("")
    known = {}
    for number, lines in enumerate(lives):
        for line in lines:
            what, *rest = line.split()
            if what == "restored":
                assert known[rest[0]] == rest[1], f"life {number} restored other bits of step {rest[0]}"
            elif what != "end":
                known[what] = rest[0]
    assert [lines[0].split()[:2] for lines in lives[1:]] == [["restored", "1"], ["restored", "3"]]
    assert lives[2][-1] == "end" and lives[2][-2].startswith("6 ")


@pytest.mark.thorough(0)
def test_processes_go_on_bit_for_bit_after_one_of_them_was_killed(tmp_path):
    """One process overflows, one dies between two checkpoints, both are killed and started again."""
    bad = resume_worker.BAD_RANK
    workers, logs = start(resume_worker.__file__, tmp_path, PROCESSES, 1)
    wait_for_the_kill(workers, logs, tmp_path)
    first = [(tmp_path / f"{rank}.log").read_text().splitlines() for rank in range(PROCESSES)]
    finish(*start(resume_worker.__file__, tmp_path, PROCESSES, 1))
    for rank, lines in enumerate(first):
        before = {line.split()[0]: line for line in lines}
        restored, *again, end = (tmp_path / f"{rank}.log").read_text().splitlines()[len(lines) :]
        assert (restored, end) == ("restored 5", "end")
        after = {line.split()[0]: line for line in again}
        assert list(after) == ["6", "7", "8"]
        assert all(after[step] == before[step] for step in before if step in after)
        assert {"6", "7"} <= set(before) or rank != bad
        skipped = {step: line.endswith("True") for step, line in before.items()}
        assert [step for step, was in skipped.items() if was] == [str(resume_worker.BAD_STEP)]
    assert len({lines[0].split()[1] for lines in first}) == PROCESSES  # each holds a part of its own
