"""Models as others write them, with float32 handed to every layer: under a policy their matmuls run in 16 bits.

`examples/third_party` has such models of Hugging Face, haiku, equinox and flax themselves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.linen.attention import dot_product_attention_weights

import jaxmp
from matmul_dtypes import matmul_flops

TOKENS = np.random.default_rng(0).integers(0, 32, (4, 16))
IMAGES = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)
SCALE = 1024.0
BITS = {"bf16": 2**-8, "fp16": 2**-11}  # half an ulp of 1
FLIPS = {"flax's ResNet": 0.05}  # a value that rounding moves over 0 has another derivative of relu


class Conv1D(nn.Module):
    """Hugging Face's layer of GPT-2, which is none of flax's."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, inputs):
        inputs = jnp.asarray(inputs, self.dtype)
        kernel = self.param("kernel", nn.initializers.normal(0.1), (self.features, inputs.shape[-1]))
        kernel = jnp.asarray(kernel.transpose(), self.dtype)
        y = jax.lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))
        bias = jnp.asarray(self.param("bias", nn.initializers.zeros, (self.features,)), self.dtype)
        return y + bias[None, None]


class Attention(nn.Module):
    """As `FlaxGPT2Attention`: a mask in its dtype, and flax's function for the weights."""

    heads: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.c_attn, self.c_proj = Conv1D(3 * 32, dtype=self.dtype), Conv1D(32, dtype=self.dtype)

    def __call__(self, x):
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.c_attn(x), 3, axis=2))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool), dtype=bool)
        lowest = jnp.full(mask.shape, jnp.finfo(self.dtype).min).astype(self.dtype)
        bias = jax.lax.select(mask, jnp.full(mask.shape, 0.0).astype(self.dtype), lowest)
        weights = dot_product_attention_weights(q, k, bias=bias, dtype=self.dtype)
        return self.c_proj(jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape))


class Block(nn.Module):
    heads: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.ln_1 = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.attn = Attention(self.heads, dtype=self.dtype)
        self.ln_2 = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.c_fc, self.c_out = Conv1D(64, dtype=self.dtype), Conv1D(32, dtype=self.dtype)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_out(nn.gelu(self.c_fc(self.ln_2(x))))


class HuggingFace(nn.Module):
    """A tree of modules, each with the default `dtype=jnp.float32` of its parent; the head is tied to the embedding."""

    dtype: jnp.dtype = jnp.float32

    def setup(self):
        embed = functools.partial(nn.Embed, features=32, dtype=self.dtype)
        self.wte, self.wpe = embed(32), embed(16)
        self.h = [Block(4, dtype=self.dtype, name=str(i)) for i in range(1)]
        self.ln_f = nn.LayerNorm(dtype=self.dtype)
        self.head = nn.Dense(32, use_bias=False, dtype=self.dtype)

    def __call__(self, ids):
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1])[None])
        for block in self.h:
            x = block(x)
        table = self.variables["params"]["wte"]["embedding"].T
        return self.head.apply({"params": {"kernel": table}}, self.ln_f(x))


class ResNetBlock(nn.Module):
    """As in flax's ImageNet example."""

    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.ones_init())(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
            axis_name=None,
        )
        x = nn.relu(norm(name="bn_init")(conv(8, (3, 3), name="conv_init")(x)))
        for filters, strides in ((8, (1, 1)), (16, (2, 2))):
            x = ResNetBlock(filters, conv, norm, strides)(x)
        return jnp.asarray(nn.Dense(10, dtype=self.dtype)(jnp.mean(x, axis=(1, 2))), self.dtype)


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        self.norm_1, self.norm_2 = (nnx.RMSNorm(32, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, dtype=dtype, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, dtype=dtype, rngs=rngs), nnx.Linear(64, 32, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.silu(self.up(self.norm_2(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, 32, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(dtype, rngs) for _ in range(1)])
        self.norm = nnx.RMSNorm(32, dtype=dtype, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def filled(path, leaf):
    """A param of the usual size, without a program that makes it."""
    name = jax.tree_util.keystr(path[-1:], simple=True)
    if name in ("scale", "var"):
        return jnp.ones(leaf.shape)
    if name in ("bias", "mean") or "fp8_" in name:
        return jnp.zeros(leaf.shape)
    numbers = np.random.default_rng(leaf.size).normal(size=leaf.shape)
    return jnp.asarray(numbers / np.sqrt(np.prod(leaf.shape[:-1])), jnp.float32)


def of_linen(model, x, labels, policy):
    """(params in float32, a function from them to loss and gradients) of a linen model under a policy."""
    with jaxmp.autocast(policy):
        variables = jax.tree_util.tree_map_with_path(filled, jax.eval_shape(model.init, jax.random.key(0), x))
    rest = {name: variables[name] for name in variables if name != "params"}
    state = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=SCALE).init(variables["params"])

    def loss(params, x):
        return cross_entropy(model.apply({"params": params} | rest, x, mutable=list(rest))[0], labels)

    def step(params):
        low = policy.cast_to_param(params)
        return jaxmp.value_and_grad(loss, policy=policy)(low, x, opt_state=state)

    return variables["params"], step


def of_nnx(policy):
    model = NnxTransformer()
    if policy.recipe is not None:
        jaxmp.nnx.to_fp8(model, policy.recipe)
    graphdef, params = nnx.split(model)
    state = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=SCALE).init(nnx.as_pure(params))

    def step(params):
        model = nnx.merge(graphdef, params)
        jaxmp.nnx.cast_to_param(model, policy)
        loss = lambda model: cross_entropy(model(TOKENS), TOKENS)  # noqa: E731
        value, grads = jaxmp.nnx.value_and_grad(loss, policy=policy)(model, opt_state=state)
        return value, nnx.as_pure(grads)

    return nnx.as_pure(params), step


MODELS = {
    "Hugging Face": functools.partial(of_linen, HuggingFace(), TOKENS, TOKENS),
    "flax's ResNet": functools.partial(of_linen, ResNet(), IMAGES, np.arange(4)),
    "an nnx transformer": of_nnx,
}


@functools.cache
def gradients(name: str, policy: str) -> tuple[Any, Any]:
    """Loss and gradients, unscaled, of one model with the same params in every policy."""
    params, step = MODELS[name](jaxmp.get_policy(policy, keep_fp32=()))
    loss, grads = jax.jit(step)(params)
    return loss, jax.tree.map(lambda g: g.astype(jnp.float32) / SCALE, grads)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("name", "policy", "in_fp8"),
    [
        *((name, policy, 0) for name in MODELS for policy in ("bf16", "fp16")),
        ("flax's ResNet", "fp8", 0.02),  # its projection, the only convolution of one pixel
        ("an nnx transformer", "fp8", 0.7),  # all but its embedding, which is its head, and attention's products
    ],
)
def test_its_matmuls_run_in_16_bits(name, policy, in_fp8):
    params, step = MODELS[name](jaxmp.get_policy(policy, keep_fp32=()))
    flops = matmul_flops(step, params)
    total = sum(flops.values())
    assert sum(count for dtypes, count in flops.items() if "32" in dtypes) <= 0.05 * total
    assert sum(count for dtypes, count in flops.items() if "float8" in dtypes) >= in_fp8 * total


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_its_gradients_are_those_of_float32_within_rounding(name, policy):
    expected_loss, expected = gradients(name, "fp32")
    loss, grads = gradients(name, policy)
    np.testing.assert_allclose(loss, expected_loss, rtol=8 * BITS[policy])
    flat, wanted = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (grads, expected))
    bound = 32 * BITS[policy] + FLIPS.get(name, 0)
    assert np.linalg.norm(flat - wanted) < bound * np.linalg.norm(wanted)
