"""What breaks at the peers, each in the very situation in which it breaks: theirs fails, ours does not.

Where the peer is installed (jmp, flax, optax) its own recipe is run and shown to fail; a recipe of a peer that is not
(mpx, Keras, DeepSpeed, MaxText) is written out. Moments and masters of plain optax are in test_master_params.py.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.loss_scale import static

INF, NAN = float("inf"), float("nan")


def half(*values):
    return np.array(values, np.float16)


def all_finite(tree):
    return all(np.all(np.isfinite(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))


def product(p, x):
    """A float32 loss whose gradient with respect to `p` is `x`."""
    return jnp.sum(p * x).astype(jnp.float32)


def after_each(tx, params, gradients):
    """(params, loss scale) after each of some gradients, through the public chain."""
    state, seen = tx.init(params), []
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    for g in gradients:
        params, state = step(np.full(params.shape, g, params.dtype), state, params)
        seen.append((float(params[0]), float(jaxmp.get_loss_scale(state))))
    return *zip(*seen, strict=True), state


def scales_after(loss_scale, gradients):
    tx = jaxmp.mixed_precision(optax.sgd(0.0), "fp16", loss_scale=loss_scale)
    return list(after_each(tx, half(1.0), gradients)[1])


# jmp


def test_jmp_loses_its_floor_in_a_pytree_round_trip():
    make = functools.partial(jmp.DynamicLossScale, np.float32(8.0), min_loss_scale=np.float32(8.0))
    theirs, scales = make(), []
    adjust = jax.jit(lambda scaler: scaler.adjust(jnp.array(False)))
    for _ in range(3):
        theirs = adjust(theirs)
        scales.append(float(theirs.loss_scale))
    assert scales == [8.0, 4.0, 2.0] or scales == [4.0, 2.0, 1.0]  # the peer
    for ours in (make(), jaxmp.DynamicLossScale(8.0, min_scale=8.0, hysteresis=1)):
        assert scales_after(ours, [INF] * 3) == [8.0] * 3


def test_jmp_fails_on_overflow_with_the_scale_of_its_readme():
    readme = jmp.DynamicLossScale(jnp.float16(2.0**15))
    with pytest.raises(TypeError, match="select"):
        readme.adjust(jnp.array(False))  # the peer
    assert scales_after(readme, [1.0, INF]) == [2.0**15, 2.0**14]
    state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=readme).init(half(1.0))
    assert_exact(jaxmp.get_loss_scale(state), np.float32(2.0**15))


def test_jmp_selects_params_only_and_adam_is_poisoned():
    """README's recipe: the optimizer has run on inf, so that the next good step makes NaN of the params."""
    adam, params = optax.adam(0.1), np.ones(1, np.float32)
    state = adam.init(params)

    @jax.jit
    def theirs(params, state, grads):
        updates, state = adam.update(grads, state, params)
        return jmp.select_tree(jmp.all_finite(grads), optax.apply_updates(params, updates), params), state

    for g in (INF, 1.0):
        params, state = theirs(params, state, np.float32([g]))
    assert np.isnan(params).all()  # the peer
    tx = jaxmp.mixed_precision(adam, "fp16", loss_scale=1.0)
    params, _, state = after_each(tx, half(1.0), (INF, 1.0))
    assert params[1] == pytest.approx(0.9, abs=1e-3)
    assert int(optax.tree.get(state, "count")) == 1


def test_jmp_retraces_for_each_value_of_a_static_scale():
    def traces_of(make, scale_of):
        traces = []

        @jax.jit
        def scaled(scaler):
            traces.append(scaler)
            return scale_of(scaler)

        for value in (2.0, 4.0, 8.0):
            scaled(make(value))
        return len(traces)

    def state_of(value):
        return jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=value).init(half(1.0))

    assert traces_of(jmp.StaticLossScale, lambda s: s.scale(jnp.ones(()))) == 3  # the peer; no array: not hashable
    assert traces_of(static.StaticLossScale, lambda s: s.scale(jnp.ones(()))) == 1
    assert traces_of(state_of, jaxmp.get_loss_scale) == 1


# flax's DynamicScale


def test_flax_overflows_on_the_first_step_of_its_own_example():
    """Its scale is a weakly typed 65536, which becomes a float16 inf beside a float16 loss; in silence."""

    def half_loss(p):
        return jnp.asarray(p, jnp.float16) ** 2

    p = jnp.array(1.0)
    _, finite, loss, _ = jax.jit(lambda scale, p: scale.value_and_grad(half_loss)(p))(DynamicScale(), p)
    assert not bool(finite) and not np.isfinite(loss)  # the peer
    state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16").init(p)
    with pytest.warns(UserWarning, match="float16"):  # ours says so, and still returns the loss
        loss, _ = jaxmp.value_and_grad(half_loss)(p, opt_state=state)
    assert_close(loss, 1.0)
    loss, grads = jaxmp.value_and_grad(lambda p: half_loss(p).astype(jnp.float32) / 4)(p, opt_state=state)
    assert_close((loss, grads), (0.25, 65536.0 / 2))


def test_flax_grows_one_step_late():
    scale, theirs = DynamicScale(growth_interval=2, scale=jnp.float32(8.0)), []
    for _ in range(4):
        scale = scale.value_and_grad(lambda p: p)(1.0).dynamic_scale
        theirs.append(float(scale.scale))
    assert theirs == [8.0, 8.0, 16.0, 16.0]  # the peer
    assert scales_after(jaxmp.DynamicLossScale(8.0, growth_interval=2), [1.0] * 4) == [8.0, 16.0, 16.0, 32.0]


def test_flax_stands_still_in_silence_after_many_overflows():
    """200 NaN steps: flax's scale is 1e-38, at which the gradient of the next good step is 0 and counts as finite."""
    scale, params = DynamicScale(scale=jnp.float32(65536.0)), half(1.0)
    backward = jax.jit(lambda scale, p, x: scale.value_and_grad(product)(p, x))
    for _ in range(200):
        scale = backward(scale, params, half(NAN)).dynamic_scale
    good = backward(scale, params, half(1.0))
    assert bool(good.finite) and float(good.grad[0]) == 0.0 and float(scale.scale) < 1e-37  # the peer

    tx = jaxmp.mixed_precision(optax.sgd(0.5), "fp16")
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(product)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    for _ in range(200):
        params, state = step(params, state, half(NAN))
    assert_close(jaxmp.get_loss_scale(state), 1.0)
    with pytest.raises(jaxmp.TrainingStuck):
        jaxmp.check_progress(state)
    params, state = step(params, state, half(1.0))
    assert_exact(params, half(0.5))


def test_flax_diverges_under_pmap_without_an_axis_name():
    """One device overflows: flax skips there alone, and from then on scales and params differ."""
    x = np.array([[1.0], [INF]], np.float16)
    on_two = functools.partial(jax.pmap, devices=jax.devices()[:2], in_axes=(None, None, 0), axis_name="data")

    @on_two
    def theirs(scale, p, x):
        scale, finite, _, grad = scale.value_and_grad(product)(p, x)
        return scale.scale, jnp.where(finite, p - grad.astype(p.dtype), p)

    scales, params = map(np.asarray, theirs(DynamicScale(scale=jnp.float32(8.0)), half(1.0), x))
    assert scales[0] != scales[1] and params[0] != params[1]  # the peer

    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=jaxmp.DynamicLossScale(8.0, hysteresis=1))

    @on_two
    def ours(p, state, x):
        _, grads = jaxmp.value_and_grad(product)(p, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, p)

    params, state = ours(half(1.0), tx.init(half(1.0)), x)
    assert_exact(params, np.ones((2, 1), np.float16))
    assert_exact(jaxmp.get_loss_scale(state), np.full(2, 4.0, np.float32))


@pytest.mark.thorough(0)
def test_flax_multiplies_gradients_by_the_devices_under_shard_map():
    """check_vma=True: autodiff has summed the gradient over the mesh before flax takes its mean."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    on_two = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=8.0).init(jnp.float32(1.0))

    def theirs(p, x):
        return DynamicScale(scale=jnp.float32(8.0)).value_and_grad(product, axis_name="data")(p, x).grad

    def ours(p, x):
        _, grads = jaxmp.value_and_grad(product)(p, x, opt_state=state)
        return jax.lax.pmean(grads, "data") / 8.0

    grads = [float(jax.jit(on_two(grad))(np.float32(1.0), np.ones(2, np.float32))) for grad in (theirs, ours)]
    assert grads == [2.0, 1.0]  # the mean of 1 and 1: the peer's, ours


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2, dtype=jnp.float16)(x)
        return nn.BatchNorm(use_running_average=False, dtype=jnp.float32)(x).astype(jnp.float32)


class FlaxState(train_state.TrainState):
    batch_stats: dict


class OurState(jaxmp.linen.TrainState):
    batch_stats: dict


@pytest.mark.thorough(0)
def test_flax_keeps_the_statistics_of_a_skipped_step():
    """inf in BatchNorm's statistics, and a `step` that moves on while the optimizer's count does not."""
    model = WithBatchNorm()
    good, bad = np.float32([[1.0] * 3, [2.0] * 3]), np.full((2, 3), 1e30, np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), good)
    sgd = optax.sgd(optax.constant_schedule(0.1))  # with a count

    def loss_fn(params, stats, x):
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean(out**2), new["batch_stats"]

    theirs = FlaxState.create(apply_fn=model.apply, tx=sgd, **variables)
    scaled = jax.jit(DynamicScale(scale=jnp.float32(8.0)).value_and_grad(loss_fn, has_aux=True))
    _, finite, (_, stats), grads = scaled(theirs.params, theirs.batch_stats, bad)
    new = theirs.apply_gradients(grads=grads, batch_stats=stats)  # flax's own ImageNet example, as follows
    keep = functools.partial(jnp.where, finite)
    theirs = new.replace(
        params=jax.tree.map(keep, new.params, theirs.params),
        opt_state=jax.tree.map(keep, new.opt_state, theirs.opt_state),
    )
    assert not bool(finite) and not all_finite(theirs.batch_stats)  # the peer
    assert theirs.step == 1 and int(theirs.opt_state[1].count) == 0  # the peer

    tx = jaxmp.mixed_precision(sgd, "fp16", loss_scale=8.0)
    ours = OurState.create(apply_fn=model.apply, tx=tx, policy="fp16", **variables)

    @jax.jit
    def step(ours, x):
        (_, stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(
            ours.params, ours.batch_stats, x, opt_state=ours.opt_state
        )
        return ours.apply_gradients(grads=grads, batch_stats=stats)

    after = step(ours, bad)
    assert_moved((after.batch_stats, after.params, after.step), (ours.batch_stats, ours.params, ours.step))
    after = step(after, good)
    assert int(after.step) == int(optax.tree.get(after.opt_state, "count")) == 1
    assert all_finite(after.batch_stats) and not np.array_equal(
        after.batch_stats["BatchNorm_0"]["mean"], ours.batch_stats["BatchNorm_0"]["mean"]
    )


class WithDropout(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


@pytest.mark.thorough(0)
def test_flax_scale_fails_on_nnx_modules_with_dropout_or_batch_norm():
    def loss_fn(model, x):
        return jnp.mean((model(x) - x) ** 2)

    x = np.float32([[1.0, 2.0], [3.0, 5.0], [4.0, 1.0]])
    model = WithDropout(nnx.Rngs(0))
    with pytest.raises(TypeError):
        DynamicScale().value_and_grad(loss_fn)(model, x)  # the peer: integer leaves of the rngs
    optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=8.0), wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, "fp16")
    before, mean = model.dense.kernel[...], model.norm.mean[...]

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jaxmp.nnx.value_and_grad(loss_fn, policy="fp16")(model, x, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)

    step(model, optimizer, x)
    assert model.dense.kernel[...].dtype == jnp.float16
    assert not np.array_equal(model.dense.kernel[...], before)
    assert not np.array_equal(model.norm.mean[...], mean)


# optax


def update_and_apply(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run_microbatches(tx, sequence, step=jaxmp.apply_gradients):
    """Params after each microbatch of scaled float16 gradients; the scale is 4."""
    params, state, values = half(1.0), tx.init(np.ones(1, np.float32)), []
    step = jax.jit(functools.partial(step, tx))
    for g in sequence:
        params, state = step(half(4 * g), state, params)
        values.append(float(params[0]))
    return values, state


NAN_MICROBATCH = [0.25, NAN, 0.5, 0.125, 0.125]  # with windows of two good ones: 1 - 0.375, then - 0.125


def mixed(inner):
    return jaxmp.mixed_precision(inner, "fp16", loss_scale=4.0)


def test_optax_multisteps_is_poisoned_for_ever_by_one_nan_microbatch():
    """0 * NaN: the accumulator is never clean again, and no update of its windows can be taken."""
    plain = optax.MultiSteps(optax.sgd(1.0), 2)
    params, state = np.ones(1, np.float32), plain.init(np.ones(1, np.float32))
    step = jax.jit(functools.partial(update_and_apply, plain))
    for g in NAN_MICROBATCH:
        params, state = step(np.float32([g]), state, params)
    assert np.isnan(params).all() and np.isnan(state.acc_grads).all()  # the peer
    outside = optax.MultiSteps(mixed(optax.sgd(1.0)), 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"around the whole optimizer; got MultiStepsState.* goes inside"):
        run_microbatches(outside, NAN_MICROBATCH)
    seen, state = run_microbatches(outside, NAN_MICROBATCH, step=update_and_apply)
    assert seen == [1.0] * 5 and int(jaxmp.get_metrics(state)["skipped_steps"]) == 2  # both windows


def test_multisteps_inside_mixed_precision_survives_a_nan_microbatch():
    """The microbatch is skipped: accumulator, counters and params stay, and the window is filled by the next."""
    seen, state = run_microbatches(mixed(optax.MultiSteps(optax.sgd(1.0), 2)), NAN_MICROBATCH)
    assert seen == [1.0, 1.0, 0.625, 0.625, 0.5]
    assert int(jaxmp.get_metrics(state)["skipped_steps"]) == 1 and all_finite(state)


def test_multisteps_outside_survives_with_skip_not_finite():
    """In the loop of plain optax; `apply_gradients` refuses it."""
    outside = optax.MultiSteps(mixed(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite)
    seen, state = run_microbatches(outside.gradient_transformation(), NAN_MICROBATCH, step=update_and_apply)
    assert seen == [1.0, 1.0, 0.625, 0.625, 0.5]
    assert all_finite(state.acc_grads)
    with pytest.raises(ValueError, match="around the whole optimizer"):
        run_microbatches(outside.gradient_transformation(), NAN_MICROBATCH)


def test_optax_multisteps_casts_its_accumulator_back_to_float16():
    """Two microbatches of 40000, summed: inf in float16, and 80000 where gradients are unscaled to float32 first."""
    plain, params = optax.MultiSteps(optax.sgd(2.0**-10), 2, use_grad_mean=False), half(100.0)
    state, update = plain.init(params), jax.jit(plain.update)
    for _ in range(2):
        updates, state = update(half(40000.0), state, params)
    assert not np.isfinite(np.asarray(updates)).any()  # the peer
    params, _, state = after_each(jaxmp.mixed_precision(plain, "fp16", loss_scale=1.0), params, [40000.0] * 2)
    assert params[1] == half(100.0 - 80000 / 1024)[0]
    assert int(jaxmp.get_metrics(state)["skipped_steps"]) == 0


def test_optax_apply_if_finite_gives_up_and_writes_nan():
    theirs = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    params = np.ones(1, np.float32)
    state, step = theirs.init(params), jax.jit(functools.partial(update_and_apply, theirs))
    for _ in range(4):
        params, state = step(np.float32([NAN]), state, params)
    assert np.isnan(params).all()  # the peer
    ours, _, state = after_each(jaxmp.mixed_precision(optax.sgd(1.0), "fp32"), np.ones(1, np.float32), [NAN] * 4)
    assert ours == (1.0,) * 4
    with pytest.raises(jaxmp.TrainingStuck):  # whether to stop is the host's choice
        jaxmp.check_progress(state, max_consecutive_skips=4)


def test_optax_apply_if_finite_is_not_synchronized():
    def moved(tx):
        params = np.ones(1, np.float32)
        update = jax.pmap(tx.update, axis_name="data", devices=jax.devices()[:2], in_axes=(0, None, None))
        updates, _ = update(np.float32([[1.0], [NAN]]), tx.init(params), params)
        return (1.0 + np.asarray(updates)[:, 0]).tolist()

    assert moved(optax.apply_if_finite(optax.sgd(0.5), 3)) == [0.5, 1.0]  # the peer
    assert moved(jaxmp.mixed_precision(optax.sgd(0.5), "fp32")) == [1.0, 1.0]


def test_flax_train_state_does_not_hand_extra_arguments_on():
    params = grads = {"w": np.ones(1, np.float32)}
    tx = optax.polyak_sgd(max_learning_rate=1.0)
    theirs = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(TypeError, match="value"):
        theirs.apply_gradients(grads=grads, value=0.25)  # the peer
    ours = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=jaxmp.mixed_precision(tx, "fp32"))
    assert_close(ours.apply_gradients(grads=grads, value=0.25).params, {"w": jnp.array([0.75])})


# mpx, DeepSpeed, Keras, MaxText


def test_mpx_and_deepspeed_unscale_with_the_new_scale():
    """On a step that grows the scale their gradient is halved; ours is the same at each step."""
    scaler, theirs = jaxmp.DynamicLossScale(8.0, growth_interval=2), []
    for _ in range(4):
        scaled_gradient = 1.0 * scaler.loss_scale
        scaler = scaler.adjust(True)  # their order: first move the scale
        theirs.append(float(scaled_gradient / scaler.loss_scale))
    assert theirs == [1.0, 0.5, 1.0, 0.5]  # the peers
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=jaxmp.DynamicLossScale(8.0, growth_interval=2))
    params, state, moves = half(64.0), tx.init(half(64.0)), []
    for _ in range(4):
        old, scale = params, jaxmp.get_loss_scale(state)
        params, state = jaxmp.apply_gradients(tx, jnp.full_like(params, scale), state, params)
        moves.append(float(old[0] - params[0]))
    assert moves == [1.0] * 4


def test_mpx_scales_the_loss_in_float16():
    """A loss of 4 at a scale of 32768: inf in float16."""
    assert np.isinf(jnp.float16(4.0) * jnp.float16(32768.0))  # the peer
    params = half(2.0)
    state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=32768.0).init(params)
    loss, grads = jaxmp.value_and_grad(lambda p: jnp.sum((p * p).astype(jnp.float32)) / 4)(params, opt_state=state)
    assert_close(loss, 1.0)
    assert_exact(grads, half(32768.0))
    loss, _ = jaxmp.value_and_grad(lambda p: jnp.sum((p * p).astype(jnp.float32)))(params, opt_state=state)
    assert_close(loss, 4.0)


def test_keras_scale_reaches_infinity_and_sticks():
    """Good steps without end: doubling ends at inf, which halving cannot leave. Ours stops at the ceiling."""
    theirs = np.float32(2.0**120)
    for _ in range(10):
        theirs = np.float32(math.inf) if theirs > 2.0**126 else theirs * np.float32(2)
    assert theirs * np.float32(0.5) == INF  # the peer
    make = functools.partial(jaxmp.DynamicLossScale, growth_interval=1, hysteresis=1)
    assert scales_after(make(), [0.0] * 40 + [INF])[-2:] == [2.0**32, 2.0**31]
    unbounded = make(2.0**120, max_scale=2.0**127)
    assert scales_after(unbounded, [0.0] * 10 + [INF])[-2:] == [2.0**127, 2.0**126]


def test_keras_scale_reaches_zero_and_the_next_clean_step_gives_nan():
    """Overflows without end: 0 / 0 at the next clean step. Ours stops at its floor, and the clean step is good."""
    theirs = np.float32(1.0)
    for _ in range(200):
        theirs = theirs * np.float32(0.5)
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.float32(0.0) * theirs / theirs)  # the peer
    tx = jaxmp.mixed_precision(optax.sgd(0.5), "fp16", loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1))
    params, scales, _ = after_each(tx, half(1.0), [INF] * 200 + [1.0])
    assert scales[-2] == 1.0 and params[-2:] == (1.0, 0.5)


def maxtext_skips(norms, window=3, factor=2.0):
    """skip_step_on_spikes: too far from the mean of a window of norms, which every step enters."""
    history, skipped = [], []
    for norm in norms:
        mean = np.mean(history[-window:]) if len(history) >= window else None
        skipped.append(mean is not None and not norm <= factor * mean)
        history.append(norm)
    return skipped


def test_maxtext_takes_a_nan_while_warming_up_and_then_skips_a_window():
    """The norm of the last step *taken* is in our metrics, so that a NaN or a spike never becomes the measure."""
    norms = [1.0, NAN, 1.0, 1.0, 1.0, 1.0, 50.0, 1.0, NAN, 1.0]
    theirs = maxtext_skips(norms)
    assert not theirs[1]  # the peer takes the NaN
    assert theirs[3:5] == [True, True] and theirs[9]  # the peer skips good steps for it

    def is_spike(grads, metrics):
        last = metrics["grad_norm"]
        return (last > 0) & (jaxmp.global_norm(grads) > 2.0 * last)

    inner = optax.chain(jaxmp.clip_by_global_norm(1e9), optax.sgd(0.125))
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=4.0, skip_if=is_spike)
    params, scales, _ = after_each(tx, half(1.0), [4 * norm for norm in norms])
    assert params == tuple(1.0 - 0.125 * np.cumsum([norm == 1.0 for norm in norms]))  # skipped where it is another
    assert scales == (4.0,) * len(norms)
