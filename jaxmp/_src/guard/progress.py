"""Stops a run that skips all steps. A compiled step cannot raise, so it counts, and the host checks the counts."""

import math
from typing import Any

import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base.warn import warn
from jaxmp._src.guard import state_readers
from jaxmp._src.step import stale_masters, state as states

_MANY = 0.1  # the share of skipped steps that is named,
_STEPS = 80  # after this many steps: before, a loss scale that begins too high finds its value by skipping
_RECENT = 40  # and only if this many steps without overflow have not followed


class TrainingStuck(RuntimeError):
    """Raised by `check_progress` for a run that skips every step.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> _, opt_state = tx.update({"w": jnp.full(2, jnp.nan)}, tx.init(params), params)
      >>> try:
      ...     check_progress(opt_state, max_consecutive_skips=1)
      ... except TrainingStuck:
      ...     "stopped"
      'stopped'
    """


def check_progress(
    opt_state: Any,
    params: PyTree = None,
    *,
    max_consecutive_skips: int = 50,
    max_pinned_overflows: int | None = None,
    ceiling: float = 2.0**32,
    step: int | None = None,
) -> None:
    """Raises for a run that skips every step; warns of other signs that it does not train.

    Call it on the host every n steps: a compiled step cannot raise, so the step counts and this function checks the
    counts. It waits for the step to end. (`jaxmp.monitor.Monitor` names each cause once in a run.)

    Args:
      opt_state: state after an update, or a TrainState that holds it; a state replicated by pmap works too.
      params: the params of the same step, to check that each is its master, rounded: the next step overwrites any other
        change. None: those of the TrainState, if it is one. (Arrays that are spread over processes are not compared.)
      max_consecutive_skips: this many skipped steps in a row raise.
      max_pinned_overflows: this many overflows in a row at the floor of the scale raise; None only warns (DeepSpeed
        raises at the first).
      ceiling: a loss scale that reaches it is reported; the `max_scale` of your `DynamicLossScale`, or more.
      step: how many steps there were, the skipped ones included; None: the optimizer's own count of steps that were
        taken. For an optimizer without a count (`optax.sgd`), the warning about skips needs the number.

    Raises:
      TypeError: `opt_state` is no state of an optimizer.
      TrainingStuck: see above. Nothing is lost: params, masters and moments are those before the first skip.

    Warns:
      UserWarning: an overflow found the loss scale at its floor; the scale is at the ceiling; of 80 steps or more one
        in ten was skipped, and it goes on; params that are not their masters.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> check_progress(jaxmp.unscale_and_skip(optax.sgd(0.1)).init(jnp.ones(2)))
    """
    state_readers.check_is_state(opt_state, "check_progress")
    metrics = {name: np.max(np.asarray(x)) for name, x in states.get_metrics(opt_state).items()}
    pinned, skips = metrics["pinned_overflows"], metrics["consecutive_skips"]
    if max_pinned_overflows is not None and pinned >= max_pinned_overflows:
        raise TrainingStuck(
            f"the loss scale must stay above its floor; it overflowed {int(pinned)} times in a row at "
            f"{metrics['loss_scale']}. {_WHAT_TO_DO}"
        )
    if skips >= max_consecutive_skips:
        raise TrainingStuck(
            f"a run must not skip {max_consecutive_skips} steps in a row; it skipped {int(skips)}, with the loss scale "
            f"at {metrics['loss_scale']}. {_WHAT_TO_DO}"
        )
    steps = _steps(metrics, opt_state, step)
    found = {}
    if pinned > 0:
        found["floor"] = (
            f"the loss scale is pinned at its floor, {metrics['loss_scale']}: overflows could not lower it "
            f"(pinned_overflows of get_metrics counts them). {_WHAT_TO_DO}"
        )
    if metrics["loss_scale"] >= ceiling and not metrics["skipped"]:
        found["ceiling"] = (
            f"the loss scale is at its ceiling of {ceiling:g}, and no gradient overflows: gradients are 0, or so small "
            f"that no scale helps, or they were not scaled. Compute them by jaxmp.value_and_grad, see that the loss "
            f"depends on the params, and look at the gradients with jaxmp.monitor.step_stats."
        )
    if (step is not None or steps > metrics["skipped_steps"]) and _skips_often(metrics, steps):
        found["skips"] = (
            f"more than {100 * _MANY:g}% of the steps are skipped (skipped_steps of get_metrics counts them). "
            f"{_WHAT_TO_DO}"
        )
    if params is None and not isinstance(opt_state, tuple):
        params = getattr(opt_state, "params", None)
    if params is not None and (path := stale_masters.first(opt_state, params)) is not None:
        found["stale"] = f"a param must be its master, rounded; got others at {path}: {stale_masters.CAUSE}"
    for message in found.values():
        warn("run-in-trouble", message)


def _steps(metrics: dict[str, Any], opt_state: Any, step: int | None) -> float:
    """How many steps there were, as far as it is known."""
    if step is not None:
        return step
    found = optax.tree_utils.tree_get_all_with_path(nnx.as_pure(opt_state), "count")
    taken = max((int(np.max(np.asarray(x))) for _, x in found if np.size(x)), default=0)
    return taken + float(np.nan_to_num(metrics["skipped_steps"]))


def _skips_often(metrics: dict[str, Any], steps: float) -> bool:
    skipped = metrics["skipped_steps"]
    if not skipped > 0:  # NaN: nothing is counted
        return False
    since = metrics["growth_count"]  # good steps since the last overflow; 0 for a static scale, NaN without one
    return steps >= _STEPS and skipped >= _MANY * steps and (math.isnan(since) or since < _RECENT)


_WHAT_TO_DO = (
    "If gradients are not finite at any scale: look for NaN in the data and the loss, lower the learning rate, keep "
    'norms and softmax in float32 (keep_fp32=), or use the policy "bf16". If they are finite, skip_if skips the steps. '
    "Params and optimizer state are those of the last step taken."
)
