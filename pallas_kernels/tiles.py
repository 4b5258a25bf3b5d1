"""One pass over a matrix in tiles: computes values, casts them to fp8 and transposes the cast, and takes the amax.

    for each tile, one CTA:     v = compute(tiles of the inputs)         float32, in registers; compute may
                                                                         also take a number for each column
                                q tile       <- fp8(clip(v * scale))
                                q.T tile     <- the same, transposed in registers (`transposes`)
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

from pallas_kernels import reference, transposes

MULTIPLE = 64
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)

Compute = Callable[..., Any]  # float32 tiles -> a float32 tile


class Output(NamedTuple):
    """The arrays that the pass writes."""

    q: Array  # fp8 [M, N]
    q_t: Array  # fp8 [N, M]
    amax: Float[Array, ""]  # of the value before the scale
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
    vectors: Sequence[Array],
    scale: Array,
    dtype: Any,
    *,
    name: str,
    rounded: Any = jnp.float32,
    sums: bool = False,
    interpret: Any = False,
) -> Output:
    """Runs the pass of the module's docstring.

    Args:
      compute: makes the value from float32 tiles of the inputs and of the vectors; None: the value is the one input.
      inputs: [M, N] each, in one of `DTYPES`; M and N multiples of 64.
      vectors: float32[N] each, more arguments of `compute`, which gets them as tiles.
      scale: float32[].
      dtype: one of `FP8_DTYPES`.
      name: of the kernel, for profiles.
      rounded: a computed value is rounded to this dtype first.
      sums: whether the unscaled value is also summed over its rows.
      interpret: the argument of `plgpu.kernel`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    m, n = inputs[0].shape
    tm, tn = tile = _tile(m, n, plain=compute is None)
    columns = n // tn
    array = jax.ShapeDtypeStruct
    in_memory = _Parts(
        q=array((m, n), dtype),
        q_t=array((n, m), dtype),
        amax=array((m // tm * columns,), jnp.float32),
        sums=array((m // tm, n), jnp.float32) if sums else None,
    )
    on_chip = _Parts(
        q=_shared(tile, dtype),
        q_t=_shared((tn, tm), dtype),
        sums=plgpu.SMEM((tn,), jnp.float32) if sums else None,
        value=_shared(tile, rounded) if sums and compute is not None else None,
    )

    def body(ins: Any, cols: Any, factor: Any, out: Any, tiles: Any, barriers: Any, at: Any) -> None:
        number = lax.axis_index("tile")
        i, j = lax.div(number, columns), lax.rem(number, columns)
        row, column = pl.ds(i * tm, tm), pl.ds(j * tn, tn)
        for ref, to, barrier in zip(ins, tiles, barriers, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[row, column], to, barrier)
        factor = factor[0]
        of_columns = [_load_vector(ref.at[column], tile) for ref in cols]
        for barrier in barriers:
            plgpu.barrier_wait(barrier)
        value = _load(tiles[0])
        if compute is not None:
            value = compute(value, *map(_load, tiles[1:]), *of_columns).astype(rounded).astype(jnp.float32)
        q = reference.saturating_cast(value * factor, dtype)
        at.q[...] = q
        at.q_t[...] = transposes.in_registers(q, interpreted=bool(interpret))
        magnitude = jnp.abs(value)
        magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
        out.amax[number] = jnp.max(jnp.max(magnitude, axis=1))
        copies = [(at.q, out.q.at[row, column]), (at.q_t, out.q_t.at[column, row])]
        if sums:
            if compute is not None:
                at.value[...] = value.astype(rounded)
                plgpu.commit_smem()  # a barrier: threads read values that other threads wrote
            by_columns = _load_transposed(tiles[0] if compute is None else at.value)
            at.sums[...] = jnp.sum(by_columns, axis=1)
            copies.append((at.sums, out.sums.at[i, column]))
        plgpu.commit_smem()
        for part, ref in copies:
            plgpu.copy_smem_to_gmem(part, ref)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(in_memory,),
        scratch_types=([_shared(tile, x.dtype) for x in inputs], [plgpu.Barrier() for _ in inputs], on_chip),
        grid=(m // tm * columns,),
        grid_names=("tile",),
        kernel_name=name,
        interpret=interpret,
    )
    (result,) = kernel(inputs, vectors, scale.reshape(1))
    return Output(result.q, result.q_t, jnp.max(result.amax), jnp.sum(result.sums, axis=0) if sums else None)


def _tile(m: int, n: int, *, plain: bool) -> tuple[int, int]:
    """Sides of a tile: rows of 128 bytes of fp8 if they fit; smaller if `compute` needs many registers."""
    if plain and n % 128 == 0:
        return 64, 128
    return (128, 64) if plain and m % 128 == 0 else (64, 64)


class _Parts(NamedTuple):
    """What the kernel writes: the arrays, or a tile of them on the chip."""

    q: Any
    q_t: Any
    amax: Any = None  # partial ones, in memory only
    sums: Any = None  # partial ones
    value: Any = None  # rounded, on the chip only, to be summed by columns


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


def _load_vector(ref: Any, tile: tuple[int, int]) -> Array:
    """A vector along the columns of a tile, as a tile."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA_8BIT
    vector = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, tile, (1,)), layout)
