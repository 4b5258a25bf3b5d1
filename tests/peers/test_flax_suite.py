"""The cases that flax's suite checks of `DynamicScale`, and those its documentation promises, with jaxmp's parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale

import jaxmp

INF = np.float32(np.inf)


def square(p):
    return jnp.asarray(p, jnp.float32) ** 2


def scales_of(inputs, scale, *, through, **rule):
    """The scale after a step at each of the `inputs`, with the gradient of p^2; NaN and inf in it are overflows."""
    if through == "transform":
        tx = jaxmp.unscale_and_skip(optax.sgd(0.0), jaxmp.DynamicLossScale(scale, hysteresis=1, **rule))
        state = tx.init(jnp.float32(1.0))
        step = jax.jit(lambda s, p: tx.update(jaxmp.value_and_grad(square)(p, opt_state=s)[1], s, p)[1])
    else:
        state = jaxmp.GradScaler(scale, **rule)
        grad = jax.grad(lambda p, scaler: scaler.scale(square(p)))
        tx = optax.sgd(0.0)
        step = jax.jit(lambda s, p: s.step(tx, grad(p, s), tx.init(p), p)[2].update())
    seen = []
    for p in inputs:
        state = step(state, jnp.float32(p))
        seen.append(float(state.get_scale() if through == "scaler" else jaxmp.get_loss_scale(state)))
    return seen


@pytest.mark.thorough(1)
@pytest.mark.parametrize("through", ["transform", "scaler"])
def test_growth_and_backoff(through):
    assert scales_of([1.0] * 6, 4.0, through=through, growth_interval=3) == [4, 4, 8, 8, 8, 16]
    assert scales_of([1, INF, 1, 1], 4.0, through=through, growth_interval=2) == [4, 2, 2, 4]


def test_factors_and_the_floor():
    rule = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1, "min_scale": 1.0}
    assert scales_of([1, INF, INF, INF, 1], 8.0, through="transform", **rule) == [32, 8, 2, 1, 4]
    theirs = dynamic_scale.DynamicScale(4.0, 0.25, 1, scale=8.0, minimum_scale=1.0)
    assert float(theirs.value_and_grad(square)(jnp.inf)[0].scale) == 2.0


def test_the_loss_aux_and_gradients_are_unscaled():
    """`DynamicScale.value_and_grad` returns the plain loss, aux, and the gradient divided by the scale."""
    loss_fn = lambda p, x: (square(p) * x, {"twice": 2 * p})  # noqa: E731
    _, finite, (their_loss, their_aux), theirs = dynamic_scale.DynamicScale(scale=256.0).value_and_grad(
        loss_fn, has_aux=True
    )(3.0, 2.0)
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), jaxmp.DynamicLossScale(256.0))
    p = jnp.float32(3.0)
    state = tx.init(p)
    (loss, aux), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(p, 2.0, opt_state=state)
    updates, state = tx.update(grads, state, p)
    assert (float(loss), float(aux["twice"]), float(-updates)) == (18.0, 6.0, 12.0)
    assert (float(their_loss), float(their_aux["twice"]), float(theirs), bool(finite)) == (18.0, 6.0, 12.0, True)
    assert float(grads) == 12.0 * 256


def test_the_example_of_its_documentation():
    """p in float32, the loss in float16; a hundred steps uphill, of which those that overflow are not taken."""
    tx = jaxmp.unscale_and_skip(optax.sgd(-0.01), jaxmp.DynamicLossScale(65536.0, growth_interval=10, hysteresis=1))

    def step(carry, _):
        p, state = carry
        loss = lambda p: (jnp.asarray(p, jnp.float16) ** 2).astype(jnp.float32)  # noqa: E731
        value, grads = jaxmp.value_and_grad(loss)(p, opt_state=state)
        updates, state = tx.update(grads, state, p)
        return (optax.apply_updates(p, updates), state), (value, state.skipped)

    p = jnp.float32(1.0)
    (p, state), (values, skipped) = jax.lax.scan(step, (p, tx.init(p)), None, length=100)
    taken = 100 - int(state.skipped_steps)
    assert 1 < int(state.skipped_steps) < 20 and np.isfinite(values).all()
    assert abs(float(p) / 1.02**taken - 1) < 5e-2 and bool(skipped[0])
