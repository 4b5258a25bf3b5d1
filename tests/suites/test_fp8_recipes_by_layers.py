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


def of_linen(model, kernel_shape):
    """(function of (kernel, x), shape of the kernel) for a layer of linen in the region of a recipe."""

    def make(recipe, x):
        with fp8.autocast(recipe, filter=everywhere):
            params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]

        def apply(kernel, x):
            def leaf(path, like):
                return kernel if path[-1].key == "kernel" else start(path[-1].key, recipe)

            with fp8.autocast(recipe, filter=everywhere):
                return model.apply({"params": jax.tree_util.tree_map_with_path(leaf, params)}, x)

        return apply

    return make, kernel_shape


def of_nnx(layer, kernel_shape):
    def make(recipe, x):
        model = layer(nnx.Rngs(0))
        jaxmp.nnx.to_fp8(model, recipe, filter=everywhere)
        graph, params = nnx.split(model)

        def apply(kernel, x):
            def leaf(path, like):
                name = jaxmp_path(path)
                return kernel if name == "kernel" else start(name, recipe)

            return nnx.merge(graph, jax.tree_util.tree_map_with_path(leaf, params))(x)

        return apply

    return make, kernel_shape


def jaxmp_path(path):
    return [str(key.key) for key in path if hasattr(key, "key")][-1]


def start(name, recipe):
    """The value of a scale leaf."""
    scale = SCALES[name.split("_")[1]]
    return jnp.float32(np.log2(scale) if recipe.power_of_two else scale)


def by_dot_general(recipe, x):
    numbers = (((3, 4), (0, 1)), ((), ()))
    scales = None
    if recipe.has_state:
        scales = fp8.Scales(*(start(name, recipe) for name in recipe.leaves()))
    return lambda w, x: fp8.dot_general(x, w, numbers, recipe=recipe, scales=scales)


def by_einsum(recipe, x):
    scales = fp8.Scales(*(start(name, recipe) for name in recipe.leaves())) if recipe.has_state else None
    return lambda w, x: fp8.einsum("abcij,ijkl->abckl", x, w, recipe=recipe, scales=scales)


def by_autocast(recipe, x):
    return jaxmp.autocast(lambda w, x: jnp.einsum("abcij,ijkl->abckl", x, w), "bf16", recipe=recipe, filter=everywhere)


FLAT, PIXEL = (144, 48), (1, 1, 144, 48)
EINSUM = "abcij,ijkl->abckl"
WAYS = {
    "linen Dense": of_linen(nn.Dense(48, use_bias=False), FLAT),
    "linen DenseGeneral": of_linen(nn.DenseGeneral(N, axis=(-2, -1), use_bias=False), (*K, *N)),
    "linen Einsum": of_linen(nn.Einsum((*K, *N), EINSUM, use_bias=False), (*K, *N)),
    "linen Conv": of_linen(nn.Conv(48, (1, 1), use_bias=False), PIXEL),
    "nnx Linear": of_nnx(lambda rngs: nnx.Linear(144, 48, use_bias=False, rngs=rngs), FLAT),
    "nnx LinearGeneral": of_nnx(
        lambda rngs: nnx.LinearGeneral(K, N, axis=(-2, -1), use_bias=False, rngs=rngs), (*K, *N)
    ),
    "nnx Einsum": of_nnx(lambda rngs: nnx.Einsum(EINSUM, (*K, *N), rngs=rngs), (*K, *N)),
    "nnx Conv": of_nnx(lambda rngs: nnx.Conv(144, 48, (1, 1), use_bias=False, rngs=rngs), PIXEL),
    "dot_general": (by_dot_general, (*K, *N)),
    "einsum": (by_einsum, (*K, *N)),
    "autocast": (by_autocast, (*K, *N)),
}


# Each way once, with recipes that cast in different ways; all other pairs are thorough.
SAMPLE = {
    "linen Dense": "Delayed",
    "linen DenseGeneral": "Block",
    "linen Einsum": "Rowwise wgrad",
    "linen Conv": "Current",
    "nnx Linear": "MXFP8",
    "nnx LinearGeneral": "Delayed dgrad",
    "nnx Einsum": "Int8",
    "nnx Conv": "Current quotients",
    "dot_general": "Delayed quotients",
    "einsum": "Rowwise",
    "autocast": "Delayed",
}
PAIRS = [
    pytest.param(name, way, marks=() if SAMPLE[way] == name else pytest.mark.thorough(0))
    for way in WAYS
    for name in RECIPES
]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_values_and_gradients_are_those_of_numpy(name, way):
    recipe, (make, kernel_shape) = RECIPES[name], WAYS[way]
    if way == "autocast" and recipe.has_state:
        with pytest.raises(ValueError, match="must get a recipe without state"):
            make(recipe, None)
        return
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
    found = [t.astype(dtype) for t in (y, dx, dw)]
    for narrow, wide in zip(found, (y, dx, dw), strict=True):
        np.testing.assert_array_equal(np.float32(narrow), np.float32(wide))  # gradients under autocast are 16-bit
    scales = SCALES.values() if recipe.has_state else ()
    flat = (t.reshape(shape) for t, shape in ((x, (1, 32, 144)), (w, (1, 144, 48)), (g, (1, 32, 48))))
    assert_products(found, products(recipe, *flat, list(scales)))
