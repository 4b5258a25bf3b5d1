"""Stacks of layers in nnx (`nnx.vmap` for `nnx.scan`), in fp8: each layer has its own amaxes and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp import checkpoint
from jaxmp.fp8 import DelayedScaling
from jaxmp.nnx import Fp8Scale

SIDE, DEPTH = 16, 3
RECIPE = DelayedScaling(amax_history_len=3)
X = jnp.asarray(np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32))
SCALE = "blocks/dot_general/fp8_{}_log2_scale".format
GRAD, LHS, RHS = map(SCALE, ("grad_e5m2", "lhs_e4m3", "rhs_e4m3"))


def stack(seed, **axes):
    """The weights of its layers are of different sizes."""
    layers = nnx.vmap(lambda rngs: nnx.Linear(SIDE, 20, rngs=rngs), **axes)(nnx.Rngs(seed).split(DEPTH))
    return nnx.Dict(first=nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(seed)), blocks=layers)


def loss_fn(model, x):
    run = nnx.scan(lambda x, block: jnp.tanh(block(x)[:, :SIDE]), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return jnp.mean((run(model.first(x), model.blocks) - 1) ** 2)


def job(seed):
    model = stack(seed)
    assert jaxmp.nnx.to_fp8(model, RECIPE) == ["blocks"]
    model.blocks.kernel[...] *= jnp.float32([1, 4, 16])[:, None, None]
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "fp8", recipe=RECIPE)
    return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp8")


@nnx.jit
def step(model, optimizer, x):
    loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, x, opt_state=optimizer)
    optimizer.update(model, grads)
    return loss, grads


def state_of(model, optimizer):
    return nnx.as_pure(nnx.state(model)), nnx.as_pure(optimizer.opt_state)


@pytest.mark.thorough(0)
def test_a_stack_trains_and_goes_on_from_a_checkpoint(tmp_path):
    """Scales and histories are stacks, saved and restored as such; the next step has the bits of the uninterrupted."""
    model, optimizer = job(0)
    kernels = np.asarray(model.blocks.kernel[...])
    loss, grads = step(model, optimizer, X)
    amaxes = jaxmp.fp8.get_amaxes(nnx.to_pure_dict(nnx.state(grads)))
    assert {path: x.shape for path, x in amaxes.items()} == dict.fromkeys((GRAD, LHS, RHS), (DEPTH,))
    assert_exact(amaxes[RHS], np.max(np.abs(kernels), axis=(1, 2)))
    scales = jaxmp.fp8.get_scales(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[RHS].tolist()
    assert scales == sorted(set(scales), reverse=True) and len(scales) == DEPTH
    assert step(model, optimizer, X)[0] < loss
    other, fresh = job(1)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=nnx.state(model, nnx.Param), opt_state=nnx.as_pure(optimizer.opt_state))
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, fresh.tx, params=nnx.state(other, nnx.Param))
    nnx.update(other, restored.params)
    variables = jax.tree.leaves(fresh.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, value in zip(variables, jax.tree.leaves(restored.opt_state), strict=True):
        variable.set_value(value)
    assert_moved(state_of(other, fresh), state_of(model, optimizer))
    assert_same_program(step(model, optimizer, X)[0], step(other, fresh, X)[0])
    assert_same_program(state_of(other, fresh), state_of(model, optimizer))


@pytest.mark.thorough(0)
def test_calibrate_fills_each_layer_of_a_stack():
    """One pass: no scale is left, no gradient is lost."""
    model, optimizer = job(0)
    optimizer.calibrate(model, loss_fn, X)
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert float(metrics["fp8/unused"]) == float(metrics["fp8/lost_gradients"]) == 0
    for _, leaf in nnx.to_flat_state(nnx.state(model, Fp8Scale)):
        assert np.all(np.asarray(leaf.get_value()) != 0)


def test_a_stack_whose_axis_is_not_the_first_is_refused_with_its_path():
    model = stack(0, out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0}))
    with pytest.raises(ValueError, match=r"must have its axes first.*kernel of blocks with shape \(16, 3, 20\)"):
        jaxmp.nnx.to_fp8(model, RECIPE)
