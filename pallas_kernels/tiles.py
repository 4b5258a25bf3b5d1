"""One pass over a matrix in tiles: computes values, casts them to fp8 and transposes the cast, and takes the amax.

    for each tile, one CTA:     v = compute(tiles of the inputs)         float32, in registers; compute may
                                                                         also take a number for each row or column
                                q tile       <- fp8(clip(v * scale))
                                q.T tile     <- the same, transposed in registers (`turned`)
                                partial amax <- max |v|                  one number per CTA; XLA takes their maximum
                                partial sums <- sums of v over rows      one row per CTA, if wanted; XLA adds them

On Hopper, cuBLASLt multiplies fp8 operands only along rows that are contiguous in memory. One product of a layer sums
over the rows of a tensor and another over its columns, so each tensor is needed in both layouts. XLA casts in one pass
and transposes in a second one, and reads once more for the amax if a cast feeds a transpose.

What Mosaic GPU requires (found by experiment; the interpreter does not check it):

- Register layouts are chosen, not inferred. Tiles are read as fragments of WGMMA for 8 bits, in which a thread has four
  neighbours and stores 16 bytes of fp8 at once (stmatrix). The transpose has a layout of its own, in which a thread
  stores four bytes at once. For the sums, tiles are read by columns, as WGMMA_TRANSPOSED; one shuffle converts it to
  WGMMA. All of them are in swizzled shared memory.
- Only float32 can be converted to fp8. There is no atomic MAX of float32, so each CTA writes a partial amax; this is
  also deterministic.
- Both sides are multiples of 64, for the layout; this is also enough for the swizzle and TMA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import reference, turned

MULTIPLE = 64
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)

Compute = Callable[..., Any]  # float32 tiles -> a float32 tile, or a tuple of them


class Output(NamedTuple):
    """The arrays that the pass writes for one value of `compute`."""

    q: Array  # fp8 [M, N]
    q_t: Array  # fp8 [N, M]
    amax: Float[Array, ""]  # of the value before the scale
    wide: Array | None  # the value [M, N] in `wide_dtype`
    sums: Float[Array, " N"] | None = None  # of the value over its rows


def why_not(shape: Sequence[int], rows: int = 1) -> str | None:
    """Why the kernel does not support a tensor of this shape, read as a matrix; None if it does."""
    m, n = math.prod(shape[:rows]), math.prod(shape[rows:])
    if m % MULTIPLE or n % MULTIPLE or not m * n:
        return f"both sides must be multiples of {MULTIPLE}, and not 0; got {m} x {n}"
    return None


def run_tiles(
    compute: Compute | None,
    inputs: Sequence[Array],
    scales: Sequence[Array],
    dtype: Any,
    *,
    name: str,
    of_rows: Sequence[Array] = (),
    of_columns: Sequence[Array] = (),
    rounded: Any = jnp.float32,
    wide_dtype: Any = None,
    sums: bool = False,
    interpret: Any = False,
) -> list[Output]:
    """Runs the pass of the module's docstring.

    Args:
      compute: makes the values from float32 tiles of the inputs, and of the vectors; None: the value is the one input.
      inputs: [M, N] each, in one of `DTYPES`; M and N multiples of 64.
      scales: float32[] each, one for each value.
      dtype: one of `FP8_DTYPES`.
      name: of the kernel, for profiles.
      of_rows, of_columns: float32 [M] and [N] each, more arguments of `compute`, which gets them as tiles.
      rounded: computed values are rounded to this dtype first.
      wide_dtype: if given, the unscaled values are also written in this dtype.
      sums: whether the unscaled values are also summed over their rows.
      interpret: the argument of `plgpu.kernel`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    m, n = inputs[0].shape
    tm, tn = tile = _tile(m, n, plain=compute is None or bool(of_rows))
    columns = n // tn
    optional = _Optional(rounded if sums and compute is not None else None, wide_dtype, sums)

    def body(ins: Any, rows: Any, cols: Any, factors: Any, outs: Any, tiles: Any, barriers: Any, scratch: Any) -> None:
        number = lax.axis_index("tile")
        i, j = lax.div(number, columns), lax.rem(number, columns)
        row, column = pl.ds(i * tm, tm), pl.ds(j * tn, tn)
        for ref, at, barrier in zip(ins, tiles, barriers, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[row, column], at, barrier)
        factors = [ref[0] for ref in factors]
        vectors = [_load_vector(ref.at[row], 0, tile) for ref in rows]
        vectors += [_load_vector(ref.at[column], 1, tile) for ref in cols]
        for barrier in barriers:
            plgpu.barrier_wait(barrier)
        values = [_load(ref) for ref in tiles]
        if compute is not None:
            made = compute(*values, *vectors)
            values = list(made) if isinstance(made, tuple | list) else [made]
        copies = []
        for value, factor, out, at in zip(values, factors, outs, scratch, strict=True):
            if compute is not None:
                value = value.astype(rounded).astype(jnp.float32)
            q = reference.saturating_cast(value * factor, dtype)
            at.q[...] = q
            at.q_t[...] = turned.turned(q, interpreted=bool(interpret))
            magnitude = jnp.abs(value)
            magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
            out.amax[number] = jnp.max(jnp.max(magnitude, axis=1))
            if wide_dtype is not None:
                at.wide[...] = value.astype(wide_dtype)
                copies.append((at.wide, out.wide.at[row, column]))
            if sums:
                if compute is not None:
                    at.value[...] = value.astype(rounded)
                    plgpu.commit_smem()  # a barrier: threads read values that other threads wrote
                by_columns = _load_transposed(tiles[0] if compute is None else at.value)
                at.sums[...] = jnp.sum(by_columns, axis=1)
                copies.append((at.sums, out.sums.at[i, column]))
            copies += [(at.q, out.q.at[row, column]), (at.q_t, out.q_t.at[column, row])]
        plgpu.commit_smem()
        for at, ref in copies:
            plgpu.copy_smem_to_gmem(at, ref)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=([optional.in_memory((m, n), tile, dtype)] * len(scales),),
        scratch_types=(
            [_shared(tile, x.dtype) for x in inputs],
            [plgpu.Barrier() for _ in inputs],
            [optional.on_chip(tile, dtype)] * len(scales),
        ),
        grid=(m // tm * columns,),
        grid_names=("tile",),
        kernel_name=name,
        interpret=interpret,
    )
    (found,) = kernel(inputs, of_rows, of_columns, [scale.reshape(1) for scale in scales])
    return [Output(v.q, v.q_t, jnp.max(v.amax), v.wide, jnp.sum(v.sums, axis=0) if sums else None) for v in found]


def _tile(m: int, n: int, *, plain: bool) -> tuple[int, int]:
    """Sides of a tile: rows of 128 bytes of fp8 if they fit; smaller if `compute` needs many registers."""
    if plain and n % 128 == 0:
        return 64, 128
    return (128, 64) if plain and m % 128 == 0 else (64, 64)


class _PerValue(NamedTuple):
    """What the kernel writes for one value: the arrays, or a tile of them on the chip."""

    q: Any
    q_t: Any
    amax: Any = None  # partial ones, in memory only
    wide: Any = None
    sums: Any = None  # partial ones
    value: Any = None  # rounded, on the chip only, to be summed by columns


class _Optional(NamedTuple):
    """What is written beside the casts: values to sum, rounded so, on the chip; values in a wide dtype; sums."""

    rounded: Any
    wide_dtype: Any
    sums: bool

    def in_memory(self, shape: tuple[int, int], tile: tuple[int, int], dtype: Any) -> _PerValue:
        """The arrays for a value of this shape."""
        (m, n), array = shape, jax.ShapeDtypeStruct
        return _PerValue(
            q=array((m, n), dtype),
            q_t=array((n, m), dtype),
            amax=array((m // tile[0] * (n // tile[1]),), jnp.float32),
            wide=None if self.wide_dtype is None else array((m, n), self.wide_dtype),
            sums=array((m // tile[0], n), jnp.float32) if self.sums else None,
        )

    def on_chip(self, tile: tuple[int, int], dtype: Any) -> _PerValue:
        """The tiles."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return _PerValue(
            q=_shared(tile, dtype),
            q_t=_shared((tile[1], tile[0]), dtype),
            wide=None if self.wide_dtype is None else _shared(tile, self.wide_dtype),
            sums=plgpu.SMEM(tile[1:], jnp.float32) if self.sums else None,
            value=None if self.rounded is None else _shared(tile, self.rounded),
        )


def _shared(shape: tuple[int, int], dtype: Any) -> Any:
    """Shared memory without bank conflicts for rows and for columns of a fragment."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = jnp.dtype(dtype).itemsize
    width = min(128, shape[1] * size)
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, width // size)), swizzle(width)))


def _load(tile: Any) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(tile, layout=plgpu.Layout.WGMMA_8BIT, optimized=False).astype(jnp.float32)


def _load_transposed(tile: Any) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x = plgpu.load(tile.T, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA).astype(jnp.float32)


def _load_vector(ref: Any, axis: int, tile: tuple[int, int]) -> Array:
    """A vector along `axis` of a tile, as a tile."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA_8BIT
    vector = plgpu.load(ref, layout=layout.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, tile, (axis,)), layout)
