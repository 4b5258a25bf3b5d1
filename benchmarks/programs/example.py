"""The whole training step of examples/train.py, on one device, from shapes: nothing is allocated."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.lib.examples import train


class Case(NamedTuple):
    """A step, and what it takes."""

    policy: jaxmp.Policy
    params: PyTree  # float32, abstract
    optimizer: optax.GradientTransformation
    loss_fn: Callable[..., Array]
    tokens: jax.ShapeDtypeStruct
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # entered to trace it

    def arguments(self) -> tuple[PyTree, Any, jax.ShapeDtypeStruct]:
        """(params, opt_state, tokens) of the step."""
        params = jax.eval_shape(self.policy.cast_to_param, self.params)
        return params, jax.eval_shape(self.optimizer.init, self.params), self.tokens

    def step(self, params: PyTree, opt_state: Any, tokens: Any) -> Any:
        with self.within():
            loss, grads = jaxmp.value_and_grad(self.loss_fn)(params, tokens, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(self.optimizer, grads, opt_state, params)
        return params, opt_state, loss


def example(precision: str, cfg: train.Config | None = None) -> Case:
    """The example's model, optimizer and precision, with the whole batch on one device."""
    cfg = cfg or train.Config()
    policy, recipe, small_state = train.precision_of(precision)
    model = train.Transformer(cfg.width, cfg.layers, cfg.heads, dtype=policy.compute_dtype)
    bits = 8 if small_state else None
    inner = train.optimizer_of(cfg, small_state)
    tx = jaxmp.mixed_precision(inner, policy, recipe=recipe, remainder_bits=bits)
    within = functools.partial(jaxmp.fp8.autocast, recipe) if recipe else contextlib.nullcontext
    tokens = jax.ShapeDtypeStruct((cfg.batch_size, cfg.seq_len + 1), jnp.uint8)

    def loss_fn(params: PyTree, tokens: Array) -> Array:
        return train.next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    with within():
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
    return Case(policy, params, tx, loss_fn, tokens, within)
