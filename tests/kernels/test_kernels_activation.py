"""Activations that are cast as they are made: on every backend, against float64 by hand and jax.nn; and in a matmul."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kernels_cast import BF16, E4M3, E5M2, EACH_BACKEND, F16, F32, HAS_KERNELS, matrix, text_for_cuda

from helpers import assert_close, assert_moved, assert_within_ulps
from jaxmp import fp8
from pallas_kernels import activation as activations, reference

pytestmark = pytest.mark.optimized  # bounds of a few ulps

ACTIVATIONS = ["gelu", "silu", "gelu_exact"]
EACH_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
FUSED = pytest.mark.parametrize("activation", ACTIVATIONS[:2])
SOURCES = pytest.mark.parametrize("source", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
IN_JAX = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False)}
COMPUTE = {name: getattr(reference, name) for name in ACTIVATIONS}
ULPS = 8  # of float32: tanh and exp are quotients of polynomials, some 4; a square doubles that


def in_float64(activation, x):
    """The formula by hand."""
    x = np.asarray(x, np.float64)
    if activation == "gelu":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def expected_of(value, scale, dtype):
    """(q, q.T, amax) of float32 values, in NumPy."""
    value, limit = np.asarray(value), F32(ml_dtypes.finfo(dtype).max)
    q = np.clip(value * F32(scale), -limit, limit).astype(dtype)
    return q, q.T, np.abs(value).max()


def operands_of(activation, x, g=None):
    """How large the terms are that float32 adds: of the activation at x, or of its gradient where `g` arrives."""
    x = np.abs(np.asarray(x, np.float64))
    if g is None:
        return x
    slope = 1 + 0.134145 * x**2 if activation == "gelu" else 1  # of the argument of tanh
    return np.abs(np.asarray(g, np.float64)) * (1 + x * slope)


def assert_rounds_to(got, value, dtype, *, of):
    """`got` is `value` in `dtype`, computed by another program: float32 may be off by some ulps `of` its operands.

    So the rounding may differ, too: by one unit of the format, in few places.
    """
    info, got = ml_dtypes.finfo(dtype), np.asarray(got)
    assert got.dtype == dtype
    want = value.astype(dtype).astype(F32)
    off, slack = np.abs(got.astype(F32) - want), ULPS * 2.0**-23 * of
    assert np.all(off <= np.maximum(float(info.eps) * np.abs(want), float(info.smallest_subnormal)) + slack)
    assert np.mean(off > slack) <= (0.02 if np.dtype(dtype).itemsize < 4 else 1)


def assert_is_cast(got, value, scale, dtype, *, of):
    """(q, q.T, amax) of float32 values that another program computed, and the transpose perhaps in its own loop."""
    q, q_t, amax = got
    value, limit = np.asarray(value), F32(ml_dtypes.finfo(dtype).max)
    scaled = np.clip(value * F32(scale), -limit, limit)
    assert_rounds_to(q, scaled, dtype, of=scale * of)
    assert_rounds_to(q_t, scaled.T, dtype, of=scale * of.T)
    assert np.abs(amax - np.abs(value).max()) <= ULPS * 2.0**-23 * of.max()


def assert_near(got, want):
    """Two programs whose casts to fp8 may differ by a unit in few places: 1 % of each array's norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


def small(source, seed=0):
    return (np.random.default_rng(seed).normal(size=(64, 128)) * 3).astype(source)


@pytest.mark.thorough(1)
@EACH_ACTIVATION
def test_the_formulas(activation):
    x = np.linspace(-12, 12, 999).astype(F32)
    for expected in (in_float64(activation, x).astype(F32), IN_JAX[activation](x)):
        assert_within_ulps(COMPUTE[activation](x), expected, ULPS, of=operands_of(activation, x))
    gradient = getattr(reference, f"{activation}_grad")
    exact = jax.vmap(jax.grad(IN_JAX[activation]))(x)
    assert_within_ulps(gradient(jnp.full_like(x, 2.0), x), 2 * exact, ULPS, of=operands_of(activation, x, 2.0))


def test_the_gated_formula():
    a, b, g = small(F32), small(F32, 1), small(F32, 2)
    expected, backward = jax.vjp(lambda a, b: jax.nn.silu(a) * b, a, b)
    assert_close(reference.silu_gated(a, b), expected, rtol=1e-5, atol=1e-6)
    for got, want in zip(reference.silu_gated_grad(g, a, b), backward(g), strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(3)
@EACH_BACKEND
@SOURCES
@FUSED
def test_forward(backend, source, activation):
    x = small(source)
    run = jax.jit(
        lambda x, s: activations.activation_cast_transpose_amax(x, s, E4M3, activation=activation, backend=backend)
    )
    got = run(x, jnp.float32(4.0))
    value = jax.jit(COMPUTE[activation])(x.astype(F32))
    if backend == "mosaic":  # its tanh and exp are those of another library
        q, _, amax = expected_of(value, 4.0, E4M3)
        assert_close(got[2], amax, rtol=1e-5)
        assert_close(got[0].astype(F32), q.astype(F32), rtol=0.13, atol=0.01)
        assert_moved(got[1], jnp.transpose(got[0]))
    else:
        assert_is_cast(got, value, 4.0, E4M3, of=operands_of(activation, x))


@pytest.mark.thorough(3)
@EACH_BACKEND
@SOURCES
@FUSED
def test_backward(backend, source, activation):
    x, g = small(source), small(source, 1)
    run = jax.jit(
        lambda g, x, s: activations.activation_grad_cast_transpose_amax(
            g, x, s, E5M2, activation=activation, backend=backend
        )
    )
    dx, q, q_t, amax = run(g, x, jnp.float32(8.0))
    value = jax.jit(getattr(reference, f"{activation}_grad"))(g.astype(F32), x.astype(F32))
    assert dx.dtype == x.dtype
    if backend == "mosaic":
        assert_close(amax, np.abs(np.asarray(value)).max(), rtol=1e-5)
        assert_moved(q_t, jnp.transpose(q))
    else:
        assert_rounds_to(dx, np.asarray(value), source, of=operands_of(activation, x, g))
        assert_is_cast((q, q_t, amax), value, 8.0, E5M2, of=operands_of(activation, x, g))


@pytest.mark.thorough(1)
@EACH_BACKEND
def test_gated_forward_and_backward(backend):
    a, b, g = small(BF16), small(BF16, 1), small(BF16, 2)
    scale = jnp.float32(2.0)

    @jax.jit
    def both(a, b, g):
        out = activations.silu_gated_cast_transpose_amax(a, b, scale, E4M3, backend=backend)
        scales = (scale, 2 * scale)
        return out, activations.silu_gated_grad_cast_transpose_amax(g, a, b, scales, E5M2, backend=backend)

    @jax.jit
    def values(a, b, g):
        a, b, g = (x.astype(jnp.float32) for x in (a, b, g))
        return reference.silu_gated(a, b), reference.silu_gated_grad(g, a, b)

    out, gradients = both(a, b, g)
    value, wide = values(a, b, g)
    if backend == "mosaic":
        assert_close(out[2], np.abs(np.asarray(value)).max(), rtol=1e-5)
        return
    a, b, g = (x.astype(np.float64) for x in (a, b, g))
    assert_is_cast(out, value, 2.0, E4M3, of=np.abs(a * b))
    operands = operands_of("silu", a, g * b), np.abs(g * a)
    for (d, *cast), exact, s, of in zip(gradients, wide, (2.0, 4.0), operands, strict=True):
        assert_rounds_to(d, np.asarray(exact), BF16, of=of)
        assert_is_cast(cast, exact, s, E5M2, of=of)


@pytest.mark.thorough(1)
@SOURCES
def test_a_gpu_gets_the_kernels(source):
    x, s = matrix(source, (64, 64)), np.float32(1)

    def every(x, s):
        outs = [activations.activation_cast_transpose_amax(x, s, E4M3, activation=a) for a in ACTIVATIONS]
        outs += [activations.activation_grad_cast_transpose_amax(x, x, s, E5M2, activation=a) for a in ACTIVATIONS]
        outs += [activations.silu_gated_cast_transpose_amax(x, x, s, E4M3)]
        return outs, activations.silu_gated_grad_cast_transpose_amax(x, x, x, (s, s), E5M2)

    text = text_for_cuda(every, x, s)
    for name in ("gelu", "silu", "gelu_grad", "silu_grad", "silu_gated", "silu_gated_grad"):
        assert (f'"{name}_cast_transpose_amax' in text or f"{name}_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (6 if HAS_KERNELS else 0)


def test_bad_input():
    x, s = jnp.ones((64, 64)), jnp.float32(1.0)
    with pytest.raises(ValueError, match="activation must be one of 'gelu', 'gelu_exact', 'silu'; got 'relu'"):
        activations.activation_cast_transpose_amax(x, s, E4M3, activation="relu")
    with pytest.raises(ValueError, match=r"takes tensors of one shape; got \(64, 64\) and \(64, 128\)"):
        activations.silu_gated_cast_transpose_amax(x, jnp.ones((64, 128)), s, E4M3)
    if HAS_KERNELS:
        with pytest.raises(ValueError, match='backend="interpret" cannot run here: Mosaic GPU has no erf'):
            activations.activation_cast_transpose_amax(x, s, E4M3, activation="gelu_exact", backend="interpret")
    with pytest.raises(ValueError, match="activation must be one of"):
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
        return y, (getattr(reference, f"{activation}_grad")(dv, x), dw, ds)

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

    text = text_for_cuda(train, x, w)
    assert ("computed_cast_transpose_amax" in text) == HAS_KERNELS
    assert text.count("@mosaic_gpu") == (3 if HAS_KERNELS else 0)


@pytest.mark.thorough(0)
def test_vmap_of_it():
    x, w = jnp.asarray(np.stack([small(F32), 2 * small(F32, 1)])), jnp.asarray(matrix(F32, (128, 64), 1))
    y, backward = jax.vjp(lambda s: jax.vmap(lambda x: product(x, w, s, "gelu"))(x), SCALES)
    (amaxes,) = backward(y)
    assert_close(amaxes.lhs, np.abs(np.asarray(reference.gelu(x))).max(), rtol=1e-6)
    assert y.shape == (2, 64, 64)
