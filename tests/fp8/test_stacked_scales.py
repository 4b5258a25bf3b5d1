"""Layers of nnx that `nnx.vmap` stacks for `nnx.scan`, in fp8: a job goes on from a checkpoint, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp import checkpoint
from jaxmp._src.base import tree_paths
from jaxmp.fp8 import DelayedScaling, is_scale
from jaxmp.nnx import Fp8Scale

SIDE, DEPTH = 16, 3
RECIPE = DelayedScaling(amax_history_len=3)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, SIDE, SIDE)).astype(np.float32))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, SIDE, decode=False, rngs=rngs)
        self.gate, self.up = (nnx.Linear(SIDE, 32, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(32, SIDE, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.down(nnx.silu(self.gate(x)) * self.up(x))


class Stack(nnx.Module):
    def __init__(self, seed):
        self.blocks = nnx.vmap(Block)(nnx.Rngs(seed).split(DEPTH))
        jaxmp.nnx.to_fp8(self, RECIPE)

    def __call__(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def job(seed, policy):
    model = Stack(seed)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, recipe=RECIPE)
    return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy=policy)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = jaxmp.nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - 1) ** 2))(
        model, x, opt_state=optimizer
    )
    optimizer.update(model, grads)
    return loss


def state_of(model, optimizer):
    return nnx.as_pure(nnx.state(model)), nnx.as_pure(optimizer.opt_state)


@pytest.mark.thorough(0)
def test_checkpoint_and_resume(tmp_path):
    """Scales and histories are stacks, saved and restored as such; the next step has the bits of the uninterrupted."""
    model, optimizer = job(0, "fp8")
    for i in range(2):
        step(model, optimizer, X * (i + 1))
    scales = {p: x for p, x in tree_paths.leaves_by_path(nnx.as_pure(nnx.state(model))).items() if is_scale(p)}
    assert {x.shape for x in scales.values()} == {(DEPTH,)} and len(scales) == 3 * 7
    assert all(np.all(np.asarray(x) != 0) for p, x in scales.items() if "rhs" in p)
    other, fresh = job(1, "fp8")
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=nnx.state(model, nnx.Param), opt_state=nnx.as_pure(optimizer.opt_state))
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, fresh.tx, params=nnx.state(other, nnx.Param))
    nnx.update(other, restored.params)
    variables = jax.tree.leaves(fresh.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, value in zip(variables, jax.tree.leaves(restored.opt_state), strict=True):
        variable.set_value(value)
    assert_moved(state_of(other, fresh), state_of(model, optimizer))
    losses = step(model, optimizer, X), step(other, fresh, X)
    assert_same_program(*losses)
    assert_same_program(state_of(other, fresh), state_of(model, optimizer))


@pytest.mark.thorough(0)
def test_calibrate_fills_each_layer_of_a_stack():
    """One pass: no scale is left, no gradient is lost, and the layers of the stack have amaxes of their own."""
    model, optimizer = job(0, "fp8")
    optimizer.calibrate(model, lambda model, x: jnp.mean((model(x) - 1) ** 2), X)
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert float(metrics["fp8/unused"]) == float(metrics["fp8/lost_gradients"]) == 0
    for _, leaf in nnx.to_flat_state(nnx.state(model, Fp8Scale)):
        assert np.all(np.asarray(leaf.get_value()) != 0)
    query = model.blocks.attention.query.dot_general.fp8_lhs_e4m3_log2_scale.get_value()
    key = model.blocks.attention.key.dot_general.fp8_lhs_e4m3_log2_scale.get_value()
    assert_exact(key, query)
