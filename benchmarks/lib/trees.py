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


def gpt2() -> PyTree:
    """GPT-2 small as flax names it: 148 leaves, 124.4 million values."""
    layers, width, vocabulary, positions = 12, 768, 50257, 1024

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
