"""Real processes, joined by `jax.distributed`: an overflow in one of them. A death is in test_lives.py."""

import itertools
import pickle

import jax
import numpy as np
import pytest
import safetensors

import jaxmp
import process_worker
import regimes
from helpers import assert_moved
from processes import finish, start

PROCESSES = 2


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
