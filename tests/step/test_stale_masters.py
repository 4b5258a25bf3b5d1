"""Params that are not their masters are named where the host can read both."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

PARAMS32 = {"dense": {"w": jnp.linspace(0.5, 2.0, 64)}, "norm": jnp.ones(4)}


def start(policy, **arguments):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=None if policy == "bf16" else 2.0, **arguments)
    return tx, jaxmp.get_policy(policy).cast_to_param(PARAMS32), tx.init(PARAMS32)


def changed(params):
    return params | {"dense": {"w": params["dense"]["w"] * 0.5}}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_param_that_is_not_its_master_is_named(policy):
    _, params, opt_state = start(policy)
    jaxmp.check_progress(opt_state, params)
    jaxmp.check_progress(*jax.tree.map(np.asarray, (opt_state, params)))
    with pytest.warns(UserWarning, match="got others at dense/w: .* jaxmp.reload_master_params"):
        jaxmp.check_progress(opt_state, changed(params))
    jaxmp.check_progress(jaxmp.reload_master_params(opt_state, changed(params)), changed(params))


def test_a_transform_behind_masters_is_named():
    """The gradients were made elsewhere, so nothing is known while the step is traced."""
    tx, params, _ = start("bf16")
    tx = optax.chain(tx, optax.scale(-1.0))
    opt_state = tx.init(PARAMS32)
    updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    with pytest.warns(UserWarning, match="a transform behind or around mixed_precision"):
        jaxmp.check_progress(opt_state, optax.apply_updates(params, updates))


def test_a_train_state_brings_its_params_along():
    tx, *_ = start("bf16")
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=PARAMS32, tx=tx, policy="bf16")
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    jaxmp.check_progress(state)
    jaxmp.check_progress(state.replace(params=changed(state.params)))  # masters follow
    with pytest.warns(UserWarning, match="got others at dense/w"):
        jaxmp.check_progress(state.replace(params=changed(state.params), opt_state=state.opt_state))


def test_no_false_alarm():
    """fp32, split masters, a master beyond float16's range, one element of many, a state over the replicas of pmap."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, params, opt_state = start("fp32")
        jaxmp.check_progress(opt_state, changed(params))
        _, params, opt_state = start("bf16", remainder_bits=16)
        jaxmp.check_progress(opt_state, changed(params))
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=2.0)
        huge = {"w": jnp.full(3, 1e5)}
        jaxmp.check_progress(tx.init(huge), jaxmp.get_policy("fp16").cast_to_param(huge))
        many = {"w": jnp.ones(1000)}
        one = {"w": jnp.ones(1000, jnp.float16).at[0].set(2.0)}
        jaxmp.check_progress(tx.init(many), one)
        copies = jax.tree.map(lambda x: jnp.stack([x, x]), (tx.init(many), {"w": jnp.ones(1000, jnp.float16)}))
        jaxmp.check_progress(*copies)
