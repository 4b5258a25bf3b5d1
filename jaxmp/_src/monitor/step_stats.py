"""One look at a training step, from inside: its gradients, its params, its fp8 tensors.

It is taken between `value_and_grad` and the update, from values that are there anyway, so that it neither keeps a
buffer alive nor makes one. What an update does to the params is seen from outside, by comparing a few values of each
tensor (`probes`) from one look to the next: old and new params side by side would cost a copy of all of them in every
step, looked at or not.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.monitor import tensor_stats
from jaxmp._src.monitor.tensor_stats import TensorStats
from jaxmp._src.step import state as states

PROBES = 256  # values of each tensor


class Fp8Stats(NamedTuple):
    """The fp8 tensors of a step, by the path of their scale leaves in the order of the params.

    Attributes:
      amax: path -> float32[...], the largest magnitude in this step, of gradients unscaled; 0 if it was not used.
      scale: path -> float32[...], what it was multiplied by before the cast.
      saturated: path -> bool[...], whether values were beyond the largest of the format.

    Example:
      >>> stats = step_stats({"w": jnp.ones(4)}, (), {"w": jnp.ones(4)})
      >>> stats.fp8.amax  # no fp8 layers
      {}
    """

    amax: dict[str, Float[Array, "..."]]
    scale: dict[str, Float[Array, "..."]]
    saturated: dict[str, Bool[Array, "..."]]


class StepStats(NamedTuple):
    """What `step_stats` saw.

    Attributes:
      grads: of the gradients as they stand, scaled: what the 16-bit numbers were.
      params: of the params in float32: of the masters, where there are some.
      activations: what `watch_activations` gave, or None.
      fp8: of the fp8 tensors with delayed scaling.
      probes: path -> float32[up to 256], some values of each param in float32; of params cut in shard_map those of each
        device, so they come out of it by the spec of an axis, not by P().
      loss_scale: float32[], the scale that is in `grads`.

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


def step_stats(
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    *,
    when: bool | Bool[Array, ""] = True,
    activations: TensorStats | None = None,
    histogram: bool = True,
    axis_name: collectives.AxisName = "auto",
) -> StepStats | None:
    """Statistics of a step, to be returned from it and handed to `Monitor.update`.

    Call it after `value_and_grad` and before the update, with what is in hand there: it changes nothing.

    Args:
      grads: as `jaxmp.value_and_grad` returned them, reduced or not.
      opt_state: state before the update.
      params: params before the update.
      when: whether to look, `step % 10 == 0`; to have every overflow by name, `| ~jaxmp.all_finite(grads)`. Python's
        False leaves nothing in the program, and None comes back.
      activations: of the same step, from `watch_activations`.
      histogram: whether to keep the octaves of gradients and params.
      axis_name: as for `tensor_stats`. Params that are the same on all devices are so in their statistics.

    Returns:
      `StepStats`, all zero where `when` is not true (`.grads.sampled` says so); or None for `when=False`.

    Raises:
      TypeError: `when` is no bool, as `step % 10` is not; `activations` is not what `watch_activations` gave beside the
        function's result.
      ValueError: an `opt_state` in the place of `grads` or `params`.

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
            f"activations= takes the statistics alone: the second of what a watched function returns; got "
            f"{type(activations).__name__}"
        )
    make = functools.partial(_look, grads, opt_state, params, activations, histogram, axis_name)
    return tensor_stats.sampled(make, when)


def _look(
    grads: PyTree, opt_state: Any, params: PyTree, activations: TensorStats | None, histogram: bool, axis_name: Any
) -> StepStats:
    measure = functools.partial(tensor_stats.measure, histogram=histogram, axis_name=axis_name)
    params32 = states.get_master_params(opt_state, params)
    return StepStats(
        grads=measure(grads),
        params=measure(params32),
        activations=None if activations is None else tensor_stats.over_microbatches(activations),
        fp8=_fp8_stats(grads, params, collectives.bound_axes(axis_name)),
        probes={path: _probe(x) for path, x in tensor_stats.float_leaves(params32)},
        loss_scale=states.get_loss_scale(opt_state),
    )


def _fp8_stats(grads: PyTree, params: PyTree, axes: tuple[str, ...]) -> Fp8Stats:
    leaves, found = tree_paths.leaves_by_path(params), Fp8Stats({}, {}, {})
    for path, amax in tree_paths.leaves_by_path(grads).items():
        if not scale_leaves.is_scale(path):
            continue
        _, dtype, holds_log2 = scale_leaves.format_of(path)
        scale, _ = scale_leaves.scale_of(leaves[path], holds_log2=holds_log2)
        amax = collectives.max_over(amax, axes)
        found.amax[path], found.scale[path] = amax, scale
        found.saturated[path] = amax * scale > np.float32(jnp.finfo(dtype).max)
    return found


def _probe(x: Array) -> Array:
    """Up to `PROBES` values, evenly spread; the stride is odd, or all would stand in one column of a matrix."""
    stride = -(-x.size // PROBES) | 1
    places = np.unravel_index(np.arange(0, x.size, stride), x.shape)  # not x.ravel(), which gathers what is cut
    sharding = PartitionSpec() if shardings.is_explicit(x) else None
    return x.at[places].get(mode="promise_in_bounds", out_sharding=sharding).astype(jnp.float32).reshape(-1)
