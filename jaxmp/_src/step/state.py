"""What a step remembers in `opt_state`, and the functions that read it.

State is plain arrays in NamedTuples: no objects with behaviour, no Python numbers. So checkpoints,
`flax.serialization`, replication for pmap, shardings, donation and `optax.tree.get(opt_state, "loss_scale")` work as
for any optimizer. Two tuples have a field of the same name only if it has the same meaning.

`find` finds a tuple at any depth: inside `optax.chain`, in a flax TrainState, in an `nnx.Optimizer`. A step itself gets
its `StepState` as an argument, and searches nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import delayed
from jaxmp._src.loss_scale import dynamic, static
from jaxmp._src.numerics import casting
from jaxmp._src.step import masters
from pallas_kernels import moments

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
class StepState(NamedTuple):
    """State of `mixed_precision`, `unscale_and_skip` and `keep_master_params`: all that a step remembers.

    A part that a transform does not have is None. A skipped step changes `scaling` and the counts only.

    Attributes:
      scaling: a `LossScaleState`, or a `CustomLossScaleState`.
      skipped: bool[], whether the last step was skipped.
      skipped_steps: int32[], skipped steps so far.
      consecutive_skips: int32[], skipped steps since the last one that was taken.
      pinned_overflows: int32[], overflows in a row with the scale at its floor.
      unscaled_fp16: bool[], whether float16 params are trained without a loss scale.
      saturated_params: float32[], weights in the params of the last step taken that stood at the largest float16 value
        because their master is larger. If params are split over devices: the largest count of any device, or, under
        pmap and shard_map(check_vma=False), the count of each device.
      stale_masters: float32[], elements of 16-bit params that were not their rounded master in the last step taken by
        `tx.update`; -1 after `apply_gradients`, which does not read the params. Split params: as saturated_params.
      largest_gradient: float32[], the largest magnitude of an unscaled gradient on any device in the last step taken;
        -1 where it is not measured.
      before_state: state of the transform `before=`.
      master_params: the tree of the params with a float32 master for each 16-bit param, and `optax.MaskedNode()` for
        params that need none (float32 params, frozen params). With `remainder_bits`, int16 or int8: the master minus
        its bfloat16 param, in units of the last place.
      rounding_count: int32[] with `remainder_bits=8`: steps so far, on which the noise of the rounding depends.
      fp8_scales: an `Fp8State`.
      optimizer_state: state of the wrapped optimizer, made from float32 params.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init({"w": jnp.ones(2)})
      >>> state.master_params["w"].dtype.name, int(state.skipped_steps)
      ('float32', 0)
    """

    scaling: Any
    skipped: Any
    skipped_steps: Any
    consecutive_skips: Any
    pinned_overflows: Any
    unscaled_fp16: Any
    saturated_params: Any
    stale_masters: Any
    largest_gradient: Any
    before_state: Any
    master_params: PyTree
    rounding_count: Any
    fp8_scales: Any
    optimizer_state: Any

    def __getattr__(self, name: str) -> Any:
        """Says where a field of the optimizer's own state is: `opt_state.hyperparams`, as a loop in optax reads it."""
        path = None if name.startswith("_") else _path_of_field(self.optimizer_state, name)
        if path is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        use = "Give functions of optax that state, and the params of jaxmp.get_master_params(opt_state, params)."
        if name == "hyperparams":
            use = "To change a number, call optax.tree.set(opt_state, learning_rate=jnp.float32(1e-4))."
        where = f"opt_state.optimizer_state{path}.{name}"
        raise AttributeError(f"opt_state has no {name}; the state of the optimizer inside has: {where}. {use}")


def _path_of_field(state: Any, name: str) -> str | None:
    """Where a NamedTuple with this field is, as it is written: `[1].inner_state`; `""` for `state` itself."""
    if not isinstance(state, tuple):
        return None
    fields = getattr(state, "_fields", ())
    if name in fields:
        return ""
    parts = zip([f".{field}" for field in fields] or [f"[{i}]" for i in range(len(state))], state, strict=True)
    paths = ((part, _path_of_field(x, name)) for part, x in parts)
    return next((f"{part}{path}" for part, path in paths if path is not None), None)


# Numbers that are measured in a step, of the last step taken, and their values before the first; -1: not measured.
# (Not NaN: `jax_debug_nans` stops a step that returns one.)
MEASURED = {
    "saturated_params": np.float32(0),
    "stale_masters": np.float32(-1),
    "largest_gradient": np.float32(-1),
}

# What a step counts, and the values before the first step; `get_metrics` returns each by its name.
COUNTED = {
    "skipped": np.bool_(False),
    "skipped_steps": np.int32(0),
    "consecutive_skips": np.int32(0),
    "pinned_overflows": np.int32(0),
    "unscaled_fp16": np.bool_(False),
    **MEASURED,
}


def counted(
    state: StepState, finite: Any, taken: Any, pinned: Any, measured: Mapping[str, Float[Array, ""]]
) -> dict[str, Any]:
    """The fields of `COUNTED` after a step.

    Args:
      state: the state before it.
      finite, taken: the decision.
      pinned: bool[], whether the gradients overflowed with the scale at its floor.
      measured: what was measured, by the names of `MEASURED`.
    """
    if state.skipped is None:
        return dict.fromkeys(COUNTED)
    skipped = ~taken
    of_last_taken = {name: jnp.where(taken, x, getattr(state, name)) for name, x in measured.items()}
    return {
        "skipped": skipped,
        "skipped_steps": _count(state.skipped_steps, skipped),
        "consecutive_skips": jnp.where(skipped, _count(state.consecutive_skips, skipped), 0),
        "pinned_overflows": jnp.where(finite, 0, _count(state.pinned_overflows, pinned)),
        "unscaled_fp16": state.unscaled_fp16,
        **dict.fromkeys(MEASURED, jnp.float32(-1)),
        **of_last_taken,
    }


def _count(count: Any, happened: Bool[Array, ""]) -> Array:
    return jnp.where(happened, optax.safe_increment(count), count)


class LowStepState(StepState):
    """`StepState` for a policy of wide params and 16-bit computation: its type says so while a step is traced."""


class Fp8State(NamedTuple):
    """State of `update_amax`: the scales of a model's fp8 tensors and their amax histories.

    Attributes:
      amax_states: one `AmaxState` for each recipe and direction (forward, backward), of n scales: scale float32[n],
        amax_history float32[len, n].
      saturated_tensors: float32[], tensors that had values beyond their fp8 range in the last step taken.
      unused_tensors: float32[], tensors that were not used in the last step taken.
      lost_gradients: float32[], gradients that were all zero in the last step taken, of layers that ran.
      spoiled_tensors: float32[], tensors whose amax was averaged with others or lost before the last step taken.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=jaxmp.fp8.DelayedScaling(amax_history_len=4))
      >>> state = tx.init({"fp8_lhs_e4m3_log2_scale": jnp.zeros(())})
      >>> [found.amax_history.shape for found in find(state, Fp8State)[0].amax_states]
      [(4, 1)]
    """

    amax_states: tuple[delayed.AmaxState, ...]
    saturated_tensors: Float[Array, ""]
    unused_tensors: Float[Array, ""]
    lost_gradients: Float[Array, ""]
    spoiled_tensors: Float[Array, ""]


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
    """

    ema_count: Int[Array, ""]
    ema_weight: Float[Array, ""]
    ema_params: PyTree


class SharedLossScaleState(NamedTuple):
    """State of `shared_loss_scale`: one scale, and whether every optimizer so far in this step had finite gradients.

    Attributes:
      scaling: a `LossScaleState`, or a `CustomLossScaleState`.
      all_grads_finite: bool[].
    """

    scaling: LossScaleState | CustomLossScaleState
    all_grads_finite: Bool[Array, ""]


# Readers


def scaling_state(scaler: Any) -> LossScaleState | CustomLossScaleState:
    """The arrays of a loss-scale object, as kept in `opt_state`."""
    loss_scale = jnp.asarray(scaler.loss_scale, jnp.float32)
    if isinstance(scaler, dynamic.DynamicLossScale):
        return LossScaleState(loss_scale, scaler.growth_count, scaler.hysteresis_left)
    if isinstance(scaler, static.StaticLossScale | static.NoOpLossScale):
        kind = NoLossScaleState if isinstance(scaler, static.NoOpLossScale) else StaticLossScaleState
        return kind(loss_scale, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    return CustomLossScaleState(loss_scale, tuple(jnp.asarray(x) for x in jax.tree.leaves(scaler)))


def scaler_of(template: Any, state: LossScaleState | CustomLossScaleState) -> Any:
    """The loss-scale object with the rule of `template` and the arrays of `state`."""
    if isinstance(state, CustomLossScaleState):
        leaves: Any = state.scaler_leaves
    elif isinstance(template, dynamic.DynamicLossScale):
        leaves = state
    else:
        leaves = (state.loss_scale,) if isinstance(template, static.StaticLossScale) else ()
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def find(opt_state: Any, kind: type) -> list[Any]:
    """Every state of type `kind` inside `opt_state`, outermost first; wrappers of nnx are removed."""
    return tree_paths.nodes_of(nnx.as_pure(opt_state), kind)


def has_loss_scale(opt_state: Any) -> bool:
    """Whether there is a loss scale in `opt_state`."""
    return bool(_scalings(opt_state))


def _scalings(opt_state: Any) -> list[Any]:
    return find(opt_state, LossScaleState) or find(opt_state, CustomLossScaleState)


def may_scale(opt_state: Any) -> bool:
    """Whether there may be a loss scale other than 1: False only if it is known that there is none."""
    scalings = _scalings(opt_state)
    return not scalings or not all(isinstance(x, NoLossScaleState) for x in scalings)


def computes_low(opt_state: Any) -> bool:
    """Whether `opt_state` is of a policy with wide params that computes in 16 bits, or is a shared loss scale."""
    return bool(find(opt_state, LowStepState) or find(opt_state, SharedLossScaleState))


def with_policy(opt_state: Any, policy: Any) -> Any:
    """`opt_state` with the policy that its TrainState carries, for `policy_of`.

    The policy is an attribute of the state's tuple, and no part of the pytree: a TrainState holds it as a static field,
    and writes it here whenever it is made, as when jax puts it together in a traced function. So `opt_state` has the
    structure that the optimizer gave it.
    """

    def tag(node: Any) -> Any:
        if not isinstance(node, StepState) or getattr(node, "policy", None) == policy:
            return node
        node = node._replace()
        vars(node)["policy"] = policy
        return node

    return jax.tree.map(tag, opt_state, is_leaf=lambda x: isinstance(x, StepState))


def policy_of(opt_state: Any) -> Any:
    """The policy that was written by `with_policy`, or None."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, StepState))
    return next((vars(x)["policy"] for x in nodes if isinstance(x, StepState) and hasattr(x, "policy")), None)


def loss_scale_of(opt_state: Any) -> Float[Array, ""]:
    """`get_loss_scale`, which does not count as read."""
    if hasattr(opt_state, "get_scale"):  # a GradScaler
        return opt_state.get_scale()
    scalings = _scalings(opt_state)
    if len(scalings) > 1:
        raise ValueError(
            f"opt_state must hold one loss scale; got {len(scalings)}. Put one mixed_precision around "
            f"optax.multi_transform."
        )
    return scalings[0].loss_scale if scalings else jnp.ones((), jnp.float32)


def check_is_state(opt_state: Any, reader: str) -> None:
    """Raises a TypeError for what cannot be the state of an optimizer: params, a `tx`, a model, a number.

    Every state holds a NamedTuple (optax's convention). `()` stands for no optimizer.
    """
    is_namedtuple = lambda x: isinstance(x, tuple) and hasattr(x, "_fields")  # noqa: E731
    is_tx = isinstance(opt_state, optax.GradientTransformation)
    is_empty = isinstance(opt_state, tuple) and not opt_state
    leaves = () if is_tx or is_empty else jax.tree.leaves(nnx.as_pure(opt_state), is_leaf=is_namedtuple)
    if is_tx or not (is_empty or any(map(is_namedtuple, leaves))):
        got = "the optimizer" if is_tx else f"{type(opt_state).__name__} without any"
        raise TypeError(
            f"{reader} must get the state of an optimizer; got {got}. Pass opt_state as tx.init(params) makes it."
        )


def get_master_params(opt_state: Any, params: PyTree) -> PyTree:
    """The params in float32: the master of a 16-bit param, a float32 param itself.

    Args:
      opt_state: state that `mixed_precision` made for `params`.
      params: the model's params. A frozen leaf has no master and is cast. It need not belong to the optimizer: with
        `wrt=nnx.LoRAParam` they may be those of the whole model, `nnx.state(model, nnx.Param)`.

    Returns:
      The tree of `params`, float leaves in float32.

    Raises:
      TypeError: `opt_state` is no state of an optimizer.
      ValueError: an optimizer's state as `params`; params of another tree; a split master without its bfloat16 param.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> params32 = {"w": jnp.array([1.001])}
      >>> get_master_params(tx.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32))
      {'w': Array([1.001], dtype=float32)}
    """

    if find(params, StepState):
        raise ValueError(
            "params must be arrays; got an opt_state as params. Call get_master_params(opt_state, params)."
        )
    check_is_state(opt_state, "get_master_params")

    def in_float32(param: Any, master: Any) -> Any:  # each may be boxed
        if master is None:
            return casting.cast_floats(param, jnp.float32)
        pairs = zip(jax.tree.leaves(param), jax.tree.leaves(master), strict=True)
        whole = [m if m.dtype == jnp.float32 else _joined(p, m) for p, m in pairs]
        return jax.tree.unflatten(jax.tree.structure(param), whole)

    own_masters = masters_of(opt_state, params)
    return jax.tree.map(in_float32, params, own_masters, is_leaf=tree_paths.is_box)


def _joined(param: Array, remainder: Array) -> Array:
    if param.dtype != jnp.bfloat16:
        raise ValueError(
            f"a split master must get its bfloat16 param; got {param.dtype}. Pass the params of apply_gradients."
        )
    return host_memory.as_before(moments.join(*host_memory.to_device((param, remainder))), remainder)


def masters_of(opt_state: Any, params: PyTree) -> PyTree:
    """The tree of `params` with the master of each leaf, or None if it has none; a box is one leaf.

    They may be the params of a whole model of which the optimizer trains a part.
    """
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    of_unit: list[Any] = [None] * len(units)
    for state in with_masters(opt_state):
        for i, master in enumerate(masters.by_unit(treedef, state.master_params, params, may_be_frozen=True)):
            if not isinstance(master, optax.MaskedNode):
                of_unit[i] = master
    return jax.tree.unflatten(treedef, of_unit)


def with_masters(opt_state: Any) -> list[StepState]:
    """The states of transforms that keep masters."""
    return [state for state in find(opt_state, StepState) if state.master_params is not None]


def map_steps(f: Callable[[StepState], StepState], opt_state: Any) -> Any:
    """`opt_state` with `f(state)` in place of each `StepState`."""
    is_one = lambda x: isinstance(x, StepState)  # noqa: E731
    return jax.tree.map(lambda x: f(x) if is_one(x) else x, opt_state, is_leaf=is_one)


def get_metrics(opt_state: Any) -> dict[str, Array]:
    """What the last step did: a flat dict of scalars, with the same keys for every chain; NaN where not computed.

    Args:
      opt_state: state after `update`, of any optimizer; `()` for none.

    Returns:
      loss_scale: the scale that the *next* step will use; 1.0 where there is none.
      skipped: bool, whether this step was skipped.
      skipped_steps, consecutive_skips: counts.
      growth_count, hysteresis_left: of the loss scale; see `DynamicLossScale`.
      pinned_overflows: overflows in a row with the scale at its floor; see `check_progress`.
      unscaled_fp16: bool, float16 params trained with `loss_scale=None`.
      saturated_params: float16 weights that stood at 65504 in this step because their master is larger.
      stale_masters: elements of 16-bit params that were not their rounded master before the step, as `tx.update` saw:
        a transform behind or around `mixed_precision` changes its updates, or the params were changed by hand.
        (`optax.apply_updates` leaves a few behind for a step.) NaN with `apply_gradients`, which reads no params.
      largest_gradient: the largest magnitude of an unscaled gradient, before clipping, on any device, in the last step
        taken. NaN where the check of the gradients does not give it: on a GPU, with `jaxmp.fused_*` in
        `apply_gradients`, with `grads_finite=`, and with `skip_nonfinite=False` without a loss scale.
      grad_norm: of the last step taken, before clipping (with `clip_by_global_norm` in the chain).
      zero_grads: exact zeros among its gradients (with `count_zeros` in the chain).
      fp8/min_scale, fp8/max_scale: of all fp8 tensors with delayed scaling, for the next step.
      fp8/max_amax: the largest of the newest amaxes.
      fp8/saturated: fp8 tensors that had values beyond their range in the last step taken.
      fp8/unused: fp8 tensors that were not used in the last step taken; a tensor of zeros is used.
      fp8/lost_gradients: gradients that came to an fp8 layer as zeros in the last step taken, although it ran.
      fp8/spoiled: fp8 tensors whose amax was changed by more than a common factor between `value_and_grad` and the
        last step taken: a mean of different amaxes (microbatches by hand), of which the step took an upper bound, or
        other arithmetic, after which scale and history stayed.

    Raises:
      TypeError: `opt_state` is no state of an optimizer (params, a `tx`, a GradScaler).

    Example:
      >>> metrics = get_metrics(optax.sgd(0.1).init(jnp.ones(2)))
      >>> float(metrics["loss_scale"]), bool(metrics["skipped"]), float(metrics["grad_norm"])
      (1.0, False, nan)
    """
    if hasattr(opt_state, "get_scale"):
        raise TypeError("get_metrics must get the state of an optimizer; got a GradScaler. Call scaler.state_dict().")
    check_is_state(opt_state, "get_metrics")
    with jax.debug_nans(False):  # NaN stands for what is not known
        return _metrics(opt_state)


def _metrics(opt_state: Any) -> dict[str, Array]:
    nan = jnp.full((), jnp.nan, jnp.float32)
    step = next(iter(find(opt_state, StepState)), None)
    scale = next(iter(_scalings(opt_state)), None)
    norm = next(iter(find(opt_state, GlobalNormState)), None)
    zeros = next(iter(find(opt_state, ZeroCountState)), None)
    nothing = {"skipped": jnp.zeros((), bool), "unscaled_fp16": jnp.zeros((), bool)}
    counts = {name: getattr(step, name, None) for name in COUNTED}
    measured = {name: counts[name] for name in MEASURED}
    counts |= {name: jnp.where(x < 0, nan, x) for name, x in measured.items() if x is not None}
    return {
        "loss_scale": jnp.ones((), jnp.float32) if scale is None else scale.loss_scale,
        **{name: nothing.get(name, nan) if count is None else count for name, count in counts.items()},
        "growth_count": getattr(scale, "growth_count", nan),
        "hysteresis_left": getattr(scale, "hysteresis_left", nan),
        "grad_norm": nan if norm is None else norm.grad_norm,
        "zero_grads": nan if zeros is None else zeros.zero_grads,
    } | _fp8_metrics(opt_state)


def _fp8_metrics(opt_state: Any) -> dict[str, Array]:
    fp8_states = find(opt_state, Fp8State)
    names = ("min_scale", "max_scale", "max_amax", "saturated", "unused", "lost_gradients", "spoiled")
    if not fp8_states:
        return {f"fp8/{name}": jnp.full((), jnp.nan, jnp.float32) for name in names}
    # Scales lie along the last axis. The replicas of pmap have an axis before it, which stays.
    scales = jnp.concatenate([group.scale for group in fp8_states[0].amax_states], axis=-1)
    newest = jnp.concatenate([group.amax_history[..., -1, :] for group in fp8_states[0].amax_states], axis=-1)
    values = (
        jnp.min(scales, axis=-1),
        jnp.max(scales, axis=-1),
        jnp.max(newest, axis=-1),
        fp8_states[0].saturated_tensors,
        fp8_states[0].unused_tensors,
        fp8_states[0].lost_gradients,
        fp8_states[0].spoiled_tensors,
    )
    return {f"fp8/{name}": value for name, value in zip(names, values, strict=True)}


def was_skipped(opt_state: Any) -> Bool[Array, ""]:
    """Whether the last update was skipped; False for an optimizer that never skips."""
    if hasattr(opt_state, "found_inf"):  # a GradScaler, between step and update
        return opt_state.found_inf()
    flags = [state.skipped for state in find(opt_state, StepState) if state.skipped is not None]
    return flags[0] if flags else jnp.zeros((), bool)


def check_not_stacked(number: Any) -> None:
    """Raises a ValueError for a number of a stacked state, whose entries a step would take for those of the params.

    None is a number that the state does not have.
    """
    if np.size(number) > 1:
        raise ValueError(
            f"a step must get one state; got one of a vmap or a pmap, stacked to {np.shape(number)}. Call the step "
            f"inside the vmap."
        )


def beside(number: Array, x: Array) -> Array:
    """A number of a state, to compute with `x`; of a stacked state, that of each entry along the first axes of `x`.

    Raises:
      ValueError: the state is stacked, and `x` is not.
    """
    if number.shape != x.shape[: number.ndim]:
        raise ValueError(
            f"a stacked opt_state, of a vmap or a pmap, needs arrays stacked alike; got {x.shape} beside "
            f"{number.shape}. Call the function inside the vmap."
        )
    return number.reshape(number.shape + (1,) * (x.ndim - number.ndim))


def keep_if_skipped(opt_state: Any, new: PyTree, old: PyTree) -> PyTree:
    """`old` if the last update was skipped, else `new`: for state outside the optimizer.

    A forward pass that overflows leaves inf in the statistics of BatchNorm, and a skipped step should not change
    counters and averages.

    Args:
      opt_state: state *after* the update; or a `GradScaler` after its step and before its update.
      new: tree of arrays after the step (batch_stats, an EMA, a step counter).
      old: the same tree before the step.

    Returns:
      A tree with the containers and dtypes of `old`, bit for bit equal to `old` or `new`.

    Raises:
      TypeError: `opt_state` is no state of an optimizer, as with arguments in another order.
      ValueError: an array of `new` is missing, or has another shape than in `old` (named by path).

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
      >>> params = jnp.ones(2)
      >>> _, opt_state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
      >>> keep_if_skipped(opt_state, new={"ema": jnp.full(1, jnp.nan)}, old={"ema": jnp.ones(1)})
      {'ema': Array([1.], dtype=float32)}
    """
    if not hasattr(opt_state, "found_inf"):  # of a GradScaler
        check_is_state(opt_state, "keep_if_skipped(opt_state, new, old)")
    if jax.tree.structure(new) != jax.tree.structure(old):  # a FrozenDict for a dict, boxes for arrays
        fix = "Pass the whole tree that the step made, with an old one of the same leaves."
        tree_paths.check_same_structure(new, old, "new", "old", fix)
        new = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
    if other_shape := tree_paths.first_of_other_shape(old, new):
        path, old_shape, new_shape = other_shape
        raise ValueError(
            f"a skipped step must keep shapes; got {new_shape} in new and {old_shape} in old at {path}. With "
            f"accumulate=, pass carry_argnum=."
        )
    skipped = was_skipped(opt_state)

    def pick(old: Any, new: Any) -> Any:  # selected, never multiplied: 0 * NaN is NaN
        new, old = jnp.asarray(new), jnp.asarray(old)
        return jnp.where(beside(skipped, old), old, new if new.dtype == old.dtype else new.astype(old.dtype))

    return jax.tree.map(pick, old, new)
