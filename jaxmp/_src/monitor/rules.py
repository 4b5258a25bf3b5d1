"""The rules that find what is wrong with a run: thresholds on recorded numbers, each with advice.

A rule reads numbers on the host, and usually finds nothing. A finding names the tensor by path and says what to try:

    skips          more than 1 % of the last steps were skipped, or skips become more frequent
    stuck_scale    several overflows in a row at the lower bound of the loss scale, or a scale of 2^32: no scale helps
    loss_jump      the loss stays far above its running median, or above its level before a skip; or it is not finite in
                   a step that was not skipped
    constant_loss  the loss has been the same number since the first step
    infinite_norm  the norm of finite gradients is inf, so that clipping makes all of them zero
    lost_gradients gradients came to fp8 layers as zeros although the layers ran
    spoiled_amaxes the gradients of fp8 scales were averaged by hand, or changed by more than a factor
    unscaled       the norm of the gradients is as if they had not been scaled, and were divided by the scale
    clipped        the norm of the gradients times the loss scale is always the same: they were clipped while scaled
    overflow       an activation is not finite; or a gradient is not finite in several samples
    near_overflow  a float16 activation exceeds a quarter of 65504
    underflow      most values of a float16 gradient are subnormal
    no_gradient    a gradient, or all of them, are exactly zero for 30 steps (`absence.py`)
    nonfinite_state
                   an array that the loop carries, such as statistics of BatchNorm, or a param is not finite (there too)
    saturation     values of an fp8 tensor exceed its range; or a master exceeds the range of float16
    dead_update    values that have gradients do not change, such as bfloat16 params without masters
    stale_master   a param is not its master, rounded: it was changed by hand, and the next step reverts it

The first nine check every step, and so does the last, as far as the metrics know. The others check sampled steps
(`StepStats`), and `Monitor` reports what they find only if it appears in several samples: in a row, or in a share of
the last ones (`RATES`), for a fault that comes and goes. A loss scale that falls to the right level causes several
overflows in a row: they count as one overflow.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._src.monitor.step_stats import StepStats
from jaxmp._src.monitor.tensor_stats import FORMATS
from jaxmp._src.step import stale_masters

_FP16 = list(FORMATS).index("fp16")
_LARGEST_FP16 = 65504.0
_HIGHEST_SCALE = 2.0**32

# In what share of the last samples a fault is believed, if it is in no `patience` samples in a row. Params do not move
# in some steps of healthy runs (a second optimizer, updates every few steps), so those must stay in most samples.
RATES = {"overflow": 0.1, "near_overflow": 0.1, "underflow": 0.2, "saturation": 0.2, "nonfinite_state": 0.1}
USUAL_RATE = 0.7  # of all other kinds


class Finding(NamedTuple):
    """Something that is wrong with a run.

    Attributes:
      kind: the rule: skips, stuck_scale, loss_jump, constant_loss, infinite_norm, lost_gradients, spoiled_amaxes,
        unscaled, clipped, overflow, near_overflow, underflow, no_gradient, nonfinite_state, saturation, dead_update or
        stale_master.
      step: the step in which it was found.
      path: the path of the tensor, such as `grads/block/kernel`, `activations/block` or `params/block/kernel`; "" if
        the finding is not about one tensor.
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


# Rules for every step


def are_many(skipped: Sequence[bool]) -> bool:
    """Whether one in ten of the last 50 steps was skipped, in both halves of them.

    A dynamic scale that begins too high skips in one half only; where all are skipped, `stuck_scale` says so.
    """
    if len(skipped) < 80:
        return False
    last = list(skipped)[-50:]
    return 5 <= sum(last) < 50 and min(sum(last[:25]), sum(last[25:])) >= 2


def skips(step: int, skipped: Sequence[bool], limit: float, suspect: str) -> Iterator[Finding]:
    """Too many of the last steps were skipped, or clearly more in their second half than in the first."""
    half = len(skipped) // 2
    first, second = sum(skipped[:half]), sum(skipped[half:])
    ratio = (first + second) / len(skipped)
    two_deviations = 2 * math.sqrt(first + second)  # of the difference
    rising = second >= 3 and second - first > two_deviations
    if ratio <= limit and not rising:
        return
    seen = f"{100 * ratio:.2g}% of the last {len(skipped)} steps were skipped"
    seen += f", {first} in the first half and {second} in the second" if rising else ""
    yield Finding(
        "skips",
        step,
        suspect,
        f"{seen}; a healthy run skips at most {100 * limit:g}%, and not more over time. "
        + (
            f"{suspect} is not finite most often. "
            if suspect
            else "To find the layer, sample every overflow (`when=`). "
        )
        + "Try a lower learning rate or a longer warm-up, clipping, a larger eps in Adam, or float32 for that layer.",
    )


def stuck_scale(step: int, metrics: dict[str, float], patience: int) -> Iterator[Finding]:
    """Several overflows in a row at the lower bound of the loss scale; or a scale that no gradient ever stopped."""
    scale = metrics.get("loss_scale", 1.0)
    if scale >= _HIGHEST_SCALE and metrics.get("skipped", 0.0) != 1:
        yield Finding(
            "stuck_scale",
            step,
            "",
            f"the loss scale has grown to {scale:g}, and no gradient overflows: gradients are 0, or so small that no "
            f"scale helps, or they were not scaled. Compute them by jaxmp.value_and_grad, and see that the loss "
            f"depends on the params.",
        )
    pinned = metrics.get("pinned_overflows", math.nan)
    if pinned >= patience:
        yield Finding(
            "stuck_scale",
            step,
            "",
            f"the loss scale is at its lower bound, {metrics['loss_scale']:g}, and {pinned:.0f} steps in a row still "
            f"overflowed: the forward pass or the data is not finite, or unscaled gradients exceed float16. Find the "
            f"operation with jaxmp.monitor.first_bad_op; lower the learning rate, or keep that layer in float32.",
        )


class Losses:
    """The levels that a loss is compared with: medians of its last values, of its first ones, and before a skip.

    Losses that were found too high do not count among them.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=50)
        self._before_skip: list[float] = []
        self._since_skip: int | None = None
        self._far: deque[bool] = deque(maxlen=100)  # whether a loss was halfway back to its start

    def skip(self, step: int, loss: float) -> Finding | None:
        """Takes a skipped step; a suspicion, if its loss is finite and too high: the params are those of the step."""
        if self._since_skip is None:
            self._before_skip = list(self._last)
        self._since_skip = 0
        message = self._why(loss) if math.isfinite(loss) else ""
        return Finding("loss_jump", step, "", message) if message else None

    def jump(self, step: int, loss: float, patience: int) -> Finding | None:
        """Takes the loss of a step that was taken; a suspicion, if it is too high."""
        self._since_skip = None if self._since_skip is None else self._since_skip + 1
        if not math.isfinite(loss):
            return _nonfinite_loss(step, loss)
        message = self._why(loss)
        usual = float(np.median(self._last)) if self._last else math.inf
        self._far.append(bool(message) and loss - usual > 0.5 * (float(np.median(self._first)) - usual))
        if message:
            often = f" So it was in {sum(list(self._far)[-50:])} of the last 50 steps." if self.is_often_high() else ""
            return Finding("loss_jump", step, "", message + often)
        self._last.append(loss)
        self._first += [loss] if len(self._first) < 3 else []
        if self._since_skip is not None and self._since_skip > 10 * patience:
            self._since_skip = None  # the skip is too long ago
        return None

    def is_often_high(self) -> bool:
        """Whether one in ten of the last 50 losses was far too high, among which is the last, and none before them.

        Losses of mixed tasks or of small batches may always differ as much.
        """
        before, last = list(self._far)[:-50], list(self._far)[-50:]
        return len(before) >= 20 and not any(before) and sum(last) >= 5 and last[-1]

    def _why(self, loss: float) -> str:
        if self._since_skip is not None and len(self._before_skip) >= 4:
            usual, spread = _level(self._before_skip)
            if loss - usual > max(8 * spread, 0.25 * abs(usual)):
                return (
                    f"the loss is {loss:.4g}, {self._since_skip} steps after a skip; before the skip it was "
                    f"{usual:.4g}. A skipped step does not change params, so steps near it did: their gradients were "
                    f"huge, but finite. Clip gradients, skip spikes (skip_if=), or lower the learning rate."
                )
        if len(self._first) < 3:
            return ""
        first = float(np.median(self._first))
        if len(self._last) >= 10:
            usual, spread = _level(list(self._last))
            # It fell by first - usual: noise of a loss that is almost 0 is no jump.
            if loss - usual > max(8 * spread, abs(usual), 0.1 * (first - usual)):
                return f"the loss is {loss:.4g}; the median of the last {len(self._last)} was {usual:.4g}. {_EXPLODES}"
        if loss > 10 * abs(first) and loss > 10 * max(map(abs, self._first)):
            return f"the loss is {loss:.4g}; it began at {first:.4g}. {_EXPLODES}"
        return ""


class ConstantLoss:
    """Whether all losses were the same number, from the first one on.

    A loss that settles later has converged. One that was computed in 16 bits may stay the same while it falls by less.
    One of 0 may stand for none yet.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._same, self._changed = 0, False

    def take(self, step: int, loss: float) -> Iterator[Finding]:
        """Takes the loss of a step that was taken."""
        self._first = loss if self._first is None else self._first
        self._same, self._changed = self._same + 1, self._changed or loss != self._first
        if self._changed or self._same < _CONSTANT or loss == 0:
            return
        is_coarse = int(np.float32(loss).view(np.int32)) & 0x1FFF == 0  # float16 has no more bits
        if not is_coarse or self._same >= _CONSTANT_COARSE:
            yield Finding(
                "constant_loss",
                step,
                "",
                f"the loss is exactly {loss:.6g} in each of the {self._same} steps since the first. Is it the loss of "
                f"this step (not one that was computed once), does it depend on the params and on the batch, and are "
                f"the params, or the state, that the step returns those that the next one gets?",
            )


_CONSTANT, _CONSTANT_COARSE = 50, 200  # steps; the second of losses with no more digits than 16 bits

_EXPLODES = (
    "No step was skipped for it, so all gradients were finite. Try a lower learning rate or a longer warm-up, clip "
    "gradients (jaxmp.clip_by_global_norm), skip spikes (skip_if=), and see whether it happens in float32 too."
)


def _level(losses: Sequence[float]) -> tuple[float, float]:
    """The median, and a standard deviation that ignores outliers."""
    usual = float(np.median(losses))
    return usual, 1.4826 * float(np.median(np.abs(np.asarray(losses) - usual)))


def _nonfinite_loss(step: int, loss: float) -> Finding:
    return Finding(
        "loss_jump",
        step,
        "",
        f"the loss is {loss} in a step that was not skipped. With mixed_precision, its gradients were finite: only "
        f"the loss overflows, so compute it in float32. With a plain optimizer no step is skipped: params or "
        f"optimizer state may be NaN (see jaxmp.monitor.first_nonfinite), for example because eps underflowed (see "
        f"jaxmp.check_optimizer).",
    )


def infinite_norm(step: int, metrics: dict[str, float]) -> Iterator[Finding]:
    """The norm of finite gradients overflowed float32, in a step that was taken."""
    if metrics.get("grad_norm") == math.inf and metrics.get("skipped", 0.0) == 0:
        yield Finding(
            "infinite_norm",
            step,
            "",
            "the norm of finite gradients is inf: a gradient is above 1.8e19, and its square overflows float32. "
            "Clipping by this norm makes all gradients zero, so the step trains nothing. Skip such steps (skip_if=), "
            "or look for the huge gradient (jaxmp.monitor.step_stats).",
        )


def lost_gradients(step: int, metrics: dict[str, float]) -> Iterator[Finding]:
    """Gradients came to fp8 layers as zeros, although the layers ran."""
    lost = metrics.get("fp8/lost_gradients", math.nan)
    if lost > 0:
        yield Finding(
            "lost_gradients",
            step,
            "",
            f"{lost:.0f} gradients came to their fp8 layer as zeros. In the first steps of delayed scaling the scales "
            f"are not known yet, and gradients become zero on their way back: call jaxmp.fp8.calibrate before the "
            f"first step. Later it is a layer whose output does not change the loss.",
        )


def spoiled_amaxes(step: int, metrics: dict[str, float]) -> Iterator[Finding]:
    """The gradients of fp8 scales were changed by more than a factor on their way to the optimizer."""
    spoiled = metrics.get("fp8/spoiled", math.nan)
    if spoiled > 0:
        yield Finding(
            "spoiled_amaxes",
            step,
            "",
            f"the amaxes of {spoiled:.0f} fp8 tensors were changed between value_and_grad and the optimizer, by more "
            f"than a common factor. Of a mean over microbatches the step took an upper bound, which costs range: use "
            f"jaxmp.value_and_grad(accumulate=). After other arithmetic (noise, weight decay) the scales stay: put "
            f"such transforms inside, jaxmp.mixed_precision(optax.chain(...), policy).",
        )


class Norms:
    """The norms of the gradients, divided by the loss scale, in the last steps that were taken."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=20)  # norm, loss scale
        self._ratios: list[float] = []

    def take(
        self, step: int, loss: float, scale: float, norm: float, sampled_norm: float, param_norm: float
    ) -> Iterator[Finding]:
        """Records a step that was taken; unknown values are NaN.

        Args:
          step: its number.
          loss: its loss.
          scale: the loss scale of its gradients.
          norm: `grad_norm` of the metrics, which the chain computed.
          sampled_norm: of the gradients before the update, divided by the scale.
          param_norm: of its params.
        """
        if scale < 16:
            return
        if sampled_norm > 0 and 0.5 < norm / (scale * sampled_norm) < 2:
            seen = (
                f"the chain clips by the norm {norm:.4g}, which is {sampled_norm:.4g} times the loss scale of {scale:g}"
            )
            yield _clipped_outside(step, f"{seen}: clipping comes before the gradients are unscaled", None)
            return
        norm = sampled_norm if math.isnan(norm) else norm
        if not (math.isfinite(norm) and norm > 0):
            return
        self._last.append((norm, scale))
        scaled = np.array([norm * scale for norm, scale in self._last])
        # The norm of constant gradients is constant too, but times the scale it is no usual max_norm.
        is_pinned = np.ptp(scaled) <= 1e-3 * scaled[0] and 0.01 < scaled[-1] < 100 and scale >= 256
        if is_pinned and len(scaled) == self._last.maxlen:
            seen = (
                f"in each of the last {len(scaled)} steps the norm of the gradients was {scaled[-1]:.4g} / loss scale"
            )
            yield _clipped_outside(
                step, f"{seen} (now {scale:g}): they were clipped while they were scaled", scaled[-1]
            )
        elif not is_pinned:
            yield from self._unscaled(step, loss, scale, norm, param_norm)

    def _unscaled(self, step: int, loss: float, scale: float, norm: float, param_norm: float) -> Iterator[Finding]:
        # If all params grow by a factor of e, a loss of order L changes by up to norm * |params|. This over L lies
        # between 0.01 and 1000 when a run begins; later gradients may be small. Without |params|, norm / L is well
        # above 3e-4.
        if len(self._ratios) == 10 or scale < 256 or not math.isfinite(loss) or loss == 0:
            return
        is_known = math.isfinite(param_norm)
        self._ratios.append(norm * (max(1.0, param_norm) / 0.01 if is_known else 1 / 3e-4) / abs(loss))
        ratio = float(np.median(self._ratios))
        if len(self._ratios) >= 5 and ratio < 1 and ratio * scale > 1:
            yield Finding(
                "unscaled",
                step,
                "",
                f"the norm of the gradients is {norm:.3g} at a loss of {loss:.3g}; {norm * scale:.3g}, which is this "
                f"norm times the loss scale of {scale:g}, is what fits. So the gradients were divided by a scale that "
                f"never multiplied them: compute them by jaxmp.value_and_grad(loss_fn)(params, ..., "
                f"opt_state=opt_state), not by jax.value_and_grad.",
            )


def _clipped_outside(step: int, seen: str, max_norm: float | None) -> Finding:
    clip = "max_norm" if max_norm is None else f"{max_norm:.3g}"
    return Finding(
        "clipped",
        step,
        "",
        f"{seen}. Clip inside: jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm({clip}), inner), policy).",
    )


# Rules for sampled steps


def overflow(step: int, stats: StepStats) -> Iterator[Finding]:
    """Tensors with inf or NaN: the first such activation, or else gradients."""
    found = stats.activations
    if found is not None and np.any(found.nonfinite > 0):
        i = int(np.flatnonzero(found.nonfinite > 0)[0])
        yield Finding(
            "overflow",
            step,
            f"activations/{found.names[i]}",
            f"{percent(found.nonfinite[i])} of this module's output ({found.dtypes[i]}) is not finite; all earlier "
            f"modules are finite. A loss scale cannot fix a forward pass: run the module in bfloat16 or float32, or "
            f"normalize or scale down its input.",
        )
        return  # the gradients are then not finite either
    names, bad = stats.grads.names, np.flatnonzero(stats.grads.nonfinite > 0)
    if 2 * len(bad) > len(names):  # most of them: one common cause
        which = "the only gradient is" if len(names) == 1 else f"{len(bad)} of {len(names)} gradients are"
        yield Finding(
            "overflow",
            step,
            "grads",
            f"{which} not finite, in several samples: the loss is not finite, or the "
            f"gradient of a late layer, from which all earlier gradients are computed. Watch the activations "
            f"(jaxmp.monitor.watch_activations) or find the operation (jaxmp.monitor.first_bad_op), and check the "
            f"batch. Or lower the learning rate.",
        )
        return
    for i in bad:
        yield Finding(
            "overflow",
            step,
            f"grads/{names[i]}",
            f"{percent(stats.grads.nonfinite[i])} of this gradient ({stats.grads.dtypes[i]}) is not finite, in "
            f"several samples; most other gradients are finite, so this layer has the largest ones. Clip them, scale "
            f"them down (jaxmp.scale_gradient), or keep the layer in bfloat16 or float32.",
        )


def near_overflow(step: int, stats: StepStats) -> Iterator[Finding]:
    """float16 activations within a factor of four of the largest float16: one spike makes them inf."""
    found = stats.activations
    if found is None:
        return
    for i, name in enumerate(found.names):
        if found.dtypes[i] == "float16" and found.nonfinite[i] == 0 and found.amax[i] > _LARGEST_FP16 / 4:
            yield Finding(
                "near_overflow",
                step,
                f"activations/{name}",
                f"this module's output reaches {found.amax[i]:.5g}, and float16 ends at 65504. Normalize or scale down "
                f"its input, or run the module in bfloat16 or float32.",
            )


def underflow(step: int, stats: StepStats, lost: float) -> Iterator[Finding]:
    """float16 gradients in which most values are subnormal."""
    grads = stats.grads
    if np.any(grads.nonfinite > 0):
        return  # an overflow hides the other values
    for i, name in enumerate(grads.names):
        present = 1 - grads.zeros[i]
        share = grads.subnormal[i, _FP16] / present if present > 0 else 0.0
        if grads.dtypes[i] != "float16" or share <= lost:
            continue
        yield Finding(
            "underflow",
            step,
            f"grads/{name}",
            f"{percent(share)} of its nonzero values are subnormal (amax {grads.amax[i]:.3g} in float16, at a loss "
            f"scale of {stats.loss_scale:g}). Try a larger scale (initial_scale=, max_scale=), bfloat16, or a factor "
            f"for this layer (jaxmp.scale_gradient).",
        )


def saturation(step: int, stats: StepStats, metrics: dict[str, float]) -> Iterator[Finding]:
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
    if metrics.get("saturated_params", 0.0) > 0:
        for i, name in enumerate(stats.params.names):
            if stats.params.overflow[i, _FP16] > 0:
                yield Finding(
                    "saturation",
                    step,
                    f"params/{name}",
                    f"its master reaches {stats.params.amax[i]:.5g}, and float16 ends at 65504. Keep the param in "
                    f"float32 (keep_fp32=), use bfloat16, or use more weight decay.",
                )


def dead_update(step: int, stats: StepStats, previous: StepStats, dead: float) -> Iterator[Finding]:
    """Params in which most values that have a gradient keep every bit from one sample to the next."""
    shares = {}
    for name, now in stats.probes.items():
        if name in stats.grads.names and name in previous.probes:
            i = stats.grads.names.index(name)
            has_gradient = (1 - stats.grads.zeros[i]) * (stats.grads.nonfinite[i] == 0)
            moved = float(np.mean(now.view(np.int32) != previous.probes[name].view(np.int32)))
            if has_gradient > 0:
                shares[name] = max(0.0, 1 - moved / float(has_gradient))
    everywhere = len(shares) > 1 and all(share == 1 for share in shares.values())
    for name, share in shares.items():
        if share == 1 and not everywhere and name in stats.may_stay:
            continue  # frozen: the values of a param that trains do not all stay
        if share > dead:
            yield Finding(
                "dead_update",
                step,
                f"params/{name}",
                f"{percent(share)} of the values that have gradients did not change since the last sample"
                + (
                    ", as in all other params: is the learning rate 0, or is every step skipped?"
                    if everywhere
                    else ": updates are below half a unit in the last place, or do not arrive. Keep masters "
                    "(jaxmp.mixed_precision), round stochastically (jaxmp.stochastic_round_updates), or raise the "
                    "learning rate; look for code that puts old params back. A layer that is meant to be frozen needs "
                    "a label (optax.set_to_zero)."
                )
                + (
                    f" The loss scale is {float(stats.loss_scale):g}: do the gradients come from jaxmp.value_and_grad "
                    f"(those of jax.value_and_grad are not scaled), and are they clipped inside mixed_precision?"
                    if float(stats.loss_scale) > 1
                    else ""
                ),
            )


def only_decays(step: int, stats: StepStats, previous: StepStats) -> Iterator[Finding]:
    """Gradients of all params, none of which grows anywhere: weight decay moves them, their gradients do not."""
    if np.any(stats.grads.nonfinite > 0) or not np.any(stats.grads.zeros < 1):
        return
    pairs = [
        (np.abs(now), np.abs(previous.probes[path])) for path, now in stats.probes.items() if path in previous.probes
    ]
    total, grew, moved = (
        sum(now.size for now, _ in pairs),
        *(sum(int(np.sum(is_so(now, old))) for now, old in pairs) for is_so in (np.greater, np.not_equal)),
    )
    if total >= 64 and grew <= 0.005 * total and moved > 0.5 * total:
        yield Finding(
            "dead_update",
            step,
            "params",
            "all params have gradients, and all only shrink since the last sample: weight decay moves them, and their "
            "gradients do not arrive. Look for what is between jaxmp.value_and_grad and the optimizer: clipping of "
            "scaled gradients (put it inside mixed_precision), a product with 0, a cast to fewer bits.",
        )


class Stale:
    """Elements of params that were not their rounded master, as `tx.update` counts them in every step."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=50)
        self._total = math.inf  # elements of params that have a master; known from a sample on

    def take(self, step: int, metrics: dict[str, float], stats: StepStats | None) -> Iterator[Finding]:
        """Takes a step. A sample names the params itself."""
        if stats is not None:
            sizes = dict(zip(stats.params.names, stats.params.sizes, strict=True))
            self._total = sum(sizes.get(path, 0) for path in stats.stale_masters)
        count = metrics.get("stale_masters", math.nan)
        if math.isnan(count) or metrics.get("skipped", 0.0) == 1:
            return
        # optax.apply_updates leaves a few behind in a step, about as many in each.
        usual = max(self._last, default=0.0)
        is_many = (len(self._last) >= 3 and count > 8 + 8 * usual) or count > stale_masters.MANY * self._total
        if stats is None and is_many:
            yield Finding(
                "stale_master",
                step,
                "params",
                f"{count:.0f} values of 16-bit params were not their master in opt_state, rounded, before this step "
                f"({usual:.0f} at most in the steps before): {stale_masters.CAUSE} jaxmp.check_progress(opt_state, "
                f"params) between the change and the step names the param.",
            )
        self._last.append(count)


def stale_master(step: int, stats: StepStats) -> Iterator[Finding]:
    """Params that are not their master, rounded."""
    for path, share in stats.stale_masters.items():
        if share > stale_masters.MANY:
            yield Finding(
                "stale_master",
                step,
                f"params/{path}",
                f"{percent(share)} of this param are not the master in opt_state, rounded: {stale_masters.CAUSE}",
            )


def percent(share: Any) -> str:
    """A share from 0 to 1 as text."""
    return f"{100 * float(share):.3g}%"
