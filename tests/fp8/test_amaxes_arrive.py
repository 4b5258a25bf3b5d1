"""Each amax arrives: layers of every kind, under autocast and pairs of transformations, report all three."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.fp8 import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=2)
SIDE, LAYERS, WAYS = 32, 3, 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, SIDE, SIDE)).astype(np.float32))  # [batch, time, features]
OPT_STATE = jaxmp.unscale_and_skip(optax.identity()).init(())
pytestmark = [pytest.mark.thorough(0), pytest.mark.filterwarnings("ignore::jaxmp.fp8.FallbackWarning")]


class Layers(nn.Module):
    """Layers of linen, of the shape [batch, time, features] -> the same."""

    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((SIDE, 2, SIDE // 2), "btd,dhk->bthk")(nn.LayerNorm()(x))
        return nn.Dense(SIDE)(nn.DenseGeneral(SIDE, axis=(-2, -1))(x))


def scanned(layers, x):
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    return nn.scan(lambda layers, x, _: (layers(x), None), **axes)(layers(), x, None)[0]


def per_example(layers, x):
    return nn.vmap(layers, variable_axes={"params": None}, split_rngs={"params": False})()(x[:, None])[:, 0]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return scanned(Layers, x)


class Wrapped(nn.Module):
    """The layers in each pair of transformations, in one program."""

    @nn.compact
    def __call__(self, x):
        remat = nn.remat(Layers)
        return per_example(Scanned, per_example(remat, scanned(remat, x)))


class NnxLayers(nnx.Module):
    """The same layers of nnx."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(SIDE, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dhk->bthk", (SIDE, 2, SIDE // 2), rngs=rngs)
        self.general = nnx.LinearGeneral((2, SIDE // 2), SIDE, axis=(-2, -1), rngs=rngs)
        self.dense = nnx.Linear(SIDE, SIDE, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.general(self.einsum(self.norm(x))))


def run(layers, x):
    return layers(x)


def twice(layers, x, f=run):
    return nnx.scan(f, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)(layers, x)


NNX_WAYS = (
    functools.partial(twice, f=nnx.remat(run)),
    nnx.vmap(nnx.remat(lambda layers, x: layers(x[None])[0]), in_axes=(None, 0)),
    nnx.vmap(lambda layers, x: twice(layers, x[None])[0], in_axes=(None, 0)),
)


class NnxWrapped(nnx.Module):
    def __init__(self, rngs):
        self.parts = nnx.List([NnxLayers(rngs) for _ in NNX_WAYS])

    def __call__(self, x):
        for way, layers in zip(NNX_WAYS, self.parts, strict=True):
            x = way(layers, x)
        return x


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def assert_all_arrive(grads):
    amaxes = jaxmp.fp8.get_amaxes(grads)
    assert len(amaxes) == 3 * LAYERS * WAYS
    assert not [path for path, x in amaxes.items() if not np.all(np.asarray(x) > 0)]


def test_of_linen_layers_under_autocast():
    model = Wrapped()
    with jaxmp.fp8.autocast(RECIPE, filter=lambda path, layer: True):
        params = jax.jit(model.init)(jax.random.key(0), X)["params"]
        with jaxmp.autocast(dtype=jnp.bfloat16):
            loss = jaxmp.value_and_grad(lambda params, x: mean_square(model.apply({"params": params}, x)))
            _, grads = jax.jit(loss)(params, X, opt_state=OPT_STATE)
    assert_all_arrive(grads)


def test_of_nnx_layers_under_autocast():
    @nnx.jit
    def new_model():
        model = NnxWrapped(nnx.Rngs(0))
        jaxmp.nnx.to_fp8(model, RECIPE, filter=lambda path, layer: True)
        return model

    @nnx.jit
    def gradients(model, x):
        with jaxmp.autocast(dtype=jnp.bfloat16):
            return jaxmp.nnx.value_and_grad(lambda model, x: mean_square(model(x)))(model, x, opt_state=OPT_STATE)[1]

    assert_all_arrive(nnx.to_pure_dict(nnx.state(gradients(new_model(), X))))
