"""A step of mixed-precision training written by hand, and as other libraries do it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

LEARNING_RATE, MAX_NORM = 1e-3, 1.0
Step = Callable[[PyTree, Any, PyTree], tuple[PyTree, Any]]  # (params, opt_state, grads) -> (params, opt_state)
# Of a recipe: what makes the state from float32 params, and the step
Recipe = tuple[Callable[[PyTree], Any], Step]


class ByHandState(NamedTuple):
    """State of fp16 training without a library."""

    masters: PyTree  # float32, as params
    adamw: Any
    scale: Float[Array, ""]
    good_steps: Int[Array, ""]


def selected(finite: Array, update: Callable[[PyTree], PyTree], old: PyTree) -> PyTree:
    """`update(old)` if the gradients are finite, else `old`: always computed, then selected."""
    return select(finite, update(old), old)


def branched(finite: Array, update: Callable[[PyTree], PyTree], old: PyTree) -> PyTree:
    """The same with `lax.cond`: a skipped step computes nothing, but the device waits for the flag."""
    return lax.cond(finite, update, lambda old: old, old)


def by_hand(taken_if: Callable[..., PyTree] = selected, *, clips: bool = True) -> Recipe:
    """Unscale, clip, AdamW on masters, `selected` or `branched`, cast: only jnp and optax."""
    adamw = optax.adamw(LEARNING_RATE)

    def init(params: PyTree) -> ByHandState:
        return ByHandState(params, adamw.init(params), jnp.float32(2.0**16), jnp.int32(0))

    def step(params: PyTree, state: ByHandState, grads: PyTree) -> tuple[PyTree, ByHandState]:
        del params  # remade from the masters
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)
        if clips:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)

        def update(old: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
            masters, adamw_state = old
            updates, adamw_state = adamw.update(grads, adamw_state, masters)
            return optax.apply_updates(masters, updates), adamw_state

        masters, adamw_state = taken_if(finite, update, (state.masters, state.adamw))
        grow = finite & (state.good_steps + 1 == 2000)
        scale = state.scale * jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        good_steps = jnp.where(finite & ~grow, state.good_steps + 1, 0)
        params = jax.tree.map(lambda w: w.astype(jnp.float16), masters)
        return params, ByHandState(masters, adamw_state, scale, good_steps)

    return init, step


def flax_dynamic_scale(tx: optax.GradientTransformation) -> Recipe:
    """flax's recipe for float16 compute: `DynamicScale` around the gradient, float32 params, select."""

    def init(params: PyTree) -> Any:
        return tx.init(params), DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0))

    def step(params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        opt_state, dynamic_scale = state

        def loss_fn(params: PyTree) -> Float[Array, ""]:  # a loss whose gradients are `grads`
            return sum(map(jnp.vdot, jax.tree.leaves(params), jax.tree.leaves(grads)), jnp.float32(0.0))

        dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(loss_fn)(params)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = select(finite, new, (params, opt_state))
        return params, (opt_state, dynamic_scale)

    return init, step


def jmp_dynamic_scale(tx: optax.GradientTransformation) -> Recipe:
    """jmp's recipe: float32 params, `DynamicLossScale`, `select_tree`."""

    def init(params: PyTree) -> Any:
        return tx.init(params), (jnp.float32(65536.0), jnp.int32(0))  # leaves: jit cannot lower the object

    def step(params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        opt_state, scale_leaves = state
        loss_scale = jmp.DynamicLossScale(*scale_leaves)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        return params, (opt_state, tuple(jax.tree.leaves(loss_scale)))

    return init, step


def plain(tx: optax.GradientTransformation) -> Recipe:
    """optax in float32, without scaling or skipping."""

    def step(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return tx.init, step


def select(finite: Array, new: PyTree, old: PyTree) -> PyTree:
    """The tree `new` if the gradients are finite, else `old`."""
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)
