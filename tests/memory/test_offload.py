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
from jaxmp._src.programs import windows as windows_lib
from regimes import guarded

WIDTH, LAYERS = 8, 3
OVERFLOWS = (1, 3)


def make_params(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"l{i}": {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)} for i, k in enumerate(keys)}


def loss_fn(params, x, y):
    for p in params.values():
        x = jnp.tanh(x @ p["w"] + p["b"][None])
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


def adamw():
    return optax.chain(jaxmp.clip_by_global_norm(0.1), optax.adamw(1e-2))


def kinds(tree):
    return {jax.typeof(x).memory_space for x in jax.tree.leaves(tree)}


def memory_of(opt_state):
    """Where each array of the state lies, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in leaves}


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.sharding), tree)


def train(tx, policy, *, on_host, place=lambda tree: tree, steps=5, grads_on_host=False, first=0):
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
        grads = offload.to_host(grads) if grads_on_host else grads
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    rng, losses = np.random.default_rng(0), []
    for number in range(steps):
        x, y = rng.normal(size=(8, WIDTH)), rng.normal(size=(8, WIDTH))
        x = x * np.inf if number in OVERFLOWS else x
        x, y = place((jnp.asarray(x, policy.compute_dtype), jnp.asarray(y, jnp.float32)))
        before, old, inputs = (
            jax.tree.map(np.array, guarded(opt_state)),
            types((params, opt_state)),
            (params, opt_state),
        )
        params, opt_state, loss = step(params, opt_state, x, y)
        assert all(x.is_deleted() for x in jax.tree.leaves(inputs) if x.ndim)
        if number >= first:
            assert types((params, opt_state)) == old
        for path, x in jaxmp._src.base.tree_paths.leaves_by_path(guarded(opt_state)).items():
            assert x.sharding.memory_kind == ("pinned_host" if on_host and path in large else "device"), path
        if number in OVERFLOWS:
            assert bool(opt_state.skipped)
            assert_moved(jax.tree.map(np.array, guarded(opt_state)), before)
        losses.append(loss)
    compiled = step._cache_size()
    return jax.tree.map(np.array, (params, opt_state, losses)), compiled


def assert_same_training(got, expected):
    """Equal decisions; floats as far as five steps carry the flipped rounding of a param."""
    state, expected_state = got[1], expected[1]
    assert_exact((state.scaling, state.skipped_steps), (expected_state.scaling, expected_state.skipped_steps))
    eps = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(expected[0]))
    assert_close(got, expected, rtol=2 * eps, atol=1e-5)


def streamed_chain(policy):
    return jaxmp.mixed_precision(offload.stream_updates(adamw(), window_bytes=1000), policy)


@functools.cache
def run_on_the_device(policy):
    return train(streamed_chain(policy), policy, on_host=False)[0]


@pytest.mark.parametrize(
    "policy", ["fp16", *(pytest.param(p, marks=pytest.mark.thorough(0)) for p in ("bf16", "fp32"))]
)
def test_state_on_the_host_trains_as_on_the_device(policy):
    got, compiled = train(streamed_chain(policy), policy, on_host=True)
    assert_same_training(got, run_on_the_device(policy))
    assert compiled == 1
    assert int(got[1].skipped_steps) == 2
    if policy != "fp16":
        return
    plain, _ = train(jaxmp.mixed_precision(adamw(), policy), policy, on_host=False)
    assert_close(got[0], plain[0], rtol=2e-3, atol=1e-5)  # the same but for XLA's fused multiply-adds
    assert_exact((got[1].scaling, got[1].skipped_steps), (plain[1].scaling, plain[1].skipped_steps))


@pytest.mark.thorough(0)
def test_an_average_on_the_host_is_that_on_the_device():
    inner = optax.chain(adamw(), jaxmp.ema_params(0.9))
    tx = jaxmp.mixed_precision(offload.stream_updates(inner, window_bytes=1000), "fp16")
    assert_same_training(train(tx, "fp16", on_host=True)[0], train(tx, "fp16", on_host=False)[0])


def test_gradients_on_the_host_too():
    got, compiled = train(streamed_chain("fp16"), "fp16", on_host=True, grads_on_host=True)
    assert_same_training(got, run_on_the_device("fp16"))
    assert compiled == 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize("what", [("masters",), ("moments",), ("masters", "moments")])
def test_an_average_is_read_whichever_part_is_on_the_host(what):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.5))), "bf16")
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    opt_state = offload.put(tx.init(params), what=what)
    params, opt_state = jax.jit(lambda s, p: jaxmp.apply_gradients(tx, {"w": jnp.ones(4)}, s, p))(opt_state, params)
    for read in (jaxmp.get_ema_params, jax.jit(jaxmp.get_ema_params)):
        assert_exact(read(opt_state, params), {"w": jnp.full(4, 0.5)})


@pytest.mark.thorough(1)
@pytest.mark.parametrize("on_host", ["masters", "moments"])
def test_one_part_of_the_state_alone(on_host):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.sgd(0.5, momentum=0.9)), "bf16")
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    opt_state = offload.put(tx.init(params), what=(on_host,))
    expected = {
        "masters": on_host == "masters",
        "moments": on_host == "moments",
    }
    for _ in range(2):
        assert host_memory.is_on_host(opt_state.master_params["w"]) == expected["masters"]
        (moments,) = jax.tree.leaves(opt_state.optimizer_state)
        assert host_memory.is_on_host(moments) == expected["moments"]
        grads = {"w": jnp.ones(4, jnp.bfloat16)}
        params, opt_state = jax.jit(functools.partial(jaxmp.apply_gradients, tx))(grads, opt_state, params)


@functools.cache
def exact_steps_on_the_device():
    scale = jaxmp.DynamicLossScale(4.0)
    return exact_steps(jaxmp.mixed_precision(optax.sgd(0.5, momentum=0.5), "fp16", loss_scale=scale), on_host=False)


def exact_steps(tx, *, on_host, policy="fp16", **put):
    """Steps in which every product and sum is exact, so that no order of operations shows."""
    params32 = jax.tree.map(lambda p: jnp.round(8 * p) / 8, make_params())
    opt_state, params = tx.init(params32), jaxmp.get_policy(policy).cast_to_param(params32)
    if on_host:
        params, opt_state = offload.put((params, opt_state), **put)
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    rng, states = np.random.default_rng(1), []
    for number in range(5):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.integers(-8, 8, p.shape), p.dtype), params)
        if number in OVERFLOWS:
            grads["l1"]["w"] = grads["l1"]["w"].at[0, 0].set(np.inf)
        params, opt_state = step(grads, opt_state, params)
        states.append(jax.tree.map(np.array, (params, opt_state, jaxmp.get_metrics(opt_state))))
    return states


@pytest.mark.thorough(0)
@pytest.mark.parametrize("window_bytes", [1000, 100])
def test_every_bit_is_that_of_the_optimizer_without_offload(window_bytes):
    inner, expected = optax.sgd(0.5, momentum=0.5), exact_steps_on_the_device()
    streamed = offload.stream_updates(inner, window_bytes=window_bytes)
    tx = jaxmp.mixed_precision(streamed, "fp16", loss_scale=jaxmp.DynamicLossScale(4.0))
    got = exact_steps(tx, on_host=True)
    for (params, opt_state, metrics), (expected_params, expected_state, expected_metrics) in zip(
        got, expected, strict=True
    ):
        assert_exact(params, expected_params)
        assert_exact(opt_state, expected_state)
        assert_exact(metrics, expected_metrics)
    assert int(got[-1][1].skipped_steps) == 2


@pytest.mark.thorough(0)
def test_masters_that_are_remainders():
    inner = offload.stream_updates(optax.sgd(0.5, momentum=0.5))
    tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=16)
    assert_exact(exact_steps(tx, on_host=True, policy="bf16"), exact_steps(tx, on_host=False, policy="bf16"))


@pytest.mark.parametrize("bits", [16, 8])
def test_remainders_in_host_memory_are_read_there(bits):
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.sgd(0.5)), "bf16", remainder_bits=bits)
    start = {"w": jnp.float32([1.001, -3.3e-5, 70000.3])}
    state, params = tx.init(start), jaxmp.get_policy("bf16").cast_to_param(start)
    expected, on_host = jaxmp.get_master_params(state, params), offload.put(state)
    for read in (jaxmp.get_master_params, jax.jit(jaxmp.get_master_params)):
        got = read(on_host, params)
        assert_exact(got, expected)
        assert got["w"].sharding.memory_kind == "pinned_host"
    whole = jaxmp.mixed_precision(optax.sgd(0.5), "bf16")
    params, made = jaxmp.checkpoint.convert(on_host, params, to=whole, policy="bf16")
    assert_exact(jaxmp.get_master_params(made, params), expected)


def test_a_state_in_host_memory_is_converted_on_the_device():
    start, adam = {"w": jnp.float32([1.001, -3.3e-5])}, optax.adam(0.5)
    state = jaxmp.mixed_precision(offload.stream_updates(adam), "bf16").init(start)
    params, to = jaxmp.get_policy("bf16").cast_to_param(start), jaxmp.mixed_precision(adam, "fp32")
    expected = jaxmp.checkpoint.convert(state, params, to=to, policy="fp32")
    got = jaxmp.checkpoint.convert(*offload.put((state, params)), to=to, policy="fp32")
    assert_exact(got, expected)
    assert not any(host_memory.is_on_host(x) for x in jax.tree.leaves(got))


@pytest.mark.thorough(0)
def test_a_sharded_state_stays_sharded_in_host_memory():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    place = functools.partial(jax.tree.map, lambda x: jax.device_put(x, sharding) if isinstance(x, jax.Array) else x)
    tx = streamed_chain("fp16")
    expected, _ = train(tx, "fp16", on_host=False, place=place, first=1)  # the first step spreads the scalars
    got, _ = train(tx, "fp16", on_host=True, place=place, first=1)
    assert_same_training(got, expected)


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
    init = jax.device_put(tx.init(params), NamedSharding(mesh, spec))
    params, grads = jax.device_put((params, params), NamedSharding(mesh, spec))
    expected = run(grads, init, params)
    got = run(grads, offload.put(init), params)
    assert_within_ulps(got[0], expected[0], 1)  # a rounding to float16
    assert_within_ulps(got[1], expected[1], 4)
    assert types(guarded(got[1])) == types(guarded(offload.put(init)))
    with pytest.raises(ValueError, match="in shard_map, arrays enter or leave|memory_space of all inputs"):
        jax.shard_map(host_memory.to_device, mesh=mesh, in_specs=spec, out_specs=spec)(offload.to_host(params))


def test_pmap_refuses_host_memory():
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adamw(1e-2)), "bf16")
    params = jax.tree.map(lambda x: jnp.stack([x] * 8), {"w": jnp.ones((4, 4), jnp.bfloat16)})
    opt_state = offload.put(jax.pmap(tx.init)(params))
    params = jax.pmap(lambda p: p)(params)
    with pytest.raises(ValueError, match=r"(?i)memory kind"):  # JAX's own words
        jax.pmap(functools.partial(jaxmp.apply_gradients, tx), axis_name="i")(params, opt_state, params)


# --- what is moved, and when ------------------------------------------------------------------------------------------


def moves(jaxpr, where=()):
    """(primitives round it, to which memory, bytes) of every move between memories in a program."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            source, target = eqn.invars[0].aval, eqn.outvars[0].aval
            if source.memory_space != target.memory_space:
                found.append((where, target.memory_space.name, source.size * source.dtype.itemsize))
        for inner, *_ in jaxmp._src.programs.jaxprs.functions_of(eqn):
            found += moves(inner, (*where, eqn.primitive.name))
    return found


@pytest.mark.thorough(1)
def test_each_array_moves_once_in_and_once_out_and_only_if_the_step_is_taken():
    tx = jaxmp.mixed_precision(offload.stream_updates(adamw(), window_bytes=1000), "fp16")
    params32 = make_params()
    opt_state, params = offload.put(tx.init(params32)), jaxmp.get_policy("fp16").cast_to_param(params32)
    closed = jax.make_jaxpr(functools.partial(jaxmp.apply_gradients, tx))(params, opt_state, params)
    found = moves(closed.jaxpr)
    assert all("while" in where for where, _, _ in found)  # the loop of no turn or one
    count = sum(p.size for p in jax.tree.leaves(params))
    assert sum(size for _, target, size in found if target == "Device") == 12 * count
    assert sum(size for _, target, size in found if target == "Host") == 12 * count
    assert len(found) == 2 * 3 * len(jax.tree.leaves(params))


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
    found = list(barriers(closed.jaxpr))
    host = [{a.size for a in operands if a.memory_space.name == "Host"} for operands in found]
    assert host == [{3, 1}, {4, 2}, {5, 3}]  # of window k, and of window k - 2
    # The new params, which stay on the device, have to be there too.
    assert all(any(a.dtype == jnp.bfloat16 for a in operands) for operands in found)


def window_shapes(f, *args, window_bytes):
    leaves = jax.tree.leaves(args)
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(f(*args)))(*args)
    jaxpr = jax.make_jaxpr(lambda *leaves: windows_lib._inlined(traced, leaves))(*leaves).jaxpr
    sizes = [x.size * x.dtype.itemsize if host_memory.is_on_host(x) else 0 for x in leaves]
    parts = [(i,) for i in range(len(f(*args)[0]))]
    return windows_lib.plan(jaxpr, sizes, parts, window_bytes)


def test_windows_hold_the_moments_of_their_params_and_no_others():
    tx, params = optax.adam(1e-2), [jnp.ones(2)] * 3
    _, state = tx.init(params), None
    state = offload.to_host(tx.init(params)[0]._replace(count=None))._replace(count=jnp.zeros((), jnp.int32))

    def f(state, grads):
        updates, (new, _) = tx.update(grads, (host_memory.to_device(state), optax.EmptyState()))
        return updates, new

    # inputs: count, mu 0-2, nu 0-2, grads 0-2; results: updates 0-2, count, mu 0-2, nu 0-2
    windows = window_shapes(f, state, params, window_bytes=16)
    assert [w.inputs for w in windows] == [(1, 4), (2, 5), (3, 6)]
    assert [set(w.results) for w in windows] == [{0, 3, 4, 7}, {1, 5, 8}, {2, 6, 9}]
    assert [w.inputs for w in window_shapes(f, state, params, window_bytes=32)] == [(1, 2, 4, 5), (3, 6)]
    assert len(window_shapes(f, state, params, window_bytes=48)) == 1


def test_what_needs_all_arrays_has_them_all():
    xs = [host_memory.to_host(jnp.full(2, i)) for i in range(3)]

    def f(xs):
        xs = host_memory.to_device(xs)
        norm = sum(jnp.sum(x) for x in xs)
        return [x * norm for x in xs], None

    assert [w.inputs for w in window_shapes(f, xs, window_bytes=1)] == [(0, 1, 2), ()]
    got, _ = windows_lib.run(f, xs, window_bytes=1)
    assert [x.tolist() for x in got] == [[0, 0], [6, 6], [12, 12]]


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
        opt_state, p = tx.init(make_params()), params
        if streamed:
            opt_state = offload.put(opt_state)
        step = jax.jit(lambda g, s, p, tx=tx: jaxmp.apply_gradients(tx, g, s, p, value=jnp.float32(1.0)))
        for _ in range(2):
            p, opt_state = step(params, opt_state, p)
        results.append(jax.tree.map(np.array, (p, opt_state)))
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert_moved(results[1][0]["l2"], jax.tree.map(np.array, params["l2"]))


def test_alone_in_a_chain():
    params = make_params()
    tx = optax.chain(optax.clip_by_global_norm(1.0), offload.stream_updates(optax.adam(1e-2), window_bytes=1))
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    opt_state = offload.put(tx.init(params))
    updates, new = jax.jit(tx.update)(params, opt_state, params)
    assert types(new) == types(opt_state)
    assert kinds(updates) == {jax.memory.Space.Device}
    expected = jax.jit(plain.update)(params, plain.init(params), params)
    assert_close(jax.tree.map(np.array, (updates, new)), expected, rtol=1e-6, atol=1e-8)


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
    assert_same_program(jax.tree.map(np.array, step(restored)), jax.tree.map(np.array, step(state)))


def test_put_is_idempotent_and_works_under_jit():
    tx = jaxmp.mixed_precision(offload.stream_updates(optax.adam(1e-2)), "bf16")
    params = make_params()
    opt_state = offload.put(tx.init(params))
    assert types(offload.put(opt_state)) == types(opt_state)
    assert memory_of(jax.jit(lambda p: offload.put(tx.init(p)))(params)) == memory_of(opt_state)
    small = offload.put(tx.init(params), min_bytes=100)
    assert small.master_params["l0"]["b"].sharding.memory_kind == "device"
    assert small.master_params["l0"]["w"].sharding.memory_kind == "pinned_host"
    back = host_memory.to_device(opt_state)
    assert set(memory_of(back).values()) == {"device"}
    assert_moved(jax.tree.map(np.array, back), jax.tree.map(np.array, opt_state))


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


@pytest.mark.parametrize("window_bytes", [0, 1.5, True, "1"])
def test_window_bytes_is_a_positive_int(window_bytes):
    with pytest.raises(ValueError, match=f"window_bytes must be a positive int, .*got {window_bytes!r}"):
        offload.stream_updates(optax.adam(1e-2), window_bytes=window_bytes)


@pytest.mark.parametrize("what", ["masters", ("masters", "gradients")])
def test_what_names_parts_of_the_state(what):
    with pytest.raises(ValueError, match='what must be a collection of "masters" and "moments"; got '):
        offload.put(optax.adam(1e-2).init(jnp.ones(2)), what=what)


def test_inner_must_be_a_transform():
    with pytest.raises(TypeError, match="inner must be an optax.GradientTransformation"):
        offload.stream_updates(1.0)


def test_a_device_without_pinned_memory_is_named(monkeypatch):
    monkeypatch.setattr(host_memory, "_HOST_KIND", "hbm2")  # of which no device here has any
    with pytest.raises(ValueError, match="memory of kind 'hbm2'; .*has 'device', 'pinned_host', .*Keep the state"):
        offload.to_host(jnp.ones(2))


def test_host_memory_is_pinned_memory_of_its_device():
    x = offload.to_host(jnp.ones(2))
    assert x.sharding == SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
