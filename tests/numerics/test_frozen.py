"""Kernels in fp8 that nobody trains: their values, and what reads them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact

W = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)


def rounded(w, axis=-2):
    """By NumPy: a power of two for each column, and e4m3."""
    amax = np.abs(w).max(axis, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    return (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("factor", [1.0, 3e-30, 2e30, 448.0, 224.0])
def test_values_are_those_of_numpy(factor):
    w = W * np.float32(factor)
    kernel = jaxmp.fp8.freeze({"kernel": w})["kernel"]
    assert (kernel.q.dtype, kernel.log2_scale.dtype) == (jnp.float8_e4m3fn, jnp.int8)
    assert kernel.shape == w.shape and kernel.log2_scale.shape == (1, 32)
    assert_exact(jnp.asarray(kernel), rounded(w))
    assert_exact(jnp.asarray(kernel).astype(jnp.bfloat16).astype(jnp.float32), rounded(w))  # no second rounding


def test_a_stack_and_several_axes_have_their_own_columns():
    w = np.stack([W, 100 * W]).reshape(2, 3, 16, 32)
    kernel = jaxmp.fp8.freeze({"kernel": w})["kernel"]
    assert kernel.log2_scale.shape == (2, 3, 1, 32)
    assert_exact(jnp.asarray(kernel), rounded(w))
    inside = jax.tree.map(lambda x: x[1], kernel)  # as lax.scan takes it apart
    assert_exact(jnp.asarray(inside), rounded(w[1]))


def test_zeros_and_what_is_not_finite():
    w = np.zeros((4, 3), np.float32)
    w[:, 1], w[2, 2], w[1, 2] = [1, np.inf, -np.inf, np.nan], 5, -0.0
    found = np.asarray(jaxmp.fp8.freeze({"kernel": w})["kernel"])
    assert_exact(found[:, 0], np.zeros(4, np.float32))
    assert found[0, 1] == 1 and np.isnan(found[1:, 1]).all()
    assert_exact(found[:, 2], w[:, 2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_it_reads_in_the_dtype_it_had(dtype):
    kernel = jaxmp.fp8.freeze({"kernel": jnp.asarray(W, dtype)})["kernel"]
    assert jnp.asarray(kernel).dtype == dtype and kernel.astype(jnp.float32).dtype == jnp.float32
    x = jnp.ones((2, 48), dtype)
    expected = x @ jnp.asarray(kernel)
    for found in (x @ kernel, jnp.dot(x, kernel), jnp.einsum("bi,ij->bj", x, kernel), x @ kernel[...]):
        assert_exact(found, expected)
    assert_exact(kernel[3], jnp.asarray(kernel)[3])


def test_only_what_fits_is_frozen():
    params = {"base": {"kernel": W, "bias": W[0]}, "lora": {"kernel": W, "ids": np.arange(3)}}
    frozen = jaxmp.fp8.freeze(params, "base/kernel")
    assert frozen["lora"]["kernel"] is W and frozen["base"]["bias"] is params["base"]["bias"]
    assert not isinstance(frozen["base"]["kernel"], np.ndarray)
    assert jaxmp.get_policy("fp16").cast_to_param(frozen)["base"]["kernel"].q.dtype == jnp.float8_e4m3fn
    shapes = jax.eval_shape(lambda p: jaxmp.fp8.freeze(p, "base/kernel"), params)["base"]["kernel"]
    assert (shapes.q.shape, shapes.log2_scale.shape) == ((48, 32), (1, 32))


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [
        ("nothing", ("freeze must fit a leaf", "got none for 'nothing'", "a/bias, a/kernel")),
        ("*", ("floats with two axes or more", "float32[32] at a/bias")),
    ],
)
def test_other_leaves_are_refused(patterns, parts):
    with pytest.raises(ValueError, match="freeze|frozen") as e:
        jaxmp.fp8.freeze({"a": {"bias": W[0], "kernel": W}}, patterns)
    assert all(part in str(e.value) for part in parts)


def test_nobody_differentiates_it():
    frozen = jaxmp.fp8.freeze({"kernel": W})
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16").init({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"got float8_e4m3fn at argument 0/kernel/q. Pass it in another argument"):
        jaxmp.value_and_grad(lambda p: jnp.sum(jnp.asarray(p["kernel"])))(frozen, opt_state=opt_state)
