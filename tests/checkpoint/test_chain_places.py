"""A job of one device goes on on several: with `reduce_gradients` first, its states stand elsewhere in the chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_moved
from jaxmp import checkpoint

RNG = np.random.default_rng(5)
# The numbers of layers are no numbers of a chain.
PARAMS = {
    "blocks": [{"kernel": jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)} for _ in range(3)],
    "head": jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32),
}
SCALE = jaxmp.DynamicLossScale(2.0**10)
AVERAGE = jaxmp.ema_params(0.9)


def mixed(inner, policy="fp16", **kwargs):
    return jaxmp.mixed_precision(inner, policy, **kwargs)


REDUCED = jaxmp.reduce_gradients("data")
# {name: (the optimizer of the saved job, that of the job that goes on)}
CHAINS = {
    "reduction before": (mixed(optax.adamw(1e-2), loss_scale=SCALE), optax.chain(REDUCED, mixed(optax.adamw(1e-2)))),
    "reduction inside": (mixed(optax.adamw(1e-2), loss_scale=SCALE), mixed(optax.chain(REDUCED, optax.adamw(1e-2)))),
    "with an average": (
        mixed(optax.chain(optax.adamw(1e-2), AVERAGE), loss_scale=SCALE),
        optax.chain(REDUCED, mixed(optax.chain(optax.clip(1.0), optax.adamw(1e-2), AVERAGE))),
    ),
    "split masters": (
        mixed(optax.adam(1e-2), "bf16", remainder_bits=16, loss_scale=SCALE),
        optax.chain(REDUCED, mixed(optax.adam(1e-2), "bf16", remainder_bits=16, loss_scale=SCALE)),
    ),
    "from a plain optimizer": (optax.adam(1e-2), optax.chain(REDUCED, mixed(optax.adam(1e-2), "bf16"))),
}


@functools.cache
def trained(name):
    """(params, opt_state) after a step and a skipped one."""
    tx = CHAINS[name][0]
    params, opt_state = jaxmp.get_policy(policy_of(name)).cast_to_param(PARAMS), tx.init(PARAMS)
    if name == "from a plain optimizer":
        updates, opt_state = tx.update(PARAMS, opt_state, PARAMS)
        return optax.apply_updates(PARAMS, updates), opt_state
    step = jax.jit(lambda p, s, g: jaxmp.apply_gradients(tx, g, s, p))
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    params, opt_state = step(params, opt_state, params)
    return step(params, opt_state, jax.tree.map(lambda p: p * jnp.inf, params))


def policy_of(name):
    return {"split masters": "bf16", "from a plain optimizer": "bf16"}.get(name, "fp16")


def parts(opt_state):
    """What a job must not lose, wherever it stands."""
    names = ("mu", "nu", "master_params", "ema_params", "skipped_steps", "loss_scale", "hysteresis_left")
    return {name: [x for _, x in optax.tree.get_all_with_path(opt_state, name)] for name in names}


def restored(folder, params, opt_state, tx):
    with checkpoint.manager(folder) as steps:
        checkpoint.save(steps, 1, params=params, opt_state=opt_state)
        found = checkpoint.restore(steps, tx=tx, params=params)
    assert_moved(found.params, params)
    return found.opt_state


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", [name for name in CHAINS if "plain" not in name])
def test_a_job_goes_on_where_a_transform_without_state_came_or_went(name, tmp_path):
    """Masters, moments, averages, counts and the loss scale, bit for bit; it was an error that named a path."""
    params, opt_state = trained(name)
    old, new = CHAINS[name]
    there = restored(tmp_path / "there", params, opt_state, new)
    assert_moved(parts(there), parts(opt_state))
    assert_moved(parts(restored(tmp_path / "back", params, there, old)), parts(opt_state))
    assert_moved(parts(checkpoint.convert(opt_state, params, to=new, policy=policy_of(name))[1]), parts(opt_state))


def test_a_plain_optimizer_goes_on_behind_a_reduction(tmp_path):
    params, opt_state = trained("from a plain optimizer")
    found = restored(tmp_path, params, opt_state, CHAINS["from a plain optimizer"][1])
    assert_moved(parts(found)["mu"], parts(opt_state)["mu"])


def test_partial_keeps_the_loss_scale_of_what_moved(tmp_path):
    """It started again at 65536, with a warning that the checkpoint had none."""
    params, opt_state = trained("reduction before")
    tx = optax.chain(REDUCED, mixed(optax.chain(optax.adamw(1e-2), AVERAGE)))
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 1, params=params, opt_state=opt_state)
        found = checkpoint.restore(steps, tx=tx, params=params, partial="*ema_*")
    assert float(jaxmp.get_loss_scale(found.opt_state)) == float(jaxmp.get_loss_scale(opt_state)) == 2.0**10
    assert int(jaxmp.get_metrics(found.opt_state)["skipped_steps"]) == 1
    assert_moved(optax.tree.get(found.opt_state, "mu"), optax.tree.get(opt_state, "mu"))


def test_another_optimizer_is_an_error_as_before(tmp_path):
    params, opt_state = trained("reduction before")
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 1, params=params, opt_state=opt_state)
        with pytest.raises(ValueError, match="must have the same inner optimizer, with the same states"):
            checkpoint.restore(steps, tx=optax.chain(REDUCED, mixed(optax.sgd(1e-2, momentum=0.9))), params=params)
