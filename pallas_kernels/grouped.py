"""The matmuls of a mixture of experts in fp8, where each row is multiplied by its own expert and by no other.

Rows are sorted by expert, and `sizes` says how many each has. Rows behind the last group belong to nobody.

    by_expert     y[m] = a[m] b[e(m)]                      [M, K] by [G, K, N] -> [M, N]      rows of nobody are zero
                  y[m] = a[m] b[e(m)]^T     (transposed)   [M, K] by [G, N, K] -> [M, N]
    per_expert    y[e] = sum over its rows m of a[m]^T b[m]  [M, K] by [M, N] -> [G, K, N]    zero without rows

For an NVIDIA Hopper GPU, kernels multiply in fp8 (`grouped_tiles`). A TPU has an instruction, `lax.ragged_dot_general`.
Elsewhere, and under vmap, a loop multiplies tiles of rows by the expert of each tile. The latter two multiply in
bfloat16, which holds each fp8 number exactly, and sum in float32. XLA for a CPU or a GPU would compute
`lax.ragged_dot_general` as a product of every row with every expert, so it is used there for two experts at most.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels import backend as backends
from pallas_kernels.by_platform import by_platform

MULTIPLE = 64  # of the sides that the kernels take; zeros are added to others
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FEW = 2  # experts by which XLA may multiply all rows
_FIRST_WITHOUT_WGMMA = 10.0  # Blackwell: its tensor cores have other instructions


def by_expert(
    a: Float[Array, "M K"],
    b: Float[Array, "G K N"],
    sizes: Int[Array, "G"],
    factor: Float[Array, ""],
    dtype: Any,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> Float[Array, "M N"]:
    """Each row of `a` by its expert, times `factor`; see the module's docstring.

    Args:
      a: [M, K], `jnp.float8_e4m3fn` or `jnp.float8_e5m2`, rows sorted by expert.
      b: [G, K, N], or [G, N, K] if `transposed`; one of these two dtypes.
      sizes: integers, how many rows each expert has; the sum is at most M.
      factor: float32[], multiplies the float32 sums.
      dtype: of the result.
      transposed: whether `b` is summed over its last axis.
      backend: as in `pallas_kernels.backend`.

    Returns:
      [M, N]. Under plain jit with rows that are split over devices, the result is split like the rows.

    Raises:
      ValueError: a backend that cannot run, with the reason.

    Example:
      >>> rows, experts = jnp.ones((5, 2), jnp.float8_e4m3fn), jnp.ones((3, 2, 4), jnp.float8_e4m3fn)
      >>> by_expert(rows, experts, jnp.array([2, 0, 1]), jnp.float32(0.5), jnp.float32)[:, 0].tolist()
      [1.0, 1.0, 1.0, 0.0, 0.0]
    """
    f = _by_expert_transposed if transposed else _by_expert
    return _run(f, a, b, jnp.asarray(sizes, jnp.int32), factor, jnp.dtype(dtype), backend)


def per_expert(
    a: Float[Array, "M K"],
    b: Float[Array, "M N"],
    sizes: Int[Array, "G"],
    factor: Float[Array, ""],
    dtype: Any,
    *,
    backend: str = "auto",
) -> Float[Array, "G K N"]:
    """The sum of a^T b over the rows of each expert, times `factor`; arguments as those of `by_expert`.

    Rows of nobody may hold anything, also NaN.

    Example:
      >>> x, y = jnp.ones((5, 2), jnp.float8_e4m3fn), jnp.ones((5, 4), jnp.float8_e5m2)
      >>> per_expert(x, y, jnp.array([2, 0, 1]), jnp.float32(1), jnp.float32)[:, 0, 0].tolist()
      [2.0, 0.0, 1.0]
    """
    return _run(_per_expert, a, b, jnp.asarray(sizes, jnp.int32), factor, jnp.dtype(dtype), backend)


def why_not(*, needs_gpu: bool = False) -> str | None:
    """Why no kernel can run with this jax and these GPUs; None if one can. See `backend.why_no_kernels`."""
    reason, oldest = backends.why_no_kernels(needs_gpu=needs_gpu), backends.oldest_gpu()
    if reason is None and oldest is not None and oldest >= _FIRST_WITHOUT_WGMMA:
        return f"the kernels of experts are for compute capability 9 (Hopper); a GPU here has {oldest}"
    return reason


# --- by platform ------------------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    """One of the three products."""

    name: str
    kernel: Callable[..., Array]  # for a GPU
    loop: Callable[..., Array]  # for any device
    numbers: Any  # of the instruction of a TPU
    rule: str  # for Shardy
    sums_rows: bool = False

    def plainly(self, a: Array, b: Array, sizes: Array, factor: Array, dtype: Any) -> Array:
        """In bfloat16, which holds the operands exactly, on any device."""

        def by_instruction(_: Any, a: Array, b: Array, sizes: Array, factor: Array) -> Array:
            wide = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
            out = lax.ragged_dot_general(*wide, sizes, self.numbers, preferred_element_type=jnp.float32)
            return (out * factor).astype(dtype)

        if len(sizes) <= FEW or not (a.size and b.size):
            return by_instruction(None, a, b, sizes, factor)
        loop = functools.partial(self.loop, dtype=dtype)
        return by_platform(loop, a, b, sizes, factor, tpu=by_instruction)


def _run(product: _Product, a: Array, b: Array, sizes: Array, factor: Array, dtype: Any, backend: str) -> Array:
    with jax.named_scope(f"pallas_kernels.{product.name}"):
        return backends.run(
            backend,
            functools.partial(_on_mesh, product, dtype=dtype),
            functools.partial(product.plainly, dtype=dtype),
            *(a, b, sizes, factor),
            unmet=_unmet(a, b),
        )


def _unmet(a: Array, b: Array) -> str | None:
    if not (a.size and b.size):
        return "an operand is empty"
    if a.dtype not in DTYPES or b.dtype not in DTYPES:
        return f"operands must be float8_e4m3fn or float8_e5m2; got {a.dtype} and {b.dtype}"
    return why_not()


def _padded(x: Array, *axes: int) -> Array:
    """`x` with zeros up to a multiple of `MULTIPLE` along these axes."""
    widths = [(0, -x.shape[i] % MULTIPLE if i in axes else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _by_expert_tiles(
    a: Array, b: Array, sizes: Array, factor: Array, dtype: Any, *, transposed: bool, interpret: Any
) -> Array:
    from pallas_kernels import grouped_tiles

    b_t = b if transposed else jnp.swapaxes(b, 1, 2)
    m, n = a.shape[0], b_t.shape[1]
    out = grouped_tiles.by_expert(_padded(a, 0, 1), _padded(b_t, 1, 2), sizes, factor, dtype, interpret=interpret)
    return out[:m, :n]


def _per_expert_tiles(a: Array, b: Array, sizes: Array, factor: Array, dtype: Any, *, interpret: Any) -> Array:
    from pallas_kernels import grouped_tiles

    a_t, b_t = _padded(a.T, 0, 1), _padded(b.T, 0, 1)
    return grouped_tiles.per_expert(a_t, b_t, sizes, factor, dtype, interpret=interpret)[:, : a.shape[1], : b.shape[1]]


# --- rows that are split over devices ---------------------------------------------------------------------------------


def _on_mesh(
    product: _Product, a: Array, b: Array, sizes: Array, factor: Array, *, dtype: Any, interpret: Any
) -> Array:
    """The kernel, which under plain jit runs on the rows of each device; all else is gathered."""
    if interpret or jax.sharding.get_abstract_mesh().manual_axes:
        return product.kernel(a, b, sizes, factor, dtype, interpret=interpret)
    split = custom_partitioning(lambda *args: product.kernel(*args, dtype, interpret=False))
    split.def_partition(
        partition=functools.partial(_partition, product, dtype),
        infer_sharding_from_operands=lambda mesh, operands, results: _of_result(product, _rows(operands[0])),
        sharding_rule=product.rule,
        need_replication_factors=tuple(dict.fromkeys(x for x in product.rule if x in "gkn")),
    )
    return split(a, b, sizes, factor)


def _partition(product: _Product, dtype: Any, mesh: Any, operands: Any, results: Any) -> Any:
    """The result that `custom_partitioning` needs: (mesh, function for one device, shardings of results, operands)."""
    del mesh, results
    rows = _rows(operands[0])
    whole, split = (NamedSharding(rows.mesh, PartitionSpec(*spec)) for spec in ((), (*rows.spec, None)))
    names = rows.spec[0]

    def on_device(a: Array, b: Array, sizes: Array, factor: Array) -> Array:
        own = sizes_of_part(sizes, a.shape[0], lax.axis_index(names) if names else 0)
        if not (product.sums_rows and names):
            return product.kernel(a, b, own, factor, dtype, interpret=False)
        out = product.kernel(a, b, own, factor, jnp.dtype(jnp.float32), interpret=False)
        return lax.psum(out, names).astype(dtype)

    b = split if product.sums_rows else whole
    return rows.mesh, on_device, _of_result(product, rows), (split, b, whole, whole)


def sizes_of_part(sizes: Array, rows: int, part: Any) -> Array:
    """How many rows each expert has in the part with this number, if each part has `rows` of all rows."""
    ends = jnp.clip(jnp.cumsum(sizes) - part * rows, 0, rows)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def _rows(operand: Any) -> NamedSharding:
    """How the rows of an operand are split."""
    sharding = operand.sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*(*sharding.spec, None)[:1]))


def _of_result(product: _Product, rows: NamedSharding) -> NamedSharding:
    spec = PartitionSpec() if product.sums_rows else PartitionSpec(*rows.spec, None)
    return NamedSharding(rows.mesh, spec)


# --- the loop ---------------------------------------------------------------------------------------------------------


def _tile(rows: int, experts: int) -> int:
    """Rows of a tile: a quarter of what an expert has on average, from 16 to 128."""
    wanted = max(16, min(128, rows // (4 * experts)))
    return min(rows, 1 << (wanted.bit_length() - 1))


def _zeros(shape: tuple[int, ...], dtype: Any, *like: Array) -> Array:
    """Zeros that vary over the manual axes that these arrays vary over: the first carry of a loop."""
    return backends.as_varying(jnp.zeros(shape, dtype), frozenset().union(*(backends.varying_axes(x) for x in like)))


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), numbers, preferred_element_type=jnp.float32)


def _by_expert_loop(a: Array, b: Array, sizes: Array, factor: Array, dtype: Any, *, transposed: bool) -> Array:
    m, g = len(a), len(sizes)
    tile = _tile(m, g)
    ends, tiles = jnp.cumsum(sizes), -(sizes // -tile)
    ends_in_tiles = jnp.cumsum(tiles)

    def step(i: Array, out: Array) -> Array:
        e = jnp.sum(ends_in_tiles <= i)
        start = ends[e] - sizes[e] + (i - ends_in_tiles[e] + tiles[e]) * tile
        first = jnp.minimum(start, m - tile)  # the last tile may begin earlier, with rows that it leaves alone
        expert = lax.dynamic_index_in_dim(b, e, keepdims=False)
        product = _dot(lax.dynamic_slice_in_dim(a, first, tile), expert, (1, 1 if transposed else 0))
        row = first + jnp.arange(tile)[:, None]
        own = (row >= start) & (row < ends[e])
        product = jnp.where(own, (product * factor).astype(dtype), lax.dynamic_slice_in_dim(out, first, tile))
        return lax.dynamic_update_slice_in_dim(out, product, first, 0)

    zeros = _zeros((m, b.shape[1 if transposed else 2]), dtype, a, b, sizes, factor)
    return lax.fori_loop(0, ends_in_tiles[-1], step, zeros)


def _per_expert_loop(a: Array, b: Array, sizes: Array, factor: Array, dtype: Any) -> Array:
    m, g = len(a), len(sizes)
    tile = _tile(m, g)
    ends = jnp.cumsum(sizes)

    def of_expert(bounds: tuple[Array, Array]) -> Array:
        start, end = bounds

        def step(i: Array, total: Array) -> Array:
            begin = start + i * tile
            first = jnp.minimum(begin, m - tile)
            row = first + jnp.arange(tile)[:, None]
            own = (row >= begin) & (row < end)
            x, y = (lax.dynamic_slice_in_dim(x, first, tile) for x in (a, b))
            x, y = (jnp.where(own, x, jnp.zeros((), x.dtype)) for x in (x, y))
            return total + _dot(x, y, (0, 0))

        zeros = _zeros((a.shape[1], b.shape[1]), jnp.float32, a, b, sizes)
        total = lax.fori_loop(0, -((end - start) // -tile), step, zeros)
        return (total * factor).astype(dtype)

    return lax.map(of_expert, (ends - sizes, ends))


_NUMBERS = lax.RaggedDotDimensionNumbers
_by_expert, _by_expert_transposed = (
    _Product(
        "grouped_by_expert",
        functools.partial(_by_expert_tiles, transposed=transposed),
        functools.partial(_by_expert_loop, transposed=transposed),
        _NUMBERS((((1,), (2 if transposed else 1,)), ((), ())), (0,), (0,)),
        "m k, g n k, g, -> m n" if transposed else "m k, g k n, g, -> m n",
    )
    for transposed in (False, True)
)
_per_expert = _Product(
    "grouped_per_expert",
    _per_expert_tiles,
    _per_expert_loop,
    _NUMBERS((((0,), (0,)), ((), ())), (0,), ()),
    "m k, m n, g, -> g k n",
    sums_rows=True,
)
