"""The bias of an fp8 layer: its gradient is summed in float32 in the pass that casts the gradient of the result."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_within_ulps
from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import linen_layers
from jaxmp.fp8 import CurrentScaling, DelayedScaling, Scales

RNG = np.random.default_rng(0)
RECIPE = DelayedScaling(amax_history_len=2)
MATMUL = (((1,), (0,)), ((), ()))
X, W, G, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 48), (64, 48), 48))
TX = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)


def scales():
    return Scales(*[jnp.zeros(())] * 3)


def product(x, w, bias, recipe=RECIPE, numbers=MATMUL):
    leaves = scales() if recipe == RECIPE else None
    return jaxmp.fp8.dot_general(x, w, numbers, recipe=recipe, scales=leaves, bias=bias)


def assert_sums(got, grad):
    """Within float32's rounding of the exact sums over all but the last axis."""
    grad = np.asarray(grad, np.float64).reshape(-1, np.size(got))
    bound = len(grad) * np.finfo(np.float32).eps * np.abs(grad).sum(axis=0)
    assert np.all(np.abs(np.asarray(got, np.float64).ravel() - grad.sum(axis=0)) <= bound)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [(RECIPE, jnp.float32), (RECIPE, jnp.bfloat16), (CurrentScaling(), jnp.bfloat16)], ids=str
)
def test_value_and_gradient(recipe, dtype):
    """The product with the bias added in the dtype of the result, and a gradient in the bias's own dtype."""
    x, g = X.astype(dtype), G.astype(dtype)

    @jax.jit
    def run(x, g, bias):
        y, backward = jax.vjp(lambda bias: product(x, W, bias, recipe), bias)
        return y, product(x, W, None, recipe) + bias[None].astype(dtype), backward(g)[0]

    y, expected, d_bias = run(x, g, BIAS)
    assert_within_ulps(y, expected, 2)
    assert d_bias.dtype == jnp.float32
    if recipe == RECIPE:  # else jax sums, in the dtype of the result
        assert_sums(d_bias, g)


VECTOR, OUTER, BATCH = (((0,), (0,)), ((), ())), (((), ()), ((), ())), (((2,), (1,)), ((0,), (0,)))
FORMS = {  # lhs, rhs, bias, dimension numbers, axes of vmap
    "rows not of 16": (X[:23], W, BIAS, MATMUL, None),
    "vector": (X[0], W, BIAS, VECTOR, None),
    "outer": (X[0], W[0], BIAS, OUTER, None),
    "batch": (X.reshape(2, 32, 32), np.stack([W, W]), BIAS, BATCH, None),
    "two free axes": (X, W.reshape(32, 6, 8), BIAS.reshape(6, 8), MATMUL, None),
    "no free axis": (X, W[:, 0], BIAS[0], MATMUL, None),
    "vmap": (X.reshape(4, 16, 32), W, BIAS, MATMUL, (0, None, None)),
    "vmap of all": (X.reshape(4, 16, 32), np.stack([W] * 4), np.stack([BIAS] * 4), MATMUL, (0, 0, 0)),
}


@pytest.mark.thorough(1)
@pytest.mark.filterwarnings("ignore:this matmul runs in float32:jaxmp.fp8.FallbackWarning")  # the outer product
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    """Whatever the shapes, the gradient of the bias is the sum of that of the result."""
    x, w, bias, numbers, axes = FORMS[form]
    f = lambda x, w, bias: product(x, w, bias, numbers=numbers)  # noqa: E731
    f = f if axes is None else jax.vmap(f, axes)
    shape = jax.eval_shape(f, x, w, bias).shape
    g = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    got = jax.jit(lambda bias, g: jax.vjp(lambda bias: f(x, w, bias), bias)[1](g)[0])(bias, g)
    for one, part in zip(got, g, strict=True) if form == "vmap of all" else [(got, g)]:
        assert_sums(one, part)


def test_a_bias_of_another_shape():
    with pytest.raises(ValueError, match=r"shape of the axes of rhs that are not summed over, \(48,\); got \(1, 48\)"):
        product(X, W, BIAS[None])


class Layers(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal()
        x = nn.DenseGeneral((4, 8), dtype=self.dtype, bias_init=bias)(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), dtype=self.dtype, bias_init=bias)(nn.relu(x))
        return nn.Dense(48, dtype=self.dtype, bias_init=bias)(nn.relu(x))


def init(model):
    with jaxmp.fp8.autocast(RECIPE, filter="*"):
        return jax.jit(model.init)(jax.random.key(0), X)["params"]


WAYS = {"plain": Layers, "remat": nn.remat(Layers), "keeps": nn.remat(Layers, policy=jaxmp.fp8.save_quantized)}


def step_of(model, policy):
    def loss_fn(params, x, g):
        with jaxmp.fp8.autocast(RECIPE, filter="*"):
            y = model.apply({"params": params}, x)
        return jnp.sum(y.astype(jnp.float32) * g), y

    grad_fn = jaxmp.value_and_grad(loss_fn, has_aux=True, policy=policy)
    return lambda params, opt_state, x, g: grad_fn(params, x, g, opt_state=opt_state)


def biases(grads):
    return {path: x for path, x in tree_paths.leaves_by_path(grads).items() if path.endswith("bias")}


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("policy", "way"), [("fp32", "plain"), ("fp8", "remat"), ("fp8", "keeps")])
def test_linen(policy, way, monkeypatch):
    """Layers of linen: params as before, the same value, and gradients that are summed by the product.

    Of inputs in whole numbers and weights in quarters nothing is rounded before the result, but by the casts to fp8.
    """
    model = WAYS[way](jnp.bfloat16 if policy == "fp32" else None)
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, X.shape).astype(np.float32)
    in_quarters = lambda p: (rng.integers(-1, 2, p.shape) / 4).astype(p.dtype) if p.ndim else p  # noqa: E731
    params = jax.tree.map(in_quarters, init(model))
    step, opt_state = step_of(model, policy), TX.init(params)
    (_, y), grads = jax.jit(step)(params, opt_state, x, G)
    assert_sums(biases(grads)["Dense_0/bias"], G.astype(jnp.bfloat16))
    monkeypatch.setattr(linen_layers, "_bias_of", lambda base, module: None)
    (_, plain), others = jax.jit(step_of(model, policy))(params, opt_state, x, G)
    assert_within_ulps(y, plain, 1)
    for (path, bias), other in zip(biases(grads).items(), biases(others).values(), strict=True):
        np.testing.assert_allclose(bias, other, rtol=2**-5, atol=0.2, err_msg=path)  # jax sums in bfloat16


@pytest.mark.thorough(1)
@pytest.mark.parametrize("way", ["general", "off", "remat", "split by flax"])
def test_nnx(way):
    """A layer of nnx hands its bias to the product, also a float32 one beside 16 bits; without fp8 it is flax's."""
    cls, n_out = (nnx.LinearGeneral, (6, 8)) if "general" in way else (nnx.Linear, 48)
    layer = cls(32, n_out, dtype=jnp.bfloat16, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    flax_y, g = layer(X), G.reshape(layer(X).shape)
    assert jaxmp.nnx.to_fp8(layer, RECIPE, filter="*") == [""]
    optimizer = jaxmp.nnx.Optimizer(layer, TX)
    if way == "split by flax":
        layer = nnx.merge(*nnx.split(layer))

    def loss_fn(layer, x):
        run = nnx.remat(lambda layer, x: layer(x)) if way == "remat" else lambda layer, x: layer(x)
        with jaxmp.fp8.autocast(RECIPE, enabled="off" not in way):
            y = run(layer, x)
        return jnp.sum(y.astype(jnp.float32) * g), y

    @nnx.jit
    def step(layer, optimizer, x):
        return jaxmp.nnx.value_and_grad(loss_fn, has_aux=True)(layer, x, opt_state=optimizer)

    (_, y), grads = step(layer, optimizer, X)
    assert y.dtype == jnp.bfloat16 and grads["bias"].get_value().dtype == jnp.float32
    if "off" in way:
        assert_within_ulps(y, flax_y, 1)
    else:
        assert_sums(grads["bias"].get_value(), G.astype(jnp.bfloat16))
        assert np.max(np.abs(np.asarray(y - flax_y, np.float32))) < 0.5


def test_a_product_that_is_put_into_a_layer_later_needs_its_promote_dtype_too():
    layer = nnx.Linear(32, 48, rngs=nnx.Rngs(0))
    as_made = layer.promote_dtype
    jaxmp.nnx.to_fp8(layer, CurrentScaling(), filter="*")
    layer.dot_general = jax.lax.dot_general
    with pytest.raises(TypeError, match="KernelAndBiasForFp8DotGeneral"):
        layer(X)
    layer.promote_dtype = as_made
    assert layer(X).shape == (64, 48)


def test_a_layer_of_nnx_with_a_call_of_its_own_adds_its_bias_itself():
    class Twice(nnx.Linear):
        def __call__(self, x):
            inputs, kernel, bias = self.promote_dtype((x, self.kernel[...], self.bias[...]), dtype=self.dtype)
            return self.dot_general(inputs, kernel, MATMUL) + 2 * bias[None]

    layer = Twice(32, 48, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    jaxmp.nnx.to_fp8(layer, CurrentScaling(), filter="*")
    y = nnx.jit(lambda layer: layer(np.zeros((1, 32), np.float32)))(layer)
    assert_within_ulps(y, 2 * np.asarray(layer.bias[...])[None], 0)
