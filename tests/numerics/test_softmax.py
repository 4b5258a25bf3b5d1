"""Softmax, its logarithm and the cross-entropy for 16-bit logits, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_within_ulps

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
softmax = jax.jit(jaxmp.softmax, static_argnums=1)
cross_entropy = jax.jit(jaxmp.softmax_cross_entropy)


def oracle(x, where=None, axis=-1):
    """(softmax, its logarithm) in float64; rows without elements as documented."""
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
    return weights / np.where(total == 0, 1.0, total), log_p


def logits_of(dtype, shape=(5, 7), scale=4.0):
    return (np.random.default_rng(0).normal(size=shape) * scale).astype(dtype)


def test_masks_say_what_counts_and_empty_rows_are_empty_sums():
    x, mask = logits_of(jnp.float16), np.random.default_rng(1).random((5, 7)) < 0.6
    x[1, 2], x[2, 0], x[3, 1] = np.nan, np.inf, -np.inf
    mask[1, 2] = mask[2, 0] = mask[4] = False
    mask[3, 1] = True
    p = softmax(x, where=mask)
    assert_close(p, np.asarray(oracle(x, mask)[0], np.float32), rtol=2e-6, atol=1e-6)
    assert_exact(p[4], np.zeros(7, np.float32))
    grads = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(jaxmp.softmax(x, where=mask) ** 2)))(x), np.float32)
    assert np.isfinite(grads).all() and not grads[~mask].any() and grads[mask].any()


@pytest.mark.thorough(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_values_and_gradients_are_those_of_float64_rounded_once(dtype):
    x, labels = logits_of(dtype), np.array([0, 6, 3, 3, 1])

    @jax.jit
    def run(x):
        return (
            jaxmp.softmax(x),
            jaxmp.softmax(x, (0, 1)),
            jax.grad(lambda x: jnp.sum(jaxmp.softmax_cross_entropy(x, labels)))(x),
        )

    of_rows, of_all, grads = run(x)
    assert_close(of_rows, np.asarray(oracle(x)[0], np.float32), rtol=2e-6, atol=1e-6)
    assert_close(of_all, np.asarray(oracle(x, axis=(0, 1))[0], np.float32), rtol=2e-6, atol=1e-6)
    assert jax.eval_shape(lambda x: jaxmp.softmax(x, dtype=jnp.bfloat16), x).dtype == jnp.bfloat16
    assert grads.dtype == dtype
    # half a unit in the last place, and float32's own rounding of numbers up to 1
    rtol = float(jnp.finfo(dtype).eps) * 0.51
    np.testing.assert_allclose(np.asarray(grads, np.float64), oracle(x)[0] - np.eye(7)[labels], rtol=rtol, atol=3e-7)


def test_infinities_and_nan_that_count_show():
    for bad in (jnp.inf, jnp.nan):
        x = np.array([0.0, bad], jnp.float16)
        loss = cross_entropy(x, np.array(0))
        assert not np.isfinite(np.asarray(softmax(x))).all() and not np.isfinite(np.asarray(loss))


def test_huge_logits_and_long_rows_of_float16():
    x = np.array([6e4, -6e4, 6e4, 0.0], jnp.float16)  # in float16, 6e4 - -6e4 is inf
    assert_exact(softmax(x), np.array([0.5, 0, 0.5, 0], np.float32))  # exp of 0, and of numbers that leave 0
    loss, grads = jax.jit(jax.value_and_grad(jaxmp.softmax_cross_entropy))(x, np.array(3))
    assert_close(loss, np.float32(60000.69), rtol=1e-6)
    assert_exact(grads, jnp.array([0.5, 0, 0.5, -1], jnp.float16))
    x = np.zeros(70_000, jnp.float16)
    assert_close(cross_entropy(x, np.array(0)), np.float32(np.log(70_000)), rtol=1e-6)
    assert_close(softmax(x), np.full(70_000, 1 / 70_000, np.float32), rtol=1e-4)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("dtype", "smoothing", "masked"), [(jnp.float32, 0.0, False), (jnp.float16, 0.1, False), (jnp.float16, 0.1, True)]
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
    assert_within_ulps(loss(x, jnp.asarray(np.eye(7)[labels], dtype)), got, 4)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(loss(x, labels))))(x)
    assert np.isfinite(np.asarray(grads, np.float32)).all()
    assert not np.asarray(grads)[~where].any()


def test_labels_that_cannot_be():
    x = np.zeros((4, 3), jnp.float16)
    losses = cross_entropy(x, np.array([-1, 0, 3, 2]))
    assert np.isnan(losses).tolist() == [True, False, True, False]
    masked = cross_entropy(x, np.array([0, 1, 0, 1]), where=np.array([False, True, True]))
    assert np.isinf(masked).tolist() == [True, False, True, False]
    # a class of probability 0 adds nothing where its log-probability is -inf
    x = np.array([[0.0, -np.inf]], jnp.float16)
    assert_exact(cross_entropy(x, np.float32([[1.0, 0.0]])), np.zeros(1, np.float32))


def test_vmap_gives_the_same():
    functions = (jaxmp.softmax, jaxmp.softmax_cross_entropy)
    args = (logits_of(jnp.float16),), (logits_of(jnp.float16), np.array([0, 6, 3, 3, 1]))
    pairs = jax.jit(lambda args: [(jax.vmap(f)(*xs), f(*xs)) for f, xs in zip(functions, args, strict=True)])
    for mapped, plain in pairs(args):
        assert_within_ulps(mapped, plain, 4)


def test_errors_say_the_rule_and_the_fix():
    x = jnp.zeros((2, 3), jnp.float16)
    with pytest.raises(TypeError, match="logits must be a float array; got int32. Cast them"):
        jaxmp.softmax(jnp.arange(3))
    with pytest.raises(TypeError, match="True where an element counts; got int32. Write where=mask != 0."):
        jaxmp.softmax(x, where=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"integer labels .* shape \(2,\); got \(2, 1\), for logits of shape \(2, 3\)"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"float labels must have shape \(2, 3\); got \(2,\)"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2))
    with pytest.raises(TypeError, match=r"labels must be integers .* got bool"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2, bool))
    with pytest.raises(ValueError, match="label_smoothing must be from 0 to 1; got 1.5"):
        jaxmp.softmax_cross_entropy(x, jnp.zeros(2, jnp.int32), label_smoothing=1.5)


# ---- all functions, rows of every magnitude and mask, first and second derivatives


def rows_of_every_kind(dtype, seed, rows=256, classes=9):
    """Logits of all magnitudes that the dtype holds, masks (`where`, -inf, both, nothing left), labels, weights."""
    rng = np.random.default_rng(seed)
    limit = min(float(jnp.finfo(dtype).max), 1e38)  # the difference of two logits is a float32
    scale = 10.0 ** rng.uniform(-6, np.log10(limit) + 0.5, (rows, 1))
    scale[: rows // 2] = 10.0 ** rng.uniform(-2, 1, (rows // 2, 1))
    offset = rng.choice([0.0, 100.0, -100.0, 3e4, -3e4], (rows, 1))  # beyond the range of exp, on both sides
    x = np.clip(rng.normal(size=(rows, classes)) * scale + offset, -limit, limit)
    x[rng.random(x.shape) < rng.choice([0.0, 0.3, 1.0], (rows, 1), p=[0.5, 0.45, 0.05])] = -np.inf
    where = rng.random(x.shape) < rng.choice([1.0, 0.6, 0.0], (rows, 1), p=[0.5, 0.45, 0.05])
    x = x.astype(np.float32).astype(dtype)
    counts = where & (x != -np.inf)
    labels = np.where(counts.any(-1), np.argmax(counts * rng.random(x.shape), -1), 0).astype(np.int32)
    q = counts * rng.random(x.shape) * (rng.random(x.shape) < 0.8)
    q = (q / np.maximum(q.sum(-1, keepdims=True), 1e-3)).astype(np.float32)
    u, v = (rng.normal(size=x.shape).astype(np.float32) for _ in range(2))
    v = v.astype(dtype)
    return {"x": x, "where": where, "labels": labels, "q": q, "u": u, "v": v}


@jax.jit
def values_and_derivatives(x, where, labels, q, u, v):
    """By function: (value, gradient of the sum of u times it, derivative of this gradient along v)."""
    row = u[:, 0]

    def of_softmax(x):
        p = jaxmp.softmax(x, where=where)
        return jnp.sum(u * p), p

    def of_classes(x):
        y = jaxmp.softmax_cross_entropy(x, labels, where=where)
        return jnp.sum(row * y), y

    def of_distributions(x):
        y = jaxmp.softmax_cross_entropy(x, q, where=where)
        return jnp.sum(row * y), y

    def derived(f):
        grad = jax.grad(f, has_aux=True)
        (first, value), (second, _) = jax.jvp(grad, (x,), (v,))
        return value, first, second

    functions = (of_softmax, of_classes, of_distributions)
    return {f.__name__: derived(f) for f in functions}


@np.errstate(all="ignore")
def values_and_derivatives_in_float64(x, where, labels, q, u, v):
    """The same from the equations: with p the softmax, dp = p (v - p.v) is its derivative along v."""
    counts = where & (x != -np.inf)
    p, log_p = oracle(x, where)
    p, u, q = p, u.astype(np.float64) * 1.0, q.astype(np.float64)
    v = np.where(counts, v.astype(np.float64), 0.0)
    row = u[:, :1]

    def dot(a, b):
        return np.sum(a * b, -1, keepdims=True)

    def loss(q):
        terms = np.where(q != 0, -q * np.where(counts, log_p, 0.0), 0.0)
        return np.where(counts.any(-1), terms.sum(-1), 0.0)

    dp = p * (v - dot(p, v))
    one_hot = np.eye(x.shape[-1])[labels] * counts.any(-1, keepdims=True)
    results = {
        "of_softmax": (p, p * (u - dot(p, u)), dp * (u - dot(p, u)) - p * dot(u, dp)),
        "of_classes": (loss(one_hot), row * (p - one_hot), row * dp),
        "of_distributions": (
            loss(q),
            row * (p * q.sum(-1, keepdims=True) - q),
            row * dp * q.sum(-1, keepdims=True),
        ),
    }
    return {name: (value, *(np.where(counts, d, 0.0) for d in rest)) for name, (value, *rest) in results.items()}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@np.errstate(over="ignore", invalid="ignore")
def test_rows_of_every_kind_and_their_derivatives_are_those_of_float64(dtype):
    eps, least = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
    for seed in range(10):
        rows = rows_of_every_kind(dtype, seed)
        expected = values_and_derivatives_in_float64(**rows)
        largest = np.abs(np.where(np.isfinite(rows["x"]), rows["x"], 0).astype(np.float64)).max(-1)
        for name, results in values_and_derivatives(**rows).items():
            for i, (result, exact) in enumerate(zip(results, expected[name], strict=True)):
                exact = exact.astype(np.float32).astype(np.float64)
                result = np.asarray(result).astype(np.float64)
                # float32 rounds x - m, which is a relative error of exp(x - m)
                bound = 3e-5 + 3e-5 * np.abs(exact)
                if i == 0:
                    bound = np.maximum(bound, 3e-7 * largest.reshape(largest.shape + (1,) * (exact.ndim - 1)))
                else:  # rounded to the dtype
                    bound = bound + eps * np.abs(exact) + least
                wrong = ~((result == exact) | (np.abs(result - exact) <= bound))
                if wrong.any():
                    at = np.argwhere(wrong)[0][0]
                    raise AssertionError((name, i, rows["x"][at], rows["where"][at], result[at], exact[at]))


def test_the_gradient_of_a_distribution_is_that_of_its_equation():
    """d/dq_c = -log p_c, where q_c is 0 as well."""
    x, q = jnp.array([[1.0, 2.0, 0.0]]), jnp.array([[0.0, 1.0, 0.0]])
    grad = jax.jit(jax.grad(lambda q: jaxmp.softmax_cross_entropy(x, q).sum()))(q)
    assert_close(grad, -np.asarray(oracle(x)[1], np.float32), rtol=1e-6)
