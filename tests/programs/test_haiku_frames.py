"""Autocast in `hk.transform`: params are made outside, keys come from a sequence of their own, state is refused."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def twice(x):
    """One layer with dropout, in two calls of autocast; and a number by the frame's next key."""
    layer = hk.Linear(8)

    @jaxmp.autocast(dtype=jnp.bfloat16)
    def run(x):
        y = layer(x)
        return jnp.where(jax.random.bernoulli(hk.next_rng_key(), 0.5, y.shape), y, 0.0)

    return run(x), run(x), jax.random.uniform(hk.next_rng_key())


def test_params_are_made_outside_and_keys_of_the_frame_are_read():
    model = hk.transform(twice)
    params = jax.jit(model.init)(KEY, X)
    assert {p.dtype.name for p in jax.tree.leaves(params)} == {"float32"}
    first, second, number = jax.jit(model.apply)(params, KEY, X)  # no value of a trace is left
    assert first.dtype == jnp.bfloat16
    assert (first != second).any() and 0 <= number < 1
    grads = jax.eval_shape(jax.grad(lambda params: model.apply(params, KEY, X)[0].sum().astype(jnp.float32)), params)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


def test_without_keys():
    model = hk.without_apply_rng(hk.transform(lambda x: jaxmp.autocast(hk.Linear(8), jnp.bfloat16)(x)))
    assert jax.eval_shape(model.apply, jax.eval_shape(model.init, KEY, X), X).dtype == jnp.bfloat16


def test_a_change_of_state_is_refused():
    def norm(x):
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    def shapes(fn):
        model = hk.transform_with_state(fn)
        params, state = jax.eval_shape(model.init, KEY, X)
        return jax.eval_shape(model.apply, params, state, None, X)[0]

    with pytest.raises(ValueError, match=r"autocast in hk.transform .* got batch_norm.* changed. Call autocast.f"):
        shapes(jaxmp.autocast(norm, jnp.bfloat16))
    assert shapes(jaxmp.autocast(norm, jnp.float32)).dtype == jnp.float32  # off: nothing is traced
