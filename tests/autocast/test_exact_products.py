"""Products that autocast leaves in float32: those that sum at most four elements, and those that ask by precision=."""

import contextlib
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
from test_sums import DTYPES, in_16_bits, in_turn

import jaxmp
from helpers import assert_close

HIGHEST = lax.Precision.HIGHEST
RNG = np.random.default_rng(0)
OF_FRAMEWORKS = ("linen", "nnx", "equinox")  # their params stay float32 beside float64


def numbers(*shape: int, high: float = 1.0) -> Any:
    return RNG.uniform(0.1, high, shape).astype(np.float32)


def gap(got: Any, fn: Any, args: Any) -> float:
    """The largest error of `fn(*args)` in roundings of the dtype of the result, relative to the sum of its terms."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in args]
        exact, terms = jax.tree.map(np.asarray, jax.jit(lambda *xs: (fn(*xs), fn(*map(jnp.abs, xs))))(*wide))
    unit = float(jnp.finfo(got.dtype).eps) / 2
    assert got.shape == exact.shape
    return float(np.max(np.abs(np.asarray(got, np.float64) - exact) / (unit * terms)))


# A dense layer `x @ w + b`, or in some a convolution of 1x1 with the same params, as each framework writes it.


def linen_layer(x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    params = {"kernel": w} if b is None else {"kernel": w, "bias": b}
    layer = nn.Dense if w.ndim == 2 else nn.Conv
    options |= {} if w.ndim == 2 else {"kernel_size": (1, 1)}
    return layer(w.shape[-1], use_bias=b is not None, **options).apply({"params": params}, x)


def nnx_layer(x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    layer = nnx.Linear(*w.shape, use_bias=b is not None, rngs=nnx.Rngs(0), **options)
    layer.kernel.set_value(w)
    if b is not None:
        layer.bias.set_value(b)
    return layer(x)


def haiku_layer(x: Any, w: Any, b: Any) -> Any:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(w.shape[-1], name="layer")(x)))
    return net.apply({"layer": {"w": w, "b": b}}, x)


def equinox_layer(x: Any, w: Any, b: Any = None) -> Any:
    """A convolution takes images [n, channels, height, width]."""
    key, size = jax.random.key(0), w.shape[-2:]
    if w.ndim == 2:
        layer, w = eqx.nn.Linear(*size, use_bias=b is not None, key=key), w.T
    else:
        layer, w = eqx.nn.Conv2d(*size, 1, use_bias=b is not None, key=key), w[0, 0].T[:, :, None, None]
        b = None if b is None else b[:, None, None]
    return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w, b), is_leaf=lambda x: x is None))(x)


# --- at most four elements --------------------------------------------------------------------------------------------


def affine_grid(theta, x, y):
    """The points of an image [h, w, 2] under an affine map, as in spatial transformers."""
    points = jnp.stack([*jnp.meshgrid(x, y), jnp.ones((y.size, x.size), x.dtype)], -1)
    return jnp.einsum("hwk,ik->hwi", points, theta)


def codes(digits, levels):
    """The number of a code from its digits, as in finite scalar quantization."""
    basis = jnp.cumprod(jnp.concatenate([jnp.ones(1, levels.dtype), levels[:-1]]))
    return (digits @ basis[:, None])[:, 0]


ANGLES = np.arange(1, 513, dtype=np.float32), np.logspace(0, -4, 8, dtype=np.float32)  # positions, frequencies
SHORT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "an affine grid of 512": (affine_grid, (numbers(2, 3), *2 * (np.linspace(-1, 1, 512, dtype=np.float32),))),
    "pixels of a projection": (lambda k, x: x @ k.T, (numbers(3, 3, high=1920.0), numbers(64, 3))),
    "batched rotations": (lambda r, x: jnp.einsum("bij,bnj->bni", r, x), (numbers(5, 3, 3), numbers(5, 9, 3))),
    "codes of digits": (codes, (RNG.integers(0, 8, (974, 4)).astype(np.float32), np.array([8, 8, 8, 5], np.float32))),
    "dot": (jnp.dot, (numbers(7, 3), numbers(3, 5))),
    "tensordot over two axes": (lambda a, b: jnp.tensordot(a, b, 2), (numbers(7, 2, 2), numbers(2, 2, 6))),
    "matvec": (lambda a, b: a @ b, (numbers(7, 4), numbers(4))),
    "in a scan": (lambda a, xs: lax.scan(lambda c, x: (c, x @ a), 0.0, xs)[1], (numbers(3, 5), numbers(6, 2, 3))),
    "in a checkpoint": (jax.checkpoint(jnp.matmul), (numbers(7, 3), numbers(3, 5))),
    "jitted": (jax.jit(jnp.matmul), (numbers(7, 3), numbers(3, 5))),
    "linen": (linen_layer, (numbers(9, 3), numbers(3, 32))),
    "equinox": (equinox_layer, (numbers(9, 3), numbers(3, 32))),
    # nothing is summed
    "an outer product by einsum": (lambda a, b: jnp.einsum("i,j->ij", a, b), ANGLES),
    "outer": (jnp.outer, ANGLES),
    "a column and a row": (lambda a, b: a[:, None] @ b[None], ANGLES),
    "batched outer products": (lambda a, b: jnp.einsum("bi,bj->bij", a[None], b[None])[0], ANGLES),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("name", "dtype"), in_turn(SHORT, DTYPES.values()), ids=SHORT)
def test_products_of_few_elements_are_float32(name, dtype):
    fn, args = SHORT[name]
    y, exact = jax.jit(lambda *args: (jaxmp.autocast(fn, dtype)(*args), fn(*args)))(*args)
    assert y.dtype == jnp.float32
    assert name in OF_FRAMEWORKS or gap(y, fn, args) <= 2
    np.testing.assert_allclose(y, exact, rtol=1e-6)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("product", "dtype"),
    [
        pytest.param(lambda h: h[:, :4] @ h[:4], jnp.bfloat16, id="four"),
        pytest.param(lambda h: jnp.outer(h[0], h[1]), jnp.float16, id="outer"),
        pytest.param(lambda h: jnp.einsum("i,j->ij", h[0], h[1]), jnp.float16, id="an outer product by einsum"),
        pytest.param(lambda h: h[:, :1] @ h[:1], jnp.bfloat16, id="a column and a row"),
        pytest.param(lambda h: jnp.einsum("bi,bj->bij", h, h), jnp.bfloat16, id="batched outer products"),
    ],
)
def test_a_product_of_few_16_bit_elements_is_rounded_once(product, dtype):
    def fn(x):
        return product(in_16_bits(x))  # of [8, 6]

    x = numbers(8, 6).astype(dtype).astype(np.float32)
    run = jaxmp.autocast(fn, dtype)
    y = jax.jit(run)(x)
    assert y.dtype == dtype and gap(y, fn, (x,)) <= 1
    assert jax.eval_shape(lambda x: jax.vjp(run, x)[1](y)[0], x).dtype == jnp.float32


def test_short_products_that_feed_float32_take_it_all_the_way():
    """The sine of an angle beyond 2048 needs all bits of the angle."""

    def table(positions, frequencies):
        angles = positions @ frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    positions, frequencies = numbers(64, 2, high=4000.0), numbers(2, 8)
    out = jax.jit(jaxmp.autocast(table, jnp.bfloat16))(positions, frequencies)
    angles = positions.astype(np.float64) @ frequencies
    np.testing.assert_allclose(out, np.concatenate([np.sin(angles), np.cos(angles)], -1), atol=2e-3)


# --- precision=HIGHEST ------------------------------------------------------------------------------------------------


def inside(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


def convolved(x, w):
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "precision": HIGHEST}
    return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME", **options)[0, 0]


X, W = numbers(24, 16), numbers(16, 8)
BIAS = np.full(8, 0.1, np.float32)
ASKED: dict[str, Any] = {
    "dot": functools.partial(jnp.dot, precision=HIGHEST),
    "of one operand": functools.partial(jnp.matmul, precision=("default", "highest")),
    "einsum of three": lambda x, w: jnp.einsum("ni,io,i->no", x, w, jnp.ones(16, x.dtype), precision=HIGHEST),
    "a convolution": convolved,
    "a context inside, jitted": jax.jit(inside),
    "a transposed weight": lambda x, w: jnp.dot(x, (2 * w).T.T, precision=HIGHEST),
    "with a bias": lambda x, w: jnp.dot(x, w, precision=HIGHEST) + jnp.full((1, 8), 0.1, x.dtype),
    "in a scan": lambda x, w: lax.scan(lambda c, r: (c, jnp.dot(r, w, precision=HIGHEST)), 0.0, x)[1],
    "in a checkpoint": jax.checkpoint(functools.partial(jnp.dot, precision=HIGHEST)),
    "under vmap": lambda x, w: jax.vmap(lambda r: jnp.dot(r, w, precision=HIGHEST))(x),
    "linen": lambda x, w: linen_layer(x, w, BIAS, precision=HIGHEST),
    "nnx": functools.partial(nnx_layer, precision="highest"),
    "an image, resized": lambda x, w: jax.image.resize(x @ (0 * w + 1) * 0 + x[:, :8], (48, 16), "linear"),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("name", "dtype"), in_turn(ASKED, DTYPES.values()), ids=ASKED)
def test_the_highest_precision_is_float32(name, dtype):
    def weighted_sum(y):
        return (y * jnp.linspace(0.5, 1.5, y.size, dtype=y.dtype).reshape(y.shape)).astype(jnp.float32).sum(), y

    def value_and_grads(fn):
        return jax.value_and_grad(lambda x, w: weighted_sum(fn(x, w)), (0, 1), has_aux=True)

    fn = ASKED[name]
    runs = (value_and_grads(jaxmp.autocast(fn, dtype)), value_and_grads(fn))
    ((_, y), grads), (_, exact) = jax.jit(lambda x, w: [run(x, w) for run in runs])(X, W)
    assert y.dtype == jnp.float32
    assert name in OF_FRAMEWORKS or gap(y, fn, (X, W)) <= 8  # sums of 16 terms
    if name != "an image, resized":
        for got, want in zip(grads, exact, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def around(x, w):
    with jax.default_matmul_precision("highest"):
        return jax.jit(jaxmp.autocast(jnp.matmul, jnp.bfloat16))(x, w)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(around, id="a context around"),
        pytest.param(lambda x, w: jaxmp.autocast(jnp.matmul, jnp.bfloat16)(x[:, :5], w[:5]), id="five elements"),
        pytest.param(jaxmp.autocast(jaxmp.autocast(jnp.matmul, jnp.bfloat16), "fp32"), id="an outer policy"),
        pytest.param(jaxmp.autocast(functools.partial(jnp.matmul, precision="high"), jnp.bfloat16), id="high"),
        pytest.param(jaxmp.autocast(functools.partial(jnp.matmul, precision="default"), jnp.bfloat16), id="default"),
    ],
)
def test_what_is_no_request_of_a_product(run):
    assert jax.eval_shape(run, X, W).dtype == jnp.bfloat16


def test_a_loss_under_a_policy():
    x, w = jnp.asarray(X), {"w": jnp.asarray(W)}
    opt_state = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16-mixed").init(w)

    def loss_fn(params, x):
        return jnp.dot(x, params["w"], precision=HIGHEST).mean()

    with pytest.warns(UserWarning, match="precision=HIGHEST keeps all in float32"):
        loss_and_grads = jax.jit(jaxmp.value_and_grad(loss_fn, policy="bf16-mixed"))(w, x, opt_state=opt_state)
    assert_close(loss_and_grads, jax.jit(jax.value_and_grad(loss_fn))(w, x), rtol=1e-6)


# --- neither is a layer with it in fp8: the third of four, of which the first and the last are not in fp8 anyway ------

HOWS = {  # precision= of the layer, and the context in which it is called
    "asked": (HIGHEST, contextlib.nullcontext),
    "called": (None, lambda: jax.default_matmul_precision("highest")),
}


class Linen(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        precision, context = HOWS[self.how]
        x = nn.Dense(16)(x)
        x = nn.Dense(16)(x)
        with context():
            x = nn.Dense(16, precision=precision)(x)
        return nn.Dense(16)(x)


class OfNnx(nnx.Module):
    def __init__(self, how):
        precision, self.context = HOWS[how]
        self.layers = nnx.List(nnx.Linear(16, 16, precision=p, rngs=nnx.Rngs(0)) for p in (None, None, precision, None))

    def __call__(self, x):
        x = self.layers[1](self.layers[0](x))
        with self.context():
            x = self.layers[2](x)
        return self.layers[3](x)


@pytest.mark.parametrize("how", HOWS)
def test_a_layer_of_linen_with_it_is_not_in_fp8(how):
    """Where it is the default around the whole, fp8 layers are in fp8."""
    model, x = Linen(how), jnp.ones((16, 16))

    def in_fp8(params):
        return {path.split("/")[1] for path in jax.eval_shape(jaxmp.fp8.get_scales, params)}

    def init():
        return jax.eval_shape(jaxmp.autocast(lambda: model.init(jax.random.key(0), x), "fp8"))

    params = init()
    assert in_fp8(params) == {"Dense_1"}
    explained = jaxmp.explain_autocast(model.apply, params, x, dtype="fp8")
    assert explained.float32_matmuls() == {"Linen/Dense_2": "precision=HIGHEST"}
    with jax.default_matmul_precision("highest"):
        assert in_fp8(init()) == ({"Dense_1"} if how == "asked" else {"Dense_1", "Dense_2"})


@pytest.mark.parametrize(("how", "layers"), [("asked", ["layers/1"]), ("called", ["layers/1", "layers/2"])])
def test_a_layer_of_nnx_with_it_is_not_in_fp8(how, layers):
    """One that is called with it gets scales, which rest until it is called without it."""
    model, x = OfNnx(how), jnp.ones((16, 16))
    assert jaxmp.nnx.to_fp8(model) == layers

    def float32_matmuls():
        return list(jaxmp.explain_autocast(lambda m, x: m(x), model, x, dtype="fp8").float32_matmuls().values())

    assert float32_matmuls() == ["precision=HIGHEST"]
    with jax.default_matmul_precision("highest"):
        assert float32_matmuls() == []
