"""A derivative of a gradient through an fp8 layer is an error that tells the fix, and the fix gives the right one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close
from jaxmp._src.base import tree_paths
from jaxmp.fp8 import MXFP8, CurrentScaling, DelayedScaling

SIDE = 16
X = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
MODEL = nn.Sequential([nn.Dense(SIDE), nn.tanh, nn.Dense(SIDE)])
RECIPES = (DelayedScaling(amax_history_len=2), MXFP8())  # which are differentiated by rules of their own
REFUSED = r"one derivative, by reverse mode; got a derivative of a gradient.*autocast\(enabled=False\)"


def output(params, x, recipe, enabled=True):
    with jaxmp.fp8.autocast(recipe, enabled=enabled, filter="*"):
        return jnp.sum(MODEL.apply({"params": params}, x) ** 2)


def penalty(params, x, recipe, enabled=True):
    """The squared norm of the gradient of the output with respect to the input."""
    return jnp.sum(jax.grad(output, 1)(params, x, recipe, enabled) ** 2)


def init(recipe):
    with jaxmp.fp8.autocast(recipe, filter="*"):
        return jax.jit(MODEL.init)(jax.random.key(0), X)["params"]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_gradient_penalty(recipe):
    params = init(recipe)
    opt_state = jaxmp.unscale_and_skip(optax.identity()).init(())
    with pytest.raises(NotImplementedError, match=REFUSED):
        jaxmp.value_and_grad(penalty)(params, X, recipe, opt_state=opt_state)
    with pytest.raises(NotImplementedError, match=REFUSED):  # the Hessian times a vector, forward over reverse
        jax.jvp(jax.grad(lambda x: output(params, x, recipe)), (X,), (X,))
    mixed = jaxmp.value_and_grad(
        lambda params, x: output(params, x, recipe) + penalty(params, x, recipe, enabled=False)
    )
    _, grads = jax.jit(mixed)(params, X, opt_state=opt_state)
    weights = {name: {"kernel": layer["kernel"], "bias": layer["bias"]} for name, layer in params.items()}

    def in_float32(weights):
        apply = lambda x: jnp.sum(MODEL.apply({"params": weights}, x) ** 2)  # noqa: E731
        return apply(X) + jnp.sum(jax.grad(apply)(X) ** 2)

    expected = jax.jit(jax.grad(in_float32))(weights)
    for path, x in tree_paths.leaves_by_path(expected).items():
        got = tree_paths.leaves_by_path(grads)[path]
        assert np.linalg.norm(got - x) < 0.1 * np.linalg.norm(x), path


def test_a_gradient_of_the_gradient_alone():
    """Only the cotangent of the fp8 layer depends on what the second derivative is taken of."""
    w = jnp.eye(SIDE)
    product = lambda x: jaxmp.fp8.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=CurrentScaling())  # noqa: E731
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.grad(lambda a: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(a) * product(x)))(X)))(1.0)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_forward_mode_says_what_to_do(recipe):
    params = init(recipe)
    of_rows = lambda x: output(params, jnp.broadcast_to(x, X.shape), recipe)  # noqa: E731
    for forward in (lambda f: jax.jvp(f, (X,), (X,)), lambda f: jax.jacfwd(f)(X[:, :1])):
        with pytest.raises(
            NotImplementedError, match=r"one derivative, by reverse.*got forward.*autocast\(enabled=False"
        ):
            forward(of_rows)
    value = jax.jit(lambda x: jax.linearize(of_rows, x)[0])(X)
    assert_close(value, jax.jit(of_rows)(X), rtol=1e-6)
