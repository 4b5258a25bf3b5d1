"""An exponential moving average of the weights, as a part of an optax chain.

    e' = e + (1 - d) (w' - e)        w' = w + u, the weight after this step

Averaging 16-bit params would not work: with d = 0.9999 a difference enters by a ten-thousandth, and the next bfloat16
is a hundredth away. So it is done where the weights are float32, inside of `mixed_precision`, behind the optimizer.
There a skipped step moves nothing, the average included, and checkpoints, shardings and other policies have it as they
have moments.

With `debias` the average starts at zero, and its weights are made to sum up to one when it is read, as Adam does with
its moments: after one step it is w_1, not a tenth of a thousandth of it. Without it the average starts at the initial
weights, which a large d remembers for long.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.numerics import casting
from jaxmp._src.step import state


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


def ema_params(
    decay: float | Callable[[Int[Array, ""]], Any], *, debias: bool = True
) -> optax.GradientTransformationExtraArgs:
    """An optax part that averages the weights as they will be after the step; updates pass through as they are.

    Put it last in the chain that `mixed_precision` wraps, where updates are final and params are the masters:
    `jaxmp.mixed_precision(optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.999)), policy)`.

    Args:
      decay: d, from 0 (the newest weights) to below 1, or a function of the count of steps (int32[]) to it, such as
        `lambda n: jnp.minimum(0.999, (1 + n) / (10 + n))`.
      debias: whether the average starts at zero and is divided by the sum of its weights where it is read; otherwise
        it starts at the initial params.

    Returns:
      A transform with `EmaParamsState`: four bytes a parameter.

    Raises:
      ValueError: `decay` outside of its range; at `update`, no params.

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
        raise ValueError(f"the decay of an average must be from 0 to below 1; got {decay}. A usual one is 0.999.")

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
            raise ValueError("an average of params needs the params: call tx.update(grads, opt_state, params)")
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
    """The average of the weights, in float32: for evaluation, and for export.

    Args:
      opt_state: state of a chain with one `ema_params`.
      params: the model's params of the same step. Leaves that are not averaged (fp8 scales) are taken from them, and
        all are before the first step.

    Returns:
      The tree of `params`, float leaves in float32; `policy.cast_to_param` casts it for the model.

    Raises:
      ValueError: there is no average in `opt_state`, or several.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.chain(optax.sgd(1.0), ema_params(0.5)), "bf16")
      >>> params = {"w": jnp.array([1.0], jnp.bfloat16)}
      >>> params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.array([0.25])}, tx.init(params), params)
      >>> get_ema_params(opt_state, params)
      {'w': Array([0.75], dtype=float32)}
    """
    found = state.find(opt_state, EmaParamsState)
    if len(found) != 1:
        raise ValueError(
            f"an average is read from the state of a chain with one ema_params; got {len(found)} of them. Put it "
            f"inside of mixed_precision, behind the optimizer: optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.999))."
        )
    weight = found[0].ema_weight

    def read(param: Any, average: Any) -> Any:  # float32; each may be boxed
        if isinstance(average, optax.MaskedNode):
            return param
        return jax.tree.map(
            lambda e, w: jnp.where(weight > 0, e / weight, w) if casting.is_float(w) else w, average, param
        )

    units, treedef = jax.tree.flatten(state.get_master_params(opt_state, params), is_leaf=tree_paths.is_box)
    averages = treedef.flatten_up_to(found[0].ema_params)
    return treedef.unflatten([read(p, e) for p, e in zip(units, averages, strict=True)])
