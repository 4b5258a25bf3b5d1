"""The sums over rows that a cast takes along, on every backend, against NumPy; and that Mosaic can lower them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from helpers import assert_exact, assert_within_ulps
from pallas_kernels import backend as backends, passes

HAS_KERNELS = backends.why_no_kernels() is None
WHY_NO_MOSAIC = backends.why_no_kernels(needs_gpu=True)
BACKENDS = [
    "auto",
    pytest.param("interpret", marks=pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))),
    pytest.param("mosaic", marks=pytest.mark.skipif(WHY_NO_MOSAIC is not None, reason=str(WHY_NO_MOSAIC))),
]


def run(x, backend="auto", *, compute=None, rows=1):
    plan = passes.Pass("sums", compute, 1, jnp.dtype(jnp.float8_e5m2), rows, sums=True)
    return passes.run(plan, [x, jnp.float32(2.0)], backend)


def size_in_e5m2(q):
    """|q|; of subnormals, the size whose last place is as large as theirs."""
    return np.maximum(np.abs(np.float32(q)), np.float32(2.0**-14))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("compute", [None, lambda x: x / (1 + jnp.exp(-x))], ids=["plain", "silu"])
def test_sums(backend, dtype, compute):
    """Within float32's rounding of the exact sums; the other results are those of a pass without sums."""
    x = np.random.default_rng(0).normal(size=(192, 128)).astype(dtype)
    found = run(jnp.asarray(x), backend, compute=compute)
    exact = np.float64(x) if compute is None else np.float64(x) / (1 + np.exp(-np.float64(x)))
    bound = 192 * np.finfo(np.float32).eps * np.abs(exact).sum(axis=0)
    assert np.all(np.abs(np.asarray(found.sums, np.float64) - exact.sum(axis=0)) <= bound)
    plan = passes.Pass("no sums", compute, 1, jnp.dtype(jnp.float8_e5m2), rows=1)
    plain = passes.run(plan, [jnp.asarray(x), jnp.float32(2.0)], backend)
    if compute is None:
        assert_exact(found[:3], plain[:3])
    else:  # exp is computed by two programs
        assert_within_ulps(found.amax, plain.amax, 8)
        assert_within_ulps(found[:2], plain[:2], 1, of=jax.tree.map(size_in_e5m2, plain[:2]))
    assert plain.sums is None


def test_sums_over_several_axes():
    x = np.arange(2 * 32 * 64 * 2, dtype=np.float32).reshape(2, 32, 64, 2) % 7
    assert_exact(run(jnp.asarray(x), rows=2).sums, x.sum(axis=(0, 1)))


@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P(None, "a")], ids=str)
def test_split_over_devices(spec):
    """Under jit the sums are those of the whole array, and a GPU gets the kernel with its rule of splitting."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    x = np.random.default_rng(0).integers(-8, 8, size=(512, 256)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(mesh, spec))
    f = jax.jit(lambda x: run(x).sums)
    assert_exact(f(split), x.sum(axis=0))
    text = f.trace(split).lower(lowering_platforms=("cuda",)).as_text()
    assert ("CustomSPMDPartitioning" in text) == HAS_KERNELS


def test_a_gpu_gets_one_kernel():
    text = jax.jit(lambda x: run(x)).trace(jnp.ones((64, 128))).lower(lowering_platforms=("cuda",)).as_text()
    assert (text.count("mosaic_gpu") > 0) == HAS_KERNELS
