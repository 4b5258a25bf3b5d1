"""A step under jax's own checks: no promotion of dtypes or ranks, no traced array that is kept."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

POLICIES = ["fp32", "bf16", "bf16-mixed", "fp16", "fp8"]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(4)(x)


MODES = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
    "nans": lambda: jax.debug_nans(True),
}


@pytest.mark.thorough(6)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_passes_the_checks_of_jax(mode, policy, accumulate):
    model, x = Model(), jax.random.normal(jax.random.key(0), (32, 16))
    init = jaxmp.autocast(model.init, "fp8") if policy == "fp8" else model.init
    params = jax.jit(init)(jax.random.key(1), x)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    def step(state, x):
        loss_fn = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, x, opt_state=state)
        return state.apply_gradients(grads=grads), loss

    fresh = lambda: jax.jit(lambda state, x: step(state, x))  # noqa: E731  traced anew, to one program
    expected, loss = fresh()(state, x)
    with MODES[mode]():
        found, same_loss = fresh()(state, x)
    assert float(loss) == float(same_loss)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_metrics_are_read_while_nan_is_looked_for():
    """NaN stands for what was not measured."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16")
    with jax.debug_nans(True):
        metrics = jaxmp.get_metrics(tx.init({"w": jnp.ones(4)}))
    assert np.isnan(metrics["grad_norm"]) and float(metrics["loss_scale"]) == 65536.0


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_an_update_keeps_no_traced_array(policy):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    params = jaxmp.get_policy(policy).cast_to_param({"w": jnp.ones(4)})
    with jax.checking_leaks():
        jax.jit(lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p))(params, tx.init({"w": jnp.ones(4)}), params)
