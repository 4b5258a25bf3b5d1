"""A transformer in flax.nnx, with dropout, under `nnx.Optimizer`; no dtype anywhere."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.positions = nnx.Embed(64, 32, rngs=rngs), nnx.Embed(16, 32, rngs=rngs)
        self.block = Block(32, rngs)
        self.logits = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        return self.logits(self.block(x))


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return model, optimizer, loss


model = Transformer(nnx.Rngs(0))
tokens = np.random.default_rng(0).integers(0, 64, (2, 17))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
step, carry, batch = train_step, (model, optimizer), (tokens,)
