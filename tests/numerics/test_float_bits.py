"""Exact float32 arithmetic against numpy's, which is IEEE's on every CPU, for subnormals too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import assert_exact
from jaxmp._src.numerics import float_bits

FLOAT32 = np.finfo(np.float32)
EDGES = np.array(
    [1e-45, 1e-42, 2.0**-127, FLOAT32.tiny, 2.0**-125, 1.0, 1.75, 448.0, 449.0, 2.0**126, 2.0**127, FLOAT32.max],
    np.float32,
)
SIZE = 64  # one shape for all examples, so that each property compiles once

positive = st.lists(st.integers(1, 0x7F7FFFFF), min_size=SIZE, max_size=SIZE).map(
    lambda bits: np.array(bits, np.int32).view(np.float32)
)


def divide(numerator, x):
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(numerator) / x


quotient, product, split = (
    jax.jit(float_bits.quotient, static_argnums=0),
    jax.jit(float_bits.product),
    jax.jit(float_bits.split),
)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("numerator", [448.0, 0.1, 448.0 * 2.0**-100, float(FLOAT32.max)])
def test_quotients_of_the_edges(numerator):
    expected, actual = divide(numerator, EDGES), np.asarray(quotient(numerator, EDGES))
    assert_exact(actual[expected >= 2.0**-149], expected[expected >= 2.0**-149])
    assert np.all(actual.view(np.int32)[expected < 2.0**-149] == 0)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("numerator", [448.0, 1.0])
def test_quotients_by_every_significand(numerator):
    x = np.arange(0x3F800000, 0x40000000, dtype=np.int32).view(np.float32)
    assert_exact(quotient(numerator, x), divide(numerator, x))


@settings(max_examples=40)
@given(x=positive, numerator=st.sampled_from([448.0, 1.0]))
def test_quotients(x, numerator):
    assert_exact(quotient(numerator, x), divide(numerator, x))


def test_a_quotient_does_not_depend_on_how_well_the_backend_divides(monkeypatch):
    """GPUs are some units off; here the guess is off by 8."""
    exact = float_bits._from_exponent
    x = np.random.default_rng(0).uniform(0.5, 4.0, 4096).astype(np.float32)
    for error in (-(2.0**-21), 2.0**-21):
        monkeypatch.setattr(float_bits, "_from_exponent", lambda e, error=error: exact(e) * np.float32(1 + error))
        assert_exact(jax.jit(lambda x: float_bits.quotient(448.0, x))(x), divide(448.0, x))


@settings(max_examples=40)
@given(x=positive, y=positive)
def test_products(x, y):
    with np.errstate(over="ignore", under="ignore"):
        expected = x * y
    x = x * np.where(np.arange(SIZE) % 2, np.float32(-1), np.float32(1))
    expected = expected * np.where(np.arange(SIZE) % 2, np.float32(-1), np.float32(1))
    subnormal = np.abs(expected) < FLOAT32.tiny
    actual = np.asarray(product(x, y))
    assert_exact(actual[~subnormal], expected[~subnormal])
    assert np.all(np.abs(actual[subnormal]) <= FLOAT32.tiny)


def test_products_of_the_edges():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1e-45, 1e-42, np.inf], np.float32)
    y = np.array([2.0**127] * 7 + [2.0**-127], np.float32)
    assert_exact(product(x, y), x * y)


@settings(max_examples=40)
@given(x=positive)
def test_split(x):
    exponent, significand = split(x)
    assert exponent.dtype == significand.dtype == jnp.int32
    assert np.all((significand >= 2**23) & (significand < 2**24))
    assert_exact(np.ldexp(np.asarray(significand, np.float64), np.asarray(exponent) - 23), x.astype(np.float64))


def test_every_power_of_two_and_back():
    """Clamped at the ends of the normal numbers."""
    exponents = np.arange(-126, 128).astype(np.float32)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32))
    beyond = np.array([-1000.0, -127.0, -np.inf, 128.0, 1000.0, np.inf], np.float32)
    ends = np.repeat(np.array([2.0**-126, 2.0**127], np.float32), 3)
    power_of_two, log2 = jax.jit(float_bits.power_of_two), jax.jit(float_bits.log2_of_power_of_two)
    assert_exact(power_of_two(np.concatenate([exponents, beyond])), np.concatenate([powers, ends]))
    others = np.array([0.0, 1e-45, 2.0**-127, FLOAT32.max, np.inf], np.float32)
    log2_of_others = np.array([-126, -126, -126, 127, 127], np.float32)
    assert_exact(log2(np.concatenate([powers, others])), np.concatenate([exponents, log2_of_others]))


def test_magnitudes_are_ordered_as_their_bits_and_nan_is_least():
    x = np.array([np.nan, 0.0, -1e-45, 1e-42, -1.0, FLOAT32.max, -np.inf], np.float32)
    bits = np.asarray(float_bits.magnitude_bits(x))
    assert bits[0] == bits[1] == 0
    assert np.all(np.diff(bits[1:]) > 0)
    assert_exact(float_bits.from_bits(bits[1:]), np.abs(x[1:]))


# Exponents: every power of two, its neighbours, and what is no normal number


POWERS = np.ldexp(np.float32(1), np.arange(-126, 128))
NEIGHBOURS = np.concatenate([POWERS, np.nextafter(POWERS, np.float32(np.inf)), np.nextafter(POWERS[1:], np.float32(0))])
OTHERS = np.array([0.0, -0.0, 1e-45, 1e-39, np.inf, -np.inf, np.nan], np.float32)


def test_the_power_of_two_below():
    expected = np.ldexp(np.float32(1), np.frexp(NEIGHBOURS)[1] - 1)
    of_others = np.array([0, 0, 0, 0, np.inf, np.inf, np.inf], np.float32)
    below = jax.jit(float_bits.power_of_two_below)(np.concatenate([NEIGHBOURS, -NEIGHBOURS, OTHERS]))
    assert_exact(below, np.concatenate([expected, expected, of_others]))


def test_the_inverse_of_a_power_of_two():
    powers = POWERS[POWERS <= 2.0**126]
    assert_exact(float_bits.inverse_of_power_of_two(powers), np.float32(1) / powers)


def test_log2_rounded_up():
    expected = np.ceil(np.log2(NEIGHBOURS.astype(np.float64))).astype(np.float32)
    assert_exact(np.asarray(jax.jit(float_bits.ceil_log2)(NEIGHBOURS)) + 0.0, expected + 0.0)
