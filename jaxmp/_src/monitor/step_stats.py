"""Statistics of one training step, computed inside it: of gradients, params and fp8 tensors.

They are computed between `value_and_grad` and the update, from values that exist at that point, so no buffer stays
alive longer. Whether an update changes the params is checked on the host: a few values of each tensor (`probes`) are
compared from one sample to the next. To compare old and new params inside the step would cost a copy of all params in
every step, sampled or not.
"""

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.fp8 import amax_records, scale_equations, scale_leaves
from jaxmp._src.monitor import tensor_stats
from jaxmp._src.monitor.tensor_stats import TensorStats
from jaxmp._src.numerics import casting, float_bits
from jaxmp._src.step import stale_masters, state as states

PROBES = 256  # number of values of each tensor


class Fp8Stats(NamedTuple):
    """Statistics of the fp8 tensors of a step. Keys are the paths of their scale leaves, in the order of the params.

    Attributes:
      amax: path -> float32[...], the largest magnitude in this step, for gradients without the loss scale; 0 if the
        tensor was not used.
      scale: path -> float32[...], the scale that multiplied the tensor before the cast.
      saturated: path -> bool[...], whether values exceeded the largest value of the format.

    Example:
      >>> stats = step_stats({"w": jnp.ones(4)}, (), {"w": jnp.ones(4)})
      >>> stats.fp8.amax  # no fp8 layers
      {}
    """

    amax: dict[str, Float[Array, "..."]]
    scale: dict[str, Float[Array, "..."]]
    saturated: dict[str, Bool[Array, "..."]]


@jax.tree_util.register_static
class Paths(frozenset[str]):
    """Paths that are known while a step is traced: a part of a result of jit, but no array."""


class StepStats(NamedTuple):
    """The result of `step_stats`.

    Attributes:
      grads: statistics of the gradients as they are: scaled, the numbers that 16 bits held.
      params: statistics of the params in float32: of their masters, if they have masters.
      activations: the statistics of `watch_activations`, or None.
      fp8: statistics of the fp8 tensors with delayed scaling.
      probes: path -> float32[up to 256], some values of each param in float32, except of frozen params in 16 or 8 bits.
        If shard_map splits the params, each device returns values of its own part: give `probes` an out_spec with that
        axis, not P().
      loss_scale: float32[], the scale of `grads`.
      grad_norm: float32[], the norm of `grads`, divided by the scale. If they are split over devices, the largest norm
        of any part.
      param_norm: float32[], of the params in the same way.
      stale_masters: path -> float32[], the share of a param that is not its master, rounded; for params with a float32
        master.
      updates: int32[], how many updates `optax.MultiSteps` has made of accumulated gradients; None without it.
      state: path -> float32[], the largest magnitude in each array of `state=`: NaN if it holds NaN, else inf if it
        holds inf.
      may_be_frozen: paths of params that the optimizer may never change (static). It has labels or masks, no master of
        them, and no state for them: `optax.set_to_zero` under a label looks like this, and so does `optax.sgd`.
      may_stay: these, and all params in float32 if the optimizer has labels or masks: the state of `optax.masked` does
        not show what it freezes (static).

    Example:
      >>> stats = step_stats({"w": jnp.ones(4)}, (), {"w": jnp.ones(4)})
      >>> sorted(stats.probes), float(stats.loss_scale)
      (['w'], 1.0)
    """

    grads: TensorStats
    params: TensorStats
    activations: TensorStats | None
    fp8: Fp8Stats
    probes: dict[str, Float[Array, "p"]]
    loss_scale: Float[Array, ""]
    grad_norm: Float[Array, ""] | float = math.nan
    param_norm: Float[Array, ""] | float = math.nan
    stale_masters: Mapping[str, Float[Array, ""]] = MappingProxyType({})
    updates: Array | None = None
    state: Mapping[str, Float[Array, ""]] = MappingProxyType({})
    may_be_frozen: Paths = Paths()
    may_stay: Paths = Paths()


def step_stats(
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    *,
    when: bool | Bool[Array, ""] = True,
    activations: TensorStats | None = None,
    state: PyTree = None,
    histogram: bool = True,
    axis_name: collectives.AxisName = "auto",
) -> StepStats | None:
    """Statistics of a training step. Return them from the step and pass them to `Monitor.update`.

    Call it after `value_and_grad` and before the update. It changes nothing.

    Args:
      grads: gradients as `jaxmp.value_and_grad` returned them, reduced over devices or not.
      opt_state: the state before the update.
      params: the params before the update.
      when: whether to compute statistics in this step, such as `step % 10 == 0`. To sample every overflow as well, add
        `| ~jaxmp.all_finite(grads)`. With Python's False, the program does not contain them, and None is returned.
      activations: statistics of `watch_activations` from the same step.
      state: any arrays that your loop carries from step to step beside params and optimizer, such as
        `state.batch_stats`, `nnx.state(model, nnx.BatchStat)` or the state of a recurrent net: the monitor finds NaN
        and inf that stay in them. A sample reads each array once. Arrays of `params` are left out.
      histogram: whether to compute the octaves of gradients and params.
      axis_name: as for `tensor_stats`. Params that all devices hold alike give the same statistics on all devices.

    Returns:
      `StepStats`; all zero where `when` is a traced False (then `.grads.sampled` is False); None for `when=False`.

    Raises:
      TypeError: `when` is not a bool, for example `step % 10`; or `activations` is not a `TensorStats`.
      ValueError: `grads` or `params` is an `opt_state`.

    Example:
      >>> import jaxmp, optax
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16")
      >>> params = {"w": jnp.ones(4, jnp.float16)}
      >>> opt_state = tx.init(params)
      >>> loss, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"].astype(jnp.float32)))(params, opt_state=opt_state)
      >>> stats = step_stats(grads, opt_state, params)
      >>> stats.grads["w"]["nonfinite"], stats.params["w"]["amax"], float(stats.loss_scale)
      (1.0, 1.0, 65536.0)
    """
    for name, tree in {"grads": grads, "params": params}.items():
        if states.has_loss_scale(tree):
            raise ValueError(f"step_stats takes grads, opt_state, params in this order; got an opt_state as {name}")
    if activations is not None and not isinstance(activations, TensorStats):
        raise TypeError(
            f"activations= takes the statistics alone, the second result of a watched function; got "
            f"{type(activations).__name__}"
        )
    make = functools.partial(_measure_step, grads, opt_state, params, activations, state, histogram, axis_name)
    return tensor_stats.sampled(make, when)


def _measure_step(
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    activations: TensorStats | None,
    state: PyTree,
    histogram: bool,
    axis_name: Any,
) -> StepStats:
    measure = functools.partial(tensor_stats.measure, histogram=histogram, axis_name=axis_name)
    params32 = states.get_master_params(opt_state, params)
    axes, loss_scale = collectives.bound_axes(axis_name), states.loss_scale_of(opt_state)
    frozen, may_be_frozen = _frozen(opt_state, params), _may_be_frozen(opt_state, params)
    return StepStats(
        grads=measure(grads),
        params=measure(params32),
        activations=None if activations is None else tensor_stats.over_microbatches(activations),
        fp8=_fp8_stats(grads, opt_state, params, axes),
        probes={path: _probe(x) for path, x in tensor_stats.float_leaves(params32) if path not in frozen},
        loss_scale=loss_scale,
        grad_norm=_norm(grads, axes) / loss_scale,
        param_norm=_norm(params32, axes),
        stale_masters={
            path: collectives.max_over(stale_masters.share(*pair), axes)
            for path, pair in stale_masters.pairs(opt_state, params).items()
        },
        updates=next((steps.gradient_step for steps in states.find(opt_state, optax.MultiStepsState)), None),
        state=_largest(state, params, axes),
        may_be_frozen=may_be_frozen,
        may_stay=_may_stay(opt_state, params, may_be_frozen),
    )


def _largest(state: PyTree, params: PyTree, axes: tuple[str, ...]) -> dict[str, Float[Array, ""]]:
    """The largest magnitude in each array of `state` that is not one of `params`."""
    known = {id(x) for x in jax.tree.leaves(params)}
    found = {}
    for path, x in tree_paths.leaves_by_path(state).items():
        if id(x) not in known and np.size(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            x = jnp.asarray(x)
            if x.dtype.itemsize > 4:  # complex, float64: large values must not become inf in float32
                x = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
            # The bits of NaN are above those of inf: a MAX of floats may lose a NaN on its way over devices.
            bits = float_bits.to_bits(x.astype(jnp.float32)) & np.int32(0x7FFFFFFF)
            found[path] = float_bits.from_bits(collectives.max_over(jnp.max(bits), axes))
    return found


def _may_be_frozen(opt_state: Any, params: PyTree) -> Paths:
    """The paths of params without a master and without own arrays in the state of an optimizer with labels or masks."""
    if not _has_masks(opt_state):
        return Paths()
    own = [f"/{path}/" for path in tree_paths.leaves_by_path(opt_state)]
    paths = tree_paths.leaves_by_path(params)
    return Paths(path for path in paths if not any(f"/{path}/" in at for at in own))


def _has_masks(opt_state: Any) -> bool:
    return any(states.find(opt_state, kind) for kind in (optax.transforms.PartitionState, optax.MaskedState))


def _may_stay(opt_state: Any, params: PyTree, may_be_frozen: Paths) -> Paths:
    """`may_be_frozen`, and all params in float32, which have no master, of an optimizer with labels or masks."""
    if not _has_masks(opt_state):
        return Paths()
    in_float32 = (path for path, x in tensor_stats.float_leaves(params) if x.dtype == jnp.float32)
    return Paths(may_be_frozen.union(in_float32))


def _frozen(opt_state: Any, params: PyTree) -> set[str]:
    """The paths of params in 16 bits without a master although others may have one: they never move."""
    if not states.with_masters(opt_state):
        return set()
    units, treedef = tree_paths.boxed_leaves(params)
    masters = treedef.flatten_up_to(states.masters_of(opt_state, params))
    return {
        path
        for (path, unit), master in zip(units, masters, strict=True)
        if master is None and any(casting.is_low_precision(x.dtype) for x in jax.tree.leaves(unit))
    }


def _norm(tree: PyTree, axes: tuple[str, ...]) -> Float[Array, ""]:
    # In units of the largest value: squares of float32 overflow and underflow.
    leaves = [x.astype(jnp.float32) for _, x in tensor_stats.float_leaves(tree)]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), initial=0) for x in leaves], jnp.float32(0))
    unit = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)
    squares = sum((jnp.sum((x / unit) ** 2) for x in leaves), jnp.float32(0))
    return collectives.max_over(unit * jnp.sqrt(squares), axes)


def _fp8_stats(grads: PyTree, opt_state: Any, params: PyTree, axes: tuple[str, ...]) -> Fp8Stats:
    leaves, found = tree_paths.leaves_by_path(params), Fp8Stats({}, {}, {})
    grads = scale_leaves.map_scales(
        lambda path, g: amax_records.observe([(g, leaves[path])]).amax.reshape(leaves[path].shape), grads
    )
    for path, amax in tree_paths.leaves_by_path(grads).items():
        if not scale_leaves.is_scale(path):
            continue
        _, dtype, holds_log2 = scale_leaves.format_of(path)
        scale, _ = scale_leaves.scale_of(leaves[path], holds_log2=holds_log2)
        amax = collectives.max_over(amax, axes)
        found.amax[path], found.scale[path] = amax, scale
        found.saturated[path] = scale_equations.saturates(amax, scale, float(jnp.finfo(dtype).max))
    return found


def _probe(x: Array) -> Array:
    """Up to `PROBES` values, evenly spread. The stride is odd, or all would be in one column of a matrix."""
    stride = -(-x.size // PROBES) | 1
    # x.ravel() would gather an array that is split over devices.
    places = np.unravel_index(np.arange(0, x.size, stride), x.shape)
    whole = shardings.whole_if_explicit(x)
    return x.at[places].get(mode="promise_in_bounds", out_sharding=whole).astype(jnp.float32).reshape(-1)
