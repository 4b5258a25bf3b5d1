"""One pass over a matrix in tiles: computes values, casts them to fp8 and transposes the cast, and takes the amax.

    for each tile, one CTA:     v = compute(tiles of the inputs)         float32, in registers
                                q tile       <- fp8(clip(v * scale))
                                q.T tile     <- the same, read back from shared memory by columns
                                partial amax <- max |v|                  one number per CTA; XLA takes their maximum
                                partial sums <- sums of v over rows      one row per CTA, if wanted; XLA adds them

On Hopper, cuBLASLt multiplies fp8 operands only along rows that are contiguous in memory. One product of a layer sums
over the rows of a tensor and another over its columns, so each tensor is needed in both layouts. XLA casts in one pass
and transposes in a second one, and reads once more for the amax if a cast feeds a transpose.

What Mosaic GPU requires (found by experiment; the interpreter does not check it):

- Register layouts are chosen, not inferred. Tiles are read as fragments of WGMMA for 8 bits, in which a thread has four
  neighbours and stores 16 bytes of fp8 at once (stmatrix). By columns they are read as WGMMA_TRANSPOSED; one shuffle
  converts it to WGMMA, in which a thread stores two fp8 values at once. Both are read from swizzled shared memory.
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

from pallas_kernels import reference

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
    wide_dtype: Any = None,
    sums: bool = False,
    interpret: Any = False,
) -> list[Output]:
    """Runs the pass of the module's docstring.

    Args:
      compute: makes the values from float32 tiles of the inputs; None: the value is the one input.
      inputs: [M, N] each, in one of `DTYPES`; M and N multiples of 64.
      scales: float32[] each, one for each value.
      dtype: one of `FP8_DTYPES`.
      name: of the kernel, for profiles.
      wide_dtype: if given, the unscaled values are also written in this dtype.
      sums: whether the unscaled values are also summed over their rows.
      interpret: the argument of `plgpu.kernel`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    m, n = inputs[0].shape
    tm, tn = _tile(m, n, plain=compute is None)
    columns = n // tn
    compiled_for = [jnp.dtype(x.dtype) for x in inputs]
    layout = plgpu.Layout

    def smem(shape: tuple[int, int], dtype: Any) -> Any:
        """Shared memory without bank conflicts for rows and for columns of a fragment."""
        size = jnp.dtype(dtype).itemsize
        width = min(128, shape[1] * size)
        tiling: Any = plgpu.TilingTransform
        swizzle: Any = plgpu.SwizzleTransform
        return plgpu.SMEM(shape, dtype, transforms=(tiling((8, width // size)), swizzle(width)))

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout.WGMMA_8BIT, optimized=False).astype(jnp.float32)

    def load_transposed(ref: Any) -> Array:
        x = plgpu.load(ref.T, layout=layout.WGMMA_TRANSPOSED, optimized=False)
        return plgpu.layout_cast(x, layout.WGMMA).astype(jnp.float32)

    def body(*refs: Any) -> None:
        ins, refs = refs[: len(inputs)], refs[len(inputs) :]
        scale_refs, refs = refs[: len(scales)], refs[len(scales) :]
        outs, scratch = refs[: len(out_type)], refs[len(out_type) :]
        tile = lax.axis_index("tile")
        i, j = lax.div(tile, columns), lax.rem(tile, columns)
        row, column = pl.ds(i * tm, tm), pl.ds(j * tn, tn)
        in_smem, scratch = scratch[: len(inputs)], scratch[len(inputs) :]
        barriers, scratch = scratch[: len(inputs)], scratch[len(inputs) :]
        for ref, at, barrier in zip(ins, in_smem, barriers, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[row, column], at, barrier)
        factors = [ref[0] for ref in scale_refs]
        for barrier in barriers:
            plgpu.barrier_wait(barrier)
        values = [load(ref) for ref in in_smem]
        if compute is not None:
            made = compute(*values)
            values = list(made) if isinstance(made, tuple | list) else [made]
        per_value = len(out_type) // len(scales)
        copies = []
        for k, (value, factor) in enumerate(zip(values, factors, strict=True)):
            q, q_t, partial, *more = outs[k * per_value : (k + 1) * per_value]
            q_smem, q_t_smem, *scratch = scratch
            if compute is None:
                value_smem = in_smem[0]
            else:
                value_smem, *scratch = scratch
                value_smem[...] = value
            q_smem[...] = reference.saturating_cast(value * factor, dtype)
            magnitude = jnp.abs(value)
            magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
            partial[tile] = jnp.max(jnp.max(magnitude, axis=1))
            if wide_dtype is not None:
                wide, *more = more
                wide_smem, *scratch = scratch
                wide_smem[...] = value.astype(wide_dtype)
                copies.append((wide_smem, wide.at[row, column]))
            if compute is not None:
                plgpu.commit_smem()  # a barrier: threads read values that other threads wrote
            turned = load_transposed(value_smem)
            q_t_smem[...] = reference.saturating_cast(turned * factor, dtype)
            if sums:
                sums_smem, *scratch = scratch
                sums_smem[...] = jnp.sum(turned, axis=1)
                copies.append((sums_smem, more[0].at[i, column]))
            copies += [(q_smem, q.at[row, column]), (q_t_smem, q_t.at[column, row])]
        plgpu.commit_smem()
        for at, ref in copies:
            plgpu.copy_smem_to_gmem(at, ref)
        plgpu.wait_smem_to_gmem(0)

    out_type, scratch_types = [], [smem((tm, tn), d) for d in compiled_for]
    scratch_types += [plgpu.Barrier() for _ in inputs]
    for _ in scales:
        out_type += [jax.ShapeDtypeStruct((m, n), dtype), jax.ShapeDtypeStruct((n, m), dtype)]
        out_type += [jax.ShapeDtypeStruct((m // tm * columns,), jnp.float32)]
        scratch_types += [smem((tm, tn), dtype), smem((tn, tm), dtype)]
        if compute is not None:
            scratch_types += [smem((tm, tn), jnp.float32)]
        if wide_dtype is not None:
            out_type += [jax.ShapeDtypeStruct((m, n), wide_dtype)]
            scratch_types += [smem((tm, tn), wide_dtype)]
        if sums:
            out_type += [jax.ShapeDtypeStruct((m // tm, n), jnp.float32)]
            scratch_types += [plgpu.SMEM((tn,), jnp.float32)]
    kernel = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=tuple(scratch_types),
        grid=(m // tm * columns,),
        grid_names=("tile",),
        kernel_name=name,
        interpret=interpret,
    )
    flat = kernel(*inputs, *(scale.reshape(1) for scale in scales))
    per_value = len(flat) // len(scales)
    found = [flat[k * per_value : (k + 1) * per_value] for k in range(len(scales))]
    outputs = []
    for q, q_t, partial, *more in found:
        wide = more.pop(0) if wide_dtype is not None else None
        outputs.append(Output(q, q_t, jnp.max(partial), wide, jnp.sum(more[0], axis=0) if sums else None))
    return outputs


def _tile(m: int, n: int, *, plain: bool) -> tuple[int, int]:
    """Sides of a tile: rows of 128 bytes of fp8 if they fit; smaller if `compute` needs many registers."""
    if plain and n % 128 == 0:
        return 64, 128
    return (128, 64) if plain and m % 128 == 0 else (64, 64)
