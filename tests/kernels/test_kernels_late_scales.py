"""Casts with scales that are known late: any guess gives the bits of the scale alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import kernel_oracles as oracles
from helpers import assert_exact
from pallas_kernels import backend as backends, late_scales

HAS_KERNELS = backends.why_no_kernels() is None
MISSING = {"interpret": backends.why_no_kernels(), "mosaic": backends.why_no_kernels(needs_gpu=True)}
BACKENDS = ["xla"] + [
    pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=str(why))) for name, why in MISSING.items()
]
SHAPES = [(), (5,), (128 + 3,), (8192 + 128 + 1,), (0, 3), (2, 8, 64)]
SCALES = [2.0, 0.25, 64.0, 1.0, 8.0, 2.0**-3]


def arrays():
    rng = np.random.default_rng(0)
    made = [np.asarray(rng.normal(size=shape) * 100, np.float32) for shape in SHAPES]
    made[1][:] = [np.nan, np.inf, -np.inf, -0.0, 1e-40]
    return made


@functools.cache
def caster(backend):
    return jax.jit(lambda x, s, g: late_scales.cast(x, s, g, jnp.float8_e4m3fn, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", ["none", "one", "all"])
def test_guesses_change_no_bit(backend, wrong):
    guesses = [s * (3.0 if wrong == "all" or (wrong == "one" and i == 3) else 1.0) for i, s in enumerate(SCALES)]
    got = caster(backend)(arrays(), *([np.float32(s) for s in scales] for scales in (SCALES, guesses)))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = [
            oracles.saturated(x * np.float32(s), jnp.float8_e4m3fn) for x, s in zip(arrays(), SCALES, strict=True)
        ]
    for q, e in zip(got, expected, strict=True):
        assert_exact(np.asarray(q).view(np.uint8), e.view(np.uint8))


def test_without_elements_there_is_nothing_to_cast():
    (q,) = late_scales.cast([jnp.zeros((0, 2))], [jnp.float32(1)], [jnp.float32(2)], jnp.float8_e4m3fn)
    assert q.shape == (0, 2) and q.dtype == jnp.float8_e4m3fn


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def spread(f, n, **options):
    """`f` under shard_map, on the parts of arrays on n devices."""
    mesh = Mesh(np.array(jax.devices()[:n]), "data")
    return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), **options)


def test_what_is_cast_again_is_written_in_place_in_one_launch():
    """The operands that the launch writes are the first casts."""
    x = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8192, 3), (40,)]]
    s = [jax.ShapeDtypeStruct((), jnp.float32)] * 2
    cast = functools.partial(late_scales.cast, dtype=jnp.float8_e4m3fn)
    calls = [line for line in lowered(spread(cast, 1, check_vma=False), x, s, s).splitlines() if "@mosaic_gpu" in line]
    assert len(calls) == (1 if HAS_KERNELS else 0)
    for call in calls:
        operands, _ = (re.findall(r"tensor<([^>]*)>", side) for side in call[call.rindex("} : (") :].split("->"))
        written = [operands[int(i)] for i in re.findall(r"operand_index = (\d+)", call)]
        assert [t for t in written if "f8" in t] == ["24576xf8E4M3FN", "40xf8E4M3FN"]
        assert "cast_late" in call


@pytest.mark.parametrize("checked", [False, True])
def test_each_device_casts_its_part(checked):
    """In shard_map that tracks axes, what varies cannot be written in place: XLA casts once."""
    x = [jax.ShapeDtypeStruct((4096, 4), jnp.float32)]
    s = [jax.ShapeDtypeStruct((), jnp.float32)]
    cast = functools.partial(late_scales.cast, dtype=jnp.float8_e4m3fn)
    text = lowered(spread(cast, 8, check_vma=checked), x, s, s)
    assert ("@mosaic_gpu" in text) == (HAS_KERNELS and not checked)


def test_under_plain_jit_kernels_are_partitioned():
    mesh = Mesh(np.array(jax.devices()), "data")
    x, s = (
        [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))]
        for shape, spec in (((4096, 4), P("data")), ((), P()))
    )
    text = lowered(functools.partial(late_scales.cast, dtype=jnp.float8_e4m3fn), x, s, s)
    assert ("CustomSPMDPartitioning" in text) == HAS_KERNELS


def test_under_vmap_the_reference_serves():
    x, s = jnp.arange(6.0).reshape(2, 3), jnp.array([1.0, 2.0])
    cast = jax.vmap(lambda x, s, g: late_scales.cast([x], [s], [g], jnp.float8_e4m3fn)[0])
    assert_exact(cast(x, s, s[::-1]).astype(jnp.float32), x * s[:, None])
