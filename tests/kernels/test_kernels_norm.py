"""A norm of a matrix with vectors of its rows and columns, cast as it is made: on every backend, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_kernels_activation import assert_rounds_to
from test_kernels_cast import BF16, E4M3, E5M2, EACH_BACKEND, F16, F32, HAS_KERNELS, by_hand, text_for_cuda

from helpers import assert_exact
from pallas_kernels import passes

pytestmark = pytest.mark.optimized  # a bound of one rounding
KERNEL = "computed_cast_transpose_amax"
PARTS = {"rms": ("weight",), "rms without weight": (), "layer": ("mean", "weight", "bias"), "layer, bias": ("bias",)}
EACH_NORM = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)


def arguments(shape, source, parts, seed=0):
    """(x, statistics of its rows and params of its columns) at random."""
    rng = np.random.default_rng(seed)
    sides = {"mean": shape[0], "weight": shape[1], "bias": shape[1]}
    x = rng.normal(size=shape).astype(source)
    vectors = {name: rng.normal(size=sides[name]).astype(F32) for name in parts}
    return x, {"inv_std": np.exp(rng.normal(size=shape[0])).astype(F32), **vectors}


def in_numpy(x, inv_std, mean=None, weight=None, bias=None):
    """The norm in float32, each operation rounded."""
    y = x.astype(F32) if mean is None else x.astype(F32) - mean[:, None]
    y = y * (inv_std[:, None] if weight is None else inv_std[:, None] * weight)
    return y if bias is None else y + bias


def normalized(parts, x, *vectors):
    """The same for a kernel, of arrays that broadcast; `parts` names the vectors beside the first, `inv_std`."""
    inv_std, given = vectors[0], dict(zip(parts, vectors[1:], strict=True))
    y = x - given["mean"] if "mean" in given else x
    y = y * (inv_std * given["weight"] if "weight" in given else inv_std)
    return y + given["bias"] if "bias" in given else y


def cast(x, inv_std, scale, dtype, rounded=None, backend="auto", **vectors):
    x, parts = jnp.asarray(x), tuple(name for name in ("mean", "weight", "bias") if name in vectors)
    plan = passes.Pass(
        name=KERNEL,
        compute=functools.partial(normalized, parts),
        inputs=1,
        values=1,
        dtype=jnp.dtype(dtype),
        wide_dtype=None,
        rows=1,
        of_rows=1 + ("mean" in parts),
        of_columns=len(parts) - ("mean" in parts),
        rounded=jnp.dtype(rounded or x.dtype),
    )
    (found,) = passes.run(plan, [x, inv_std, *(vectors[name] for name in parts)], [jnp.float32(scale)], backend)
    return found.q, found.q_t, found.amax


@pytest.mark.thorough(5)
@EACH_BACKEND
@pytest.mark.parametrize("source", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
@EACH_NORM
def test_it_is_the_cast_of_the_norm(backend, source, parts):
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
        found, _, largest = cast(x, np.ones(64, F32), 1.0, E4M3, rounded=rounded, backend=backend)
        assert_exact((found, largest), (np.full((64, 64), q, E4M3), F32(amax)))


@pytest.mark.thorough(3)
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 128)], ids=str)
@EACH_NORM
def test_a_gpu_gets_the_kernel(shape, parts):
    x, vectors = arguments(shape, BF16, parts)
    text = text_for_cuda(lambda x, vectors: cast(x, scale=1.0, dtype=E5M2, **vectors), x, vectors)
    assert (KERNEL in text and "mosaic_gpu" in text) == HAS_KERNELS


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b")], ids=str)
def test_under_jit_vectors_are_split_like_the_matrix(spec):
    """What `custom_partitioning` makes of it is compiled for eight H100s in benchmarks/h100/kernels.py."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    x, vectors = arguments((256, 128), F32, PARTS["rms"])
    split = jax.device_put(x, NamedSharding(mesh, spec))
    f = jax.jit(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors))
    assert_exact(f(split, vectors), by_hand(in_numpy(x, **vectors), 2.0, E4M3))
    text = f.trace(split, vectors).lower(lowering_platforms=("cuda",)).as_text()
    assert ("CustomSPMDPartitioning" in text) == HAS_KERNELS


def test_under_vmap_each_member_is_cast():
    members = [arguments((64, 64), F32, PARTS["rms"], seed) for seed in range(3)]
    x, vectors = jax.tree.map(lambda *parts: np.stack(parts), *members)
    found = jax.vmap(lambda x, vectors: cast(x, scale=2.0, dtype=E4M3, **vectors))(x, vectors)
    expected = [by_hand(in_numpy(x, **vectors), 2.0, E4M3) for x, vectors in members]
    assert_exact(found, tuple(np.stack(part) for part in zip(*expected, strict=True)))
