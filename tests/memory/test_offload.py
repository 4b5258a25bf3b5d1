"""State and layers in host memory: the same numbers as on the device, the same types, nothing moved on a skip."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps
from jaxmp import offload
from jaxmp._src.devices import host_memory
from regimes import guarded

WIDTH, LAYERS = 8, 3
OVERFLOWS = (1, 3)


def make_params(layers=LAYERS):
    kernels = np.random.default_rng(0).normal(size=(layers, WIDTH, WIDTH)).astype(np.float32) / 3
    return {f"l{i}": {"w": jnp.asarray(w), "b": jnp.zeros(WIDTH)} for i, w in enumerate(kernels)}


def loss_fn(params, x, y):
    for p in params.values():
        x = jnp.tanh(x @ p["w"] + p["b"][None])
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


def adamw():
    return optax.chain(jaxmp.clip_by_global_norm(0.1), optax.adamw(1e-2))


def on_numpy(tree):
    return jax.tree.map(np.array, tree)


def memory_of(opt_state):
    """Where each array of the state lies, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in leaves}


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.sharding), tree)


def train(tx, policy, *, on_host, place=lambda tree: tree, steps=5, first=0):
    """Params, state and losses after some steps of which two overflow, with what must hold after each of them."""
    policy = jaxmp.get_policy(policy)
    params32 = place(make_params(2))
    opt_state, params = tx.init(params32), policy.cast_to_param(params32)
    if on_host:
        params, opt_state = offload.put((params, opt_state))
    large = {path for path, x in jaxmp._src.base.tree_paths.leaves_by_path(guarded(opt_state)).items() if x.ndim}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x, y):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, y, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    rng, losses = np.random.default_rng(0), []
    for number in range(steps):
        x, y = rng.normal(size=(8, WIDTH)), rng.normal(size=(8, WIDTH))
        x = x * np.inf if number in OVERFLOWS else x
        x, y = place((jnp.asarray(x, policy.compute_dtype), jnp.asarray(y, jnp.float32)))
        before, old, inputs = on_numpy(guarded(opt_state)), types((params, opt_state)), (params, opt_state)
        params, opt_state, loss = step(params, opt_state, x, y)
        assert all(x.is_deleted() for x in jax.tree.leaves(inputs) if x.ndim)
        if number >= first:
            assert types((params, opt_state)) == old
        for path, x in jaxmp._src.base.tree_paths.leaves_by_path(guarded(opt_state)).items():
            assert x.sharding.memory_kind == ("pinned_host" if on_host and path in large else "device"), path
        if number in OVERFLOWS:
            assert bool(opt_state.skipped)
            assert_moved(on_numpy(guarded(opt_state)), before)
        losses.append(loss)
    assert step._cache_size() == 1 + first
    return on_numpy((params, opt_state, losses))


def assert_same_training(training, expected):
    """Equal decisions; floats as far as five steps carry the flipped rounding of a param."""
    state, expected_state = training[1], expected[1]
    assert_exact((state.scaling, state.skipped_steps), (expected_state.scaling, expected_state.skipped_steps))
    eps = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(expected[0]))
    assert_close(training, expected, rtol=2 * eps, atol=1e-5)


def streamed_chain(policy):
    return jaxmp.mixed_precision(offload.stream_updates(adamw(), window_bytes=1000), policy)


@functools.cache
def run_on_the_device(policy):
    return train(streamed_chain(policy), policy, on_host=False)


@pytest.mark.parametrize("policy", ["fp16", pytest.param("fp32", marks=pytest.mark.thorough(0))])
def test_state_on_the_host_trains_as_on_the_device(policy):
    training = train(streamed_chain(policy), policy, on_host=True)
    assert_same_training(training, run_on_the_device(policy))
    assert int(training[1].skipped_steps) == 2


@pytest.mark.thorough(0)
def test_the_streamed_chain_trains_as_the_plain_one():
    streamed = run_on_the_device("fp16")
    plain = train(jaxmp.mixed_precision(adamw(), "fp16"), "fp16", on_host=False)
    assert_close(streamed[0], plain[0], rtol=2e-3, atol=1e-5)  # the same but for XLA's fused multiply-adds
    assert_exact((streamed[1].scaling, streamed[1].skipped_steps), (plain[1].scaling, plain[1].skipped_steps))


@pytest.mark.thorough(0)
def test_an_average_on_the_host_is_that_on_the_device():
    inner = optax.chain(adamw(), jaxmp.ema_params(0.9))
    tx = jaxmp.mixed_precision(offload.stream_updates(inner, window_bytes=1000), "fp16")
    assert_same_training(train(tx, "fp16", on_host=True), train(tx, "fp16", on_host=False))


@pytest.mark.parametrize("what", [("masters",), pytest.param(("moments",), marks=pytest.mark.thorough(0))])
def test_an_average_is_read_whichever_part_is_on_the_host(what):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.5))), "bf16")
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    opt_state = offload.put(jax.jit(tx.init)(params), what=what)
    params, opt_state = jax.jit(lambda s, p: jaxmp.apply_gradients(tx, {"w": jnp.ones(4)}, s, p))(opt_state, params)
    for read in (jaxmp.get_ema_params, jax.jit(jaxmp.get_ema_params)):
        assert_exact(read(opt_state, params), {"w": jnp.full(4, 0.5)})


@pytest.mark.parametrize("jitted", [True, False])
def test_statistics_of_masters_on_the_host_are_those_on_the_device(jitted):
    tx = streamed_chain("bf16")
    params32 = make_params()
    opt_state, params = tx.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32)
    stats_of = jax.jit(jaxmp.monitor.step_stats) if jitted else jaxmp.monitor.step_stats
    expected, got = (stats_of(params, state, params) for state in (opt_state, jaxmp.offload.put(opt_state)))
    assert expected.stale_masters and not got.stale_masters  # these would copy the masters in every step
    assert_moved(got, expected._replace(stale_masters={}))


@pytest.mark.parametrize("what", ["masters", pytest.param("moments", marks=pytest.mark.thorough(0))])
def test_one_part_of_the_state_alone(what):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.sgd(0.5, momentum=0.9)), "bf16")
    params = grads = {"w": jnp.ones(4, jnp.bfloat16)}
    opt_state = offload.put(jax.jit(tx.init)(params), what=(what,))
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    for _ in range(2):
        assert host_memory.is_on_host(opt_state.master_params["w"]) == (what == "masters")
        (moments,) = jax.tree.leaves(opt_state.optimizer_state)
        assert host_memory.is_on_host(moments) == (what == "moments")
        params, opt_state = step(grads, opt_state, params)


def exact_steps(tx, *, on_host, policy="fp16"):
    """Steps in which every product and sum is exact, so that no order of operations shows."""
    params32 = jax.tree.map(lambda p: jnp.asarray(np.round(8 * np.asarray(p)) / 8), make_params())
    opt_state, params = jax.jit(tx.init)(params32), jaxmp.get_policy(policy).cast_to_param(params32)
    if on_host:
        params, opt_state = offload.put((params, opt_state))
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    rng, states = np.random.default_rng(1), []
    for number in range(5):
        grads = jax.tree.map(lambda p: rng.integers(-8, 8, p.shape).astype(p.dtype), params)
        if number in OVERFLOWS:
            grads["l1"]["w"][0, 0] = np.inf
        params, opt_state = step(grads, opt_state, params)
        states.append(on_numpy((params, opt_state, jaxmp.get_metrics(opt_state))))
    return states


@pytest.mark.thorough(0)
def test_every_bit_is_that_of_the_optimizer_without_offload():
    inner = optax.sgd(0.5, momentum=0.5)
    streamed = offload.stream_updates(inner, window_bytes=100)
    tx = jaxmp.mixed_precision(streamed, "fp16", loss_scale=jaxmp.DynamicLossScale(4.0))
    steps = exact_steps(tx, on_host=True)
    plain = jaxmp.mixed_precision(inner, "fp16", loss_scale=jaxmp.DynamicLossScale(4.0))
    assert_exact(steps, exact_steps(plain, on_host=False))
    assert int(steps[-1][1].skipped_steps) == 2


@pytest.mark.thorough(0)
def test_masters_that_are_remainders():
    inner = offload.stream_updates(optax.sgd(0.5, momentum=0.5))
    tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=16)
    assert_exact(exact_steps(tx, on_host=True, policy="bf16"), exact_steps(tx, on_host=False, policy="bf16"))


@pytest.mark.parametrize("bits", [8, pytest.param(16, marks=pytest.mark.thorough(0))])
def test_remainders_in_host_memory_are_read_there(bits):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.sgd(0.5)), "bf16", remainder_bits=bits)
    start = {"w": jnp.float32([1.001, -3.3e-5, 70000.3])}
    state, params = tx.init(start), jaxmp.get_policy("bf16").cast_to_param(start)
    expected, on_host = jaxmp.get_master_params(state, params), offload.put(state)
    for read in (jaxmp.get_master_params, jax.jit(jaxmp.get_master_params)):
        masters = read(on_host, params)
        assert_exact(masters, expected)
        assert masters["w"].sharding.memory_kind == "pinned_host"


def test_a_state_in_host_memory_is_converted_on_the_device():
    start, adam = {"w": jnp.float32([1.001, -3.3e-5])}, optax.adam(0.5)
    state = jaxmp.mixed_precision(offload.stream_updates(adam), "bf16", remainder_bits=16).init(start)
    params, to = jaxmp.get_policy("bf16").cast_to_param(start), jaxmp.mixed_precision(adam, "fp32")
    expected = jaxmp.checkpoint.convert(state, params, to=to, policy="fp32")
    converted = jaxmp.checkpoint.convert(*offload.put((state, params)), to=to, policy="fp32")
    assert_exact(converted, expected)
    assert not any(host_memory.is_on_host(x) for x in jax.tree.leaves(converted))


@pytest.mark.thorough(0)
def test_a_sharded_state_stays_sharded_in_host_memory():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    place = functools.partial(jax.tree.map, lambda x: jax.device_put(x, sharding) if isinstance(x, jax.Array) else x)
    tx = streamed_chain("fp16")
    on_device, on_host = (  # the first step spreads the scalars
        train(tx, "fp16", on_host=on_host, place=place, first=1) for on_host in (False, True)
    )
    assert_same_training(on_host, on_device)


def test_in_shard_map_under_jit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adamw(1e-2), window_bytes=1), "fp16", loss_scale=4.0)
    params = {"a": jnp.ones((4, 4), jnp.float16), "b": jnp.ones(4, jnp.float16)}
    spec = PartitionSpec()

    def step(grads, opt_state, params):
        grads = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), grads)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    specs = {"mesh": mesh, "in_specs": (spec, spec, spec), "out_specs": spec}
    run = jax.jit(jax.shard_map(step, **specs))
    init = jax.device_put(jax.jit(tx.init)(params), NamedSharding(mesh, spec))
    params, grads = jax.device_put((params, params), NamedSharding(mesh, spec))
    expected = run(grads, init, params)
    new_params, new_state = run(grads, offload.put(init), params)
    assert_within_ulps(new_params, expected[0], 1)  # a rounding to float16
    assert_within_ulps(new_state, expected[1], 4)
    assert types(guarded(new_state)) == types(guarded(offload.put(init)))
    with pytest.raises(ValueError, match="in shard_map, arrays enter or leave|memory_space of all inputs"):
        jax.shard_map(host_memory.to_device, mesh=mesh, in_specs=spec, out_specs=spec)(offload.to_host(params))


def test_pmap_refuses_host_memory():
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.sgd(1e-2)), "bf16")
    params = jax.pmap(lambda _: {"w": jnp.ones(4, jnp.bfloat16)})(jnp.arange(8))
    opt_state = offload.put(jax.pmap(tx.init)(params))
    with pytest.raises(ValueError, match=r"(?i)memory kind"):  # JAX's own words
        jax.pmap(functools.partial(jaxmp.apply_gradients, tx), axis_name="i")(params, opt_state, params)


# --- what is moved, and when ------------------------------------------------------------------------------------------


def moves(jaxpr, where=()):
    """(primitives round it, to which memory, bytes) of every move between memories in a program."""
    moved = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            source, target = eqn.invars[0].aval, eqn.outvars[0].aval
            if source.memory_space != target.memory_space:
                moved.append((where, target.memory_space.name, source.size * source.dtype.itemsize))
        for inner, *_ in jaxmp._src.programs.jaxprs.functions_of(eqn):
            moved += moves(inner, (*where, eqn.primitive.name))
    return moved


def test_each_array_moves_once_in_and_once_out_and_only_if_the_step_is_taken():
    tx = jaxmp.mixed_precision(offload.stream_updates(adamw(), window_bytes=1000), "fp16")
    params32 = make_params()
    opt_state, params = offload.put(jax.jit(tx.init)(params32)), jaxmp.get_policy("fp16").cast_to_param(params32)
    closed = jax.make_jaxpr(functools.partial(jaxmp.apply_gradients, tx))(params, opt_state, params)
    moved = moves(closed.jaxpr)
    assert all("while" in where for where, _, _ in moved)  # the loop of no turn or one
    count = sum(p.size for p in jax.tree.leaves(params))
    assert sum(size for _, target, size in moved if target == "Device") == 12 * count
    assert sum(size for _, target, size in moved if target == "Host") == 12 * count
    assert len(moved) == 2 * 3 * len(jax.tree.leaves(params))


def barriers(jaxpr):
    """The operands that each barrier with an array in host memory has."""
    for eqn in jaxpr.eqns:
        operands = [v.aval for v in eqn.invars if hasattr(v, "aval")]
        if eqn.primitive.name == "optimization_barrier" and any(a.memory_space.name == "Host" for a in operands):
            yield operands
        for inner, *_ in jaxmp._src.programs.jaxprs.functions_of(eqn):
            yield from barriers(inner)


def test_a_window_waits_for_the_one_before_the_last():
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adam(1e-2), window_bytes=1), "bf16")
    params = {str(i): jnp.ones(i + 1, jnp.bfloat16) for i in range(5)}
    closed = jax.make_jaxpr(functools.partial(jaxmp.apply_gradients, tx))(params, offload.put(tx.init(params)), params)
    waiting = list(barriers(closed.jaxpr))
    host = [{a.size for a in operands if a.memory_space.name == "Host"} for operands in waiting]
    assert host == [{3, 1}, {4, 2}, {5, 3}]  # of window k, and of window k - 2
    # The new params, which stay on the device, have to be there too.
    assert all(any(a.dtype == jnp.bfloat16 for a in operands) for operands in waiting)


# --- with the rest of optax, flax and jaxmp ---------------------------------------------------------------------------


@pytest.mark.thorough(0)
def test_masks_labels_hyperparams_and_extra_arguments():
    labels = {"l0": "a", "l1": "b", "l2": "frozen"}
    hyper = optax.inject_hyperparams(optax.adamw)(1e-2)
    inner = optax.multi_transform(
        {
            "a": optax.adamw(1e-2, mask=jaxmp.weight_decay_mask),
            "b": optax.chain(hyper, optax.contrib.reduce_on_plateau()),
            "frozen": optax.set_to_zero(),
        },
        labels,
    )
    params = jaxmp.get_policy("bf16").cast_to_param(make_params())
    results = []
    for streamed in (False, True):
        tx = jaxmp.mixed_precision(offload.stream_updates(inner, window_bytes=1) if streamed else inner, "bf16")
        opt_state, new_params = jax.jit(tx.init)(make_params()), params
        if streamed:
            opt_state = offload.put(opt_state)
        step = jax.jit(lambda g, s, p, tx=tx: jaxmp.apply_gradients(tx, g, s, p, value=jnp.float32(1.0)))
        for _ in range(2):
            new_params, opt_state = step(params, opt_state, new_params)
        results.append(on_numpy((new_params, opt_state)))
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert_moved(results[1][0]["l2"], on_numpy(params["l2"]))


def test_alone_in_a_chain():
    params = make_params()
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload.stream_updates(optax.adam(1e-2), window_bytes=1))
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    opt_state = offload.put(tx.init(params))
    updates, new = jax.jit(tx.update)(params, opt_state, params)
    assert types(new) == types(opt_state)
    assert not any(map(host_memory.is_on_host, jax.tree.leaves(updates)))
    expected = jax.jit(plain.update)(params, plain.init(params), params)
    assert_close(on_numpy((updates, new)), expected, rtol=1e-6, atol=1e-8)


def test_a_train_state_and_its_checkpoint():
    model = nn.Dense(4, dtype=jnp.bfloat16)
    x = jnp.ones((2, 4), jnp.bfloat16)
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adamw(1e-2)), "bf16")
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy="bf16")
    state = offload.put(state)

    @jax.jit
    def step(state):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.mean(model.apply({"params": p}, x).astype(jnp.float32) ** 2))(
            state.params, opt_state=state.opt_state
        )
        return state.apply_gradients(grads=grads)

    state = step(step(state))
    assert step._cache_size() == 1
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    restored = offload.put(jax.tree.map(jnp.asarray, restored))
    assert memory_of(restored.opt_state) == memory_of(state.opt_state)
    assert_same_program(on_numpy(step(restored)), on_numpy(step(state)))


def test_put_is_idempotent_and_works_under_jit():
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adam(1e-2)), "bf16")
    params = make_params()
    start = jax.jit(tx.init)(params)
    opt_state = offload.put(start)
    assert types(offload.put(opt_state)) == types(opt_state)
    assert memory_of(jax.jit(lambda p: offload.put(tx.init(p)))(params)) == memory_of(opt_state)
    small = offload.put(start, min_bytes=100)
    assert small.master_params["l0"]["b"].sharding.memory_kind == "device"
    assert small.master_params["l0"]["w"].sharding.memory_kind == "pinned_host"
    back = host_memory.to_device(opt_state)
    assert set(memory_of(back).values()) == {"device"}
    assert_moved(on_numpy(back), on_numpy(opt_state))


# --- errors -----------------------------------------------------------------------------------------------------------


def offloaded(tx, params):
    return offload.put(tx.init(params))


def test_what_cannot_stream_says_so():
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    streamed = jaxmp.mixed_precision(offload.stream_updates(optax.adamw(1e-2)), "bf16")
    opt_state = offloaded(streamed, params)
    message = "state in host memory needs apply_gradients with mixed_precision.stream_updates.inner., policy.; got .*w"
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(streamed.update)(params, opt_state, params)
    for inner in (optax.adamw(1e-2), jaxmp.fused_adamw(1e-2)):
        tx = jaxmp.mixed_precision(inner, "bf16")
        with pytest.raises(ValueError, match=message):
            jax.make_jaxpr(functools.partial(jaxmp.apply_gradients, tx))(params, offloaded(tx, params), params)
    with pytest.raises(ValueError, match="must be an optax optimizer; got one that writes in place"):
        offload.stream_updates(jaxmp.fused_adamw(1e-2))
    policy = jaxmp.get_policy("fp16")
    steps = jaxmp.mixed_precision(optax.MultiSteps(offload.stream_updates(optax.adamw(1e-2)), 2), policy)
    low = policy.cast_to_param(params)
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(functools.partial(jaxmp.apply_gradients, steps))(low, offloaded(steps, params), low)


def test_arguments_are_checked():
    for window_bytes in (0, 1.5, True, "1"):
        with pytest.raises(ValueError, match=f"window_bytes must be a positive int, .*got {window_bytes!r}"):
            offload.stream_updates(optax.adam(1e-2), window_bytes=window_bytes)
    for what in ("masters", ("masters", "gradients")):
        with pytest.raises(ValueError, match='what must be a collection of "masters" and "moments"; got '):
            offload.put(optax.adam(1e-2).init(jnp.ones(2)), what=what)
    with pytest.raises(TypeError, match="inner must be an optax.GradientTransformation"):
        offload.stream_updates(1.0)


def test_host_memory_is_pinned_memory_of_its_device(monkeypatch):
    x = offload.to_host(jnp.ones(2))
    assert x.sharding == SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    monkeypatch.setattr(host_memory, "_HOST_KIND", "hbm2")  # of which no device here has any
    with pytest.raises(ValueError, match="memory of kind 'hbm2'; .*has 'device', 'pinned_host', .*Keep the state"):
        offload.to_host(jnp.ones(2))
