"""Digests: every bit counts, and no device does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp._src.devices import digests

RNG = np.random.default_rng(0)
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "uint8", "int4", "bool"]


def digest(x):
    return digests.of_leaves({"x": x})["x"]


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64", "float64", "int64", "complex128"])
def test_every_bit_of_every_element_counts(dtype):
    """Of arrays of NumPy and of jax alike."""
    dtype = jnp.dtype(dtype)
    drawn = RNG.normal(size=(2, 3)) * 5
    x = np.asarray(drawn > 0 if dtype == np.bool_ else drawn).astype(dtype)
    whole, seen = digest(x), set()
    bits = 1 if dtype in (np.bool_, jnp.int4) else 8 * dtype.itemsize
    for element in range(6):
        for bit in range(bits):
            raw = bytearray(x.tobytes())
            raw[element * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            seen.add(digest(np.frombuffer(bytes(raw), dtype).reshape(2, 3)))
    assert whole not in seen and len(seen) == 6 * bits
    if dtype.itemsize < 8 or dtype == jnp.complex64:
        assert digest(jnp.asarray(x)) == whole


def test_changes_of_many_elements_are_seen():
    """An even number of signs, elements that change places, zeros: sums of products miss some of these."""
    x = jnp.asarray(RNG.normal(size=(64, 64)), jnp.float32)
    others = [-x, x.T, x[::-1], x.at[:2].multiply(-1), x.at[0, :2].set(x[0, 1::-1]), x.at[:32].set(0)]
    assert len({digest(x), *map(digest, others)}) == 7
    assert digest(jnp.array([0.0, -0.0])) != digest(jnp.array([-0.0, 0.0]))
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(nans[:1]) != digest(nans[1:])


PLACES = [((8, 1), P("a", "b")), ((4, 2), P(("a", "b"))), ((4, 2), P(None, "a")), ((2, 3), P("b")), ((1, 1), P())]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", AxisType.Auto), ("float32", AxisType.Explicit)])
def test_devices_do_not_count(dtype, kind):
    x = jnp.asarray((RNG.normal(size=(24, 24)) * 5).astype(dtype))
    whole = digest(x)
    for shape, spec in PLACES:
        devices = jax.devices()[: shape[0] * shape[1]]
        mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(kind,) * 2, devices=devices)
        assert digest(jax.device_put(x, NamedSharding(mesh, spec))) == whole
    host = NamedSharding(jax.make_mesh((4,), ("a",)), P("a"), memory_kind="pinned_host")
    assert digest(jax.device_put(x, host)) == whole


def test_wide_numbers_have_one_digest_with_x64_and_without():
    for x in (RNG.normal(size=7), np.arange(-3, 4), RNG.normal(size=3) * 1j, np.int64(2**40), np.array(0.1)):
        x = np.asarray(x)
        with jax.enable_x64(True):
            inside, of_jax = digest(x), digest(jnp.asarray(x))
        assert digest(x) == inside == of_jax
