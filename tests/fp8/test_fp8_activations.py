"""Activations in front of a matmul in fp8: the formulas, against float64 by hand and jax.nn; and the matmul."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import assert_close, assert_within_ulps
from jaxmp import fp8
from jaxmp._src.fp8 import activations
from pallas_kernels import backend as backends

pytestmark = pytest.mark.optimized  # bounds of a few ulps

F32, BF16, HAS_KERNELS = np.float32, ml_dtypes.bfloat16, backends.why_no_kernels() is None
ACTIVATIONS = ["gelu", "silu", "gelu_exact"]
EACH_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
IN_JAX = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}
COMPUTE = {name: getattr(activations, name) for name in ACTIVATIONS}
ULPS = 8  # of float32: tanh and exp are quotients of polynomials, some 4; a square doubles that


def in_float64(activation, x):
    """The formula by hand."""
    x = np.asarray(x, np.float64)
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def operands_of(activation, x, g=None):
    """How large the terms are that float32 adds: of the activation at x, or of its gradient where `g` arrives."""
    x = np.abs(np.asarray(x, np.float64))
    if g is None:
        return x
    slope = 1 + 0.134145 * x**2 if activation == "gelu" else 1  # of the argument of tanh
    return np.abs(np.asarray(g, np.float64)) * (1 + x * slope)


def assert_near(got, want):
    """Two programs whose casts to fp8 may differ by a unit in few places: 1 % of each array's norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


def matrix(source, shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 50).astype(source)


def small(source, seed=0):
    return (np.random.default_rng(seed).normal(size=(64, 128)) * 3).astype(source)


@pytest.mark.thorough(1)
@EACH_ACTIVATION
def test_the_formulas(activation):
    x = np.linspace(-12, 12, 999).astype(F32)
    for expected in (in_float64(activation, x).astype(F32), IN_JAX[activation](x)):
        assert_within_ulps(COMPUTE[activation](x), expected, ULPS, of=operands_of(activation, x))
    gradient = getattr(activations, f"{activation}_grad")
    exact = jax.vmap(jax.grad(IN_JAX[activation]))(x)
    assert_within_ulps(gradient(jnp.full_like(x, 2.0), x), 2 * exact, ULPS, of=operands_of(activation, x, 2.0))


def test_bad_input():
    x = jnp.ones((64, 64))
    with pytest.raises(ValueError, match="activation must be one of 'gelu', 'gelu_exact', 'silu'; got 'relu'"):
        fp8.dot_general(x, x, (((1,), (0,)), ((), ())), recipe=fp8.CurrentScaling(), activation="relu")


# In a matmul

MATMUL = (((1,), (0,)), ((), ()))
SCALES = fp8.Scales(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(1.0))


def product(x, w, scales, activation):
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales, activation=activation)


@pytest.mark.thorough(1)
@EACH_ACTIVATION
def test_a_matmul_behind_an_activation(activation):
    """With float32 activations it is the matmul of the activation; so are its gradients and amaxes."""
    x, w = small(F32), matrix(F32, (128, 64), 1)
    g = matrix(F32, (64, 64), 2)

    @jax.jit
    def fused(x, w, g):
        y, backward = jax.vjp(lambda x, w, s: product(x, w, s, activation), x, w, SCALES)
        return y, backward(g)

    @jax.jit
    def apart(x, w, g):
        y, backward = jax.vjp(lambda v, w, s: product(v, w, s, None), COMPUTE[activation](x), w, SCALES)
        dv, dw, ds = backward(g)
        return y, (getattr(activations, f"{activation}_grad")(dv, x), dw, ds)

    assert_near(fused(x, w, g), apart(x, w, g))


@pytest.mark.thorough(0)
@EACH_ACTIVATION
def test_recipes_without_state_and_odd_shapes_take_it_too(activation):
    x, w = small(BF16), matrix(BF16, (128, 64), 1)
    recipe = fp8.CurrentScaling()
    got = fp8.dot_general(x, w, MATMUL, recipe=recipe, activation=activation)
    want = fp8.dot_general(COMPUTE[activation](x.astype(F32)).astype(BF16), w, MATMUL, recipe=recipe)
    assert_near(got, want)
    odd = product(jnp.asarray(x[:, :20]), jnp.asarray(w[:20]), SCALES, activation)
    padded = product(np.pad(x[:, :20], ((0, 0), (0, 12))), np.pad(w[:20], ((0, 12), (0, 0))), SCALES, activation)
    assert_near(odd, padded)


def test_the_activation_is_not_in_memory_on_a_gpu():
    x, w = matrix(BF16, (64, 128)), matrix(F32, (128, 64))

    def train(x, w):
        y, backward = jax.vjp(lambda x, w, s: product(x, w, s, "gelu"), x, w, SCALES)
        return y, backward(y)

    text = jax.jit(train).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert ("computed_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (3 if HAS_KERNELS else 0)


@pytest.mark.thorough(0)
def test_vmap_of_it():
    x, w = jnp.asarray(np.stack([small(F32), 2 * small(F32, 1)])), jnp.asarray(matrix(F32, (128, 64), 1))
    y, backward = jax.vjp(lambda s: jax.vmap(lambda x: product(x, w, s, "gelu"))(x), SCALES)
    (amaxes,) = backward(y)
    assert_close(amaxes.lhs, np.abs(np.asarray(activations.gelu(x))).max(), rtol=1e-6)
    assert y.shape == (2, 64, 64)
