"""Loss scaling against the traces of the systems whose rules it offers, and against what breaks in jmp."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import jaxmp
from helpers import assert_bitwise, assert_close
from jaxmp._src.loss_scale import protocol, static
from jaxmp._src.numerics import float_bits
from oracle_data import load, name_of

LONGEST = 64  # steps; shorter traces are padded, so that each rule compiles once
SUBNORMALS = 1.2e-38  # XLA on CPU flushes what is smaller to zero
PRESETS = ("megatron", "torch", "deepspeed", "deepspeed_fused", "apex", "apex_amp", "mmcv")

MEGATRON = load("megatron_dynamic_grad_scaler")
TORCH = load("torch_amp_grad_scaler")
DEEPSPEED = load("deepspeed_loss_scaler")
APEX = load("apex_update_scale_hysteresis")
APEX_AMP = load("apex_amp_loss_scaler")
MMCV = load("mmcv_loss_scaler")
SHARDED = load("sharded_grad_scaler")


class Trace(NamedTuple):
    """What a scale was after each step; `pinned` is what it said about the step before taking it."""

    loss_scale: np.ndarray
    growth_count: np.ndarray
    hysteresis_left: np.ndarray
    inv_scale: np.ndarray
    pinned: np.ndarray


@jax.jit
def _scan(scaler, finite):
    def step(scaler, finite):
        pinned = scaler.is_pinned(finite)
        scaler = scaler.adjust(finite)
        inv_scale = float_bits.reciprocal(scaler.loss_scale)
        return scaler, Trace(scaler.loss_scale, scaler.growth_count, scaler.hysteresis_left, inv_scale, pinned)

    return jax.lax.scan(step, scaler, finite)[1]


def run(scaler: jaxmp.DynamicLossScale, overflows: list) -> Trace:
    finite = np.ones(LONGEST, bool)
    finite[: len(overflows)] = ~np.array(overflows, bool)
    return Trace(*(np.asarray(x)[: len(overflows)] for x in _scan(scaler, finite)))


def column(case: dict, i: int, dtype: Any) -> np.ndarray:
    return np.array([row[i] for row in case["trace"]], np.float64).astype(dtype)


def with_leaves(scaler: Any, *leaves: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(scaler), leaves)


def torch_scaler(kwargs: dict) -> jaxmp.DynamicLossScale:
    kwargs = dict(kwargs)
    initial_scale = kwargs.pop("init_scale", 2.0**16)
    if math.isinf(initial_scale):  # no such scaler can be made: it got there from outside
        scaler = jaxmp.DynamicLossScale.preset("torch", **kwargs)
        return with_leaves(scaler, jnp.float32(initial_scale), scaler.growth_count, scaler.hysteresis_left)
    return jaxmp.DynamicLossScale.preset("torch", initial_scale=initial_scale, **kwargs)


# Megatron-LM


@pytest.mark.parametrize("case", MEGATRON["cases"], ids=name_of)
def test_megatron_traces(case):
    trace = run(jaxmp.DynamicLossScale.preset("megatron", **case["cfg"]), case["found_inf"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    assert_bitwise(trace.growth_count, column(case, 1, np.int32))
    assert_bitwise(trace.hysteresis_left, column(case, 2, np.int32))
    assert_close(trace.inv_scale, column(case, 3, np.float32), atol=SUBNORMALS)
    normal = column(case, 3, np.float32) >= np.finfo(np.float32).tiny
    assert_bitwise(trace.inv_scale[normal], column(case, 3, np.float32)[normal])


def test_the_traces_hold_without_jit_as_well():
    case = next(case for case in MEGATRON["cases"] if case["name"] == "hysteresis_refilled_by_growth")
    scaler = jaxmp.DynamicLossScale.preset("megatron", **case["cfg"])
    for overflow, (loss_scale, growth_count, hysteresis_left, _) in zip(case["found_inf"], case["trace"], strict=True):
        scaler = scaler.adjust(not overflow)
        assert_bitwise(tuple(jax.tree.leaves(scaler)), (loss_scale, growth_count, hysteresis_left))


@pytest.mark.parametrize("kwargs", [kwargs for kwargs, _ in MEGATRON["constructor_asserts"]], ids=str)
def test_what_megatron_asserts_raises_and_says_what_it_got(kwargs):
    ((name, value),) = kwargs.items()
    rule = "min_scale <= initial_scale" if value == 131072.0 else f"{name} must be"
    with pytest.raises(ValueError, match=rule) as raised:
        jaxmp.DynamicLossScale.preset("megatron", **({"initial_scale": 65536.0, "min_scale": 1.0} | kwargs))
    assert str(value) in str(raised.value)


def test_a_constant_scale_does_not_move():
    scaler = jaxmp.StaticLossScale(MEGATRON["constant"]["scale"])
    assert_bitwise(scaler.adjust(jnp.array(False)).adjust(True).loss_scale, MEGATRON["constant"]["scale"])


def test_the_default_rule_never_reaches_inf():
    """Megatron's scale grows to inf and stays there: the gradients are then multiplied by zero for ever."""
    (stuck,) = [case for case in MEGATRON["cases"] if case["name"] == "growth_overflows_to_inf_then_stuck"]
    assert stuck["trace"][-1][0] == np.inf
    scaler = jaxmp.DynamicLossScale(2.0**31, growth_interval=1, hysteresis=1)
    assert_bitwise(run(scaler, stuck["found_inf"][:4]).loss_scale, np.full(4, 2.0**32, np.float32))


# torch.amp


ROUNDED_TWICE = ("nonpow2", "growth_1.001")  # torch multiplies in double
EXACT_TORCH = [case for case in TORCH["cases"] if case["name"] not in (*ROUNDED_TWICE, "no_floor_underflow_to_zero")]


@pytest.mark.parametrize("case", EXACT_TORCH, ids=name_of)
def test_torch_traces(case):
    trace = run(torch_scaler(case["kwargs"]), case["found_inf"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    assert_bitwise(trace.growth_count, column(case, 1, np.int32))


def test_torch_scale_that_underflows_to_zero():
    (case,) = [case for case in TORCH["cases"] if case["name"] == "no_floor_underflow_to_zero"]
    trace = run(torch_scaler(case["kwargs"]), case["found_inf"])
    assert_close(trace.loss_scale, column(case, 0, np.float32), atol=SUBNORMALS)
    assert_bitwise(trace.growth_count, column(case, 1, np.int32))


@pytest.mark.parametrize("case", [case for case in TORCH["cases"] if case["name"] in ROUNDED_TWICE], ids=name_of)
def test_torch_traces_with_other_factors_are_an_ulp_a_step_away_at_most(case):
    scaler = torch_scaler(case["kwargs"])
    expected, counts = column(case, 0, np.float32), column(case, 1, np.int32)
    before = with_leaves(
        scaler,
        np.append(np.float32(case["kwargs"]["init_scale"]), expected[:-1]),
        np.append(np.int32(0), counts[:-1]),
        np.ones_like(counts),
    )
    after = jax.jit(jax.vmap(lambda scaler, finite: scaler.adjust(finite)))(before, ~np.array(case["found_inf"], bool))
    assert_bitwise(np.asarray(after.growth_count), counts)
    assert after.loss_scale.dtype == jnp.float32
    ulps = np.asarray(after.loss_scale).view(np.int32) - expected.view(np.int32)
    assert np.abs(ulps).max() <= 1
    moved = run(scaler, case["found_inf"])  # one's own errors may add up
    assert_close(moved.loss_scale, expected, rtol=len(expected) * 2.0**-23)


@pytest.mark.parametrize("name", ["defaults", "nan_is_inf", "backoff_then_interval_restart"])
def test_torch_traces_through_the_transform(name):
    """The column `optimizer_stepped` too; found_inf 2 stands for NaN."""
    (case,) = [case for case in TORCH["cases"] if case["name"] == name]
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), torch_scaler(case["kwargs"]))

    @jax.jit
    def train(grads):
        def step(carry, grad):
            param, opt_state = carry
            updates, opt_state = tx.update(grad, opt_state, param)
            metrics = jaxmp.get_metrics(opt_state)
            return (param + updates, opt_state), (metrics["loss_scale"], metrics["growth_count"], metrics["skipped"])

        param = jnp.zeros(())
        return jax.lax.scan(step, (param, tx.init(param)), grads)

    grads = np.array([0.0, np.inf, np.nan], np.float32)[case["found_inf"]]
    (param, _), (loss_scale, growth_count, skipped) = train(grads)
    assert_bitwise(loss_scale, column(case, 0, np.float32))
    assert_bitwise(growth_count, column(case, 1, np.int32))
    assert_bitwise(skipped, ~column(case, 2, bool))
    assert np.isfinite(param)


def test_a_scale_set_from_outside_leaves_the_growth_count():
    """torch's `update(new_scale)`: the step is skipped on overflow, the scale is what was given, the count stays."""
    oracle = TORCH["update_new_scale"]
    scaler = jaxmp.DynamicLossScale.preset(
        "torch", initial_scale=oracle["init_scale"], growth_interval=oracle["growth_interval"]
    )
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), scaler)
    param = jnp.zeros(())
    update, update_without_moving = jax.jit(tx.update), jax.jit(lambda g, s, p, S: tx.update(g, s, p, loss_scale=S))
    opt_state = tx.init(param)
    for overflow, given_scale, scale_after, count_after, stepped in oracle["trace"]:
        new_scale = 256.0 if given_scale == "tensor256" else given_scale
        grad = jnp.float32(np.inf if overflow else 0.0)
        if new_scale is None:
            _, opt_state = update(grad, opt_state, param)
        else:
            _, opt_state = update_without_moving(grad, opt_state, param, jaxmp.get_loss_scale(opt_state))
            opt_state = opt_state._replace(scaling=opt_state.scaling._replace(loss_scale=jnp.float32(new_scale)))
        metrics = jaxmp.get_metrics(opt_state)
        assert_bitwise((metrics["loss_scale"], metrics["growth_count"]), (scale_after, count_after))
        assert_bitwise(metrics["skipped"], not stepped)


@pytest.mark.parametrize("row", TORCH["unscale_values"], ids=lambda row: f"{row['scale']:g}-{len(row['in'])}")
def test_unscaled_values(row):
    grads = np.array(row["in"], np.float32)
    unscaled = np.asarray(jax.jit(static.unscale)({"g": grads}, jnp.float32(row["scale"]))["g"])
    expected = np.array(row["out_bits"], np.int32).view(np.float32)
    kept = np.float32(1.0) / np.float32(row["scale"]) >= np.finfo(np.float32).tiny  # the reciprocal is not flushed
    if kept:
        assert_close(unscaled, expected, atol=SUBNORMALS)
        normal = np.isfinite(grads) & ~((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny))
        normal &= (grads == 0) | (np.abs(grads) >= np.finfo(np.float32).tiny)
        assert_bitwise(unscaled[normal], expected[normal])
    assert_bitwise(jaxmp.all_finite({"g": grads}), not row["found_inf"][0])


def test_an_overflow_that_unscaling_makes_is_skipped():
    """torch looks at the scaled gradients only: with a scale of 1/8 the largest float32 becomes inf, unseen."""
    (row,) = [row for row in TORCH["unscale_values"] if row["scale"] == 0.125 and row["found_inf"] == [0.0]]
    grads = np.array(row["in"], np.float32)
    assert np.inf in np.array(row["out_bits"], np.int32).view(np.float32)
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), row["scale"])
    updates, opt_state = tx.update(grads, tx.init(grads), grads)
    assert_bitwise(jaxmp.get_metrics(opt_state)["skipped"], True)
    assert_bitwise(updates, jnp.full(grads.shape, -0.0))


@functools.cache
def _two_optimizers(a_first: bool):
    shared = jaxmp.shared_loss_scale(
        jaxmp.DynamicLossScale.preset("torch", initial_scale=4.0, growth_interval=2), axis_name="auto"
    )
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=1.0)

    @jax.jit
    def step(params, opt_states, scale_state, grads):
        params, opt_states = list(params), list(opt_states)
        for i in (0, 1) if a_first else (1, 0):
            params[i], opt_states[i], scale_state = shared.apply_gradients(
                tx, grads[i], opt_states[i], params[i], scale_state
            )
        return params, opt_states, shared.update(scale_state)

    return shared, tx, step


@pytest.mark.parametrize(
    "case", TORCH["multi_optimizer"], ids=lambda c: f"{c['inf_in_opt']}-{c['unscale_opt_a_first']}"
)
def test_two_optimizers_under_one_scale(case):
    """Each skips on its own overflow; the scale moves once a step, on the overflow of either."""
    shared, tx, step = _two_optimizers(bool(case["unscale_opt_a_first"]))
    params = [jnp.zeros((), jnp.float16)] * 2
    opt_states, scale_state = [tx.init(p) for p in params], shared.init()
    for i, (_, a, b, loss_scale, growth_count) in enumerate(case["trace"]):
        overflows = [bool(has_inf and i in (0, 2)) for has_inf in case["inf_in_opt"]]
        grads = [jnp.float16(np.inf if overflow else 4.0) for overflow in overflows]
        params, opt_states, scale_state = step(params, opt_states, scale_state, grads)
        assert_bitwise(params, [jnp.float16(a), jnp.float16(b)])
        assert_bitwise(jaxmp.get_loss_scale(scale_state), loss_scale)
        assert_bitwise(scale_state.scaling.growth_count, growth_count)
        assert_bitwise([jaxmp.get_metrics(s)["skipped"] for s in opt_states], overflows)


# DeepSpeed


def deepspeed_count(cur_iter: int, last_overflow_iter: int, window: int) -> int:
    """`growth_count` as DeepSpeed's two counters have it."""
    stable = cur_iter - last_overflow_iter - 2
    return stable if stable <= 0 else stable % window


@pytest.mark.parametrize("case", DEEPSPEED["cases"], ids=name_of)
def test_deepspeed_traces(case):
    config = case["cfg"]
    scaler = jaxmp.DynamicLossScale.preset(
        "deepspeed",
        initial_scale=config["init_scale"],
        growth_interval=config["scale_window"],
        min_scale=config["min_scale"],
        hysteresis=config["delayed_shift"],
        refill="step" if config["consecutive_hysteresis"] else "growth",
    )
    raises = case["trace"][-1][0] == "raise"
    rows = case["trace"][:-1] if raises else case["trace"]
    trace = run(scaler, case["overflow"][: len(case["trace"])])
    assert_bitwise(trace.loss_scale[: len(rows)], np.array([row[0] for row in rows], np.float32))
    assert_bitwise(trace.hysteresis_left[: len(rows)], np.array([row[1] for row in rows], np.int32))
    counts = [deepspeed_count(row[2], row[3], config["scale_window"]) for row in rows]
    assert_bitwise(trace.growth_count[: len(rows)], np.array(counts, np.int32))
    if config["raise_error_at_min_scale"]:
        assert_bitwise(trace.pinned, np.arange(len(case["trace"])) == (len(rows) if raises else -1))


@pytest.mark.parametrize("case", DEEPSPEED["fused_optimizer_update_scale"]["cases"], ids=["defaults", "256", "floor"])
def test_deepspeed_fused_traces(case):
    names = {"init_scale": "initial_scale", "scale_window": "growth_interval", "min_scale": "min_scale"}
    kwargs = {names[k]: v for k, v in (case["dynamic_loss_args"] or {}).items() if k in names}
    trace = run(jaxmp.DynamicLossScale.preset("deepspeed_fused", **kwargs), case["overflow"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    counts = [deepspeed_count(row[1], row[2], kwargs.get("growth_interval", 1000)) for row in case["trace"]]
    assert_bitwise(trace.growth_count, np.array(counts, np.int32))


# apex, mmcv


@pytest.mark.parametrize("case", APEX["cases"], ids=name_of)
def test_apex_kernel_traces(case):
    config = dict(case["cfg"])
    scaler = jaxmp.DynamicLossScale.preset("apex", initial_scale=config.pop("init_scale"), **config)
    trace = run(scaler, case["found_inf"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    assert_bitwise(trace.growth_count, column(case, 1, np.int32))
    assert_bitwise(trace.hysteresis_left, column(case, 2, np.int32))


@pytest.mark.parametrize("case", APEX_AMP["cases"], ids=lambda case: str(case["kwargs"]))
def test_apex_amp_traces(case):
    names = {
        "init_scale": "initial_scale",
        "scale_window": "growth_interval",
        "min_loss_scale": "min_scale",
        "max_loss_scale": "max_scale",
    }
    scaler = jaxmp.DynamicLossScale.preset("apex_amp", **{names[k]: v for k, v in case["kwargs"].items()})
    trace = run(scaler, case["overflow"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    assert_bitwise(trace.growth_count, column(case, 1, np.int32))
    assert_bitwise(np.array(case["overflow"], bool), column(case, 2, bool))


@pytest.mark.parametrize(
    "case", [case for case in MMCV["cases"] if case["kwargs"].get("mode") != "static"], ids=lambda c: str(c["kwargs"])
)
def test_mmcv_traces(case):
    names = {"init_scale": "initial_scale", "scale_window": "growth_interval"}
    kwargs = {names[k]: v for k, v in case["kwargs"].items()}
    trace = run(jaxmp.DynamicLossScale.preset("mmcv", **kwargs), case["overflow"])
    assert_bitwise(trace.loss_scale, column(case, 0, np.float32))
    counts = [(row[1] - row[2] - 1) % kwargs.get("growth_interval", 1000) for row in case["trace"]]
    assert_bitwise(trace.growth_count, np.array(counts, np.int32))


def test_mmcv_static_trace():
    (case,) = [case for case in MMCV["cases"] if case["kwargs"].get("mode") == "static"]
    scaler = jaxmp.StaticLossScale(case["kwargs"]["init_scale"])
    for overflow, row in zip(case["overflow"], case["trace"], strict=True):
        scaler = scaler.adjust(jnp.array(not overflow))
        assert_bitwise(scaler.loss_scale, row[0])


def test_overflow_is_what_is_not_finite():
    """mmcv and DeepSpeed look at the *sum*, so that finite gradients overflow; a static mmcv scale applies inf."""
    values = [[1.0, -2.0], [1.0, np.inf], [np.nan, 1.0], [1e38] * 4, [np.inf, -np.inf]]
    theirs = [found for _, found in MMCV["has_overflow"]][:5]
    ours = [not bool(jaxmp.all_finite(np.array(grads, np.float32))) for grads in values]
    assert theirs == [False, True, True, True, True]
    assert ours == [False, True, True, False, True]

    assert MMCV["has_overflow"][5] == ["static mode with inf", False]
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=512.0)
    params = jnp.ones(2, jnp.float16)
    params, opt_state = jaxmp.apply_gradients(tx, jnp.array([np.inf, 1.0], jnp.float16), tx.init(params), params)
    assert_bitwise(params, jnp.ones(2, jnp.float16))
    assert_bitwise(jaxmp.get_metrics(opt_state)["skipped"], True)


# torch's sharded scaler: devices decide together


def inf_ranks(world: int) -> np.ndarray:
    """bool[world, 12], which device finds inf at which step, as the oracle's `patterns` says."""
    ranks = [[], [0], [], [0, 1], range(world), [], [], [world - 1], [], [], [], []]
    return np.array([[rank in step for step in ranks] for rank in range(world)])


@functools.cache
def _run_on_devices(world: int, axis_name: Any, bad_value: float):
    """Columns loss_scale, growth_count, finite of float/int/bool[world, 12]."""
    scaler = jaxmp.DynamicLossScale.preset("torch", initial_scale=64.0, growth_interval=3)

    def steps(found_inf):  # bool[12], of this device
        def step(scaler, found_inf):
            grads = {"a": jnp.ones(2), "b": jnp.where(found_inf, bad_value, 1.0)}
            finite = jaxmp.all_finite(grads, axis_name)
            scaler = scaler.adjust(finite)
            return scaler, (scaler.loss_scale, scaler.growth_count, finite)

        return jax.lax.scan(step, scaler, found_inf)[1]

    return jax.pmap(steps, axis_name="data", devices=jax.devices()[:world])(inf_ranks(world))


@pytest.mark.parametrize("bad_value", [np.inf, np.nan])
@pytest.mark.parametrize("world", [2, 4])
def test_all_devices_follow_the_trace_of_the_sharded_scaler(world, bad_value):
    """torch sums the flags and gets 2.0 or 4.0; ours is a MAX. A MAX of the NaNs themselves would lose some of them."""
    loss_scale, growth_count, finite = _run_on_devices(world, "auto", bad_value)
    for rank in range(world):
        rows = SHARDED["res"][f"world_{world}"][f"rank{rank}"]["torch_ShardedGradScaler(cpu)"]
        assert_bitwise(finite[rank], np.array([row[0][0] == 0 for row in rows]))
        assert_bitwise(finite[rank], np.array([row[1] for row in rows], bool))
        assert_bitwise(loss_scale[rank], np.array([row[2] for row in rows], np.float32))
        assert_bitwise(growth_count[rank], np.array([row[3] for row in rows], np.int32))


def test_without_an_axis_devices_would_diverge():
    """The oracle's unsynchronised baseline, which the axes "auto" finds by itself prevent."""
    loss_scale, _, _ = _run_on_devices(4, (), np.inf)
    for rank in range(4):
        rows = SHARDED["res"]["world_4"][f"rank{rank}"]["torch_GradScaler(cpu), no sync"]
        assert_bitwise(loss_scale[rank], np.array([row[2] for row in rows], np.float32))
    assert len(set(np.asarray(loss_scale[:, -1]))) > 1
    with pytest.raises(ValueError, match="devices would skip different steps and diverge"):
        _run_on_devices(2, None, np.inf)


def test_a_growth_past_float32():
    """torch's sharded scaler has no guard on CPU and reaches inf; its rule with the guard is the preset's default."""
    saturated = SHARDED["res"]["world_2"]["rank0"]["sharded_cpu_saturation"]
    kwargs = {"initial_scale": 2.0**126, "growth_interval": 1}
    unguarded = run(jaxmp.DynamicLossScale.preset("torch", max_scale=None, **kwargs), [0] * 4)
    assert_bitwise(unguarded.loss_scale, np.array(saturated, np.float32))
    guarded = run(jaxmp.DynamicLossScale.preset("torch", **kwargs), [0] * 4)
    assert_bitwise(guarded.loss_scale, np.full(4, 2.0**127, np.float32))


# The objects


SCALERS = {
    "default": jaxmp.DynamicLossScale,
    "refill": functools.partial(jaxmp.DynamicLossScale, refill="step", min_scale=None, max_scale=None),
    **{name: functools.partial(jaxmp.DynamicLossScale.preset, name) for name in PRESETS},
    "static": functools.partial(jaxmp.StaticLossScale, 8),
    "static from array": lambda: jaxmp.StaticLossScale(jnp.int32(8)),
    "none": jaxmp.NoOpLossScale,
}


@pytest.mark.parametrize("name", SCALERS)
def test_jmp_protocol(name):
    scaler = SCALERS[name]()
    scale = np.float32(scaler.loss_scale)
    tree = {
        "f16": jnp.full(2, 0.5, jnp.float16),
        "bf16": jnp.bfloat16(3.0),
        "n": jnp.arange(2),
        "key": jax.random.key(0),
    }
    scaled, unscaled = scaler.scale(tree), scaler.unscale(tree)
    assert_bitwise(scaled, tree | {"f16": np.full(2, 0.5 * scale), "bf16": 3 * scale})
    assert_bitwise(unscaled, tree | {"f16": np.full(2, np.float32(0.5 / scale)), "bf16": np.float32(3 / scale)})
    assert_bitwise(scaler.loss_scale, scale)
    assert type(scaler.adjust(jnp.array(True))) is type(scaler)


@jax.jit
def jit_adjust(scaler, finite):
    return scaler.adjust(finite)


@pytest.mark.parametrize("name", SCALERS)
def test_leaves_keep_their_strong_dtypes(name):
    """A weakly typed scale follows the dtype of what it meets: in float16 65536 is inf (flax's DynamicScale)."""
    scaler = SCALERS[name]()
    types = [jax.typeof(x) for x in jax.tree.leaves(scaler)]
    for leaf in types:
        assert not leaf.weak_type
        assert leaf.dtype in (jnp.float32, jnp.int32)
        assert leaf.shape == ()
    for finite in (True, False, np.bool_(True), jnp.array(False)):
        for adjusted in (scaler.adjust(finite), jit_adjust(scaler, finite)):
            assert [jax.typeof(x) for x in jax.tree.leaves(adjusted)] == types
            assert jax.tree.structure(adjusted) == jax.tree.structure(scaler)


def test_the_loss_is_scaled_in_float32():
    """jmp and mpx scale a float16 loss in float16: 4 * 32768 is inf. torch does so unless the loss is a scalar."""
    assert TORCH["misc"]["scale_of_fp16_loss (0-d fp16 * 0-d fp32 scale)"] == ["torch.float32", 2.0**17]
    assert TORCH["misc"]["scale_of_fp16_loss (1-d fp16 * 0-d fp32 scale)"] == ["torch.float16", np.inf]
    assert_bitwise(jaxmp.DynamicLossScale().scale(jnp.full(1, 2.0, jnp.float16)), jnp.full(1, 2.0**17))
    loss = jnp.float16(4.0)
    assert_bitwise(jaxmp.DynamicLossScale(2.0**15).scale(loss), 2.0**17)
    assert_bitwise(jmp.DynamicLossScale(jnp.float16(2.0**15)).scale(loss), jnp.float16(np.inf))


@pytest.mark.parametrize("name", SCALERS)
def test_a_round_trip_through_a_pytree_keeps_the_rule(name):
    scaler = SCALERS[name]()
    rebuilt = jax.tree.unflatten(jax.tree.structure(scaler), jax.tree.leaves(scaler))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(SCALERS[name]())
    assert repr(rebuilt) == repr(scaler)
    for _ in range(4):
        scaler, rebuilt = scaler.adjust(False), jax.tree.map(jnp.copy, rebuilt).adjust(False)
        assert_bitwise(rebuilt, scaler)


def test_the_floor_survives_jit_where_jmp_loses_it():
    theirs = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(8.0))
    ours = protocol.as_loss_scale(theirs)
    seen = []
    for _ in range(3):
        theirs, ours = jit_adjust(theirs, jnp.array(False)), jit_adjust(ours, jnp.array(False))
        seen.append((float(theirs.loss_scale), float(ours.loss_scale)))
    assert seen == [(4.0, 8.0), (2.0, 8.0), (1.0, 8.0)]


def test_jmp_scale_in_float16_overflows_without_a_type_error():
    """The scaler of jmp's README."""
    theirs = jmp.DynamicLossScale(jnp.float16(2.0**15))
    with pytest.raises(TypeError):
        theirs.adjust(jnp.array(False))
    assert_bitwise(protocol.as_loss_scale(theirs).adjust(jnp.array(False)).loss_scale, 2.0**14)


def test_jmp_dynamic_scale_is_taken_over_step_by_step():
    theirs = jmp.DynamicLossScale(
        jnp.float32(2.0**10), jnp.int32(2), period=4, factor=4, min_loss_scale=jnp.float32(2.0)
    )
    ours = protocol.as_loss_scale(theirs)
    rng = np.random.default_rng(0)
    for finite in rng.random(60) > 0.3:
        theirs, ours = theirs.adjust(jnp.array(finite)), ours.adjust(finite)
        assert_bitwise(ours.loss_scale, theirs.loss_scale)
        assert_bitwise(ours.growth_count, np.asarray(theirs.counter, np.int32))


def test_jmp_scales_inside_mixed_precision():
    params = jnp.ones(2, jnp.float16)
    bad = jnp.array([np.nan, 1.0], jnp.float16)
    for theirs, after in (
        (jmp.DynamicLossScale(jnp.float32(16.0), factor=4, min_loss_scale=jnp.float32(8.0)), 8.0),
        (jmp.StaticLossScale(16.0), 16.0),
    ):
        tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=theirs)
        step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
        opt_state = tx.init(params)
        for _ in range(2):
            kept, opt_state = step(bad, opt_state, params)
            assert_bitwise(jaxmp.get_loss_scale(opt_state), after)
            assert_bitwise(kept, params)
        moved, _ = step(jnp.full(2, after, jnp.float16), opt_state, params)
        assert_bitwise(moved, jnp.zeros(2, jnp.float16))


@pytest.mark.parametrize(
    "given, expected",
    [
        (jmp.StaticLossScale(jnp.float16(128.0)), jaxmp.StaticLossScale(128.0)),
        (jmp.NoOpLossScale(), jaxmp.NoOpLossScale()),
        (None, jaxmp.NoOpLossScale()),
        (128, jaxmp.StaticLossScale(128.0)),
        (np.float64(128.0), jaxmp.StaticLossScale(128.0)),
        (jnp.float32(128.0), jaxmp.StaticLossScale(128.0)),
    ],
    ids=["jmp static", "jmp none", "None", "int", "numpy", "array"],
)
def test_what_stands_for_a_scale(given, expected):
    assert_bitwise(protocol.as_loss_scale(given), expected)


def test_a_static_scale_is_an_argument_not_a_program():
    """jmp keeps the value in the tree structure: each one compiles again."""
    traced = []

    @jax.jit
    def scale(scaler, x):
        traced.append(type(scaler))
        return scaler.scale(x)

    for value in (2.0, 4.0, 8.0):
        assert_bitwise(scale(jaxmp.StaticLossScale(value), jnp.float32(1.0)), value)
        scale(jmp.StaticLossScale(value), jnp.float32(1.0))
    assert traced.count(jaxmp.StaticLossScale) == 1
    assert traced.count(jmp.StaticLossScale) == 3


@functools.partial(jax.tree_util.register_dataclass, data_fields=["loss_scale", "overflows"], meta_fields=["divisor"])
@dataclasses.dataclass(frozen=True)
class DividingScale:
    """A user's own scaler: divides by `divisor` at every second overflow and never grows."""

    loss_scale: Any
    overflows: Any
    divisor: float

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32) / self.loss_scale, tree)

    def adjust(self, grads_finite):
        overflows = jnp.where(grads_finite, self.overflows, self.overflows + 1)
        falls = ~grads_finite & (overflows % 2 == 0)
        return dataclasses.replace(
            self, loss_scale=jnp.where(falls, self.loss_scale / self.divisor, self.loss_scale), overflows=overflows
        )


def test_a_users_own_scaler():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=DividingScale(jnp.float32(64.0), jnp.int32(0), 4.0))
    params = {"w": jnp.zeros(2, jnp.float16)}
    traces = []

    @jax.jit
    def step(params, opt_state, x):
        traces.append(1)
        value_and_grad = jaxmp.value_and_grad(lambda params, x: jnp.sum((params["w"] * x).astype(jnp.float32)))
        loss, grads = value_and_grad(params, x, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss, grads

    opt_state = tx.init(params)
    types = jax.tree.map(jax.typeof, opt_state)
    expected = [(1.0, 64.0, -1.0), (np.inf, 64.0, -1.0), (1.0, 64.0, -2.0), (np.inf, 16.0, -2.0), (0.5, 16.0, -2.5)]
    for x, scale_after, w in expected:
        scale_before = jaxmp.get_loss_scale(opt_state)
        params, opt_state, _, grads = step(params, opt_state, jnp.full(2, x, jnp.float16))
        assert_bitwise(grads["w"], jnp.full(2, x * scale_before, jnp.float16))
        assert_bitwise(jaxmp.get_loss_scale(opt_state), scale_after)
        assert_bitwise(params["w"], jnp.full(2, w, jnp.float16))
        assert jax.tree.map(jax.typeof, opt_state) == types
    assert len(traces) == 1
    assert_bitwise(opt_state.scaling.scaler_leaves, (16.0, 2))
    assert_bitwise(jaxmp.get_metrics(opt_state)["skipped_steps"], 2)
    assert np.isnan(jaxmp.get_metrics(opt_state)["growth_count"])


# Bad input


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"initial_scale": 0.0}, "initial_scale must be > 0; got 0.0"),
        ({"initial_scale": -8}, "initial_scale must be > 0; got -8"),
        ({"initial_scale": math.nan}, "initial_scale must be > 0; got nan"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1, or the scale never grows; got 1.0"),
        ({"growth_factor": 0.5}, "growth_factor must be > 1, or the scale never grows; got 0.5"),
        ({"growth_factor": math.nan}, "growth_factor must be > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1, both excluded; got 1.0"),
        ({"backoff_factor": 0}, "backoff_factor must be between 0 and 1, both excluded; got 0"),
        ({"backoff_factor": -1.0}, "backoff_factor must be between 0 and 1, both excluded; got -1.0"),
        ({"growth_interval": 0}, "growth_interval must be >= 1 step; got 0"),
        ({"hysteresis": 0}, "hysteresis must be >= 1 overflow; 1 is no hysteresis; got 0"),
        ({"min_scale": 0.0}, "min_scale must be > 0; pass None for no floor; got 0.0"),
        ({"max_scale": math.inf}, "max_scale must be finite; pass None for no ceiling; got inf"),
        (
            {"min_scale": 2.0**17},
            r"min_scale <= initial_scale <= max_scale must hold; got 131072.0.*65536.0.*4294967296.0",
        ),
        ({"max_scale": 2.0}, "pass None for a bound that you do not want"),
        ({"initial_scale": 2.0**33}, "Move initial_scale into the range"),
        ({"refill": "always"}, r"""refill must be "growth" \(Megatron-LM\) or "step" \(apex\); got 'always'"""),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_bad_number_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.DynamicLossScale(**kwargs)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_check_their_overrides(name):
    with pytest.raises(ValueError, match="hysteresis must be >= 1 overflow; 1 is no hysteresis; got 0"):
        jaxmp.DynamicLossScale.preset(name, hysteresis=0)


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match="a preset is one of 'megatron', 'torch'.*; got 'nvidia'"):
        jaxmp.DynamicLossScale.preset("nvidia")


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_a_static_scale_is_positive_and_finite(scale):
    with pytest.raises(ValueError, match=f"a static loss scale must be positive and finite; got {scale}"):
        jaxmp.StaticLossScale(scale)


def test_what_is_no_loss_scale_is_named():
    with pytest.raises(TypeError, match=r"an object with jmp's protocol .*; got 'dynamic', which lacks .loss_scale"):
        protocol.as_loss_scale("dynamic")
    with pytest.raises(TypeError, match="a class: pass an instance of it"):
        protocol.as_loss_scale(jaxmp.DynamicLossScale)
    with pytest.raises(TypeError, match="which lacks .loss_scale"):
        jaxmp.shared_loss_scale(object())
    with pytest.raises(ValueError, match=r"got 'torch'\. .*DynamicLossScale.preset\(\"megatron\"\)"):
        jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale="torch")


# Values that are not there yet


RULE = {
    "initial_scale": 4.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 1,
    "hysteresis": 1,
    "min_scale": 2.0,
    "max_scale": 8.0,
}


@pytest.mark.parametrize("name", RULE)
def test_traced_numbers_pass(name):
    """Only Python numbers can be checked, so all others must come through: a factory under inject_hyperparams."""

    @jax.jit
    def adjust(value, finite):
        scaler = jaxmp.DynamicLossScale(**(RULE | {name: value}))
        return scaler.adjust(finite).loss_scale, scaler.is_pinned(finite)

    for finite, expected in ((True, 8.0), (False, 2.0)):
        assert_bitwise(adjust(RULE[name], finite), (expected, False))


def test_scales_under_inject_hyperparams():
    @functools.partial(optax.inject_hyperparams, static_args=("policy",))
    def make(learning_rate, initial_scale, policy):
        loss_scale = jaxmp.DynamicLossScale(initial_scale, hysteresis=1)
        return jaxmp.mixed_precision(optax.sgd(learning_rate), policy, loss_scale=loss_scale)

    tx = make(learning_rate=1.0, initial_scale=4.0, policy="fp16")
    params = jnp.zeros(1, jnp.float16)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for grad, scale_after, w in ((8.0, 4.0, -2.0), (np.inf, 2.0, -2.0), (8.0, 2.0, -6.0)):
        updates, opt_state = update(jnp.array([grad], jnp.float16), opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_bitwise(jaxmp.get_loss_scale(opt_state), scale_after)
        assert_bitwise(params, jnp.array([w], jnp.float16))


def test_a_sweep_in_one_program():
    """Learning rates and scales as arrays, from `init` on: nothing may ask what they are."""

    @jax.jit
    @jax.vmap
    def run(learning_rate, initial_scale):
        loss_scale = jaxmp.DynamicLossScale.preset("apex_amp", initial_scale=initial_scale)
        inner = optax.chain(jaxmp.clip_by_global_norm(initial_scale), optax.sgd(learning_rate))
        tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=loss_scale)
        params = jnp.zeros(2, jnp.float16)
        opt_state = tx.init(params)
        for grad in (8.0, np.inf):
            params, opt_state = jaxmp.apply_gradients(tx, jnp.array([grad, 0.0], jnp.float16), opt_state, params)
        return params[0], jaxmp.get_loss_scale(opt_state)

    params, scales = run(jnp.array([1.0, 0.5]), jnp.array([4.0, 8.0]))
    assert_bitwise((params, scales), (jnp.array([-2.0, -0.5], jnp.float16), jnp.array([2.0, 4.0])))


# The default rule against a rewrite


def naive_default_rule(scale: float, overflows: list[bool], *, interval: int, hysteresis: int, refill: str) -> list:
    """Rows of (scale, growth count, hysteresis left), in Python floats, with the floor 0.5 and the ceiling 64."""
    count, left, rows = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            count, left = 0, left - 1
            if left <= 0:
                scale, left = max(scale / 2, 0.5), 0
        else:
            count += 1
            if refill == "step":
                left = hysteresis
            if count == interval:
                scale, count, left = min(scale * 2, 64.0), 0, hysteresis
        rows.append((scale, count, left))
    return rows


@given(
    overflows=st.lists(st.booleans() | st.just(True) | st.just(False), min_size=1, max_size=LONGEST),
    exponent=st.integers(-1, 6),
    interval=st.sampled_from([1, 3]),
    hysteresis=st.sampled_from([1, 3]),
    refill=st.sampled_from(["growth", "step"]),
)
def test_the_default_rule(overflows, exponent, interval, hysteresis, refill):
    initial_scale = 2.0**exponent
    scaler = jaxmp.DynamicLossScale(
        initial_scale, growth_interval=interval, hysteresis=hysteresis, min_scale=0.5, max_scale=64.0, refill=refill
    )
    trace = run(scaler, overflows)
    rows = naive_default_rule(initial_scale, overflows, interval=interval, hysteresis=hysteresis, refill=refill)
    assert_bitwise(trace.loss_scale, np.array([row[0] for row in rows], np.float32))
    assert_bitwise(trace.growth_count, np.array([row[1] for row in rows], np.int32))
    assert_bitwise(trace.hysteresis_left, np.array([row[2] for row in rows], np.int32))
    assert np.all((trace.loss_scale >= 0.5) & (trace.loss_scale <= 64.0))
    assert np.all(trace.loss_scale.view(np.uint32) & 0x7FFFFF == 0)  # powers of two: gradients keep every bit
    assert_bitwise(trace.inv_scale * trace.loss_scale, np.ones(len(overflows), np.float32))
    before = np.append(np.float32(initial_scale), trace.loss_scale[:-1])
    left_before = np.append(np.int32(hysteresis), trace.hysteresis_left[:-1])
    assert_bitwise(trace.pinned, np.array(overflows) & (left_before <= 1) & (before == 0.5))
