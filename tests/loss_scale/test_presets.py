"""Loss scales against recorded traces of the systems whose rules they offer, and the default rule against a rewrite."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import jaxmp
from helpers import assert_close, assert_exact
from jaxmp._src.numerics import float_bits
from oracle_data import load, name_of

LONGEST, BATCH = 64, 64  # steps, and traces at once; shorter ones are padded, so that all have one shape
SUBNORMALS = 1.2e-38  # XLA on CPU flushes what is smaller to zero

MEGATRON = load("megatron_dynamic_grad_scaler")
TORCH = load("torch_amp_grad_scaler")
DEEPSPEED = load("deepspeed_loss_scaler")
APEX = load("apex_update_scale_hysteresis")
APEX_AMP = load("apex_amp_loss_scaler")
MMCV = load("mmcv_loss_scaler")
SHARDED = load("sharded_grad_scaler")


class Trace(NamedTuple):
    """A scale after each step; `pinned` is what it said about the step before."""

    loss_scale: np.ndarray
    growth_count: np.ndarray
    hysteresis_left: np.ndarray
    inv_scale: np.ndarray
    pinned: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _scan(form, numbers, leaves, finite):
    """Traces of several scalers whose rules differ in numbers only: one compiled program for all."""

    def trace(numbers, leaves, finite):
        rule = dataclasses.replace(form, **numbers)

        def step(leaves, finite):
            scaler = jaxmp.DynamicLossScale.tree_unflatten(rule, leaves)
            pinned = scaler.is_pinned(finite)
            leaves = tuple(x for _, x in scaler.adjust(finite).tree_flatten_with_keys()[0])
            return leaves, Trace(*leaves, float_bits.reciprocal(leaves[0]), pinned)

        return jax.lax.scan(step, leaves, finite)[1]

    return jax.vmap(trace)(numbers, leaves, finite)


def run_all(runs: list[tuple[jaxmp.DynamicLossScale, list]]) -> list[Trace]:
    """The trace of each scaler over its overflows, by few programs."""
    groups: dict[Any, list] = {}
    for i, (scaler, overflows) in enumerate(runs):
        leaves, rule = scaler.tree_flatten_with_keys()
        numbers = {}
        for name, value in dataclasses.asdict(rule).items():
            if isinstance(value, float):
                numbers[name] = np.float32(value)
            elif isinstance(value, int):
                numbers[name] = np.int32(value)
        form = dataclasses.replace(rule, **dict.fromkeys(numbers, 0))
        finite = np.ones(LONGEST, bool)
        finite[: len(overflows)] = ~np.array(overflows, bool)
        groups.setdefault(form, []).append((i, numbers, tuple(np.asarray(x) for _, x in leaves), finite))
    traces_by_run = {}
    for form, members in groups.items():
        order = [i for i, *_ in members]
        padded = members + [members[0]] * (-len(members) % BATCH)
        arguments = list(zip(*padded, strict=True))[1:]
        traces = _scan(form, *(jax.tree.map(lambda *x: np.stack(x), *argument) for argument in arguments))
        for k, i in enumerate(order):
            traces_by_run[i] = Trace(*(np.asarray(x)[k][: len(runs[i][1])] for x in traces))
    return [traces_by_run[i] for i in range(len(runs))]


def run(scaler: jaxmp.DynamicLossScale, overflows: list) -> Trace:
    return run_all([(scaler, overflows)])[0]


def traces_of(cases: list[dict], scaler_of: Callable[[dict], jaxmp.DynamicLossScale], column: str) -> Callable:
    """`trace(case)` for each of the cases. The first call runs all of them."""

    @functools.cache
    def traces() -> list[Trace]:
        return run_all([(scaler_of(case), case[column][: len(case["trace"])]) for case in cases])

    return lambda case: traces()[next(i for i, other in enumerate(cases) if other is case)]


DTYPES = {"loss_scale": np.float32, "growth_count": np.int32, "hysteresis_left": np.int32}


def column(case: dict, i: int, dtype: Any) -> np.ndarray:
    return np.array([row[i] for row in case["trace"]], np.float64).astype(dtype)


def assert_columns(trace: Any, case: dict, *names: str) -> None:
    """The first columns of a recorded trace are these fields, exactly."""
    for i, name in enumerate(names):
        assert_exact(getattr(trace, name), column(case, i, DTYPES[name]))


OUR_NAMES = {
    "init_scale": "initial_scale",
    "scale_window": "growth_interval",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
    "delayed_shift": "hysteresis",
}


def preset(name: str, config: dict) -> jaxmp.DynamicLossScale:
    """The preset with numbers under the names of another system."""
    return jaxmp.DynamicLossScale.preset(name, **{OUR_NAMES.get(key, key): value for key, value in config.items()})


def with_leaves(scaler: Any, *leaves: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(scaler), leaves)


def torch_scaler(case: dict) -> jaxmp.DynamicLossScale:
    kwargs = dict(case["kwargs"])
    if math.isinf(kwargs.get("init_scale", 0.0)):  # no such scaler can be made: it got there from outside
        infinite = jnp.float32(kwargs.pop("init_scale"))
        scaler = preset("torch", kwargs)
        return with_leaves(scaler, infinite, scaler.growth_count, scaler.hysteresis_left)
    return preset("torch", {"init_scale": 2.0**16} | kwargs)


# Megatron-LM


megatron_trace = traces_of(MEGATRON["cases"], lambda case: preset("megatron", case["cfg"]), "found_inf")


@pytest.mark.thorough(10)
@pytest.mark.parametrize("case", MEGATRON["cases"], ids=name_of)
def test_megatron_traces(case):
    trace = megatron_trace(case)
    assert_columns(trace, case, "loss_scale", "growth_count", "hysteresis_left")
    assert_close(trace.inv_scale, column(case, 3, np.float32), atol=SUBNORMALS)
    normal = column(case, 3, np.float32) >= np.finfo(np.float32).tiny
    assert_exact(trace.inv_scale[normal], column(case, 3, np.float32)[normal])


def test_the_traces_hold_without_jit_as_well():
    case = next(case for case in MEGATRON["cases"] if case["name"] == "hysteresis_refilled_by_growth")
    scaler = preset("megatron", case["cfg"])
    for overflow, (*expected, _) in zip(case["found_inf"], case["trace"], strict=True):
        scaler = scaler.adjust(not overflow)
        assert_exact(tuple(jax.tree.leaves(scaler)), tuple(expected))


@pytest.mark.parametrize("kwargs", [kwargs for kwargs, _ in MEGATRON["constructor_asserts"]], ids=str)
def test_what_megatron_asserts_raises_and_says_what_it_got(kwargs):
    ((name, value),) = kwargs.items()
    rule = "min_scale <= initial_scale" if value == 131072.0 else f"{name} must be"
    with pytest.raises(ValueError, match=rule) as raised:
        preset("megatron", {"initial_scale": 65536.0, "min_scale": 1.0} | kwargs)
    assert str(value) in str(raised.value)


def test_a_constant_scale_does_not_move():
    scaler = jaxmp.StaticLossScale(MEGATRON["constant"]["scale"])
    assert_exact(scaler.adjust(jnp.array(False)).adjust(True).loss_scale, MEGATRON["constant"]["scale"])


# torch.amp


ROUNDED_TWICE = ("nonpow2", "growth_1.001")  # torch multiplies in double
EXACT_TORCH = [case for case in TORCH["cases"] if case["name"] not in (*ROUNDED_TWICE, "no_floor_underflow_to_zero")]


torch_trace = traces_of(TORCH["cases"], torch_scaler, "found_inf")


@pytest.mark.thorough(4)
@pytest.mark.parametrize("case", EXACT_TORCH, ids=name_of)
def test_torch_traces(case):
    assert_columns(torch_trace(case), case, "loss_scale", "growth_count")


def test_torch_scale_that_underflows_to_zero():
    (case,) = [case for case in TORCH["cases"] if case["name"] == "no_floor_underflow_to_zero"]
    trace = torch_trace(case)
    assert_close(trace.loss_scale, column(case, 0, np.float32), atol=SUBNORMALS)
    assert_exact(trace.growth_count, column(case, 1, np.int32))


@pytest.mark.parametrize("case", [case for case in TORCH["cases"] if case["name"] in ROUNDED_TWICE], ids=name_of)
def test_torch_traces_with_other_factors_are_an_ulp_a_step_away_at_most(case):
    scaler = torch_scaler(case)
    expected, counts = column(case, 0, np.float32), column(case, 1, np.int32)
    before = with_leaves(
        scaler,
        np.append(np.float32(case["kwargs"]["init_scale"]), expected[:-1]),
        np.append(np.int32(0), counts[:-1]),
        np.ones_like(counts),
    )
    after = jax.jit(jax.vmap(lambda scaler, finite: scaler.adjust(finite)))(before, ~np.array(case["found_inf"], bool))
    assert_exact(np.asarray(after.growth_count), counts)
    assert after.loss_scale.dtype == jnp.float32
    ulps = np.asarray(after.loss_scale).view(np.int32) - expected.view(np.int32)
    assert np.abs(ulps).max() <= 1
    moved = torch_trace(case)  # its own errors may add up
    assert_close(moved.loss_scale, expected, rtol=len(expected) * 2.0**-23)


def test_an_overflow_that_unscaling_makes_is_skipped():
    """torch looks at the scaled gradients only: with a scale of 1/8 the largest float32 becomes inf, unseen."""
    (row,) = [row for row in TORCH["unscale_values"] if row["scale"] == 0.125 and row["found_inf"] == [0.0]]
    grads = np.array(row["in"], np.float32)
    assert np.inf in np.array(row["out_bits"], np.int32).view(np.float32)
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), row["scale"])
    updates, opt_state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert_exact(jaxmp.get_metrics(opt_state)["skipped"], True)
    assert_exact(updates, jnp.full(grads.shape, -0.0))


@functools.cache
def _two_optimizers(a_first: bool):
    shared = jaxmp.shared_loss_scale(preset("torch", {"initial_scale": 4.0, "growth_interval": 2}), axis_name="auto")
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


@pytest.mark.thorough(1)
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
        assert_exact(params, [jnp.float16(a), jnp.float16(b)])
        assert_exact(jaxmp.get_loss_scale(scale_state), loss_scale)
        assert_exact(scale_state.scaling.growth_count, growth_count)
        assert_exact([jaxmp.get_metrics(s)["skipped"] for s in opt_states], overflows)


# DeepSpeed


def deepspeed_count(cur_iter: int, last_overflow_iter: int, window: int) -> int:
    """`growth_count` as DeepSpeed's two counters have it."""
    stable = cur_iter - last_overflow_iter - 2
    return stable if stable <= 0 else stable % window


def deepspeed_scaler(case: dict) -> jaxmp.DynamicLossScale:
    names = ("init_scale", "scale_window", "min_scale", "delayed_shift")
    refill = {"refill": "step" if case["cfg"]["consecutive_hysteresis"] else "growth"}
    return preset("deepspeed", {name: case["cfg"][name] for name in names} | refill)


deepspeed_trace = traces_of(DEEPSPEED["cases"], deepspeed_scaler, "overflow")


@pytest.mark.thorough(11)
@pytest.mark.parametrize("case", DEEPSPEED["cases"], ids=name_of)
def test_deepspeed_traces(case):
    config = case["cfg"]
    raises = case["trace"][-1][0] == "raise"
    rows = case["trace"][:-1] if raises else case["trace"]
    trace = deepspeed_trace(case)
    assert_exact(trace.loss_scale[: len(rows)], np.array([row[0] for row in rows], np.float32))
    assert_exact(trace.hysteresis_left[: len(rows)], np.array([row[1] for row in rows], np.int32))
    counts = [deepspeed_count(row[2], row[3], config["scale_window"]) for row in rows]
    assert_exact(trace.growth_count[: len(rows)], np.array(counts, np.int32))
    if config["raise_error_at_min_scale"]:
        assert_exact(trace.pinned, np.arange(len(case["trace"])) == (len(rows) if raises else -1))


@pytest.mark.parametrize("case", DEEPSPEED["fused_optimizer_update_scale"]["cases"], ids=["defaults", "256", "floor"])
def test_deepspeed_fused_traces(case):
    names = ("init_scale", "scale_window", "min_scale")
    config = {name: value for name, value in (case["dynamic_loss_args"] or {}).items() if name in names}
    trace = run(preset("deepspeed_fused", config), case["overflow"])
    assert_columns(trace, case, "loss_scale")
    counts = [deepspeed_count(row[1], row[2], config.get("scale_window", 1000)) for row in case["trace"]]
    assert_exact(trace.growth_count, np.array(counts, np.int32))


# apex, mmcv


apex_trace = traces_of(APEX["cases"], lambda case: preset("apex", case["cfg"]), "found_inf")


@pytest.mark.thorough(4)
@pytest.mark.parametrize("case", APEX["cases"], ids=name_of)
def test_apex_kernel_traces(case):
    assert_columns(apex_trace(case), case, "loss_scale", "growth_count", "hysteresis_left")


apex_amp_trace = traces_of(APEX_AMP["cases"], lambda case: preset("apex_amp", case["kwargs"]), "overflow")


@pytest.mark.parametrize("case", APEX_AMP["cases"], ids=lambda case: str(case["kwargs"]))
def test_apex_amp_traces(case):
    assert_columns(apex_amp_trace(case), case, "loss_scale", "growth_count")
    assert_exact(np.array(case["overflow"], bool), column(case, 2, bool))


MMCV_DYNAMIC = [case for case in MMCV["cases"] if case["kwargs"].get("mode") != "static"]
mmcv_trace = traces_of(MMCV_DYNAMIC, lambda case: preset("mmcv", case["kwargs"]), "overflow")


@pytest.mark.parametrize("case", MMCV_DYNAMIC, ids=lambda c: str(c["kwargs"]))
def test_mmcv_traces(case):
    trace = mmcv_trace(case)
    assert_columns(trace, case, "loss_scale")
    counts = [(row[1] - row[2] - 1) % case["kwargs"].get("scale_window", 1000) for row in case["trace"]]
    assert_exact(trace.growth_count, np.array(counts, np.int32))


def test_overflow_is_what_is_not_finite():
    """mmcv and DeepSpeed look at the *sum*, so that finite gradients overflow."""
    values = [[1.0, -2.0], [1.0, np.inf], [np.nan, 1.0], [1e38] * 4, [np.inf, -np.inf]]
    theirs = [overflow for _, overflow in MMCV["has_overflow"]][:5]
    padded = np.array([grads + [0.0] * (4 - len(grads)) for grads in values], np.float32)
    ours = (~jax.jit(jax.vmap(jaxmp.all_finite))(padded)).tolist()
    assert theirs == [False, True, True, True, True]
    assert ours == [False, True, True, False, True]


# torch's sharded scaler: devices decide together


def inf_ranks(world: int) -> np.ndarray:
    """bool[world, 12], which device finds inf at which step, as the oracle's `patterns` says."""
    ranks = [[], [0], [], [0, 1], range(world), [], [], [world - 1], [], [], [], []]
    return np.array([[rank in step for step in ranks] for rank in range(world)])


@functools.cache
def _on_devices(world: int, axis_name: Any):
    scaler = preset("torch", {"initial_scale": 64.0, "growth_interval": 3})

    def steps(found_inf, bad_value):  # bool[12], of this device
        def step(scaler, found_inf):
            grads = {"a": jnp.ones(2), "b": jnp.where(found_inf, bad_value, 1.0)}
            finite = jaxmp.all_finite(grads, axis_name)
            scaler = scaler.adjust(finite)
            return scaler, (scaler.loss_scale, scaler.growth_count, finite)

        return jax.lax.scan(step, scaler, found_inf)[1]

    return jax.pmap(steps, axis_name="data", in_axes=(0, None), devices=jax.devices()[:world])


def run_on_devices(world: int, axis_name: Any, bad_value: float):
    """Columns loss_scale, growth_count, finite of float/int/bool[world, 12]."""
    return _on_devices(world, axis_name)(inf_ranks(world), bad_value)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bad_value", [np.inf, np.nan])
@pytest.mark.parametrize("world", [2, 4])
def test_all_devices_follow_the_trace_of_the_sharded_scaler(world, bad_value):
    """torch sums the flags and gets 2.0 or 4.0; ours is a MAX. A MAX of the NaNs themselves would lose some of them."""
    loss_scale, growth_count, finite = run_on_devices(world, "auto", bad_value)
    for rank in range(world):
        rows = SHARDED["res"][f"world_{world}"][f"rank{rank}"]["torch_ShardedGradScaler(cpu)"]
        assert_exact(finite[rank], np.array([row[0][0] == 0 for row in rows]))
        assert_exact(finite[rank], np.array([row[1] for row in rows], bool))
        assert_exact(loss_scale[rank], np.array([row[2] for row in rows], np.float32))
        assert_exact(growth_count[rank], np.array([row[3] for row in rows], np.int32))


def test_without_an_axis_devices_would_diverge():
    """The oracle's unsynchronised baseline, which the axes "auto" finds by itself prevent."""
    loss_scale, _, _ = run_on_devices(4, (), np.inf)
    for rank in range(4):
        rows = SHARDED["res"]["world_4"][f"rank{rank}"]["torch_GradScaler(cpu), no sync"]
        assert_exact(loss_scale[rank], np.array([row[2] for row in rows], np.float32))
    assert len(set(np.asarray(loss_scale[:, -1]))) > 1


def test_a_growth_past_float32():
    """torch's sharded scaler has no guard on CPU and reaches inf; its rule with the guard is the preset's default."""
    saturated = SHARDED["res"]["world_2"]["rank0"]["sharded_cpu_saturation"]
    config = {"initial_scale": 2.0**126, "growth_interval": 1}
    for bounds, expected in (({"max_scale": None}, saturated), ({}, [2.0**127] * 4)):
        assert_exact(run(preset("torch", config | bounds), [0] * 4).loss_scale, np.array(expected, np.float32))


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
    assert_columns(trace, {"trace": rows}, "loss_scale", "growth_count", "hysteresis_left")
    assert np.all((trace.loss_scale >= 0.5) & (trace.loss_scale <= 64.0))
    assert np.all(trace.loss_scale.view(np.uint32) & 0x7FFFFF == 0)  # powers of two: gradients keep every bit
    assert_exact(trace.inv_scale * trace.loss_scale, np.ones(len(overflows), np.float32))
    before = np.append(np.float32(initial_scale), trace.loss_scale[:-1])
    left_before = np.append(np.int32(hysteresis), trace.hysteresis_left[:-1])
    assert_exact(trace.pinned, np.array(overflows) & (left_before <= 1) & (before == 0.5))
