#!/usr/bin/env python
"""A PyTorch AMP loop, ported: the same training in float32, with a GradScaler, and in jaxmp's own way.

    python examples/port_torch_amp.py                    (or --framework nnx)

A small CNN with BatchNorm learns handwritten digits. The PyTorch lines are comments beside the lines that replace
them, in `scaler_loop` (the closest port: `jaxmp.autocast` and `jaxmp.GradScaler`) and in `native_loop` (fewer lines,
no call to forget: the loss scale is in the optimizer's state). The model has no dtype in any of them. This is the loop
to port, in PyTorch:

    model, scaler = CNN().cuda(), torch.amp.GradScaler("cuda", init_scale, growth_interval=100, enabled=use_amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=use_amp):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

The first scale is too high, so both loops skip their first steps. Expect about this, in half a minute on two
cores:

     loop         train  held-out  accuracy  skips  loss scale  params
    ──────────────────────────────────────────────────────────────────
     fp32        0.0104    0.1179     96.4%      0           1   25 kB
     GradScaler  0.0106    0.1228     96.9%      3      131072   25 kB
     native      0.0106    0.1244     96.7%      3      131072   12 kB

    GradScaler step 0: skipped, loss scale 524288 -> 262144
    GradScaler step 1: skipped, loss scale 262144 -> 131072
    GradScaler step 2: skipped, loss scale 131072 -> 65536
    GradScaler step 102: loss scale 65536 -> 131072
    native step 0: skipped, loss scale 524288 -> 262144
    ...
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import jaxmp

DIGITS = Path(__file__).parent / "data" / "digits.npz"  # see its "source": UCI, CC BY 4.0, by way of scikit-learn


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained. The defaults are for two CPU cores."""

    framework: Literal["linen", "nnx"] = "linen"
    loops: tuple[Literal["fp32", "GradScaler", "native"], ...] = ("fp32", "GradScaler", "native")
    steps: int = 200
    batch_size: int = 64
    width: int = 16
    learning_rate: float = 3e-3
    max_norm: float = 1.0
    init_scale: float = 2.0**19  # too high, to show skips; the default of torch and jaxmp is 2**16
    growth_interval: int = 100  # torch's default is 2000, longer than this run
    seed: int = 0


@dataclasses.dataclass
class Run:
    """The results of one way to train; lists have one entry per step."""

    name: str
    losses: list[float]
    skipped: list[bool]
    scales: list[float]  # after the step
    held_out_loss: float
    accuracy: float
    param_bytes: int
    seconds: float


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(images f32 [N, 8, 8, 1] in 0..1, labels i32 [N]) to train on, and the last fifth, held out."""
    with np.load(DIGITS) as arrays:
        images, labels = arrays["images"].astype(np.float32)[..., None] / 16, arrays["labels"].astype(np.int32)
    cut = len(images) * 4 // 5
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def batches(x: np.ndarray, y: np.ndarray, cfg: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """for x, y in DataLoader(dataset, batch_size, shuffle=True, drop_last=True)"""
    rng, per_epoch = np.random.default_rng(cfg.seed), len(x) // cfg.batch_size
    for step in range(cfg.steps):
        if step % per_epoch == 0:
            order = rng.permutation(len(x))
        at = order[step % per_epoch * cfg.batch_size :][: cfg.batch_size]
        yield x[at], y[at]


class LinenCNN(nn.Module):
    """Two convolutions with BatchNorm, and a layer on top: no dtype anywhere."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:  # f32 [N, 8, 8, 1] -> [N, 10]
        for channels in (self.width, 2 * self.width):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)  # torch calls this momentum 0.1
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class NnxCNN(nnx.Module):
    """The same."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.conv_1 = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv_2 = nnx.Conv(width, 2 * width, (3, 3), use_bias=False, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(8 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in ((self.conv_1, self.norm_1), (self.conv_2, self.norm_2)):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        return self.dense(x.reshape(len(x), -1))


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:  # F.cross_entropy
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# ---------------------------------------------------------------------------------------------------------------------
# The model as two functions, so that the loops below are the same for both frameworks.

Stats = Any  # BatchNorm's statistics, and all other state that is not a param
Forward = Callable[[Any, Stats, jax.Array], tuple[jax.Array, Stats]]


def make_model(cfg: Config) -> tuple[Forward, Forward, Any, Stats]:
    """`(train, eval, params, stats)`: the model in both modes, and its initial values in float32."""
    if cfg.framework == "nnx":
        model = NnxCNN(cfg.width, nnx.Rngs(cfg.seed))
        model.eval()
        in_eval = nnx.graphdef(model)
        model.train()
        in_train, params, stats = nnx.split(model, nnx.Param, ...)
        params, stats = nnx.as_pure(params), nnx.as_pure(stats)  # arrays in place of variables

        def run(graphdef: Any, params: Any, stats: Stats, x: jax.Array) -> tuple[jax.Array, Stats]:
            model = nnx.merge(graphdef, params, stats, copy=True)
            return model(x), nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])

        return functools.partial(run, in_train), functools.partial(run, in_eval), params, stats

    model = LinenCNN(cfg.width)

    def apply(params: Any, stats: Stats, x: jax.Array) -> tuple[jax.Array, Stats]:
        logits, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    def evaluate(params: Any, stats: Stats, x: jax.Array) -> tuple[jax.Array, Stats]:
        return model.apply({"params": params, "batch_stats": stats}, x, train=False), stats

    variables = model.init(jax.random.key(cfg.seed), jnp.zeros((1, 8, 8, 1)))
    return apply, evaluate, variables["params"], variables["batch_stats"]


# ---------------------------------------------------------------------------------------------------------------------
# The closest port. With use_amp=False this is plain float32 training, as in PyTorch.


def scaler_loop(cfg: Config, forward: Forward, params: Any, stats: Stats, use_amp: bool) -> tuple[Any, Any]:
    """`(state, step)`, with `step(state, x, y) -> (state, (loss, skipped, scale))`."""
    tx = optax.adamw(cfg.learning_rate, weight_decay=1e-2)  # optimizer = torch.optim.AdamW(model.parameters(), lr)
    clip = optax.clip_by_global_norm(cfg.max_norm)
    scaler = jaxmp.GradScaler(cfg.init_scale, growth_interval=cfg.growth_interval, enabled=use_amp)

    @jaxmp.autocast(dtype=jnp.float16, enabled=use_amp)  # with torch.autocast("cuda", torch.float16, enabled=use_amp):
    def loss_fn(params: Any, stats: Stats, x: jax.Array, y: jax.Array) -> Any:
        logits, stats = forward(params, stats, x)  # logits = model(x)
        return cross_entropy(logits, y), stats  # loss = F.cross_entropy(logits, y)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, old_stats, opt_state, scaler = state

        def scaled_loss(params: Any) -> Any:
            loss, stats = loss_fn(params, old_stats, x, y)
            return scaler.scale(loss), (loss, stats)

        grads, (loss, stats) = jax.grad(scaled_loss, has_aux=True)(params)  # scaler.scale(loss).backward()
        grads, scaler = scaler.unscale(grads)  # scaler.unscale_(optimizer)
        grads, _ = clip.update(grads, clip.init(params))  # clip_grad_norm_(model.parameters(), max_norm)
        params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)  # scaler.step(optimizer)
        skipped = scaler.found_inf()
        # torch has no such line: its BatchNorm keeps the statistics of a skipped step.
        stats = jax.tree.map(lambda new, old: jnp.where(skipped, old, new), stats, old_stats)
        scaler = scaler.update()  # scaler.update()
        return (params, stats, opt_state, scaler), (loss, skipped, scaler.get_scale())

    return (params, stats, tx.init(params), scaler), step


# ---------------------------------------------------------------------------------------------------------------------
# The native way, with float16 params and their float32 masters in the optimizer.


def native_loop(cfg: Config, forward: Forward, params: Any, stats: Stats) -> tuple[Any, Any]:
    """Like `scaler_loop`."""
    policy = jaxmp.get_policy("fp16", keep_fp32=("*[Nn]orm*",))
    inner = optax.chain(jaxmp.clip_by_global_norm(cfg.max_norm), optax.adamw(cfg.learning_rate, weight_decay=1e-2))
    rule = jaxmp.DynamicLossScale.preset(
        "torch", initial_scale=cfg.init_scale, growth_interval=cfg.growth_interval
    )  # or leave it at "auto"
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=rule)  # the optimizer, the clipping and the GradScaler in one

    def loss_fn(params: Any, stats: Stats, x: jax.Array, y: jax.Array) -> Any:
        logits, stats = forward(params, stats, x)
        return cross_entropy(logits, y), stats

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, old_stats, opt_state = state
        grad_fn = jaxmp.value_and_grad(loss_fn, has_aux=True)
        with jaxmp.autocast(dtype=policy.compute_dtype):  # with torch.autocast("cuda", torch.float16):
            (loss, stats), grads = grad_fn(params, old_stats, x, y, opt_state=opt_state)  # ... scale(loss).backward()
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)  # unscale_, clip, step, update
        stats = jaxmp.keep_if_skipped(opt_state, stats, old_stats)
        metrics = jaxmp.get_metrics(opt_state)
        return (params, stats, opt_state), (loss, metrics["skipped"], metrics["loss_scale"])

    return (policy.cast_to_param(params), stats, tx.init(params)), step


# ---------------------------------------------------------------------------------------------------------------------


def train(cfg: Config, name: str) -> Run:
    """One run: "fp32", "GradScaler" or "native"."""
    started = time.perf_counter()
    (x, y), (held_out_x, held_out_y) = load_digits()
    forward, evaluate, params, stats = make_model(cfg)
    if name == "native":
        state, step = native_loop(cfg, forward, params, stats)
    else:
        state, step = scaler_loop(cfg, forward, params, stats, use_amp=name == "GradScaler")
    history = []
    for batch in batches(x, y, cfg):
        state, measured = step(state, *batch)
        history.append(measured)
    losses, skipped, scales = (np.stack(column).tolist() for column in zip(*jax.device_get(history), strict=True))

    # model.eval(), and with torch.no_grad(), torch.autocast(...): JAX computes no gradients here.
    predict = evaluate if name == "fp32" else jaxmp.autocast(evaluate, jnp.float16)
    logits, _ = jax.jit(predict)(state[0], state[1], held_out_x)
    loss = float(cross_entropy(logits.astype(jnp.float32), held_out_y))
    accuracy = float(np.mean(np.argmax(logits, -1) == held_out_y))
    param_bytes = sum(x.nbytes for x in jax.tree.leaves(state[0]))
    return Run(name, losses, skipped, scales, loss, accuracy, param_bytes, time.perf_counter() - started)


def table(runs: list[Run], cfg: Config) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=f"{cfg.framework}, {cfg.steps} steps")
    out.add_column("loop")
    for name in ("train", "held-out", "accuracy", "skips", "loss scale", "params", "time"):
        out.add_column(name, justify="right")
    for run in runs:
        out.add_row(
            run.name,
            f"{np.mean(run.losses[-20:]):.4f}",  # one batch is noisy
            f"{run.held_out_loss:.4f}",
            f"{100 * run.accuracy:.1f}%",
            str(sum(run.skipped)),
            f"{run.scales[-1]:.0f}",
            f"{run.param_bytes / 1000:.0f} kB",
            f"{run.seconds:.0f} s",
        )
    return out


def main(cfg: Config) -> list[Run]:
    """Trains each way, and prints a table."""
    console = Console(highlight=False)
    runs = [train(cfg, name) for name in cfg.loops]
    console.print(table(runs, cfg))
    for run in runs:
        for i, scale in enumerate(run.scales):
            before = run.scales[i - 1] if i else cfg.init_scale
            if run.skipped[i] or (i and scale != before):
                what = "skipped, " if run.skipped[i] else ""
                console.print(f"{run.name} step {i}: {what}loss scale {before:.0f} -> {scale:.0f}", soft_wrap=True)
    return runs


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
