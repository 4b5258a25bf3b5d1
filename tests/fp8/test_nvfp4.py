"""NVFP4: TransformerEngine's bytes, products against NumPy, unbiased rounding, keys in linen and nnx, and training."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from test_block_matmul import MATMUL, gradients, normal, product

import block_oracle
import jaxmp
from fp8_oracle import assert_products, nvfp4_rewritten, nvfp4_values, products
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp import fp8
from jaxmp._src.fp8 import nvfp4
from jaxmp._src.numerics import float_bits
from jaxmp.fp8 import NVFP4
from oracle_data import load, load_arrays

CASES = load("te_nvfp4_index")["cases"]
ARRAYS = load_arrays("te_nvfp4")
NEAREST = NVFP4(stochastic_rounding=False)


@functools.partial(jax.jit, static_argnames=("recipe", "axis"))
def quantize(recipe, x, axis=-1):
    return recipe.quantize(x, axis=axis)


# casts


@pytest.mark.thorough(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['kind']}")
def test_bytes_of_transformer_engine(case):
    i, (rows, _) = case["case"], case["tile"]
    q, scale_inv, _ = quantize(NVFP4(), ARRAYS[f"n{i}_x"], (-2, -1) if rows == 16 else -1)
    halves = np.asarray(q).view(np.uint8)
    np.testing.assert_array_equal(halves[:, ::2] | halves[:, 1::2] << 4, ARRAYS[f"n{i}_q"])
    np.testing.assert_array_equal(np.repeat(np.asarray(scale_inv).view(np.uint8), rows, axis=0), ARRAYS[f"n{i}_s"])


def saturated(x, axis):
    """x, limited to six times the factor of its block."""
    _, factor, inverse = nvfp4_rewritten(x, axis)
    limit = 6 * block_oracle.spread(factor.astype(np.float64), x.shape, axis, 16) * np.float64(inverse)
    return np.clip(x, -limit, limit)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("axis", [(1,), (1, 2)], ids=str)
def test_casts_equal_a_rewrite(axis):
    for size in (1e-30, 1.0, 1e30):
        x = (np.random.default_rng(0).standard_cauchy((3, 40, 56)) * size).astype(np.float32)
        for actual, expected in zip(quantize(NVFP4(), x, axis), nvfp4_rewritten(x, axis), strict=True):
            assert_exact(actual, expected)  # products and quotients, each rounded once; nothing is added


def test_a_sixth_is_rounded_as_division_rounds():
    x = np.random.default_rng(1).integers(0x01800000, 0x7F800000, 20000).astype(np.int32).view(np.float32)
    for divisor in (1, 3, 6, 7, 63):
        found = jax.jit(float_bits.divided_by, static_argnums=1)(x[x > 1e-35], divisor)
        assert_exact(found, x[x > 1e-35] / np.float32(divisor))


@pytest.mark.thorough(0)
def test_a_block_with_nan_or_inf_is_nan_and_no_other():
    x = normal(1, 4, 48)
    x[1, 20], x[2, 40] = np.nan, -np.inf
    back = np.asarray(jax.jit(NVFP4().dequantize)(*quantize(NVFP4(), x)))
    expected = np.zeros((4, 48), bool)
    expected[1, 16:32] = expected[2, 32:] = True
    np.testing.assert_array_equal(np.isnan(back), expected)
    error = abs(back - x)[~expected]
    assert error.max() < abs(x[np.isfinite(x)]).max() / 6  # half of the widest step, 4 to 6


def test_stochastic_rounding_has_the_mean_and_only_neighbours():
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    draws = np.asarray(
        jax.jit(jax.vmap(nvfp4.stochastically_rounded, (None, 0)))(x, jax.random.split(jax.random.key(0), 4096))
    )
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.unique([-grid, grid])
    low = grid[np.searchsorted(grid, x, side="right") - 1]
    high = grid[np.searchsorted(grid, x, side="left")]
    assert ((draws == low) | (draws == high)).all()
    deviation = (high - low) / 2 / 64  # of the mean of 4096 draws, at most
    assert (abs(draws.mean(0) - x) <= 5 * deviation).all()
    assert (draws[:, low == high] == x[low == high]).all()


def test_hadamard_is_orthogonal():
    r = np.asarray(nvfp4.hadamard(np.eye(16, dtype=np.float32)[None]))[0]
    assert_exact(r @ r.T, np.eye(16, dtype=np.float32))
    assert_exact(abs(r), np.full((16, 16), 0.25, np.float32))
    x, g = normal(1, 2, 40, 8), normal(2, 2, 40, 24)
    mixed = np.einsum("bmk,bmn->bkn", nvfp4.hadamard(x), nvfp4.hadamard(g))
    np.testing.assert_allclose(mixed, np.einsum("bmk,bmn->bkn", x, g), atol=1e-4)


# products


@pytest.mark.thorough(0)  # tests/suites/test_fp8_recipes_by_layers.py: NEAREST
def test_products_of_the_blocks_are_exact():
    x, w, g = normal(1, 2, 48, 80), normal(2, 2, 80, 32), normal(3, 2, 48, 32)
    recipe = NVFP4(stochastic_rounding=False, square_weights=False)
    of_batch = functools.partial(gradients, product(recipe, (((2,), (1,)), ((0,), (0,)))))
    assert_products(jax.jit(of_batch)(x, w, g), products(recipe, x, w, g))


@pytest.mark.thorough(0)
def test_under_vmap_each_member_has_its_own_tensor_scale():
    x, w, g = normal(1, 2, 48, 80), normal(2, 2, 80, 32), normal(3, 2, 48, 32)
    recipe = NVFP4(stochastic_rounding=False, hadamard=False)
    found = jax.jit(jax.vmap(functools.partial(gradients, product(recipe))))(x, w, g)
    for i in range(2):
        assert_products([t[i : i + 1] for t in found], products(recipe, *(t[i : i + 1] for t in (x, w, g))))


RANDOM = NVFP4()
KEYS = jax.random.split(jax.random.key(0), 30)


def keyed(x, w, key, recipe=RANDOM):
    return fp8.dot_general(x, w, MATMUL, recipe=recipe, key=key)


@pytest.mark.thorough(0)
def test_gradients_rounded_at_random_have_the_mean_of_the_gradients_before():
    x, w, g = normal(1, 32, 48), normal(2, 48, 32), normal(3, 32, 32)

    def run(key):
        y, back = jax.vjp(lambda x, w: keyed(x, w, key, NVFP4(hadamard=False)), x, w)
        return y, *back(g)

    y, dx, dw = map(np.asarray, jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 256)))
    assert_moved(y, np.broadcast_to(y[0], y.shape))  # no key goes into it, so vmap computes one
    assert not (dx == dx[0]).all() and not (dw == dw[0]).all()
    x_rounded, w_rounded = nvfp4_values(x, (0,)), nvfp4_values(w, (0, 1))
    # A factor that e4m3 rounded down saturates the largest elements of its block.
    for draws, exact in ((dx, saturated(g, (1,)) @ w_rounded.T), (dw, x_rounded.T @ saturated(g, (0,)))):
        error = abs(draws.mean(0) - exact)
        assert (error < 6 * draws.std(0) / 16 + 1e-3).all()
        assert draws.std(0).mean() > 0.1


def loss(f, x, w, key):
    return jnp.sum(f(x, w, key) ** 2)


plain = jax.grad(functools.partial(loss, keyed), argnums=(0, 1))
jitted = jax.jit(plain)


def scanned(x, w, key):
    step = jax.checkpoint(lambda x: keyed(x, w, key))
    return jax.lax.scan(lambda carry, x: (carry, step(x)), None, x[None])[1][0]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("how", ["remat in a scan", "explicit", "shard_map"])
def test_transformations(how):
    """The gradients with a key are those without the transformation; those of a device's rows, in shard_map."""
    x, w, key = normal(1, 64, 48), normal(2, 48, 32), jax.random.key(3)
    mesh_of = functools.partial(jax.make_mesh, (2,), ("data",), devices=jax.devices()[:2])
    if how == "shard_map":
        mesh, of_rows = mesh_of(axis_types=(AxisType.Auto,)), lambda *args: plain(*args)[0]
        spread = jax.shard_map(of_rows, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
        found = [jax.jit(spread)(np.concatenate([x, 2 * x]), w, key)]
        expected = [np.concatenate([jitted(part, w, key)[0] for part in (x, 2 * x)])]
    elif how == "explicit":
        with jax.set_mesh(mesh_of(axis_types=(AxisType.Explicit,))):
            found = jitted(jax.reshard(x, P("data")), jax.reshard(w, P()), key)
        expected = jitted(x, w, key)
    else:
        found = jax.jit(jax.grad(functools.partial(loss, scanned), argnums=(0, 1)))(x, w, key)
        expected = jitted(x, w, key)
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-3)


# training


class Mlp(nn.Module):
    """Three layers: the first and the last stay in 16 bits."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(16)(x)


def batch():
    x, w = (np.random.default_rng(seed).normal(size=(n, 16)).astype(np.float32) for seed, n in ((1, 64), (2, 16)))
    return x, np.tanh(x @ w)


@pytest.mark.thorough(0)
def test_training_linen():
    """With a key like Dropout's, as gradients are rounded at random. An inf skips the step."""
    x, target = batch()
    recipe = NVFP4()
    model, tx = Mlp(), jaxmp.mixed_precision(optax.adam(1e-2), "bf16", recipe=recipe)

    def loss_fn(params, x, key):
        with fp8.autocast(recipe):
            y = model.apply({"params": params}, x, rngs={"rounding": key})
        return jnp.mean((y - target) ** 2)

    with fp8.autocast(recipe):
        params32 = jax.jit(model.init)(jax.random.key(0), x)["params"]

    @jax.jit
    def step(params, opt_state, x, key):
        loss, grads = jaxmp.value_and_grad(loss_fn, policy="bf16")(params, x, key, opt_state=opt_state)
        return loss, grads, jaxmp.apply_gradients(tx, grads, opt_state, params)

    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(params32), tx.init(params32)
    first, again, other = (step(params, opt_state, x, KEYS[i])[1] for i in (1, 1, 2))
    assert_same_program(first, again)
    assert any(bool((a != b).any()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))
    losses = []
    for key in KEYS[:30]:
        loss, _, (params, opt_state) = step(params, opt_state, x, key)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    x[0, 0] = np.inf
    _, _, (after, opt_state) = step(params, opt_state, x, KEYS[0])
    assert_moved(after, params)
    assert bool(jaxmp.get_metrics(opt_state)["skipped"])


@pytest.mark.thorough(0)
def test_training_nnx_with_rngs():
    x, target = batch()
    model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)))
    assert len(jaxmp.nnx.to_fp8(model, NVFP4(), rngs=nnx.Rngs(rounding=0))) == 1
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bf16")
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="bf16")

    @nnx.jit
    def step(model, optimizer):
        loss_fn = lambda model: jnp.mean((model(x) - target) ** 2)  # noqa: E731
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return loss

    count = model.layers[1].dot_general.rngs.count
    before = int(count.get_value())
    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert int(count.get_value()) == before + 20  # a new key for each step
