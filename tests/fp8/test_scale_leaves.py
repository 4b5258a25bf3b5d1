"""How fp8 state travels: leaves among the params, amaxes as their gradients, whatever the loss goes through.

Amaxes of inputs are exact. Amaxes of activations and gradients are compared between programs, up to some
ulps. A leaf that is used several times must report the largest of the amaxes of copies that are used once each.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from fp8_model import (
    GRAD,
    LHS,
    RHS,
    SIDE,
    amaxes,
    assert_amaxes,
    guarded,
    histories,
    layer_params,
    make_batch,
    make_step,
    make_tx,
    matmul,
    model_loss,
    model_params,
    only_amaxes,
    only_scales,
    scale_leaves,
    start,
    to_host,
)
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.fp8 import scale_leaves as scale_leaves_lib
from jaxmp.fp8 import is_scale
from regimes import AXIS, mesh_of

F32 = np.float32
NO_SCALE = jaxmp.unscale_and_skip(optax.identity()).init(())  # for value_and_grad alone
X = make_batch(0)["x"]


def compute(loss_fn, params, *args, **kwargs):
    return jaxmp.value_and_grad(loss_fn, **kwargs)(params, *args, opt_state=NO_SCALE)[1]


def grads_of(loss_fn, params, *args, **kwargs):
    return jax.jit(lambda params, *args: compute(loss_fn, params, *args, **kwargs))(params, *args)


def square(layer, x):
    return jnp.mean(matmul(layer, x) ** 2)


def largest(*trees):
    """The largest of the amaxes of each leaf."""
    return jax.tree.map(lambda *xs: np.max(np.stack(xs), axis=0), *[to_host(only_scales(t)) for t in trees])


def amax_of(x):
    return F32(np.max(np.abs(np.asarray(x, F32))))


# A leaf, its name and what it holds


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("fp8_lhs_e4m3_log2_scale", True),
        ("layers/0/dot_general/fp8_grad_e5m2_scale", True),
        ("LayerNorm/scale", False),
        ("log2_scale", False),
        ("fp8_lhs_e3m4_scale", False),
        ("fp8_lhs_e4m3_log2_scale/kernel", False),
        ("my_fp8_lhs_e4m3_log2_scale", False),
        ("<root>", False),
    ],
)
def test_is_scale_of_a_path(path, expected):
    assert is_scale(path) is expected
    assert is_scale(path, jnp.float32(0)) is expected
    assert is_scale(path, optax.MaskedNode()) is expected
    assert is_scale(tuple(jax.tree_util.DictKey(name) for name in path.split("/"))) is expected


def test_is_scale_sees_through_states_boxes_and_labels():
    product, rngs = jaxmp.nnx.Fp8DotGeneral(), nnx.Rngs(0)
    net = nnx.Dict(dense=nnx.Linear(SIDE, SIDE, dot_general=product, rngs=rngs), norm=nnx.LayerNorm(SIDE, rngs=rngs))
    state = nnx.state(net, nnx.Param)
    boxed = {"fp8_rhs_e4m3_scale": nn.Partitioned(jnp.ones(2), ("layers",)), "scale": nn.Partitioned(jnp.ones(2), "x")}
    labels = jax.tree.map(lambda _: "label", model_params())
    for tree, count in [(state, 3), (nnx.as_pure(state), 3), (boxed, 1), (labels, 6), (model_params(), 6)]:
        assert sum(is_scale(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree)) == count
        only, others = scale_leaves_lib.partition(tree)
        assert all(is_scale(path, x) for path, x in jax.tree_util.tree_leaves_with_path(only))
        assert not any(is_scale(path, x) for path, x in jax.tree_util.tree_leaves_with_path(others))
        assert jax.tree.structure(scale_leaves_lib.merge(only, others)) == jax.tree.structure(tree)
        assert scale_leaves_lib.has_scales(tree)


def test_leaves_are_integers_the_powers_of_two_that_bring_the_amax_below_the_largest_number():
    tx = make_tx("fp32", recipe=jaxmp.fp8.DelayedScaling(amax_history_len=1))
    params, opt_state = start(tx, "fp32", {"w": jnp.ones(1)} | scale_leaves())

    @jax.jit
    def step(params, opt_state, amax):
        grads = {"w": jnp.ones(1)} | dict.fromkeys((LHS, RHS, GRAD), amax)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for amax in [3.0, 2.0**-70, 2.0**60, 1.5, 2.0**-100, 448.0]:
        params, opt_state = step(params, opt_state, F32(amax))
        for name, largest in [(LHS, 448.0), (RHS, 448.0), (GRAD, 57344.0)]:
            log2 = F32(np.floor(np.log2(largest / amax)))
            assert_exact(params[name], log2)
            cast_with = np.clip(log2, -63, 63)  # so that products of two are scales
            assert_exact(jaxmp.fp8.get_scales(params)[name], F32(2.0) ** cast_with)
            both = scale_leaves_lib.scale_of(params[name], holds_log2=True)
            assert_exact(both, (F32(2.0) ** cast_with, F32(2.0) ** -cast_with))


# The loss scale


def test_leaves_hold_the_scale_of_unscaled_gradients():
    """The gradient's amax comes back divided by the loss scale, and the cast is shifted by it the other way."""
    params = {"w": np.eye(SIDE, dtype=F32)} | scale_leaves() | {GRAD: F32(5.0)}
    compute = jax.jit(jaxmp.value_and_grad(lambda params, x: jnp.sum(matmul(params, x))))
    seen = {}
    for scale in (1.0, 2.0**10, 1280.0):  # the gradient of y is 1
        opt_state = jaxmp.unscale_and_skip(optax.identity(), scale).init(())
        _, grads = compute(params, X, opt_state=opt_state)
        seen[scale] = only_amaxes(grads) | {"w": grads["w"] / scale}
    assert_exact(seen[1.0], seen[2.0**10])
    assert_close(seen[1280.0], to_host(seen[1.0]), rtol=0.1)  # gradients are rounded elsewhere
    assert_exact(only_scales(seen[1.0]), {LHS: amax_of(X), RHS: F32(1), GRAD: F32(1)})


def test_no_leaf_moves_on_a_skip():
    """An inf among the inputs shows in an amax alone: the cast saturates, and all gradients are finite."""
    tx = make_tx("fp16", loss_scale=jaxmp.DynamicLossScale(2.0**12, hysteresis=1))
    step = jax.jit(make_step(tx))
    state, _ = step(start(tx), make_batch(0))
    for bad in (np.inf, np.nan):
        batch = make_batch(1)
        batch["x"][3, 3] = bad
        new, (loss, grads) = step(state, batch)
        if bad == np.inf:
            assert np.isfinite(loss) and bool(jaxmp.all_finite(scale_leaves_lib.partition(grads)[1]))
            assert amaxes(grads)[f"a/{LHS}"] == np.inf
        assert bool(jaxmp.get_metrics(new[1])["skipped"])
        assert float(jaxmp.get_loss_scale(new[1])) == float(jaxmp.get_loss_scale(state[1])) / 2
        assert_moved((new[0], guarded(new[1])), (state[0], guarded(state[1])))
        state = new


# One leaf used several times: MAX


def test_a_shared_layer_reports_the_largest():
    def twice(first, second, x):
        return square(second, 3 * jnp.tanh(matmul(first, x)))

    layer = layer_params(3)
    tied = to_host(only_amaxes(grads_of(lambda layer, x: twice(layer, layer, x), layer, X)))
    apart = grads_of(lambda layers, x: twice(*layers, x), [layer, layer], X)
    assert_amaxes(tied, largest(*map(only_amaxes, apart)))
    assert tied[LHS] >= amax_of(X)


@pytest.mark.thorough(0)
def test_plain_jax_grad_adds_the_amaxes_of_a_shared_layer():
    """It works, and a layer that is used once is right; combining by MAX takes jaxmp.value_and_grad."""
    layer = layer_params(3)

    def loss_fn(layers, x):
        return square(layers[1], jnp.tanh(matmul(layers[0], x)))

    apart = jax.jit(jax.grad(loss_fn))([layer, layer], X)
    ours = [layer | only_amaxes(layer) for layer in grads_of(loss_fn, [layer, layer], X)]
    assert_close(apart, ours, rtol=1e-5, atol=1e-6)
    shared = jax.jit(jax.grad(lambda layer, x: loss_fn([layer, layer], x)))(layer, X)
    for name in (LHS, RHS, GRAD):
        assert_close(shared[name], np.asarray(apart[0][name]) + np.asarray(apart[1][name]), rtol=1e-6)


LAYERS = 3


def chain_loss(layers, x):
    for layer in layers:
        x = jnp.tanh(matmul(layer, 2 * x))
    return jnp.mean(x**2)


@functools.cache
def layers_apart():
    """Params of layers, and their amaxes where they are no stack."""
    layers = [layer_params(i) for i in range(LAYERS)]
    return layers, [to_host(only_amaxes(layer)) for layer in grads_of(chain_loss, layers, X)]


def stack(trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def turn(x, layer):
    return jnp.tanh(matmul(layer, 2 * x)), None


def in_scan(stacked, x):
    return lax.scan(jax.checkpoint(turn), x, stacked)[0]


def in_fori_loop(stacked, x):
    layer_of = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)  # noqa: E731
    return lax.fori_loop(0, LAYERS, lambda i, x: turn(x, layer_of(i))[0], x)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("loop", [in_scan, in_fori_loop])
def test_stacked_leaves_report_one_amax_a_layer(loop):
    layers, apart = layers_apart()
    grads = grads_of(lambda stacked, x: jnp.mean(loop(stacked, x) ** 2), stack(layers), X)
    assert_amaxes(only_amaxes(grads), stack(apart))


@pytest.mark.thorough(0)
def test_a_leaf_that_all_steps_of_a_scan_share_reports_the_largest_of_all():
    layers, apart = layers_apart()

    def loss_fn(params, x):
        w, scales = params
        return jnp.mean(lax.scan(lambda x, w: turn(x, {"w": w} | scales), x, w)[0] ** 2)

    _, shared = grads_of(loss_fn, (np.stack([layer["w"] for layer in layers]), scale_leaves()), X)
    assert_amaxes(only_amaxes(shared), largest(*apart))


@pytest.mark.thorough(0)
def test_an_ensemble_under_vmap_has_an_amax_for_each_member_over_all_examples():
    members = [layer_params(i) for i in range(2)]
    factors = np.array([3.0, 0.5], F32)
    xs = np.random.default_rng(5).normal(size=(3, SIDE, SIDE)).astype(F32)

    def loss_fn(stacked, xs):
        of_member = lambda layer, factor: jnp.sum(jax.vmap(lambda x: square(layer, factor * x))(xs))  # noqa: E731
        return jnp.sum(jax.vmap(of_member)(stacked, factors))

    together = to_host(grads_of(loss_fn, stack(members), xs))
    amaxes, alone = only_amaxes(together), jax.jit(jax.grad(square))
    for i, (layer, factor) in enumerate(zip(members, factors, strict=True)):
        of_examples = [to_host(alone(layer, factor * x)) for x in xs]
        assert_amaxes({name: amaxes[name][i] for name in amaxes}, largest(*of_examples))
        total = sum(factor_grads["w"] for factor_grads in of_examples)
        assert_close(together["w"][i], total, rtol=1e-5, atol=1e-5)


def test_microbatches_have_the_amaxes_of_the_full_batch():
    """Loss scale / k, times k fewer rows: the numbers that are cast are those of the full batch."""
    whole, accumulated = (grads_of(model_loss, model_params(), make_batch(0, rows=64), accumulate=k) for k in (1, 4))
    assert_amaxes(amaxes(accumulated), amaxes(whole))
    assert_close(accumulated["a"]["w"], np.asarray(whole["a"]["w"]), rtol=1e-5, atol=1e-6)


# Leaves that are not used


def test_a_layer_that_is_not_used_keeps_leaf_and_history():
    tx = make_tx("bf16", loss_scale=None)
    state = start(tx, "bf16", {"used": layer_params(1), "idle": layer_params(2)})
    state[0]["idle"] |= {name: jnp.float32(7.0) for name in (LHS, RHS, GRAD)}

    def loss_fn(params, x):
        return jnp.mean(matmul(params["used"], x.astype(jnp.bfloat16)).astype(F32) ** 2)

    step = jax.jit(make_step(tx, loss_fn, accumulate=2))
    for i in range(2):
        state, (_, grads) = step(state, make_batch(i)["x"])
        assert_exact(only_amaxes(grads["idle"]), {name: F32(0) for name in (LHS, RHS, GRAD)})
    assert_exact(only_scales(state[0]["idle"]), {name: F32(7) for name in (LHS, RHS, GRAD)})
    assert all(float(state[0]["used"][name]) != 0 for name in (LHS, RHS, GRAD))
    backward, forward = sorted(to_host(histories(state[1])), key=lambda history: history.shape[1])
    # in the order of the tree: idle before used
    assert np.all(forward[:, :2] == 0) and np.all(backward[:, :1] == 0)
    assert np.all(forward[-2:, 2:] > 0) and np.all(backward[-2:, 1:] > 0)
    assert float(jaxmp.get_metrics(state[1])["fp8/unused"]) == 3


def test_cond_reports_the_branch_that_ran():
    def loss_fn(params, x, flag):
        y = lax.cond(flag, lambda x: matmul(params["a"], x), lambda x: matmul(params["b"], 2 * x), x)
        return jnp.mean(y**2)

    params = {"a": layer_params(1), "b": layer_params(2)}
    run = jax.jit(functools.partial(compute, loss_fn))
    for flag, used, idle, factor in [(True, "a", "b", 1), (False, "b", "a", 2)]:
        grads = run(params, X, flag)
        amaxes = only_amaxes(grads[used])
        assert_exact(amaxes[LHS], amax_of(factor * X))
        assert_exact(amaxes[RHS], amax_of(params[used]["w"]))
        assert float(amaxes[GRAD]) > 0
        assert_exact(to_host(only_amaxes(grads[idle])), {name: F32(0) for name in (LHS, RHS, GRAD)})


# Errors that say what the dtype of the leaves means


def of_two_layers(params, x):
    for i in range(2):
        x = matmul(jax.tree.map(lambda a, i=i: a[i], params), x)
    return jnp.mean(x)


@pytest.mark.parametrize(
    ("loss_fn", "params", "advice"),
    [
        (
            lambda params, x: square(params, x) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)),
            layer_params(0),
            "Leave them out of a norm of all params",
        ),
        (of_two_layers, stack([layer_params(0), layer_params(1)]), "slice stacked params with lax.scan"),
    ],
    ids=["a norm of all params", "static slices of a stack"],
)
def test_what_is_no_arithmetic_of_scales_is_explained(loss_fn, params, advice):
    with pytest.raises(TypeError) as caught:
        grads_of(loss_fn, jax.tree.map(jnp.asarray, params), X)
    assert advice in "".join(caught.value.__notes__)


@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.thorough(0)), False])
def test_shard_map_inside_of_the_differentiated_loss(check_vma):
    layer = layer_params(0)
    local = lambda layer, x: lax.pmean(square(layer, x), AXIS)  # noqa: E731
    spread = jax.shard_map(local, mesh=mesh_of(devices=2), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check_vma)
    if not check_vma:
        with pytest.raises(TypeError, match="fp8_meta32") as caught:
            compute(spread, layer, X)
        assert "and call value_and_grad inside a shard_map" in "".join(caught.value.__notes__)
        with pytest.raises(TypeError, match="fp8_meta32"):  # raised by the compiler, which accepts no notes
            grads_of(spread, layer, X)
        return
    grads, expected = grads_of(spread, layer, X), grads_of(square, layer, X)
    assert_amaxes(only_amaxes(grads), only_amaxes(expected))
    assert_close(np.asarray(grads["w"]), np.asarray(expected["w"]), rtol=1e-5, atol=1e-6)
