"""Trains one small transformer three times, in float32, bfloat16 and float16, and shows that the curves coincide.

    make train                                  (or: python examples/train.py; --help names every knob)

The text is Python's own language reference, which every Python brings along; the model reads it byte by byte. Four
simulated CPU devices share each batch by `jax.pmap`. The three runs start from the same params and see the same
batches. In the float16 run one device is made to overflow at three known steps, so that you can watch what happens to
the step and to the loss scale. Expect about this, within two minutes on two cores (the reference differs from Python
to Python; these are of 3.12):

     policy   train  held-out  vs fp32  skips  loss scale       memory
    ───────────────────────────────────────────────────────────────────
     fp32    1.4566    1.5214               0           1  1.11 + 2.22
     bf16    1.4572    1.5256   +0.28%      0           1  0.55 + 3.32
     fp16    1.4576    1.5190   -0.16%      3       65536  0.55 + 3.32

    fp16 step 249: loss scale 32768 -> 65536
    fp16 step 350: a device overflowed, all skip; loss scale stays 65536 (hysteresis)
    fp16 step 360: a device overflowed, all skip; loss scale 65536 -> 32768
    fp16 step 610: loss scale 32768 -> 65536
    fp16 step 750: a device overflowed, all skip; loss scale stays 65536 (hysteresis)

A gap of some tenths of a percent, to either side, is noise: another seed moves float32 itself as far (parity.py).

Three tiers, one script:

    CPU, four simulated devices     python examples/train.py
    all GPUs of this machine        python examples/train.py --width 512 --layers 8 --batch-size 128 --steps 3000
    several processes               python examples/train.py --coordinator HOST:PORT --num-processes 2 --process-id 0
                                    (and --process-id 1 in the other; on a cluster that jax knows: --coordinator auto)
"""

import dataclasses
import functools
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from rich import box, progress
from rich.console import Console
from rich.table import Table

import jaxmp

matplotlib.use("Agg")  # pictures go to files, also where there is no screen
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and on what. The defaults are for two CPU cores."""

    policies: tuple[str, ...] = ("fp32", "bf16", "fp16")  # each is one run; gaps are measured from the first
    steps: int = 1000  # three epochs; the curves have had the time to part
    batch_size: int = 16  # sequences a step, over all devices together: 1024 bytes
    seq_len: int = 64  # bytes of context; a short one is learned sooner
    width: int = 96  # with 2 layers 0.3 M params: half a minute a run
    layers: int = 2
    heads: int = 4
    learning_rate: float = 4e-3  # the peak; then a cosine down to a tenth of it
    warmup: float = 0.05  # the part of the steps in which the rate rises to its peak
    weight_decay: float = 0.1  # on matrices only (jaxmp.weight_decay_mask)
    max_norm: float = 1.0  # gradients are clipped to this norm
    initial_scale: float = 2.0**15  # at the usual 2^16 this model overflows by itself in its first steps, too
    growth_interval: int = 250  # good steps until the loss scale grows; 2000 is usual, too long to see here
    overflow_steps: tuple[int, ...] = (350, 360, 750)  # of float16: skipped; skipped and scale halved; skipped
    overflow_device: int = 1  # where they happen: every other device must skip as well
    log_every: int = 10  # steps between looks at the devices; in between nothing waits for them
    eval_every: int = 100  # steps between held-out losses
    seed: int = 0  # of the params and of the batches
    out: Path = Path(__file__).parent / "out"  # where train.png goes
    figure: Path | None = None  # a second copy of the picture
    json: Path | None = None  # the closing table for machines
    cpu_devices: int = 4  # simulated devices, where there is no GPU
    coordinator: str | None = None  # HOST:PORT of process 0, or "auto" on a cluster that jax can detect
    num_processes: int | None = None
    process_id: int | None = None


OnLog = Callable[[int, float, float], None]  # (steps taken, loss, loss scale)


@dataclasses.dataclass
class Run:
    """What one policy did; lists have one entry per step."""

    policy: str
    param_bytes: int
    state_bytes: int
    losses: list[Any] = dataclasses.field(default_factory=list)  # nats per byte, of the training batch
    loss_scales: list[Any] = dataclasses.field(default_factory=list)  # after the step
    skipped: list[Any] = dataclasses.field(default_factory=list)  # whether the step was
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)  # steps taken -> loss on the held-out text
    seconds: float = 0.0  # compilation included

    def log(self, metrics: dict[str, Any], opt_state: Any, cfg: Any, on_log: OnLog) -> None:
        """Keeps the metrics of a step, on their device; every `log_every` steps they are fetched and looked at."""
        columns = {"loss": self.losses, "loss_scale": self.loss_scales, "skipped": self.skipped}
        for name, column in columns.items():
            column.append(metrics[name])
        steps, recent = len(self.losses), slice(-cfg.log_every, None)
        if steps % cfg.log_every == 0 or steps == cfg.steps:  # the only place that waits for the devices
            for column in columns.values():
                column[recent] = np.asarray(jax.device_get(column[recent])).tolist()
            jaxmp.check_progress(opt_state)  # stops a run that only skips
            on_log(steps, float(np.mean(self.losses[recent])), self.loss_scales[-1])

    @property
    def final_train(self) -> float:
        return float(np.mean(self.losses[-50:]))  # one batch is too noisy

    @property
    def final_held_out(self) -> float:
        return self.held_out[max(self.held_out)]


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on and the bytes held out, about nine to one.

    Entries of the reference repeat one another, so each paragraph is taken once: no held-out paragraph was trained on.
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
    """All of `text` once, in batches like those of `sample`; what is left over at the end is dropped."""
    rows = len(text) // (cfg.seq_len + 1) // cfg.batch_size * cfg.batch_size
    return iter(text[: rows * (cfg.seq_len + 1)].reshape(-1, cfg.batch_size, cfg.seq_len + 1))


def next_byte_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, f32[], in nats per byte, of logits f32 [B, T, 256] against tokens uint8 [B, T + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()


def attend(qkv: jax.Array) -> jax.Array:
    """Causal attention, [B, T, 3, H, D/H] -> [B, T, H, D/H]; scores and softmax in float32, the rest as it comes."""
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones((1, 1, q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e30)).astype(v.dtype)  # [B, H, T, T]
    return jnp.einsum("bhts,bshd->bthd", weights, v)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm. Matmuls run in `dtype`; norms and softmax in float32."""

    heads: int
    seq_len: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B*T, D]: on CPU, matmuls in 16 bits are fast in 2 dimensions only
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=jnp.float32)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        width = x.shape[-1]
        qkv = dense(3 * width, name="qkv")(norm()(x)).reshape(-1, self.seq_len, 3, self.heads, width // self.heads)
        x = x + dense(width, name="out")(attend(qkv).reshape(x.shape))
        return x + dense(width, name="down")(nn.relu(dense(4 * width, name="up")(norm()(x))))


class Transformer(nn.Module):
    """Bytes to logits of the next byte; the logits are float32 whatever `dtype` is."""

    width: int
    layers: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # uint8 [B, T] -> f32 [B, T, 256]
        seq_len = tokens.shape[1]
        x = nn.Embed(256, self.width, dtype=self.dtype, name="bytes")(tokens.astype(jnp.int32))
        x = x + nn.Embed(seq_len, self.width, dtype=self.dtype, name="positions")(jnp.arange(seq_len))[None]
        x = x.reshape(-1, self.width)  # [B*T, D]
        for _ in range(self.layers):
            x = Block(self.heads, seq_len, self.dtype)(x)
        x = nn.LayerNorm(use_bias=False, dtype=jnp.float32)(x)
        return nn.Dense(256, use_bias=False, dtype=jnp.float32, name="logits")(x).reshape(*tokens.shape, 256)


def train(cfg: Config, policy_name: str, on_log: OnLog = lambda *_: None) -> Run:
    """One run. `on_log` is called every `log_every` steps."""
    policy = jaxmp.get_policy(policy_name, keep_fp32=("*norm*",))
    with policy.default_matmul_precision():  # "fp32" means float32: no TensorFloat-32 in the baseline
        return _train(cfg, policy_name, policy, on_log)


def _train(cfg: Config, policy_name: str, policy: jaxmp.Policy, on_log: OnLog) -> Run:
    started = time.perf_counter()
    train_text, held_out_text = load_text()
    model = Transformer(cfg.width, cfg.layers, cfg.heads, dtype=policy.compute_dtype)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, round(cfg.warmup * cfg.steps), cfg.steps, 0.1 * cfg.learning_rate
    )
    tx = optax.chain(
        jaxmp.clip_by_global_norm(cfg.max_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=cfg.weight_decay, mask=jaxmp.weight_decay_mask),
    )
    is_fp16 = policy.param_dtype == jnp.float16
    scaler = jaxmp.DynamicLossScale(cfg.initial_scale, growth_interval=cfg.growth_interval)  # or leave it at "auto"

    # A Flax loop becomes one in mixed precision in three places. First, the optimizer:
    tx = jaxmp.mixed_precision(tx, policy, loss_scale=scaler if is_fp16 else None)
    tx = optax.chain(jaxmp.reduce_gradients("devices"), tx)  # in place of jax.lax.pmean(grads): the mean in float32

    def init(key: jax.Array) -> jaxmp.linen.TrainState:
        params = model.init(key, jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]  # float32
        # Second, the train state, which casts the params (was: flax.training.train_state.TrainState):
        return jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    @functools.partial(jax.pmap, axis_name="devices", donate_argnums=0, out_axes=(0, None))
    def step(state: jaxmp.linen.TrainState, tokens: jax.Array, disturbance: jax.Array) -> tuple[Any, dict[str, Any]]:
        # Third, the gradients (was: jax.value_and_grad(loss_fn)(state.params, tokens)):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, opt_state=state.opt_state)
        grads = jax.tree.map(lambda g: g * disturbance.astype(g.dtype), grads)  # for the show: 1, or inf to overflow
        state = state.apply_gradients(grads=grads)
        return state, state.metrics | {"loss": jax.lax.pmean(loss, "devices")}

    @functools.partial(jax.pmap, axis_name="devices", out_axes=None)
    def held_out_loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss_fn(params, tokens), "devices")

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
    for i in range(cfg.steps):
        disturbance = np.ones(devices, np.float32)
        if is_fp16 and i in cfg.overflow_steps:
            disturbance[cfg.overflow_device % devices] = np.inf
        state, metrics = step(state, mine(sample(train_text, cfg, i)), mine(disturbance)[:, 0])
        if (i + 1) % cfg.eval_every == 0 or i + 1 == cfg.steps:
            # One batch at a time: simulated devices share few threads, and two batches at once can lock each other out.
            losses = [float(held_out_loss(state.params, mine(batch))) for batch in walk(held_out_text, cfg)]
            run.held_out[i + 1] = float(np.mean(losses))
        run.log(metrics, state.opt_state, cfg, on_log)
    run.seconds = time.perf_counter() - started
    return run


def gap_percent(run: Run, baseline: Run) -> float:
    return 100 * (run.final_held_out / baseline.final_held_out - 1)


def events(run: Run) -> Iterator[str]:
    """A line for each step that was skipped or moved the loss scale."""
    before = run.loss_scales[0]
    for i, (scale, skipped) in enumerate(zip(run.loss_scales, run.skipped, strict=True)):
        moved = f"loss scale {before:.0f} -> {scale:.0f}" if scale != before else f"loss scale stays {scale:.0f}"
        if skipped:
            yield f"step {i}: a device overflowed, all skip; {moved}" + ("" if scale != before else " (hysteresis)")
        elif scale != before:
            yield f"step {i}: {moved}"
        before = scale


def table(runs: list[Run]) -> Table:
    """The closing table."""
    title = "loss in nats per byte; MB of params + optimizer state on a device"
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    out.add_column("policy")
    for name in ("train", "held-out", f"vs {runs[0].policy}", "skips", "loss scale", "memory", "time"):
        out.add_column(name, justify="right")
    for run in runs:
        out.add_row(
            run.policy,
            f"{run.final_train:.4f}",
            f"{run.final_held_out:.4f}",
            "" if run is runs[0] else f"{gap_percent(run, runs[0]):+.2f}%",
            str(sum(run.skipped)),
            f"{run.loss_scales[-1]:.0f}",
            f"{run.param_bytes / 1e6:.2f} + {run.state_bytes / 1e6:.2f}",
            f"{run.seconds:.0f} s",
        )
    return out


# Curves that coincide: each is drawn thinner than the one below it. (color, line, width, marker, its size)
STYLES = (
    ("0.75", "-", 5.0, "o", 12.0),
    ("#0072b2", "-", 2.5, "s", 8.0),
    ("#d55e00", ":", 2.0, "^", 4.0),
    ("black", "-.", 1.0, "x", 4.0),
)


def plot(runs: list[Run], cfg: Any, path: Path) -> None:
    """Loss curves, their distance from the first run's, and the loss scale with skipped steps marked."""
    window = cfg.log_every
    fig = plt.figure(figsize=(10, 4.4), dpi=100, layout="constrained")
    loss, gap, scale = fig.subplot_mosaic([["loss", "gap"], ["loss", "scale"]], width_ratios=(1.1, 1)).values()
    steps = np.arange(1, len(runs[0].losses) // window + 1) * window
    smooth = [np.reshape(run.losses[: len(steps) * window], (-1, window)).mean(1) for run in runs]
    for run, curve, (color, line, width, marker, size) in zip(runs, smooth, STYLES, strict=False):
        loss.plot(steps, curve, line, color=color, lw=width, label=f"{run.policy}, training")
        held_out = zip(*run.held_out.items(), strict=True)
        edge = "0.4" if run is runs[0] else color
        loss.plot(*held_out, marker, color=edge, mfc="none", mew=1.5, ms=size, label=f"{run.policy}, held out")
        if run is not runs[0]:
            gap.plot(steps, 100 * (curve / smooth[0] - 1), line, color=color, lw=2, label=run.policy)
        if len(set(run.loss_scales)) > 1 or any(run.skipped):
            scale.step(range(len(run.loss_scales)), run.loss_scales, where="post", color=color, lw=2, label=run.policy)
            skips = [i for i, skipped in enumerate(run.skipped) if skipped]
            scale.plot(skips, [run.loss_scales[i] for i in skips], "kx", ms=9, mew=2, label="skipped step")
    loss.set(title="Loss", xlabel="step", ylabel="cross-entropy [nats per byte]")
    gap.axhspan(-1, 1, color="0.92", zorder=0)
    gap.text(0, -0.95, "±1%", va="bottom", color="0.4")
    gap.set(title=f"Training loss against {runs[0].policy}", xlabel="step", ylabel="difference [%]", ylim=(-2, 2))
    scale.set(title="Loss scale", xlabel="step", ylabel="loss scale")
    scale.set_yscale("log", base=2)
    scale.margins(y=0.25)
    for axes in (loss, gap, scale):
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    plt.close(fig)


def record(runs: list[Run], cfg: Config) -> dict[str, Any]:
    """The closing table for machines, with what is needed to repeat it."""
    settings = dataclasses.asdict(cfg)
    for name in ("out", "figure", "json", "coordinator", "num_processes", "process_id"):
        del settings[name]
    return {
        "command": "python examples/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "packages": {m.__name__: m.__version__ for m in (jax, optax, jaxmp)},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores",
        "config": settings,
        "runs": [
            {
                "policy": run.policy,
                "train_loss": run.final_train,
                "held_out_loss": run.final_held_out,
                "gap_percent": gap_percent(run, runs[0]),
                "skipped_steps": [i for i, skipped in enumerate(run.skipped) if skipped],
                "loss_scale": run.loss_scales[-1],
                "param_bytes": run.param_bytes,
                "optimizer_state_bytes": run.state_bytes,
                "seconds": round(run.seconds, 1),
                "events": list(events(run)),
            }
            for run in runs
        ],
    }


def start_jax(cfg: Config) -> None:
    """Chooses devices; must come before anything that uses jax."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cfg.cpu_devices)  # does nothing where there is a GPU
    if cfg.coordinator == "auto":
        jax.distributed.initialize()
    elif cfg.coordinator is not None:
        jax.distributed.initialize(cfg.coordinator, cfg.num_processes, cfg.process_id)


def run_with_progress(train: Callable[..., Run], cfg: Any, console: Console, label: str = "{}") -> list[Run]:
    """`train(cfg, policy, on_log)` for each policy of `cfg`, with a bar for each."""
    bars = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[status]}"),
        progress.TimeElapsedColumn(),
        console=console,
    )
    runs = []
    with bars:
        for name in cfg.policies:
            task = bars.add_task(label.format(name), total=cfg.steps, status="compiling")

            def on_log(step: int, loss: float, scale: float, task: progress.TaskID = task) -> None:
                bars.update(task, completed=step, status=f"loss {loss:.3f}  scale {scale:.0f}")

            runs.append(train(cfg, name, on_log))
    return runs


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
