"""A step under jax's own checks: no promotion of dtypes or ranks, no traced array that is kept."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_same_program
from policy_steps import filled

MODES = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(4)(x)


def a_step(policy, accumulate):
    """A function that makes the step anew, to be traced anew, and its arguments."""
    model, x = Model(), np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    params = filled(jaxmp.autocast(model.init, policy), jax.random.key(1), x)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def step(state, x):
        loss_fn = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, x, opt_state=state)
        return state.apply_gradients(grads=grads), loss

    return lambda: lambda state, x: step(state, x), (state, x)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("policy", "accumulate"), [("fp8", 1), ("fp16", 2)])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_passes_the_checks_of_jax(mode, policy, accumulate):
    fresh, args = a_step(policy, accumulate)
    shapes = jax.eval_shape(fresh(), *args)
    with MODES[mode]():
        assert jax.eval_shape(jax.jit(fresh()), *args) == shapes


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("policy", "accumulate"), [pytest.param("fp8", 2, marks=pytest.mark.thorough(0)), ("fp16", 1)])
def test_a_step_runs_while_nan_is_looked_for(policy, accumulate):
    fresh, args = a_step(policy, accumulate)
    expected = jax.jit(fresh())(*args)
    with jax.debug_nans(True):
        assert_same_program(jax.jit(fresh())(*args), expected)


def test_metrics_are_read_while_nan_is_looked_for():
    """NaN stands for what was not measured."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16")
    with jax.debug_nans(True):
        metrics = jaxmp.get_metrics(tx.init({"w": jnp.ones(4)}))
    assert np.isnan(metrics["grad_norm"]) and float(metrics["loss_scale"]) == 65536.0
