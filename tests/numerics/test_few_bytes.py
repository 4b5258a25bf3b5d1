"""Arrays in the few bytes that devices send: against NumPy, at the ends of the range, and with inf and NaN."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import assert_exact, assert_moved
from jaxmp._src.numerics import few_bytes

ROUND = jax.jit(few_bytes.encode, static_argnums=1)
BACK = jax.jit(few_bytes.decode, static_argnums=1)
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
EIGHT_BITS = pytest.mark.parametrize("name", LIMITS)


def by_hand(x, name):
    """Blocks of 128 with the largest power of two at which they fit, in float64."""
    blocks = np.asarray(x, np.float64).reshape(-1, 128)
    out = np.empty_like(blocks)
    for i, block in enumerate(blocks):
        amax, k = np.abs(block).max(), 126
        while k > -126 and amax * 2.0**k > LIMITS[name]:
            k -= 1
        scaled = block * 2.0**k
        dtype = getattr(ml_dtypes, name, None)
        rounded = np.rint(scaled) if dtype is None else scaled.astype(np.float32).astype(dtype).astype(np.float64)
        out[i] = rounded * 2.0**-k
    return out.reshape(x.shape).astype(np.float32)


@pytest.mark.thorough(1)
@EIGHT_BITS
def test_values_are_those_of_numpy(name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 512)).astype(np.float32) * np.repeat(10.0 ** rng.integers(-20, 20, (4, 4)), 128, axis=1)
    x = x.astype(np.float32)
    x[1, :128], x[2, 0], x[3, 5] = 0.0, 3e38, -0.0
    codes, values = ROUND(x, getattr(jnp, name))
    assert codes.shape == (4, 516) and codes.dtype == jnp.uint8
    assert_exact(values, by_hand(x, name))
    back = np.asarray(BACK(codes, getattr(jnp, name)))
    assert_exact(back + np.float32(0), np.asarray(values) + np.float32(0))  # int8 has no -0.0


@pytest.mark.thorough(2)
@EIGHT_BITS
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
def test_a_block_with_inf_or_nan_is_nan_and_others_are_not(name, bad):
    x = np.ones(384, np.float32)
    x[130] = bad
    codes, values = ROUND(x, getattr(jnp, name))
    for found in (values, BACK(codes, getattr(jnp, name))):
        np.testing.assert_array_equal(np.isnan(found), np.arange(384) // 128 == 1)
        assert_exact(found[:128], np.ones(128, np.float32))


def test_wider_dtypes():
    x = jnp.array([1.0 + 2**-9, 3.4e38, jnp.inf, jnp.nan, -1e-30])
    codes, values = ROUND(x, jnp.bfloat16)
    assert codes.dtype == jnp.uint16
    largest = float(jnp.finfo(jnp.bfloat16).max)
    assert_exact(values, jnp.array([1.0, largest, jnp.inf, jnp.nan, float(jnp.bfloat16(-1e-30))], jnp.float32))
    assert_exact(BACK(codes, jnp.bfloat16), values)
    codes, values = ROUND(x, jnp.float32)
    assert_moved(values, x)
    assert_moved(BACK(codes, jnp.float32), x)
