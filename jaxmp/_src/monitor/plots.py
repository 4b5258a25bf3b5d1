"""Plots of a run, from the numbers that `Monitor` recorded. They can be read in black and white as well.

Lines differ in their dashes, and shades in their lightness. A cross marks a skipped step or a value that is not finite.
Each function returns a matplotlib Figure: a notebook shows it, and `figure.savefig` writes it to a file.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.base import optional
from jaxmp._src.monitor.monitor import Monitor
from jaxmp._src.monitor.step_stats import StepStats
from jaxmp._src.monitor.tensor_stats import FORMATS, HIGHEST, LOWEST, TensorStats

_STYLES = (("black", "-"), ("#0072b2", "--"), ("#d55e00", ":"), ("0.55", "-."))  # different in lightness and in dashes

Rows = Iterable[Mapping[str, float]]
Samples = Iterable[tuple[int, StepStats]]


def plot_loss_and_scale(runs: Monitor | Rows | Mapping[str, Monitor | Rows], *, smooth: int = 1) -> Any:
    """Loss and loss scale over the steps, with a mark at each skipped step.

    Args:
      runs: a `Monitor`; or its rows (`monitor.steps`: dicts with "step", "loss", "loss_scale", "skipped"); or a dict of
        several of these by name.
      smooth: number of steps over which the loss is averaged.

    Returns:
      A matplotlib Figure of two panels.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no step was recorded.

    Example:
      >>> rows = [{"step": i, "loss": 1 / (i + 1), "loss_scale": 8.0, "skipped": i == 2} for i in range(5)]
      >>> figure = plot_loss_and_scale(rows)
      >>> [axes.get_ylabel() for axes in figure.axes]
      ['loss', 'loss scale']
    """
    named = runs if isinstance(runs, Mapping) else {"": runs}
    figure, (above, below) = _figure(2, height=4.6, sharex=True, height_ratios=(2, 1))
    marked = False
    for k, ((name, run), (color, dashes)) in enumerate(zip(named.items(), itertools.cycle(_STYLES), strict=False)):
        width = max(1.2, 1.8 + 0.8 * (len(named) - 1) - 0.8 * k)  # each curve is thinner, so equal curves stay visible
        rows = _recorded(run, "steps", "a step must be recorded; got none. Call Monitor.update in the training loop.")
        steps, skipped = _column(rows, "step"), _column(rows, "skipped") == 1
        loss, scale = _column(rows, "loss"), _column(rows, "loss_scale")
        above.plot(steps, _smoothed(loss, smooth), dashes, color=color, lw=width, label=name or None)
        below.step(steps, scale, where="post", ls=dashes, color=color, lw=width)
        if skipped.any():
            below.plot(
                steps[skipped], scale[skipped], "x", color=color, ms=7, mew=1.6, label="" if marked else "skipped"
            )
            top = above.get_xaxis_transform()  # puts the crosses along the lower edge
            above.plot(steps[skipped], np.full(skipped.sum(), 0.03), "x", color=color, ms=5, mew=1.2, transform=top)
            marked = True
    above.set(ylabel="loss")
    below.set(xlabel="step", ylabel="loss scale")
    below.set_yscale("log", base=2)
    below.margins(y=0.2)
    _finish(above, below)
    return figure


def plot_exponents(
    stats: StepStats | TensorStats, *, names: Sequence[str] | None = None, loss_scale: float | None = None
) -> Any:
    """The magnitudes of gradients and the ranges of the formats, before and after loss scaling.

    Args:
      stats: the `StepStats` of one step (its gradients are drawn), or `TensorStats` of any tensors; with histogram.
      names: the tensors to draw, summed; None for all.
      loss_scale: a power of two. For `StepStats`, whose gradients are scaled, the scale that they contain (None: the
        scale of that step). For `TensorStats`, the factor of the second curve. With 1, only one curve is drawn.

    Returns:
      A matplotlib Figure. Upper panel: the share of values in each octave. Lower panel: the range of each format, with
      subnormals hatched.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: `stats` is something else, such as a `Monitor` or a pair of step and statistics.
      ValueError: there is no such tensor, no histogram, or the step was not sampled.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> stats = jaxmp.monitor.tensor_stats({"w": 2.0 ** -jnp.arange(20.0)})
      >>> figure = plot_exponents(stats, loss_scale=1024.0)
      >>> [line.get_label() for line in figure.axes[0].lines]
      ['unscaled', 'times the loss scale, 2^10']
    """
    if not isinstance(stats, StepStats | TensorStats):
        got = type(stats).__name__
        raise TypeError(f"stats must be of one step; got {got}. Pass monitor.samples[-1][1].")
    tensors = stats.grads if isinstance(stats, StepStats) else stats
    if loss_scale is None:
        loss_scale = float(stats.loss_scale) if isinstance(stats, StepStats) else 1.0
    if not bool(tensors.sampled):
        raise ValueError("the step must be sampled; got one where `when` was False.")
    for name in names or ():
        if name not in tensors.names:
            raise ValueError(f"names must be of tensors; got {name!r}. There are {', '.join(tensors.names)}.")
    chosen = [tensors.names.index(name) for name in (tensors.names if names is None else names)]
    if not chosen:
        raise ValueError("stats must have a float tensor; got none to draw.")
    octaves = np.asarray(tensors.octaves)[chosen]
    if octaves.shape[1] == 0:
        raise ValueError("statistics must have octaves; got none. Compute them with histogram=True.")
    weights = np.asarray(tensors.sizes, np.float64)[chosen]
    share = 100 * (octaves * weights[:, None]).sum(0) / weights.sum()
    exponents = np.arange(LOWEST, HIGHEST + 1)
    shift = round(np.log2(loss_scale))
    figure, (above, below) = _figure(2, height=4.2, sharex=True, height_ratios=(2.4, 1))
    scaled = isinstance(stats, StepStats)  # the gradients of a step contain the loss scale; other tensors do not
    curves = [("unscaled", -shift if scaled else 0, _STYLES[0])]
    if shift:
        curves.append((f"times the loss scale, 2^{shift}", 0 if scaled else shift, _STYLES[1]))
    for label, by, (color, dashes) in curves:
        above.plot(exponents + 0.5 + by, share, dashes, color=color, lw=1.8, drawstyle="steps-mid", label=label)
        above.fill_between(exponents + 0.5 + by, share, step="mid", color=color, alpha=0.12)
    zeros = float((np.asarray(tensors.zeros)[chosen] * weights).sum() / weights.sum())
    above.set(ylabel="values in an octave [%]", title=f"{100 * zeros:.2g}% are zero", ylim=(0, None))
    shown = [(name, jnp.finfo(dtype)) for name, dtype in FORMATS.items()]
    for row, (_, f) in enumerate(reversed(shown)):
        low, normal, high = (np.log2(float(x)) for x in (f.smallest_subnormal, f.smallest_normal, f.max))
        below.barh(row, high - normal, left=normal, height=0.55, color="0.6", edgecolor="black", lw=0.8)
        below.barh(row, normal - low, left=low, height=0.55, color="white", edgecolor="black", hatch="////", lw=0.8)
    below.set_yticks(range(len(shown)), [name for name, _ in reversed(shown)])
    used = exponents[share > 0.001] if np.any(share > 0.001) else exponents
    ends = [used.min() + min(by for _, by, _ in curves), used.max() + max(by for _, by, _ in curves)]
    below.set(xlabel="log2 of the magnitude (hatched: subnormal)", xlim=(min(ends[0], -26) - 1, max(ends[1], 17) + 2))
    _finish(above, below)
    return figure


def plot_fp8(samples: Monitor | Samples, *, paths: Sequence[str] | None = None) -> Any:
    """Amax and scale of fp8 tensors over the steps.

    Args:
      samples: a `Monitor`, or its samples.
      paths: paths of at most four scale leaves; None for the first four.

    Returns:
      A matplotlib Figure. Upper panel: the amax of each tensor, with a cross where values were clipped. Lower panel:
      its scale.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no fp8 tensor was sampled, or none has that path.

    Example:
      >>> from jaxmp._src.monitor.step_stats import Fp8Stats
      >>> stats = Fp8Stats({"a": 3.0}, {"a": 64.0}, {"a": False})
      >>> sample = StepStats(None, None, None, stats, {}, 1.0)
      >>> [axes.get_ylabel() for axes in plot_fp8([(0, sample), (1, sample)]).axes]
      ['amax', 'scale']
    """
    own_samples = _samples(samples)
    known = list(own_samples[0][1].fp8.amax)
    if not known:
        raise ValueError("samples must have fp8 tensors with delayed scaling; got none.")
    for path in paths or ():
        if path not in known:
            raise ValueError(f"paths must name sampled fp8 tensors; got {path!r}. There are {', '.join(known)}.")
    figure, (above, below) = _figure(2, height=4.4, sharex=True)
    steps = [step for step, _ in own_samples]
    shown = list(paths or known)[: len(_STYLES)]
    for path, (color, dashes) in zip(shown, _STYLES, strict=False):
        amax = np.array([np.max(stats.fp8.amax[path]) for _, stats in own_samples])
        scale = np.array([np.min(stats.fp8.scale[path]) for _, stats in own_samples])
        clipped = np.array([np.any(stats.fp8.saturated[path]) for _, stats in own_samples])
        label = path.replace("_log2_scale", "").replace("Fp8DotGeneral_0/", "").replace("fp8_", "")
        above.plot(steps, np.where(amax > 0, amax, np.nan), dashes, color=color, lw=1.8, label=label)
        above.plot(np.array(steps)[clipped], amax[clipped], "x", color=color, ms=8, mew=1.8)
        if clipped.any():
            above.set_title("crosses: values outside the range were clipped", fontsize=10)
        below.step(steps, scale, where="post", ls=dashes, color=color, lw=1.8)
    above.set(ylabel="amax")
    below.set(xlabel="step", ylabel="scale")
    for axes in (above, below):
        axes.set_yscale("log", base=2)
    _finish(above, below)
    return figure


def plot_layers(samples: Monitor | Samples, *, of: str = "grads", what: str = "amax") -> Any:
    """A heat map with one row for each tensor and one column for each sampled step.

    Args:
      samples: a `Monitor`, or its samples.
      of: "grads", "params" or "activations".
      what: "amax", "smallest", "zeros" or "nonfinite"; or "overflow", "underflow" or "subnormal" with a format, such as
        "underflow/fp16".

    Returns:
      A matplotlib Figure: magnitudes as log2, shares in percent. A cross marks a tensor that is not finite.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: nothing was sampled, or there is no such statistic.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> params = {"w": jnp.ones(2)}
      >>> sample = jaxmp.monitor.step_stats(params, optax.sgd(0.1).init(params), params)
      >>> figure = plot_layers([(0, sample), (10, sample)], what="underflow/fp16")
      >>> figure.axes[0].get_xlabel(), [label.get_text() for label in figure.axes[0].get_yticklabels()]
      ('step', ['w'])
    """
    field, _, name = what.partition("/")
    kinds = ("amax", "smallest", "zeros", "nonfinite") if not name else ("overflow", "underflow", "subnormal")
    if field not in kinds or (name and name not in FORMATS) or of not in ("grads", "params", "activations"):
        raise ValueError(
            f"what must be such as 'amax' or 'underflow/fp16', of= grads, params or activations; got {what!r}, {of!r}."
        )
    by_step = [(step, stats) for step, s in _samples(samples) if (stats := getattr(s, of)) is not None]
    by_step = [(step, stats) for step, stats in by_step if bool(stats.sampled)]
    if not by_step or not by_step[0][1].names:
        raise ValueError(f"samples must have {of}; got none.")
    if len({stats.names for _, stats in by_step}) > 1:
        raise ValueError(f"all samples must have the same {of}; got different ones. Draw one model and one filter.")
    names = by_step[0][1].names
    values = np.stack([np.asarray(getattr(stats, field), np.float64) for _, stats in by_step], axis=1)
    if name:
        values = values[..., list(FORMATS).index(name)]
    bad = np.stack([np.asarray(stats.nonfinite) > 0 for _, stats in by_step], axis=1)
    is_magnitude = field in ("amax", "smallest")
    with np.errstate(divide="ignore"):
        values = np.where(values > 0, np.log2(values), np.nan) if is_magnitude else 100 * values
    figure, (axes,) = _figure(1, height=1.4 + 0.22 * len(names), width=8.0)
    limits: dict[str, Any] = {} if is_magnitude else {"vmin": 0.0, "vmax": max(1.0, float(np.nanmax(values)))}
    image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", **limits)
    rows, columns = np.nonzero(bad)
    axes.plot(columns, rows, "x", color="white", ms=6, mew=2.6)
    axes.plot(columns, rows, "x", color="black", ms=5, mew=1.2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    every = max(1, len(by_step) // 8)
    axes.set_xticks(range(0, len(by_step), every), [str(step) for step, _ in by_step[::every]])
    axes.set(xlabel="step", title=f"{what} of {of}" + (" (cross: not finite)" if bad.any() else ""))
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="log2 of the magnitude" if is_magnitude else "share of the values [%]")
    return figure


def _figure(panels: int, *, height: float, width: float = 7.0, sharex: bool = False, height_ratios: Any = None) -> Any:
    plt = optional.load("matplotlib.pyplot", extra="plots")
    size = {"figsize": (width, height), "dpi": 120, "height_ratios": height_ratios}
    figure, axes = plt.subplots(panels, layout="constrained", sharex=sharex, squeeze=False, **size)
    plt.close(figure)  # removes it from pyplot's list of open figures; the caller keeps it
    return figure, axes[:, 0]


def _finish(*panels: Any) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        if any(not label.startswith("_") for label in axes.get_legend_handles_labels()[1]):
            axes.legend(frameon=False, fontsize=8)


def _samples(run: Monitor | Samples) -> list[tuple[int, StepStats]]:
    return _recorded(run, "samples", "a step must be sampled; got none. Pass stats= of step_stats to Monitor.update.")


def _recorded(run: Any, name: str, if_empty: str) -> list[Any]:
    if isinstance(run, Monitor):
        run.finish()
        run = getattr(run, name)
    records = list(run)
    if not records:
        raise ValueError(if_empty)
    return records


def _column(rows: list[Mapping[str, float]], key: str) -> np.ndarray:
    return np.array([row.get(key, np.nan) for row in rows], np.float64)


def _smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the last `width` finite values."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[width:], counts[width:] = sums[width:] - sums[:-width], counts[width:] - counts[:-width]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
