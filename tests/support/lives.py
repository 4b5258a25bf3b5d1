"""A job of several lives: each is spread over other devices in another way, and goes on from what the last one saved.

    lives.live(way, devices, directory, kind, steps) -> the step that was restored, what it held, and what was saved

All ways train the same steps: the batch of a step follows from its number, and each way takes the mean over all rows.
As a program it is one of the processes of a life that several of them share; steps lie in `folder/steps`. With `dies`,
the last process kills itself in the save, and the others go on:
`lives.py <rank> <processes> <port> <folder> <kind> <steps> [dies]`.
"""

import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import helpers
import jaxmp

AXIS, ROWS, BAD_STEP = "data", 24, 5
# name -> (policy, optimizer from its clip, options); a large eps, so that no rounding decides a step alone
KINDS = {
    "fp16": (
        "fp16",
        lambda clip: optax.chain(clip, optax.adamw(1e-2, eps=1e-3)),
        lambda: {"loss_scale": jaxmp.DynamicLossScale(2.0**10, growth_interval=3)},
    ),
    "split": ("bf16", lambda clip: jaxmp.fused_adamw(1e-2, eps=1e-3), lambda: {"remainder_bits": 16}),
}


def params_of() -> dict[str, Any]:
    """Sides that no number of devices divides, and a leaf that is smaller than it."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)  # noqa: E731
    return {"in": {"w": draw(13, 17), "b": jnp.zeros(17)}, "ln": jnp.ones(17), "out": {"w": draw(17, 5)}}


def batch_of(step: int) -> dict[str, np.ndarray]:
    """The rows of a step; one of them overflows in the bad one."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(ROWS, 13)).astype(np.float32)
    if step == BAD_STEP:
        x[ROWS - 2, 3] = np.inf
    return {"x": x, "y": np.tanh(x[:, :5]) * (step != BAD_STEP) + 0.1}


def loss_fn(params: Any, batch: Any) -> Any:
    w, b, gain = params["in"]["w"], params["in"]["b"], params["ln"]
    h = jnp.tanh(batch["x"].astype(w.dtype) @ w + b.astype(w.dtype)[None])
    h = h.astype(jnp.float32) * gain.astype(jnp.float32)[None]
    out = h.astype(w.dtype) @ params["out"]["w"]
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


def optimizer(kind: str, way: str, layout: Any) -> tuple[Any, Any]:
    """(policy, tx); where each device has its own gradients, `tx` averages them, or its clip does over the parts."""
    name, inner, options = KINDS[kind]
    policy = jaxmp.get_policy(name, keep_fp32=("ln",))
    options = options() | ({"before": jaxmp.reduce_gradients(AXIS)} if way in ("shard_map", "pmap") else {})
    parts = {"axis_name": AXIS, "replicated": layout.whole} if way == "fsdp in shard_map" else {}
    return policy, jaxmp.mixed_precision(inner(jaxmp.clip_by_global_norm(1.0, **parts)), policy, **options)


def step_of(tx: Any, loss_fn: Any = loss_fn, reduce: Any = lambda grads: grads) -> Any:
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        _, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, reduce(grads), opt_state, params)

    return step


def live(
    way: str, devices: int, directory: Any, kind: str, steps: int, in_save: Callable[..., None] = lambda *_: None
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Trains so many steps from the newest step on, or from the start, and saves the last one."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    params32, layout = params_of(), None
    rows = NamedSharding(mesh, P(AXIS))
    if way.startswith("fsdp"):
        layout = jaxmp.fsdp.layout_of(params32, mesh, AXIS, min_size=20)
        params32 = jax.eval_shape(lambda tree: jaxmp.fsdp.pad(tree, layout), params32)
        shardings = layout.shardings
    else:
        cuts = lambda x: P(AXIS) if way == "jit" and x.shape[0] % devices == 0 else P()  # noqa: E731
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, cuts(x)), params32)
    policy, tx = optimizer(kind, way, layout)
    of_state = jaxmp.sharding_of(tx, params32, shardings)

    def start() -> Any:
        params32 = params_of() if layout is None else jaxmp.fsdp.pad(params_of(), layout)
        return policy.cast_to_param(params32), tx.init(params32)

    def place(batch: Any) -> Any:
        if way == "pmap":
            return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows, lambda index: x[index]), batch)

    whole_loss: Any = loss_fn
    if layout is not None:
        whole_loss = lambda params, batch: loss_fn(jaxmp.fsdp.gather(params, layout), batch)  # noqa: E731
    if way in ("jit", "fsdp"):
        step = jax.jit(step_of(tx, whole_loss), out_shardings=(shardings, of_state))
    elif way == "pmap":
        step = jax.pmap(step_of(tx), axis_name=AXIS, devices=jax.devices()[:devices])
    else:
        is_fsdp, specs = layout is not None, jax.tree.map(lambda s: s.spec, (shardings, of_state))
        reduce = functools.partial(jaxmp.fsdp.reduce_gradients, layout=layout) if is_fsdp else lambda grads: grads
        parts = step_of(tx, whole_loss, reduce)
        step = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=specs))

    with jaxmp.checkpoint.manager(directory) as manager:
        params, opt_state = jax.jit(start, out_shardings=(shardings, of_state))()
        restored = -1
        if manager.latest_step() is not None:
            restored, params, opt_state, *_ = jaxmp.checkpoint.restore(manager, tx, params=params, layout=layout)
        before = compared(params, opt_state, layout)
        if way == "pmap":
            copies = functools.partial(flax.jax_utils.replicate, devices=jax.devices()[:devices])
            params, opt_state = copies(jax.tree.map(np.asarray, (params, opt_state)))
        for number in range(restored + 1, restored + 1 + steps):
            params, opt_state = step(params, opt_state, place(batch_of(number)))
        if way == "pmap":
            params, opt_state = jax.tree.map(lambda x: np.asarray(x[0]), (params, opt_state))
        life = restored, before, compared(params, opt_state, layout)
        jaxmp.checkpoint.save(manager, number, params=params, opt_state=opt_state, layout=layout)
        in_save(*life)
    return life


def compared(params: Any, opt_state: Any, layout: Any) -> dict[str, Any]:
    """Masters, moments and counts, whole on each process."""

    def whole(params: Any, opt_state: Any) -> dict[str, Any]:
        if layout is not None:
            params, opt_state = jaxmp.fsdp.trim((params, opt_state), layout)
        counts = {name: jaxmp.get_metrics(opt_state)[name] for name in ("skipped_steps", "loss_scale")}
        return {
            "masters": jaxmp.get_master_params(opt_state, params),
            "moments": {name: optax.tree.get(opt_state, name) for name in ("mu", "nu")},
            "counts": counts | {"count": optax.tree.get(opt_state, "count")},
        }

    where = {} if layout is None else {"out_shardings": NamedSharding(layout.mesh, P())}
    trees = jax.jit(whole, **where)(params, opt_state)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), trees)


def main(rank: int, processes: int, port: int, folder: str, kind: str, steps: int, *, dies: bool) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeout = {"heartbeat_timeout_seconds": 20} if dies else {}  # 100 is the default
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=rank, **timeout)

    def in_save(restored: int, before: Any, after: Any) -> None:
        of_before, of_after = map(helpers.digest, (before, after))
        print(f"restored {restored} {of_before}; saved {restored + steps} {of_after}", flush=True)
        if dies and rank == processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    live("fsdp", jax.device_count(), pathlib.Path(folder) / "steps", kind, steps, in_save)
    jax.distributed.shutdown()


if __name__ == "__main__":
    rank, processes, port, folder, kind, steps, *rest = sys.argv[1:]
    main(int(rank), int(processes), int(port), folder, kind, int(steps), dies=rest == ["dies"])
