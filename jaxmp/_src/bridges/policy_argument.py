"""The precision is named once: an optimizer of optax that comes with a policy is wrapped for it."""

from typing import Any

import jmp
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from jaxmp._src.step import policy as policy_lib, scale_reads, state as states, transform
from jaxmp._src.step.transform import Transformation


def wrapped(
    tx: optax.GradientTransformation, policy: str | jmp.Policy | None, keep_fp32: Any, loss_scale: Any
) -> tuple[optax.GradientTransformation, policy_lib.Policy | None]:
    """`(tx, policy)`: `tx` in `mixed_precision`, if it is not there yet, and the policy with its patterns.

    Raises:
      TypeError: `keep_fp32` or `loss_scale` for a `tx` that was made with its own, or without a policy.
      ValueError: a `tx` of jaxmp without masters, or of another policy.
    """
    is_made = policy is None or isinstance(tx, Transformation)
    is_auto = isinstance(loss_scale, str) and loss_scale == "auto"
    options = ["keep_fp32"] * (keep_fp32 is not None) + ["loss_scale"] * (not is_auto)
    if is_made and options:
        held = "no policy" if policy is None else "a tx of jaxmp, which was made with its own"
        raise TypeError(
            f"{options[0]}= must go with policy= and an optax optimizer; got {held}. Pass it to "
            f"{'jaxmp.mixed_precision' if keep_fp32 is None else 'jaxmp.get_policy'}."
        )
    if policy is None:
        return tx, None
    named = {} if keep_fp32 is None else {"keep_fp32": keep_fp32}  # `()` says that no layer has to stay in float32
    chosen = policy_lib.get_policy(policy, **named)
    if not isinstance(tx, Transformation):
        return transform.mixed_precision(tx, chosen, loss_scale=loss_scale), chosen
    if tx.rule.policy is None:
        raise ValueError("tx must keep masters for policy=; got none. Call jaxmp.mixed_precision(tx, policy).")
    fields = ("param_dtype", "keep_fp32", "compute_dtype")
    if difference := policy_lib.first_difference(chosen, tx.rule.policy, fields):
        field, other, own = difference
        raise ValueError(
            f"policy= must be that of tx; got {field}={other!s} in policy and {own!s} in tx. Pass an optax optimizer "
            f"as tx."
        )
    return tx, chosen


def check_taken(policy: policy_lib.Policy, opt_state: Any, grads: PyTree, params: PyTree) -> None:
    """Warns if the loss of `grads` cannot have run in the policy that a TrainState or nnx.Optimizer carries.

    The update tells it of a dynamic loss scale in a trace.
    """
    step_states = states.find(opt_state, states.StepState)
    scale = step_states[0].scaling.loss_scale if step_states and step_states[0].scaling is not None else None
    is_told = policy.uses_float16 and isinstance(scale, Tracer)
    computes_wide = not policy.computes_in_16_bits and policy.recipe is None
    if scale is None or is_told or computes_wide or scale_reads.may_be_of(grads, scale, params):
        return
    if not scale_reads.ran_in(policy.compute_dtype, grads):
        scale_reads.warn_of_unread(
            f"this state carries the policy {policy}, and no loss took it from there. Call value_and_grad of jaxmp or "
            f"jaxmp.nnx with opt_state=state. If the model computes in 16 bits by itself, leave out policy=."
        )
