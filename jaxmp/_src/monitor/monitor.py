"""`Monitor`: records a run on the host and warns when something is wrong.

The compiled step returns a few scalars (`get_metrics`) and, in some steps, statistics (`step_stats`). `Monitor.update`
stores the arrays without waiting for the device, and reads them after newer steps have started. It keeps the numbers
for plots and tables, and checks them with the rules of `rules.py`. Each new finding becomes a warning, once.
"""

import csv
import math
import os
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmp._src.base.warn import warn
from jaxmp._src.monitor import absence, log, rules
from jaxmp._src.monitor.rules import Finding
from jaxmp._src.monitor.step_stats import StepStats

_LONGEST_SEARCH = 12  # skipped steps: from 65536 with hysteresis down to 32


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
          patience: how often in a row something must be seen before it is a finding: in samples, overflows at the lower
            bound of the scale, or losses after a skip. What comes and goes is also a finding if it is seen this often,
            and in a share of the last 10 * patience samples: a tenth for overflows, a fifth for underflow and
            saturation. Losses: a tenth of the last 50 steps, and not before.
          lag: number of steps in flight. A step is read after this many newer ones have started.
          keep, keep_samples: how many steps and samples are kept; the oldest are dropped first.
          warn: whether a finding also gives a `MonitorWarning`.

        Raises:
          ValueError: `window`, `patience`, `keep` or `keep_samples` is below 1.
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
        self._losses, self._constant, self._norms = rules.Losses(), rules.ConstantLoss(), rules.Norms()
        self._absences, self._carried, self._stale = absence.Absences(), absence.Carried(), rules.Stale()
        self._scale = 1.0  # of the step that is read next
        self._high = 0  # number of losses in a row that were too high
        self._previous: StepStats | None = None
        self._taken_since_sample = 0
        self._search = 0  # samples since the first overflow of a scale that falls to its level
        self._suspected: deque[set[tuple[str, str]]] = deque(maxlen=10 * patience)

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
        _check_update(step, metrics, loss, stats)
        self._waiting.append((step, (dict(metrics) | ({} if loss is None else {"loss": loss}), stats)))
        found = []
        while len(self._waiting) > self._lag:
            found += self._read(*self._waiting.popleft())
        return found

    def finish(self) -> list[Finding]:
        """Reads the steps that are still in flight, and returns new findings. Call it at the end of a run."""
        found = []
        while self._waiting:
            found += self._read(*self._waiting.popleft())
        return found

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
        self.steps.append(row)
        found = list(self._of_step(step, row))
        if stats is not None and np.ndim(stats.loss_scale):  # pmap made several copies
            stats = jax.tree.map(lambda x: x[0], stats)
        stats = stats if stats is not None and bool(stats.grads.sampled) else None
        found += self._of_norms(step, row, stats)
        found += self._absences.of_step(step, row, stats is not None)
        found += self._stale.take(step, row, stats)
        if stats is not None:
            found += self._of_sample(step, stats, row)
            self.samples.append((step, stats._replace(probes={})))  # probes are most of the bytes, and were compared
        self._taken_since_sample += row.get("skipped", 0.0) != 1  # after the sample: it was taken before the update
        known = {(old.kind, old.path) for old in self.findings}
        new = [f for f in found if (f.kind, f.path) not in known]
        self.findings += new
        for finding in new if self._warn else ():
            warn("monitor-finding", str(finding), MonitorWarning)
        return new

    def _of_step(self, step: int, row: dict[str, float]) -> list[Finding]:
        skipped, loss = row.get("skipped", 0.0) == 1, row.get("loss")
        self._skipped.append(skipped)
        found = [*rules.stuck_scale(step, row, self._patience)]
        found += [*rules.infinite_norm(step, row), *rules.lost_gradients(step, row), *rules.spoiled_amaxes(step, row)]
        if len(self._skipped) == self._skipped.maxlen or rules.are_many(self._skipped):
            counts = Counter(path for s in self._suspected for kind, path in s if kind == "overflow")
            suspect = counts.most_common(1)[0][0] if counts else ""
            found += rules.skips(step, list(self._skipped), self._limits["skip_ratio"], suspect)
        jump = None
        if skipped:
            jump = self._losses.skip(step, math.nan if loss is None else loss)
        elif loss is not None:
            jump = self._losses.jump(step, loss, self._patience)
            found += self._constant.take(step, loss)
        if loss is not None and (np.isfinite(loss) or not skipped):  # an overflow says nothing about the level
            self._high = self._high + 1 if jump else 0
            if jump and (self._high >= self._patience or not np.isfinite(loss) or self._losses.is_often_high()):
                found.append(jump)
        return found

    def _of_norms(self, step: int, row: dict[str, float], stats: StepStats | None) -> list[Finding]:
        # get_metrics has the scale of the next step, statistics have that of this one.
        scale, self._scale = self._scale, row.get("loss_scale", 1.0)
        if row.get("skipped", 0.0) == 1:
            return []
        sampled_norm, param_norm = np.nan, np.nan
        if stats is not None:
            scale = float(stats.loss_scale)
            sampled_norm, param_norm = float(stats.grad_norm), float(stats.param_norm)
        norm, loss = row.get("grad_norm", np.nan), row.get("loss", np.nan)
        return list(self._norms.take(step, loss, scale, norm, sampled_norm, param_norm))

    def _of_sample(self, step: int, stats: StepStats, row: dict[str, float]) -> list[Finding]:
        suspicions = [
            *rules.overflow(step, stats),
            *rules.near_overflow(step, stats),
            *rules.underflow(step, stats, self._limits["lost"]),
            *rules.saturation(step, stats, row),
            *rules.stale_master(step, stats),
            *self._carried.take(step, stats),
        ]
        before, kept = self._previous, set()
        absences = self._absences.take(step, stats, before, self._patience)
        if before is not None and before.updates is not None and before.updates == stats.updates:
            # optax.MultiSteps only accumulated: nothing should have moved, and nothing is known of the next update.
            kept = {key for key in self._suspected[-1] if key[0] == "dead_update"}
        elif before is not None and self._taken_since_sample:
            suspicions += rules.dead_update(step, stats, before, self._limits["dead"])
            suspicions += rules.only_decays(step, stats, before)
        self._search = self._search + 1 if before is not None and self._searches(before, stats, row) else 0
        if 0 < self._search <= _LONGEST_SEARCH:  # the overflow that was seen before
            suspicions = [s for s in suspicions if s.kind != "overflow" or s.path.startswith("activations/")]
        self._previous, self._taken_since_sample = stats, 0
        self._suspected.append({(s.kind, s.path) for s in suspicions} | kept)
        return [*absences, *(s for s in suspicions if self._is_believed(s))]

    def _searches(self, before: StepStats, stats: StepStats, row: dict[str, float]) -> bool:
        """Whether a scale falls to its level: one overflow after the other, no step taken, and the loss is finite."""
        both = all(np.any(x.grads.nonfinite > 0) for x in (before, stats))
        falls = float(stats.loss_scale) <= float(before.loss_scale)  # hysteresis keeps it for a step
        return both and falls and not self._taken_since_sample and bool(np.isfinite(row.get("loss", np.nan)))

    def _is_believed(self, suspicion: Finding) -> bool:
        key = (suspicion.kind, suspicion.path)
        if suspicion.kind == "stale_master":  # the next step reverts it
            return True
        if suspicion.kind == "overflow" and suspicion.path.startswith("activations/"):
            return True
        last = list(self._suspected)
        times = sum(key in s for s in last)
        in_a_row = len(last) >= self._patience and all(key in s for s in last[-self._patience :])
        # A few overflows are normal: a dynamic scale finds its value by them. So they count in full windows alone.
        window = self._suspected.maxlen or 1
        return in_a_row or times >= max(self._patience, rules.RATES.get(suspicion.kind, rules.USUAL_RATE) * window)


def _check_update(step: Any, metrics: Any, loss: Any, stats: Any) -> None:
    # Without these checks a wrong argument would fail two steps later; inside a compiled step it would not fail at all.
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"Monitor.update takes (step, metrics), where metrics is a dict of scalars: jaxmp.get_metrics(opt_state), "
            f"or .metrics of jaxmp's TrainState; got {type(metrics).__name__}"
        )
    if stats is not None and not isinstance(stats, StepStats):
        raise TypeError(f"stats= takes the result of step_stats; got {type(stats).__name__}")
    if len(jax.tree.leaves(loss)) > 1:
        raise TypeError(f"loss= takes the loss alone; got {type(loss).__name__} of {len(jax.tree.leaves(loss))} values")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((step, dict(metrics), loss, stats))):
        raise TypeError(
            "Monitor.update is for the loop, outside of jit; got a traced value. Return metrics, loss and stats from "
            "the step, and pass the results to update."
        )


def _of_this_process(x: Any) -> Any:
    """`x`, or the part that this process holds; of probes, each process compares its own."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.concatenate([np.ravel(shard.data) for shard in x.addressable_shards])
    return x
