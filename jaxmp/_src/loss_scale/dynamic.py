"""The dynamic loss scale: the rule that moves it, with hysteresis, and the rules of other systems as presets."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmp._src.loss_scale.static import Scaling, is_number

_UNBOUNDED_BELOW = -(2**31)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The constants of the rule: static in the pytree."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float | None
    max_scale: float | None
    refill: str
    hysteresis_floor: int = 0  # `hysteresis_left` stops here; Megatron and apex count down without end
    count_after_overflow: int = 0  # DeepSpeed: -1, so the first growth takes one more good step


@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(Scaling):
    """A scale that grows while gradients stay finite and backs off when they do not, with hysteresis.

    `adjust(grads_finite)` does, with S = loss_scale, c = growth_count, h = hysteresis_left:

        overflow:   h <- max(h - 1, 0);  if h is 0:  S <- max(S * backoff_factor, min_scale);  c <- 0
        otherwise:  c <- c + 1;          if c reaches growth_interval:
                                             S <- min(S * growth_factor, max_scale);  c <- 0;  h <- hysteresis

    With `refill="step"`, every step without overflow also sets h <- hysteresis.

    Args:
      initial_scale: the first scale, > 0. On most models, 2^16 needs only a few skipped steps to find its level.
      growth_factor: > 1. Powers of two keep the scale exact, and with it the gradients.
      backoff_factor: between 0 and 1, both excluded.
      growth_interval: steps without overflow after which the scale grows, counted since the last overflow or growth.
      hysteresis: the scale falls at this many overflows the first time, >= 1; 1 means no hysteresis.
      min_scale: lower bound of the scale, > 0; None for no bound (the scale can then reach 0, as in torch).
      max_scale: upper bound of the scale; None for no bound (the scale can then reach inf and stay there, as in
        Megatron-LM).
      refill: when `hysteresis_left` is set back: `"growth"`, when the scale grows (Megatron-LM), or `"step"`, at every
        step without overflow (apex).

    Attributes:
      loss_scale: float32[].
      growth_count: int32[], steps without overflow since the last overflow or growth.
      hysteresis_left: int32[], overflows until the scale falls.

    Raises:
      ValueError: a number is outside its range; the message names it. Only Python numbers are checked, so that traced
        values pass. The check runs here, not when jax rebuilds the pytree.

    Example:
      >>> scaler = DynamicLossScale(4.0, growth_interval=2, hysteresis=1)
      >>> for finite in (True, True, False):
      ...     scaler = scaler.adjust(finite)
      ...     print(float(scaler.loss_scale))
      4.0
      8.0
      4.0
    """

    loss_scale: Float[Array, ""]

    def __init__(
        self,
        initial_scale: float | Float[Array, ""] = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**32,
        refill: Literal["growth", "step"] = "growth",
    ):
        self._rule = _Rule(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, refill)
        _check_rule(self._rule, initial_scale)
        self.loss_scale = jnp.asarray(initial_scale, jnp.float32)
        self.growth_count = jnp.zeros((), jnp.int32)
        self.hysteresis_left = jnp.asarray(hysteresis, jnp.int32)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "DynamicLossScale":
        """The rule and the defaults of another system. The scale equals that system's scale at every step.

        Args:
          name: one of these.

            - `"megatron"`: no upper bound; the hysteresis counter goes below zero.
            - `"torch"`: torch.amp. No hysteresis, no lower bound; the scale does not grow past float32.
            - `"deepspeed"`: ZeRO. The first growth after an overflow needs one step more.
            - `"deepspeed_fused"`: FP16_Optimizer. As `"deepspeed"`, without hysteresis.
            - `"apex"`: the update_scale_hysteresis kernel. Every step without overflow refills the hysteresis.
            - `"apex_amp"`: upper bound 2^24, which also limits the initial scale.
            - `"mmcv"`: mmcv's LossScaler.
          **overrides: arguments of the constructor that replace the defaults of that system.

        Returns:
          A `DynamicLossScale`.

        Raises:
          ValueError: the name is unknown, or a number is outside its range.

        Example:
          >>> float(DynamicLossScale.preset("megatron").loss_scale) == 2.0**32
          True
        """
        if name not in _PRESETS:
            raise ValueError(f"a preset is one of {', '.join(map(repr, _PRESETS))}; got {name!r}")
        defaults, preset_only = _PRESETS[name]
        arguments = defaults | overrides
        if name == "apex_amp" and is_number(arguments["initial_scale"]) and is_number(arguments["max_scale"]):
            arguments["initial_scale"] = min(arguments["initial_scale"], arguments["max_scale"])
        new = cls(**arguments)
        new._rule = dataclasses.replace(new._rule, **preset_only)
        new.growth_count = jnp.asarray(new._rule.count_after_overflow, jnp.int32)
        return new

    def adjust(self, grads_finite: Bool[Array, ""] | bool) -> "DynamicLossScale":
        """The scale for the next step.

        Args:
          grads_finite: bool[], the same on every device; False if this step overflowed.

        Returns:
          A new `DynamicLossScale` with the same rule, dtypes and structure.
        """
        rule, finite = self._rule, jnp.asarray(grads_finite, bool)
        count = self.growth_count + 1
        grows = count >= rule.growth_interval
        refills = grows if rule.refill == "growth" else True
        falls = self.hysteresis_left <= 1
        left = jnp.maximum(self.hysteresis_left - 1, rule.hysteresis_floor)
        grown = self.loss_scale * jnp.asarray(rule.growth_factor, jnp.float32)
        if rule.max_scale is not None:
            bounded = jnp.minimum(grown, jnp.asarray(rule.max_scale, jnp.float32))
            grown = jnp.where(jnp.isfinite(grown), bounded, self.loss_scale)
        lowered = jnp.maximum(self.loss_scale * jnp.asarray(rule.backoff_factor, jnp.float32), self._floor())
        loss_scale = jnp.where(
            finite, jnp.where(grows, grown, self.loss_scale), jnp.where(falls, lowered, self.loss_scale)
        )
        growth_count = jnp.where(finite, jnp.where(grows, 0, count), rule.count_after_overflow)
        hysteresis_left = jnp.where(finite, jnp.where(refills, rule.hysteresis, self.hysteresis_left), left)
        return DynamicLossScale.tree_unflatten(
            rule, (loss_scale, growth_count.astype(jnp.int32), hysteresis_left.astype(jnp.int32))
        )

    def is_pinned(self, grads_finite: Bool[Array, ""] | bool) -> Bool[Array, ""]:
        """Whether this step overflowed and the scale would fall, but is already at `min_scale`.

        Several such steps in a row mean that no loss scale can help this run.

        Args:
          grads_finite: bool[], as for `adjust`.

        Returns:
          bool[].

        Example:
          >>> bool(DynamicLossScale(1.0, hysteresis=1, min_scale=1.0).is_pinned(False))
          True
        """
        at_floor = self.loss_scale <= self._floor()
        return ~jnp.asarray(grads_finite, bool) & (self.hysteresis_left <= 1) & at_floor

    def _floor(self) -> Float[Array, ""]:
        return jnp.asarray(0.0 if self._rule.min_scale is None else self._rule.min_scale, jnp.float32)

    def __repr__(self) -> str:
        return (
            f"DynamicLossScale(loss_scale={self.loss_scale}, growth_count={self.growth_count}, "
            f"hysteresis_left={self.hysteresis_left}, {self._rule})"
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], _Rule]:
        names = ("loss_scale", "growth_count", "hysteresis_left")
        return tuple((jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names), self._rule

    @classmethod
    def tree_unflatten(cls, aux: _Rule, children: tuple[Any, ...]) -> "DynamicLossScale":
        new = object.__new__(cls)
        new._rule = aux
        new.loss_scale, new.growth_count, new.hysteresis_left = children
        return new


def _check_rule(rule: _Rule, initial_scale: Any) -> None:
    floor = 0.0 if rule.min_scale is None else rule.min_scale
    ceiling = math.inf if rule.max_scale is None else rule.max_scale
    for name, value, holds, rule_text in (
        ("growth_factor", rule.growth_factor, lambda x: x > 1, "> 1"),
        ("backoff_factor", rule.backoff_factor, lambda x: 0 < x < 1, "between 0 and 1, both excluded"),
        ("growth_interval", rule.growth_interval, lambda x: x >= 1, ">= 1 step"),
        ("hysteresis", rule.hysteresis, lambda x: x >= 1, ">= 1 overflow; 1 is no hysteresis"),
        ("min_scale", rule.min_scale, lambda x: x > 0, "> 0; pass None for no floor"),
        ("max_scale", rule.max_scale, lambda x: x < math.inf, "finite; pass None for no ceiling"),
        ("initial_scale", initial_scale, lambda x: x > 0, "> 0"),
    ):
        if is_number(value) and not holds(value):
            raise ValueError(f"{name} must be {rule_text}; got {value}")
    if is_number(initial_scale) and is_number(floor) and is_number(ceiling) and not floor <= initial_scale <= ceiling:
        raise ValueError(
            f"min_scale <= initial_scale <= max_scale must hold; got {rule.min_scale}, {initial_scale} and "
            f"{rule.max_scale}. Move initial_scale, or pass None for a bound."
        )
    if rule.refill not in ("growth", "step"):
        raise ValueError(f'refill must be "growth" (Megatron-LM) or "step" (apex); got {rule.refill!r}')


# For each preset: its arguments of the constructor, and the fields of the rule that only a preset sets.
_PRESETS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "megatron": (
        dict(initial_scale=2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=None),
        dict(hysteresis_floor=_UNBOUNDED_BELOW),
    ),
    "torch": (dict(hysteresis=1, min_scale=None, max_scale=_LARGEST_FLOAT32), {}),
    "deepspeed": (
        dict(growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=None),
        dict(hysteresis_floor=1, count_after_overflow=-1),
    ),
    "deepspeed_fused": (
        dict(initial_scale=2.0**32, growth_interval=1000, hysteresis=1, min_scale=1.0, max_scale=None),
        dict(hysteresis_floor=1, count_after_overflow=-1),
    ),
    "apex": (
        dict(hysteresis=2, min_scale=None, max_scale=_LARGEST_FLOAT32, refill="step"),
        dict(hysteresis_floor=_UNBOUNDED_BELOW),
    ),
    "apex_amp": (dict(initial_scale=2.0**16, hysteresis=1, min_scale=None, max_scale=2.0**24), {}),
    "mmcv": (dict(initial_scale=2.0**32, growth_interval=1000, hysteresis=1, min_scale=1.0, max_scale=None), {}),
}
