#!/usr/bin/env python
"""A whole training loop in one file: what a trainer does around a step, in plain lines to copy and to change.

    python examples/loop.py                          half a minute on two CPU cores; the same command again goes on
    python examples/loop.py --policy fp16 --out runs/fp16 --tensorboard
    python examples/loop.py --peak-tflops 989        with MFU: this is the peak of an H100 in 16 bits

The page docs/how-to/job/loop.md goes through it part by part.
"""

import dataclasses
import functools
import math
import signal
import threading
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from rich.progress import Progress

import jaxmp


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and what is written how often."""

    policy: str = "bf16"
    steps: int = 300
    batch_size: int = 16  # sequences a step, over all devices together
    seq_len: int = 64
    width: int = 64
    layers: int = 2
    learning_rate: float = 3e-3
    log_every: int = 10  # steps; the only ones that wait for the device
    eval_every: int = 100  # steps, a multiple of log_every
    save_every: int = 100
    peak_tflops: float | None = None  # of one device, in the policy's dtype; None: no MFU
    out: Path = Path("runs/loop")  # checkpoints and metrics.csv; delete it to begin anew
    tensorboard: bool = False  # events for TensorBoard, in place of metrics.csv


class Transformer(nn.Module):
    """Bytes to logits of the next byte. It names no dtype: the policy decides."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # uint8 [B, T] -> [B, T, 256]
        positions = jnp.arange(tokens.shape[1])[None]
        x = nn.Embed(256, self.width)(tokens.astype(jnp.int32)) + nn.Embed(positions.size, self.width)(positions)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def batches(cfg: Config, text: np.ndarray, step: int) -> np.ndarray:
    """The batch of a step, uint8 [B, T + 1]. It needs only the number of the step, so data have no state to save."""
    starts = np.random.default_rng(step).integers(0, len(text) - cfg.seq_len, cfg.batch_size)
    return text[starts[:, None] + np.arange(cfg.seq_len + 1)]


def main(cfg: Config) -> None:
    """Trains, or goes on where the last run stopped."""
    text = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    train_text, held_out = np.split(text, [len(text) * 9 // 10])
    model, policy = Transformer(cfg.width, cfg.layers), jaxmp.get_policy(cfg.policy, keep_fp32=("*norm*",))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    schedule = optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, cfg.steps // 20, cfg.steps)
    adamw = optax.adamw(schedule, mask=jaxmp.weight_decay_mask)
    tx = optax.chain(jaxmp.clip_by_global_norm(1.0), adamw)  # sees unscaled gradients, and counts no skipped step

    @functools.partial(jax.jit, out_shardings=everywhere)
    def start(key: jax.Array) -> jaxmp.linen.TrainState:
        with jaxmp.autocast(policy):  # for fp8: its layers get scales
            params = model.init(key, jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
        return jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: jaxmp.linen.TrainState, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, opt_state=state)
        state = state.apply_gradients(grads=grads)
        return state, state.metrics | {"loss": loss}

    evaluate = jax.jit(jaxmp.autocast(loss_fn, policy))  # what the training computes, without gradients
    state = start(jax.random.key(0))
    explained = jaxmp.explain_autocast(loss_fn, state.params, batches(cfg, train_text, 0), dtype=policy)  # runs nothing
    forward = sum(explained.matmul_flops_by_dtype().values())  # FLOPs of the matmuls of a step
    peak = (cfg.peak_tflops or math.nan) * 1e12 * jax.device_count()  # [FLOP/s]

    cfg.out.mkdir(parents=True, exist_ok=True)
    to: Any = cfg.out / "metrics.csv"  # or a W&B run, or a function of (step, dict): see jaxmp.monitor.log_metrics
    if cfg.tensorboard:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        to = SummaryWriter(str(cfg.out))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with jaxmp.checkpoint.manager(cfg.out / "checkpoints", max_to_keep=2) as saved, Progress() as progress:
        first = 0
        if saved.latest_step() is not None:
            found = jaxmp.checkpoint.restore(saved, state.tx, params=state.params, extra={"step": state.step})
            state = state.replace(params=found.params, opt_state=found.opt_state, step=found.extra["step"])
            first = found.step + 1
        bar, clock, since = progress.add_task("compiling", total=cfg.steps, completed=first), 0.0, first
        for i in range(first, cfg.steps):
            state, metrics = train_step(state, jax.device_put(batches(cfg, train_text, i), rows))
            done = i + 1
            if i == first:  # compilation is no part of the throughput
                jax.block_until_ready(metrics)
                clock, since = time.perf_counter(), done
            if done % cfg.log_every == 0 or done == cfg.steps:
                row = {name: float(x) for name, x in metrics.items()}
                per_step = (time.perf_counter() - clock) / (done - since or math.nan)  # [s]
                row["tokens_per_second"] = cfg.batch_size * cfg.seq_len / per_step
                row["mfu"] = 3 * forward / per_step / peak  # the backward pass has twice the FLOPs of the forward pass
                row["held_out_loss"] = math.nan  # not computed: only metrics.csv shows it
                if done % cfg.eval_every == 0 or done == cfg.steps:
                    tokens = (jax.device_put(batches(cfg, held_out, n), rows) for n in range(8))
                    row["held_out_loss"] = float(np.mean([evaluate(state.params, t) for t in tokens]))
                    progress.console.print(f"step {done}: held-out loss {row['held_out_loss']:.4f}")
                jaxmp.monitor.log_metrics(to, done, row)
                jaxmp.check_progress(state.opt_state)  # raises if all steps are skipped
                shown = f"loss {row['loss']:.3f}, skipped {row['skipped_steps']:.0f}, scale {row['loss_scale']:.0f}"
                progress.update(bar, completed=done, description=f"{shown}, {row['tokens_per_second']:.0f} tokens/s")
                clock, since = time.perf_counter(), done
            if (stopped := stop.is_set()) or done % cfg.save_every == 0 or done == cfg.steps:
                job = {"params": state.params, "opt_state": state.opt_state, "extra": {"step": state.step}}
                jaxmp.checkpoint.save(saved, i, **job)  # writes in the background
            if stopped:
                progress.console.print(f"SIGTERM after step {done}: saved; the same command goes on here")
                break


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
