"""Optimizers that write in place: the same numbers as optax's own, in less memory."""

import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from pallas_kernels import backend as backends, moments
from regimes import guarded

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


# Each optimizer under a loss scale, and one of them in each other dtype.
@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*case, marks=() if case[1] == "fp16" or case[0] == "adamw" else pytest.mark.thorough(0))
        for case in itertools.product(PAIRS, ("fp16", "bf16", "fp32"))
    ],
)
def test_equals_optax(name, policy):
    fused, plain = PAIRS[name]
    got, got_state = run(jaxmp.mixed_precision(fused(max_norm=CLIP), policy), policy)
    expected, expected_state = run(jaxmp.mixed_precision(chained(plain), policy), policy)
    assert jax.tree.structure(got_state) == jax.tree.structure(expected_state)  # a checkpoint of one serves the other
    masters = [jaxmp.get_master_params(*x) for x in ((got_state, got), (expected_state, expected))]
    assert_close(*masters, rtol=1e-6, atol=1e-6)
    ulp = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 1e-6}[policy]
    assert_close(got, expected, rtol=ulp, atol=1e-6)
    metrics, expected_metrics = jaxmp.get_metrics(got_state), jaxmp.get_metrics(expected_state)
    assert_close(metrics.pop("grad_norm"), expected_metrics.pop("grad_norm"), rtol=1e-6)
    assert np.isnan(metrics.pop("largest_gradient")) and expected_metrics.pop("largest_gradient") > 0
    assert_exact(metrics, expected_metrics)
    assert int(metrics["skipped_steps"]) == 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("bits", "roundings"), [(None, 2.0**-22), (16, 2.0**-22), (8, 2.0**-16)])
def test_nesterov_equals_optax_in_all_forms_of_masters(bits, roundings):
    """Each step rounds a master, one of 24 bits stochastically."""
    fused, plain = PAIRS["nadamw"]
    (got, got_state), (expected, expected_state) = (
        run(jaxmp.mixed_precision(inner, "bf16", remainder_bits=bits), "bf16")
        for inner in (fused(max_norm=CLIP), chained(plain))
    )
    masters = [jaxmp.get_master_params(*x) for x in ((got_state, got), (expected_state, expected))]
    assert_close(*masters, rtol=STEPS * roundings, atol=1e-6)
    for name, atol in (("mu", 1e-9), ("nu", 1e-15), ("count", 0.0)):  # mu is a sum of terms that cancel
        moments = [optax.tree.get(x, name) for x in (got_state, expected_state)]
        assert_close(*moments, rtol=STEPS * 2.0**-22, atol=atol)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", PAIRS)
def test_without_apply_gradients_it_is_optax(name):
    """The same program, so the same bits."""
    fused, plain = PAIRS[name]
    programs = []
    for inner in (fused(max_norm=CLIP), chained(plain)):
        tx = jaxmp.mixed_precision(inner, "bf16")
        state = jax.eval_shape(functools.partial(start, tx, "bf16"), normal(0))
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), normal(100))
        programs.append(str(jax.make_jaxpr(step_of(tx, updates=True))(*state, grads)))
    assert programs[0] == programs[1]


def test_unwrapped_it_is_an_optax_optimizer():
    params = normal(0)
    for fused, plain in PAIRS.values():
        tx, expected = fused(), plain()
        assert_same_program(
            tx.update(params, tx.init(params), params), expected.update(params, expected.init(params), params)
        )


@pytest.mark.thorough(0)
@pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
@pytest.mark.parametrize(
    ("policy", "kwargs", "bits"),
    [
        ("fp16", {}, None),
        ("bf16", {}, 16),
        ("bf16", {"state_dtype": jnp.int8}, 8),
        ("bf16", {"state_dtype": jnp.bfloat16}, None),
        ("fp32", {}, None),
    ],
    ids=["fp16", "split", "8-bit", "bfloat16-moments", "fp32"],
)
def test_the_kernels_do_the_same(policy, kwargs, bits):
    states = []
    for backend in ("interpret", "xla"):
        inner = jaxmp.fused_adamw(1e-2, max_norm=CLIP, backend=backend, **kwargs)
        states.append(run(jaxmp.mixed_precision(inner, policy, remainder_bits=bits), policy, steps=3, bad=1))
    (params, state), (expected, expected_state) = states
    ulp = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 1e-6}[policy]
    assert_close(params, expected, rtol=ulp, atol=1e-6)
    if "state_dtype" not in kwargs:
        masters = [jaxmp.get_master_params(*x) for x in ((state, params), (expected_state, expected))]
        assert_close(*masters, rtol=1e-6, atol=1e-6)
    metrics, expected_metrics = jaxmp.get_metrics(state), jaxmp.get_metrics(expected_state)
    assert_close(metrics.pop("grad_norm"), expected_metrics.pop("grad_norm"), rtol=1e-5)
    assert_exact(metrics, expected_metrics)


# --- split masters ---------------------------------------------------------------------------------------------------


@functools.cache
def after_steps_with_full_masters(steps):
    return run(jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, max_norm=CLIP), "bf16"), "bf16", steps=steps)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "optax"])
def test_split_masters_train_as_full_ones(fused):
    """No bit is lost in a split; what remains are the roundings of two programs, some ulps in each step."""
    inner = jaxmp.fused_adamw(1e-2, max_norm=CLIP) if fused else chained(lambda: optax.adamw(1e-2))
    full = after_steps_with_full_masters(30)
    split = run(jaxmp.mixed_precision(inner, "bf16", remainder_bits=16), "bf16", steps=30)
    assert_close(split[0], full[0], rtol=2.0**-7)
    masters = jaxmp.get_master_params(split[1], split[0])
    assert_close(masters, jaxmp.get_master_params(full[1], full[0]), rtol=30 * 2.0**-23, atol=1e-6)
    (kept,) = jaxmp._src.step.state.find(split[1], jaxmp._src.step.state.StepState)
    assert {x.dtype.name for x in jax.tree.leaves(kept.master_params)} == {"int16"}


@pytest.mark.thorough(0)
def test_a_master_of_24_bits_is_near_the_full_one():
    full = after_steps_with_full_masters(STEPS)
    inner = jaxmp.fused_adamw(1e-2, max_norm=CLIP)
    short = run(jaxmp.mixed_precision(inner, "bf16", remainder_bits=8), "bf16")
    masters = [jaxmp.get_master_params(s, p) for p, s in (short, full)]
    assert_close(*masters, rtol=STEPS * 2.0**-16, atol=1e-6)  # half a unit of 16 bits of mantissa in each step


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
@pytest.mark.parametrize("make", [optax.adam, optax.sgd], ids=["adam", "sgd"])
def test_a_master_of_24_bits_learns_at_small_learning_rates(make):
    """Rounded to nearest, masters would take a third of the steps of 1e-5, and none of 1e-6."""
    rates = [np.float32(r) for r in (1e-6, 1e-5, 1e-4)]
    inner = optax.inject_hyperparams(make)(learning_rate=1.0)
    full = drifts(jaxmp.mixed_precision(inner, "bf16"), "bf16", rates)
    short = drifts(jaxmp.mixed_precision(inner, "bf16", remainder_bits=8), "bf16", rates)
    for drift in (full, short):
        np.testing.assert_allclose(drift, [-3000 * r for r in rates], rtol=2e-2)


def test_the_noise_of_a_master_of_24_bits_moves_on_with_each_step_taken():
    """And only then: a skipped step leaves it, and two runs have the same."""
    for inner in (optax.sgd(1e-4), jaxmp.fused_sgd(1e-4)):
        tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=8)
        params32 = {"w": jnp.linspace(0.5, 1.0, 64)}
        params, state = start(tx, "bf16", params32)
        step = jax.jit(step_of(tx))
        g = {"w": jnp.ones(64, jnp.bfloat16)}
        first = step(params, state, g)
        assert_same_program(step(params, state, g), first)
        assert int(first[1].rounding_count) == 1
        skipped = step(*first, {"w": jnp.full(64, jnp.nan, jnp.bfloat16)})
        assert int(skipped[1].rounding_count) == 1
        later = (params, state._replace(rounding_count=jnp.int32(5)))
        other = step(*later, g)
        masters = [np.asarray(jaxmp.get_master_params(s, p)["w"]) for p, s in (first, other)]
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


@pytest.mark.thorough(0)
def test_a_skip_changes_no_bit_of_split_masters_and_small_moments():
    inner = jaxmp.fused_adamw(1e-2, max_norm=CLIP, state_dtype=jnp.int8)
    tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=8)
    params, opt_state = run(tx, "bf16", steps=2, bad=None)
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
    after, after_state = jax.jit(step_of(tx))(params, opt_state, grads)
    assert_moved(after, params)
    assert_moved(guarded(after_state), guarded(opt_state))
    assert bool(jaxmp.get_metrics(after_state)["skipped"])


def test_bytes_stored_for_each_parameter():
    """FlashOptim's AdamW stores 7, gradients of 2 included; the same is 5.04 + 2 here."""
    params32 = {"w": jnp.zeros((256, 1024))}
    expected = {None: 14.0, 16: 12.0, 8: 5 + 2 * 4 / moments.GROUPS[0]}
    for bits, stored in expected.items():
        state_dtype = jnp.int8 if bits == 8 else jnp.float32
        tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, state_dtype=state_dtype), "bf16", remainder_bits=bits)
        held = jax.eval_shape(functools.partial(start, tx, "bf16"), params32)
        scalars = 64
        n_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
        assert stored * params32["w"].size <= n_bytes <= stored * params32["w"].size + scalars


# --- where it is used ------------------------------------------------------------------------------------------------


def test_behind_a_reduction_and_under_a_shared_scale():
    inner, before = jaxmp.fused_sgd(0.5), jaxmp.reduce_gradients()
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=2.0, before=before)
    params = jnp.ones(2, jnp.float16)
    params, opt_state = jaxmp.apply_gradients(tx, jnp.array([2.0, -2.0], jnp.float16), tx.init(params), params)
    assert params.tolist() == [0.5, 1.5]
    shared = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(4.0, hysteresis=1))
    scale_state = shared.init()
    bad = jnp.array([jnp.inf, 0.0], jnp.float16)
    after, opt_state, scale_state = shared.apply_gradients(tx, bad, opt_state, params, scale_state)
    assert_moved(after, params)
    assert float(jaxmp.get_loss_scale(shared.update(scale_state))) == 2.0


@pytest.mark.thorough(0)
def test_part_of_an_optimizer_is_plain_optax():
    """What has a part of the params, or stands in a branch, must not write for all."""
    mixed = lambda inner: jaxmp.mixed_precision(inner, "bf16")  # noqa: E731
    labels = {"a": "x", "b": "y"}
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.full(3, 2.0, jnp.bfloat16)}
    around = (
        optax.multi_transform({"x": mixed(jaxmp.fused_sgd(0.5)), "y": mixed(jaxmp.fused_sgd(0.5))}, labels),
        optax.masked(mixed(jaxmp.fused_sgd(0.5)), {"a": True, "b": True}),
        optax.MultiSteps(mixed(jaxmp.fused_sgd(0.5)), 2).gradient_transformation(),
    )
    for tx in around:
        with pytest.raises(ValueError, match="mixed_precision must stand around the whole optimizer"):
            jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), tx.init(params), params)
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
    params = jnp.ones(2, jnp.bfloat16)
    for skip_if, expected in ((None, 0.5), (lambda grads, metrics: jnp.max(grads) > 0.5, 1.0)):
        tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5), "bf16", loss_scale=Halves(), skip_if=skip_if)
        got, _ = jaxmp.apply_gradients(tx, jnp.full(2, 2.0, jnp.bfloat16), tx.init(params), params)
        assert got.tolist() == [expected] * 2


def fp8_params():
    model = nn.Sequential([nn.Dense(32), nn.Dense(16)])
    policy = jaxmp.get_policy("fp8")

    def init(key):
        with jaxmp.fp8.autocast(policy.recipe, filter=("*",)):
            return model.init(key, jnp.ones((16, 16)))["params"]

    params32 = jax.jit(init)(jax.random.key(0))

    def loss_fn(params, x):
        with jaxmp.fp8.autocast(policy.recipe, filter=("*",)):
            return jnp.mean(model.apply({"params": params}, x) ** 2)

    return policy, params32, loss_fn


@pytest.mark.thorough(0)
def test_with_fp8_layers():
    policy, params32, loss_fn = fp8_params()
    x = normal(1, (16, 16))
    outcomes = []
    for inner in (jaxmp.fused_adamw(1e-2, max_norm=CLIP), chained(lambda: optax.adamw(1e-2))):
        tx = jaxmp.mixed_precision(inner, policy)
        params, opt_state = start(tx, policy, params32)

        @jax.jit
        def step(params, opt_state, x, tx=tx):
            _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
            return jaxmp.apply_gradients(tx, grads, opt_state, params)

        for i in range(4):
            params, opt_state = step(params, opt_state, x * np.float32(np.nan if i == 2 else 1.0))
        outcomes.append((params, opt_state))
    (got, state), (expected, expected_state) = outcomes
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    masters = [jaxmp.get_master_params(s, p) for p, s in outcomes]
    assert_close(*masters, rtol=1e-5, atol=1e-6)
    assert_exact(jaxmp.fp8.get_scales(got), jaxmp.fp8.get_scales(expected))
    metrics, expected_metrics = jaxmp.get_metrics(state), jaxmp.get_metrics(expected_state)
    for measured in ("grad_norm", "fp8/max_amax"):
        assert_close(metrics.pop(measured), expected_metrics.pop(measured), rtol=1e-5)
    del metrics["largest_gradient"], expected_metrics["largest_gradient"]  # the fused check does not find it
    assert_exact(metrics, expected_metrics)


def test_in_linen_and_nnx():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5), "bf16", remainder_bits=16)
    model = Net()
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="bf16")
    optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))
    assert model.w[...].dtype == jnp.bfloat16 and model.w[...].tolist() == [0.5, 0.5]
    state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, policy="bf16")
    state = state.apply_gradients(grads={"w": jnp.ones(2, jnp.bfloat16)})
    assert state.params["w"].tolist() == [0.5, 0.5]


def test_the_second_step_compiles_nothing_and_donation_copies_nothing():
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, max_norm=CLIP), "fp16")
    params32 = jax.tree.map(jnp.asarray, normal(0))
    params, opt_state = jaxmp.get_policy("fp16").cast_to_param(params32), tx.init(params32)
    step = jax.jit(lambda p, s, g: jaxmp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    grads = jax.tree.map(jnp.ones_like, params)
    before = jax.tree.map(jax.typeof, (params, opt_state))
    params, opt_state = step(params, opt_state, grads)
    assert jax.tree.map(jax.typeof, (params, opt_state)) == before
    step(params, opt_state, grads)
    assert step._cache_size() == 1


def test_on_a_cpu_gradients_are_checked_without_a_sum_of_flags():
    """XLA for CPU would write 4 bytes for each of them."""
    tx, params = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16"), {"w": jnp.ones((64, 48))}
    short = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    step = jax.jit(lambda grads, state, params: jaxmp.apply_gradients(tx, grads, state, params))
    text = step.lower(short, tx.init(params), short).compile().as_text()
    assert not re.findall(r" reduce\(.*dimensions=\{0,1\}|= f32\S* reduce-window\(", text)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_split_masters_need_apply_gradients():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=16)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"needs jaxmp.apply_gradients\(tx, ...\); got tx.update"):
        tx.update(params, tx.init(params), params)


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
        (
            lambda: jaxmp.fused_adamw(1e-3, weight_decay=SCHEDULE),
            "only learning_rate may be a schedule",
        ),
        (lambda: jaxmp.fused_adamw(1e-3, max_norm=jnp.ones(())), "max_norm must be a Python number or None"),
        (lambda: jaxmp.fused_sgd(1e-3, momentum=None), "momentum must be a number; got None"),
        (lambda: jaxmp.fused_adamw(1e-3, backend="triton"), "backend must be one of .* got 'triton'"),
        (lambda: jaxmp.compress_moments(optax.sgd(1.0), jnp.int8).init(jnp.ones(2)), "needs an optimizer with moments"),
    ],
    ids=["fp16", "bits", "state_dtype", "max_norm", "schedule", "traced", "momentum", "backend", "no-moments"],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("other", [None, 8])
def test_masters_of_another_kind_are_refused(other):
    """Remainders taken for masters, or for other remainders, would be weights of the size of integers."""
    params32 = {"w": jnp.full((2, 3), 0.3)}
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    made = jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=16).init(params32)
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=other)
    assert jax.tree.structure(made) != jax.tree.structure(tx.init(params32))  # a checkpoint does not fit
    steps = [functools.partial(jaxmp.apply_gradients, tx)] + [tx.update] * (other is None)
    for step in steps:
        with pytest.raises(ValueError, match=rf"masters must fit remainder_bits={other}; got int16 at w"):
            step(jax.tree.map(jnp.copy, params), made, params)
    with pytest.raises(ValueError, match="must fit remainder_bits=16; got float32 at w. Call tx.init"):
        whole = jaxmp.mixed_precision(optax.sgd(1.0), "bf16").init(params32)
        split = jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=16)
        jaxmp.apply_gradients(split, jax.tree.map(jnp.copy, params), whole, params)
    with pytest.raises(ValueError, match="must get its bfloat16 param; got float32"):
        jaxmp.get_master_params(made, params32)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_split_params_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    params32 = {"w": jnp.linspace(0.0, 1.0, 32 * 256).reshape(32, 256), "b": jnp.ones(256)}
    specs = {"w": jax.sharding.PartitionSpec("m"), "b": jax.sharding.PartitionSpec()}
    policy = jaxmp.get_policy("bf16")
    outcomes = []
    for inner in (jaxmp.fused_adamw(1e-2), optax.adamw(1e-2)):
        tx = jaxmp.mixed_precision(inner, policy)

        def step(params32, grads, tx=tx):
            return jaxmp.apply_gradients(tx, grads, tx.init(params32), policy.cast_to_param(params32))[0]

        spread = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=check_vma)
        outcomes.append(jax.jit(spread)(params32, params32))
    assert_close(*outcomes, rtol=2.0**-7)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("scaled", ["fp16", "bf16"])
@pytest.mark.parametrize("inner", [jaxmp.fused_adamw(1e-2), optax.adamw(1e-2)], ids=["fused", "optax"])
def test_leaves_of_one_kind_cut_and_whole_inside_checked_shard_map(inner, scaled):
    """Both would share the branches of one kernel, whose types shard_map tells apart: XLA serves."""
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    params32 = {"a": jnp.linspace(0.0, 1.0, 64 * 512).reshape(64, 512), "b": jnp.ones((64, 512))}
    specs = {"a": jax.sharding.PartitionSpec("m"), "b": jax.sharding.PartitionSpec()}
    policy = jaxmp.get_policy(scaled)
    tx = jaxmp.mixed_precision(inner, policy)

    def step(params32, grads):
        return jaxmp.apply_gradients(tx, grads, tx.init(params32), policy.cast_to_param(params32))[0]

    grads = policy.cast_to_param(params32)
    spread = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=True)
    assert_close(jax.jit(spread)(params32, grads), jax.jit(step)(params32, grads), rtol=2.0**-7)


def test_mosaic_says_why_it_cannot_serve():
    reason = backends.why_no_kernels(needs_gpu=True)
    if reason is None:
        pytest.skip("kernels can serve on this machine's GPU")
    tx = jaxmp.mixed_precision(jaxmp.fused_sgd(0.5, backend="mosaic"), "bf16")
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match='backend="mosaic" cannot run here: '):
        jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), tx.init(params), params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=lambda x: x.__name__)
def test_an_empty_tree_and_empty_leaves(state_dtype):
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=CLIP, state_dtype=state_dtype), "fp16")
    assert jaxmp.apply_gradients(tx, {}, tx.init({}), {})[0] == {}
    params = {"a": jnp.zeros((0, 3), jnp.float16), "b": jnp.ones(1, jnp.float16)}
    step = lambda params: jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), tx.init(params), params)  # noqa: E731
    params, _ = jax.jit(step)(params)
    assert params["a"].shape == (0, 3) and params["b"].dtype == jnp.float16
