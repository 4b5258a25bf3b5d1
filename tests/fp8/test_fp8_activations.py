"""Activations in front of a matmul in fp8: the formulas, against float64 by hand and jax.nn; and the matmul."""

import functools
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


def normal(seed, *shape, size=3):
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(F32)


def operands_of(activation, x, g=None):
    """How large the terms are that float32 adds: of the activation at x, or of its gradient where `g` arrives."""
    x = np.abs(np.asarray(x, np.float64))
    slope = 1 + 0.134145 * x**2 if activation == "gelu" else 1  # of the argument of tanh
    return x if g is None else np.abs(np.asarray(g, np.float64)) * (1 + x * slope)


def in_float64(activation, x):
    """The formula by hand."""
    x = np.asarray(x, np.float64)
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def assert_near(got, want):
    """Two programs whose casts to fp8 may differ by a unit in few places: 1 % of each array's norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


@pytest.mark.thorough(1)
@EACH_ACTIVATION
def test_the_formulas(activation):
    x = np.linspace(-12, 12, 999).astype(F32)
    value, slope = jax.jit(COMPUTE[activation])(x), jax.jit(getattr(activations, f"{activation}_grad"))
    for expected in (in_float64(activation, x).astype(F32), jax.jit(IN_JAX[activation])(x)):
        assert_within_ulps(value, expected, ULPS, of=operands_of(activation, x))
    exact = 2 * jax.jit(jax.vmap(jax.grad(IN_JAX[activation])))(x)
    assert_within_ulps(slope(np.full_like(x, 2.0), x), exact, ULPS, of=operands_of(activation, x, 2.0))


def test_bad_input():
    x = jnp.ones((64, 64))
    with pytest.raises(ValueError, match="activation must be one of 'gelu', 'gelu_exact', 'silu'; got 'relu'"):
        fp8.dot_general(x, x, (((1,), (0,)), ((), ())), recipe=fp8.CurrentScaling(), activation="relu")


# In a matmul

MATMUL = (((1,), (0,)), ((), ()))
SCALES = fp8.Scales(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(1.0))


def product(x, w, scales, activation):
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales, activation=activation)


X, W, G = normal(0, 64, 128), normal(1, 128, 64, size=50), normal(2, 64, 64, size=50)


@pytest.mark.thorough(1)
@EACH_ACTIVATION
def test_a_matmul_behind_an_activation(activation):
    """With float32 activations it is the matmul of the activation; so are its gradients and amaxes."""

    @jax.jit
    def fused(x, w, g):
        y, backward = jax.vjp(lambda x, w, s: product(x, w, s, activation), x, w, SCALES)
        return y, backward(g)

    @jax.jit
    def apart(x, w, g):
        y, backward = jax.vjp(lambda v, w, s: product(v, w, s, None), COMPUTE[activation](x), w, SCALES)
        dv, dw, ds = backward(g)
        return y, (getattr(activations, f"{activation}_grad")(dv, x), dw, ds)

    assert_near(fused(X, W, G), apart(X, W, G))


@pytest.mark.thorough(0)
def test_recipes_without_state_and_odd_shapes_take_it_too():
    x, w, activation = X.astype(BF16), W.astype(BF16), "silu"
    of_current = jax.jit(functools.partial(fp8.dot_general, recipe=fp8.CurrentScaling()), static_argnums=2)
    activated = jax.jit(COMPUTE[activation])(x.astype(F32)).astype(BF16)
    fused = fp8.dot_general(x, w, MATMUL, recipe=fp8.CurrentScaling(), activation=activation)
    assert_near(fused, of_current(activated, w, MATMUL))
    run = jax.jit(lambda x, w: product(x, w, SCALES, activation))
    odd = run(x[:, :20], w[:20])
    padded = run(np.pad(x[:, :20], ((0, 0), (0, 12))), np.pad(w[:20], ((0, 12), (0, 0))))
    assert_near(odd, padded)


def test_the_activation_is_not_in_memory_on_a_gpu():
    def train(x, w):
        y, backward = jax.vjp(lambda x, w, s: product(x, w, s, "gelu"), x, w, SCALES)
        return y, backward(y)

    text = jax.jit(train).trace(X.astype(BF16), W).lower(lowering_platforms=("cuda",)).as_text()
    assert ("computed_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (3 if HAS_KERNELS else 0)


@pytest.mark.thorough(0)
def test_vmap_of_it():
    x = np.stack([X, 2 * normal(1, 64, 128)])

    @jax.jit
    def run(x):
        y, backward = jax.vjp(lambda s: jax.vmap(lambda x: product(x, W, s, "gelu"))(x), SCALES)
        return y, backward(y)[0].lhs, jnp.max(jnp.abs(activations.gelu(x)))

    y, amax, expected = run(x)
    assert_close(amax, expected, rtol=1e-6)
    assert y.shape == (2, 64, 64)
