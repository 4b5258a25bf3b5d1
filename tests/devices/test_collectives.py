"""What devices tell each other: the finite flag in every regime, names of axes, and means of 16-bit gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.devices import collectives
from regimes import AXIS, mesh_of

DEVICES = 4

EVERYWHERE, BY_ROWS = P(), P(AXIS)


def spread(f, how="shard_map", *, out_specs=EVERYWHERE):
    """`f`, compiled to run on four devices, each with one row of every array."""
    if how == "pmap":
        return jax.pmap(f, AXIS, devices=jax.devices()[:DEVICES])
    check_vma = how == "shard_map"
    return jax.jit(jax.shard_map(f, mesh=mesh_of(), in_specs=BY_ROWS, out_specs=out_specs, check_vma=check_vma))


MANUAL = pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])


@functools.cache
def flag_of(how):
    return spread(lambda tree: jaxmp.all_finite(tree), how)


def rows(value, device, dtype=np.float32):
    """A tree with one row for each device, one element of which is `value` on `device`."""
    a = np.ones((DEVICES, 3), dtype)
    a[device, 1] = value
    return {"a": jnp.asarray(a), "b": jnp.ones((DEVICES, 2), jnp.float16), "n": jnp.full((DEVICES, 1), 7)}


def values_by_device(x):
    return [shard.data.item() for shard in x.addressable_shards]


@pytest.mark.thorough(1)
@MANUAL
def test_every_device_hears_of_one_bad_value(how):
    """`lax.pmax` of the values would drop a NaN: the flag is made on each device, and then reduced."""
    for value, device in ((np.inf, 0), (-np.inf, 2), (np.nan, 0), (np.nan, 2)):
        finite = flag_of(how)(rows(value, device))
        assert finite.dtype == bool
        assert values_by_device(finite) == [False] * DEVICES
    assert values_by_device(flag_of(how)(rows(1.0, 0))) == [True] * DEVICES


def test_a_count_is_the_largest_of_any_device():
    largest = spread(lambda x: collectives.largest_on_any_device([x[0]], (AXIS,))[0][None])
    assert values_by_device(largest(np.arange(DEVICES, dtype=np.int32))) == [DEVICES - 1.0] * DEVICES


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
def test_a_bad_value_in_one_shard_under_jit(axis_type):
    """`jnp.max` of a sharded array drops a NaN as well."""
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        all_finite = jax.jit(jaxmp.all_finite)
        for value in (np.inf, -np.inf, np.nan):
            finite = all_finite(jax.device_put(rows(value, 2), NamedSharding(mesh, P(AXIS))))
            assert values_by_device(finite) == [False] * DEVICES


def test_all_finite_on_one_device():
    for all_finite in (jaxmp.all_finite, jax.jit(jaxmp.all_finite, static_argnames="axis_name")):
        assert_exact(all_finite(rows(1.0, 0)), np.bool_(True))
        assert_exact(all_finite(rows(np.nan, 0)), np.bool_(False))
        assert_exact(all_finite({"empty": jnp.ones((0, 3))}), np.bool_(True))
        assert_exact(all_finite(rows(np.nan, 0), axis_name=None), np.bool_(False))
    tree = {"int": jnp.array([2**31 - 1], jnp.int32), "bool": jnp.array([True]), "none": None, "number": 1.0}
    tree |= {"key": jax.random.key(0), "raw key": jax.random.PRNGKey(0)}
    assert_exact(jaxmp.all_finite(tree), np.bool_(True))
    assert_exact(jaxmp.all_finite(tree | {"number": float("inf")}), np.bool_(False))
    assert_exact(jaxmp.all_finite(tree | {"complex": jnp.array([complex(0.0, np.nan)])}), np.bool_(False))


def test_finite_values_never_count_as_overflow():
    """DeepSpeed looks at the sum of the gradients, which overflows on finite ones."""
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2):
        largest = np.full(1000, jnp.finfo(dtype).max, dtype)
        assert_exact(jaxmp.all_finite(largest), np.bool_(True))
        largest[999] = np.inf
        assert_exact(jaxmp.all_finite(largest), np.bool_(False))


@MANUAL
def test_an_empty_tree_is_finite_and_takes_part(how):
    # the input only makes it run on each device
    finite = spread(lambda x: jaxmp.all_finite({}) & (x.shape[-1] == 1), how)(jnp.ones((DEVICES, 1)))
    assert values_by_device(finite) == [True] * DEVICES


def test_all_finite_over_some_axes_only():
    """Names restrict the agreement: here to the two devices of a row of the mesh."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def f(x):
        here = jaxmp.all_finite(x, "model")[None, None]
        return here, jaxmp.all_finite(x)

    x = jnp.array([[1.0, 1.0], [jnp.nan, 1.0]])
    specs = P("data", "model")
    by_row, everywhere = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(specs, P())))(x)
    assert by_row.tolist() == [[True, True], [False, False]]
    assert values_by_device(everywhere) == [False] * 4


def test_flags_of_an_unvarying_value_can_be_reduced_again():
    """A decision that is common already may pass through the same code."""
    twice = spread(lambda tree: jaxmp.all_finite({"flag": jaxmp.all_finite(tree).astype(jnp.float32)}))
    assert values_by_device(twice(rows(np.nan, 1))) == [True] * DEVICES


@pytest.mark.thorough(0)
def test_an_axis_of_vmap_that_is_named_decides_for_all():
    """Members of an ensemble that are skipped together. Under "auto" each decides for itself."""

    def skipped(axis_name, bad):
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", axis_name=axis_name, loss_scale=16.0)
        params = {"w": jnp.ones(3, jnp.float16)}

        def step(bad):
            loss = lambda p: jnp.sum(p["w"].astype(jnp.float32)) * jnp.where(bad, jnp.inf, 1.0)  # noqa: E731
            opt_state = tx.init(params)
            grads = jaxmp.value_and_grad(loss, axis_name=axis_name)(params, opt_state=opt_state)[1]
            return jaxmp.apply_gradients(tx, grads, opt_state, params)[1].skipped

        return jax.vmap(step, axis_name=AXIS)(bad).tolist()

    bad = jnp.arange(DEVICES) == 1
    assert skipped(AXIS, bad) == [True] * DEVICES
    assert skipped("auto", bad) == bad.tolist()


@MANUAL
def test_names_of_axes_are_those_that_are_bound(how):
    x = jnp.ones((DEVICES, 1))
    message = r"axis_name=None is for no bound axes; \('data',\) are bound.*Use axis_name=\"auto\""
    with pytest.raises(ValueError, match=message):
        spread(lambda x: jaxmp.all_finite(x, None), how)(x)
    with pytest.raises(ValueError, match="axis name 'model' is not bound here; bound axes: data"):
        spread(lambda x: jaxmp.all_finite(x, ("data", "model")), how)(x)


def test_a_name_outside_is_an_error_that_says_what_to_do():
    message = r"axis name 'data' is not bound here; bound axes: none. Call this in jax.shard_map; under plain jit leave"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jaxmp.all_finite(x, "data"))(1.0)
    with pytest.raises(ValueError, match=message):
        jaxmp.reduce_gradients("data").update({"w": jnp.ones(1)}, optax.EmptyState())
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", axis_name="data")
    with pytest.raises(ValueError, match=message):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1, jnp.float16))


# Sums of 16-bit gradients


def reduced(grads, how="shard_map", **kwargs):
    """`reduce_gradients` of one row a device; what each device gets, [devices, ...]."""
    tx = jaxmp.reduce_gradients(**kwargs)
    return np.asarray(spread(lambda g: tx.update(g, optax.EmptyState())[0], how, out_specs=BY_ROWS)(grads))


def test_float16_sums_overflow_on_finite_values_and_ours_do_not():
    """4 x 28672 is beyond float16; their mean is not. From 32768 on FSDP's rule, which halves before, is not enough."""
    grads = np.full((DEVICES, 2), 28672.0, np.float16)
    assert np.isinf(reduced(grads, dtype=None, predivide=1)).all()  # what a plain psum does
    assert_exact(reduced(grads, dtype=None), grads)
    grads = np.full((DEVICES, 1), 32768.0, np.float16)
    assert np.isinf(reduced(grads, dtype=None)).all()
    largest = np.full((DEVICES, 1), 65504.0, np.float16)
    assert_exact(reduced(largest), largest.astype(np.float32))


@pytest.mark.thorough(1)
@MANUAL
def test_means_are_exact_and_a_nan_survives(how):
    """Integers up to 2^11 and four devices: every partial result is a float32, and a float16."""
    values = np.random.default_rng(0).integers(-500, 500, (DEVICES, 5)) * 4
    exact = np.broadcast_to(values.mean(0), (DEVICES, 5))
    grads = values.astype(np.float16)
    assert_exact(reduced(grads, how), exact.astype(np.float32))
    assert_exact(reduced(grads, how, dtype=None), exact.astype(np.float16))
    assert_exact(reduced(grads, how, dtype=jnp.float32, predivide=4), exact.astype(np.float32))
    # In float32 a mean of float16 values loses nothing to the sum: 1 + 3 * 2^-11 is not representable in float16.
    fine = np.array([[1.0], [1.0], [1.0], [1.0 + 2.0**-10]], np.float16)
    assert_exact(reduced(fine, how), np.full((DEVICES, 1), 1 + 2.0**-12, np.float32))
    means = reduced(rows(np.nan, 1)["a"], how)
    assert np.isnan(means[:, 1]).all()
    assert_exact(means[:, [0, 2]], np.ones((DEVICES, 2), np.float32))


def test_predivide_saves_small_values_too():
    """Dividing by all four devices before the sum flushes 2^-23 to zero; by two it does not."""
    small = np.full((DEVICES, 1), 2.0**-23, np.float16)
    assert_exact(reduced(small, dtype=None, predivide=4), np.zeros((DEVICES, 1), np.float16))
    assert_exact(reduced(small, dtype=None), small)
    assert_exact(reduced(small), small.astype(np.float32))


def test_reduce_gradients_does_nothing_but_cast_where_no_axis_is_bound():
    grads = {"w": jnp.array([1.0, -0.0, jnp.inf], jnp.float16), "n": jnp.array([3])}
    for run in (lambda f: f, jax.jit):
        updates, state = run(jaxmp.reduce_gradients().update)(grads, optax.EmptyState())
        assert_exact(updates, {"w": np.array([1.0, -0.0, np.inf], np.float32), "n": np.array([3], np.int32)})
        assert state == optax.EmptyState()
        own = run(jaxmp.reduce_gradients(dtype=None).update)(grads, optax.EmptyState())[0]
        assert_moved(own, jax.tree.map(np.asarray, grads))
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh_of(), P(AXIS)))
    step = jax.jit(lambda g: jaxmp.reduce_gradients().update(g, optax.EmptyState())[0])
    assert "all-reduce" not in step.lower(sharded).compile().as_text()


def test_ints_and_keys_are_not_reduced():
    tree = {"n": jnp.arange(DEVICES), "w": jnp.arange(DEVICES, dtype=jnp.float32)}
    updates = spread(lambda t: jaxmp.reduce_gradients().update(t, optax.EmptyState())[0], out_specs=BY_ROWS)(tree)
    assert_close(updates, {"n": np.arange(DEVICES, dtype=np.int32), "w": np.full(DEVICES, 1.5, np.float32)})


def test_reduce_over_two_axes():
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = jnp.arange(4.0).reshape(2, 2)

    def f(x):
        both = jaxmp.reduce_gradients().update(x, optax.EmptyState())[0]
        one = jaxmp.reduce_gradients("expert").update(x, optax.EmptyState())[0]
        return both, one

    specs = (P(), P("data"))
    both, one = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data", "expert"), out_specs=specs))(x)
    assert_exact(both, np.full((1, 1), 1.5, np.float32))
    assert_exact(one, np.array([[0.5], [2.5]], np.float32))
