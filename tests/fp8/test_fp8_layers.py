"""fp8 layers of linen and nnx: which layers run in fp8, which leaves they hold, and that models of all kinds train."""

import contextlib
import dataclasses
import functools
from typing import Any

import flax
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from fp8_model import GRAD, LHS, RHS, SIDE, to_host
from helpers import assert_exact, assert_moved, assert_same_program, assert_within_ulps
from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import layers, linen_layers, nnx_layers, scale_leaves
from jaxmp._src.step import state as states
from jaxmp.fp8 import CurrentScaling, DelayedScaling, autocast, is_scale
from jaxmp.linen import Fp8DotGeneral

F32, BF16 = np.float32, jnp.bfloat16
RECIPE = DelayedScaling(amax_history_len=4)
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2 * SIDE, SIDE)).astype(F32)  # [batch, features]
WITH_INF = np.where(np.arange(X.size).reshape(X.shape) == 0, F32(np.inf), X)
SEQUENCE = X.reshape(2, SIDE, SIDE)  # [batch, time, features]
FP8 = functools.partial(Fp8DotGeneral, recipe=RECIPE)


def converted(params):
    """Paths of the layers that hold scale leaves."""
    paths = [tree_paths.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return sorted({path.rsplit("/", 2)[0] for path in paths if is_scale(path)})


def all_true(path, layer):
    return True


def without_leaves(params):
    if not isinstance(params, dict):
        return params
    return {name: without_leaves(x) for name, x in params.items() if not name.startswith("Fp8DotGeneral")}


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def init(model, *args, **kwargs):
    """In one program: op by op, each region compiles each operation anew."""
    return model.init({"params": KEY, "dropout": KEY}, *args, **kwargs)["params"]


def shapes_of_init(model, *args, **kwargs):
    """The params that `init` would make, where their numbers do not matter."""
    return jax.eval_shape(functools.partial(model.init, {"params": KEY, "dropout": KEY}, **kwargs), *args)["params"]


def mean_square(y):
    return jnp.mean(y.astype(F32) ** 2)


def amaxes_of(apply, params, *args):
    """The amaxes in the gradients of a mean-square loss, by the layer that holds them."""
    opt_state = jaxmp.unscale_and_skip(optax.identity()).init(())

    @jax.jit
    def f(params):
        _, grads = jaxmp.value_and_grad(lambda p: mean_square(apply(p, *args)))(params, opt_state=opt_state)
        return grads, jaxmp.fp8.get_amaxes(grads)

    grads, amaxes = f(params)
    found = {}
    for path, amax in amaxes.items():
        layer, _, name = f"/{path}".rsplit("/", 2)
        found.setdefault(layer.removeprefix("/"), {})[name] = np.asarray(amax)
    return found, grads


def check_trains(apply, params, *args, recipe=RECIPE, policy="fp8", steps=2):
    """Two steps: the loss falls, every scale leaf has moved, and the compiled step serves both."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=recipe)
    params = jax.tree.map(jnp.asarray, params)  # nn.remat initializes NumPy arrays, which jit counts as another type
    before = scale_leaves.partition(params)[0]

    @jax.jit
    def step(params, opt_state):
        loss, grads = jaxmp.value_and_grad(lambda p: mean_square(apply(p, *args)))(params, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    opt_state, losses = jax.jit(tx.init)(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert step._cache_size() == 1
    after = scale_leaves.partition(params)[0]
    moved = [np.all(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert moved and all(moved)
    return params


# linen: dot_general_cls


def test_current_scaling_needs_no_leaves():
    layer = nn.Dense(SIDE, dot_general_cls=functools.partial(Fp8DotGeneral, recipe=CurrentScaling()))
    params = init(layer, X)
    assert sorted(params) == ["bias", "kernel"]
    plain = nn.Dense(SIDE)
    assert_same_program(params, init(plain, X))
    y, exact = jax.jit(layer.apply)({"params": params}, X), jax.jit(plain.apply)({"params": params}, X)
    assert 0 < float(jnp.max(jnp.abs(y - exact))) < 0.3
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=CurrentScaling())
    assert not jaxmp._src.step.state.find(tx.init(params), states.Fp8State)
    model = NnxNet(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(model, CurrentScaling()) == NNX_INNER
    assert not jax.tree.leaves(nnx.state(model, jaxmp.nnx.Fp8Scale))


@pytest.mark.parametrize("promotes", [False, True])
def test_promote_all_but_kernel_keeps_the_gradient_of_the_kernel_in_float32(promotes):
    """flax casts the kernel to the layer's dtype, and its gradient is rounded on the way back."""
    kwargs = {"dtype": BF16} | ({"promote_dtype": jaxmp.fp8.promote_all_but_kernel} if promotes else {})
    layer = nn.Dense(SIDE, dot_general_cls=FP8, **kwargs)
    params = init(layer, X)
    of_linen = amaxes_of(lambda p: layer.apply({"params": p}, X), params)[1]["kernel"]
    model = nnx.Linear(SIDE, SIDE, dot_general=jaxmp.nnx.Fp8DotGeneral(RECIPE), rngs=nnx.Rngs(0), **kwargs)
    opt_state = jaxmp.unscale_and_skip(optax.identity()).init(())
    _, grads = jaxmp.nnx.value_and_grad(lambda m: mean_square(m(X)))(model, opt_state=opt_state)
    for kernel in (of_linen, nnx.as_pure(grads)["kernel"]):
        assert kernel.dtype == F32
        assert np.array_equal(kernel.astype(BF16).astype(F32), kernel) == (not promotes)


# autocast: models as they are


class Block(nn.Module):
    width: int = 2 * SIDE
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.gelu(nn.Dense(self.width, name="up")(nn.LayerNorm()(x)))
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        return x + nn.Dense(x.shape[-1], name="down")(h)


class Model(nn.Module):
    rate: float = 0.0

    def setup(self):
        self.embed = nn.Dense(SIDE)
        self.blocks = [Block(rate=self.rate)]
        self.head = nn.Dense(SIDE)

    def __call__(self, x, train=False):
        return self.head(self.encode(x, train=train))

    def encode(self, x, train=False):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, train=train)
        return x


INNER = ["blocks_0/down", "blocks_0/up"]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, INNER),
        (("*up",), ["blocks_0/up"]),
        ("*down", ["blocks_0/down"]),
        (("embed", "head"), ["embed", "head"]),
        (lambda path, layer: layer.features == SIDE, ["blocks_0/down", "embed", "head"]),
        ((), []),
    ],
    ids=["default", "globs", "glob", "ends", "function", "none"],
)
def test_filters(chosen, expected):
    """By default all but the first and the last layer with weights; a filter says it all."""
    with autocast(RECIPE, filter=chosen):
        params = init(Model(), X)
    assert converted(params) == sorted(expected)
    assert_within_ulps(without_leaves(params), init(Model(), X), 4)  # drawn by two programs


@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_every_method_runs_the_layers_that_hold_scales(method):
    """`encode` is a part of the model: its last layer is not the last layer of the model."""
    model = Model(rate=0.5)
    with autocast(RECIPE):
        params = init(model, X, train=True)
        apply = functools.partial(model.apply, method=method, train=True, rngs={"dropout": KEY})
        observed, _ = amaxes_of(lambda p: apply({"params": p}, X), params)
    assert sorted(observed) == INNER
    assert all(amax > 0 for layer in observed.values() for amax in layer.values())


def test_the_innermost_region_counts():
    with autocast(RECIPE):
        with autocast(DelayedScaling(fp8_format="E4M3")):
            leaves = shapes_of_init(Model(), X)["blocks_0"]["up"]["Fp8DotGeneral_0"]
            assert sorted(leaves) == [f"fp8_{name}_e4m3_log2_scale" for name in ("grad", "lhs", "rhs")]
        with autocast(enabled=False):
            assert converted(shapes_of_init(Model(), X)) == []
            with autocast(RECIPE, filter=("head",)):
                assert converted(shapes_of_init(Model(), X)) == ["head"]
        assert converted(shapes_of_init(Model(), X)) == INNER
    assert layers.is_enabled()


def test_disabled_layers_run_in_their_own_dtype():
    linen_layer = nn.Dense(SIDE, dtype=BF16, dot_general_cls=FP8)
    params = init(linen_layer, X)
    nnx_layer = nnx.Linear(SIDE, SIDE, dtype=BF16, dot_general=jaxmp.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
    plain = nnx.Linear(SIDE, SIDE, dtype=BF16, rngs=nnx.Rngs(0))
    apply, call = jax.jit(linen_layer.apply), nnx.jit(lambda layer: layer(X))
    with autocast(enabled=False):
        got, got_nnx = apply({"params": params}, X), call(nnx_layer)
    kept = {name: params[name] for name in ("kernel", "bias")}
    assert_within_ulps(got, jax.jit(nn.Dense(SIDE, dtype=BF16).apply)({"params": kept}, X), 1)
    assert_within_ulps(got_nnx, call(plain), 1)
    assert np.any(np.asarray(apply({"params": params}, X) != got))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return x + nn.Dense(SIDE)(x)


class ScanBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Layer()(x, True), None


def twice(layer, x):
    return layer(nn.tanh(layer(x)))


def scanned(x, block=ScanBlock, **variables):
    """Three layers, by default with weights of their own."""
    variables = variables or {"variable_axes": {"params": 0}}
    rngs = {"params": "variable_axes" in variables}
    return nn.scan(block, split_rngs=rngs, length=3, **variables)()(x, None)[0]


def three_members(x):
    members = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3)
    return members(SIDE)(x)


def own_product(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


def with_products_of_their_own(x):
    x = nn.Dense(SIDE, dot_general=own_product)(nn.Dense(SIDE)(x))
    x = nn.Dense(SIDE, dot_general_cls=functools.partial(Fp8DotGeneral, recipe=CurrentScaling()))(x)
    return nn.Dense(SIDE)(nn.Dense(SIDE, name="plain")(x))


class Net(nn.Module):
    """One of several kinds of model round the same layers."""

    call: Any

    @nn.compact
    def __call__(self, x):
        return self.call(x)


ENDS = {
    "scan": (lambda x: scanned(nn.Dense(SIDE)(nn.Dense(SIDE)(x))), ["Dense_0", "ScanScanBlock_0/Layer_0/Dense_0"]),
    "others": (
        lambda x: nn.Conv(SIDE, (3,))(nn.Dense(SIDE)(nn.Dense(SIDE)(nn.Embed(32, SIDE)(x.astype(int))))),
        ["Dense_0", "Dense_1"],
    ),
    "own products": (with_products_of_their_own, ["plain"]),
}


@pytest.mark.parametrize(("call", "expected"), ENDS.values(), ids=ENDS)
def test_the_first_and_the_last_layer_with_weights_stay(call, expected):
    """A layer in a scan is neither; embeddings and convolutions are. A product of the user's stays.

    flax counts the layers as they are made: the one that is called last is Dense_0.
    """
    with autocast(RECIPE):
        params = shapes_of_init(Net(call), X)
    assert converted(params) == expected


KINDS = {  # the layers of the model, and the shape of their leaves
    "shared": (lambda x: twice(nn.Dense(SIDE), x), "Dense_0", ()),
    "remat": (lambda x: nn.remat(Layer, static_argnums=(2,))()(x, False), "CheckpointLayer_0/Dense_0", ()),
    "scan": (lambda x: scanned(x, nn.remat(ScanBlock)), "ScanCheckpointScanBlock_0/Layer_0/Dense_0", (3,)),
    "broadcast": (lambda x: scanned(x, variable_broadcast="params"), "ScanScanBlock_0/Layer_0/Dense_0", ()),
    "vmap": (three_members, "VmapDense_0", (3,)),
    "two axes": (lambda x: nn.DenseGeneral(32, axis=(-2, -1))(x.reshape(SIDE, 2, SIDE)), "DenseGeneral_0", ()),
    "batch_dims": (lambda x: nn.DenseGeneral(16, batch_dims=(0,))(x.reshape(2, SIDE, SIDE)), "DenseGeneral_0", ()),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("call", "layer", "shape"), KINDS.values(), ids=KINDS)
def test_models_of_all_kinds_train(call, layer, shape):
    model = Net(call)
    with autocast(RECIPE, filter=all_true):
        variables = jax.jit(model.init)(KEY, X)
    params = variables.pop("params")
    assert converted(params) == [layer]
    assert {(x.shape, x.dtype) for x in jax.tree.leaves(scale_leaves.partition(params)[0])} == {(shape, np.dtype(F32))}
    assert_within_ulps(without_leaves(params), init(model, X), 4)  # drawn by two programs

    def apply(params):
        with autocast(RECIPE, filter=all_true):
            return model.apply({"params": params} | variables, X)

    check_trains(apply, params)


@pytest.mark.thorough(0)
def test_a_bound_model_and_params_outside_of_the_region():
    model = Model()
    with autocast(RECIPE):
        params = init(model, X)
        expected = model.apply({"params": params}, X)
        assert_same_program(model.bind({"params": params})(X), expected)
    exact = model.apply({"params": without_leaves(params)}, X)
    assert np.any(np.asarray(exact != expected))
    assert_same_program(model.apply({"params": params}, X), exact)


@pytest.mark.thorough(0)
def test_two_recipes_in_one_model():
    """Each layer has its own, and the optimizer has a dict of them by path."""
    other = DelayedScaling(amax_history_len=2, fp8_format="E4M3", power_of_two=False)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(SIDE, dot_general_cls=FP8, name="up")(x))
            return nn.Dense(SIDE, dot_general_cls=functools.partial(Fp8DotGeneral, recipe=other), name="down")(x)

    params = init(Net(), X)
    recipes = {"up/*": RECIPE, "down/*": other}
    params = check_trains(lambda p: Net().apply({"params": p}, X), params, recipe=recipes)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipes).init(params)
    (found,) = jaxmp._src.step.state.find(opt_state, states.Fp8State)
    assert sorted(group.amax_history.shape for group in found.amax_states) == [(2, 1), (2, 2), (4, 1), (4, 2)]


# nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(SIDE, rngs=rngs)
        self.up = nnx.Linear(SIDE, 2 * SIDE, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.LinearGeneral(2 * SIDE, SIDE, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norm(x)))))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(SIDE, SIDE, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs)])
        self.mix = nnx.Einsum("td,de->te", (SIDE, SIDE), rngs=rngs)
        self.head = nnx.Linear(SIDE, SIDE, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mix(x))


NNX_INNER = ["blocks/0/up", "blocks/0/down", "mix"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, NNX_INNER),
        (("*up", "head"), ["blocks/0/up", "head"]),
        (lambda path, layer: isinstance(layer, nnx.Einsum), ["mix"]),
    ],
    ids=["default", "globs", "function"],
)
def test_to_fp8(chosen, expected):
    model, plain = NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=chosen) == expected
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    scales = nnx.state(model, jaxmp.nnx.Fp8Scale)
    assert len(jax.tree.leaves(scales)) == 3 * len(expected)
    assert all(x.dtype == F32 and x.shape == () for x in jax.tree.leaves(scales))
    others = scale_leaves.partition(params)[1]
    assert_same_program(jax.tree.leaves(others), jax.tree.leaves(nnx.to_pure_dict(nnx.state(plain, nnx.Param))))
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=chosen) == []  # they have products of their own now


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kind", ["flax", "jaxmp"])
def test_nnx_optimizers_move_the_scales(kind):
    """Under nnx.jit, with Dropout's counts and BatchNorm's statistics, which a skip takes back."""
    model = NnxNet(nnx.Rngs(0))
    jaxmp.nnx.to_fp8(model, RECIPE)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "fp16", recipe=RECIPE, loss_scale=2.0**8)
    if kind == "flax":
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        jaxmp.nnx.cast_to_param(model, "fp16")
    else:
        optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp16")

    @nnx.jit
    def step(model, optimizer, x):
        before = jaxmp.nnx.snapshot(model)
        compute = jaxmp.nnx.value_and_grad(lambda model, x: mean_square(model(x) - x))
        loss, grads = compute(model, x, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(4)]
    assert losses[-1] < losses[0]
    scales = jax.tree.leaves(nnx.state(model, jaxmp.nnx.Fp8Scale))
    assert len(scales) == 3 * len(NNX_INNER) and all(x.dtype == F32 and x != 0 for x in scales)
    assert model.embed.kernel[...].dtype == np.float16
    kinds = nnx.Any(nnx.Param, nnx.BatchStat)
    before = to_host(nnx.to_pure_dict(nnx.state(model, kinds)))
    step(model, optimizer, WITH_INF)
    assert bool(jaxmp.get_metrics(optimizer.opt_state)["skipped"])
    assert_moved(to_host(nnx.to_pure_dict(nnx.state(model, kinds))), before)


def test_layers_of_nnx_that_share_a_product_share_its_scales():
    """Their amaxes are combined by MAX."""
    product = jaxmp.nnx.Fp8DotGeneral(RECIPE)
    layers = nnx.List([nnx.Linear(SIDE, SIDE, dot_general=product, rngs=nnx.Rngs(i)) for i in range(3)])
    opt_state = jaxmp.unscale_and_skip(optax.identity()).init(())
    compute = jaxmp.nnx.value_and_grad(lambda layers: mean_square(layers[2](layers[1](layers[0](X)))))
    amaxes = jaxmp.fp8.get_amaxes(compute(layers, opt_state=opt_state)[1])
    assert sorted(path.rpartition("/")[2] for path in amaxes) == [GRAD, LHS, RHS]
    (observed,) = [amax for path, amax in amaxes.items() if path.endswith(RHS)]
    assert_exact(observed, max(jnp.max(jnp.abs(layer.kernel[...])) for layer in layers))


# --- what a user may get wrong ----------------------------------------------------------------------------------------


def test_a_second_to_fp8_with_another_recipe_is_warned_of():
    layers = [nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(i)) for i in range(4)]
    model = nnx.Sequential(*layers)
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=("layers/1",)) == ["layers/1"]
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=("layers/1",)) == []  # as it is
    other = jaxmp.fp8.CurrentScaling()
    with pytest.warns(UserWarning, match=r"layers/1: it runs in fp8 by DelayedScaling\(.*which stays; make"):
        assert jaxmp.nnx.to_fp8(model, other, filter=("layers/1",)) == []
    assert jaxmp.nnx.to_fp8(model, other) == ["layers/2"]  # the rest
    assert (layers[1].dot_general.recipe, layers[2].dot_general.recipe) == (RECIPE, other)


@pytest.mark.parametrize("recipe", ["delayed", ("*mlp*",), jaxmp.fp8.MXFP8, {"*": "delayed"}], ids=str)
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(TypeError, match=r"a recipe must be one of jaxmp.fp8.*path patterns to them; got"):
        with autocast(recipe):
            pass
    with pytest.raises(TypeError, match="a recipe must be"):
        jaxmp.nnx.to_fp8(nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0)), recipe)


def test_a_loss_outside_of_autocast_is_warned_of():
    with autocast(RECIPE):
        params = init(Model(), X)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)
    loss_fn = lambda p: jnp.mean(Model().apply({"params": p}, X).astype(jnp.float32) ** 2)  # noqa: E731
    with pytest.warns(UserWarning, match="with fp8 scales must multiply in fp8; got none that does"):
        jaxmp.value_and_grad(loss_fn)(params, opt_state=tx.init(params))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_a_loss_that_was_traced_before_is_not_warned_of(wrap):
    with autocast(RECIPE):
        params = init(Model(), X)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)
    state = tx.init(params)
    loss_fn = wrap(lambda p: jnp.mean(Model().apply({"params": p}, X).astype(jnp.float32) ** 2))
    policy = dataclasses.replace(jaxmp.get_policy("fp8"), recipe=RECIPE)
    for _ in range(2):  # two steps that share the loss; jax traces it once
        params, state = jaxmp.fp8.calibrate(loss_fn, params, tx=tx, opt_state=state, policy=policy)
        step = jax.jit(lambda p, state: jaxmp.value_and_grad(loss_fn, policy=policy)(p, opt_state=state))
        grads = step(params, state)[1]
        assert all(amax > 0 for amax in jaxmp.fp8.get_amaxes(grads).values())


def test_a_jitted_function_is_traced_anew_in_another_region():
    """It ran as in the first region that called it."""
    model, traces = Model(), []

    @jax.jit
    def init():
        traces.append(None)
        return init_model()

    init_model = lambda: model.init(KEY, X)["params"]  # noqa: E731
    e4m3 = DelayedScaling(fp8_format="E4M3")
    regions = [
        contextlib.nullcontext,
        lambda: autocast(RECIPE),
        lambda: autocast(e4m3),
        lambda: autocast({"*up": e4m3, "*": RECIPE}),
        lambda: autocast(RECIPE, filter=("*up",)),
        lambda: autocast(RECIPE, filter=lambda path, layer: path.endswith("down")),
        *(
            lambda name=name: autocast(RECIPE, filter=lambda path, layer: path.endswith(name))
            for name in ("up", "down")
        ),
        lambda: autocast(RECIPE, filter=functools.partial(lambda names, path, layer: path in names, {"embed": X})),
    ]
    for region in regions * 2:
        with region():
            assert jax.tree.structure(jax.eval_shape(init)) == jax.tree.structure(jax.eval_shape(init_model))
    assert len(traces) == len(regions) + 1  # the dict of the last one is another one each time, and has no hash


def test_params_without_scales_are_explained():
    params = init(Model(), X)
    missing = pytest.raises(flax.errors.ScopeParamNotFoundError, match="fp8_lhs_e4m3_log2_scale")
    with missing as caught, autocast(RECIPE):
        Model().apply({"params": params}, X)
    assert "Call model.init as the model is applied, under the same jaxmp.fp8.autocast" in caught.value.__notes__[0]


# Layers of users: subclasses, rules of promotion, einsums that are no GEMM


def half(*args, dtype=None, **kwargs):
    """A `promote_dtype=` that halves the kernel: of linen (three arguments) and of nnx (one tuple)."""
    inputs, kernel, bias = args[0] if len(args) == 1 else args
    return inputs, kernel / 2, bias


LAYERS = {
    "Dense": functools.partial(nn.Dense, SIDE),
    "DenseGeneral": functools.partial(nn.DenseGeneral, (2, 8)),
    "Einsum": functools.partial(nn.Einsum, (SIDE, 20), "btd,df->btf"),
    "Conv": functools.partial(nn.Conv, SIDE, (1,)),
    "nnx.Linear": functools.partial(nnx.Linear, SIDE, SIDE),
    "nnx.LinearGeneral": functools.partial(nnx.LinearGeneral, SIDE, (2, 8)),
    "nnx.Einsum": functools.partial(nnx.Einsum, "btd,df->btf", (SIDE, 20)),
    "nnx.Conv": functools.partial(nnx.Conv, SIDE, SIDE, (1,)),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_promote_dtype_of_the_user_is_kept(name):
    if name.startswith("nnx"):
        layer, plain = (LAYERS[name](rngs=nnx.Rngs(0), **kwargs) for kwargs in ({"promote_dtype": half}, {}))
        assert jaxmp.nnx.to_fp8(layer, CurrentScaling(), filter=all_true) == [""]
        call = nnx.jit(lambda layer: layer(SEQUENCE))
        y, expected = call(layer), call(plain) / 2
    else:
        layer, plain = LAYERS[name](promote_dtype=half), LAYERS[name](use_bias=False)
        with autocast(RECIPE, filter=all_true):
            params = init(layer, SEQUENCE)
            y = layer.apply({"params": params}, SEQUENCE)
            amaxes = amaxes_of(lambda p: layer.apply({"params": p}, SEQUENCE), params)[0]
        expected = plain.apply({"params": {"kernel": params["kernel"]}}, SEQUENCE) / 2
        assert_exact(amaxes[""][LHS], F32(np.max(np.abs(X))))
        assert_exact(amaxes[""][RHS], F32(np.max(np.abs(params["kernel"])) / 2))
    np.testing.assert_allclose(y, expected, rtol=0.1, atol=0.2)


class SummedEinsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((SIDE, SIDE), "bd,df->b", use_bias=False, name="summed")(x)


def test_an_einsum_that_is_no_gemm_runs_as_it_is_and_warns_with_its_path():
    """'f' is summed over the kernel alone. Another einsum keeps its preferred_element_type."""
    model = SummedEinsum()
    said = "the layer summed does not run in fp8: .* one GEMM: the label 'f'"
    with autocast(RECIPE, filter=all_true):
        with pytest.warns(jaxmp.fp8.FallbackWarning, match=said):
            params = init(model, X)
        with pytest.warns(jaxmp.fp8.FallbackWarning, match=said):
            y = model.apply({"params": params}, X)
    assert sorted(params["summed"]) == ["kernel"]
    assert_same_program(y, model.apply({"params": params}, X))
    layer = nnx.Einsum("bd,df->b", (SIDE, SIDE), rngs=nnx.Rngs(0))
    before = layer(X)
    holder = nnx.Dict(summed=layer)
    with pytest.warns(jaxmp.fp8.FallbackWarning, match="the layer summed does not run in fp8: .* one GEMM"):
        assert jaxmp.nnx.to_fp8(holder, RECIPE, filter=all_true) == []
    assert_same_program(holder.summed(X), before)
    product = nnx_layers.Fp8Einsum(CurrentScaling(), layer="summed")
    with pytest.warns(jaxmp.fp8.FallbackWarning, match="the layer summed"):
        assert_same_program(product("bd,df->b", X, layer.kernel[...]), before)
    wide = nn.Einsum((SIDE, SIDE), "bd,df->bf", dtype=BF16, preferred_element_type=F32)
    with autocast(CurrentScaling(), filter=all_true):
        assert jax.eval_shape(lambda: wide.apply({"params": init(wide, X)}, X)).dtype == F32


def test_a_layer_of_nnx_is_named_in_its_warnings():
    layers = nnx.Dict(inner=nnx.Dict(outer=nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0))))
    assert jaxmp.nnx.to_fp8(layers, RECIPE, filter=all_true) == ["inner/outer"]
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"\(layer inner/outer\) runs in float32 instead of fp8"):
        layers.inner.outer.dot_general(X[0], X[0], (((), ()), ((), ())))


class OwnEinsum(nn.Einsum):
    """It computes by itself."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", self.kernel_init, self.shape)


class OwnNnxLinear(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...]


def test_a_subclass_that_computes_by_itself_warns_with_its_path():
    model = OwnEinsum((SIDE, SIDE), "bd,df->bf", name="own")
    holder = nn.Sequential([nn.Dense(SIDE), model, nn.Dense(SIDE)])
    with autocast(RECIPE):
        with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"layer layers_1 does not run in fp8: OwnEinsum"):
            params = holder.init(KEY, X)["params"]
        with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"does not call nn.Einsum.__call__"):
            y = holder.apply({"params": params}, X)
    assert converted(params) == []
    assert_same_program(y, holder.apply({"params": params}, X))
    layers = nnx.Dict(own=OwnNnxLinear(SIDE, SIDE, rngs=nnx.Rngs(0)))
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"layer own does not run .* OwnNnxLinear.__call__ does not use"):
        assert jaxmp.nnx.to_fp8(layers, RECIPE, filter=all_true) == []


# Convolutions of one pixel


@pytest.mark.thorough(0)
@pytest.mark.parametrize("kwargs", [{}, {"strides": 2}, {"padding": "CIRCULAR", "strides": (2, 1)}], ids=str)
def test_a_convolution_of_one_pixel_is_a_matmul(kwargs):
    images = X.reshape(2, 4, 4, SIDE).round()
    layer = nn.Conv(10, (1, 1), **kwargs)
    with autocast(RECIPE, filter=all_true):
        params = init(layer, images)
        params |= {"kernel": params["kernel"].round(1) * 4}
        amaxes = amaxes_of(lambda p: layer.apply({"params": p}, images), params)[0]
        y = layer.apply({"params": params}, images)
    assert_exact(amaxes[""][RHS], np.max(np.abs(params["kernel"])))
    of_nnx = nnx.Conv(SIDE, 10, (1, 1), **kwargs, rngs=nnx.Rngs(0))
    want_nnx = of_nnx(images)
    assert jaxmp.nnx.to_fp8(of_nnx, RECIPE, filter=all_true) == [""]
    for got, want in ((y, layer.apply({"params": params}, images)), (of_nnx(images), want_nnx)):
        assert got.shape == want.shape and np.any(np.asarray(got != want))
        np.testing.assert_allclose(got, want, rtol=0.1, atol=0.2)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "kwargs",
    [{"kernel_size": (3, 3)}, {"padding": 1}, {"feature_group_count": 2}, {"input_dilation": 2, "padding": 0}],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(kwargs):
    kwargs = {"kernel_size": (1, 1), **kwargs}
    images = X.reshape(2, 4, 4, SIDE)
    layer = nn.Conv(10, **kwargs)
    with pytest.warns(UserWarning, match="with weights for fp8 .*: it is no matmul"), autocast(RECIPE, filter=all_true):
        assert sorted(shapes_of_init(layer, images)) == ["bias", "kernel"]
    assert jaxmp.nnx.to_fp8(
        nnx.Dict(a=nnx.Conv(SIDE, 10, **kwargs, rngs=nnx.Rngs(0)), b=nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
        RECIPE,
        filter=all_true,
    ) == ["b"]
    own = nn.Conv(10, **kwargs, conv_general_dilated_cls=linen_layers.Fp8ConvGeneralDilated)
    with pytest.raises(ValueError, match="a matmul at each pixel; got a kernel"):
        init(own, images)


# Stacks of layers in nnx


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(SIDE, SIDE, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(SIDE, SIDE, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.first(x), self.blocks
        )


@pytest.mark.thorough(0)
def test_a_stack_of_nnx_layers_has_a_stack_of_scales_which_trains():
    """Each layer of the stack has its own amaxes and scales."""
    model = Stack(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(model, RECIPE) == ["blocks"]
    model.blocks.kernel[...] *= jnp.float32([1, 4, 16])[:, None, None]
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.01), "fp8", recipe=RECIPE), wrt=nnx.Param)
    kernels = np.asarray(model.blocks.kernel[...])

    @nnx.jit
    def step(model, optimizer):
        compute = jaxmp.nnx.value_and_grad(lambda m: mean_square(m(X)), policy="fp8")
        loss, grads = compute(model, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return loss, grads

    amaxes = jaxmp.fp8.get_amaxes(nnx.to_pure_dict(nnx.state(step(model, optimizer)[1])))
    assert {path: x.shape for path, x in amaxes.items()} == dict.fromkeys(
        (f"blocks/dot_general/{name}" for name in (GRAD, LHS, RHS)), (3,)
    )
    assert_exact(amaxes[f"blocks/dot_general/{RHS}"], np.max(np.abs(kernels), axis=(1, 2)))
    scales = jaxmp.fp8.get_scales(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[f"blocks/dot_general/{RHS}"].tolist()
    assert scales == sorted(set(scales), reverse=True) and len(scales) == 3
    losses = [float(step(model, optimizer)[0]) for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_stack_whose_axis_is_not_the_first_is_refused_with_its_path():
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    model = Stack(nnx.Rngs(0))
    model.blocks = nnx.vmap(lambda rngs: nnx.Linear(SIDE, 20, rngs=rngs), out_axes=axes)(nnx.Rngs(0).split(3))
    with pytest.raises(ValueError, match=r"must have its axes first.*kernel of blocks with shape \(16, 3, 20\)"):
        jaxmp.nnx.to_fp8(model, RECIPE)
