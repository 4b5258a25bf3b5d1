#!/usr/bin/env python
"""Does low precision cost quality? Paired seeds of every policy and fp8 recipe, on the model of train.py.

    make parity            (or: python examples/parity.py; --help lists all options)

One run of low precision may end above or below one run of high precision by chance. So each seed (of the params and of
the batches) trains every policy on the same batches, and the gap of a policy to its baseline is computed for each seed:

    gap [%]      = 100 * mean over seeds of (held_out(policy) - held_out(baseline)) / mean of held_out(baseline)
    std. error   = 100 * std over seeds of (held_out(policy) - held_out(baseline)) / sqrt(seeds) / the same mean

The baseline of 16 bits is fp32. The baseline of fp8 is bf16, because fp8 runs everything except its matmuls in bf16. A
held-out loss is the mean of five, each 20 steps after the one before, up to the last step; all are computed in 16 bits.
"in fp8" is what the loss of the same trained params changes when it is computed in the recipe instead.
"fp8 FLOPs" are those of matmuls that run in the recipe, where attention's scores and sums count among all.

The text is the reference of this Python, so another version of Python is another text: --json names its file.

A run takes about half a minute of one core, and of four bits ten times as long. The runs are made in two processes, and
each finished one is written to the file at once: interrupt the script when you like, and call it again to go on. The
stored results are benchmarks/results/parity.json, and `python -m benchmarks recipes --table` writes them into
docs/how-to/precision/recipes.md.
"""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich import box, progress
from rich.console import Console
from rich.table import Table

import jaxmp
from jaxmp import fp8
from train import Config, Transformer, load_text, next_byte_loss, optimizer_of, precision_of, sample, walk

CHUNK = 20  # steps of one program, and between the held-out losses of the end
EVALUATIONS = 5


class Choice(NamedTuple):
    """What one policy of the comparison trains with."""

    base: str  # a policy of train.py
    seeds: int
    recipe: Any = None  # in place of that of `base`
    in_16_bits: tuple[str, ...] = ()  # how paths of layers begin that stay in 16 bits; embedding and logits always do
    calibrated: bool = False  # whether the first batch sets the scales before the first step


E4M3 = fp8.DelayedScaling(fp8_format="E4M3")
CHOICES = {
    "fp32": Choice("fp32", 4),
    "bf16": Choice("bf16", 20),
    "fp16": Choice("fp16", 4),
    "bf16-mixed": Choice("bf16-mixed", 4),
    "bf16+8bit": Choice("bf16+8bit", 4),
    "fp8": Choice("fp8", 20),
    "fp8, E4M3": Choice("fp8", 6, E4M3),
    "fp8, first qkv in bf16": Choice("fp8", 10, None, ("Block_0/qkv",)),
    "fp8, backward pass in bf16": Choice("fp8", 8, fp8.DelayedScaling(dgrad="bfloat16", wgrad="bfloat16")),
    "fp8, history of 16": Choice("fp8", 8, fp8.DelayedScaling(amax_history_len=16)),
    "fp8, calibrated": Choice("fp8", 8, calibrated=True),
    "fp8, E4M3, first qkv in bf16": Choice("fp8", 4, E4M3, ("Block_0/qkv",)),
    "fp8, first block in bf16": Choice("fp8", 4, None, ("Block_0/",)),
    "fp8, last block in bf16": Choice("fp8", 4, None, ("Block_1/",)),
    "fp16+fp8": Choice("fp16+fp8", 4),
    "CurrentScaling": Choice("fp8", 4, fp8.CurrentScaling()),
    "RowwiseScaling": Choice("fp8", 4, fp8.RowwiseScaling()),
    "BlockScaling": Choice("fp8", 4, fp8.BlockScaling()),
    "MXFP8": Choice("fp8", 4, fp8.MXFP8()),
    "NVFP4": Choice("fp8", 2, fp8.NVFP4()),
    "NVFP4, last block in bf16": Choice("fp8", 3, fp8.NVFP4(), ("Block_1/",)),
}


@dataclasses.dataclass(frozen=True)
class Parity:
    """The runs, and the file for the results."""

    policies: tuple[str, ...] = tuple(CHOICES)
    seeds: int | None = None  # of each policy; the default is as many as its row of CHOICES says
    steps: int = 1000
    width: int = 96
    processes: int = 2  # of one thread each
    restart: bool = False  # forget the runs in the file
    json: Path = Path(__file__).parents[1] / "benchmarks" / "results" / "parity.json"


def choice_of(name: str) -> Choice:
    """The row of CHOICES; any other policy of train.py works as well."""
    return CHOICES.get(name) or Choice(name, 6)


def is_in_fp8(choice: Choice, path: str) -> bool:
    """Whether a policy with a recipe runs the layer at `path` in it."""
    return path.startswith("Block_") and not path.startswith(choice.in_16_bits)


class Trainer(NamedTuple):
    """The compiled programs of one policy."""

    start: Callable[[jax.Array], Any]  # key -> TrainState
    steps: Callable[..., Any]  # (TrainState, key, tokens uint8 [CHUNK, batch, T + 1]) -> (TrainState, skips [CHUNK])
    held_out: Callable[..., jax.Array]  # (params, tokens uint8 [batches, batch, T + 1]) -> f32[], in 16 bits
    held_out_in_fp8: Callable[..., jax.Array] | None  # in the recipe


@functools.cache  # a process compiles each policy once, for all seeds
def trainer_of(name: str, cfg: Config) -> Trainer:
    """The programs of the policy `name`, on one device."""
    choice = choice_of(name)
    policy, recipe, small_state = precision_of(choice.base)
    recipe = choice.recipe or recipe
    policy = dataclasses.replace(policy, recipe=recipe)
    model = Transformer(cfg.width, cfg.layers, cfg.heads)
    scaler = jaxmp.DynamicLossScale(cfg.initial_scale, growth_interval=cfg.growth_interval)
    tx = jaxmp.mixed_precision(
        optimizer_of(cfg, small_state),
        policy,
        loss_scale=scaler if policy.param_dtype == jnp.float16 else None,
        remainder_bits=8 if small_state else None,
    )

    def in_fp8(enabled: bool = True) -> Any:
        chosen = functools.partial(is_in_fp8, choice)
        return fp8.autocast(recipe, enabled=enabled and recipe is not None, filter=lambda path, _: chosen(path))

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        rngs = None if key is None else {"rounding": key}  # for NVFP4
        return next_byte_loss(model.apply({"params": params}, tokens[:, :-1], rngs=rngs), tokens)

    @jax.jit
    def start(key: jax.Array) -> jaxmp.linen.TrainState:
        with in_fp8():
            params = model.init(key, jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
        return jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def start_calibrated(key: jax.Array) -> jaxmp.linen.TrainState:
        with in_fp8():
            return start(key).calibrate(loss_fn, sample(load_text()[0], cfg, 0))

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state: jaxmp.linen.TrainState, key: jax.Array, batches: jax.Array) -> Any:
        def step(state: jaxmp.linen.TrainState, tokens: jax.Array) -> Any:
            now = jax.random.fold_in(key, state.step)
            with in_fp8():
                _, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, now, opt_state=state.opt_state)
            state = state.apply_gradients(grads=grads)
            return state, state.metrics["skipped"]

        return jax.lax.scan(step, state, batches)

    def evaluation(*, enabled: bool) -> Callable[..., jax.Array]:
        def mean_loss(params: Any, batches: jax.Array) -> jax.Array:
            with in_fp8(enabled), jaxmp.autocast(dataclasses.replace(policy, recipe=None)):
                return jax.lax.map(functools.partial(loss_fn, params), batches).mean()

        return jax.jit(mean_loss)

    begin = start_calibrated if choice.calibrated else start
    return Trainer(begin, steps, evaluation(enabled=False), None if recipe is None else evaluation(enabled=True))


def train_one(name: str, seed: int, cfg: Config) -> dict[str, Any]:
    """One run; a row of the results."""
    started = time.perf_counter()
    cfg = dataclasses.replace(cfg, seed=0)
    trainer, seeded = trainer_of(name, cfg), dataclasses.replace(cfg, seed=seed)
    train_text, held_out_text = load_text()
    held_out = np.stack(list(walk(held_out_text, cfg)))
    key = jax.random.key(seed)
    state = trainer.start(key)
    skipped, losses = 0, []
    for first in range(0, cfg.steps, CHUNK):
        batches = np.stack([sample(train_text, seeded, i) for i in range(first, first + CHUNK)])
        state, skips = trainer.steps(state, key, batches)
        skipped += int(skips.sum())
        if first + EVALUATIONS * CHUNK >= cfg.steps:
            losses.append(float(trainer.held_out(state.params, held_out)))
    run = {"policy": name, "seed": seed, "held_out": float(np.mean(losses)), "last": losses[-1]}
    if trainer.held_out_in_fp8 is not None:
        run["last_in_fp8"] = float(trainer.held_out_in_fp8(state.params, held_out))
    return run | {"skipped": skipped, "seconds": round(time.perf_counter() - started, 1)}


def fp8_flops(name: str, cfg: Config) -> float:
    """The part of the FLOPs of all matmuls that run in the recipe of the policy, in percent."""
    choice = choice_of(name)
    if choice.recipe is None and precision_of(choice.base).recipe is None:
        return 0.0
    model = Transformer(cfg.width, cfg.layers, cfg.heads)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
    in_fp8, total = 0, cfg.layers * 2 * cfg.seq_len * cfg.width  # a token's products in attention
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        layer, _, leaf_name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")
        if leaf_name == "kernel":
            total += leaf.size
            in_fp8 += leaf.size * is_in_fp8(choice, layer)
    return 100 * in_fp8 / total


def baseline_of(policy: str, policies: tuple[str, ...]) -> str:
    """The policy to compare with: bf16 for fp8 and for small state, else fp32; the first one where it is missing."""
    has_bf16_inside = precision_of(choice_of(policy).base).recipe is not None or "+" in policy
    wanted = "bf16" if has_bf16_inside else "fp32"
    return wanted if wanted in policies else policies[0]


def summarize(runs: list[dict[str, Any]], cfg: Config) -> dict[str, dict[str, Any]]:
    """For each policy its losses and, over the seeds that its baseline has too, the gap with its standard error."""
    by_policy: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], {})[run["seed"]] = run
    summary = {}
    for name, of_seed in by_policy.items():
        baseline = baseline_of(name, tuple(by_policy))
        losses = np.array([run["held_out"] for run in of_seed.values()])
        row = {
            "baseline": baseline,
            "seeds": len(losses),
            "mean": float(losses.mean()),
            "std": _std(losses),
            "fp8_flops_percent": round(fp8_flops(name, cfg), 1),
            "skipped_steps": sum(run["skipped"] for run in of_seed.values()),
        }
        shared = sorted(of_seed.keys() & by_policy[baseline].keys())
        if name != baseline and shared:
            base = np.array([by_policy[baseline][seed]["held_out"] for seed in shared])
            row |= _gap("", np.array([of_seed[seed]["held_out"] for seed in shared]) - base, base)
        if "last_in_fp8" in next(iter(of_seed.values())):
            base = np.array([run["last"] for run in of_seed.values()])
            row |= _gap("in_fp8_", np.array([run["last_in_fp8"] for run in of_seed.values()]) - base, base)
        summary[name] = row
    return summary


def _std(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _gap(prefix: str, gaps: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """The mean of paired gaps to `base`, and its standard error."""
    scale = 100 / base.mean()
    deviation = _std(gaps)
    return {
        f"{prefix}gaps": len(gaps),
        f"{prefix}mean_gap": float(gaps.mean()),
        f"{prefix}std_of_gaps": deviation,
        f"{prefix}mean_gap_percent": float(gaps.mean() * scale),
        f"{prefix}standard_error_percent": None if deviation is None else float(deviation * scale / len(gaps) ** 0.5),
    }


def table(summary: dict[str, dict[str, Any]]) -> Table:
    """The summary for a reader, in 80 columns."""
    title = "held-out loss; gaps to fp32, of fp8 to bf16, ± their standard errors, in percent"
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for name in ("policy", "seeds", "loss", "gap", "fp8 FLOPs", "in fp8", "skips"):
        out.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for name, row in summary.items():
        error = row.get("standard_error_percent")
        share = row["fp8_flops_percent"]
        out.add_row(
            name,
            str(row["seeds"]),
            f"{row['mean']:.4f}",
            _percent(row.get("mean_gap_percent")) + (f" ± {error:.2f}" if error is not None else ""),
            f"{share:.0f} %" if share else "",
            _percent(row.get("in_fp8_mean_gap_percent")),
            str(row["skipped_steps"]),
        )
    return out


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def config_of(cfg: Config) -> dict[str, Any]:
    """What all runs of a file must share."""
    names = ("steps", "batch_size", "seq_len", "width", "layers", "heads", "learning_rate", "warmup", "weight_decay")
    names += ("max_norm", "initial_scale", "growth_interval")
    return {name: getattr(cfg, name) for name in names} | {
        "held_out_after_steps": [cfg.steps - CHUNK * i for i in range(EVALUATIONS)][::-1],
        "python": platform.python_version(),
        "packages": {m.__name__: m.__version__ for m in (jax, optax, jaxmp)},
    }


def stored_runs(path: Path, config: dict[str, Any], *, restart: bool) -> list[dict[str, Any]]:
    """The runs in the file; an error where they were made with another config."""
    if restart or not path.exists():
        return []
    found = json.loads(path.read_text())
    before = found.get("config", {})
    if changed := [name for name in config | before if config.get(name) != before.get(name)]:
        raise SystemExit(
            f"{path} holds runs of another config: "
            + "; ".join(f"{name} was {before.get(name)}, is {config.get(name)}" for name in changed)
            + ". Runs of two configs do not belong into one mean: name another file by --json, or start anew by "
            "--restart."
        )
    return found["runs"]


def store(path: Path, config: dict[str, Any], runs: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Writes the results, whole or not at all."""
    order = {name: i for i, name in enumerate(CHOICES)}
    runs = sorted(runs, key=lambda run: (order.get(run["policy"], len(order)), run["policy"], run["seed"]))
    results = {
        "command": "python examples/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": "one CPU core for each run",
        "versions": {"python": config["python"], **config["packages"]},
        "config": config,
        "summary": {name: summary[name] for name in sorted(summary, key=lambda name: order.get(name, len(order)))},
    }
    rows = ",\n".join("    " + json.dumps(run) for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=2)[:-2] + f',\n  "runs": [\n{rows}\n  ]\n}}\n')
    partial.replace(path)


def todo(parity: Parity, runs: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(policy, seed) of the runs that are missing, so that all policies proceed alike."""
    seeds = {name: parity.seeds or choice_of(name).seeds for name in parity.policies}
    missing = {(name, seed) for name in seeds for seed in range(seeds[name])}
    missing -= {(run["policy"], run["seed"]) for run in runs}
    return sorted(missing, key=lambda job: ((job[1] + 1) / seeds[job[0]], parity.policies.index(job[0])))


def main(parity: Parity, console: Console | None = None) -> None:
    """Trains what is missing, writes after each run, prints."""
    console = console or Console(highlight=False)
    if parity.steps % CHUNK or parity.steps < CHUNK * EVALUATIONS:
        raise SystemExit(f"--steps must be a multiple of {CHUNK}, {EVALUATIONS} of them or more; got {parity.steps}")
    cfg = Config(steps=parity.steps, width=parity.width)
    config = config_of(cfg)
    runs = stored_runs(parity.json, config, restart=parity.restart)
    jobs = todo(parity, runs)
    console.print(f"{len(runs)} runs are in {parity.json.name}, {len(jobs)} are missing")
    if jobs:
        run_missing(parity, cfg, jobs, runs, console)
    store(parity.json, config, runs, summarize(runs, cfg))
    console.print(table(summarize(runs, cfg)))


def run_missing(
    parity: Parity, cfg: Config, jobs: list[tuple[str, int]], runs: list[dict[str, Any]], console: Console
) -> None:
    """Trains `jobs`, (policy, seed) each, and adds them to `runs` and to the file as they end."""
    pool = pool_of(parity.processes)
    columns = (progress.MofNCompleteColumn(), progress.BarColumn(), progress.TextColumn("{task.description}"))
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=len(jobs))
        try:
            for done in concurrent.futures.as_completed([pool.submit(train_one, *job, cfg) for job in jobs]):
                run = done.result()
                runs.append(run)
                store(parity.json, config_of(cfg), runs, summarize(runs, cfg))
                bar.update(task, advance=1, description=f"{run['policy']}, seed {run['seed']}: {run['held_out']:.4f}")
        except KeyboardInterrupt:
            raise SystemExit(
                f"interrupted: the same command makes the {len(jobs)} runs that were missing, less those that finished"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def pool_of(processes: int) -> concurrent.futures.Executor:
    """Processes that train, each with one thread; an interrupt from the keyboard ends them at once."""
    os.environ["NPROC"] = "1"  # so many threads XLA starts in each of them; more would only wait for each other
    context = multiprocessing.get_context("spawn")
    on_interrupt = (signal.SIGINT, signal.SIG_DFL)
    return concurrent.futures.ProcessPoolExecutor(processes, context, signal.signal, on_interrupt)


if __name__ == "__main__":
    main(tyro.cli(Parity, description=__doc__))
