"""Imports loss scales from other systems, and exports them.

    torch      {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}   Python numbers
    Megatron   {"scale": [s], "growth_tracker", "hysteresis_tracker"}                               without the rule
    flax       DynamicScale: scale, fin_steps, and the rule as attributes

All of them store the same state: a scale, a count of good steps and, in Megatron, the rest of the hysteresis. flax
counts from 0 to `growth_interval` and grows at the step after that, so its rule is ours with an interval longer by one.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.loss_scale import dynamic, torch_state
from jaxmp._src.step import state as states, state_arrays

_MEGATRON = ("scale", "growth_tracker", "hysteresis_tracker")


def import_loss_scale(saved: Any, *, loss_scale: dynamic.DynamicLossScale | None = None) -> dynamic.DynamicLossScale:
    """Imports a loss scale of torch, Megatron-LM or flax; pass it to `mixed_precision` or `set_loss_scale`.

    Args:
      saved: `GradScaler.state_dict()` of torch; the `grad_scaler` entry of a Megatron checkpoint; a flax
        `DynamicScale`, or a dict with its `scale` and `fin_steps`. Numbers or scalar arrays.
      loss_scale: gives the rule to continue with. None: the rule of the other system, with its defaults for what was
        not saved.

    Returns:
      A `DynamicLossScale`.

    Raises:
      ValueError: an entry that is missing, or a scale that is not positive and finite.

    Example:
      >>> import_loss_scale({"scale": [4096.0], "growth_tracker": 1, "hysteresis_tracker": 2}).loss_scale
      Array(4096., dtype=float32)
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> import_loss_scale(DynamicScale(scale=8.0, fin_steps=5)).growth_count
      Array(5, dtype=int32)

    References:
      torch/amp/grad_scaler.py; megatron/core/optimizer/grad_scaler.py; flax/training/dynamic_scale.py.
    """
    if hasattr(saved, "fin_steps") or (isinstance(saved, Mapping) and "fin_steps" in saved):
        return _from_flax(saved, loss_scale)
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"a loss scale must come as a state dict of torch or Megatron, or as flax's DynamicScale; got a "
            f"{type(saved).__name__}."
        )
    if any(name in saved for name in ("growth_tracker", "hysteresis_tracker")):
        return _from_megatron(saved, loss_scale)
    new = torch_state.from_state_dict(loss_scale or dynamic.DynamicLossScale.preset("torch"), dict(saved))
    _check_positive(new.loss_scale)
    return new


def export_loss_scale(
    opt_state: Any, loss_scale: dynamic.DynamicLossScale, format: Literal["torch", "megatron"]
) -> dict[str, Any]:
    """Exports the loss scale of a state in the format of torch or Megatron-LM.

    Args:
      opt_state: state of `mixed_precision`, or of `shared_loss_scale`.
      loss_scale: the loss scale that the optimizer was made with; torch also saves the rule.
      format: `"torch"` or `"megatron"`.

    Returns:
      A dict of Python numbers. Megatron's `scale` is a list of one number; make a tensor of it for Megatron.

    Raises:
      ValueError: another format; no loss scale in `opt_state`, or several.

    Example:
      >>> import jaxmp, optax
      >>> scale = jaxmp.DynamicLossScale(8.0)
      >>> opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=scale).init(jnp.ones(2))
      >>> export_loss_scale(opt_state, scale, "megatron")
      {'scale': [8.0], 'growth_tracker': 0, 'hysteresis_tracker': 2}
    """
    (found,) = _find_one(opt_state)
    if format == "torch":
        return torch_state.to_state_dict(states.scaler_of(loss_scale, found))
    if format != "megatron":
        raise ValueError(f'format must be "torch" or "megatron"; got {format!r}')
    values = ([float(found.loss_scale)], int(found.growth_count), int(found.hysteresis_left))
    return dict(zip(_MEGATRON, values, strict=True))


def set_loss_scale(opt_state: Any, loss_scale: Any) -> Any:
    """Sets the value and the counts of the loss scale in `opt_state`; the rule is still that of the optimizer.

    Args:
      opt_state: state of `mixed_precision` with a loss scale, or of `shared_loss_scale`.
      loss_scale: a `DynamicLossScale`; or a positive number, which does not change the counts.

    Returns:
      The new state; no buffer is shared with the arguments.

    Raises:
      ValueError: no loss scale in `opt_state`, or several; a scale that is not positive and finite.

    Example:
      >>> import jaxmp, optax
      >>> opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(jnp.ones(2))
      >>> jaxmp.get_loss_scale(set_loss_scale(opt_state, 1024.0))
      Array(1024., dtype=float32)
    """
    (old,) = _find_one(opt_state)
    if isinstance(loss_scale, dynamic.DynamicLossScale):
        new = states.scaling_state(loss_scale)
    else:
        new = old._replace(loss_scale=jnp.asarray(loss_scale, jnp.float32))
    _check_positive(new.loss_scale)

    def replaced(x: Any) -> Any:
        if not isinstance(x, states.LossScaleState):
            return x
        leaves, treedef = jax.tree.flatten(x)  # each may be in a box, and may have a leading axis for pmap
        pairs = zip(jax.tree.leaves(new), leaves, strict=True)
        return treedef.unflatten([jnp.broadcast_to(jnp.asarray(n, o.dtype), o.shape) for n, o in pairs])

    changed = jax.tree.map(replaced, opt_state, is_leaf=lambda x: isinstance(x, states.LossScaleState))
    return state_arrays.own_buffers(changed, foreign=(loss_scale, opt_state))


def _find_one(opt_state: Any) -> list[Any]:
    found = states.find(opt_state, states.LossScaleState)
    if len(found) != 1:
        raise ValueError(
            f"opt_state must have one loss scale; got {len(found)} of them. Make it with "
            f"jaxmp.mixed_precision(inner, policy, loss_scale=jaxmp.DynamicLossScale())."
        )
    return found


def _check_positive(scale: Any) -> None:
    numbers = np.asarray(scale, np.float64)
    if not np.all((numbers > 0) & np.isfinite(numbers)):
        raise ValueError(f"a loss scale must be positive and finite; got {numbers}.")


def _number(saved: Mapping[str, Any], name: str) -> float:
    value = np.asarray(saved[name], np.float64)
    if value.size != 1:
        raise ValueError(f"{name} must be a single number; got {name} of shape {value.shape}.")
    return float(value.reshape(()))


def _make(rule: dynamic.DynamicLossScale, scale: float, count: int, left: Any) -> dynamic.DynamicLossScale:
    _check_positive(scale)
    left = left if count or int(left) else 1  # 1 and 0 act alike, but counts that are all 0 mean a static scale
    leaves = (jnp.asarray(scale, jnp.float32), jnp.asarray(count, jnp.int32), jnp.asarray(left, jnp.int32))
    return jax.tree.unflatten(jax.tree.structure(rule), leaves)


def _from_megatron(saved: Mapping[str, Any], rule: dynamic.DynamicLossScale | None) -> dynamic.DynamicLossScale:
    missing = [name for name in _MEGATRON if name not in saved]
    if missing:
        raise ValueError(
            f"Megatron's grad_scaler must have the entries {', '.join(_MEGATRON)}; got {', '.join(saved)}, without "
            f"{', '.join(missing)}. Remove grad_scaler to keep the loss scale of the optimizer."
        )
    rule = rule or dynamic.DynamicLossScale.preset("megatron")
    return _make(rule, _number(saved, "scale"), *(int(_number(saved, name)) for name in _MEGATRON[1:]))


def _from_flax(saved: Any, rule: dynamic.DynamicLossScale | None) -> dynamic.DynamicLossScale:
    get = saved.get if isinstance(saved, Mapping) else lambda name, default: getattr(saved, name, default)
    values = {"scale": get("scale", None), "fin_steps": get("fin_steps", None)}
    missing = [name for name, x in values.items() if x is None]
    if missing:
        raise ValueError(f"flax's DynamicScale must have scale and fin_steps; {missing[0]} is missing.")
    if rule is None:
        floor = get("minimum_scale", float(np.finfo(np.float32).tiny))
        rule = dynamic.DynamicLossScale.preset(
            "torch",
            growth_factor=float(get("growth_factor", 2.0)),
            backoff_factor=float(get("backoff_factor", 0.5)),
            growth_interval=int(get("growth_interval", 2000)) + 1,
            min_scale=None if floor is None else float(floor),
            max_scale=float(np.finfo(np.float32).max),
        )
    return _make(rule, _number(values, "scale"), int(_number(values, "fin_steps")), rule.hysteresis_left)
