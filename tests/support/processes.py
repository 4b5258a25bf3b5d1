"""Starts the processes of a job, joined by `jax.distributed`, and waits for them."""

import os
import pathlib
import socket
import subprocess
import sys

from helpers import compiled_quickly

HANGS_AFTER = 300  # seconds; a run takes about ten


def start(script, folder, processes, devices, *arguments):
    """The processes, not waited for, and the files in `folder` that hold what they print.

    Each runs `script <rank> <processes> <port> <folder> *arguments`, and has so many simulated devices.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    logs = [(folder / f"{rank}.out").open("w+") for rank in range(processes)]
    workers = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(processes), str(port), str(folder), *map(str, arguments)],
            env=compiled_quickly(environment),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    return workers, logs


def wait(workers, logs):
    """Waits for the ends of processes. -> their exit codes"""
    try:
        return [worker.wait(HANGS_AFTER) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        for log in logs:
            log.close()


def finish(workers, logs):
    """Waits for processes, which have to end well."""
    codes = wait(workers, logs)
    assert codes == [0] * len(workers), "\n".join(pathlib.Path(log.name).read_text()[-3000:] for log in logs)
