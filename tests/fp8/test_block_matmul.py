"""The block-scaled matmul against float64 products of blocks that NumPy makes; `test_blocks` compares their bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from fp8_oracle import assert_products, products
from jaxmp import fp8
from jaxmp._src.base import hardware
from jaxmp.fp8 import MXFP8, NVFP4, BlockScaling, RowwiseScaling

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
        fp8.dot_general, dimension_numbers=dimension_numbers, recipe=recipe, preferred_element_type=out_dtype
    )


def powers(size):
    """Each 16 numbers of an axis are of another size, so that rounding shows which of them share a scale."""
    return np.float32(2) ** (np.arange(size) // 16 * 5 % 24 - 12)


@pytest.mark.parametrize(
    ("recipe", "case"),
    [
        (MXFP8(), "odd"),
        *(
            pytest.param(recipe, case, marks=pytest.mark.thorough(0))
            for recipe, cases in (
                (BlockScaling(), ("matrices", "odd", "batch")),
                (MXFP8(), ("heads",)),
                (RowwiseScaling(), ("heads", "batch")),
                (BlockScaling(power_of_two=False), ("batch",)),
            )
            for case in cases
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else recipe_id(x),
)
def test_products_of_the_blocks_are_exact(recipe, case):
    subscripts, x_shape, w_shape, dimension_numbers, x_axes, w_axes = CASES[case]
    m, k, n = (powers(size) for size in (*x_axes[1:], w_axes[2]))  # they cancel where an axis is summed over
    x, w = normal(1, *x_axes) * m[:, None] * k, normal(2, *w_axes) / k[:, None] * n
    g = normal(3, x_axes[0], len(m), len(n)) / m[:, None] / n
    y_shape = np.einsum(subscripts, np.zeros(x_shape), np.zeros(w_shape)).shape
    found = product_and_gradients(recipe, dimension_numbers)(*map(np.reshape, (x, w, g), (x_shape, w_shape, y_shape)))
    for actual, shape in zip(found, (y_shape, x_shape, w_shape), strict=True):
        assert actual.shape == shape and actual.dtype == jnp.float32
    assert_products(found, products(recipe, x, w, g))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [*zip(BOTH, (jnp.bfloat16, jnp.float16), strict=True)], ids=["bf16", "f16"]
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


@pytest.mark.parametrize(
    "recipe", [RowwiseScaling(), *(pytest.param(x, marks=pytest.mark.thorough(0)) for x in RECIPES[:-1])], ids=recipe_id
)
@pytest.mark.parametrize("bad", [-np.inf, np.nan])  # one program for both, and for the next test
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
def test_vmap_scan_and_remat_change_nothing():
    recipe = BlockScaling(fp8_format="HYBRID")
    x, w, g = normal(1, 3, 32, 48), normal(2, 3, 48, 16), normal(3, 3, 32, 16)
    f = functools.partial(gradients, product(recipe))
    expected = products(recipe, x, w, g)
    assert_products(jax.jit(jax.vmap(f))(x, w, g), expected)
    assert_products(jax.jit(lambda *ts: jax.lax.scan(lambda c, t: (c, f(*t)), None, ts)[1])(x, w, g), expected)
    shared = jax.jit(jax.vmap(jax.checkpoint(product(recipe)), in_axes=(0, None)))
    assert_products([shared(x, w[0])[0]], [tuple(t[0] for t in expected[0])])


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "check_vma"), [*zip(BOTH, (True, False), strict=True)], ids=["checked", "unchecked"]
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
def test_explicit_mesh():
    recipe = BlockScaling()
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


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "capability", "side", "products"),
    [
        (MXFP8(), 10.0, 48, 3),  # summed over in y: the last block gets zeros
        (MXFP8(), 9.0, 64, 0),
        (BlockScaling(), 10.0, 64, 0),
        (NVFP4(stochastic_rounding=False), 10.0, 40, 3),
    ],
    ids=lambda x: str(x) if isinstance(x, (int, float)) else recipe_id(x),
)
def test_only_blackwell_multiplies_blocks_of_8_and_4_bits(recipe, capability, side, products, monkeypatch):
    text = lowered_for_gpu(recipe, capability, monkeypatch, side=side)
    assert text.count("@__op$block_scaled_dot(") == products
    assert products or "block_scaled_dot" not in text
    assert side != 48 or "tensor<1x32x64xf8E4M3FN>" in text


def test_products_of_rows_are_fp8_gemms_on_hopper(monkeypatch):
    for capability, in_fp8 in ((9.0, 2), (8.0, 0)):
        text = lowered_for_gpu(RowwiseScaling(), capability, monkeypatch)
        operands = [line.count("xf8E4M3FN>") for line in text.splitlines() if "dot_general" in line]
        assert operands == [in_fp8] * 3


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
@pytest.mark.parametrize("recipe", [MXFP8(fp8_format="HYBRID"), NVFP4(stochastic_rounding=False)], ids=recipe_id)
def test_hardware_path_is_the_same_product(recipe, monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(hardware, "on_block_scaled_hardware", lambda in_blocks, otherwise: in_blocks)
    x, w, g = normal(1, 3, 20, 64), normal(2, 3, 64, 90), normal(3, 3, 20, 90)  # short blocks along M and N
    run = functools.partial(gradients, product(recipe, (((2,), (1,)), ((0,), (0,)))))
    in_blocks = jax.jit(run)
    expected = products(recipe, x, w, g)
    assert_products(in_blocks(x, w, g), expected)
    if isinstance(recipe, MXFP8):
        assert_products([t[0] for t in jax.jit(jax.vmap(run))(x[None], w[None], g[None])], expected)
    broken = x.copy()
    broken[0, 3, 5] = np.inf
    y, _, dw = in_blocks(broken, w, g)
    assert np.isnan(y[0, 3]).all() and np.isnan(dw[0, 5]).all()
