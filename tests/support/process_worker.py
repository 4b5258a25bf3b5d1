"""One of the processes of test_processes.py: `process_worker.py <rank> <processes> <port> <folder>`.

Trains each job with the devices of all processes and saves what its own devices hold after every step: a pickle of
{job: (leaves[step][device], losses)}. Then it writes weights that are split over the processes, and reads them.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
import regimes
from helpers import assert_exact

JOBS = (("pmap", "plain", "fp16", 1), ("jit_fsdp", "plain", "fp16", 1))


def weights() -> dict[str, dict[str, np.ndarray]]:
    """The weights that the processes write: the kernel is cut over all devices, the bias is whole on each."""
    rng = np.random.default_rng(0)
    return {"dense": {"kernel": rng.normal(size=(8, 12)).astype(np.float32), "bias": np.ones(3, np.float32)}}


def write_and_read(folder: pathlib.Path) -> str:
    """Writes split weights from their split masters, reads them back. -> the error of an impossible path."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16", remainder_bits=16)
    policy, whole = jaxmp.get_policy("bf16"), weights()
    layout = jaxmp.fsdp.layout_of(whole, mesh, min_size=32)
    shardings = (layout.shardings, jaxmp.sharding_of(tx, whole, layout.shardings))
    params, opt_state = jax.jit(lambda: (policy.cast_to_param(whole), tx.init(whole)), out_shardings=shardings)()
    save = jaxmp.checkpoint.save_safetensors
    full = jax.jit(jaxmp.get_master_params, out_shardings=layout.shardings)(opt_state, params)
    save(folder / "model", full, dtype=jnp.float32, max_shard_size=100)
    save(folder / "fp8.safetensors", full, dtype=jnp.float8_e4m3fn, layout="torch")
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), whole, layout.shardings)
    loaded = jaxmp.checkpoint.load_safetensors(folder / "model", like)
    for x, like_x, expected in zip(*map(jax.tree.leaves, (loaded, like, whole)), strict=True):
        assert x.sharding == like_x.sharding
        for shard in x.addressable_shards:
            assert_exact(shard.data, expected[shard.index])
    (folder / "a file").touch()
    try:
        save(folder / "a file" / "model", params, max_shard_size=100)
    except OSError as e:
        return str(e)
    return "no error"


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
    (pathlib.Path(folder) / f"{rank}.error").write_text(write_and_read(pathlib.Path(folder)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
