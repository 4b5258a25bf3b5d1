"""Two real processes with two devices each, joined by `jax.distributed`, and an overflow in one of them."""

import itertools
import os
import pathlib
import pickle
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import process_worker
import regimes
from helpers import compiled_quickly

pytestmark = pytest.mark.xdist_group("regimes")  # shares traces with test_regimes.py

PROCESSES = 2
HANGS_AFTER = 300  # seconds; a run takes about ten


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """What each process saved."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={regimes.DEVICES // PROCESSES}")
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(PROCESSES)]
    workers = [
        subprocess.Popen(
            [sys.executable, process_worker.__file__, str(rank), str(PROCESSES), str(port), str(folder)],
            env=compiled_quickly(environment),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [worker.wait(HANGS_AFTER) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        for log in logs:
            log.close()
    assert codes == [0] * PROCESSES, "\n".join(pathlib.Path(log.name).read_text()[-3000:] for log in logs)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", process_worker.JOBS, ids=lambda case: case[0])
def test_processes_decide_as_one(traces, case):
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


def test_the_overflow_is_in_the_data_of_one_process():
    ours, others = np.split(np.arange(regimes.BATCH), PROCESSES)
    assert regimes.BAD_ROW in ours
    assert regimes.BAD_ROW not in others
    assert jax.process_count() == 1  # here
