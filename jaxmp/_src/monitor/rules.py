"""The rules that find what is wrong with a run: thresholds on recorded numbers, each with advice.

A rule reads numbers on the host, and usually finds nothing. A finding names the tensor by path and says what to try:

    skips          more than 1 % of the last steps were skipped, or skips become more frequent
    stuck_scale    several overflows in a row at the lower bound of the loss scale, or a scale of 2^32: no scale helps
    loss_jump      the loss stays far above its median, or is not finite in a step that was not skipped
    lost_gradients gradients came to fp8 layers as zeros although the layers ran
    spoiled_amaxes the gradients of fp8 scales were averaged by hand, or changed by more than a factor
    stale_master   a param is not its master, rounded: it was changed by hand, and the next step reverts it
    no_gradient    a gradient, or all of them, are exactly zero for 30 steps
    dead_update    values that have gradients do not change, such as bfloat16 params without masters
    overflow       an activation is not finite; or a gradient, a param or an array that the loop carries, repeatedly
    near_overflow  a float16 activation exceeds a quarter of 65504
    underflow      most values of a float16 gradient are subnormal
    saturation     values of an fp8 tensor exceed its range; or a master exceeds the range of float16

The first six read every step, the others sampled steps (`StepStats`). `Monitor` reports the last four only if they are
in several of the last samples, as faults often come and go.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._src.monitor.step_stats import StepStats
from jaxmp._src.monitor.tensor_stats import FORMATS

_FP16 = list(FORMATS).index("fp16")
_LARGEST_FP16 = 65504.0
_HIGHEST_SCALE = 2.0**32
_ABSENT = 30  # steps without a gradient
_MOMENTUM = 0.95  # the slowest decay of momentum that is told apart from new gradients
_STALE = 0.01  # the share of a param that is named; optax.apply_updates leaves a few elements a step behind
_CHANGED_BY_HAND = (
    "it was changed by hand, and the next step computes it from its master again. Call opt_state = "
    "jaxmp.reload_master_params(opt_state, params) after the change. Or a transform behind or around mixed_precision "
    "changes its updates: put it inside, jaxmp.mixed_precision(optax.chain(inner, transform), policy)."
)


class Finding(NamedTuple):
    """Something that is wrong with a run.

    Attributes:
      kind: the rule: skips, stuck_scale, loss_jump, lost_gradients, spoiled_amaxes, stale_master, no_gradient,
        dead_update, overflow, near_overflow, underflow or saturation.
      step: the step in which it was found.
      path: the path of the tensor, such as `grads/block/kernel`, `activations/block`, `params/block/kernel` or
        `state/block/mean`; "" if the finding is not about one tensor.
      message: what was seen, and what to try.

    Example:
      >>> print(Finding("overflow", 7, "grads/block/kernel", "10% of it is not finite."))
      step 7: overflow at grads/block/kernel: 10% of it is not finite.
    """

    kind: str
    step: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}{f' at {self.path}' if self.path else ''}: {self.message}"


# Rules for every step: `row` has the metrics and the loss, as numbers


def skips(
    step: int, skipped: Sequence[bool], is_full: bool, is_pinned: bool, limit: float, suspect: str
) -> Iterator[Finding]:
    """Too many of the last steps were skipped, or clearly more in their second half than in the first.

    `is_full`: whether all steps of the window are known. One in ten, again and again, is seen before. `is_pinned`:
    whether the scale is at its floor; if all steps are skipped there, `stuck_scale` says so.
    """
    half = len(skipped) // 2
    first, second = sum(skipped[:half]), sum(skipped[half:])
    is_rising = second >= 3 and second - first > 2 * math.sqrt(first + second)  # two deviations of the difference
    # A scale that begins too high skips in one half of 50 steps.
    older, newer = sum(skipped[-50:-25]), sum(skipped[-25:])
    is_told = is_pinned and older + newer == 50
    is_often = len(skipped) >= 80 and older + newer >= 5 and min(older, newer) >= 2 and not is_told
    if is_often or (is_full and (first + second > limit * len(skipped) or is_rising)):
        seen = f"{100 * (first + second) / len(skipped):.2g}% of the last {len(skipped)} steps were skipped"
        seen += f", {first} in the first half and {second} in the second" if is_rising else ""
        where = f" {suspect} is not finite most often." if suspect else ""
        yield Finding(
            "skips",
            step,
            suspect,
            f"{seen}; at most {100 * limit:g}%, and not more over time, is healthy.{where} "
            + (
                "Is a static loss scale too high, is skip_if always true, or is the data not finite?"
                if all(skipped)
                else "Lower the learning rate, warm up longer, clip, use a larger eps in Adam, or keep that layer in "
                "float32."
            ),
        )


def stuck_scale(step: int, row: dict[str, float], patience: int, level: float) -> Iterator[Finding]:
    """Several overflows in a row at the lower bound of the loss scale; or a scale that grows and grows.

    `level`: the largest scale that the run began with, or that an overflow left. A scale near it is no surprise.
    """
    scale = row.get("loss_scale", 1.0)
    if scale >= _HIGHEST_SCALE and scale > 4 * level and row.get("skipped", 0.0) != 1:
        yield Finding(
            "stuck_scale",
            step,
            "",
            f"the loss scale has grown to {scale:g}, and no gradient overflows: gradients are 0, too small for any "
            f"scale, or were not scaled. Compute them by jaxmp.value_and_grad, and see that the loss depends on the "
            f"params.",
        )
    pinned = row.get("pinned_overflows", math.nan)
    if pinned >= patience:
        yield Finding(
            "stuck_scale",
            step,
            "",
            f"the loss scale is at its lower bound, {scale:g}, and {pinned:.0f} steps in a row still overflowed: the "
            f"data or the forward pass is not finite, or true gradients exceed float16. Find the operation with "
            f"jaxmp.monitor.first_bad_op. Lower the learning rate, or keep that layer in float32.",
        )


class Losses:
    """Finds a loss that jumps: it stays far above the median of its last values, or above ten times its first ones."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=50)  # without those that were too high
        self._high = 0  # losses in a row that were too high
        self._skip: int | None = None  # the last step that was skipped

    def take(self, step: int, row: dict[str, float], patience: int) -> Iterator[Finding]:
        """Takes a step."""
        loss, is_skipped = row.get("loss", math.nan), row.get("skipped", 0.0) == 1
        self._skip = step if is_skipped else self._skip
        if "loss" not in row or (is_skipped and not math.isfinite(loss)):  # an overflow says nothing about the level
            return
        if not math.isfinite(loss):
            yield Finding(
                "loss_jump",
                step,
                "",
                f"the loss is {loss} in a step that was not skipped. If mixed_precision made the optimizer, gradients "
                f"were finite: compute the loss in float32. If not, params may be NaN: see "
                f"jaxmp.monitor.first_nonfinite.",
            )
            return
        usual = float(np.median(self._last)) if self._last else math.inf
        limit = 10 * max(map(abs, self._first)) if len(self._first) == 3 else math.inf
        if len(self._last) >= 10:
            spread = 1.4826 * float(np.median(np.abs(np.asarray(self._last) - usual)))  # a deviation without outliers
            # It fell by first - usual: noise of a loss that is almost 0 is no jump.
            fell = float(np.median(self._first)) - usual
            limit = min(limit, usual + max(8 * spread, abs(usual), 0.1 * fell))
        if loss <= limit:
            self._high = 0
            self._last.append(loss)
            self._first += [loss] if len(self._first) < 3 else []
            return
        self._high += 1
        if self._high >= patience:
            is_near = self._skip is not None and step - self._skip <= 50
            after = f" Step {self._skip} was skipped, so gradients may be huge." if is_near else ""
            yield Finding(
                "loss_jump",
                step,
                "",
                f"the loss is {loss:.4g}; the median of the last {len(self._last)} was {usual:.4g}.{after} The steps "
                f"that were taken had finite gradients. Lower the learning rate, warm up longer, clip gradients "
                f"(jaxmp.clip_by_global_norm), or skip spikes (skip_if=).",
            )


def fp8_gradients(step: int, row: dict[str, float]) -> Iterator[Finding]:
    """Gradients that came to fp8 layers as zeros, and gradients of fp8 scales that were changed on their way."""
    if (lost := row.get("fp8/lost_gradients", math.nan)) > 0:
        yield Finding(
            "lost_gradients",
            step,
            "",
            f"{lost:.0f} gradients came to their fp8 layer as zeros. In the first steps the scales of delayed scaling "
            f"are not known: call jaxmp.fp8.calibrate before the first step. Later, the output of that layer does not "
            f"change the loss.",
        )
    if (spoiled := row.get("fp8/spoiled", math.nan)) > 0:
        yield Finding(
            "spoiled_amaxes",
            step,
            "",
            f"the amaxes of {spoiled:.0f} fp8 tensors were changed between value_and_grad and the optimizer. If they "
            f"were averaged over microbatches, use jaxmp.value_and_grad(accumulate=). Put other transforms (noise, "
            f"weight decay) inside, jaxmp.mixed_precision(optax.chain(...), policy).",
        )


class StaleMasters:
    """Finds params that are not their master, rounded, in the step that reverts them."""

    def __init__(self) -> None:
        self._counts: deque[float] = deque(maxlen=50)

    def take(self, step: int, row: dict[str, float], stats: StepStats | None) -> Iterator[Finding]:
        """Takes a step, and its statistics, also those of a step that was not sampled."""
        sizes = {} if stats is None else dict(zip(stats.params.names, stats.params.sizes, strict=True))
        for path, share in {} if stats is None else stats.stale_masters.items():
            if share > max(_STALE, 1.5 / sizes[path]):  # one value of a small param may be rounding
                seen = f"{percent(share)} of this param is not the master in opt_state, rounded"
                yield Finding("stale_master", step, f"params/{path}", f"{seen}: {_CHANGED_BY_HAND}")
        count = row.get("stale_masters", math.nan)  # of all params, as tx.update counts in every step
        if math.isnan(count) or row.get("skipped", 0.0) == 1:
            return
        # optax.apply_updates leaves a few behind in a step, about as many in each.
        if stats is None and len(self._counts) >= 3 and count > 8 + 8 * max(self._counts):
            seen = f"{count:.0f} values of 16-bit params were not their master in opt_state, rounded, before this step"
            yield Finding("stale_master", step, "params", f"{seen}: {_CHANGED_BY_HAND}")
        self._counts.append(count)


class Absences:
    """Finds gradients that are exactly zero for at least 30 steps.

    A sample sees one step of many: an expert that gets no tokens in it may get some in the next one. So a gradient that
    came back from zeros is absent only if it is away for three times as long; and it is there between two samples if
    its param grew somewhere: weight decay only shrinks it, and what momentum still moves becomes less in each step.
    """

    def __init__(self) -> None:
        self._probes: Mapping[str, Any] = {}  # of the sample before, which was of the step
        self._step = 0
        self._growth: dict[str, float] = {}  # by path: how far its param grew between the two samples before
        self._since: dict[str, int] = {}  # by path, and "" for all: the first step of the zeros in a row
        self._samples: Counter[str] = Counter()  # their number
        self._longest: Counter[str] = Counter()  # steps, of the rows of zeros that ended
        self._zero_norms = 0  # steps in a row in which the norm of all gradients was 0

    def take(self, step: int, row: dict[str, float], stats: StepStats | None, patience: int) -> Iterator[Finding]:
        """Takes a step, and its statistics if it was sampled."""
        if stats is None:
            # Before the first update the norm is 0 too: optax.MultiSteps may accumulate for some steps.
            is_zero = row.get("grad_norm") == 0 and row.get("skipped", 0.0) != 1
            self._zero_norms = self._zero_norms + 1 if is_zero else 0
            if self._zero_norms >= 1.5 * _ABSENT:
                yield _all_zero(step, step - self._zero_norms + 1, row.get("loss_scale", 1.0))
            return
        grads = stats.grads
        if not grads.names or np.any(grads.nonfinite > 0):  # an overflow makes some gradients zero
            return
        grew = {path: self._grew(step, path, stats.probes) for path in grads.names}
        self._step, self._probes = step, stats.probes
        zeros = {path: grads.zeros[i] == 1 and not grew[path] for i, path in enumerate(grads.names)}
        zeros[""] = bool(np.all(grads.zeros == 1)) and not any(grew.values())
        absent = [path for path, is_zero in zeros.items() if self._is_absent(step, path, bool(is_zero), patience)]
        if "" in absent:
            yield _all_zero(step, self._since[""], float(stats.loss_scale))
        for path in () if zeros[""] else absent:
            if path not in stats.probes or path in stats.may_be_frozen:
                continue
            dtype, scale = grads.dtypes[grads.names.index(path)], float(stats.loss_scale)
            low = f" Or it underflows: try a larger loss scale than {scale:g}." if dtype == "float16" else ""
            yield Finding(
                "no_gradient",
                step,
                f"grads/{path}",
                f"this gradient is exactly zero in all samples since step {self._since[path]}: the loss does not "
                f"depend on this param. Look for stop_gradient, an unused output, units that relu holds at 0, or an "
                f"expert that gets no tokens; or freeze the param (optax.set_to_zero under a label).{low}",
            )

    def _grew(self, step: int, path: str, probes: Mapping[str, Any]) -> bool:
        if path not in probes or path not in self._probes:
            return False
        growth = float(np.mean(np.maximum(np.abs(probes[path]) - np.abs(self._probes[path]), 0)))
        before, self._growth[path] = self._growth.get(path, 0.0), growth
        return growth > before * _MOMENTUM ** (step - self._step)

    def _is_absent(self, step: int, path: str, is_zero: bool, patience: int) -> bool:
        if not is_zero:
            self._longest[path] = max(self._longest[path], step - self._since.pop(path, step))
            self._samples[path] = 0
            return False
        self._samples[path] += 1
        row = step - self._since.setdefault(path, step)
        return self._samples[path] >= patience and row >= max(_ABSENT, 3 * self._longest[path])


def _all_zero(step: int, since: int, scale: float) -> Finding:
    scaled = (
        f" With a loss scale ({scale:g} here), a clip outside of mixed_precision does this too: put it inside, "
        f"jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(max_norm), inner), policy)."
    )
    return Finding(
        "no_gradient",
        step,
        "grads",
        f"all gradients are exactly zero since step {since}, so nothing is trained. Is the loss detached from the "
        f"params (stop_gradient, a constant, argmax), or multiplied by 0?{scaled if scale > 1 else ''}",
    )


class DeadUpdates:
    """Finds params in which most values that have a gradient keep every bit from one sample to the next."""

    def __init__(self) -> None:
        self._previous: StepStats | None = None
        self._taken = 0  # steps since then that were not skipped
        self._samples: Counter[str] = Counter()  # by path: in how many in a row most of the param stayed

    def take(
        self, step: int, row: dict[str, float], stats: StepStats | None, dead: float, patience: int
    ) -> Iterator[Finding]:
        """Takes a step, and its statistics if it was sampled."""
        previous, taken = self._previous, self._taken
        self._taken += row.get("skipped", 0.0) != 1  # after the sample, which was taken before the update
        if stats is None or (previous is not None and not taken):
            return
        # If optax.MultiSteps only accumulated, nothing should have moved: the next sample is compared.
        if previous is not None and previous.updates is not None and previous.updates == stats.updates:
            return
        self._previous, self._taken = stats, int(row.get("skipped", 0.0) != 1)
        if previous is None:
            return
        shares = {}  # of the values that have a gradient, those that stayed
        for path, now in stats.probes.items():
            grads = previous.grads  # the updates that are compared began with these
            if path in grads.names and path in previous.probes:
                i = grads.names.index(path)
                has_gradient = float(1 - grads.zeros[i]) * bool(grads.nonfinite[i] == 0)
                moved = float(np.mean(now.view(np.int32) != previous.probes[path].view(np.int32)))
                if has_gradient:
                    shares[path] = max(0.0, 1 - moved / has_gradient)
        is_everywhere = len(shares) > 1 and all(share == 1 for share in shares.values())
        shares = {"": 1.0} if is_everywhere else shares | {"": 0.0}
        for path, share in shares.items():
            is_frozen = share == 1 and path in stats.may_stay  # if it trains, not all stays
            self._samples[path] = self._samples[path] + 1 if share > dead and not is_frozen else 0
            if self._samples[path] < patience:
                continue
            seen = f"{percent(share)} of the values that have gradients did not change since the last sample"
            cause = (
                ", in any param: is the learning rate 0, or do old params come back? "
                if is_everywhere
                else ": updates are below half a unit in the last place. Keep masters (jaxmp.mixed_precision), raise "
                "the learning rate, or look for code that puts old params back. Label what is frozen "
                "(optax.set_to_zero). "
            )
            scale = float(stats.loss_scale)
            scaled = f"The loss scale is {scale:g}: do gradients come from jaxmp.value_and_grad?" if scale > 1 else ""
            yield Finding("dead_update", step, f"params/{path}".strip("/"), f"{seen}{cause}{scaled}".strip())


# Rules for sampled steps, whose findings count if they are in several of the last samples


def overflow(step: int, stats: StepStats, finite: set[str]) -> Iterator[Finding]:
    """Tensors with inf or NaN: the first such activation, or else gradients; params, and arrays that the loop carries.

    `finite` has the paths that were finite in a sample: an inf from the start may be meant (the best loss, a mask).
    """
    for path, largest in stats.state.items():
        worst = float(np.max(largest))  # NaN, if there is one
        finite |= {f"state/{path}"} if math.isfinite(worst) else set()
        if math.isnan(worst) or (math.isinf(worst) and f"state/{path}" in finite):
            yield Finding(
                "overflow",
                step,
                f"state/{path}",
                f"this array holds {worst}, and the loop carries it on. Set it to finite values again. Keep the old "
                f"one in skipped steps, jaxmp.keep_if_skipped(opt_state, new, old); if none is skipped, find the "
                f"operation with jaxmp.monitor.first_bad_op.",
            )
    names, nonfinite = stats.params.names, stats.params.nonfinite
    finite |= {f"params/{name}" for i, name in enumerate(names) if nonfinite[i] == 0}
    yield from _of_one_or_most(
        step,
        "params",
        {name: nonfinite[i] for i, name in enumerate(names) if nonfinite[i] > 0 and f"params/{name}" in finite},
        len(names),
        "is not finite, and was finite before. A step of mixed_precision does not do this: look for code that writes "
        "params, or an eps that underflows. Go back to a checkpoint; jaxmp.monitor.first_nonfinite names the place.",
    )
    activations = stats.activations
    if activations is not None and np.any(activations.nonfinite > 0):
        i = int(np.flatnonzero(activations.nonfinite > 0)[0])
        yield Finding(
            "overflow",
            step,
            f"activations/{activations.names[i]}",
            f"{percent(activations.nonfinite[i])} of this module's output is not finite; "
            f"all earlier modules are finite. A loss scale cannot fix a forward pass: run the module in bfloat16 or "
            f"float32, or scale down its input.",
        )
        return  # the gradients are then not finite either
    names, nonfinite = stats.grads.names, stats.grads.nonfinite
    yield from _of_one_or_most(
        step,
        "grads",
        {name: nonfinite[i] for i, name in enumerate(names) if nonfinite[i] > 0},
        len(names),
        "is not finite, in several samples. If one layer is, clip its gradient, scale it down (jaxmp.scale_gradient), "
        "or keep the layer in float32. If all are, check the loss and the batch: jaxmp.monitor.first_bad_op finds the "
        "operation.",
    )


def _of_one_or_most(step: int, group: str, bad: dict[str, Any], total: int, message: str) -> Iterator[Finding]:
    """An overflow of each of these tensors; if they are most of their group, which has one cause, of the group."""
    if 2 * len(bad) > total and (total > 1 or group == "grads"):
        yield Finding("overflow", step, group, f"{len(bad)} of {total} tensors: each {message}")
        return
    for name, share in bad.items():
        yield Finding("overflow", step, f"{group}/{name}", f"{percent(share)} of it {message}")


def near_overflow(step: int, stats: StepStats) -> Iterator[Finding]:
    """float16 activations within a factor of four of the largest float16: one spike makes them inf."""
    activations = stats.activations
    if activations is None:
        return
    for i, name in enumerate(activations.names):
        dtype, amax = activations.dtypes[i], activations.amax[i]
        # Under a policy, autocast computes in float16 what the traced module has in float32: its values show it.
        in_float16 = dtype == "float16" or (dtype == "float32" and stats.loss_scale > 1 and np.float16(amax) == amax)
        if in_float16 and activations.nonfinite[i] == 0 and amax > _LARGEST_FP16 / 4:
            yield Finding(
                "near_overflow",
                step,
                f"activations/{name}",
                f"this module's output reaches {amax:.5g}, and float16 ends at 65504. Normalize or scale down its "
                f"input, or run the module in bfloat16 or float32.",
            )


def underflow(step: int, stats: StepStats, lost: float) -> Iterator[Finding]:
    """float16 gradients in which most values are subnormal."""
    grads = stats.grads
    for i, name in enumerate(grads.names):
        present = 1 - grads.zeros[i]
        share = grads.subnormal[i, _FP16] / present if present > 0 else 0.0
        if grads.dtypes[i] == "float16" and share > lost and not np.any(grads.nonfinite > 0):  # which hides the others
            yield Finding(
                "underflow",
                step,
                f"grads/{name}",
                f"{percent(share)} of its nonzero values are subnormal (amax {grads.amax[i]:.3g} in float16, at a loss "
                f"scale of {stats.loss_scale:g}). Try a larger scale (initial_scale=, max_scale=), bfloat16, or a "
                f"factor for this layer (jaxmp.scale_gradient).",
            )


def saturation(step: int, stats: StepStats, row: dict[str, float]) -> Iterator[Finding]:
    """fp8 tensors with values clipped to the largest value of the format, and masters outside the range of float16."""
    for path, saturated in stats.fp8.saturated.items():
        if np.any(saturated):
            amax, scale = float(np.max(stats.fp8.amax[path])), float(np.min(stats.fp8.scale[path]))
            yield Finding(
                "saturation",
                step,
                path,
                f"values were clipped in several samples: amax {amax:.3g} at a scale of {scale:g}. The amax history "
                f"misses the peaks. Try a longer amax_history_len, a margin, current scaling, or bfloat16 for this "
                f"layer.",
            )
    for i, name in enumerate(stats.params.names if row.get("saturated_params", 0.0) > 0 else ()):
        if stats.params.overflow[i, _FP16] > 0:
            yield Finding(
                "saturation",
                step,
                f"params/{name}",
                f"its master reaches {stats.params.amax[i]:.5g}, and float16 ends at 65504. Keep the param in "
                f"float32 (keep_fp32=), use bfloat16, or use more weight decay.",
            )


def percent(share: Any) -> str:
    """A share from 0 to 1 as text."""
    return f"{100 * float(share):.3g}%"
