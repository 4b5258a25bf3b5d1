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
