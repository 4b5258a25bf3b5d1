"""Converts a loss scale to and from torch.amp's state dict of Python numbers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.loss_scale import dynamic, protocol

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_NEEDED = ("scale", *_FACTORS, "_growth_tracker")


def to_state_dict(loss_scale: Any) -> dict[str, float | int]:
    """torch's five entries, plus `_hysteresis_left` if the rule has hysteresis."""
    leaves, rule = _as_dynamic(loss_scale).tree_flatten_with_keys()
    scale, count, left = (x for _, x in leaves)
    more = {"_hysteresis_left": int(left)} if rule.hysteresis > 1 else {}
    factors = {name: getattr(rule, name) for name in _FACTORS}
    return {"scale": float(scale), **factors, "_growth_tracker": int(count)} | more


def from_state_dict(loss_scale: Any, state_dict: dict[str, Any]) -> dynamic.DynamicLossScale:
    """The scale and the counts of a state dict, under the rule of `loss_scale` with the dict's factors."""
    if not state_dict:
        raise ValueError("a state dict must be of an enabled scaler; got an empty one. Use a new GradScaler() instead.")
    missing = [name for name in _NEEDED if name not in state_dict]
    if missing:
        raise ValueError(
            f"a state dict must have {', '.join(_NEEDED)}; it lacks {', '.join(missing)}. Pass what "
            f"GradScaler.state_dict() returned."
        )
    scale, interval = np.float32(state_dict["scale"]), state_dict["growth_interval"]
    protocol.check_positive(scale)
    if int(interval) != interval:
        raise ValueError(f"growth_interval must be a whole number of steps; got {interval}.")
    factors: Any = {name: float(state_dict[name]) for name in _FACTORS} | {"growth_interval": int(interval)}
    dynamic.DynamicLossScale(**factors)  # raises if one is out of range
    _, rule = _as_dynamic(loss_scale).tree_flatten_with_keys()
    rule = dataclasses.replace(rule, **factors)
    left = state_dict.get("_hysteresis_left", rule.hysteresis)
    return dynamic.DynamicLossScale.tree_unflatten(
        rule,
        (
            jnp.asarray(scale),
            jnp.asarray(state_dict["_growth_tracker"], jnp.int32),
            jnp.asarray(left, jnp.int32),
        ),
    )


def _as_dynamic(loss_scale: Any) -> dynamic.DynamicLossScale:
    if not isinstance(loss_scale, dynamic.DynamicLossScale):
        raise TypeError(f"a state dict needs a dynamic scale; got {loss_scale!r}. Of a static scale save the number.")
    return loss_scale
