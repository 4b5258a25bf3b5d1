"""What jaxmp's programs in `h100.py` are measured against: the same work by hand, in flax and in optax."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from h100_programs import GPT2, LEARNING_RATE, LLAMA, MANY, MAX_NORM, Program, Step
from jaxtyping import Array, Float, Int, PyTree


class ByHandState(NamedTuple):
    """fp16 training as one writes it without a library."""

    masters: PyTree  # float32, as params
    adamw: Any
    scale: Float[Array, ""]
    good_steps: Int[Array, ""]


def by_hand() -> tuple[Callable[[PyTree], ByHandState], Step]:
    """Unscale, clip, AdamW on masters, select old or new, cast: jnp and optax, nothing else."""
    adamw = optax.adamw(LEARNING_RATE)

    def init(params: PyTree) -> ByHandState:
        return ByHandState(params, adamw.init(params), jnp.float32(2.0**16), jnp.int32(0))

    def step(params: PyTree, state: ByHandState, grads: PyTree) -> tuple[PyTree, ByHandState]:
        del params  # the masters are the truth
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
        updates, adamw_state = adamw.update(grads, state.adamw, state.masters)
        new = optax.apply_updates(state.masters, updates), adamw_state
        masters, adamw_state = _select(finite, new, (state.masters, state.adamw))
        grow = finite & (state.good_steps + 1 == 2000)
        scale = state.scale * jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        good_steps = jnp.where(finite & ~grow, state.good_steps + 1, 0)
        params = jax.tree.map(lambda w: w.astype(jnp.float16), masters)
        return params, ByHandState(masters, adamw_state, scale, good_steps)

    return init, step


def flax_dynamic_scale(tx: optax.GradientTransformation) -> tuple[Callable[[PyTree], Any], Step]:
    """flax's recipe for float16 compute: `DynamicScale` round the gradient, float32 params, select."""

    def init(params: PyTree) -> Any:
        return tx.init(params), DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0))

    def step(params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        opt_state, dynamic_scale = state

        def loss_fn(params: PyTree) -> Float[Array, ""]:  # the loss with these gradients
            return sum(map(jnp.vdot, jax.tree.leaves(params), jax.tree.leaves(grads)), jnp.float32(0.0))

        dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(loss_fn)(params)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = _select(finite, new, (params, opt_state))
        return params, (opt_state, dynamic_scale)

    return init, step


def plain(tx: optax.GradientTransformation) -> tuple[Callable[[PyTree], Any], Step]:
    """optax in float32: nothing scaled, nothing skipped."""

    def step(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx.init, step


def _select(finite: Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def baseline_programs() -> Iterator[Program]:
    """The same work without jaxmp."""
    adamw = optax.adamw(LEARNING_RATE)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    init, step = by_hand()
    by_hand_row = Program("by hand: fp16 params, fp32 masters, clip, adamw", "1 device", step, init)
    for tree in (GPT2, MANY, LLAMA):
        yield by_hand_row._replace(tree=tree)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = flax_dynamic_scale(tx)
        yield Program(f"flax DynamicScale, f32 params, {name}", "1 device", step, init, params_dtype=jnp.float32)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = plain(tx)
        yield Program(f"optax.{name}, f32, no scaling", "1 device", step, init, params_dtype=jnp.float32)
