"""Training 16-bit params without float32 masters: two optax parts.

A bfloat16 weight of 1.0 does not move by 1e-3: the next one below is 0.996, and rounding to nearest takes every step
back. A master remembers the small steps, for four bytes a parameter. The other way is to round *stochastically*,

    new = f32(p) + u,      p' = the neighbour above new with the odds of how near it is, else the one below

so that p' is right on average: of a thousand steps of a tenth of a spacing, about a hundred move the weight by one. It
costs nothing to store. What it costs is noise of up to one spacing, 2^-8 of a weight in bfloat16, at every step that
moves it: a weight wanders as far as the root of the number of steps, where a master does not.

The other trap of plain optax is that its moments have the dtype of the params: a second moment in float16 underflows.
`float32_moments` keeps them in float32. With both:

    inner = optax.chain(jaxmp.float32_moments(optax.adamw(1e-3)), jaxmp.stochastic_round_updates(seed=0))
    tx = jaxmp.unscale_and_skip(inner, jaxmp.DynamicLossScale())     # or None, in bfloat16

Adam then stores 10 bytes a parameter, where masters make it 14.
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
from pallas_kernels import moments


class StochasticRoundState(NamedTuple):
    """State of `stochastic_round_updates`: round_count is int32[], the steps so far, which the noise hangs on."""

    round_count: Int[Array, ""]


def stochastic_round_updates(
    seed: int | Int[Array, ""], *, axis_name: collectives.AxisName = None, replicated: PyTree | None = None
) -> optax.GradientTransformation:
    """An optax part, the last of a chain, that lets 16-bit params move by less than their spacing.

        u <- f32(stochastic_round(f32(p) + f32(u))) - f32(p)

    in float32, so that `optax.apply_updates` lands on the rounded value exactly (unless the weight shrinks 8000-fold in
    the step). p' is unbiased, E[p'] = f32(p) + f32(u), and |p' - (p + u)| is below one spacing of the dtype; float32
    params pass through untouched.

    The noise is a hash of the seed, the step, the number of the leaf and that of the element in it: every device that
    holds a replica draws the same, and under plain jit so it is for split params, however they are split. A step that
    `unscale_and_skip` skips does not count.

    Args:
      seed: a number; runs with the same one draw the same noise.
      axis_name: inside shard_map, the axes over which params are *split*: each part then draws noise of its own. Not
        the data axis: replicas must draw alike. Without it the parts of a split leaf share their noise, which is still
        unbiased.
      replicated: tree of bools like the params (or a prefix of it, or a function of them): leaves that every device
        along `axis_name` holds in full. `shard_map(check_vma=True)` knows them by itself.

    Returns:
      A transform with `StochasticRoundState`. Its `update(updates, state, params)` takes updates of any float dtype and
      returns float32 ones for 16-bit params. A sum beyond the range lands on the largest finite value; an update that
      is not finite stays so.

    Raises:
      ValueError: no params at `update`; updates that do not match them; an axis that is not bound.

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
            raise ValueError("stochastic rounding needs the params: call tx.update(grads, opt_state, params)")
        tree_paths.check_same_structure(updates, params, "updates", "params")
        count: Any = optax.safe_increment(state.round_count)
        axes = collectives.named_axes(axis_name)
        leaves, treedef = jax.tree.flatten(params)
        held = _flags(replicated, params)
        with jax.named_scope("jaxmp.stochastic_round"):
            new = []
            for number, (p, u, whole) in enumerate(zip(leaves, treedef.flatten_up_to(updates), held, strict=True)):
                key = moments.noise(jnp.asarray(seed, jnp.int32), float(number), count)
                new.append(_landing(p, u, _key_of_part(key, p, () if whole else axes)))
        return treedef.unflatten(new), StochasticRoundState(count)

    return optax.GradientTransformation(init_fn, update_fn)


def float32_moments(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that its state is float32 whatever the params are, without masters.

    `inner` is initialized with, and at each step sees, float32 views of 16-bit params and gradients, and its updates
    come out in float32. `mixed_precision` and `keep_master_params` do this by themselves.

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
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> Any:
        return inner.init(_wide(params))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        moves, state = inner.update(_wide(updates), state, _wide(params), **extra_args)
        return _wide(moves), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _wide(tree: PyTree) -> PyTree:
    """`tree` with its 16-bit floats in float32."""

    def widened(x: Any) -> Any:
        is_narrow = casting.is_float(x) and casting.is_low_precision(x.dtype)
        return casting.cast_float(x, jnp.float32) if is_narrow else x

    return jax.tree.map(widened, tree)


def _landing(param: Any, update: Any, key: UInt[Array, ""]) -> Any:
    """What to add to `param` in float32 to land on a rounded value; -0.0 where it is there already."""
    if not (casting.is_float(param) and casting.is_low_precision(param.dtype)):
        return update
    full = param.astype(jnp.float32)
    index = moments.flat_index(param.shape) ^ lax.bitcast_convert_type(key, jnp.int32)
    bits = moments.noise(index, 0.0, 0.0)
    rounded = casting.stochastic_round(full + update.astype(jnp.float32), param.dtype, bits)
    move = rounded - full
    return jnp.where(move == 0, -0.0, move)


def _key_of_part(key: UInt[Array, ""], param: Any, axes: tuple[str, ...]) -> UInt[Array, ""]:
    """`key`, another one for each part of a param that is split over `axes`."""
    for axis in axes:
        if compat.is_tracked(axis) and axis not in compat.varying_axes(param):
            continue  # jax keeps track, and knows of no split
        key = moments.noise(lax.bitcast_convert_type(key, jnp.int32) ^ lax.axis_index(axis), 1.0, 0.0)
    return key


def _flags(replicated: Any, params: PyTree) -> list[bool]:
    mask = replicated(params) if callable(replicated) else False if replicated is None else replicated
    return jax.tree.leaves(jax.tree.broadcast(mask, params))
