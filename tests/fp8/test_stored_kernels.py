"""Kernels in fp8: stored so by the optimizer, or cast once for all microbatches."""

import functools
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps
from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import linen_layers, stored_kernels
from pallas_kernels import backend as backends, late_scales

RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=3)
WIDTH = 16
LEAF = "fp8_rhs_e4m3_log2_scale"
X = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)
Y = np.sin(2 * X)


class Net(nn.Module):
    """The first and the last layer stay in 16 bits."""

    layers: int = 3

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers - 1):
            x = nn.tanh(nn.Dense(WIDTH, dtype=jnp.bfloat16)(x))
        return nn.Dense(WIDTH, dtype=jnp.bfloat16)(x)


class WithoutDtype(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Dense(WIDTH)(x)
        return x


def in_fp8():
    return jaxmp.fp8.autocast(RECIPE)


def loss_fn(params, x, y):
    with in_fp8():
        return jnp.mean((Net(len(params)).apply({"params": params}, x).astype(jnp.float32) - y) ** 2)


@functools.cache
def params32(layers=3):
    def init(key):
        with in_fp8():
            return Net(layers).init(key, X)["params"]

    return jax.jit(init)(jax.random.key(0))


def make(policy="fp8", inner=None, layers=3):
    policy = jaxmp.get_policy(policy, fp8_weights=True)
    tx = jaxmp.mixed_precision(inner or optax.adam(1e-2), policy, recipe=RECIPE)
    return tx, *jax.jit(lambda params: (policy.cast_to_param(params), tx.init(params)))(params32(layers))


def stepper(tx, loss_fn=loss_fn, **kwargs):
    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jaxmp.value_and_grad(loss_fn, **kwargs)(params, x, y, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss, grads

    return lambda params, opt_state, x=X, y=Y: step(params, opt_state, x, y)


@functools.cache
def job(policy="fp8"):
    """(tx, params, opt_state, compiled step) under Adam, shared by tests."""
    tx, params, opt_state = make(policy)
    return tx, params, opt_state, stepper(tx)


@functools.cache
def first_gradients():
    """(loss, gradients) of the params that `job` starts from."""
    _, params, opt_state, step = job()
    return step(params, opt_state)[2:]


def test_pairs_finds_the_nearest_kernel_above_a_leaf():
    layer = {"kernel": 1.0, "bias": 1.0, "Fp8DotGeneral_0": {LEAF: 0.0, "fp8_lhs_e4m3_log2_scale": 0.0}}
    tree = {
        "a": layer,
        "plain": {"kernel": 1.0},
        "attend": {"dot": {LEAF: 0.0}},
        "e": {"kernel": 1, "op": {"d": {LEAF: 0}}},
    }
    expected = {"a/kernel": f"a/Fp8DotGeneral_0/{LEAF}", "e/kernel": f"e/op/d/{LEAF}"}
    assert stored_kernels.pairs(tree) == expected
    masked = jax.tree.map(lambda x: x, tree)
    masked["a"]["Fp8DotGeneral_0"][LEAF] = optax.MaskedNode()  # as the optimizer sees it
    assert stored_kernels.pairs(masked) == expected


def test_store_takes_the_scale_from_the_weights_and_load_gives_them_back():
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(3, 8, 4)).astype(np.float32) * np.array([1.0, 100.0, 0.0], np.float32)[:, None, None]
    params = {"kernel": jnp.asarray(kernel), "dot": {LEAF: jnp.zeros(3)}, "bias": jnp.ones(4)}  # a stack of layers
    stored = stored_kernels.store(params)
    assert stored["kernel"].dtype == jnp.float8_e4m3fn
    scale = np.exp2(np.asarray(stored["dot"][LEAF]))
    largest = np.abs(kernel).max((1, 2))
    assert np.all(scale[:2] * largest[:2] <= 448) and np.all(2 * scale[:2] * largest[:2] > 448)
    assert scale[2] == 1.0  # nothing is known of zeros
    loaded = jaxmp.fp8.load_weights(stored, jnp.float32)
    np.testing.assert_allclose(loaded["kernel"], kernel, rtol=2.0**-4)
    assert_moved(stored_kernels.store(stored), stored)
    assert_exact(stored_kernels.store(loaded), stored)  # nothing is rounded twice
    assert_moved({"bias": loaded["bias"]}, {"bias": params["bias"]})


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp8", "bf16", "fp16"])
def test_params_are_one_byte_and_follow_the_float32_master(policy):
    _, params, opt_state, step = job(policy)
    masters = jaxmp.get_master_params(opt_state, params)
    assert_moved(masters["Dense_1"]["kernel"], params32()["Dense_1"]["kernel"])
    assert [params[f"Dense_{i}"]["kernel"].dtype.itemsize == 1 for i in range(3)] == [False, True, False]
    losses = []
    for _ in range(40):
        params, opt_state, loss, grads = step(params, opt_state)
        losses.append(float(loss))
        kernel, leaf = params["Dense_1"]["kernel"], params["Dense_1"]["Fp8DotGeneral_0"][LEAF]
        master = opt_state_master(opt_state)["Dense_1"]["kernel"]
        assert (kernel.dtype, master.dtype, leaf.dtype) == (jnp.float8_e4m3fn, jnp.float32, jnp.float32)
        assert_cast(kernel, np.asarray(master), 2.0 ** np.asarray(leaf))
    assert grads["Dense_1"]["kernel"].dtype == jnp.bfloat16
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    assert jaxmp.get_metrics(opt_state)["fp8/unused"] == 0


def assert_cast(kernel, master, scale):
    """The cast of `master`; a step may compute it for the cast once more, an ulp of float32 beside."""
    ulp = 2.0**-23 * np.abs(master).max()
    low, high = (np.clip((master + d) * scale, -448, 448).astype(kernel.dtype).astype(np.float32) for d in (-ulp, ulp))
    kernel = np.asarray(kernel, np.float32)
    assert np.all((low <= kernel) & (kernel <= high))


def opt_state_master(opt_state):
    (found,) = jaxmp._src.step.state.find(opt_state, jaxmp._src.step.state.StepState)
    return found.master_params


@pytest.mark.thorough(0)
def test_the_scale_falls_when_weights_outgrow_it():
    """The kernel saturates, so its amax must be that of the master, or the scale would never fall."""
    tx, params, opt_state = make(inner=optax.sgd(1.0))
    before = float(params["Dense_1"]["Fp8DotGeneral_0"][LEAF])

    @jax.jit
    def step(params, opt_state):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, X, Y, opt_state=opt_state)
        grads["Dense_1"]["kernel"] = jnp.full((WIDTH, WIDTH), -50.0, jnp.bfloat16)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    for _ in range(3):
        params, opt_state = step(params, opt_state)
    assert float(params["Dense_1"]["Fp8DotGeneral_0"][LEAF]) <= before - 7
    loaded = jaxmp.fp8.load_weights(params, jnp.float32)["Dense_1"]["kernel"]
    # the scale is one step behind, as all delayed scales are: 100 was known, 150 is written
    assert_close(loaded, jnp.clip(opt_state_master(opt_state)["Dense_1"]["kernel"], -112, 112), rtol=2.0**-4)


def by_hand(history, scale, amax):
    """(history, scale) after a step by the equations of delayed scaling, in NumPy."""
    filled = np.concatenate([[amax], history[1:]])
    scale = 2.0 ** np.floor(np.log2(448.0 / filled.max()))
    return np.concatenate([[0.0], filled[2:], filled[:1]]), scale


def test_scales_and_histories_are_those_of_the_masters_before_each_step():
    """Six steps with growing weights; one is skipped, one kernel is frozen, and the layer of one is used at times."""
    labels = jax.tree.map(lambda _: "train", params32(5)) | {"Dense_3": "freeze"}
    inner = optax.multi_transform({"train": optax.sgd(1.0), "freeze": optax.set_to_zero()}, labels)
    tx, params, opt_state = make(inner=inner, layers=5)

    def at_times(params, x, y):  # Dense_2 is called if the batch says so
        called = jax.lax.cond(y[0, 0] > 0, lambda: params["Dense_2"], lambda: params["Dense_1"])
        return loss_fn(params | {"Dense_2": called}, x, y)

    @jax.jit
    def step(params, opt_state, x, y):
        _, grads = jaxmp.value_and_grad(at_times)(params, x, y, opt_state=opt_state)
        for layer in ("Dense_1", "Dense_2"):
            grads[layer]["kernel"] = jnp.full((WIDTH, WIDTH), -0.7, jnp.bfloat16)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    forward = [p for p in tree_paths.leaves_by_path(params) if jaxmp.fp8.is_scale(p) and "grad" not in p]
    leaves = {layer: f"{layer}/Fp8DotGeneral_0/{LEAF}" for layer in ("Dense_1", "Dense_2", "Dense_3")}
    histories = {layer: np.zeros(3) for layer in leaves}
    scales = {layer: float(jaxmp.fp8.get_scales(params)[leaf]) for layer, leaf in leaves.items()}
    moved = set()
    for i in range(7):
        amaxes = {layer: np.abs(opt_state_master(opt_state)[layer]["kernel"]).max() for layer in ("Dense_1", "Dense_2")}
        is_skipped, is_called = i == 3, i not in (1, 4)
        y = np.where(np.arange(Y.size).reshape(Y.shape) == 0, 1.0 if is_called else -1.0, Y).astype(np.float32)
        params, opt_state = step(params, opt_state, np.float32(np.inf) * X if is_skipped else X, y)
        assert bool(jaxmp.get_metrics(opt_state)["skipped"]) == is_skipped
        for layer, amax in amaxes.items():
            if not is_skipped and (layer == "Dense_1" or is_called):
                histories[layer], new = by_hand(histories[layer], scales[layer], amax)
                moved |= {layer} if new != scales[layer] else set()
                scales[layer] = new
        (found,) = (s for s in opt_state.fp8_scales.amax_states if s.scale.size == len(forward))
        for layer, leaf in leaves.items():
            assert_exact(found.amax_history[:, forward.index(leaf)], histories[layer].astype(np.float32))
            assert_exact(jaxmp.fp8.get_scales(params)[leaf], np.float32(scales[layer]))
        for layer in amaxes:
            master = np.asarray(opt_state_master(opt_state)[layer]["kernel"])
            assert_cast(params[layer]["kernel"], master, np.float32(scales[layer]))
    assert moved == {"Dense_1", "Dense_2"}


@pytest.mark.skipif(bool(backends.why_no_kernels()), reason=str(backends.why_no_kernels()))
def test_a_kernel_whose_scale_moves_is_cast_again(monkeypatch):
    """As a GPU does it: the first cast has the scale of before, and all come to the bits of the new one."""
    layers = {str(i): {"kernel": jnp.full((8, 16), 3.0 + i), "dot": {LEAF: jnp.float32(0)}} for i in range(3)}
    layers["stack"] = {"kernel": jnp.ones((2, 8, 8)), "dot": {LEAF: jnp.zeros(2)}}
    params = stored_kernels.store(layers)
    masters = jax.tree.map(lambda x: 5 * x, layers) | {"2": {"kernel": optax.MaskedNode(), "dot": optax.MaskedNode()}}
    new = params | {"1": params["1"] | {"dot": {LEAF: params["1"]["dot"][LEAF] - 3}}}
    expected = stored_kernels.write(new, masters, params)
    cast = functools.partial(late_scales.cast, backend="interpret")
    monkeypatch.setattr(stored_kernels, "late_scales", types.SimpleNamespace(cast=cast))
    for before in (params, new):
        assert_exact(stored_kernels.write(new, masters, before), expected)
    assert_moved(expected["2"], params["2"])
    assert float(expected["1"]["kernel"][0, 0].astype(jnp.float32)) == 20.0 * 2.0 ** float(new["1"]["dot"][LEAF])


def test_a_gpu_casts_again_in_one_launch():
    tx, params, opt_state, _ = job()
    _, grads = first_gradients()
    traced = jax.jit(functools.partial(jaxmp.apply_gradients, tx)).trace(grads, opt_state, params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    launches = [line for line in text.splitlines() if "@mosaic_gpu" in line and "cast_late" in line]
    assert len(launches) == (0 if backends.why_no_kernels() else 1)


@pytest.mark.thorough(0)
def test_a_skipped_step_leaves_stored_kernels_and_their_scales():
    _, params, opt_state, step = job()
    params, opt_state, *_ = step(params, opt_state)
    bad = X.copy()
    bad[3, 3] = np.inf
    new_params, new_state, *_ = step(params, opt_state, bad)
    assert bool(jaxmp.get_metrics(new_state)["skipped"])
    assert_moved(new_params, params)
    assert_moved(regimes.guarded(new_state), regimes.guarded(opt_state))


@pytest.mark.thorough(0)
def test_an_update_that_is_added_cannot_move_them_and_says_so():
    tx, params, opt_state, _ = job()
    _, grads = first_gradients()
    message = "kernels that are stored in fp8 cannot be moved by optax.apply_updates.* Dense_1/kernel.*apply_gradients"
    with pytest.raises(ValueError, match=message):
        tx.update(grads, opt_state, params)
    jax.eval_shape(functools.partial(jaxmp.apply_gradients, tx), grads, opt_state, params)  # nothing was lost


def test_masters_start_from_float32():
    tx, params, *_ = job()
    with pytest.raises(TypeError, match=r"got float8_e4m3fn at Dense_1/kernel. Call tx.init with float32 params"):
        tx.init(params)


@pytest.mark.thorough(0)
def test_a_policy_without_them_refuses_stored_kernels():
    _, params, opt_state, _ = job()
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "fp8", recipe=RECIPE)
    _, grads = first_gradients()
    with pytest.raises(ValueError, match="params at update must have the dtypes of the policy|must have"):
        jaxmp.apply_gradients(tx, grads, opt_state, params)


def test_eval_gives_what_training_saw():
    """Two programs: a few of the bfloat16 outputs may be rounded to the other side."""
    _, params, *_ = job()
    loss, _ = first_gradients()
    assert_close(jax.jit(loss_fn)(params, X, Y), loss, rtol=1e-4)


@pytest.mark.thorough(0)
def test_models_whose_layers_name_no_dtype_are_evaluated():
    model = nn.Sequential([nn.Dense(WIDTH) for _ in range(3)])
    policy = jaxmp.get_policy("fp8", fp8_weights=True)
    with jaxmp.fp8.autocast(recipe=RECIPE):
        params = policy.cast_to_param(model.init(jax.random.key(1), X)["params"])
    run = lambda params: model.apply({"params": params}, X)  # noqa: E731
    expected = run(jaxmp.fp8.load_weights(params, jnp.float32))
    assert params["layers_1"]["kernel"].dtype == jnp.float8_e4m3fn
    with jaxmp.fp8.autocast(recipe=RECIPE):
        in_fp8 = run(params)
        with jaxmp.fp8.autocast(enabled=False):
            off = run(params)
    assert off.dtype == in_fp8.dtype == jnp.float32
    assert_close(off, expected, rtol=2.0**-6, atol=2.0**-6)
    assert_close(jaxmp.autocast(run, policy)(params).astype(jnp.float32), expected, rtol=0.1, atol=0.1)
    assert_close(in_fp8, expected, rtol=0.1, atol=0.1)


def test_switched_off_a_layer_multiplies_by_the_weight_itself():
    _, params, opt_state, _ = job()

    def without(params, x, y):
        with in_fp8(), jaxmp.fp8.autocast(enabled=False):
            layer = jaxmp.linen.Fp8DotGeneral(RECIPE)
            kernel, scales = params["Dense_1"]["kernel"], params["Dense_1"]["Fp8DotGeneral_0"]
            out = layer.apply({"params": scales}, x, kernel, (((1,), (0,)), ((), ())))
            return jnp.mean(out * y)

    loss, grads = jax.jit(jaxmp.value_and_grad(without))(params, X, Y, opt_state=opt_state)
    weight = jaxmp.fp8.load_weights(params, jnp.float32)["Dense_1"]["kernel"]
    expected, gradient = jax.value_and_grad(lambda w: jnp.mean((X @ w) * Y))(weight)
    assert_close(loss, expected, rtol=2.0**-6)  # the result is bfloat16
    assert_close(grads["Dense_1"]["kernel"], gradient.astype(jnp.bfloat16), rtol=2.0**-6, atol=2.0**-12)


def norm(params):
    return sum(
        jnp.sum(x.astype(jnp.float32) ** 2)
        for k, x in tree_paths.leaves_by_path(params).items()
        if k.endswith("kernel")
    )


READS = {
    "a penalty": lambda p, x, y: loss_fn(p, x, y) + 1e-4 * norm(p),
    "remat": lambda p, x, y: loss_fn(p, x, y) + 1e-4 * jax.checkpoint(norm)(p),
    "jit": lambda p, x, y: loss_fn(p, x, y) + 1e-4 * jax.jit(norm)(p),
    "scan": lambda p, x, y: loss_fn(p, x, y) + jax.lax.scan(lambda c, _: (c + norm(p), None), 0.0, None, length=2)[0],
    "cond": lambda p, x, y: loss_fn(p, x, y) + jax.lax.cond(y[0, 0] > 0, norm, lambda p: 0.0, p),
    "rearranged": lambda p, x, y: loss_fn(p, x, y) + jnp.mean(p["Dense_1"]["kernel"].T.reshape(-1)[:4]),
    "vmap": lambda p, x, y: loss_fn(p, x, y) + jnp.sum(jax.vmap(lambda w: w @ w)(p["Dense_1"]["kernel"])),
    "a layer outside of autocast": lambda p, x, y: jnp.mean(Net().apply({"params": p}, x).astype(jnp.float32) - y),
    "policy": lambda p, x, y: norm(p),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_that_reads_a_kernel_outside_of_its_layer_is_refused(name, kept):
    if kept:  # cast once for two microbatches, not stored
        policy, options = "fp8", {"accumulate": 2, "accumulate_argnums": (1, 2), "keep_fp8_weights": True}
        tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=RECIPE)
        params, opt_state = jaxmp.get_policy(policy).cast_to_param(params32()), tx.init(params32())
    else:
        (_, params, opt_state, _), options = job(), {"policy": "fp8"} if name == "policy" else {}
    grad = jaxmp.value_and_grad(READS[name], **options)
    with pytest.raises(
        ValueError, match=r"reads argument 0/Dense_1/kernel outside of an fp8 layer.*load_weights\(params"
    ):
        jax.eval_shape(lambda p, s: grad(p, X, Y, opt_state=s), params, opt_state)


def test_a_penalty_takes_the_weights_by_load_weights():
    _, params, opt_state, _ = job()
    penalized = lambda p, x, y: loss_fn(p, x, y) + 0.5 * norm(jaxmp.fp8.load_weights(p, jnp.float32))  # noqa: E731
    loss, grads = jax.jit(jaxmp.value_and_grad(penalized))(params, X, Y, opt_state=opt_state)
    plain, without = first_gradients()
    weights = {
        k: np.asarray(v, np.float64)
        for k, v in tree_paths.leaves_by_path(jaxmp.fp8.load_weights(params, jnp.float32)).items()
    }
    kernels = {k: v for k, v in weights.items() if k.endswith("kernel")}
    assert_close(loss - plain, np.float32(0.5 * sum((w**2).sum() for w in kernels.values())), rtol=1e-4)
    for name, w in kernels.items():
        layer = name.split("/")[0]
        moved = np.asarray(grads[layer]["kernel"], np.float64) - np.asarray(without[layer]["kernel"], np.float64)
        assert_close(moved, w, rtol=2.0**-6, atol=2.0**-6)  # gradients of such kernels are bfloat16
    # amaxes of bfloat16 numbers that two programs compute: some may be rounded to the other side
    got, expected = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), g["Dense_1"]) for g in (grads, without))
    assert_within_ulps(got["Fp8DotGeneral_0"], expected["Fp8DotGeneral_0"], 2)


def apply(net, params):
    return net.apply({"params": params}, X)


def in_region(net, params):
    with jaxmp.autocast("bf16"):
        return apply(net, params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("run", [in_region, jaxmp.autocast(apply, "bf16"), jaxmp.autocast(apply, jnp.bfloat16)])
def test_autocast_without_fp8_refuses_them_in_linens_layers(run):
    """With a dtype of its own, a layer would cast w * scale as if it were w; without, jax finds no promotion."""
    _, params, _, _ = job()
    for net in (Net(), WithoutDtype()):
        with pytest.raises(
            ValueError, match=r"got Dense_1/kernel .* `with jaxmp.autocast\(\"fp8\"\):`, or .*load_weights\("
        ):
            jax.eval_shape(lambda params, net=net: run(net, params), params)
        weights = jaxmp.fp8.load_weights(params, jnp.bfloat16)
        assert jax.eval_shape(lambda params, net=net: run(net, params), weights).dtype == jnp.bfloat16
    with jaxmp.autocast("fp8"):
        assert jax.eval_shape(lambda params: jaxmp.autocast(apply, "bf16")(Net(), params), params).shape == X.shape


def test_the_apply_fn_of_a_train_state_refuses_them_outside_of_autocast():
    policy = jaxmp.get_policy("fp8", fp8_weights=True)
    model, tx = Net(), jaxmp.mixed_precision(optax.adam(1e-2), policy, recipe=RECIPE)
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params32(), tx=tx, policy=policy)
    with pytest.raises(ValueError, match=r"got params/Dense_1/kernel for a model outside of fp8"):
        state.apply_fn({"params": state.params}, X)
    weights = jaxmp.fp8.load_weights(state.params, jnp.bfloat16)
    expected = model.apply({"params": weights}, X)
    assert_same_program(state.apply_fn({"params": weights}, X), expected)
    with jaxmp.autocast(policy):
        assert_close(jax.jit(state.apply_fn)({"params": state.params}, X), expected, rtol=0, atol=0.1)
    assert state.apply_fn.__self__ is model and hash(state.apply_fn) == hash(state.replace(step=1).apply_fn)


@pytest.mark.thorough(0)
def test_an_unused_layer_keeps_its_scale_and_its_kernel():
    tx, params, opt_state = make(inner=optax.sgd(0.1), layers=4)

    def skips_one(params, x, y):  # Dense_2 is not called
        return loss_fn({k: v for k, v in params.items()} | {"Dense_2": params["Dense_1"]}, x, y)

    new, new_state, *_ = stepper(tx, skips_one)(params, opt_state)
    assert_moved(new["Dense_2"], params["Dense_2"])
    assert jaxmp.get_metrics(new_state)["fp8/unused"] == 3
    assert not regimes.unchanged(jax.device_get(new["Dense_1"]), jax.device_get(params["Dense_1"]))


@pytest.mark.thorough(0)
def test_step_stats_have_the_amaxes_of_the_masters():
    """The gradients of the leaves only say that the layers ran: 1.0, which any scale above 448 would saturate."""
    _, params, opt_state = make()
    masters, scales = jaxmp.get_master_params(opt_state, params), jaxmp.fp8.get_scales(params)
    ran = tree_paths.map_with_path(lambda path, x: jnp.float32(LEAF in path) * jnp.ones(x.shape), params)
    found = jaxmp.monitor.step_stats(ran, opt_state, params, histogram=False).fp8
    path = f"Dense_1/Fp8DotGeneral_0/{LEAF}"
    assert scales[path] > 448
    assert_exact(found.amax[path], jnp.max(jnp.abs(masters["Dense_1"]["kernel"])))
    assert not any(map(bool, found.saturated.values()))
    idle = jaxmp.monitor.step_stats(jax.tree.map(jnp.zeros_like, ran), opt_state, params, histogram=False).fp8
    assert found.amax.keys() == idle.amax.keys() == scales.keys()
    assert float(idle.amax[path]) == 0


@pytest.mark.thorough(0)
def test_frozen_kernels_stay_in_fp8_without_a_master():
    labels = jax.tree.map(lambda _: "train", params32(4)) | {"Dense_1": "freeze"}
    inner = optax.multi_transform({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)
    tx, params, opt_state = make(inner=inner, layers=4)
    assert isinstance(opt_state_master(opt_state)["Dense_1"]["kernel"], optax.MaskedNode)
    step = stepper(tx)
    before = params
    for _ in range(3):
        params, opt_state, *_ = step(params, opt_state)
    assert_moved(params["Dense_1"]["kernel"], before["Dense_1"]["kernel"])
    assert_moved(params["Dense_1"]["Fp8DotGeneral_0"][LEAF], before["Dense_1"]["Fp8DotGeneral_0"][LEAF])
    assert jaxmp.get_metrics(opt_state)["fp8/unused"] == 0  # it is used without a cast
    assert not regimes.unchanged(jax.device_get(params["Dense_2"]), jax.device_get(before["Dense_2"]))


def test_nnx():
    model = nnx.Sequential(*(nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(3)))
    jaxmp.nnx.to_fp8(model, RECIPE)
    policy = jaxmp.get_policy("fp8", fp8_weights=True)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, recipe=RECIPE)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy=policy)

    @nnx.jit
    def step(model, optimizer):
        squares = lambda m, x, y: jnp.mean((m(x).astype(jnp.float32) - y) ** 2)  # noqa: E731
        compute = jaxmp.nnx.value_and_grad(squares, accumulate=2, accumulate_argnums=(1, 2))
        loss, grads = compute(model, X, Y, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert model.layers[1].kernel[...].dtype == jnp.float8_e4m3fn
    assert losses[-1] < 0.8 * losses[0]


@functools.cache
def after_three_steps(regime_name):
    """The copies of (params, opt_state) on each device."""
    tx, params, opt_state = make(inner=optax.sgd(0.05))

    def step(state, batch, mean):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state[0], batch["x"], batch["y"], opt_state=state[1])
        return jaxmp.apply_gradients(tx, mean(grads), state[1], state[0]), loss

    regime = regimes.SINGLE if regime_name == "single" else regimes.REGIMES[regime_name]
    compiled, state = regime.compile(step), regime.place((params, opt_state))
    for _ in range(3):
        state, _ = jax.block_until_ready(compiled(state, regime.shard({"x": X, "y": Y})))
    return regime.copies(state)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("regime_name", ["pmap", "shard_map", "jit_fsdp"])
def test_in_parallel_all_devices_write_the_same_kernels(regime_name):
    (single,), parallel = after_three_steps("single"), after_three_steps(regime_name)
    for copy in parallel:
        assert_same_program(copy, parallel[0])
    masters = [jaxmp.get_master_params(state[1], state[0]) for state in (parallel[0], single)]
    assert_close(masters[0], masters[1], rtol=2.0**-6, atol=2.0**-9)


@pytest.mark.thorough(0)
def test_checkpoints_hold_them(tmp_path):
    import orbax.checkpoint as ocp

    _, params, opt_state, step = job()
    params, opt_state, *_ = step(params, opt_state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": params, "opt_state": opt_state})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "step", {"params": params, "opt_state": opt_state})
    assert_same_program(step(restored["params"], restored["opt_state"])[:2], step(params, opt_state)[:2])


# --- kept over microbatches ------------------------------------------------------------------------------------------


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp8", "bf16"])
def test_kernels_kept_over_microbatches_change_nothing(policy):
    """The amaxes of kernels are those of the same numbers; all else comes from two programs, which may round apart."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=RECIPE)
    start = jaxmp.get_policy(policy).cast_to_param(params32()), jax.jit(tx.init)(params32())
    results = []
    for keep in (False, True):
        step = stepper(tx, accumulate=4, accumulate_argnums=(1, 2), keep_fp8_weights=keep)
        params, opt_state, loss, first = step(*start)
        results.append((first, loss, step(params, opt_state)[0]))
    (first, loss, params), (kept_first, kept_loss, kept_params) = results
    assert kept_first["Dense_1"]["kernel"].dtype == jnp.float32
    assert_exact(kept_first["Dense_1"]["Fp8DotGeneral_0"][LEAF], first["Dense_1"]["Fp8DotGeneral_0"][LEAF])
    assert_close(kept_loss, loss, rtol=1e-4)
    for kept, expected in ((kept_first, first), (kept_params, params)):
        jax.tree.map(lambda a, b: assert_close(a, b, atol=2.0**-8 * float(np.abs(b).max())), kept, expected)


def test_kept_kernels_are_cast_once():
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "fp8", recipe=RECIPE)
    params, opt_state = params32(), tx.init(params32())

    def saturations_in_loop(keep):  # of a kernel's shape; only a real cast saturates
        compute = jaxmp.value_and_grad(loss_fn, accumulate=2, accumulate_argnums=(1, 2), keep_fp8_weights=keep)
        program = jax.make_jaxpr(lambda p, s: compute(p, X, Y, opt_state=s))(params, opt_state)
        (loop,) = (e for e in program.eqns if e.primitive.name == "scan")
        text = str(loop.params["jaxpr"])
        return len(re.findall(rf"f32\[{WIDTH},{WIDTH}\] = (?:clamp|min|pjit\[name=clip|jit\[name=clip)", text))

    assert saturations_in_loop(keep=False) > 0
    assert saturations_in_loop(keep=True) == 0


def test_they_need_delayed_scaling():
    policy = jaxmp.get_policy("bf16", fp8_weights=True)
    for recipe in (None, jaxmp.fp8.CurrentScaling()):
        with pytest.raises(ValueError, match="fp8_weights=True stores kernels with the scales of delayed scaling"):
            jaxmp.mixed_precision(optax.adam(1e-2), policy, recipe=recipe)


def test_linen_layers_that_are_switched_off_multiply_by_the_weight_itself():
    _, params, *_ = job()
    with jaxmp.fp8.autocast(enabled=False):
        off = Net().apply({"params": params}, X)
    expected = Net().apply({"params": jaxmp.fp8.load_weights(params, jnp.bfloat16)}, X)
    assert_close(off, expected, rtol=2.0**-6, atol=2.0**-8)


def test_a_kernel_beside_two_products_is_not_stored():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, rows, sizes):
            for name in ("kernel", "w2"):
                weight = self.param(name, nn.initializers.lecun_normal(), (2, WIDTH, WIDTH))
                rows = jaxmp.linen.Fp8RaggedDot(RECIPE)(rows, weight, sizes)
            return rows

    sizes = jnp.array([40, 24])
    params = jax.jit(Experts().init)(jax.random.key(0), X, sizes)["params"]
    policy = jaxmp.get_policy("fp8", fp8_weights=True)
    with pytest.warns(UserWarning, match="got kernel beside Fp8RaggedDot_0, Fp8RaggedDot_1") as caught:
        stored = policy.cast_to_param(params)  # the paths do not say which of both reads `kernel`
    assert len(caught) == 1 and "kernel-not-stored" in str(caught[0].message)
    assert_same_program(*(Experts().apply({"params": p}, X, sizes) for p in (stored, params)))


def own_promotion(*args, dtype=None, **_):
    return [None if x is None else jnp.asarray(x, dtype) for x in (args[0] if len(args) == 1 else args)]


BOXED = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
IN_FP8 = {"dtype": jnp.bfloat16, "dot_general_cls": jaxmp.linen.Fp8DotGeneral}
OF_LINEN = {
    "dense": lambda: nn.Dense(WIDTH, **IN_FP8),
    "boxed": lambda: nn.Dense(WIDTH, kernel_init=BOXED, **IN_FP8),
    "own promotion": lambda: nn.Dense(WIDTH, promote_dtype=own_promotion, **IN_FP8),
    "general": lambda: nn.DenseGeneral((4, WIDTH // 4), **IN_FP8),
    "in float16": lambda: nn.Dense(WIDTH, **IN_FP8 | {"dtype": jnp.float16}),
    "einsum": lambda: linen_layers.Fp8Einsum((WIDTH, WIDTH), "...i,ij->...j", dtype=jnp.bfloat16),
    "conv": lambda: nn.Conv(
        WIDTH, (1,), dtype=jnp.bfloat16, conv_general_dilated_cls=linen_layers.Fp8ConvGeneralDilated
    ),
    "attention": lambda: nn.MultiHeadDotProductAttention(
        4,
        dtype=jnp.bfloat16,
        qkv_dot_general_cls=jaxmp.linen.Fp8DotGeneral,
        out_dot_general_cls=jaxmp.linen.Fp8DotGeneral,
    ),
    "remat": lambda: nn.remat(nn.Dense)(WIDTH, **IN_FP8),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", OF_LINEN)
def test_layers_that_the_user_turned_to_fp8_evaluate_with_stored_kernels(name):
    """flax promotes the kernel to the layer's dtype before the product sees it."""
    layer, x = OF_LINEN[name](), X[None]
    params = layer.init(jax.random.key(0), x)["params"]
    params = jaxmp.get_policy("fp8", fp8_weights=True).cast_to_param(params)
    assert any(map(stored_kernels.is_stored, jax.tree.leaves(params)))
    weights = jaxmp.fp8.load_weights(params, jnp.bfloat16)
    for is_on in (True, False):
        with jaxmp.fp8.autocast(enabled=is_on):
            got, expected = (layer.apply({"params": p}, x) for p in (params, weights))
        assert_same_program(got, expected)
    assert_same_program(layer.apply({"params": params}, x), layer.apply({"params": weights}, x))


def test_boxed_layers_of_a_region_evaluate_with_stored_kernels_also_when_switched_off():
    layer = nn.Sequential([nn.Dense(WIDTH, dtype=jnp.bfloat16, kernel_init=BOXED) for _ in range(3)])
    with in_fp8():
        params = jax.jit(layer.init)(jax.random.key(0), X)["params"]
    params = jaxmp.get_policy("fp8", fp8_weights=True).cast_to_param(params)
    weights = jaxmp.fp8.load_weights(params, jnp.bfloat16)
    with jaxmp.fp8.autocast(enabled=False):
        assert_same_program(layer.apply({"params": params}, X), layer.apply({"params": weights}, X))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "options", [{}, {"dtype": jnp.bfloat16}, {"dtype": jnp.float16, "promote_dtype": own_promotion}]
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_nnx_layers_evaluate_with_stored_kernels(options, by_hand):
    model = nnx.Sequential(
        *(
            nnx.Linear(
                WIDTH,
                WIDTH,
                rngs=nnx.Rngs(i),
                dot_general=jaxmp.nnx.Fp8DotGeneral(RECIPE) if by_hand and i == 1 else jax.lax.dot_general,
                **options,
            )
            for i in range(3)
        )
    )
    if not by_hand:
        jaxmp.nnx.to_fp8(model, RECIPE)
    jaxmp.nnx.cast_to_param(model, jaxmp.get_policy("fp8", fp8_weights=True))
    assert stored_kernels.is_stored(model.layers[1].kernel[...])
    with_weights = nnx.clone(model)
    nnx.update(with_weights, jaxmp.fp8.load_weights(nnx.state(model), jnp.bfloat16))
    for is_on in (True, False):
        with jaxmp.fp8.autocast(enabled=is_on):
            assert_same_program(model(X), with_weights(X))


def test_jax_value_and_grad_says_what_to_do():
    tx, params, opt_state, _ = job()
    grads = jax.tree.map(jnp.zeros_like, params)  # in fp8, as jax.grad makes them
    with pytest.raises(TypeError, match="kernels stored in fp8, differentiate by jaxmp.value_and_grad"):
        jaxmp.apply_gradients(tx, grads, opt_state, params)
