"""Block-scaled fp8 against the bytes of TransformerEngine, and against a rewrite for shapes that are not recorded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import block_oracle
from helpers import assert_exact
from jaxmp._src.fp8.blocks import MXFP8, BlockScaling, e8m0_from_amax
from oracle_data import load, load_arrays

pytestmark = pytest.mark.optimized

INDEX = load("te_blockwise_index")
ARRAYS = load_arrays("te_blockwise")
E8M0 = load("te_scale_from_amax")["mxfp8_e8m0"]
E8M0_JAX = load("te_jax_delayed_scaling")

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "f16": jnp.float16}
FP8 = {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}
RECIPES = [BlockScaling(), BlockScaling(power_of_two=False), MXFP8()]


def id_of(x):
    return str(x) if isinstance(x, tuple | str) else recipe_id(x)


def recipe_id(recipe):
    return type(recipe).__name__ + ("" if getattr(recipe, "power_of_two", True) else "-quotients")


@functools.partial(jax.jit, static_argnames=("recipe", "axis", "backward"))
def quantize(recipe, x, axis=-1, backward=False):
    return recipe.quantize(x, axis=axis, backward=backward)


@functools.partial(jax.jit, static_argnums=0)
def dequantize(recipe, blocks):
    """A program of its own: where q is made and read in one, XLA may leave out the rounding."""
    return recipe.dequantize(*blocks)


def to_bytes(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


# TransformerEngine


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "case",
    INDEX["cases"],
    ids=lambda c: f"{c['case']}-{'x'.join(map(str, c['tile']))}-{c['fp8']}-pow2={c['pow2']}-{c['kind']}",
)
def test_blocks_are_the_bytes_of_te(case):
    expected = {key: ARRAYS[f"c{case['case']}_{key}"] for key in ("x", "q", "sinv", "qt", "sinv_t")}
    recipe = BlockScaling(fp8_format="HYBRID", power_of_two=bool(case["pow2"]))
    dtype = DTYPES[case["x_dtype"]]
    backward = case["fp8"] == "e5m2"
    x = np.asarray(expected["x"], dtype)
    square = case["tile"] == [128, 128]
    blocks = quantize(recipe, x, axis=(-2, -1) if square else -1, backward=backward)
    assert blocks.q.dtype == FP8[case["fp8"].upper()]
    np.testing.assert_array_equal(to_bytes(blocks.q), expected["q"])
    assert_exact(blocks.scale_inv, expected["sinv"])
    if square:
        np.testing.assert_array_equal(to_bytes(blocks.q).T, expected["qt"])
        assert_exact(np.asarray(blocks.scale_inv).T, expected["sinv_t"])
        return
    # TransformerEngine quantizes a transpose anew from x; that is a quantization along the other axis
    along_rows = quantize(recipe, x, axis=0, backward=backward)
    np.testing.assert_array_equal(to_bytes(along_rows.q).T, expected["qt"])
    assert_exact(np.asarray(along_rows.scale_inv).T, expected["sinv_t"])


def test_square_blocks_of_mxfp8_are_the_reference_of_te():
    """Its scales are written out for rows and for columns; here they are one number a block."""
    blocks = quantize(MXFP8(), ARRAYS["mx2d_x"], axis=(-2, -1))
    np.testing.assert_array_equal(to_bytes(blocks.q), ARRAYS["mx2d_q"])
    scale_inv = to_bytes(blocks.scale_inv)
    np.testing.assert_array_equal(np.repeat(scale_inv, 32, axis=0), ARRAYS["mx2d_rowscale"])
    np.testing.assert_array_equal(np.repeat(scale_inv, 32, axis=1), ARRAYS["mx2d_colscale"])


FORMATS = [("E4M3", 448.0), ("E5M2", 57344.0)]
e8m0 = jax.jit(e8m0_from_amax, static_argnums=1)

# Where TransformerEngine differs from itself its CUDA kernels are followed, not its Python and JAX helpers: they are
# what trains, and in E8M0 the byte 255 is NaN. The helpers make 255 of inf and 0 of NaN.


@pytest.mark.parametrize(("fmt", "fp8_max"), FORMATS)
def test_e8m0_of_an_amax(fmt, fp8_max):
    table = E8M0["amax_to_e8m0"]
    amax = np.array(table["amax"], np.float32)
    (cuda,) = [np.array(column, np.uint8) for key, column in table.items() if key.startswith(f"cuda_{fmt}")]
    byte = np.asarray(e8m0(amax, fp8_max))
    assert_exact(byte, cuda)
    if fmt == "E4M3":
        (helper,) = [np.array(column, np.uint8) for key, column in table.items() if key.startswith("py_ref")]
        finite = np.isfinite(amax)
        assert_exact(byte[finite], helper[finite])
        assert_exact(helper[~finite], np.array([255, 0], np.uint8))


@pytest.mark.parametrize("table", [E8M0["value_to_e8m0_host_cpp"], E8M0_JAX["e8m0_round_up"]], ids=["cuda", "te jax"])
def test_e8m0_is_rounded_up(table):
    values = np.array([value for value, _ in table], np.float32)
    expected = np.array([byte for _, byte in table], np.uint8)
    byte = np.asarray(e8m0(values, 1.0))
    if table is E8M0_JAX["e8m0_round_up"]:
        assert_exact(byte[~np.isfinite(values)], np.array([254, 255], np.uint8))
        byte, expected = byte[np.isfinite(values)], expected[np.isfinite(values)]
    assert_exact(byte, expected)


def test_e8m0_decoded():
    """`exp2f_rcp` is what x is multiplied by, 2^(127 - b); the other table is what q is."""
    ones = np.ones((256, 1), jnp.float8_e4m3fn)
    decoded = dequantize(MXFP8(), (ones, np.arange(256, dtype=np.uint8).view(jnp.float8_e8m0fnu)[:, None]))
    decoded = np.asarray(decoded)
    assert decoded[0] in (0.0, 2.0**-127)  # a product that is subnormal: XLA on CPU makes it 0
    assert_exact(decoded[1:255, 0], np.ldexp(np.float32(1), np.arange(-126, 128)))
    assert np.isnan(decoded[255, 0])
    for byte, value in E8M0_JAX["e8m0_to_f32"][1:-1]:  # its 255 is inf
        assert_exact(decoded[byte, 0], value)
    for byte, value in E8M0["exp2f_rcp"][1:-1]:
        if byte < 254:
            assert_exact(decoded[254 - byte, 0], value)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("fmt", "fp8_max"), FORMATS)
def test_e8m0_of_every_significand_is_that_of_the_product_by_the_reciprocal(fmt, fp8_max):
    """CUDA multiplies by float32(1 / fp8_max) and rounds; the comparison of significands is the same for all."""
    amax = np.arange(0x3F800000, 0x40000000, dtype=np.int32).view(np.float32)
    bits = (amax * np.float32(1 / fp8_max)).view(np.int32)
    expected = ((bits >> 23) + (bits & 0x7FFFFF > 0)).astype(np.uint8)
    assert_exact(e8m0(amax, fp8_max), expected)


# Any shape, against a rewrite


SHAPES = [
    *((recipe, (65, 2, 3), (0,)) for recipe in RECIPES),  # one short block
    *((recipe, (2, 131, 3), (1,)) for recipe in RECIPES[::2]),
    *((recipe, (129, 2, 40), (0, 2)) for recipe in RECIPES),  # axes that are no neighbours
    (BlockScaling(), (3, 128, 256), (1, 2)),  # no short block
    (BlockScaling(), (0, 5), (1,)),
    (MXFP8(), (5, 0), (1,)),
]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("recipe", "shape", "axis"), SHAPES, ids=id_of)
def test_any_axis_of_any_shape(recipe, shape, axis):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, size=shape))).astype(np.float32)
    q, scale_inv = block_oracle.quantized(recipe, x, axis)
    blocks = quantize(recipe, x, axis=axis)
    np.testing.assert_array_equal(to_bytes(blocks.q), q.view(np.uint8))
    assert blocks.scale_inv.dtype == (jnp.float8_e8m0fnu if isinstance(recipe, MXFP8) else jnp.float32)
    assert_exact(np.asarray(blocks.scale_inv).astype(np.float32), scale_inv)
    dequantized = np.asarray(dequantize(recipe, blocks))
    assert_exact(dequantized, block_oracle.dequantized(q, scale_inv, axis, recipe.block_size))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("recipe", "source"), [*zip(RECIPES, ("bf16", "f16", "bf16"), strict=True)], ids=id_of)
def test_vmap_of_16_bits_changes_no_byte(recipe, source):
    x = np.random.default_rng(0).normal(size=(3, 4, 200)).astype(DTYPES[source])
    q, scale_inv = block_oracle.quantized(recipe, x, (2,))
    blocks = jax.jit(jax.vmap(recipe.quantize))(x)
    np.testing.assert_array_equal(to_bytes(blocks.q), q.view(np.uint8))
    assert_exact(np.asarray(blocks.scale_inv).astype(np.float32), scale_inv)
    dequantized = jax.jit(jax.vmap(recipe.dequantize))(*blocks)
    assert_exact(dequantized, block_oracle.dequantized(q, scale_inv, (2,), recipe.block_size))


# What a block may hold


EDGES = np.array([0.0, -0.0, 1e-45, -1e-42, 2.0**-126, 1.0, -448.0, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_signs_of_zeros_and_nans_stay(recipe):
    x = np.array([[0.0, -0.0, 1.0, np.nan], [0.0, -0.0, 0.0, -0.0], [np.nan] * 4], np.float32)
    q = np.asarray(quantize(recipe, x).q).astype(np.float32)
    assert_exact(q[:2, :2], x[:2, :2])
    assert np.array_equal(np.isnan(q), np.isnan(x))
    assert q[0, 2] == 256.0 if getattr(recipe, "power_of_two", True) else q[0, 2] == 448.0  # NaN is no amax


@pytest.mark.thorough(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_golden_edges(recipe):
    """Each edge in a block of its own."""
    q, scale_inv = quantize(recipe, EDGES[:, None])
    q = np.asarray(q).astype(np.float32)[:, 0]
    scale_inv = np.asarray(scale_inv).astype(np.float64)[:, 0]
    smallest, one = 2.0**-127, 2.0**-8
    if isinstance(recipe, MXFP8):
        expected = [smallest] * 5 + [one, 1.0, 2.0**127, 2.0**127, smallest]
    elif recipe.power_of_two:
        expected = [1.0, 1.0] + [smallest] * 3 + [one, 1.0, 1.0, 1.0, 1.0]
    else:
        least = float(np.float32(1) / np.finfo(np.float32).max)
        expected = [1.0, 1.0] + [least] * 3 + [float(np.float32(1) / np.float32(448)), 1.0, 1.0, 1.0, 1.0]
    assert_exact(scale_inv, np.array(expected))
    assert_exact(q[:2], EDGES[:2])
    assert_exact(q[2:4], np.array([0.0, -0.0], np.float32))  # some 2^-139 * 2^127 is below 2^-10
    assert q[4] in (2.0, 4.0)  # 2^-126 times 2^127, or times the largest float32
    assert_exact(q[6:9], np.array([-448.0, 448.0, -448.0], np.float32))
    assert np.isnan(q[9])


def test_an_inf_costs_its_block_of_mxfp8_and_no_other():
    x = np.ones((1, 64), np.float32)
    x[0, 5] = np.inf
    x[0, 6] = np.finfo(np.float32).max
    q, scale_inv = quantize(MXFP8(), x)
    assert to_bytes(scale_inv).tolist() == [[254, 119]]
    q = np.asarray(q).astype(np.float32)[0]
    assert q[5] == 448.0 and q[6] == 2.0 and q[4] == 0.0  # times 2^-127, which is subnormal
    assert np.all(q[32:] == 256.0)


def test_a_scale_that_is_inf_becomes_the_largest_number_of_the_input():
    recipe = BlockScaling(power_of_two=False)
    for dtype in (jnp.bfloat16, jnp.float32):
        expected = np.float32(1.0) / np.float32(jnp.finfo(dtype).max)
        assert_exact(quantize(recipe, np.full((1, 1), 1e-38, dtype)).scale_inv, np.full((1, 1), expected, np.float32))


def test_an_epsilon_bounds_the_scale():
    x = np.full((1, 3), 1e-10, np.float32)
    assert_exact(quantize(BlockScaling(amax_epsilon=1.0), x).scale_inv, np.full((1, 1), 2.0**-8, np.float32))


def test_formats():
    x = np.array([[1.75]], np.float32)
    for recipe in (BlockScaling(fp8_format="HYBRID"), MXFP8(fp8_format="HYBRID")):
        assert jax.eval_shape(recipe.quantize, x).q.dtype == recipe.dtype() == jnp.float8_e4m3fn
        blocks = jax.eval_shape(functools.partial(recipe.quantize, backward=True), x)
        assert blocks.q.dtype == recipe.dtype(backward=True) == jnp.float8_e5m2
        narrow = functools.partial(recipe.dequantize, dtype=jnp.bfloat16)
        assert jax.eval_shape(narrow, *blocks).dtype == jnp.bfloat16
    assert BlockScaling().dtype(backward=True) == MXFP8().dtype(backward=True) == jnp.float8_e4m3fn


# Bad input


@pytest.mark.parametrize("recipe", [BlockScaling, MXFP8])
def test_what_a_recipe_does_not_take_is_named(recipe):
    with pytest.raises(ValueError, match='fp8_format must be "HYBRID" or "E4M3"; got .E5M2.'):
        recipe(fp8_format="E5M2")
    for axis in (2, -3, (0, -2), (), (0, 1, 1)):
        message = rf"axis is one axis of x, or two different ones; got {re.escape(str(axis))} for x of shape \(2, 3\)"
        with pytest.raises(ValueError, match=message):
            recipe().quantize(jnp.ones((2, 3)), axis=axis)
    for x, got in ((jnp.ones(3, jnp.int32), "int32"), ([1.0], "list"), (jnp.ones(3, jnp.float8_e5m2), "float8_e5m2")):
        with pytest.raises(TypeError, match=f"floats of 16 bits or more; got {got}. Cast it to float32 first."):
            recipe().quantize(x)
    with pytest.raises(ValueError, match="amax_epsilon must be finite and >= 0; 0 is no bound; got -1"):
        BlockScaling(amax_epsilon=-1)


def test_what_quantize_did_not_return_is_named():
    q, scale_inv = quantize(BlockScaling(), np.ones((2, 200), np.float32))
    with pytest.raises(TypeError, match="and the float8_e8m0fnu that quantize returns; got float8_e4m3fn and float32"):
        MXFP8().dequantize(q, scale_inv)
    with pytest.raises(TypeError, match="got float32 and float32"):
        BlockScaling().dequantize(jnp.ones((2, 200)), scale_inv)
    for shape in ((2, 3), (2,), (3, 2)):
        with pytest.raises(ValueError, match=r"one for every 128 elements; got .* for q \(2, 200\)") as e:
            BlockScaling().dequantize(q, jnp.ones(shape))
        assert str(shape) in str(e.value)
