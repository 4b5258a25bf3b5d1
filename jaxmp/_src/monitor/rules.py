"""What is wrong with a run, from what was recorded of it: rules with thresholds, each with a way out.

A rule looks at finished numbers on the host and says nothing most of the time. What it finds it names by the path of
the tensor, and says what to try. By kind:

    skips          more than 1 % of the last steps skipped, or more and more of them
    stuck_scale    overflows in a row at the floor of the loss scale: no scale helps
    loss_jump      the loss stays far above what it was before a skip, or is not finite in a step that was taken
    overflow       an activation that is not finite; a gradient that is so again and again
    near_overflow  a float16 activation beyond a fourth of 65504
    underflow      most of a float16 gradient is subnormal, or all of it zero while others are not
    saturation     values of an fp8 tensor beyond its range; a master beyond float16
    dead_update    values that have gradients and do not move, as bfloat16 params without masters

The first three are of every step, the others of the steps that were looked at (`StepStats`): they are suspicions, which
`Monitor` believes when they come again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._src.monitor.step_stats import StepStats
from jaxmp._src.monitor.tensor_stats import FORMATS

_FP16 = list(FORMATS).index("fp16")
_LARGEST_FP16 = 65504.0


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
      kind: the rule: skips, stuck_scale, loss_jump, overflow, near_overflow, underflow, saturation or
        dead_update.
      step: where it was noticed.
      path: of the tensor, as `grads/block/kernel`, `activations/block` or `params/block/kernel`; "" without one.
      message: what was seen, and what to try.

    Example:
      >>> print(Finding("overflow", 7, "grads/block/kernel", "a tenth of its values would be inf."))
      step 7: overflow at grads/block/kernel: a tenth of its values would be inf.
    """

    kind: str
    step: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}{f' at {self.path}' if self.path else ''}: {self.message}"


# Of every step


def skips(step: int, skipped: Sequence[bool], limit: float, suspect: str) -> Iterator[Finding]:
    """Too many skips among the last steps, or clearly more in their second half than in the first."""
    half = len(skipped) // 2
    first, second = sum(skipped[:half]), sum(skipped[half:])
    ratio = (first + second) / len(skipped)
    rising = second >= 3 and second - first > 2 * math.sqrt(first + second)  # two deviations of the difference
    if ratio <= limit and not rising:
        return
    seen = f"{100 * ratio:.2g}% of the last {len(skipped)} steps were skipped"
    seen += f", {first} in the first half and {second} in the second" if rising else ""
    yield Finding(
        "skips",
        step,
        suspect,
        f"{seen}; healthy is at most {100 * limit:g}%, and not rising. "
        + (f"Not finite most often: {suspect}. " if suspect else "To learn where, sample every overflow (`when=`). ")
        + "Try a lower learning rate or a longer warm-up, clipping, a larger eps in Adam, or float32 for that layer.",
    )


def stuck_scale(step: int, metrics: dict[str, float], patience: int) -> Iterator[Finding]:
    """Overflows in a row at the floor of the loss scale."""
    pinned = metrics.get("pinned_overflows", math.nan)
    if pinned >= patience:
        yield Finding(
            "stuck_scale",
            step,
            "",
            f"the loss scale is at its floor, {metrics['loss_scale']:g}, and {pinned:.0f} steps in a row overflowed "
            f"all the same: the forward pass or the data is not finite, or gradients leave float16 unscaled. Find the "
            f"operation with jaxmp.monitor.first_bad_op; lower the learning rate, or keep that layer in float32.",
        )


def loss_jump(
    step: int, loss: float, before: Sequence[float], since_skip: int | None, skipped: bool
) -> Iterator[Finding]:
    """A loss far above what it was before the last skip.

    Args:
      step: of the loss.
      loss: of a step.
      before: losses of steps taken before the last skip.
      since_skip: steps since then; None if there was none.
      skipped: whether this step itself was.
    """
    if skipped:
        return
    if not math.isfinite(loss):
        yield Finding(
            "loss_jump",
            step,
            "",
            f"the loss is {loss} in a step that was taken. Under mixed_precision its gradients were finite: the loss "
            f"itself overflows, so compute it in float32. Under a plain optimizer nothing is skipped: params or its "
            f"state may be NaN (jaxmp.monitor.first_nonfinite), as after an eps that underflowed (check_optimizer).",
        )
    elif since_skip is not None and len(before) >= 4:
        usual = float(np.median(before))
        spread = 1.4826 * float(np.median(np.abs(np.asarray(before) - usual)))  # a deviation, whatever the outliers
        if loss - usual > max(8 * spread, 0.25 * abs(usual)):
            yield Finding(
                "loss_jump",
                step,
                "",
                f"the loss is {loss:.4g}, {since_skip} steps after a skip; before it was {usual:.4g}. A skip leaves "
                f"params as they are, so the steps around it went wrong: gradients near overflow that are finite but "
                f"huge. Clip them, skip spikes (skip_if=), or lower the learning rate.",
            )


# Of the steps that were looked at


def overflow(step: int, stats: StepStats) -> Iterator[Finding]:
    """Tensors with inf or NaN: the first activation, or else gradients."""
    found = stats.activations
    if found is not None and np.any(found.nonfinite > 0):
        i = int(np.flatnonzero(found.nonfinite > 0)[0])
        yield Finding(
            "overflow",
            step,
            f"activations/{found.names[i]}",
            f"{_percent(found.nonfinite[i])} of this module's output ({found.dtypes[i]}) is not finite, and what was "
            f"computed before it is. No loss scale mends a forward pass: run the module in bfloat16 or float32, or "
            f"normalize or scale down what comes in.",
        )
        return  # which makes gradients so
    names, bad = stats.grads.names, np.flatnonzero(stats.grads.nonfinite > 0)
    if len(bad) > 1 and 2 * len(bad) > len(names):  # one cause
        yield Finding(
            "overflow",
            step,
            "grads",
            f"{len(bad)} of {len(names)} gradients are not finite, again and again: the loss is not, or the gradient "
            f"of a late layer, which reaches all before it. Look at the activations (jaxmp.monitor.watch_activations) "
            f"or find the operation (jaxmp.monitor.first_bad_op), and look at the batch; lower the learning rate.",
        )
        return
    for i in bad:
        yield Finding(
            "overflow",
            step,
            f"grads/{names[i]}",
            f"{_percent(stats.grads.nonfinite[i])} of it ({stats.grads.dtypes[i]}) is not finite, again and again, and "
            f"most other gradients are: those of this layer are the largest. Clip them, scale them down "
            f"(jaxmp.scale_gradient), or keep the layer in bfloat16 or float32.",
        )


def near_overflow(step: int, stats: StepStats) -> Iterator[Finding]:
    """float16 activations that come within a factor of four of the largest float16: it takes a spike, no more."""
    found = stats.activations
    if found is None:
        return
    for i, name in enumerate(found.names):
        if found.dtypes[i] == "float16" and found.nonfinite[i] == 0 and found.amax[i] > _LARGEST_FP16 / 4:
            yield Finding(
                "near_overflow",
                step,
                f"activations/{name}",
                f"it reaches {found.amax[i]:.5g}, and float16 ends at 65504. Normalize or scale down what comes in, or "
                f"run the module in bfloat16 or float32.",
            )


def underflow(step: int, stats: StepStats, lost: float) -> Iterator[Finding]:
    """Gradients in float16 of which most have lost bits."""
    grads = stats.grads
    if np.any(grads.nonfinite > 0) or not np.any(grads.amax > 0):
        return  # nothing can be said, or nothing flows at all
    for i, name in enumerate(grads.names):
        present = 1 - grads.zeros[i]
        share = grads.subnormal[i, _FP16] / present if present > 0 else 1.0
        if grads.dtypes[i] != "float16" or share <= lost:
            continue
        seen = (
            f"{_percent(share)} of its values other than 0 are subnormal"
            if present > 0
            else "all of it is 0, and other gradients are not: it underflowed, or nothing leads from it to the loss"
        )
        yield Finding(
            "underflow",
            step,
            f"grads/{name}",
            f"{seen} (amax {grads.amax[i]:.3g} in float16, at a loss scale of {stats.loss_scale:g}). Try a larger "
            f"scale (initial_scale=, max_scale=), bfloat16, or a factor for this layer (jaxmp.scale_gradient).",
        )


def saturation(step: int, stats: StepStats, metrics: dict[str, float]) -> Iterator[Finding]:
    """fp8 tensors that were cut off at the largest value of their format, and masters beyond float16."""
    for path, saturated in stats.fp8.saturated.items():
        if np.any(saturated):
            amax, scale = float(np.max(stats.fp8.amax[path])), float(np.min(stats.fp8.scale[path]))
            yield Finding(
                "saturation",
                step,
                path,
                f"values were cut off: amax {amax:.3g} at a scale of {scale:g}, look after look. The history does not "
                f"hold the peaks: a longer amax_history_len, a margin, current scaling, or bfloat16 for this layer.",
            )
    if metrics.get("saturated_params", 0.0) > 0:
        for i, name in enumerate(stats.params.names):
            if stats.params.overflow[i, _FP16] > 0:
                yield Finding(
                    "saturation",
                    step,
                    f"params/{name}",
                    f"its master reaches {stats.params.amax[i]:.5g}, and a float16 param ends at 65504. Keep it in "
                    f"float32 (keep_fp32=), use bfloat16, or more weight decay.",
                )


def dead_update(step: int, stats: StepStats, earlier: StepStats, dead: float) -> Iterator[Finding]:
    """Params of which most values that have a gradient are, bit for bit, what they were at the look before."""
    shares = {}
    for name, now in stats.probes.items():
        if name in stats.grads.names and name in earlier.probes:
            i = stats.grads.names.index(name)
            flowing = (1 - stats.grads.zeros[i]) * (stats.grads.nonfinite[i] == 0)
            moved = float(np.mean(now.view(np.int32) != earlier.probes[name].view(np.int32)))
            if flowing > 0:
                shares[name] = max(0.0, 1 - moved / float(flowing))
    everywhere = len(shares) > 1 and all(share == 1 for share in shares.values())
    for name, share in shares.items():
        if share > dead:
            yield Finding(
                "dead_update",
                step,
                f"params/{name}",
                f"{_percent(share)} of the values that have gradients have not moved since the last look"
                + (
                    ", as in all other params: is the learning rate 0, or every step skipped?"
                    if everywhere
                    else ": updates are below half of a unit in the last place. Keep masters (jaxmp.mixed_precision), "
                    "round stochastically (jaxmp.stochastic_round_updates), or raise the learning rate."
                )
                + (
                    f" The loss scale is {float(stats.loss_scale):g}: are the gradients those of jaxmp.value_and_grad "
                    f"(jax's have no scale in them), clipped inside of mixed_precision?"
                    if float(stats.loss_scale) > 1
                    else ""
                ),
            )


def _percent(share: Any) -> str:
    return f"{100 * float(share):.3g}%"
