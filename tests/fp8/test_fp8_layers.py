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
from same_operations import assert_same_operations

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


OPT_STATE = jaxmp.unscale_and_skip(optax.identity()).init(())  # for value_and_grad alone


def amaxes_of(apply, params, *args):
    """The amaxes in the gradients of a mean-square loss, by the layer that holds them; and the gradients."""
    compute = jaxmp.value_and_grad(lambda p: mean_square(apply(p, *args)))
    grads = jax.jit(lambda p: compute(p, opt_state=OPT_STATE)[1])(params)
    amaxes = {}
    for path, amax in jaxmp.fp8.get_amaxes(grads).items():
        layer, _, name = f"/{path}".rsplit("/", 2)
        amaxes.setdefault(layer.removeprefix("/"), {})[name] = np.asarray(amax)
    return amaxes, grads


@nnx.jit
def nnx_gradients(model):
    return jaxmp.nnx.value_and_grad(lambda model: mean_square(model(X)))(model, opt_state=OPT_STATE)[1]


# linen: dot_general_cls


def test_current_scaling_needs_no_leaves():
    layer = nn.Dense(SIDE, dot_general_cls=functools.partial(Fp8DotGeneral, recipe=CurrentScaling()))
    params = shapes_of_init(layer, X)
    assert sorted(params) == ["bias", "kernel"]
    assert "float8" in str(jax.make_jaxpr(lambda params: layer.apply({"params": params}, X))(params))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=CurrentScaling())
    assert not states.find(jax.eval_shape(tx.init, params), states.Fp8State)
    model = NnxNet(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(model, CurrentScaling()) == NNX_INNER
    assert not jax.tree.leaves(nnx.state(model, jaxmp.nnx.Fp8Scale))


def test_promote_all_but_kernel_keeps_the_gradient_of_the_kernel_in_float32():
    """flax casts the kernel to the layer's dtype, and its gradient is rounded on the way back."""
    kwargs = {"dtype": BF16, "promote_dtype": jaxmp.fp8.promote_all_but_kernel}
    layer = nn.Dense(SIDE, dot_general_cls=FP8, **kwargs)
    params = init(layer, X)
    assert_within_ulps(without_leaves(params), init(nn.Dense(SIDE), X), 4)  # drawn by two programs
    of_linen = amaxes_of(lambda p: layer.apply({"params": p}, X), params)[1]["kernel"]
    model = nnx.Linear(SIDE, SIDE, dot_general=jaxmp.nnx.Fp8DotGeneral(RECIPE), rngs=nnx.Rngs(0), **kwargs)
    for kernel in (of_linen, nnx.as_pure(nnx_gradients(model))["kernel"]):
        assert kernel.dtype == F32
        assert np.any(kernel.astype(BF16).astype(F32) != kernel)


# autocast: models as they are


class Block(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(nn.Dense(2 * SIDE, name="up")(x)))
        return x + nn.Dense(SIDE, name="down")(h)


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


def test_a_filter_gets_the_layer():
    """What runs in fp8 by default, and the other kinds of filters: test_chosen_layers.py."""
    with autocast(RECIPE, filter=lambda path, layer: layer.features == SIDE):
        assert converted(shapes_of_init(Model(), X)) == ["blocks_0/down", "embed", "head"]


@pytest.mark.thorough(0)
def test_every_method_runs_the_layers_that_hold_scales():
    """`encode` is a part of the model: its last layer is not the last layer of the model."""
    model = Model(rate=0.5)
    with autocast(RECIPE):
        params = init(model, X, train=True)
        apply = functools.partial(model.apply, method="encode", train=True, rngs={"dropout": KEY})
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
    layer, plain = nn.Dense(SIDE, dtype=BF16, dot_general_cls=FP8), nn.Dense(SIDE, dtype=BF16)
    apply = lambda params: layer.apply({"params": params}, X)  # noqa: E731
    params = shapes_of_init(layer, X)
    nnx_layer, nnx_plain = (
        nnx.Linear(SIDE, SIDE, dtype=BF16, rngs=nnx.Rngs(0), **product)
        for product in ({"dot_general": jaxmp.nnx.Fp8DotGeneral()}, {})
    )
    nnx_plain.kernel[...] = nnx_layer.kernel[...]
    with autocast(enabled=False):
        assert_same_operations(apply, lambda params: plain.apply({"params": without_leaves(params)}, X), params)
        assert_same_operations(lambda: nnx_layer(X), lambda: nnx_plain(X))
    assert "float8" in str(jax.make_jaxpr(lambda params: apply(params))(params))


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


def scanned(x):
    """Three layers that share their weights."""
    return nn.scan(ScanBlock, split_rngs={"params": False}, length=3, variable_broadcast="params")()(x, None)[0]


def heads(x):
    return nn.DenseGeneral(2 * SIDE, batch_dims=(0,))(x.reshape(2, SIDE, SIDE)).reshape(4 * SIDE, SIDE)


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


def test_a_product_of_the_user_stays():
    """And its layer is neither the first nor the last. flax counts the layers as they are made."""
    with autocast(RECIPE):
        params = shapes_of_init(Net(with_products_of_their_own), X)
    assert converted(params) == ["plain"]
    rngs = nnx.Rngs(0)
    own = nnx.Linear(SIDE, SIDE, dot_general=own_product, rngs=rngs)
    layers = nnx.Dict(own=own, plain=nnx.Linear(SIDE, SIDE, rngs=rngs))
    assert jaxmp.nnx.to_fp8(layers, RECIPE, filter="*") == ["plain"]


KINDS = {  # by the path of the layer; the others are in tests/suites/test_fp8_zoo.py
    "Dense_0": lambda x: twice(nn.Dense(SIDE), x),
    "CheckpointLayer_0/Dense_0": lambda x: nn.remat(Layer, static_argnums=(2,))()(x, False),
    "ScanScanBlock_0/Layer_0/Dense_0": scanned,
    "DenseGeneral_0": heads,
}


def test_models_of_all_kinds_train():
    """Two steps: the loss falls, every scale leaf has moved, and the compiled step serves both."""
    model = Net(lambda x: functools.reduce(lambda x, layer: layer(x), KINDS.values(), x))
    with autocast(RECIPE, filter="*"):
        params = init(model, X)
    assert converted(params) == sorted(KINDS)
    assert {(x.shape, x.dtype) for x in jax.tree.leaves(scale_leaves.partition(params)[0])} == {((), np.dtype(F32))}

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)
    params = jax.tree.map(jnp.asarray, params)  # nn.remat initializes NumPy arrays, which jit counts as another type
    before = scale_leaves.partition(params)[0]

    def loss_fn(params):
        with autocast(RECIPE, filter="*"):
            return mean_square(model.apply({"params": params}, X))

    @jax.jit
    def step(params, opt_state):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    *state, first = step(params, jax.jit(tx.init)(params))
    after, _, second = step(*state)
    assert second < first and step._cache_size() == 1
    after = scale_leaves.partition(after)[0]
    assert all(np.all(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_a_bound_model_and_params_outside_of_the_region():
    model = Model()
    apply = lambda params: model.apply({"params": params}, X)  # noqa: E731
    with autocast(RECIPE):
        params = shapes_of_init(model, X)
        assert_same_operations(lambda params: model.bind({"params": params})(X), apply, params)
        assert "float8" in str(jax.make_jaxpr(lambda params: apply(params))(params))
    assert_same_operations(apply, lambda params: apply(without_leaves(params)), params)


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


def test_to_fp8():
    model, plain = NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(0))
    chosen, expected = (lambda path, layer: isinstance(layer, nnx.Einsum)), ["mix"]
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=chosen) == expected
    scales = jax.tree.leaves(nnx.state(model, jaxmp.nnx.Fp8Scale))
    assert [(x.dtype, x.shape) for x in scales] == [(F32, ())] * 3 * len(expected)
    others = scale_leaves.partition(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[1]
    assert_same_program(jax.tree.leaves(others), jax.tree.leaves(nnx.to_pure_dict(nnx.state(plain, nnx.Param))))
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=chosen) == []  # they have products of their own now


@pytest.mark.thorough(0)
def test_nnx_optimizers_move_the_scales():
    """flax's (ours: suites/test_pairs.py); a skip takes Dropout's counts and BatchNorm's statistics back."""
    model = NnxNet(nnx.Rngs(0))
    jaxmp.nnx.to_fp8(model, RECIPE)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "fp16", recipe=RECIPE, loss_scale=2.0**8)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, "fp16")

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
    model = nnx.Sequential(*(nnx.Linear(SIDE, SIDE, dot_general=product, rngs=nnx.Rngs(i)) for i in range(3)))
    amaxes = jaxmp.fp8.get_amaxes(nnx_gradients(model))
    assert sorted(path.rpartition("/")[2] for path in amaxes) == [GRAD, LHS, RHS]
    (observed,) = [amax for path, amax in amaxes.items() if path.endswith(RHS)]
    assert_exact(observed, np.max([np.abs(layer.kernel[...]) for layer in model.layers]))


def nnx_stack(**axes):
    """Layers of nnx in a stack (`nnx.vmap` for `nnx.scan`), behind a first one."""
    blocks = nnx.vmap(lambda rngs: nnx.Linear(SIDE, 20, rngs=rngs), **axes)(nnx.Rngs(0).split(3))
    return nnx.Dict(first=nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0)), blocks=blocks)


def stack_loss(model, x):
    run = nnx.scan(lambda x, block: jnp.tanh(block(x)[:, :SIDE]), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return mean_square(run(model.first(x), model.blocks) - 1)


@pytest.mark.thorough(0)
def test_calibrate_fills_each_layer_of_a_stack():
    """One pass: no scale is left, no gradient is lost, and weights of other sizes have other scales."""
    model = nnx_stack()
    assert jaxmp.nnx.to_fp8(model, RECIPE) == ["blocks"]
    model.blocks.kernel[...] *= jnp.float32([1, 4, 16])[:, None, None]
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "fp8", recipe=RECIPE)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp8")
    optimizer.calibrate(model, stack_loss, X)
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert float(metrics["fp8/unused"]) == float(metrics["fp8/lost_gradients"]) == 0
    for _, leaf in nnx.to_flat_state(nnx.state(model, jaxmp.nnx.Fp8Scale)):
        assert leaf.shape == (3,) and np.all(np.asarray(leaf.get_value()) != 0)
    scales = jaxmp.fp8.get_scales(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    of_weights = scales[f"blocks/dot_general/{RHS}"].tolist()
    assert of_weights == sorted(set(of_weights), reverse=True) and len(of_weights) == 3


# What a user may get wrong


def test_a_stack_whose_axis_is_not_the_first_is_refused_with_its_path():
    model = nnx_stack(out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0}))
    with pytest.raises(ValueError, match=r"must have its axes first.*kernel of blocks with shape \(16, 3, 20\)"):
        jaxmp.nnx.to_fp8(model, RECIPE)


def test_a_second_to_fp8_with_another_recipe_is_warned_of():
    model = nnx.Sequential(*(nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(i)) for i in range(4)))
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=("layers/1",)) == ["layers/1"]
    assert jaxmp.nnx.to_fp8(model, RECIPE, filter=("layers/1",)) == []  # as it is
    other = CurrentScaling()
    with pytest.warns(UserWarning, match=r"layers/1: it runs in fp8 by DelayedScaling\(.*which stays; make"):
        assert jaxmp.nnx.to_fp8(model, other, filter=("layers/1",)) == []
    assert jaxmp.nnx.to_fp8(model, other) == ["layers/2"]  # the rest
    assert [layer.dot_general.recipe for layer in model.layers[1:3]] == [RECIPE, other]


@pytest.mark.parametrize("recipe", ["delayed", jaxmp.fp8.MXFP8, {"*": "delayed"}], ids=str)
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(TypeError, match=r"a recipe must be one of jaxmp.fp8.*path patterns to them; got"):
        with autocast(recipe):
            pass
    with pytest.raises(TypeError, match="a recipe must be"):
        jaxmp.nnx.to_fp8(nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0)), recipe)


def test_a_loss_outside_of_autocast_is_warned_of():
    with autocast(RECIPE):
        params = shapes_of_init(Model(), X)
    compute = jaxmp.value_and_grad(lambda p: mean_square(Model().apply({"params": p}, X)))
    with pytest.warns(UserWarning, match="with fp8 scales must multiply in fp8; got none that does"):
        jax.eval_shape(lambda p: compute(p, opt_state=OPT_STATE), params)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_a_loss_that_was_traced_before_is_not_warned_of(wrap):
    model = nn.Sequential(tuple(nn.Dense(SIDE, use_bias=False) for _ in range(3)))
    with autocast(RECIPE):
        params = init(model, X)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)
    state = tx.init(params)
    loss_fn = wrap(lambda p: mean_square(model.apply({"params": p}, X)))
    policy = dataclasses.replace(jaxmp.get_policy("fp8"), recipe=RECIPE)
    for _ in range(2):  # two steps that share the loss; jax traces it once
        params, state = jaxmp.fp8.calibrate(loss_fn, params, tx=tx, opt_state=state, policy=policy)
        step = jax.jit(lambda p, state: jaxmp.value_and_grad(loss_fn, policy=policy)(p, opt_state=state))
        assert all(amax > 0 for amax in jaxmp.fp8.get_amaxes(step(params, state)[1]).values())


def test_a_jitted_function_is_traced_anew_in_another_region():
    """It ran as in the first region that called it."""
    model, traces = Model(), []
    init_model = lambda: model.init(KEY, X)["params"]  # noqa: E731

    @jax.jit
    def init():
        traces.append(None)
        return init_model()

    e4m3 = DelayedScaling(fp8_format="E4M3")
    ends_with = lambda end: lambda path, layer: path.endswith(end)  # noqa: E731
    regions = [
        contextlib.nullcontext,
        lambda: autocast(RECIPE),
        lambda: autocast(e4m3),
        lambda: autocast({"*up": e4m3, "*": RECIPE}),
        lambda: autocast(RECIPE, filter=("*up",)),
        lambda: autocast(RECIPE, filter=ends_with("up")),
        lambda: autocast(RECIPE, filter=ends_with("down")),
        lambda: autocast(RECIPE, filter=functools.partial(lambda names, path, layer: path in names, {"embed": X})),
    ]
    for region in regions * 2:
        with region():
            assert jax.tree.structure(jax.eval_shape(init)) == jax.tree.structure(jax.eval_shape(init_model))
    # The dict of the last one is another one each time, and has no hash.
    assert len(traces) == len(regions) + 1


def test_params_without_scales_are_explained():
    params = shapes_of_init(Model(), X)
    missing = pytest.raises(flax.errors.ScopeParamNotFoundError, match="fp8_lhs_e4m3_log2_scale")
    with missing as caught, autocast(RECIPE):
        jax.eval_shape(lambda params: Model().apply({"params": params}, X), params)
    assert "Call model.init as the model is applied, under the same jaxmp.fp8.autocast" in caught.value.__notes__[0]


# Layers of users: subclasses, rules of promotion, einsums that are no GEMM


def half(*args, dtype=None, **kwargs):
    """A `promote_dtype=` that halves the kernel: of linen (three arguments) and of nnx (one tuple)."""
    inputs, kernel, bias = args[0] if len(args) == 1 else args
    return inputs, kernel / 2, bias


LAYERS = {
    "Dense": functools.partial(nn.Dense, SIDE),
    "Einsum": functools.partial(nn.Einsum, (SIDE, 20), "btd,df->btf"),
    "nnx.Linear": functools.partial(nnx.Linear, SIDE, SIDE),
    "nnx.Einsum": functools.partial(nnx.Einsum, "btd,df->btf", (SIDE, 20)),
}


@pytest.mark.parametrize(
    "name", [name if name == "nnx.Linear" else pytest.param(name, marks=pytest.mark.thorough(0)) for name in LAYERS]
)
def test_a_promote_dtype_of_the_user_is_kept(name):
    if name.startswith("nnx"):
        layer, plain = (LAYERS[name](rngs=nnx.Rngs(0), **kwargs) for kwargs in ({"promote_dtype": half}, {}))
        assert jaxmp.nnx.to_fp8(layer, CurrentScaling(), filter="*") == [""]
        call = nnx.jit(lambda layer: layer(SEQUENCE))
        y, expected = call(layer), call(plain) / 2
    else:
        layer, plain = LAYERS[name](promote_dtype=half), LAYERS[name](use_bias=False)
        with autocast(RECIPE, filter="*"):
            params = init(layer, SEQUENCE)
            y = jax.jit(layer.apply)({"params": params}, SEQUENCE)
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
    warned = functools.partial(
        pytest.warns, jaxmp.fp8.FallbackWarning, match="the layer summed does not run in fp8: .* one GEMM"
    )
    with autocast(RECIPE, filter="*"):
        with warned():
            params = init(model, X)
        with warned():
            y = model.apply({"params": params}, X)
    assert sorted(params["summed"]) == ["kernel"]
    assert_same_program(y, model.apply({"params": params}, X))
    layer = nnx.Einsum("bd,df->b", (SIDE, SIDE), rngs=nnx.Rngs(0))
    expected, holder = layer(X), nnx.Dict(summed=layer)
    with warned():
        assert jaxmp.nnx.to_fp8(holder, RECIPE, filter="*") == []
    assert_same_program(holder.summed(X), expected)
    product = nnx_layers.Fp8Einsum(CurrentScaling(), layer="summed")
    with pytest.warns(jaxmp.fp8.FallbackWarning, match="the layer summed"):
        assert_same_program(product("bd,df->b", X, layer.kernel[...]), expected)
    wide = nn.Einsum((SIDE, SIDE), "bd,df->bf", dtype=BF16, preferred_element_type=F32)
    with autocast(CurrentScaling(), filter="*"):
        assert jax.eval_shape(lambda: wide.init_with_output(KEY, X)[0]).dtype == F32


def test_a_layer_of_nnx_is_named_in_its_warnings():
    layers = nnx.Dict(inner=nnx.Dict(outer=nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0))))
    assert jaxmp.nnx.to_fp8(layers, RECIPE, filter="*") == ["inner/outer"]
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
    model = nn.Sequential([nn.Dense(SIDE), OwnEinsum((SIDE, SIDE), "bd,df->bf", name="own"), nn.Dense(SIDE)])
    apply = lambda params: model.apply({"params": params}, X)  # noqa: E731
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"layer layers_1 does not run in fp8: OwnEinsum"):
        with autocast(RECIPE):
            params = shapes_of_init(model, X)
    assert converted(params) == []
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"does not call nn.Einsum.__call__"):
        assert_same_operations(autocast(RECIPE)(apply), apply, params)
    layers = nnx.Dict(own=OwnNnxLinear(SIDE, SIDE, rngs=nnx.Rngs(0)))
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"layer own does not run .* OwnNnxLinear.__call__ does not use"):
        assert jaxmp.nnx.to_fp8(layers, RECIPE, filter="*") == []


# Convolutions of one pixel


@pytest.mark.thorough(0)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_convolution_of_one_pixel_is_a_matmul(framework):
    """Values by all recipes: tests/suites/test_fp8_recipes_by_layers.py."""
    images = X.reshape(2, 4, 4, SIDE)
    kwargs = {"kernel_size": (1, 1), "padding": "CIRCULAR", "strides": (2, 1)}
    if framework == "linen":
        layer = nn.Conv(10, **kwargs)
        with autocast(RECIPE, filter="*"):
            params = init(layer, images)
            y = jax.jit(layer.apply)({"params": params}, images)
        expected = layer.apply({"params": params}, images)
    else:
        layer = nnx.Conv(SIDE, 10, **kwargs, rngs=nnx.Rngs(0))
        expected = layer(images)
        assert jaxmp.nnx.to_fp8(layer, RECIPE, filter="*") == [""]
        y = nnx.jit(lambda layer: layer(images))(layer)
    assert y.shape == expected.shape and np.any(np.asarray(y != expected))
    np.testing.assert_allclose(y, expected, rtol=0.1, atol=0.2)


@pytest.mark.parametrize(
    "kwargs",
    [{"kernel_size": (3, 3)}, {"padding": 1}, {"feature_group_count": 2}, {"input_dilation": 2, "padding": 0}],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(kwargs):
    kwargs = {"kernel_size": (1, 1), **kwargs}
    images = X.reshape(2, 4, 4, SIDE)
    with pytest.warns(UserWarning, match="with weights for fp8 .*: it is no matmul"), autocast(RECIPE, filter="*"):
        assert sorted(shapes_of_init(nn.Conv(10, **kwargs), images)) == ["bias", "kernel"]
    rngs = nnx.Rngs(0)
    layers = nnx.Dict(a=nnx.Conv(SIDE, 10, **kwargs, rngs=rngs), b=nnx.Linear(4, 4, rngs=rngs))
    assert jaxmp.nnx.to_fp8(layers, RECIPE, filter="*") == ["b"]
    own = nn.Conv(10, **kwargs, conv_general_dilated_cls=linen_layers.Fp8ConvGeneralDilated)
    with pytest.raises(ValueError, match="a matmul at each pixel; got a kernel"):
        shapes_of_init(own, images)
