"""Loss scales of torch, Megatron and flax: taken over, they move on as they would have there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxmp
import oracle_data
from helpers import assert_moved
from jaxmp.checkpoint import export_loss_scale, import_loss_scale, set_loss_scale

TORCH = {"scale": 4096.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5, "_growth_tracker": 2}
MEGATRON = oracle_data.load("megatron_state_dict")["format"]["grad_scaler"]
W = {"w": jnp.ones(2, jnp.float16)}


def state_of(scale):
    return jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=scale).init(W)


adjust = jax.jit(lambda scale, finite: scale.adjust(finite))


def numbers(scale):
    return float(scale.loss_scale), int(scale.growth_count)


@pytest.mark.parametrize(("fin_steps", "floor"), [(0, None), pytest.param(3, 4.0, marks=pytest.mark.thorough(0))])
def test_a_scale_of_flax_moves_as_flax_moves_it(fin_steps, floor):
    theirs = DynamicScale(growth_interval=3, scale=16.0, fin_steps=fin_steps, minimum_scale=floor)
    ours = import_loss_scale(theirs)
    step = jax.jit(lambda scale, x: scale.value_and_grad(lambda p: p * x)(jnp.float32(1.0)))
    for finite in np.random.default_rng(0).random(40) < 0.8:
        grad = step(theirs, np.float32(1.0 if finite else np.inf))
        assert bool(grad.finite) == finite
        theirs, ours = grad.dynamic_scale, adjust(ours, finite)
        assert numbers(ours) == (float(theirs.scale), int(theirs.fin_steps))


def test_dicts_are_read_with_their_defaults_and_a_used_up_scale_still_moves():
    flax = import_loss_scale({"scale": np.float32(8.0), "fin_steps": np.int32(3)})
    assert numbers(flax) == (8.0, 3) and "growth_interval=2001" in repr(flax)
    used_up = import_loss_scale({"scale": 8.0, "growth_tracker": 0, "hysteresis_tracker": 0})
    assert int(used_up.hysteresis_left) == 1
    assert numbers(used_up.adjust(False)) == (4.0, 0)


def test_torch_in_and_out():
    scale = import_loss_scale(TORCH)
    opt_state = state_of(scale)
    assert numbers(opt_state.scaling) == (4096.0, 2)
    assert export_loss_scale(opt_state, scale, "torch") == TORCH
    assert jaxmp.GradScaler().load_state_dict(export_loss_scale(opt_state, scale, "torch")).state_dict() == TORCH


def test_megatron_in_and_out():
    scale = import_loss_scale({name: np.asarray(x) for name, x in MEGATRON.items()})
    assert (*numbers(scale), int(scale.hysteresis_left)) == (4096.0, 1, 2)
    assert export_loss_scale(state_of(scale), scale, "megatron") == MEGATRON
    mine = jaxmp.DynamicLossScale(2.0, growth_interval=2)
    assert numbers(import_loss_scale(MEGATRON, loss_scale=mine).adjust(True)) == (8192.0, 0)


def test_setting_a_scale_leaves_all_else_and_the_rule():
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(8.0, growth_interval=3))
    old = tx.init(W)
    new = set_loss_scale(old, import_loss_scale(TORCH))
    assert_moved(new._replace(scaling=old.scaling), old)
    _, after = tx.update(W, new, W)
    assert numbers(after.scaling) == (8192.0, 0)  # the third good step, by the rule of tx
    assert numbers(set_loss_scale(new, 2.0).scaling) == (2.0, 2)
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, old)
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), old)
    assert set_loss_scale(copies, 2.0).scaling.loss_scale.tolist() == [2.0, 2.0]
    shared = jaxmp.shared_loss_scale().init()
    assert float(jaxmp.get_loss_scale(set_loss_scale(shared, 2.0))) == 2.0


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"scale": [1.0], "growth_tracker": 1}, "hysteresis_tracker has missing"),
        ({"scale": [0.0], "growth_tracker": 1, "hysteresis_tracker": 2}, "positive and finite; got 0"),
        (TORCH | {"scale": [1.0, 2.0]}, "scale has 2"),
        ({"scale": 2.0}, "it lacks growth_factor"),
        ({}, "of an enabled scaler; got an empty one"),
        ({"fin_steps": 3}, "scale has missing"),
        (3.0, "got 3.0"),
    ],
    ids=["megatron", "zero", "two", "torch", "empty", "flax", "number"],
)
def test_what_is_no_loss_scale(saved, message):
    with pytest.raises(ValueError, match=message):
        import_loss_scale(saved)


def test_errors_of_a_state():
    none = optax.sgd(0.1).init(W)
    for call in (lambda: set_loss_scale(none, 2.0), lambda: export_loss_scale(none, jaxmp.DynamicLossScale(), "torch")):
        with pytest.raises(ValueError, match="must have one loss scale .*; got 0"):
            call()
    with pytest.raises(ValueError, match="positive and finite; got -1"):
        set_loss_scale(state_of(jaxmp.DynamicLossScale()), -1.0)
    with pytest.raises(ValueError, match="""format must be "torch" or "megatron"; got 'apex'"""):
        export_loss_scale(state_of(jaxmp.DynamicLossScale()), jaxmp.DynamicLossScale(), "apex")  # pyright: ignore
