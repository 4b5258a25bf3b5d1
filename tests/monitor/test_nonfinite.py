"""`first_nonfinite`: the path and the index of the first inf or NaN, of any tree on any devices."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp import monitor
from jaxmp.monitor import first_nonfinite


class Pair(NamedTuple):
    left: object
    right: object


def with_bad(shape, dtype, index, value=np.nan):
    x = np.ones(shape, np.float32)
    x[index] = value
    return jnp.asarray(x).astype(dtype)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64]
)
@pytest.mark.parametrize("shape", [(3, 5, 7), (40, 30, 10)], ids=["small", "large"])
def test_the_first_in_row_major_order_is_named(dtype, shape):
    x = np.array(with_bad(shape, jnp.float32, (2, 1, 3)))
    x[2, 4, 0] = x[1, 4, 6] = np.nan
    found = first_nonfinite({"ok": jnp.ones(3, dtype), "layer": {"w": jnp.asarray(x).astype(dtype)}})
    assert (found.path, found.index, found.count, found.size) == ("layer/w", (1, 4, 6), 3, x.size)
    assert np.isnan(found.value)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_nan_counts(dtype):
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    bad = np.arange(65536) & {jnp.bfloat16: 0x7F80, jnp.float16: 0x7C00}[dtype]
    bad = bad == {jnp.bfloat16: 0x7F80, jnp.float16: 0x7C00}[dtype]
    for given in (x, jnp.asarray(x)):
        found = first_nonfinite([given])
        assert (found.index, found.count) == ((int(np.argmax(bad)),), int(bad.sum()))


def test_numpy_and_jax_say_the_same():
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.normal(size=(5, 40, 30)).astype(np.float32)
        x[rng.random(x.shape) < 1e-3] = np.inf
        bad = np.argwhere(~np.isfinite(x))
        for given in (x, jnp.asarray(x)):
            found = first_nonfinite([given])
            assert (found.index, found.count) == (tuple(bad[0]), len(bad))


def test_a_finite_tree_of_anything_has_none():
    key = jax.random.key(0)
    tree = {"a": jnp.ones(3), "i": jnp.array([2**31 - 1]), "k": key, "b": True, "n": None, "s": "nan", "e": jnp.ones(0)}
    assert first_nonfinite(tree) is None
    assert first_nonfinite({}) is None


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (FrozenDict({"a": {"b": np.float32("inf")}}), "a/b"),
        (Pair(1.0, [float("inf")]), "right/0"),
        (jnp.float32(jnp.inf), "<root>"),
        ({"box": nn.Partitioned(jnp.array(jnp.inf), ("x",))}, "box"),
        (np.float64("inf"), "<root>"),
    ],
    ids=["FrozenDict", "NamedTuple", "scalar", "boxed", "float64"],
)
def test_paths_are_those_of_errors(tree, path):
    found = first_nonfinite(tree)
    assert (found.path, found.index, found.value) == (path, (), np.inf)
    assert str(found) == f"{path} is inf; 1 of 1 values are not finite"


def test_nnx_modules_and_states():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    assert first_nonfinite(model) is None
    model.layers[1].var[...] = jnp.array([1.0, jnp.inf, jnp.nan])
    for tree in (model, nnx.state(model), nnx.state(model, nnx.BatchStat)):
        assert first_nonfinite(tree).path == "layers/1/var"
        assert first_nonfinite(tree).index == (1,)
    assert first_nonfinite({"model": model}).path == "model/layers/1/var"


@pytest.mark.parametrize("spec", [P("a", "b"), P("b"), P(None, "a"), P()], ids=str)
def test_arrays_on_a_mesh(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = np.ones((8, 4), np.float32)
    x[5, 2] = x[6, 0] = np.inf
    found = first_nonfinite({"w": jax.device_put(x, NamedSharding(mesh, spec))})
    assert (found.index, found.count, found.size) == ((5, 2), 2, 32)


def test_of_a_stack_over_devices_the_first_index_is_the_device():
    found = first_nonfinite(jax.pmap(lambda x: 1 / x)(jnp.arange(8.0)[::-1]))
    assert (found.index, found.count) == ((7,), 1)


def test_a_replica_that_differs_shows():
    """What one device holds wrongly is not what the others hold."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    parts = [
        jax.device_put(np.array([1.0, np.inf if i == 6 else 2.0], np.float32), d) for i, d in enumerate(mesh.devices)
    ]
    x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), parts)
    assert np.isfinite(np.asarray(x)).all()  # the first replica
    assert first_nonfinite(x).index == (1,)


def test_a_tracer_is_told_of_all_finite():
    with pytest.raises(TypeError, match=r"got a traced float32\[2\] at w. In jit use jaxmp.all_finite"):
        jax.jit(lambda x: monitor.first_nonfinite({"w": x}))(jnp.ones(2))


def test_a_shape_is_told_that_it_has_no_values():
    with pytest.raises(TypeError, match=r"got a traced bfloat16\[2,3\] at w"):
        first_nonfinite({"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)})


def test_a_donated_leaf_is_named():
    x = jnp.ones(2)
    x.delete()
    with pytest.raises(ValueError, match="got a donated or deleted array at w. Pass results of the step"):
        first_nonfinite({"w": x})
