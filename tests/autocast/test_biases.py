"""What autocast takes for the bias of a matmul or a convolution: shapes that are none, beside float64, and biases.

A bias is added in 16 bits, as a part of its matmul. Any other addend in float32 makes a sum in float32.
"""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from test_sums import both_dtypes

import jaxmp

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def as_users_write_it():
    """`[n, 8] + [8]`."""
    with jax.numpy_rank_promotion("allow"):
        yield


def numbers(*shape: int) -> Any:
    """Multiples of 1/8 up to 1: products and sums of a few are exact in both dtypes."""
    return RNG.integers(1, 9, shape).astype(np.float32) / 8


def far(*shape: int) -> Any:
    """Numbers that no 16-bit dtype holds."""
    return 1000.0 + RNG.uniform(0, 1, shape).astype(np.float32)


def dense(x: Any, features: int = 8, axis: Any = -1) -> Any:
    """A layer of linen whose result is zero, so that a sum with it is the addend."""
    layer = nn.DenseGeneral(features, axis)
    return layer.apply(jax.tree.map(jnp.zeros_like, jax.eval_shape(layer.init, jax.random.key(0), x)), x)


def linear(x: Any, features: int = 8) -> Any:
    layer = nnx.Linear(x.shape[-1], features, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    return layer(x)


def conv(x: Any, features: int = 8) -> Any:
    layer = nn.Conv(features, (3,))
    return layer.apply(jax.tree.map(jnp.zeros_like, jax.eval_shape(layer.init, jax.random.key(0), x)), x)


def zeros(*shape: int) -> Any:
    return jnp.zeros(shape)


def row_added(x: Any, row: Any) -> Any:
    return x @ zeros(16, 16) + row


SERIES = far(6, 16)  # [N, T]
CHANNELS = far(6, 16, 5)  # [B, T, C]
ADDENDS: dict[str, tuple[Any, Any]] = {
    # a residual that is repeated along the features
    "NLinear": (lambda x: x[:, -1:] + dense(x), SERIES),
    "NLinear, nnx": (lambda x: linear(x) + x[:, -1:], SERIES),
    "NLinear, one row": (lambda x: x[:, -1:] + dense(x), SERIES[:1]),
    "NLinear, one step": (lambda x: x[:, -1:] + dense(x, 1), SERIES),
    "NLinear, no batch": (lambda x: x[-1:] + dense(x), SERIES[0]),
    "NLinear of channels": (lambda x: x[:, -1:] + dense(x.mT).mT, CHANNELS),
    "NLinear of channels, one row": (lambda x: x[:, -1:] + dense(x.mT).mT, CHANNELS[:1]),
    "NLinear of channels, no batch": (lambda x: x[-1:] + dense(x.T).T, CHANNELS[0]),
    "NLinear after a layer": (lambda x: x[-1:] + dense(nn.relu(dense(x.T, 16))).T, CHANNELS[0]),
    "vmap": (jax.vmap(lambda x: x[-1:] + x @ zeros(16, 8)), SERIES),
    "[N, 1]": (lambda x: x @ zeros(16, 8) + x[:, :1], SERIES),
    "[B, T, 1]": (lambda x: x @ zeros(5, 8) + x[:, :, :1], CHANNELS),
    "[B, 1, 1]": (lambda x: x @ zeros(5, 8) + x[:, :1, :1], CHANNELS),
    "[B, 1, C]": (lambda x: x[:, :1] + x @ zeros(5, 5), CHANNELS),
    "[T, 1] of all": (lambda x: x @ zeros(5, 8) + x[0, :, :1], CHANNELS),
    "einsum": (lambda x: jnp.einsum("btc,co->bto", x, zeros(5, 8)) + x[..., :1], CHANNELS),
    "einsum, heads": (lambda x: jnp.einsum("btc,cho->btho", x, zeros(5, 2, 4)) + x[:, :, None, :1], CHANNELS),
    "a product with the weight on the left": (lambda x: zeros(8, 16) @ x.T + x[:, 0][None], SERIES),
    "a convolution": (lambda x: conv(x) + x[:, :, :1], CHANNELS),
    "a convolution's rows": (lambda x: conv(x, 5) + x[:, :1], CHANNELS),
    # of the features, but computed
    "a mean": (lambda x: x @ zeros(16, 16) + x.mean(0), SERIES),
    "a scaled row": (lambda x: x @ zeros(16, 16) + 2 * x[0], SERIES),
    "in a jitted function": (lambda x: jax.jit(lambda x, m: x @ zeros(16, 16) + m)(x, x.mean(0)), SERIES),
    "in a checkpoint": (lambda x: jax.checkpoint(lambda x, m: x @ zeros(16, 16) + m)(x, x.mean(0)), SERIES),
    "in a scan": (lambda x: lax.scan(lambda c, r: (c, r @ zeros(16, 16) + c), x.mean(0), x[:, None])[1], SERIES),
    "a maximum": (lambda x: x @ zeros(16, 16) + x.max(0), SERIES),
    "a row, in a branch": (lambda x: lax.cond(x[0, 0] > 0, row_added, lambda x, r: x, x, x[0]), SERIES),
    "a row, in a jitted function": (lambda x: jax.jit(row_added)(x, x[0]), SERIES),
    "a row, in a jitted function of a jitted one": (
        lambda x: jax.jit(lambda x: jax.jit(row_added)(x, x[0]))(x),
        SERIES,
    ),
    "a row, in a scan": (lambda x: lax.scan(lambda c, r: (c, row_added(r, x[0])), 0.0, x[:, None])[1], SERIES),
    "a row of the data": (lambda x: x @ zeros(16, 16) + x[0], SERIES),
}


@pytest.mark.thorough(6)
@both_dtypes
@pytest.mark.parametrize("name", ADDENDS)
def test_what_is_no_bias_is_added_in_float32(name, dtype):
    """Beside float64; the products are zero, so the sum is the addend."""
    fn, x = ADDENDS[name]
    y = jax.jit(jaxmp.autocast(fn, dtype))(x)
    assert y.dtype == jnp.float32
    with jax.enable_x64(True):
        exact = np.asarray(fn(np.asarray(x, np.float64)), np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * float(jnp.finfo(jnp.float32).eps))


X, IMAGE = numbers(6, 16), numbers(2, 6, 6, 16)
W, B = numbers(16, 8), numbers(8)


def haiku(make: Any, w: Any, b: Any, x: Any) -> Any:
    net = hk.without_apply_rng(hk.transform(lambda x: make(name="layer")(x)))
    return net.apply({"layer": {"w": w, "b": b}}, x)


def equinox(layer: Any, w: Any, b: Any) -> Any:
    return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w, b)))


def nnx_layer(layer: Any, w: Any, b: Any) -> Any:
    layer.kernel.set_value(w)
    layer.bias.set_value(b)
    return layer


def gelu_of(w: Any) -> Any:
    return nn.gelu(w)


BIASES: dict[str, Any] = {
    "x @ w + b": lambda x, w, b: x @ w + b,
    "b + x @ w": lambda x, w, b: b + x @ w,
    "b[None]": lambda x, w, b: x @ w + b[None],
    "of stacked ones": lambda x, w, b: x @ jnp.stack([w, w])[1] + jnp.stack([b, b])[1],
    "in a scan over layers": lambda x, w, b: lax.scan(
        lambda h, p: (h, h @ p[0] + p[1]), x, (jnp.stack([w, w]), jnp.stack([b, b]))
    )[1],
    "shared by two layers": lambda x, w, b: nn.relu(x @ w + b) @ w.T @ w + b,
    "by vmap": lambda x, w, b: jax.vmap(lambda r: w.T @ r + b)(x),
    "three axes": lambda x, w, b: jnp.stack([x, x]) @ w + b,
    "heads": lambda x, w, b: jnp.einsum("ni,iho->nho", x, w.reshape(16, 2, 4)) + b.reshape(2, 4),
    "one bias for all heads": lambda x, w, b: jnp.einsum("ni,iho->nho", x, w.reshape(16, 2, 4)) + b[:4],
    "one feature": lambda x, w, b: x @ w[:, :1] + b[:1],
    "a computed weight": lambda x, w, b: nn.relu(x) @ gelu_of(w) + b,
    "a graph": lambda x, w, b: jnp.eye(6) @ (x @ w) + b,
    "jitted": lambda x, w, b: jax.jit(lambda x, w: x @ w)(x, w) + b,
    "in a checkpoint": lambda x, w, b: jax.checkpoint(lambda x, w, b: x @ w + b)(x, w, b),
    "linen": lambda x, w, b: nn.Dense(8).apply({"params": {"kernel": w, "bias": b}}, x),
    "linen, general": lambda x, w, b: nn.DenseGeneral((2, 4)).apply(
        {"params": {"kernel": w.reshape(16, 2, 4), "bias": b.reshape(2, 4)}}, x
    ),
    "linen, convolution": lambda x, w, b: nn.Conv(8, (1, 1)).apply(
        {"params": {"kernel": w[None, None], "bias": b}}, jnp.asarray(IMAGE)
    ),
    "nnx": lambda x, w, b: nnx_layer(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), w, b)(x),
    "nnx, convolution": lambda x, w, b: nnx_layer(nnx.Conv(16, 8, (1, 1), rngs=nnx.Rngs(0)), w[None, None], b)(
        jnp.asarray(IMAGE)
    ),
    "haiku": lambda x, w, b: haiku(functools.partial(hk.Linear, 8), w, b, x),
    "haiku, convolution": lambda x, w, b: haiku(
        functools.partial(hk.Conv2D, 8, 1), w[None, None], b, jnp.asarray(IMAGE)
    ),
    "equinox": lambda x, w, b: equinox(eqx.nn.Linear(16, 8, key=jax.random.key(0)), w.T, b)(x),
    "equinox, convolution": lambda x, w, b: equinox(
        eqx.nn.Conv2d(16, 8, 1, key=jax.random.key(0)), w.T[:, :, None, None], b[:, None, None]
    )(jnp.moveaxis(jnp.asarray(IMAGE), -1, 1)),
}


@pytest.mark.thorough(8)
@both_dtypes
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_a_part_of_its_matmul(name, dtype):
    y = jax.eval_shape(jaxmp.autocast(BIASES[name], dtype), X, W, B)
    assert y.dtype == dtype


def test_what_only_the_widest_dtype_says():
    """A bias that is computed, one number for all features, and the row of a single example: sums of what arrives."""
    others = {
        "scaled": lambda x, w, b: x @ w + 2 * b,
        "one number for all": lambda x, w, b: x @ w + b[:1],
        "a column": lambda x, w, b: w.T @ x.T + b[:, None],
        "a vector": lambda x, w, b: x[0] @ w + b,
    }
    for name, fn in others.items():
        assert jax.eval_shape(jaxmp.autocast(fn, jnp.bfloat16), X, W, B).dtype == jnp.float32, name


@pytest.mark.thorough(0)
def test_a_forecast_trains_as_in_float32():
    """NLinear: the last value, in float32, and what a layer adds to it."""
    rng = np.random.default_rng(0)
    walks = jnp.asarray(100 + np.cumsum(rng.normal(0, 0.02, (256, 48)), 1), jnp.float32)
    x, y = walks[:, :40], walks[:, 40:]
    layer = nn.Dense(8)

    def loss_fn(params):
        last = x[:, -1:]
        return jnp.mean((last + layer.apply({"params": params}, x - last) - y) ** 2)

    losses = {}
    for policy in ("fp32", "bf16", "fp16"):
        params32 = layer.init(jax.random.key(0), x)["params"]
        tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
        params, opt_state = jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)

        @jax.jit
        def step(params, opt_state, tx=tx, policy=policy):
            loss, grads = jaxmp.value_and_grad(loss_fn, policy=policy)(params, opt_state=opt_state)
            return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

        for _ in range(80):
            params, opt_state, loss = step(params, opt_state)
        losses[policy] = float(loss)
    assert losses["fp32"] < 0.01
    for policy in ("bf16", "fp16"):
        np.testing.assert_allclose(losses[policy], losses["fp32"], rtol=0.1)
