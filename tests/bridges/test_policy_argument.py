"""The precision is named once: a state that is created with a policy wraps its optimizer, and carries the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact
from policy_steps import nothing_read

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


def linear_loss(params, x):
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)


def state_of(policy, tx=None, **options):
    params = {"norm": {"scale": np.ones(2, np.float32)}, "w": np.ones((16, 2), np.float32)}
    tx = optax.sgd(0.1) if tx is None else tx
    return jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy=policy, **options)


def right(state, x):
    _, grads = jaxmp.value_and_grad(linear_loss)(state.params, x, opt_state=state)
    return state.apply_gradients(grads=grads)


def wrong(state, x):
    """With jax's own gradients."""
    return state.apply_gradients(grads=jax.grad(linear_loss)(state.params, x))


def test_the_precision_is_named_once():
    """`create` wraps an optimizer of optax; the state is that of one that was wrapped before."""
    once = state_of("fp16", optax.adam(0.1), keep_fp32="norm/*", loss_scale=8.0)
    chosen = jaxmp.get_policy("fp16", keep_fp32="norm/*")
    twice = state_of(chosen, jaxmp.mixed_precision(optax.adam(0.1), chosen, loss_scale=8.0))
    assert jax.tree.structure(once.opt_state) == jax.tree.structure(twice.opt_state) and once.policy == chosen
    assert_exact((once.params, once.opt_state), (twice.params, twice.opt_state))
    step = jax.jit(right)
    assert_exact(step(once, X).params, step(twice, X).params)


OF_JAXMP = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tx": OF_JAXMP, "policy": "bf16", "loss_scale": 2.0}, TypeError, "an optax optimizer; got a tx of jaxmp"),
        ({"tx": OF_JAXMP, "policy": "bf16", "keep_fp32": "w"}, TypeError, "an optax optimizer; got a tx of jaxmp"),
        ({"tx": optax.sgd(0.1), "keep_fp32": "w"}, TypeError, "an optax optimizer; got no policy"),
        (
            {"tx": jaxmp.unscale_and_skip(optax.sgd(0.1)), "policy": "fp16"},
            ValueError,
            r"must keep masters for policy=; got none. Call jaxmp.mixed_precision\(tx, policy\)",
        ),
    ],
    ids=["loss_scale", "keep_fp32", "no policy", "no masters"],
)
def test_what_a_made_optimizer_has_is_not_named_again(options, error, message):
    with pytest.raises(error, match=message):
        jaxmp.linen.TrainState.create(apply_fn=None, params={"w": np.ones(2, np.float32)}, **options)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=message):
        jaxmp.nnx.Optimizer(model, **options)
    assert model.kernel[...].dtype == jnp.float32  # it was not cast


@pytest.mark.parametrize("policy", ["bf16", "bf16-mixed"])
def test_a_policy_that_no_loss_took_is_named(policy):
    """With jax's own `value_and_grad` the loss runs in float32, and nothing else would say so."""
    state = state_of(policy)
    with nothing_read():
        jax.eval_shape(right, state, X)
        with pytest.raises(jaxmp.UnreadLossScale, match="carries the policy .* and no loss took it from there"):
            jax.eval_shape(wrong, state, X)
        jax.eval_shape(lambda state, x: jax.jit(right)(state, x), state, X)
        grads = jax.tree.map(np.ones_like, state.params)  # from another program
        jax.eval_shape(lambda state, grads: state.apply_gradients(grads=grads), state, grads)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_it_is_told_without_jit_too(policy):
    with nothing_read(), pytest.warns(jaxmp.UnreadLossScale):
        wrong(state_of(policy), X)


@pytest.mark.parametrize("jitted", [True, False])
def test_gradients_that_were_unscaled_to_look_at_are_not_for_the_update(jitted):
    def step(state, x):
        _, grads = jaxmp.value_and_grad(linear_loss)(state.params, x, opt_state=state)
        return state.apply_gradients(grads=jaxmp.unscale(grads, state))

    with nothing_read(), pytest.warns(jaxmp.UnreadLossScale, match="gradients are unscaled once, by the update"):
        jax.eval_shape(step, state_of("fp16"), X) if jitted else step(state_of("fp16"), X)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_unscaled_gradients_are_those_to_look_at(dtype):
    """The norm of scaled float16 gradients is inf; that of unscaled ones is right."""
    state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init({"w": np.ones(8, np.float32)})
    grads = {"w": np.full(8, 0.25 * 65536, dtype)}
    norm = optax.tree.norm(jaxmp.unscale(grads, state))
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 0.25 * np.sqrt(8), rtol=1e-6)
    scales = {"fp8_lhs_e4m3_log2_scale": jnp.float32(3.0)}
    assert_exact(jaxmp.unscale(scales, state), scales)


@pytest.mark.thorough(0)
def test_of_an_nnx_optimizer():
    """With fp8 it puts the layers into fp8 first, as `to_fp8` before it would."""

    def after_a_step(short):
        model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)))
        tx = optax.adam(0.1)
        if not short:
            jaxmp.nnx.to_fp8(model)
            tx = jaxmp.mixed_precision(tx, "fp8")
        optimizer = jaxmp.nnx.Optimizer(model, tx, policy="fp8")
        loss = nnx.jit(step)(model, optimizer, X)
        return loss, nnx.state(model)

    def step(model, optimizer, x):
        loss_fn = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, x, opt_state=optimizer)
        optimizer.update(model, grads)
        return loss

    once, twice = after_a_step(short=True), after_a_step(short=False)
    assert_exact(once, twice)
    assert len(jaxmp.fp8.get_scales(nnx.as_pure(once[1]))) > 0


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(16, 4, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.linear(self.dropout(x, rngs=rngs))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [1, 2])
def test_rngs_are_an_argument_of_the_loss(k):
    """Their counts move, through the microbatches too, also where the model shares them."""
    model, rngs = Dropped(nnx.Rngs(0)), nnx.Rngs(3)
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy="bf16")

    def loss_fn(model, x, rngs):
        return jnp.mean(model(x, rngs).astype(jnp.float32) ** 2)

    @nnx.jit
    def step(model, optimizer, x, rngs):
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn, accumulate=k)(model, x, rngs, opt_state=optimizer)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X, rngs)) for _ in range(3)]
    assert int(rngs.default.count[...]) == 3 * k
    assert len(set(losses)) == 3
    if k == 1:
        fresh = Dropped(nnx.Rngs(0))
        jaxmp.nnx.cast_to_param(fresh, "bf16")
        expected = nnx.jit(jaxmp.autocast(loss_fn, "bf16"))(fresh, X, nnx.Rngs(3))
        assert losses[0] == pytest.approx(float(expected), rel=1e-2)
