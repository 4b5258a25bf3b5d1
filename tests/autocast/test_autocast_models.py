"""Unmodified models under `jaxmp.autocast`: dtypes as in torch, losses as in float32, gradients as if cast by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autocast_models as models
import jaxmp
import oracle_data
from autocast_models import NAMES
from autocast_twins import TWINS
from helpers import assert_close, sqnr
from same_operations import assert_same_operations

TORCH = oracle_data.load("torch_autocast")["models"]
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16}
SHORT = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()} | {jnp.dtype("float32"): "f32"}
QUICK = {"xla_backend_optimization_level": 0}  # for XLA: compiles in half the time; the models are small
FRAMEWORKS = ("linen", "nnx")

# Layers whose dtype is not torch's: a reason, and the dtype here ("lp" is autocast's).
DEVIATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "cnn": {"pool2": ("a mean is a sum, in float32, and a division", "f32")},
    "transformer": {},
    "lstm": {},
    "lstm_module": {},
    "moe": {
        "dispatched": ("a product that sums nothing, of float32 with 16 bits", "f32"),
        "combined": ("a product that sums four elements, of float32 with 16 bits", "f32"),
        "residual": ("a sum with it", "f32"),
    },
}


def slow(name: str) -> Any:
    """A thorough case: the others have the same layers, or the other test has it."""
    return pytest.param(name, marks=pytest.mark.thorough(0))


def layers_of(framework: str, name: str, lp: str) -> dict[str, Any]:
    """What each layer puts out under autocast, as shapes and dtypes: nothing is computed."""
    if framework == "nnx":
        graphdef, state = nnx.split(nnx.eval_shape(lambda: models.NNX[name](nnx.Rngs(0))))
        return jax.eval_shape(
            lambda state, batch: autocast(models.layers_nnx, lp)(nnx.merge(graphdef, state), batch),
            state,
            models.batch(name),
        )
    params, rest = models.shapes_linen(name)
    return jax.eval_shape(autocast(models.layers_linen(name), lp), params, models.batch(name), rest)


def autocast(fn: Any, lp: str) -> Any:
    return jaxmp.autocast(fn, dtype=DTYPES[lp])


@pytest.mark.thorough(5)
@pytest.mark.parametrize("lp", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_have_the_dtypes_of_torch(framework, name, lp):
    expected = dict(TORCH[name][lp]["layers"])
    for layer, (reason, dtype) in DEVIATIONS[name].items():
        assert reason
        dtype = lp if dtype == "lp" else dtype
        assert expected[layer] != dtype, f"{layer} deviates no longer"
        expected[layer] = dtype
    found = layers_of(framework, name, lp)
    assert {layer: SHORT[found[layer].dtype] for layer in expected} == expected


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_float32_as_in_torch(name):
    assert {dtype for lp in DTYPES for dtype in TORCH[name][lp]["grads, on cpu"].values()} == {"f32"}
    params, rest = models.shapes_linen(name)
    grad = jax.value_and_grad(autocast(models.loss_linen(name), "f16"), has_aux=True)
    (loss, new), grads = jax.eval_shape(grad, params, models.batch(name), rest)
    assert types_of((loss, new, grads)) == types_of((jax.ShapeDtypeStruct((), jnp.float32), rest, params))


def types_of(tree: Any) -> Any:
    """The structure of a tree, and the shape and dtype of each leaf."""
    return jax.tree.structure(tree), [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_output_has_the_structure_of_the_function_itself(name):
    params, rest = models.shapes_linen(name)
    fn, arguments = models.layers_linen(name), (params, models.batch(name), rest)
    plain, cast = (jax.eval_shape(f, *arguments) for f in (fn, autocast(fn, "f16")))
    assert jax.tree.structure(plain) == jax.tree.structure(cast)
    assert [x.shape for x in jax.tree.leaves(plain)] == [x.shape for x in jax.tree.leaves(cast)]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("framework", "name"), [("linen", "cnn"), ("nnx", "lstm")])
def test_float32_is_the_function_itself(framework, name):
    """Loss, gradients and BatchNorm's statistics come from the same operations."""
    functions = []
    for wrap in (lambda fn: fn, lambda fn: jaxmp.autocast(fn, dtype=jnp.float32)):
        if framework == "nnx":
            graphdef, params = nnx.split(nnx.eval_shape(lambda: models.NNX[name](nnx.Rngs(0))))
            rest, fn = {}, nnx.value_and_grad(wrap(models.loss_nnx))
            fn = functools.partial(
                lambda fn, graphdef, params, batch, _: fn(nnx.merge(graphdef, params), batch), fn, graphdef
            )
        else:
            params, rest = models.shapes_linen(name)
            fn = jax.value_and_grad(wrap(models.loss_linen(name)), has_aux=True)
        functions.append(fn)
    assert_same_operations(*functions, params, models.batch(name), rest)


@pytest.mark.parametrize("how", ["passed", "closed over"])
def test_arrays_of_numpy_are_cast_like_any(how):
    x, w = np.full((2, 8), 0.1, np.float32), jnp.ones((8, 3))
    fn = jaxmp.autocast(lambda w, x: x @ w) if how == "passed" else lambda w, _: jaxmp.autocast(lambda w: x @ w)(w)
    assert_close(jax.jit(fn)(w, x), np.full((2, 3), 8 * np.float16(0.1)), rtol=2e-3)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x)).sum()


def test_batch_norm_of_nnx_is_updated_inside():
    """In place and in float32, as the function itself does it."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    @nnx.jit
    def run():
        found = []
        for wrap in (lambda fn: fn, jaxmp.autocast):
            model = Normed(nnx.Rngs(0))
            before = statistics(model)
            wrap(lambda model, x: model(x))(model, x)
            found.append((before, statistics(model)))
        return found

    (before, plain), (_, cast) = run()
    assert all((a != b).any() for a, b in zip(plain, before, strict=True))
    assert_close(cast, plain, rtol=1e-3, atol=1e-4)


def statistics(model: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.BatchStat)))


# Gradients


@functools.cache
def gradients(name: str) -> tuple[Any, Any, Any]:
    """Of autocast, of the twin that is cast by hand, and of float32: (loss, gradients) each."""
    params, rest = models.init_linen(name)
    batch = models.batch(name, 16)
    exact = models.loss_linen(name)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, batch, rest):
        found = []
        for fn in (jaxmp.autocast(exact), models.loss_linen(name, TWINS[name]), exact):

            def scaled(params, fn=fn):  # out of the subnormal numbers of float16
                loss, _ = fn(params, batch, rest)
                return loss * 1024, loss

            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
            found.append((loss, grads))
        return tuple(found)

    return run(params, batch, rest)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", [slow("cnn"), "transformer", "lstm", "moe"])
def test_gradients_are_those_of_a_model_cast_by_hand(name):
    """The two round at other places here and there: neither may be further from float32 than the other by a bit."""
    (loss, cast), (by_hand_loss, by_hand), (exact_loss, exact) = gradients(name)
    assert types_of(cast) == types_of(by_hand)
    np.testing.assert_allclose([loss, by_hand_loss], exact_loss, rtol=2e-3)
    for (path, e), g, h in zip(
        jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(cast), jax.tree.leaves(by_hand), strict=True
    ):
        path = jax.tree_util.keystr(path)
        if path in ROUNDING_ONLY:
            continue
        ours, theirs = quality(e, g), quality(e, h)
        assert ours > 20, (path, ours, theirs)  # least behind a BatchNorm, where gradients cancel
        assert ours > theirs - ONE_BIT, (path, ours, theirs)


ONE_BIT = 20 * np.log10(2)  # dB
ROUNDING_ONLY = ("['conv1']['bias']", "['conv2']['bias']")  # a bias before a BatchNorm has a gradient of zero


def quality(exact: Any, rounded: Any) -> float:
    return np.inf if np.array_equal(exact, rounded) else sqnr(exact, rounded)


# Training


STEPS = {"cnn": 40, "transformer": 60, "lstm": 80, "moe": 60}
RATE = {"cnn": 1e-2, "transformer": 3e-3, "lstm": 1e-2, "moe": 2e-3}
ROWS = {"transformer": 8, "cnn": 16}


@functools.cache
def losses_of(name: str, policy: str) -> np.ndarray:
    """Of a run with float32 params, float32[steps]; under autocast unless it is float32, too."""
    loss_fn = models.loss_linen(name)
    if policy != "float32":
        loss_fn = jaxmp.autocast(loss_fn, dtype=policy)
    params, rest = models.init_linen(name)
    tx = jaxmp.mixed_precision(optax.adam(RATE[name]), f"params=float32,compute={policy},output=float32")

    def step(state, batch):
        params, opt_state, rest = state
        (loss, new), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(params, batch, rest, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        rest = jaxmp.keep_if_skipped(opt_state, new, rest)
        return (optax.apply_updates(params, updates), opt_state, rest), (loss, jaxmp.get_metrics(opt_state)["skipped"])

    data = models.batches(name, STEPS[name], ROWS.get(name, 32))
    run = jax.jit(lambda state: jax.lax.scan(step, state, data), compiler_options=QUICK)
    _, (losses, skipped) = run((params, tx.init(params), rest))
    assert skipped.sum() <= 3  # while the loss scale finds its place
    return np.asarray(losses)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["float16"])
@pytest.mark.parametrize("name", ["cnn", slow("transformer"), slow("lstm"), slow("moe")])
def test_training_follows_float32(name, policy):
    """Over the last steps, on average, to a percent: skipped steps and another rounding move it less."""
    exact, cast = losses_of(name, "float32"), losses_of(name, policy)
    assert exact[-10:].mean() < 0.7 * exact[:3].mean()  # it learns
    assert cast.dtype == exact.dtype == np.float32
    np.testing.assert_allclose(cast[:3], exact[:3], rtol=0.01)
    np.testing.assert_allclose(cast[-10:].mean(), exact[-10:].mean(), rtol=0.01)
