"""The linen models of tests/autocast_models.py cast by hand, as a careful user of fp16 does it, without autocast.

Dense, Conv and Einsum layers compute in `HALF` (`dtype=`), norms, softmax and the loss in float32. Params have the same
names and shapes, so one tree serves both.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from autocast_models import EXPERTS, FAR_BELOW, HEADS, LENGTH, VOCABULARY, WIDTH, causal

HALF, F32 = jnp.float16, jnp.float32
dense = functools.partial(nn.Dense, dtype=HALF)
layer_norm = functools.partial(nn.LayerNorm, dtype=F32)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=F32)
        x = nn.relu(norm(name="bn1")(nn.Conv(16, (3, 3), dtype=HALF, name="conv1")(x).astype(F32)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(norm(name="bn2")(nn.Conv(32, (3, 3), dtype=HALF, name="conv2")(x).astype(F32)))
        return dense(10, name="head")(x.mean((1, 2))).astype(F32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        rows, length, width = x.shape
        qkv = dense(3 * width, name="qkv")(layer_norm(name="norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(rows, length, 3, HEADS, width // HEADS), 2, 0)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (width // HEADS) ** -0.5
        weights = nn.softmax(jnp.where(causal(length), scores.astype(F32), FAR_BELOW)).astype(HALF)
        y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        x = x + dense(width, name="proj")(y)
        y = dense(4 * width, name="up")(layer_norm(name="norm2")(x))
        return x + dense(width, name="down")(nn.gelu(y))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="bytes")(tokens)
        x = x + nn.Embed(LENGTH, WIDTH, name="positions")(jnp.arange(LENGTH))[None]
        x = Block(name="block0")(x)
        return dense(VOCABULARY, name="head")(layer_norm(name="norm")(x)).astype(F32)


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        h, c = carry  # float32
        i, f, g, o = jnp.split(dense(4 * WIDTH, name="gates")(jnp.concatenate([x, h], -1)), 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
        return (nn.sigmoid(o) * nn.tanh(c), c), None


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
        zeros = jnp.zeros((len(x), WIDTH))
        (h, _), _ = scanned(name="cell")((zeros, zeros), x)
        return dense(10, name="head")(h).astype(F32)


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(dense(WIDTH, name="embed")(x))
        probs = nn.softmax(dense(EXPERTS, use_bias=False, name="router")(x).astype(F32))
        gates, chosen = lax.top_k(probs, 2)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("w_up", init, (EXPERTS, WIDTH, 2 * WIDTH)).astype(HALF)
        down = self.param("w_down", init, (EXPERTS, 2 * WIDTH, WIDTH)).astype(HALF)
        one_hot = jax.nn.one_hot(chosen, EXPERTS)  # [N, 2, E]
        y = jnp.einsum("nke,nd->end", one_hot.astype(HALF), x)
        y = jnp.einsum("enf,efd->end", nn.gelu(jnp.einsum("end,edf->enf", y, up)), down)
        combine = (one_hot * gates[..., None]).sum(1).astype(HALF)
        x = layer_norm(name="norm")(x + jnp.einsum("ne,end->nd", combine, y))
        return dense(10, name="head")(x).astype(F32)


TWINS = {"cnn": CNN(), "transformer": Transformer(), "lstm": LSTM(), "moe": MoE()}
