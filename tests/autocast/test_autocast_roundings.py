"""No compiled program sees two versions of one 16-bit value: losses of saturated logits are not below zero.

XLA computes bfloat16 sums in float32, and may hand the unrounded result to some readers and the rounded one to others.
"""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from test_sums import in_turn

import jaxmp
from helpers import assert_close

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype(np.float32)
W = (RNG.normal(size=(32, 10)) * 4).astype(np.float32)
B = RNG.normal(size=10).astype(np.float32)
LABELS = np.argmax(X @ W + B, -1).astype(np.int32)  # saturated: each label has the largest logit
ROWS = np.arange(len(X))

HEADS: dict[str, Any] = {
    "bias": lambda x: x @ W + B[None],
    "residual": lambda x: (x @ W + B[None]) + jnp.tanh(x @ W),
    "convolution": lambda x: lax.conv(x[..., None], W.T[..., None], (1,), "SAME")[..., 0] + B[None],
    "rematerialized": jax.checkpoint(lambda x: x @ W + B[None]),
    "concatenated": lambda x: jnp.concatenate([x @ W[:, :4] + B[None, :4], x @ W[:, 4:] + B[None, 4:]], -1),
    "scanned": lambda x: lax.scan(lambda c, w: (c, c @ w + B[None]), x, W[None])[1][0],
}


def by_hand(z: jax.Array) -> jax.Array:
    return jax.scipy.special.logsumexp(z, -1) - z[ROWS, LABELS]


def of_a_row(row: jax.Array, label: jax.Array) -> jax.Array:
    return jax.scipy.special.logsumexp(row) - lax.dynamic_slice(row, (label,), (1,))[0]


LOSSES: dict[str, Any] = {
    "classes": lambda z: optax.softmax_cross_entropy_with_integer_labels(z, LABELS),
    "log_softmax": lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), LABELS[:, None], 1)[:, 0],
    "logsumexp": by_hand,
    "dynamic_slice": lambda z: jax.vmap(of_a_row)(z, LABELS),
    "rematerialized": jax.checkpoint(by_hand),
    "in a cond": lambda z: lax.cond(z[0, 0] > 1e6, lambda z: z[:, 0], by_hand, z),
    "split": lambda z: jax.scipy.special.logsumexp(z, -1) - jnp.sort(z, -1)[:, -1],
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("head", "dtype"), in_turn(HEADS, [BF16, F16]), ids=HEADS)
def test_losses_of_saturated_logits(head: str, dtype: Any) -> None:
    def losses(x: jax.Array) -> Any:
        return {name: jaxmp.autocast(lambda x, f=f: f(HEADS[head](x)), dtype)(x) for name, f in LOSSES.items()}

    def with_logits(x: jax.Array) -> Any:
        z = HEADS[head](x)
        return LOSSES["classes"](z), z, jnp.argmax(z, -1)

    def gradient(x: jax.Array) -> Any:
        total = jaxmp.autocast(lambda x: LOSSES["classes"](HEADS[head](x)).sum(), dtype)
        return jax.value_and_grad(total)(x)

    def exact(z: Any) -> Any:
        z = np.asarray(z).astype(np.float64)
        return np.float32(np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1) - z[ROWS, LABELS])

    run = jax.jit(lambda x: (losses(x), jaxmp.autocast(with_logits, dtype)(x), gradient(x), HEADS[head](x)))
    losses_by_name, (loss, logits, best), (total, grad), exact_logits = jax.device_get(run(X))
    for name, values in losses_by_name.items():
        assert values.dtype == F32 and values.min() >= -1e-5, (name, values.min())
        assert_close(np.minimum(values, 8.0), np.minimum(exact(exact_logits), 8.0), atol=0.35)
    assert logits.dtype == dtype
    assert_close(loss, exact(logits), atol=2e-5)  # of the logits that are returned
    assert (best == np.argmax(np.asarray(logits).astype(np.float64), -1)).all()
    assert total >= -1e-4 and np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("fn", "x", "gathered"),
    [
        pytest.param(lambda x: by_hand(x @ W).mean(), X, "f32", id="the label, from the float32 values of the sum"),
        pytest.param(
            lambda table: jax.nn.softmax(table[LABELS]),
            jnp.zeros((1000, 8), BF16),
            "bf16",
            id="rows of a table of 16-bit params, which stays as small as it is",
        ),
    ],
)
def test_what_is_gathered(fn: Any, x: Any, gathered: str) -> None:
    text = str(jax.make_jaxpr(jaxmp.autocast(fn, BF16))(x))
    assert re.findall(r":(\w+)\[[\d,]*\] = gather\[", text) == [gathered]


def test_a_layer_that_is_one_operation_is_rounded_for_both() -> None:
    """BatchNorm computes in float32 and returns 16 bits."""
    norm = nn.BatchNorm(use_running_average=True)
    variables = jax.jit(norm.init)(jax.random.key(0), X)

    def fn(x: jax.Array) -> Any:
        y = norm.apply(variables, x)
        return jax.nn.relu(y), jnp.exp(y)

    run = jaxmp.autocast(fn, BF16)
    pins = re.findall(r" = (?:reduce_precision|optimization_barrier)\b", str(jax.make_jaxpr(run)(X)))
    assert len(pins) == 1
    low, exponential = jax.jit(run)(X)
    assert low.dtype == BF16
    expected = np.exp(np.asarray(low).astype(np.float64))
    at = expected > 1  # where relu is the identity
    assert_close(np.asarray(exponential)[at], np.float32(expected[at]), rtol=1e-6)


def test_what_is_read_in_both_is_rounded_for_both() -> None:
    """The value itself, a function of it in float32, and a matmul of it, against the rounded value."""

    def fn(x: jax.Array) -> Any:
        z = x @ W + B[None]
        return z, jnp.exp(z / 64), z @ W.T

    z, exponential, product = jax.jit(jaxmp.autocast(fn, BF16))(X)
    rounded = np.asarray(z).astype(np.float32)
    assert_close(exponential, np.exp(rounded / 64), rtol=1e-5)
    expected = rounded @ np.asarray(jnp.asarray(W).astype(BF16).astype(F32)).T
    assert_close(np.float32(product), expected, rtol=2e-2, atol=2.0)
