"""Checksums of leaves: the same wherever a leaf lies, and another one after any change of one element."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp._src.checkpoint import leaf_sums

RNG = np.random.default_rng(0)


def mixed(dimension, position):
    """SplitMix64 of (dimension, position) in Python's integers, made odd."""
    x = (position + ((dimension + 1) << 48)) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return (x ^ (x >> 31)) | 1


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 1), (2, 3, 100), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_the_sum_is_the_one_in_the_docstring(shape, dtype):
    x = np.asarray(RNG.normal(size=shape) * 9, dtype)
    bits = x.view(f"u{x.dtype.itemsize}")
    total = 0
    for at in itertools.product(*map(range, shape)):
        term = int(bits[at])
        for d, position in enumerate(at):
            term = term * mixed(d, position)
        total += term
    assert leaf_sums.sum_of_part(x, (0,) * x.ndim, x.shape) == total % 2**64


def test_rows_longer_than_a_block_are_summed_alike(monkeypatch):
    x = RNG.normal(size=(3, 2, 40)).astype(np.float32)
    expected = leaf_sums.sum_of_part(x, (0, 0, 0), x.shape)
    for block in (1, 7, 50, 90):
        monkeypatch.setattr(leaf_sums, "_BLOCK", block)
        assert leaf_sums.sum_of_part(x, (0, 0, 0), x.shape) == expected


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_it_does_not_matter_where_a_leaf_lies(axis_type):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x = jnp.asarray(RNG.normal(size=(8, 6, 4)), jnp.bfloat16)
    specs = [P(), P("a"), P("a", "b"), P(("a", "b")), P(None, "b"), P(None, None, "a")]
    found = [leaf_sums.of_leaves({"x": jax.device_put(x, NamedSharding(mesh, spec))}) for spec in specs]
    assert all(one == found[0] for one in [*found, leaf_sums.of_leaves({"x": np.asarray(x)})])


def test_padding_does_not_count():
    """Nor does where it is cut: the part of the last device is padding alone, that of the one before it in part."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = RNG.normal(size=(6, 13)).astype(np.float16)
    padded = jnp.asarray(np.pad(x, ((0, 0), (0, 3)), constant_values=7.0))
    for spec in (P(), P(None, "a")):
        found = leaf_sums.of_leaves(
            {"x": jax.device_put(padded, NamedSharding(mesh, spec))}, lambda path, shape: (6, 13)
        )
        assert found == leaf_sums.of_leaves({"x": x})


def test_any_element_that_changes_changes_it():
    x = RNG.normal(size=(5, 130)).astype(np.float16)
    before = leaf_sums.of_leaves({"x": x})
    for row, column, bit in itertools.product((0, 4), (0, 3, 129), (0, 7, 15)):
        other = x.copy()
        other.view(np.uint16)[row, column] ^= np.uint16(1 << bit)
        assert leaf_sums.of_leaves({"x": other}) != before
    swapped = x[::-1].copy(), np.roll(x, 1, 1), x.reshape(130, 5), x.view(np.int16), x[:, :129]
    assert all(leaf_sums.of_leaves({"x": other}) != before for other in swapped)


def test_keys_numbers_and_complex_numbers_have_one_and_text_has_none():
    sums = leaf_sums.of_leaves({"key": jax.random.key(1), "n": 3, "on": True, "z": np.ones(2, np.complex128) * 1j})
    assert len(set(sums.values())) == 4
    assert sums["key"] == leaf_sums.of_leaves({"key": jax.random.key_data(jax.random.key(1))})["key"]
    with pytest.raises(ValueError, match="a checkpoint holds arrays and numbers; got str at extra/name"):
        leaf_sums.of_leaves({"extra/name": "a"})


def test_what_differs_is_named():
    assert leaf_sums.differing({"a": "1", "b": "2", "d": "4"}, {"a": "1", "b": "3", "c": "5"}) == ["b", "c", "d"]
