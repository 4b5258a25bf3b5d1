"""The NamedTuples that a chain keeps in `opt_state`: plain arrays with unique names, and no behaviour.

`optax.tree.get(opt_state, "loss_scale")` finds a field at any depth. So two tuples have a field of the same name only
if it has the same meaning. The functions that read them are in read_state.py.
"""

from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.fp8 import recipes

T = TypeVar("T")


def _with_attributes(kind: type[T]) -> type[T]:
    """A NamedTuple class whose objects can have attributes. They are no part of the pytree, and are lost with it."""
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)  # pyright: ignore[reportReturnType]


class LossScaleState(NamedTuple):
    """The changing part of one of jaxmp's loss scales.

    Attributes:
      loss_scale: float32[], the scale that the next loss is multiplied by.
      growth_count: int32[], good steps since the last overflow or growth; 0 for a static scale.
      hysteresis_left: int32[], overflows until the scale falls; 0 for a static scale.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(8.0))
      >>> state = tx.init({"w": jnp.ones(2)}).scaling
      >>> float(state.loss_scale), int(state.growth_count), int(state.hysteresis_left)
      (8.0, 0, 2)
    """

    loss_scale: Float[Array, ""]
    growth_count: Int[Array, ""]
    hysteresis_left: Int[Array, ""]


class NoLossScaleState(LossScaleState):
    """A `LossScaleState` of a chain without a loss scale: its type says so while a step is traced."""


class StaticLossScaleState(LossScaleState):
    """A `LossScaleState` of a scale that never changes: its type says so while a step is traced."""


class CustomLossScaleState(NamedTuple):
    """The changing part of a user's own loss-scale object.

    Attributes:
      loss_scale: float32[].
      scaler_leaves: the pytree leaves of the object.
    """

    loss_scale: Float[Array, ""]
    scaler_leaves: tuple[Array, ...]


@_with_attributes
class UnscaleState(NamedTuple):
    """State of `unscale_and_skip`.

    Attributes:
      scaling: a `LossScaleState`, or a `CustomLossScaleState`.
      skipped: bool[], whether the last step was skipped.
      skipped_steps: int32[], skipped steps so far.
      consecutive_skips: int32[], skipped steps since the last one that was taken.
      pinned_overflows: int32[], overflows in a row with the scale at its floor.
      unscaled_fp16: bool[], whether float16 params are trained without a loss scale.
      saturated_params: float32[], weights in the params of the last step that stood at the largest float16 value
        because their master is larger. If params are split over devices: the largest count of any device, or, under
        pmap and shard_map(check_vma=False), the count of each device.
      kept_elements: float32[], elements of the params that kept all their old values in the last step, because the
        optimizer made a number of theirs non-finite; 0 in a skipped step. Split params: as for saturated_params.
      guarded: state of the wrapped transform.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> state = jaxmp.unscale_and_skip(optax.sgd(0.1), 8.0).init({"w": jnp.ones(2)})
      >>> isinstance(state, UnscaleState), int(state.skipped_steps)
      (True, 0)
    """

    scaling: LossScaleState | CustomLossScaleState
    skipped: Bool[Array, ""]
    skipped_steps: Int[Array, ""]
    consecutive_skips: Int[Array, ""]
    pinned_overflows: Int[Array, ""]
    unscaled_fp16: Bool[Array, ""]
    saturated_params: Float[Array, ""]
    kept_elements: Float[Array, ""]
    guarded: Any


class LowUnscaleState(UnscaleState):
    """`UnscaleState` for a policy of wide params and 16-bit computation: its type says so while a step is traced."""


class MasterState(NamedTuple):
    """State of `keep_master_params`.

    Attributes:
      master_params: the tree of the params with a float32 master for each 16-bit param, and `optax.MaskedNode()` for
        params that need none (float32 params, frozen params). With `remainder_bits`, int16 or int8: the master minus
        its bfloat16 param, in units of the last place.
      master_inner: state of the wrapped optimizer, made from float32 params.
      rounding_count: int32[] with `remainder_bits=8`: steps so far, on which the noise of the rounding depends; else
        None.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> state = jaxmp.keep_master_params(optax.sgd(0.1), "fp16").init({"w": jnp.ones(2, jnp.float16)})
      >>> state.master_params["w"].dtype.name
      'float32'
    """

    master_params: PyTree
    master_inner: Any
    rounding_count: Any = None


class Fp8State(NamedTuple):
    """State of `update_amax`: the scales of a model's fp8 tensors and their amax histories.

    Attributes:
      amax_states: one `AmaxState` for each recipe and direction (forward, backward), of n scales: scale float32[n],
        amax_history float32[len, n].
      saturated_tensors: float32[], tensors that had values beyond their fp8 range in the last step taken.
      unused_tensors: float32[], tensors that were not used in the last step taken, or all zero.
      lost_gradients: float32[], gradients that were all zero in the last step taken, of layers that ran.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> params = {"fp8_lhs_e4m3_log2_scale": jnp.zeros(())}
      >>> state = jaxmp.fp8.update_amax(jaxmp.fp8.DelayedScaling(amax_history_len=4)).init(params)
      >>> [found.amax_history.shape for found in state.amax_states]
      [(4, 1)]
    """

    amax_states: tuple[recipes.AmaxState, ...]
    saturated_tensors: Float[Array, ""]
    unused_tensors: Float[Array, ""]
    lost_gradients: Float[Array, ""]


class SplitFp8State(NamedTuple):
    """State of `split_fp8`.

    Attributes:
      fp8_scales: state of the transform of the scale leaves, an `Fp8State`.
      fp8_rest: state of the transform of all other leaves.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.fp8.split_fp8(jaxmp.fp8.update_amax(jaxmp.fp8.DelayedScaling()), optax.sgd(0.1))
      >>> state = tx.init({"w": jnp.ones(2), "fp8_lhs_e4m3_log2_scale": jnp.zeros(())})
      >>> type(state.fp8_scales).__name__
      'Fp8State'
    """

    fp8_scales: Any
    fp8_rest: Any


class GlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`: grad_norm is float32[], the norm before clipping, of the last step taken."""

    grad_norm: Float[Array, ""]


class ZeroCountState(NamedTuple):
    """State of `count_zeros`: zero_grads is float32[], exact zeros among the gradients of the last step taken."""

    zero_grads: Float[Array, ""]


class EmaParamsState(NamedTuple):
    """State of `ema_params`.

    Attributes:
      ema_count: int32[], steps taken so far.
      ema_weight: float32[], the sum of the weights in the average: 1 - d^count with `debias`, else 1.
      ema_params: the tree of the params in float32.
      ema_batch_stats: the statistics that are averaged too, float32 in nested dicts; None without them.
    """

    ema_count: Int[Array, ""]
    ema_weight: Float[Array, ""]
    ema_params: PyTree
    ema_batch_stats: Any = None


class SharedLossScaleState(NamedTuple):
    """State of `shared_loss_scale`: one scale, and whether every optimizer so far in this step had finite gradients.

    Attributes:
      scaling: a `LossScaleState`, or a `CustomLossScaleState`.
      all_grads_finite: bool[].
    """

    scaling: LossScaleState | CustomLossScaleState
    all_grads_finite: Bool[Array, ""]
