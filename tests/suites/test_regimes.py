"""One suite over the ways to spread a step, the frameworks and the dtypes; `regimes.py` says what they are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_close, assert_moved
from regimes import AXIS, DEVICES, REGIMES, SAMPLE, make_job, trace_of

FRAMEWORKS, DTYPES = ("plain", "linen", "nnx", "fused"), ("fp16", "bf16")
# All of the plain job and of float16; the frameworks' own code does not ask for the dtype.
CASES = [*SAMPLE]
CASES += [(regime, framework, "fp16", 1) for regime, framework in itertools.product(REGIMES, FRAMEWORKS)]
CASES += [(regime, "plain", "bf16", 2) for regime in REGIMES]
CASES = sorted(set(CASES))


def test_the_sample_has_each_regime_framework_and_dtype():
    assert {regime for regime, *_ in SAMPLE} == set(REGIMES)
    assert {framework for _, framework, *_ in SAMPLE} == set(FRAMEWORKS)
    chosen = {(framework, dtype) for _, framework, dtype, _ in SAMPLE}
    assert chosen >= set(itertools.product(("plain", "fused"), DTYPES))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("regime_name", "framework", "dtype", "accumulate"), CASES)
def test_one_overflowing_device_stops_all_and_nothing_else_differs(regime_name, framework, dtype, accumulate):
    job = make_job(framework, dtype, REGIMES[regime_name].axis_name, accumulate)
    trace = trace_of(regime_name, framework, dtype, accumulate)
    regimes.check_run(job, dtype, trace.devices)
    single = trace_of("single", framework, dtype, accumulate)
    single_job = make_job(framework, dtype, None, accumulate)
    regimes.check_equal(job, trace, single_job, single, regimes.TOLERANCE[dtype])


# Where gradients are reduced, all devices see the same inf and would decide alike by chance. So here they are not:
# each device trains params of its own (local SGD), and only the flag crosses over.


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spread", ["pmap", "shard_map", "shard_map_unchecked"])
def test_devices_that_share_no_gradients_still_decide_together(spread):
    tx = jaxmp.mixed_precision(
        optax.adam(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1, growth_interval=2)
    )
    params32 = {"w": np.arange(DEVICES * 3, dtype=np.float32).reshape(DEVICES, 3)}

    def init(params32):
        return jaxmp.get_policy("fp16").cast_to_param(params32), tx.init(params32)

    def step(state, factor):
        def loss_fn(params):
            return jnp.sum(params["w"].astype(jnp.float32) * factor)

        _, grads = jaxmp.value_and_grad(loss_fn)(state[0], opt_state=state[1])
        return jaxmp.apply_gradients(tx, grads, state[1], state[0])

    if spread == "pmap":
        init, step = (jax.pmap(f, AXIS, devices=jax.devices()[:DEVICES]) for f in (init, step))
    else:
        # params differ from device to device; scale and counters leave as replicated, which check_vma proves
        local = jax.tree.map(lambda x: P(AXIS) if x.ndim else P(), jax.eval_shape(init, params32))
        spread_over = functools.partial(jax.shard_map, mesh=regimes.mesh_of(), check_vma=spread == "shard_map")
        init = jax.jit(spread_over(init, in_specs=P(AXIS), out_specs=local))
        step = jax.jit(spread_over(step, in_specs=(local, P(AXIS)), out_specs=local))

    state = init(params32)
    good = np.ones((DEVICES, 1), np.float32)
    bad = np.where(np.arange(DEVICES)[:, None] == 2, np.float32(np.inf), good)
    skipped, scales, moved = [], [], []
    for factor in (good, bad, bad, good, good):
        before = np.asarray(state[0]["w"])
        state = step(state, factor)
        metrics = jaxmp.get_metrics(state[1])
        skipped.append(sorted({bool(s.data.item()) for s in metrics["skipped"].addressable_shards}))
        scales.append(sorted({s.data.item() for s in metrics["loss_scale"].addressable_shards}))
        assert len(metrics["skipped"].addressable_shards) == DEVICES
        moved.append(np.any(np.asarray(state[0]["w"]) != before, axis=-1).tolist())
    assert skipped == [[False], [True], [True], [False], [False]]
    assert scales == [[4.0], [2.0], [1.0], [1.0], [2.0]]
    assert moved == [[not s[0]] * DEVICES for s in skipped]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_sharded_masters_in_shard_map_skip_on_every_shard(check_vma):
    """ZeRO by hand: each device holds, gathers and updates its rows; the overflow is in the gradient of one row."""
    mesh = regimes.mesh_of()
    policy = jaxmp.get_policy("fp16")
    tx = jaxmp.mixed_precision(optax.adam(0.1), policy, loss_scale=jaxmp.DynamicLossScale(2.0**10, hysteresis=1))
    params32 = {"w": jnp.ones((DEVICES * 2, 3))}
    params, opt_state = policy.cast_to_param(params32), tx.init(params32)
    specs = (jax.tree.map(regimes.fsdp_spec, params), jax.tree.map(regimes.fsdp_spec, opt_state))

    def step(params, opt_state, x):  # x [2, rows]: this device's examples
        def loss_fn(shard):
            w = jax.lax.all_gather(shard["w"], AXIS, tiled=True)  # transposed: a reduce-scatter of the gradients
            return jnp.mean((x.astype(jnp.float16) @ w).astype(jnp.float32))

        _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        finite_here = jnp.all(jnp.isfinite(grads["w"]))
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), finite_here[None]

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=(*specs, P(AXIS)), check_vma=check_vma)
    )
    x = np.ones((DEVICES * 2, DEVICES * 2), np.float32)
    x[0, 5] = 2000.0  # 2000 * 1024 / 6 is beyond float16, in row 5 only: the third device's
    before = (params, opt_state)
    params, opt_state, finite_here = step(params, opt_state, x)
    assert finite_here.tolist() == [True, True, False, True]
    assert_moved(params, before[0])
    assert_moved(regimes.guarded(opt_state), regimes.guarded(before[1]))
    assert all(s.data.item() == 512.0 for s in jaxmp.get_loss_scale(opt_state).addressable_shards)
    params, opt_state, finite_here = step(params, opt_state, np.ones_like(x))
    assert finite_here.tolist() == [True] * DEVICES
    # Adam's first step: -lr everywhere
    assert_close(params, {"w": np.full((DEVICES * 2, 3), 0.9, np.float16)}, atol=2.0**-11)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spread", ["pmap", "shard_map"])
def test_axis_name_none_would_let_devices_diverge_and_is_an_error(spread):
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=4.0, axis_name=None)
    params = jnp.ones((DEVICES, 2), jnp.float16)

    def step(params):
        return jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), tx.init(params), params)[0]

    over_devices = jax.pmap(step, AXIS, devices=jax.devices()[:DEVICES])
    if spread == "shard_map":
        over_devices = jax.shard_map(step, mesh=regimes.mesh_of(), in_specs=P(AXIS), out_specs=P(AXIS))
    message = r"axis_name=None is for no bound axes; \('data',\) are bound, so devices would diverge"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_devices, params)
    assert_close(jax.jit(step)(params), np.full((DEVICES, 2), 0.75, np.float16))  # without such axes it is what it says
