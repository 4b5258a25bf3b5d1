"""An exponential moving average of the weights, as an optax transform.

    e' = e + (1 - d) (w' - e)        w' = w + u, the weight after this step

An average of 16-bit params would not work: with d = 0.9999 a step adds 1/10,000 of a difference, and neighbouring
bfloat16 values differ by about 1/100. So the average is computed from float32 weights: inside `mixed_precision`, after
the optimizer. There, a skipped step does not change the average, and checkpoints, shardings and conversions to other
policies treat the average like moments.

With `debias` the average starts at zero and is divided by the sum of its weights when it is read, as Adam does with its
moments: after one step it is w_1, not w_1 / 10,000. Without `debias` the average starts at the initial weights, and a
large d keeps a part of them for many steps.

A net with BatchNorm must be evaluated with statistics that fit its weights. With `batch_stats=`, the statistics of each
step are averaged too, with the same d.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array, Int, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.guard import state_readers
from jaxmp._src.numerics import casting
from jaxmp._src.step import state as states
from jaxmp._src.step.state import EmaParamsState


def ema_params(
    decay: float | Callable[[Int[Array, ""]], Any], *, debias: bool = True, batch_stats: PyTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """A transform that averages the weights after each step, and does not change the updates.

    Put it last in the chain that `mixed_precision` wraps; there the updates are final and the params are the masters:
    `jaxmp.mixed_precision(optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.999)), policy)`. Behind it,
    `value_and_grad` and `apply_gradients` accept only transforms that return the updates they get, such as
    `jaxmp.count_zeros`.

    Args:
      decay: d, with 0 <= d < 1 (0: the newest weights only); or a function from the count of steps (int32[]) to d, such
        as `lambda n: jnp.minimum(0.999, (1 + n) / (10 + n))`.
      debias: whether the average starts at zero and is divided by the sum of its weights when it is read. False: it
        starts at the initial params.
      batch_stats: the initial statistics of BatchNorm, linen's or `nnx.state(model, nnx.BatchStat)`, to average them
        too (with `debias` shapes are enough). Then `update` needs the new ones of each step as an extra argument:
        `jaxmp.apply_gradients(..., batch_stats=new)`, `optimizer.update(model, grads, batch_stats=new)`.
        `jaxmp.linen.TrainState` passes its field `batch_stats`. Read the average by `get_ema_batch_stats`.

    Returns:
      A transform with `EmaParamsState`: four bytes per parameter.

    Raises:
      ValueError: `decay` outside its range; `update` without params; `update` without the statistics that are averaged,
        with others (by path), or with some where none are averaged.

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
        stats = None if batch_stats is None else jax.tree.map(first, _by_path(batch_stats))
        return EmaParamsState(jnp.zeros((), jnp.int32), weight, start, stats)

    def first(x: Any) -> Array:
        return jnp.zeros(jnp.shape(x), jnp.float32) if debias else jnp.array(x, jnp.float32)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        batch_stats: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, EmaParamsState]:
        del extra_args
        if params is None:
            raise ValueError("ema_params needs the params; got none. Call tx.update(grads, opt_state, params)")
        new_stats = _checked(batch_stats, state.ema_batch_stats)
        keep = jnp.asarray(decay(state.ema_count) if callable(decay) else decay, jnp.float32)

        def average(old: Array, param: Array, update: Array) -> Array:
            if not casting.is_float(param):
                return old
            new = param.astype(jnp.float32) + update.astype(jnp.float32)
            return old + (1 - keep) * (new - old)

        with jax.named_scope("jaxmp.ema_params"):
            averages = jax.tree.map(average, state.ema_params, params, updates)
            stats = jax.tree.map(lambda e, x: e + (1 - keep) * (x - e), state.ema_batch_stats, new_stats)
            weight = state.ema_weight + (1 - keep) * (1 - state.ema_weight)
        count: Any = optax.safe_increment(state.ema_count)
        return updates, EmaParamsState(count, weight, averages, stats)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def get_ema_params(opt_state: Any, params: PyTree) -> PyTree:
    """The average of the weights in float32, for evaluation and export.

    Args:
      opt_state: state of a chain with one `ema_params`.
      params: the model's params of the same step. Leaves without an average (fp8 scales) are taken from them; before
        the first step, all leaves are.

    Returns:
      The tree of `params`, float leaves in float32; `policy.cast_to_param` casts it for the model.

    Raises:
      ValueError: `opt_state` has no average, or several.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.chain(optax.sgd(1.0), ema_params(0.5)), "bf16")
      >>> params = {"w": jnp.array([1.0], jnp.bfloat16)}
      >>> params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.array([0.25])}, tx.init(params), params)
      >>> get_ema_params(opt_state, params)
      {'w': Array([0.75], dtype=float32)}
    """
    found = _state_of(opt_state)
    weight = found.ema_weight

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
        return jnp.where(weight > 0, e / weight, w)

    units, treedef = jax.tree.flatten(state_readers.get_master_params(opt_state, params), is_leaf=tree_paths.is_box)
    averages = treedef.flatten_up_to(found.ema_params)
    return treedef.unflatten([read(p, e) for p, e in zip(units, averages, strict=True)])


def get_ema_batch_stats(opt_state: Any, batch_stats: PyTree) -> PyTree:
    """The average of the statistics that `ema_params(batch_stats=)` averages, in float32.

    Args:
      opt_state: state of a chain with one `ema_params(batch_stats=)`.
      batch_stats: the statistics of the same step. Before the first step, the result is these.

    Returns:
      The tree of `batch_stats`.

    Raises:
      ValueError: `opt_state` has no average, several, or one without statistics; `batch_stats` of another tree.

    Example:
      >>> stats = {"mean": jnp.array([4.0])}
      >>> tx = optax.chain(optax.sgd(1.0), ema_params(0.5, batch_stats=stats))
      >>> params = jnp.array([1.0])
      >>> _, opt_state = tx.update(params, tx.init(params), params, batch_stats={"mean": jnp.array([8.0])})
      >>> get_ema_batch_stats(opt_state, stats)
      {'mean': Array([8.], dtype=float32)}
    """
    found = _state_of(opt_state)
    averages = tree_paths.leaves_by_path(found.ema_batch_stats)
    _checked(batch_stats, found.ema_batch_stats)

    def read(path: str, now: Any) -> Array:
        now = jnp.asarray(now, jnp.float32)
        return jnp.where(found.ema_weight > 0, averages[path] / found.ema_weight, now)

    return tree_paths.map_with_path(read, batch_stats)


def _state_of(opt_state: Any) -> EmaParamsState:
    found = states.find(opt_state, EmaParamsState)
    if len(found) != 1:
        raise ValueError(
            f"opt_state must be the state of a chain with one ema_params; got {len(found)} of them. Put ema_params "
            f"inside mixed_precision, after the optimizer: optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.999))."
        )
    return found[0]


def _by_path(batch_stats: PyTree) -> dict[str, Any]:
    """The statistics as nested dicts, whatever holds them: a FrozenDict, a State of nnx."""
    return traverse_util.unflatten_dict(tree_paths.leaves_by_path(batch_stats), sep="/")


def _checked(batch_stats: PyTree | None, averages: PyTree | None) -> PyTree | None:
    """The new statistics in float32, like their averages; a ValueError if they are not."""
    if (batch_stats is None) != (averages is None):
        got = "none" if batch_stats is None else "some, where ema_params was made without"
        raise ValueError(
            f"ema_params(batch_stats=) averages the statistics that each update gets; got {got}. Make the transform "
            f"with ema_params(decay, batch_stats=variables['batch_stats']), and pass those of the step: "
            f"jaxmp.apply_gradients(tx, grads, opt_state, params, batch_stats=new_stats)."
        )
    if averages is None:
        return None
    new = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _by_path(batch_stats))
    where = "Pass the collection that ema_params was made with."
    tree_paths.check_same_structure(new, averages, "batch_stats", "the averages of ema_params", where)
    if found := tree_paths.first_of_other_shape(new, averages):
        path, shape, expected = found
        fix = "Make ema_params with the statistics of this model."
        if shape[1:] == expected and len(shape) > len(expected):
            fix = (
                "If these are the statistics of all microbatches, stacked, pass them through the microbatches: "
                "jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=k, carry_argnum=i), where argument i of the "
                "loss holds them. Else make ema_params with the statistics of this model."
            )
        raise ValueError(
            f"batch_stats must have the shapes of their averages; got {shape} at {path}, expected {expected}. {fix}"
        )
    return new
