"""A loss scale as torch.amp saves it, a dict of Python numbers, and sets it."""

import copy
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.loss_scale import dynamic, static

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_NEEDED = ("scale", *_FACTORS, "_growth_tracker")


def to_state_dict(loss_scale: Any) -> dict[str, float | int]:
    """torch's five entries; with a rule that has hysteresis, `_hysteresis_left` as well."""
    leaves, rule = _dynamic(loss_scale).tree_flatten_with_keys()
    scale, count, left = (x for _, x in leaves)
    more = {"_hysteresis_left": int(left)} if rule.hysteresis > 1 else {}
    factors = {name: getattr(rule, name) for name in _FACTORS}
    return {"scale": float(scale), **factors, "_growth_tracker": int(count)} | more


def from_state_dict(loss_scale: Any, state_dict: dict[str, Any]) -> dynamic.DynamicLossScale:
    """The scale of a state dict, moved on by the rule of `loss_scale` with the factors of the dict."""
    if not state_dict:
        raise ValueError(
            "an enabled scaler loads the state of an enabled one; got an empty dict, as one with enabled=False saves. "
            "Start with a fresh GradScaler()."
        )
    missing = [name for name in _NEEDED if name not in state_dict]
    if missing:
        raise ValueError(
            f"a state dict must have the entries {', '.join(_NEEDED)}; got {', '.join(state_dict)}, without "
            f"{', '.join(missing)}. Load what GradScaler.state_dict() of torch or jaxmp returned."
        )
    growth_factor, backoff_factor = float(state_dict["growth_factor"]), float(state_dict["backoff_factor"])
    factors: Any = dict(zip(_FACTORS, (growth_factor, backoff_factor, int(state_dict["growth_interval"])), strict=True))
    dynamic.DynamicLossScale(**factors)  # says which one is out of range
    _, rule = _dynamic(loss_scale).tree_flatten_with_keys()
    rule = dataclasses.replace(rule, **factors)
    left = state_dict.get("_hysteresis_left", rule.hysteresis)
    return dynamic.DynamicLossScale.tree_unflatten(
        rule,
        (
            jnp.asarray(state_dict["scale"], jnp.float32),
            jnp.asarray(state_dict["_growth_tracker"], jnp.int32),
            jnp.asarray(left, jnp.int32),
        ),
    )


def at_scale(loss_scale: Any, new_scale: Any) -> Any:
    """`loss_scale` at another scale: its rule and its counts stay."""
    if static.is_number(new_scale) and not 0 < new_scale < math.inf:
        raise ValueError(f"a loss scale must be positive and finite; got new_scale={new_scale}")
    if jnp.shape(new_scale) != ():
        raise ValueError(
            f"one loss has one scale, of shape (); got new_scale of shape {jnp.shape(new_scale)}. Pass a number or a "
            f"scalar, such as new_scale[0]."
        )
    new = copy.copy(loss_scale)
    new.loss_scale = jax.lax.convert_element_type(new_scale, jnp.float32)
    return new


def _dynamic(loss_scale: Any) -> dynamic.DynamicLossScale:
    if not isinstance(loss_scale, dynamic.DynamicLossScale):
        raise TypeError(
            f"torch's state dict is that of a scale that moves; got a scaler with {loss_scale!r}. Keep the number that "
            f"it was made with."
        )
    return loss_scale
