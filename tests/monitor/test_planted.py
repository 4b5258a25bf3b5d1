"""`first_bad_op` on overflows planted in models of four frameworks: it names the layer, the operation and the line.

Each model is two blocks `x -> x + down(act(up(x)))` and a head, written in float32 and run in float16 by the policy.
"""

import pathlib

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp.monitor import first_bad_op

WIDTH, ROWS = 32, 16
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(2 * WIDTH, name="up")(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = LinenBlock(name=f"block_{i}")(x)
        return nn.Dense(WIDTH, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.block_0, self.block_1 = NnxBlock(rngs), NnxBlock(rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block_1(self.block_0(x)))


class HaikuBlock(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(WIDTH, name="down")(jax.nn.relu(hk.Linear(2 * WIDTH, name="up")(x)))


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=key), eqx.nn.Linear(2 * WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class EquinoxNet(eqx.Module):
    block_0: EquinoxBlock
    block_1: EquinoxBlock
    head: eqx.nn.Linear

    def __call__(self, x):
        with jax.named_scope("block_0"):
            x = self.block_0(x)
        with jax.named_scope("block_1"):
            x = self.block_1(x)
        with jax.named_scope("head"):
            return self.head(x)


def linen_case():
    net = LinenNet()
    params = jax.jit(net.init)(jax.random.key(0), X)["params"]
    return params, lambda params, x: net.apply({"params": params}, x), lambda block, layer: (block, layer, "kernel")


def haiku_case():
    def net(x):
        return hk.Linear(WIDTH, name="head")(HaikuBlock(name="block_1")(HaikuBlock(name="block_0")(x)))

    pure = hk.without_apply_rng(hk.transform(net))
    params = jax.jit(pure.init)(jax.random.key(0), X)
    return params, pure.apply, lambda block, layer: ("/".join(filter(None, (block, layer))), None, "w")


def equinox_case():
    key = jax.random.key(0)
    net = EquinoxNet(EquinoxBlock(key), EquinoxBlock(key), eqx.nn.Linear(WIDTH, WIDTH, key=key))
    params, static = eqx.partition(net, eqx.is_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x), lambda block, layer: (block, layer, "weight")


def nnx_case():
    """A module has the names of its layers where it is an argument."""
    _, params = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param)
    return params, lambda model, x: model(x), lambda block, layer: (block, layer, "kernel")


def model_of(framework, params):
    """What the loss takes: the params, for nnx the module."""
    return nnx.merge(nnx.graphdef(NnxNet(nnx.Rngs(0))), params) if framework == "nnx" else params


CASES = {"linen": linen_case, "nnx": nnx_case, "haiku": haiku_case, "equinox": equinox_case}
PLACES = {"up": ("block_1", "up"), "down": ("block_0", "down"), "head": ("head", None)}


def planted(params, path):
    """`params` with the largest weight at a path near the end of float16's range."""
    wanted = [key for key in path if key]

    def plant(key_path, w):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in key_path]
        return w * (6e4 / jnp.max(jnp.abs(w))) if names[: len(wanted)] == wanted else w

    found = jax.tree_util.tree_map_with_path(plant, params)
    assert sum(a is not b for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)) == 1
    return found


def half_of(params, policy="fp16"):
    return jaxmp.get_policy(policy).cast_to_param(params)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("framework", CASES)
def test_a_layer_whose_product_is_too_large(framework, place):
    """Under the policy and by hand: the matmul, its layer, how far it overflows; by hand the line, too."""
    params, apply, path_of = CASES[framework]()
    block, layer = PLACES[place]
    params = planted(params, path_of(block, layer))

    def loss_fn(params, x):
        return jnp.mean(apply(params, x).astype(jnp.float32) ** 2)

    opt_state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16").init(params)
    ours, plain = (jaxmp.nnx, nnx) if framework == "nnx" else (jaxmp, jax)
    model = model_of(framework, half_of(params))
    under_policy = first_bad_op(ours.value_and_grad(loss_fn, policy="fp16"), model, X, opt_state=opt_state)
    by_hand = first_bad_op(plain.grad(loss_fn), model, X.astype(np.float16))
    named = f"{block}/eqx.nn.Linear" if framework == "equinox" else "/".join(filter(None, (block, layer)))
    for bad in (under_policy, by_hand):
        assert (bad.primitive, bad.module, bad.backward, bad.dtype) == ("dot_general", named, False, "float16")
        assert bad.float32_amax > bad.limit == 65504 and all(x.finite for x in bad.operands)
        assert max(x.amax for x in bad.operands) == pytest.approx(6e4, rel=1e-3)
    assert by_hand.source.startswith(__file__) and by_hand.code in pathlib.Path(__file__).read_text()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("framework", CASES)
def test_a_loss_scale_that_is_too_large(framework):
    params, apply, _ = CASES[framework]()

    def loss_fn(params, x):
        return jnp.mean(apply(params, x) ** 2)

    step = (jaxmp.nnx if framework == "nnx" else jaxmp).value_and_grad(loss_fn, policy="fp16")
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=jaxmp.StaticLossScale(2.0**30))
    opt_state = tx.init(params)
    model = model_of(framework, half_of(params))
    bad = first_bad_op(step, model, X, opt_state=opt_state)
    assert bad.backward and bad.dtype == "float16" and bad.float32_amax > bad.limit
    before = jaxmp.checkpoint.set_loss_scale(opt_state, 1.0)
    assert first_bad_op(step, model, X, opt_state=before) is None


@pytest.mark.thorough(1)
@pytest.mark.parametrize("wrap", ["jit", "checkpoint", "vmap", "accumulate", "shard_map"])
def test_the_layer_is_named_under(wrap):
    params, apply, path_of = linen_case()
    params = planted(params, path_of("block_1", "up"))
    opt_state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16").init(params)

    def loss_fn(params, x):
        return jnp.mean(apply(params, x).astype(jnp.float32) ** 2)

    grad_fn = jaxmp.value_and_grad(loss_fn, policy="fp16", accumulate=4 if wrap == "accumulate" else 1)
    step, x = (lambda params, x: grad_fn(params, x, opt_state=opt_state)), X
    if wrap == "shard_map":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P()), "check_vma": False}
        bad = first_bad_op(jax.shard_map(step, mesh=mesh, **specs), half_of(params), x)
        assert bad.primitive == "shard_map"
        return
    if wrap == "vmap":
        step, x = jax.vmap(step, in_axes=(None, 0)), X[None]
    elif wrap != "accumulate":
        step = getattr(jax, wrap)(step)
    bad = first_bad_op(step, half_of(params), x)
    assert (bad.primitive, bad.module, bad.backward) == ("dot_general", "block_1/up", False)
