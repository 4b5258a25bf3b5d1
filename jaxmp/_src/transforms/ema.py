"""An exponential moving average of the weights, as an optax transform.

    e' = e + (1 - d) (w' - e)        w' = w + u, the weight after this step

An average of 16-bit params would not work: with d = 0.9999 a step adds 1/10,000 of a difference, and neighbouring
bfloat16 values differ by about 1/100. So the average is computed from float32 weights: inside `mixed_precision`, after
the optimizer. There, a skipped step does not change the average, and checkpoints, shardings and conversions to other
policies treat the average like moments.

With `debias` the average starts at zero and is divided by the sum of its weights when it is read, as Adam does with its
moments: after one step it is w_1, not w_1 / 10,000. Without `debias` the average starts at the initial weights, and a
large d keeps a part of them for many steps.

A net with BatchNorm must be evaluated with statistics that fit its weights: those of the average are computed by a pass
over data, as torch.optim.swa_utils.update_bn does (docs/how-to/step/batch_norm.md).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.numerics import casting
from jaxmp._src.step import masters, state as states
from jaxmp._src.step.state import EmaParamsState


def ema_params(
    decay: float | Callable[[Int[Array, ""]], Any], *, debias: bool = True
) -> optax.GradientTransformationExtraArgs:
    """A transform that averages the weights after each step, and does not change the updates.

    Put it last in the chain that `mixed_precision` wraps; there the updates are final and the params are the masters:
    `jaxmp.mixed_precision(optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.999)), policy)`. In front of a transform
    that changes updates it would average other weights. (`optax.incremental_update` on 16-bit params moves nothing: a
    step is below half a unit in their last place.)

    Args:
      decay: d, with 0 <= d < 1 (0: the newest weights only); or a function from the count of steps (int32[]) to d, such
        as `lambda n: jnp.minimum(0.999, (1 + n) / (10 + n))`.
      debias: whether the average starts at zero and is divided by the sum of its weights when it is read. False: it
        starts at the initial params.

    Returns:
      A transform with `EmaParamsState`: four bytes per parameter.

    Raises:
      ValueError: `decay` outside its range; `update` without params.

    Example:
      >>> tx = optax.chain(optax.sgd(1.0), ema_params(0.5))
      >>> params = {"w": jnp.array([0.0])}
      >>> opt_state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, opt_state = tx.update({"w": jnp.array([-3.0])}, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["w"], get_ema_params(opt_state, params)["w"]  # (1/4 3 + 1/2 6) / (3/4)
      (Array([6.], dtype=float32), Array([5.], dtype=float32))

    References:
      Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".
    """
    if isinstance(decay, int | float) and not 0 <= decay < 1:
        raise ValueError(f"decay must be >= 0 and < 1; got {decay}. A usual value is 0.999.")

    def init_fn(params: PyTree) -> EmaParamsState:
        full = casting.cast_floats(params, jnp.float32)
        start = jax.tree.map(lambda x: jnp.zeros_like(x) if debias and casting.is_float(x) else jnp.copy(x), full)
        weight = jnp.zeros((), jnp.float32) if debias else jnp.ones((), jnp.float32)
        return EmaParamsState(jnp.zeros((), jnp.int32), weight, start)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, EmaParamsState]:
        del extra_args
        if params is None:
            raise ValueError("ema_params needs the params; got none. Call tx.update(grads, opt_state, params)")
        keep = jnp.asarray(decay(state.ema_count) if callable(decay) else decay, jnp.float32)

        def average(old: Array, param: Array, update: Array) -> Array:
            if not casting.is_float(param):
                return old
            new = param.astype(jnp.float32) + update.astype(jnp.float32)
            return old + (1 - keep) * (new - old)

        with jax.named_scope("jaxmp.ema_params"):
            averages = jax.tree.map(average, state.ema_params, params, updates)
            weight = state.ema_weight + (1 - keep) * (1 - state.ema_weight)
        count: Any = optax.safe_increment(state.ema_count)
        return updates, EmaParamsState(count, weight, averages)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def get_ema_params(opt_state: Any, params: PyTree) -> PyTree:
    """The average of the weights in float32, for evaluation and export.

    Args:
      opt_state: state of a chain with one `ema_params`.
      params: the model's params of the same step. Leaves without an average (fp8 scales, those of other labels) are
        taken from them; before the first step, all leaves are.

    Returns:
      The tree of `params`, float leaves in float32; `policy.cast_to_param` casts it for the model.

    Raises:
      ValueError: `opt_state` has no average, or several; or a transform comes behind `ema_params`.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.chain(optax.sgd(1.0), ema_params(0.5)), "bf16")
      >>> opt_state, params = tx.init({"w": jnp.array([1.0])}), {"w": jnp.array([1.0], jnp.bfloat16)}
      >>> params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.array([0.25])}, opt_state, params)
      >>> get_ema_params(opt_state, params)
      {'w': Array([0.75], dtype=float32)}
    """
    ema_states = states.find(opt_state, EmaParamsState)
    if len(ema_states) != 1:
        raise ValueError(
            f"opt_state must have one ema_params; got {len(ema_states)}. Write optax.chain(optax.adamw(1e-3), "
            f"jaxmp.ema_params(0.999))."
        )
    if not _is_last(nnx.as_pure(opt_state)):
        raise ValueError(
            "ema_params must be last in its chain, and inside mixed_precision; got a transform behind it, whose "
            "updates the average does not have. Write jaxmp.mixed_precision(optax.chain(optax.adamw(1e-3), "
            "jaxmp.ema_params(0.999)), policy)."
        )
    weight = ema_states[0].ema_weight

    def read(param: Any, average: Any) -> Any:  # float32; each may be in a box
        if isinstance(average, optax.MaskedNode):
            return param
        leaves, treedef = jax.tree.flatten(param)
        return treedef.unflatten([of_leaf(e, w) for e, w in zip(jax.tree.leaves(average), leaves, strict=True)])

    def of_leaf(e: Any, w: Any) -> Any:
        if not casting.is_float(w):
            return w
        if host_memory.is_on_host(e) != host_memory.is_on_host(w):  # only masters, or only moments were offloaded
            e, w = host_memory.to_device((e, w))
        weight_of = states.beside(weight, w)
        return jnp.where(weight_of > 0, e / weight_of, w)

    units, treedef = jax.tree.flatten(states.get_master_params(opt_state, params), is_leaf=tree_paths.is_box)
    averages = masters.by_unit(treedef, ema_states[0].ema_params, params)
    return treedef.unflatten([read(p, e) for p, e in zip(units, averages, strict=True)])


def _is_last(state: Any) -> bool:
    """Whether nothing comes behind `ema_params` in the chains, whose states are plain tuples, around it."""
    holds = lambda x: bool(tree_paths.nodes_of(x, EmaParamsState))  # noqa: E731
    if isinstance(state, EmaParamsState) or not isinstance(state, tuple | list | dict):
        return True
    children = list(state.values() if isinstance(state, dict) else state)
    place = next((i for i, x in enumerate(children) if holds(x)), None)
    if place is None:
        return True
    is_state = lambda x: not isinstance(x, jax.Array | np.ndarray | int | float | None)  # noqa: E731
    is_before = type(state) is tuple and any(map(is_state, children[place + 1 :]))
    is_around = type(state) is tuple and any(tree_paths.nodes_of(x, states.StepState) for x in children[:place])
    return not is_before and not is_around and _is_last(children[place])
