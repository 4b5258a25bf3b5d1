"""`check_progress`: what the host sees of a run that does not train."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
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
    with pytest.raises(jaxmp.TrainingStuck, match="must not skip 3 steps in a row; it skipped 3"):
        jaxmp.check_progress(skip_repeatedly(tx, 3), max_consecutive_skips=3)


def test_check_progress_warns_of_a_pinned_scale_and_raises_if_asked():
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), jaxmp.DynamicLossScale(1.0, hysteresis=1))
    state = skip_repeatedly(tx, 2)
    with pytest.warns(UserWarning, match="pinned at its floor, 1.0: overflows could not lower it"):
        jaxmp.check_progress(state)
    with pytest.raises(jaxmp.TrainingStuck, match="stay above its floor; it overflowed 2 times in a row at 1.0"):
        jaxmp.check_progress(state, max_pinned_overflows=2)
    _, state = tx.update(grads(), state, params())
    jaxmp.check_progress(state, max_pinned_overflows=1)  # a good step: all is well


@functools.cache
def counted_step(inner, growth_interval):
    """One compiled step of float16 params under a dynamic scale: `step(state, gradient)`, and the first state."""
    scale = jaxmp.DynamicLossScale(2.0**10, hysteresis=1, growth_interval=growth_interval)
    tx = jaxmp.mixed_precision({"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)}[inner], "fp16", loss_scale=scale)
    w = {"w": jnp.ones(4, jnp.float16)}
    return jax.jit(lambda state, g: tx.update({"w": jnp.full(4, g, jnp.float16)}, state, w)[1]), tx.init(w)


def warnings_of(inner, gradients, growth_interval=1, **arguments):
    """The texts that `check_progress` warns of in a loop, under the filter that hides no repetition."""
    step, state = counted_step(inner, growth_interval)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, g in enumerate(gradients):
            state = step(state, np.float16(g))
            numbered = {"step": i + 1} if inner == "sgd" else {}
            jaxmp.check_progress(state, max_consecutive_skips=1000, **numbered, **arguments)
    return [str(w.message) for w in caught]


def test_check_progress_warns_of_each_cause_at_both_ends():
    """The scale falls to its floor and stays there; then gradients are 0, and it grows."""
    floor, ceiling = dict.fromkeys(warnings_of("adam", [np.inf] * 20 + [0.0] * 30, ceiling=2.0**12))
    assert "pinned at its floor, 1.0: overflows could not lower it" in floor
    assert "the loss scale is at its ceiling" in ceiling and "value_and_grad" in ceiling


@pytest.mark.thorough(1)
@pytest.mark.parametrize("inner", ["adam", "sgd"])
def test_check_progress_names_skips_of_a_tenth_within_100_steps(inner):
    gradients = [np.inf if i % 10 == 9 else 1e-3 for i in range(100)]
    (message,) = set(warnings_of(inner, gradients, growth_interval=2000))
    assert "more than 10% of the steps are skipped" in message


def test_check_progress_knows_a_scale_that_begins_too_high():
    """Ten skips find the value. Later none follows."""
    assert not warnings_of("adam", [np.inf, 1e-3] * 10 + [1e-3] * 100, growth_interval=2000)


def test_check_progress_of_a_replicated_state():
    state = skip_repeatedly(jaxmp.unscale_and_skip(optax.sgd(1.0)), 3)
    with pytest.raises(jaxmp.TrainingStuck, match="skipped 3"):
        jaxmp.check_progress(jax.tree.map(lambda x: jnp.stack([x, x]), state), max_consecutive_skips=3)


def test_check_progress_of_a_plain_optimizer_says_nothing():
    jaxmp.check_progress(optax.adam(0.1).init(params()), max_consecutive_skips=1, max_pinned_overflows=1)
