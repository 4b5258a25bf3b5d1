"""Two rules about what is missing: gradients that are exactly zero, and finite values in what the loop carries.

Both look at sampled steps, and remember what earlier samples showed: a gradient that is zero once, or an array that
begins with inf, is healthy.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxmp._src.monitor.rules import Finding, percent
from jaxmp._src.monitor.step_stats import StepStats

_ABSENT = 30  # steps without a gradient that are a finding; by the norm alone more, as updates may be accumulated
_MOMENTUM = 0.97  # the slowest decay of momentum that is told apart from new gradients


class Absences:
    """Since when each gradient, and all of them, are exactly zero.

    A sample sees one step of many: an expert that gets no tokens in it may get some in the next one. So a gradient is
    absent in two cases. It was in all samples until now, and in none of the last ones. Or it is in none of the last
    samples, and its param did not grow between them: weight decay only shrinks a param, and what momentum still moves
    becomes less.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Zeros] = {}  # by path; "" for all gradients together
        self._quiet: dict[str, _Zeros] = {}  # the same, but a param that grew counts as one with a gradient
        self._growth: dict[str, tuple[int, float]] = {}  # the last step with a gradient, and the growth before it
        self._moved: set[str] = set()
        self._norms = 0  # steps in a row in which the norm of all gradients was 0

    def of_step(self, step: int, metrics: dict[str, float], is_sampled: bool) -> Iterator[Finding]:
        """Takes a step whose gradients are known by their norm alone."""
        if metrics.get("skipped", 0.0) == 1:
            return
        # Before the first update the norm is 0 too: optax.MultiSteps may accumulate for many steps.
        self._norms = self._norms + 1 if metrics.get("grad_norm") == 0 and not is_sampled else 0
        if self._norms >= _ABSENT + 15:
            seen = f"the norm of all gradients was exactly 0 in each of the last {self._norms} steps"
            yield Finding("no_gradient", step, "grads", f"{seen}. {_all_zero(metrics.get('loss_scale', 1.0))}")

    def take(self, step: int, stats: StepStats, previous: StepStats | None, patience: int) -> Iterator[Finding]:
        """Takes a sample."""
        grads = stats.grads
        if not grads.names or np.any(grads.nonfinite > 0):  # an overflow makes some gradients zero
            return
        zero = {name: bool(grads.zeros[i] == 1) for i, name in enumerate(grads.names)}
        grew = {name: self._grew(step, name, is_zero, stats, previous) for name, is_zero in zero.items()}
        all_zero = all(zero.values())
        absent = [
            name
            for name, is_zero in zero.items()
            if self._is_absent(step, name, is_zero, grew[name], patience)
            and name in stats.probes  # or it is frozen
            and (name in self._moved or name not in stats.may_be_frozen)
        ]
        if self._is_absent(step, "", all_zero, any(grew.values()), patience):
            count = "the only gradient is" if len(zero) == 1 else f"all {len(zero)} gradients are"
            seen = f"{count} exactly zero in all samples since step {self._runs[''].since}"
            yield Finding("no_gradient", step, "grads", f"{seen}. {_all_zero(float(stats.loss_scale))}")
        elif not all_zero:
            for name in absent:
                yield self._of_one(step, name, stats)

    def _grew(self, step: int, name: str, is_zero: bool, stats: StepStats, previous: StepStats | None) -> bool:
        """Whether a param grew since the last sample by more than momentum explains."""
        if previous is None or name not in stats.probes or name not in previous.probes:
            return False
        now, old = np.abs(stats.probes[name]), np.abs(previous.probes[name])
        self._moved |= {name} if np.any(now != old) else set()
        growth = float(np.mean(np.maximum(now - old, 0)))
        since, usual = self._growth.get(name, (step, 0.0))
        grew = bool(np.mean(now > old) > 0.05) and growth > usual * _MOMENTUM ** (step - since)
        if grew or not is_zero:
            self._growth[name] = step, growth
        return grew

    def _is_absent(self, step: int, name: str, is_zero: bool, grew: bool, patience: int) -> bool:
        run, quiet = (runs.setdefault(name, _Zeros()) for runs in (self._runs, self._quiet))
        run.take(step, is_zero)
        quiet.take(step, is_zero and not grew)
        # A gradient that never came back after a zero has been absent; one that comes and goes may be away by chance.
        is_sure = run.zeros == 0 and run.alive > 0 and run.chance() < 1e-4
        is_quiet = quiet.chance() < (2e-3 if quiet.zeros == 0 else 1e-6) or (quiet.zeros == 0 and quiet.alive <= 2)
        return any(
            x.row >= patience and step - x.since >= _ABSENT and is_no_chance
            for x, is_no_chance in ((run, is_sure), (quiet, is_quiet))
        )

    def _of_one(self, step: int, name: str, stats: StepStats) -> Finding:
        run, dtype = self._runs[name], stats.grads.dtypes[stats.grads.names.index(name)]
        before = "It had gradients before. " if run.alive else "It never had one. "
        low = (
            f"in {dtype} it may have underflowed: try a larger loss scale than {float(stats.loss_scale):g} "
            f"(initial_scale=, max_scale=), bfloat16, or a factor for this layer (jaxmp.scale_gradient). Otherwise"
            if dtype == "float16"
            else "while others are not:"
        )
        return Finding(
            "no_gradient",
            step,
            f"grads/{name}",
            f"this gradient is exactly zero in all samples since step {run.since}, {low} the loss does not depend on "
            f"this param. {before}Look for stop_gradient or an integer between it and the loss, an output that is not "
            f"used, units that relu or clip hold at a constant, or a weight of 0 in the loss. If that is meant, freeze "
            f"it (optax.set_to_zero under a label), or leave it out of the params.",
        )


class _Zeros:
    """A gradient that is zero, and how often it was before."""

    def __init__(self) -> None:
        self.since, self.row = 0, 0  # the first of the zeros in a row; their number
        self.alive, self.zeros = 0, 0  # samples with a gradient; samples without, before those in a row

    def take(self, step: int, is_zero: bool) -> None:
        """Takes a sample."""
        if is_zero:
            self.since = step if self.row == 0 else self.since
            self.row += 1
        else:
            self.alive, self.zeros, self.row = self.alive + 1, self.zeros + self.row, 0

    def chance(self) -> float:
        """How likely so many zeros in a row are, if they are as frequent as before."""
        return ((self.zeros + 1) / (self.alive + self.zeros + 2)) ** self.row


def _all_zero(scale: float) -> str:
    scaled = (
        f" With a loss scale ({scale:g} here): a clip outside of mixed_precision takes the norm of scaled float16 "
        f"gradients, which is inf, and divides by it; put it inside, jaxmp.mixed_precision(optax.chain("
        f"jaxmp.clip_by_global_norm(max_norm), inner), policy). Or all gradients underflow: try a larger scale."
        if scale > 1
        else ""
    )
    return (
        f"Nothing is trained. Is the loss detached from the params (stop_gradient, a constant, an integer or argmax on "
        f"the way, params other than those that are differentiated), or multiplied by 0?{scaled}"
    )


class Carried:
    """Arrays that hold NaN, or inf where they were finite before: the carried state, and params.

    An inf from the start may be meant: the best loss so far, a mask.
    """

    def __init__(self) -> None:
        self._finite: set[str] = set()

    def take(self, step: int, stats: StepStats) -> Iterator[Finding]:
        """Takes a sample."""
        for path, largest in stats.state.items():
            worst = float(np.max(largest))  # NaN, if there is one
            if self._is_bad(f"state/{path}", math.isnan(worst), math.isinf(worst)):
                yield Finding(
                    "nonfinite_state",
                    step,
                    f"state/{path}",
                    f"it holds {worst}, in several samples. The step carries this array on, and an average with NaN in "
                    "it stays NaN, also where the loss does not show it (BatchNorm reads its statistics in evaluation "
                    "only). Set it to finite values again, and keep the old one in steps that are skipped: "
                    "jaxmp.keep_if_skipped(opt_state, new, old), or state.apply_gradients(batch_stats=new). If no "
                    "step is skipped, find what wrote it with jaxmp.monitor.first_bad_op.",
                )
        bad = [
            i
            for i, name in enumerate(stats.params.names)
            if self._is_bad(f"params/{name}", False, bool(stats.params.nonfinite[i] > 0))
        ]
        several = 2 * len(bad) > len(stats.params.names) > 1
        for i in bad[:1] if several else bad:
            name, share = stats.params.names[i], stats.params.nonfinite[i]
            seen = f"{len(bad)} of {len(stats.params.names)} params are" if several else f"{percent(share)} of it are"
            yield Finding(
                "nonfinite_state",
                step,
                "params" if several else f"params/{name}",
                f"{seen} not finite, and were finite before. Steps with finite gradients do not do this under "
                f"mixed_precision: they were written by hand, or by an optimizer whose eps underflows (see "
                f"jaxmp.check_optimizer). Go back to a checkpoint from before; jaxmp.monitor.first_nonfinite(params) "
                f"names the place.",
            )

    def _is_bad(self, path: str, is_nan: bool, is_inf: bool) -> bool:
        self._finite |= set() if is_nan or is_inf else {path}
        return is_nan or (is_inf and path in self._finite)
