"""What a kernel computes from a matrix and vectors of its columns, casts and sums: on every backend, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_kernels_cast import BF16, E4M3, E5M2, EACH_BACKEND, F16, F32, HAS_KERNELS, by_hand, stacked

from helpers import assert_exact, assert_within_ulps
from pallas_kernels import passes
from platforms import text_for

pytestmark = pytest.mark.optimized  # a bound of one rounding
KERNEL = "computed_cast_transpose_amax"
EACH_SET = pytest.mark.parametrize("parts", [(), ("weight",), ("weight", "bias")], ids=["nothing", "weight", "both"])
ULPS = 8


def arguments(shape, source, parts, seed=0):
    """(x, vectors of its columns) at random."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(source)
    return x, {name: rng.normal(size=shape[1]).astype(F32) for name in parts}


def in_numpy(x, weight=None, bias=None):
    """The value in float32, each operation rounded."""
    y = x.astype(F32) if weight is None else x.astype(F32) * weight
    return y if bias is None else y + bias


def computed(parts, x, *vectors):
    """The same for a kernel, of arrays that broadcast; `parts` names the vectors."""
    given = dict(zip(parts, vectors, strict=True))
    y = x * given["weight"] if "weight" in given else x
    return y + given["bias"] if "bias" in given else y


def cast(x, scale, dtype, rounded=None, backend="auto", **vectors):
    x, parts = jnp.asarray(x), tuple(name for name in ("weight", "bias") if name in vectors)
    plan = passes.Pass(
        name=KERNEL,
        compute=functools.partial(computed, parts),
        inputs=1,
        dtype=jnp.dtype(dtype),
        rows=1,
        vectors=len(parts),
        rounded=jnp.dtype(rounded or x.dtype),
    )
    found = passes.run(plan, [x, *(vectors[name] for name in parts), jnp.float32(scale)], backend)
    return found.q, found.q_t, found.amax


def assert_rounds_to(got, value, dtype, *, of):
    """`got` is `value` in `dtype`, computed by another program: float32 may be off by some ulps `of` its operands.

    So the rounding may differ, too: by one unit of the format, in few places.
    """
    info, got = ml_dtypes.finfo(dtype), np.asarray(got)
    assert got.dtype == dtype
    want = value.astype(dtype).astype(F32)
    off, slack = np.abs(got.astype(F32) - want), ULPS * 2.0**-23 * of
    assert np.all(off <= np.maximum(float(info.eps) * np.abs(want), float(info.smallest_subnormal)) + slack)
    assert np.mean(off > slack) <= (0.02 if np.dtype(dtype).itemsize < 4 else 1)


@pytest.mark.thorough(2)
@EACH_BACKEND
@pytest.mark.parametrize(
    ("source", "parts"),
    [(F32, ("weight",)), (BF16, ("weight", "bias")), (F16, ("bias",))],
    ids=["float32", "bfloat16", "float16"],
)
def test_it_is_the_cast_of_the_value(backend, source, parts):
    """No program can fuse a difference and products, each is rounded; a bias may come in by a fused multiply-add."""
    x, vectors = arguments((64, 192), source, parts)
    q, q_t, amax = cast(x, scale=4.0, dtype=E4M3, rounded=BF16, backend=backend, **vectors)
    y = in_numpy(x, **vectors).astype(BF16)
    if "bias" not in parts:
        assert_exact((q, q_t, amax), by_hand(y, 4.0, E4M3))
    else:
        y = y.astype(F32)
        scaled, addends = np.clip(y * 4, -448, 448), 4 * (np.abs(y) + 2 * np.abs(vectors["bias"]))
        assert_rounds_to(q, scaled, E4M3, of=addends)
        assert_rounds_to(q_t, scaled.T, E4M3, of=addends.T)  # perhaps from a loop of its own
        np.testing.assert_allclose(amax, np.abs(y).max(), rtol=2**-7)  # a unit of bfloat16


@pytest.mark.thorough(1)
@EACH_BACKEND
def test_it_is_rounded_before_the_cast(backend):
    """1 + 2^-4 + 2^-10 is 1 + 2^-4 in bfloat16, a tie that e4m3 rounds down; without that rounding it goes up."""
    x = np.full((64, 64), 1 + 2**-4 + 2**-10, F32)
    for rounded, q, amax in ((BF16, 1.0, 1 + 2**-4), (F32, 1.125, 1 + 2**-4 + 2**-10)):
        found, _, largest = cast(x, 1.0, E4M3, rounded=rounded, backend=backend)
        assert_exact((found, largest), (np.full((64, 64), q, E4M3), F32(amax)))


@EACH_SET
def test_a_gpu_gets_the_kernel(parts):
    x, vectors = arguments((128, 64), BF16, parts)
    text = text_for(lambda x, vectors: cast(x, scale=1.0, dtype=E5M2, **vectors), x, vectors)
    assert (KERNEL in text and "mosaic_gpu" in text) == HAS_KERNELS


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spec", [P("a"), P(None, "b")], ids=str)
def test_under_jit_vectors_are_split_like_the_matrix(spec):
    """What `custom_partitioning` makes of it is compiled for eight H100s in benchmarks/h100/kernels.py."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    x, vectors = arguments((256, 128), F32, ("weight",))
    split = jax.device_put(x, NamedSharding(mesh, spec))
    f = jax.jit(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors))
    assert_exact(f(split, vectors), by_hand(in_numpy(x, **vectors), 2.0, E4M3))
    text = f.trace(split, vectors).lower(lowering_platforms=("cuda",)).as_text()
    assert ("CustomSPMDPartitioning" in text) == HAS_KERNELS


def test_under_vmap_each_member_is_cast():
    members = [arguments((64, 64), F32, ("weight",), seed) for seed in range(3)]
    x, vectors = jax.tree.map(lambda *parts: np.stack(parts), *members)
    found = jax.jit(jax.vmap(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors)))(x, vectors)
    assert_exact(found, stacked(by_hand(in_numpy(x, **vectors), 2.0, E4M3) for x, vectors in members))


def silu_gated(a, b):
    return a / (1 + jnp.exp(-a)) * b


@pytest.mark.thorough(1)
@EACH_BACKEND
def test_a_value_of_two_tensors(backend):
    a, b = (arguments((64, 128), BF16, (), seed)[0] for seed in (0, 1))
    plan = passes.Pass(KERNEL, silu_gated, 2, jnp.dtype(E4M3), rows=1, rounded=jnp.dtype(BF16))
    q, q_t, amax, _ = passes.run(plan, [jnp.asarray(a), jnp.asarray(b), jnp.float32(2.0)], backend)
    wide = a.astype(np.float64) / (1 + np.exp(-a.astype(np.float64))) * b.astype(np.float64)
    scaled = np.clip(2 * wide.astype(BF16).astype(F32), -448, 448)
    of = 2 * np.abs(wide) + 2**-7 * np.abs(scaled) / (ULPS * 2.0**-23)  # and a unit of bfloat16, where exp differs
    assert_rounds_to(q, scaled, E4M3, of=of)
    assert_rounds_to(q_t, scaled.T, E4M3, of=of.T)
    np.testing.assert_allclose(amax, np.abs(wide).max(), rtol=2**-7)


# The sums over rows that a cast takes along


def with_sums(x, backend="auto", *, compute=None, rows=1):
    plan = passes.Pass("sums", compute, 1, jnp.dtype(E5M2), rows, sums=True)
    return passes.run(plan, [x, jnp.float32(2.0)], backend)


def size_in_e5m2(q):
    """|q|; of subnormals, the size whose last place is as large as theirs."""
    return np.maximum(np.abs(np.float32(q)), np.float32(2.0**-14))


@pytest.mark.thorough(0)
@EACH_BACKEND
@pytest.mark.parametrize(
    ("dtype", "compute"), [(F32, None), (BF16, lambda x: x / (1 + jnp.exp(-x)))], ids=["plain", "silu of bfloat16"]
)
def test_sums(backend, dtype, compute):
    """Within float32's rounding of the exact sums; the other results are those of a pass without sums."""
    x = np.random.default_rng(0).normal(size=(192, 128)).astype(dtype)
    found = with_sums(jnp.asarray(x), backend, compute=compute)
    exact = np.float64(x) if compute is None else np.float64(x) / (1 + np.exp(-np.float64(x)))
    bound = 192 * np.finfo(F32).eps * np.abs(exact).sum(axis=0)
    assert np.all(np.abs(np.asarray(found.sums, np.float64) - exact.sum(axis=0)) <= bound)
    plan = passes.Pass("no sums", compute, 1, jnp.dtype(E5M2), rows=1)
    plain = passes.run(plan, [jnp.asarray(x), jnp.float32(2.0)], backend)
    if compute is None:
        assert_exact(found[:3], plain[:3])
    else:  # exp is computed by two programs
        assert_within_ulps(found.amax, plain.amax, 8)
        assert_within_ulps(found[:2], plain[:2], 1, of=jax.tree.map(size_in_e5m2, plain[:2]))
    assert plain.sums is None


def test_sums_over_several_axes():
    x = np.arange(2 * 32 * 64 * 2, dtype=F32).reshape(2, 32, 64, 2) % 7
    assert_exact(with_sums(jnp.asarray(x), rows=2).sums, x.sum(axis=(0, 1)))


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "a")], ids=str)
def test_sums_of_what_is_split_over_devices(spec):
    """Under jit the sums are those of the whole array, and a GPU gets the kernel with its rule of splitting."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    x = np.random.default_rng(0).integers(-8, 8, size=(512, 256)).astype(F32)
    split = jax.device_put(x, NamedSharding(mesh, spec))
    f = lambda x: with_sums(x).sums  # noqa: E731
    assert_exact(jax.jit(f)(split), x.sum(axis=0))
    assert ("CustomSPMDPartitioning" in text_for(f, split)) == HAS_KERNELS
    assert ("mosaic_gpu" in text_for(f, x)) == HAS_KERNELS
