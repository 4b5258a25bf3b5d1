"""The numerics of `pallas_kernels.moments`: unbiased roundings, averages that move, masters that split and join.

Codes are read by tables (`kernel_oracles`).
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kernel_oracles as oracles
from helpers import assert_exact
from pallas_kernels import moments
from pallas_kernels.moments import Quantized

SHAPE = (16, 256)
FORMATS = [
    (dtype, signed) for dtype in ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2") for signed in (True, False)
]
each_format = pytest.mark.parametrize(
    "dtype, signed", FORMATS, ids=[f"{d}-{'signed' if s else 'not_negative'}" for d, s in FORMATS]
)


def values(signed: bool, seed: int = 0) -> np.ndarray:
    """Moments of many magnitudes, as those of a layer are."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE) * np.exp(rng.normal(size=SHAPE))
    return (x if signed else x**2).astype(np.float32) * np.float32(1e-3)


@functools.cache
def rounder(dtype: str, signed: bool):
    """Compiled (x, step) -> what x is worth after it was stored and read."""

    @jax.jit
    def once(x, step):
        bits = moments.noise(moments.flat_index(SHAPE), 0.0, step)
        bits = moments.low_bits(bits) if signed else moments.high_bits(bits)
        like = moments.zeros(SHAPE, dtype, signed=signed)
        return moments.requantize(x, like, bits, signed=signed)

    return once


def worth(stored, signed: bool) -> np.ndarray:
    if isinstance(stored, Quantized):
        return oracles.decoded(stored.codes, stored.scales, signed=signed)
    return np.asarray(stored).astype(np.float64)


@pytest.mark.thorough(2)
@each_format
def test_rounding_is_unbiased(dtype, signed):
    """The mean over n noises is within 5 standard errors of x, the spacing of the two neighbours known; and its
    overall bias within 5 of those of all elements together.
    """
    x, n = values(signed), 100
    once = rounder(dtype, signed)
    total = sum(worth(once(x, step), signed) for step in range(n))
    if dtype == "bfloat16":
        spacing = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 7).astype(np.float64)
        scales = np.ones_like(x)
    else:
        stored = once(x, 0)
        scales = np.repeat(np.asarray(stored.scales, np.float64), oracles.GROUP, axis=1)
        low, high = oracles.neighbours(x / scales, stored.codes.dtype.name, signed=signed)
        spacing = (high - low) * scales
    error = total / n - x
    below_first = np.zeros(SHAPE, bool)
    if not signed and dtype != "bfloat16":  # these never become 0, but the smallest code
        first = np.unique(oracles.table(stored.codes.dtype.name, signed=False)[1:])
        below_first = x / scales < first[first > 0][0]
        assert np.all(error[below_first] >= 0)
    error, spacing = error[~below_first], spacing[~below_first]
    assert np.mean(below_first) < 0.01
    standard_error = 0.5 * spacing / np.sqrt(n) + 1e-6 * np.abs(x[~below_first])
    assert np.max(np.abs(error) / standard_error) < 5.5
    assert abs(np.sum(error)) < 5 * np.sqrt(np.sum(standard_error**2))


@pytest.mark.thorough(2)
@each_format
def test_what_is_stored_is_a_neighbour(dtype, signed):
    """Which the table of codes decodes."""
    x = values(signed, 1)
    stored = rounder(dtype, signed)(x, 5)
    if dtype == "bfloat16":
        assert stored.dtype == jnp.bfloat16
        assert np.all(np.abs(worth(stored, signed) - x) < np.abs(x) * 2.0**-7)
        return
    name = "uint8" if dtype == "int8" and not signed else dtype
    assert (stored.codes.dtype.name, stored.scales.dtype.name) == (name, "float32")
    assert_exact(stored.scales, np.max(np.abs(x), axis=1, keepdims=True))
    ratio = x.astype(np.float64) / np.asarray(stored.scales, np.float64)
    slack = 1e-6 * np.abs(ratio)  # of the float32 quotient
    low, _ = oracles.neighbours(np.clip(ratio - slack, -1, 1), name, signed=signed)
    _, high = oracles.neighbours(np.clip(ratio + slack, -1, 1), name, signed=signed)
    value = oracles.decoded(stored.codes, np.ones_like(stored.scales), signed=signed)
    assert np.all((value >= low) & (value <= high))
    assert_exact(np.abs(worth(stored, signed)).max(axis=1), np.abs(x).max(axis=1).astype(np.float64))
    np.testing.assert_allclose(moments.dequantize(stored, signed=signed), worth(stored, signed), rtol=1e-6, atol=1e-37)


@functools.cache
def averaged(dtype: str, signed: bool):
    """Compiled (decay, start, feed) -> an average over 400 steps that was stored after each."""

    @jax.jit
    def run(decay, start, feed):
        def step(i, stored):
            x = decay * moments.dequantize(stored, signed=signed) + (1 - decay) * feed
            return rounder(dtype, signed)(x, i)

        return jax.lax.fori_loop(0, 400, step, rounder(dtype, signed)(start, 400))

    return run


def average_in_float64(start: np.ndarray, feed: np.ndarray) -> np.ndarray:
    decay = 0.999**400
    return decay * start.astype(np.float64) + (1 - decay) * feed


@pytest.mark.thorough(2)
@each_format
def test_averages_follow(dtype, signed):
    """On average over elements. To nearest, one of a constant would stop far below it, one of zeros far above."""
    g, zeros = np.random.default_rng(2).uniform(0.5, 1.0, SHAPE).astype(np.float32), np.zeros(SHAPE, np.float32)
    for start, feed in ((zeros, g), (g, zeros)):
        ours = worth(averaged(dtype, signed)(0.999, start, feed), signed)
        assert abs(np.mean(ours) / np.mean(average_in_float64(start, feed)) - 1) < 0.01


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_what_is_positive_stays_so(dtype):
    """Down to 10^-30 of the largest of its group; and zero stays zero, for either sign of moment."""
    x = np.logspace(0, -30, SHAPE[1], dtype=np.float32)[None].repeat(SHAPE[0], 0)
    x[:, -1] = 0.0
    for step in range(2):
        codes = np.asarray(rounder(dtype, False)(x, step).codes).astype(np.float32)
        assert np.all(codes[:, :-1] > 0)
        assert np.all(codes[:, -1] == 0)
        zeros = rounder(dtype, step % 2 == 0)(np.zeros(SHAPE, np.float32), step)
        assert not np.any(np.asarray(zeros.codes).astype(np.float32)) and not np.any(zeros.scales)


def test_bfloat16_at_the_edges():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1.0, -(2.0**-100)], np.float32)
    limit = float(ml_dtypes.finfo(jnp.bfloat16).max)
    expected = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, limit, -limit, 1.0, -(2.0**-100)], jnp.bfloat16)
    for random in (0, 0xFFFF):
        assert_exact(moments.to_bfloat16(jnp.asarray(x), jnp.full(x.shape, random, jnp.int32)), expected)


def test_which_leaves_take_scales():
    groups = {(16, 256): 256, (4096,): 256, (2, 8, 256): 256, (96, 128): 128, (8, 1600): 64, (64, 96): 32}
    assert {shape: moments.group_of(shape) for shape in groups} == groups
    assert not any(moments.group_of(shape) for shape in [(8, 256), (4096, 255), (256, 16), (), (0, 256)])
    assert moments.zeros((16, 255), "int8", signed=True).dtype == jnp.float32
    assert moments.like((2, 8, 512), "int8", signed=False).scales.shape == (2, 8, 2)


# --- noise -----------------------------------------------------------------------------------------------------------


low_bits, high_bits = jax.jit(moments.low_bits), jax.jit(moments.high_bits)


def test_noise_is_the_same_everywhere_and_nowhere_twice():
    index = moments.flat_index((64, 64))
    assert_exact(index.reshape(-1), np.arange(4096, dtype=np.int32))
    noise = jax.jit(moments.noise)
    bits = {(leaf, step): np.asarray(noise(index, float(leaf), step)) for leaf in range(3) for step in range(1, 4)}
    assert_exact(moments.noise(index, 2.0, 3), bits[2, 3])
    for i, (a, x) in enumerate(bits.items()):
        assert np.unique(x).size == x.size  # a bijection of the index
        for b, y in list(bits.items())[:i]:
            assert np.mean(x == y) < 1e-3, (a, b)
            for half in (low_bits, high_bits):
                u, v = (np.asarray(half(z)).reshape(-1) / 65535 for z in (x, y))
                assert abs(np.corrcoef(u, v)[0, 1]) < 0.08, (a, b)  # 5 standard errors of 4096


def test_noise_is_uniform():
    bits = moments.noise(moments.flat_index((256, 256)), 1.0, 1.0)
    for half in (moments.low_bits, moments.high_bits):
        x = np.asarray(half(bits))
        assert x.dtype == np.int32 and x.min() >= 0 and x.max() <= 0xFFFF
        counts = np.bincount(x.reshape(-1) >> 8, minlength=256)
        assert np.sum((counts - 256) ** 2 / 256) < 256 + 5 * np.sqrt(2 * 256)  # chi squared
    low, high = (np.asarray(f(bits)).reshape(-1) for f in (moments.low_bits, moments.high_bits))
    assert abs(np.corrcoef(low, high)[0, 1]) < 5 / 256


# --- split masters ---------------------------------------------------------------------------------------------------

LARGEST = 0x7F7F7FFF  # the largest float32 that rounds to a finite bfloat16
BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x10000, 0x7FFFFF, 0x800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000]
BITS += [LARGEST - 1, LARGEST, 0x7F7F0000, 0x7F7E8000]

split16, split8 = (jax.jit(functools.partial(moments.split, dtype=d)) for d in (jnp.int16, jnp.int8))
join = jax.jit(moments.join)


def floats(bits) -> np.ndarray:
    bits = np.asarray(bits, np.uint32)
    return np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)


def assert_splits(x: np.ndarray) -> None:
    param, remainder = split16(x)
    assert (param.dtype, remainder.dtype) == (jnp.bfloat16, jnp.int16)
    assert_exact(join(param, remainder), x)
    assert_exact(oracles.joined(param, remainder), x)
    bits = x.view(np.uint32)
    is_tie = bits & 0xFFFF == 0x8000
    assert_exact(np.asarray(param)[~is_tie], x.astype(ml_dtypes.bfloat16)[~is_tie])  # the nearest
    away = ((bits[is_tie].astype(np.int64) + 0x8000) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    assert_exact(np.asarray(param)[is_tie], away)


def test_split_and_join():
    rng = np.random.default_rng(0)
    subnormals = rng.integers(0, 1 << 23, 1 << 12)
    ties = (rng.integers(0, 0x7F7F, 1 << 12) << 16) + 0x8000
    assert_splits(floats(np.concatenate([BITS, rng.integers(0, LARGEST + 1, 1 << 16), subnormals, ties])))


def test_masters_of_24_bits():
    """Half a unit of 2^8 in the last place, the param the nearest bfloat16 of what is left; splitting it again is
    exact."""
    rng = np.random.default_rng(1)
    x = floats(np.concatenate([BITS, rng.integers(0, LARGEST + 1, 1 << 16), rng.integers(0, 1 << 23, 1 << 12)]))
    param, remainder = split8(x)
    assert (param.dtype, remainder.dtype) == (jnp.bfloat16, jnp.int8)
    master = np.asarray(join(param, remainder))
    assert_exact(oracles.joined(param, remainder), master)
    error = np.abs(master.view(np.uint32).astype(np.int64) - x.view(np.uint32).astype(np.int64))
    beyond = np.abs(x.view(np.int32) & 0x7FFFFFFF) > 0x7F7F7F80  # what would round to beyond the range
    assert error[~beyond].max() <= 128 and np.all(error[beyond] <= 255)
    assert_exact(split8(master), (param, remainder))


def test_masters_of_24_bits_are_right_on_average():
    """The two neighbours in 24 bits, the upper with the share that is dropped; what 24 bits hold stays."""
    n = 1 << 14
    dropped = np.repeat(np.array([0, 1, 25, 128, 255], np.uint32), n)
    x = floats(0x3F812300 + dropped)  # both signs
    random = moments.split_noise(moments.flat_index(x.shape), 3, 7)
    master = np.asarray(join(*jax.jit(functools.partial(moments.split, dtype=jnp.int8))(x, random=random)))
    moved = (master.view(np.int32) - (x.view(np.int32) & ~0xFF)).reshape(2, 5, n)
    assert set(np.unique(moved)) == {0, 256}
    shares = np.mean(moved == 256, axis=-1)
    expected = np.array([0, 1, 25, 128, 255]) / 256
    assert np.all(np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / n))
    others = moments.split_noise(moments.flat_index(x.shape), 3, 8)
    assert np.mean(np.asarray(random) == np.asarray(others)) < 0.01


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int8])
def test_split_at_the_end_of_the_range(dtype):
    limit = float(ml_dtypes.finfo(jnp.bfloat16).max)
    x = np.array([np.inf, -np.inf, np.finfo(np.float32).max, np.nan], np.float32)
    param, remainder = moments.split(x, dtype)
    assert_exact(param, np.array([limit, -limit, limit, np.nan], jnp.bfloat16))
    assert np.all(np.isfinite(np.asarray(join(param, remainder))) == [True, True, True, False])
