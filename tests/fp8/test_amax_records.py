"""Gradients of scale leaves show what arithmetic was done to them: what is divided out, counted or lost."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from fp8_model import LHS, amaxes, make_batch, make_tx, model_loss, scale_leaves, start, to_host
from helpers import assert_exact
from jaxmp._src.fp8 import amax_records
from jaxmp._src.step import checks, scales as scales_lib
from regimes import AXIS, DEVICES, mesh_of

F32 = np.float32


record, read = jax.jit(amax_records.record), jax.jit(amax_records.read)
read_scaled = jax.jit(lambda record, factor: amax_records.read(record * factor))


def recorded(amaxes):
    return record(F32(amaxes), np.ones(np.shape(amaxes), bool))


# Records


def test_an_untouched_record_is_read_bit_for_bit():
    drawn = F32(2.0) ** np.random.default_rng(0).uniform(-85, 120, 1000).astype(F32)
    amaxes = np.concatenate([drawn, F32([0, 448, 2.0**-86, 3e38, np.inf])])
    values = read(recorded(amaxes))
    assert_exact(values.amax, amaxes)
    assert np.all(values.is_used) and not np.any(values.is_spoiled)


def test_an_unused_tensor_is_no_tensor_of_zeros():
    values = read(record(np.zeros(2, F32), np.array([True, False])))
    assert values.is_used.tolist() == [True, False] and values.amax.tolist() == [0, 0]
    assert not np.any(values.is_spoiled)


def test_a_common_factor_is_divided_out():
    """Exactly for tensors of 16 bits; for others to 21 bits."""
    exact = F32(2.0) ** np.random.default_rng(0).uniform(-30, 30, 1000).astype(F32)
    short = exact.astype(jnp.bfloat16).astype(F32)
    for factor in (0.37, 1 / 3, 1e-4, 2.0**-32, 7.0, 4096.0, -1.0):
        values = read_scaled(recorded(short), F32(factor))
        assert_exact(values.amax, short)
        assert not np.any(values.is_spoiled)
        values = read_scaled(recorded(exact), F32(factor))
        assert not np.any(values.is_spoiled)
        np.testing.assert_allclose(values.amax, exact, rtol=2.0**-21)


@pytest.mark.parametrize(
    ("k", "spread", "divides"), [(2, 0.2, True), (3, 3.0, False), (8, 0.01, False), (65, 3.0, True), (65, 0.2, False)]
)
def test_a_mean_of_different_amaxes_is_counted_and_read_as_more_than_the_mean(k, spread, divides):
    """And never as more than the largest; NumPy in float64 is the oracle."""
    amaxes = np.exp(np.random.default_rng(k).normal(size=(k, 200)) * spread).astype(F32)
    total = functools.reduce(np.add, [np.asarray(recorded(x)) for x in amaxes])
    values = read(total / F32(k) if divides else total)
    wide = amaxes.astype(np.float64)
    expected = (wide.mean(0) / np.sqrt(wide).mean(0)) ** 2
    np.testing.assert_allclose(values.amax, expected, rtol=1e-4)
    assert np.all(expected >= wide.mean(0)) and np.all(expected <= wide.max(0))
    assert np.mean(values.is_spoiled) > (0.7 if spread == 0.01 else 0.95)  # a variance below rounding is none


def test_a_rounding_to_bfloat16_moves_an_amax_by_two_roundings():
    """Gradients that are reduced over devices in 16 bits by hand."""
    amaxes = F32(2.0) ** np.random.default_rng(0).uniform(-30, 30, 1000).astype(F32)
    for factor in (1.0, 0.3):
        values = read((np.asarray(recorded(amaxes)) * F32(factor)).astype(jnp.bfloat16).astype(F32))
        ratios = np.asarray(values.amax) / amaxes
        assert 1 - 2.0**-7 < ratios.min() and ratios.max() < 1 + 2.0**-5
        assert np.mean(values.is_spoiled) > 0.9


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r + F32(1e-3),
        lambda r: r + F32(1e-3) * np.random.default_rng(0).normal(size=r.shape).astype(F32),
        lambda r: r * F32([[1, 1, 0.5]]),
        np.sign,
        lambda r: r * F32(2.0**40),
    ],
    ids=["decay", "noise", "one of three", "sign", "too large"],
)
def test_other_arithmetic_loses_the_amax(spoil):
    values = read(spoil(np.asarray(recorded([3.0, 0.7, 40.0]))))
    assert np.all(values.is_spoiled) and values.amax.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(value):
    values = read_scaled(recorded([value, 1.0, 1.0]), F32(0.5))
    assert not np.isfinite(values.amax[0]) and float(values.amax[1]) == 1
    assert not np.any(values.is_spoiled)


# Loops


@jax.jit
def compute_gradients(state, batch):
    return jaxmp.value_and_grad(model_loss)(state[0], batch, opt_state=state[1])[1]


@functools.cache
def gradients():
    """A step's params and state, and the gradients of three batches, of which the second is larger."""
    tx = make_tx("bf16", optax.sgd(0.1))
    state = start(tx, "bf16")
    batches = [make_batch(i) for i in range(3)]
    batches[1]["x"] *= 1.5
    return tx, state, [compute_gradients(state, batch) for batch in batches]


@functools.cache
def update_of(tx):
    return jax.jit(tx.update)


def scales_after(grads):
    """The scales after an update, and the metrics."""
    tx, (params, opt_state), _ = gradients()
    updates, opt_state = update_of(tx)(grads, opt_state, params)
    metrics = to_host(jaxmp.get_metrics(opt_state))
    return to_host(jaxmp.fp8.get_scales(optax.apply_updates(params, updates))), metrics


def mean(trees):
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *trees)


def scaled(grads, factor):
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("loop", ["clipped", "unscaled by hand", "summed over devices", "two equal losses"])
def test_loops_that_scale_the_tree_leave_the_scales_right(loop):
    _, _, (grads, *_) = gradients()
    factor = {"clipped": F32(0.1) / optax.tree.norm(grads), "unscaled by hand": 2.0**-16}.get(loop, 4.0)
    changed = jax.tree.map(jnp.add, grads, grads) if loop == "two equal losses" else scaled(grads, factor)
    scales, metrics = scales_after(changed)
    assert scales == scales_after(grads)[0]
    assert metrics["fp8/spoiled"] == metrics["fp8/saturated"] == metrics["fp8/unused"] == 0
    assert amaxes(changed) == amaxes(grads)


def test_saturation_is_counted_of_what_was_cast_also_if_gradients_are_clipped():
    tx, (params, opt_state), (grads, *_) = gradients()
    high = jax.tree_util.tree_map_with_path(lambda path, x: x + 12 if jaxmp.fp8.is_scale(path) else x, params)
    for given in (grads, scaled(grads, 1e-6)):
        metrics = jaxmp.get_metrics(update_of(tx)(given, opt_state, high)[1])
        assert metrics["fp8/saturated"] == 4  # inputs and weights; gradients have more range


def test_a_norm_of_the_whole_tree_is_that_of_the_weights():
    _, _, (grads, *_) = gradients()
    grads = jax.tree.map(lambda g: g.astype(F32), grads)
    assert_exact(optax.tree.norm(grads), jnp.asarray(jaxmp.global_norm(grads)))


def test_microbatches_by_hand_are_counted():
    """The scales lie between those of the largest and of the smallest amax."""
    _, _, trees = gradients()
    alone = [scales_after(grads)[0] for grads in trees]
    for total in (mean(trees), jax.tree.map(lambda *gs: sum(gs), *trees)):
        scales, metrics = scales_after(total)
        for path, scale in scales.items():
            assert min(scales[path] for scales in alone) <= scale <= max(scales[path] for scales in alone), path
        assert 0 < metrics["fp8/spoiled"] <= 6


def test_a_spoiled_amax_is_the_largest_of_the_history_if_that_is_larger():
    """A mean is below the largest of its amaxes, and noise leaves none: no scale rises by either."""
    tx, (params, opt_state), trees = gradients()
    _, after_largest = update_of(tx)(trees[1], opt_state, params)
    noisy = jax.tree.map(lambda g: g + jnp.asarray(1e-3, g.dtype), trees[0])
    for spoiled in (mean(trees), noisy):
        _, after = update_of(tx)(spoiled, after_largest, params)
        for group, before in zip(*(state.fp8_scales.amax_states for state in (after, after_largest)), strict=True):
            assert np.all(group.amax_history[-1] >= 0.99 * before.amax_history[-1])  # of equal ones the mean
            assert np.all(group.scale <= before.scale)
    scales, metrics = scales_after(noisy)
    assert scales == to_host(jaxmp.fp8.get_scales(params))
    assert metrics["fp8/spoiled"] == 6 and metrics["fp8/max_amax"] == 0


def test_amaxes_of_another_gradient_are_an_error():
    """`jax.grad` adds the amaxes of a layer that is used twice, so they are not read as amaxes."""
    _, (params, _), _ = gradients()
    grads = jax.eval_shape(jax.grad(lambda params: jnp.float32(model_loss(params, make_batch(0)))), params)
    plain = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), grads)
    with pytest.raises(
        ValueError, match=r"3 numbers for each fp8 scale; got shape \(\) at .*. Use jaxmp.value_and_grad, not jax.grad"
    ):
        jaxmp.fp8.get_amaxes(plain)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_is_a_factor(check_vma):
    tx, state, _ = gradients()

    def step(reduce, state, batch):
        params, opt_state = state
        _, grads = jaxmp.value_and_grad(model_loss)(params, batch, opt_state=opt_state)
        updates, opt_state = tx.update(reduce(grads, AXIS), opt_state, params)
        return optax.apply_updates(params, updates), jaxmp.get_metrics(opt_state)["fp8/spoiled"]

    def run(reduce):
        spread = functools.partial(
            jax.shard_map, mesh=mesh_of(), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check_vma
        )
        return jax.jit(spread(functools.partial(step, reduce)))(state, make_batch(0, rows=16 * DEVICES))

    summed, spoiled = run(jax.lax.psum)
    averaged, _ = run(jax.lax.pmean)
    assert to_host(jaxmp.fp8.get_scales(summed)) == to_host(jaxmp.fp8.get_scales(averaged))
    assert spoiled == 0


def test_multi_steps_outside_are_an_error():
    tx, (params, _), (grads, *_) = gradients()
    steps = optax.MultiSteps(tx, 2)
    with pytest.raises(TypeError, match=LHS):
        jax.eval_shape(steps.update, grads, steps.init(params), params)


@pytest.mark.parametrize("like", ["params", pytest.param("gradients", marks=pytest.mark.thorough(0))])
def test_a_scan_by_hand_adds_to_zeros_of_the_gradients_shapes(like):
    _, state, trees = gradients()
    batches = jax.tree.map(lambda *xs: np.stack(xs), *[make_batch(i) for i in range(2)])
    zeros = jax.tree.map(jnp.zeros_like, state[0] if like == "params" else trees[0])

    @jax.jit
    def total(zeros):
        add = lambda total, batch: (jax.tree.map(jnp.add, total, compute_gradients(state, batch)), None)  # noqa: E731
        return jax.lax.scan(add, zeros, batches)[0]

    if like == "params":
        with pytest.raises(TypeError, match=LHS):
            total(zeros)
        return
    scales, _ = scales_after(total(zeros))
    for path, scale in scales_after(trees[0])[0].items():
        assert scale / 16 <= scales[path] <= scale, path


def test_a_restored_state_inside_of_multi_transform_is_refused_by_an_update():
    """Its init, which refuses too, does not run."""
    tx, (params, _), (grads, *_) = gradients()
    labels = {name: jax.tree.map(lambda _, name=name: "f" if name == "a" else "t", params[name]) for name in params}
    partly = optax.multi_transform({"t": tx, "f": optax.set_to_zero()}, labels)
    masked = jax.tree.map(lambda label, x: x if label == "t" else optax.MaskedNode(), labels, params)
    with mock.patch.object(checks, "check_init"):
        states = {"t": tx.init(masked), "f": optax.EmptyState()}
    state = optax.PartitionState({label: optax.MaskedState(state) for label, state in states.items()})
    with pytest.raises(ValueError, match=r"must get all fp8 scales; got a part of the params. Put it around optax"):
        partly.update(grads, state, params)


def test_a_layer_that_was_fed_zeros_is_used():
    _, state, _ = gradients()
    batch = make_batch(0)
    batch["x"] *= 0
    assert scales_after(compute_gradients(state, batch))[1]["fp8/unused"] == 0


def test_plain_amaxes_are_taken_as_they_are_and_counted():
    """As `jax.grad` and programs of one's own give them: they do not show what was done to them."""
    tx = scales_lib.update_amax(jaxmp.fp8.DelayedScaling(amax_history_len=2))
    params = jax.tree.map(jnp.asarray, scale_leaves())
    _, state = jax.jit(tx.update)(scale_leaves(value=1e-30), tx.init(params), params)
    assert [group.amax_history[-1].tolist() for group in state.amax_states] == [[F32(1e-30)], [F32(1e-30)] * 2]
    assert state.spoiled_tensors == 3


def test_the_monitor_names_spoiled_amaxes():
    monitor = jaxmp.monitor.Monitor(warn=False)
    rows = [{"skipped": 0.0, "fp8/spoiled": spoiled} for spoiled in (0.0, 3.0, 0.0, 0.0)]
    findings = [finding for i, row in enumerate(rows) for finding in monitor.update(i, row)]
    ((kind, step, _, message),) = [*findings, *monitor.finish()]  # it reads late
    assert (kind, step) == ("spoiled_amaxes", 1)
    assert "the amaxes of 3 fp8 tensors were changed" in message and "accumulate=" in message
