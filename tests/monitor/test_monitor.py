"""A run that is watched: nothing changes, and what is wrong is named."""

import csv
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_bitwise
from jaxmp.monitor import Monitor, MonitorWarning
from regimes import AXIS, mean_in_float32, mesh_of

pytestmark = pytest.mark.newest  # what hangs on a version of jax is in test_tensor_stats.py and test_taps.py

F16, F32 = jnp.float16, jnp.float32


class Net(nn.Module):
    dtype: type = F16

    @nn.compact
    def __call__(self, x):
        for name, width in (("first", 8), ("middle", 8), ("last", 1)):
            x = jnp.sin(nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(x))
        return x.astype(F32)


X = jax.random.normal(jax.random.key(0), (16, 4))
Y = jnp.sum(X, axis=1, keepdims=True)


def loss_of(params, x, y, factor=1.0):
    return factor * jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


def start(policy, inner=None, **options):
    params32 = Net().init(jax.random.key(1), X)["params"]
    tx = jaxmp.mixed_precision(inner or optax.adam(1e-2), policy, **options)
    return tx, (jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32))


def step_of(tx, loss_fn=loss_of, disturb=lambda grads, step: grads, every=1, histogram=False):
    def step(state, step, x, y):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, y, opt_state=opt_state)
        grads = disturb(grads, step)
        stats = jaxmp.monitor.step_stats(
            grads, opt_state, params, when=every and step % every == 0, histogram=histogram
        )
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state), loss, stats

    return step


def run(tx, state, steps=12, monitor=None, **options):
    monitor = monitor or Monitor(warn=False)
    step = jax.jit(step_of(tx, **options))
    for i in range(steps):
        state, loss, stats = step(state, i, X, Y)
        monitor.update(i, jaxmp.get_metrics(state[1]), loss=loss, stats=stats)
    monitor.finish()
    return monitor


def found(monitor):
    return {(f.kind, f.path) for f in monitor.findings}


# It changes nothing


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_a_watched_run_has_the_same_bits(policy):
    tx, watched = start(policy)
    state = watched
    with_stats, without = jax.jit(step_of(tx, every=2)), jax.jit(step_of(tx, every=0))
    for i in range(6):
        watched, loss_watched, stats = with_stats(watched, i, X, Y)
        state, loss, nothing = without(state, i, X, Y)
        assert nothing is None
        assert bool(stats.grads.sampled) == (i % 2 == 0)
        assert_bitwise((watched, loss_watched), (state, loss))


def test_off_the_program_is_the_same():
    tx, state = start("fp16")

    def plain(state, step, x, y):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_of)(params, x, y, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state), loss, None

    def program(f):
        f.__name__ = "step"
        text = jax.jit(f).lower(state, 0, X, Y).compile().as_text()
        return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line]

    assert program(step_of(tx, every=0)) == program(plain)


def test_donated_buffers_are_still_reused():
    """The look is taken before the update, so nothing that is written in place has to be copied for it."""
    tx, state = start("fp16")
    size = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim == 2)
    compiled = jax.jit(step_of(tx, every=10), donate_argnums=0).lower(state, 0, X, Y).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    state, _, _ = compiled(state, 0, X, Y)
    assert bool(jaxmp.all_finite(state))


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_on_devices_it_is_the_same_everywhere(how):
    tx, state = start("fp16", loss_scale=8.0)
    alone = jax.device_get(jax.jit(step_of(tx))(state, 0, X, Y)[2])

    def step(state, step, x, y):
        params, opt_state = state
        _, grads = jaxmp.value_and_grad(loss_of)(params, x, y, opt_state=opt_state)
        grads = mean_in_float32(grads)
        return jaxmp.monitor.step_stats(grads, opt_state, params, when=step % 10 == 0, histogram=False)

    if how == "pmap":
        mapped = jax.pmap(step, AXIS, in_axes=(None, None, 0, 0), out_axes=None, devices=jax.devices()[:4])
        stats = mapped(state, 0, X.reshape(4, 4, 4), Y.reshape(4, 4, 1))
    else:
        specs = (P(), P(), P(AXIS), P(AXIS))
        spread = jax.shard_map(step, mesh=mesh_of(), in_specs=specs, out_specs=P(), check_vma=how == "shard_map")
        stats = jax.jit(spread)(state, 0, X, Y)
    np.testing.assert_allclose(stats.grads.amax, alone.grads.amax, rtol=2e-2)
    assert_bitwise(jax.device_get(stats.params), alone.params)
    assert_bitwise(jax.device_get(stats.probes), alone.probes)


# What is wrong is named


def test_a_healthy_run_has_no_findings():
    tx, state = start("fp16", loss_scale=2.0**10)
    monitor = run(tx, state, steps=40, monitor=Monitor(window=20))
    assert not monitor.findings
    assert len(monitor.steps) == len(monitor.samples) == 40
    assert [row["step"] for row in monitor.steps] == list(range(40))
    assert monitor.steps[-1]["loss"] < monitor.steps[0]["loss"]


def test_a_gradient_that_overflows_again_and_again():
    def disturb(grads, step):
        bad = jnp.where(step % 2 == 1, jnp.inf, 1.0).astype(F16)
        kernel = grads["middle"]["kernel"] * bad
        return grads | {"middle": grads["middle"] | {"kernel": kernel}}

    tx, state = start("fp16", loss_scale=8.0)
    monitor = run(tx, state, steps=30, disturb=disturb, monitor=Monitor(window=20, warn=False))
    assert found(monitor) == {("overflow", "grads/middle/kernel"), ("skips", "grads/middle/kernel")}
    message = next(f.message for f in monitor.findings if f.kind == "skips")
    assert "50% of the last 20 steps" in message and "lower learning rate" in message


def test_gradients_that_all_overflow_are_one_finding():
    def disturb(grads, step):
        return jax.tree.map(lambda g: g * jnp.where(step % 2 == 1, jnp.inf, 1.0).astype(g.dtype), grads)

    tx, state = start("fp16", loss_scale=8.0)
    assert found(run(tx, state, steps=10, disturb=disturb)) == {("overflow", "grads")}


def test_one_overflow_now_and_then_is_no_finding():
    def disturb(grads, step):
        return jax.tree.map(lambda g: g * jnp.where(step == 20, jnp.inf, 1.0).astype(g.dtype), grads)

    tx, state = start("fp16", loss_scale=8.0)
    monitor = run(tx, state, steps=40, disturb=disturb, monitor=Monitor(window=1000))
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
    def loss_fn(params, x, y):  # the last layer's gradient is small, not that of the others
        last = jax.tree.map(lambda w: jaxmp.scale_gradient(w, 2.0**-20), params["last"])
        return loss_of(params | {"last": last}, x, y)

    tx, state = start("fp16", loss_scale=1.0)
    monitor = run(tx, state, steps=5, loss_fn=loss_fn)
    assert found(monitor) == {("underflow", "grads/last/kernel")}
    assert any("larger scale" in f.message for f in monitor.findings)


def test_a_gradient_that_is_all_zero():
    def loss_fn(params, x, y):
        return loss_of(params | {"first": jax.lax.stop_gradient(params["first"])}, x, y)

    tx, state = start("fp16", loss_scale=2.0**12)
    paths = {path for kind, path in found(run(tx, state, steps=5, loss_fn=loss_fn)) if kind == "underflow"}
    assert paths == {"grads/first/kernel"}


def test_a_scale_stuck_at_its_floor():
    def disturb(grads, step):
        return jax.tree.map(lambda g: g * jnp.inf, grads)

    tx, state = start("fp16", loss_scale=jaxmp.DynamicLossScale(2.0, hysteresis=1))
    monitor = run(tx, state, steps=6, disturb=disturb)
    (finding,) = (f for f in monitor.findings if f.kind == "stuck_scale")
    assert "the loss scale is at its lower bound, 1, and 3 steps in a row" in finding.message


def test_bfloat16_params_that_do_not_move():
    """Plain optax on bfloat16 params; of a master nothing is missed."""
    inner = optax.sgd(1e-4)
    params32 = Net().init(jax.random.key(1), X)["params"]
    params = jax.tree.map(lambda x: (x + 1.0).astype(jnp.bfloat16), params32)

    def watch(tx, params):
        monitor, state = Monitor(warn=False), (params, tx.init(params))

        @jax.jit
        def step(state):
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_of)(params, X, Y)
            stats = jaxmp.monitor.step_stats(grads, opt_state, params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss, stats

        for i in range(8):
            state, loss, stats = step(state)
            monitor.update(i, jaxmp.get_metrics(state[1]), loss=loss, stats=stats)
        monitor.finish()
        return monitor

    dead = watch(inner, params)
    assert ("dead_update", "params/last/kernel") in found(dead)
    assert any("Keep masters" in f.message or "learning rate 0" in f.message for f in dead.findings)
    assert not watch(jaxmp.mixed_precision(inner, "bf16"), params).findings


def test_probes_are_spread_over_rows_and_columns():
    """With an even stride those of a matrix of powers of two would all stand in one column."""
    w = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
    probes = jaxmp.monitor.step_stats({"w": w}, optax.EmptyState(), {"w": w}).probes["w"]
    assert probes.shape[0] <= 256 and len(np.unique(probes % 256)) > 200 and len(np.unique(probes // 256)) > 200


def test_a_look_is_of_the_params_before_its_own_step():
    """Looks at each step, of which one is skipped: params move between looks if the step of the first was taken."""
    monitor, w = Monitor(warn=False, patience=1), np.ones(4, np.float32)
    for i, skipped in enumerate([False, True, False, True, False]):
        stats = jaxmp.monitor.step_stats({"w": np.ones(4, np.float32)}, optax.EmptyState(), {"w": w})
        monitor.update(i, {"skipped": skipped}, stats=stats)
        w = w if skipped else w + 1
    monitor.finish()
    assert not monitor.findings


def test_a_learning_rate_of_zero_is_told_apart():
    tx, state = start("bf16", optax.sgd(0.0))
    monitor = run(tx, state, steps=6)
    assert {kind for kind, _ in found(monitor)} == {"dead_update"}
    assert all("is the learning rate 0" in f.message for f in monitor.findings)


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("a", "b", "c"):
            x = nn.Dense(16, use_bias=False, dtype=jnp.bfloat16, name=name)(x)
        return x.astype(F32)


def test_an_fp8_tensor_that_saturates():
    """Inputs that grow faster than the history follows; the tensor is named by its leaf."""
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=4)
    tx = jaxmp.mixed_precision(optax.sgd(0.0), "fp8", recipe=recipe)
    x = jnp.ones((16, 16))
    with jaxmp.fp8.autocast(recipe, filter=("b",)):
        params = Fp8Net().init(jax.random.key(0), x)["params"]

    @jax.jit
    def step(params, opt_state, x):
        with jaxmp.fp8.autocast(recipe, filter=("b",)):
            loss, grads = jaxmp.value_and_grad(lambda p: jnp.mean(Fp8Net().apply({"params": p}, x)))(
                params, opt_state=opt_state
            )
        stats = jaxmp.monitor.step_stats(grads, opt_state, params)
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


def test_a_master_beyond_float16():
    tx, (params, opt_state) = start("fp16", optax.sgd(0.0), loss_scale=1.0)
    masters = jaxmp.get_master_params(opt_state, params)
    masters["middle"]["kernel"] = masters["middle"]["kernel"].at[0, 0].set(70000.0)
    params["middle"]["kernel"] = params["middle"]["kernel"].at[0, 0].set(65504.0)
    monitor = run(tx, (params, tx.init(masters)), steps=5)
    assert ("saturation", "params/middle/kernel") in found(monitor)


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
    stats = jaxmp.monitor.step_stats({"w": jnp.ones(3)}, optax.sgd(0.1).init({"w": jnp.ones(3)}), {"w": jnp.ones(3)})
    for i in range(8):
        monitor.update(i, {"skipped": 1.0}, stats=stats)
    monitor.finish()
    assert [row["step"] for row in monitor.steps] == [3, 4, 5, 6, 7]
    assert [step for step, _ in monitor.samples] == [6, 7]


def test_thresholds_are_checked():
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        Monitor(window=0)


def test_saved_as_csv(tmp_path):
    tx, state = start("fp16", loss_scale=8.0)
    monitor = run(tx, state, steps=3)
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
    _, (_, opt_state) = start("fp16", loss_scale=8.0)
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
            r"metrics is a dict of scalars: jaxmp.get_metrics\(opt_state\).*got UnscaleState",
        ),
        (
            lambda: {"stats": jaxmp.monitor.tensor_stats({"w": jnp.ones(2)})},
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


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_dead_update_asks_whether_the_gradients_are_scaled(scale):
    """Of what jax.value_and_grad leaves nothing fails; the updates are too small by the scale."""
    tx = jaxmp.mixed_precision(optax.sgd(1e-5), "fp16", loss_scale=scale)
    params = {"w": jnp.ones(4, jnp.float16), "b": jnp.full(4, 2.0**-14, jnp.float16)}
    opt_state, monitor = tx.init(params), jaxmp.monitor.Monitor(warn=False)
    grads = {"w": jnp.full(4, 2.0**-10, jnp.float16), "b": jnp.full(4, 2.0, jnp.float16)}
    for step in range(6):
        stats = jaxmp.monitor.step_stats(grads, opt_state, params)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        monitor.update(step, jaxmp.get_metrics(opt_state), stats=stats)
    monitor.finish()
    (found,) = monitor.findings
    assert (found.kind, found.path) == ("dead_update", "params/w")
    assert ("do the gradients come from jaxmp.value_and_grad" in found.message) == (scale > 1)
