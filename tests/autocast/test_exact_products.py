"""Products that autocast leaves in float32: those that sum at most four elements, and those that ask by precision=."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from test_sums import both_dtypes, in_16_bits

import jaxmp

HIGHEST = lax.Precision.HIGHEST
RNG = np.random.default_rng(0)


def numbers(*shape: int, high: float = 1.0) -> Any:
    return RNG.uniform(0.1, high, shape).astype(np.float32)


def gap(got: Any, fn: Any, args: Any) -> float:
    """The largest error of `fn(*args)` in roundings of the dtype of the result, relative to the sum of its terms."""
    with jax.enable_x64(True):
        exact = np.asarray(fn(*jax.tree.map(lambda x: np.asarray(x, np.float64), args)))
        terms = np.asarray(fn(*jax.tree.map(lambda x: np.abs(np.asarray(x, np.float64)), args)))
    unit = float(jnp.finfo(got.dtype).eps) / 2
    assert got.shape == exact.shape
    return float(np.max(np.abs(np.asarray(got, np.float64) - exact) / (unit * terms)))


# --- at most four elements --------------------------------------------------------------------------------------------


def affine_grid(theta, x, y):
    """The points of an image [h, w, 2] under an affine map, as in spatial transformers."""
    points = jnp.stack([*jnp.meshgrid(x, y), jnp.ones((y.size, x.size), x.dtype)], -1)
    return jnp.einsum("hwk,ik->hwi", points, theta)


def rotary_angles(positions, frequencies):
    """Angles of three axes, chosen by a matrix of zeros and ones."""
    chosen = np.repeat(np.eye(3), 4, axis=1).astype(np.float32) * frequencies[None]
    return positions @ chosen


def codes(digits, levels):
    """The number of a code from its digits, as in finite scalar quantization."""
    basis = jnp.cumprod(jnp.concatenate([jnp.ones(1, levels.dtype), levels[:-1]]))
    return (digits @ basis[:, None])[:, 0]


def linen_dense(x, w):
    return nn.Dense(w.shape[1], use_bias=False).apply({"params": {"kernel": w}}, x)


def nnx_linear(x, w):
    layer = nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(w)
    return layer(x)


def haiku_linear(x, w):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(w.shape[1], with_bias=False)(x)))
    return net.apply({"linear": {"w": w}}, x)


def equinox_linear(x, w):
    layer = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(*w.shape, use_bias=False, key=jax.random.key(0)), w.T)
    return jax.vmap(layer)(x)


SHORT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "an affine grid of 512": (affine_grid, (numbers(2, 3), *2 * (np.linspace(-1, 1, 512, dtype=np.float32),))),
    "pixels of a projection": (lambda k, x: x @ k.T, (numbers(3, 3, high=1920.0), numbers(64, 3))),
    "a homogeneous transform": (lambda m, x: jnp.einsum("ij,nj->ni", m, x), (numbers(4, 4), numbers(64, 4))),
    "batched rotations": (lambda r, x: jnp.einsum("bij,bnj->bni", r, x), (numbers(5, 3, 3), numbers(5, 9, 3))),
    "rotary angles": (rotary_angles, (RNG.integers(1, 4000, (64, 3)).astype(np.float32), numbers(12))),
    "codes of digits": (codes, (RNG.integers(0, 8, (974, 4)).astype(np.float32), np.array([8, 8, 8, 5], np.float32))),
    "two by two": (lambda a, b: a @ b, (numbers(2, 2), numbers(2, 2))),
    "dot": (jnp.dot, (numbers(7, 3), numbers(3, 5))),
    "inner": (jnp.inner, (numbers(7, 2), numbers(5, 2))),
    "tensordot over two axes": (lambda a, b: jnp.tensordot(a, b, 2), (numbers(7, 2, 2), numbers(2, 2, 6))),
    "matvec": (lambda a, b: a @ b, (numbers(7, 4), numbers(4))),
    "vecmat": (lambda a, b: a @ b, (numbers(3), numbers(3, 6))),
    "under vmap": (jax.vmap(jnp.matmul), (numbers(4, 6, 3), numbers(4, 3, 2))),
    "in a scan": (lambda a, xs: lax.scan(lambda c, x: (c, x @ a), 0.0, xs)[1], (numbers(3, 5), numbers(6, 2, 3))),
    "in a checkpoint": (jax.checkpoint(jnp.matmul), (numbers(7, 3), numbers(3, 5))),
    "jitted": (jax.jit(jnp.matmul), (numbers(7, 3), numbers(3, 5))),
    "linen": (linen_dense, (numbers(9, 3), numbers(3, 32))),
    "nnx": (nnx_linear, (numbers(9, 2), numbers(2, 32))),
    "haiku": (haiku_linear, (numbers(9, 4), numbers(4, 32))),
    "equinox": (equinox_linear, (numbers(9, 3), numbers(3, 32))),
}


@pytest.mark.thorough(5)
@both_dtypes
@pytest.mark.parametrize("name", SHORT)
def test_products_of_few_elements_are_float32(name, dtype):
    fn, args = SHORT[name]
    y = jax.jit(jaxmp.autocast(fn, dtype))(*args)
    assert y.dtype == jnp.float32
    if name not in ("linen", "nnx", "haiku", "equinox"):  # their params are float32
        assert gap(y, fn, args) <= 2
    np.testing.assert_allclose(y, fn(*map(jnp.asarray, args)), rtol=1e-6)


@pytest.mark.thorough(1)
@both_dtypes
def test_a_product_of_few_16_bit_elements_is_rounded_once(dtype):
    def fn(x):
        h = in_16_bits(x)  # [8, 6]
        return h[:, :4] @ h[:4]

    x = numbers(8, 6).astype(dtype).astype(np.float32)
    y, pull_back = jax.vjp(jaxmp.autocast(fn, dtype), x)
    assert y.dtype == dtype and gap(y, fn, (x,)) <= 1
    assert pull_back(y)[0].dtype == jnp.float32


def test_five_elements_are_a_layer():
    y = jaxmp.autocast(jnp.matmul, jnp.bfloat16)(jnp.ones((2, 5)), jnp.ones((5, 2)))
    assert y.dtype == jnp.bfloat16


@pytest.mark.thorough(1)
@both_dtypes
def test_short_products_that_feed_float32_take_it_all_the_way(dtype):
    """The sine of an angle beyond 2048 needs all bits of the angle."""

    def table(positions, frequencies):
        angles = positions @ frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    positions, frequencies = numbers(64, 2, high=4000.0), numbers(2, 8)
    out = jax.jit(jaxmp.autocast(table, dtype))(positions, frequencies)
    with jax.enable_x64(True):
        exact = table(positions.astype(np.float64), frequencies.astype(np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=2e-3)


# --- precision=HIGHEST ------------------------------------------------------------------------------------------------


def inside(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


def linen_highest(x, w, precision: Any = HIGHEST):
    layer = nn.Dense(w.shape[1], precision=precision)
    return layer.apply({"params": {"kernel": w, "bias": jnp.full(w.shape[1], 0.1, w.dtype)}}, x)


def nnx_highest(x, w):
    layer = nnx.Linear(*w.shape, use_bias=False, precision="highest", rngs=nnx.Rngs(0))
    layer.kernel.set_value(w)
    return layer(x)


def convolved(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    given = (x[None, None], w[None, None])
    return lax.conv_general_dilated(*given, (1, 1), "SAME", dimension_numbers=numbers, precision=HIGHEST)[0, 0]


X, W = numbers(24, 16), numbers(16, 8)
ASKED: dict[str, Any] = {
    "dot": functools.partial(jnp.dot, precision=HIGHEST),
    "matmul": functools.partial(jnp.matmul, precision="highest"),
    "of one operand": functools.partial(jnp.matmul, precision=("default", "highest")),
    "einsum": lambda x, w: jnp.einsum("ni,io->no", x, w, precision="float32"),
    "einsum of three": lambda x, w: jnp.einsum("ni,io,i->no", x, w, jnp.ones(16, x.dtype), precision=HIGHEST),
    "lax.dot_general": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=HIGHEST),
    "a convolution": convolved,
    "a context inside": inside,
    "a context inside, jitted": jax.jit(inside),
    "a transposed weight": lambda x, w: jnp.dot(x, (2 * w).T.T, precision=HIGHEST),
    "with a bias": lambda x, w: jnp.dot(x, w, precision=HIGHEST) + jnp.full((1, 8), 0.1, x.dtype),
    "in a scan": lambda x, w: lax.scan(lambda c, r: (c, jnp.dot(r, w, precision=HIGHEST)), 0.0, x)[1],
    "in a checkpoint": jax.checkpoint(functools.partial(jnp.dot, precision=HIGHEST)),
    "under vmap": lambda x, w: jax.vmap(lambda r: jnp.dot(r, w, precision=HIGHEST))(x),
    "linen": linen_highest,
    "linen, by name": functools.partial(linen_highest, precision="float32"),
    "nnx": nnx_highest,
    "haiku": lambda x, w: hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(8, with_bias=False)(x, precision=HIGHEST))
    ).apply({"linear": {"w": w}}, x),
    "an image, resized": lambda x, w: jax.image.resize(x @ (0 * w + 1) * 0 + x[:, :8], (48, 16), "linear"),
}


@pytest.mark.thorough(5)
@both_dtypes
@pytest.mark.parametrize("name", ASKED)
def test_the_highest_precision_is_float32(name, dtype):
    fn = ASKED[name]
    y, grads = jax.jit(
        jax.value_and_grad(lambda x, w: _sum_and(jaxmp.autocast(fn, dtype)(x, w)), (0, 1), has_aux=True)
    )(X, W)
    assert y[1].dtype == jnp.float32
    if "linen" not in name and name not in ("nnx", "haiku"):
        assert gap(y[1], fn, (X, W)) <= 8  # sums of 16 terms
    exact = jax.jit(jax.grad(lambda x, w: _sum_and(fn(x, w))[0], (0, 1)))(X, W)
    if name != "an image, resized":
        for got, want in zip(grads, exact, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _sum_and(y: Any) -> Any:
    return (y * jnp.linspace(0.5, 1.5, y.size, dtype=y.dtype).reshape(y.shape)).astype(jnp.float32).sum(), y


@pytest.mark.parametrize("how", ["around", "of the policy", "high", "default"])
def test_what_is_no_request_of_a_product(how):
    fn = {"high": functools.partial(jnp.matmul, precision="high"), "default": functools.partial(jnp.matmul)}
    run = jaxmp.autocast(fn.get(how, jnp.matmul), jnp.bfloat16)
    if how == "around":
        with jax.default_matmul_precision("highest"):
            y = jax.jit(run)(X, W)
    elif how == "of the policy":  # the inner one counts
        y = jaxmp.autocast(run, "fp32")(X, W)
    else:
        y = run(X, W)
    assert y.dtype == jnp.bfloat16


def test_explain_says_why():
    def fn(x, w):
        with jax.named_scope("exact"):
            h = jnp.dot(x, w, precision=HIGHEST)
        with jax.named_scope("layer"):
            return h @ w.T

    explained = jaxmp.explain_autocast(fn, X, W, dtype=jnp.bfloat16)
    assert explained.float32_matmuls() == {"exact": "precision=HIGHEST"}
    with jax.default_matmul_precision("highest"):
        assert jaxmp.explain_autocast(fn, X, W, dtype=jnp.bfloat16).float32_matmuls() == {}


def test_a_loss_under_a_policy():
    x, w = jnp.asarray(X), {"w": jnp.asarray(W)}
    opt_state = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16-mixed").init(w)

    def loss_fn(params, x):
        return jnp.dot(x, params["w"], precision=HIGHEST).mean()

    with pytest.warns(UserWarning, match="products with precision=HIGHEST"):
        loss, grads = jaxmp.value_and_grad(loss_fn, policy="bf16-mixed")(w, x, opt_state=opt_state)
    exact, exact_grads = jax.value_and_grad(loss_fn)(w, x)
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], exact_grads["w"], rtol=1e-6)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_layer_with_it_is_not_in_fp8(framework):
    if framework == "nnx":
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(16, 16, precision=p, rngs=rngs) for p in (None, None, "highest", None)]
        assert jaxmp.nnx.to_fp8(nnx.Sequential(*layers)) == ["layers/1"]
        return

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for precision in (None, None, HIGHEST, None):
                x = nn.Dense(16, precision=precision)(x)
            return x

    x = jnp.ones((16, 16))
    params = jaxmp.autocast(Net().init, "fp8")(jax.random.key(0), x)["params"]
    assert {path.split("/")[0] for path in jaxmp.fp8.get_scales(params)} == {"Dense_1"}
    explained = jaxmp.explain_autocast(Net().apply, {"params": params}, x, dtype="fp8")
    assert explained.float32_matmuls() == {"Net/Dense_2": "precision=HIGHEST"}


class _Two(nn.Module):
    """Two layers between a first and a last one; the second is called with the highest precision."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        x = nn.Dense(16)(x)
        with jax.default_matmul_precision("highest"):
            x = nn.Dense(16)(x)
        return nn.Dense(16)(x)


class _TwoOfNNX(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        x = self.layers[1](self.layers[0](x))
        with jax.default_matmul_precision("highest"):
            x = self.layers[2](x)
        return self.layers[3](x)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_layer_that_is_called_with_it_is_not_in_fp8(framework):
    """Where it is the default around the whole, fp8 layers are in fp8."""
    x = jnp.ones((16, 16))
    if framework == "linen":
        init = jaxmp.autocast(_Two().init, "fp8")
        params = init(jax.random.key(0), x)
        assert {path.split("/")[1] for path in jaxmp.fp8.get_scales(params)} == {"Dense_1"}
        with jax.default_matmul_precision("highest"):
            around = init(jax.random.key(0), x)
            assert {path.split("/")[1] for path in jaxmp.fp8.get_scales(around)} == {"Dense_1", "Dense_2"}
        explained = jaxmp.explain_autocast(_Two().apply, params, x, dtype="fp8")
        assert explained.float32_matmuls() == {"_Two/Dense_2": "precision=HIGHEST"}
        return
    model = _TwoOfNNX(nnx.Rngs(0))
    assert jaxmp.nnx.to_fp8(model) == ["layers/1", "layers/2"]
    explained = jaxmp.explain_autocast(lambda m, x: m(x), model, x, dtype="fp8")
    assert list(explained.float32_matmuls().values()) == ["precision=HIGHEST"]
    with jax.default_matmul_precision("highest"):
        explained = jaxmp.explain_autocast(lambda m, x: m(x), model, x, dtype="fp8")
    assert not explained.float32_matmuls()
