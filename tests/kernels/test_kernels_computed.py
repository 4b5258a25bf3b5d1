"""What a kernel computes from a matrix and vectors of its columns, and casts: on every backend, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_kernels_cast import BF16, E4M3, E5M2, EACH_BACKEND, F16, F32, HAS_KERNELS, by_hand, text_for_cuda

from helpers import assert_exact
from pallas_kernels import passes

pytestmark = pytest.mark.optimized  # a bound of one rounding
KERNEL = "computed_cast_transpose_amax"
PARTS = {"weight": ("weight",), "nothing": (), "both": ("weight", "bias"), "bias": ("bias",)}
EACH_SET = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
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


@pytest.mark.thorough(5)
@EACH_BACKEND
@pytest.mark.parametrize("source", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
@EACH_SET
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


@pytest.mark.thorough(3)
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128)], ids=str)
@EACH_SET
def test_a_gpu_gets_the_kernel(shape, parts):
    x, vectors = arguments(shape, BF16, parts)
    text = text_for_cuda(lambda x, vectors: cast(x, scale=1.0, dtype=E5M2, **vectors), x, vectors)
    assert (KERNEL in text and "mosaic_gpu" in text) == HAS_KERNELS


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b")], ids=str)
def test_under_jit_vectors_are_split_like_the_matrix(spec):
    """What `custom_partitioning` makes of it is compiled for eight H100s in benchmarks/h100/kernels.py."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    x, vectors = arguments((256, 128), F32, PARTS["weight"])
    split = jax.device_put(x, NamedSharding(mesh, spec))
    f = jax.jit(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors))
    assert_exact(f(split, vectors), by_hand(in_numpy(x, **vectors), 2.0, E4M3))
    text = f.trace(split, vectors).lower(lowering_platforms=("cuda",)).as_text()
    assert ("CustomSPMDPartitioning" in text) == HAS_KERNELS


def test_under_vmap_each_member_is_cast():
    members = [arguments((64, 64), F32, PARTS["weight"], seed) for seed in range(3)]
    x, vectors = jax.tree.map(lambda *parts: np.stack(parts), *members)
    found = jax.vmap(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors))(x, vectors)
    expected = [by_hand(in_numpy(x, **vectors), 2.0, E4M3) for x, vectors in members]
    assert_exact(found, tuple(np.stack(part) for part in zip(*expected, strict=True)))


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
