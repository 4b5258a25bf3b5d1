"""Loss scaling: the arithmetic, with no optimizer in sight.

float16 holds nothing below 6e-8, and most gradients of a trained network are smaller than that. So the loss is
multiplied by a scale S before differentiation and the gradients are divided by S after: they travel through float16
2^k times larger than they are. S must be as large as possible without any gradient passing 65504. A *dynamic* scale
finds that value by trial:

    a step with a non-finite gradient is skipped, and (once `hysteresis` of them have come)  S <- max(S * backoff, min)
    after `growth_interval` steps without one                                               S <- min(S * growth, max)

*Hysteresis* tells an S that is too large from a single bad batch: of `hysteresis` overflows only the last one lowers
S. When the count is refilled is where systems differ: Megatron-LM refills it when S grows (`refill="growth"`), apex's
kernel at every good step (`refill="step"`). In between, once the count is used up, *each* further overflow lowers S.

Every object here is immutable and a pytree whose leaves are arrays, and follows jmp's protocol: `.loss_scale`,
`.scale(tree)`, `.unscale(tree)`, `.adjust(grads_finite)`. A class of your own with these four can be used as well.

    Megatron-LM  megatron/core/optimizer/grad_scaler.py     torch   torch/amp/grad_scaler.py
    DeepSpeed    runtime/fp16/loss_scaler.py                apex    csrc/update_scale_hysteresis.cu, apex/amp/scaler.py
    Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740)

Where we differ from all of them: the scale is clamped at both ends by default (theirs reach inf, or 0, and stay).
"""

import dataclasses
import math
from typing import Any, Literal, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp import casting

_UNBOUNDED_BELOW = -(2**31)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@runtime_checkable
class LossScale(Protocol):
    """What a loss-scale object must offer: jmp's protocol. Its leaves are arrays that `adjust` keeps in dtype."""

    @property
    def loss_scale(self) -> Any: ...
    def scale(self, tree: PyTree) -> PyTree: ...
    def unscale(self, tree: PyTree) -> PyTree: ...
    def adjust(self, grads_finite: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The static part of a dynamic scale: how it moves."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float | None
    max_scale: float | None
    refill: str
    hysteresis_floor: int = 0  # below this `hysteresis_left` does not count on: Megatron and apex count without end
    count_after_overflow: int = 0  # DeepSpeed: -1, one more good step before the first growth


class _Scaling:
    """`scale` and `unscale`, the same for every loss scale of ours."""

    loss_scale: Float[Array, ""]

    def scale(self, tree: PyTree) -> PyTree:
        """Float leaves times the scale, in float32 (a float16 loss times 65536 would be inf)."""
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) * self.loss_scale if casting.is_float(x) else x, tree
        )

    def unscale(self, tree: PyTree) -> PyTree:
        """Float leaves in float32, times 1 / scale."""
        return unscale(tree, self.loss_scale)


def unscale(tree: PyTree, loss_scale: Float[Array, ""]) -> PyTree:
    """Float leaves of `tree` in float32, times `1 / loss_scale`: g_i = f32(scaled_i) * f32(1 / S).

    Multiplying by the rounded reciprocal is what Megatron-LM and torch do; it is exact for powers of two.

    Args:
      tree: gradients, in any float dtypes.
      loss_scale: float32[], the scale that scaled them.

    Returns:
      The same structure, float leaves in float32.

    Example:
      >>> unscale({"w": jnp.array([8.0], jnp.float16)}, jnp.float32(4.0))
      {'w': Array([2.], dtype=float32)}
    """
    inv_scale = casting.reciprocal(loss_scale)
    return jax.tree.map(lambda x: x.astype(jnp.float32) * inv_scale if casting.is_float(x) else x, tree)


@jax.tree_util.register_pytree_node_class
class NoOpLossScale(_Scaling):
    """No loss scaling: the scale is 1 and gradients only change dtype.

    Example:
      >>> float(NoOpLossScale().loss_scale)
      1.0
    """

    @property
    def loss_scale(self) -> Float[Array, ""]:  # type: ignore[override]
        """float32[], always 1."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """`tree` with float leaves in float32."""
        return casting.cast_floats(tree, jnp.float32)

    unscale = scale

    def adjust(self, grads_finite: Bool[Array, ""]) -> Self:
        """Itself."""
        del grads_finite
        return self

    def __repr__(self) -> str:
        return "NoOpLossScale()"

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[()]) -> Self:
        del aux, children
        return cls()


@jax.tree_util.register_pytree_node_class
class StaticLossScale(_Scaling):
    """A scale that never moves. A step that overflows is skipped all the same.

    Args:
      scale: positive and finite; powers of two keep gradients exact.

    Raises:
      ValueError: `scale` is not positive and finite.

    Example:
      >>> scaler = StaticLossScale(128.0)
      >>> scaler.unscale(scaler.scale(jnp.float32(3.0)))
      Array(3., dtype=float32)
    """

    def __init__(self, scale: float | Float[Array, ""]):
        if isinstance(scale, (int, float)) and not 0 < scale < math.inf:
            raise ValueError(f"a static loss scale must be positive and finite; got {scale}. 1.0 is no scaling.")
        self.loss_scale = jnp.asarray(scale, jnp.float32)

    def adjust(self, grads_finite: Bool[Array, ""]) -> Self:
        """Itself."""
        del grads_finite
        return self

    def __repr__(self) -> str:
        return f"StaticLossScale({self.loss_scale})"

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.loss_scale,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Self:
        del aux
        new = object.__new__(cls)
        (new.loss_scale,) = children
        return new


@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(_Scaling):
    """A scale that grows while gradients stay finite and backs off when they do not, with hysteresis.

    One `adjust(grads_finite)`, with c = growth_count, h = hysteresis_left:

        overflow:   h <- max(h - 1, 0);  if h is used up:  S <- max(S * backoff_factor, min_scale);  c <- 0
        otherwise:  c <- c + 1;          if c reaches growth_interval:
                                             S <- min(S * growth_factor, max_scale);  c <- 0;  h <- hysteresis

    With `refill="step"`, h <- hysteresis at every step that does not overflow.

    Args:
      initial_scale: the first scale. 2^16 finds its place within some skipped steps on most models.
      growth_factor: > 1. Powers of two keep the scale, and so the gradients, exact.
      backoff_factor: between 0 and 1, both excluded.
      growth_interval: good steps, counted since the last overflow or growth, after which the scale grows.
      hysteresis: overflows it takes to lower the scale the first time, >= 1; 1 is no hysteresis.
      min_scale: floor of the scale, > 0; None for no floor (the scale may then reach 0, as torch's may).
      max_scale: ceiling of the scale; None for no ceiling (it may then reach inf and stay there, as Megatron's may).
      refill: `"growth"` (Megatron-LM) or `"step"` (apex): when `hysteresis_left` is refilled.

    Attributes:
      loss_scale: float32[].
      growth_count: int32[], good steps since the last overflow or growth.
      hysteresis_left: int32[], overflows until the scale falls.

    Raises:
      ValueError: a number outside of its range, named in the message. Only Python numbers are checked, so that
        traced values pass; and only here, never when a pytree is rebuilt.

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
        """The rule and the defaults of another system, equal to it step by step.

        Args:
          name: `"megatron"` (no ceiling; counts hysteresis below zero), `"torch"` (torch.amp: no hysteresis, no
            floor; a growth past float32 is not taken), `"deepspeed"` (ZeRO: the first growth after an overflow takes
            one step more), `"deepspeed_fused"` (FP16_Optimizer: the same without hysteresis), `"apex"` (the
            update_scale_hysteresis kernel: refilled at every good step), `"apex_amp"` (ceiling 2^24, to which the
            initial scale is cut as well), `"mmcv"` (its LossScaler).
          **overrides: arguments of the constructor that replace the defaults of that system.

        Returns:
          A `DynamicLossScale`.

        Raises:
          ValueError: an unknown name, or a number outside of its range.

        Example:
          >>> float(DynamicLossScale.preset("megatron").loss_scale) == 2.0**32
          True
        """
        if name not in _PRESETS:
            raise ValueError(f"a preset is one of {', '.join(map(repr, _PRESETS))}; got {name!r}")
        defaults, hidden = _PRESETS[name]
        arguments = defaults | overrides
        if name == "apex_amp" and arguments["max_scale"] is not None:
            arguments["initial_scale"] = min(arguments["initial_scale"], arguments["max_scale"])
        new = cls(**arguments)
        new._rule = dataclasses.replace(new._rule, **hidden)
        new.growth_count = jnp.asarray(new._rule.count_after_overflow, jnp.int32)
        return new

    def adjust(self, grads_finite: Bool[Array, ""] | bool) -> "DynamicLossScale":
        """The scale for the next step.

        Args:
          grads_finite: bool[], the same on every device; False where this step overflowed.

        Returns:
          A new `DynamicLossScale` with the same rule, dtypes and structure.
        """
        rule, finite = self._rule, jnp.asarray(grads_finite, bool)
        count = self.growth_count + 1
        grows = count >= rule.growth_interval
        refills = grows if rule.refill == "growth" else True
        falls = self.hysteresis_left <= 1
        left = jnp.maximum(self.hysteresis_left - 1, rule.hysteresis_floor)
        return self._with_leaves(
            jnp.where(finite, jnp.where(grows, self._grown(), self.loss_scale), jnp.where(falls, self._lowered(), self.loss_scale)),
            jnp.where(finite, jnp.where(grows, 0, count), rule.count_after_overflow).astype(jnp.int32),
            jnp.where(finite, jnp.where(refills, rule.hysteresis, self.hysteresis_left), left).astype(jnp.int32),
        )

    def is_pinned(self, grads_finite: Bool[Array, ""] | bool) -> Bool[Array, ""]:
        """Whether this overflow should lower the scale but the floor forbids it: more of them mean a broken run.

        Args:
          grads_finite: bool[], as for `adjust`.

        Returns:
          bool[].

        Example:
          >>> bool(DynamicLossScale(1.0, hysteresis=1, min_scale=1.0).is_pinned(False))
          True
        """
        at_floor = self.loss_scale <= np.float32(self._rule.min_scale or 0.0)
        return ~jnp.asarray(grads_finite, bool) & (self.hysteresis_left <= 1) & at_floor

    def _grown(self) -> Float[Array, ""]:
        grown = self.loss_scale * np.float32(self._rule.growth_factor)
        if self._rule.max_scale is None:
            return grown
        bounded = jnp.minimum(grown, np.float32(self._rule.max_scale))
        return jnp.where(jnp.isfinite(grown), bounded, self.loss_scale)

    def _lowered(self) -> Float[Array, ""]:
        return jnp.maximum(self.loss_scale * np.float32(self._rule.backoff_factor), np.float32(self._rule.min_scale or 0.0))

    def _with_leaves(self, loss_scale: Any, growth_count: Any, hysteresis_left: Any) -> "DynamicLossScale":
        new = object.__new__(DynamicLossScale)
        new._rule = self._rule
        new.loss_scale, new.growth_count, new.hysteresis_left = loss_scale, growth_count, hysteresis_left
        return new

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


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _check_rule(rule: _Rule, initial_scale: Any) -> None:
    floor = 0.0 if rule.min_scale is None else rule.min_scale
    ceiling = math.inf if rule.max_scale is None else rule.max_scale
    for name, value, holds, rule_text in (
        ("growth_factor", rule.growth_factor, lambda x: x > 1, "> 1, or the scale never grows"),
        ("backoff_factor", rule.backoff_factor, lambda x: 0 < x < 1, "between 0 and 1, both excluded"),
        ("growth_interval", rule.growth_interval, lambda x: x >= 1, ">= 1 step"),
        ("hysteresis", rule.hysteresis, lambda x: x >= 1, ">= 1 overflow; 1 is no hysteresis"),
        ("min_scale", rule.min_scale, lambda x: x > 0, "> 0; pass None for no floor"),
        ("max_scale", rule.max_scale, lambda x: x < math.inf, "finite; pass None for no ceiling"),
        ("initial_scale", initial_scale, lambda x: x > 0, "> 0"),
    ):
        if _is_number(value) and not holds(value):
            raise ValueError(f"{name} must be {rule_text}; got {value}")
    if _is_number(initial_scale) and _is_number(floor) and _is_number(ceiling) and not floor <= initial_scale <= ceiling:
        raise ValueError(
            f"min_scale <= initial_scale <= max_scale must hold; got {rule.min_scale} <= {initial_scale} <= {rule.max_scale}. "
            f"Move initial_scale into the range, or pass None for the end that should not bind."
        )
    if rule.refill not in ("growth", "step"):
        raise ValueError(f'refill must be "growth" (Megatron-LM) or "step" (apex); got {rule.refill!r}')


# defaults of the constructor, and the parts of the rule that only a preset sets
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
    "apex_amp": (dict(hysteresis=1, min_scale=None, max_scale=2.0**24), {}),
    "mmcv": (dict(initial_scale=2.0**32, growth_interval=1000, hysteresis=1, min_scale=1.0, max_scale=None), {}),
}


def as_loss_scale(loss_scale: Any) -> Any:
    """The loss-scale object that an argument stands for.

    Args:
      loss_scale: None (no scaling), a Python number or scalar array (static), an object of this module, one of jmp
        (taken over with its scale, period, factor and floor), or any object with jmp's protocol.

    Returns:
      An object with `.loss_scale`, `.scale`, `.unscale` and `.adjust`.

    Raises:
      TypeError: none of these.

    Example:
      >>> as_loss_scale(None), as_loss_scale(8.0)
      (NoOpLossScale(), StaticLossScale(8.0))
    """
    if loss_scale is None or isinstance(loss_scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    if isinstance(loss_scale, jmp.StaticLossScale):
        return StaticLossScale(jnp.asarray(loss_scale.loss_scale, jnp.float32))
    if isinstance(loss_scale, jmp.DynamicLossScale):
        return _from_jmp(loss_scale)
    if _is_number(loss_scale) or (isinstance(loss_scale, (jax.Array, np.ndarray, np.generic)) and jnp.ndim(loss_scale) == 0):
        return StaticLossScale(loss_scale)
    missing = [n for n in ("loss_scale", "scale", "unscale", "adjust") if not hasattr(loss_scale, n)]
    if missing or isinstance(loss_scale, type):
        raise TypeError(
            f'loss_scale must be "auto", None, a number or an object with jmp\'s protocol (.loss_scale, .scale, .unscale, '
            f".adjust); got {loss_scale!r}" + (f", which lacks .{missing[0]}" if missing else ", a class: call it")
        )
    return loss_scale


def _from_jmp(scaler: jmp.DynamicLossScale) -> DynamicLossScale:
    """jmp's rule with our arithmetic: its own loses `min_loss_scale` in a pytree round trip, and fails on float16."""
    new = DynamicLossScale.preset(
        "torch",
        initial_scale=jnp.asarray(scaler.loss_scale, jnp.float32),
        growth_factor=float(scaler.factor),
        backoff_factor=1.0 / float(scaler.factor),
        growth_interval=int(scaler.period),
        min_scale=float(scaler.min_loss_scale),
    )
    new.growth_count = jnp.asarray(scaler.counter, jnp.int32)
    return new
