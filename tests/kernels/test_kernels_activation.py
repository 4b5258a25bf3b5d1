"""Activations that are cast as they are made: on every backend, against float64 by hand and jax.nn; and in a matmul."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kernels_cast import BF16, E4M3, E5M2, EACH_BACKEND, F16, F32, HAS_KERNELS, matrix, text_for_cuda

import pallas_kernels
from helpers import assert_bitwise, assert_close
from jaxmp import fp8
from pallas_kernels import reference

ACTIVATIONS = ["gelu", "silu", "gelu_exact"]
EACH_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
FUSED = pytest.mark.parametrize("activation", ACTIVATIONS[:2])
SOURCES = pytest.mark.parametrize("source", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
IN_JAX = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}
COMPUTE = {name: getattr(reference, name) for name in ACTIVATIONS}


def in_float64(activation, x):
    """The formula by hand."""
    x = np.asarray(x, np.float64)
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def slope_in_float64(activation, x):
    """The derivative by hand."""
    x = np.asarray(x, np.float64)
    if activation == "gelu":
        c = math.sqrt(2 / math.pi)
        t = np.tanh(c * (x + 0.044715 * x**3))
        return (1 + t) / 2 + x / 2 * (1 - t**2) * c * (1 + 3 * 0.044715 * x**2)
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


def assert_near(got, exact, slack):
    """Rounded to its dtype from a number at most `slack` away from the exact one."""
    got = np.asarray(got)
    low, high = ((exact + sign * slack).astype(F32).astype(got.dtype) for sign in (-1, 1))
    assert np.all((low <= got) & (got <= high))


def assert_cast(got, exact, slack, scale, dtype):
    """(q, q.T, amax) of values at most `slack` away from the exact ones, which are float64."""
    q, q_t, amax = (np.asarray(x) for x in got)
    limit = float(ml_dtypes.finfo(dtype).max)
    slack = slack + 2.0**-22 * np.abs(exact)
    low, high = (np.clip((exact + d) * scale, -limit, limit).astype(F32).astype(dtype) for d in (-slack, slack))
    assert q.dtype == dtype and np.all((low <= q) & (q <= high))
    assert_bitwise(q_t, q.T)
    assert amax.dtype == F32 and abs(amax - np.abs(exact).max()) <= slack.max()


def assert_same_products(got, expected):
    """Two programs: what is rounded apart before a cast to fp8 may fall to another neighbour, here and there."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def small(source, seed=0):
    return (np.random.default_rng(seed).normal(size=(64, 128)) * 3).astype(source)


@EACH_ACTIVATION
def test_the_formulas(activation):
    """Two parts in ten million of the largest: float32's own rounding."""
    x = np.linspace(-12, 12, 999).astype(F32)
    value = jax.jit(COMPUTE[activation])(x)
    assert_close(value, in_float64(activation, x).astype(F32), atol=2e-6)
    assert_close(value, jax.jit(IN_JAX[activation])(x), atol=2e-6)
    gradient = jax.jit(getattr(reference, f"{activation}_grad"))(np.full_like(x, 2.0), x)
    exact = jax.jit(jax.vmap(jax.grad(IN_JAX[activation])))(x)
    assert_close(gradient, 2 * exact, atol=4e-6)
    if activation != "gelu_exact":
        assert_close(gradient, 2 * slope_in_float64(activation, x).astype(F32), atol=4e-6)


def test_the_gated_formula():
    @jax.jit
    def run(a, b, g):
        expected, backward = jax.vjp(lambda a, b: jax.nn.silu(a) * b, a, b)
        return reference.silu_gated(a, b), expected, reference.silu_gated_grad(g, a, b), backward(g)

    got, expected, gradients, expected_gradients = run(small(F32), small(F32, 1), small(F32, 2))
    assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert_close(tuple(gradients), expected_gradients, rtol=1e-5, atol=1e-5)


@EACH_BACKEND
@SOURCES
@FUSED
def test_forward(backend, source, activation):
    x = small(source)
    run = jax.jit(
        lambda x, s: pallas_kernels.activation_cast_transpose_amax(x, s, E4M3, activation=activation, backend=backend)
    )
    slack = 1e-4 if backend == "mosaic" else 2e-6  # its tanh and exp are those of another library
    assert_cast(run(x, F32(4.0)), in_float64(activation, x), slack, 4.0, E4M3)


@EACH_BACKEND
@SOURCES
@FUSED
def test_backward(backend, source, activation):
    x, g = small(source), small(source, 1)
    run = jax.jit(
        lambda g, x, s: pallas_kernels.activation_grad_cast_transpose_amax(
            g, x, s, E5M2, activation=activation, backend=backend
        )
    )
    dx, *cast = run(g, x, F32(8.0))
    assert dx.dtype == x.dtype
    exact = g.astype(np.float64) * slope_in_float64(activation, x)
    slack = (1e-4 if backend == "mosaic" else 2e-6) * np.abs(g.astype(np.float64))
    assert_near(dx, exact, slack)
    assert_cast(cast, exact, slack, 8.0, E5M2)


@EACH_BACKEND
def test_gated_forward_and_backward(backend):
    a, b, g = small(BF16), small(BF16, 1), small(BF16, 2)
    scale = F32(2.0)

    @jax.jit
    def both(a, b, g):
        out = pallas_kernels.silu_gated_cast_transpose_amax(a, b, scale, E4M3, backend=backend)
        scales = (scale, 2 * scale)
        return out, pallas_kernels.silu_gated_grad_cast_transpose_amax(g, a, b, scales, E5M2, backend=backend)

    out, gradients = both(a, b, g)
    a, b, g = (x.astype(np.float64) for x in (a, b, g))
    error = 1e-4 if backend == "mosaic" else 2e-6
    assert_cast(out, in_float64("silu", a) * b, error * np.abs(b), 2.0, E4M3)
    exact = g * b * slope_in_float64("silu", a), g * in_float64("silu", a)
    for (d, *cast), wide, factor, s in zip(gradients, exact, (g * b, g), (2.0, 4.0), strict=True):
        assert_near(d, wide, error * np.abs(factor) + 2.0**-22 * np.abs(wide))
        assert_cast(cast, wide, error * np.abs(factor), s, E5M2)


@SOURCES
def test_a_gpu_gets_the_kernels(source):
    x, s = matrix(source, (64, 64)), np.float32(1)

    def every(x, s):
        outs = [pallas_kernels.activation_cast_transpose_amax(x, s, E4M3, activation=a) for a in ACTIVATIONS]
        outs += [pallas_kernels.activation_grad_cast_transpose_amax(x, x, s, E5M2, activation=a) for a in ACTIVATIONS]
        outs += [pallas_kernels.silu_gated_cast_transpose_amax(x, x, s, E4M3)]
        return outs, pallas_kernels.silu_gated_grad_cast_transpose_amax(x, x, x, (s, s), E5M2)

    text = text_for_cuda(every, x, s)
    for name in ("gelu", "silu", "gelu_grad", "silu_grad", "silu_gated", "silu_gated_grad"):
        assert (f'"{name}_cast_transpose_amax' in text or f"{name}_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (6 if HAS_KERNELS else 0)


def test_bad_input():
    x, s = jnp.ones((64, 64)), jnp.float32(1.0)
    with pytest.raises(ValueError, match="activation must be one of 'gelu', 'gelu_exact', 'silu'; got 'relu'"):
        pallas_kernels.activation_cast_transpose_amax(x, s, E4M3, activation="relu")
    with pytest.raises(ValueError, match=r"takes tensors of one shape; got \(64, 64\) and \(64, 128\)"):
        pallas_kernels.silu_gated_cast_transpose_amax(x, jnp.ones((64, 128)), s, E4M3)
    if HAS_KERNELS:
        with pytest.raises(ValueError, match='backend="interpret" cannot run here: Mosaic GPU has no erf'):
            pallas_kernels.activation_cast_transpose_amax(x, s, E4M3, activation="gelu_exact", backend="interpret")
    with pytest.raises(ValueError, match="activation must be one of"):
        fp8.dot_general(x, x, (((1,), (0,)), ((), ())), recipe=fp8.CurrentScaling(), activation="relu")


# In a matmul

MATMUL = (((1,), (0,)), ((), ()))
SCALES = fp8.Scales(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(1.0))


def product(x, w, scales, activation):
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales, activation=activation)


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
        return y, (getattr(reference, f"{activation}_grad")(dv, x), dw, ds)

    assert_same_products(fused(x, w, g), apart(x, w, g))


@EACH_ACTIVATION
def test_recipes_without_state_and_odd_shapes_take_it_too(activation):
    x, w = small(BF16), matrix(BF16, (128, 64), 1)
    recipe = fp8.CurrentScaling()

    @jax.jit
    def both(x, w):
        activated = COMPUTE[activation](x.astype(F32)).astype(BF16)
        got = fp8.dot_general(x, w, MATMUL, recipe=recipe, activation=activation)
        return got, fp8.dot_general(activated, w, MATMUL, recipe=recipe)

    assert_same_products(*both(x, w))
    with pytest.warns(fp8.FallbackWarning):
        odd = jax.jit(lambda x, w: product(x, w, SCALES, activation))(x[:, :20], w[:20])
    plain = np.asarray(in_float64(activation, x[:, :20]) @ w[:20].astype(np.float64), F32)
    assert_close(odd.astype(F32), plain, rtol=0.02, atol=4.0)


def test_the_activation_is_not_in_memory_on_a_gpu():
    x, w = matrix(BF16, (64, 128)), matrix(F32, (128, 64))

    def train(x, w):
        y, backward = jax.vjp(lambda x, w, s: product(x, w, s, "gelu"), x, w, SCALES)
        return y, backward(y)

    text = text_for_cuda(train, x, w)
    assert ("gelu_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (3 if HAS_KERNELS else 0)


def test_vmap_of_it():
    x, w = np.stack([small(F32), 2 * small(F32, 1)]), matrix(F32, (128, 64), 1)

    @jax.jit
    def run(x, w):
        y, backward = jax.vjp(lambda s: jax.vmap(lambda x: product(x, w, s, "gelu"))(x), SCALES)
        return y, *backward(y)

    y, amaxes = run(x, w)
    assert_close(amaxes.lhs, np.abs(in_float64("gelu", x)).max().astype(F32), rtol=1e-6)
    assert y.shape == (2, 64, 64)
