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
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from jaxmp._src.base import compat
from jaxmp._src.fp8 import scale_leaves as scale_leaves_lib
from jaxmp.fp8 import is_scale
from regimes import AXIS, mesh_of

F32 = np.float32
NO_SCALE = jaxmp.unscale_and_skip(optax.identity()).init(())  # for value_and_grad alone
X, Y = make_batch(0)["x"], make_batch(1)["x"]


def grads_of(loss_fn, params, *args, jit=True, **kwargs):
    f = functools.partial(jaxmp.value_and_grad(loss_fn, **kwargs), opt_state=NO_SCALE)
    return (jax.jit(f) if jit else f)(params, *args)[1]


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
        ("Dense_0/Fp8DotGeneral_0/fp8_grad_e5m2_log2_scale", True),
        ("layers/0/dot_general/fp8_rhs_e4m3_scale", True),
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


def found_by(tree):
    return sum(is_scale(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree))


def test_is_scale_sees_through_states_boxes_and_labels():
    class Net(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(SIDE, SIDE, dot_general=jaxmp.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(SIDE, rngs=nnx.Rngs(0))

    state = nnx.state(Net(), nnx.Param)
    boxed = {"fp8_rhs_e4m3_scale": nn.Partitioned(jnp.ones(2), ("layers",)), "scale": nn.Partitioned(jnp.ones(2), "x")}
    labels = jax.tree.map(lambda _: "label", model_params())
    for tree, count in [(state, 3), (nnx.as_pure(state), 3), (boxed, 1), (labels, 6), (model_params(), 6)]:
        assert found_by(tree) == count
        only, others = scale_leaves_lib.partition(tree)
        assert found_by(only) == len(jax.tree.leaves(only)) == count
        assert found_by(others) == 0
        assert jax.tree.structure(scale_leaves_lib.merge(only, others)) == jax.tree.structure(tree)
        assert scale_leaves_lib.has_scales(tree)


def test_every_jump_of_a_leaf_is_exact():
    """optax adds `new - old`; of integers the sum is the new one, of the scales themselves it often is not."""
    log2 = np.arange(-126, 128, dtype=F32)
    old, new = np.meshgrid(log2, log2)
    assert_exact(old + (new - old), new)
    assert F32(2.0**30) + (F32(1) - F32(2.0**30)) == 0


def test_leaves_are_the_integers_that_the_state_says():
    amax_path = [3.0, 2.0**-70, 2.0**60, 1.5, 2.0**-100, 448.0]
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=1)
    tx = make_tx("fp32", recipe=recipe)
    params, opt_state = start(tx, "fp32", {"w": jnp.ones(1)} | scale_leaves())
    update = jax.jit(tx.update)
    for amax in amax_path:
        grads = {"w": jnp.ones(1)} | scale_leaves(value=amax)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        for backward, name in [(False, LHS), (False, RHS), (True, GRAD)]:
            expected = recipe.update(recipe.init(), F32(amax), backward=backward).scale
            assert_exact(params[name], F32(np.log2(expected)))
            kept = F32(np.clip(np.log2(expected), -63, 63))  # what a cast takes, so that products of two are scales
            assert_exact(jaxmp.fp8.get_scales(params)[name], F32(2.0) ** kept)
            scale, inv_scale = scale_leaves_lib.scale_of(params[name], holds_log2=True)
            assert_exact((scale, inv_scale), (F32(2.0) ** kept, F32(2.0) ** -kept))


# The loss scale


def test_leaves_enter_a_loss_shifted_and_typed_as_before():
    """All scalars come out of one array; a stack of leaves, and a scalar of one device's own, keep theirs."""
    names = [f"{name}/fp8_{operand}_log2_scale" for name in "ab" for operand in ("lhs_e4m3", "grad_e5m2")]
    leaves = {name: jnp.float32(i) for i, name in enumerate(names)} | {LHS: jnp.arange(3.0), "w": jnp.ones(2)}
    expected = {name: x - 4 if "grad" in name else x for name, x in leaves.items()}  # of gradients 16 times as large

    def entered(own):
        tree = scale_leaves_lib.enter(leaves | {RHS: own[0]}, jnp.float32(16.0))
        assert [name for name, x in tree.items() if compat.varying_axes(x)] == [RHS] * bool(compat.varying_axes(own))
        return {name: compat.max_dtype_to_float32(x) if is_scale(name) else x for name, x in tree.items()}

    own = jnp.array([5.0, 7.0])
    assert_exact(jax.jit(entered)(own), expected | {RHS: F32(5.0)})
    spread = jax.jit(
        jax.shard_map(
            lambda own: jax.tree.map(lambda x: x[None], entered(own)),
            mesh=mesh_of(devices=2),
            in_specs=P(AXIS),
            out_specs={name: P(AXIS) if name == RHS else P() for name in (*leaves, RHS)},
        )
    )(own)
    assert_exact(spread, {name: np.asarray(x)[None] for name, x in expected.items()} | {RHS: own})


@pytest.mark.thorough(0)
def test_a_moving_loss_scale_moves_neither_params_nor_leaves():
    """One program. A scale grows from 2^10, another from 2^13; from 2^10 * 1.25 gradients are rounded elsewhere."""
    txs = [make_tx("fp16", loss_scale=jaxmp.DynamicLossScale(s, growth_interval=3)) for s in (2.0**10, 2.0**13, 1280.0)]
    step = jax.jit(make_step(txs[0]))
    runs = []
    for tx in txs:
        state = start(tx)
        trace = []
        for i in range(7):
            state, (loss, grads) = step(state, make_batch(i))
            assert not bool(jaxmp.get_metrics(state[1])["skipped"])
            trace.append(to_host((state[0], guarded(state[1]), loss, amaxes(grads))))
        assert jaxmp.get_loss_scale(state[1]) == 4 * jaxmp.get_loss_scale(start(tx)[1])
        runs.append(trace)
    assert step._cache_size() == 1
    small, large, odd = runs
    assert_exact(small, large)
    for path, amax in odd[0][3].items():  # the same but for rounding
        np.testing.assert_allclose(amax, small[0][3][path], rtol=0.1)


def test_leaves_hold_the_scale_of_unscaled_gradients():
    """The gradient's amax comes back divided by the loss scale, and the cast is shifted by it the other way."""
    params = {"w": np.eye(SIDE, dtype=F32)} | scale_leaves() | {GRAD: F32(5.0)}
    seen = {}
    for scale in (1.0, 2.0**10):  # the gradient of y is 1
        opt_state = jaxmp.unscale_and_skip(optax.identity(), scale).init(())
        compute = jax.jit(jaxmp.value_and_grad(lambda params, x: jnp.sum(matmul(params, x))))
        _, grads = compute(params, X, opt_state=opt_state)
        seen[scale] = only_amaxes(grads) | {"w": grads["w"] / scale}
    assert_exact(seen[1.0], seen[2.0**10])
    assert_exact(only_scales(seen[1.0]), {LHS: amax_of(X), RHS: F32(1), GRAD: F32(1)})


def test_no_leaf_moves_on_a_skip():
    tx = make_tx("fp16", loss_scale=jaxmp.DynamicLossScale(2.0**12, hysteresis=1))
    step = jax.jit(make_step(tx))
    state, _ = step(start(tx), make_batch(0))
    for bad in (np.inf, np.nan):
        batch = make_batch(1)
        batch["x"][3, 3] = bad
        new, _ = step(state, batch)
        assert bool(jaxmp.get_metrics(new[1])["skipped"])
        assert float(jaxmp.get_loss_scale(new[1])) == float(jaxmp.get_loss_scale(state[1])) / 2
        assert_moved((new[0], guarded(new[1])), (state[0], guarded(state[1])))
        state = new


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_an_overflow_that_only_an_amax_shows_is_skipped(policy):
    """The cast saturates: from an inf among the inputs come finite gradients."""
    tx = make_tx(policy)
    state = start(tx, policy)
    batch = make_batch(0)
    batch["x"][0, 0] = np.inf
    new, (loss, grads) = jax.jit(make_step(tx))(state, batch)
    assert np.isfinite(loss)
    weights_only = scale_leaves_lib.partition(grads)[1]
    assert bool(jaxmp.all_finite(weights_only))
    assert amaxes(grads)[f"a/{LHS}"] == np.inf
    assert bool(jaxmp.get_metrics(new[1])["skipped"])
    assert_moved((new[0], guarded(new[1])), (state[0], guarded(state[1])))


# One leaf used several times: MAX


def tied_and_untied(tied, untied, n, *args, jit=True):
    """Amaxes of one layer used n times, and the largest of those of n layers used once."""
    layer = layer_params(3)
    got = grads_of(tied, layer, *args, jit=jit)
    apart = grads_of(lambda layers, *args: untied([w | {"w": layer["w"]} for w in layers], *args), [layer] * n, *args)
    return to_host(only_amaxes(got)), largest(*map(only_amaxes, apart))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_a_shared_layer_reports_the_largest(jit):
    def twice(first, second, x):
        return jnp.mean(matmul(second, 3 * jnp.tanh(matmul(first, x))) ** 2)

    got, expected = tied_and_untied(
        lambda layer, x: twice(layer, layer, x), lambda layers, x: twice(*layers, x), 2, X, jit=jit
    )
    assert_amaxes(got, expected)
    assert got[LHS] == max(amax_of(X), got[LHS])


def test_plain_jax_grad_adds_the_amaxes_of_a_shared_layer():
    """It works, and a layer that is used once is right; combining by MAX takes jaxmp.value_and_grad."""
    layer = layer_params(3)

    def loss_fn(layers, x):
        return jnp.mean(matmul(layers[1], jnp.tanh(matmul(layers[0], x))) ** 2)

    apart = jax.jit(jax.grad(loss_fn))([layer, layer], X)
    ours = [layer | only_amaxes(layer) for layer in grads_of(loss_fn, [layer, layer], X)]
    assert_close(apart, ours, rtol=1e-5, atol=1e-6)
    shared = jax.jit(jax.grad(lambda layer, x: loss_fn([layer, layer], x)))(layer, X)
    for name in (LHS, RHS, GRAD):
        assert_close(shared[name], np.asarray(apart[0][name] + apart[1][name]), rtol=1e-6)


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


@pytest.mark.thorough(1)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("kind", ["stacked", "broadcast"])
def test_scan(kind, remat):
    """Stacked leaves [n] report one amax a layer, a leaf that all steps share the largest of all."""
    layers, apart = layers_apart()

    def body(x, layer):
        return jnp.tanh(matmul(layer, 2 * x)), None

    body = jax.checkpoint(body) if remat else body
    if kind == "stacked":
        loss_fn = lambda params, x: jnp.mean(lax.scan(body, x, params)[0] ** 2)  # noqa: E731
        assert_amaxes(only_amaxes(grads_of(loss_fn, stack(layers), X)), stack(apart))
    else:

        def loss_fn(params, x):
            w, scales = params
            return jnp.mean(lax.scan(lambda x, w: body(x, {"w": w} | scales), x, w)[0] ** 2)

        got = grads_of(loss_fn, (np.stack([layer["w"] for layer in layers]), scale_leaves()), X)
        assert_amaxes(only_amaxes(got[1]), largest(*apart))


@pytest.mark.thorough(0)
def test_fori_loop_over_stacked_layers():
    layers, apart = layers_apart()

    def loss_fn(stacked, x):
        def body(i, x):
            layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)
            return jnp.tanh(matmul(layer, 2 * x))

        return jnp.mean(lax.fori_loop(0, LAYERS, body, x) ** 2)

    assert_amaxes(only_amaxes(grads_of(loss_fn, stack(layers), X)), stack(apart))


def test_an_ensemble_under_vmap_has_an_amax_for_each_member():
    layers = [layer_params(i) for i in range(LAYERS)]
    factors = np.array([1.0, 3.0, 0.5], F32)

    def loss_fn(stacked, x):
        return jnp.sum(jax.vmap(lambda layer, c: jnp.mean(matmul(layer, c * x) ** 2))(stacked, factors))

    got = to_host(only_amaxes(grads_of(loss_fn, stack(layers), X)))
    alone = jax.jit(jax.grad(lambda layer, x: jnp.mean(matmul(layer, x) ** 2)))
    for i, (layer, factor) in enumerate(zip(layers, factors, strict=True)):
        assert_amaxes({name: got[name][i] for name in (LHS, RHS, GRAD)}, only_scales(alone(layer, factor * X)))


def test_a_loss_for_each_example_under_vmap_has_one_amax():
    xs = np.random.default_rng(5).normal(size=(3, SIDE, SIDE)).astype(F32)
    layer = layer_params(3)

    def loss_fn(layer, xs):
        return jnp.sum(jax.vmap(lambda x: jnp.mean(matmul(layer, x) ** 2))(xs))

    got = grads_of(loss_fn, layer, xs)
    grad = jax.jit(jax.grad(lambda layer, x: jnp.mean(matmul(layer, x) ** 2)))
    alone = [grad(layer, x) for x in xs]
    assert_amaxes(only_amaxes(got), largest(*alone))
    total = sum(np.asarray(g["w"]) for g in alone)
    assert_close(got["w"], total, rtol=1e-5, atol=1e-5)


def test_vmap_of_value_and_grad():
    """Several runs side by side: each with params and amaxes of its own."""
    xs = np.stack([X, 4 * X])
    layer = layer_params(3)

    def loss_fn(layer, x):
        return jnp.mean(matmul(layer, x) ** 2)

    f = functools.partial(jaxmp.value_and_grad(loss_fn), opt_state=NO_SCALE)
    got = only_amaxes(jax.jit(jax.vmap(f))(stack([layer, layer]), xs)[1])
    alone = jax.jit(f)
    for i in range(2):
        assert_amaxes({name: got[name][i] for name in (LHS, RHS, GRAD)}, only_amaxes(alone(layer, xs[i])[1]))


@functools.cache
def gradients_in_microbatches(k):
    return grads_of(model_loss, model_params(), make_batch(0, rows=64), accumulate=k)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [2, 4])
def test_microbatches_have_the_amaxes_of_the_full_batch(k):
    """Loss scale / k, times k fewer rows: the numbers that are cast are those of the full batch."""
    expected, got = (gradients_in_microbatches(n) for n in (1, k))
    assert_amaxes(amaxes(got), amaxes(expected))
    assert_close(got["a"]["w"], np.asarray(expected["a"]["w"]), rtol=1e-5, atol=1e-6)


# Leaves that are not used


@pytest.mark.thorough(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_that_is_not_used_keeps_leaf_and_history(accumulate):
    tx = make_tx("bf16", loss_scale=None)
    params32 = {"used": layer_params(1), "idle": layer_params(2)}
    state = start(tx, "bf16", params32)
    state[0]["idle"] |= {name: jnp.float32(7.0) for name in (LHS, RHS, GRAD)}

    def loss_fn(params, x):
        return jnp.mean(matmul(params["used"], x.astype(jnp.bfloat16)).astype(F32) ** 2)

    step = jax.jit(make_step(tx, loss_fn, accumulate=accumulate))
    for i in range(2):
        state, (_, grads) = step(state, make_batch(i)["x"])
        assert_exact(only_amaxes(grads["idle"]), {name: F32(0) for name in (LHS, RHS, GRAD)})
    for name in (LHS, RHS, GRAD):
        assert float(state[0]["used"][name]) != 0
    forward, backward = to_host(histories(state[1]))
    if forward.shape[1] != 4:
        forward, backward = backward, forward
    # in the order of the tree: idle before used
    assert np.all(forward[:, :2] == 0) and np.all(backward[:, :1] == 0)
    assert np.all(forward[-2:, 2:] > 0) and np.all(backward[-2:, 1:] > 0)
    assert float(jaxmp.get_metrics(state[1])["fp8/unused"]) == 3


def test_cond_reports_the_branch_that_ran():
    def loss_fn(params, x, flag):
        y = lax.cond(flag, lambda x: matmul(params["a"], x), lambda x: matmul(params["b"], 2 * x), x)
        return jnp.mean(y**2)

    params = {"a": layer_params(1), "b": layer_params(2)}
    f = jax.jit(functools.partial(jaxmp.value_and_grad(loss_fn), opt_state=NO_SCALE))
    for flag, used, idle, factor in [(True, "a", "b", 1), (False, "b", "a", 2)]:
        _, grads = f(params, X, flag)
        found = only_amaxes(grads[used])
        assert_exact(found[LHS], amax_of(factor * X))
        assert_exact(found[RHS], amax_of(params[used]["w"]))
        assert float(found[GRAD]) > 0
        assert_exact(to_host(only_amaxes(grads[idle])), {name: F32(0) for name in (LHS, RHS, GRAD)})


def test_a_forward_pass_alone_moves_nothing():
    """Evaluation needs no mutable state: params in, loss out."""
    params = model_params()
    before = to_host(params)
    first = jax.jit(model_loss)(params, make_batch(0))
    assert_same_program(jax.jit(model_loss)(params, make_batch(0)), first)
    assert_moved(to_host(params), before)


# Errors that say what the dtype of the leaves means


def notes_of(caught):
    return "".join(getattr(caught.value, "__notes__", ()))


def sums_all(params, x):
    return jnp.mean(matmul(params["a"], x)) + sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def indexes(params, x):
    for i in range(2):
        x = matmul(jax.tree.map(lambda a, i=i: a[i], params), x)
    return jnp.mean(x)


def test_a_loss_over_all_params_is_explained():
    with pytest.raises(TypeError) as caught:
        grads_of(sums_all, {"a": layer_params(0)}, X)
    assert "Leave them out of a norm of all params" in notes_of(caught)


def test_a_loss_over_all_but_the_scales_works():
    def loss_fn(params, x):
        _, others = scale_leaves_lib.partition(params)
        return jnp.mean(matmul(params["a"], x) ** 2) + 0.5 * sum(jnp.sum(w**2) for w in jax.tree.leaves(others))

    params = {"a": layer_params(0)}
    got = grads_of(loss_fn, params, X)["a"]
    alone = grads_of(lambda params, x: jnp.mean(matmul(params["a"], x) ** 2), params, X)["a"]
    assert_amaxes(only_amaxes(got), only_amaxes(alone))
    assert_close(got["w"], np.asarray(alone["w"] + params["a"]["w"]), rtol=1e-5, atol=1e-6)


def test_static_slices_of_stacked_leaves_are_explained():
    stacked = jax.tree.map(jnp.asarray, stack([layer_params(0), layer_params(1)]))
    with pytest.raises(TypeError) as caught:
        grads_of(indexes, stacked, X)
    assert "slice stacked params with lax.scan" in notes_of(caught)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_of_the_differentiated_loss(check_vma):
    layer = layer_params(0)

    def local(layer, x):
        return lax.pmean(jnp.mean(matmul(layer, x) ** 2), AXIS)

    spread = jax.shard_map(local, mesh=mesh_of(devices=2), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check_vma)
    if not check_vma:
        with pytest.raises(TypeError, match="fp8_meta32") as caught:
            grads_of(spread, layer, X, jit=False)
        assert "and call value_and_grad inside a shard_map" in notes_of(caught)
        with pytest.raises(TypeError, match="fp8_meta32"):  # raised by the compiler, which accepts no notes
            grads_of(spread, layer, X)
        return
    got = grads_of(spread, layer, X)
    expected = grads_of(lambda layer, x: jnp.mean(matmul(layer, x) ** 2), layer, X)
    assert_amaxes(only_amaxes(got), only_amaxes(expected))
    assert_close(np.asarray(got["w"]), np.asarray(expected["w"]), rtol=1e-5, atol=1e-6)
