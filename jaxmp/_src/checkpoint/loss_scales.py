"""Loss scales of other systems: the state dicts of torch's GradScaler and of Megatron-LM, and flax's DynamicScale.

torch      {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}   Python numbers
Megatron   {"scale": [s], "growth_tracker", "hysteresis_tracker"}                               without the rule
flax       DynamicScale: scale, fin_steps, and the rule; it grows one step later than the others
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.loss_scale import dynamic, protocol, torch_state
from jaxmp._src.step import state as states, state_arrays

_MEGATRON = ("scale", "growth_tracker", "hysteresis_tracker")


_OF_FLAX = {"scale": None, "fin_steps": None, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_OF_FLAX |= {"minimum_scale": float(np.finfo(np.float32).tiny)}


def import_loss_scale(saved: Any, *, loss_scale: dynamic.DynamicLossScale | None = None) -> dynamic.DynamicLossScale:
    """A loss scale of torch, Megatron-LM or flax, which goes on step by step as it would have there.

    Args:
      saved: `GradScaler.state_dict()` of torch; the `grad_scaler` entry of a Megatron checkpoint; a flax
        `DynamicScale`, or a dict with its `scale` and `fin_steps`.
      loss_scale: gives the rule; None: that of the other system, with its defaults for what is not saved.

    Returns:
      A `DynamicLossScale`, for `mixed_precision` or `set_loss_scale`; a ValueError for what is no positive scale.

    Example:
      >>> import_loss_scale({"scale": [4096.0], "growth_tracker": 1, "hysteresis_tracker": 2}).loss_scale
      Array(4096., dtype=float32)

    References: torch/amp/grad_scaler.py; megatron/core/optimizer/grad_scaler.py; flax/training/dynamic_scale.py.
    """
    preset = dynamic.DynamicLossScale.preset
    if hasattr(saved, "fin_steps"):
        saved = {name: getattr(saved, name, default) for name, default in _OF_FLAX.items()}
    if not isinstance(saved, Mapping):
        raise ValueError(f"a loss scale is a state dict of torch or Megatron, or flax's scale; got {saved!r:.80}.")
    if "fin_steps" in saved:
        flax: Any = {k: None if x is None else np.asarray(x).item() for k, x in {**_OF_FLAX, **saved}.items()}
        rule = {name: flax[name] for name in ("growth_factor", "backoff_factor")}
        rule |= {"min_scale": flax["minimum_scale"], "max_scale": float(np.finfo(np.float32).max)}
        rule = loss_scale or preset("torch", growth_interval=flax["growth_interval"] + 1, **rule)
        return _at(rule, *_numbers(saved, ("scale", "fin_steps")), left=int(rule.hysteresis_left))
    if "growth_tracker" in saved or "hysteresis_tracker" in saved:
        return _at(loss_scale or preset("megatron"), *_numbers(saved, _MEGATRON))
    numbers = dict(zip(saved, _numbers(saved, (*saved,)), strict=True))
    return torch_state.from_state_dict(loss_scale or preset("torch"), numbers)


def _numbers(saved: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    """The entries of these names, each of which is one number."""
    sizes = {name: np.size(saved.get(name)) if saved.get(name) is not None else "missing" for name in names}
    if wrong := [name for name, size in sizes.items() if size != 1]:
        raise ValueError(f"a loss scale has a number for each of {names}; {wrong[0]} has {sizes[wrong[0]]}.")
    return [np.asarray(saved[name]).item() for name in names]


def _at(rule: dynamic.DynamicLossScale, scale: float, count: int, left: int) -> dynamic.DynamicLossScale:
    """`rule` with another scale, count, and rest of the hysteresis."""
    protocol.check_positive(scale)
    left = left if count or left else 1  # 1 and 0 act alike, but counts that are all 0 mean a static scale
    return jax.tree.structure(rule).unflatten([jnp.float32(scale), jnp.int32(count), jnp.int32(left)])


def export_loss_scale(
    opt_state: Any, loss_scale: dynamic.DynamicLossScale, format: Literal["torch", "megatron"]
) -> dict[str, Any]:
    """The loss scale of a state as a state dict of torch or Megatron-LM.

    Args:
      opt_state: state of `mixed_precision`, or of `shared_loss_scale`, with one loss scale; else a ValueError.
      loss_scale: the one that the optimizer was made with; torch also saves its rule.
      format: `"torch"` or `"megatron"`.

    Returns:
      A dict of Python numbers; Megatron's `scale` is a list of one, of which Megatron wants a tensor.

    Example:
      >>> import jaxmp, optax
      >>> scale = jaxmp.DynamicLossScale(8.0)
      >>> opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=scale).init(jnp.ones(2))
      >>> export_loss_scale(opt_state, scale, "megatron")
      {'scale': [8.0], 'growth_tracker': 0, 'hysteresis_tracker': 2}
    """
    scaling = _only(opt_state)
    if format == "torch":
        return torch_state.to_state_dict(states.scaler_of(loss_scale, scaling))
    if format != "megatron":
        raise ValueError(f'format must be "torch" or "megatron"; got {format!r}')
    values = ([float(scaling.loss_scale)], int(scaling.growth_count), int(scaling.hysteresis_left))
    return dict(zip(_MEGATRON, values, strict=True))


def set_loss_scale(opt_state: Any, loss_scale: Any) -> Any:
    """`opt_state` with another value of its loss scale; the rule is still that of the optimizer.

    Args:
      opt_state: state of `mixed_precision`, or of `shared_loss_scale`, with one loss scale; else a ValueError.
      loss_scale: a `DynamicLossScale` (its value and its counts), or a positive number (the counts stay).

    Returns:
      The new state; no buffer is shared with the arguments.

    Example:
      >>> import jaxmp, optax
      >>> opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(jnp.ones(2))
      >>> jaxmp.get_loss_scale(set_loss_scale(opt_state, 1024.0))
      Array(1024., dtype=float32)
    """
    old = _only(opt_state)
    if isinstance(loss_scale, dynamic.DynamicLossScale):
        new = states.scaling_state(loss_scale)
    elif jnp.shape(loss_scale) not in ((), jnp.shape(old.loss_scale)):
        raise ValueError(f"a loss scale must be one number; got the shape {jnp.shape(loss_scale)}.")
    else:
        new = old._replace(loss_scale=jnp.asarray(loss_scale, jnp.float32))
    protocol.check_positive(new.loss_scale)

    def replaced(x: Any) -> Any:
        if not isinstance(x, states.LossScaleState):
            return x
        leaves, treedef = jax.tree.flatten(x)  # each may be in a box, and may have a leading axis for pmap
        pairs = zip(jax.tree.leaves(new), leaves, strict=True)
        return treedef.unflatten([jnp.broadcast_to(jnp.asarray(n, o.dtype), o.shape) for n, o in pairs])

    changed = jax.tree.map(replaced, opt_state, is_leaf=lambda x: isinstance(x, states.LossScaleState))
    return state_arrays.own_buffers(changed, foreign=(loss_scale, opt_state))


def _only(opt_state: Any) -> states.LossScaleState:
    scalings = states.find(opt_state, states.LossScaleState)
    if len(scalings) != 1:
        raise ValueError(
            f"opt_state must have one loss scale (mixed_precision(..., loss_scale=)); got {len(scalings)}."
        )
    return scalings[0]
