"""One of the processes of test_processes.py that are killed: `resume_worker.py <rank> <processes> <port> <folder>`.

Trains params that are cut over all processes, saves every third step, and writes down after each step what its own
part is: lines of "<step> <digest> <loss scale> <skipped>". In its first life one of the processes kills itself between
two saves. Started again they go on from the newest checkpoint.

With a file `elastic.json` in the folder the number of processes differs between lives, and with it the padding: lines
have the digest of all params and state without padding, and one process may be killed while a step is saved:
{"kill_in_save_of": step or null, "steps": how many}.
"""

import json
import os
import pathlib
import signal
import sys
import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import helpers
import jaxmp
import regimes

STEPS, EVERY, BAD_STEP, BAD_RANK, DIES_AFTER = 9, 3, 4, 1, 7


def digest_of_all(tree, layout):
    """A number for every bit of a tree that is cut over the processes, padding aside. All processes call it."""
    trimmed = jax.jit(lambda tree: jaxmp.fsdp.trim(tree, layout), out_shardings=NamedSharding(layout.mesh, P()))(tree)
    return helpers.digest(trimmed, lambda x: np.asarray(x.addressable_data(0)))


def digest(tree):
    return helpers.digest(tree, lambda x: np.asarray(x.addressable_shards[0].data))


def batch_of(step):
    """The same on every process; the overflow is in the rows of one."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(regimes.BATCH, regimes.FEATURES)).astype(np.float32)
    rows = regimes.BATCH // jax.process_count()
    if step == BAD_STEP:
        x[BAD_RANK * rows, 3] = np.inf
    return {"x": x, "y": rng.normal(size=(regimes.BATCH, regimes.OUTPUTS)).astype(np.float32)}


def main(rank, processes, port, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=rank)
    mesh = jax.make_mesh((processes,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    policy = jaxmp.get_policy("fp16", keep_fp32=("*ln*",))
    tx = jaxmp.mixed_precision(regimes.optimizer(), policy, loss_scale=regimes.loss_scale_of("fp16"))
    plan_file = pathlib.Path(folder) / "elastic.json"
    plan = json.loads(plan_file.read_text()) if plan_file.exists() else None
    params32 = jax.tree.map(np.asarray, regimes.plain_params())
    layout = jaxmp.fsdp.layout_of(params32, mesh, min_size=32)
    padded = jax.tree.map(np.asarray, jaxmp.fsdp.pad(params32, layout))
    shardings = (layout.shardings, jaxmp.sharding_of(tx, padded, layout.shardings))

    def start():
        return policy.cast_to_param(padded), tx.init(padded)

    def loss_fn(params, batch):
        return regimes.plain_loss(jaxmp.fsdp.gather(params, layout), batch)

    def step_fn(params, opt_state, batch):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    params, opt_state = jax.jit(start, out_shardings=shardings)()
    train_step = jax.jit(step_fn, out_shardings=shardings)
    rows = NamedSharding(mesh, P("fsdp"))
    with jaxmp.checkpoint.manager(pathlib.Path(folder) / "steps") as steps, open(f"{folder}/{rank}.log", "a") as log:
        first = 0
        if steps.latest_step() is not None:
            step, params, opt_state, *_ = jaxmp.checkpoint.restore(steps, tx, params=params, layout=layout)
            first = step + 1
            of_all = f" {digest_of_all((params, opt_state), layout)}" if plan else ""
            print(f"restored {step}{of_all}", file=log, flush=True)
        for step in range(first, plan["steps"] if plan else STEPS):
            whole = batch_of(step)
            batch = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows, lambda i, x=x: x[i]), whole)
            params, opt_state = train_step(params, opt_state, batch)
            metrics = jaxmp.get_metrics(opt_state)
            line = f"{step} {digest((params, opt_state))} {float(metrics['loss_scale'])} {bool(metrics['skipped'])}"
            print(f"{step} {digest_of_all((params, opt_state), layout)}" if plan else line, file=log, flush=True)
            if plan:
                jaxmp.checkpoint.save(steps, step, params=params, opt_state=opt_state, layout=layout)
                if step == plan["kill_in_save_of"]:  # its part is being written
                    os.kill(os.getpid(), signal.SIGKILL) if rank == BAD_RANK else signal.pause()
                steps.wait_until_finished()
                continue
            if first == 0 and step == DIES_AFTER:
                os.kill(os.getpid(), signal.SIGKILL) if rank == BAD_RANK else signal.pause()
            if step % EVERY == EVERY - 1 and step + 1 < STEPS:
                jaxmp.checkpoint.save(steps, step, params=params, opt_state=opt_state, layout=layout)
                steps.wait_until_finished()
        print("end", file=log, flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
