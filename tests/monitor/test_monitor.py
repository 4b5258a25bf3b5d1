"""A run that is watched: nothing changes, and what is wrong is named."""

import csv
import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp.monitor import Monitor, MonitorWarning
from regimes import AXIS, mean_in_float32, mesh_of

# What depends on a version of jax is in test_tensor_stats.py and test_taps.py. Tests share compiled steps.

F16, F32 = np.float16, np.float32


class Net(nn.Module):
    dtype: type = F16

    @nn.compact
    def __call__(self, x):
        for name, width in (("first", 8), ("middle", 8), ("last", 1)):
            x = jnp.sin(nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(x))
        return x.astype(F32)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = np.sum(X, axis=1, keepdims=True)
SHAPES = {"first": (4, 8), "middle": (8, 8), "last": (8, 1)}
PARAMS32 = {name: {"kernel": RNG.normal(size=s).astype(np.float32) / s[0] ** 0.5} for name, s in SHAPES.items()}


def loss_of(params, x, y):
    return jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


@functools.cache
def tx_of(policy):
    # The modules are float16, which asks for a loss scale under any policy.
    return jaxmp.mixed_precision(optax.adam(1e-2), policy, loss_scale=8.0 if policy == "fp16" else 1.0)


def start(policy="fp16", loss_scale=8.0):
    """New arrays: the step takes their buffers."""
    params32 = jax.tree.map(jnp.array, PARAMS32)
    opt_state = tx_of(policy).init(params32)
    if policy == "fp16":
        opt_state = at_scale(opt_state, loss_scale)
    return jax.tree.map(jnp.array, jaxmp.get_policy(policy).cast_to_param(params32)), opt_state


def at_scale(opt_state, loss_scale):
    return opt_state._replace(scaling=opt_state.scaling._replace(loss_scale=jnp.float32(loss_scale)))


def times(factor, *names):
    """Factors for the gradients of some layers; without names, of all."""
    return {name: {"kernel": F16(factor if name in (names or SHAPES) else 1)} for name in SHAPES}


ONES = times(1)


@functools.cache
def compiled(policy="fp16", statistics="on"):
    """A step that writes in place, compiled once for all tests: `step(state, i, every, factors, x, y)`.

    `statistics`: "on" in every `every`-th step, "off" by `when=False`, or "left out". Gradients are multiplied by
    `factors`, one number for each.
    """
    tx = tx_of(policy)

    def step(state, i, every, factors, x, y):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_of)(params, x, y, opt_state=opt_state)
        grads = jax.tree.map(lambda g, factor: g * factor.astype(g.dtype), grads, factors)
        stats = None
        if statistics != "left out":
            when = i % every == 0 if statistics == "on" else False
            stats = jaxmp.monitor.step_stats(grads, opt_state, params, when=when, histogram=False)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state), loss, stats

    return jax.jit(step, donate_argnums=0).lower(start(policy), np.int32(0), np.int32(1), ONES, X, Y).compile()


def run(steps=12, monitor=None, factors=lambda i: ONES, loss_scale=8.0):
    monitor, state = monitor or Monitor(warn=False), start(loss_scale=loss_scale)
    for i in range(steps):
        state, loss, stats = compiled()(state, np.int32(i), np.int32(1), factors(i), X, Y)
        # The next step reuses the buffers of this state, but the monitor reads late: so copy the metrics.
        metrics = jax.tree.map(np.array, jaxmp.get_metrics(state[1]))
        monitor.update(i, metrics, loss=loss, stats=stats)
    monitor.finish()
    return monitor


def found(monitor):
    return {(f.kind, f.path) for f in monitor.findings}


# It changes nothing


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_a_sampled_step_has_the_same_bits(policy):
    """One program, in which some steps are sampled or none."""
    state, watched = start(policy), start(policy)
    for i in range(1, 7):
        watched, loss_watched, stats = compiled(policy)(watched, np.int32(i), np.int32(2), ONES, X, Y)
        state, loss, no_stats = compiled(policy)(state, np.int32(i), np.int32(97), ONES, X, Y)
        assert bool(stats.grads.sampled) == (i % 2 == 0) and not no_stats.grads.sampled
        assert_same_program((watched, loss_watched), (state, loss))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_a_watched_step_is_the_step_without_statistics(policy):
    """Two programs, which XLA may fuse in different ways: sums may differ in their last bits, and so one rounding."""
    arguments = np.int32(0), np.int32(1), ONES, X, Y
    watched, loss_watched, _ = compiled(policy)(start(policy), *arguments)
    state, loss, nothing = compiled(policy, "off")(start(policy), *arguments)
    assert nothing is None
    np.testing.assert_allclose(loss_watched, loss, rtol=1e-3 if policy == "fp16" else 1e-6)
    # The first step of Adam moves a param by the learning rate, whichever way the gradient's last bits fall.
    close = functools.partial(np.testing.assert_allclose, rtol=4e-3 if policy == "fp16" else 1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: close(np.asarray(a, np.float64), np.asarray(b, np.float64)), watched, state)


def test_off_the_program_is_the_same():
    def program(statistics):
        lines = compiled("fp16", statistics).as_text().splitlines()
        return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in lines if " = " in line]

    assert program("off") == program("left out")


@pytest.mark.thorough(0)
def test_donated_buffers_are_still_reused():
    """Statistics are computed before the update, so the update can write in place."""
    state = start()
    size = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim == 2)
    assert compiled().memory_analysis().alias_size_in_bytes >= size
    state, _, _ = compiled()(state, np.int32(0), np.int32(10), ONES, X, Y)
    assert bool(jaxmp.all_finite(state))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_on_devices_it_is_the_same_everywhere(how):
    alone = jax.device_get(compiled()(start(), np.int32(0), np.int32(1), ONES, X, Y)[2])

    def step(state, step, x, y):
        params, opt_state = state
        _, grads = jaxmp.value_and_grad(loss_of)(params, x, y, opt_state=opt_state)
        grads = mean_in_float32(grads)
        return jaxmp.monitor.step_stats(grads, opt_state, params, when=step % 10 == 0, histogram=False)

    if how == "pmap":
        mapped = jax.pmap(step, AXIS, in_axes=(None, None, 0, 0), out_axes=None, devices=jax.devices()[:4])
        stats = mapped(start(), 0, X.reshape(4, 4, 4), Y.reshape(4, 4, 1))
    else:
        spread = jax.shard_map(step, mesh=mesh_of(), in_specs=(P(), P(), P(AXIS), P(AXIS)), out_specs=P())
        stats = jax.jit(spread)(start(), 0, X, Y)
    np.testing.assert_allclose(stats.grads.amax, alone.grads.amax, rtol=2e-2)
    assert_exact(jax.device_get(stats.params), alone.params)
    assert_moved(jax.device_get(stats.probes), alone.probes)


# What is wrong is named


def test_a_healthy_run_has_no_findings():
    monitor = run(steps=40, monitor=Monitor(window=20), loss_scale=2.0**10)
    assert not monitor.findings
    assert len(monitor.steps) == len(monitor.samples) == 40
    assert [row["step"] for row in monitor.steps] == list(range(40))
    assert monitor.steps[-1]["loss"] < monitor.steps[0]["loss"]


def test_a_gradient_that_overflows_again_and_again():
    factors = lambda i: times(np.inf, "middle") if i % 2 == 1 else ONES  # noqa: E731
    monitor = run(steps=30, factors=factors, monitor=Monitor(window=20, warn=False))
    assert found(monitor) == {("overflow", "grads/middle/kernel"), ("skips", "grads/middle/kernel")}
    message = next(f.message for f in monitor.findings if f.kind == "skips")
    assert "50% of the last 20 steps" in message and "lower learning rate" in message


def test_gradients_that_all_overflow_are_one_finding():
    monitor = run(steps=10, factors=lambda i: times(np.inf) if i % 2 == 1 else ONES)
    assert found(monitor) == {("overflow", "grads")}


def test_one_overflow_now_and_then_is_no_finding():
    monitor = run(steps=40, factors=lambda i: times(np.inf) if i == 20 else ONES, monitor=Monitor(window=1000))
    assert not monitor.findings and sum(row["skipped"] for row in monitor.steps) == 1


def test_skips_that_become_more():
    rows = [{"skipped": float(i in (1900, 1930, 1960, 1980, 1990))} for i in range(2000)]
    monitor = Monitor(warn=False)
    for i, row in enumerate(rows):
        monitor.update(i, row)
    monitor.finish()
    (finding,) = monitor.findings
    assert finding.kind == "skips" and "0 in the first half and 5 in the second" in finding.message


def test_a_gradient_that_underflows():
    """The gradient of the last layer is small, those of the others are not."""
    monitor = run(steps=5, factors=lambda i: times(2.0**-20, "last"), loss_scale=1.0)
    assert found(monitor) == {("underflow", "grads/last/kernel")}
    assert any("larger scale" in f.message for f in monitor.findings)


def test_a_gradient_that_is_all_zero():
    monitor = run(steps=35, factors=lambda i: times(0.0, "first"), loss_scale=2.0**12)
    assert found(monitor) == {("no_gradient", "grads/first/kernel")}
    assert "try a larger loss scale than 4096" in monitor.findings[0].message


def test_a_scale_stuck_at_its_floor():
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(2.0, hysteresis=1))
    params = {"w": jnp.ones(2, jnp.float16)}
    opt_state, monitor = tx.init(params), Monitor(warn=False)
    update = jax.jit(tx.update)
    for i in range(6):
        _, opt_state = update({"w": np.full(2, np.inf, np.float16)}, opt_state, params)
        monitor.update(i, jaxmp.get_metrics(opt_state), loss=1.0)
    monitor.finish()
    (finding,) = (f for f in monitor.findings if f.kind == "stuck_scale")
    assert "the loss scale is at its lower bound, 1, and 3 steps in a row" in finding.message


# Params of two leaves, whose gradients are given: does an update move them?


@functools.cache
def sgd_step(policy):
    """`step(params, opt_state, grads, learning_rate)` and `init`, under a policy or as optax alone ("optax")."""

    def tx_of(learning_rate):
        sgd, loss_scale = optax.sgd(learning_rate), 1.0 if policy == "fp16" else None
        return sgd if policy == "optax" else jaxmp.mixed_precision(sgd, policy, loss_scale=loss_scale)

    @jax.jit
    def step(params, opt_state, grads, learning_rate):
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        params, opt_state = jaxmp.apply_gradients(tx_of(learning_rate), grads, opt_state, params)
        return params, opt_state, stats

    return step, tx_of(0.0).init


def watch_sgd(policy, dtype, learning_rate, *, w=1.0, loss_scale=None):
    step, init = sgd_step(policy)
    params32 = {"w": jnp.full(4, w), "b": jnp.full(4, 2.0**-14)}
    params = jax.tree.map(lambda x: jnp.clip(x, -65504, 65504).astype(dtype), params32)
    opt_state, monitor = init(params if policy == "optax" else params32), Monitor(warn=False)
    if loss_scale is not None:
        opt_state = at_scale(opt_state, loss_scale)
    grads = {"w": np.full(4, 2.0**-10, dtype), "b": np.full(4, 2.0, dtype)}
    for i in range(6):
        params, opt_state, stats = step(params, opt_state, grads, np.float32(learning_rate))
        monitor.update(i, jaxmp.get_metrics(opt_state), stats=stats)
    monitor.finish()
    return monitor


def test_bfloat16_params_that_do_not_move():
    """With optax alone. With masters every update arrives."""
    (finding,) = watch_sgd("optax", jnp.bfloat16, 0.1).findings
    assert (finding.kind, finding.path) == ("dead_update", "params/w")
    assert "Keep masters" in finding.message
    assert not watch_sgd("bf16", jnp.bfloat16, 0.1).findings


@pytest.mark.thorough(1)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_dead_update_asks_whether_the_gradients_are_scaled(scale):
    """Gradients of jax.value_and_grad raise no error; their updates are too small by the factor of the scale."""
    (finding,) = watch_sgd("fp16", F16, 1e-5, loss_scale=scale).findings
    assert (finding.kind, finding.path) == ("dead_update", "params/w")
    assert ("do the gradients come from jaxmp.value_and_grad" in finding.message) == (scale > 1)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("policy", "by"), [("bf16", "label"), ("fp32", "label"), ("16-mixed", "label"), ("fp32", "mask"), ("fp32", "hand")]
)
def test_a_frozen_param_is_no_dead_update(policy, by):
    """Under optax.set_to_zero it has gradients and never moves; in 16 bits it has no master.

    One that code puts back after each step is named.
    """
    frozen = {"base": True, "bias": True, "lora": False}
    inner = optax.sgd(0.1)
    if by == "label":
        labels = {name: "f" if is_frozen else "t" for name, is_frozen in frozen.items()}
        inner = optax.multi_transform({"t": inner, "f": optax.set_to_zero()}, labels)
    elif by == "mask":
        inner = optax.chain(inner, optax.masked(optax.set_to_zero(), frozen))
    tx = jaxmp.mixed_precision(inner, policy)
    params32 = {"base": jnp.linspace(0.1, 1, 7), "bias": jnp.zeros(7), "lora": jnp.linspace(0.2, 1, 7)}
    opt_state, params = tx.init(params32), jaxmp.get_policy(policy).cast_to_param(params32)
    monitor = Monitor(warn=False)

    @jax.jit
    def step(params, opt_state):
        loss = lambda p: jnp.sum(p["base"] * p["lora"] + p["bias"]).astype(jnp.float32)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(params, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params)
        new, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return new | ({name: params[name] for name in ("base", "bias")} if by == "hand" else {}), opt_state, stats

    with warnings.catch_warnings(action="ignore"):  # the loss has no matmul
        for i in range(6):
            params, opt_state, stats = step(params, opt_state)
            monitor.update(i, jaxmp.get_metrics(opt_state), stats=stats)
    monitor.finish()
    expected = {("dead_update", f"params/{name}") for name in ("base", "bias")} if by == "hand" else set()
    assert found(monitor) == expected


@pytest.mark.thorough(1)
@pytest.mark.parametrize("remainder_bits", [None, 16, 8])
@pytest.mark.parametrize("boxed", [False, True], ids=["dict", "nnx"])
def test_every_param_with_a_master_has_probes(remainder_bits, boxed):
    """Also those with split masters, and those in boxes; the frozen one has none."""
    inner = optax.multi_transform({"t": optax.sgd(0.1), "f": optax.set_to_zero()}, {"base": "f", "lora": "t"})
    params32 = {"base": jnp.ones(7), "lora": jnp.ones(7)}
    params32 = {name: nnx.Param(x) for name, x in params32.items()} if boxed else params32
    tx = jaxmp.mixed_precision(inner, "bf16", remainder_bits=remainder_bits)

    def probes(params32):
        params = jaxmp.get_policy("bf16").cast_to_param(params32)
        return jaxmp.monitor.step_stats(params, tx.init(params32), params).probes

    assert set(jax.eval_shape(probes, params32)) == {"lora"}


def test_a_learning_rate_of_zero_is_told_apart():
    monitor = watch_sgd("bf16", jnp.bfloat16, 0.0)
    assert found(monitor) == {("dead_update", "params/w"), ("dead_update", "params/b")}
    assert all("is the learning rate 0" in f.message for f in monitor.findings)


def test_a_master_beyond_float16():
    assert ("saturation", "params/w") in found(watch_sgd("fp16", F16, 0.0, w=70000.0))


def test_probes_are_spread_over_rows_and_columns():
    """With an even stride the probes of a matrix whose sides are powers of two would all be in one column."""
    w = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
    probes = jax.jit(lambda w: jaxmp.monitor.step_stats({}, (), {"w": w}, histogram=False))(w).probes["w"]
    assert probes.shape[0] <= 256 and len(np.unique(probes % 256)) > 200 and len(np.unique(probes // 256)) > 200


@jax.jit
def stats_of(w):
    return jaxmp.monitor.step_stats({"w": jnp.ones(4)}, (), {"w": w}, histogram=False)


def test_statistics_are_of_the_params_before_their_own_step():
    """Each step is sampled, and some are skipped: params move from a sample to the next if the first step was taken."""
    monitor, w = Monitor(warn=False, patience=1), np.ones(4, np.float32)
    for i, skipped in enumerate([False, True, False, True, False]):
        monitor.update(i, {"skipped": skipped}, stats=stats_of(w))
        w = w if skipped else w + 1
    monitor.finish()
    assert not monitor.findings


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("a", "b", "c"):
            x = nn.Dense(16, use_bias=False, dtype=jnp.bfloat16, name=name)(x)
        return x.astype(F32)


@pytest.mark.thorough(0)
def test_an_fp8_tensor_that_saturates():
    """Inputs that grow faster than the history follows; the tensor is named by its leaf."""
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=4)
    tx = jaxmp.mixed_precision(optax.sgd(0.0), "fp8", recipe=recipe)
    x = jnp.ones((16, 16))
    with jaxmp.fp8.autocast(recipe, filter=("b",)):
        params = jax.jit(Fp8Net().init)(jax.random.key(0), x)["params"]

    @jax.jit
    def step(params, opt_state, x):
        with jaxmp.fp8.autocast(recipe, filter=("b",)):
            loss, grads = jaxmp.value_and_grad(lambda p: jnp.mean(Fp8Net().apply({"params": p}, x)))(
                params, opt_state=opt_state
            )
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss, stats

    opt_state, monitor = tx.init(params), Monitor(warn=False)
    for i in range(8):
        params, opt_state, loss, stats = step(params, opt_state, x * 4.0**i)
        monitor.update(i, jaxmp.get_metrics(opt_state), loss=loss, stats=stats)
    monitor.finish()
    paths = {path for kind, path in found(monitor) if kind == "saturation"}
    assert any(path.startswith("b/") and "lhs" in path for path in paths)
    assert not any(path.startswith(("a/", "c/")) or "rhs" in path for path in paths)
    _, stats = monitor.samples[-1]
    assert stats.fp8.amax.keys() == stats.fp8.scale.keys() == jaxmp.fp8.get_scales(params).keys()


def test_a_loss_that_jumps_after_a_skip():
    monitor = Monitor(warn=False)
    for i in range(30):
        monitor.update(i, {"skipped": float(i == 20)}, loss=2.0 + 0.01 * (i % 3) if i < 21 else 5.0)
    monitor.finish()
    (finding,) = monitor.findings
    assert (finding.kind, finding.step) == ("loss_jump", 23)
    assert "5, 3 steps after a skip; before the skip it was 2.0" in finding.message


@pytest.mark.parametrize("after", [1.9, 2.2], ids=["lower", "a_little_higher"])
def test_a_loss_that_goes_on_is_no_jump(after):
    monitor = Monitor()
    for i in range(40):
        monitor.update(i, {"skipped": float(i == 20)}, loss=np.nan if i == 20 else 2.0 if i < 20 else after)
    monitor.finish()
    assert not monitor.findings


def test_a_loss_that_is_not_finite_in_a_step_that_was_taken():
    monitor = Monitor(warn=False)
    monitor.update(0, {"skipped": 0.0}, loss=np.inf)
    assert [f.kind for f in monitor.finish()] == ["loss_jump"]


# How it behaves


def test_it_reads_late_and_warns_once():
    monitor = Monitor(lag=2)
    bad = {"skipped": 0.0, "pinned_overflows": 5.0, "loss_scale": 1.0}
    assert monitor.update(0, bad) == monitor.update(1, bad) == []
    with pytest.warns(MonitorWarning, match="first_bad_op"):
        assert [f.step for f in monitor.update(2, bad)] == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.finish() == []
    assert len(monitor.steps) == 3
    assert "3 steps, 0 skipped, 0 sampled, 1 findings" in str(monitor)


def test_what_it_keeps_is_bounded():
    monitor = Monitor(keep=5, keep_samples=2)
    for i in range(8):
        monitor.update(i, {"skipped": 1.0}, stats=stats_of(np.ones(4, np.float32)))
    monitor.finish()
    assert [row["step"] for row in monitor.steps] == [3, 4, 5, 6, 7]
    assert [step for step, _ in monitor.samples] == [6, 7]


def test_thresholds_are_checked():
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        Monitor(window=0)


def test_saved_as_csv(tmp_path):
    monitor = run(steps=3)
    monitor.save_csv(tmp_path / "run.csv")
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in monitor.steps]
    assert rows[0].keys() == monitor.steps[0].keys()


# Logging


class TorchWriter:
    def __init__(self):
        self.rows = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


class FlaxWriter:
    def __init__(self):
        self.rows = []

    def scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


class WandbRun:
    def __init__(self):
        self.rows = []

    def log(self, row, *, step):
        self.rows += [(key, value, step) for key, value in row.items()]


@pytest.mark.parametrize("make", [TorchWriter, FlaxWriter, WandbRun])
def test_metrics_go_to_a_writer(make):
    writer = make()
    _, opt_state = start()
    jaxmp.monitor.log_metrics(writer, 7, jaxmp.get_metrics(opt_state), loss=jnp.float32(jnp.nan))
    rows = {key: value for key, value, step in writer.rows if step == 7}
    assert rows["loss_scale"] == 8.0 and "grad_norm" not in rows and np.isnan(rows["loss"])
    assert all(type(value) is float for value in rows.values())


def test_metrics_go_to_a_csv_file(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in range(3):
        jaxmp.monitor.log_metrics(path, step, {"loss_scale": jnp.float32(8.0), "grad_norm": jnp.nan}, loss=0.5 * step)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [0.0, 0.5, 1.0]
    assert rows[0]["grad_norm"] == "nan" and rows[2]["step"] == "2"
    with pytest.raises(ValueError, match="got other columns than those of .*: they differ in accuracy"):
        jaxmp.monitor.log_metrics(path, 3, {"loss_scale": 8.0, "grad_norm": 1.0}, loss=1.0, accuracy=0.5)


def test_metrics_go_nowhere_else():
    with pytest.raises(TypeError, match="a path that ends in .csv"):
        jaxmp.monitor.log_metrics("metrics.txt", 0, {})


OPT_STATE = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda: {"metrics": OPT_STATE},
            r"metrics is a dict of scalars: jaxmp.get_metrics\(opt_state\).*got StepState",
        ),
        (
            lambda: {"stats": stats_of(np.ones(4, np.float32)).grads},
            "stats= takes the result of step_stats; got TensorStats",
        ),
        (lambda: {"loss": (jnp.ones(()), jnp.ones(3))}, "loss= takes the loss alone; got tuple of 2 values"),
    ],
    ids=["metrics", "stats", "loss"],
)
def test_update_refuses_other_things_at_once(arguments, message):
    monitor = jaxmp.monitor.Monitor()
    with pytest.raises(TypeError, match=message):
        monitor.update(0, **({"metrics": {}} | arguments()))
    assert not monitor.finish() and not monitor.steps


@pytest.mark.parametrize("what", ["metrics", "loss"])
def test_update_inside_of_the_compiled_step_is_refused(what):
    monitor = jaxmp.monitor.Monitor()

    @jax.jit
    def step(x):
        monitor.update(0, {"loss_scale": x} if what == "metrics" else {}, loss=x if what == "loss" else None)
        return x

    with pytest.raises(TypeError, match="outside of jit; got a traced value. Return metrics, loss and stats"):
        step(1.0)


def test_step_stats_in_another_order_are_refused():
    params = {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match="grads, opt_state, params in this order; got an opt_state as params"):
        jaxmp.monitor.step_stats(params, params, OPT_STATE)
    with pytest.raises(ValueError, match="got an opt_state as grads"):
        jaxmp.monitor.step_stats(OPT_STATE, params, params)
    with pytest.raises(TypeError, match="activations= takes the statistics alone.*got tuple"):
        jaxmp.monitor.step_stats(params, OPT_STATE, params, activations=(1.0, None))
