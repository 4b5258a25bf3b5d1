"""Stops a run that skips all steps: a compiled step cannot raise, so it counts, and the host checks the counts."""

from typing import Any

import numpy as np

from jaxmp._src.base.warn import warn
from jaxmp._src.step import state as states


class TrainingStuck(RuntimeError):
    """Raised by `check_progress` for a run that skips every step.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> opt_state, params = tx.init({"w": jnp.ones(2)}), {"w": jnp.ones(2, jnp.bfloat16)}
      >>> _, opt_state = tx.update({"w": jnp.full(2, jnp.nan)}, opt_state, params)
      >>> try:
      ...     check_progress(opt_state, max_consecutive_skips=1)
      ... except TrainingStuck:
      ...     "stopped"
      'stopped'
    """


def check_progress(opt_state: Any, *, max_consecutive_skips: int = 50, max_pinned_overflows: int | None = None) -> None:
    """Raises for a run that skips every step; warns of a loss scale that overflows at its floor.

    Call it on the host every n steps. It waits for the step to end. (`jaxmp.monitor.Monitor` names what else is wrong
    with a run: frequent skips, a scale at its ceiling, params that are not their masters.)

    Args:
      opt_state: state after an update, or a TrainState that holds it; a state replicated by pmap works too.
      max_consecutive_skips: this many skipped steps in a row raise.
      max_pinned_overflows: this many overflows in a row at the floor of the scale raise; None only warns (DeepSpeed
        raises at the first).

    Raises:
      TypeError: `opt_state` is no state of an optimizer.
      TrainingStuck: see above. Nothing is lost: params, masters and moments are those before the first skip.

    Warns:
      UserWarning: an overflow found the loss scale at its floor.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> check_progress(jaxmp.unscale_and_skip(optax.sgd(0.1)).init(jnp.ones(2)))
    """
    states.check_is_state(opt_state, "check_progress")
    metrics = {name: np.max(np.asarray(x)) for name, x in states.get_metrics(opt_state).items()}
    pinned, skips = metrics["pinned_overflows"], metrics["consecutive_skips"]
    scale = metrics["loss_scale"]
    if max_pinned_overflows is not None and pinned >= max_pinned_overflows:
        raise TrainingStuck(
            f"the loss scale must stay above its floor; got {int(pinned)} overflows in a row at {scale}. {_WHAT_TO_DO}"
        )
    if skips >= max_consecutive_skips:
        raise TrainingStuck(
            f"a run must not skip {max_consecutive_skips} steps in a row; got {int(skips)}, with the loss scale at "
            f"{scale}. {_WHAT_TO_DO}"
        )
    if pinned > 0:
        warn(
            "run-in-trouble",
            f"the loss scale is pinned at its floor, {scale}: overflows could not lower it. {_WHAT_TO_DO}",
        )


_WHAT_TO_DO = "Look for NaN with jaxmp.monitor.first_bad_op, or lower the learning rate."
