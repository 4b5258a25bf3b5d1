"""Gradients of a scaled loss: what comes back, under which transforms, on which device, and what is refused.

Numbers are small integers and powers of two wherever that makes every result exact.
"""

import contextlib
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.step import microbatches
from regimes import AXIS, guarded, mesh_of

F16, F32 = np.float16, np.float32
SCALE = 2.0**10


def state_with(scale):
    """An optimizer's state that holds this loss scale."""
    return jaxmp.unscale_and_skip(optax.identity(), scale).init(())


def params16():
    return {"w": jnp.array([1.0, -2.0], F16), "gain": jnp.array(0.5, F32)}


def loss_fn(params, x):  # x [batch, 2]
    y = (x.astype(F16) @ params["w"]).astype(F32) * params["gain"]  # [batch]
    return jnp.mean(y)


X = np.array([[1, 2], [3, -4], [5, 6], [-7, 8]], F32)
MEAN_X = X.mean(0)  # [0.5, 3]
LOSS = F32(0.5 * (0.5 - 6.0))
GRADS = {"w": 0.5 * MEAN_X, "gain": F32(0.5 - 6.0)}  # unscaled


def scaled(grads, scale, dtypes):
    return {name: np.asarray(grads[name] * scale, dtypes[name]) for name in grads}


# What comes back


def test_loss_is_unscaled_float32_and_grads_are_scaled_in_the_dtypes_of_the_params():
    loss, grads = jaxmp.value_and_grad(loss_fn)(params16(), X, opt_state=state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, SCALE, {"w": F16, "gain": F32}))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("scale", [3.0, 1e-3, 2.0**30, 2.0**100])
def test_loss_is_exact_whatever_the_scale(scale):
    """Never scaled and divided back: 0.1 * 3 / 3 is not 0.1, and 2^100 * 2^100 is inf."""

    def loss_fn(x):
        return jnp.sum(x)

    x = jnp.array([0.1, 2.0**90], F32)
    for accumulate in (1, 2):
        f = jaxmp.value_and_grad(lambda x, b: loss_fn(x) + 0 * jnp.sum(b), accumulate=accumulate)
        loss, grads = jax.jit(f)(x, jnp.ones(2), opt_state=state_with(scale))
        assert_exact(loss, np.asarray(np.sum(x)))
        assert_close(grads, np.full(2, scale, F32), rtol=2e-7)


def test_a_scale_of_65536_does_not_overflow_the_loss():
    """flax's DynamicScale multiplies a float16 loss by it: inf at the first step of its own example."""
    params = {"w": jnp.array([2.0], F16)}

    def loss_fn(params):
        return jnp.mean(params["w"].astype(F32) * 4.0**-4)

    opt_state = jaxmp.mixed_precision(optax.sgd(1.0), "fp16").init(params)
    assert_exact(jaxmp.get_loss_scale(opt_state), F32(65536.0))
    loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
    assert_exact(loss, F32(2.0**-7))
    assert_exact(grads, {"w": np.array([256.0], F16)})


def test_a_large_loss_times_the_scale_stays_finite():
    """mpx scales in float16, where 4 * 32768 is inf."""
    opt_state = state_with(2.0**15)
    w = jnp.array(4.0, F16)
    loss, grads = jaxmp.value_and_grad(lambda w: w.astype(F32) * 2.0**-3 + 4.0)(w, opt_state=opt_state)
    assert_exact((loss, grads), (F32(4.5), F16(4096.0)))


def test_a_float16_loss_is_warned_of_and_overflows_at_65536():
    w = jnp.array(2.0**-10, F16)
    with pytest.warns(
        UserWarning, match="float16.*a scale above 65504 overflows in every step. Compute the loss in float32"
    ):
        loss, grads = jaxmp.value_and_grad(lambda w: w * 1)(w, opt_state=state_with(2.0**16))
    assert_exact((loss, grads), (F32(2.0**-10), F16(np.inf)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = jaxmp.value_and_grad(lambda w: (w * 1).astype(jnp.bfloat16))(w, opt_state=state_with(2.0**16))
        assert_exact(loss, F32(2.0**-10))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux(accumulate):
    def with_aux(params, x):
        return loss_fn(params, x), {"rows": x[:, 0], "n": jnp.int32(x.shape[0])}

    f = jaxmp.value_and_grad(with_aux, has_aux=True, accumulate=accumulate)
    (loss, aux), grads = f(params16(), X, opt_state=state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, SCALE, {"w": F16 if accumulate == 1 else F32, "gain": F32}))
    if accumulate == 1:
        assert_moved(aux, {"rows": X[:, 0], "n": np.int32(4)})
    else:  # stacked, one entry per microbatch
        assert_moved(aux, {"rows": X[:, 0].reshape(2, 2), "n": np.array([2, 2], np.int32)})


@pytest.mark.thorough(2)
@pytest.mark.parametrize("argnums", [1, -1, (0, 1), (1, 0), (-1,), [0, -1]], ids=str)
def test_argnums(argnums):
    a, b = jnp.array([1.0, 2.0], F16), jnp.array([3.0, 4.0], F32)

    def f(a, b):
        return jnp.sum(a.astype(F32) * b)

    loss, grads = jaxmp.value_and_grad(f, argnums)(a, b, opt_state=state_with(2.0))
    expected = {0: np.array([6.0, 8.0], F16), 1: np.array([2.0, 4.0], F32)}
    assert_exact(loss, F32(11.0))
    if isinstance(argnums, int):
        assert_exact(grads, expected[argnums % 2])
    else:
        assert_exact(grads, tuple(expected[i % 2] for i in argnums))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_keyword_arguments_are_passed_on_whole(accumulate):
    seen = []

    def f(w, x, *, table, train):
        seen.append((table.shape, train))
        return jnp.mean(x * w) + jnp.sum(table)

    x, w = jnp.arange(4.0), jnp.array(2.0)
    loss, grads = jaxmp.value_and_grad(f, accumulate=accumulate)(
        w, x, table=jnp.ones(3), train=True, opt_state=state_with(2.0)
    )
    assert_exact((loss, grads), (F32(6.0), F32(3.0)))
    assert set(seen) == {((3,), True)}


def test_the_scale_is_found_where_it_lies():
    """In a chain, in a shared scale, and 1.0 where there is no scaling."""
    w = jnp.array(2.0, F32)
    f = jaxmp.value_and_grad(lambda w: w * 3.0)
    shared = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(8.0))
    inner = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=4.0)
    unscaled = jaxmp.mixed_precision(optax.sgd(1.0), "bf16")
    for opt_state, scale in (
        (shared.init(), 8.0),
        (optax.chain(jaxmp.reduce_gradients(), inner).init(w), 4.0),
        (unscaled.init(w), 1.0),
    ):
        assert_exact(f(w, opt_state=opt_state), (F32(6.0), F32(3.0 * scale)))


def test_the_wrapper_keeps_the_name_of_the_function():
    assert jaxmp.value_and_grad(loss_fn).__name__ == "loss_fn"


# Accumulation


@pytest.mark.parametrize("k", [2, 4])
def test_accumulation_equals_the_full_batch(k):
    loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=k)(params16(), X, opt_state=state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, SCALE, {"w": F32, "gain": F32}))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [2, 4])
def test_accumulation_of_a_network_equals_the_full_batch(k):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)).astype(F32), rng.normal(size=(8, 3)).astype(F32)
    params = {"a": jnp.asarray(rng.normal(size=(6, 5)), F16), "b": jnp.asarray(rng.normal(size=(5, 3)), F16)}

    def loss_fn(params, batch):
        out = jnp.tanh(batch["x"].astype(F16) @ params["a"]) @ params["b"]
        return jnp.mean((out.astype(F32) - batch["y"]) ** 2)

    run = functools.partial(jaxmp.value_and_grad, loss_fn)
    batch, opt_state = {"x": x, "y": y}, state_with(64.0)
    loss, grads = jax.jit(run())(params, batch, opt_state=opt_state)
    loss_k, grads_k = jax.jit(run(accumulate=k))(params, batch, opt_state=opt_state)
    assert_close(loss_k, loss, rtol=1e-6)
    assert_close(grads_k, jax.tree.map(lambda g: g.astype(F32), grads), rtol=0, atol=64 * 2.0**-10)


def test_sums_of_microbatches_are_float32():
    """Four times 32768 is inf in float16, where optax.MultiSteps keeps the sum of float16 gradients."""
    w = jnp.array([1.0], F16)

    def loss_fn(w, x):
        return jnp.mean((x * w).astype(F32))

    x = jnp.full((4,), 2.0**15, F16)
    loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=4)(w, x, opt_state=state_with(4.0))
    assert_exact((loss, grads), (F32(2.0**15), np.array([2.0**17], F32)))
    _, whole = jaxmp.value_and_grad(loss_fn)(w, x, opt_state=state_with(4.0))
    assert_exact(whole, np.array([np.inf], F16))  # the gradient of the whole batch overflows float16

    tx = jaxmp.mixed_precision(optax.sgd(2.0**-15), "fp16", loss_scale=4.0)
    opt_state = tx.init(w)
    _, grads = jaxmp.value_and_grad(loss_fn, accumulate=4)(w, x, opt_state=opt_state)
    new, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, w)
    assert_exact((new, opt_state.skipped), (np.array([0.0], F16), np.bool_(False)))


def test_small_gradients_are_not_lost_in_the_sum():
    """1 + 2^-12 + 2^-12 + 2^-12, which a float16 sum rounds to 1."""
    w = jnp.array(1.0, F16)
    x = jnp.array([1.0, 2.0**-12, 2.0**-12, 2.0**-12], F16)
    _, grads = jaxmp.value_and_grad(lambda w, x: jnp.mean((x * w).astype(F32)), accumulate=4)(
        w, x, opt_state=state_with(4.0)
    )
    assert_exact(grads, F32(1 + 3 * 2.0**-12))


def test_one_bad_microbatch_spoils_the_window_and_only_it():
    w = jnp.array([1.0], F16)
    tx = jaxmp.mixed_precision(optax.adam(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1))
    opt_state = tx.init(w)

    @jax.jit
    def step(w, opt_state, x):
        loss, grads = jaxmp.value_and_grad(lambda w, x: jnp.mean((x * w).astype(F32)), accumulate=4)(
            w, x, opt_state=opt_state
        )
        return loss, *jaxmp.apply_gradients(tx, grads, opt_state, w)

    loss, w1, state1 = step(w, opt_state, jnp.array([1.0, np.nan, 1.0, 1.0], F16))
    assert np.isnan(loss)
    assert_moved(w1, w)
    assert_moved(guarded(state1), guarded(opt_state))
    assert_exact((state1.scaling.loss_scale, state1.skipped_steps), (F32(2.0), np.int32(1)))
    _, w2, state2 = step(w1, state1, jnp.ones(4, F16))
    assert_exact((w2, state2.skipped_steps), (np.array([0.9], F16), np.int32(1)))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("typed", [True, False], ids=["typed key", "raw key"])
def test_keys_are_split_and_scalars_repeated(typed):
    key = jax.random.key(3) if typed else jax.random.PRNGKey(3)

    def f(w, x, key, rate, flag):
        return jnp.mean(x * w), {"noise": jax.random.uniform(key, (2,)), "rate": rate, "flag": flag}

    compute = jaxmp.value_and_grad(f, has_aux=True, accumulate=2, accumulate_argnums=(1, 2, 3, 4))
    (_, aux), _ = compute(jnp.array(1.0), jnp.arange(4.0), key, 0.5, jnp.array(True), opt_state=state_with(1.0))
    expected = jnp.stack([jax.random.uniform(k, (2,)) for k in jax.random.split(key, 2)])  # exact in every program
    assert_exact(aux, {"noise": expected, "rate": np.array([0.5, 0.5], F32), "flag": np.array([True, True])})
    # without accumulation the key is the caller's
    (_, aux), _ = jaxmp.value_and_grad(f, has_aux=True)(
        jnp.array(1.0), jnp.arange(4.0), key, 0.5, True, opt_state=state_with(1.0)
    )
    assert_exact(aux["noise"], jax.random.uniform(key, (2,)))


def test_accumulate_argnums_name_the_batch():
    """batch_stats of length 3 stand beside a batch of 4, and are passed on whole."""

    def f(w, batch_stats, batch):
        return jnp.mean(batch["x"] * w) + jnp.sum(batch_stats["mean"]) * 0, batch_stats["mean"]

    args = (jnp.array(1.0), {"mean": jnp.ones(3)}, {"x": jnp.arange(4.0)})
    for named in (2, -1, (2,)):
        compute = jaxmp.value_and_grad(f, has_aux=True, accumulate=2, accumulate_argnums=named)
        (loss, aux), grads = compute(*args, opt_state=state_with(2.0))
        assert_exact((loss, grads, aux), (F32(1.5), F32(3.0), np.ones((2, 3), F32)))
    with pytest.raises(
        ValueError, match="accumulate=2 must divide the leading axis.*Name the arguments to cut: accumulate_argnums="
    ):
        jaxmp.value_and_grad(f, has_aux=True, accumulate=2, accumulate_argnums=(1, 2))(*args, opt_state=state_with(2.0))
    six = (args[0], {"mean": jnp.ones(6)}, args[2])
    with pytest.raises(
        ValueError, match="same leading axis; got 6 at argument 1/mean, 4 at argument 2/x. Name the arg"
    ):
        jaxmp.value_and_grad(f, has_aux=True, accumulate=2, accumulate_argnums=(1, 2))(*six, opt_state=state_with(2.0))


# Under other transforms


def under_nothing(f, params, x, opt_state):
    return f(params, x, opt_state=opt_state)


def under_jit(f, params, x, opt_state):
    return jax.jit(f)(params, x, opt_state=opt_state)


def under_scan(f, params, x, opt_state):
    def body(carry, x):
        return carry, f(carry, x, opt_state=opt_state)

    _, out = jax.lax.scan(body, params, jnp.stack([x, x]))
    return jax.tree.map(lambda x: x[1], out)


def under_vmap(f, params, x, opt_state):
    out = jax.vmap(lambda x: f(params, x, opt_state=opt_state))(jnp.stack([x * 0, x]))
    return jax.tree.map(lambda x: x[1], out)


def under_vmap_over_scales(f, params, x, opt_state):
    """Two states with a scale each: a population."""
    both = jax.tree.map(lambda a: jnp.stack([a, a * 2 if a.dtype == F32 else a]), opt_state)
    out = jax.vmap(lambda s: f(params, x, opt_state=s))(both)
    return jax.tree.map(lambda x: x[0], out)


@pytest.mark.thorough(5)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("rematerialized", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("under", [under_nothing, under_jit, under_scan, under_vmap, under_vmap_over_scales])
def test_transforms(under, rematerialized, accumulate):
    f = jaxmp.value_and_grad(jax.checkpoint(loss_fn) if rematerialized else loss_fn, accumulate=accumulate)
    loss, grads = under(f, params16(), jnp.asarray(X), state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, SCALE, {"w": F16 if accumulate == 1 else F32, "gain": F32}))


def test_per_example_gradients():
    f = jaxmp.value_and_grad(loss_fn)
    _, grads = jax.vmap(lambda x: f(params16(), x, opt_state=state_with(2.0)))(X[:, None])
    assert_exact(grads["w"], (2.0 * 0.5 * X).astype(F16))


# On several devices

SPREAD = pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])


def on_four_devices(f, how, params, x):
    """`f(params, x)` on each device with all params and its row of `x`; results stacked, [4, ...]."""
    if how == "pmap":
        return jax.pmap(f, AXIS, in_axes=(None, 0), devices=jax.devices()[:4])(params, x)

    def stacked(params, x):
        return jax.tree.map(lambda y: y[None], f(params, x[0]))

    spread = jax.shard_map(
        stacked, mesh=mesh_of(), in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=how == "shard_map"
    )
    return jax.jit(spread)(params, x)


@pytest.mark.thorough(1)
@SPREAD
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_this_device_s_own(how, accumulate):
    """Under check_vma autodiff sums the gradients of replicated params over the mesh: flax's come back times N."""
    params, opt_state = params16(), state_with(SCALE)
    x = np.stack([X, 2 * X, 3 * X, 4 * X])

    def f(params, x):
        return jaxmp.value_and_grad(loss_fn, accumulate=accumulate)(params, x, opt_state=opt_state)

    loss, grads = on_four_devices(f, how, params, x)
    factors = np.arange(1, 5, dtype=F32)
    assert_exact(loss, LOSS * factors)
    dtypes = {"w": F16 if accumulate == 1 else F32, "gain": F32}
    expected = {"w": GRADS["w"] * factors[:, None], "gain": GRADS["gain"] * factors}
    assert_exact(grads, scaled(expected, SCALE, dtypes))


@pytest.mark.thorough(1)
@SPREAD
def test_no_float16_sum_over_devices_happens_before_the_user_s_own(how):
    w = jnp.array([1.0], F16)
    x = jnp.full((4, 1), 2.0**13, F16)
    opt_state = state_with(4.0)

    def loss_fn(w, x):
        return jnp.sum((w * x).astype(F32))

    def f(w, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(w, x, opt_state=opt_state)
        tx = jaxmp.reduce_gradients()
        return tx.update(grads, tx.init(grads))[0]

    assert_exact(on_four_devices(f, how, w, x), np.full((4, 1), 2.0**15, F32))
    if how == "shard_map":  # what jax.grad does there: 4 * 32768 in float16
        summed = on_four_devices(lambda w, x: jax.lax.pmean(jax.grad(lambda w: 4 * loss_fn(w, x))(w), AXIS), how, w, x)
        assert np.isinf(summed).all()


@pytest.mark.parametrize("joined", ["pmean", "psum"])
@pytest.mark.parametrize("accumulate", [1, 2])
@SPREAD
def test_a_loss_that_is_one_for_all_devices(how, accumulate, joined):
    """A mean of the gradients over devices is that of the loss in every regime, as in plain jax."""
    params, opt_state = params16(), state_with(SCALE)
    x = np.stack([X, 2 * X, 3 * X, 4 * X])

    def joint(params, x):
        loss = loss_fn(params, x)
        return jax.lax.pmean(loss, AXIS) if joined == "pmean" else jax.lax.psum(loss / 4, AXIS)

    def f(params, x):
        loss, grads = jaxmp.value_and_grad(joint, accumulate=accumulate)(params, x, opt_state=opt_state)
        return loss, jax.lax.pmean(grads, AXIS)

    loss, grads = on_four_devices(f, how, params, x)
    assert_exact(loss, np.full(4, LOSS * 2.5))
    dtypes = {"w": F16 if accumulate == 1 else F32, "gain": F32}
    expected = {"w": np.tile(GRADS["w"] * 2.5, (4, 1)), "gain": np.tile(GRADS["gain"] * 2.5, 4)}
    assert_exact(grads, scaled(expected, SCALE, dtypes))


def test_the_sum_that_a_joint_loss_needs_is_in_float32():
    """Of four parts in float16, two are beyond its range together."""
    mesh, opt_state = mesh_of(), state_with(4.0)

    def f(w, x):
        loss = lambda w, x: jax.lax.pmean(jnp.sum((w * x).astype(F32)), AXIS)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(w, x, opt_state=opt_state)
        return grads

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))
    found = run(jnp.ones(1, F16), jnp.array([2.0**15, 2.0**15, -(2.0**15), 32.0], F16))
    assert_exact(found, np.array([2.0**15 + 32], F16))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_that_is_one_along_one_of_two_axes(check_vma):
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def f(w, x):
        loss = lambda w: jax.lax.pmean(jnp.sum(w * x), "sequence")  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(w, opt_state=state_with(2.0))
        tx = jaxmp.reduce_gradients()
        return tx.update({"w": grads}, tx.init(()))[0]["w"]

    spread = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data", "sequence")), out_specs=P(), check_vma=check_vma)
    assert_exact(jax.jit(spread)(jnp.array(1.0), jnp.array([[1.0, 2.0], [3.0, 4.0]])), F32(5.0))


def test_a_joint_loss_of_cut_params_is_refused():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    layout = jaxmp.fsdp.layout_of(params, mesh_of(), axis_name=AXIS, min_size=9)

    def f(params, x):
        whole = lambda params: jaxmp.fsdp.gather(params, layout)  # noqa: E731
        loss = lambda params, x: jax.lax.pmean(jnp.mean(x @ whole(params)["w"] + whole(params)["b"][None]), AXIS)  # noqa: E731
        return jaxmp.value_and_grad(loss)(params, x, opt_state=state_with(2.0))[1]

    run = jax.shard_map(f, mesh=mesh_of(), in_specs=(layout.specs, P(AXIS)), out_specs=layout.specs)
    with pytest.raises(ValueError, match="the loss must be that of this device's rows; .* Take its pmean after"):
        jax.jit(run)(params, jnp.ones((8, 8)))


def test_named_axes_stay_own_and_others_are_summed():
    """A tensor-parallel axis that is left out keeps the sum that autodiff makes over it."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    opt_state = state_with(2.0)

    def f(w, x):
        def loss_fn(w):  # each device of the model axis holds a part of x
            return jax.lax.psum(jnp.sum(w * x), "model")

        loss, grads = jaxmp.value_and_grad(loss_fn, axis_name="data")(w, opt_state=opt_state)
        return loss[None], grads[None]

    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data", "model")), out_specs=(P("data"), P("data")))
    loss, grads = jax.jit(spread)(jnp.array(1.0), x)
    assert_exact((loss, grads), (np.array([3.0, 7.0], F32), np.array([6.0, 14.0], F32)))


def test_accumulation_on_an_explicit_mesh():
    """Where shardings are part of the types, microbatches and sums keep those of the batch and of the params."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    def loss_fn(w, x):
        return jnp.mean((x.astype(F16) @ w).astype(F32))

    w = jax.device_put(jnp.ones((2, 4), F16), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    f = jax.jit(jaxmp.value_and_grad(loss_fn, accumulate=2))
    loss, grads = f(w, x, opt_state=state_with(4.0))  # the arrays name their mesh: it needs no jax.set_mesh
    assert_exact(loss, F32(3.5))
    assert_exact(grads, np.broadcast_to(MEAN_X[:, None], (2, 4)).astype(F32))
    assert grads.sharding.spec == P(None, "model")


# What is refused


@pytest.mark.parametrize(
    ("leaf", "what"),
    [(jnp.arange(2), "int32"), (jnp.ones(2, jnp.complex64), "complex64"), (jnp.array([True]), "bool"), (1, "int")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_params_that_are_no_floats(leaf, what):
    f = jaxmp.value_and_grad(lambda params, x: jnp.float32(0))
    with pytest.raises(TypeError, match=f"params must be float; got {what} at argument 0/layer/w. Pass it in another"):
        f({"layer": {"w": leaf}, "ok": jnp.ones(1)}, 1.0, opt_state=state_with(1.0))


def test_typed_keys_among_params():
    with pytest.raises(TypeError, match=r"params must be float; got key<fry> at argument 0/key"):
        jaxmp.value_and_grad(lambda p: jnp.float32(0))({"key": jax.random.key(0)}, opt_state=state_with(1.0))


@pytest.mark.parametrize("opt_state", [optax.sgd(0.1).init(jnp.ones(1)), optax.adam(1.0).init(jnp.ones(1)), {}])
def test_no_loss_scale_in_the_state(opt_state):
    with pytest.raises(
        ValueError,
        match=r"must hold a loss scale; got a state without. Pass opt_state=, the state of jaxmp.mixed_precision",
    ):
        jaxmp.value_and_grad(loss_fn)(params16(), X, opt_state=opt_state)


def test_two_loss_scales_in_the_state():
    tx = optax.chain(jaxmp.unscale_and_skip(optax.identity(), 2.0), jaxmp.unscale_and_skip(optax.identity(), 2.0))
    with pytest.raises(ValueError, match="opt_state must hold one loss scale; got 2"):
        jaxmp.value_and_grad(loss_fn)(params16(), X, opt_state=tx.init(params16()))


def test_opt_state_must_be_given():
    with pytest.raises(
        ValueError, match=r"must hold a loss scale; got None. Pass opt_state=, the state of jaxmp.mixed_precision"
    ):
        jaxmp.value_and_grad(loss_fn)(params16(), X)


def test_an_nnx_module_is_sent_to_its_bridge():
    with pytest.raises(TypeError, match=r"Use jaxmp.nnx.value_and_grad"):
        jaxmp.value_and_grad(lambda m: 0.0)(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), opt_state=state_with(1.0))


@pytest.mark.parametrize(
    ("loss", "what"),
    [(jnp.ones(2), r"float32\[2\]"), (jnp.ones((1, 1)), r"float32\[1, 1\]"), (jnp.int32(1), r"int32\[\]")],
    ids=["vector", "matrix", "int"],
)
def test_a_loss_that_is_no_float_scalar(loss, what):
    f = jaxmp.value_and_grad(lambda w: loss)
    with pytest.raises(TypeError, match=f"the loss must be a float scalar; got {what}. Reduce it with jnp.mean"):
        f(jnp.ones(1), opt_state=state_with(1.0))


def test_a_loss_that_is_not_returned():
    with pytest.raises(TypeError, match="the loss must be a float scalar; got NoneType. Return it"):
        jaxmp.value_and_grad(lambda w: None)(jnp.ones(1), opt_state=state_with(1.0))


def test_aux_without_has_aux():
    f = jaxmp.value_and_grad(lambda w: (jnp.sum(w), {"aux": w}))
    with pytest.raises(TypeError, match=r"the loss must be a float scalar; got tuple. Pass has_aux=True"):
        f(jnp.ones(1), opt_state=state_with(1.0))


@pytest.mark.parametrize(("out", "got"), [((1.0,), "1 values"), (1.0, "float")], ids=["one", "loss-alone"])
def test_has_aux_without_aux(out, got):
    match = rf"with has_aux=True the function must return \(loss, aux\); got {got}"
    with pytest.raises(TypeError, match=match):
        jaxmp.value_and_grad(lambda w: out, has_aux=True)(jnp.ones(1), opt_state=state_with(1.0))
    with pytest.raises(TypeError, match=match):
        jaxmp.nnx.value_and_grad(lambda m: out, has_aux=True)(
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)), opt_state=state_with(1.0)
        )


def test_aux_of_a_watched_function_goes_beside_the_statistics():
    watched = jaxmp.monitor.watch_activations(lambda w: (jnp.sum(w), w))
    with pytest.raises(TypeError, match=r"got tuple. Return \(loss, \(aux, stats\)\)"):
        jaxmp.value_and_grad(watched, has_aux=True)(jnp.ones(1), opt_state=state_with(1.0))


def test_accumulate_must_divide_the_batch():
    f = jaxmp.value_and_grad(lambda w, batch: jnp.mean(batch["x"] * w), accumulate=3)
    with pytest.raises(
        ValueError, match=r"accumulate=3 must divide the leading axis of the batch; got \(4, 1\) at argument 1/x"
    ):
        f(jnp.array(1.0), {"x": jnp.ones((4, 1))}, opt_state=state_with(1.0))


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, None])
def test_accumulate_must_be_a_count(accumulate):
    with pytest.raises(ValueError, match=f"accumulate must be a number of microbatches >= 1; got {accumulate}"):
        jaxmp.value_and_grad(loss_fn, accumulate=accumulate)


@pytest.mark.parametrize("argnums", [2, -3, (0, 5)], ids=str)
def test_argnums_out_of_range(argnums):
    with pytest.raises(ValueError, match=r"argnums must name positional arguments; got -?\d for a call with 2 of them"):
        jaxmp.value_and_grad(loss_fn, argnums)(params16(), X, opt_state=state_with(1.0))


def test_params_by_keyword_are_not_found():
    with pytest.raises(ValueError, match="argnums must name positional arguments; got 0 for a call with 0 of them"):
        jaxmp.value_and_grad(loss_fn)(params=params16(), x=X, opt_state=state_with(1.0))


def test_the_batch_cannot_be_what_is_differentiated():
    f = jaxmp.value_and_grad(loss_fn, accumulate=2, accumulate_argnums=(0, 1))
    with pytest.raises(ValueError, match=r"must not name differentiated or carried arguments; got \(0, 1\)"):
        f(params16(), X, opt_state=state_with(1.0))


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")], ids=str)
def test_an_axis_that_is_not_bound(axis_name):
    with pytest.raises(ValueError, match="axis name 'data' is not bound here; bound axes: none"):
        jaxmp.value_and_grad(loss_fn, axis_name=axis_name)(params16(), X, opt_state=state_with(1.0))


def test_split_microbatches_keeps_order_and_dtypes():
    tree = {"x": jnp.arange(6, dtype=jnp.int8).reshape(6, 1), "y": (np.ones(6, F16), None)}
    out = microbatches.split_microbatches(tree, 3)
    assert_exact(out, {"x": np.arange(6, dtype=np.int8).reshape(3, 2, 1), "y": (np.ones((3, 2), F16), None)})


def test_microbatches_on_an_explicit_mesh_of_one_device_are_blocks_of_rows():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    for spec in (P("data"), P(None, "data"), P()):
        x = jax.device_put(jnp.arange(12.0).reshape(6, 2), NamedSharding(mesh, spec))
        assert_moved(
            jax.jit(lambda x: microbatches.split_microbatches(x, 3))(x),
            np.arange(12, dtype=np.float32).reshape(3, 2, 2),
        )


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("k", [2, 8])
def test_microbatches_of_a_sharded_batch_stay_spread_over_its_devices(axis_type, k):
    """Blocks of rows would lie on some devices only; XLA then has every device compute the whole microbatch."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    rows = 16  # of a microbatch: two for each device
    x = jax.device_put(jnp.ones((rows * k, 4)), NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P()))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")

    def step(w, opt_state, x):
        return jaxmp.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), accumulate=k)(
            w, x, opt_state=opt_state
        )

    with jax.set_mesh(mesh) if axis_type == AxisType.Explicit else contextlib.nullcontext():
        program = jax.jit(step).lower(w, tx.init(w), x).compile().as_text()
    outputs = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program))
    assert f"{rows // 8},6" in outputs and f"{rows},6" not in outputs
    assert "all-gather" not in program
