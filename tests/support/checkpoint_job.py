"""A job that trains, saves every step and is killed at any moment, again and again: what it leaves must go on.

One process imports what is needed and forks a child for each life of the job. A child restores the newest checkpoint,
trains and saves until it is killed with SIGKILL. It writes down, in a file that survives it, what it restored, what it
was at each step and which saves were finished. At the end the parent trains the same steps without a break and
compares digests of every bit of params and state.

    python tests/support/checkpoint_job.py --kills 50
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp

POLICY, SIDE = "fp16", 32
# What is not pure: the imports that every life would pay again.
_orbax = jaxmp._src.checkpoint.orbax.package()


def make_job():
    """(params32, tx, train_step): a small model in float16 whose loss scale moves, and which skips steps."""
    scale = jaxmp.DynamicLossScale(2.0**15, growth_interval=3, hysteresis=1)
    tx = jaxmp.mixed_precision(optax.chain(optax.adamw(1e-2), jaxmp.ema_params(0.9)), POLICY, loss_scale=scale)
    rng = np.random.default_rng(0)
    params32 = {f"w{i}": jnp.asarray(rng.normal(size=(SIDE, SIDE)) / 6, jnp.float32) for i in range(2)}

    def loss_fn(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def train_step(params, opt_state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    return params32, tx, jax.jit(train_step, donate_argnums=(0, 1))


def batch(step):
    x = np.random.default_rng(step).normal(size=(8, SIDE)).astype(np.float16)
    return x if step % 7 else np.full_like(x, np.inf)  # every seventh step overflows


def digest(tree):
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()[:16]


def live(directory, log, parent):
    """One life: from the newest checkpoint on, until somebody kills it."""
    params32, tx, train_step = make_job()
    params = jaxmp.get_policy(POLICY).cast_to_param(params32)
    with jaxmp.checkpoint.manager(directory, max_to_keep=2) as manager:
        step, opt_state = -1, None
        if manager.latest_step() is None:
            opt_state = tx.init(params32)
        else:
            step, params, opt_state, _ = jaxmp.checkpoint.restore(manager, tx, params=params)
        os.write(log, f"restored {step} {digest((params, opt_state))}\n".encode())
        finished = step
        while os.getppid() == parent:  # it ends when its parent has ended
            step += 1
            params, opt_state = train_step(params, opt_state, batch(step))
            os.write(log, f"step {step} {digest((params, opt_state))}\n".encode())
            jaxmp.checkpoint.save(manager, step, params=params, opt_state=opt_state, policy=POLICY)
            if finished >= 0:  # a save waits for the one before it
                os.write(log, f"finished {finished} -\n".encode())
            finished = step


def run(directory, kills, seconds, seed=0):
    """Kills the job `kills` times; [one record for each life: what it restored, reached and had finished]."""
    lives, chance, parent = [], random.Random(seed), os.getpid()
    log_path = pathlib.Path(directory) / "log"
    for number in range(kills):
        log_path.write_text("")
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
        child = os.fork()
        if child == 0:
            try:
                live(pathlib.Path(directory) / "steps", log, parent)
            finally:  # nobody killed it: it failed
                traceback.print_exc()
                os._exit(1)
        os.close(log)
        # Most die while they train and save; some already while they start, clean up and read.
        trains = number in (0, kills - 1) or chance.random() < 0.7
        while trains and "step" not in log_path.read_text() and not _has_ended(child):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        lines = [line.split() for line in log_path.read_text().splitlines()]
        lives.append({"killed": os.WIFSIGNALED(status), "lines": lines})
    return lives


def _has_ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def judge(lives):
    """Compares all lives with one that was never killed. -> a summary; an AssertionError says what was lost."""
    last = max(int(n) for life in lives for what, n, _ in life["lines"] if what != "finished")
    params32, tx, train_step = make_job()
    params, opt_state = jaxmp.get_policy(POLICY).cast_to_param(params32), tx.init(params32)
    twin = {-1: digest((params, opt_state))}
    for step in range(last + 1):
        params, opt_state = train_step(params, opt_state, batch(step))
        twin[step] = digest((params, opt_state))
    finished, reached, lost, steps = -1, -1, [], 0
    for life in lives:
        assert life["killed"], f"a life ended by itself: {life['lines'][-3:]}"
        if not life["lines"]:
            continue
        (what, restored, _), *_ = life["lines"]
        assert what == "restored"
        assert int(restored) >= finished, f"step {finished} was finished, but {restored} was restored"
        lost.append(reached - int(restored))
        for what, step, seen in life["lines"]:
            assert what == "finished" or seen == twin[int(step)], f"{what} {step} differs from the twin"
            steps += what == "step"
            finished = max(finished, int(step)) if what == "finished" else finished
        reached = max(int(n) for _, n, _ in life["lines"])
    return {
        "kills": len(lives),
        "steps_trained": steps,
        "last_step": last,
        "skipped_steps_of_the_twin": int(opt_state.skipped_steps),
        "most_steps_trained_again": max(lost),
        "killed_before_it_had_restored": len(lives) - len(lost),
        "restored_bit_for_bit": len(lost),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long a life may last; of most, from its first step"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where to write the record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lives = run(directory, args.kills, args.seconds, args.seed)
        left = sorted(x.name for x in (pathlib.Path(directory) / "steps").iterdir())
    record = judge(lives) | {"left_behind": left, "versions": {"jax": jax.__version__, "orbax": _orbax.__version__}}
    record["command"] = f"python tests/support/checkpoint_job.py --kills {args.kills} --seed {args.seed}"
    text = json.dumps(record, indent=2)
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
