"""The precision is named once: a state that is created with a policy wraps its optimizer, and carries the policy."""

import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact
from jaxmp._src.step import scale_reads

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_the_precision_is_named_once(policy):
    """`create` wraps an optimizer of optax; the state is that of one that was wrapped before."""
    params = {"norm": {"scale": jnp.ones(2)}, "w": jnp.ones((3, 2))}
    once = jaxmp.linen.TrainState.create(
        apply_fn=None, params=params, tx=optax.adam(0.1), policy=policy, keep_fp32="norm/*", loss_scale=8.0
    )
    chosen = jaxmp.get_policy(policy, keep_fp32="norm/*")
    tx = jaxmp.mixed_precision(optax.adam(0.1), chosen, loss_scale=8.0)
    twice = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy=chosen)
    assert jax.tree.structure(once.opt_state) == jax.tree.structure(twice.opt_state) and once.policy == chosen
    assert_exact((once.params, once.opt_state), (twice.params, twice.opt_state))
    grads = jax.tree.map(jnp.ones_like, once.params)
    assert_exact(once.apply_gradients(grads=grads).params, twice.apply_gradients(grads=grads).params)


def test_what_a_made_optimizer_has_is_not_named_again():
    made = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
    for options, got in (
        ({"tx": made, "policy": "bf16", "loss_scale": 2.0}, "got a tx of jaxmp"),
        ({"tx": made, "policy": "bf16", "keep_fp32": "w"}, "got a tx of jaxmp"),
        ({"tx": optax.sgd(0.1), "keep_fp32": "w"}, "got no policy"),
    ):
        with pytest.raises(TypeError, match=f"must go with policy= and an optax optimizer; {got}"):
            jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, **options)
        with pytest.raises(TypeError, match=got):
            jaxmp.nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), **options)


@pytest.mark.parametrize("policy", ["bf16", "bf16-mixed"])
def test_a_policy_that_no_loss_took_is_named(policy):
    """With jax's own `value_and_grad` the loss runs in float32, and nothing else would say so."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    def step(state, x, gradients):
        _, grads = gradients(state, x)
        return state.apply_gradients(grads=grads)

    def made():
        return jaxmp.linen.TrainState.create(
            apply_fn=None, params={"w": jnp.ones((3, 2))}, tx=optax.adam(0.1), policy=policy
        )

    def trace(gradients):
        jax.eval_shape(lambda state, x: step(state, x, gradients), made(), np.ones((4, 3), np.float32))

    taken = lambda state, x: jaxmp.value_and_grad(loss_fn)(state.params, x, opt_state=state)  # noqa: E731
    inside = lambda state, x: jax.jit(taken)(state, x)  # noqa: E731
    plain = lambda state, x: jax.value_and_grad(loss_fn)(state.params, x)  # noqa: E731
    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()), warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(taken)
        with pytest.raises(jaxmp.UnreadLossScale, match="carries the policy .* and no loss took it from there"):
            trace(plain)
        trace(inside)
        grads = {"w": jnp.ones((3, 2))}
        jax.eval_shape(lambda state, grads: state.apply_gradients(grads=grads), made(), grads)  # from another program


def linear_loss(params, x):
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)


def made(policy, **options):
    params = {"w": jnp.ones((16, 2))}
    return jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), policy=policy, **options)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_it_is_told_without_jit_too(policy):
    state = made(policy)
    grads = jax.grad(linear_loss)(state.params, X)
    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()), pytest.warns(jaxmp.UnreadLossScale):
        state.apply_gradients(grads=grads)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16"])
def test_a_right_step_before_it_silences_nothing(first, jitted):
    """A baseline in float32, then the same model in float16 with jax's own gradients."""

    def right(state, x):
        _, grads = jaxmp.value_and_grad(linear_loss)(state.params, x, opt_state=state)
        return state.apply_gradients(grads=grads)

    def wrong(state, x):
        return state.apply_gradients(grads=jax.grad(linear_loss)(state.params, x))

    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()), warnings.catch_warnings():
        warnings.simplefilter("error")
        (jax.jit(right) if jitted else right)(made(first), X)
        with pytest.raises(jaxmp.UnreadLossScale):
            jax.eval_shape(wrong, made("fp16"), X)


@pytest.mark.parametrize("jitted", [True, False])
def test_gradients_that_were_unscaled_to_look_at_are_not_for_the_update(jitted):
    def step(state, x):
        _, grads = jaxmp.value_and_grad(linear_loss)(state.params, x, opt_state=state)
        return state.apply_gradients(grads=jaxmp.unscale(grads, state))

    run = jax.jit(step) if jitted else step
    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()):
        with pytest.warns(jaxmp.UnreadLossScale, match="gradients are unscaled once, by the update"):
            run(made("fp16"), X)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def square(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def trained(model, optimizer):
    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(square)(model, x, opt_state=optimizer)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, X) for _ in range(2)]
    return losses, nnx.state(model)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["bf16", "fp8"])
def test_of_an_nnx_optimizer(policy):
    """With fp8 it puts the layers into fp8 first, as `to_fp8` before it would."""
    once, twice = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    short = jaxmp.nnx.Optimizer(once, optax.adam(0.1), policy=policy)
    if policy == "fp8":
        jaxmp.nnx.to_fp8(twice)
    long = jaxmp.nnx.Optimizer(twice, jaxmp.mixed_precision(optax.adam(0.1), policy), policy=policy)
    assert_exact(trained(once, short), trained(twice, long))
    assert (len(jaxmp.fp8.get_scales(nnx.as_pure(nnx.state(once)))) > 0) == (policy == "fp8")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [1, 2])
def test_rngs_are_an_argument_of_the_loss(k):
    """Their counts move, through the microbatches too, also where the model shares them."""

    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(16, 4, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.linear(self.dropout(x, rngs=rngs))

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
        other = nnx.Rngs(3)
        fresh = Dropped(nnx.Rngs(0))
        jaxmp.nnx.cast_to_param(fresh, "bf16")
        assert losses[0] == pytest.approx(float(jaxmp.autocast(loss_fn, "bf16")(fresh, X, other)), rel=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_unscaled_gradients_are_those_to_look_at(dtype):
    """The norm of scaled float16 gradients is inf; that of unscaled ones is right."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16")
    state = tx.init({"w": jnp.ones(8)})
    grads = {"w": jnp.full(8, 0.25 * 65536, dtype)}
    norm = optax.tree.norm(jaxmp.unscale(grads, state))
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 0.25 * np.sqrt(8), rtol=1e-6)
    scales = {"fp8_lhs_e4m3_log2_scale": jnp.float32(3.0)}
    assert_exact(jaxmp.unscale(scales, state), scales)
