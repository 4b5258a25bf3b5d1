"""cast_transpose_amax on every backend, against NumPy by hand; that Mosaic can lower it; and fp8 matmuls that use it.

An interpreted kernel checks values, not layouts: so everything that is interpreted here is lowered for a GPU as well.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pallas_kernels
from helpers import assert_exact
from jaxmp import fp8
from pallas_kernels import backend as backends
from platforms import text_for

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
HAS_KERNELS = backends.why_no_kernels() is None
WHY_NO_MOSAIC = backends.why_no_kernels(needs_gpu=True)
KERNEL = "cast_transpose_amax"
BACKENDS = [
    "xla",
    pytest.param("interpret", marks=pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))),
    pytest.param("mosaic", marks=pytest.mark.skipif(WHY_NO_MOSAIC is not None, reason=str(WHY_NO_MOSAIC))),
]
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))


def by_hand(x, scale, dtype):
    """(q, q.T, amax) in NumPy."""
    limit = F32(ml_dtypes.finfo(dtype).max)
    q = np.clip(np.asarray(x, F32) * F32(scale), -limit, limit).astype(dtype)
    magnitude = np.abs(np.asarray(x, F32))
    amax = np.where(np.isfinite(magnitude), magnitude, F32(np.inf)).max(initial=0.0)
    return q, q.T, F32(amax)


def edges(source, dtype):
    """Every number at which a cast can go wrong: of the wide dtype and of the fp8 one."""
    wide, narrow = ml_dtypes.finfo(source), ml_dtypes.finfo(dtype)
    limit, tiny = float(narrow.max), float(narrow.smallest_subnormal)
    ulp = limit - float(np.nextafter(np.asarray(narrow.max, dtype), np.asarray(0, dtype)).astype(F32))
    found = [0.0, 1.0, 1.0625, limit, limit + ulp / 2, limit + ulp, limit * 4, tiny, tiny / 2, tiny * 0.75, tiny / 4]
    found += [float(narrow.smallest_normal), float(wide.smallest_normal), 3.14159, 0.3]
    found = [value for value in found if value <= float(wide.max)]
    return np.array([*found, *(-value for value in found)], F32).astype(source)


def matrix(source, shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 50).astype(source)


def cast(x, scale, dtype, backend="auto"):
    return pallas_kernels.cast_transpose_amax(jnp.asarray(x), jnp.float32(scale), dtype, backend=backend)


# Values


EACH_SOURCE = pytest.mark.parametrize(
    "source, dtype", [(F32, E4M3), (BF16, E5M2), (F16, E4M3)], ids=["float32", "bfloat16", "float16"]
)


@pytest.mark.thorough(2)
@EACH_BACKEND
@EACH_SOURCE
def test_edges(backend, source, dtype):
    golden = edges(source, dtype)
    x = np.resize(golden, (64, 64))
    x[0, : len(golden)] = golden
    q, q_t, amax = cast(x, 1.0, dtype, backend)
    expected = by_hand(x, 1.0, dtype)
    assert_exact((q, q_t, amax), expected)
    zeros = np.asarray(q)[0, : len(golden)][golden == 0].view(np.uint8)
    assert set(zeros.tolist()) == {0x00, 0x80}  # 0 and -0


@pytest.mark.thorough(2)
@EACH_BACKEND
@pytest.mark.parametrize("bad, dtype", [(np.nan, E4M3), (np.inf, E4M3), (-np.inf, E5M2)])
def test_what_is_not_finite_saturates_or_stays_nan_and_is_reported(backend, bad, dtype):
    x = matrix(F32, (64, 64))
    x[5, 7] = bad
    q, q_t, amax = cast(x, 1.0, dtype, backend)
    assert_exact((q, q_t, amax), by_hand(x, 1.0, dtype))
    assert float(amax) == np.inf
    limit = float(ml_dtypes.finfo(dtype).max)
    expected = np.float32(np.nan) if np.isnan(bad) else np.float32(np.sign(bad) * limit)
    assert_exact((np.float32(q[5, 7]), np.float32(q_t[7, 5])), (expected, expected))


@pytest.mark.thorough(2)
@EACH_BACKEND
@EACH_SOURCE
def test_every_tile(backend, source, dtype):
    for shape in ((192, 128), (64, 192)):
        x = matrix(source, shape)
        assert_exact(cast(x, 4.0, dtype, backend), by_hand(x, 4.0, dtype))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("shape", [(100, 200), (64, 65), (0, 64), (0, 0)], ids=str)
def test_other_shapes_are_served_by_xla(shape):
    x = matrix(F32, shape)
    assert_exact(cast(x, 2.0, E4M3), by_hand(x, 2.0, E4M3))
    assert "mosaic" not in text_for(lambda x: cast(x, 2.0, E4M3), x)


# Lowering


@pytest.mark.thorough(2)
@EACH_SOURCE
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128)], ids=str)
def test_a_gpu_gets_the_kernel(shape, source, dtype):
    x = matrix(source, shape)
    text = text_for(lambda x, s: cast(x, s, dtype), x, np.float32(1))
    assert (KERNEL in text and "mosaic_gpu" in text) == HAS_KERNELS
    assert "mosaic" not in text_for(lambda x: cast(x, 1.0, dtype, "xla"), x)
    assert "mosaic" not in jax.jit(lambda x: cast(x, 1.0, dtype)).lower(x).as_text()  # a CPU does not


# Regions of a program


@pytest.mark.thorough(1)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_vmap(backend):
    x, scales = matrix(F32, (3, 64, 64)), np.array([1.0, 2.0, 4.0], F32)
    f = lambda x, s: pallas_kernels.cast_transpose_amax(x, s, E4M3, backend=backend)  # noqa: E731
    own, shared = jax.jit(lambda x, s: (jax.vmap(f)(x, s), jax.vmap(f, (0, None))(x, s[1])))(x, scales)
    assert_exact(own, stacked(by_hand(one, s, E4M3) for one, s in zip(x, scales, strict=True)))
    assert_exact(shared, stacked(by_hand(one, 2.0, E4M3) for one in x))


def stacked(members):
    return tuple(np.stack(part) for part in zip(*members, strict=True))


def auto_mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_each_device_casts_its_own(check_vma):
    x = matrix(F32, (256, 128))

    def own(x, scale):
        q, q_t, amax = cast(x, scale, E4M3)
        return q, q_t, amax[None, None]

    specs = P("a", "b"), P("b", "a"), P("a", "b")
    f = jax.jit(jax.shard_map(own, mesh=auto_mesh(), in_specs=(P("a", "b"), P()), out_specs=specs, check_vma=check_vma))
    blocks = np.abs(x).reshape(4, 64, 2, 64).max(axis=(1, 3))
    assert_exact(f(x, jnp.float32(2.0)), (*by_hand(x, 2.0, E4M3)[:2], blocks))
    text = f.trace(x, np.float32(2)).lower(lowering_platforms=("cuda",)).as_text()
    assert (KERNEL in text and "mosaic_gpu" in text) == HAS_KERNELS


def test_on_a_mesh_with_explicit_axes_xla_serves():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    split = jax.device_put(matrix(F32, (512, 128)), NamedSharding(mesh, P("a")))
    assert "mosaic" not in text_for(lambda x, s: cast(x, s, E4M3), split, np.float32(2))


def test_in_pmap():
    x = matrix(F32, (2, 64, 64))
    found = jax.pmap(lambda x: cast(x, 2.0, E4M3))(x)
    assert_exact(jax.tree.map(np.asarray, found), stacked(by_hand(one, 2.0, E4M3) for one in x))


# Bad input


@pytest.mark.parametrize(
    ("x", "scale", "dtype", "error", "message"),
    [
        (np.ones((2, 2), np.int32), 1.0, E4M3, TypeError, "float32, bfloat16 or float16; got int32. Cast it with"),
        (np.ones((2, 2, 2), F32), 1.0, E4M3, ValueError, r"\[M, N\]; got shape \(2, 2, 2\). Reshape it"),
        (np.ones((2, 2), F32), 1.0, np.float16, TypeError, "casts to jnp.float8_e4m3fn or jnp.float8_e5m2; got float"),
        (np.ones((2, 2), F32), np.ones(2, F32), E4M3, TypeError, r"one float32 scale, shape \(\); got float32\[2\]"),
    ],
    ids=["integers", "three axes", "no fp8", "two scales"],
)
def test_bad_arguments_are_named(x, scale, dtype, error, message):
    with pytest.raises(error, match=f"cast_transpose_amax .*{message}"):
        pallas_kernels.cast_transpose_amax(jnp.asarray(x), jnp.asarray(scale, F32), dtype)


@pytest.mark.parametrize("backend", ["mosaic", "interpret"])
def test_a_backend_that_cannot_serve_says_why(backend):
    reason = backends.why_no_kernels(needs_gpu=backend == "mosaic")
    with pytest.raises(ValueError, match=reason or "both sides must be multiples of 64, and not 0; got 100 x 64"):
        cast(np.ones((100, 64), F32), 1.0, E4M3, backend)
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'xla', 'mosaic', 'interpret'; got 'triton'"):
        cast(np.ones((64, 64), F32), 1.0, E4M3, "triton")


# The fp8 matmul

SCALES = fp8.Scales(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(1.0))
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def product(x, w, scales, numbers=ROWS_BY_COLUMNS):
    return fp8.dot_general(x, w, numbers, recipe=fp8.DelayedScaling(), scales=scales)


def product_and_gradients(x, w, scales, numbers=ROWS_BY_COLUMNS):
    y, backward = jax.vjp(lambda x, w, scales: product(x, w, scales, numbers), x, w, scales)
    return y, backward(y)


CASES = {
    "matrices": ((64, 128), (128, 192), ROWS_BY_COLUMNS),
    "heads out": ((2, 32, 64), (64, 4, 16), (((2,), (0,)), ((), ()))),
    "heads in": ((2, 32, 4, 16), (4, 16, 64), (((2, 3), (0, 1)), ((), ()))),
    "weight transposed": ((64, 128), (192, 128), (((1,), (1,)), ((), ()))),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("case", CASES)
def test_a_matmul_s_tensors_are_cast_by_the_kernel(case):
    """Each of the three once, where it is differentiated; without a gradient nothing is turned."""
    x_shape, w_shape, numbers = CASES[case]
    x, w = matrix(BF16, x_shape), matrix(F32, w_shape)
    trained = text_for(lambda x, w: product_and_gradients(x, w, SCALES, numbers), x, w)
    assert trained.count("@mosaic_gpu") == (3 if HAS_KERNELS else 0)
    assert "mosaic" not in text_for(lambda x, w: product(x, w, SCALES, numbers), x, w)


def test_odd_shapes_and_turned_operands_stay_with_xla():
    x, w = matrix(BF16, (48, 128)), matrix(F32, (128, 80))
    assert "mosaic" not in text_for(lambda x, w: product_and_gradients(x, w, SCALES), x, w)
    lhs_turned = (((0,), (0,)), ((), ()))
    x = matrix(BF16, (128, 64))
    assert "mosaic" not in text_for(lambda x, w: product_and_gradients(x, w, SCALES, lhs_turned), x, w)


@needs_kernels
def test_on_a_split_mesh_a_weight_keeps_one_form():
    """It would be gathered twice under FSDP."""
    x = jax.device_put(matrix(BF16, (512, 64)), NamedSharding(auto_mesh(), P("a")))
    w = jax.device_put(matrix(F32, (64, 64)), NamedSharding(auto_mesh(), P("a")))
    assert text_for(lambda x, w: product_and_gradients(x, w, SCALES), x, w).count("@CustomSPMDPart") == 2
