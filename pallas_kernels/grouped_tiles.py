"""The three products of a mixture of experts in fp8: each row is multiplied by its own expert only.

Rows are sorted by expert; expert e has the rows starts[e] to ends[e]. Both operands of each product are stored with the
summed axis last, as Hopper multiplies fp8 only in this form:

    by_expert    y[m]   = a[m] b[e(m)]^T                     a [M, K], b [G, N, K] -> [M, N]
    per_expert   y[e]   = sum over its rows m of a^T[m]^T b^T[m]    a^T [K, M], b^T [N, M] -> [G, K, N]

`by_expert`: a CTA owns a tile of the result, of 64 rows. It goes through the experts that have rows in its tile,
multiplies the parts of 16 rows that hold rows of each, and keeps the rows that are this expert's. So every tile is
written once, by one copy, and rows of nobody are zero. An instruction multiplies 64 rows of its first operand by 8 to
256 of its second: so the weights are the first, and a tile is transposed on the chip before it is written. The tiles of
all experts are M / 64 + G - 1 at most, the parts M / 16 + G - 1.
`per_expert`: a CTA owns a tile of one expert's result, and goes through the blocks of rows that hold its rows. In the
first and the last block it sets the rows of other experts to zero, in both operands: 0 * NaN would be NaN.

Sums: Hopper's tensor cores sum fp8 products with about 14 bits. So each block of at most 128 products is summed there,
and the blocks in float32.

What Mosaic GPU requires (the interpreter does not check it): sides that are multiples of 64; and no arithmetic on fp8,
so that rows are set to zero in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

MULTIPLE = 64
PART = 16  # rows of a tile that `by_expert` multiplies or leaves out; a program for each run of parts is compiled
STAGES = 3  # blocks of an operand that are on the chip at once: with more, one CTA would fill it


def by_expert(
    a: Float[Array, "M K"],
    b: Float[Array, "G N K"],
    sizes: Int[Array, "G"],
    factor: Float[Array, ""],
    dtype: Any,
    *,
    interpret: Any = False,
) -> Float[Array, "M N"]:
    """`a` by the expert of each row, times `factor`, in `dtype`. See the docstring of the module."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (m, k), n = a.shape, b.shape[1]
    tm, tn, tk = MULTIPLE, _block(n), _block(k)
    columns = n // tn
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    tiles = jnp.arange(m // tm, dtype=jnp.int32) * tm
    first = jnp.sum(ends[None] <= tiles[:, None], axis=1, dtype=jnp.int32)
    last = jnp.sum(ends[None] < tiles[:, None] + tm, axis=1, dtype=jnp.int32)
    experts = jnp.minimum(last + 1, len(sizes)) - first  # of each tile, perhaps with some that have no rows
    runs = [(at * PART, (to + 1) * PART) for to in range(tm // PART) for at in range(to + 1)]  # of parts of a tile

    def body(
        a: Any, b: Any, starts: Any, ends: Any, first: Any, experts: Any, factor: Any, out: Any, tile: Any
    ) -> None:
        number = lax.axis_index("tile")
        i, j = lax.div(number, columns), lax.rem(number, columns)
        row = plgpu.broadcasted_iota(jnp.int32, (tn, tm), 1, layout=plgpu.Layout.WGMMA) + i * tm

        def expert(turn: Any, total: Any) -> Any:
            e = first[i] + turn
            start, end = starts[e], ends[e]
            at = lax.div(jnp.maximum(start - i * tm, 0), jnp.int32(PART))  # its first and its last part of the tile
            to = lax.div(jnp.minimum(end - i * tm, tm) - 1, jnp.int32(PART))

            def step(_: Any, b: Any, a: Any, own: Array) -> Array:
                def add(at: int, to: int, own: Array) -> Array:
                    more = own[:, at:to] + _product(b, a.at[pl.ds(at, to - at)])
                    before, behind = [own[:, :at]] if at else [], [own[:, to:]] if to < tm else []
                    return jnp.concatenate([*before, more, *behind], axis=1)

                return lax.switch(lax.div(to * (to + 1), 2) + at, [functools.partial(add, *run) for run in runs], own)

            steps = _steps(end > start, k // tk)
            own = _summed((b.at[e], a), (tn, tm, tk), lambda step: (j, step), lambda step: (i, step), steps, step)
            return jnp.where((row >= start) & (row < end), own, total)

        total = lax.fori_loop(0, experts[i], expert, _zeros((tn, tm))) * factor[0]
        transposed = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        _store(transposed, tile.T, tile, out.at[pl.ds(i * tm, tm), pl.ds(j * tn, tn)])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=(_shared((tm, tn), dtype),),
        grid=(m // tm * columns,),
        grid_names=("tile",),
        kernel_name="grouped_by_expert",
        interpret=interpret,
    )
    return kernel(a, b, ends - sizes, ends, first, experts, factor.reshape(1))


def per_expert(
    a_t: Float[Array, "K M"],
    b_t: Float[Array, "N M"],
    sizes: Int[Array, "G"],
    factor: Float[Array, ""],
    dtype: Any,
    *,
    interpret: Any = False,
) -> Float[Array, "G K N"]:
    """The sum over each expert's rows of a^T b, times `factor`, in `dtype`. See the docstring of the module."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (k, m), n, g = a_t.shape, b_t.shape[0], len(sizes)
    tk, tn, tm = MULTIPLE, _block(n), block_of_rows(m, g)
    columns = n // tn
    ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def body(a: Any, b: Any, starts: Any, ends: Any, factor: Any, out: Any, tile: Any) -> None:
        number = lax.axis_index("tile")
        e, i, j = lax.axis_index("expert"), lax.div(number, columns), lax.rem(number, columns)
        start, end = starts[e], ends[e]
        first = lax.div(start, jnp.int32(tm))
        last = lax.div(end - 1, jnp.int32(tm))

        def step(index: Any, a: Any, b: Any, total: Array) -> Array:
            block = (first + index[0]) * tm

            @pl.when((block < start) | (block + tm > end))
            def _() -> None:
                for ref in (a, b):
                    layout = plgpu.Layout.WGMMA_8BIT
                    x = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
                    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 1, layout=layout) + block
                    ref[...] = jnp.where((row >= start) & (row < end), x, 0.0).astype(ref.dtype)
                plgpu.commit_smem()

            return total + _product(a, b)

        steps = _steps(end > start, last + 1 - first)
        a_block, b_block = lambda step: (i, first + step), lambda step: (j, first + step)
        total = _summed((a, b), (tk, tn, tm), a_block, b_block, steps, step) * factor[0]
        _store(total.astype(dtype), tile, tile, out.at[e, pl.ds(i * tk, tk), pl.ds(j * tn, tn)])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((g, k, n), dtype),
        scratch_types=(_shared((tk, tn), dtype),),
        grid=(g, k // tk * columns),
        grid_names=("expert", "tile"),
        kernel_name="grouped_per_expert",
        interpret=interpret,
    )
    return kernel(a_t, b_t, ends - sizes, ends, factor.reshape(1))


def block_of_rows(rows: int, experts: int) -> int:
    """How many rows `per_expert` sums at once; fewer for small experts, as all blocks with a row of theirs are read."""
    return _block(rows) if rows >= 512 * experts else 32  # the fewest: one instruction sums 32


def _block(size: int) -> int:
    return 128 if size % 128 == 0 else 64


def _steps(some: Any, n: Any) -> Any:
    return jnp.where(some, n, 0).astype(jnp.int32)


def _zeros(shape: tuple[int, int]) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _product(a: Any, b: Any) -> Array:
    """a b^T of blocks on the chip."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def of_block(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b.T)
        return sums[...]

    return pl.run_scoped(of_block, plgpu.ACC((a.shape[0], b.shape[0])))  # pyright: ignore


def _summed(
    operands: tuple[Any, Any], sides: tuple[int, int, int], a_block: Any, b_block: Any, steps: Any, step: Any
) -> Array:
    """A tile of the product: what `step` adds up in float32 over `steps` blocks of the summed axis."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, columns, summed = sides
    spec = functools.partial(plgpu.BlockSpec, transforms=_transforms(summed, 1))
    return plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=[spec((rows, summed), a_block), spec((columns, summed), b_block)],
        max_concurrent_steps=STAGES,
        init_carry=_zeros((rows, columns)),
    )(*operands)


def _store(x: Array, view: Any, tile: Any, out: Any) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    view[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def _transforms(width: int, size: int) -> tuple[Any, ...]:
    """Shared memory as the tensor cores read it: rows of at most 128 bytes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    swizzle = min(128, width * size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore


def _shared(shape: tuple[int, int], dtype: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[1], jnp.dtype(dtype).itemsize))
