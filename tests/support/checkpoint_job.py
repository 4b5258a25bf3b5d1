"""A job that trains, saves every step and is killed at any moment, again and again: what it leaves must go on.

One process imports what is needed and forks a child for each life of the job. A child restores the newest checkpoint,
trains and saves until it is killed with SIGKILL. It writes down, in a file that survives it, what it restored, what it
was at each step and which saves were finished. At the end the parent trains the same steps without a break and
compares digests of every bit of params and state.

With `--elastic` each life has another number of devices: params are cut over them, and padded. Then a restore must have
the bits of the step that an earlier life saved, padding aside, and the trained weights lie by those of the unbroken run
on one device within the rounding of the gradients.

    python tests/support/checkpoint_job.py --kills 50 [--elastic]
"""

import functools
import json
import os
import pathlib
import random
import signal
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import campaigns
import helpers
import jaxmp

POLICY, SIDE = "fp16", 34  # which neither 3 nor 4 nor 8 devices divide
DEVICES = (1, 2, 3, 4, 8)


def make_job(devices=1):
    """(params32, tx, layout, shardings, step): a model in float16 whose loss scale moves, and which skips steps."""
    scale = jaxmp.DynamicLossScale(2.0**15, growth_interval=3, hysteresis=1)
    tx = jaxmp.mixed_precision(optax.chain(optax.adamw(1e-2), jaxmp.ema_params(0.9)), POLICY, loss_scale=scale)
    rng = np.random.default_rng(0)
    params32 = {f"w{i}": jnp.asarray(rng.normal(size=(SIDE, SIDE)) / 6, jnp.float32) for i in range(2)}

    def loss_fn(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def train_step(params, opt_state, x, loss_fn=loss_fn):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    if devices == 1:
        return params32, tx, None, None, jax.jit(train_step, donate_argnums=(0, 1))
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    layout = jaxmp.fsdp.layout_of(params32, mesh, min_size=1)
    padded = jaxmp.fsdp.pad(params32, layout)
    shardings = (layout.shardings, jaxmp.sharding_of(tx, padded, layout.shardings))
    step = functools.partial(train_step, loss_fn=lambda params, x: loss_fn(jaxmp.fsdp.gather(params, layout), x))
    return padded, tx, layout, shardings, jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)


def batch(step):
    x = np.random.default_rng(step).normal(size=(8, SIDE)).astype(np.float16)
    return x if step % 7 else np.full_like(x, np.inf)  # every seventh step overflows


def digest(tree, layout=None):
    """A number for every bit of a tree, padding aside."""
    return helpers.digest(tree if layout is None else jaxmp.fsdp.trim(tree, layout))


def live(directory, log, parent, devices):
    """One life: from the newest checkpoint on, until somebody kills it."""
    params32, tx, layout, shardings, train_step = make_job(devices)
    params = jaxmp.get_policy(POLICY).cast_to_param(params32)
    params = params if layout is None else jax.device_put(params, layout.shardings)
    with jaxmp.checkpoint.manager(directory, max_to_keep=2) as manager:
        step, opt_state = -1, None
        if manager.latest_step() is None:
            opt_state = tx.init(params32)
            opt_state = opt_state if shardings is None else jax.device_put(opt_state, shardings[1])
        else:
            step, params, opt_state, *_ = jaxmp.checkpoint.restore(manager, tx, params=params, layout=layout)
        os.write(log, f"restored {step} {digest((params, opt_state), layout)}\n".encode())
        finished = step
        while os.getppid() == parent:  # it ends when its parent has ended
            step += 1
            params, opt_state = train_step(params, opt_state, batch(step))
            os.write(log, f"step {step} {digest((params, opt_state), layout)}\n".encode())
            jaxmp.checkpoint.save(manager, step, params=params, opt_state=opt_state, layout=layout)
            if finished >= 0:  # a save waits for the one before it
                os.write(log, f"finished {finished} -\n".encode())
            finished = step


def run(directory, kills, seconds, seed=0, choices=(1,)):
    """Kills the job `kills` times; [one record for each life: what it restored, reached and had finished]."""
    lives, chance, parent = [], random.Random(seed), os.getpid()
    log_path = pathlib.Path(directory) / "log"
    for number in helpers.shown(range(kills), "kills"):
        log_path.write_text("")
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
        others = [n for n in choices if not lives or n != lives[-1]["devices"]]
        devices = chance.choice(others or choices)
        child = os.fork()
        if child == 0:
            try:
                live(pathlib.Path(directory) / "steps", log, parent, devices)
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
        lives.append({"killed": os.WIFSIGNALED(status), "lines": lines, "devices": devices})
    return lives


def _has_ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def unbroken(last):
    """The run that was never killed: (step, params, opt_state) from before the first step, -1, on."""
    params32, tx, _, _, train_step = make_job()
    params, opt_state = jaxmp.get_policy(POLICY).cast_to_param(params32), tx.init(params32)
    yield -1, params, opt_state
    for step in range(last + 1):
        params, opt_state = train_step(params, opt_state, batch(step))
        yield step, params, opt_state


def judge(lives):
    """Compares all lives with one that was never killed. -> a summary; an AssertionError says what was lost."""
    elastic = any(life["devices"] > 1 for life in lives)
    last = max(int(n) for life in lives for what, n, _ in life["lines"] if what != "finished")
    twin = {}
    for step, params, opt_state in unbroken(last):
        twin[step] = digest((params, opt_state))
        skipped = int(opt_state.skipped_steps)
    # With other devices a step rounds its gradients in another way: what an earlier life was at a step may be restored.
    seen = {-1: {twin[-1]}}
    finished, reached, lost, steps, moves = -1, -1, [], 0, set()
    before = None
    for life in lives:
        assert life["killed"], f"a life ended by itself: {life['lines'][-3:]}"
        if not life["lines"]:
            continue
        (what, restored, _), *_ = life["lines"]
        assert what == "restored"
        assert int(restored) >= finished, f"step {finished} was finished, but {restored} was restored"
        lost.append(reached - int(restored))
        if before is not None and int(restored) >= 0 and before != life["devices"]:
            moves.add((before, life["devices"]))
        before = life["devices"]
        for what, step, found in life["lines"]:
            step = int(step)
            if what == "step":
                steps += 1
                seen.setdefault(step, set()).add(found)
                assert elastic or found == twin[step], f"step {step} differs from the twin"
            elif what == "restored":
                assert found in seen[step], f"what was restored of step {step} is not what was saved"
            else:
                finished = max(finished, step)
        reached = max(int(n) for _, n, _ in life["lines"])
    return {
        "kills": len(lives),
        "steps_trained": steps,
        "last_step": last,
        "skipped_steps_of_the_twin": skipped,
        "most_steps_trained_again": max(lost),
        "killed_before_it_had_restored": len(lives) - len(lost),
        "restored_bit_for_bit": len(lost),
        "restored_on_other_devices": sorted(f"{old} to {new}" for old, new in moves),
    }


def distance(directory):
    """How far the trained weights lie from those of the unbroken run at the same step, as a share of their way."""
    params32, tx, _, _, _ = make_job()
    params = jaxmp.get_policy(POLICY).cast_to_param(params32)
    with jaxmp.checkpoint.manager(directory) as steps:
        if steps.latest_step() is None:  # all lives were short
            return 0.0
        step, params, opt_state, *_ = jaxmp.checkpoint.restore(steps, tx, params=params)
    masters = jaxmp.get_master_params(opt_state, params)
    *_, (_, params, opt_state) = unbroken(step)
    twin = jaxmp.get_master_params(opt_state, params)
    norm = lambda a, b: float(np.sqrt(sum(np.sum(np.square(a[k] - b[k])) for k in a)))  # noqa: E731
    return norm(masters, twin) / max(norm(twin, params32), 1e-6)


def main():
    parser = campaigns.parser_of(__doc__, "--kills", 50)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long a life may last; of most, from its first step"
    )
    parser.add_argument("--elastic", action="store_true", help="another number of devices in each life")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        steps = pathlib.Path(directory) / "steps"
        lives = run(directory, args.kills, args.seconds, args.seed, DEVICES if args.elastic else (1,))
        left = sorted(x.name for x in steps.iterdir() if not x.name.startswith("."))
        record = judge(lives) | {"left_behind": left}
        if args.elastic:
            record["share_of_the_way_from_the_twin"] = share = round(distance(steps), 5)
            # Adam's first step goes by the signs of the gradients: one of 2,312 that rounds to the other side of zero
            # is 0.04 of the way. A step that is lost is far more, at any length.
            most = max(0.02, 0.2 / (1 + record["last_step"]))
            assert share < most, f"the weights lie {share} of their way from those of the unbroken run"
    record["versions"] = campaigns.versions("orbax-checkpoint")
    flags = f"--kills {args.kills} --seed {args.seed}" + " --elastic" * args.elastic
    record["command"] = f"python tests/support/checkpoint_job.py {flags}"
    print(json.dumps(record, indent=2))
    campaigns.save(args.json, campaigns.read(args.json) | {"elastic" if args.elastic else "one_device": record})


if __name__ == "__main__":
    main()
