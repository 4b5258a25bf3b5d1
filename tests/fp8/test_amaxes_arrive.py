"""Each amax arrives: layers of every kind, under autocast, remat, scan, vmap and pairs of these, report all three."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.base import tree_paths
from jaxmp.fp8 import DelayedScaling, is_scale

RECIPE = DelayedScaling(amax_history_len=2)
SIDE = 32
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, SIDE, SIDE)).astype(np.float32))  # [batch, time, features]


class Layers(nn.Module):
    """Every layer of linen that can run in fp8, of the shape [batch, time, features] -> the same."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=SIDE)(x)  # its `out` sums over two axes
        return nn.Dense(SIDE)(nn.Einsum((SIDE, SIDE), "btd,df->btf")(nn.LayerNorm()(x)))


class Scanned(nn.Module):
    body: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda layers, x, _: (layers(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return scan(self.body(), x, None)[0]


class Vmapped(nn.Module):
    body: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        per_example = nn.vmap(self.body, variable_axes={"params": None}, split_rngs={"params": False})
        return per_example()(x[:, None])[:, 0]


class Wrapped(nn.Module):
    """The layers as they are, and in each pair of transformations, in one program."""

    @nn.compact
    def __call__(self, x):
        remat = nn.remat(Layers)
        ways = (
            Layers,
            functools.partial(Scanned, remat),
            functools.partial(Vmapped, remat),
            functools.partial(Vmapped, functools.partial(Scanned, Layers)),
        )
        for layers in ways:
            x = x + layers()(x)
        return x


class NnxLayers(nnx.Module):
    """The same layers of nnx."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, SIDE, SIDE, SIDE, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(SIDE, rngs=rngs)
        self.einsum = nnx.Einsum("btd,df->btf", (SIDE, SIDE), rngs=rngs)
        self.dense = nnx.Linear(SIDE, SIDE, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.einsum(self.norm(x + self.attention(x))))


def run(layers, x):
    return layers(x)


def per_example(layers, x):
    return layers(x[None])[0]


def twice(layers, x, f=run):
    return nnx.scan(f, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)(layers, x)


NNX_WAYS = (
    run,
    functools.partial(twice, f=nnx.remat(run)),
    nnx.vmap(nnx.remat(per_example), in_axes=(None, 0)),
    nnx.vmap(lambda layers, x: twice(layers, x[None])[0], in_axes=(None, 0)),
)


class NnxWrapped(nnx.Module):
    def __init__(self, rngs):
        self.parts = nnx.List([NnxLayers(rngs) for _ in NNX_WAYS])

    def __call__(self, x):
        for way, layers in zip(NNX_WAYS, self.parts, strict=True):
            x = x + way(layers, x)
        return x


def anything(path, layer):
    return True


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def missing(amaxes):
    """(number of scale leaves, paths of those without an amax)."""
    found = {path: x for path, x in tree_paths.leaves_by_path(amaxes).items() if is_scale(path)}
    return len(found), [path for path, x in found.items() if not np.all(np.asarray(x) > 0)]


OPT_STATE = jaxmp.unscale_and_skip(optax.identity()).init(())


@pytest.mark.thorough(0)
@pytest.mark.filterwarnings("ignore::jaxmp.fp8.FallbackWarning")
def test_of_linen_layers_under_autocast():
    model = Wrapped()
    with jaxmp.fp8.autocast(RECIPE, filter=anything):
        params = jax.jit(model.init)(jax.random.key(0), X)["params"]
        with jaxmp.autocast(dtype=jnp.bfloat16):
            loss = jaxmp.value_and_grad(lambda params, x: mean_square(model.apply({"params": params}, x)))
            _, grads = jax.jit(loss)(params, X, opt_state=OPT_STATE)
    assert missing(grads) == (4 * 6 * 3, [])


@pytest.mark.thorough(0)
@pytest.mark.filterwarnings("ignore::jaxmp.fp8.FallbackWarning")
def test_of_nnx_layers_under_autocast():

    @nnx.jit
    def new_model():
        model = NnxWrapped(nnx.Rngs(0))
        jaxmp.nnx.to_fp8(model, RECIPE, filter=anything)
        return model

    model = new_model()

    @nnx.jit
    def gradients(model, x):
        with jaxmp.autocast(dtype=jnp.bfloat16):
            return jaxmp.nnx.value_and_grad(lambda model, x: mean_square(model(x)))(model, x, opt_state=OPT_STATE)[1]

    assert missing(gradients(model, X)) == (4 * 6 * 3, [])
