"""The fp8 matmul against NumPy in float64 on numbers cast by hand: forward and both gradients, in any shape.

Operands are small whole numbers, times a power of two: fp8 rounds them, and the sums of their products are exact in
float32, whatever the order. So results are those of the oracle to the bit.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from fp8_model import GRAD, LHS, MATMUL, RHS, scale_leaves
from helpers import assert_close, assert_exact, sqnr
from jaxmp._src.programs import jaxprs
from jaxmp.fp8 import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    FallbackWarning,
    Scales,
    dequantize,
    dot_general,
    einsum,
    quantize,
)

F16, F32, F64, BF16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
HYBRID, ONLY_E4M3 = DelayedScaling(), DelayedScaling(fp8_format="E4M3")
UNIT = Scales(*np.zeros(3, F32))


def whole_numbers(seed, *shape, largest=31):
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(F32)


def cast(x, scale, dtype):
    """fp8(x * scale) by hand, as float64."""
    limit = F32(ml_dtypes.finfo(dtype).max)
    return np.clip(np.asarray(x, F32) * F32(scale), -limit, limit).astype(dtype).astype(F64)


def oracle(lhs, rhs, grad, numbers, scales, backward_dtype=E5M2):
    """(result, gradient of lhs, gradient of rhs) in float64."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    lhs_names = [next(letters) for _ in range(lhs.ndim)]
    rhs_names = [next(letters) for _ in range(rhs.ndim)]
    for i, j in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
        rhs_names[j] = lhs_names[i]
    shared = [lhs_names[i] for i in (*lhs_contract, *lhs_batch)]
    out_names = [lhs_names[i] for i in lhs_batch]
    out_names += [x for x in lhs_names if x not in shared] + [x for x in rhs_names if x not in shared]
    a, b, c = ("".join(names) for names in (lhs_names, rhs_names, out_names))
    s_lhs, s_rhs, s_grad = scales
    q_lhs, q_rhs = cast(lhs, s_lhs, E4M3) / F64(s_lhs), cast(rhs, s_rhs, E4M3) / F64(s_rhs)
    q_grad = cast(grad, s_grad, backward_dtype) / F64(s_grad)
    return (
        np.einsum(f"{a},{b}->{c}", q_lhs, q_rhs),
        np.einsum(f"{c},{b}->{a}", q_grad, q_rhs),
        np.einsum(f"{a},{c}->{b}", q_lhs, q_grad),
    )


@functools.cache
def compiled(numbers, recipe, kwargs):
    @jax.jit
    def three(lhs, rhs, grad, scales):
        f = lambda lhs, rhs, scales: dot_general(lhs, rhs, numbers, recipe=recipe, scales=scales, **dict(kwargs))  # noqa: E731
        y, vjp = jax.vjp(f, lhs, rhs, scales)
        return y, *vjp(grad.astype(y.dtype))

    return three


def run(lhs, rhs, grad, numbers, *, recipe=HYBRID, scales=UNIT, **kwargs):
    """The same three, and the amaxes, by jaxmp."""
    return compiled(numbers, recipe, tuple(kwargs.items()))(lhs, rhs, grad, scales)


def log2_leaves(*log2):
    return Scales(*(F32(x) for x in log2))


# The casts


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("source", "dtype"), [(F32, E4M3), (F16, E5M2), (BF16, E4M3)])
def test_quantize_saturates_and_keeps_nan(source, dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.array([0.0, -0.0, 1.0, 1.06, -3.3, 2e-3, 1e-7, 460, 6e4, -6e4, np.inf, -np.inf, np.nan]).astype(source)
    for scale in (1.0, 4.0, 0.25):
        q = np.asarray(quantize(jnp.asarray(x), jnp.float32(scale), dtype))
        expected = np.clip(x.astype(F32) * F32(scale), -limit, limit).astype(dtype)
        assert_exact(q, expected)
        assert np.isnan(q[-1].astype(F32))
        assert float(q[-3]) == limit == -float(q[-2])
        back = dequantize(q, jnp.float32(scale), F32)
        assert_exact(back, expected.astype(F32) / F32(scale))
    assert_exact(
        quantize(jnp.ones((2, 3)), jnp.array([[1.0], [2.0]]), dtype), np.float32([[1] * 3, [2] * 3]).astype(dtype)
    )
    thirds = dequantize(jnp.array([448.0, -3.0, 0.0], dtype), jnp.float32(3.0), BF16)
    assert_exact(thirds, (np.float32([448, -3, 0]) * F32(1 / 3)).astype(BF16))


# One GEMM and its gradients

CASES = {  # lhs shape, rhs shape, dimension_numbers
    "matmul": ((16, 32), (32, 48), MATMUL),
    "both_transposed": ((32, 16), (48, 32), (((0,), (1,)), ((), ()))),
    "contracting_out_of_order": ((16, 4, 8), (4, 8, 16), (((2, 1), (1, 0)), ((), ()))),
    "rhs_free_on_both_sides": ((16, 32), (4, 32, 4), (((1,), (1,)), ((), ()))),
    "two_batch": ((2, 16, 3, 16), (3, 16, 16, 2), (((3,), (1,)), ((2, 0), (0, 3)))),
    # Sides that are no multiples of 16 are padded with zeros inside.
    "odd_activations_3d": ((3, 5, 37), (37, 10), (((2,), (0,)), ((), ()))),
    "odd_contracting_out_of_order": ((6, 3, 5), (3, 5, 10), (((2, 1), (1, 0)), ((), ()))),
    "odd_batch": ((3, 5, 37), (3, 37, 7), (((2,), (1,)), ((0,), (0,)))),
    "vector": ((37,), (37, 10), (((0,), (0,)), ((), ()))),
    "two_vectors_in_a_batch": ((37, 2), (2, 37), (((0,), (1,)), ((1,), (0,)))),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients(name):
    lhs_shape, rhs_shape, numbers = CASES[name]
    lhs, rhs = whole_numbers(0, *lhs_shape), whole_numbers(1, *rhs_shape)
    out_shape = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs, rhs).shape
    grad = whole_numbers(2, *out_shape)
    y, d_lhs, d_rhs, amaxes = run(lhs, rhs, grad, numbers)
    expected = oracle(lhs, rhs, grad, numbers, (1, 1, 1))
    assert_exact((y, d_lhs, d_rhs), tuple(x.astype(F32) for x in expected))
    assert_exact(amaxes, Scales(*(np.max(np.abs(x)) for x in (lhs, rhs, grad))))
    assert np.any(cast(lhs, 1, E4M3) != lhs) and np.any(cast(grad, 1, E5M2) != grad)  # the casts do round


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "scales", "backward"),
    [
        (HYBRID, UNIT, "f8E5M2"),
        (ONLY_E4M3, UNIT, "f8E4M3FN"),
        (CurrentScaling(), None, "f8E5M2"),
        (DelayedScaling(power_of_two=False), UNIT, "f8E5M2"),
    ],
    ids=["hybrid", "e4m3", "current", "any_scale"],
)
def test_the_program_for_cuda_multiplies_fp8_in_multiples_of_16(recipe, scales, backward):
    args = jnp.ones((5, 20), BF16), jnp.ones((20, 10)), jnp.ones((5, 10), BF16), scales
    text = compiled(MATMUL, recipe, ()).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    forward, dgrad, wgrad = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    e4m3 = "f8E4M3FN"
    for line, left, right, fast in [
        (forward, f"16x32x{e4m3}", f"32x16x{e4m3}", True),
        (dgrad, f"16x16x{backward}", f"32x16x{e4m3}", False),
        (wgrad, f"16x32x{e4m3}", f"16x16x{backward}", False),
    ]:
        types = re.search(r": \(tensor<(\w+)>, tensor<(\w+)>\) -> tensor<\d+x\d+x(\w+)>", line)
        assert types and types.groups()[:2] == (left, right), line
        narrow = recipe.power_of_two and line is not wgrad  # the weight is float32
        assert types.group(3) == ("bf16" if narrow else "f32")
        assert f"allow_imprecise_accumulation = {str(fast).lower()}" in line
        assert "accumulation_type = f32" in line


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("recipe", "log2"),
    [(ONLY_E4M3, (3, -2, 5)), (HYBRID, (-63, 63, 0)), (HYBRID, (63, 63, -60)), (HYBRID, (-55, -55, 20))],
    ids=lambda x: x.fp8_format if isinstance(x, DelayedScaling) else str(x),
)
def test_power_of_two_scales(recipe, log2):
    """Operands at the size that their scale is for; results are the oracle's to the bit, up to the ends of float32."""
    scales = [2.0**x for x in log2]
    lhs, rhs, grad = (whole_numbers(i, 16, 16) * F32(1 / s) for i, s in enumerate(scales))
    y, d_lhs, d_rhs, amaxes = run(lhs, rhs, grad, MATMUL, recipe=recipe, scales=log2_leaves(*log2))
    expected = oracle(lhs, rhs, grad, MATMUL, scales, E4M3 if recipe is ONLY_E4M3 else E5M2)
    for got, want in zip((y, d_lhs, d_rhs), expected, strict=True):
        assert got.dtype == F32
        tiny = np.abs(want) < np.finfo(F32).tiny  # CPUs may read subnormals as zero
        assert_exact(np.where(tiny, F32(0), got), np.where(tiny, F32(0), want.astype(F32)))
    assert_exact(amaxes, Scales(*(np.max(np.abs(x)) for x in (lhs, rhs, grad))))


def test_scales_that_are_no_powers_of_two():
    recipe = DelayedScaling(power_of_two=False)
    scales = (3.0, 0.7, 11.0)
    lhs, rhs, grad = (whole_numbers(i, 16, 16) for i in range(3))
    for dtype in (F32, BF16, F16):
        got = run(*(x.astype(dtype) for x in (lhs, rhs, grad)), MATMUL, recipe=recipe, scales=log2_leaves(*scales))
        expected = oracle(lhs, rhs, grad, MATMUL, np.float32(scales))
        eps = float(ml_dtypes.finfo(dtype).eps)
        for x, want in zip(got[:3], expected, strict=True):
            assert_close(x, want.astype(dtype), rtol=max(eps, 5e-7), atol=1e-4)
        assert_exact(got[3], Scales(F32(31), F32(31), F32(31)))


# Dtypes


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "asked", "expected"),
    [
        (F32, F32, None, F32),
        (BF16, F32, None, BF16),
        (F32, F16, None, F16),
        (BF16, F32, F32, F32),
        (F32, F32, BF16, BF16),
    ],
    ids=lambda x: x and np.dtype(x).name,
)
def test_the_result_has_the_narrower_dtype_and_gradients_those_of_the_inputs(lhs_dtype, rhs_dtype, asked, expected):
    lhs, rhs, grad = (whole_numbers(i, 16, 16) for i in range(3))
    args = lhs.astype(lhs_dtype), rhs.astype(rhs_dtype), grad, MATMUL
    y, d_lhs, d_rhs, _ = run(*args, preferred_element_type=asked)  # one rounding from the exact sum
    want_y, want_lhs, want_rhs = oracle(lhs, rhs, grad, MATMUL, (1, 1, 1))
    assert_exact((y, d_lhs), (want_y.astype(expected), want_lhs.astype(lhs_dtype)))
    assert_exact(d_rhs, want_rhs.astype(rhs_dtype))
    f = compiled(MATMUL, CurrentScaling(), (("preferred_element_type", asked),))
    y, d_lhs, d_rhs, _ = jax.eval_shape(f, *args[:3], None)
    assert (y.dtype, d_lhs.dtype, d_rhs.dtype) == (expected, lhs_dtype, rhs_dtype)


def test_float16_results_whose_accumulator_is_beyond_float16():
    """q reaches 448 * 448 * 16 = 3.2e6; unscaled it is small."""
    x = np.full((16, 16), 0.025, F16)
    y, d_lhs, d_rhs, _ = run(x, x, x, MATMUL, scales=log2_leaves(14, 14, 20))
    expected = oracle(x, x, x, MATMUL, (2.0**14, 2.0**14, 2.0**20))
    assert_exact((y, d_lhs, d_rhs), tuple(e.astype(F16) for e in expected))
    assert float(cast(x, 2.0**14, E4M3)[0, 0]) ** 2 * 16 > 65504


# What is not finite


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bad", [-np.inf, np.nan], ids=str)
@pytest.mark.parametrize("recipe", [HYBRID, CurrentScaling()], ids=["delayed", "current"])
def test_what_is_not_finite_shows(recipe, bad):
    """Delayed scaling reports it as an amax of inf; current scaling, which has none, by a result of NaN.

    A NaN stays where it is in padded tensors: zeros of one operand meet zeros of the other.
    """
    ones = [np.ones(shape, F32) for shape in ((3, 5), (5, 7), (3, 7))]
    for role, shown in enumerate([(0, 2), (0, 1), (1, 2)]):  # results that read lhs, rhs and the gradient
        lhs, rhs, grad = given = [x.copy() for x in ones]
        given[role][1, 2] = bad
        *found, amaxes = run(*given, MATMUL, recipe=recipe, scales=UNIT if recipe is HYBRID else None)
        if recipe is not HYBRID:
            for some in (np.any, np.all):
                assert [bool(some(np.isnan(x))) for x in found] == [i in shown for i in range(3)]
            continue
        assert_exact(amaxes, Scales(*(F32(np.inf if i == role else 1) for i in range(3))))
        if np.isnan(bad):
            assert_exact([np.isnan(x) for x in found], [np.isnan(x) for x in (lhs @ rhs, grad @ rhs.T, lhs.T @ grad)])


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("power_of_two", "size"), [(True, 1e-30), (True, 1e18), (False, 1.0), (False, 1e30)])
def test_current_scaling(power_of_two, size):
    """Scales by the tensors' own amaxes, whatever their size; powers of two up to 2^63."""
    recipe = CurrentScaling(power_of_two=power_of_two)
    lhs, rhs, grad = whole_numbers(0, 16, 16) * F32(size), whole_numbers(1, 16, 16), whole_numbers(2, 16, 16)
    y, d_lhs, d_rhs, _ = run(lhs, rhs, grad, MATMUL, recipe=recipe, scales=None)
    scales = [np.float64(F32(limit) / np.max(np.abs(x))) for x, limit in [(lhs, 448), (rhs, 448), (grad, 57344)]]
    if power_of_two:
        scales = [np.clip(2.0 ** np.floor(np.log2(s)), 2.0**-63, 2.0**63) for s in scales]
    for got, want in zip((y, d_lhs, d_rhs), oracle(lhs, rhs, grad, MATMUL, scales), strict=True):
        assert_close(got, want.astype(F32), rtol=1e-5, atol=1e-6 * float(np.max(np.abs(want))))


def test_what_is_too_large_for_a_power_of_two_is_nan():
    """Beyond 448 * 2^63 the cast would clip, and a recipe without state has no metric that shows it."""
    lhs, rhs, grad = whole_numbers(0, 16, 16) * F32(1e30), whole_numbers(1, 16, 16), whole_numbers(2, 16, 16)
    y, d_lhs, d_rhs, _ = run(lhs, rhs, grad, MATMUL, recipe=CurrentScaling(), scales=None)
    assert np.all(np.isnan(y)) and np.all(np.isnan(d_rhs)) and np.all(np.isfinite(d_lhs))


# Sides of other lengths than multiples of 16


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        *((HYBRID, shape) for shape in ((0, 16, 16), (16, 0, 16), (16, 16, 0))),
        *((recipe, (16, 0, 16)) for recipe in (CurrentScaling(), BlockScaling())),
        *((recipe, (0, 5, 3)) for recipe in (CurrentScaling(), MXFP8())),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else type(x).__name__,
)
def test_sides_that_are_empty(recipe, shape):
    m, k, n = shape
    lhs, rhs, grad = (whole_numbers(i, *sides, largest=8) for i, sides in enumerate([(m, k), (k, n), (m, n)]))
    y, d_lhs, d_rhs, amaxes = run(lhs, rhs, grad, MATMUL, recipe=recipe, scales=UNIT if recipe is HYBRID else None)
    assert_exact((y, d_lhs, d_rhs), (lhs @ rhs, grad @ rhs.T, lhs.T @ grad))
    if recipe is HYBRID:
        assert_exact(amaxes, Scales(*(np.max(np.abs(x), initial=F32(0)) for x in (lhs, rhs, grad))))


@pytest.mark.thorough(0)
def test_a_batch_split_over_devices_gives_the_same_bits():
    """Of split tensors XLA pads what each device has; in shard_map each device pads its own rows."""
    lhs, rhs, grad = whole_numbers(0, 12, 20), whole_numbers(1, 20, 10), whole_numbers(2, 12, 10)
    whole = run(lhs, rhs, grad, MATMUL)
    mesh, explicit = (
        jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    split = compiled(MATMUL, HYBRID, ())
    for mesh_of_data in (mesh, explicit):
        of_data, on_all = (NamedSharding(mesh_of_data, spec) for spec in (P("data"), P()))
        put = jax.device_put(lhs, of_data), jax.device_put(rhs, on_all), jax.device_put(grad, of_data)
        assert_exact(split(*put, UNIT), whole)
    with jax.set_mesh(explicit):  # a weight that nobody put on the mesh
        assert_exact(split(put[0], rhs, put[2], UNIT), whole)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=(P("data"), P()))
    def local(lhs, rhs, grad):
        y, vjp = jax.vjp(lambda *args: dot_general(*args, MATMUL, recipe=HYBRID, scales=UNIT), lhs, rhs)
        d_lhs, d_rhs = vjp(grad)
        return (y, d_lhs), d_rhs

    (y, d_lhs), d_rhs = jax.jit(local)(lhs, rhs, grad)
    assert_exact((y, d_lhs, d_rhs), whole[:3])


@pytest.mark.thorough(0)
@pytest.mark.optimized
@pytest.mark.parametrize("recipe", [HYBRID, MXFP8()], ids=["delayed", "mxfp8"])
def test_operands_that_the_same_program_computes_in_bfloat16_are_rounded_first(recipe):
    """XLA computes them in float32, and a reader in float32 could see them without their rounding.

    They are whole numbers of 8 bits times 3, which bfloat16 rounds; all sums are exact.
    """
    rng = np.random.default_rng(7)
    x, slope = (np.copysign(rng.integers(128, 256, n), rng.normal(size=n)).astype(F32) for n in ((48, 64), (48, 32)))
    w = whole_numbers(8, 64, 32, largest=8)
    scales = Scales(*np.array([-1, 0, 0], F32)) if recipe is HYBRID else None
    for operand, dtype in ((x, E4M3), (slope, E5M2)):
        assert np.mean(cast(3 * operand, 0.5, dtype) != cast((3 * operand).astype(BF16), 0.5, dtype)) > 0.01

    def product(h, w, scales):
        return dot_general(h, w.astype(jnp.bfloat16), MATMUL, recipe=recipe, scales=scales)

    def backward(h, w, scales, grad):
        return jax.vjp(product, h, w, scales)[1](grad)

    activate = lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(3)  # noqa: E731
    h, grad = jax.jit(activate)(x), jax.jit(activate)(slope)
    together = jax.jit(lambda x, w, s: product(activate(x), w, s))(x, w, scales)
    assert_exact(together, jax.jit(product)(h, w, scales))
    together = jax.jit(lambda h, w, s, slope: backward(h, w, s, activate(slope)))(h, w, scales, slope)
    assert_exact(together, jax.jit(backward)(h, w, scales, grad))


# vmap


def with_gradients(f, grad):
    def all_of(x, w, scales):
        y, vjp = jax.vjp(lambda x, w, s: f(x, w, *s), x, w, scales)
        return y, *vjp(grad)

    return all_of


def one_example(recipe):
    """A model of one example, x [K] times w [K, N]."""
    numbers = (((0,), (0,)), ((), ()))
    return lambda x, w, *scales: dot_general(x, w, numbers, recipe=recipe, scales=Scales(*scales) if scales else None)


def gemms_of(f, *args):
    """The shapes of operands of the products in float32, as (lhs, rhs), in the program for CPUs."""
    text = jax.jit(f).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    shapes = [re.findall(r"tensor<([\dx]+)xf32>", line)[:2] for line in lines]
    return [tuple(tuple(int(side) for side in x.split("x")) for x in pair) for pair in shapes]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "around"),
    [
        *((HYBRID, around) for around in ("checkpoint", "scan", "vmap")),
        *((CurrentScaling(), "scan"), (BlockScaling(), "vmap"), (MXFP8(), "jit")),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_vmap_joins_rows_inside_what_stands_around_the_model(recipe, around):
    """x [S, B, K]: the result for all rows at once, in whatever order the transformations come."""
    x, w = whole_numbers(0, 2, 8, 20), whole_numbers(1, 20, 10)
    scales = UNIT if recipe is HYBRID else ()
    model = one_example(recipe)
    axes = (0, *[None] * (1 + len(scales)))
    if around == "scan":
        each = lambda x, w, *s: jax.lax.scan(lambda c, row: (c, model(row, w, *s)), 0, x)[1]  # noqa: E731
        f = jax.vmap(each, (1, *axes[1:]), 1)
    else:
        wrap = {"jit": jax.jit, "checkpoint": jax.checkpoint, "vmap": lambda f: f}[around]
        f = jax.vmap(wrap(jax.vmap(model, axes)), axes)

    def three(dot, x, w):
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(jnp.ones_like(y))

    got = jax.jit(functools.partial(three, lambda x, w: f(x, w, *scales)))(x, w)
    want = jax.jit(functools.partial(three, lambda x, w: jax.vmap(model, axes)(x.reshape(16, 20), w, *scales)))(x, w)
    if around != "scan" or recipe is HYBRID:
        assert_exact(jax.tree.map(lambda a, b: a.reshape(b.shape), got, want), want)
    else:  # a scale for the rows of one turn
        pairs = [(a.reshape(b.shape), b) for a, b in zip(got, want, strict=True)]
        assert all(np.array_equal(a, b) or sqnr(b, a) > 25 for a, b in pairs)


def test_a_model_of_one_example_runs_as_one_gemm_under_vmap():
    """The batch joins the rows, also in the gradient of the weight; the amaxes are those of the whole batch."""
    x, w, grad = whole_numbers(0, 24, 20), whole_numbers(1, 20, 10), whole_numbers(2, 24, 10)
    f = with_gradients(jax.vmap(one_example(HYBRID), (0, *[None] * 4)), grad)
    assert_exact(jax.jit(f)(x, w, UNIT), run(x, w, grad, MATMUL))
    assert gemms_of(f, x, w, UNIT) == [((32, 32), (32, 16)), ((32, 16), (32, 16)), ((32, 32), (32, 16))]


def test_gradients_of_each_example():
    """vmap of grad: one gradient for each example, and the largest amax over all."""
    x, w = whole_numbers(0, 24, 20), whole_numbers(1, 20, 10)
    x *= np.arange(1, 25, dtype=F32)[:, None]
    tx = jaxmp.unscale_and_skip(optax.identity())
    opt_state = tx.init(())

    def loss(params, x):
        y = one_example(HYBRID)(x, params["w"], params[LHS], params[RHS], params[GRAD])
        return jnp.sum(y * (jnp.arange(10) % 8))

    params = {"w": jnp.asarray(w)} | scale_leaves()
    each = lambda params, x: jaxmp.value_and_grad(loss)(params, x, opt_state=opt_state)[1]  # noqa: E731
    grads = jax.jit(jax.vmap(each, (None, 0)))(params, x)
    assert_exact(grads["w"], np.einsum("bk,n->bkn", cast(x, 1, E4M3), np.arange(10) % 8).astype(F32))
    largest = {name: np.unique(amaxes).tolist() for name, amaxes in jaxmp.fp8.get_amaxes(grads).items()}
    assert largest == {LHS: [np.max(np.abs(x))], RHS: [np.max(np.abs(w))], GRAD: [7]}


@pytest.mark.parametrize(
    ("m", "k", "n", "gemm"),
    [
        (6, 20, 10, ((3, 16, 32), (3, 32, 16))),
        pytest.param(64, 64, 64, ((3, 64, 64), (3, 64, 64)), marks=pytest.mark.thorough(0)),  # what kernels cast
    ],
    ids=["odd", "tiles"],
)
def test_members_with_weights_of_their_own_under_vmap_of_examples(m, k, n, gemm):
    """Experts inside a model of one example: the rows of each expert join; each has its own scales and amaxes."""
    x, w, grad = whole_numbers(0, m, 3, k), whole_numbers(1, 3, k, n), whole_numbers(2, m, 3, n)
    leaves = Scales(*(np.arange(3, dtype=F32) - i for i in range(3)))
    f = with_gradients(jax.vmap(jax.vmap(one_example(HYBRID)), (0, *[None] * 4)), grad)
    y, d_x, d_w, amaxes = jax.jit(f)(x, w, leaves)
    for i in range(3):
        member = Scales(*(leaf[i] for leaf in leaves))
        want = run(x[:, i], w[i], grad[:, i], MATMUL, scales=member)
        assert_exact((y[:, i], d_x[:, i], d_w[i], jax.tree.map(lambda a, i=i: a[i], amaxes)), want)
    assert gemms_of(f, x, w, leaves)[0] == gemm


# Arguments that fp8 does not take


def test_a_product_that_sums_over_no_axis_runs_in_the_result_s_dtype():
    numbers = (((), ()), ((), ()))
    lhs, rhs = whole_numbers(0, 16).astype(BF16), whole_numbers(1, 16)
    expected = "this matmul runs in bfloat16 instead of fp8: it sums over no axis"
    with pytest.warns(FallbackWarning, match=expected):
        y, _, d_rhs, amaxes = run(lhs, rhs, np.ones((16, 16), F32), numbers)
    assert_exact(y, jnp.asarray(lhs)[:, None] * jnp.asarray(rhs, BF16)[None])
    assert d_rhs.dtype == F32
    assert_exact(amaxes, Scales(F32(0), F32(0), F32(0)))


def test_a_recipe_with_state_needs_scales_and_others_take_none():
    x = jnp.ones((16, 16))
    with pytest.raises(ValueError, match=r"needs scales=.*got DelayedScaling and scales=None"):
        dot_general(x, x, MATMUL, recipe=HYBRID)
    with pytest.raises(ValueError, match=r"takes none; got CurrentScaling and scales=given"):
        dot_general(x, x, MATMUL, recipe=CurrentScaling(), scales=UNIT)


X_4_5, BATCH_AXES = jnp.ones((4, 5)), (((1,), (0,)), ((0,), (1,)))
UNFIT = {
    "sizes": (X_4_5, jnp.ones((6, 6)), MATMUL, CurrentScaling(), r"got \(4, 5\) and \(6, 6\)"),
    "axes": (X_4_5[0], jnp.ones((5, 6)), MATMUL, CurrentScaling(), r"got \(5,\) and \(5, 6\)"),
    "batch": (X_4_5, jnp.ones((5, 6)), BATCH_AXES, CurrentScaling(), r"equal sizes on summed and batch axes"),
    "integers": (jnp.ones((4, 5), int), jnp.ones((5, 6)), MATMUL, CurrentScaling(), "takes floats .*; got int32 and"),
    "a name": (X_4_5, jnp.ones((5, 6)), MATMUL, "fp8", "a recipe must be one of jaxmp.fp8"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_operands_that_do_not_fit_are_named_by_their_own_shapes(what):
    lhs, rhs, numbers, recipe, message = UNFIT[what]
    with pytest.raises(TypeError, match=message):
        dot_general(lhs, rhs, numbers, recipe=recipe)


# einsum

EQUATIONS = {
    "btd,dhk->bthk": ((2, 16, 16), (16, 4, 8)),  # attention's projections
    "ecd,edf->ecf": ((3, 16, 32), (3, 32, 16)),  # experts
    "bqhd,bkhd->bhqk": ((2, 16, 2, 16), (2, 16, 2, 16)),
    "...ij,...jk->...ik": ((3, 16, 16), (3, 16, 32)),
    "b...d,df->b...f": ((2, 8, 16), (16, 32)),
    " ij , kj -> ik ": ((16, 32), (48, 32)),
    "abd,dc->cba": ((4, 4, 16), (16, 16)),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_is_that_of_the_quantized_operands(equation):
    lhs, rhs = (whole_numbers(i, *shape) for i, shape in enumerate(EQUATIONS[equation]))
    leading = "xy"[: lhs.ndim - len(re.findall("[a-z]", equation.split(",")[0]))]
    a, b, c = re.split(",|->", equation.replace(" ", "").replace("...", leading))
    grad = whole_numbers(2, *np.einsum(equation, lhs, rhs).shape)
    f = with_gradients(lambda x, w, *s: einsum(equation, x, w, recipe=HYBRID, scales=Scales(*s)), grad)
    q_lhs, q_rhs, q_grad = cast(lhs, 1, E4M3), cast(rhs, 1, E4M3), cast(grad, 1, E5M2)
    products = [(f"{a},{b}->{c}", q_lhs, q_rhs), (f"{c},{b}->{a}", q_grad, q_rhs), (f"{a},{c}->{b}", q_lhs, q_grad)]
    assert_exact(jax.jit(f)(lhs, rhs, UNIT)[:3], tuple(np.einsum(*x).astype(F32) for x in products))


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("ij,jk", "it needs two operands and '->'"),
        ("ij,jk,kl->il", "it needs two operands and '->'"),
        ("i,ij->j", "it does not fit operands of 2 and 2 axes"),
        ("ii,ij->j", "a label may come once in each operand"),
        ("ij,jk->k", "the label 'i' is in one operand only and not in the result: sum it first"),
        ("ij,jk->ikl", "the result has labels of no operand: ['l']"),
    ],
)
def test_einsum_refuses_what_is_not_one_gemm(equation, reason):
    x = jnp.ones((16, 16))
    with pytest.raises(ValueError, match=re.escape(f"an fp8 einsum is one GEMM: {reason}; got {equation!r}")):
        einsum(equation, x, x, recipe=CurrentScaling())


def test_a_weight_is_one_value_for_both_of_its_products():
    """So one that is split over devices is gathered once; a barrier round it would make fprop's and dgrad's differ."""

    def loss(x, w):
        return jnp.sum(dot_general(x, w, MATMUL, recipe=HYBRID, scales=UNIT) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((32, 64)), jnp.ones((64, 48)))
    barriers = [eqn for eqn in jaxprs.equations(jaxpr) if eqn.primitive.name == "optimization_barrier"]
    of_products = [[x.aval for x in eqn.invars] for eqn in barriers if any(x.aval.shape == () for x in eqn.invars)]
    assert sorted(x.shape for avals in of_products for x in avals if x.shape) == [(32, 48), (32, 64), (32, 64)]
