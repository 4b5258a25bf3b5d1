"""`check_progress`: what the host sees of a run that does not train."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp


def params():
    return {"a": jnp.array([1.0, -0.0, 0.0]), "b": jnp.array([2.0])}


def grads(value=1.0, *, bad=None):
    new = {"a": jnp.full(3, value), "b": jnp.full(1, value)}
    return new if bad is None else new | {"b": jnp.array([bad])}


def skip_repeatedly(tx, times):
    state = tx.init(params())
    for _ in range(times):
        _, state = tx.update(grads(bad=jnp.nan), state, params())
    return state


def test_check_progress_stops_after_k_skips():
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0))
    jaxmp.check_progress(skip_repeatedly(tx, 2), max_consecutive_skips=3)
    with pytest.raises(jaxmp.TrainingStuck, match="must not skip 3 steps in a row; got 3"):
        jaxmp.check_progress(skip_repeatedly(tx, 3), max_consecutive_skips=3)


def test_check_progress_warns_of_a_pinned_scale_and_raises_if_asked():
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), jaxmp.DynamicLossScale(1.0, hysteresis=1))
    state = skip_repeatedly(tx, 2)
    with pytest.warns(UserWarning, match="pinned at its floor, 1.0: overflows could not lower it"):
        jaxmp.check_progress(state)
    with pytest.raises(jaxmp.TrainingStuck, match="stay above its floor; got 2 overflows in a row at 1.0"):
        jaxmp.check_progress(state, max_pinned_overflows=2)
    _, state = tx.update(grads(), state, params())
    jaxmp.check_progress(state, max_pinned_overflows=1)  # a good step: all is well


def test_check_progress_of_a_replicated_state():
    state = skip_repeatedly(jaxmp.unscale_and_skip(optax.sgd(1.0)), 3)
    with pytest.raises(jaxmp.TrainingStuck, match="got 3, with the loss scale"):
        jaxmp.check_progress(jax.tree.map(lambda x: jnp.stack([x, x]), state), max_consecutive_skips=3)


def test_check_progress_of_a_plain_optimizer_says_nothing():
    jaxmp.check_progress(optax.adam(0.1).init(params()), max_consecutive_skips=1, max_pinned_overflows=1)
