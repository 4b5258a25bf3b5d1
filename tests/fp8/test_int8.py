"""Int8: its numbers are those of NumPy, and its products run in int8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8_oracle import assert_products, int8_rows, products as fp8_products
from helpers import assert_within_ulps
from jaxmp import fp8

MATMUL = (((1,), (0,)), ((), ()))
FORWARD_ONLY = fp8.Int8(dgrad="bfloat16", wgrad="bfloat16")


def _normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_is_cast_as_numpy_casts_it(axis):
    x = _normal(37, 21) * np.logspace(-30, 30, 37, dtype=np.float32)[:, None]
    x[3], x[:, 2] = 0.0, 0.0
    q, scale_inv = jax.jit(lambda x: fp8.Int8().quantize(x, axis=axis))(x if axis else x.T)
    expected, expected_scale = int8_rows(x if axis else x.T, axis)
    assert q.dtype == jnp.int8 and scale_inv.dtype == jnp.float32
    np.testing.assert_array_equal(q, expected)
    assert_within_ulps(scale_inv, expected_scale, 1)


def test_a_row_that_is_not_finite_has_a_factor_of_nan():
    x = _normal(4, 8)
    x[:3, 3] = np.nan, np.inf, -np.inf
    q, scale_inv = map(np.asarray, jax.jit(fp8.Int8().quantize)(x))
    np.testing.assert_array_equal(np.isnan(scale_inv[:, 0]), [True, True, True, False])
    assert not q[:3].any()


def _dots(recipe, **kwargs):
    """(dtypes of the operands, dtype of the result) of the products in a gradient."""
    x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 16))
    grad = jax.grad(lambda x, w: fp8.dot_general(x, w, MATMUL, recipe=recipe, **kwargs).sum().astype("f4"), (0, 1))
    eqns = jax.make_jaxpr(grad)(x, w).jaxpr.eqns
    dots = [e for e in eqns if e.primitive.name == "dot_general"]
    return [(*(v.aval.dtype.name for v in e.invars), e.outvars[0].aval.dtype.name) for e in dots]


def test_the_products_multiply_integers():
    assert _dots(fp8.Int8()) == [("int8", "int8", "int32")] * 3
    wide = ("bfloat16", "bfloat16")
    assert _dots(FORWARD_ONLY) == [("int8", "int8", "int32"), (*wide, "bfloat16"), (*wide, "float32")]


def test_a_sum_that_may_not_fit_into_int32_is_refused():
    x, w = jax.ShapeDtypeStruct((1, 133_145), jnp.bfloat16), jax.ShapeDtypeStruct((133_145, 1), jnp.bfloat16)
    product = functools.partial(fp8.dot_general, dimension_numbers=MATMUL, recipe=fp8.Int8())
    with pytest.raises(ValueError, match="at most 133144 products; got fprop over 133145 elements"):
        jax.eval_shape(product, x, w)
    y = jax.jit(lambda q: product(q, q.T))(np.ones((1, 133_144), np.float32))
    np.testing.assert_allclose(y, 133_144, rtol=1e-6)


def test_gradients_rounded_at_random_have_the_right_mean():
    recipe = fp8.Int8(stochastic_rounding=True)
    x = _normal(4, 64)
    keys = jax.random.split(jax.random.key(0), 400)
    q, scale_inv = map(np.asarray, jax.jit(jax.vmap(lambda key: recipe.quantize(x, key=key)))(keys))
    step = scale_inv[0]
    assert (np.abs(q * scale_inv - x) <= step * 1.001).all()
    np.testing.assert_allclose((q * scale_inv).mean(0) / step, x / step, atol=0.13)  # 5 standard errors of 1/2


def test_random_rounding_needs_a_key_for_a_gradient_only():
    x, w = jnp.ones((16, 16)), jnp.ones((16, 16))
    recipe = fp8.Int8(stochastic_rounding=True)
    dot = lambda x, **kwargs: fp8.dot_general(x, w, MATMUL, recipe=recipe, **kwargs)  # noqa: E731
    assert jax.eval_shape(dot, x).shape == (16, 16)
    with pytest.raises(ValueError, match="Int8 needs a key for random rounding"):
        jax.eval_shape(jax.grad(lambda x: dot(x).sum()), x)
    with_key = jax.grad(lambda x: dot(x, key=jax.random.key(0)).sum())
    assert jax.eval_shape(with_key, x).shape == (16, 16)
    assert not fp8.Int8(stochastic_rounding=True, dgrad="bfloat16", wgrad="bfloat16").rounds_at_random


@pytest.mark.thorough(0)
@pytest.mark.parametrize("around", ["vmap", "remat in a scan"])
def test_it_goes_through_transformations(around):
    xs, w = _normal(3, 8, 32), _normal(32, 16, seed=1)

    def f(x, w):
        return fp8.dot_general(x, w, MATMUL, recipe=fp8.Int8())

    remat = jax.checkpoint(f, policy=fp8.save_quantized)
    scanned = lambda xs, w: jax.lax.scan(lambda c, x: (c, remat(x, w)), 0.0, xs)[1]  # noqa: E731

    @jax.jit
    def products(xs, w):
        y, back = jax.vjp(jax.vmap(f, (0, None)) if around == "vmap" else scanned, xs, w)
        return y, back(y)[0]

    y, dx = map(np.asarray, products(xs, w))
    for i in range(3):
        expected = fp8_products(fp8.Int8(), *(t[None] for t in (xs[i], w, y[i])))
        assert_products((y[i], dx[i]), expected)
