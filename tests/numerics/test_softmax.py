"""Softmax, its logarithm and the cross-entropy for 16-bit logits, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_bitwise, assert_close

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
FUNCTIONS = (jaxmp.softmax, jaxmp.log_softmax, jaxmp.logsumexp)
cross_entropy = jax.jit(jaxmp.softmax_cross_entropy)


@functools.partial(jax.jit, static_argnums=1)
def all_of(x, axis=-1, where=None):
    return [f(x, axis, where=where) for f in FUNCTIONS]


def oracle(x, where=None, axis=-1):
    """(softmax, log_softmax, logsumexp) in float64; rows without elements as documented."""
    x = np.asarray(x).astype(np.float64)
    where = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    x = np.where(where, x, -np.inf)
    largest = np.max(x, axis=axis, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.exp(x - largest)
    total = weights.sum(axis=axis, keepdims=True)
    with np.errstate(divide="ignore"):
        log_total = np.where(total == 0, -np.inf, largest + np.log(total))
        log_p = np.where(total == 0, -np.inf, x - np.where(total == 0, 0.0, log_total))
    return weights / np.where(total == 0, 1.0, total), log_p, np.squeeze(log_total, axis)


def logits_of(dtype, shape=(5, 7), scale=4.0):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) * scale, dtype)


@each_dtype
@pytest.mark.parametrize("axis", [-1, (0, 1)], ids=str)
def test_values_are_those_of_float64_in_float32(dtype, axis):
    x = logits_of(dtype)
    expected = [np.asarray(y, np.float32) for y in oracle(x, axis=axis)]
    assert_close(all_of(x, axis), expected, rtol=2e-6, atol=1e-6)
    for f in FUNCTIONS:
        assert jax.eval_shape(lambda x, f=f: f(x, axis, dtype=jnp.bfloat16), x).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda x: jaxmp.logsumexp(x, axis, keepdims=True), x).ndim == 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_masks_say_what_counts_and_empty_rows_are_empty_sums(dtype):
    x = logits_of(dtype)
    x = x.at[1, 2].set(jnp.nan).at[2, 0].set(jnp.inf).at[3, 1].set(-jnp.inf)
    mask = np.random.default_rng(1).random(x.shape) < 0.6
    mask[1, 2] = mask[2, 0] = mask[4] = False
    mask[3, 1] = True
    got = all_of(x, where=jnp.asarray(mask))
    assert_close(got, [np.asarray(y, np.float32) for y in oracle(x, mask)], rtol=2e-6, atol=1e-6)

    def loss(x, f):
        y = f(x, where=mask)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0) ** 2)

    for grads in jax.jit(lambda x: [jax.grad(loss)(x, f) for f in FUNCTIONS])(x):
        assert grads.dtype == dtype
        grads = np.asarray(grads, np.float32)
        assert np.isfinite(grads).all()
        assert not grads[~mask].any() and grads[mask].any()
    assert_bitwise(got[0][4], np.zeros(7, np.float32))
    # a row of -inf is one that is masked
    empty = jnp.full((5, 7), -jnp.inf, dtype)
    assert_bitwise(all_of(empty), all_of(x, where=jnp.zeros((5, 7), bool)))
    grads = jax.jit(jax.grad(lambda x: jnp.sum(jaxmp.softmax(x)) + jnp.sum(jnp.exp(jaxmp.logsumexp(x)))))(empty)
    assert_bitwise(grads, jnp.zeros((5, 7), dtype))


def test_infinities_and_nan_that_count_show():
    for bad in (jnp.inf, jnp.nan):
        x = jnp.array([0.0, bad], jnp.float16)
        p, _, total = all_of(x)
        assert not np.isfinite(np.asarray(p)).all() and not np.isfinite(np.asarray(total))


def test_huge_logits_and_long_rows_of_float16():
    x = jnp.array([6e4, -6e4, 6e4, 0.0], jnp.float16)  # in float16, 6e4 - -6e4 is inf
    p, _, total = all_of(x)
    assert_bitwise(p, np.array([0.5, 0, 0.5, 0], np.float32))
    assert_close(total, np.float32(60000.69), rtol=1e-6)
    assert_bitwise(jax.jit(jax.grad(jaxmp.logsumexp))(x), jnp.array([0.5, 0, 0.5, 0], jnp.float16))
    p, _, total = all_of(jnp.zeros(70_000, jnp.float16))
    assert_close(total, np.float32(np.log(70_000)), rtol=1e-6)
    assert_close(p, np.full(70_000, 1 / 70_000, np.float32), rtol=1e-4)


@each_dtype
def test_gradients_are_those_of_float64_rounded_once(dtype):
    x = logits_of(dtype)
    labels = jnp.array([0, 6, 3, 3, 1])
    grads = jax.jit(jax.grad(lambda x: jnp.sum(jaxmp.softmax_cross_entropy(x, labels))))(x)
    expected = oracle(x)[0] - np.eye(7)[np.asarray(labels)]
    assert grads.dtype == dtype
    # half a unit in the last place, and float32's own rounding of numbers up to 1
    np.testing.assert_allclose(
        np.asarray(grads, np.float64), expected, rtol=float(jnp.finfo(dtype).eps) * 0.51, atol=3e-7
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(
    ("smoothing", "masked"), [(0.0, False), (0.1, False), (0.1, True)], ids=["plain", "smooth", "smooth-masked"]
)
def test_cross_entropy_of_classes_and_distributions(dtype, smoothing, masked):
    x = logits_of(dtype)
    labels = np.array([0, 6, 3, 3, 1], np.uint8)
    where = np.ones((5, 7), bool)
    if masked:
        where[:, 5] = False
        where[4] = False
    q = np.eye(7)[labels] * (1 - smoothing) + smoothing * where / np.maximum(where.sum(-1, keepdims=True), 1)
    expected = np.array([-sum(a * b for a, b in zip(q[i], oracle(x, where)[1][i], strict=True) if a) for i in range(5)])
    expected[~where.any(-1)] = 0.0
    options = {"where": jnp.asarray(where) if masked else None, "label_smoothing": smoothing}
    loss = jax.jit(lambda x, labels: jaxmp.softmax_cross_entropy(x, labels, **options))
    got = loss(x, labels)
    assert_close(got, np.asarray(expected, np.float32), rtol=3e-6, atol=1e-6)
    assert_bitwise(loss(x, jnp.asarray(np.eye(7)[labels], dtype)), got)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(loss(x, labels))))(x)
    assert np.isfinite(np.asarray(grads, np.float32)).all()
    assert not np.asarray(grads)[~where].any()


def test_cross_entropy_agrees_with_optax_in_float32():
    x, labels = logits_of(jnp.float32, (4, 9)), jnp.array([1, 8, 0, 4])
    assert_close(
        cross_entropy(x, labels),
        np.asarray(jax.jit(optax.softmax_cross_entropy_with_integer_labels)(x, labels)),
        rtol=1e-6,
        atol=1e-6,
    )
    q = jnp.asarray(oracle(logits_of(jnp.float32, (4, 9), 1.0)[::-1])[0], jnp.float32)
    expected = np.asarray(jax.jit(optax.softmax_cross_entropy)(x, q))
    assert_close(cross_entropy(x, q), expected, rtol=1e-6, atol=1e-6)


def test_labels_that_cannot_be():
    x = jnp.zeros((4, 3), jnp.float16)
    losses = np.asarray(cross_entropy(x, jnp.array([-1, 0, 3, 2])))
    assert np.isnan(losses).tolist() == [True, False, True, False]
    masked = cross_entropy(x, jnp.array([0, 1, 0, 1]), where=jnp.array([False, True, True]))
    assert np.isinf(np.asarray(masked)).tolist() == [True, False, True, False]
    # a class of probability 0 adds nothing where its log-probability is -inf
    x = jnp.array([[0.0, -jnp.inf]], jnp.float16)
    assert_bitwise(cross_entropy(x, jnp.array([[1.0, 0.0]])), np.zeros(1, np.float32))


def test_vmap_gives_the_same():
    x, labels = logits_of(jnp.float16), jnp.array([0, 6, 3, 3, 1])
    assert_close(jax.vmap(all_of)(x), [np.asarray(y) for y in all_of(x)], rtol=1e-6)
    assert_close(jax.vmap(cross_entropy)(x, labels), np.asarray(cross_entropy(x, labels)), rtol=1e-6)


def test_errors_say_the_rule_and_the_fix():
    x = jnp.zeros((2, 3), jnp.float16)
    with pytest.raises(TypeError, match="logits must be a float array; got int32. Cast them"):
        jaxmp.softmax(jnp.arange(3))
    with pytest.raises(TypeError, match="True where an element counts; got int32. Write where=mask != 0."):
        jaxmp.logsumexp(x, where=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"integer labels for logits of shape \(2, 3\) .* shape \(2,\); got \(2, 1\)"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"float labels .* must have the shape \(2, 3\); got \(2,\)"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2))
    with pytest.raises(TypeError, match=r"labels must be integers .* got bool"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2, bool))
    with pytest.raises(ValueError, match="label_smoothing must be from 0 to 1; got 1.5"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2, jnp.int32), label_smoothing=1.5)
