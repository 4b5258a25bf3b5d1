"""Steps on disk: what is saved comes back bit for bit, on other devices, or is an error that names the leaf."""

import functools
import logging
import os
import shutil
import subprocess
import sys
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import corruption
import jaxmp
from fp8_model import model_loss, model_params
from helpers import ROOT, assert_close, assert_moved, assert_same_program, compiled_quickly
from jaxmp import checkpoint

ADAM = optax.adamw(1e-2, eps=1e-3)
SCALE = {"loss_scale": jaxmp.DynamicLossScale(2.0**10, growth_interval=2)}
KINDS = {
    "fp16": ("fp16", optax.chain(jaxmp.clip_by_global_norm(1.0), ADAM, jaxmp.ema_params(0.9)), SCALE),
    "split16": ("bf16", ADAM, {"remainder_bits": 16}),
    "int8": ("bf16", jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), {"remainder_bits": 8}),
    "fp8": ("fp16", ADAM, {"recipe": jaxmp.fp8.DelayedScaling(amax_history_len=3), **SCALE}),
    "multisteps": ("bf16", optax.MultiSteps(ADAM, 2), {}),
}


def params_of(kind):
    """Axes that 1, 3 and 8 devices divide."""
    if kind == "fp8":
        tiled = jax.tree.map(lambda x: jnp.asarray(np.tile(x, (3, 3)) if x.shape == (16, 16) else x), model_params())
        return tiled | {"ln": {"scale": jnp.ones((1, 48))}}
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"dense": {"kernel": draw(24, 128), "bias": draw(128)}, "ln": draw(24)}


def policy_of(kind):
    return jaxmp.get_policy(KINDS[kind][0], keep_fp32=("ln*",))


@functools.cache
def tx_of(kind):
    _, inner, options = KINDS[kind]
    return jaxmp.mixed_precision(inner, policy_of(kind), **options)


def loss_of(kind):
    if kind == "fp8":
        batch = {"x": jnp.asarray(np.random.default_rng(1).normal(size=(32, 48)), jnp.float32), "y": jnp.ones((32, 48))}
        return lambda params: model_loss(params, batch)
    return lambda params: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))


@functools.cache
def job(kind):
    """(tx, params, opt_state) on one device; no array is what a new job has."""
    tx, policy = tx_of(kind), policy_of(kind)
    state = jax.jit(lambda params32: (policy.cast_to_param(params32), tx.init(params32)))(params_of(kind))
    changed = jax.tree.map(lambda x: x if x.dtype == bool else jnp.asarray(np.asarray(x) + x.dtype.type(1)), state)
    return tx, *changed


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def placed(params, mesh):
    """The params as descriptions, cut along their first axis where it is long."""
    place = lambda x: NamedSharding(mesh, P("x") if x.ndim and x.shape[0] % 24 == 0 else P())  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), params)


def places_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def saved(directory, params, opt_state=(), step=1, **more):
    with checkpoint.manager(directory) as steps:
        assert checkpoint.save(steps, step, params=params, opt_state=opt_state, **more)
    return directory


def restored(directory, tx, params, **more):
    with checkpoint.manager(directory, read_only=True) as steps:
        return checkpoint.restore(steps, tx, params=params, **more)


@pytest.fixture(scope="module")
def fp16_folder(tmp_path_factory):
    """A checkpoint of job("fp16")."""
    _, params, opt_state = job("fp16")
    return saved(tmp_path_factory.mktemp("fp16") / "run", params, opt_state, extra={"stats": {"a": 1}})


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


# Onto the same devices, and others


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_comes_back_bit_for_bit_on_any_number_of_devices(kind, tmp_path):
    tx, params, opt_state = job(kind)

    @jax.jit
    def step(params, opt_state):
        _, grads = jaxmp.value_and_grad(loss_of(kind))(params, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    params, opt_state = step(params, opt_state)
    where = places_of(placed(params, mesh_of(8)))
    saved(tmp_path, *jax.device_put((params, opt_state), (where, jaxmp.sharding_of(tx, params_of(kind), where))))
    for devices in (8, 3, 1):
        like = placed(params, mesh_of(devices))
        result = restored(tmp_path, tx, like)
        assert result.step == 1 and result.fresh == () and result.extra == {}
        assert_moved(on_host((result.params, result.opt_state)), on_host((params, opt_state)))
        places = jaxmp.sharding_of(tx, params_of(kind), places_of(like))
        for x, sharding in zip(jax.tree.leaves(result.opt_state), jax.tree.leaves(places), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        assert all(x.sharding == y.sharding for x, y in zip(*map(jax.tree.leaves, (result.params, like)), strict=True))
    result = restored(tmp_path, tx, params)  # on the default device, free to move
    assert_moved((result.params, result.opt_state), (params, opt_state))
    assert not any(x.committed for x in jax.tree.leaves(result[1:3]))
    assert_same_program(step(result.params, result.opt_state), step(params, opt_state))
    jax.tree.map(lambda x: x.delete(), result[1:3])  # no buffer is shared
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))


@pytest.mark.thorough(0)
def test_explicit_axes_and_one_device_that_is_not_the_first(tmp_path):
    tx, params, opt_state = job("fp16")
    mesh = mesh_of(4, AxisType.Explicit)
    like = placed(params, mesh)
    where = places_of(like)
    saved(tmp_path, *jax.device_put((params, opt_state), (where, jaxmp.sharding_of(tx, params_of("fp16"), where))))
    with jax.set_mesh(mesh):
        result = restored(tmp_path, tx, like)
    assert_moved(on_host(result[1:3]), on_host((params, opt_state)))
    assert places_of(result.params) == where
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    result = restored(tmp_path, tx, jax.device_put(params, alone))
    assert {x.sharding for x in jax.tree.leaves(result[1:3])} == {alone}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kind", ["fp16", "split16"])
def test_padding_is_not_saved_and_follows_the_devices(kind, tmp_path):
    """Axes that hardly any number of devices divides."""
    rng = np.random.default_rng(0)
    whole = {"a": jnp.float32(rng.normal(size=(13, 17))), "ln": jnp.float32(rng.normal(size=5))}
    policy, tx = policy_of(kind), tx_of(kind)
    jaxmp.get_loss_scale(())

    @jax.jit
    def first_step(whole):
        params = policy.cast_to_param(whole)
        return jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), tx.init(whole), params)

    before = first_step(whole)

    def on(devices):
        layout = jaxmp.fsdp.layout_of(whole, mesh_of(devices), "x", min_size=1)
        return layout, jaxmp.sharding_of(tx, jaxmp.fsdp.pad(whole, layout), layout.shardings)

    layout, of_state = on(8)
    params = jax.device_put(jaxmp.fsdp.pad(before[0], layout), layout.shardings)
    opt_state = jax.device_put(jaxmp.fsdp.pad(before[1], layout), of_state)
    for number, devices in enumerate((3, 1, 8)):
        saved(tmp_path / str(number), params, opt_state, layout=layout)
        result = restored(tmp_path / str(number), tx, policy.cast_to_param(whole))  # without any padding
        assert_moved(on_host(result[1:3]), on_host(before))
        layout, of_state = on(devices)
        like = jax.tree.map(jnp.zeros_like, jaxmp.fsdp.pad(before[0], layout))
        if number % 2:  # only described
            like = jax.eval_shape(lambda like=like: like)
        _, params, opt_state, *_ = restored(tmp_path / str(number), tx, like, layout=layout)
        places = zip(*map(jax.tree.leaves, ((params, opt_state), (layout.shardings, of_state))), strict=True)
        assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in places)
        assert_moved(on_host(jaxmp.fsdp.trim((params, opt_state), layout)), on_host(before))
        assert_moved(on_host(params), on_host(jaxmp.fsdp.pad(before[0], layout)))
    wrong = saved(tmp_path / "padded", params, opt_state)
    with pytest.raises(ValueError, match=r"params/a has shape .* \(pass layout= of jaxmp.fsdp to save"):
        restored(wrong, tx, jaxmp.fsdp.pad(before[0], on(3)[0]))


def test_moments_of_8_bits_cannot_be_padded(tmp_path):
    layout = jaxmp.fsdp.layout_of({"a": np.ones((257, 128))}, mesh_of(3), "x", min_size=1)
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), "bf16")
    opt_state = jax.jit(tx.init)({"a": jnp.ones((258, 128))})
    with pytest.raises(ValueError, match="moments in 8 bits cannot be padded"):
        saved(tmp_path, {"a": jnp.ones((258, 128), jnp.bfloat16)}, opt_state, layout=layout)


def test_state_in_pinned_host_memory_comes_back(tmp_path):
    tx = jaxmp.mixed_precision(jaxmp.offload.stream_updates(optax.adam(1e-3)), "bf16")
    params, opt_state = {"w": jnp.ones((8, 8), jnp.bfloat16)}, jax.jit(tx.init)({"w": jnp.full((8, 8), 1.001)})
    saved(tmp_path, params, jaxmp.offload.put(opt_state))
    result = restored(tmp_path, tx, params)
    assert_moved(result.opt_state, opt_state)
    on_host_again = jaxmp.offload.put(result.opt_state)
    assert any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(on_host_again))
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    there = restored(tmp_path, None, {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=where)}).params["w"]
    assert there.sharding.memory_kind == "pinned_host"


# What users hold


def test_a_train_state_in_three_lines(tmp_path):
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "fp16", loss_scale=jaxmp.DynamicLossScale(8.0))
    new = lambda value: jaxmp.linen.TrainState.create(  # noqa: E731
        apply_fn=None, params={"w": jnp.full(3, value)}, tx=tx, policy="fp16"
    )
    state, other = new(1.0), new(2.0)
    jaxmp.get_loss_scale(())
    step = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)))
    for at in (0, 1):  # its count is a number of Python, and then an array
        saved(tmp_path / str(at), state.params, state.opt_state, extra={"step": state.step})
        result = restored(tmp_path / str(at), other.tx, other.params, extra={"step": other.step})
        again = other.replace(params=result.params, opt_state=result.opt_state, step=result.extra["step"])
        assert_moved((again.params, again.opt_state), (state.params, state.opt_state))
        assert int(again.step) == int(state.step) == at
        state = step(state)


def test_boxes_and_containers(tmp_path):
    tx = jaxmp.mixed_precision(ADAM, "bf16", remainder_bits=16)
    boxed = {"w": nn.Partitioned(jnp.full((4, 4), 1.001), names=("a", None)), "l": [jnp.ones(2), (jnp.zeros(1), None)]}
    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(boxed), jax.jit(tx.init)(boxed)
    result = restored(saved(tmp_path / "a", params, opt_state), tx, params)
    assert_moved((result.params, result.opt_state), (params, opt_state))
    plain = params | {"w": params["w"].value}
    assert_moved(restored(tmp_path / "a", None, plain).params, plain)  # a box adds nothing to a name
    one = jnp.arange(3.0, dtype=jnp.bfloat16)
    opt_state = jax.jit(ADAM.init)(jnp.arange(3.0))  # plain optax, which began with params of another dtype
    result = restored(saved(tmp_path / "b", one, opt_state), ADAM, one)
    assert_moved((result.params, result.opt_state), (one, opt_state))


def test_numpys_64_bits_and_frozen_kernels_come_back_as_they_are(tmp_path):
    params = {"w": np.array([2**40 + 3]), "v": np.array([0.1])}
    base = jaxmp.fp8.freeze({"kernel": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)})
    saved(tmp_path, params, extra={"base": base})
    result = restored(tmp_path, None, params, extra={"base": jax.eval_shape(lambda base: base, base)})
    assert {name: (x.dtype, x[0]) for name, x in result.params.items()} == {
        "w": (np.int64, 2**40 + 3),
        "v": (np.float64, 0.1),
    }
    kernel = result.extra["base"]["kernel"]
    assert type(kernel) is type(base["kernel"]) and kernel.dtype == np.float32
    assert_moved(result.extra["base"], base)


EXTRA = {
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(3, impl="rbg"), 3),
    "old key": jax.random.PRNGKey(3),
    "epoch": 3,
    "rate": 0.1,
    "flag": True,
    "wave": 1 + 2j,
    "seen": np.int64(2**40),
    "mean": np.arange(4.0),
    "dtypes": {
        x: jnp.asarray(np.arange(-3, 5).astype(x))  # XLA has no float16 on CPUs without F16C
        for x in ("int4", "int8", "uint8", "int16", "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    },
    "complex": jnp.ones(2, jnp.complex64) * 1j,
    "nan": jnp.array([np.nan, -0.0, np.inf]),
    "none": None,
    "empty": {},
}


@pytest.fixture(scope="module")
def extra_folder(tmp_path_factory):
    """A checkpoint of EXTRA."""
    metadata = {"run": "a", "notes": [1, 2.5, None, {"ü": True}]}
    return saved(tmp_path_factory.mktemp("extra") / "run", {"w": jnp.ones(2)}, extra=EXTRA, metadata=metadata)


def test_extra_trees_come_back_as_they_are_wanted(extra_folder):
    params = {"w": jnp.ones(2)}
    result = restored(extra_folder, None, params, extra=EXTRA)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(EXTRA), jax.tree.leaves(result.extra), strict=True):
        assert type(x) is type(y), path
        if hasattr(x, "dtype"):
            assert x.dtype == y.dtype and np.asarray(raw(x)).tobytes() == np.asarray(raw(y)).tobytes(), path
        else:
            assert x == y, path
    some = restored(extra_folder, None, params, extra={"epoch": jnp.int32(0), "mean": EXTRA["mean"]}).extra
    assert some["epoch"].dtype == jnp.int32 and int(some["epoch"]) == 3 and set(some) == {"epoch", "mean"}
    everywhere = NamedSharding(mesh_of(4), P())
    placed_key = jax.device_put(EXTRA["key"], everywhere)
    assert restored(extra_folder, None, params, extra={"key": placed_key}).extra["key"].sharding == everywhere
    with checkpoint.manager(extra_folder, read_only=True) as steps:
        about = checkpoint.read_metadata(steps)
    assert about["metadata"] == {"run": "a", "notes": [1, 2.5, None, {"ü": True}]}
    assert about["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"epoch": 1.0}, "epoch is of dtype int64 in the checkpoint and float64"),
        ({"seen": jnp.int32(0)}, "numbers must fit the job; seen is 1099511627776 in the checkpoint, and int32"),
        ({"mean": jnp.ones(4)}, "mean is of dtype float64 in the checkpoint and float32"),
        ({"key": jax.random.key(0, impl="unsafe_rbg")}, "key is of dtype key<fry> in the checkpoint and key<urbg>"),
        ({"old key": jax.random.key(0)}, "old key is of dtype uint32 in the checkpoint and key<fry>"),
        ({"ema": jnp.ones(2)}, "ema is in the job and not in the checkpoint"),
        ({"dtypes": {"int8": EXTRA["dtypes"]["int8"]}}, "dtypes/.* is in the checkpoint and not in the job"),
        ({"params": 1}, "takes trees by names other than params"),
        ([1], "takes trees by names other than params"),
    ],
)
def test_extra_trees_of_another_kind_are_errors(wanted, message, extra_folder):
    with pytest.raises(ValueError, match=message):
        restored(extra_folder, None, {"w": jnp.ones(2)}, extra=wanted)


def test_names_of_any_letters(tmp_path):
    names = ["a.b", "a/b", "ü", "", " ", "..", "value", "0", "x" * 200, "mu", "count", "params", "opt_state", "%2E"]
    params = {name: {"w": jnp.full(2, float(i))} for i, name in enumerate(names)}
    opt_state = {"mu": jax.tree.map(lambda x: x + 1, params)}
    tx = optax.GradientTransformation(lambda params: {"mu": params}, None)
    result = restored(saved(tmp_path / "a", params, opt_state), tx, params)
    assert_moved((result.params, result.opt_state), (params, opt_state))
    numbered = {i: jnp.full(2, float(i)) for i in range(12)}
    assert_moved(restored(saved(tmp_path / "b", numbered), None, numbered).params, numbered)
    with checkpoint.manager(tmp_path / "c") as steps:
        for params in ({"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}, {"a": {"": jnp.ones(1)}, "a.": jnp.ones(1)}):
            with pytest.raises(ValueError, match=r"leaves must differ by name, .*; got two params.a"):
                checkpoint.save(steps, 0, params=params, opt_state=())
        assert steps.all_steps() == []


# Another model


def test_what_differs_is_named_before_an_array_is_read(fp16_folder, monkeypatch):
    tx, params, _ = job("fp16")
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", lambda *_: pytest.fail("an array was read"))
    for message, other_tx, like in (
        ("params/head is in the job and not in the checkpoint", tx, params | {"head": jnp.ones(2)}),
        ("params/ln is in the checkpoint and not in the job", tx, {"dense": params["dense"]}),
        (r"params/ln has shape \(24,\) in the checkpoint and \(25,\) in the job", tx, params | {"ln": jnp.ones(25)}),
        ("params/dense/bias is of dtype float16 in the checkpoint and float32", tx, params_of("fp16")),
        ("opt_state/.*in the checkpoint and not in the job", jaxmp.mixed_precision(optax.sgd(0.1), "fp16"), params),
        ("opt_state/.*job", tx_of("int8"), params),
        (r".* take pmap's replicas off", tx, jax.tree.map(lambda x: np.stack([x] * 2), params)),
    ):
        with pytest.raises(ValueError, match=f"must be of this model and this optimizer; {message}"):
            restored(fp16_folder, other_tx, like, extra={"stats": {"a": 0}})


def test_leaves_that_may_start_fresh(fp16_folder):
    tx, params, opt_state = job("fp16")
    head = {"w": jnp.full((2, 3), 0.5, jnp.float16)}
    stats = {"stats": {"a": 0, "head": {"n": 7}}}
    result = restored(fp16_folder, tx, params | {"head": head}, fresh="head/*", extra=stats)
    assert_moved({name: x for name, x in result.params.items() if name != "head"}, params)
    assert_moved(result.params["head"], head)
    assert result.params["head"]["w"] is not head["w"]  # donated, it would be lost to the caller
    assert result.extra == {"stats": {"a": 1, "head": {"n": 7}}}
    assert sorted(x.split("/")[0] for x in result.fresh) == ["opt_state"] * 4 + ["params", "stats"]
    assert_moved(result.opt_state.master_params["head"], {"w": jnp.full((2, 3), 0.5)})
    assert_moved(result.opt_state.master_params["dense"], opt_state.master_params["dense"])
    assert_moved(result.opt_state.scaling, opt_state.scaling)
    wider = params | {"ln": jnp.ones(30)}
    result = restored(fp16_folder, tx, wider, fresh=("ln",))
    assert "params/ln" in result.fresh
    assert_moved(result.params, wider | {"dense": params["dense"]})
    less = restored(fp16_folder, tx, {"dense": params["dense"]}, fresh="ln")
    assert less.fresh == () and set(optax.tree.get(less.opt_state, "mu")) == {"dense"}
    with pytest.raises(ValueError, match="params/head/w starts fresh, so it needs a value, and is only described"):
        restored(fp16_folder, tx, jax.eval_shape(lambda: params | {"head": head}), fresh="head/*")
    with pytest.raises(ValueError, match="params/dense/bias is of dtype float16"):  # fresh= is for shapes
        restored(fp16_folder, tx, params_of("fp16"), fresh="*")
    like = placed(params, mesh_of(4)) | {"head": jax.device_put(head, NamedSharding(mesh_of(4), P()))}
    result = restored(fp16_folder, tx, like, fresh="head/*")
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(result[1:3]))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("kind", "width", "pattern"), [("split16", 256, "kernel"), ("int8", 100, "dense/kernel"), ("int8", None, "kernel")]
)
def test_a_pattern_names_a_param_and_all_that_stands_for_it(kind, width, pattern, tmp_path):
    """Its remainder, its codes; also a part of another shape by chance."""
    tx, params, opt_state = job(kind)
    saved(tmp_path, params, opt_state)
    like = {"dense": {"bias": params["dense"]["bias"]}, "ln": params["ln"]}
    if width:
        like["dense"]["kernel"] = jnp.ones((24, width), jnp.bfloat16)
    result = restored(tmp_path, tx, like, fresh=pattern)
    assert_moved(result.params["dense"]["bias"], params["dense"]["bias"])
    assert jax.tree.structure(result.opt_state) == jax.tree.structure(jax.eval_shape(tx.init, like))
    if width:
        masters = jaxmp.get_master_params(result.opt_state, result.params)
        assert_moved(masters["dense"]["kernel"], np.ones((24, width), np.float32))


def test_a_fresh_param_has_no_state_of_before(tmp_path):
    """Adafactor's means over rows have one shape for heads of any width."""
    tx = jaxmp.mixed_precision(optax.adafactor(1e-2, min_dim_size_to_factor=2), "bf16")
    init = jax.jit(tx.init)
    rows = lambda opt_state: optax.tree.get_all_with_path(opt_state, "v_row")[0][1]  # noqa: E731
    params = {"h": jnp.ones((4, 5), jnp.bfloat16), "deep": {"h": jnp.ones((4, 5), jnp.bfloat16)}}
    old = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 1, x.dtype), init(params))
    saved(tmp_path, params, old)
    other = params | {"h": jnp.ones((4, 7), jnp.bfloat16)}
    result = restored(tmp_path, tx, other, fresh="h")
    assert_moved(rows(result.opt_state), {"h": rows(init(other))["h"], "deep": rows(old)["deep"]})


@pytest.mark.parametrize("debias", [True, False])
def test_the_average_of_a_fresh_param_begins_as_the_param(debias, tmp_path):
    """All leaves share the weight of an average; with zeros, that of a new head would be near zero for long."""
    tx = jaxmp.mixed_precision(optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.75, debias=debias)), "bf16")
    params = {"w": jnp.ones(2, jnp.bfloat16), "head": jnp.ones(2, jnp.bfloat16)}
    opt_state = tx.init(params)
    for _ in range(3):
        params, opt_state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), opt_state, params)
    saved(tmp_path, params, opt_state)
    _, params, opt_state, *_ = restored(tmp_path, tx, params | {"head": jnp.full(3, 2, jnp.bfloat16)}, fresh="head")
    assert_close(jaxmp.get_ema_params(opt_state, params)["head"], np.full(3, 2.0, np.float32))
    params, opt_state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), opt_state, params)
    weight = 1 - 0.75**3 if debias else 1
    average = (0.75 * weight * 2.0 + 0.25 * 1.5) / (0.75 * weight + 0.25)
    assert_close(jaxmp.get_ema_params(opt_state, params)["head"], np.full(3, average, np.float32))


def test_a_loss_scale_of_another_kind_is_an_error(tmp_path):
    """A scale of 1 would pass for one that moves; convert starts it again."""
    params, scales = {"w": jnp.ones(3)}, {"none": None, "static": 8.0, "dynamic": jaxmp.DynamicLossScale()}
    tx = {name: jaxmp.mixed_precision(optax.sgd(0.1), "fp32", loss_scale=scale) for name, scale in scales.items()}
    for old in tx:
        saved(tmp_path / old, params, tx[old].init(params))
        assert_moved(restored(tmp_path / old, tx[old], params).opt_state, tx[old].init(params))
        for new in tx.keys() - {old}:
            with pytest.raises(ValueError, match="opt_state has a loss scale of .* then call jaxmp.checkpoint.convert"):
                restored(tmp_path / old, tx[new], params)


def test_a_kernel_that_is_frozen_on_one_side_is_named(tmp_path):
    params = {"a": jnp.ones(2)}
    plain, frozen = {"kernel": np.full((8, 4), 0.3, np.float32)}, jaxmp.fp8.freeze({"kernel": np.ones((8, 4))})
    for number, (base, wanted) in enumerate(((plain, frozen), (frozen, plain))):
        saved(tmp_path / str(number), params, extra={"base": base})
        with pytest.raises(ValueError, match=r"base/kernel.*; freeze that kernel \(jaxmp.fp8.freeze\) in both") as e:
            restored(tmp_path / str(number), None, params, extra={"base": wanted})
        assert "convert" not in str(e.value) and "fresh" not in str(e.value)


def test_amaxes_do_not_go_to_other_layers(tmp_path):
    tx, params, opt_state = job("fp8")
    saved(tmp_path, params, opt_state)
    other = {"a": params["a"], "ln": params["ln"], "z": params["b"]}
    with pytest.raises(ValueError, match="params/b/.* is in the checkpoint and not in the job"):
        restored(tmp_path, tx, other)
    with pytest.raises(ValueError, match="amax_states/0/amax_history has the amaxes of other fp8 layers"):
        restored(tmp_path, tx, other, fresh=("z/*", "b/*"))
    result = restored(tmp_path, tx, other, fresh=("z/*", "b/*", "*amax_states*"))
    assert not any(x.amax_history.any() for x in optax.tree.get(result.opt_state, "amax_states"))
    assert_moved(result.params["a"], params["a"])


# What is refused


def test_what_cannot_be_saved_is_refused_before_it_is_written(tmp_path):
    w, gone, shape = jnp.ones(2), jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)
    gone.delete()
    no_dtype = "of dtypes that Orbax saves; got .* at"
    with checkpoint.manager(tmp_path / "run") as steps:
        good = {"params": {"w": w}, "opt_state": ()}
        for message, wrong in (
            ("params/w was deleted, by a step that it was donated to", {"params": {"w": gone}}),
            (f"{no_dtype} params/w", {"params": {"w": jnp.ones(2, jnp.uint4)}}),
            *((f"{no_dtype} note", {"extra": {"note": x}}) for x in ("text", 2**70, np.ones(2, ">f4"), shape)),
            (r"no array without elements; got shape \(0, 3\) at params/w", {"params": {"w": jnp.ones((0, 3))}}),
            ("metadata= must be what JSON gives back", {"metadata": {"a": (1, 2)}}),
            ("metadata= must be what JSON gives back", {"metadata": {"a": float("nan")}}),
        ):
            with pytest.raises(ValueError, match=message):
                checkpoint.save(steps, 0, **good | wrong)
        with pytest.raises(TypeError):
            checkpoint.save(steps, 1.5, **good)  # pyright: ignore
        with pytest.raises(ValueError, match="rising order, from 0 on; got -1"):
            checkpoint.save(steps, -1, **good)
        assert steps.all_steps() == []
        assert checkpoint.save(steps, np.int64(4), **good)
        for step in (4, 3):
            with pytest.raises(ValueError, match=f"rising order, .*; got {step}, and the newest in .*run is 4"):
                checkpoint.save(steps, step, **good)
        with pytest.raises(ValueError, match=r"run has no complete step 9; it has \[4\]"):
            checkpoint.restore(steps, None, params={"w": w}, step=9)
        steps.delete(4)
        assert checkpoint.save(steps, 3, **good)
    for reader, why in ((steps, "it is closed"), (checkpoint.manager(tmp_path / "run", read_only=True), "read_only")):
        with pytest.raises(ValueError, match=f"a step needs a manager that writes; .*{why}"):
            checkpoint.save(reader, 8, **good)
    with (
        checkpoint.manager(tmp_path / "empty") as steps,
        pytest.raises(ValueError, match="empty has no complete step; it has none"),
    ):
        checkpoint.restore(steps, None, params={"w": w})


def test_options_are_those_of_orbax(tmp_path):
    params = {"w": jnp.ones(2)}
    with checkpoint.manager(tmp_path, save_interval_steps=2, max_to_keep=2) as steps:
        done = [checkpoint.save(steps, i, params=params, opt_state=()) for i in range(8)]
        steps.wait_until_finished()
        assert done == [True, False] * 4 and steps.all_steps() == [4, 6]
    with checkpoint.manager(tmp_path, read_only=True) as reader, checkpoint.manager(tmp_path) as steps:
        assert checkpoint.restore(reader, None, params=params).step == 6
        checkpoint.save(steps, 9, params=params, opt_state=())
        steps.wait_until_finished()
        assert checkpoint.restore(reader, None, params=params).step == 9  # what another process saved meanwhile


# Damage


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_is_named_by_its_leaf(tmp_path):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32), "b": jnp.ones(3)}
    for step in (1, 2):
        saved(tmp_path, params, step=step)
    file = max((tmp_path / "2" / "state").rglob("*"), key=lambda x: x.stat().st_size)
    flip(file, file.stat().st_size // 2)
    message = r"step 2 in .* cannot be read: (1 leaves are not what was saved: params.w|.*)\. Other steps there: \[1\]"
    with pytest.raises(ValueError, match=message):
        restored(tmp_path, None, params)
    assert restored(tmp_path, None, params, step=1).step == 1


def test_a_record_that_is_damaged_or_not_there_is_an_error(tmp_path):
    params = {"w": jnp.ones(3)}
    saved(tmp_path, params, metadata={"run": "abc"})
    (record,) = [x for x in (tmp_path / "1" / "jaxmp").rglob("*") if x.is_file() and b"abc" in x.read_bytes()]
    text = record.read_text()
    for damaged in (text.replace("abc", "abd"), text[:-4], "{}", "[]"):
        record.write_text(damaged)
        with checkpoint.manager(tmp_path, read_only=True) as steps:
            for read in (checkpoint.read_metadata, functools.partial(checkpoint.restore, tx=None, params=params)):
                with pytest.raises(ValueError, match="steps must be whole, and saved by jaxmp.checkpoint.save"):
                    read(steps)
    shutil.rmtree(tmp_path / "1" / "jaxmp")
    with pytest.raises(ValueError, match="steps must be whole, and saved by jaxmp.checkpoint.save"):
        restored(tmp_path, None, params)


def test_what_is_saved_here_is_read_by_orbax(fp16_folder, tmp_path):
    tx, params, opt_state = job("fp16")
    with ocp.CheckpointManager(fp16_folder) as plain, warnings.catch_warnings(action="ignore"):
        state = plain.restore(1, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"]
    assert_moved(state["params"], on_host(params))
    with ocp.CheckpointManager(tmp_path / "alone") as plain:
        plain.save(3, args=ocp.args.Composite(state=ocp.args.PyTreeSave({"params": params, "opt_state": opt_state})))
    with pytest.raises(ValueError, match="step 3 in .*alone cannot be read"):
        restored(tmp_path / "alone", tx, params)


@pytest.mark.thorough(0)
def test_no_damage_is_restored_in_silence(tmp_path, capfd):
    """Files deleted, cut off, with a flipped bit or zeros: an error, or what was saved; no flood of tracebacks."""
    logging.disable(logging.CRITICAL)  # Orbax and its threads log each failed read
    try:
        counts, wrong, unnamed = corruption.run(tmp_path, 64)
    finally:
        logging.disable(logging.NOTSET)
    assert wrong == unnamed == []
    assert sum(count for outcome, count in counts.items() if "an error" in outcome) >= 10
    assert "Traceback" not in capfd.readouterr().err


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxmp\[checkpoint\]'"):
        checkpoint.manager(tmp_path)


IN_A_BUCKET = """
import fsspec, jax.numpy as jnp, os, optax
import jaxmp
from jaxmp import checkpoint

url, tx = "gs://a-bucket/runs/1", jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
params = {"w": jnp.arange(8.0, dtype=jnp.bfloat16)}
with checkpoint.manager(url, max_to_keep=2) as steps:
    for i in range(3):
        checkpoint.save(steps, i, params=params, opt_state=tx.init(params), extra={"n": i})
    result = checkpoint.restore(steps, tx, params=params, extra={"n": 0})
    assert (result.step, result.extra) == (2, {"n": 2}) and jnp.array_equal(result.params["w"], params["w"])
    files = fsspec.filesystem("gcs").store
    arrays = [name for name in files if name.startswith("/a-bucket/runs/1/2/state/d/")]
    files[max(arrays, key=lambda name: len(files[name].getvalue()))].getbuffer()[40] ^= 4
    try:
        checkpoint.restore(steps, tx, params=params)
    except ValueError as e:
        assert "step 2" in str(e) and "Other steps there: [1]" in str(e), e
    else:
        raise AssertionError("a damaged step was restored")
del files["/a-bucket/runs/1/2/commit_success.txt"]  # as of a job that was killed while it saved
with checkpoint.manager(url) as steps:
    assert checkpoint.restore(steps, tx, params=params).step == 1
assert os.listdir(".") == []
"""


@pytest.mark.thorough(0)
def test_a_bucket_holds_steps_with_records_and_digests(tmp_path):
    """Of a storage in memory: Orbax writes arrays by tensorstore, over HTTP, and all else by fsspec."""
    script = tmp_path / "job.py"
    script.write_text(IN_A_BUCKET)
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(ROOT / "tests" / "support" / "fake_gcs.py"), str(script)]
    env = compiled_quickly(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=env, cwd=tmp_path / "empty", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
