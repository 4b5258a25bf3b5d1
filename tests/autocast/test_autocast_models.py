"""Unmodified models under `jaxmp.autocast`: dtypes as in torch, losses as in float32, gradients as if cast by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autocast_models as models
import jaxmp
import oracle_data
from autocast_models import NAMES
from autocast_twins import TWINS
from helpers import sqnr

TORCH = oracle_data.load("torch_autocast")["models"]
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16}
SHORT = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()} | {jnp.dtype("float32"): "f32"}
QUICK = {"xla_backend_optimization_level": 0}  # for XLA: compiles in half the time; the models are small

# Layers whose dtype is not torch's: a reason, and the dtype here.
DEVIATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "cnn": {"pool2": ("a mean is a sum, in float32, and a division", "f32")},
    "moe": {
        "dispatched": ("a product that sums nothing, of float32 with 16 bits", "f32"),
        "combined": ("a product that sums four elements, of float32 with 16 bits", "f32"),
        "residual": ("a sum with it", "f32"),
    },
}


@pytest.mark.thorough(5)
@pytest.mark.parametrize(
    ("framework", "name", "lp"),
    [("linen", name, "f16") for name in NAMES]
    + [("nnx" if name in models.NNX else "linen", name, "bf16") for name in NAMES],
)
def test_layers_have_the_dtypes_of_torch(framework, name, lp):
    expected = dict(TORCH[name][lp]["layers"])
    for layer, (reason, dtype) in DEVIATIONS.get(name, {}).items():
        assert reason
        assert expected[layer] != dtype, f"{layer} deviates no longer"
        expected[layer] = dtype
    batch = models.batch(name)  # only shapes and dtypes are asked: nothing is computed
    if framework == "nnx":
        graphdef, state = nnx.split(nnx.eval_shape(lambda: models.NNX[name](nnx.Rngs(0))))
        layers = jaxmp.autocast(models.layers_nnx, DTYPES[lp])
        outputs = jax.eval_shape(lambda state, batch: layers(nnx.merge(graphdef, state), batch), state, batch)
    else:
        params, rest = models.shapes_linen(name)
        outputs = jax.eval_shape(jaxmp.autocast(models.layers_linen(name), DTYPES[lp]), params, batch, rest)
    assert {layer: SHORT[outputs[layer].dtype] for layer in expected} == expected


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_float32_as_in_torch(name):
    assert {dtype for lp in DTYPES for dtype in TORCH[name][lp]["grads, on cpu"].values()} == {"f32"}
    params, rest = models.shapes_linen(name)
    grad = jax.value_and_grad(jaxmp.autocast(models.loss_linen(name), jnp.float16), has_aux=True)
    (loss, new), grads = jax.eval_shape(grad, params, models.batch(name), rest)
    assert types_of((loss, new, grads)) == types_of((jax.ShapeDtypeStruct((), jnp.float32), rest, params))


def types_of(tree: Any) -> Any:
    """The structure of a tree, and the shape and dtype of each leaf."""
    return jax.tree.structure(tree), [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


ONE_BIT = 20 * np.log10(2)  # dB


ROUNDING_ONLY = ("['conv1']['bias']", "['conv2']['bias']")  # a bias before a BatchNorm has a gradient of zero


def quality(exact: Any, rounded: Any) -> float:
    return np.inf if np.array_equal(exact, rounded) else sqnr(exact, rounded)


OTHERS = [pytest.param(name, marks=pytest.mark.thorough(0)) for name in ("cnn", "lstm", "transformer")]


@pytest.mark.parametrize("name", ["moe", *OTHERS])
def test_gradients_are_those_of_a_model_cast_by_hand(name):
    """The two round at other places here and there: neither may be further from float32 than the other by a bit."""
    params, rest = models.init_linen(name)
    batch = models.batch(name, 16)

    def scaled_gradients(fn):  # out of the subnormal numbers of float16
        def scaled(params):
            loss, _ = fn(params, batch, rest)
            return loss * 1024, loss

        return jax.value_and_grad(scaled, has_aux=True)

    fn = models.loss_linen(name)
    runs = [scaled_gradients(f) for f in (jaxmp.autocast(fn), models.loss_linen(name, TWINS[name]), fn)]
    all_gradients = jax.jit(lambda params: [run(params) for run in runs], compiler_options=QUICK)
    ((_, loss), cast), ((_, by_hand_loss), by_hand), ((_, exact_loss), exact) = all_gradients(params)
    assert types_of(cast) == types_of(by_hand)
    np.testing.assert_allclose([loss, by_hand_loss], exact_loss, rtol=2e-3)
    leaves = zip(jax.tree.leaves(cast), jax.tree.leaves(by_hand), strict=True)
    for (path, e), (g, h) in zip(jax.tree_util.tree_leaves_with_path(exact), leaves, strict=True):
        if jax.tree_util.keystr(path) not in ROUNDING_ONLY:
            ours, theirs = quality(e, g), quality(e, h)
            assert ours > 20, (path, ours, theirs)  # least behind a BatchNorm, where gradients cancel
            assert ours > theirs - ONE_BIT, (path, ours, theirs)
