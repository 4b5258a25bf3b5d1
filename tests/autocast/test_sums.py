"""What adds up numbers under autocast, beside float64: its value and its gradient, in roundings of their dtypes.

A test of dtypes would not do. In bfloat16 a sum of ones ends at 256, wherever the sum is: in a window, a scatter, a
loop, or the gradient of what was repeated.
"""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
LENGTHS = (4, 256, 8192)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def roundings(got: Any, exact: Any, dtype: Any) -> float:
    """The largest error in units of a rounding to `dtype`: half of its epsilon, relative to the exact number."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert got.shape == exact.shape
    assert np.isfinite(got).all()
    return float(np.max(np.abs(got - exact) / (np.abs(exact) * float(jnp.finfo(dtype).eps) / 2), initial=0.0))


def in_float64(fn: Any, x: Any, weights: Any) -> tuple[Any, Any]:
    """`fn(x)`, and the gradient of its product with `weights`, in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        y, pull_back = jax.vjp(fn, jnp.asarray(np.asarray(x, np.float64)))
        return np.asarray(y), np.asarray(pull_back(jnp.asarray(np.asarray(weights, np.float64)))[0])


def exact_numbers(shape: tuple[int, ...], low: float = 0.5, high: float = 2.0) -> Any:
    """Positive float32 numbers that both 16-bit dtypes hold: no cast rounds them, and sums of 8192 are exact."""
    x = np.random.default_rng(0).uniform(low, high, shape)
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def in_16_bits(x: Any) -> Any:
    """`x`, as a product leaves it: of 16 bits under autocast."""
    return jnp.einsum("bn,bc->cn", x, jnp.eye(8))


def windows(h: Any) -> Any:
    """[8, n] as an image [1, n, 8] of channels."""
    return h.T[None]


def sums_of_windows(h: Any, n: int) -> Any:
    return lax.reduce_window(h, 0.0, lax.add, (1, n), (1, 1), "VALID")


N = np.arange  # of rows and places
TURN = np.float32([[0.0, 1.0], [-1.0, 0.0]])


def over(body: Any, h: Any, start: Any = lambda c: c) -> Any:
    """What a scan over columns carries in the end, from the first one on."""
    return lax.scan(body, start(h[:, 0]), h[:, 1:].T)[0]


@jax.custom_vjp
def _added(c: Any, x: Any) -> Any:
    return c + x


_added.defvjp(lambda c, x: (c + x, None), lambda _, g: (g, g))

SUMS: dict[str, Any] = {
    # over windows
    "reduce_window": sums_of_windows,
    "reduce_window, padded": lambda h, n: lax.reduce_window(h, 0.0, lax.add, (1, min(n, 256)), (1, 1), "SAME"),
    "linen's pool": lambda h, n: nn.avg_pool(windows(h), (n,), (n,)),
    "linen's pool, padded": lambda h, n: nn.avg_pool(windows(h), (3,), (1,), "SAME", count_include_pad=False),
    "nnx's pool": lambda h, n: nnx.avg_pool(windows(h), (min(n, 64),), (min(n, 64),)),
    "haiku's pool": lambda h, n: hk.avg_pool(windows(h), (1, n, 1), (1, n, 1), "VALID"),
    "haiku's pool, padded": lambda h, n: hk.avg_pool(windows(h), (1, 5, 1), (1, 2, 1), "SAME"),
    "equinox's pool": lambda h, n: eqx.nn.AvgPool1d(min(n, 128), min(n, 128))(h),
    "a pool of a pool": lambda h, n: nn.avg_pool(nn.avg_pool(windows(h), (2,), (2,)), (n // 2,)),
    "a pool in a jitted function": lambda h, n: jax.jit(lambda h: nn.avg_pool(nn.relu(windows(h)), (n,)))(h),
    "a pool by a factor": lambda h, n: (1 / n) * sums_of_windows(h, n),
    "a pool by counts": lambda h, n: sums_of_windows(h, n) / jnp.full((8, 1), 3.0),
    # of which each element is in several windows: the gradients are added up
    "windows' maximum": lambda h, n: nn.max_pool(windows(h), (min(n, 256),), (1,)),
    "windows' minimum": lambda h, n: lax.reduce_window(h, jnp.inf, lax.min, (1, min(n, 64)), (1, 1), "SAME"),
    "cummax": lambda h, n: lax.cummax(h.at[:, 0].set(3 * h[:, 0]), 1),
    "cummin": lambda h, n: lax.cummin(h.at[:, 0].set(h[:, 0] / 4), 1),
    # cumulative ones, and those of loops
    "cumsum": lambda h, n: jnp.cumsum(h, 1),
    "cumsum, from the end": lambda h, n: lax.cumsum(h, 1, reverse=True),
    "scan": lambda h, n: lax.scan(lambda c, x: (c + x, c + x), jnp.zeros(8), h.T)[1],
    "scan from an element": lambda h, n: over(lambda c, x: (c + x, None), h),
    "scan of a jitted body": lambda h, n: over(jax.jit(lambda c, x: (x + c, None)), h),
    "fori_loop": lambda h, n: lax.fori_loop(1, n, lambda i, c: c + h[:, i], h[:, 0]),
    "two sums in a scan": lambda h, n: over(lambda c, x: ((c[0] + x, c[1] + x * x), None), h, lambda c: (c, c))[0],
    "scan of a checkpointed body": lambda h, n: over(jax.checkpoint(lambda c, x: (c + x, None)), h),
    "scan of a body with its own derivative": lambda h, n: over(lambda c, x: (_added(c, x), None), h),
    "a sum of some": lambda h, n: over(lambda c, x: (jnp.where(x > 1, c + x, c), None), h),
    "a sum in a branch": lambda h, n: over(
        lambda c, x: (lax.cond(x[0] > 1, lambda: jnp.clip(c + x, 0, 1e5), lambda: c), None), h
    ),
    "sums that a loop moves": lambda h, n: over(
        lambda c, x: ((c[1], jnp.roll(c[0].at[:4].add(x[:4]), 2)), None), h, lambda c: (c, c)
    )[0],
    "a state that is turned": lambda h, n: over(lambda c, x: ((c.reshape(4, 2) @ TURN).reshape(8) + x, None), h),
    "what a checkpointed body hands on": lambda h, n: lax.scan(
        jax.checkpoint(lambda c, i: (c, c * i)), h[:, 0], jnp.arange(n) % 2 + 1.0
    )[1],
    "what all turns read": lambda h, n: lax.scan(lambda c, i: (c, h[:, 0] * i), 0.0, jnp.arange(n) % 2 + 1.0)[1],
    # of what was scattered, gathered, repeated
    "scatter to zeros": lambda h, n: jnp.zeros(2).at[N(n) % 2].add(h[0]),
    "scatter": lambda h, n: h[1, :2].at[N(n) % 2].add(h[0]),
    "scatter, subtracted": lambda h, n: (-h[1, :2]).at[N(n) % 2].subtract(h[0]),
    "scattered maxima": lambda h, n: jnp.zeros(2, h.dtype).at[N(n) % 2].max(h[0] * 0 + h[0, :1]),
    "segment_sum": lambda h, n: jax.ops.segment_sum(h.T, N(n) % 2, 2),
    "bincount": lambda h, n: jnp.bincount(N(n) % 2, h[0], length=2),
    "gather": lambda h, n: h[:, N(n) % 2],
    "take": lambda h, n: jnp.take(h, N(n) % 2, axis=1),
    "take_along_axis": lambda h, n: jnp.take_along_axis(h, jnp.zeros((8, n), int), 1),
    "broadcast": lambda h, n: jnp.broadcast_to(h[:, :4, None], (8, 4, n)),
    "tile": lambda h, n: jnp.tile(h[:, :2], (1, n)),
    "repeat": lambda h, n: jnp.repeat(h[:, :2], n, axis=1),
    "a sum with one of each row": lambda h, n: lax.stop_gradient(h) + h[:, :1],
    "a product with one of each row": lambda h, n: lax.stop_gradient(h) * h[:, :1],
    # plain ones
    "sum": lambda h, n: h.sum(1),
    "mean": lambda h, n: h.mean(1),
    "lax.reduce": lambda h, n: lax.reduce(h, 0.0, lax.add, (1,)),
    "average": lambda h, n: jnp.average(h, 1, jnp.ones(n)),
    "nansum": lambda h, n: jnp.nansum(h, 1),
    "vdot": lambda h, n: jnp.vdot(h, lax.stop_gradient(h)),
    "fft": lambda h, n: jnp.fft.fft(h)[:, 0].real,
}


def gaps(name: str, dtype: Any, n: int) -> dict[str, float]:
    """The errors of a sum of n elements, and of its gradient, in roundings."""

    def fn(x: Any) -> Any:
        return SUMS[name](in_16_bits(x), n)

    def value_and_gradient(x: Any, weights: Any) -> Any:
        y, pull_back = jax.vjp(run, x)
        return y, pull_back(weights)[0]

    x, run = exact_numbers((8, n)), jaxmp.autocast(fn, dtype)
    shape = jax.eval_shape(run, x)
    weights = exact_numbers(shape.shape, 0.25, 1.0)
    y, grad = jax.jit(value_and_gradient)(x, weights.astype(shape.dtype))
    exact, exact_grad = in_float64(fn, x, weights)
    places = exact_grad != 0  # others are zero
    if dtype == jnp.float16 and np.abs(exact_grad).max() > 60000:
        places &= False
    return {"value": roundings(y, exact, y.dtype), "grad": roundings(grad[places], exact_grad[places], dtype)}


@pytest.mark.thorough(4)
@both_dtypes
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_as_exact_as_in_float32(name, dtype):
    for n in LENGTHS:
        found = gaps(name, dtype, n)
        assert max(found.values()) <= 2, (n, found)


@pytest.mark.thorough(1)
@both_dtypes
def test_an_average_of_windows_has_the_dtype_of_what_it_averages(dtype):
    """As in torch. A sum over windows alone is float32, as `jnp.sum` is, and so is what feeds float32 operations."""

    def fn(x):
        h = windows(in_16_bits(x))
        total = lax.reduce_window(h, 0.0, lax.add, (1, 4, 1), (1, 4, 1), "VALID")
        average = nn.avg_pool(h, (4,), (4,))
        return average, total, total / 4.0, total * jnp.ones((1, 1, 8)), nn.softmax(total / 4.0)

    out = jaxmp.autocast(fn, dtype)(exact_numbers((8, 64)))
    assert [y.dtype for y in out] == [dtype, jnp.float32, dtype, dtype, jnp.float32]


@pytest.mark.thorough(1)
@both_dtypes
def test_features_whose_window_is_beyond_16_bits(dtype):
    """In float16 the sum of 32x32 features of 300 is beyond 65504; their mean is not."""
    image = jnp.full((1, 32, 32, 8), 300.0)
    pool = jaxmp.autocast(lambda x: nn.avg_pool(jnp.einsum("nhwc,cd->nhwd", x, jnp.eye(8)), (32, 32)), dtype)
    y, grad = jax.jit(jax.value_and_grad(lambda x: pool(x).astype(jnp.float32).sum()))(image)
    assert float(y) == 8 * 300.0
    np.testing.assert_array_equal(grad, np.full(image.shape, 2.0**-10))


EYE = jnp.eye(8)
CARRIED: dict[str, tuple[Any, Any]] = {
    # a stream, and what is only moved, keep their 16 bits
    "a stream": (jnp.bfloat16, lambda c, x: (c + jnp.tanh(c @ EYE), x)),
    "a stream in a function": (jnp.bfloat16, lambda c, x: (jax.checkpoint(lambda c: c + jax.nn.relu(c @ EYE))(c), x)),
    "moved": (jnp.bfloat16, lambda c, x: (c.T.reshape(8, 8), x)),
    "a buffer": (jnp.bfloat16, lambda c, x: (c.at[0].set(x[0] + 1), x)),
    "the largest": (jnp.bfloat16, lambda c, x: (jnp.maximum(c, x), x)),
    "the last of some": (jnp.bfloat16, lambda c, x: (jnp.where(x > 0, x, c), x)),
    "kept": (jnp.bfloat16, lambda c, x: (c, x)),
    "kept by a function": (jnp.bfloat16, lambda c, x: (jax.checkpoint(lambda c: c)(c), x)),
    # what is computed beside them does not
    "a sum": (jnp.float32, lambda c, x: (x + c, x)),
    "a sum of several": (jnp.float32, lambda c, x: (jax.jit(jnp.add)(c + x, x * x) - x, x)),
    "a sum of what a stream makes": (jnp.float32, lambda c, x: (c + jnp.tanh(x @ EYE), x)),
    "a state that decays": (jnp.float32, lambda c, x: (0.5 * c + x, x)),
    "a product": (jnp.float32, lambda c, x: (c * 1.001, x)),
    "a sum beside a product of another": (
        jnp.float32,
        lambda c, x: (lax.scan(lambda d, y: (d + y, y @ EYE), c, x[None])[0], x),
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_loop_computes_without_a_product_is_float32(name):
    expected, body = CARRIED[name]
    fn = jaxmp.autocast(lambda x: lax.scan(body, x @ EYE, jnp.stack([x @ EYE] * 3))[0], jnp.bfloat16)
    assert jax.eval_shape(fn, jnp.ones((8, 8))).dtype == expected


@both_dtypes
def test_a_running_average_follows_what_it_averages(dtype):
    """It starts from what a product returned. In bfloat16 it would stay where it started."""
    x = exact_numbers((8, 1)) * np.asarray(jnp.linspace(0.5, 1.5, 800).astype(jnp.bfloat16), np.float32)

    def fn(x):
        return over(lambda c, y: (0.99 * c + 0.01 * y, None), in_16_bits(x)).sum()

    run = jaxmp.autocast(fn, dtype)
    value, grad = jax.jit(jax.value_and_grad(lambda x: run(x).astype(jnp.float32)))(x)
    expected, expected_grad = jax.jit(jax.value_and_grad(fn))(x)
    np.testing.assert_allclose(value, expected, rtol=2**-8)  # x and 0.01 * y are of 16 bits
    np.testing.assert_allclose(grad, expected_grad, rtol=2**-7, atol=1e-5)


def test_what_a_loop_hands_on_keeps_a_derivative_of_its_own():
    """A gradient that is reversed, of ones and small integers: exact."""
    reversed_gradient = jax.custom_vjp(lambda c: c)
    reversed_gradient.defvjp(lambda c: (c, None), lambda _, g: (-g,))

    def fn(x):
        carry, out = lax.scan(lambda c, i: (reversed_gradient(c), c * i), (x @ EYE)[0], jnp.ones(3))
        return carry.sum() + out.sum()

    x = jnp.ones((1, 8))
    np.testing.assert_array_equal(jax.grad(jaxmp.autocast(fn, jnp.bfloat16))(x), jax.grad(fn)(x))


class Everything(nn.Module):
    """All kinds in one model: pools, gathers, sums of loops, a grid, an exact product, a residual of one column."""

    @nn.compact
    def __call__(self, x):
        points = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(-1, 1, 16)]), -1)
        grid = jnp.einsum("hwk,ik->hwi", points, self.param("theta", nn.initializers.constant(0.5), (2, 2)))
        x = jnp.concatenate([x, jnp.broadcast_to(grid[None], (*x.shape[:3], 2))], -1)
        h = nn.relu(nn.Conv(16, (3, 3))(x))
        h = nn.avg_pool(nn.max_pool(h, (3, 3), (1, 1), "SAME"), (2, 2), (2, 2))
        h = nn.relu(nn.Conv(32, (3, 3))(h))
        rows = h.reshape(h.shape[0], -1, 32)
        total, _ = lax.scan(lambda c, row: (c + row, None), rows[:, 0], jnp.moveaxis(rows[:, 1:], 1, 0))
        picked = rows[:, jnp.arange(64) % 7].sum(1)
        y = jnp.concatenate([nn.avg_pool(h, h.shape[1:3])[:, 0, 0], total / 64, picked / 64], -1)
        y = nn.Dense(16)(y)
        y = jnp.dot(y, self.param("out", nn.initializers.lecun_normal(), (16, 8)), precision="highest")
        return y[:, -1:] + nn.Dense(8)(y)


def mean(tree: Any) -> Any:
    return jax.tree.map(lambda g: g.mean(0), tree)


def in_four(*arrays: Any) -> Any:
    return tuple(a.reshape(4, -1, *a.shape[1:]) for a in arrays)


MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
over_devices = functools.partial(jax.shard_map, mesh=MESH, in_specs=P("data"), out_specs=P())
REGIMES: dict[str, Any] = {
    "jit": lambda grads, x, y: grads(x, y),
    "accumulated": lambda grads, x, y: grads(x, y, accumulate=2, accumulate_argnums=(1, 2)),
    "remat": lambda grads, x, y: grads(x, y, around=jax.checkpoint),
    "vmap": lambda grads, x, y: mean(jax.vmap(lambda x, y: grads(x[None], y[None]))(x, y)),
    "scan": lambda grads, x, y: mean(lax.scan(lambda c, b: (c, grads(*b)), 0, in_four(x, y))[1]),
    "sharded": lambda grads, x, y: grads(*jax.device_put((x, y), NamedSharding(MESH, P("data")))),
    "shard_map": lambda grads, x, y: over_devices(lambda *b: lax.pmean(grads(*b), "data"))(x, y),
    "shard_map, unchecked": lambda grads, x, y: over_devices(lambda *b: lax.pmean(grads(*b), "data"), check_vma=False)(
        x, y
    ),
    "pmap": lambda grads, x, y: mean(jax.pmap(grads, "data", devices=jax.devices()[:4])(*in_four(x, y))),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "bf16-mixed", "fp16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_in_every_regime(regime, policy):
    model, rng = Everything(), np.random.default_rng(0)
    x, y = rng.normal(size=(8, 16, 16, 3)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)

    def loss_fn(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    params32 = jax.jit(model.init)(jax.random.key(0), x)["params"]
    tx = jaxmp.mixed_precision(optax.adam(1e-3), policy, loss_scale=256.0 if policy == "fp16" else None)
    params, opt_state = jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)

    def grads(x, y, around=lambda f: f, **options):
        grad_fn = jaxmp.value_and_grad(around(loss_fn), policy=policy, **options)
        return jaxmp.unscale(grad_fn(params, x, y, opt_state=opt_state)[1], opt_state)

    run = functools.partial(REGIMES[regime], grads)
    found = (run if regime == "pmap" else jax.jit(run))(x, y)
    exact = jax.jit(jax.grad(loss_fn))(params32, x, y)
    limit = 0.005 if policy == "fp16" else 0.02
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        gap = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert gap < limit, (want.shape, gap)
