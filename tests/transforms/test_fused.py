"""Optimizers that write in place: the same numbers as optax's own, in less memory."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from pallas_kernels import backend as backends

SHAPES = {"dense": {"kernel": (4, 512), "bias": (3,)}, "norm": {"scale": (2,)}, "scalar": ()}  # in blocks of 2048
STEPS, BAD_STEP = 6, 3
CLIP = 0.1


def normal(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: np.asarray(rng.normal(size=s), np.float32), shapes, is_leaf=is_shape)


def start(tx, policy, params32):
    params32 = jax.tree.map(jnp.asarray, params32)
    return jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)


def step_of(tx, *, updates=False):
    def step(params, opt_state, grads):
        if not updates:
            return jaxmp.apply_gradients(tx, grads, opt_state, params)
        moves, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, moves), opt_state

    return step


def run(tx, policy, *, steps=STEPS, bad=BAD_STEP, seed=0):
    """(params, state) after some steps on random gradients, one of which is not finite."""
    params, opt_state = start(tx, policy, normal(seed))
    step = jax.jit(step_of(tx))
    for i in range(steps):
        scale = np.float32(jaxmp.get_loss_scale(opt_state))
        grads = jax.tree.map(lambda g, p: (g * 0.1 * scale).astype(p.dtype), normal(100 + i), params)  # noqa: B023
        if i == bad:
            grads["norm"]["scale"][1] = np.nan
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
DECAYS = {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}, "scalar": True}
PAIRS = {
    "adamw": (
        lambda **kw: jaxmp.fused_adamw(1e-2, weight_decay=0.1, **kw),
        lambda: optax.adamw(1e-2, weight_decay=0.1),
    ),
    "adamw-schedule-mask": (
        lambda **kw: jaxmp.fused_adamw(SCHEDULE, 0.8, 0.95, 1e-6, 1e-8, weight_decay=0.1, mask=DECAYS, **kw),
        lambda: optax.adamw(SCHEDULE, 0.8, 0.95, 1e-6, 1e-8, weight_decay=0.1, mask=DECAYS),
    ),
    "nadamw": (
        lambda **kw: jaxmp.fused_adamw(1e-2, eps_root=1e-8, weight_decay=0.1, nesterov=True, **kw),
        lambda: optax.nadamw(1e-2, eps_root=1e-8, weight_decay=0.1),
    ),
    "lion": (lambda **kw: jaxmp.fused_lion(1e-3, **kw), lambda: optax.lion(1e-3)),
    "sgd": (lambda **kw: jaxmp.fused_sgd(1e-2, **kw), lambda: optax.sgd(1e-2, 0.9)),
    "nesterov": (lambda **kw: jaxmp.fused_sgd(1e-2, 0.8, True, **kw), lambda: optax.sgd(1e-2, 0.8, True)),
}


def chained(plain):
    return optax.chain(jaxmp.clip_by_global_norm(CLIP), plain())


def masters_of(run):
    params, opt_state = run
    return jaxmp.get_master_params(opt_state, params)


def assert_same_metrics(run, expected, rtol):
    """The fused check finds no largest gradient."""
    metrics, expected = jaxmp.get_metrics(run[1]), jaxmp.get_metrics(expected[1])
    for measured in {"grad_norm", "fp8/max_amax"} & set(metrics):
        assert_close(metrics.pop(measured), expected.pop(measured), rtol=rtol)
    assert np.isnan(metrics.pop("largest_gradient")) and expected.pop("largest_gradient") > 0
    assert_exact(metrics, expected)


ULP = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 1e-6}


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "fp16") for name in PAIRS), ("adamw", "bf16"), ("adamw", "fp32")]
)
def test_equals_optax(name, policy):
    fused, plain = PAIRS[name]
    got = run(jaxmp.mixed_precision(fused(max_norm=CLIP), policy), policy)
    expected = run(jaxmp.mixed_precision(chained(plain), policy), policy)
    assert jax.tree.structure(got[1]) == jax.tree.structure(expected[1])  # a checkpoint of one serves the other
    assert_close(masters_of(got), masters_of(expected), rtol=1e-6, atol=1e-6)
    assert_close(got[0], expected[0], rtol=ULP[policy], atol=1e-6)
    assert_same_metrics(got, expected, 1e-6)
    assert int(jaxmp.get_metrics(got[1])["skipped_steps"]) == 1


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", PAIRS)
def test_without_apply_gradients_it_is_optax(name):
    """The same program, so the same bits; also without `mixed_precision` around it."""
    fused, plain = PAIRS[name]

    def programs_of(inner):
        tx = jaxmp.mixed_precision(inner, "bf16")
        state = jax.eval_shape(functools.partial(start, tx, "bf16"), normal(0))
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), normal(100))
        yield jax.make_jaxpr(step_of(tx, updates=True))(*state, grads)
        yield jax.make_jaxpr(lambda params: inner.update(params, inner.init(params), params))(normal(0))

    ours, theirs = (list(map(str, programs_of(inner))) for inner in (fused(max_norm=CLIP), chained(plain)))
    assert ours == theirs


@pytest.mark.thorough(0)
@pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
@pytest.mark.parametrize(
    ("policy", "kwargs", "bits"),
    [("fp16", {}, None), ("bf16", {}, 16), ("bf16", {"state_dtype": jnp.int8}, 8)],
    ids=["fp16", "split", "8-bit"],
)
def test_the_kernels_do_the_same(policy, kwargs, bits):
    got, expected = (
        run(
            jaxmp.mixed_precision(
                jaxmp.fused_adamw(1e-2, max_norm=CLIP, backend=backend, **kwargs), policy, remainder_bits=bits
            ),
            policy,
            steps=3,
            bad=1,
        )
        for backend in ("interpret", "xla")
    )
    assert_close(got[0], expected[0], rtol=ULP[policy], atol=1e-6)
    if "state_dtype" not in kwargs:
        assert_close(masters_of(got), masters_of(expected), rtol=1e-6, atol=1e-6)
    metrics, expected_metrics = jaxmp.get_metrics(got[1]), jaxmp.get_metrics(expected[1])
    assert_close(metrics.pop("grad_norm"), expected_metrics.pop("grad_norm"), rtol=1e-5)
    assert_exact(metrics, expected_metrics)


# Split masters


def drifts(tx, policy, rates):
    """How far 3000 steps of a constant gradient move masters near 0.7, for each learning rate; float64."""
    start = {"w": jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.0, 512), jnp.float32)}
    g = {"w": jnp.ones(512)}
    params, state = jaxmp.get_policy(policy).cast_to_param(start), tx.init(start)

    @jax.jit
    def train(rate):
        held = optax.tree.set(state, learning_rate=rate)
        step = lambda carry, _: (jaxmp.apply_gradients(tx, g, carry[1], carry[0]), None)  # noqa: E731
        (params_, state_), _ = jax.lax.scan(step, (params, held), length=3000)
        return jaxmp.get_master_params(state_, params_)["w"]

    return [np.mean(np.asarray(train(rate), np.float64) - np.asarray(start["w"])) for rate in rates]


@pytest.mark.thorough(0)
def test_a_master_of_24_bits_learns_at_small_learning_rates():
    """Rounded to nearest, masters would take a third of the steps of 1e-5, and none of 1e-6."""
    rates = [np.float32(r) for r in (1e-6, 1e-5, 1e-4)]
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=1.0)
    for bits in (None, 8):
        drift = drifts(jaxmp.mixed_precision(inner, "bf16", remainder_bits=bits), "bf16", rates)
        np.testing.assert_allclose(drift, [-3000 * r for r in rates], rtol=2e-2)


def test_the_noise_of_a_master_of_24_bits_moves_on_with_each_step_taken():
    """And only then: a skipped step leaves it, and two runs have the same."""
    params32 = {"w": np.linspace(0.5, 1.0, 64, dtype=np.float32)}
    grads, bad = {"w": np.ones(64, jnp.bfloat16)}, {"w": np.full(64, np.nan, jnp.bfloat16)}
    for inner in (optax.sgd(1e-4), jaxmp.fused_sgd(1e-4)):
        tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=8)
        params, state = start(tx, "bf16", params32)
        step = jax.jit(step_of(tx))
        first = step(params, state, grads)
        assert_same_program(step(params, state, grads), first)
        assert int(first[1].rounding_count) == 1
        assert int(step(*first, bad)[1].rounding_count) == 1
        other = step(params, state._replace(rounding_count=jnp.int32(5)), grads)
        masters = [np.asarray(masters_of(x)["w"]) for x in (first, other)]
        assert 0 < np.mean(masters[0] != masters[1]) < 1
        assert np.max(np.abs(masters[0] - masters[1])) <= 2.0**-16  # of 24 bits, below 1


def test_initial_masters_are_the_float32_params():
    rng = np.random.default_rng(0)
    bits = rng.integers(0x00800000, 0x7F000000, 4096).astype(np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x3F800000, 0xBF808000]  # ties, both ways; a bfloat16; a negative tie
    params32 = jnp.asarray(bits.view(np.float32))
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=16)
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    got = np.asarray(jaxmp.get_master_params(tx.init(params32), params)).view(np.uint32)
    rounded_down = (bits & 0x1FFFF) == 0x8000
    expected = np.where(rounded_down, bits - 1, bits)  # the midway point is the upper one's
    np.testing.assert_array_equal(got, expected)


# Where it is used


def test_behind_a_reduction_and_under_a_shared_scale():
    tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5), "fp16", loss_scale=2.0, before=jaxmp.reduce_gradients())
    shared, params = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(4.0, hysteresis=1)), np.ones(2, np.float16)

    @jax.jit
    def both(good, bad):
        moved, opt_state = jaxmp.apply_gradients(tx, good, tx.init(params), params)
        same, _, scale_state = shared.apply_gradients(tx, bad, opt_state, moved, shared.init())
        return moved, same, jaxmp.get_loss_scale(shared.update(scale_state))

    moved, same, scale = both(np.float16([2.0, -2.0]), np.float16([np.inf, 0.0]))
    assert moved.tolist() == [0.5, 1.5] and float(scale) == 2.0
    assert_moved(same, moved)


@pytest.mark.thorough(0)
def test_part_of_an_optimizer_is_plain_optax():
    """What has a part of the params, or stands in a branch, must not write for all."""
    mixed = lambda inner: jaxmp.mixed_precision(inner, "bf16")  # noqa: E731
    labels = {"a": "x", "b": "y"}
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.full(3, 2.0, jnp.bfloat16)}
    inside = (
        lambda make: mixed(optax.multi_transform({"x": make(), "y": make()}, labels)),
        lambda make: mixed(optax.masked(make(), {"a": True, "b": True})),
        lambda make: mixed(optax.MultiSteps(make(), 2).gradient_transformation()),
    )
    for wrap in inside:
        outcomes = []
        for make in (lambda: jaxmp.fused_sgd(0.5), lambda: optax.sgd(0.5, 0.9)):
            tx = wrap(make)
            step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
            moved, opt_state = params, tx.init(params)
            for _ in range(2):
                moved, opt_state = step(jax.tree.map(np.ones_like, moved), opt_state, moved)
            outcomes.append(moved)
        assert_exact(*outcomes)
        assert outcomes[0]["a"][0] < 1


def test_a_scaler_of_your_own_and_a_reason_of_your_own():
    class Halves:
        loss_scale = jnp.float32(2.0)

        def scale(self, tree):
            return jax.tree.map(lambda x: x * 2, tree)

        def unscale(self, tree):
            return jax.tree.map(lambda x: x.astype(jnp.float32) / 2, tree)

        def adjust(self, finite):
            del finite
            return self

    jax.tree_util.register_static(Halves)
    params = np.ones(2, jnp.bfloat16)
    for skip_if, expected in ((None, 0.5), (lambda grads, metrics: jnp.max(grads) > 0.5, 1.0)):
        tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5), "bf16", loss_scale=Halves(), skip_if=skip_if)
        step = jax.jit(lambda params, tx=tx: jaxmp.apply_gradients(tx, 2 * params, tx.init(params), params)[0])
        assert step(params).tolist() == [expected] * 2


@pytest.mark.thorough(0)
def test_with_fp8_layers():
    model, policy, x = nn.Sequential([nn.Dense(32), nn.Dense(16)]), jaxmp.get_policy("fp8"), normal(1, (16, 16))

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    with jaxmp.fp8.autocast(policy.recipe, filter=("*",)):
        params32 = jax.jit(model.init)(jax.random.key(0), x)["params"]
    runs = []
    for inner in (jaxmp.fused_adamw(1e-2, max_norm=CLIP), chained(lambda: optax.adamw(1e-2))):
        tx = jaxmp.mixed_precision(inner, policy)
        params, opt_state = start(tx, policy, params32)

        @jax.jit
        def step(params, opt_state, x, tx=tx):
            with jaxmp.fp8.autocast(policy.recipe, filter=("*",)):
                _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
            return jaxmp.apply_gradients(tx, grads, opt_state, params)

        for factor in (1.0, 1.0, np.nan, 1.0):
            params, opt_state = step(params, opt_state, x * np.float32(factor))
        runs.append((params, opt_state))
    got, expected = runs
    assert jax.tree.structure(got[1]) == jax.tree.structure(expected[1])
    assert_close(masters_of(got), masters_of(expected), rtol=1e-5, atol=1e-6)
    assert_exact(jaxmp.fp8.get_scales(got[0]), jaxmp.fp8.get_scales(expected[0]))
    assert_same_metrics(got, expected, 1e-5)


def test_split_masters_in_linen_and_nnx():
    tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5), "bf16", remainder_bits=16)
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    optimizer = jaxmp.nnx.Optimizer(model, tx, policy="bf16")
    optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))
    state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, policy="bf16")
    state = state.apply_gradients(grads={"w": jnp.ones(2, jnp.bfloat16)})
    assert_exact([model["w"][...], state.params["w"]], [np.full(2, 0.5, jnp.bfloat16)] * 2)


def test_on_a_cpu_gradients_are_checked_without_a_sum_of_flags():
    """XLA for CPU would write 4 bytes for each of them."""
    tx, params = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16"), {"w": jnp.ones((64, 48))}
    short = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    step = jax.jit(lambda grads, state, params: jaxmp.apply_gradients(tx, grads, state, params))
    text = step.lower(short, tx.init(params), short).compile().as_text()
    assert not re.findall(r" reduce\(.*dimensions=\{0,1\}|= f32\S* reduce-window\(", text)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jaxmp.mixed_precision(optax.sgd(1.0), "fp16", remainder_bits=16),
            "must go with bfloat16 params; got float16",
        ),
        (lambda: jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=12), "None .*, 16 or 8; got 12"),
        (lambda: jaxmp.fused_adamw(1e-3, state_dtype=jnp.float16), "state_dtype must be .* got float16"),
        (lambda: jaxmp.fused_adamw(1e-3, max_norm=-1.0), "max_norm must be >= 0"),
        (lambda: jaxmp.fused_adamw(1e-3, weight_decay=SCHEDULE), "only learning_rate may be a schedule"),
        (lambda: jaxmp.fused_adamw(1e-3, max_norm=jnp.ones(())), "max_norm must be a Python number or None"),
        (lambda: jaxmp.fused_sgd(1e-3, momentum=None), "momentum must be a number; got None"),
        (lambda: jaxmp.fused_adamw(1e-3, backend="triton"), "backend must be one of .* got 'triton'"),
    ],
    ids=["fp16", "bits", "state_dtype", "max_norm", "schedule", "traced", "momentum", "backend"],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masters_of_another_kind_are_refused():
    """Remainders taken for masters, or for other remainders, would be weights of the size of integers."""
    params32 = {"w": np.full((2, 3), 0.3, np.float32)}
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    grads = jax.tree.map(np.array, params)
    by_bits = {bits: jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=bits) for bits in (None, 16, 8)}
    states = {bits: tx.init(params32) for bits, tx in by_bits.items()}
    for other in (None, 8):
        assert jax.tree.structure(states[16]) != jax.tree.structure(states[other])  # a checkpoint does not fit
        with pytest.raises(ValueError, match=rf"masters must fit remainder_bits={other}; got int16 at w"):
            jaxmp.apply_gradients(by_bits[other], grads, states[16], params)
    with pytest.raises(ValueError, match="masters must fit remainder_bits=None; got int16 at w"):
        by_bits[None].update(grads, states[16], params)
    with pytest.raises(ValueError, match="must fit remainder_bits=16; got float32 at w. Call tx.init"):
        jaxmp.apply_gradients(by_bits[16], grads, states[None], params)
    with pytest.raises(ValueError, match="must get its bfloat16 param; got float32"):
        jaxmp.get_master_params(states[16], params32)
    with pytest.raises(ValueError, match=r"needs jaxmp.apply_gradients\(tx, ...\); got tx.update"):
        by_bits[16].update(params, states[16], params)


def over_four_devices(step, specs, check_vma):
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=check_vma))


def first_step(tx, policy):
    def step(params32, grads):
        return jaxmp.apply_gradients(tx, grads, tx.init(params32), policy.cast_to_param(params32))[0]

    return step


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_split_params_inside_shard_map(check_vma):
    params32 = {"w": np.linspace(0.0, 1.0, 32 * 256, dtype=np.float32).reshape(32, 256), "b": np.ones(256, np.float32)}
    specs, policy = {"w": P("m"), "b": P()}, jaxmp.get_policy("bf16")
    steps = [first_step(jaxmp.mixed_precision(x, policy), policy) for x in (jaxmp.fused_adamw(1e-2), optax.adamw(1e-2))]
    assert_close(*(over_four_devices(step, specs, check_vma)(params32, params32) for step in steps), rtol=2.0**-7)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("inner", "scaled"), [(jaxmp.fused_adamw(1e-2), "fp16"), (optax.adamw(1e-2), "bf16")], ids=["fused", "optax"]
)
def test_leaves_of_one_kind_cut_and_whole_inside_checked_shard_map(inner, scaled):
    """Both would share the branches of one kernel, whose types shard_map tells apart: XLA serves."""
    ones = np.ones((64, 512), np.float32)
    params32 = {"a": np.linspace(0.0, 1.0, ones.size, dtype=np.float32).reshape(ones.shape), "b": ones}
    policy = jaxmp.get_policy(scaled)
    step, grads = first_step(jaxmp.mixed_precision(inner, policy), policy), policy.cast_to_param(params32)
    spread = over_four_devices(step, {"a": P("m"), "b": P()}, True)
    assert_close(spread(params32, grads), jax.jit(step)(params32, grads), rtol=2.0**-7)


def test_mosaic_says_why_it_cannot_serve():
    reason = backends.why_no_kernels(needs_gpu=True)
    if reason is None:
        pytest.skip("kernels can serve on this machine's GPU")
    tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5, backend="mosaic"), "bf16")
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match='backend="mosaic" cannot run here: '):
        jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), tx.init(params), params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.int8], ids=lambda x: x.__name__)
def test_an_empty_tree_and_empty_leaves(state_dtype):
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=CLIP, state_dtype=state_dtype), "fp16")
    assert jaxmp.apply_gradients(tx, {}, tx.init({}), {})[0] == {}
    params = {"a": jnp.zeros((0, 3), jnp.float16), "b": jnp.ones(1, jnp.float16)}
    step = lambda params: jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), tx.init(params), params)  # noqa: E731
    params, _ = jax.jit(step)(params)
    assert params["a"].shape == (0, 3) and params["b"].dtype == jnp.float16
