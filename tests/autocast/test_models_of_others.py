"""Models as others write them, with float32 handed to every layer: under a policy their matmuls run in 16 bits.

`examples/third_party` has such models of Hugging Face, haiku, equinox and flax themselves.
"""

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
from policy_steps import linen_step, nnx_step

TOKENS = np.random.default_rng(0).integers(0, 32, (4, 16))


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


class Block(nn.Module):
    """As `FlaxGPT2Block`: a mask in its dtype, and flax's function for the weights of attention."""

    heads: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.ln_1, self.ln_2 = (nn.LayerNorm(epsilon=1e-5, dtype=self.dtype) for _ in range(2))
        self.c_attn, self.c_proj = Conv1D(3 * 32, dtype=self.dtype), Conv1D(32, dtype=self.dtype)
        self.c_fc, self.c_out = Conv1D(64, dtype=self.dtype), Conv1D(32, dtype=self.dtype)

    def attend(self, x):
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.c_attn(x), 3, axis=2))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool), dtype=bool)
        lowest = jnp.full(mask.shape, jnp.finfo(self.dtype).min).astype(self.dtype)
        bias = jax.lax.select(mask, jnp.full(mask.shape, 0.0).astype(self.dtype), lowest)
        weights = dot_product_attention_weights(q, k, bias=bias, dtype=self.dtype)
        return self.c_proj(jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape))

    def __call__(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.c_out(nn.gelu(self.c_fc(self.ln_2(x))))


class HuggingFace(nn.Module):
    """A tree of modules, each with the default `dtype=jnp.float32` of its parent; the head is tied to the embedding."""

    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.wte, self.wpe = (nn.Embed(n, features=32, dtype=self.dtype) for n in (32, 16))
        self.h = [Block(4, dtype=self.dtype, name="0")]
        self.ln_f = nn.LayerNorm(dtype=self.dtype)
        self.head = nn.Dense(32, use_bias=False, dtype=self.dtype)

    def __call__(self, ids):
        x = self.h[0](self.wte(ids) + self.wpe(jnp.arange(ids.shape[1])[None]))
        table = self.variables["params"]["wte"]["embedding"].T
        return self.head.apply({"params": {"kernel": table}}, self.ln_f(x))


class NnxTransformer(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, 32, dtype=dtype, rngs=rngs)
        self.norm_1, self.norm_2, self.norm = (nnx.RMSNorm(32, dtype=dtype, rngs=rngs) for _ in range(3))
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, dtype=dtype, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, dtype=dtype, rngs=rngs), nnx.Linear(64, 32, dtype=dtype, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        x = x + self.down(nnx.silu(self.up(self.norm_2(x))))
        return self.embed.attend(self.norm(x))


MODELS = {
    "Hugging Face": (linen_step, HuggingFace),
    "an nnx transformer": (nnx_step, NnxTransformer),
}


def step_of(name: str, policy: str) -> Any:
    """Params, the optimizer's state, and a function from params to loss and gradients."""
    make_step, model = MODELS[name]
    policy = jaxmp.get_policy(policy, keep_fp32=())
    cross_entropy = lambda y: optax.softmax_cross_entropy_with_integer_labels(y, TOKENS).mean()  # noqa: E731
    return make_step(model(), policy, cross_entropy, TOKENS)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("name", "policy", "in_fp8"),
    [
        ("Hugging Face", "bf16", 0),
        ("an nnx transformer", "fp16", 0),
        ("an nnx transformer", "fp8", 0.6),  # without its embedding, and `down`, its last attribute
    ],
)
def test_its_matmuls_run_in_16_bits(name, policy, in_fp8):
    params, _, step = step_of(name, policy)
    flops = matmul_flops(step, params)
    total = sum(flops.values())
    assert sum(count for dtypes, count in flops.items() if "32" in dtypes) <= 0.05 * total
    assert sum(count for dtypes, count in flops.items() if "float8" in dtypes) >= in_fp8 * total
