"""A GPT in flax.linen: embeddings that are tied to the logits, attention, an MLP, dropout; no dtype anywhere."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        h = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(x.shape[-1])(nn.gelu(h)))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32)
        x = embed(tokens) + nn.Embed(tokens.shape[1], 32)(jnp.arange(tokens.shape[1]))[None]
        x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def loss_fn(params, tokens, key):
    logits = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens, key):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens, key)
    return state.apply_gradients(grads=grads), loss


model = GPT()
tokens, key = np.random.default_rng(0).integers(0, 64, (2, 17)), jax.random.key(1)
params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": key}, tokens[:, :-1])["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
step, carry, batch = train_step, (state,), (tokens, key)
