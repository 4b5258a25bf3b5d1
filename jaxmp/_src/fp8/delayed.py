"""Delayed scaling: the scale of a cast from the largest magnitudes, the amaxes, of the tensor in earlier steps.

The range of e4m3fn is 2^-9 to 448, that of e5m2 is 2^-16 to 57344. A tensor fits in if it is scaled first:

    q = cast(x * scale),    x ~ q / scale,    scale <= fp8_max / amax,    amax = max |x|

`scale` always multiplies before the cast. In the format "HYBRID", activations and weights are e4m3fn, which has more
bits of mantissa, and gradients are e5m2, which has more range.

The largest scale that fits is fp8_max / amax. The largest *power of two* that fits costs less than one binade of the
range. Multiplying and dividing by it is exact, and it does not change when amax changes a little. With
x = 2^e(x) (1 + f(x)),

    log2(scale) = e(fp8_max) - e(amax) - (1 if f(amax) > f(fp8_max) else 0) - margin

is integer arithmetic. `margin` leaves that many binades free above amax.

The amax of the tensor itself (`current`) costs a second read of x. With that of earlier steps, one read gives the cast
and the amax; values above the amaxes in the history saturate. A state keeps the history h of L amaxes of each tensor,
updated after each step:

    h[0] <- amax;    a = max(h) or h[0];    h <- roll(h, -1);    h[0] <- 0;    scale <- fp8_max / a

The rules are those of TransformerEngine (transformer_engine/common/recipe), bit for bit where this file says so.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import casts, scale_equations, scale_leaves
from jaxmp._src.fp8.casts import Cast, Tensor
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.recipe import TensorRecipe
from jaxmp._src.fp8.scale_equations import Format
from jaxmp._src.numerics import float_bits

_LARGEST_MARGIN = 100  # fp8_max * 2^-margin must be a normal float32


class AmaxState(NamedTuple):
    """The state of delayed scaling for one tensor, or for several tensors with axes `*shape`.

    Attributes:
      scale: float32[*shape], the factor of the next cast.
      amax_history: float32[len, *shape]. The next amax goes into slot 0, which is 0 between updates; the last slot
        holds the newest amax.

    Example:
      >>> DelayedScaling(amax_history_len=2).init((3,)).amax_history.shape
      (2, 3)
    """

    scale: Float[Array, "*shape"]
    amax_history: Float[Array, "len *shape"]


@dataclasses.dataclass(frozen=True)
class DelayedScaling(TensorRecipe):
    """The scale of a step from the amaxes of earlier steps.

    One `update(state, amax)` is, elementwise and in float32,

        if the tensor was used:   h[0] <- amax;   a = amax_compute(h);   h <- roll(h, -1);   h[0] <- 0
                                  scale <- fp8_max * 2^-margin / a   where 0 < a < inf
        otherwise:                nothing

    An amax of 0, -0 or -inf (the identity of max) says that the tensor was not used.

    With `semantics="te"` and `power_of_two=False` this is bit for bit the fused update of TransformerEngine: a NaN or
    an inf enters the history, the maximum ignores the NaN, and an inf freezes the scale until it has left the window.
    With `semantics="jaxmp"` an amax that is not finite counts as not used and never enters the history.

    Differences from TransformerEngine: power-of-two scales and `semantics="jaxmp"` are the defaults; there is no
    unfused update, in which old amaxes age while a tensor is not used.

    Args:
      margin: binades left free above the amax, a whole number; 0 uses the whole range.
      amax_history_len: L >= 1; an amax counts for L updates.
      amax_compute: `"max"` of the history, `"most_recent"`, or a function of float32[L, *shape] (the newest in slot
        0) to float32[*shape].
      fp8_format: `"HYBRID"` (e5m2 for gradients, else e4m3fn) or `"E4M3"`.
      power_of_two: whether scales are powers of two.
      semantics: `"jaxmp"` or `"te"`.
      dgrad, wgrad: `"bfloat16"` leaves this product in 16 bits.
      interval: ignored, with a warning unless it is 1; TransformerEngine never used it either.

    Raises:
      ValueError: an argument outside its range, named in the message.

    Example:
      >>> recipe = DelayedScaling(amax_history_len=2)
      >>> state = recipe.init()
      >>> for amax in (3.0, 7.0, 1.0, 1.0, jnp.inf):
      ...     state = recipe.update(state, jnp.float32(amax))
      ...     print(float(state.scale), state.amax_history.tolist())
      128.0 [0.0, 3.0]
      64.0 [0.0, 7.0]
      64.0 [0.0, 1.0]
      256.0 [0.0, 1.0]
      256.0 [0.0, 1.0]

    References:
      transformer_engine/common/recipe/delayed_scaling.cu; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute: Literal["max", "most_recent"] | Callable[[Array], Array] = "max"
    fp8_format: Format = "HYBRID"
    power_of_two: bool = True
    semantics: Literal["jaxmp", "te"] = "jaxmp"
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.margin, numbers.Integral) or abs(self.margin) > _LARGEST_MARGIN:
            raise ValueError(
                f"margin counts binades: a whole number from -{_LARGEST_MARGIN} to {_LARGEST_MARGIN}; "
                f"got {self.margin!r}"
            )
        if not isinstance(self.amax_history_len, numbers.Integral) or self.amax_history_len < 1:
            raise ValueError(
                f"amax_history_len must be a whole number >= 1; got {self.amax_history_len!r}. "
                "Without a history use CurrentScaling."
            )
        if self.amax_compute not in ("max", "most_recent") and not callable(self.amax_compute):
            raise ValueError(
                f'amax_compute must be "max", "most_recent" or a function of the history; got {self.amax_compute!r}'
            )
        if self.semantics not in ("jaxmp", "te"):
            raise ValueError(f'semantics must be "jaxmp" or "te" (TransformerEngine); got {self.semantics!r}')
        if self.interval != 1:
            warn(
                "interval-does-nothing",
                f"interval={self.interval!r} does nothing: scales move at every update. Leave it out.",
                UserWarning,
            )

    def leaves(self) -> dict[str, float]:
        """Names and first values of the scale leaves of a layer.

        Example:
          >>> DelayedScaling(power_of_two=False).leaves()
          {'fp8_lhs_e4m3_scale': 1.0, 'fp8_rhs_e4m3_scale': 1.0, 'fp8_grad_e5m2_scale': 1.0}
        """
        names = [
            scale_leaves.leaf_name(operand, self.dtype(backward=operand == "grad"), power_of_two=self.power_of_two)
            for operand in ("lhs", "rhs", "grad")
        ]
        return dict.fromkeys(names, 0.0 if self.power_of_two else 1.0)

    def cast(self, gemm: Gemm, tensor: Tensor, products: Sequence[str]) -> Cast:
        """See `Recipe.cast`: one cast, with the scale of the leaf, for both products."""
        return casts.by_leaf(gemm, tensor, products)

    def init(self, shape: tuple[int, ...] = (), *, backward: bool = False) -> AmaxState:
        """The state before the first step: scale 1, an empty history.

        Args:
          shape: axes of tensors that are updated together; () for one tensor.
          backward: as for `update`; it does not change the first state.

        Example:
          >>> DelayedScaling(amax_history_len=2).init()
          AmaxState(scale=Array(1., dtype=float32), amax_history=Array([0., 0.], dtype=float32))
        """
        del backward
        return AmaxState(jnp.ones(shape, jnp.float32), jnp.zeros((self.amax_history_len, *shape), jnp.float32))

    def update(self, state: AmaxState, amax: Float[Array, "*shape"], *, backward: bool = False) -> AmaxState:
        """The state for the next step.

        Args:
          state: scale float32[*shape] and history float32[len, *shape].
          amax: float32[*shape], max |x| of this step; 0 or less where the tensor was not used.
          backward: whether the tensors are gradients: e5m2 under `"HYBRID"`.

        Returns:
          A new `AmaxState` of the same shapes, float32.

        Raises:
          ValueError: the shapes do not agree.

        Example:
          >>> recipe = DelayedScaling(amax_history_len=1)
          >>> float(recipe.update(recipe.init(), jnp.float32(3.0), backward=True).scale)
          16384.0
        """
        scale, history = jnp.asarray(state.scale, jnp.float32), jnp.asarray(state.amax_history, jnp.float32)
        amax = jnp.asarray(amax, jnp.float32)
        if history.shape != (self.amax_history_len, *scale.shape) or amax.shape != scale.shape:
            raise ValueError(
                f"amax_history_len={self.amax_history_len} amaxes of each scale must be in the history; got scale "
                f"{scale.shape}, amax {amax.shape}, history {history.shape}. Call init(shape)."
            )
        used = float_bits.is_positive_finite(amax)
        if self.semantics == "te":
            used = used | (amax == jnp.inf) | jnp.isnan(amax)
        filled = history.at[0].set(amax)  # [L, *shape]
        moved = scale_equations.scale_from_amax(
            self._reduce(filled),
            float(jnp.finfo(self.dtype(backward=backward)).max),
            fallback=scale,
            margin=int(self.margin),
            power_of_two=self.power_of_two,
        )
        rolled = jnp.roll(filled, -1, axis=0).at[0].set(0.0)
        return AmaxState(jnp.where(used, moved, scale), jnp.where(used[None], rolled, history))

    def _reduce(self, history: Float[Array, "len *shape"]) -> Float[Array, "*shape"]:
        if self.amax_compute == "max":
            return float_bits.from_bits(jnp.max(float_bits.magnitude_bits(history), axis=0))
        if self.amax_compute == "most_recent":
            return history[0]
        reduced = jnp.asarray(self.amax_compute(history), jnp.float32)  # pyright: ignore[reportCallIssue]
        if reduced.shape != history.shape[1:]:
            raise ValueError(
                f"amax_compute reduces axis 0 of a history {history.shape}, to {history.shape[1:]}; got {reduced.shape}"
            )
        return reduced
