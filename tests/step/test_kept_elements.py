"""Finite gradients that overflow an optimizer: an element keeps all its numbers or none, and is counted.

The oracle is NumPy: every optimizer in float32, from its equations. An element of which a number would become
non-finite keeps all its old ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
import regimes
from helpers import assert_exact, assert_within_ulps
from jaxmp._src.numerics import casting
from pallas_kernels import backend, broken, reference

RATE, STEPS = 1e-2, 10
SHAPES = {"a": (5, 16), "b": (24,)}
F = np.float32


def huge_gradients(seed, most=3e38):
    """A sequence of finite gradients: ordinary ones, and among them huge, tiny and zero ones of both signs."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        g = rng.normal(size=shape)
        kind = rng.random(shape)
        g = np.where(kind < 0.15, np.sign(g) * 10.0 ** rng.uniform(18, np.log10(most), shape), g)
        g = np.where((kind > 0.15) & (kind < 0.25), most, g)  # two of them overflow a sum
        g = np.where((kind > 0.25) & (kind < 0.3), np.sign(g) * 10.0 ** rng.uniform(-35, -30, shape), g)
        return np.where(kind > 0.95, -0.0, g).astype(F)

    return [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def adam(w, g, s, t, decay=0.0):
    mu, nu = F(0.1) * g + F(0.9) * s[0], F(0.001) * (g * g) + F(0.999) * s[1]
    hat = (mu / F(1 - 0.9**t)) / (np.sqrt(nu / F(1 - 0.999**t)) + F(1e-8))
    return w - F(RATE) * (hat + F(decay) * w), (mu, nu)


def momentum(w, g, s, t):
    trace = g + F(0.9) * s[0]
    return w - F(RATE) * trace, (trace,)


def lion(w, g, s, t):
    return w - F(RATE) * np.sign(F(0.1) * g + F(0.9) * s[0]), (F(0.01) * g + F(0.99) * s[0],)


RULES = {
    "adam": (lambda: optax.adam(RATE), adam, 2),
    "adamw": (lambda: optax.adamw(RATE, weight_decay=0.1), functools.partial(adam, decay=0.1), 2),
    "sgd": (lambda: optax.sgd(RATE, 0.9), momentum, 1),
    "lion": (lambda: optax.lion(RATE, weight_decay=0.0), lion, 1),
    "fused_adamw": (lambda: jaxmp.fused_adamw(RATE, weight_decay=0.1), functools.partial(adam, decay=0.1), 2),
    "fused_sgd": (lambda: jaxmp.fused_sgd(RATE), momentum, 1),
    "fused_lion": (lambda: jaxmp.fused_lion(RATE, weight_decay=0.0), lion, 1),
    "streamed": (lambda: jaxmp.offload.stream_updates(optax.adam(RATE)), adam, 2),
}


def expected(rule, gradients, start):
    """(weights after each step, elements kept in each step)."""
    _, step, n = RULES[rule]
    weights = {k: [w] for k, w in start.items()}
    state = {k: (np.zeros_like(w),) * n for k, w in start.items()}
    counts = []
    with np.errstate(all="ignore"):
        for t, g in enumerate(gradients, 1):
            kept = 0
            for name in start:
                old = (weights[name][-1], *state[name])
                w, s = step(old[0], g[name], state[name], t)
                held = ~np.logical_and.reduce([np.isfinite(x) for x in (w, *s)])
                new = [np.where(held, o, x) for o, x in zip(old, (w, *s), strict=True)]
                weights[name].append(new[0])
                state[name] = tuple(new[1:])
                kept += int(held.sum())
            counts.append(kept)
    return {k: np.stack(w[1:]) for k, w in weights.items()}, counts


def start():
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(F) for name, shape in SHAPES.items()}


def run(tx, policy, gradients, scale=1.0):
    """(masters after each step, kept elements of each step, last state); one compiled step."""
    params32 = jax.tree.map(jnp.asarray, start())
    params, state = jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)

    @jax.jit
    def step(params, state, g):
        params, state = jaxmp.apply_gradients(tx, jax.tree.map(lambda x: x * scale, g), state, params)
        return params, state, jaxmp.get_master_params(state, params)

    masters, counts = [], []
    for g in gradients:
        params, state, full = step(params, state, g)
        masters.append(jax.device_get(full))
        metrics = jaxmp.get_metrics(state)
        assert not metrics["skipped"]
        counts.append(int(metrics["kept_elements"]))
    for x in jax.tree.leaves((params, state)):
        assert np.all(np.isfinite(np.asarray(x, F)))
    return jax.tree.map(lambda *xs: np.stack(xs), *masters), counts, state


def assert_near(got, want, tolerance=2e-5):
    """Within the rounding of float32, relative to the largest value that an element has had."""
    for name in want:
        largest = np.maximum.accumulate(np.abs(want[name]), axis=0)
        error = np.abs(got[name].astype(np.float64) - want[name])
        assert np.all(error <= tolerance * np.maximum(largest, 1.0)), name


CASES = [
    *(pytest.param(rule, "bf16", {}, id=f"{rule}-bf16") for rule in RULES),
    pytest.param("adam", "fp32", {}, id="adam-fp32"),
    pytest.param("adamw", "fp16", {"loss_scale": 4.0}, id="adamw-fp16"),
    pytest.param("fused_adamw", "fp16", {"loss_scale": jaxmp.DynamicLossScale(4.0)}, id="fused-fp16"),
    pytest.param("adam", "bf16", {"skip_nonfinite": False}, id="adam-never-skips"),
    pytest.param("adam", "bf16", {"remainder_bits": 16}, id="adam-split"),
    pytest.param("fused_adamw", "bf16", {"remainder_bits": 16}, id="fused-split"),
    pytest.param("sgd", "fp32", {}, id="sgd-fp32"),
]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("rule", "policy", "options"), CASES)
def test_every_master_is_that_of_consistent_state(rule, policy, options):
    scale = 4.0 if "loss_scale" in options else 1.0
    gradients = huge_gradients(len(rule) + len(policy), most=3e38 / scale)
    tx = jaxmp.mixed_precision(RULES[rule][0](), policy, **options)
    got, counts, _ = run(tx, policy, gradients, scale)
    want, kept = expected(rule, gradients, start())
    assert counts == kept
    assert sum(kept) > 0 or rule.endswith("lion")
    # A remainder beside a subnormal or a huge master loses nothing, but a master of bfloat16 ends at 3.39e38.
    assert_near(got, want)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("rule", "policy", "bits"),
    [
        ("adamw", "bf16", None),
        ("adam", "fp32", None),
        ("fused_adamw", "bf16", None),
        ("adam", "bf16", 16),
        ("adam", "bf16", 8),
    ],
)
def test_a_step_traced_for_a_tpu_has_the_same_numbers(rule, policy, bits, monkeypatch):
    gradients = huge_gradients(5)
    tx = jaxmp.mixed_precision(RULES[rule][0](), policy, remainder_bits=bits)
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    got, counts, state = run(tx, policy, gradients)
    monkeypatch.setattr(backend, "default_platform", lambda: "tpu")
    in_words, counts_in_words, state_in_words = run(tx, policy, gradients)
    assert sum(counts) > 0 and counts_in_words == counts == expected(rule, gradients, start())[1]
    assert_within_ulps(in_words, got, 16, of=got)  # five steps of two programs
    assert jax.tree.map(jax.typeof, state_in_words) == jax.tree.map(jax.typeof, state)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64])
def test_both_words_for_a_broken_number_say_the_same(dtype):
    numbers = jnp.asarray([0.0, -1.5, 448.0, np.nan, np.inf, -np.inf, 1e-40], jnp.float32).astype(dtype)
    new, old = jnp.meshgrid(numbers, numbers)
    want = ~np.isfinite(np.asarray(new, np.complex64)) & np.isfinite(np.asarray(old, np.complex64))
    np.testing.assert_array_equal(broken.is_broken(new, old), want)
    np.testing.assert_array_equal(broken.in_other_words(new, old), want)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_param_has_the_bits_of_the_saturating_cast(dtype):
    most = float(jnp.finfo(dtype).max)
    # No subnormals of float32: XLA for CPU flushes them in a clamp.
    special = [0.0, -0.0, most, np.nextafter(F(most), F(np.inf)), 3.4e38, np.inf, np.nan, 2.0**-25, 1.0009766]
    rng = np.random.default_rng(3)
    x = jnp.asarray([*special, *(-v for v in special), *rng.normal(size=999) * 10.0 ** rng.uniform(-9, 9, 999)], F)
    assert_exact(reference.cast_by_selects(x, dtype), casting.saturating_cast(x, dtype))


def test_with_a_grad_scaler():
    """It has no metrics, and the same rule: with masters, and for params that are their own."""
    gradients = huge_gradients(1)
    want, _ = expected("adam", gradients, start())
    for tx in (optax.adam(RATE), jaxmp.keep_master_params(optax.adam(RATE), "bf16")):
        params = jax.tree.map(jnp.asarray, start())
        state, scaler = tx.init(params), jaxmp.GradScaler(1.0)
        if isinstance(state, jaxmp.MasterState):
            params = jaxmp.get_policy("bf16").cast_to_param(params)

        @jax.jit
        def step(params, state, scaler, g, tx=tx):
            scaler.scale(jnp.float32(1.0))
            params, state, scaler = scaler.step(tx, g, state, params)
            return params, state, scaler.update()

        for g in gradients:
            params, state, scaler = step(params, state, scaler, g)
        masters = jax.device_get(jaxmp.get_master_params(state, params))
        assert_near(jax.tree.map(lambda x: x[None], masters), jax.tree.map(lambda x: x[-1:], want), 1e-4)


def small_moments(dtype):
    return lambda: jaxmp.compress_moments(optax.adam(RATE), dtype)


LABELS = {"big": "x", "small": "y"}
WRAPPED = {
    "int8": small_moments(jnp.int8),
    "float8": small_moments(jnp.float8_e4m3fn),
    "bfloat16": small_moments(jnp.bfloat16),
    "fused int8": lambda: jaxmp.fused_adamw(RATE, state_dtype=jnp.int8),
    "chain around int8": lambda: optax.chain(small_moments(jnp.int8)(), optax.add_decayed_weights(-1e-6)),
    "multi_transform": lambda: optax.multi_transform({"x": optax.adam(RATE), "y": optax.adamw(RATE)}, LABELS),
    "masked": lambda: optax.masked(optax.adam(RATE), {"big": True, "small": True}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE, momentum=0.9),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "novograd": lambda: optax.novograd(RATE),
    "every second step": lambda: optax.MultiSteps(optax.adam(RATE), 2),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", WRAPPED)
def test_no_weight_runs_away(name):
    """One gradient of 1e20 among ordinary ones, wherever the optimizer keeps its moments. Without the rule a weight
    moves by 1e17 and more; an optimizer with one scale for each leaf holds the leaf, and only that.
    """
    tx = jaxmp.mixed_precision(WRAPPED[name](), "bf16")
    params32 = {"big": jnp.ones((32, 128)), "small": jnp.ones(3)}
    params, state = jaxmp.get_policy("bf16").cast_to_param(params32), tx.init(params32)
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    kept = []
    for i in range(6):
        g = {k: np.full(x.shape, 1e-3, F) for k, x in params32.items()}
        g["big"][3, 4] = 1e20 if i == 2 else 1e-3
        params, state = step(g, state, params)
        kept.append(int(jaxmp.get_metrics(state)["kept_elements"]))
    shares = name in ("adafactor", "novograd")
    # MultiSteps runs the optimizer in every second step, on the mean of two gradients
    at = 3 if name == "every second step" else 2
    assert kept == [(4096 if shares else 1) if i == at else 0 for i in range(6)]
    for x in jax.tree.leaves(jaxmp.get_master_params(state, params)):
        assert np.all(np.abs(np.asarray(x) - 1) <= 100 * RATE)
    assert all(np.all(np.isfinite(np.asarray(x, F))) for x in jax.tree.leaves(state))


def test_a_sum_that_overflows_keeps_a_param_of_its_own():
    """Without masters too: p + u of a float32 and of a float16 param."""
    for dtype, most in ((jnp.float32, 3e38), (jnp.float16, 6e4)):
        tx = jaxmp.unscale_and_skip(optax.sgd(1.0))
        params = {"w": jnp.array([-most, 1.0], dtype)}
        updates, state = tx.update({"w": jnp.array([most, 0.5], jnp.float32)}, tx.init(params), params)
        assert_exact(optax.apply_updates(params, updates), {"w": jnp.array([-most, 0.5], dtype)})
        assert float(state.kept_elements) == 1.0


def test_params_of_the_names_of_fields_and_of_one_another():
    """A state's leaf belongs to the param whose whole path ends its own."""
    tx = jaxmp.mixed_precision(optax.adam(RATE), "fp32")
    params = {"mu": {"w": jnp.ones(3)}, "w": jnp.ones(3), "x": {"mu": {"w": jnp.ones(3)}}}
    _, state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), tx.init(params), params)
    g = {"mu": {"w": jnp.ones(3)}, "w": jnp.array([1.0, 1e20, 1.0]), "x": {"mu": {"w": jnp.ones(3)}}}
    _, after = jax.jit(functools.partial(jaxmp.apply_gradients, tx))(g, state, params)
    assert float(after.kept_elements) == 1.0
    for field in ("mu", "nu"):
        new, old = (optax.tree.get(s, "ScaleByAdamState")._asdict()[field] for s in (after, state))
        same = jax.tree.map(lambda n, o: np.asarray(n == o).tolist(), new, old)
        mu = field == "mu"
        assert same["w"] == [False, True, False], mu
        assert not any(same["mu"]["w"]) and not any(same["x"]["mu"]["w"])


def test_params_that_are_one_array():
    """A scalar of the state, such as a count, is no part of it."""
    tx = jaxmp.mixed_precision(optax.adam(RATE), "fp32")
    params = jnp.ones(3)
    updates, state = tx.update(jnp.array([1e20, 1.0, 1.0]), tx.init(params), params)
    assert float(state.kept_elements) == 1.0 and int(optax.tree.get(state, "count")) == 1
    assert np.asarray(updates != 0).tolist() == [False, True, True]


def test_a_skipped_step_keeps_no_element():
    tx = jaxmp.unscale_and_skip(optax.adam(RATE))
    params = {"w": jnp.ones(4)}
    _, state = tx.update({"w": jnp.full(4, 1e20)}, tx.init(params), params)
    assert float(jaxmp.get_metrics(state)["kept_elements"]) == 4.0
    _, state = tx.update({"w": jnp.full(4, jnp.nan)}, state, params)
    metrics = jaxmp.get_metrics(state)
    assert bool(metrics["skipped"]) and float(metrics["kept_elements"]) == 0.0


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_params_split_over_devices(check_vma):
    """Each device holds its part; under check_vma the count is that of the device with most, the same on all."""
    mesh, n = regimes.mesh_of(), regimes.DEVICES
    P = jax.sharding.PartitionSpec
    tx = jaxmp.mixed_precision(optax.adam(RATE), "fp16", loss_scale=1.0)
    params32 = {"w": jnp.ones((n, 4))}
    specs = jaxmp.sharding_of(tx, params32, {"w": P(regimes.AXIS)})

    def step(g, state, params):
        params, state = jaxmp.apply_gradients(tx, g, state, params)
        return params, state, state.kept_elements[None]

    spread = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({"w": P(regimes.AXIS)}, specs, {"w": P(regimes.AXIS)}),
        out_specs=({"w": P(regimes.AXIS)}, specs, P(regimes.AXIS) if not check_vma else P()),
        check_vma=check_vma,
    )
    g = jnp.ones((n, 4)).at[1, :3].set(1e20)
    _, state, counts = jax.jit(spread)({"w": g}, tx.init(params32), {"w": params32["w"].astype(jnp.float16)})
    assert np.asarray(counts).tolist() == ([3.0] if check_vma else [3.0 if i == 1 else 0.0 for i in range(n)])
    master = np.asarray(state.guarded.master_params["w"])
    assert np.array_equal(master == 1.0, np.asarray(g) == 1e20)


def test_the_count_takes_no_further_collective_for_replicated_params():
    """Of a step under shard_map: one MAX of the flags, as before."""
    tx = jaxmp.mixed_precision(optax.adam(RATE), "fp16")
    params = {"w": jnp.ones(4, jnp.float16)}
    P = jax.sharding.PartitionSpec
    step = jax.shard_map(
        lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p),
        mesh=regimes.mesh_of(),
        in_specs=P(),
        out_specs=P(),
        check_vma=True,
    )
    text = str(jax.make_jaxpr(step)(params, tx.init(params), params))
    assert text.count("pmax") == 1
