"""Statistics of one training step, computed inside it: of gradients, params and fp8 tensors.

They are computed between `value_and_grad` and the update, from values that exist at that point, so no buffer stays
alive longer. Whether an update changes the params is checked on the host: a few values of each tensor (`probes`) are
compared from one sample to the next. To compare old and new params inside the step would cost a copy of all params in
every step, sampled or not. Whether 16-bit params are their masters, rounded, is checked in every step, at the same few
places: the step writes them anew from the masters, and the next sample would see nothing.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives, host_memory, shardings
from jaxmp._src.fp8 import amax_records, scale_equations, scale_leaves
from jaxmp._src.monitor import tensor_stats
from jaxmp._src.monitor.tensor_stats import TensorStats
from jaxmp._src.numerics import casting, float_bits
from jaxmp._src.step import scale_reads, state as states

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
        If shard_map splits the params, they come from all parts; with `check_vma=False`, from those of one device.
      loss_scale: float32[], the scale of `grads`.
      stale_masters: path -> float32[], the share of up to 256 values of a 16-bit param that are not its float32 master,
        rounded; in every step, sampled or not. Masters that are split or in host memory are left out.
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
      `StepStats`; all zero but `stale_masters` where `when` is a traced False (and `.grads.sampled` False); None for
      `when=False`.

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
        got = "an opt_state" if states.has_loss_scale(tree) else ""
        got = "gradients" if name == "params" and scale_reads.holds_gradients(tree) else got
        if got:
            raise ValueError(f"step_stats takes grads, opt_state, params; got {got} as {name}. Reorder them.")
    if activations is not None and not isinstance(activations, TensorStats):
        got = type(activations).__name__
        raise TypeError(f"activations must be the statistics of watch_activations alone; got {got}.")
    axes = collectives.bound_axes(axis_name)
    measure = functools.partial(tensor_stats.measure, histogram=histogram, axis_name=axis_name)

    def make() -> StepStats:
        params32 = host_memory.to_device(states.get_master_params(opt_state, params))
        in_16_bits = {path for path, x in tensor_stats.float_leaves(params) if casting.is_low_precision(x.dtype)}
        masters = tree_paths.leaves_by_path(states.masters_of(opt_state, params))
        frozen = in_16_bits - masters.keys() if states.with_masters(opt_state) else set()  # others have masters
        may_be_frozen, may_stay = _may_be_frozen(opt_state, params)
        return StepStats(
            grads=measure(grads),
            params=measure(params32),
            activations=None if activations is None else tensor_stats.over_microbatches(activations),
            fp8=_fp8_stats(grads, params, axes),
            probes={
                path: collectives.of_all_parts(_probe(x).astype(jnp.float32))
                for path, x in tensor_stats.float_leaves(params32)
                if path not in frozen
            },
            loss_scale=states.loss_scale_of(opt_state),
            stale_masters={},
            updates=next((steps.gradient_step for steps in states.find(opt_state, optax.MultiStepsState)), None),
            state=_largest(state, params, axes),
            may_be_frozen=may_be_frozen,
            may_stay=may_stay,
        )

    stats = tensor_stats.sampled(make, when)
    if stats is None:
        return None
    with jax.named_scope("jaxmp.monitor"):
        stale = collectives.largest_on_any_device(_stale_shares(opt_state, params), axes)
    return stats._replace(stale_masters=stale)


def _stale_shares(opt_state: Any, params: PyTree) -> dict[str, Float[Array, ""]]:
    """The share of the probes of each 16-bit param with a float32 master on the device that are not it, rounded."""
    masters, shares = tree_paths.leaves_by_path(states.masters_of(opt_state, params)), {}
    for path, param in tree_paths.leaves_by_path(params).items():
        master = masters.get(path)
        if master is None or host_memory.is_on_host(master):
            continue
        if param.size and casting.is_low_precision(param.dtype) and master.dtype == jnp.float32:
            rounded = casting.round_to(_probe(master), param.dtype)  # inf where the param is the largest float16
            is_stale = (rounded != _probe(param).astype(jnp.float32)) & jnp.isfinite(rounded)
            shares[path] = jnp.mean(is_stale.astype(jnp.float32))
    return shares


def _largest(state: PyTree, params: PyTree, axes: tuple[str, ...]) -> dict[str, Float[Array, ""]]:
    """The largest magnitude in each array of `state` that is not one of `params`."""
    known = {id(x) for x in jax.tree.leaves(params)}
    largest = {}
    for path, x in tree_paths.leaves_by_path(state).items():
        if id(x) not in known and np.size(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            x = jnp.asarray(x)
            if x.dtype.itemsize > 4:  # complex, float64: large values must not become inf in float32
                x = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
            # The bits of NaN are above those of inf: a MAX of floats may lose a NaN on its way over devices.
            bits = float_bits.to_bits(x.astype(jnp.float32)) & np.int32(0x7FFFFFFF)
            largest[path] = float_bits.from_bits(collectives.max_over(jnp.max(bits), axes))
    return largest


def _may_be_frozen(opt_state: Any, params: PyTree) -> tuple[Paths, Paths]:
    """`may_be_frozen` and `may_stay`: both are empty for an optimizer without labels and masks."""
    if not any(states.find(opt_state, kind) for kind in (optax.transforms.PartitionState, optax.MaskedState)):
        return Paths(), Paths()
    own = [f"/{path}/" for path in tree_paths.leaves_by_path(opt_state)]
    leaves = dict(tensor_stats.float_leaves(params))
    frozen = {path for path in leaves if not any(f"/{path}/" in at for at in own)}
    return Paths(frozen), Paths(frozen | {path for path, x in leaves.items() if x.dtype == jnp.float32})


def _fp8_stats(grads: PyTree, params: PyTree, axes: tuple[str, ...]) -> Fp8Stats:
    leaves, fp8 = tree_paths.leaves_by_path(params), Fp8Stats({}, {}, {})
    grads = scale_leaves.map_scales(
        lambda path, g: amax_records.observe([(g, leaves[path])]).amax.reshape(leaves[path].shape), grads
    )
    for path, amax in tree_paths.leaves_by_path(grads).items():
        if not scale_leaves.is_scale(path):
            continue
        _, dtype, holds_log2 = scale_leaves.format_of(path)
        scale, _ = scale_leaves.scale_of(leaves[path], holds_log2=holds_log2)
        amax = collectives.max_over(amax, axes)
        fp8.amax[path], fp8.scale[path] = amax, scale
        fp8.saturated[path] = scale_equations.saturates(amax, scale, float(jnp.finfo(dtype).max))
    return fp8


def _probe(x: Array) -> Array:
    """Up to `PROBES` values, evenly spread. The stride is odd, or all would be in one column of a matrix."""
    x = jnp.atleast_1d(x)
    stride = -(-x.size // PROBES) | 1
    # x.ravel() would gather an array that is split over devices.
    places = np.unravel_index(np.arange(0, x.size, stride), x.shape)
    whole = shardings.whole_if_explicit(x)
    return x.at[places].get(mode="promise_in_bounds", out_sharding=whole).reshape(-1)
