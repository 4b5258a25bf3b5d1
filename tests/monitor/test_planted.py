"""`first_bad_op` on overflows planted in models of three frameworks: it names the layer, the operation and the line.

Each model is two blocks `x -> x + down(act(up(x)))`, written in float32 and run in float16 by the policy.
"""

import pathlib

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.monitor import first_bad_op

WIDTH = 32  # of all arrays: fewer programs to compile
X = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(WIDTH, name="up")(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenBlock(name="block_1")(LinenBlock(name="block_0")(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.block_0, self.block_1 = NnxBlock(rngs), NnxBlock(rngs)

    def __call__(self, x):
        return self.block_1(self.block_0(x))


class HaikuBlock(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(WIDTH, name="down")(jax.nn.relu(hk.Linear(WIDTH, name="up")(x)))


def linen_case():
    net = LinenNet()
    params = jax.jit(net.init)(jax.random.key(0), X)["params"]
    return params, lambda params, x: net.apply({"params": params}, x), lambda block, layer: (block, layer, "kernel")


def haiku_case():
    pure = hk.without_apply_rng(hk.transform(lambda x: HaikuBlock(name="block_1")(HaikuBlock(name="block_0")(x))))
    return jax.jit(pure.init)(jax.random.key(0), X), pure.apply, lambda block, layer: (f"{block}/{layer}", "w")


def nnx_case():
    """A module has the names of its layers where it is an argument."""
    _, params = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param)
    return params, lambda model, x: model(x), lambda block, layer: (block, layer, "kernel")


def model_of(framework, params):
    """What the loss takes: the params, for nnx the module."""
    return nnx.merge(nnx.graphdef(NnxNet(nnx.Rngs(0))), params) if framework == "nnx" else params


CASES = {"linen": linen_case, "nnx": nnx_case, "haiku": haiku_case}
PLANTED = {"linen": ("block_1", "up"), "nnx": ("block_0", "down"), "haiku": ("block_1", "down")}


def planted(params, path):
    """`params` with the largest weight at a path near the end of float16's range."""

    def plant(key_path, w):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in key_path]
        return w * (6e4 / jnp.max(jnp.abs(w))) if tuple(names[: len(path)]) == path else w

    result = jax.tree_util.tree_map_with_path(plant, params)
    assert sum(a is not b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(params), strict=True)) == 1
    return result


def half_of(params):
    return jaxmp.get_policy("fp16").cast_to_param(params)


def state_of(params, loss_scale=2.0**8):
    return jax.jit(jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=loss_scale).init)(params)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("framework", CASES)
def test_a_layer_whose_product_is_too_large(framework):
    """Under the policy and by hand: the matmul, its layer, how far it overflows; by hand the line, too."""
    params, apply, path_of = CASES[framework]()
    block, layer = PLANTED[framework]
    params = planted(params, path_of(block, layer))

    def loss_fn(params, x):
        return jnp.mean(apply(params, x).astype(jnp.float32) ** 2)

    opt_state = state_of(params)
    ours, plain = (jaxmp.nnx, nnx) if framework == "nnx" else (jaxmp, jax)
    model = model_of(framework, half_of(params))
    under_policy = first_bad_op(ours.value_and_grad(loss_fn, policy="fp16"), model, X, opt_state=opt_state)
    by_hand = first_bad_op(plain.grad(loss_fn), model, X.astype(np.float16))
    for bad in (under_policy, by_hand):
        assert (bad.primitive, bad.module) == ("dot_general", f"{block}/{layer}")
        assert (bad.backward, bad.dtype) == (False, "float16")
        assert bad.float32_amax > bad.limit == 65504 and all(x.finite for x in bad.operands)
        assert max(x.amax for x in bad.operands) == pytest.approx(6e4, rel=1e-3)
    assert by_hand.source.startswith(__file__) and by_hand.code in pathlib.Path(__file__).read_text()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_loss_scale_that_is_too_large(framework):
    params, apply, _ = CASES[framework]()

    def loss_fn(params, x):
        return jnp.mean(apply(params, x) ** 2)

    step = (jaxmp.nnx if framework == "nnx" else jaxmp).value_and_grad(loss_fn, policy="fp16")
    model = model_of(framework, half_of(params))
    bad = first_bad_op(step, model, X, opt_state=state_of(params, 2.0**30))
    assert bad.backward and bad.dtype == "float16" and bad.float32_amax > bad.limit
    assert first_bad_op(step, model, X, opt_state=state_of(params, 1.0)) is None


@pytest.mark.thorough(1)
@pytest.mark.parametrize("wrap", ["jit", "vmap", "accumulate"])
def test_the_layer_is_named_under(wrap):
    params, apply, path_of = linen_case()
    params = planted(params, path_of("block_1", "up"))
    opt_state = state_of(params)

    def loss_fn(params, x):
        return jnp.mean(apply(params, x).astype(jnp.float32) ** 2)

    grad_fn = jaxmp.value_and_grad(loss_fn, policy="fp16", accumulate=4 if wrap == "accumulate" else 1)
    step, x = (lambda params, x: grad_fn(params, x, opt_state=opt_state)), X
    if wrap == "vmap":
        step, x = jax.vmap(step, in_axes=(None, 0)), X[None]
    elif wrap == "jit":
        step = jax.jit(step)
    bad = first_bad_op(step, half_of(params), x)
    assert (bad.primitive, bad.module, bad.backward) == ("dot_general", "block_1/up", False)
