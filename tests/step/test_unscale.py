"""Unscale and skip: what a skipped step leaves alone, who decides, and what is handed on and counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_moved
from platforms import ways_of

BAD = [jnp.inf, -jnp.inf, jnp.nan]
STANDS = {"a": np.full(3, -0.0, np.float32), "b": np.full(1, -0.0, np.float32)}  # the updates of a skipped step


def params():
    return {"a": jnp.array([1.0, -0.0, 0.0]), "b": jnp.array([2.0])}


def grads(value=1.0, *, bad=None):
    new = {"a": jnp.full(3, value), "b": jnp.full(1, value)}
    return new if bad is None else new | {"b": jnp.array([bad])}


def run(tx, state, sequence, **extra):
    """Updates and states of one step after another, from the same params."""
    out = []
    for g in sequence:
        updates, state = tx.update(g, state, params(), **extra)
        out.append((updates, state))
    return out


# the skip


@pytest.mark.parametrize(
    ("bad", "loss_scale"),
    [(jnp.inf, None), (-jnp.inf, 8.0), (jnp.nan, jaxmp.DynamicLossScale(8.0))],
    ids=["inf, no scale", "-inf, static scale", "nan, dynamic scale"],
)
def test_a_skip_changes_nothing_but_the_scale_and_counters(bad, loss_scale):
    """Updates are -0.0, and params keep the sign of -0.0."""
    tx = jaxmp.unscale_and_skip(optax.adam(0.1), loss_scale)
    ((_, state),) = run(tx, tx.init(params()), [grads()])
    ((updates, after),) = run(tx, state, [grads(bad=bad)])
    assert_exact(updates, STANDS)
    assert_moved(optax.apply_updates(params(), updates), params())
    assert_moved(regimes.guarded(after), regimes.guarded(state))
    assert bool(after.skipped) and int(after.skipped_steps) == 1


def test_gradients_are_unscaled_in_float32():
    """fp16 gradients of a scale of 65536: 2^-24 (fp16's smallest) comes out as 2^-40, which fp16 does not hold."""
    seen = {}
    probe = optax.stateless(lambda updates, _: seen.update(updates) or updates)
    tx = jaxmp.unscale_and_skip(probe, 65536.0)
    tx.update({"w": jnp.array([2.0**-24, 1.0], jnp.float16)}, tx.init({"w": jnp.zeros(2)}), {"w": jnp.zeros(2)})
    assert_exact(seen, {"w": jnp.array([2.0**-40, 2.0**-16])})


def test_counters():
    """They stop at their end."""
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0))
    good, bad = grads(), grads(bad=jnp.nan)
    states = [state for _, state in run(tx, tx.init(params()), [good, bad, bad, good, bad])]
    assert [bool(s.skipped) for s in states] == [False, True, True, False, True]
    assert [int(s.skipped_steps) for s in states] == [0, 1, 2, 2, 3]
    assert [int(s.consecutive_skips) for s in states] == [0, 1, 2, 0, 1]
    last = states[-1]
    assert (last.skipped.dtype, last.skipped_steps.dtype, last.consecutive_skips.dtype) == (bool, jnp.int32, jnp.int32)
    largest = jnp.int32(2**31 - 1)
    ((_, state),) = run(tx, last._replace(skipped_steps=largest, consecutive_skips=largest), [bad])
    assert int(state.skipped_steps) == int(state.consecutive_skips) == 2**31 - 1


@pytest.mark.parametrize("loss_scale", [None, 4.0], ids=["no_scale", "static_scale"])
def test_skip_nonfinite_false_takes_the_step(loss_scale):
    """It still unscales, and what is not finite enters the update and the state."""
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0, momentum=0.5), loss_scale, skip_nonfinite=False)
    ((updates, state),) = run(tx, tx.init(params()), [grads(2.0 * (loss_scale or 1.0), bad=jnp.nan)])
    assert not bool(state.skipped)
    assert_exact(updates["a"], jnp.full(3, -2.0))
    assert np.isnan(updates["b"]).all() and np.isnan(optax.tree.get(state, "trace")["b"]).all()


@pytest.mark.parametrize(("loss_scale", "sign"), [(None, 1), (4.0, -1)], ids=["no_scale", "static_scale, negative"])
def test_a_gradient_of_2_to_the_48_skips(loss_scale, sign):
    """Once it is unscaled. Below, its square is finite, and no inf enters the state."""
    tx, scale = jaxmp.unscale_and_skip(optax.adam(0.1), loss_scale), loss_scale or 1.0
    ((_, state),) = run(tx, tx.init(params()), [grads(scale)])
    below = sign * scale * float(np.nextafter(np.float32(2.0**48), np.float32(0)))
    ((updates, after),) = run(tx, state, [grads(scale, bad=below)])
    assert not bool(after.skipped)
    assert_close(optax.tree.get(after, "nu")["b"], jnp.array([0.001 * 2.0**96]), rtol=1e-5)
    assert bool(jaxmp.all_finite((updates, regimes.guarded(after))))
    ((_, after),) = run(tx, state, [grads(scale, bad=sign * scale * 2.0**48)])
    assert bool(after.skipped)
    assert_moved(regimes.guarded(after), regimes.guarded(state))


# a reason of one's own


def is_spike(unscaled, metrics):
    """Gradients above twice a limit."""
    del metrics
    return jaxmp.global_norm(unscaled) > 100.0


def test_skip_if_skips_without_lowering_the_scale():
    """A spike is skipped like an overflow, and for the loss scale it is a good step: it counts towards growth."""
    scaler = jaxmp.DynamicLossScale(4.0, growth_interval=2, hysteresis=1)
    tx = jaxmp.unscale_and_skip(optax.adam(0.1), scaler, skip_if=is_spike)
    ((_, state),) = run(tx, tx.init(params()), [grads(4.0)])
    ((updates, after),) = run(tx, state, [grads(4000.0)])
    assert bool(after.skipped) and int(after.consecutive_skips) == 1
    assert_exact(updates, STANDS)
    assert_moved(regimes.guarded(after), regimes.guarded(state))
    assert float(jaxmp.get_loss_scale(after)) == 8.0  # the second good step in a row
    ((_, after),) = run(tx, after, [grads(bad=jnp.inf)])
    assert float(jaxmp.get_loss_scale(after)) == 4.0


def test_skip_if_sees_unscaled_gradients_the_metrics_before_the_step_and_the_loss():
    seen = []

    def skip_if(unscaled, metrics):
        seen.append((unscaled, metrics))
        return metrics["loss"] > 10 if "loss" in metrics else False  # a Python bool will do

    tx = jaxmp.unscale_and_skip(optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(1.0)), 4.0, skip_if=skip_if)
    (_, (_, state)) = run(tx, tx.init(params()), [grads(8.0), grads(12.0)])
    assert not bool(state.skipped)
    (first, before), (second, between) = seen
    assert_exact((first, second), (grads(2.0), grads(3.0)))
    assert_close((before["grad_norm"], between["grad_norm"]), (0.0, 4.0))  # of the step before: two, four times squared
    skipped = [tx.update(grads(), state, params(), value=x)[1].skipped for x in (10.0, 11.0)]
    assert_exact(skipped, [np.bool_(False), np.bool_(True)])
    assert [set(metrics) - METRICS for _, metrics in seen] == [set(), set(), {"loss"}, {"loss"}]


@functools.cache
def adam_with_a_scale():
    tx = jaxmp.unscale_and_skip(optax.adam(0.1), jaxmp.DynamicLossScale(8.0, hysteresis=1))
    return tx.init(params()), jax.jit(tx.update)


@pytest.mark.parametrize("loss", [*BAD, 3.0], ids=["inf", "-inf", "nan", "finite"])
def test_a_loss_that_is_not_finite_skips_without_lowering_the_scale(loss):
    state, update = adam_with_a_scale()
    _, after = update(grads(), state, params(), value=jnp.float32(loss))
    assert bool(after.skipped) == (not np.isfinite(loss))
    assert_close(jaxmp.get_loss_scale(after), 8.0)
    assert int(after.scaling.growth_count) == 1
    if not np.isfinite(loss):
        assert_moved(regimes.guarded(after), regimes.guarded(state))
    _, after = update(grads(bad=jnp.nan), state, params(), value=jnp.float32(loss))  # overflow lowers it as ever
    assert bool(after.skipped)
    assert_close(jaxmp.get_loss_scale(after), 4.0)


@pytest.mark.parametrize("adamw", [optax.adamw, jaxmp.fused_adamw], ids=["optax", "fused"])
def test_the_loss_of_one_device_skips_on_all(adamw):
    tx, own = jaxmp.mixed_precision(adamw(0.1), "bf16"), P(regimes.AXIS)
    tree = {"w": jnp.ones(2, jnp.bfloat16)}

    def step(state, loss):
        return jaxmp.apply_gradients(tx, tree, state, tree, value=loss[0])[1].skipped[None]

    spread = jax.jit(
        jax.shard_map(step, mesh=regimes.mesh_of(devices=4), in_specs=(P(), own), out_specs=own, check_vma=False)
    )
    assert_exact(spread(tx.init(tree), np.float32([0, 1, 2, 3])), np.full(4, False))
    assert_exact(spread(tx.init(tree), np.float32([1, 2, np.inf, 3])), np.full(4, True))


@pytest.mark.parametrize("known", [{"grads_finite": jnp.bool_(True)}, {}], ids=["known", "off"])
def test_who_checks_nothing_does_not_check_the_loss(known):
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), skip_nonfinite=bool(known))
    _, after = tx.update(grads(), tx.init(params()), params(), value=jnp.inf, **known)
    assert not bool(after.skipped)


def test_skip_if_on_one_device_skips_on_all():
    """The spike is in the second device's own data; both stand still and agree."""
    devices = jax.devices()[:2]
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), skip_if=is_spike)
    step = jax.pmap(lambda g, s, p: tx.update(g, s, p), axis_name="data", devices=devices, in_axes=(0, None, None))
    ordinary_and_spike = jax.tree.map(lambda x: jnp.stack([x, 1000 * x]), grads())
    updates, state = step(ordinary_and_spike, tx.init(params()), params())
    assert np.asarray(state.skipped).tolist() == [True, True]
    assert_exact(updates, jax.tree.map(lambda p: jnp.full((2, *p.shape), -0.0), params()))
    updates, state = step(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), grads()), tx.init(params()), params())
    assert np.asarray(state.skipped).tolist() == [False, False]


# overrides and what is handed on


def test_loss_scale_override_unscales_with_it_and_leaves_the_own_scale_alone():
    inner, seen = probe()
    tx = jaxmp.unscale_and_skip(inner, jaxmp.DynamicLossScale(4.0, growth_interval=1, hysteresis=1))
    state = tx.init(params())
    ((updates, after),) = run(tx, state, [grads(64.0)], loss_scale=jnp.float32(32.0))
    assert_exact(updates, grads(2.0))
    assert float(seen[0]["loss_scale"]) == float(seen[0]["next_loss_scale"]) == 32.0
    assert_moved(after.scaling, state.scaling)
    ((_, after),) = run(tx, after, [grads(bad=jnp.inf)], loss_scale=jnp.float32(32.0))
    assert bool(after.skipped)  # it still looks
    assert_moved(after.scaling, state.scaling)


def test_grads_finite_override_is_trusted():
    """False skips finite gradients and lowers the own scale; True takes the step without a look."""
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), jaxmp.DynamicLossScale(4.0, hysteresis=1))
    ((updates, state),) = run(tx, tx.init(params()), [grads(4.0)], grads_finite=jnp.array(False))
    assert bool(state.skipped) and float(jaxmp.get_loss_scale(state)) == 2.0
    assert_exact(updates, STANDS)
    ((updates, state),) = run(tx, state, [grads(4.0, bad=jnp.inf)], grads_finite=jnp.array(True))
    assert not bool(state.skipped) and float(jaxmp.get_loss_scale(state)) == 2.0
    assert_exact(updates, {"a": jnp.full(3, -2.0), "b": jnp.array([-jnp.inf])})


def probe():
    """An inner transform that keeps a list of the extra arguments it is handed."""
    seen = []

    def update(updates, state, params=None, **extra_args):
        del params
        seen.append(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), seen


def test_extra_arguments_for_the_inner_transform():
    """The flag of this step, the scale that scaled it, and the scale of the next, beside the user's own.

    On a CPU the inner transform does not run in a step that is skipped.
    """
    inner, seen = probe()
    tx = jaxmp.unscale_and_skip(inner, jaxmp.DynamicLossScale(4.0, growth_interval=1, hysteresis=1))
    run(tx, tx.init(params()), [grads(), grads(bad=jnp.nan), grads()], value=3.0)
    for found, scale in zip(seen, (4.0, 4.0), strict=True):
        assert_exact(
            {k: found[k] for k in ("grads_finite", "loss_scale", "next_loss_scale")},
            {"grads_finite": jnp.array(True), "loss_scale": jnp.float32(scale), "next_loss_scale": jnp.float32(8.0)},
        )
        assert found["value"] == 3.0


# looking on from outside

METRICS = set(
    "loss_scale skipped skipped_steps consecutive_skips growth_count hysteresis_left pinned_overflows unscaled_fp16 "
    "saturated_params stale_masters largest_gradient grad_norm zero_grads "
    "fp8/min_scale fp8/max_scale fp8/max_amax fp8/saturated fp8/unused fp8/lost_gradients fp8/spoiled".split()
)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(1.0),
        optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.adam(0.1)),
        jaxmp.unscale_and_skip(optax.sgd(1.0)),
        jaxmp.mixed_precision(optax.sgd(1.0), "bf16", loss_scale=2.0),
        jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.sgd(1.0)), "fp16"),
        jaxmp.mixed_precision(optax.sgd(1.0), "fp32", before=jaxmp.reduce_gradients()),
    ],
    ids=["optax", "parts", "no_scale", "bf16", "everything", "before"],
)
def test_metrics_have_the_same_keys_for_every_chain(tx):
    metrics = jaxmp.get_metrics(tx.init({"w": jnp.ones(2)}))
    assert set(metrics) == METRICS
    assert all(x.shape == () for x in metrics.values())
    assert metrics["skipped"].dtype == metrics["unscaled_fp16"].dtype == bool
    assert metrics["loss_scale"].dtype == jnp.float32


def test_metrics_of_a_whole_chain():
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.sgd(1.0))
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=jaxmp.DynamicLossScale(2.0, growth_interval=5))
    params16 = {"w": jnp.zeros(4, jnp.float16)}
    state, update = tx.init(params16), jax.jit(tx.update)
    _, state = update({"w": jnp.array([6.0, 8.0, 0.0, -0.0], jnp.float16)}, state, params16)
    expected = {"loss_scale": 2.0, "grad_norm": 5.0, "zero_grads": 2.0, "growth_count": 1, "hysteresis_left": 2}
    metrics = jaxmp.get_metrics(state)
    assert_close({k: metrics[k] for k in expected}, expected)
    _, state = update({"w": jnp.full(4, jnp.nan, jnp.float16)}, state, params16)
    metrics = jaxmp.get_metrics(state)
    expected |= {"growth_count": 0, "hysteresis_left": 1, "skipped": True, "skipped_steps": 1, "consecutive_skips": 1}
    assert_close({k: metrics[k] for k in expected}, expected)  # the norm is that of the last step taken


def test_metrics_are_nan_where_not_computed():
    metrics = jaxmp.get_metrics(optax.sgd(1.0).init({"w": jnp.ones(1)}))
    assert float(metrics["loss_scale"]) == 1.0 and not bool(metrics["skipped"])
    for name in METRICS - {"loss_scale", "skipped", "unscaled_fp16"}:
        assert np.isnan(metrics[name]), name


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_the_largest_gradient_of_the_last_step_taken(policy):
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy, loss_scale=8.0)
    tree = jaxmp.get_policy(policy).cast_to_param(
        {"a": jnp.zeros((3, 5)), "b": jnp.zeros(7), "none": jnp.zeros((0, 2))}
    )
    step, state, seen = jax.jit(functools.partial(jaxmp.apply_gradients, tx)), tx.init(tree), []
    for value in (-24.0, jnp.inf, jnp.nan, 4.0):
        last = np.array([0, 0, 0, 0, 0, 0, value], tree["b"].dtype)
        _, state = step(tree | {"b": last}, state, tree)
        seen.append(jaxmp.get_metrics(state)["largest_gradient"])
    assert_exact(seen, [np.float32(x) for x in (3.0, 3.0, 3.0, 0.5)])


@pytest.mark.parametrize("checked", [True, False])
def test_the_largest_gradient_is_that_of_any_device(checked):
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0))
    mesh, tree = regimes.mesh_of(devices=4), {"w": jnp.zeros(2)}

    def step(grads, state):
        return jaxmp.get_metrics(tx.update(grads, state, tree)[1])["largest_gradient"][None]

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(P(regimes.AXIS), P()), out_specs=P(regimes.AXIS), check_vma=checked
    )
    found = jax.jit(spread)({"w": jnp.array([1.0, 2.0, -5.0, 0.0, 3.0, 0.0, 0.0, 4.0])}, tx.init(tree))
    assert_exact(found, np.full(4, 5.0, np.float32))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", ["gpu", "fused", "known", "masters alone"])
def test_the_largest_gradient_is_nan_where_nothing_looks_for_it(kind):
    inner = jaxmp.fused_sgd(1.0) if kind == "fused" else optax.sgd(1.0)
    tx = (jaxmp.keep_master_params if kind == "masters alone" else jaxmp.mixed_precision)(inner, "bf16")
    tree = {"w": jnp.ones(2, jnp.bfloat16)}
    known = {"grads_finite": jnp.bool_(True)} if kind == "known" else {}
    with ways_of("cuda" if kind == "gpu" else "cpu"):
        _, state = jax.jit(functools.partial(jaxmp.apply_gradients, tx))(tree, tx.init(tree), tree, **known)
    assert np.isnan(jaxmp.get_metrics(state)["largest_gradient"])
    assert all(np.all(np.isfinite(x.astype(np.float32))) for x in jax.tree.leaves(state))


def test_keep_if_skipped_selects_bit_for_bit():
    """Statistics of BatchNorm with inf, an EMA with -0.0, integer counters and keys; bound axes or not."""
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0))
    old = {"mean": jnp.array([-0.0, 1.0]), "count": jnp.int32(3), "key": jax.random.key(0), "half": jnp.float16(1.5)}
    new = {"mean": jnp.array([0.0, jnp.inf]), "count": jnp.int32(4), "key": jax.random.key(1), "half": jnp.float16(2)}
    ((_, taken),) = run(tx, tx.init(params()), [grads()])
    assert_moved(jaxmp.keep_if_skipped(taken, new, old), new)
    ((_, skipped),) = run(tx, taken, [grads(bad=jnp.nan)])
    assert_moved(jaxmp.keep_if_skipped(skipped, new, old), old)
    assert_moved(jax.jit(jaxmp.keep_if_skipped)(skipped, new, old), old)
    assert_moved(jaxmp.keep_if_skipped(optax.sgd(1.0).init(params()), new, old), new)  # a plain optimizer skips nothing


def test_look_ups_find_their_state_wherever_it_lies():
    """Inside chains, `masked`, `multi_transform`, hyperparameter state and MultiSteps."""
    tx = jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(1.0)), "fp16", loss_scale=32.0)
    tree = {"w": jnp.ones(2)}
    for outer in (
        optax.chain(optax.identity(), tx),
        optax.named_chain(("a", optax.identity()), ("b", tx)),
        optax.masked(tx, {"w": True}),
        optax.multi_transform({"x": tx}, {"w": "x"}),
        optax.MultiSteps(tx, 2).gradient_transformation(),
        optax.inject_hyperparams(lambda unused: tx)(unused=1.0),
    ):
        state = outer.init(tree)
        assert_close(jaxmp.get_loss_scale(state), 32.0)
        assert_close(jaxmp.get_metrics(state)["grad_norm"], 0.0)
        assert_moved(jaxmp.get_master_params(state, {"w": jnp.ones(2, jnp.float16)}), tree)


def test_a_state_restored_into_an_optimizer_without_a_scale_is_unscaled_by_its_own():
    """value_and_grad scales by what the state holds, so the update must divide by that, not by 1."""
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16")
    state = tx.init(params)
    restored = state._replace(scaling=state.scaling._replace(loss_scale=jnp.float32(8.0)))

    def loss_fn(p):
        return jnp.sum(p["w"].astype(jnp.float32)) * 0.25

    _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=restored)
    params, restored = jaxmp.apply_gradients(tx, grads, restored, params)
    assert params["w"].tolist() == [0.75, 0.75]
    assert float(jaxmp.get_loss_scale(restored)) == 8.0


# clamp_inf


def clamping(inner, loss_scale, **options):
    return jaxmp.unscale_and_skip(inner, loss_scale, clamp_inf=jnp.float16, **options)


def test_an_infinite_gradient_counts_as_the_largest_float16():
    """Divided by the scale, in whatever dtype it arrives (a mean over devices is float32); finite ones stay."""
    tx = clamping(optax.identity(), jaxmp.DynamicLossScale(8.0, hysteresis=1))
    g = {"a": np.array([np.inf, 1.0, -np.inf], np.float16), "b": np.float32([np.inf])}
    updates, state = tx.update(g, tx.init(params()), params())
    assert_exact(updates, {"a": np.float32([65504 / 8, 1 / 8, -65504 / 8]), "b": np.float32([65504 / 8])})
    assert not bool(state.skipped) and int(state.skipped_steps) == 0
    assert float(jaxmp.get_loss_scale(state)) == 4.0  # which backs off as for a skip
    assert int(state.scaling.growth_count) == 0
    large = {"a": np.full(3, 1e6, np.float32), "b": np.float32([-0.0])}  # beyond float16, in float32: no overflow
    updates, state = tx.update(large, state, params())
    assert_exact(updates, {"a": np.full(3, 1e6 / 4, np.float32), "b": np.float32([-0.0])})
    assert float(jaxmp.get_loss_scale(state)) == 4.0 and int(state.scaling.growth_count) == 1


def test_a_nan_beside_an_infinity_skips_also_with_a_reason_of_ones_own():
    scaler = jaxmp.DynamicLossScale(8.0, hysteresis=1)
    tx = clamping(optax.adam(0.1), scaler, skip_if=lambda grads, metrics: jnp.array(False))
    first = tx.init(params())
    g = {"a": jnp.array([jnp.inf, 1.0, 1.0]), "b": jnp.array([jnp.nan])}
    updates, state = tx.update(g, first, params())
    assert_exact(updates, STANDS)
    assert_moved(regimes.guarded(state), regimes.guarded(first))
    assert bool(state.skipped) and float(jaxmp.get_loss_scale(state)) == 4.0


def test_the_limit_is_that_of_the_narrower_dtype():
    tx = jaxmp.unscale_and_skip(optax.identity(), None, clamp_inf=jnp.float32)
    g = jnp.array([jnp.inf], jnp.float16)
    assert_exact(tx.update(g, tx.init(g), g)[0], jnp.array([65504.0]))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("how", "bad"), [("pmap", jnp.inf), ("shard_map", jnp.nan), ("shard_map_unchecked", jnp.inf)], ids=str
)
def test_devices_agree_on_what_was_clamped_and_what_is_skipped(how, bad):
    """One device has the infinity (params are split: its own gradient): the scale backs off on all, none skips."""
    n = regimes.DEVICES
    tx = clamping(optax.sgd(1.0), jaxmp.DynamicLossScale(8.0, hysteresis=1))
    g = jnp.ones((n, 2)).at[1, 0].set(bad)
    state = tx.init(jnp.ones((1, 2)))

    def step(g, p):
        updates, new = tx.update(g, state, p)
        return updates, jnp.stack([new.scaling.loss_scale, new.skipped.astype(jnp.float32)])[None]

    p = jnp.ones((n, 2))
    if how == "pmap":
        updates, seen = jax.pmap(step, regimes.AXIS, devices=jax.devices()[:n])(g[:, None], p[:, None])
        updates, seen = updates[:, 0], seen[:, 0]
    else:
        spec = P(regimes.AXIS)
        spread = jax.shard_map(
            step, mesh=regimes.mesh_of(), in_specs=spec, out_specs=spec, check_vma=how == "shard_map"
        )
        updates, seen = jax.jit(spread)(g, p)
    skips = bool(jnp.isnan(bad))
    assert_exact(np.asarray(seen), np.tile(np.float32([4.0, skips]), (n, 1)))
    expected = np.full((n, 2), -0.0 if skips else -1 / 8, np.float32)
    expected[1, 0] = -0.0 if skips else -65504 / 8
    assert_exact(np.asarray(updates), expected)


def test_clamped_steps_of_mixed_precision_in_both_ways_of_writing():
    policy = jaxmp.get_policy("fp16")
    for inner in (optax.sgd(2.0**-14), jaxmp.fused_sgd(2.0**-14)):
        tx = jaxmp.mixed_precision(inner, policy, loss_scale=4.0, clamp_inf=jnp.float16)
        p = {"w": jnp.ones(2, jnp.float16)}
        state = tx.init(p)
        new, after = jaxmp.apply_gradients(tx, {"w": jnp.array([jnp.inf, 0.0], jnp.float16)}, state, p)
        assert_exact(new, {"w": jnp.array([1 - 65504 / 4 / 2**14, 1.0]).astype(jnp.float16)})
        assert not bool(after.skipped)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def test_an_infinite_amax_of_fp8_is_no_gradient_to_clamp():
    tx = jaxmp.mixed_precision(
        optax.sgd(1.0), "fp16", loss_scale=4.0, recipe=jaxmp.fp8.DelayedScaling(), clamp_inf=jnp.float16
    )
    name = "fp8_lhs_e4m3_log2_scale"
    p = {"w": jnp.ones(2, jnp.float16), name: jnp.zeros(())}
    _, state = tx.update({"w": jnp.ones(2, jnp.float16), name: jnp.float32(jnp.inf)}, tx.init(p), p)
    assert bool(state.skipped)


@pytest.mark.parametrize("wrong", [65504.0, jnp.int32], ids=["number", "int32"])
def test_clamp_inf_wants_a_float_dtype(wrong):
    with pytest.raises(TypeError, match="clamp_inf must be a float dtype such as jnp.float16"):
        jaxmp.unscale_and_skip(optax.sgd(0.1), 4.0, clamp_inf=wrong)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["apply_gradients", "update", "reduced before", "unscaled by the caller"])
def test_a_line_search_gets_the_unscaled_gradient(how):
    """optax's line searches take the gradient as the extra argument `grad=`, and compare slopes with it."""

    def move(updates, state, params=None, *, grad, **extra_args):
        return jax.tree.map(lambda g: -g, grad), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), move)
    before = optax.stateless(lambda g, _: jax.tree.map(lambda x: x * 1.0, g)) if "before" in how else None
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=1024.0, before=before)
    params32 = {"w": jnp.array([2.0, 3.0])}
    params, state = {"w": params32["w"].astype(jnp.float16)}, tx.init(params32)

    def step(params, state):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"].astype(jnp.float32) ** 2))(params, opt_state=state)
        by_hand = jax.tree.map(lambda g: g.astype(jnp.float32) / 1024.0, grads)
        grad = by_hand if "caller" in how else grads
        if how == "update":
            updates, _ = tx.update(grads, state, params, grad=grad)
            return optax.apply_updates(params, updates)
        return jaxmp.apply_gradients(tx, grads, state, params, grad=grad)[0]

    assert_exact(jax.jit(step)(params, state), {"w": np.array([-2.0, -3.0], np.float16)})


def test_one_inside_another_is_refused_at_init():
    inner = jaxmp.mixed_precision(optax.sgd(0.1), "fp16")
    params = {"w": jnp.ones((2, 2))}
    for tx in (
        jaxmp.mixed_precision(inner, "fp16"),
        jaxmp.unscale_and_skip(optax.chain(optax.identity(), inner)),
        jaxmp.mixed_precision(optax.MultiSteps(inner, 2), "bf16"),
    ):
        with pytest.raises(ValueError, match="must stand once around an optimizer"):
            tx.init(params)


@pytest.mark.parametrize(
    ("reason", "got"),
    [(jnp.ones(3, bool), r"bool\[3\]"), (0.5, r"float64\[\]"), (jnp.float32(0.5), r"float32\[\]"), (None, "object")],
    ids=["flags", "a number", "an array", "None"],
)
def test_a_reason_to_skip_is_one_bool(reason, got):
    """A number skipped each step where it is not 0."""
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), skip_if=lambda grads, metrics: reason)
    with pytest.raises(TypeError, match=f"skip_if.* must return one bool.*; got {got}"):
        tx.update(grads(), tx.init(params()), params())


@pytest.mark.parametrize("reason", [True, np.True_, jnp.array(True)], ids=["Python", "NumPy", "jax"])
def test_any_kind_of_bool_is_a_reason(reason):
    tx = jaxmp.unscale_and_skip(optax.sgd(1.0), skip_if=lambda grads, metrics: reason)
    assert bool(tx.update(grads(), tx.init(params()), params())[1].skipped)


def test_an_ensemble_over_explicit_axes_steps_member_by_member():
    mesh = jax.make_mesh((2,), ("member",), axis_types=(jax.sharding.AxisType.Explicit,))
    tx = jaxmp.mixed_precision(optax.sgd(0.5), "bf16")
    params = {"w": jnp.ones((2, 4), jnp.bfloat16)}
    state = {"w": np.float32([[1.0] * 4, [np.inf] * 4])}, jax.vmap(tx.init)(params), params
    split = jax.device_put(state, jax.sharding.NamedSharding(mesh, P("member")))
    with jax.set_mesh(mesh):
        new, opt_state = jax.jit(jax.vmap(functools.partial(jaxmp.apply_gradients, tx)))(*split)
    assert new["w"].astype(jnp.float32).tolist() == [[0.5] * 4, [1.0] * 4]
    assert jaxmp.get_metrics(opt_state)["skipped"].tolist() == [False, True]
