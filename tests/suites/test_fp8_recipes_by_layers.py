"""Every recipe through every way into fp8: values and gradients are the products of NumPy, whoever makes the call.

Operands are multiples of 1/16 up to 4, exact in bfloat16. So the function under autocast, which rounds to bfloat16
first, reads the numbers that the layers read, and one oracle holds for all. A result is the oracle's sum, up to 1e-6 of
the magnitudes that it adds, rounded once to the dtype of the layer.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxmp
from fp8_oracle import assert_products, products
from jaxmp import fp8

BF16 = ml_dtypes.bfloat16
M, K, N = (2, 4, 4), (4, 36), (3, 16)  # 32 rows, 144 summed: more than one block of 128; 48 columns
SCALES = {"lhs": 2.0**6, "rhs": 2.0**4, "grad": 2.0**9}

RECIPES = {
    "Delayed": fp8.DelayedScaling(),
    "Delayed quotients": fp8.DelayedScaling(power_of_two=False),
    "Delayed E4M3": fp8.DelayedScaling(fp8_format="E4M3"),
    "Delayed dgrad": fp8.DelayedScaling(dgrad="bfloat16"),
    "Current": fp8.CurrentScaling(),
    "Current quotients": fp8.CurrentScaling(power_of_two=False),
    "Current E4M3": fp8.CurrentScaling(fp8_format="E4M3"),
    "Rowwise": fp8.RowwiseScaling(),
    "Rowwise wgrad": fp8.RowwiseScaling(wgrad="bfloat16"),
    "Block": fp8.BlockScaling(),
    "Block HYBRID": fp8.BlockScaling(fp8_format="HYBRID"),
    "MXFP8": fp8.MXFP8(),
    "NVFP4": fp8.NVFP4(stochastic_rounding=False),
    "NVFP4 wgrad": fp8.NVFP4(stochastic_rounding=False, wgrad="bfloat16"),
    "Int8": fp8.Int8(),
    "Int8 forward": fp8.Int8(dgrad="bfloat16", wgrad="bfloat16"),
}


def everywhere(path, layer):
    return True


def data(seed, *shape):
    drawn = np.random.default_rng(seed).normal(size=shape)
    return np.clip(np.round(drawn * 16) / 16, -4, 4).astype(np.float32)


def start(name, recipe):
    """The value of a scale leaf."""
    scale = SCALES[name.split("_")[1]]
    return jnp.float32(np.log2(scale) if recipe.power_of_two else scale)


def with_kernel(params, kernel, recipe):
    """The params of a layer, with a kernel of ours and scales that have moved."""

    def leaf(path, like):
        name = [str(key.key) for key in path if hasattr(key, "key")][-1]
        return kernel if name == "kernel" else start(name, recipe)

    return jax.tree_util.tree_map_with_path(leaf, params)


def of_linen(model):
    """A function of (kernel, x) for a layer of linen in the region of a recipe."""

    def make(recipe, x):
        with fp8.autocast(recipe, filter=everywhere):
            params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]

        def apply(kernel, x):
            with fp8.autocast(recipe, filter=everywhere):
                return model.apply({"params": with_kernel(params, kernel, recipe)}, x)

        return apply

    return make


def of_nnx(layer, *args, **kwargs):
    def make(recipe, x):
        model = layer(*args, rngs=nnx.Rngs(0), **kwargs)
        jaxmp.nnx.to_fp8(model, recipe, filter=everywhere)
        graph, params = nnx.split(model)
        return lambda kernel, x: nnx.merge(graph, with_kernel(params, kernel, recipe))(x)

    return make


def scales_of(recipe):
    return fp8.Scales(*(start(name, recipe) for name in recipe.leaves())) if recipe.has_state else None


def by_dot_general(recipe, x):
    numbers = (((3, 4), (0, 1)), ((), ()))
    return lambda w, x: fp8.dot_general(x, w, numbers, recipe=recipe, scales=scales_of(recipe))


def by_einsum(recipe, x):
    return lambda w, x: fp8.einsum(EINSUM, x, w, recipe=recipe, scales=scales_of(recipe))


def by_autocast(recipe, x):
    return jaxmp.autocast(lambda w, x: jnp.einsum(EINSUM, x, w), "bf16", recipe=recipe, filter=everywhere)


FLAT, PIXEL, GENERAL = (144, 48), (1, 1, 144, 48), (*K, *N)
EINSUM = "abcij,ijkl->abckl"
bare = {"use_bias": False}
# How a layer is made, the shape of its kernel, and a recipe for it: together they cast in all ways.
WAYS = {
    "linen Dense": (of_linen(nn.Dense(48, **bare)), FLAT, "Delayed"),
    "linen DenseGeneral": (of_linen(nn.DenseGeneral(N, axis=(-2, -1), **bare)), GENERAL, "Block"),
    "linen Einsum": (of_linen(nn.Einsum(GENERAL, EINSUM, **bare)), GENERAL, "Rowwise wgrad"),
    "linen Conv": (of_linen(nn.Conv(48, (1, 1), **bare)), PIXEL, "Current"),
    "nnx Linear": (of_nnx(nnx.Linear, 144, 48, **bare), FLAT, "MXFP8"),
    "nnx LinearGeneral": (of_nnx(nnx.LinearGeneral, K, N, axis=(-2, -1), **bare), GENERAL, "Delayed dgrad"),
    "nnx Einsum": (of_nnx(nnx.Einsum, EINSUM, GENERAL), GENERAL, "Int8"),
    "nnx Conv": (of_nnx(nnx.Conv, 144, 48, (1, 1), **bare), PIXEL, "Current quotients"),
    "dot_general": (by_dot_general, GENERAL, "Delayed quotients"),
    "einsum": (by_einsum, GENERAL, "Rowwise"),
    "autocast": (by_autocast, GENERAL, "NVFP4"),
}
# Where a way has its own recipe, that pair; one way has all recipes.
BY_DEFAULT = ("linen Dense", "linen Einsum", "nnx Linear", "nnx Conv", "dot_general")
PAIRS = [
    pytest.param(name, way, marks=() if way in BY_DEFAULT else pytest.mark.thorough(0))
    for way, (*_, name) in WAYS.items()
] + [pytest.param(name, "linen DenseGeneral", marks=pytest.mark.thorough(0)) for name in RECIPES if name != "Block"]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_values_and_gradients_are_those_of_numpy(name, way):
    recipe, (make, kernel_shape, _) = RECIPES[name], WAYS[way]
    is_flat = kernel_shape[-2:] == FLAT
    x = data(1, *M, *((144,) if is_flat else K))
    w, g = data(2, *kernel_shape), data(3, *M, *((48,) if is_flat else N))
    dtype = BF16 if way == "autocast" else np.float32

    @jax.jit
    def run(w, x, g):
        y, back = jax.vjp(make(recipe, x), w, x)
        return y, *back(g.astype(y.dtype))

    y, dw, dx = (np.asarray(t) for t in run(w, x, g))
    assert y.dtype == dtype and dw.dtype == dx.dtype == np.float32
    assert y.shape == g.shape and dw.shape == w.shape and dx.shape == x.shape
    rounded = [t.astype(dtype) for t in (y, dx, dw)]
    for narrow, wide in zip(rounded, (y, dx, dw), strict=True):
        np.testing.assert_array_equal(np.float32(narrow), np.float32(wide))  # gradients under autocast are 16-bit
    scales = SCALES.values() if recipe.has_state else ()
    flat = (t.reshape(shape) for t, shape in ((x, (1, 32, 144)), (w, (1, 144, 48)), (g, (1, 32, 48))))
    assert_products(rounded, products(recipe, *flat, list(scales)))
