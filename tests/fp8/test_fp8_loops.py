"""fp8 state in the loops that people have: several devices, any inner optimizer, masks, look-ups, and what it costs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from fp8_model import (
    GRAD,
    LHS,
    RECIPE,
    RHS,
    SIDE,
    guarded,
    layer_params,
    make_batch,
    make_step,
    make_tx,
    matmul,
    model_params,
    only_amaxes,
    only_scales,
    scale_leaves,
    start,
    to_host,
)
from helpers import assert_close, assert_exact, assert_moved, reductions
from jaxmp._src.fp8 import scale_leaves as scale_leaves_lib
from jaxmp.fp8 import is_scale
from regimes import AXIS, DEVICES, mesh_of

F32 = np.float32
ROWS = DEVICES * SIDE


# Several devices: one MAX, in value_and_grad (tests/suites/test_fp8_regimes.py compares whole runs)


@pytest.mark.thorough(0)
def test_stages_have_leaves_of_their_own_and_one_decision():
    """Leaves that are split over the devices report what their device saw; an inf of one skips the step on all."""
    tx = make_tx("bf16")
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *[layer_params(i) for i in range(DEVICES)])
    params = jaxmp.get_policy("bf16").cast_to_param(stacked)

    def loss_fn(stage, x):
        layer = {name: jnp.squeeze(stage["w"], 0) if name == "w" else lax.squeeze(stage[name], (0,)) for name in stage}
        return jnp.mean(matmul(layer, x[0].astype(jnp.bfloat16)).astype(F32) ** 2)

    def step(params, x):
        state = tx.init(params)  # of this stage
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        updates, state = tx.update(grads, state, params)
        metrics = jaxmp.get_metrics(state)
        return optax.apply_updates(params, updates), only_amaxes(grads), metrics["skipped"][None]

    spread = jax.jit(jax.shard_map(step, mesh=mesh_of(), in_specs=P(AXIS), out_specs=P(AXIS)))
    xs = np.stack([(i + 1) * make_batch(i, SIDE)["x"] for i in range(DEVICES)])
    for bad in (False, True):
        if bad:
            xs[1, 0, 0] = np.inf
        new, observed, skipped = spread(params, xs)
        assert skipped.tolist() == [bad] * DEVICES
        expected = np.max(np.abs(xs.astype(jnp.bfloat16)), axis=(1, 2)).astype(F32)
        assert_exact(observed[LHS], expected)
        if bad:
            assert_moved(to_host(new), to_host(params))
        else:
            assert np.all(np.asarray(new[LHS]) != 0)


@pytest.mark.thorough(0)
def test_an_axis_left_out_of_the_gradients_is_not_left_out_of_the_amaxes():
    """`axis_name=()` lets autodiff alone (tensor parallelism); the leaves are one for all devices nevertheless."""
    tx = make_tx("bf16")

    def step(state, batch):
        _, (_, grads) = make_step(tx, axis_name=())(state, batch)
        return {name: amax[None] for name, amax in only_amaxes(grads["a"]).items()}

    batch = make_batch(1, ROWS)
    batch["x"][2 * SIDE : 3 * SIDE] *= 37  # of one device
    spread = jax.shard_map(step, mesh=mesh_of(), in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False)
    observed = jax.jit(spread)(start(tx, "bf16"), batch)
    for amax in observed.values():
        assert_exact(amax, np.repeat(np.asarray(amax[:1]), DEVICES))
    assert_exact(observed[LHS][0], F32(np.max(np.abs(batch["x"].astype(jnp.bfloat16)))))


# The inner optimizer never meets a scale


def without_scales(tree):
    return {name: without_scales(x) if isinstance(x, dict) else x for name, x in tree.items() if not is_scale(name)}


def decay_mask(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


def labels_of(tree):
    return jax.tree_util.tree_map_with_path(lambda path, x: "fast" if path[0].key == "a" else "slow", tree)


INNERS = {  # each made for a tree of params; with masks and labels of the whole tree
    "clips_and_norms": lambda tree: optax.chain(
        jaxmp.clip_by_global_norm(0.1),
        jaxmp.count_zeros(),
        optax.clip_by_global_norm(0.05),
        optax.clip(0.01),
        optax.lamb(1e-2, weight_decay=0.1),
    ),
    "masks_and_ema": lambda tree: optax.chain(
        optax.masked(optax.scale(2.0), decay_mask(tree)),
        optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask),
        optax.add_decayed_weights(0.1, mask=jaxmp.weight_decay_mask(tree)),
        optax.ema(0.9),
    ),
    "labels": lambda tree: optax.chain(
        optax.multi_transform({"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3)}, labels_of(tree)),
        optax.multi_transform({"fast": optax.scale(2.0), "slow": optax.set_to_zero()}, labels_of),
    ),
    "steps_and_schedule": lambda tree: optax.MultiSteps(
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 3)), 2
    ),
}


@functools.partial(jax.jit, static_argnames="backward")
def next_amax_state(state, amax, backward):
    return RECIPE.update(state, amax, backward=backward)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", INNERS)
def test_weights_train_as_if_there_were_no_scales(name):
    """As in a model without leaves, but for the roundings of two programs; leaves move by their own rule, unclipped."""
    params32 = model_params()
    tx, plain = make_tx("bf16", INNERS[name](params32)), make_tx("bf16", INNERS[name](without_scales(params32)), None)
    params, opt_state = start(tx, "bf16")
    alone, alone_state = start(plain, "bf16", without_scales(params32))

    @jax.jit
    def update(state, alone_state, grads):
        def moved(tx, grads, params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return moved(tx, grads, *state), moved(plain, without_scales(grads), *alone_state)

    amax_state = {False: RECIPE.init(), True: RECIPE.init()}
    for i in range(3):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(lambda x, rng=rng: np.asarray(rng.normal(size=x.shape) / 10, x.dtype), params)
        amax = F32(1e4 * 3.0**-i)
        grads = scale_leaves_lib.map_scales(lambda path, x, amax=amax: amax, grads)
        (params, opt_state), (alone, alone_state) = update((params, opt_state), (alone, alone_state), grads)
        assert_close(without_scales(params), alone, rtol=2.0**-7)
        for backward, names in [(False, (LHS, RHS)), (True, (GRAD,))]:
            amax_state[backward] = next_amax_state(amax_state[backward], amax, backward)
            log2 = F32(np.log2(amax_state[backward].scale))
            assert_exact([params[layer][n] for layer in "ab" for n in names], [log2] * 2 * len(names))
    masters = jaxmp.get_master_params(opt_state, params)
    assert_close(without_scales(masters), jaxmp.get_master_params(alone_state, alone), rtol=1e-6, atol=1e-7)
    assert_moved(only_scales(masters["a"]), only_scales(params["a"]))
    metrics, expected = to_host(jaxmp.get_metrics(opt_state)), to_host(jaxmp.get_metrics(alone_state))
    assert set(metrics) == set(expected)
    for key in metrics:
        assert key.startswith("fp8/") or np.allclose(metrics[key], expected[key], rtol=1e-6, equal_nan=True), key
    assert np.isnan(expected["fp8/min_scale"])
    scales = [amax_state[backward].scale for backward in (False, True)]
    assert_exact((metrics["fp8/min_scale"], metrics["fp8/max_scale"]), (min(scales), max(scales)))
    assert_exact([metrics[f"fp8/{key}"] for key in ("max_amax", "saturated", "unused")], [amax, F32(0), F32(0)])


# Everything else that looks at trees


@pytest.mark.parametrize("name", ["fp8", "params=float16,compute=bfloat16,output=float16"])
def test_casts_of_a_policy_leave_scales_alone(name):
    policy = jaxmp.get_policy(name)
    params = model_params()
    shapes = jax.eval_shape(lambda: params)
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        for tree in (params, shapes):
            out = cast(tree)
            assert all(x.dtype == F32 for x in jax.tree.leaves(scale_leaves_lib.partition(out)[0]))
        assert_moved(only_scales(cast(params)["a"]), only_scales(params["a"]))
    assert policy.cast_to_compute(params)["a"]["w"].dtype == policy.compute_dtype


def test_norms_zeros_and_reductions_leave_scales_out():
    grads, idle = ({"w": F32([3.0, 4.0, 0.0])} | scale_leaves(value=value) for value in (1e6, 0.0))
    assert_exact(jaxmp.global_norm(grads), F32(5))
    clip, zeros = jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros()
    clipped, _ = clip.update(grads, clip.init(grads))
    assert_close(clipped["w"], np.array([0.6, 0.8, 0.0], F32), rtol=1e-5)
    assert_moved(only_scales(clipped), only_scales(grads))
    assert float(zeros.update(idle, zeros.init(idle))[1].zero_grads) == 1
    tx = jaxmp.reduce_gradients(dtype=jnp.bfloat16, predivide=2.0)
    reduce = jax.pmap(lambda g: tx.update(g, tx.init(g))[0], AXIS)
    reduced = reduce(jax.tree.map(lambda x: np.stack([x] * 2), grads))
    assert reduced["w"].dtype == jnp.bfloat16
    assert_moved(only_scales(jax.tree.map(lambda x: np.asarray(x)[0], reduced)), only_scales(grads))


def test_two_optimizers_under_one_loss_scale():
    """Each moves its own leaves; an overflow in one, seen by an amax alone, leaves the other's step."""
    shared = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(2.0**8, hysteresis=1))
    tx = make_tx("fp16", loss_scale=1.0)
    params, states = {}, {}
    for name in "ab":
        params[name], states[name] = start(tx, "fp16", layer_params(ord(name)))

    @jax.jit
    def step(params, states, scale_state, xs):
        params, states = dict(params), dict(states)
        for name in "ab":
            loss_fn = lambda layer, x: jnp.mean(matmul(layer, x.astype(np.float16)).astype(F32) ** 2)  # noqa: E731
            _, grads = jaxmp.value_and_grad(loss_fn)(params[name], xs[name], opt_state=scale_state)
            params[name], states[name], scale_state = shared.apply_gradients(
                tx, grads, states[name], params[name], scale_state
            )
        return params, states, shared.update(scale_state)

    xs = {"a": make_batch(0)["x"], "b": make_batch(1)["x"]}
    first = step(params, states, shared.init(), xs)
    bad = xs["b"].copy()  # jax may still read the first one
    bad[2, 2] = np.inf
    second = step(*first, xs | {"b": bad})
    assert float(jaxmp.get_loss_scale(second[2])) == 2.0**7
    assert [bool(jaxmp.get_metrics(second[1][name])["skipped"]) for name in "ab"] == [False, True]
    assert_moved(second[0]["b"], first[0]["b"])
    assert_moved(guarded(second[1]["b"]), guarded(first[1]["b"]))
    assert np.any(np.asarray(second[0]["a"]["w"] != first[0]["a"]["w"]))


# What it costs


@pytest.mark.thorough(0)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_all_reduces_of_a_whole_step(how):
    """Beside the sums of gradients: the amaxes of all layers in one MAX, and the flags."""
    tx = make_tx("fp16", optax.sgd(0.1), before=jaxmp.reduce_gradients())
    state = start(tx)
    step = make_step(tx)

    def apply(state, batch):
        return step(state, batch)[0]

    if how == "pmap":
        mapped = jax.pmap(apply, AXIS, devices=jax.devices()[:8])
        stack = lambda tree: jax.tree.map(lambda x: np.stack([x] * 8), tree)  # noqa: E731
        text = mapped.lower(stack(state), stack(make_batch(0))).compile().as_text()
    else:
        spread = jax.shard_map(
            apply, mesh=mesh_of(devices=8), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=how == "shard_map"
        )
        text = jax.jit(spread).lower(state, make_batch(0, 8 * SIDE)).compile().as_text()
    found = reductions(text)
    assert [operator for operator, _ in found].count("maximum") == 1
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
