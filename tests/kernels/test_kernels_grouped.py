"""The matmuls of experts against NumPy, expert by expert, on whole numbers: all sums are exact.

An interpreted kernel checks values, not layouts: so the same programs are lowered for a GPU as well.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from helpers import assert_exact
from kernel_oracles import expert_by_expert
from pallas_kernels import backend as backends, grouped, grouped_tiles

E4M3, E5M2, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, np.float32
WITHOUT_KERNELS = backends.why_no_kernels()
needs_kernels = pytest.mark.skipif(WITHOUT_KERNELS is not None, reason=str(WITHOUT_KERNELS))
BACKENDS = ["xla", pytest.param("interpret", marks=needs_kernels)]
BACKENDS += [] if grouped.why_not(needs_gpu=True) else ["mosaic"]
CASES = {  # M, K, N, sizes
    "within a tile": (100, 20, 30, (30, 0, 50, 8)),
    "many in a tile": (192, 24, 70, (1, 0, 1, 3, 60, 0, 0, 100, 20)),
    "two experts": (40, 16, 8, (7, 30)),
    "no rows": (16, 8, 8, (0, 0, 0)),
    "ends of groups": (470, 250, 40, (15, 0, 1, 17, 7, 16, 63, 64, 65, 200)),
    "blocks of 128 rows": (1100, 24, 70, (390, 610)),
}


def whole_numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(F32)


def operands(case):
    """x and its gradient's kind with NaN in the rows of nobody, experts, sizes."""
    m, k, n, sizes = CASES[case]
    x, w, grad = whole_numbers(0, m, k), whole_numbers(1, len(sizes), k, n), whole_numbers(2, m, n)
    x[sum(sizes) :] = grad[sum(sizes) :] = np.nan
    return jnp.asarray(x, E4M3), jnp.asarray(w, E4M3), jnp.asarray(grad, E5M2), jnp.asarray(sizes, jnp.int32)


@functools.partial(jax.jit, static_argnames="backend")
def products(x, w, grad, sizes, backend="auto"):
    half = jnp.float32(0.5)
    return (
        grouped.by_expert(x, w, sizes, half, jnp.float32, backend=backend),
        grouped.by_expert(grad, w, sizes, half, jnp.float32, transposed=True, backend=backend),
        grouped.per_expert(x, grad, sizes, half, jnp.float32, backend=backend),
    )


def halves(args):
    return [x / 2 for x in expert_by_expert(*args)]


def assert_equal(actual, expected):
    assert_exact([np.asarray(x) + 0 for x in actual], [x + 0 for x in expected])  # -0 + 0 is 0


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "case", [case if case == "two experts" else pytest.param(case, marks=pytest.mark.thorough(0)) for case in CASES]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_meets_its_own_expert(backend, case):
    args = operands(case)
    assert_equal(products(*args, backend=backend), halves(args))


@pytest.mark.thorough(0)
@needs_kernels
def test_parts_of_tiles_without_rows_of_an_expert_are_not_multiplied(monkeypatch):
    x, w, _, sizes = operands("many in a tile")
    product, rows = grouped_tiles._product, []

    def counted(a, b):
        jax.debug.callback(lambda: rows.append(b.shape[0]))
        return product(a, b)

    monkeypatch.setattr(grouped_tiles, "_product", counted)
    grouped.by_expert(x, w, sizes, jnp.float32(1), F32, backend="interpret")
    jax.effects_barrier()
    ends = np.cumsum(sizes)
    parts = sum(-(end // -16) - (end - size) // 16 for end, size in zip(ends, np.asarray(sizes), strict=True) if size)
    assert sum(rows) == parts * 16


def test_the_result_is_rounded_once():
    x, w, grad, sizes = operands("two experts")
    y, _, d_w = expert_by_expert(x, w, grad, sizes)
    third, dtype = np.float32(1) / 3, jnp.bfloat16
    run = lambda: (grouped.by_expert(x, w, sizes, third, dtype), grouped.per_expert(x, grad, sizes, third, dtype))  # noqa: E731
    assert_exact(jax.jit(run)(), ((y * third).astype(dtype), (d_w * third).astype(dtype)))


@pytest.mark.thorough(0)
def test_under_vmap():
    """Of the rows and sizes, and of the experts."""
    x, w, grad, sizes = map(np.asarray, operands("within a tile"))
    x, grad = (np.nan_to_num(t.astype(F32)).astype(t.dtype) for t in (x, grad))
    sizes, w = np.stack([sizes, sizes[::-1]]), np.stack([w, -w])
    found = jax.jit(jax.vmap(products, (None, 0, None, 0)))(x, w, grad, sizes)
    for i in range(2):
        assert_equal([f[i] for f in found], halves((x, w[i], grad, sizes[i])))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_has_its_own_rows_and_experts(check_vma):
    args = operands("within a tile")
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    run = jax.shard_map(products, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    twice = [np.concatenate([t, t]) for t in map(np.asarray, args)]
    assert_equal(jax.jit(run)(*twice), [np.concatenate([t, t]) for t in halves(args)])


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axes", [P("data"), P(("data", "model")), P()], ids=str)
def test_rows_that_are_split_stay_where_they_are(axes):
    """The rule by which XLA splits a kernel, with the loop in its place: a device gets its own rows of each expert."""
    args = operands("many in a tile")
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    parts = []

    def whole(product, a, *more):
        def kernel(a, b, sizes, factor, dtype, interpret):
            parts.append(a.shape[0])
            return product.loop(a, b, sizes, factor, dtype)

        return grouped._on_mesh(product._replace(kernel=kernel), a, *more, dtype=F32, interpret=False)

    @jax.jit
    def all_of(x, w, grad, sizes):
        x, grad = (lax.with_sharding_constraint(t, NamedSharding(mesh, axes)) for t in (x, grad))
        factor = jnp.float32(0.5)
        return (
            whole(grouped._by_expert, x, w, sizes, factor),
            whole(grouped._by_expert_transposed, grad, w, sizes, factor),
            whole(grouped._per_expert, x, grad, sizes, factor),
        )

    placed = jax.device_put(args, NamedSharding(mesh, P()))
    compiled = all_of.lower(*placed).compile()
    split = 192 // {P(): 1, P("data"): 2}.get(axes, 4)
    assert parts[-3:] == [split] * 3
    assert_equal(compiled(*placed), halves(args))
    assert not re.search(r"f8\w+\[192,\d+\]\S* all-gather", compiled.as_text())


@needs_kernels
def test_the_program_for_gpus_has_a_kernel_for_each_product():
    given = operands("many in a tile")
    one = Mesh(np.array(jax.devices()[:1]), "data")
    f = jax.shard_map(products, mesh=one, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert [re.findall(r"tensor<(\d+x[\dx]+)xf8E\dM\d\w*>", line) for line in found] == [
        ["192x64", "9x128x64"],
        ["192x128", "9x64x128"],
        ["64x192", "128x192"],
    ]  # each summed over its last axis; their formats: tests/fp8/test_ragged_matmul.py
    assert "ragged_dot" not in text


def test_no_program_multiplies_all_rows_by_all_experts():
    """For GPUs without the kernels, and for CPUs: a loop over tiles; XLA has the product of up to two experts."""
    given = operands("many in a tile")
    for platform in ("cpu", "cuda"):
        traced = jax.jit(functools.partial(products.__wrapped__, backend="xla")).trace(*given)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "ragged_dot" not in text and "stablehlo.while" in text
        sides = [int(n) for n in re.findall(r"dot_general.*: \(tensor<(\d+)x", text)]
        assert len(sides) == 3 and max(sides) <= 64
    traced = jax.jit(functools.partial(products.__wrapped__, backend="xla")).trace(*given)
    assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_what_a_kernel_does_not_take():
    x, w, _, sizes = operands("within a tile")
    with pytest.raises(ValueError, match=r"cannot run here: .*(jax >= 0.11.2|no NVIDIA GPU)"):
        grouped.by_expert(x, w, sizes, jnp.float32(1), F32, backend="mosaic")
    if WITHOUT_KERNELS is None:
        with pytest.raises(ValueError, match="operands must be float8_e4m3fn or float8_e5m2; got float32 and float8"):
            grouped.by_expert(x.astype(F32), w, sizes, jnp.float32(1), F32, backend="interpret")


def test_hopper_alone_has_the_kernels(monkeypatch):
    monkeypatch.setattr(backends, "oldest_gpu", lambda: 10.0)
    if WITHOUT_KERNELS is None:
        assert grouped.why_not() == "the kernels of experts are for compute capability 9 (Hopper); a GPU here has 10.0"
