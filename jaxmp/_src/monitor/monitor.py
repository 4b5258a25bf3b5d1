"""A run, watched from the host: what it did, and what is wrong with it.

The compiled step returns a few scalars (`get_metrics`) and, now and then, statistics (`step_stats`). `Monitor.update`
takes them as they are, without waiting for the device: they are read when newer steps have been started. What it has
read it keeps, for pictures and tables, and holds against rules (`_rules`); what they find becomes a warning, once.
"""

import csv
import os
import warnings
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._src.monitor import log, rules
from jaxmp._src.monitor.rules import Finding
from jaxmp._src.monitor.step_stats import StepStats


class MonitorWarning(UserWarning):
    """What a rule of `Monitor` found.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", MonitorWarning)  # in here a run stops at the first finding
      ...     issubclass(MonitorWarning, UserWarning)
      True
    """


class Monitor:
    """Keeps the numbers of a run and says what is wrong with it.

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
      steps: dicts, one for each step: "step", "loss" and the metrics, as numbers.
      samples: `(step, StepStats)` of the steps that were looked at, as numpy arrays, without probes.
      findings: list of `Finding`, each kind once for a path.
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
          window: number of steps over which skips are counted; nothing is said before there are as many.
          skip_ratio: share of skipped steps that is still healthy.
          lost: share of a float16 gradient's values that may be subnormal.
          dead: share of a param's values with gradients that may stay as they are from one look to the next.
          patience: samples in a row in which a suspicion must stand (of overflowing gradients: among the last ten
            times as many), pinned overflows in a row, and losses after a skip, before anything is said.
          lag: steps that may be in flight before the oldest is read.
          keep, keep_samples: how many steps and samples are kept; the oldest go first.
          warn: whether a finding is also a `MonitorWarning`.
        """
        for name, value in {"window": window, "patience": patience, "keep": keep, "keep_samples": keep_samples}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.steps: deque[dict[str, float]] = deque(maxlen=keep)
        self.samples: deque[tuple[int, StepStats]] = deque(maxlen=keep_samples)
        self.findings: list[Finding] = []
        self._limits = {"skip_ratio": skip_ratio, "lost": lost, "dead": dead}
        self._patience, self._lag, self._warn = patience, lag, warn
        self._waiting: deque[tuple[int, Any]] = deque()
        self._skipped: deque[bool] = deque(maxlen=window)
        self._losses: deque[float] = deque(maxlen=50)  # of steps taken
        self._before_skip: list[float] = []
        self._since_skip: int | None = None
        self._high = 0  # losses in a row that were a jump
        self._earlier: StepStats | None = None
        self._taken_since_look = 0
        self._suspected: deque[set[tuple[str, str]]] = deque(maxlen=10 * patience)

    def update(
        self, step: int, metrics: dict[str, Any], *, loss: Any = None, stats: StepStats | None = None
    ) -> list[Finding]:
        """Takes what a step returned; what rules find in the steps that can be read by now is returned.

        Args:
          step: its number.
          metrics: `jaxmp.get_metrics(opt_state)` after the update, with whatever scalars you add.
          loss: of the step.
          stats: from `step_stats`, None or unsampled included.

        Returns:
          New findings, mostly none.

        Raises:
          TypeError: `metrics` is no dict (but a TrainState, say, or an opt_state), `stats` is not from `step_stats`, or
            the call stands inside of the compiled step.
        """
        _check_update(step, metrics, loss, stats)
        self._waiting.append((step, (dict(metrics) | ({} if loss is None else {"loss": loss}), stats)))
        found = []
        while len(self._waiting) > self._lag:
            found += self._read(*self._waiting.popleft())
        return found

    def finish(self) -> list[Finding]:
        """Reads what is still in flight: at the end of a run, or before a picture. Returns what was found in it."""
        found = []
        while self._waiting:
            found += self._read(*self._waiting.popleft())
        return found

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the steps that are kept into a file of comma-separated values, one column a metric."""
        self.finish()
        columns = dict.fromkeys(key for row in self.steps for key in row)
        with open(path, "w", newline="") as f:
            writer = csv.DictWriter(f, list(columns))
            writer.writeheader()
            writer.writerows(self.steps)

    def __str__(self) -> str:
        skipped = sum(row.get("skipped", 0.0) == 1 for row in self.steps)
        head = (
            f"{len(self.steps)} steps, {skipped} skipped, {len(self.samples)} looked at, {len(self.findings)} findings"
        )
        return "\n".join([head, *map(str, self.findings)])

    def _read(self, step: int, arrays: Any) -> list[Finding]:
        metrics, stats = jax.device_get(jax.tree.map(_of_this_process, arrays))
        row = {"step": float(step)} | {key: log.as_number(value) for key, value in metrics.items()}
        self.steps.append(row)
        found = list(self._of_step(step, row))
        stats = _first_copy(stats)
        if stats is not None and bool(stats.grads.sampled):
            found += self._of_sample(step, stats, row)
            self.samples.append((step, stats._replace(probes={})))  # which were compared, and are the most of it
        self._taken_since_look += row.get("skipped", 0.0) != 1  # the look came before the update
        known = {(old.kind, old.path) for old in self.findings}
        new = [f for f in found if (f.kind, f.path) not in known]
        self.findings += new
        for finding in new if self._warn else ():
            warnings.warn(str(finding), MonitorWarning, stacklevel=3)
        return new

    def _of_step(self, step: int, row: dict[str, float]) -> list[Finding]:
        skipped, loss = row.get("skipped", 0.0) == 1, row.get("loss")
        self._skipped.append(skipped)
        found = list(rules.stuck_scale(step, row, self._patience))
        if len(self._skipped) == self._skipped.maxlen:
            found += rules.skips(step, list(self._skipped), self._limits["skip_ratio"], self._most_suspect())
        if skipped:
            if self._since_skip is None:
                self._before_skip = list(self._losses)
            self._since_skip, self._high = 0, 0
        elif self._since_skip is not None:
            self._since_skip += 1
        if loss is None:
            return found
        jump = list(rules.loss_jump(step, loss, self._before_skip, self._since_skip, skipped))
        self._high = self._high + 1 if jump else 0
        if self._high >= self._patience or (jump and not np.isfinite(loss)):
            found += jump
        if not skipped and not jump:
            self._losses.append(loss)
            if self._since_skip is not None and self._since_skip > 10 * self._patience:
                self._since_skip = None  # over and done with
        return found

    def _of_sample(self, step: int, stats: StepStats, row: dict[str, float]) -> list[Finding]:
        suspicions = [
            *rules.overflow(step, stats),
            *rules.near_overflow(step, stats),
            *rules.underflow(step, stats, self._limits["lost"]),
            *rules.saturation(step, stats, row),
        ]
        if self._earlier is not None and self._taken_since_look:
            suspicions += rules.dead_update(step, stats, self._earlier, self._limits["dead"])
        self._earlier, self._taken_since_look = stats, 0
        self._suspected.append({(s.kind, s.path) for s in suspicions})
        return [s for s in suspicions if self._is_believed(s)]

    def _is_believed(self, suspicion: Finding) -> bool:
        key = (suspicion.kind, suspicion.path)
        if suspicion.kind == "overflow" and suspicion.path.startswith("activations/"):
            return True
        if suspicion.kind == "overflow":  # now and then it is how a dynamic scale finds its value
            return sum(key in s for s in self._suspected) >= self._patience
        last = list(self._suspected)[-self._patience :]
        return len(last) == self._patience and all(key in s for s in last)

    def _most_suspect(self) -> str:
        counts = Counter(path for s in self._suspected for kind, path in s if kind == "overflow")
        return counts.most_common(1)[0][0] if counts else ""


def _check_update(step: Any, metrics: Any, loss: Any, stats: Any) -> None:
    """What would otherwise fail two steps later, or once a program is compiled not at all."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"Monitor.update takes (step, metrics), metrics a dict of scalars: jaxmp.get_metrics(opt_state), or "
            f".metrics of jaxmp's TrainState; got {type(metrics).__name__}"
        )
    if stats is not None and not isinstance(stats, StepStats):
        raise TypeError(f"stats= takes what step_stats returned; got {type(stats).__name__}")
    if len(jax.tree.leaves(loss)) > 1:
        raise TypeError(f"loss= takes the loss alone; got {type(loss).__name__} of {len(jax.tree.leaves(loss))} values")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((step, dict(metrics), loss, stats))):
        raise TypeError(
            "Monitor.update is for the loop outside of jit; got a traced value. Return metrics, loss and stats from "
            "the step, and call update with what comes back."
        )


def _of_this_process(x: Any) -> Any:
    """An array that spans devices of other processes as far as this one has it: for probes, which are compared here."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.concatenate([np.ravel(shard.data) for shard in x.addressable_shards])
    return x


def _first_copy(stats: StepStats | None) -> StepStats | None:
    if stats is None or np.ndim(stats.loss_scale) == 0:
        return stats
    return jax.tree.map(lambda x: x[0], stats)
