"""Products that return float32 of 16-bit operands: logits of attention beyond 65504, layers that ask for it."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
from helpers import assert_within_ulps
from matmul_dtypes import matmuls

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
WIDTH, TOKENS = 64, 8

# Products of queries and keys are 153600 and more, in float16 inf. They are integers, so float32 has them exactly.
Q = np.full((TOKENS, WIDTH), 60, np.float32)
K = np.full((TOKENS, WIDTH), 40, np.float32) + np.where(np.arange(WIDTH) == 0, np.arange(TOKENS)[:, None] / 4, 0)
V = np.random.default_rng(0).integers(-8, 9, (TOKENS, WIDTH)).astype(np.float32) / 8
QKV = np.concatenate([Q, K, V], axis=1).astype(np.float32)  # the weights of a layer: every row of x chooses one of them
X = np.eye(TOKENS, dtype=np.float32)
TARGET = np.random.default_rng(1).integers(-2, 3, (TOKENS, WIDTH)).astype(np.float32)


def attend(qkv):
    q, k, v = (x[None, :, None] for x in jnp.split(qkv, 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")[0, :, 0]


def loss_of(out):
    return jnp.mean(out.astype(jnp.float32) * TARGET)


@functools.cache
def exact():
    """The loss and its gradient in NumPy, in float64, and the size of what is added up in each gradient."""
    q, k, v = np.split(QKV.astype(np.float64), 3, axis=1)
    logits = q @ k.T / 8
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g = TARGET / TARGET.size
    dp = g @ v.T
    dl = p * (dp - (p * dp).sum(1, keepdims=True)) / 8
    # The sum of p dp cancels in float32: its terms bound what a rounding of p to 16 bits moves.
    sizes = p * (np.abs(g) @ np.abs(v).T + (p * (np.abs(g) @ np.abs(v).T)).sum(1, keepdims=True)) / 8
    grads = np.concatenate([dl @ k, dl.T @ q, p.T @ g], axis=1)
    return (p @ v * g).sum(), grads, np.concatenate([sizes @ k, sizes.T @ q, p.T @ np.abs(g)], axis=1)


def check(dtype, loss, grad):
    """As in float64, but for the roundings of what 16 bits hold: probabilities and operands."""
    expected, grads, sizes = exact()
    eps = float(jnp.finfo(dtype).eps)
    assert loss.dtype == F32
    np.testing.assert_allclose(loss, expected, rtol=0, atol=2 * eps)
    np.testing.assert_array_less(np.abs(grad - grads), 2 * eps * sizes + 3e-7)


@DTYPES
def test_logits_beyond_float16(dtype):
    """Under a policy and its loss scale."""
    policy = jaxmp.get_policy("fp16" if dtype == F16 else "bf16")
    state = jax.jit(jaxmp.mixed_precision(optax.sgd(1e-3), policy).init)(QKV)
    grad_fn = jaxmp.value_and_grad(lambda w, x: loss_of(attend(x @ w)), policy=policy)
    loss, grad = jax.jit(grad_fn)(QKV.astype(dtype), X, opt_state=state)
    assert grad.dtype == dtype
    check(dtype, loss, jaxmp.unscale(grad, state))


A: Any = np.full((4, 8), 300, np.float32)
B: Any = np.full((8, 4), 100, np.float32)
BIAS = np.full(4, 1000, np.float32)
LAYERS = {
    "linen.Einsum": (functools.partial(nn.Einsum, (8, 4), "ij,jk->ik"), A),
    "nnx.Linear": (functools.partial(nnx.Linear, 8, 4), A),
    "nnx.LinearGeneral": (functools.partial(nnx.LinearGeneral, 8, 4), A),
    "nnx.Einsum": (functools.partial(nnx.Einsum, "ij,jk->ik", (8, 4), (4,)), A),
    "nnx.Conv": (functools.partial(nnx.Conv, 8, 4, (1,)), A[None]),
    "nnx.ConvTranspose": (functools.partial(nnx.ConvTranspose, 8, 4, (1,)), A[None]),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, None) for kind in LAYERS), ("nnx.Linear", F16), ("linen.Einsum", F32)]
)
def test_layers(kind, dtype):
    """A layer with `preferred_element_type=jnp.float32` returns float32, bias included, and its gradients are right."""
    make, x = LAYERS[kind]
    layer = functools.partial(make, preferred_element_type=jnp.float32, dtype=dtype)
    cast = functools.partial(jaxmp.autocast, dtype=F16, modules={})

    def call(kernel, bias):
        if kind == "linen.Einsum":
            return cast(layer().apply)({"params": {"kernel": kernel, "bias": bias}}, x)
        model = layer(rngs=nnx.Rngs(0))
        model.kernel.set_value(kernel.reshape(model.kernel.shape))
        model.bias.set_value(bias)
        return cast(lambda layer: layer(x))(model).reshape(4, 4)  # an argument: its dtypes are read

    def loss(kernel, bias):
        out: Any = call(kernel, bias)
        return jnp.mean(jnp.square(out / 1e5)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(B, BIAS)
    assert out.dtype == F32
    np.testing.assert_array_equal(out, np.full((4, 4), 241000))
    g = 2 * 2.41 / 1e5 / 16
    assert_within_ulps([x.astype(F16) for x in grads], [jnp.full((8, 4), 4 * 300 * g, F16), jnp.full(4, 4 * g, F16)], 2)


def test_of_operands_in_16_bits():
    """Operands that the code itself casts: the product is float32, and so is its sum with a 16-bit bias."""

    def layer(w, b):
        y = jnp.einsum("ij,jk->ik", A.astype(F16), w.astype(F16), preferred_element_type=jnp.float32)
        return y + b.astype(F16)[None]

    np.testing.assert_array_equal(jax.jit(jaxmp.autocast(layer, F16))(B, BIAS), np.full((4, 4), 241000))


WAYS = {
    "vmap": lambda fn: lambda qkv: jax.vmap(fn)(jnp.stack([qkv, qkv]))[1],
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "scan": lambda fn: lambda qkv: lax.scan(lambda c, _: (c + fn(qkv) / 2, None), 0 * qkv[:, :64], None, length=2)[0],
    "cond": lambda fn: lambda qkv: lax.cond(qkv[0, 0] > 0, fn, lambda x: fn(x) * 2, qkv),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("way", "place", "dtype"),
    [
        *(("vmap", "inside", F16), ("vmap", "around", F16), ("scan", "inside", F16), ("remat", "around", F16)),
        *(("jit", "inside", BF16), ("cond", "around", BF16), ("scan", "around", BF16)),
    ],
)
def test_transformed(way, place, dtype):
    """Under transformations, in both modes of derivatives."""
    cast = functools.partial(jaxmp.autocast, dtype=dtype)
    fn = cast(WAYS[way](attend)) if place == "inside" else WAYS[way](cast(attend))
    direction = np.concatenate([QKV[:, :64], np.zeros((TOKENS, 128), np.float32)], axis=1)  # its products are as large

    @jax.jit
    def derivatives(w, direction):
        loss_fn = lambda w: loss_of(fn(w))  # noqa: E731
        return *jax.value_and_grad(loss_fn)(w), jax.jvp(loss_fn, (w,), (direction,))[1]

    loss, grad, along = derivatives(QKV, direction)
    assert grad.dtype == F32
    check(dtype, loss, grad)
    _, grads, sizes = exact()
    bound = 2 * float(jnp.finfo(dtype).eps) * (sizes * np.abs(direction)).sum()
    np.testing.assert_allclose(along, (grads * direction).sum(), rtol=0, atol=bound)


@DTYPES
def test_backward_products(dtype):
    """In bfloat16 all products multiply 16-bit arrays; in float16 the derivative of the logits has its range."""
    layer = lambda w: loss_of(attend(w) @ np.eye(WIDTH, dtype=np.float32))  # noqa: E731
    counts = matmuls(jax.grad(jaxmp.autocast(layer, dtype)), QKV)
    assert counts == ({"bfloat16": 8} if dtype == BF16 else {"float16": 6, "float16xfloat32": 2})


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.1, "deterministic": True}], ids=str)
def test_layers_that_ask_for_nothing(options):
    """flax's attention hands `lax.dot_general` to an einsum: its products return 16 bits, as by hand."""
    x = np.ones((2, 8, 32), np.float32)
    layer = nn.MultiHeadDotProductAttention(4, **options)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    text = str(jax.make_jaxpr(jaxmp.autocast(layer.apply, BF16))(params, x))
    assert re.findall(r":(\w+)\[[\d,]*\] = dot_general\[", text) == ["bf16"] * 6
