"""What adds up numbers under autocast, beside float64: its value and its gradient, in roundings of their dtypes.

A test of dtypes would not do. In bfloat16 a sum of ones ends at 256, wherever the sum is: in a window, a scatter, a
loop, or the gradient of what was repeated.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
LENGTHS = (4, 4096)


def in_turn(cases: Any, others: Any) -> list[tuple[Any, Any]]:
    """Each case with one of the others."""
    return list(zip(cases, itertools.cycle(others), strict=False))


def roundings(got: Any, exact: Any, dtype: Any) -> float:
    """The largest error in units of a rounding to `dtype`: half of its epsilon, relative to the exact number."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert got.shape == exact.shape
    assert np.isfinite(got).all()
    return float(np.max(np.abs(got - exact) / (np.abs(exact) * float(jnp.finfo(dtype).eps) / 2), initial=0.0))


def in_float64(fn: Any, x: Any, weights: Any) -> tuple[Any, Any]:
    """`fn(x)`, and the gradient of its product with `weights`, in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        run = jax.jit(lambda x, weights: (fn(x), jax.vjp(fn, x)[1](weights)[0]))
        return jax.tree.map(np.asarray, run(np.asarray(x, np.float64), np.asarray(weights, np.float64)))


def exact_numbers(shape: tuple[int, ...], low: float = 0.5, high: float = 2.0) -> Any:
    """Positive float32 numbers that both 16-bit dtypes hold: no cast rounds them, and sums of 8192 are exact."""
    return np.random.default_rng(0).uniform(low, high, shape).astype(jnp.bfloat16).astype(np.float32)


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
    "linen's pool": lambda h, n: nn.avg_pool(windows(h), (n,), (n,)),
    "a pool in a jitted function": lambda h, n: jax.jit(lambda h: nn.avg_pool(nn.relu(windows(h)), (n,)))(h),
    "a pool by counts": lambda h, n: sums_of_windows(h, n) / jnp.full((8, 1), 3.0),
    # of which each element is in several windows: the gradients are added up
    "windows' maximum": lambda h, n: nn.max_pool(windows(h), (min(n, 256),), (1,)),
    "cummax": lambda h, n: lax.cummax(h.at[:, 0].set(3 * h[:, 0]), 1),
    # cumulative ones, and those of loops
    "cumsum": lambda h, n: jnp.cumsum(h, 1),
    "scan": lambda h, n: lax.scan(lambda c, x: (c + x, c + x), jnp.zeros(8), h.T)[1],
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
    # of what was scattered, gathered, repeated
    "scatter to zeros": lambda h, n: jnp.zeros(2).at[N(n) % 2].add(h[0]),
    "scatter": lambda h, n: h[1, :2].at[N(n) % 2].add(h[0]),
    "scattered maxima": lambda h, n: jnp.zeros(2, h.dtype).at[N(n) % 2].max(h[0] * 0 + h[0, :1]),
    "segment_sum": lambda h, n: jax.ops.segment_sum(h.T, N(n) % 2, 2),
    "gather": lambda h, n: h[:, N(n) % 2],
    "take_along_axis": lambda h, n: jnp.take_along_axis(h, jnp.zeros((8, n), int), 1),
    "broadcast": lambda h, n: jnp.broadcast_to(h[:, :4, None], (8, 4, n)),
    "repeat": lambda h, n: jnp.repeat(h[:, :2], n, axis=1),
    "a product with one of each row": lambda h, n: lax.stop_gradient(h) * h[:, :1],
    # plain ones
    "sum": lambda h, n: h.sum(1),
    "lax.reduce": lambda h, n: lax.reduce(h, 0.0, lax.add, (1,)),
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


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("name", "dtype"), in_turn(SUMS, DTYPES.values()), ids=SUMS)
def test_sums_are_as_exact_as_in_float32(name, dtype):
    for n in LENGTHS:
        roundings_by_kind = gaps(name, dtype, n)
        assert max(roundings_by_kind.values()) <= 2, (n, roundings_by_kind)


def test_an_average_of_windows_has_the_dtype_of_what_it_averages():
    """As in torch. A sum over windows alone is float32, as `jnp.sum` is, and so is what feeds float32 operations."""

    def fn(x):
        h = windows(in_16_bits(x))
        total = lax.reduce_window(h, 0.0, lax.add, (1, 4, 1), (1, 4, 1), "VALID")
        average = nn.avg_pool(h, (4,), (4,))
        return average, total, total / 4.0, total * jnp.ones((1, 1, 8)), nn.softmax(total / 4.0)

    dtypes = [y.dtype.name for y in jax.eval_shape(jaxmp.autocast(fn), np.ones((8, 64), np.float32))]
    assert dtypes == ["float16", "float32", "float16", "float16", "float32"]


def test_features_whose_window_is_beyond_16_bits():
    """In float16 the sum of 32x32 features of 300 is beyond 65504; their mean is not."""
    image = np.full((1, 32, 32, 8), 300.0, np.float32)
    pool = jaxmp.autocast(lambda x: nn.avg_pool(jnp.einsum("nhwc,cd->nhwd", x, jnp.eye(8)), (32, 32)))
    y, grad = jax.jit(jax.value_and_grad(lambda x: pool(x).astype(jnp.float32).sum()))(image)
    assert float(y) == 8 * 300.0
    np.testing.assert_array_equal(grad, np.full(image.shape, 2.0**-10))


EYE = jnp.eye(8)
CARRIED: dict[str, tuple[Any, Any]] = {
    # a stream, and what is only moved, keep their 16 bits
    "a stream": (jnp.bfloat16, lambda c, x: (c + jnp.tanh(c @ EYE), x)),
    "moved": (jnp.bfloat16, lambda c, x: (c.T.reshape(8, 8), x)),
    "a buffer": (jnp.bfloat16, lambda c, x: (c.at[0].set(x[0] + 1), x)),
    "the largest": (jnp.bfloat16, lambda c, x: (jnp.maximum(c, x), x)),
    "kept": (jnp.bfloat16, lambda c, x: (c, x)),
    # what is computed beside them does not
    "a sum": (jnp.float32, lambda c, x: (x + c, x)),
    "a sum of several": (jnp.float32, lambda c, x: (jax.jit(jnp.add)(c + x, x * x) - x, x)),
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


def test_a_running_average_follows_what_it_averages():
    """It starts from what a product returned. In bfloat16 it would stay where it started."""
    x = exact_numbers((8, 1)) * np.linspace(0.5, 1.5, 800, dtype=np.float32).astype(jnp.bfloat16).astype(np.float32)

    def fn(x):
        return over(lambda c, y: (0.99 * c + 0.01 * y, None), in_16_bits(x)).sum()

    run = jax.value_and_grad(jaxmp.autocast(fn, jnp.bfloat16))
    (value, grad), (expected, expected_grad) = jax.jit(lambda x: (run(x), jax.value_and_grad(fn)(x)))(x)
    np.testing.assert_allclose(value, expected, rtol=2**-8)  # x and 0.01 * y are of 16 bits
    np.testing.assert_allclose(grad, expected_grad, rtol=2**-7, atol=1e-5)


def test_what_a_loop_hands_on_keeps_a_derivative_of_its_own():
    """A gradient that is reversed, of ones and small integers: exact."""
    reversed_gradient = jax.custom_vjp(lambda c: c)
    reversed_gradient.defvjp(lambda c: (c, None), lambda _, g: (-g,))

    def fn(x):
        carry, out = lax.scan(lambda c, i: (reversed_gradient(c), c * i), (x @ EYE)[0], jnp.ones(3))
        return carry.sum() + out.sum()

    both = jax.jit(lambda x: (jax.grad(jaxmp.autocast(fn, jnp.bfloat16))(x), jax.grad(fn)(x)))
    np.testing.assert_array_equal(*both(np.ones((1, 8), np.float32)))


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


def mean_of_devices(grads: Any) -> Any:
    return lambda *batch: lax.pmean(grads(*batch), "data")


REGIMES: dict[str, Any] = {
    "jit": lambda grads, x, y: grads(x, y),
    "accumulated": lambda grads, x, y: grads(x, y, accumulate=2, accumulate_argnums=(1, 2)),
    "remat": lambda grads, x, y: grads(x, y, around=jax.checkpoint),
    "vmap": lambda grads, x, y: mean(jax.vmap(lambda x, y: grads(x[None], y[None]))(x, y)),
    "scan": lambda grads, x, y: mean(lax.scan(lambda c, b: (c, grads(*b)), 0, in_four(x, y))[1]),
    "sharded": lambda grads, x, y: grads(*jax.device_put((x, y), NamedSharding(MESH, P("data")))),
    "shard_map": lambda grads, x, y: over_devices(mean_of_devices(grads))(x, y),
    "shard_map, unchecked": lambda grads, x, y: over_devices(mean_of_devices(grads), check_vma=False)(x, y),
    "pmap": lambda grads, x, y: mean(jax.pmap(grads, "data", devices=jax.devices()[:4])(*in_four(x, y))),
}


IMAGES = np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32)
TARGETS = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((Everything().apply({"params": params}, x) - y) ** 2)


@functools.cache
def params_and_gradients() -> Any:
    """In float32."""
    params = jax.jit(Everything().init)(jax.random.key(0), IMAGES)["params"]
    return params, jax.jit(jax.grad(loss_fn))(params, IMAGES, TARGETS)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("regime", "policy"),
    [
        pytest.param(regime, policy, marks=[pytest.mark.thorough(0)] if regime == "pmap" else [])
        for regime, policy in in_turn(REGIMES, ["fp16", "bf16", "bf16-mixed"])
    ],
)
def test_gradients_in_every_regime(regime, policy):
    params32, exact = params_and_gradients()
    tx = jaxmp.mixed_precision(optax.adam(1e-3), policy, loss_scale=256.0 if policy == "fp16" else None)
    params, opt_state = jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)

    def grads(x, y, around=lambda f: f, **options):
        grad_fn = jaxmp.value_and_grad(around(loss_fn), policy=policy, **options)
        return jaxmp.unscale(grad_fn(params, x, y, opt_state=opt_state)[1], opt_state)

    run = functools.partial(REGIMES[regime], grads)
    gradients = (run if regime == "pmap" else jax.jit(run))(IMAGES, TARGETS)
    limit = 0.005 if policy == "fp16" else 0.02
    for grad, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        gap = np.linalg.norm(np.asarray(grad, np.float64) - expected) / np.linalg.norm(expected)
        assert gap < limit, (expected.shape, gap)
