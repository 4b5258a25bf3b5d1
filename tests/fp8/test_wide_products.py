"""dgrad="bfloat16" and wgrad="bfloat16": any recipe leaves a product of the backward pass in 16 bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from fp8_model import GRAD, LHS, RHS
from jaxmp import fp8

MATMUL = (((1,), (0,)), ((), ()))
NAMES = (LHS, RHS, GRAD)
RECIPES = (
    fp8.DelayedScaling(),
    fp8.CurrentScaling(),
    fp8.RowwiseScaling(),
    fp8.BlockScaling(),
    fp8.MXFP8(),
    fp8.Int8(),
)
RECIPES += (fp8.NVFP4(stochastic_rounding=False),)
WIDE = {
    "dgrad": {"dgrad": "bfloat16"},
    "wgrad": {"wgrad": "bfloat16"},
    "both": dict.fromkeys(("dgrad", "wgrad"), "bfloat16"),
}


def _tensors():
    rng = np.random.default_rng(0)
    shapes = (32, 48), (48, 16), (32, 16)
    x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return x.astype(jnp.bfloat16), w, g.astype(jnp.bfloat16)


def _scales(recipe):
    return fp8.Scales(*(jnp.full((), s, jnp.float32) for s in (2.0, 3.0, 4.0))) if recipe.has_state else None


def _products(recipe, x, w, g):
    """y, dx, dw, the amaxes."""

    def f(x, w, scales):
        return fp8.dot_general(x, w, MATMUL, recipe=recipe, scales=scales)

    y, back = jax.vjp(f, x, w, _scales(recipe))
    return y, *back(g)


def test_a_gradient_that_no_product_casts_has_no_amax():
    """The products: tests/suites/test_fp8_recipes_by_layers.py."""
    recipe = fp8.DelayedScaling()
    run = jax.jit(
        lambda *tensors: [_products(dataclasses.replace(recipe, **w), *tensors)[3] for w in ({}, *WIDE.values())]
    )
    amaxes, *by_name = run(*_tensors())
    assert by_name == [amaxes, amaxes, amaxes._replace(grad=-np.inf)]  # dgrad, wgrad, both


@pytest.mark.thorough(2)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_no_tensor_is_cast_for_a_product_in_16_bits(recipe):
    def casts(recipe):
        text = str(jax.make_jaxpr(lambda *tensors: _products(recipe, *tensors)[1:3])(*_tensors()))
        names = {jnp.dtype(recipe.dtype(backward=backward)).name for backward in (False, True)}
        return sum(text.count(f"new_dtype={name}") for name in names)

    both, dgrad, narrow = (casts(dataclasses.replace(recipe, **wide)) for wide in (WIDE["both"], WIDE["dgrad"], {}))
    assert both < dgrad <= narrow and both < narrow


def test_an_activation_and_a_bias_stay_with_the_product():
    x, w, g = _tensors()
    recipe, bias = fp8.DelayedScaling(), jnp.ones(16)

    def f(recipe):
        def loss(x, w, bias):
            given = {"activation": "silu", "bias": bias, "scales": _scales(recipe)}
            return (fp8.dot_general(x, w, MATMUL, recipe=recipe, **given) * g).sum().astype(jnp.float32)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, bias)

    narrow, wide = f(recipe), f(fp8.DelayedScaling(**WIDE["both"]))
    np.testing.assert_array_equal(wide[2], narrow[2])  # the sums over g
    for a, b in zip(narrow[:2], wide[:2], strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), rtol=0.1, atol=1.0)


def test_a_gradient_that_no_product_casts_is_neither_unused_nor_lost():
    recipe = fp8.DelayedScaling(**WIDE["both"])
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipe)
    params = {"w": jnp.ones((16, 16))} | {name: jnp.float32(0) for name in NAMES}

    def loss_fn(params, x):
        scales = fp8.Scales(*[params[name] for name in NAMES])
        return jnp.mean(fp8.dot_general(x, params["w"], MATMUL, recipe=recipe, scales=scales).astype(jnp.float32) ** 2)

    x, opt_state = jnp.ones((16, 16), jnp.bfloat16), tx.init(params)
    _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
    _, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
    metrics = jaxmp.get_metrics(opt_state)
    assert (metrics["fp8/unused"], metrics["fp8/lost_gradients"]) == (0, 0)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="wgrad is None, or \"bfloat16\" to leave this product in 16 bits; got 'f16'"):
        fp8.CurrentScaling(wgrad="f16")
