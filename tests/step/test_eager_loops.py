"""Loops without jit: value_and_grad compiles in the first step only, and reads what the loss closes over now."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import compilations
from policy_steps import filled

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Dense(16)(nn.relu(nn.Dense(16)(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b, self.c = (nnx.Linear(16, n, rngs=rngs) for n in (16, 16, 1))

    def __call__(self, x):
        return self.c(self.b(nnx.relu(self.a(x))))


def linen_steps(policy, **options):
    """A function that takes a step with a loss that is made anew and closes over `factor`."""
    model = Model()
    params = filled(jaxmp.autocast(model.init, policy), jax.random.key(0), X)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1), policy=policy)

    def step(factor):
        def loss_fn(params, x):
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2) * factor

        return jaxmp.value_and_grad(loss_fn, **options)(state.params, X, opt_state=state)

    return step


def nnx_steps(policy, **options):
    model = NnxModel(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy=policy)

    def step(factor):
        def loss_fn(model, x):
            return jnp.mean(model(x) ** 2) * factor

        return jaxmp.nnx.value_and_grad(loss_fn, **options)(model, X, opt_state=optimizer)

    return step


def plain_steps(policy, **options):
    """fp8 in plain code: a recipe without state."""
    params = {"w": jnp.eye(16), "v": jnp.ones((16, 16)) / 16, "u": jnp.ones((16, 1))}
    state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)

    def step(factor):
        def loss_fn(params, x):
            return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"] @ params["u"]) ** 2) * factor

        return jaxmp.value_and_grad(loss_fn, policy=policy, **options)(params, X, opt_state=state)

    return step


CURRENT = dataclasses.replace(jaxmp.get_policy("fp8"), recipe=jaxmp.fp8.CurrentScaling())
CASES = [
    (linen_steps, "fp8", {}),
    (nnx_steps, "fp8", {}),
    (linen_steps, "bf16", {"accumulate": 2}),
    (plain_steps, CURRENT, {}),
    (nnx_steps, "bf16-mixed", {}),
    (plain_steps, "fp16", {}),
]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("steps", "policy", "options"), CASES)
def test_only_the_first_step_compiles(steps, policy, options):
    step = steps(policy, **options)
    factors = [jnp.float32(f) for f in (1, 2)]
    first, _ = step(factors[0])
    with compilations() as compiled:
        second, _ = step(factors[1])
    assert not compiled
    assert float(second) == 2 * float(first) != 0
