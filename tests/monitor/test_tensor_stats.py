"""Statistics of tensors against a count in NumPy, in every regime; off, they are not in the program."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp._src.monitor import tensor_stats
from regimes import AXIS, mesh_of

FORMATS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def oracle(x):
    """Shares as a cast by NumPy shows them."""
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        x = np.asarray(x).astype(np.float64).ravel()
    finite = x[np.isfinite(x)]
    nonzero = np.abs(finite[finite != 0])
    out = {
        "zeros": np.mean(x == 0),
        "nonfinite": np.mean(~np.isfinite(x)),
        "amax": np.max(np.abs(finite), initial=0.0),
        "smallest": np.min(nonzero) if len(nonzero) else 0.0,
    }
    for name, dtype in FORMATS.items():
        with np.errstate(over="ignore"):
            cast = nonzero.astype(np.float32).astype(dtype).astype(np.float64)
        normal = float(ml_dtypes.finfo(dtype).smallest_normal)
        out[f"overflow/{name}"] = np.sum(~np.isfinite(cast)) / len(x)
        out[f"underflow/{name}"] = np.sum(cast == 0) / len(x)
        out[f"subnormal/{name}"] = np.sum((nonzero < normal) & (cast != 0)) / len(x)
    return out


def edges():
    """Numbers around each threshold of a format."""
    values = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-42, 3e38, 65520.0, 464.0, 61440.0]  # the last three: ties
    for info in map(ml_dtypes.finfo, FORMATS.values()):
        tiny, normal, top = (float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.max))
        values += [tiny, tiny / 2, normal, top, top * (1 + 2.0**-9)]
    exact = np.array(values, np.float32)
    exact = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))])
    return np.concatenate([exact, -exact])


measured = jax.jit(jaxmp.monitor.tensor_stats, static_argnames="histogram")


def compare(stats, x):
    for key, value in oracle(x).items():
        np.testing.assert_allclose(stats[key], value, rtol=1e-6, atol=0, err_msg=key)


def compare_all(stats, whole, names=("amax", "smallest", "zeros", "nonfinite", "overflow", "underflow", "octaves")):
    for name in names:
        np.testing.assert_allclose(getattr(stats, name), getattr(whole, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("histogram", [True, pytest.param(False, marks=pytest.mark.thorough(0))])
def test_shares_are_those_of_a_cast(histogram):
    x = edges()
    compare(measured({"x": x}, histogram=histogram)["x"], x)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_every_pattern_of_a_narrow_dtype(dtype):
    bits = jnp.finfo(dtype).bits
    x = np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype))
    stats = measured({"x": x}, histogram=False)["x"]
    compare(stats, x)
    assert stats["dtype"] == jnp.dtype(dtype).name


def test_both_ways_of_counting_agree():
    """Only one of them runs on a CPU; the other is that of GPUs."""
    m = jnp.asarray(np.abs(edges()).view(np.int32))
    for histogram in (True, False):
        by_comparison, by_scatter = (
            jax.jit(count, static_argnums=1)(m, histogram)
            for count in (tensor_stats._ranks_by_comparison, tensor_stats._ranks_by_scatter)
        )
        assert_exact(by_scatter, by_comparison)
        ranks = np.searchsorted(tensor_stats._edges(histogram), np.asarray(m), side="right")
        assert np.asarray(by_comparison).tolist() == np.bincount(ranks, minlength=len(by_comparison)).tolist()


def test_octaves_are_those_of_log2():
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) * 2.0 ** np.arange(-60.0, 4)
    stats = measured({"x": x})
    k = np.clip(np.frexp(np.abs(x))[1] - 1, -48, 23)  # frexp's fraction is from 1/2 to 1
    np.testing.assert_allclose(stats.octaves[0], np.bincount((k + 48).ravel(), minlength=72) / x.size, rtol=1e-6)
    assert stats.octaves.dtype == jnp.float32


def test_what_is_no_float_is_passed_over():
    tree = {"w": np.ones(3, np.float32), "count": np.arange(3), "empty": np.ones((0, 3), np.float32)}
    tree |= {"key": jax.random.key(0), "fp8_rhs_e4m3_log2_scale": np.float32(3.0)}
    assert jax.eval_shape(jaxmp.monitor.tensor_stats, tree).names == ("w",)
    assert jaxmp.monitor.tensor_stats({}).names == ()


def test_scale_gives_what_gradients_stand_for():
    x = np.array([2.0**-10, 1.0], np.float16)
    stats = measured({"x": x}, scale=np.float32(2.0**-16), histogram=False)
    assert (stats["x"]["amax"], stats["x"]["smallest"]) == (2.0**-16, 2.0**-26)
    assert stats["x"]["underflow/fp16"] == 0.5
    with pytest.raises(KeyError, match="the key must name a tensor; got 'y'. There are x"):
        stats["y"]


def test_a_step_that_is_not_sampled_gives_zeros_of_the_same_type():
    look = jax.jit(lambda x, step: jaxmp.monitor.tensor_stats({"x": x}, when=step % 10 == 0))
    x = jnp.array([1.0, 2.0], jnp.bfloat16)
    on, off = look(x, 10), look(x, 11)
    assert look._cache_size() == 1
    assert (bool(on.sampled), bool(off.sampled)) == (True, False)
    assert float(on.amax[0]) == 2.0 and float(off.amax[0]) == 0.0
    assert jax.tree.map(jax.typeof, on) == jax.tree.map(jax.typeof, off)
    # The passes over the tensor are in a branch.
    text = look.lower(x, 10).compile().as_text()
    assert "conditional(" in text


def test_off_it_is_not_in_the_program():
    def step(x, watch):
        return jnp.sin(x), jaxmp.monitor.tensor_stats({"x": x}, when=False) if watch else None

    lowered = {jax.jit(step, static_argnums=1).lower(jnp.ones(8), watch).as_text() for watch in (True, False)}
    assert len(lowered) == 1


VALUES = (np.linspace(-2, 2, 64) ** 9).astype(np.float32).reshape(8, 8)
VALUES[3, 3] = np.inf
VALUES[1] = 0.0


def _alone():
    return jax.device_get(measured({"x": VALUES}))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_parts_on_devices_give_the_statistics_of_the_whole(how):
    def look(x, step):
        return jaxmp.monitor.tensor_stats({"x": x}, when=step % 10 == 0)

    if how == "pmap":
        run = jax.pmap(look, axis_name=AXIS, in_axes=(0, None), out_axes=None, devices=jax.devices()[:4])
        stats = run(VALUES.reshape(4, 2, 8), 0)
    else:
        specs = {"in_specs": (P(AXIS), P()), "out_specs": P(), "check_vma": how == "shard_map"}
        stats = jax.jit(jax.shard_map(look, mesh=mesh_of(), **specs))(VALUES, 0)
    compare_all(stats, _alone())


def test_shown_as_a_table():
    lines = str(measured({"a": jnp.array([1.0, 1e-9, 0.0, 1e6])}, histogram=False)).splitlines()
    assert lines[0].split()[:3] == ["tensor", "dtype", "amax"]
    assert lines[1].split() == ["a", "float32", "1e+06", "1e-09", "25%", "0%", "0%", "50%", "50%", "50%"]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("axis_type", "dimension"), [(AxisType.Auto, 0), (AxisType.Auto, 1), (AxisType.Explicit, 1)])
def test_what_is_cut_over_devices_stays_cut(axis_type, dimension):
    """Only counts and extremes go over the wire, whichever dimension is cut."""
    mesh = mesh_of(axis_type)
    x = jax.device_put(VALUES, NamedSharding(mesh, P(*[None] * dimension, AXIS)))
    look = jax.jit(lambda x: jaxmp.monitor.step_stats({"x": x}, optax.EmptyState(), {"x": x}))
    compiled = look.lower(x).compile()  # the arrays name their mesh: it needs no jax.set_mesh
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    stats = compiled(x)
    compare_all(stats.grads, _alone())
    assert_moved(stats.probes["x"], VALUES.ravel())


def test_a_condition_that_differs_between_devices_is_an_error():
    def look(x):
        return jaxmp.monitor.tensor_stats({"x": x}, when=x[0, 0] > 0)

    spread = jax.shard_map(look, mesh=mesh_of(), in_specs=P(AXIS), out_specs=P())
    with pytest.raises(ValueError, match="when must be the same on all devices; got one that varies over .'data'."):
        jax.eval_shape(spread, VALUES)


def test_many_small_tensors_of_one_shape_share_a_loop():
    """A deep model compiles as a shallow one does."""
    tree = {f"w{i}": (VALUES * 2.0**-i).astype(np.float16) for i in range(12)}
    look = jax.jit(functools.partial(jaxmp.monitor.tensor_stats, histogram=False))
    scatters = look.lower(tree).as_text().count("stablehlo.scatter")
    assert scatters == look.lower({"w0": tree["w0"]}).as_text().count("stablehlo.scatter") > 0
    stats = look(tree)
    for name, x in tree.items():
        compare(stats[name], x)


@pytest.mark.parametrize(
    ("when", "got"),
    [(lambda: 7 % 5, "2"), (lambda: jnp.int32(3), r"int32\[\]"), (lambda: jnp.ones(2, bool), r"bool\[2\]")],
    ids=["int", "traced-int", "vector"],
)
def test_when_is_a_bool(when, got):
    """`step % 10` for `step % 10 == 0` would look at nine steps of ten, and not at the tenth."""
    with pytest.raises(TypeError, match=f"when must be one bool, such as step % 10 == 0; got {got}"):
        jaxmp.monitor.tensor_stats({"w": jnp.ones(2)}, when=when())
