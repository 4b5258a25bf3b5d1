"""The block-scaled matmul against float64 products of blocks that NumPy makes; `test_blocks` compares their bits."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from fp8_oracle import assert_products, products
from helpers import assert_moved
from jaxmp import fp8
from jaxmp._src.base import hardware
from jaxmp._src.fp8 import block_matmul
from jaxmp._src.fp8.blocks import BlockRecipe
from jaxmp.fp8 import MXFP8, NVFP4, BlockScaling, CurrentScaling, RowwiseScaling

RECIPES = [
    BlockScaling(),
    BlockScaling(fp8_format="HYBRID"),
    BlockScaling(power_of_two=False),
    MXFP8(),
    RowwiseScaling(),
]
BOTH = [RECIPES[0], RECIPES[3]]
MATMUL = (((1,), (0,)), ((), ()))

# subscripts, shapes, dimension numbers; the operands as [B, M, K] and [B, K, N]; short blocks, and several axes for one
CASES = {
    "matrices": ("mk,kn->mn", (144, 272), (272, 160), MATMUL, (1, 144, 272), (1, 272, 160)),
    "odd": ("mk,kn->mn", (5, 7), (7, 3), MATMUL, (1, 5, 7), (1, 7, 3)),
    "tokens": ("btk,kn->btn", (2, 72, 80), (80, 48), (((2,), (0,)), ((), ())), (1, 144, 80), (1, 80, 48)),
    "heads": ("mhk,hkn->mn", (32, 4, 36), (4, 36, 16), (((1, 2), (0, 1)), ((), ())), (1, 32, 144), (1, 144, 16)),
    "batch": ("bmk,bkn->bmn", (3, 16, 144), (3, 144, 16), (((2,), (1,)), ((0,), (0,))), (3, 16, 144), (3, 144, 16)),
}


def recipe_id(recipe):
    name = type(recipe).__name__ + ("" if getattr(recipe, "power_of_two", True) else "-quotients")
    return name + ("-hybrid" if getattr(recipe, "fp8_format", "") == "HYBRID" else "")


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gradients(f, x, w, g):
    y, backward = jax.vjp(f, x, w)
    return y, *backward(g)


@functools.cache
def product_and_gradients(recipe, dimension_numbers=MATMUL):
    """Compiled (x, w, g) -> (y, dx, dw)."""
    return jax.jit(functools.partial(gradients, product(recipe, dimension_numbers)))


def product(recipe, dimension_numbers=MATMUL, out_dtype=jnp.float32):
    return functools.partial(
        block_matmul.dot_general, dimension_numbers=dimension_numbers, recipe=recipe, out_dtype=out_dtype
    )


# Each recipe, and each shape for one kind of block at least.
SAMPLE = [(BOTH[0], "matrices"), (BOTH[0], "heads"), (RECIPES[1], "tokens"), (RECIPES[2], "batch")]
SAMPLE += [(BOTH[1], case) for case in ("matrices", "odd")] + [(RECIPES[4], case) for case in ("heads", "batch")]
REST = [case for case in itertools.product(BOTH, CASES) if case not in SAMPLE]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "case"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.thorough(0)) for case in REST)],
    ids=lambda x: x if isinstance(x, str) else recipe_id(x),
)
def test_products_of_the_blocks_are_exact(recipe, case):
    subscripts, x_shape, w_shape, dimension_numbers, x_axes, w_axes = CASES[case]
    x, w = normal(1, *x_shape), normal(2, *w_shape)
    g = normal(3, *np.einsum(subscripts, x, w).shape)
    found = product_and_gradients(recipe, dimension_numbers)(x, w, g)
    for actual, shape in zip(found, (g.shape, x.shape, w.shape), strict=True):
        assert actual.shape == shape and actual.dtype == jnp.float32
    g_axes = (x_axes[0], x_axes[1], w_axes[2])
    assert_products(found, products(recipe, x.reshape(x_axes), w.reshape(w_axes), g.reshape(g_axes)))


def cases_of(*cases):
    """Those of (recipe, second parameter) that run always; the rest of the matrix is thorough."""
    rest = [case for case in itertools.product(BOTH, {second: None for _, second in cases}) if case not in cases]
    return [*cases, *(pytest.param(*case, marks=pytest.mark.thorough(0)) for case in rest)]


def id_of(x):
    return recipe_id(x) if isinstance(x, BlockRecipe) else None


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "dtype"), cases_of((BOTH[0], jnp.bfloat16), (BOTH[1], jnp.bfloat16), (BOTH[1], jnp.float16)), ids=id_of
)
def test_result_has_the_activations_dtype_and_dw_the_weights(recipe, dtype):
    x, w, g = normal(1, 32, 48, dtype=dtype), normal(2, 48, 16), normal(3, 32, 16, dtype=dtype)
    f = functools.partial(fp8.dot_general, dimension_numbers=MATMUL, recipe=recipe)
    y, dx, dw = jax.jit(functools.partial(gradients, f))(x, w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    assert_products((y, dx, dw), products(recipe, x[None], w[None], g[None]))
    assert jax.eval_shape(functools.partial(f, preferred_element_type=jnp.float32), x, w).dtype == jnp.float32


@pytest.mark.thorough(1)
@pytest.mark.parametrize("recipe", BOTH, ids=recipe_id)
def test_backward_pass_keeps_fp8(recipe):
    x, w = normal(1, 64, 128, dtype=jnp.bfloat16), normal(2, 128, 32)
    f = functools.partial(fp8.dot_general, dimension_numbers=MATMUL, recipe=recipe)
    _, backward = jax.eval_shape(functools.partial(jax.vjp, f), x, w)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size > 1]
    assert {leaf.dtype for leaf in kept if leaf.size >= w.size} == {jnp.dtype(jnp.uint8)}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) < 1.2 * (x.size + w.size)


def snr_of_rows(actual, exact):
    """The signal-to-noise ratio of the middle row, in dB."""
    noise = np.asarray(actual, np.float64) - exact
    return float(np.median(10 * np.log10((exact**2).sum(axis=1) / (noise**2).sum(axis=1))))


# Measured 24.5 for e5m2 gradients and 28.3 to 28.9 for all else; a value rounded to e4m3 is at about 31.5.
NORMAL_DB = {
    CurrentScaling(): (28, 24, 24),
    RowwiseScaling(): (28, 28, 28),
    BlockScaling(): (28, 28, 28),
    MXFP8(): (28, 28, 28),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", NORMAL_DB, ids=lambda r: type(r).__name__)
def test_snr_on_normal_data(recipe):
    found, exact = products_with_noise(recipe, outliers=False)
    for actual, wide, least in zip(found, exact, NORMAL_DB[recipe], strict=True):
        assert snr_of_rows(actual, wide) > least


@pytest.mark.thorough(0)
def test_an_outlier_costs_its_block_not_its_tensor():
    """One value in 2000 is 1e5 times as large. With one scale for the tensor most others are rounded to little."""
    current, exact = products_with_noise(CurrentScaling(), outliers=True)
    worst = [snr_of_rows(actual, wide) for actual, wide in zip(current, exact, strict=True)]
    assert worst[0] < 15 and worst[2] < 15  # e4m3 reaches 2^-16 of its scale; e5m2, which dx is made of, 2^-31
    for recipe in BOTH:
        found, _ = products_with_noise(recipe, outliers=True)
        for actual, wide, per_tensor in zip(found, exact, worst, strict=True):
            assert snr_of_rows(actual, wide) > max(26, per_tensor)


@functools.cache
def one_scale_for_a_tensor():
    f = functools.partial(
        fp8.dot_general, dimension_numbers=MATMUL, recipe=CurrentScaling(), preferred_element_type=jnp.float32
    )
    return jax.jit(functools.partial(gradients, f))


def products_with_noise(recipe, *, outliers):
    """In the shapes, and so in the programs, of the case "matrices"."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape) for shape in ((144, 272), (272, 160), (144, 160)))
    if outliers:
        for t in (x, w, g):
            t[rng.random(t.shape) < 5e-4] *= 1e5
    x, w, g = (np.asarray(t, np.float32) for t in (x, w, g))
    f = one_scale_for_a_tensor() if isinstance(recipe, CurrentScaling) else product_and_gradients(recipe)
    found = f(x, w, g)
    x, w, g = (t.astype(np.float64) for t in (x, w, g))
    return found, (x @ w, g @ w.T, x.T @ g)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "recipe", [*RECIPES[1:], pytest.param(RECIPES[0], marks=pytest.mark.thorough(0))], ids=recipe_id
)
def test_overflow_shows_in_the_result(recipe, bad):
    x, w, g = (normal(*shape) for shape in ((1, 32, 48), (2, 48, 16), (3, 32, 16)))

    def results(place, array):
        broken = array.copy()
        broken[place] = bad
        return map(np.asarray, product_and_gradients(recipe)(*(broken if t is array else t for t in (x, w, g))))

    y, _, dw = results((3, 5), x)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, axis=0)).all()
    assert np.isnan(dw[5]).all() and np.isfinite(np.delete(dw, 5, axis=0)).all()
    y, dx, _ = results((5, 3), w)
    assert np.isnan(y[:, 3]).all() and np.isnan(dx[:, 5]).all()
    y, dx, dw = results((3, 5), g)
    assert np.isfinite(y).all() and np.isnan(dx[3]).all() and np.isnan(dw[:, 5]).all()


@pytest.mark.thorough(0)
@pytest.mark.parametrize("largest", [3e38, 1e-30], ids=["near-max", "tiny"])
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=recipe_id)
def test_extremes_stay_finite(recipe, largest):
    x = normal(1, 32, 48)
    x[0, 0] = 4.0
    x *= np.float32(largest / 4.0)
    y, *_ = product_and_gradients(recipe)(x, np.eye(48, 16, dtype=np.float32), np.zeros((32, 16), np.float32))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, x[:, :16], rtol=2**-4, atol=largest * 2.0**-16)


# transformations


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", [RECIPES[1], BOTH[1]], ids=recipe_id)
def test_vmap_scan_and_remat_change_nothing(recipe):
    x, w, g = normal(1, 3, 32, 48), normal(2, 3, 48, 16), normal(3, 3, 32, 16)
    f = functools.partial(gradients, product(recipe))
    expected = products(recipe, x, w, g)
    assert_products(jax.jit(jax.vmap(f))(x, w, g), expected)
    assert_products(jax.jit(lambda *ts: jax.lax.scan(lambda c, t: (c, f(*t)), None, ts)[1])(x, w, g), expected)
    shared = jax.jit(jax.vmap(jax.checkpoint(product(recipe)), in_axes=(0, None)))
    assert_products([shared(x, w[0])[0]], [tuple(t[0] for t in expected[0])])


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "check_vma"), cases_of((BOTH[0], True), (BOTH[1], True), (BOTH[1], False)), ids=id_of
)
def test_shard_map(recipe, check_vma):
    x, w, g = normal(1, 8, 32, 48), normal(2, 48, 16), normal(3, 8, 32, 16)

    def local(x, w, g):
        if check_vma:
            w = jax.lax.pcast(w, "data", to="varying")  # each device's own gradient
        return jax.tree.map(lambda t: t[None], gradients(product(recipe), x[0], w, g[0]))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), P(), P("data"))
    spread = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    assert_products(jax.jit(spread)(x, w, g), products(recipe, x, np.stack([w] * 8), g))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", BOTH, ids=recipe_id)
def test_explicit_mesh(recipe):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w, g = normal(1, 4, 16, 64), normal(2, 64, 32), normal(3, 4, 16, 32)
    f = functools.partial(gradients, product(recipe, (((2,), (0,)), ((), ()))))
    specs = P("data"), P(None, "model"), P("data", None, "model")
    with jax.set_mesh(mesh):
        y, dx, dw = jax.jit(f)(*(jax.reshard(t, spec) for t, spec in zip((x, w, g), specs, strict=True)))
    assert (y.sharding.spec, dw.sharding.spec) == (P("data", None, "model"), P(None, "model"))
    assert (y.shape, dx.shape, dw.shape) == (g.shape, x.shape, w.shape)
    assert_products((y, dx, dw), products(recipe, x.reshape(1, 64, 64), w[None], g.reshape(1, 64, 32)))


# hardware


def lowered_for_gpu(recipe, capability, monkeypatch, side=64):
    monkeypatch.setattr(hardware, "_oldest_gpu", lambda: capability)
    f = functools.partial(gradients, product(recipe, out_dtype=jnp.bfloat16))
    x, w, g = normal(1, 32, side), normal(2, side, 128), normal(3, 32, 128)  # three shapes: equal ones share a function
    args = x.astype(jnp.bfloat16), w, g.astype(jnp.bfloat16)
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_only_blackwell_multiplies_blocks(monkeypatch):
    assert lowered_for_gpu(MXFP8(), 10.0, monkeypatch).count("@__op$block_scaled_dot(") == 3
    assert "block_scaled_dot" not in lowered_for_gpu(MXFP8(), 9.0, monkeypatch)
    assert "block_scaled_dot" not in lowered_for_gpu(BlockScaling(), 10.0, monkeypatch)
    short = lowered_for_gpu(MXFP8(), 10.0, monkeypatch, side=48)  # summed over in y: the last block gets zeros
    assert short.count("@__op$block_scaled_dot(") == 3 and "tensor<1x32x64xf8E4M3FN>" in short


@pytest.mark.thorough(0)
def test_only_blackwell_multiplies_four_bits(monkeypatch):
    recipe = NVFP4(stochastic_rounding=False)
    assert lowered_for_gpu(recipe, 10.0, monkeypatch).count("@__op$block_scaled_dot(") == 3
    assert lowered_for_gpu(recipe, 10.0, monkeypatch, side=40).count("@__op$block_scaled_dot(") == 3
    assert "block_scaled_dot" not in lowered_for_gpu(recipe, 9.0, monkeypatch)


def test_products_of_rows_are_fp8_gemms_on_hopper(monkeypatch):
    text = lowered_for_gpu(RowwiseScaling(), 9.0, monkeypatch)
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3 and all(line.count("xf8E4M3FN>") == 2 for line in products)
    assert "xf8E4M3FN>" not in "".join(
        line for line in lowered_for_gpu(RowwiseScaling(), 8.0, monkeypatch).splitlines() if "dot_general" in line
    )


def scaled_matmul(a, b, a_scales, b_scales, preferred_element_type):
    """`jax.nn.scaled_matmul` as documented; jax 0.10 has it for GPUs only."""
    a, b, a_scales, b_scales = (t.astype(preferred_element_type) for t in (a, b, a_scales, b_scales))
    a, b = (t * jnp.repeat(s, t.shape[-1] // s.shape[-1], axis=-1) for t, s in ((a, a_scales), (b, b_scales)))
    return jnp.einsum("bmk,bnk->bmn", a, b, precision="highest")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["vmap", "shard_map", "shard_map_unchecked", "remat"])
def test_hardware_path_goes_through_transformations(how, monkeypatch):
    """Lowered for a Blackwell GPU, not run."""
    monkeypatch.setattr(hardware, "_oldest_gpu", lambda: 10.0)
    x, w = normal(1, 128, 64), normal(2, 64, 32)
    f = functools.partial(fp8.dot_general, dimension_numbers=MATMUL, recipe=MXFP8())
    if how == "remat":
        f = jax.checkpoint(f)

    def run(x, w):
        return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), argnums=(0, 1))(x, w)

    if how == "vmap":
        run, x = jax.vmap(run, in_axes=(0, None)), normal(1, 3, 128, 64)
    elif how != "remat":
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        checked = how == "shard_map"
        specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P() if checked else P("data"))}
        run = jax.shard_map(run, mesh=mesh, check_vma=checked, **specs)
    text = jax.jit(run).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__op$block_scaled_dot(") == 3


@pytest.mark.thorough(0)
@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
def test_hardware_path_is_the_same_product(fp8_format, monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(hardware, "on_block_scaled_hardware", lambda in_blocks, otherwise: in_blocks)
    recipe = MXFP8(fp8_format=fp8_format)
    x, w, g = normal(1, 3, 20, 64), normal(2, 3, 64, 90), normal(3, 3, 20, 90)  # short blocks along M and N
    run = functools.partial(gradients, product(recipe, (((2,), (1,)), ((0,), (0,)))))
    in_blocks = jax.jit(run)
    expected = products(recipe, x, w, g)
    assert_products(in_blocks(x, w, g), expected)
    if fp8_format == "HYBRID":
        assert_products([t[0] for t in jax.jit(jax.vmap(run))(x[None], w[None], g[None])], expected)
    broken = x.copy()
    broken[0, 3, 5] = np.inf
    y, _, dw = in_blocks(broken, w, g)
    assert np.isnan(y[0, 3]).all() and np.isnan(dw[0, 5]).all()


# training


class LinenMlp(nn.Module):
    """Three layers: the first and the last stay in 16 bits."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(32, dtype=jnp.bfloat16)(x))
        return nn.Dense(16, dtype=jnp.bfloat16)(x)


def batch():
    x, w = (np.random.default_rng(seed).normal(size=(n, 16)).astype(np.float32) for seed, n in ((1, 64), (2, 16)))
    return x, np.tanh(x @ w)


# One recipe for linen, another for nnx.
@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "recipe",
    [RECIPES[1], *(pytest.param(recipe, marks=pytest.mark.thorough(0)) for recipe in BOTH)],
    ids=recipe_id,
)
def test_training_linen(recipe):
    x, target = batch()
    model, tx = LinenMlp(), jaxmp.mixed_precision(optax.adam(1e-2), "bf16", recipe=recipe)

    def init(key, x):
        with fp8.autocast(recipe):
            return model.init(key, x)["params"]

    params32 = jax.jit(init)(jax.random.key(0), x)
    assert not any(fp8.is_scale(path) for path, _ in jax.tree_util.tree_leaves_with_path(params32))

    def loss_fn(params, x):
        with fp8.autocast(recipe):
            return jnp.mean((model.apply({"params": params}, x).astype(jnp.float32) - target) ** 2)

    @jax.jit
    def step(state, x):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        return loss, jaxmp.apply_gradients(tx, grads, opt_state, params)

    state = jaxmp.get_policy("bf16").cast_to_param(params32), jax.jit(tx.init)(params32)
    assert "f8E4M3FN" in step.lower(state, x).as_text()
    losses = []
    for _ in range(20):
        loss, state = step(state, x)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]

    x[0, 0] = np.inf
    _, (params, opt_state) = step(state, x)
    assert_moved(params, state[0])
    assert bool(jaxmp.get_metrics(opt_state)["skipped"])


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "recipe", [MXFP8(), pytest.param(BlockScaling(), marks=pytest.mark.thorough(0))], ids=recipe_id
)
def test_training_nnx(recipe):
    x, target = batch()
    layers = [nnx.Linear(n, 16 if n == 48 else 48 if i else 32, rngs=nnx.Rngs(i)) for i, n in enumerate((16, 32, 48))]
    model = nnx.Sequential(layers[0], nnx.tanh, layers[1], nnx.tanh, layers[2])
    assert len(jaxmp.nnx.to_fp8(model, recipe)) == 1
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bf16", recipe=recipe)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="bf16")

    def loss_fn(model, x):
        return jnp.mean((model(x.astype(jnp.bfloat16)).astype(jnp.float32) - target) ** 2)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, x, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.6 * losses[0]


def test_a_stateless_recipe_takes_no_scales():
    scales = fp8.Scales(*[jnp.zeros(())] * 3)
    with pytest.raises(ValueError, match="got MXFP8 and scales=given"):
        fp8.dot_general(normal(1, 16, 16), normal(2, 16, 16), MATMUL, recipe=MXFP8(), scales=scales)
