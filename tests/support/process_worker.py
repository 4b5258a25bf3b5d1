"""One of the processes of test_processes.py: `process_worker.py <rank> <processes> <port> <folder>`.

Trains each job with the devices of all processes and saves what its own devices hold after every step: a pickle of
{job: (leaves[step][device], losses)}.
"""

import pathlib
import pickle
import sys

import jax

import regimes

JOBS = (("pmap", "plain", "fp16", 1), ("jit_fsdp", "plain", "fp16", 1))


def main(rank: int, processes: int, port: int, folder: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=rank)
    assert jax.process_count() == processes
    assert jax.device_count() == regimes.DEVICES
    assert jax.local_device_count() == regimes.DEVICES // processes
    traces = {case: regimes.trace_of(*case) for case in JOBS}
    leaves = {
        case: ([[jax.tree.leaves(s) for s in copies] for copies in t.devices], t.losses) for case, t in traces.items()
    }
    (pathlib.Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(leaves))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
