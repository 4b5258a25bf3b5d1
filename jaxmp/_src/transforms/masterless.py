"""Trains 16-bit params without float32 masters: two optax transforms.

A step of 1e-3 cannot change a bfloat16 weight of 1.0: the next value below is 0.996, and rounding to nearest undoes
every step. A master accumulates the small steps, and needs four bytes per parameter. The other solution is *stochastic*
rounding,

    new = f32(p) + u,      p' = the value above new, with a probability that grows as new gets nearer to it; else the
                                value below

so that p' is correct on average: of a thousand steps of 1/10 of a spacing, about a hundred change the weight by one
spacing. Stochastic rounding needs no memory, but it adds noise: each step that changes a weight has an error of up to
one spacing, which in bfloat16 is 2^-8 of the weight. These errors grow like a random walk, with the square root of the
number of steps; with a master they do not grow.

Plain optax has another problem: its moments have the dtype of the params, and a second moment in float16 underflows.
`float32_moments` keeps moments in float32. Together:

    inner = optax.chain(jaxmp.float32_moments(optax.adamw(1e-3)), jaxmp.stochastic_round_updates(seed=0))
    tx = jaxmp.unscale_and_skip(inner, jaxmp.DynamicLossScale())     # or None, in bfloat16

Adam then stores 10 bytes per parameter, instead of 14 with masters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Int, PyTree, UInt

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.numerics import casting
from jaxmp._src.step import inner_update
from jaxmp._src.step.optimizers import as_transformation
from pallas_kernels import moments


class StochasticRoundState(NamedTuple):
    """State of `stochastic_round_updates`: round_count, int32[], is the steps so far; the noise depends on it."""

    round_count: Int[Array, ""]


def stochastic_round_updates(
    seed: int | Int[Array, ""], *, axis_name: collectives.AxisName = None, replicated: PyTree | None = None
) -> optax.GradientTransformation:
    """A transform, the last in a chain, that rounds the updates of 16-bit params stochastically.

        u <- f32(stochastic_round(f32(p) + f32(u))) - f32(p)

    in float32, so that `optax.apply_updates` gives exactly the rounded value (unless the weight becomes 8000 times
    smaller in the step). p' is unbiased, E[p'] = f32(p) + f32(u), and |p' - (p + u)| is below one spacing of the dtype.
    Updates of float32 params do not change.

    The noise is a hash of the seed, the step, the number of the leaf and the number of the element in the leaf. So all
    replicas of a param get the same noise, and under plain jit the noise does not depend on how params are split.
    Skipped steps (`unscale_and_skip`) are not counted.

    Args:
      seed: a number; runs with the same seed have the same noise.
      axis_name: inside shard_map, the axes over which params are *split*; each part then gets its own noise. Not the
        data axis: replicas must get the same noise. Without it the parts of a split leaf have the same noise; the
        rounding is then still unbiased.
      replicated: tree of bools like the params (or a prefix of it, or a function of them): True for leaves that every
        device along `axis_name` has as a whole. Not needed under `shard_map(check_vma=True)`.

    Returns:
      A transform with `StochasticRoundState`. Its `update(updates, state, params)` takes updates of any float dtype and
      returns float32 updates for 16-bit params. A sum beyond the range becomes the largest finite value; a non-finite
      update stays non-finite.

    Raises:
      ValueError: `update` without params; updates that do not match them; an axis that is not bound.

    Example:
      >>> tx = optax.chain(optax.sgd(1e-3), stochastic_round_updates(seed=0))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> updates, opt_state = tx.update(jnp.ones_like(params), tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)  # a quarter of them moved, by a spacing of 0.0039
      >>> sorted(set(params.tolist())), round(float(jnp.mean(params.astype(jnp.float32))), 4)
      ([0.99609375, 1.0], 0.999)

    References:
      Gupta et al. 2015, "Deep Learning with Limited Numerical Precision" (arXiv 1502.02551); Zamirai et al. 2020,
      "Revisiting BFloat16 Training" (arXiv 2010.06192).
    """
    if isinstance(seed, int):
        seed = int(np.uint32(seed & 0xFFFFFFFF).view(np.int32))

    def init_fn(params: PyTree) -> StochasticRoundState:
        del params
        return StochasticRoundState(jnp.zeros((), jnp.int32))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, StochasticRoundState]:
        if params is None:
            raise ValueError(
                "stochastic_round_updates needs the params; got none. Call tx.update(grads, opt_state, params)"
            )
        tree_paths.check_same_structure(updates, params, "updates", "params")
        count: Any = optax.safe_increment(state.round_count)
        axes = collectives.named_axes(axis_name)
        leaves, treedef = jax.tree.flatten(params)
        mask = replicated(params) if callable(replicated) else False if replicated is None else replicated
        held = jax.tree.leaves(jax.tree.broadcast(mask, params))
        with jax.named_scope("jaxmp.stochastic_round"):
            new = []
            for number, (p, u, whole) in enumerate(zip(leaves, treedef.flatten_up_to(updates), held, strict=True)):
                key = moments.noise(jnp.asarray(seed, jnp.int32), float(number), count)
                for axis in () if whole else axes:  # another key for each part of a param that is split
                    if compat.is_tracked(axis) and axis not in compat.varying_axes(p):
                        continue  # jax tracks this axis, and the param is not split over it
                    key = moments.noise(lax.bitcast_convert_type(key, jnp.int32) ^ lax.axis_index(axis), 1.0, 0.0)
                new.append(_rounded_update(p, u, key))
        return treedef.unflatten(new), StochasticRoundState(count)

    return optax.GradientTransformation(init_fn, update_fn)


def float32_moments(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that its state is float32 for params of every dtype, without masters.

    `inner` gets params and gradients cast to float32, in `init` and in `update`, and its updates are float32.
    `mixed_precision` and `keep_master_params` do this already.

    Args:
      inner: any optax transform.

    Returns:
      A transform with the state of `inner`. Its updates are float32: end the chain with `stochastic_round_updates`, or
      let `optax.apply_updates` round to nearest, which loses steps below half a spacing.

    Example:
      >>> params = {"w": jnp.ones(2, jnp.float16)}
      >>> optax.tree.get(optax.adam(1e-3).init(params), "nu")["w"].dtype.name
      'float16'
      >>> optax.tree.get(float32_moments(optax.adam(1e-3)).init(params), "nu")["w"].dtype.name
      'float32'
    """
    inner = as_transformation(inner)

    def init_fn(params: PyTree) -> Any:
        return inner.init(_wide(params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        moves, state = inner_update.update(inner, _wide(updates), state, _wide(params), extra_args)
        return _wide(moves), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _wide(tree: PyTree) -> PyTree:
    """`tree` with its 16-bit floats in float32."""

    def widened(x: Any) -> Any:
        is_narrow = casting.is_float(x) and casting.is_low_precision(x.dtype)
        return casting.cast_float(x, jnp.float32) if is_narrow else x

    return jax.tree.map(widened, tree)


def _rounded_update(param: Any, update: Any, key: UInt[Array, ""]) -> Any:
    """The float32 update that takes `param` to the rounded value; -0.0 where the param does not change."""
    if not (casting.is_float(param) and casting.is_low_precision(param.dtype)):
        return update
    full = param.astype(jnp.float32)
    index = moments.flat_index(param.shape) ^ lax.bitcast_convert_type(key, jnp.int32)
    bits = moments.noise(index, 0.0, 0.0)
    rounded = casting.stochastic_round(full + update.astype(jnp.float32), param.dtype, bits)
    move = rounded - full
    return jnp.where(move == 0, -0.0, move)
