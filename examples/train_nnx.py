#!/usr/bin/env python
"""The transformer of train.py in flax.nnx, under `nnx.jit`, with params and optimizer state sharded over a mesh.

    python examples/train_nnx.py

Four simulated CPU devices form a mesh of 2 x 2. Each batch is sharded over all four. Each matrix, its master and its
moments are sharded over the two devices of the axis "fsdp" only, so a device holds half of them. The code contains no
communication: XLA derives it from the shardings. The model has dropout, whose keys are state that changes in the
forward pass. A step sums the gradients of two microbatches in float32. The loss scale starts far too high, to show how
it adapts: the first overflow costs only its step, each further one halves the scale, and a skipped step changes nothing
else. Expect about this, in a minute on two cores:

     policy   train  held-out  vs bf16  skips  loss scale       memory
    ───────────────────────────────────────────────────────────────────
     bf16    1.9591    1.9942               0           1  0.28 + 1.66
     fp16    1.9565    1.9920   -0.11%      4      524288  0.28 + 1.66
     fp8     1.9614    1.9944   +0.01%      0           1  0.55 + 1.16

    fp16 step 0: a device overflowed, all skip; loss scale stays 1048576 (hysteresis)
    fp16 step 1: a device overflowed, all skip; loss scale 1048576 -> 524288
    fp16 step 2: a device overflowed, all skip; loss scale 524288 -> 262144
    fp16 step 17: a device overflowed, all skip; loss scale 262144 -> 131072
    fp16 step 217: loss scale 131072 -> 262144
    fp16 step 417: loss scale 262144 -> 524288
"""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console

import jaxmp
import report
import train


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and on what. The defaults are for two CPU cores."""

    policies: tuple[str, ...] = ("bf16", "fp16", "fp8")  # each is one run; gaps are relative to the first
    steps: int = 500
    batch_size: int = 16  # sequences per step, over all devices and microbatches
    accumulate: int = 2  # microbatches per step
    seq_len: int = 64  # bytes of context
    width: int = 96
    layers: int = 2
    heads: int = 4
    dropout: float = 0.05
    learning_rate: float = 4e-3
    initial_scale: float = 2.0**20  # far too high
    growth_interval: int = 200
    log_every: int = 10
    eval_every: int = 100
    seed: int = 0
    fsdp: int = 2  # devices that share one copy of the params
    out: Path = Path(__file__).parent / "out"  # where train_nnx.png goes
    cpu_devices: int = 4  # simulated devices, where there is no GPU
    coordinator: None = None


class Block(nnx.Module):
    """Attention and an MLP, each after a norm. No layer names a dtype: the policy decides."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, cfg.width, use_bias=False, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm_1, self.norm_2 = norm(), norm()
        self.qkv, self.out = linear(cfg.width, 3 * cfg.width), linear(cfg.width, cfg.width)
        self.up, self.down = linear(cfg.width, 4 * cfg.width), linear(4 * cfg.width, cfg.width)
        self.dropout = nnx.Dropout(cfg.dropout, rngs=rngs)
        self.heads, self.seq_len = cfg.heads, cfg.seq_len

    def __call__(self, x: jax.Array) -> jax.Array:  # [B*T, D]
        qkv = self.qkv(self.norm_1(x)).reshape(-1, self.seq_len, 3, self.heads, x.shape[-1] // self.heads)
        x = x + self.dropout(self.out(train.attend(qkv).reshape(x.shape)))
        return x + self.dropout(self.down(nnx.relu(self.up(self.norm_2(x)))))


class Transformer(nnx.Module):
    """Bytes to logits of the next byte; the logits are float32 in every policy: autocast is off around their layer."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, cfg.width, rngs=rngs)
        self.positions = nnx.Embed(cfg.seq_len, cfg.width, rngs=rngs)
        self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.layers)])
        self.norm = nnx.LayerNorm(cfg.width, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(cfg.width, 256, use_bias=False, dtype=jnp.float32, rngs=rngs)  # also of 16-bit params

    def __call__(self, tokens: jax.Array) -> jax.Array:  # uint8 [B, T] -> f32 [B, T, 256]
        x = self.bytes(tokens.astype(jnp.int32)) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = x.reshape(-1, x.shape[-1])  # [B*T, D]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        with jaxmp.autocast(enabled=False):
            return self.logits(x).reshape(*tokens.shape, 256)


def spread(module: nnx.Module, mesh: Mesh) -> None:
    """Shards the arrays of `module` over the mesh: matrices over "fsdp", the rest on every device."""

    def place(x: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P("fsdp") if x.ndim == 2 and x.shape[0] % mesh.shape["fsdp"] == 0 else P())

    arrays = nnx.state(module)
    nnx.update(module, jax.device_put(arrays, jax.tree.map(place, arrays)))


def train_nnx(cfg: Config, policy_name: str, on_log: report.OnLog = lambda *_: None) -> report.Run:
    """One run, like `train.train`."""
    started = time.perf_counter()
    policy, recipe, small_state = train.precision_of(policy_name)
    if small_state:
        raise SystemExit("8-bit state is shown by train.py; flax's nnx.Optimizer, used here, adds updates to params")
    shape = (jax.device_count() // cfg.fsdp, cfg.fsdp)
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    train_text, held_out_text = train.load_text()

    model = Transformer(cfg, nnx.Rngs(cfg.seed))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, cfg.steps // 10, cfg.steps, 0.1 * cfg.learning_rate
    )
    tx = optax.chain(
        jaxmp.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=jaxmp.weight_decay_mask),
    )
    scaler = jaxmp.DynamicLossScale(cfg.initial_scale, growth_interval=cfg.growth_interval)
    # An nnx loop changes in three places: wrap the optimizer, cast the params after creating it, and further down take
    # the gradients with jaxmp.nnx. For fp8, the model's Linear layers (except the logits) get an fp8 dot_general.
    if recipe:
        jaxmp.nnx.to_fp8(model, recipe)
    is_fp16 = policy.param_dtype == jnp.float16
    tx = jaxmp.mixed_precision(tx, policy, loss_scale=scaler if is_fp16 else None)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    spread(model, mesh)
    spread(optimizer, mesh)

    def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
        return train.next_byte_loss(model(tokens[:, :-1]), tokens)

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array) -> dict[str, jax.Array]:
        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, policy=policy, accumulate=cfg.accumulate)
        loss, grads = grad_fn(model, tokens, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return jaxmp.get_metrics(optimizer.opt_state) | {"loss": loss}

    @nnx.jit
    def held_out_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
        with jaxmp.fp8.autocast(enabled=False):  # fp8 is for training
            return jaxmp.autocast(loss_fn, dataclasses.replace(policy, recipe=None))(model, tokens)

    param_bytes, state_bytes = (
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(nnx.state(module, of)))
        for module, of in ((model, nnx.Param), (optimizer, nnx.optimizer.OptState))
    )
    run = report.Run(policy_name, param_bytes, state_bytes)
    for i in range(cfg.steps):
        metrics = step(model, optimizer, jax.device_put(train.sample(train_text, cfg, i), rows))
        if (i + 1) % cfg.eval_every == 0 or i + 1 == cfg.steps:
            model.eval()  # no dropout
            batches = (jax.device_put(batch, rows) for batch in train.walk(held_out_text, cfg))
            run.held_out[i + 1] = float(np.mean([float(held_out_loss(model, batch)) for batch in batches]))
            model.train()
        run.log(metrics, optimizer.opt_state, cfg, on_log)
    run.seconds = time.perf_counter() - started
    return run


def main(cfg: Config) -> None:
    train.start_jax(cfg)
    console = Console(highlight=False)
    runs = report.run_with_progress(train_nnx, cfg, console)
    console.print(report.table(runs))
    for run in runs:
        for event in report.events(run):
            console.print(f"{run.policy} {event}", soft_wrap=True)
    report.plot(runs, cfg, cfg.out / "train_nnx.png")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
