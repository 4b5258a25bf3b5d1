"""Flags of elements in bytes and their counts, beside NumPy; also in the form that XLA for GPU compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from helpers import assert_exact
from pallas_kernels import backend, flags

# Nine of one shape: more than one byte counts. Rows, a leaf without, one that is summed at once; empty; one element.
SHAPES = [(768,)] * 9 + [(300, 256), (300, 256), (3, 3, 64, 100), (40_000,), (400, 100, 1), (0, 4), (), (1,)]


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def platform(request, monkeypatch):
    """The form that is traced where the default device is of this platform; it is compiled for the CPU."""
    monkeypatch.setattr(backend, "default_platform", lambda: request.param)
    return request.param


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    first = [rng.random(shape) < 0.3 for shape in SHAPES]
    second = [None if i % 4 == 3 else rng.random(shape) < 0.6 for i, shape in enumerate(SHAPES)]
    return first, second


def expected(first, second):
    return sum(x.sum() for x in first), sum(0 if y is None else y.sum() for y in second)


@pytest.mark.thorough(1)
def test_the_counts_of_both_flags_are_numpys(platform):
    first, second = drawn()
    found = jax.jit(flags.count_in_pass)(first, second)
    assert [x.dtype for x in found] == [jnp.float32] * 2
    assert tuple(map(int, found)) == expected(first, second)
    assert tuple(map(int, flags.count_in_pass(first, second))) == expected(first, second)  # without a trace
    only_first = jax.jit(lambda first: flags.count_in_pass(first, [None] * len(first)))(first)
    assert tuple(map(int, only_first)) == (expected(first, second)[0], 0)


@pytest.mark.thorough(1)
def test_all_flags_set_in_many_leaves_do_not_run_over_a_byte(platform):
    ones = [np.ones(5, bool)] * 100
    assert tuple(map(int, jax.jit(flags.count_in_pass)(ones, ones))) == (500, 500)


@pytest.mark.thorough(1)
def test_bytes_hold_both_flags(platform):
    first, second = drawn()
    both = jax.jit(flags.in_bytes)(first, second)
    assert {x.dtype for x in both} == {jnp.dtype(jnp.int8)}
    for x, found in zip(first, flags.first_of(both), strict=True):
        np.testing.assert_array_equal(found, x)
    assert tuple(map(int, jax.jit(flags.count)(both))) == expected(first, second)


@pytest.mark.thorough(1)
def test_counts_under_vmap(platform):
    batch = [jnp.asarray(np.stack(xs)) for xs in zip(drawn(0)[0], drawn(1)[0], strict=True)]
    found = jax.vmap(flags.count_in_pass)(batch, batch)
    each = [expected(x, x) for x in (drawn(0)[0], drawn(1)[0])]
    assert_exact(np.stack(found, axis=1), np.float32(each))


def sums_to_a_scalar(f, *args):
    """How many sums in the program end in one number."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return sum(e.primitive.name == "reduce_sum" and e.outvars[0].aval.shape == () for e in jaxpr.eqns)


def test_on_a_gpu_each_shape_is_one_sum(monkeypatch):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    many = [jnp.ones(64, bool)] * 20 + [jnp.ones((400, 128), bool)] * 20
    assert sums_to_a_scalar(flags.count_in_pass, many, many) == 2


@pytest.mark.parametrize("manual", [True, False], ids=["shard_map", "jit on a mesh"])
def test_on_a_mesh_only_arrays_that_are_whole_on_their_device_are_added(monkeypatch, manual):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    xs = [jax.device_put(jnp.ones(64, bool), jax.NamedSharding(mesh, P("d" if i % 2 else None))) for i in range(4)]
    seen = []

    def count(xs):
        seen.append(sums_to_a_scalar(lambda xs: flags.count_in_pass(xs, xs), xs))
        kept, _ = flags.count_in_pass(xs, xs)
        return jax.lax.psum(kept, "d") if manual else kept

    f = jax.shard_map(count, mesh=mesh, in_specs=P("d"), out_specs=P()) if manual else count
    compiled = jax.jit(f).lower(xs).compile()
    assert int(compiled(xs)) == 4 * 64
    assert seen[0] == (1 if manual else 4)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_arrays_that_are_split_and_whole_are_added(monkeypatch, check_vma):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def count(split, whole):  # both of 3 elements on each device
        both = jnp.stack(flags.count_in_pass([split, whole], [whole, None]))
        return jax.lax.pmax(both, "d")

    f = jax.shard_map(count, mesh=mesh, in_specs=(P("d"), P()), out_specs=P(), check_vma=check_vma)
    split = jnp.zeros(24, bool).at[3].set(True).at[7:9].set(True)
    assert_exact(jax.jit(f)(split, jnp.ones(3, bool)), np.float32([2 + 3, 3]))
