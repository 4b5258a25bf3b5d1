"""The precision is named once: an optimizer of optax that comes with a policy is wrapped for it."""

from typing import Any

import jmp
import optax

from jaxmp._src.guard import transform
from jaxmp._src.step import policy as policy_lib
from jaxmp._src.step.transform import Transformation


def wrapped(
    tx: optax.GradientTransformation, policy: str | jmp.Policy | None, keep_fp32: Any, loss_scale: Any
) -> tuple[optax.GradientTransformation, policy_lib.Policy | None]:
    """`(tx, policy)`: `tx` in `mixed_precision`, if it is not there yet, and the policy with its patterns.

    Raises:
      TypeError: `keep_fp32` or `loss_scale` for a `tx` that was made with its own, or without a policy.
    """
    is_made = policy is None or isinstance(tx, Transformation)
    given = [
        name for name, is_given in (("keep_fp32", keep_fp32 != ()), ("loss_scale", loss_scale != "auto")) if is_given
    ]
    if is_made and given:
        held = "no policy" if policy is None else "a tx of jaxmp, which was made with its own"
        raise TypeError(
            f"{given[0]}= goes with policy= to an optimizer of optax, which is wrapped for it; got {held}. Pass it to "
            f"jaxmp.mixed_precision(inner, policy, ...) or jaxmp.get_policy(policy, keep_fp32=...)."
        )
    if policy is None:
        return tx, None
    chosen = policy_lib.get_policy(policy, keep_fp32=keep_fp32)
    return (tx if is_made else transform.mixed_precision(tx, chosen, loss_scale=loss_scale)), chosen
