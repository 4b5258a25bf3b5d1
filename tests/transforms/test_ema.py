"""The average of the masters: beside a NumPy rewrite in float64, over skipped steps and for every kind of param."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from regimes import guarded

W = np.array([1.0, -2.0, 0.5], np.float32)


def run(tx, params, grads):
    """[(params, opt_state)] after each step."""
    opt_state, seen = tx.init(params), []
    for g in grads:
        params, opt_state = jaxmp.apply_gradients(
            tx, jax.tree.map(lambda p, g=g: jnp.full(p.shape, g, p.dtype), params), opt_state, params
        )
        seen.append((params, opt_state))
    return seen


@pytest.mark.parametrize("debias", [True, False], ids=["debiased", "from-the-start"])
@pytest.mark.parametrize(
    "decay", [0.0, 0.9, lambda n: jnp.minimum(0.9, (1.0 + n) / (10.0 + n))], ids=["0", "0.9", "warm"]
)
def test_it_is_the_average_of_the_weights_after_each_step(decay, debias):
    tx = optax.chain(optax.sgd(0.25), jaxmp.ema_params(decay, debias=debias))
    expected, weight = (np.zeros(3), 0.0) if debias else (W.astype(np.float64), 1.0)
    w = W.astype(np.float64)
    for n, (params, opt_state) in enumerate(run(tx, {"w": jnp.asarray(W)}, [1.0, -0.5, 2.0, 0.25])):
        w = w - 0.25 * [1.0, -0.5, 2.0, 0.25][n]
        d = min(0.9, (1 + n) / (10 + n)) if callable(decay) else decay
        expected, weight = d * expected + (1 - d) * w, d * weight + (1 - d)
        got = jaxmp.get_ema_params(opt_state, params)
        assert_close(got, {"w": (expected / weight).astype(np.float32)}, rtol=1e-6, atol=1e-7)


def test_after_one_step_a_debiased_average_is_the_weight():
    tx = optax.chain(optax.sgd(1.0), jaxmp.ema_params(0.9999))
    params, opt_state = run(tx, {"w": jnp.asarray(W)}, [1.0])[0]
    assert_close(jaxmp.get_ema_params(opt_state, params), params, rtol=1e-3)  # 1 - d in float32
    start = tx.init(params)
    assert_moved(jaxmp.get_ema_params(start, params), params)  # before the first


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kwargs", [{}, {"remainder_bits": 16}], ids=["whole", "split"])
def test_it_averages_masters_and_not_what_they_are_rounded_to(kwargs):
    inner = optax.chain(optax.sgd(2.0**-12), jaxmp.ema_params(0.5))
    tx, policy = jaxmp.mixed_precision(inner, "bf16", **kwargs), jaxmp.get_policy("bf16")
    plain = run(inner, {"w": jnp.asarray(W)}, [1.0, 1.0, 1.0])
    opt_state, params = tx.init({"w": jnp.asarray(W)}), policy.cast_to_param({"w": jnp.asarray(W)})
    for _ in range(3):
        params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.ones(3)}, opt_state, params)
    assert params["w"].dtype == jnp.bfloat16
    average = jaxmp.get_ema_params(opt_state, params)
    assert_exact(average, jaxmp.get_ema_params(plain[-1][1], plain[-1][0]))
    assert not np.array_equal(average["w"], np.asarray(params["w"], np.float32))


def test_a_skipped_step_moves_nothing():
    tx = jaxmp.mixed_precision(optax.chain(optax.sgd(1.0), jaxmp.ema_params(0.5)), "fp16")
    params, opt_state = run(tx, {"w": jnp.asarray(W, jnp.float16)}, [1.0])[0]
    _, after = jaxmp.apply_gradients(tx, {"w": jnp.full(3, jnp.inf)}, opt_state, params)
    assert bool(after.skipped)
    assert_moved(guarded(after), guarded(opt_state))
    assert int(optax.tree.get(after, "ema_count")) == 1


def test_fp8_scales_and_frozen_leaves_are_taken_from_the_params():
    params = {"w": jnp.ones((16, 16)), "fp8_lhs_e4m3_log2_scale": jnp.float32(3.0), "base": jnp.ones(2, jnp.int32)}
    labels = {"w": "train", "fp8_lhs_e4m3_log2_scale": "train", "base": "frozen"}
    inner = optax.multi_transform(
        {"train": optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.5)), "frozen": optax.set_to_zero()}, labels
    )
    tx = jaxmp.mixed_precision(inner, "fp32", recipe=jaxmp.fp8.DelayedScaling(amax_history_len=2))
    grads = {"w": jnp.ones((16, 16)), "fp8_lhs_e4m3_log2_scale": jnp.float32(1.0), "base": jnp.zeros(2, jnp.float32)}
    new, opt_state = jax.jit(lambda *args: jaxmp.apply_gradients(tx, *args))(grads, tx.init(params), params)
    average = jaxmp.get_ema_params(opt_state, new)
    assert_exact(average, new)


def test_updates_pass_and_the_state_keeps_its_types():
    tx = jaxmp.ema_params(0.9)
    params = {"w": jnp.asarray(W, jnp.bfloat16)}
    state = tx.init(params)
    updates, after = jax.jit(tx.update)({"w": jnp.asarray(W)}, state, params)
    assert_moved(updates, {"w": jnp.asarray(W)})
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    assert state.ema_params["w"].dtype == jnp.float32


def test_errors():
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"decay must be >= 0 and < 1; got {decay}"):
            jaxmp.ema_params(decay)
    with pytest.raises(ValueError, match="one ema_params; got 0 of them. Put ema_params inside mixed_precision"):
        jaxmp.get_ema_params(optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
    with pytest.raises(ValueError, match="needs the params"):
        jaxmp.ema_params(0.9).update(jnp.ones(2), jaxmp.ema_params(0.9).init(jnp.ones(2)))


EMA = functools.partial(jaxmp.ema_params, 0.5)
OF_W, OF_B = {"w": True, "b": False}, {"w": False, "b": True}
NOT_LAST = {
    "first": (lambda: optax.chain(EMA(), optax.sgd(0.1, momentum=0.9)), "TraceState"),
    "before a schedule": (
        lambda: optax.chain(optax.scale_by_adam(), EMA(), optax.scale_by_schedule(lambda n: -0.1)),
        "ScaleByScheduleState",
    ),
    "in a chain": (lambda: optax.chain(optax.chain(optax.sgd(0.1), EMA()), optax.scale(0.5)), "EmptyState"),
    "in MultiSteps": (lambda: optax.MultiSteps(optax.chain(EMA(), optax.sgd(0.1)), 2), "EmptyState"),
    "before a mask": (
        lambda: optax.chain(optax.sgd(0.1), EMA(), optax.masked(optax.set_to_zero(), OF_W)),
        "EmptyState",
    ),
}
LAST = {
    "last": lambda: optax.chain(optax.sgd(0.1), EMA()),
    "before counts": lambda: optax.chain(
        optax.sgd(0.1), EMA(), optax.chain(jaxmp.count_zeros()), optax.snapshot("norm", optax.tree.norm)
    ),
    "two parts": lambda: optax.chain(
        optax.masked(optax.chain(optax.sgd(0.1), EMA()), OF_W), optax.masked(optax.set_to_zero(), OF_B)
    ),
    "a label": lambda: optax.multi_transform(
        {"train": optax.chain(optax.sgd(0.1), EMA()), "freeze": optax.set_to_zero()}, {"w": "train", "b": "freeze"}
    ),
}


@pytest.mark.parametrize("wrap", [jaxmp.mixed_precision, jaxmp.keep_master_params], ids=["mixed", "masters"])
@pytest.mark.parametrize("name", NOT_LAST)
def test_an_average_before_what_changes_updates_is_refused(name, wrap):
    """It would average weights that other updates moved."""
    make, behind = NOT_LAST[name]
    tx, params = wrap(make(), "fp32"), {"w": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(
        ValueError, match=f"got a transform with {behind} behind ema_params in a chain. Put ema_params last:"
    ):
        jax.eval_shape(lambda: jaxmp.apply_gradients(tx, params, tx.init(params), params))


@pytest.mark.parametrize("name", LAST)
def test_an_average_of_final_updates_is_not(name):
    tx, params = jaxmp.mixed_precision(LAST[name](), "fp32"), {"w": jnp.ones(2), "b": jnp.ones(2)}
    jax.eval_shape(lambda: jaxmp.apply_gradients(tx, params, tx.init(params), params))


# Statistics


def averaged_by_hand(values, decay=0.5):
    """The average of float64 arrays with debias."""
    total, weight = 0.0, 0.0
    for x in values:
        total, weight = decay * total + (1 - decay) * np.asarray(x, np.float64), decay * weight + (1 - decay)
    return total / weight


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))


class StateWithStats(jaxmp.linen.TrainState):
    batch_stats: Any


def loop(net, x):
    variables = net.init(jax.random.key(0), x)
    ema = jaxmp.ema_params(0.5, batch_stats=jax.eval_shape(lambda: variables["batch_stats"]))
    tx = jaxmp.mixed_precision(optax.chain(optax.sgd(0.1), ema), "fp16")
    state = StateWithStats.create(
        apply_fn=net.apply, params=variables["params"], tx=tx, policy="fp16", batch_stats=variables["batch_stats"]
    )

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            out, new = net.apply({"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"])
            return jnp.mean(out.astype(jnp.float32) ** 2), new["batch_stats"]

        (_, stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(state.params, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    return state, step


@pytest.mark.thorough(0)
def test_statistics_are_averaged_with_the_weights_and_survive_skips_and_checkpoints(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    fresh, step = loop(Net(), x)
    assert_moved(jaxmp.get_ema_batch_stats(fresh.opt_state, fresh.batch_stats), fresh.batch_stats)
    state, seen = fresh, []
    for i in range(3):
        state = step(state, (1 + i) * x)
        seen.append(state.batch_stats["BatchNorm_0"])
    average = jaxmp.get_ema_batch_stats(state.opt_state, state.batch_stats)["BatchNorm_0"]
    for name in ("mean", "var"):
        np.testing.assert_allclose(average[name], averaged_by_hand([s[name] for s in seen]), rtol=1e-6)
    skipped = step(state, x.at[0, 0].set(jnp.inf))
    assert bool(skipped.metrics["skipped"])
    same = [optax.tree.get(found.opt_state, "ema_batch_stats") for found in (skipped, state)]
    assert_moved(*same)
    with jaxmp.checkpoint.manager(tmp_path) as steps:
        jaxmp.checkpoint.save_job(steps, 0, state)
        restored = jaxmp.checkpoint.restore_job(steps, fresh).job
    assert_same_program(step(restored, x).opt_state, step(state, x).opt_state)


def test_statistics_of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(3, momentum=0.5, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    model, x = Model(nnx.Rngs(0)), jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    ema = jaxmp.ema_params(0.5, batch_stats=nnx.state(model, nnx.BatchStat))
    tx = jaxmp.mixed_precision(optax.chain(optax.sgd(0.1), ema), "bf16")
    optimizer = jaxmp.nnx.Optimizer(model, tx, policy="bf16")

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model, opt_state=optimizer)
        optimizer.update(model, grads, batch_stats=nnx.state(model, nnx.BatchStat))

    seen = []
    for i in range(2):
        step(model, optimizer, (1 + i) * x)
        seen.append(np.asarray(model.norm.mean[...]))
    average = jaxmp.get_ema_batch_stats(optimizer.opt_state, nnx.state(model, nnx.BatchStat))
    np.testing.assert_allclose(average["norm"]["mean"][...], averaged_by_hand(seen), rtol=1e-5)
    nnx.update(model, average)
    np.testing.assert_allclose(model.norm.mean[...], averaged_by_hand(seen), rtol=1e-5)


def test_statistics_without_debias_start_at_the_first_ones():
    tx = jaxmp.ema_params(0.75, debias=False, batch_stats={"mean": jnp.array([4.0])})
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    _, state = tx.update(params, state, params, batch_stats={"mean": jnp.array([8.0], jnp.bfloat16)})
    assert_exact(jaxmp.get_ema_batch_stats(state, {"mean": jnp.zeros(1)}), {"mean": jnp.array([5.0])})


def test_errors_of_statistics():
    params, stats = {"w": jnp.ones(2)}, {"norm": {"mean": jnp.zeros(3)}}
    with_stats, without = jaxmp.ema_params(0.9, batch_stats=stats), jaxmp.ema_params(0.9)
    update = functools.partial(with_stats.update, params, with_stats.init(params), params)
    with pytest.raises(ValueError, match="that each update gets; got none.*batch_stats=new_stats"):
        update()
    with pytest.raises(ValueError, match="got some, where ema_params was made without"):
        without.update(params, without.init(params), params, batch_stats=stats)
    with pytest.raises(ValueError, match="norm/var"):
        update(batch_stats={"norm": {"mean": jnp.zeros(3), "var": jnp.zeros(3)}})
    with pytest.raises(ValueError, match=r"got \(4,\) at norm/mean, expected \(3,\)"):
        update(batch_stats={"norm": {"mean": jnp.zeros(4)}})
    with pytest.raises(ValueError, match=r"got \(4, 3\) at norm/mean, .*microbatches.*accumulate=.*carry_argnum="):
        update(batch_stats={"norm": {"mean": jnp.zeros((4, 3))}})
    with pytest.raises(ValueError, match="got some, where ema_params was made without"):
        jaxmp.get_ema_batch_stats(without.init(params), stats)
