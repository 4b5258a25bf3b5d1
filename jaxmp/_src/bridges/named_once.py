"""The precision is named once: an optimizer of optax that comes with a policy is wrapped for it."""

from typing import Any

import jmp
import optax

from jaxmp._src.step import policy as policy_lib, transform
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
    given = ["keep_fp32"] * (keep_fp32 is not None) + ["loss_scale"] * (not is_auto)
    if is_made and given:
        held = "no policy" if policy is None else "a tx of jaxmp, which was made with its own"
        raise TypeError(
            f"{given[0]}= must go with policy= and an optax optimizer; got {held}. Pass it to "
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
    for name in ("param_dtype", "keep_fp32", "compute_dtype"):
        own, other = getattr(tx.rule.policy, name), getattr(chosen, name)
        if own != other:
            raise ValueError(
                f"policy= must be that of tx; got {name}={other!s} in policy and {own!s} in tx. Pass an optax "
                f"optimizer as tx."
            )
    return tx, chosen
