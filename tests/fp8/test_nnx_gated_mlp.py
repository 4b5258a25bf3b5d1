"""The gated MLP of nnx: the params of three Linear layers, and the numbers of linen's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_close, assert_same_program
from jaxmp.fp8 import CurrentScaling, DelayedScaling
from jaxmp.nnx import Fp8Scale, GatedMLP

WIDTH, HIDDEN = 32, 64
RECIPE = DelayedScaling(amax_history_len=2)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, WIDTH)).astype(np.float32))


class Layers(nnx.Module):
    """The same as three Linear layers."""

    def __init__(self, rngs):
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def mlp(recipe=RECIPE, **kwargs):
    return GatedMLP(WIDTH, HIDDEN, recipe=recipe, rngs=nnx.Rngs(0), **kwargs)


def loss_fn(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)


@pytest.mark.thorough(0)
def test_params_and_values_are_those_of_three_layers():
    layers = Layers(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(layers, RECIPE, filter=lambda *_: True) == ["gate", "up", "down"]
    state = nnx.state(mlp(), nnx.Param)
    assert_same_program(nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.state(layers, nnx.Param)))
    with jaxmp.fp8.autocast(enabled=False):
        assert_close(mlp()(X), layers(X), rtol=1e-6, atol=1e-6)
    for recipe in (RECIPE, CurrentScaling()):
        assert np.linalg.norm(mlp(recipe)(X) - layers(X)) < 0.1 * np.linalg.norm(layers(X))


@pytest.mark.thorough(0)
def test_gradients_are_those_of_linen():
    """The same operation on the same params: equal amaxes and gradients."""
    model = mlp()
    linen = jaxmp.linen.GatedMLP(HIDDEN, recipe=RECIPE)
    params = linen.init(jax.random.key(0), X)["params"]
    for name in ("gate", "up", "down"):
        params[name]["kernel"] = getattr(model, name).kernel.get_value()
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)

    @jax.jit
    def of_linen(params):
        loss = lambda params, x: jnp.mean((linen.apply({"params": params}, x).astype(jnp.float32) - 1) ** 2)  # noqa: E731
        return jaxmp.value_and_grad(loss, policy="fp8")(params, X, opt_state=tx.init(params))

    @nnx.jit
    def of_nnx(model):
        opt_state = tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))
        return jaxmp.nnx.value_and_grad(loss_fn, policy="fp8")(model, X, opt_state=opt_state)

    (loss, expected), (got_loss, got) = of_linen(params), of_nnx(model)
    assert_close(got_loss, loss, rtol=1e-6)
    for name in ("gate", "up", "down"):
        assert_close(got[name]["kernel"].get_value(), expected[name]["kernel"], rtol=1e-3, atol=1e-6)
        for leaf, amax in expected[name]["Fp8DotGeneral_0"].items():
            assert_close(got[name]["dot_general"][leaf].get_value(), amax, rtol=1e-5)
            assert np.all(amax > 0)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial(nnx.remat, policy=jaxmp.fp8.save_quantized)])
def test_it_trains_after_calibration(wrap):
    model = mlp()
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp8")
    loss = wrap(loss_fn)
    optimizer.calibrate(model, loss, X)

    @nnx.jit
    def step(model, optimizer):
        value, grads = jaxmp.nnx.value_and_grad(loss)(model, X, opt_state=optimizer)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[0]
    scales = [float(leaf.get_value()) for _, leaf in nnx.to_flat_state(nnx.state(model, Fp8Scale))]
    assert len(scales) == 9 and all(scales)


@pytest.mark.thorough(0)
def test_a_stack_for_scan():
    """Each layer of a stack has its own scales, and runs as alone."""
    make = nnx.vmap(lambda rngs: GatedMLP(WIDTH, HIDDEN, recipe=RECIPE, rngs=rngs))
    stack = make(nnx.Rngs(0).split(2))
    assert stack.gate.dot_general.fp8_lhs_e4m3_log2_scale.get_value().shape == (2,)
    got = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, stack)
    expected = X
    for i in range(2):
        graphdef, state = nnx.split(stack)
        expected = nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state))(expected)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(0)
def test_nvfp4_draws_from_rngs():
    model = GatedMLP(16, 32, recipe=jaxmp.fp8.NVFP4(), rngs=nnx.Rngs(0, rounding=1))
    gradient = nnx.jit(nnx.grad(loss_fn))
    grads = [gradient(model, jnp.ones((16, 16)))["up"]["kernel"].get_value() for _ in range(2)]
    assert np.any(np.asarray(grads[0] != grads[1]))
    bare = GatedMLP(16, 32, recipe=jaxmp.fp8.NVFP4(stochastic_rounding=False), rngs=nnx.Rngs(0))
    assert nnx.eval_shape(lambda model: model(jnp.ones((16, 16))), bare).shape == (16, 16)
