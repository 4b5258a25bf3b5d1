"""The loops of PyTorch's page of automatic mixed precision examples, with `GradScaler` and with `mixed_precision`.

Each is run beside the same loop in float32: the params end at the same place, and an overflow is skipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, 16, 8)).astype(np.float32)
Y = np.tanh(X @ RNG.normal(size=(8, 2)).astype(np.float32))
PARAMS = {"a": RNG.normal(size=(8, 16)).astype(np.float32) / 3, "b": RNG.normal(size=(16, 2)).astype(np.float32) / 4}
POLICY = "16-mixed"
SGD = optax.sgd(0.05)


def forward(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def loss_fn(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


LOW = jaxmp.autocast(loss_fn, jnp.float16)


def plain(loss=loss_fn, clip=None):
    """The loop in float32."""

    @jax.jit
    def step(params, x, y):
        grads = jax.grad(loss)(params, x, y)
        grads = clip.update(grads, clip.init(params))[0] if clip else grads
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)

    params = PARAMS
    for x, y in zip(X, Y, strict=True):
        params = step(params, x, y)
    return params


def scaler_step(grad=None):
    """A step with a GradScaler; `grad(params, scaler, x, y) -> (grads, scaler)`."""

    def step(params, state, scaler, x, y):
        if grad is None:
            grads = jax.grad(lambda p: scaler.scale(LOW(p, x, y)))(params)
        else:
            grads, scaler = grad(params, scaler, x, y)
        params, state, scaler = scaler.step(SGD, grads, state, params)
        return params, state, scaler.update()

    return step


def close(params, expected):
    for name in PARAMS:
        moved = np.abs(np.asarray(expected[name]) - PARAMS[name]).max()
        np.testing.assert_allclose(params[name], expected[name], atol=0.05 * moved)


def with_scaler(step, scaler=None):
    """`step(params, state, scaler, x, y)`; the state is that of SGD."""
    params, state, scaler = PARAMS, SGD.init(PARAMS), scaler or jaxmp.GradScaler(2.0**12)
    run = jax.jit(step)
    for x, y in zip(X, Y, strict=True):
        params, state, scaler = run(params, state, scaler, x, y)
    return params, scaler


def native(tx, grad=None, **options):
    grad = grad or jaxmp.value_and_grad(loss_fn, policy=POLICY, **options)
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, x, y):
        _, grads = grad(params, x, y, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    for x, y in zip(X, Y, strict=True):
        params, state = step(params, state, x, y)
    return params, state


def test_typical_training():
    expected = plain()
    close(with_scaler(scaler_step())[0], expected)
    close(native(jaxmp.mixed_precision(SGD, POLICY))[0], expected)
    params, scaler = with_scaler(scaler_step(), jaxmp.GradScaler(2.0**40, growth_interval=2000))
    assert 0 < 40 - np.log2(float(scaler.get_scale())) <= 6  # it fell at each overflow
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.thorough(0)
def test_clipping_unscaled_gradients():
    clip = optax.clip_by_global_norm(0.1)

    def grad(params, scaler, x, y):
        grads, scaler = scaler.unscale(jax.grad(lambda p: scaler.scale(LOW(p, x, y)))(params))
        return clip.update(grads, clip.init(params))[0], scaler

    expected = plain(clip=clip)
    close(with_scaler(scaler_step(grad))[0], expected)
    close(native(jaxmp.mixed_precision(optax.chain(clip, SGD), POLICY))[0], expected)


@pytest.mark.thorough(0)
def test_gradient_accumulation():
    k = 4

    def grad(params, scaler, x, y):
        grads = jax.tree.map(jnp.zeros_like, params)
        for part_x, part_y in zip(jnp.split(x, k), jnp.split(y, k), strict=True):
            new = jax.grad(lambda p, x=part_x, y=part_y: scaler.scale(LOW(p, x, y) / k))(params)
            grads = jax.tree.map(jnp.add, grads, new)
        return grads, scaler

    expected = plain()
    close(with_scaler(scaler_step(grad))[0], expected)
    close(native(jaxmp.mixed_precision(SGD, POLICY), accumulate=k, accumulate_argnums=(1, 2))[0], expected)


@pytest.mark.thorough(0)
def test_gradient_penalty():
    def penalized(loss_fn, scale=1.0):
        def loss(params, x, y):
            slopes = jax.grad(lambda p: scale * loss_fn(p, x, y))(params)
            norm = jnp.sqrt(sum(jnp.sum((g / scale) ** 2) for g in jax.tree.leaves(slopes)))
            return loss_fn(params, x, y) + 0.1 * norm

        return loss

    def grad(params, scaler, x, y):
        loss = penalized(LOW, scaler.get_scale())
        return jax.grad(lambda p: scaler.scale(loss(p, x, y)))(params), scaler

    def by_state(params, x, y, *, opt_state):
        loss = penalized(LOW, jaxmp.get_loss_scale(opt_state))
        return jaxmp.value_and_grad(loss)(params, x, y, opt_state=opt_state)

    expected = plain(penalized(loss_fn))
    close(with_scaler(scaler_step(grad), jaxmp.GradScaler(256.0))[0], expected)
    scaled = jaxmp.mixed_precision(SGD, POLICY, loss_scale=jaxmp.DynamicLossScale(256.0))
    close(native(scaled, by_state)[0], expected)
