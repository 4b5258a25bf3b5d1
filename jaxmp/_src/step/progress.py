"""Stop a run that skips all steps. A compiled step cannot raise: it counts, and the host checks the counts."""

import warnings
from typing import Any

import numpy as np

from jaxmp._src.step import state as states


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


def check_progress(opt_state: Any, *, max_consecutive_skips: int = 50, max_pinned_overflows: int | None = None) -> None:
    """Raises for a run that skips every step, and warns of a loss scale stuck at its floor.

    Call it on the host every n steps: a compiled step cannot raise, so the step counts and this function checks the
    counts. It waits for the step to end.

    Args:
      opt_state: state after an update; a state replicated by pmap works too.
      max_consecutive_skips: this many skipped steps in a row raise.
      max_pinned_overflows: this many overflows in a row at the floor of the scale raise; None only warns (DeepSpeed
        raises at the first).

    Raises:
      TrainingStuck: see above. Nothing is lost: params, masters and moments are those before the first skip.

    Warns:
      UserWarning: an overflow found the loss scale at its floor.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> check_progress(jaxmp.unscale_and_skip(optax.sgd(0.1)).init(jnp.ones(2)))
    """
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
    if pinned > 0:
        warnings.warn(
            f"the loss scale is pinned at its floor, {metrics['loss_scale']}: {int(pinned)} overflows in a row could "
            f"not lower it. {_WHAT_TO_DO}",
            stacklevel=2,
        )


_WHAT_TO_DO = (
    "If gradients are not finite at any scale: look for NaN in the data and the loss, lower the learning rate, keep "
    'norms and softmax in float32 (keep_fp32=), or use the policy "bf16". If they are finite, skip_if skips the steps. '
    "Params and optimizer state are those of the last step taken."
)
