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


def recorded(amaxes):
    amaxes = jnp.asarray(amaxes, F32)
    return record(amaxes, jnp.ones(amaxes.shape, bool))


# Records


@pytest.mark.parametrize("seed", range(3))
def test_an_untouched_record_is_read_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    amaxes = np.concatenate([F32(2.0) ** rng.uniform(-85, 120, 500).astype(F32), F32([0, 448, 2.0**-86, 3e38, np.inf])])
    found = jax.jit(lambda x: amax_records.read(recorded(x)))(amaxes)
    assert_exact(found.amax, amaxes)
    assert np.all(found.is_used) and not np.any(found.is_spoiled)


def test_an_unused_tensor_is_no_tensor_of_zeros():
    found = read(record(jnp.zeros(2), jnp.array([True, False])))
    assert found.is_used.tolist() == [True, False] and found.amax.tolist() == [0, 0]
    assert not np.any(found.is_spoiled)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("factor", [0.37, 1 / 3, 1e-4, 2.0**-32, 7.0, 4096.0, -1.0])
def test_a_common_factor_is_divided_out(factor):
    """Exactly for tensors of 16 bits; for others to 21 bits."""
    rng = np.random.default_rng(0)
    exact = F32(2.0) ** rng.uniform(-30, 30, 1000).astype(F32)
    short = np.asarray(jnp.asarray(exact, jnp.bfloat16), F32)
    read_after = jax.jit(lambda x: amax_records.read(recorded(x) * F32(factor)))
    found = read_after(short)
    assert_exact(found.amax, short)
    assert not np.any(found.is_spoiled)
    assert not np.any(read_after(exact).is_spoiled)
    np.testing.assert_allclose(read_after(exact).amax, exact, rtol=2.0**-21)


@pytest.mark.thorough(8)
@pytest.mark.parametrize("k", [2, 3, 8, 65])
@pytest.mark.parametrize("spread", [0.01, 0.2, 3.0])
@pytest.mark.parametrize("divides", [True, False], ids=["mean", "sum"])
def test_a_mean_of_different_amaxes_is_counted_and_read_as_more_than_the_mean(k, spread, divides):
    """And never as more than the largest; NumPy in float64 is the oracle."""
    rng = np.random.default_rng(k)
    amaxes = np.exp(rng.normal(size=(k, 200)) * spread).astype(F32)
    total = functools.reduce(jnp.add, [recorded(x) for x in amaxes])
    found = read(total / k if divides else total)
    wide = amaxes.astype(np.float64)
    expected = (wide.mean(0) / np.sqrt(wide).mean(0)) ** 2
    np.testing.assert_allclose(found.amax, expected, rtol=1e-4)
    assert np.all(expected >= wide.mean(0)) and np.all(expected <= wide.max(0))
    assert np.mean(found.is_spoiled) > (0.7 if spread == 0.01 else 0.95)  # a variance below rounding is none


@pytest.mark.thorough(1)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_rounding_to_bfloat16_moves_an_amax_by_two_roundings(factor):
    """Gradients that are reduced over devices in 16 bits by hand."""
    amaxes = F32(2.0) ** np.random.default_rng(0).uniform(-30, 30, 1000).astype(F32)
    found = read((recorded(amaxes) * F32(factor)).astype(jnp.bfloat16).astype(F32))
    ratios = np.asarray(found.amax) / amaxes
    assert 1 - 2.0**-7 < ratios.min() and ratios.max() < 1 + 2.0**-5
    assert np.mean(found.is_spoiled) > 0.9


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r + 1e-3,
        lambda r: r + 1e-3 * np.random.default_rng(0).normal(size=r.shape).astype(F32),
        lambda r: r * F32([[1, 1, 0.5]]),
        lambda r: jnp.sign(r),
        lambda r: r * F32(2.0**40),
    ],
    ids=["decay", "noise", "one of three", "sign", "too large"],
)
def test_other_arithmetic_loses_the_amax(spoil):
    found = jax.jit(lambda x: amax_records.read(spoil(recorded(x))))(F32([3.0, 0.7, 40.0]))
    assert np.all(found.is_spoiled) and found.amax.tolist() == [0, 0, 0]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(value):
    found = read(recorded([value, 1.0]) * 0.5)
    assert not np.isfinite(found.amax[0]) and float(found.amax[1]) == 1
    assert not np.any(found.is_spoiled)


# Loops


@functools.cache
def gradients():
    """A step's params and state, and the gradients of three batches, of which the second is larger."""
    tx = make_tx("bf16", optax.sgd(0.1))
    state = start(tx, "bf16")
    batches = [make_batch(i) for i in range(3)]
    batches[1]["x"] *= 1.5
    compute = jax.jit(lambda state, batch: jaxmp.value_and_grad(model_loss)(state[0], batch, opt_state=state[1])[1])
    return tx, state, [compute(state, batch) for batch in batches]


@functools.cache
def update_of(tx):
    return jax.jit(tx.update)


def scales_after(grads, tx=None, opt_state=None):
    own, (params, own_state), _ = gradients()
    tx, opt_state = tx or own, own_state if opt_state is None else opt_state
    updates, opt_state = update_of(tx)(grads, opt_state, params)
    metrics = to_host(jaxmp.get_metrics(opt_state))
    return to_host(jaxmp.fp8.get_scales(optax.apply_updates(params, updates))), metrics


def scaled(grads, factor):
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("loop", ["clipped", "unscaled by hand", "summed over devices", "two equal losses"])
def test_loops_that_scale_the_tree_leave_the_scales_right(loop):
    _, _, (grads, *_) = gradients()
    factor = {"clipped": F32(0.1) / optax.tree.norm(grads), "unscaled by hand": 2.0**-16}.get(loop, 4.0)
    changed = jax.tree.map(jnp.add, grads, grads) if loop == "two equal losses" else scaled(grads, factor)
    expected, _ = scales_after(grads)
    found, metrics = scales_after(changed)
    assert found == expected
    assert metrics["fp8/spoiled"] == metrics["fp8/saturated"] == metrics["fp8/unused"] == 0
    assert amaxes(changed) == amaxes(grads)


def test_saturation_is_counted_of_what_was_cast_also_if_gradients_are_clipped():
    tx, (params, opt_state), (grads, *_) = gradients()
    high = jax.tree_util.tree_map_with_path(lambda path, x: x + 12 if jaxmp.fp8.is_scale(path) else x, params)
    counts = [
        float(jaxmp.get_metrics(update_of(tx)(g, opt_state, high)[1])["fp8/saturated"])
        for g in (grads, scaled(grads, 1e-6))
    ]
    assert counts == [4, 4]  # inputs and weights; gradients have more range


def test_a_norm_of_the_whole_tree_is_that_of_the_weights():
    _, _, (grads, *_) = gradients()
    grads = jax.tree.map(lambda g: g.astype(F32), grads)
    assert_exact(optax.tree.norm(grads), jnp.asarray(jaxmp.global_norm(grads)))


@pytest.mark.parametrize("divides", [True, False], ids=["mean", "sum"])
def test_microbatches_by_hand_are_counted(divides):
    """The scales lie between those of the largest and of the smallest amax."""
    _, _, trees = gradients()
    total = jax.tree.map(lambda *gs: sum(gs) / (3 if divides else 1), *trees)
    alone = [scales_after(grads)[0] for grads in trees]
    found, metrics = scales_after(total)
    for path, scale in found.items():
        assert min(scales[path] for scales in alone) <= scale <= max(scales[path] for scales in alone), path
    assert 0 < metrics["fp8/spoiled"] <= 6


def test_a_spoiled_amax_is_the_largest_of_the_history_if_that_is_larger():
    """A mean is below the largest of its amaxes, and noise leaves none: no scale rises by either."""
    tx, (params, opt_state), trees = gradients()
    _, after_largest = update_of(tx)(trees[1], opt_state, params)
    for spoiled in (
        jax.tree.map(lambda *gs: sum(gs) / 3, *trees),
        jax.tree.map(lambda g: g + jnp.asarray(1e-3, g.dtype), trees[0]),
    ):
        _, after = update_of(tx)(spoiled, after_largest, params)
        for group, before in zip(*(state.fp8_scales.amax_states for state in (after, after_largest)), strict=True):
            assert np.all(group.amax_history[-1] >= 0.99 * before.amax_history[-1])  # of equal ones the mean
            assert np.all(group.scale <= before.scale)


def test_amaxes_of_another_gradient_are_an_error():
    """`jax.grad` adds the amaxes of a layer that is used twice, so they are not read as amaxes."""
    _, (params, _), _ = gradients()
    grads = jax.eval_shape(jax.grad(lambda params: jnp.float32(model_loss(params, make_batch(0)))), params)
    plain = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), grads)
    with pytest.raises(
        ValueError, match=r"3 numbers for each fp8 scale; got shape \(\) at .*. Use jaxmp.value_and_grad, not jax.grad"
    ):
        jaxmp.fp8.get_amaxes(plain)


def test_noise_keeps_scales_and_histories():
    _, (params, _), (grads, *_) = gradients()
    found, metrics = scales_after(jax.tree.map(lambda g: g + jnp.asarray(1e-3, g.dtype), grads))
    assert found == to_host(jaxmp.fp8.get_scales(params))
    assert metrics["fp8/spoiled"] == 6 and metrics["fp8/max_amax"] == 0


def test_a_chain_that_clips_in_front_leaves_the_scales_right():
    tx, (params, _), (grads, *_) = gradients()
    chain = optax.chain(optax.clip_by_global_norm(0.01), tx)
    found, metrics = scales_after(grads, chain, chain.init(params))
    assert found == scales_after(grads)[0] and metrics["fp8/spoiled"] == 0


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


@pytest.mark.parametrize("start_of", ["params", "gradients"])
def test_a_scan_by_hand_adds_to_zeros_of_the_gradients_shapes(start_of):
    _, (params, opt_state), trees = gradients()
    batches = jax.tree.map(lambda *xs: np.stack(xs), *[make_batch(i) for i in range(2)])
    like = params if start_of == "params" else trees[0]

    def add(total, batch):
        _, grads = jaxmp.value_and_grad(model_loss)(params, batch, opt_state=opt_state)
        return jax.tree.map(jnp.add, total, grads), None

    @jax.jit
    def total(batches):
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, like), batches)[0]

    if start_of == "params":
        with pytest.raises(TypeError, match=LHS):
            total(batches)
        return
    found, _ = scales_after(total(batches))
    for path, scale in scales_after(trees[0])[0].items():
        assert scale / 16 <= found[path] <= scale, path


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
    tx, state, _ = gradients()

    def step(state, batch):
        _, grads = jaxmp.value_and_grad(model_loss)(state[0], batch, opt_state=state[1])
        return tx.update(grads, state[1], state[0])[1]

    batch = make_batch(0)
    batch["x"] *= 0
    metrics = jaxmp.get_metrics(jax.jit(step)(state, batch))
    assert metrics["fp8/unused"] == 0


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
    found = [finding for i, row in enumerate(rows) for finding in monitor.update(i, row)]
    ((kind, step, _, message),) = [*found, *monitor.finish()]  # it reads late
    assert (kind, step) == ("spoiled_amaxes", 1)
    assert "the amaxes of 3 fp8 tensors were changed" in message and "accumulate=" in message
