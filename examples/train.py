#!/usr/bin/env python
"""Trains one small transformer in float32, bfloat16, float16 and fp8, and shows that the curves coincide.

    make train                                  (or: python examples/train.py; --help lists all options)

The text is Python's own language reference, which is part of every Python. The model reads it byte by byte. Four
simulated CPU devices share each batch with `jax.pmap`. The runs start from the same params and see the same batches. In
the float16 run one device is forced to overflow at three known steps, so that you can see what happens to the step and
to the loss scale. Expect about this, within three minutes on two cores (the reference differs between Python versions;
these numbers are from 3.12):

     policy       train  held-out  vs fp32  skips  loss scale       memory
    ───────────────────────────────────────────────────────────────────────
     fp32        1.4573    1.5203               0           1  1.11 + 2.22
     bf16        1.4548    1.5219   +0.10%      0           1  0.55 + 3.32
     bf16-mixed  1.4565    1.5211   +0.05%      0           1  1.11 + 2.22
     fp16        1.4514    1.5160   -0.28%      3       65536  0.55 + 3.32
     fp8         1.4715    1.5352   +0.98%      0           1  1.11 + 2.31

    fp16 step 249: loss scale 32768 -> 65536
    fp16 step 350: a device overflowed, all skip; loss scale stays 65536 (hysteresis)
    fp16 step 360: a device overflowed, all skip; loss scale 65536 -> 32768
    fp16 step 610: loss scale 32768 -> 65536
    fp16 step 750: a device overflowed, all skip; loss scale stays 65536 (hysteresis)

Gaps of one run are noise, in either direction: another seed changes float32 by half a percent. In the mean of twenty
seeds fp8 ends 0.3 % above bf16, and the others at float32's loss (parity.py).

One script for three sizes of machine:

    CPU, four simulated devices     python examples/train.py
    all GPUs of this machine        python examples/train.py --width 512 --layers 8 --batch-size 128 --steps 3000
    several processes               python examples/train.py --coordinator HOST:PORT --num-processes 2 --process-id 0
                                    (and --process-id 1 in the other; on a cluster that jax detects: --coordinator auto)
"""

import dataclasses
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxmp
from report import OnLog, Run, events, plot, record, run_with_progress, table

POLICIES = ("fp32", "bf16", "bf16-mixed", "fp16", "fp8")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and on what. The defaults are for two CPU cores."""

    # Each name is one run; gaps are relative to the first. "fp8" has float32 params and bfloat16 activations.
    # "fp16+fp8" is float16 with its loss scale, and fp8 matmuls. "bf16+8bit" has 24-bit masters and 8-bit moments: 5
    # bytes per parameter, where bf16 has 14.
    policies: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--policy"])] = POLICIES
    steps: int = 1000  # three epochs: enough time for the curves to diverge
    batch_size: int = 16  # sequences a step, over all devices together: 1024 bytes
    seq_len: int = 64  # bytes of context; a short context trains faster
    width: int = 96  # with 2 layers 0.3 M params: half a minute a run
    layers: int = 2
    heads: int = 4
    learning_rate: float = 4e-3  # the peak; then a cosine down to a tenth of it
    warmup: float = 0.05  # the part of the steps in which the rate rises to its peak
    weight_decay: float = 0.1  # on matrices only (jaxmp.weight_decay_mask)
    max_norm: float = 1.0  # gradients are clipped to this norm
    initial_scale: float = 2.0**15  # at the usual 2^16 this model also overflows in its first steps
    growth_interval: int = 250  # good steps until the loss scale grows; 2000 is usual, too long to see here
    overflow_steps: tuple[int, ...] = (350, 360, 750)  # in float16: skipped; skipped and scale halved; skipped
    overflow_device: int = 1  # where they happen: every other device must skip as well
    log_every: int = 10  # steps between reads from the devices; between them nothing waits
    eval_every: int = 100  # steps between held-out losses
    seed: int = 0  # of the params and of the batches
    out: Path = Path(__file__).parent / "out"  # where train.png goes
    figure: Path | None = None  # a second copy of the plot
    json: Path | None = None  # the final table as JSON
    log: Path | None = (
        None  # a folder for metrics, one CSV file per policy (TensorBoard and W&B: see jaxmp.monitor.log_metrics)
    )
    cpu_devices: int = 4  # simulated devices, where there is no GPU
    coordinator: str | None = None  # HOST:PORT of process 0, or "auto" on a cluster that jax can detect
    num_processes: int | None = None
    process_id: int | None = None


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on and the bytes held out, about nine to one.

    Entries of the reference repeat each other, so each paragraph is used once: no held-out paragraph is trained on.
    """
    entries = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = list(dict.fromkeys(p.strip("\n") for p in entries.split("\n\n")))
    pages = ["\n\n".join(paragraphs[i : i + 10]) + "\n\n" for i in range(0, len(paragraphs), 10)]
    parts = ("".join(p for i, p in enumerate(pages) if (i % 10 == 9) == held_out) for held_out in (False, True))
    train, held_out = (np.frombuffer(part.encode(), np.uint8) for part in parts)
    return train, held_out


def sample(text: np.ndarray, cfg: Config, step: int) -> np.ndarray:
    """The batch of a step, uint8 [batch_size, seq_len + 1]: the same on every process and for every policy."""
    rng = np.random.default_rng((cfg.seed, step))
    starts = rng.integers(0, len(text) - cfg.seq_len, cfg.batch_size)
    return text[starts[:, None] + np.arange(cfg.seq_len + 1)]


def walk(text: np.ndarray, cfg: Config) -> Iterator[np.ndarray]:
    """All of `text` once, in batches like those of `sample`; the incomplete rest is dropped."""
    rows = len(text) // (cfg.seq_len + 1) // cfg.batch_size * cfg.batch_size
    return iter(text[: rows * (cfg.seq_len + 1)].reshape(-1, cfg.batch_size, cfg.seq_len + 1))


def next_byte_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, f32[], in nats per byte, of logits f32 [B, T, 256] against tokens uint8 [B, T + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()


def attend(qkv: jax.Array) -> jax.Array:
    """Causal attention, [B, T, 3, H, D/H] -> [B, T, H, D/H]; scores and softmax in float32, the rest in its dtype."""
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones((1, 1, q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e30)).astype(v.dtype)  # [B, H, T, T]
    return jnp.einsum("bhts,bshd->bthd", weights, v)


class Block(nn.Module):
    """Attention and an MLP, each after a norm. Norms and softmax run in float32, matmuls in `dtype`, if it is given."""

    heads: int
    seq_len: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B*T, D]: on CPU, matmuls in 16 bits are fast in 2 dimensions only
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=jnp.float32)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        width = x.shape[-1]
        qkv = dense(3 * width, name="qkv")(norm()(x)).reshape(-1, self.seq_len, 3, self.heads, width // self.heads)
        x = x + dense(width, name="out")(attend(qkv).reshape(x.shape))
        return x + dense(width, name="down")(nn.relu(dense(4 * width, name="up")(norm()(x))))


class Transformer(nn.Module):
    """Bytes to logits of the next byte. No layer needs a dtype: the policy decides, and the logits are in float32."""

    width: int
    layers: int
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # uint8 [B, T] -> f32 [B, T, 256]
        seq_len = tokens.shape[1]
        x = nn.Embed(256, self.width, dtype=self.dtype, name="bytes")(tokens.astype(jnp.int32))
        x = x + nn.Embed(seq_len, self.width, dtype=self.dtype, name="positions")(jnp.arange(seq_len))[None]
        x = x.reshape(-1, self.width)  # [B*T, D]
        for _ in range(self.layers):
            x = Block(self.heads, seq_len, self.dtype)(x)
        x = nn.LayerNorm(use_bias=False, dtype=jnp.float32)(x)
        with jaxmp.autocast(enabled=False):
            x = nn.Dense(256, use_bias=False, dtype=jnp.float32, name="logits")(x)
        return x.reshape(*tokens.shape, 256)


class Precision(NamedTuple):
    """The precision that the name of a run means."""

    policy: jaxmp.Policy
    recipe: Any  # for its fp8 matmuls, or None
    small_state: bool  # 24-bit masters, 8-bit moments


def precision_of(policy_name: str) -> Precision:
    """The precision of a run: a policy, and the parts after `+`."""
    name, *added = policy_name.split("+")
    policy = jaxmp.get_policy(name, keep_fp32=("*norm*",))
    if "fp8" in added:
        policy = dataclasses.replace(policy, recipe=jaxmp.fp8.DelayedScaling())
    return Precision(policy, policy.recipe, "8bit" in added)


def optimizer_of(cfg: Config, small_state: bool) -> optax.GradientTransformation:
    """AdamW with clipping; any optax optimizer would work."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, round(cfg.warmup * cfg.steps), cfg.steps, 0.1 * cfg.learning_rate
    )
    decay: dict[str, Any] = {"weight_decay": cfg.weight_decay, "mask": jaxmp.weight_decay_mask}
    if small_state:
        return jaxmp.fused_adamw(schedule, b2=0.95, max_norm=cfg.max_norm, state_dtype=jnp.int8, **decay)
    return optax.chain(jaxmp.clip_by_global_norm(cfg.max_norm), optax.adamw(schedule, b2=0.95, **decay))


def train(cfg: Config, policy_name: str, on_log: OnLog = lambda *_: None) -> Run:
    """One run. `on_log` is called every `log_every` steps."""
    started = time.perf_counter()
    policy, _, small_state = precision_of(policy_name)
    train_text, held_out_text = load_text()
    model = Transformer(cfg.width, cfg.layers, cfg.heads)
    tx = optimizer_of(cfg, small_state)
    is_fp16 = policy.param_dtype == jnp.float16
    scaler = jaxmp.DynamicLossScale(cfg.initial_scale, growth_interval=cfg.growth_interval)  # or leave it at "auto"

    # For mixed precision, a Flax loop changes in three places; for fp8, in one more. First, the optimizer:
    bits = 8 if small_state else None
    mean = jaxmp.reduce_gradients("devices")  # in place of jax.lax.pmean(grads): the mean in float32
    scaler = scaler if is_fp16 else None
    tx = jaxmp.mixed_precision(tx, policy, loss_scale=scaler, remainder_bits=bits, before=mean)

    def init(key: jax.Array) -> jaxmp.linen.TrainState:
        with jaxmp.autocast(policy):  # for fp8: the Dense layers get scales, all but the last, the logits
            params = model.init(key, jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]  # float32
        # Second, the train state, which casts the params and carries the policy (was: flax's TrainState):
        return jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    @functools.partial(jax.pmap, axis_name="devices", donate_argnums=0, out_axes=(0, None))
    def step(state: jaxmp.linen.TrainState, tokens: jax.Array, disturbance: jax.Array) -> tuple[Any, dict[str, Any]]:
        # Third, the gradients (was: jax.value_and_grad(loss_fn)(state.params, tokens)):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, opt_state=state.opt_state)
        grads = jax.tree.map(
            lambda g: g * disturbance.astype(g.dtype), grads
        )  # for the demonstration: 1, or inf to overflow
        state = state.apply_gradients(grads=grads)
        return state, state.metrics | {"loss": jax.lax.pmean(loss, "devices")}

    @functools.partial(jax.pmap, axis_name="devices", out_axes=None)
    def held_out_loss(params: Any, tokens: jax.Array) -> jax.Array:
        evaluated = jaxmp.autocast(loss_fn, dataclasses.replace(policy, recipe=None))  # fp8 is for training
        return jax.lax.pmean(evaluated(params, tokens), "devices")

    devices, local = jax.device_count(), jax.local_device_count()
    if cfg.batch_size % devices:
        raise SystemExit(f"--batch-size must be a multiple of the number of devices, {devices}; got {cfg.batch_size}")

    def mine(batch: np.ndarray) -> np.ndarray:  # this process's part of a batch: [local devices, rows, ...]
        rows = len(batch) // jax.process_count()
        part = batch[jax.process_index() * rows :][:rows]
        return part.reshape(local, rows // local, *batch.shape[1:])

    start = jax.pmap(init, axis_name="devices")
    state = start(jnp.stack([jax.random.key(cfg.seed)] * local))  # the same on every device
    param_bytes, state_bytes = (
        sum(x.nbytes for x in jax.tree.leaves(tree)) // local for tree in (state.params, state.opt_state)
    )
    run = Run(policy_name, param_bytes, state_bytes)
    shapes = jax.eval_shape(init, jax.random.key(cfg.seed)).params, sample(train_text, cfg, 0)
    run.precision = jaxmp.explain_autocast(loss_fn, *shapes, dtype=policy).summary()
    if cfg.log:
        cfg.log.mkdir(parents=True, exist_ok=True)
        (cfg.log / f"{policy_name}.csv").unlink(missing_ok=True)
    for i in range(cfg.steps):
        disturbance = np.ones(devices, np.float32)
        if is_fp16 and i in cfg.overflow_steps:
            disturbance[cfg.overflow_device % devices] = np.inf
        state, metrics = step(state, mine(sample(train_text, cfg, i)), mine(disturbance)[:, 0])
        if (i + 1) % cfg.eval_every == 0 or i + 1 == cfg.steps:
            # One batch at a time: simulated devices share few threads, and two batches at once can deadlock.
            losses = [float(held_out_loss(state.params, mine(batch))) for batch in walk(held_out_text, cfg)]
            run.held_out[i + 1] = float(np.mean(losses))
        run.log(metrics, state.opt_state, cfg, on_log)
        if cfg.log and jax.process_index() == 0 and len(run.losses) % cfg.log_every == 0:
            jaxmp.monitor.log_metrics(cfg.log / f"{policy_name}.csv", i + 1, metrics)
    run.seconds = time.perf_counter() - started
    return run


def start_jax(cfg: Config) -> None:
    """Chooses devices; call it before anything that uses jax."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cfg.cpu_devices)  # does nothing where there is a GPU
    if cfg.coordinator == "auto":
        jax.distributed.initialize()
    elif cfg.coordinator is not None:
        jax.distributed.initialize(cfg.coordinator, cfg.num_processes, cfg.process_id)


def main(cfg: Config) -> None:
    start_jax(cfg)
    is_first = jax.process_index() == 0
    console = Console(quiet=not is_first, highlight=False)
    console.print(
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, {jax.process_count()} process(es): "
        f"{cfg.steps} steps for each of {', '.join(cfg.policies)}"
    )
    runs = run_with_progress(train, cfg, console)
    if not is_first:
        return
    console.print(table(runs))
    for run in runs:
        console.print(f"{run.policy} {run.precision}", soft_wrap=True)
        for event in events(run):
            console.print(f"{run.policy} {event}", soft_wrap=True)
    picture = cfg.out / "train.png"
    plot(runs, cfg, picture)
    if cfg.figure:
        shutil.copy(picture, cfg.figure)
    if cfg.json:
        cfg.json.write_text(json.dumps(record(runs, cfg), indent=2) + "\n")
    console.print(f"\nCurves: {os.path.relpath(picture)}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
