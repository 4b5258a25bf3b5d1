"""Under remat with `save_quantized` no tensor of an fp8 layer is cast twice, and under any policy none is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from fp8_model import RECIPE, SIDE, layer_params, matmul
from helpers import assert_close
from jaxmp._src.programs import jaxprs
from jaxmp.fp8 import MXFP8, NVFP4, BlockScaling, CurrentScaling, RowwiseScaling

X = np.random.default_rng(0).normal(size=(2 * SIDE, SIDE)).astype(np.float32)
RECIPES = (RECIPE, CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8(), NVFP4(stochastic_rounding=False))
RUN = (RECIPE, MXFP8())  # compiled, too


def block(params, x, recipe):
    h = jnp.tanh(matmul(params["a"], x, recipe))
    return jnp.tanh(matmul(params["b"], h, recipe))


def casts_to_fp8(f, *args):
    casts = (eqn for eqn in jaxprs.equations(jax.make_jaxpr(f)(*args)) if eqn.primitive.name == "convert_element_type")
    return sum(eqn.outvars[0].aval.dtype.itemsize == 1 for eqn in casts)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_no_tensor_is_cast_twice(recipe):
    layers = {"a": layer_params(1), "b": layer_params(2)}
    params = layers if recipe is RECIPE else {name: {"w": layer["w"]} for name, layer in layers.items()}
    run = functools.partial(block, recipe=recipe)
    ways = {
        "kept": run,
        "remat": jax.checkpoint(run),
        "policy": jax.checkpoint(run, policy=jaxmp.fp8.save_quantized),
        "everything": jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable),
    }
    gradients = {name: jax.grad(lambda params, f=f: jnp.sum(f(params, X) ** 2)) for name, f in ways.items()}
    casts = {name: casts_to_fp8(gradients[name], params) for name in ("kept", "remat", "policy")}
    assert casts["policy"] == casts["kept"] < casts["remat"], casts
    if recipe in RUN:
        kept, policy, everything = (jax.jit(gradients[name])(params) for name in ("kept", "policy", "everything"))
        assert_close(policy, kept, rtol=1e-5, atol=1e-5)
        assert_close(everything, kept, rtol=1e-5, atol=1e-5)
