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


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64]
)
@pytest.mark.parametrize("shape", [(3, 5, 7), (40, 30, 10)], ids=["small", "large"])
def test_the_first_in_row_major_order_is_named(dtype, shape):
    x = np.ones(shape, dtype)
    x[2, 1, 3] = x[2, 4, 0] = x[1, 4, 6] = np.nan
    bad_leaf = first_nonfinite({"ok": np.ones(3, dtype), "layer": {"w": jnp.asarray(x)}})
    assert (bad_leaf.path, bad_leaf.index, bad_leaf.count, bad_leaf.size) == ("layer/w", (1, 4, 6), 3, x.size)
    assert np.isnan(bad_leaf.value)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_nan_counts(dtype):
    x, exponent = np.arange(65536, dtype=np.uint16).view(dtype), {jnp.bfloat16: 0x7F80, jnp.float16: 0x7C00}[dtype]
    bad = (np.arange(65536) & exponent) == exponent
    for array in (x, jnp.asarray(x)):  # NumPy and jax say the same
        bad_leaf = first_nonfinite([array])
        assert (bad_leaf.index, bad_leaf.count) == ((int(np.argmax(bad)),), int(bad.sum()))


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
    bad_leaf = first_nonfinite(tree)
    assert (bad_leaf.path, bad_leaf.index, bad_leaf.value) == (path, (), np.inf)
    assert str(bad_leaf) == f"{path} is inf; 1 of 1 values are not finite"


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
    bad_leaf = first_nonfinite({"w": jax.device_put(x, NamedSharding(mesh, spec))})
    assert (bad_leaf.index, bad_leaf.count, bad_leaf.size) == ((5, 2), 2, 32)


def test_a_replica_that_differs_shows():
    """What one device holds wrongly is not what the others hold."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    parts = [
        jax.device_put(np.array([1.0, np.inf if i == 6 else 2.0], np.float32), d) for i, d in enumerate(mesh.devices)
    ]
    x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), parts)
    assert np.isfinite(np.asarray(x)).all()  # the first replica
    assert first_nonfinite(x).index == (1,)


def test_a_tracer_and_a_shape_have_no_values():
    with pytest.raises(TypeError, match=r"got a traced float32\[2\] at w. In jit use jaxmp.all_finite"):
        jax.eval_shape(lambda x: monitor.first_nonfinite({"w": x}), jnp.ones(2))
    with pytest.raises(TypeError, match=r"got a traced bfloat16\[2,3\] at w"):
        first_nonfinite({"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)})


def test_a_donated_leaf_is_named():
    x = jnp.ones(2)
    x.delete()
    with pytest.raises(ValueError, match="got a donated or deleted array at w. Pass results of the step"):
        first_nonfinite({"w": x})
