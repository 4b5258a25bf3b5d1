"""Both ways to cast a tensor that GEMMs read in both forms give the same bytes; a table chooses between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from helpers import assert_close, assert_exact
from jaxmp._src.base import hardware
from jaxmp._src.fp8 import cast_ways
from pallas_kernels import backend as backends

needs_kernels = pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
KERNEL = "cast_transpose_amax"


def operands():
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((64, 64), (64, 128), (64, 128)))
    return 4 * x, w, g, jaxmp.fp8.Scales(*map(np.float32, (6.0, 6.0, 8.0))), np.ones(128, np.float32)


def both_passes(x, w, g, scales, bias):
    """(what the casts give: all tensors in fp8 that the backward pass reads, amaxes; what the GEMMs give)."""

    def dot(x, w, scales, bias):
        recipe = jaxmp.fp8.DelayedScaling()
        return jaxmp.fp8.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, scales=scales, bias=bias)

    y, pullback = jax.vjp(dot, x, w, scales, bias)
    narrow = [leaf for leaf in jax.tree.leaves(pullback) if leaf.dtype.itemsize == 1]
    dx, dw, amaxes, d_bias = pullback(g)
    return (narrow, amaxes), (y, dx, dw, d_bias)


@pytest.fixture
def in_way(monkeypatch):
    """Runs a function in a way, on the GPU that this machine has, or without one."""

    def run(way, f):
        monkeypatch.setitem(cast_ways.BY_KIND, hardware.gpu_kind(), way)
        jax.clear_caches()  # the table does not change in a process, so no trace depends on it
        return f()

    yield run
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.thorough(0)
@needs_kernels
def test_both_ways_give_the_same_bytes_and_amaxes(in_way, interpreted):
    args = operands()
    interpreted()

    def run():
        return str(jax.make_jaxpr(both_passes)(*args)), jax.jit(lambda *args: both_passes(*args))(*args)

    by_way = {way: in_way(way, run) for way in cast_ways.WAYS}
    for way, (text, _) in by_way.items():
        assert (KERNEL in text) == (way == cast_ways.ONE_PASS)
    (casts, products), (other_casts, other_products) = (results for _, results in by_way.values())
    assert len(casts[0]) == 2  # x transposed, and w
    assert_exact(casts, other_casts)
    assert_close(products, other_products, rtol=1e-2, atol=1e-2)  # sums in another order, rounded to the dtype


@pytest.mark.thorough(0)
@needs_kernels
def test_the_table_chooses_in_programs_for_a_gpu(in_way):
    for way in cast_ways.WAYS:
        lowered = in_way(way, lambda: jax.jit(both_passes).trace(*operands()).lower(lowering_platforms=("cuda",)))
        assert (KERNEL in lowered.as_text()) == (way == cast_ways.ONE_PASS)


def test_what_is_not_in_the_table_is_one_pass(monkeypatch):
    assert set(cast_ways.BY_KIND.values()) <= set(cast_ways.WAYS)
    monkeypatch.setattr(hardware, "gpu_kind", lambda: "a GPU of next year")
    assert cast_ways.chosen() == cast_ways.ONE_PASS
    monkeypatch.setitem(cast_ways.BY_KIND, "a GPU of next year", cast_ways.TWO_PASSES)
    assert cast_ways.chosen() == cast_ways.TWO_PASSES
