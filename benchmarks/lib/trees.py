"""Shapes and names of models' params, without values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

# The scales of an fp8 layer, beside its kernel.
FP8_SCALES = ("fp8_lhs_e4m3_log2_scale", "fp8_rhs_e4m3_log2_scale", "fp8_grad_e5m2_log2_scale")


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 parameter."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gpt2(layers: int = 12) -> PyTree:
    """GPT-2 small as flax names it: 148 leaves, 124.4 million values. With 83 layers: 1000 leaves, 627.5 million."""
    width, vocabulary, positions = 768, 50257, 1024

    def dense(n_in: int, n_out: int) -> PyTree:
        return {"kernel": leaf(n_in, n_out), "bias": leaf(n_out)}

    norm = {"scale": leaf(width), "bias": leaf(width)}
    block = {
        "ln_1": norm,
        "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
        "ln_2": norm,
        "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
    }
    embeddings = {"wte": {"embedding": leaf(vocabulary, width)}, "wpe": {"embedding": leaf(positions, width)}}
    return {**embeddings, **{f"h_{i}": block for i in range(layers)}, "ln_f": norm}


def llama_1b() -> PyTree:
    """Llama 3.2 1B with an untied output head: 16 layers, 147 leaves, 1.5 billion values."""
    layers, width, hidden, kv_width, vocabulary = 16, 2048, 8192, 512, 128256
    block = {
        "attention": {"q": leaf(width, width), "k": leaf(width, kv_width), "v": leaf(width, kv_width)}
        | {"o": leaf(width, width)},
        "mlp": {"gate": leaf(width, hidden), "up": leaf(width, hidden), "down": leaf(hidden, width)},
        "attention_norm": leaf(width),
        "mlp_norm": leaf(width),
    }
    ends = {"embedding": leaf(vocabulary, width), "norm": leaf(width), "head": leaf(width, vocabulary)}
    return {**ends, **{f"layer_{i}": block for i in range(layers)}}


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """The shapes of `tree` in another dtype."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)


def on_device(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    return x.sharding.shard_shape(x.shape) if x.sharding else x.shape


def size(tree: PyTree) -> int:
    """The number of values of a tree on one device."""
    return sum(math.prod(on_device(x)) for x in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """The bytes of a tree on one device."""
    return sum(math.prod(on_device(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
