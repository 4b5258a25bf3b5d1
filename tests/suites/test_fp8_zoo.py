"""A zoo of models in fp8, of linen and nnx: which layers run in fp8, that their GEMMs do, and that every amax arrives.

Stacks of layers are in test_amaxes_arrive.py and test_fp8_layers.py, convolutions in the latter.
Sides are odd on purpose. A warning is an error here, so nothing falls back in silence or aloud.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.base import tree_paths
from jaxmp._src.programs import jaxprs
from jaxmp.fp8 import DelayedScaling, is_scale

WIDTH, HEADS, TOKENS, WORDS, CLASSES = 24, 2, 5, 11, 10
RECIPE = DelayedScaling(amax_history_len=4)
OPT_STATE = jaxmp.unscale_and_skip(optax.identity()).init(())
MATMULS = jaxprs.MATMULS | jaxprs.RAGGED_MATMULS
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 8, 8, 3)).astype(np.float32)
TEXT = RNG.integers(0, WORDS, (3, TOKENS))
SERIES = RNG.normal(size=(3, TOKENS, WIDTH)).astype(np.float32)


class Entry(NamedTuple):
    """A model, its input, the layers of it that run in fp8, and the number of fp8 GEMMs of a gradient."""

    model: object
    x: object
    layers: list[str]
    gemms: int


# linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(h)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), (4, 4), name="patches")(images)
        x = Block(name="block")(x.reshape(x.shape[0], -1, WIDTH))
        return nn.Dense(CLASSES, name="head")(jnp.mean(x, axis=1))


class EinsumMoe(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH, name="embed")(words)
        gates = nn.softmax(nn.Dense(3, name="router")(x))
        h = nn.gelu(nn.Einsum((3, WIDTH, 20), "btd,edf->btef", use_bias=False, name="up")(x))
        y = nn.Einsum((3, 20, WIDTH), "btef,efd->bted", use_bias=False, name="down")(h)
        return nn.Dense(WORDS, name="head")(jnp.einsum("bted,bte->btd", y, gates))


def by_expert(x, router):
    """Rows sorted by their expert, how many each expert has, and the order in which they were taken."""
    expert = jnp.argmax(router, axis=-1)
    order = jnp.argsort(expert)
    return x[order], jnp.bincount(expert, length=router.shape[-1]), order


class Experts(nn.Module):
    """A product for each expert."""

    width: int

    @nn.compact
    def __call__(self, rows, sizes):
        kernel = self.param("kernel", nn.initializers.lecun_normal(batch_axis=0), (3, rows.shape[-1], self.width))
        return jaxmp.linen.Fp8RaggedDot(RECIPE)(rows, kernel, sizes)


class RaggedMoe(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH, name="embed")(words).reshape(-1, WIDTH)
        gates = nn.softmax(nn.Dense(3, name="router")(x))
        rows, sizes, order = by_expert(x, gates)
        y = Experts(WIDTH, name="down")(nn.gelu(Experts(20, name="up")(rows, sizes)), sizes)
        return nn.Dense(WORDS, name="head")(x.at[order].add(y) * jnp.max(gates, axis=-1, keepdims=True))


class Recurrent(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH, name="embed")(words)
        return nn.Dense(WORDS, name="head")(nn.RNN(self.cell(20, name="cell"))(x))


class LoraEinsum(nn.Einsum):
    rank: int = 2

    @nn.compact
    def __call__(self, inputs):
        a = self.param("a", nn.initializers.normal(0.1), (self.shape[0], self.rank))
        b = self.param("b", nn.initializers.normal(0.1), (self.rank, *self.shape[1:]))
        return super().__call__(inputs) + jnp.tensordot(inputs @ a, b, 1)


class LoraDense(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        a = self.param("a", nn.initializers.normal(0.1), (inputs.shape[-1], 2))
        b = self.param("b", nn.initializers.normal(0.1), (2, self.features))
        return super().__call__(inputs) + inputs @ a @ b


class Lora(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH, name="embed")(words)
        x = LoraEinsum((WIDTH, HEADS, 7), "btd,dhk->bthk", name="heads")(x)
        return nn.Dense(WORDS, name="head")(LoraDense(WIDTH, name="merge")(x.reshape(*x.shape[:2], -1)))


class OfOneExample(nn.Module):
    """Features [d] to classes [c]; the loss maps it over the batch."""

    @nn.compact
    def __call__(self, x):
        for width in (20, 30, 20):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


def of_block(name):
    return [f"{name}/attention/{part}" for part in ("key", "out", "query", "value")] + [f"{name}/down", f"{name}/up"]


GATES = [side + gate for side in "hi" for gate in "fgio"]
LINEN = {
    "ViT": Entry(ViT(), IMAGES, of_block("block"), 18),
    "einsum MoE": Entry(EinsumMoe(), TEXT, ["down", "router", "up"], 9),
    "ragged MoE": Entry(RaggedMoe(), TEXT, ["down", "router", "up"], 9),
    "LSTM": Entry(Recurrent(nn.LSTMCell), TEXT, [f"cell/{gate}" for gate in GATES], 24),
    "LSTM optimized": Entry(Recurrent(nn.OptimizedLSTMCell), TEXT, [f"cell/{gate}" for gate in GATES], 24),
    "LoRA": Entry(Lora(), TEXT, ["heads", "merge"], 6),
    "vmapped": Entry(OfOneExample(), SERIES[:, 0], ["Dense_1", "Dense_2"], 6),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    model, x, expected, gemms = LINEN[name]
    one = x[0] if name == "vmapped" else x
    with jaxmp.fp8.autocast(RECIPE):
        params = jax.jit(model.init)(jax.random.key(0), one)["params"]
    assert layers_with_scales(params) == sorted(expected)

    def loss(params, x):
        apply = lambda x: model.apply({"params": params}, x)  # noqa: E731
        with jaxmp.fp8.autocast(RECIPE):
            y = jax.vmap(apply)(x) if name == "vmapped" else apply(x)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    check(jaxmp.value_and_grad(loss), params, x, gemms)


# nnx


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxGpt(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = NnxMlp(rngs)

    def __call__(self, words):
        x = self.embed(words)
        return self.embed.attend(self.mlp(x + self.attention(x)))


class NnxRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, 20, rngs=rngs))

    def __call__(self, words):
        return self.rnn(self.embed(words))


class NnxExperts(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), (3, WIDTH, 20)))
        self.product = jaxmp.nnx.Fp8RaggedDot(RECIPE)
        self.inner = nnx.Linear(20, 20, rngs=rngs)
        self.head = nnx.Linear(20, WORDS, rngs=rngs)

    def __call__(self, words):
        x = self.embed(words).reshape(-1, WIDTH)
        with jaxmp.fp8.autocast(enabled=False):
            rows, sizes, _ = by_expert(x, self.router(x))
        return self.head(self.inner(self.product(rows, self.kernel[...], sizes)))


NNX = {
    "GPT tied": Entry(
        NnxGpt,
        TEXT,
        [f"attention/{part}" for part in ("key", "out", "query", "value")] + ["mlp/up"],  # down was set last
        15,
    ),
    "GRU": Entry(NnxRecurrent, TEXT, ["rnn/cell/dense_h", "rnn/cell/dense_i"], 6),
    "ragged MoE": Entry(NnxExperts, TEXT, ["inner"], 6),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    make, x, expected, gemms = NNX[name]
    model = make(nnx.Rngs(0))
    chosen = (lambda path, layer: path == "inner") if name == "ragged MoE" else None
    assert sorted(jaxmp.nnx.to_fp8(model, RECIPE, filter=chosen)) == sorted(expected)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        y = nnx.merge(graph, params, rest, copy=True)(x)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    check(jaxmp.value_and_grad(loss), nnx.to_pure_dict(params), x, gemms)


# What is checked


def layers_with_scales(params):
    paths = [tree_paths.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return sorted({path.rsplit("/", 2)[0] for path in paths if is_scale(path)})


def check(value_and_grad, params, x, gemms):
    traced = jax.jit(lambda params, x: value_and_grad(params, x, opt_state=OPT_STATE)[1]).trace(params, x)
    assert fp8_gemms(traced.jaxpr.jaxpr) == gemms
    grads = traced.lower().compile()(params, x)
    for path, amax in jaxmp.fp8.get_amaxes(grads).items():
        assert np.all(np.asarray(amax) > 0), (path, amax)


def fp8_gemms(jaxpr):
    """The number of matmuls of two fp8 operands in a jaxpr and in the functions inside it."""
    count = 0
    for eqn in jaxpr.eqns:
        dtypes = [v.aval.dtype.name for v in eqn.invars[:2] if hasattr(v.aval, "dtype")]
        # A ragged product is one by platform: a kernel, or a product of the same fp8 numbers in bfloat16.
        is_product = eqn.primitive.name in MATMULS | {jaxprs.BY_PLATFORM}
        is_gemm = is_product and [name[:6] for name in dtypes] == ["float8"] * 2
        count += 1 if is_gemm else sum(fp8_gemms(inner) for inner, *_ in jaxprs.functions_of(eqn))
    return count
