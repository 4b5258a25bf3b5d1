"""Products that return float32 of 16-bit operands: logits of attention beyond 65504, layers that ask for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_within_ulps
from jaxmp._src.programs import jaxprs
from matmul_dtypes import matmuls

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
WIDTH, TOKENS = 64, 8

# Products of queries and keys are 153600 and more, in float16 inf. They are integers, so float32 has them exactly.
Q = np.full((TOKENS, WIDTH), 60, np.float32)
K = np.full((TOKENS, WIDTH), 40, np.float32) + np.where(np.arange(WIDTH) == 0, np.arange(TOKENS)[:, None] / 4, 0)
V = np.random.default_rng(0).integers(-8, 9, (TOKENS, WIDTH)).astype(np.float32) / 8
QKV = np.concatenate([Q, K, V], axis=1).astype(np.float32)  # the weights of a layer: every row of x chooses one of them
X = np.eye(TOKENS, dtype=np.float32)
TARGET = np.random.default_rng(1).integers(-2, 3, (TOKENS, WIDTH)).astype(np.float32)


def by_jax(qkv):
    q, k, v = (x[None, :, None] for x in jnp.split(qkv, 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")[0, :, 0]


class Linen(nn.Module):
    attention: Any

    @nn.compact
    def __call__(self, x):
        return self.attention(nn.Dense(3 * WIDTH, use_bias=False)(x))


class Nnx(nnx.Module):
    def __init__(self, attention):
        self.qkv = nnx.Linear(TOKENS, 3 * WIDTH, use_bias=False, rngs=nnx.Rngs(0))
        self.attention = attention

    def __call__(self, x):
        return self.attention(self.qkv(x))


def loss_of(out):
    return jnp.mean(out.astype(jnp.float32) * TARGET)


def exact(weights):
    """The loss and its gradient in NumPy, in float64, and the size of what is added up in each gradient."""
    q, k, v = np.split(weights.astype(np.float64), 3, axis=1)
    logits = q @ k.T / 8
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g = TARGET / TARGET.size
    dp = g @ v.T
    dl = p * (dp - (p * dp).sum(1, keepdims=True)) / 8
    # The sum of p dp cancels in float32: its terms bound what a rounding of p to 16 bits moves.
    sizes = p * (np.abs(g) @ np.abs(v).T + (p * (np.abs(g) @ np.abs(v).T)).sum(1, keepdims=True)) / 8
    grads = np.concatenate([dl @ k, dl.T @ q, p.T @ g], axis=1)
    return (p @ v * g).sum(), grads, np.concatenate([sizes @ k, sizes.T @ q, p.T @ np.abs(g)], axis=1)


def run(kind, attention, dtype):
    """The loss and the gradient of the weights, under a policy and its loss scale."""
    policy, weights = "fp16" if dtype == F16 else "bf16", jnp.asarray(QKV, dtype)
    tx = jaxmp.mixed_precision(optax.sgd(1e-3), policy)
    if kind == "nnx":
        model = Nnx(attention)
        model.qkv.kernel.set_value(weights)
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        grad_fn = jaxmp.nnx.value_and_grad(lambda model: loss_of(model(X)), policy=policy)
        loss, grads = nnx.jit(lambda model, state: grad_fn(model, opt_state=state))(model, optimizer)
        grad = jaxmp.unscale(grads, optimizer)["qkv"]["kernel"].get_value()
        return loss, grad
    if kind == "linen":
        model, params = Linen(attention), {"Dense_0": {"kernel": weights}}
        loss_fn = lambda p: loss_of(model.apply({"params": p}, X))  # noqa: E731
    else:
        params = weights
        loss_fn = lambda w: loss_of(attention(X @ w))  # noqa: E731
    state = tx.init(jax.tree.map(lambda x: x.astype(F32), params))
    loss, grads = jax.jit(jaxmp.value_and_grad(loss_fn, policy=policy))(params, opt_state=state)
    return loss, jax.tree.leaves(jaxmp.unscale(grads, state))[0]


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("linen", by_jax), ("nnx", by_jax), ("plain", by_jax)],
)
@DTYPES
@pytest.mark.thorough(6)
def test_logits_beyond_float16(dtype, kind, attention):
    """Values and gradients as in float64, but for the roundings of what 16 bits hold: probabilities and operands."""
    loss, grad = run(kind, attention, dtype)
    expected, grads, sizes = exact(QKV)
    eps = float(jnp.finfo(dtype).eps)
    assert loss.dtype == F32
    np.testing.assert_allclose(loss, expected, rtol=0, atol=2 * eps)
    np.testing.assert_array_less(np.abs(grad - grads), 2 * eps * sizes + 3e-7)


A: Any = np.full((4, 8), 300, np.float32)
B: Any = np.full((8, 4), 100, np.float32)
BIAS = np.full(4, 1000, np.float32)


def _layer(kind, dtype):
    """A function of a kernel and a bias: a layer under autocast that asks for float32, of A. Its outputs are 241000."""
    cast = functools.partial(jaxmp.autocast, dtype=F16, modules={})
    given: dict[str, Any] = {"preferred_element_type": jnp.float32, "dtype": dtype}
    if kind == "linen.Einsum":
        layer = nn.Einsum((8, 4), "ij,jk->ik", **given)
        return cast(lambda kernel, bias: layer.apply({"params": {"kernel": kernel, "bias": bias}}, A))
    rngs = nnx.Rngs(0)
    model, x = {
        "nnx.Linear": lambda: (nnx.Linear(8, 4, rngs=rngs, **given), A),
        "nnx.LinearGeneral": lambda: (nnx.LinearGeneral(8, 4, rngs=rngs, **given), A),
        "nnx.Einsum": lambda: (nnx.Einsum("ij,jk->ik", (8, 4), (4,), rngs=rngs, **given), A),
        "nnx.Conv": lambda: (nnx.Conv(8, 4, (1,), rngs=rngs, **given), A[None]),
        "nnx.ConvTranspose": lambda: (nnx.ConvTranspose(8, 4, (1,), rngs=rngs, **given), A[None]),
    }[kind]()

    def call(kernel, bias):
        copy = nnx.clone(model)
        copy.kernel.set_value(kernel.reshape(model.kernel.shape))
        copy.bias.set_value(bias)
        return cast(lambda layer: layer(x))(copy).reshape(4, 4)  # an argument: its dtypes are read

    return call


LAYERS = ("linen.Einsum", "nnx.Linear", "nnx.LinearGeneral", "nnx.Einsum", "nnx.Conv", "nnx.ConvTranspose")


@pytest.mark.parametrize("dtype", [None, jnp.float16, jnp.float32], ids=["any", "its own", "float32"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.thorough(7)
def test_layers(kind, dtype):
    """A layer with `preferred_element_type=jnp.float32` returns float32, bias included, and its gradients are right."""
    call = _layer(kind, dtype)

    def loss(kernel, bias):
        out: Any = call(kernel, bias)
        assert out.dtype == F32
        return jnp.mean(jnp.square(out / 1e5)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(B, BIAS)
    np.testing.assert_array_equal(out, np.full((4, 4), 241000))
    g = 2 * 2.41 / 1e5 / 16
    assert_within_ulps([x.astype(F16) for x in grads], [jnp.full((8, 4), 4 * 300 * g, F16), jnp.full(4, 4 * g, F16)], 2)


def test_of_operands_in_16_bits():
    """Operands that the code itself casts: the product is float32, and so is its sum with a 16-bit bias."""

    def layer(w, b):
        y = jnp.einsum("ij,jk->ik", A.astype(F16), w.astype(F16), preferred_element_type=jnp.float32)
        return y + b.astype(F16)[None]

    out = jax.jit(jaxmp.autocast(layer, F16))(B, BIAS)
    np.testing.assert_array_equal(out, np.full((4, 4), 241000))


def _looped(qkv):
    return lax.scan(lambda c, _: (c + by_jax(qkv) / 2, None), jnp.zeros((TOKENS, WIDTH)), None, length=2)[0]


WAYS = {
    "vmap": lambda fn: lambda qkv: jax.vmap(fn)(jnp.stack([qkv, qkv]))[1],
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "scan": lambda fn: _looped,
    "map": lambda fn: lambda qkv: lax.map(fn, qkv[None])[0],
    "cond": lambda fn: lambda qkv: lax.cond(qkv[0, 0] > 0, fn, lambda x: fn(x) * 2, qkv),
}


@pytest.mark.parametrize(
    ("way", "inside"),
    # The loop is a function of its own.
    [(way, inside) for way in WAYS for inside in (True, False) if inside or way != "scan"],
    ids=lambda part: part if isinstance(part, str) else "in autocast" if part else "around autocast",
)
@DTYPES
@pytest.mark.thorough(5)
def test_transformed(dtype, way, inside):
    """Under transformations, in both modes of derivatives."""
    cast = functools.partial(jaxmp.autocast, dtype=dtype)
    fn = cast(WAYS[way](by_jax)) if inside else WAYS[way](cast(by_jax))
    expected, grads, sizes = exact(QKV)
    eps = float(jnp.finfo(dtype).eps)
    loss, grad = jax.jit(jax.value_and_grad(lambda w: loss_of(fn(w))))(QKV)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=2 * eps)
    assert grad.dtype == F32
    np.testing.assert_array_less(np.abs(grad - grads), 2 * eps * sizes + 3e-7)
    direction = np.concatenate([QKV[:, :64], np.zeros((TOKENS, 128), np.float32)], axis=1)  # its products are as large
    _, along = jax.jit(lambda w, t: jax.jvp(lambda w: loss_of(fn(w)), (w,), (t,)))(QKV, direction)
    np.testing.assert_allclose(
        along, (grads * direction).sum(), rtol=0, atol=2 * eps * (sizes * np.abs(direction)).sum()
    )


SPREAD = ("shard_map", "shard_map without vma", "pmap", "mesh", "accumulate")


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("way", SPREAD)
@DTYPES
@pytest.mark.thorough(2)
def test_spread(dtype, way, reduce_dtype):
    """Over devices that compute the same, or microbatches: numbers as of one device."""
    policy = jaxmp.get_policy("fp16" if dtype == F16 else "bf16", reduce_dtype=reduce_dtype)
    tx = jaxmp.mixed_precision(optax.sgd(1e-3), policy)
    weights, state = jnp.asarray(QKV, dtype), jax.device_get(tx.init(jnp.asarray(QKV)))
    loss_fn = lambda w, x: loss_of(by_jax(x @ w))  # noqa: E731
    options = {"accumulate": 2} if way == "accumulate" else {}
    compute = functools.partial(jaxmp.value_and_grad(loss_fn, policy=policy, **options), opt_state=state)
    mesh = regimes.mesh_of()
    mean = lambda w, x: jax.lax.pmean(compute(w, x), regimes.AXIS)  # noqa: E731
    if way == "accumulate":
        loss, grad = jax.jit(compute)(weights, np.concatenate([X, X]))
    elif way == "pmap":
        spread = jax.pmap(mean, regimes.AXIS, in_axes=(None, 0), devices=jax.devices()[: regimes.DEVICES])
        loss, grad = (x[0] for x in spread(weights, np.stack([X] * regimes.DEVICES)))
    elif way == "mesh":
        split = jax.device_put(weights, NamedSharding(mesh, P(regimes.AXIS)))
        loss, grad = jax.jit(compute)(split, jax.device_put(X, NamedSharding(mesh, P())))
    else:
        specs = {"mesh": mesh, "in_specs": (P(), P()), "out_specs": P(), "check_vma": way == "shard_map"}
        loss, grad = jax.jit(jax.shard_map(mean, **specs))(weights, X)
    expected, grads, sizes = exact(QKV)
    eps = float(jnp.finfo(dtype).eps)
    assert grad.dtype == (F32 if reduce_dtype or way == "accumulate" else dtype)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=2 * eps)
    np.testing.assert_array_less(np.abs(jaxmp.unscale(grad, state) - grads), 2 * eps * sizes + 3e-7)


@DTYPES
def test_backward_products(dtype):
    """In bfloat16 all products multiply 16-bit arrays; in float16 the derivative of the logits has its range."""
    layer = lambda w: loss_of(by_jax(w) @ np.eye(WIDTH, dtype=np.float32))  # noqa: E731
    found = matmuls(jax.grad(jaxmp.autocast(layer, dtype)), QKV)
    assert found == ({"bfloat16": 8} if dtype == BF16 else {"float16": 6, "float16xfloat32": 2})


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.1, "deterministic": True}], ids=str)
def test_layers_that_ask_for_nothing(options):
    """flax's attention hands `lax.dot_general` to an einsum: its products return 16 bits, as by hand."""
    x = np.ones((2, 8, 32), np.float32)
    layer = nn.MultiHeadDotProductAttention(4, **options)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    closed = jax.make_jaxpr(jaxmp.autocast(layer.apply, BF16))(params, x)
    products = [eqn for eqn in jaxprs.equations(closed) if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in products] == [BF16] * 6
