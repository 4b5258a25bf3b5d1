"""`Monitor`: records a run on the host and warns when something is wrong.

The compiled step returns a few scalars (`get_metrics`) and, in some steps, statistics (`step_stats`). `Monitor.update`
stores the arrays without waiting for the device, and reads them after newer steps have started. It keeps the numbers
for plots and tables, and checks them with the rules of `rules.py`. Each new finding becomes a warning, once.
"""

import csv
import os
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._src.base.warn import warn
from jaxmp._src.monitor import log, rules
from jaxmp._src.monitor.rules import Finding
from jaxmp._src.monitor.step_stats import StepStats


class MonitorWarning(UserWarning):
    """The warning that `Monitor` gives for a finding.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", MonitorWarning)  # a run inside this block stops at the first finding
      ...     issubclass(MonitorWarning, UserWarning)
      True
    """


class Monitor:
    """Records the numbers of a run and names what is wrong with it.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(1.0))
      >>> opt_state = tx.init({"w": jnp.ones(2)})
      >>> monitor = Monitor(warn=False)
      >>> for step in range(5):
      ...     bad = {"w": jnp.full(2, jnp.inf, jnp.float16)}
      ...     _, opt_state = tx.update(bad, opt_state, {"w": jnp.ones(2, jnp.float16)})
      ...     found = monitor.update(step, jaxmp.get_metrics(opt_state), loss=1.0)
      >>> found = monitor.finish()
      >>> print(monitor.findings[0].kind, monitor.steps[-1]["loss_scale"])
      stuck_scale 1.0

    Attributes:
      steps: one dict for each step: "step", "loss" and the metrics, as numbers.
      samples: `(step, StepStats)` of the sampled steps, as numpy arrays, without probes.
      findings: list of `Finding`; one for each kind and path.
    """

    def __init__(
        self,
        *,
        window: int = 1000,
        skip_ratio: float = 0.01,
        lost: float = 0.75,
        dead: float = 0.5,
        patience: int = 3,
        lag: int = 2,
        keep: int = 100_000,
        keep_samples: int = 1000,
        warn: bool = True,
    ) -> None:
        """Sets the thresholds.

        Args:
          window: number of last steps in which skips are counted. The rule about skips waits for this many steps; but
            if one step in ten is skipped, again and again, for 80.
          skip_ratio: the largest healthy share of skipped steps.
          lost: the largest healthy share of subnormal values in a float16 gradient.
          dead: among the values of a param that have gradients, the largest healthy share that is unchanged from one
            sample to the next.
          patience: how often something must be seen before it is a finding: overflows, underflow and saturation in this
            many of the last 3 * patience samples; zero gradients and dead updates in samples in a row; overflows at the
            lower bound of the scale and high losses in steps in a row.
          lag: number of steps in flight. A step is read after this many newer ones have started.
          keep, keep_samples: how many steps and samples are kept; the oldest are dropped first.
          warn: whether a finding also gives a `MonitorWarning`.

        Raises:
          ValueError: `window`, `patience`, `keep` or `keep_samples` is below 1.
        """
        for name, value in {"window": window, "patience": patience, "keep": keep, "keep_samples": keep_samples}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}.")
        self.steps: deque[dict[str, float]] = deque(maxlen=keep)
        self.samples: deque[tuple[int, StepStats]] = deque(maxlen=keep_samples)
        self.findings: list[Finding] = []
        self._skip_ratio, self._lost, self._dead, self._patience = skip_ratio, lost, dead, patience
        self._lag, self._warn = lag, warn
        self._waiting: deque[tuple[int, Any]] = deque()
        self._skipped: deque[bool] = deque(maxlen=window)
        self._losses, self._stale_masters = rules.Losses(), rules.StaleMasters()
        self._absences, self._dead_updates = rules.Absences(), rules.DeadUpdates()
        self._level = 0.0  # the largest loss scale that the run began with, or that an overflow left
        self._finite: set[str] = set()  # params and carried arrays that were finite in a sample
        self._suspected: deque[set[tuple[str, str]]] = deque(maxlen=3 * patience)  # of the last samples: kind, path

    def update(
        self, step: int, metrics: dict[str, Any], *, loss: Any = None, stats: StepStats | None = None
    ) -> list[Finding]:
        """Takes the results of a step. Reads older steps and returns what the rules find in them.

        Args:
          step: the number of the step.
          metrics: `jaxmp.get_metrics(opt_state)` after the update, and any scalars that you add.
          loss: the loss of the step, a scalar.
          stats: the result of `step_stats`: None, sampled or not.

        Returns:
          New findings; usually an empty list.

        Raises:
          TypeError: `metrics` is not a dict (for example, a TrainState or an opt_state), `stats` is not a `StepStats`,
            `loss` is more than one value, or the call is inside the compiled step.
        """
        # Without these checks a wrong argument would fail two steps later; inside a compiled step it would not fail.
        if not isinstance(metrics, Mapping):
            got = type(metrics).__name__
            raise TypeError(f"metrics must be a dict of scalars; got {got}. Pass jaxmp.get_metrics(opt_state).")
        if stats is not None and not isinstance(stats, StepStats):
            raise TypeError(f"stats must be the result of step_stats; got {type(stats).__name__}.")
        if (count := len(jax.tree.leaves(loss))) > 1:
            raise TypeError(f"loss must be the loss alone; got {type(loss).__name__} of {count} values.")
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((step, dict(metrics), loss, stats))):
            raise TypeError("Monitor.update must be outside of jit; got a traced value. Return it from the step first.")
        self._waiting.append((step, (dict(metrics) | ({} if loss is None else {"loss": loss}), stats)))
        findings = []
        while len(self._waiting) > self._lag:
            findings += self._read(*self._waiting.popleft())
        return findings

    def finish(self) -> list[Finding]:
        """Reads the steps that are still in flight, and returns new findings. Call it at the end of a run."""
        findings = []
        while self._waiting:
            findings += self._read(*self._waiting.popleft())
        return findings

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the steps that are kept to a CSV file, with one column for each metric."""
        self.finish()
        columns = dict.fromkeys(key for row in self.steps for key in row)
        with open(path, "w", newline="") as f:
            writer = csv.DictWriter(f, list(columns))
            writer.writeheader()
            writer.writerows(self.steps)

    def __str__(self) -> str:
        skipped = sum(row.get("skipped", 0.0) == 1 for row in self.steps)
        head = f"{len(self.steps)} steps, {skipped} skipped, {len(self.samples)} sampled, {len(self.findings)} findings"
        return "\n".join([head, *map(str, self.findings)])

    def _read(self, step: int, arrays: Any) -> list[Finding]:
        metrics, stats = jax.device_get(jax.tree.map(_of_this_process, arrays))
        row = {"step": float(step)} | {key: log.as_number(value) for key, value in metrics.items()}
        if stats is not None and np.ndim(stats.loss_scale):  # pmap made several copies
            stats = jax.tree.map(lambda x: x[0], stats)
        sample = stats if stats is not None and bool(stats.grads.sampled) else None
        is_skipped, is_pinned = row.get("skipped", 0.0) == 1, row.get("pinned_overflows", 0.0) > 0
        patience = self._patience
        if not self.steps or is_skipped:
            self._level = max(self._level, row.get("loss_scale", 1.0))
        findings = [
            *rules.stuck_scale(step, row, patience, self._level),
            *rules.fp8_gradients(step, row),
            *self._losses.take(step, row, patience),
            *self._stale_masters.take(step, row, stats),
            *self._absences.take(step, row, sample, patience),
            *self._dead_updates.take(step, row, sample, self._dead, patience),
        ]
        if sample is not None:
            suspicions = [
                *rules.overflow(step, sample, self._finite),
                *rules.near_overflow(step, sample),
                *rules.underflow(step, sample, self._lost),
                *rules.saturation(step, sample, row),
            ]
            # A loss scale that falls to its level overflows in each step: that counts as one overflow.
            falls = bool(self._skipped and self._skipped[-1] and np.isfinite(row.get("loss", np.nan)))
            if falls and not is_pinned:
                suspicions = [s for s in suspicions if s.kind != "overflow" or not s.path.startswith("grads")]
            self._suspected.append({(s.kind, s.path) for s in suspicions})
            times = Counter(key for seen in self._suspected for key in seen)
            # What the forward pass makes infinite, no loss scale repairs: once is enough.
            is_sure = lambda s: s.kind == "overflow" and s.path.startswith("activations/")  # noqa: E731
            findings += [s for s in suspicions if times[s.kind, s.path] >= patience or is_sure(s)]
            self.samples.append((step, sample._replace(probes={})))  # probes are most of the bytes, and were compared
        self.steps.append(row)
        self._skipped.append(is_skipped)
        overflows = Counter(path for seen in self._suspected for kind, path in seen if kind == "overflow")
        suspect = max(overflows, key=overflows.__getitem__, default="")
        is_full = len(self._skipped) == self._skipped.maxlen
        findings += rules.skips(step, list(self._skipped), is_full, is_pinned, self._skip_ratio, suspect)
        known = {(old.kind, old.path) for old in self.findings}
        new = [f for f in findings if (f.kind, f.path) not in known]
        self.findings += new
        for finding in new if self._warn else ():
            warn("monitor-finding", str(finding), MonitorWarning)
        return new


def _of_this_process(x: Any) -> Any:
    """`x`, or the part that this process holds; of probes, each process compares its own."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.concatenate([np.ravel(shard.data) for shard in x.addressable_shards])
    return x
