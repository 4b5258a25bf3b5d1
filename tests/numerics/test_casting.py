"""Roundings and casts against NumPy's and ml_dtypes', over every value of the 16-bit floats and round it."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import assert_exact, assert_moved
from jaxmp._src.numerics import casting, float_bits
from kernel_oracles import saturated

NARROW = (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
TINY = np.finfo(np.float32).tiny


@functools.cache
def jitted(name: str, dtype):
    if name == "round_to":
        return jax.jit(lambda x: casting.round_to(x, dtype))
    return jax.jit(lambda x: casting.saturating_cast(x, dtype).astype(jnp.float32))


def rounded(x: np.ndarray, dtype) -> np.ndarray:
    """float32 `x` clipped to the range of `dtype`, cast and cast back, on the host."""
    return saturated(x, dtype).astype(np.float32)


def assert_rounds(x: np.ndarray, dtype) -> None:
    """Both functions give the host's rounding. Of float32 subnormals, which XLA flushes on CPU, bfloat16 holds some:
    there the two agree with each other.
    """
    ours = jitted("round_to", dtype)(x)
    assert_exact(jitted("saturating_cast", dtype)(x), ours)
    known = ~((x != 0) & (np.abs(x) < TINY)) | (np.dtype(dtype) != ml_dtypes.bfloat16)
    assert_exact(np.asarray(ours)[known], rounded(x, dtype)[known])


def every_value(dtype) -> np.ndarray:
    """float32: every value of `dtype`, the midpoints between them, and the neighbours of all."""
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    values = np.arange(np.iinfo(unsigned).max + 1).astype(unsigned).view(dtype).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    midpoints = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    x = np.concatenate([values, midpoints.astype(np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):  # past the last value; signalling NaNs
        return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: np.dtype(d).name)
def test_every_value_and_its_neighbourhood(dtype):
    """`lax.reduce_precision` flushes float16's subnormals, 1e-6 among them; a plain cast makes 65520 inf."""
    x = every_value(dtype)
    assert_rounds(x, dtype)


@settings(max_examples=40)
@given(st.lists(st.floats(width=32), min_size=32, max_size=32), st.sampled_from(NARROW))
def test_any_float(values, dtype):
    x = np.array(values, np.float32)
    assert_rounds(x, dtype)
    once = jitted("round_to", dtype)(x)
    assert_exact(jitted("round_to", dtype)(once), once)


MAX16 = 65504.0
MAXB16 = float(ml_dtypes.finfo(jnp.bfloat16).max)
MAX32 = float(np.finfo(np.float32).max)
EDGES = {
    jnp.float16: [
        (-0.0, -0.0),
        (-(2.0**-25), -0.0),  # half of the smallest subnormal: to even
        (2.0**-25 * 1.0001, 2.0**-24),
        (1e-6, 17 * 2.0**-24),
        (2.0**-14 - 2.0**-25, 2.0**-14),  # tie, carried into the normals
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),
        (65520.0, MAX16),  # a plain cast: inf
        (-1e6, -MAX16),
    ],
    jnp.bfloat16: [(-0.0, -0.0), (2.0**-126, 2.0**-126), (1.0 + 2.0**-8, 1.0), (MAX32, MAXB16)],
    jnp.float8_e4m3fn: [(2.0**-10, 0.0), (2.0**-10 * 1.001, 2.0**-9), (480.0, 448.0)],  # a plain cast: NaN
    jnp.float8_e5m2: [(2.0**-16, 2.0**-16), (2.0**-17, 0.0), (61440.0, 57344.0)],
}


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: np.dtype(d).name)
def test_golden_edges(dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    pairs = [*EDGES[dtype], (limit, limit), (np.inf, limit), (-np.inf, -limit), (np.nan, np.nan)]
    x, expected = (np.array(side, np.float32) for side in zip(*pairs, strict=True))
    assert_exact(jitted("round_to", dtype)(x), expected)
    assert_exact(jitted("saturating_cast", dtype)(x), expected)
    assert_exact(casting.round_to(x[0], dtype), expected[0])  # a scalar


def test_rounding_to_float32_is_nothing():
    x = np.float32([0.1, np.inf, -0.0, np.nan])
    assert_moved(casting.round_to(x, jnp.float32), x)


def test_round_to_wants_float32():
    with pytest.raises(TypeError, match="round_to rounds float32 arrays; got bfloat16. Cast it with"):
        casting.round_to(np.ones(2, jnp.bfloat16), jnp.float16)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "source, target, expected",
    [
        (jnp.bfloat16, jnp.float16, MAX16),  # bfloat16 has no 65504, the value to clip at
        (jnp.float16, jnp.bfloat16, MAXB16),
        (jnp.float16, jnp.float8_e4m3fn, 448.0),
        (jnp.bfloat16, jnp.float8_e5m2, 57344.0),
        (jnp.float16, jnp.float32, np.inf),  # wider dtypes hold what there was
        (jnp.float32, jnp.float32, np.inf),
    ],
    ids=lambda x: np.dtype(x).name if isinstance(x, type(jnp.float16)) else "",
)
def test_saturation_between_dtypes(source, target, expected):
    run = jax.jit(lambda x: casting.saturating_cast(x, target))
    x = np.array([np.inf, -np.inf, 0.5, -0.0, np.nan], source)
    assert_exact(run(x), np.array([expected, -expected, 0.5, -0.0, np.nan], target))
    if (source, target) == (jnp.bfloat16, jnp.float16):
        x = np.array([65280.0, 65536.0, 1e6, -1e30, 0.0], source)
        assert_exact(run(x), np.array([65280.0, MAX16, MAX16, -MAX16, 0.0], target))


# Casts of leaves and trees


KEPT = {
    "int": jnp.arange(3),
    "bool": np.array([True]),
    "key": jax.random.key(0),
    "raw key": jax.random.PRNGKey(0),
    "complex": jnp.array([1j]),
    "e4m3": jnp.ones(2, jnp.float8_e4m3fn),
    "e5m2 spec": jax.ShapeDtypeStruct((2,), jnp.float8_e5m2),
    "int spec": jax.ShapeDtypeStruct((2,), jnp.int32),
    "number": 1.5,
    "text": "text",
    "function": len,
}


@pytest.mark.parametrize(("dtype", "make"), [(jnp.float16, jnp.asarray), (jnp.bfloat16, np.asarray)])
def test_cast_float(dtype, make):
    x = np.float32([0.1, 1e30, -0.0])
    with np.errstate(over="ignore"):
        assert_exact(casting.cast_float(make(x), dtype), x.astype(dtype))
    assert_exact(casting.cast_float(make(x), dtype, saturate=True), rounded(x, dtype).astype(dtype))
    for same in (make(x), make(x.astype(jnp.bfloat16))):
        assert casting.cast_float(same, same.dtype) is same


def test_abstract_arrays_are_cast():
    """jmp leaves them as they are, so that `jax.eval_shape` and the arrays disagree."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "data")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spec = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    cast = casting.cast_float(spec, jnp.bfloat16, saturate=True)
    assert cast == jax.ShapeDtypeStruct((4, 2), jnp.bfloat16, sharding=sharding)
    assert jax.eval_shape(lambda x: casting.cast_float(x, jnp.float16), spec).dtype == jnp.float16


def test_cast_floats():
    tree = KEPT | {
        "w": jnp.ones(2),
        "deep": [jnp.ones((), jnp.bfloat16), None],
        "spec": jax.ShapeDtypeStruct((), jnp.float32),
    }
    cast = casting.cast_floats(tree, jnp.float16)
    assert_exact(cast["w"], np.ones(2, np.float16))
    assert_exact(cast["deep"], [np.ones((), np.float16), None])
    assert cast["spec"].dtype == jnp.float16
    assert all(cast[name] is KEPT[name] for name in KEPT)


def test_casts_keep_shardings():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "data")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.arange(8.0), sharding)
    for cast in (casting.cast_float(x, jnp.float16, saturate=True), casting.round_to(x, jnp.float16)):
        assert cast.sharding.is_equivalent_to(sharding, 1)


def test_dtypes_of_16_bits():
    dtypes = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2, jnp.int16)
    assert [casting.is_low_precision(dtype) for dtype in dtypes] == [True, True, False, False, False]


# Reciprocals


reciprocal = jax.jit(float_bits.reciprocal)


def test_reciprocals_of_powers_of_two_are_exact():
    exponents = np.arange(-126, 127)
    assert_exact(reciprocal(np.ldexp(np.float32(1), exponents)), np.ldexp(np.float32(1), -exponents))


def test_reciprocal_at_the_edges():
    inverse = reciprocal(np.float32([np.inf, 0.0, np.nan, 2.0**127, MAX32]))
    assert inverse.dtype == jnp.float32
    np.testing.assert_allclose(
        inverse, [0.0, np.inf, np.nan, 0.0, 0.0], rtol=0, atol=1.2e-38
    )  # subnormals may be flushed


@settings(max_examples=40)
@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=16, max_size=16))
def test_reciprocal_is_the_rounded_quotient(values):
    """float32(1 / float64(scale)), as Megatron-LM and torch compute it."""
    scales = np.array(values, np.float32)
    assert_exact(reciprocal(scales), (1 / scales.astype(np.float64)).astype(np.float32))


# Stochastic rounding


def neighbours(size: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """The two values of `dtype` that a size lies between, both the size where it is one."""
    bits = size.astype(dtype).view(np.uint16)
    bits -= bits.view(dtype).astype(np.float64) > size
    low = bits.view(dtype).astype(np.float64)
    above = (bits + 1).view(dtype).astype(np.float64)
    return low, np.where(low == size, low, np.minimum(above, float(ml_dtypes.finfo(dtype).max)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_stochastic_rounding_goes_up_for_as_many_of_the_random_bits_as_it_should(dtype):
    """Exactly: the odds are counted on the random numbers next to the threshold, not estimated."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-30, 18, size=4000)
    x = (rng.choice([-1, 1], 4000) * (1 + rng.random(4000)) * 2.0**exponents).astype(np.float32)
    x = np.concatenate([x, rounded(x, dtype), np.float32([0.0, -0.0, 65504, 65519.9, 7e4, 3.4e38])])
    size = np.minimum(np.abs(x).astype(np.float64), float(ml_dtypes.finfo(dtype).max))
    low, high = neighbours(size, dtype)
    width = 24 if dtype == jnp.float16 else 16
    odds = np.where(high > low, (size - low) / np.where(high > low, high - low, 1.0), 0.0)
    threshold = np.ceil(odds * 2.0**width).astype(np.int64)  # so many of 2^width numbers round up
    run = jax.jit(lambda bits: casting.stochastic_round(x, dtype, bits))
    lowest, highest = 0, 2**width - 1
    for offset in (-1, 0):
        number = np.clip(threshold + offset, lowest, highest)
        if dtype == jnp.bfloat16:  # rounds up for the largest numbers, float16 for the smallest
            bits = (highest - number).astype(np.uint32)
        else:
            bits = (number << 8).astype(np.uint32)
        expected = np.copysign(np.where(number < threshold, high, low), x).astype(np.float32)
        assert_exact(run(bits), expected)


def test_stochastic_rounding_keeps_what_is_not_finite_and_float32():
    x, bits = np.float32([np.inf, -np.inf, np.nan]), np.full(3, 0xFFFFFFFF, np.uint32)
    run = jax.jit(lambda x: [casting.stochastic_round(x, dtype, bits) for dtype in (jnp.float16, jnp.bfloat16)])
    assert_moved(run(x), [x, x])
    y = jnp.array([1e-45, 0.1, -3.0])
    assert casting.stochastic_round(y, jnp.float32, bits) is y


def test_errors_of_stochastic_rounding():
    bits = jnp.zeros(2, jnp.uint32)
    with pytest.raises(TypeError, match="stochastic_round rounds float32 arrays; got float16. Cast it"):
        casting.stochastic_round(jnp.ones(2, jnp.float16), jnp.bfloat16, bits)
    with pytest.raises(TypeError, match="bfloat16 or float32; got float8_e4m3fn. For 8 bits see jaxmp.compress"):
        casting.stochastic_round(jnp.ones(2), jnp.float8_e4m3fn, bits)
