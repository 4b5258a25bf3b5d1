"""The results of a training run, and how the examples show them: a table, events, curves, a JSON record."""

import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
from rich import box, progress
from rich.console import Console
from rich.table import Table

import jaxmp

matplotlib.use("Agg")  # plots go to files, also without a screen
import matplotlib.pyplot as plt

OnLog = Callable[[int, float, float], None]  # (steps taken, loss, loss scale)


@dataclasses.dataclass
class Run:
    """The results of one policy; lists have one entry per step."""

    policy: str
    param_bytes: int
    state_bytes: int
    losses: list[Any] = dataclasses.field(default_factory=list)  # nats per byte, of the training batch
    loss_scales: list[Any] = dataclasses.field(default_factory=list)  # after the step
    skipped: list[Any] = dataclasses.field(default_factory=list)  # whether the step was skipped
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)  # steps taken -> loss on the held-out text
    seconds: float = 0.0  # compilation included
    precision: str = ""  # which part of the loss's matmuls runs in which dtype

    def log(self, metrics: dict[str, Any], opt_state: Any, cfg: Any, on_log: OnLog) -> None:
        """Keeps the metrics of a step on the device; every `log_every` steps they are fetched and checked."""
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


def gap_percent(run: Run, baseline: Run) -> float:
    return 100 * (run.final_held_out / baseline.final_held_out - 1)


def events(run: Run) -> Iterator[str]:
    """A line for each step that was skipped or changed the loss scale."""
    before = run.loss_scales[0]
    for i, (scale, skipped) in enumerate(zip(run.loss_scales, run.skipped, strict=True)):
        moved = f"loss scale {before:.0f} -> {scale:.0f}" if scale != before else f"loss scale stays {scale:.0f}"
        if skipped:
            yield f"step {i}: a device overflowed, all skip; {moved}" + ("" if scale != before else " (hysteresis)")
        elif scale != before:
            yield f"step {i}: {moved}"
        before = scale


def table(runs: list[Run]) -> Table:
    """The final table."""
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


# The curves coincide, so each is drawn thinner than the one below it. (color, line, width, marker, marker size)
STYLES = (
    ("0.75", "-", 5.0, "o", 12.0),
    ("#0072b2", "-", 2.5, "s", 8.0),
    ("#009e73", "--", 2.0, "d", 6.0),
    ("#d55e00", ":", 2.0, "^", 4.0),
    ("black", "-.", 1.0, "x", 4.0),
)


def plot(runs: list[Run], cfg: Any, path: Path) -> None:
    """Loss curves, their distance from the first run, and the loss scale with skipped steps marked."""
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
    gap.text(1, -0.95, "±1% ", va="bottom", ha="right", color="0.4", transform=gap.get_yaxis_transform())
    gap.set(title=f"Training loss against {runs[0].policy}", xlabel="step", ylabel="difference [%]", ylim=(-2, 2))
    scale.set(title="Loss scale", xlabel="step", ylabel="loss scale")
    scale.set_yscale("log", base=2)
    scale.margins(y=0.25)
    for axes in (loss, gap, scale):
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, **({"loc": "lower left", "ncols": 3} if axes is gap else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    plt.close(fig)


def record(runs: list[Run], cfg: Any) -> dict[str, Any]:
    """The final table as data, with the settings needed to repeat it."""
    settings = dataclasses.asdict(cfg)
    for name in ("out", "figure", "json", "log", "coordinator", "num_processes", "process_id"):
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
