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
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp.monitor import Monitor, MonitorWarning
from regimes import AXIS, mean_in_float32, mesh_of

F16, F32 = np.float16, np.float32


class Net(nn.Module):
    dtype: type = F16

    @nn.compact
    def __call__(self, x):
        for name, width in (("first", 8), ("last", 1)):
            x = jnp.sin(nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(x))
        return x.astype(F32)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = np.sum(X, axis=1, keepdims=True)
SHAPES = {"first": (4, 8), "last": (8, 1)}
PARAMS32 = {name: {"kernel": RNG.normal(size=s).astype(np.float32) / s[0] ** 0.5} for name, s in SHAPES.items()}


def loss_of(params, x, y):
    return jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


TX = jaxmp.mixed_precision(optax.adam(1e-2), "fp16", loss_scale=8.0)


@functools.cache
def initialized():
    cast = jaxmp.get_policy("fp16").cast_to_param
    return jax.device_get(jax.jit(lambda params32: (cast(params32), TX.init(params32)))(PARAMS32))


def start():
    """New arrays: the step takes their buffers."""
    return jax.tree.map(jnp.array, initialized())


@functools.cache
def compiled(statistics="on"):
    """A step that writes in place, compiled once for all tests: `step(state, i, every, x, y)`.

    `statistics`: "on" in every `every`-th step, "off" by `when=False`, or "left out".
    """

    def step(state, i, every, x, y):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_of)(params, x, y, opt_state=opt_state)
        stats = None
        if statistics != "left out":
            when = i % every == 0 if statistics == "on" else False
            stats = jaxmp.monitor.step_stats(grads, opt_state, params, when=when, histogram=False)
        params, opt_state = jaxmp.apply_gradients(TX, grads, opt_state, params)
        return (params, opt_state), loss, stats

    return jax.jit(step, donate_argnums=0).lower(start(), np.int32(0), np.int32(1), X, Y).compile()


# It changes nothing


@pytest.mark.thorough(0)
def test_a_sampled_step_has_the_same_bits():
    """One program, in which some steps are sampled or none."""
    state, watched = start(), start()
    for i in range(1, 5):
        watched, loss_watched, stats = compiled()(watched, np.int32(i), np.int32(2), X, Y)
        state, loss, no_stats = compiled()(state, np.int32(i), np.int32(97), X, Y)
        assert bool(stats.grads.sampled) == (i % 2 == 0) and not no_stats.grads.sampled
        assert_same_program((watched, loss_watched), (state, loss))


def test_off_the_program_is_the_same():
    def program(statistics):
        lines = compiled(statistics).as_text().splitlines()
        return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in lines if " = " in line]

    assert program("off") == program("left out")


def test_donated_buffers_are_still_reused():
    """Statistics are computed before the update, so the update can write in place."""
    state = start()
    size = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim == 2)
    assert compiled().memory_analysis().alias_size_in_bytes >= size


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_on_devices_it_is_the_same_everywhere(how):
    alone = jax.device_get(compiled()(start(), np.int32(0), np.int32(1), X, Y)[2])

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


def test_probes_are_spread_over_rows_and_columns():
    """With an even stride the probes of a matrix whose sides are powers of two would all be in one column."""
    w = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
    probes = jax.jit(lambda w: jaxmp.monitor.step_stats({}, (), {"w": w}, histogram=False))(w).probes["w"]
    assert probes.shape[0] <= 256 and len(np.unique(probes % 256)) > 200 and len(np.unique(probes // 256)) > 200


@pytest.mark.parametrize("when", [True, np.True_])
def test_probes_of_a_split_param_come_from_all_parts(when):
    """They are the same on all devices, as every other statistic: the whole result has one out_spec."""
    w = np.arange(1, 4 * 512 + 1, dtype=np.float32).reshape(4, 512)

    def step(w, when):
        return jaxmp.monitor.step_stats({}, (), {"w": w}, when=when, histogram=False)

    spread = jax.shard_map(step, mesh=mesh_of(), in_specs=(P(AXIS), P()), out_specs=P())
    probes = np.asarray(jax.jit(spread)(w, jnp.asarray(when)).probes["w"])
    assert set((probes - 1) // 512) == {0, 1, 2, 3} and set(probes) < set(w.ravel()) and len(set(probes)) > 100


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


# How it behaves


def test_it_reads_late_and_warns_once():
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        Monitor(window=0)
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


def test_what_it_keeps_is_bounded_and_saved_as_csv(tmp_path):
    monitor = Monitor(keep=5, keep_samples=2)
    for i in range(8):
        monitor.update(i, {"skipped": 1.0}, loss=0.5 * i, stats=stats_of(np.ones(4, np.float32)))
    monitor.finish()
    assert [row["step"] for row in monitor.steps] == [3, 4, 5, 6, 7]
    assert [step for step, _ in monitor.samples] == [6, 7]
    monitor.save_csv(tmp_path / "run.csv")
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in monitor.steps]
    assert rows[0].keys() == monitor.steps[0].keys()


# Logging


class Writer(list):
    """What was written, as (name, value, step)."""

    def add(self, tag, value, step):
        self.append((tag, value, step))

    def add_row(self, row, *, step):
        self.extend((key, value, step) for key, value in row.items())


class TorchWriter(Writer):
    add_scalar = Writer.add


class FlaxWriter(Writer):
    scalar = Writer.add


class WandbRun(Writer):
    log = Writer.add_row


@pytest.mark.parametrize("make", [TorchWriter, FlaxWriter, WandbRun])
def test_metrics_go_to_a_writer(make):
    writer = make()
    jaxmp.monitor.log_metrics(writer, 7, jaxmp.get_metrics(start()[1]), loss=np.float32(np.nan))
    rows = {key: value for key, value, step in writer if step == 7}
    assert rows["loss_scale"] == 8.0 and "grad_norm" not in rows and np.isnan(rows["loss"])
    assert all(type(value) is float for value in rows.values())


def test_metrics_go_to_a_csv_file(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in range(3):
        jaxmp.monitor.log_metrics(path, step, {"loss_scale": jnp.float32(8.0), "grad_norm": jnp.nan}, loss=0.5 * step)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [0.0, 0.5, 1.0]
    assert rows[0]["grad_norm"] == "nan" and rows[2]["step"] == "2"
    with pytest.raises(ValueError, match="rows must have the columns of .*; got others: accuracy"):
        jaxmp.monitor.log_metrics(path, 3, {"loss_scale": 8.0, "grad_norm": 1.0}, loss=1.0, accuracy=0.5)
    with pytest.raises(TypeError, match="to must be a path ending in .csv"):
        jaxmp.monitor.log_metrics("metrics.txt", 0, {})


OPT_STATE = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"metrics": OPT_STATE}, r"metrics must be a dict of scalars; got StepState. Pass jaxmp.get_metrics\("),
        (lambda: {"stats": stats_of(np.ones(4, np.float32)).grads}, "the result of step_stats; got TensorStats"),
        (lambda: {"loss": (jnp.ones(()), jnp.ones(3))}, "loss must be the loss alone; got tuple of 2 values"),
    ],
    ids=["metrics", "stats", "loss"],
)
def test_update_refuses_other_things_at_once(arguments, message):
    monitor = Monitor()
    with pytest.raises(TypeError, match=message):
        monitor.update(0, **({"metrics": {}} | arguments()))
    assert not monitor.finish() and not monitor.steps


def test_update_inside_of_the_compiled_step_is_refused():
    for update in (lambda x: Monitor().update(0, {"loss_scale": x}), lambda x: Monitor().update(0, {}, loss=x)):
        with pytest.raises(TypeError, match="outside of jit; got a traced value. Return it from the step first"):
            jax.eval_shape(update, 1.0)


def test_step_stats_in_another_order_are_refused():
    params = {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match="takes grads, opt_state, params; got an opt_state as params. Reorder them"):
        jaxmp.monitor.step_stats(params, params, OPT_STATE)
    with pytest.raises(ValueError, match="got an opt_state as grads"):
        jaxmp.monitor.step_stats(OPT_STATE, params, params)
    with pytest.raises(TypeError, match="activations must be the statistics of watch_activations alone; got tuple"):
        jaxmp.monitor.step_stats(params, OPT_STATE, params, activations=(1.0, None))
