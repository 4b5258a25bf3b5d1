"""What autocast takes for the bias of a matmul or a convolution: shapes that are none, beside float64, and biases.

A bias is added in 16 bits, as a part of its matmul. Any other addend in float32 makes a sum in float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from test_exact_products import equinox_layer, haiku_layer, linen_layer, nnx_layer
from test_sums import DTYPES, in_turn

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


def zero(layer: Any, x: Any) -> Any:
    """A layer of linen whose result is zero, so that a sum with it is the addend."""
    return layer.apply(jax.tree.map(jnp.zeros_like, jax.eval_shape(layer.init, jax.random.key(0), x)), x)


def dense(x: Any, features: int = 8, axis: Any = -1) -> Any:
    return zero(nn.DenseGeneral(features, axis), x)


def conv(x: Any, features: int = 8) -> Any:
    return zero(nn.Conv(features, (3,)), x)


def linear(x: Any) -> Any:
    return nnx.Linear(x.shape[-1], 8, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))(x)


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
    "NLinear of channels": (lambda x: x[:, -1:] + dense(x.mT).mT, CHANNELS),
    "NLinear after a layer": (lambda x: x[-1:] + dense(nn.relu(dense(x.T, 16))).T, CHANNELS[0]),
    "vmap": (jax.vmap(lambda x: x[-1:] + x @ zeros(16, 8)), SERIES),
    "[N, 1]": (lambda x: x @ zeros(16, 8) + x[:, :1], SERIES),
    "[B, 1, C]": (lambda x: x[:, :1] + x @ zeros(5, 5), CHANNELS),
    "[T, 1] of all": (lambda x: x @ zeros(5, 8) + x[0, :, :1], CHANNELS),
    "a product with the weight on the left": (lambda x: zeros(8, 16) @ x.T + x[:, 0][None], SERIES),
    "a convolution": (lambda x: conv(x) + x[:, :, :1], CHANNELS),
    # of the features, but computed
    "a mean": (lambda x: x @ zeros(16, 16) + x.mean(0), SERIES),
    "a scaled row": (lambda x: x @ zeros(16, 16) + 2 * x[0], SERIES),
    "in a jitted function": (lambda x: jax.jit(lambda x, m: x @ zeros(16, 16) + m)(x, x.mean(0)), SERIES),
    "in a checkpoint": (lambda x: jax.checkpoint(lambda x, m: x @ zeros(16, 16) + m)(x, x.mean(0)), SERIES),
    "in a scan": (lambda x: lax.scan(lambda c, r: (c, r @ zeros(16, 16) + c), x.mean(0), x[:, None])[1], SERIES),
    "a row, in a branch": (lambda x: lax.cond(x[0, 0] > 0, row_added, lambda x, r: x, x, x[0]), SERIES),
    "a row, in a jitted function of a jitted one": (jax.jit(lambda x: jax.jit(row_added)(x, x[0])), SERIES),
    "a row of the data": (lambda x: x @ zeros(16, 16) + x[0], SERIES),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("name", "dtype"), in_turn(ADDENDS, DTYPES.values()), ids=ADDENDS)
def test_what_is_no_bias_is_added_in_float32(name, dtype):
    """Beside float64; the products are zero, so the sum is the addend."""
    fn, x = ADDENDS[name]
    y = jax.jit(jaxmp.autocast(fn, dtype))(x)
    assert y.dtype == jnp.float32
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(fn)(np.asarray(x, np.float64)))
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * float(jnp.finfo(jnp.float32).eps))


X, IMAGE = numbers(6, 16), numbers(2, 6, 6, 16)
W, B = numbers(16, 8), numbers(8)


BIASES: dict[str, Any] = {
    "x @ w + b": lambda x, w, b: x @ w + b,
    "b + x @ w": lambda x, w, b: b + x @ w,
    "of stacked ones": lambda x, w, b: x @ jnp.stack([w, w])[1] + jnp.stack([b, b])[1],
    "in a scan over layers": lambda x, w, b: lax.scan(
        lambda h, p: (h, h @ p[0] + p[1]), x, (jnp.stack([w, w]), jnp.stack([b, b]))
    )[1],
    "shared by two layers": lambda x, w, b: nn.relu(x @ w + b) @ w.T @ w + b,
    "heads": lambda x, w, b: jnp.einsum("ni,iho->nho", x, w.reshape(16, 2, 4)) + b.reshape(2, 4),
    "one bias for all heads": lambda x, w, b: jnp.einsum("ni,iho->nho", x, w.reshape(16, 2, 4)) + b[:4],
    "one feature": lambda x, w, b: x @ w[:, :1] + b[:1],
    "jitted": lambda x, w, b: jax.jit(lambda x, w: x @ w)(x, w) + b,
    "in a checkpoint": lambda x, w, b: jax.checkpoint(lambda x, w, b: x @ w + b)(x, w, b),
    "linen": linen_layer,
    "linen, convolution": lambda x, w, b: linen_layer(jnp.asarray(IMAGE), w[None, None], b),
    "nnx": nnx_layer,
    "haiku": haiku_layer,
    "equinox, convolution": lambda x, w, b: equinox_layer(jnp.moveaxis(jnp.asarray(IMAGE), -1, 1), w[None, None], b),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_a_part_of_its_matmul(name):
    assert jax.eval_shape(jaxmp.autocast(BIASES[name]), X, W, B).dtype == jnp.float16


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x, w, b: x @ w + 2 * b, id="a computed bias"),
        pytest.param(lambda x, w, b: x @ w + b[:1], id="one number for all features"),
        pytest.param(lambda x, w, b: w.T @ x.T + b[:, None], id="a column"),
        pytest.param(lambda x, w, b: x[0] @ w + b, id="the row of a single example"),
    ],
)
def test_sums_of_what_arrives(fn):
    assert jax.eval_shape(jaxmp.autocast(fn, jnp.bfloat16), X, W, B).dtype == jnp.float32
