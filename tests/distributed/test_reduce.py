"""Gradients that move in few bytes: what is sent and unsent adds up, overflow is seen, skipped steps change nothing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_moved, assert_same_program
from jaxmp import fsdp
from regimes import AXIS, mesh_of

DEVICES = 4
MANUAL = ["shard_map", "shard_map_unchecked", "pmap"]
HOW = pytest.mark.parametrize("how", MANUAL)
HOPS = {
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "bf16_int8": (jnp.bfloat16, jnp.int8),
    "fp32_int8": (jnp.float32, jnp.int8),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Sizes that 4 * 128 divides, does not divide, and is more than; a small one, which moves in float32.
PARAMS = {"even": (16, 64), "odd": (7, 131), "short": (90,), "small": (3,)}
reduced = functools.partial(jaxmp.reduce_gradients, AXIS, min_size=50)


def job_of(tx, params, how):
    """(opt_state, step(grads, opt_state) -> (updates, opt_state)) where grads have a leading axis of devices."""

    def step(grads, opt_state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), opt_state, params)

    if how == "pmap":
        run = jax.pmap(lambda g, s: tx.update(g, s, params), AXIS, devices=jax.devices()[:DEVICES])
        copies = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), tx.init(params))

        def by_pmap(grads, opt_state):
            updates, opt_state = run(grads, opt_state)
            updates = jax.tree.map(np.asarray, updates)
            for u in jax.tree.leaves(updates):
                assert_same_program(u, np.broadcast_to(u[:1], u.shape))
            return jax.tree.map(lambda u: u[0], updates), opt_state

        return copies, by_pmap
    specs = jaxmp.sharding_of(tx, params, jax.tree.map(lambda _: P(), params))
    in_specs, check_vma = (P(AXIS), specs), how == "shard_map"
    f = jax.shard_map(step, mesh=mesh_of(), in_specs=in_specs, out_specs=(P(), specs), check_vma=check_vma)
    return tx.init(params), jax.jit(f)


@functools.cache
def plain_job(how, name="int8", **kwargs):
    """The mean of gradients, as updates of params that are zero."""
    params = {key: jnp.zeros(shape) for key, shape in PARAMS.items()}
    devices = 1 if how == "pmap" else DEVICES
    reduce = reduced(wire_dtype=HOPS[name], devices=devices)
    return job_of(jaxmp.mixed_precision(reduce, "fp32", **kwargs), params, how)


def unsent_of(opt_state):
    """{name: float64[devices, ...]}."""
    found = optax.tree.get(opt_state, "unsent").by_axis[AXIS]
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {path[0].key: np.asarray(x, np.float64).reshape(DEVICES, *PARAMS[path[0].key]) for path, x in leaves}


def gradients(seed, scale=1.0):
    return {key: scale * draw(DEVICES, *shape, seed=seed) for key, shape in PARAMS.items()}


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("how", "name"), [("pmap", "int8"), ("shard_map_unchecked", "int8"), *(("shard_map", name) for name in HOPS)]
)
def test_what_is_sent_and_what_is_unsent_is_what_was_given(how, name):
    """So over the steps nothing is lost: the sum of the means that were sent is that of the exact ones, but for what
    is unsent at the end."""
    opt_state, step = plain_job(how, name)
    sent, given = ({key: np.zeros(shape) for key, shape in PARAMS.items()} for _ in range(2))
    for seed in range(4):
        grads = gradients(seed, scale=10.0**-seed)
        updates, opt_state = step(grads, opt_state)
        for key, g in grads.items():
            sent[key] += updates[key]
            given[key] += np.mean(g, axis=0, dtype=np.float64)
            if key == "small":
                np.testing.assert_allclose(updates[key], g.mean(0), rtol=1e-6, atol=1e-7)
        unsent = unsent_of(opt_state)
        assert sorted(unsent) == ["even", "odd", "short"]
        for key, e in unsent.items():
            np.testing.assert_allclose(sent[key] + e.mean(0), given[key], rtol=0, atol=2e-6, err_msg=key)
            assert seed > 0 or np.abs(e).max() > (1e-6 if name == "fp32_int8" else 1e-4)  # something was rounded


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", HOPS)
def test_the_error_of_one_step_is_that_of_the_two_formats(name):
    """The largest of a block of 128 normal numbers is about 2.7; a code is half a step off at most."""
    opt_state, step = plain_job("shard_map", name)
    grads = gradients(7)
    updates, _ = step(grads, opt_state)
    exact = grads["even"].mean(0)
    error = np.abs(updates["even"] - exact).max()
    steps = {"int8": 2 * 4 / 64 / 2, "e4m3": 2 * 4 / 16, "e5m2": 2 * 4 / 8, "bf16_int8": 3 / 64 / 2 + 4 / 256}
    assert 1e-4 < error < steps.get(name, 3 / 64 / 2)


@pytest.mark.thorough(1)
@HOW
@pytest.mark.parametrize("bad", [np.inf, np.nan], ids=str)
def test_one_bad_value_on_one_device_skips_the_step_and_changes_nothing_unsent(how, bad):
    opt_state, step = plain_job(how)
    _, opt_state = step(gradients(0), opt_state)
    grads = gradients(1)
    grads["odd"][2, 3, 5] = bad
    updates, after = step(grads, opt_state)
    assert np.all(jaxmp.get_metrics(after)["skipped"])
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    keep = lambda state: [optax.tree.get(state, name) for name in ("unsent", "unsent_of")]  # noqa: E731
    assert_moved(jax.tree.map(np.asarray, keep(after)), jax.tree.map(np.asarray, keep(opt_state)))


@pytest.mark.thorough(0)
def test_a_step_that_skip_if_refuses_changes_nothing_unsent():
    opt_state, step = plain_job("shard_map", skip_if=_is_large)
    _, opt_state = step(gradients(0), opt_state)
    _, after = step(gradients(1, scale=1e3), opt_state)
    assert jaxmp.get_metrics(after)["skipped"]
    assert_moved(optax.tree.get(after, "unsent"), optax.tree.get(opt_state, "unsent"))


def _is_large(grads, metrics):
    del metrics
    return jnp.max(jnp.abs(grads["even"])) > 100


@pytest.mark.thorough(0)
def test_where_no_step_is_skipped_an_overflow_is_nan_in_its_block():
    """`skip_nonfinite=False` takes every step: the codes of the block say NaN, so nothing that was inf looks finite."""
    opt_state, step = plain_job("shard_map", skip_nonfinite=False)
    _, opt_state = step(gradients(0), opt_state)
    grads = gradients(1)
    grads["even"][1, 0, 3] = np.inf
    updates, opt_state = step(grads, opt_state)
    block = np.arange(16 * 64).reshape(16, 64) < 128
    assert np.all(np.isnan(np.asarray(updates["even"])[block]))
    others = np.asarray(updates["even"])[~block]
    assert np.all(np.isfinite(others)) and np.mean(others != 0) > 0.9
    assert not jaxmp.get_metrics(opt_state)["skipped"]


def test_what_another_device_has_not_sent_is_dropped():
    """After `unreplicate` and `replicate` every device has the unsent part of the first: it counts once."""
    opt_state, step = plain_job("pmap")
    _, opt_state = step(gradients(0), opt_state)
    first = unsent_of(opt_state)
    copied = jax.tree.map(lambda x: np.stack([np.asarray(x)[0]] * DEVICES), opt_state)
    grads = gradients(1)
    updates, after = step(grads, copied)
    for key, e in unsent_of(after).items():
        given = grads[key].mean(0, dtype=np.float64) + first[key][0] / DEVICES
        np.testing.assert_allclose(updates[key] + e.mean(0), given, rtol=0, atol=2e-6)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["int8", "bf16_int8"])
def test_bytes_in_the_compiled_program(name):
    opt_state, step = plain_job("shard_map", name)
    grads = jax.eval_shape(lambda: gradients(0))
    text = step.lower(grads, opt_state).compile().as_text()
    found = re.findall(r"(\w+)\[[\d,]*\](?:{[\d,]*})?[^=\n]* (all-to-all|all-gather|all-reduce)\(", text)
    kinds = {(kind, dtype) for dtype, kind in found}
    first = "u8" if name == "int8" else "u16"
    assert kinds == {("all-to-all", first), ("all-gather", "u8"), ("all-reduce", "f32")}
    # The mean of the small leaf, and the flag: all else moves in few bytes.
    sizes = [int(n or 1) for n in re.findall(r"f32\[(\d*)\](?:{\d*})?[^=\n]* all-reduce\(", text)]
    assert max(sizes) <= 3


# In a training step


def data():
    x = jax.random.normal(jax.random.key(1), (32, 24))
    return x, jnp.tanh(x @ jax.random.normal(jax.random.key(2), (24, 5)))


def loss_fn(params, x, y):
    h = jnp.tanh(x.astype(params["in"].dtype) @ params["in"])
    return jnp.mean(((h @ params["out"]).astype(jnp.float32) - y) ** 2)


def trained(how, wire_dtype, *, steps=12, inner=None, policy="fp16"):
    params32 = {"in": 0.3 * jnp.asarray(draw(24, 40)), "out": 0.3 * jnp.asarray(draw(40, 5, seed=1))}
    inner = optax.adamw(1e-2) if inner is None else inner
    policy = jaxmp.get_policy(policy)
    devices = 1 if how == "pmap" else DEVICES
    few = {} if wire_dtype is None else {"wire_dtype": wire_dtype, "devices": devices}
    tx = jaxmp.mixed_precision(optax.chain(reduced(**few), inner), policy)

    def step(params, opt_state, x, y):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, y, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), jax.lax.pmean(loss, AXIS)

    params, opt_state, (x, y) = policy.cast_to_param(params32), tx.init(params32), data()
    if how == "pmap":
        params, opt_state = (jax.tree.map(lambda x: jnp.stack([x] * DEVICES), t) for t in (params, opt_state))
        x, y = (a.reshape(DEVICES, -1, a.shape[-1]) for a in (x, y))
        step = jax.pmap(step, AXIS, devices=jax.devices()[:DEVICES])
    else:
        specs = (P(), jaxmp.sharding_of(tx, params32, jax.tree.map(lambda _: P(), params32)))
        check_vma = how == "shard_map"
        where = {"mesh": mesh_of(), "in_specs": (*specs, P(AXIS), P(AXIS)), "out_specs": (*specs, P())}
        step = jax.jit(jax.shard_map(step, **where, check_vma=check_vma))
    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(jnp.mean(loss)))
    return params, opt_state, losses


@functools.cache
def trained_in_float32():
    return trained("shard_map", None)[2]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("how", "name"), [("shard_map", "int8"), ("pmap", "e4m3")])
def test_training_goes_as_with_exact_means(how, name):
    _, _, losses = trained(how, HOPS[name])
    np.testing.assert_allclose(losses, trained_in_float32(), rtol=0.01)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.thorough(0)
def test_beside_other_transforms():
    parts = [jaxmp.clip_by_global_norm(100.0), jaxmp.compress_moments(optax.adamw(1e-2), jnp.int8)]
    for inner in (jaxmp.fused_adamw(1e-2, max_norm=100.0), optax.chain(*parts, jaxmp.ema_params(0.9))):
        losses = trained("shard_map", jnp.int8, inner=inner)[2]
        np.testing.assert_allclose(losses, trained_in_float32(), rtol=0.03)


# Layouts, checkpoints


def test_unsent_parts_lie_over_their_axis_and_else_as_their_params():
    mesh = jax.make_mesh((2, 4), ("node", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": jnp.ones((6, 24)), "odd": jnp.ones((7, 5))}
    layout = fsdp.layout_of(params, mesh, min_size=1)
    reduce = jaxmp.reduce_gradients("node", wire_dtype=jnp.int8, devices=2, min_size=1)
    tx = jaxmp.mixed_precision(optax.chain(reduce, optax.adam(1e-3)), "bf16")
    padded = fsdp.pad(params, layout)
    for shardings, spec_of in ((layout.specs, lambda s: s), (layout.shardings, lambda s: s.spec)):
        found = jaxmp.sharding_of(tx, padded, shardings)
        unsent = optax.tree.get(found, "unsent").by_axis["node"]
        assert jax.tree.map(spec_of, unsent) == {"w": P("node", None, "fsdp"), "odd": P("node", "fsdp", None)}
        assert spec_of(optax.tree.get(found, "unsent_of").by_axis["node"]) == P("node")
    state = tx.init(padded)
    assert optax.tree.get(fsdp.trim(state, layout), "unsent").by_axis["node"]["odd"].shape == (2, 7, 5)
    assert_moved(fsdp.pad(fsdp.trim(state, layout), layout), state)


def test_the_plan_counts_what_is_unsent_on_one_device():
    params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    few = functools.partial(jaxmp.reduce_gradients, "data", wire_dtype=jnp.int8)
    sizes = [
        jaxmp.memory.plan(params, "bf16", optimizer=jaxmp.mixed_precision(inner, "bf16")).optimizer
        for inner in (optax.sgd(0.1), optax.chain(few(devices=8), optax.sgd(0.1)))
    ]
    assert sizes[1] - sizes[0] == 4 * 64 * 256 + 4  # and the number of the device


@pytest.mark.thorough(0)
def test_cut_inside_a_node_and_eight_bits_between_nodes():
    """HSDP: the first hop, inside the node, is a reduce-scatter in float32."""
    mesh = jax.make_mesh((2, 4), ("node", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params32 = {"in": 0.3 * jnp.asarray(draw(24, 40)), "out": 0.3 * jnp.asarray(draw(40, 5, seed=1))}
    layout, policy, rows = fsdp.layout_of(params32, mesh, min_size=1), jaxmp.get_policy("bf16"), P(("node", "fsdp"))
    losses = {}
    for few in ({}, {"wire_dtype": jnp.int8, "devices": 2, "min_size": 1}):
        reduce = jaxmp.reduce_gradients("node", **few)
        tx = jaxmp.mixed_precision(optax.chain(reduce, optax.adamw(1e-2)), policy)

        def step(params, opt_state, x, y, tx=tx):
            whole = lambda params, *batch: loss_fn(fsdp.gather(params, layout), *batch)  # noqa: E731
            compute = jaxmp.value_and_grad(whole, axis_name=("node", "fsdp"))
            loss, grads = compute(params, x, y, opt_state=opt_state)
            grads = fsdp.reduce_gradients(grads, layout)
            return *jaxmp.apply_gradients(tx, grads, opt_state, params), jax.lax.pmean(loss, ("node", "fsdp"))

        padded = fsdp.pad(params32, layout)
        specs = (layout.specs, jaxmp.sharding_of(tx, padded, layout.specs))
        run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, rows, rows), out_specs=(*specs, P())))
        params, opt_state = policy.cast_to_param(padded), tx.init(padded)
        losses[bool(few)] = found = []
        for _ in range(8):
            params, opt_state, loss = run(params, opt_state, *data())
            found.append(float(loss))
    np.testing.assert_allclose(losses[True], losses[False], rtol=0.01)


@pytest.mark.thorough(0)
def test_a_job_goes_on_bit_for_bit_from_its_checkpoint(tmp_path):
    params = {key: jnp.zeros(shape) for key, shape in PARAMS.items()}
    opt_state, step = plain_job("shard_map")
    tx = jaxmp.mixed_precision(reduced(wire_dtype=jnp.int8, devices=DEVICES), "fp32")
    shardings = jaxmp.sharding_of(tx, params, jax.tree.map(lambda _: NamedSharding(mesh_of(), P()), params))
    _, opt_state = step(gradients(0), opt_state)
    with jaxmp.checkpoint.manager(tmp_path) as steps:
        jaxmp.checkpoint.save(steps, 0, params=params, opt_state=opt_state)
        job = jaxmp.checkpoint.restore(steps, tx, params=params)
    assert_moved(job.opt_state, opt_state)
    restored = jax.device_put(job.opt_state, shardings)
    assert_same_program(step(gradients(1), restored)[0], step(gradients(1), opt_state)[0])


def test_what_is_unsent_is_restored_where_it_belongs(tmp_path):
    """It came whole to each device: as many times its memory as there are devices."""
    params = {key: jnp.zeros(shape) for key, shape in PARAMS.items()}
    job = functools.partial(reduced, wire_dtype=jnp.int8)
    tx, fewer = (jaxmp.mixed_precision(job(devices=n), "fp32") for n in (DEVICES, 2))

    def on_mesh(devices):
        sharding = NamedSharding(jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices]), P())
        return {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for key, x in params.items()}

    with jaxmp.checkpoint.manager(tmp_path) as steps:
        jaxmp.checkpoint.save(steps, 0, params=params, opt_state=tx.init(params))
        restored = jaxmp.checkpoint.restore(steps, tx, params=on_mesh(DEVICES))
        shardings = jaxmp.sharding_of(tx, params, jax.tree.map(lambda x: x.sharding, on_mesh(DEVICES)))
        for x, sharding in zip(jax.tree.leaves(restored.opt_state), jax.tree.leaves(shardings), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        with pytest.raises(ValueError, match=r"got 2 at .*unsent/by_axis/data/even, and the mesh has 4.*devices="):
            jaxmp.checkpoint.restore(steps, fewer, params=on_mesh(4), fresh="*unsent*")


def test_what_was_not_sent_is_for_as_many_devices(tmp_path):
    """On others it starts again, if the user says so."""
    params = {key: jnp.zeros(shape) for key, shape in PARAMS.items()}
    tx, fewer = (jaxmp.mixed_precision(reduced(wire_dtype=jnp.int8, devices=n), "fp32") for n in (DEVICES, 2))
    _, opt_state = plain_job("shard_map")[1](gradients(0), plain_job("shard_map")[0])
    with jaxmp.checkpoint.manager(tmp_path) as steps:
        jaxmp.checkpoint.save(steps, 0, params=params, opt_state=opt_state)
        with pytest.raises(ValueError, match=r"unsent/by_axis/data/\w+ has shape \(4, .* in the job"):
            jaxmp.checkpoint.restore(steps, fewer, params=params)
        restored = jaxmp.checkpoint.restore(steps, fewer, params=params, fresh="*unsent*")
    assert restored.fresh and all("unsent" in path for path in restored.fresh)
    assert not any(np.any(e) for e in jax.tree.leaves(optax.tree.get(restored.opt_state, "unsent")))
    with pytest.raises(ValueError, match="unsent/by_axis/data"):
        jaxmp.checkpoint.convert(opt_state, params, to=fewer, policy="fp32")
    assert_moved(jaxmp.checkpoint.convert(opt_state, params, to=tx, policy="fp32")[1], opt_state)


# Errors

WRONG = {
    "dtype": (lambda: reduced(wire_dtype=jnp.float16), TypeError, "must be one of int8, .*float32.*got .*float16"),
    "three": (lambda: reduced(wire_dtype=(jnp.int8,) * 3), TypeError, "a pair of them for the two hops"),
    "auto": (lambda: jaxmp.reduce_gradients(wire_dtype=jnp.int8), ValueError, "one named axis; got .*'auto'"),
    "sum": (
        lambda: reduced(jnp.float16, wire_dtype=jnp.int8),
        ValueError,
        "must not stand beside wire_dtype=; got .*float16",
    ),
    "predivide": (
        lambda: reduced(wire_dtype=jnp.int8, predivide=2.0),
        ValueError,
        "predivide= must not stand beside wire_dtype=.*, 2.0. Leave both out",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_go_together(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_places_where_it_cannot_stand():
    params = {"w": jnp.ones((16, 64))}
    few = functools.partial(reduced, wire_dtype=jnp.int8)
    tx = jaxmp.mixed_precision(few(devices=DEVICES), "fp32")
    with pytest.raises(ValueError, match=r"needs its axis bound; got 'data', bound axes: none. Under plain jit"):
        jax.jit(tx.update)(params, tx.init(params), params)
    outside = optax.chain(few(devices=DEVICES), jaxmp.mixed_precision(optax.sgd(1.0), "fp32"))
    state, step = job_of(outside, params, "shard_map")
    grads = {"w": jnp.ones((DEVICES, 16, 64))}
    with pytest.raises(ValueError, match="must stand in mixed_precision"):
        step(grads, state)
    on_mesh = {"w": NamedSharding(mesh_of(), P())}
    with pytest.raises(ValueError, match=r"axis 'data'; got 1 at .*, and the mesh has 4.*devices="):
        jaxmp.sharding_of(jaxmp.mixed_precision(few(), "fp32"), params, on_mesh)
    with pytest.raises(ValueError, match=r"got 4 at .*, and the mesh has no such axis \(fsdp\)"):
        other = NamedSharding(jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4]), P())
        jaxmp.sharding_of(tx, params, {"w": other})
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match="got 2 at .*, and the mesh has 4"):
        jaxmp.sharding_of(jaxmp.mixed_precision(few(devices=2), "fp32"), params, {"w": P()})
    state, step = job_of(jaxmp.mixed_precision(few(devices=8), "fp32"), params, "shard_map")
    with pytest.raises(ValueError, match=r"\(1, 16, 64\) on each device; got \(2, 16, 64\) at w.*devices="):
        step(grads, state)


IN_BRANCHES = {
    "optax.MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "optax.apply_if_finite": lambda inner: optax.apply_if_finite(inner, 2),
    "optax.conditionally_transform": lambda inner: optax.conditionally_transform(inner, lambda step: step % 2 == 0),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("wire_dtype", [None, jnp.int8], ids=["whole", "int8"])
@pytest.mark.parametrize("name", IN_BRANCHES)
def test_a_transform_that_decides_about_the_step_stands_behind_the_reduction(name, wire_dtype):
    """Inside of it, jax said that the types of two branches differ; in few bytes, that it is not in mixed_precision."""
    params, wrap = {"w": jnp.ones((16, 64))}, IN_BRANCHES[name]
    reduce = reduced() if wire_dtype is None else reduced(wire_dtype=wire_dtype, devices=DEVICES)

    def trace(inner, how="shard_map"):
        state, step = job_of(jaxmp.mixed_precision(inner, "fp32"), params, how)
        return jax.eval_shape(step, {"w": jnp.ones((DEVICES, 16, 64))}, state)

    inside, before = wrap(optax.chain(reduce, optax.sgd(0.1))), optax.chain(reduce, wrap(optax.sgd(0.1)))
    trace(before), trace(before, "untracked")
    told = rf"reduce_gradients must come before {name}; got it inside. Pass it as before= of jaxmp.mixed"
    with pytest.raises(ValueError, match=told):
        trace(inside)
    if name == "optax.apply_if_finite" or (wire_dtype is not None and name == "optax.MultiSteps"):
        with pytest.raises(ValueError, match=told):
            trace(inside, "untracked")
    else:  # it decides by a count, which is the same on all devices
        trace(inside, "untracked")
