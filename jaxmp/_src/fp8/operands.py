"""Casts the tensors of an fp8 layer once with the scale of a leaf; also transposed, if all three GEMMs run.

On an NVIDIA GPU a kernel reads each tensor once and writes it in fp8 in both forms, which the GEMMs read (`gemms`),
unless a table says that two passes are faster there (`cast_ways`).
Elsewhere, for other shapes, on meshes with explicit axes and under vmap, XLA casts and transposes; the numbers are the
same. The kernel always writes both forms, so jaxmp uses it only in the forward pass of a differentiated function:
without a gradient, no GEMM reads the transposed form.

With an activation f, the kernel casts f(x) from float32, and f(x) is never written to memory. The result of a norm or
of an activation in the model is cast from what it was made of (`made`). The gradient of a bias is the sum over the rows
of a tensor that is cast: the same kernel computes it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxmp._src.base import compat
from jaxmp._src.devices import collectives
from jaxmp._src.fp8 import cast_ways, gemms, padding, remat, scale_equations, scale_leaves, stored_kernels
from jaxmp._src.fp8.gemms import Gemm, Quantized
from jaxmp._src.fp8.made import Made
from jaxmp._src.fp8.padding import Zeros
from jaxmp._src.fp8.scheme import Cast
from jaxmp._src.numerics import casting, float_bits, quantize as quantize_lib
from pallas_kernels import activation as activations, backend, passes, reference


def activated(x: Array, activation: str | None) -> Array:
    """f(x), or x itself, in float32."""
    x = casting.widened(x)
    return x if activation is None else activations.ACTIVATIONS[activation][0](x)


def activation_gradient(grad: Array, x: Array, activation: str) -> Array:
    """`grad` f'(x), computed in float32, in the dtype of x."""
    derivative = activations.ACTIVATIONS[activation][1]
    return derivative(casting.widened(grad), casting.widened(x)).astype(x.dtype)


def quantize(
    gemm: Gemm,
    x: Array,
    leaf: Array,
    dtype: Any,
    *,
    rows: int | None = None,
    activation: str | None = None,
    zeros: Zeros = (),
    made: Made | None = None,
) -> tuple[Quantized, Array]:
    """`x`, or its activation, cast to the fp8 `dtype` with the leaf's scale, and its amax in the leaf's dtype.

    With `rows`, the number of axes that are rows, it is also written transposed if a kernel can do that. `zeros` are
    added to `x` (each activation of 0 is 0); then no kernel runs, which would read `x` from memory once more. With
    `made`, a kernel reads what `x` was made of in its place.
    """
    quantized, amax, _ = quantize_and_sum(
        gemm, x, leaf, dtype, rows=rows, activation=activation, zeros=zeros, made=made
    )
    return quantized, amax


def quantize_and_sum(
    gemm: Gemm,
    x: Array,
    leaf: Array,
    dtype: Any,
    *,
    rows: int | None = None,
    activation: str | None = None,
    zeros: Zeros = (),
    summed: int | None = None,
    made: Made | None = None,
) -> tuple[Quantized, Array, Array | None]:
    """`quantize`, and the float32 sums of `x` over its first `summed` axes; None without `summed`."""
    padded = padding.pad(x, zeros)
    with jax.named_scope("jaxmp.fp8_quantize"):
        scale, inv_scale = scale_leaves.scale_of(leaf, holds_log2=gemm.holds_log2)
        in_kernel = summed is not None and summed == rows
        sums = None
        if gemm.by_own_amax or zeros or rows is None or _why_not_transposed(x, rows, activation):
            y = activated(padded, activation)
            observed = quantize_lib.observe(y, scale)
            if gemm.by_own_amax:
                scale, inv_scale = scales_of(observed, dtype, holds_log2=gemm.holds_log2)
            values, transposed = quantize_lib.stored(quantize_lib.quantize(y, scale, dtype)), None
            in_kernel = False
        else:
            if made is None:
                plan = _plan(dtype, rows, activation, in_kernel)
                found = _both_ways(plan, activation)(padded, scale)
            else:
                found = _both_ways(made.plan(dtype, x.dtype, rows, sums=in_kernel), None)(x, *made.arguments(), scale)
            values, transposed, observed = found[:3]
            sums = found[3] if in_kernel else None
        if summed is not None and not in_kernel:
            sums = reference.sums_over_rows(casting.widened(x), summed)
        values, transposed, observed = remat.named((values, transposed, observed))
        # A leaf that all devices share gets the MAX here if a shard_map is differentiated from outside.
        observed = collectives.max_over(observed, tuple(compat.varying_axes(observed) - compat.varying_axes(leaf)))
        return Quantized(values, inv_scale, transposed), lax.convert_element_type(observed, leaf.dtype), sums


def quantize_rhs(gemm: Gemm, rhs: Array, leaf: Array, rows: int | None) -> tuple[Quantized, Array]:
    """The weight in fp8: cast here, or already stored in fp8."""
    if not stored_kernels.holds_fp8(rhs, leaf):
        rows = rows if is_whole(rhs) else None
        return quantize(gemm, rhs, leaf, gemm.forward_dtype, rows=rows, zeros=gemm.rhs_zeros)
    _, inv_scale = scale_leaves.scale_of(leaf, holds_log2=True)
    values = quantize_lib.stored(padding.pad(rhs, gemm.rhs_zeros).astype(gemm.forward_dtype))
    return Quantized(values, inv_scale), stored_kernels.used(leaf)


def quantize_by_itself(recipe: Any, x: Array, dtype: Any, zeros: padding.Zeros, *, backward: bool) -> Quantized:
    """`x` with `zeros` in fp8, with the scale of its own amax."""
    x = casting.widened(padding.pad(x, zeros))
    with jax.named_scope("jaxmp.fp8_quantize"):
        largest = quantize_lib.largest_magnitude(x)
        scale = recipe.scale(largest, backward=backward)
        if recipe.power_of_two:
            scale = float_bits.power_of_two(
                jnp.clip(float_bits.log2_of_power_of_two(scale), np.float32(-63), np.float32(63))
            )
        values = quantize_lib.stored(quantize_lib.quantize(x, scale, dtype))
        # The cast makes inf finite, so the overflow must show here.
        inv_scale = jnp.where(largest < jnp.inf, float_bits.reciprocal(scale), jnp.nan)
        return Quantized(*remat.named((values, inv_scale)))


def in_bfloat16(rhs: Array, leaf: Array | None) -> Array:
    """A weight that a product in 16 bits reads; one that is stored in fp8 with the scale of its leaf."""
    if leaf is not None and stored_kernels.holds_fp8(rhs, leaf):
        return stored_kernels.dequantized(rhs, leaf, jnp.bfloat16)
    return rhs.astype(jnp.bfloat16)


def not_cast(gemm: Gemm, grad: Array, leaf: Array | None) -> Cast:
    """A gradient that no product reads in a narrow dtype: its leaf was not used."""
    amax = None
    if leaf is not None:
        amax = lax.convert_element_type(jnp.full(leaf.shape, -jnp.inf, jnp.float32), leaf.dtype)
    summed = gemm.ndims[0] - len(gemm.contract[0])
    sums = None if gemm.bias_dtype is None else reference.sums_over_rows(casting.widened(grad), summed)
    return Cast({}, amax, sums)


def scales_of(amax: Array, dtype: Any, *, holds_log2: bool) -> tuple[Array, Array]:
    """(scale, 1 / scale) of a tensor with this amax, as a leaf with this scale would give them."""
    limit = float(jnp.finfo(dtype).max)
    scale = scale_equations.scale_from_amax(amax, limit, fallback=1.0, power_of_two=holds_log2)
    leaf = float_bits.log2_of_power_of_two(scale) if holds_log2 else scale
    return scale_leaves.scale_of(leaf, holds_log2=holds_log2)


def rows_of(gemm: Gemm, role: str) -> int | None:
    """How many axes of a tensor are rows; None for a tensor that no GEMM reads transposed."""
    summed = len(gemm.contract[0])
    specs = (gemm.lhs_sharding, gemm.rhs_sharding, gemm.out_sharding)
    on_explicit_axes = any(spec is not None for spec in specs)
    if on_explicit_axes or not gemms.is_of_matrices(gemm.ndims, gemm.contract, gemm.batch):
        return None
    if role == "rhs":
        return summed if gemm.rhs_starts else gemm.ndims[1] - summed
    return gemm.ndims[0] - summed


def kept(gemm: Gemm, role: str, q: Quantized) -> Quantized:
    """lhs or rhs only in the form that the backward pass reads."""
    if role == "rhs" and gemm.rhs_starts:
        return q._replace(transposed=None)
    return q if q.transposed is None else q._replace(values=None)


def is_whole(x: Array) -> bool:
    """Whether `x` lies on one device as far as a trace can tell, or is a device's own (in shard_map and pmap).

    A split weight (FSDP) is gathered before the matmul: once if it has one form only.
    """
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return mesh is None or mesh.empty or mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names)


def _why_not_transposed(x: Array, rows: int, activation: str | None) -> str | None:
    """Why no kernel can write this tensor in both forms on any device; None if one can."""
    if x.dtype not in passes.DTYPES:
        return f"it is {x.dtype}"
    return backend.why_no_kernels() or passes.why_not(_plan(jnp.float8_e4m3fn, rows, activation), (x,))


def _plan(dtype: Any, rows: int, activation: str | None, sums: bool = False) -> passes.Pass:
    compute = None if activation is None else activations.ACTIVATIONS[activation][0]
    name = "cast_transpose_amax" if compute is None else f"{compute.__name__}_cast_transpose_amax"
    unmet = activations.UNMET.get(activation or "")
    return passes.Pass(name, compute, 1, 1, jnp.dtype(dtype), None, rows, unmet, sums)


@functools.lru_cache(maxsize=256)
def _both_ways(plan: passes.Pass, activation: str | None) -> Callable[..., Any]:
    """(x, scale) -> (q, q transposed, amax, perhaps the sums over rows), by the kernel of `plan` if it can.

    What `x` was made of lies between x and the scale: the kernel reads it, and all else reads x.
    """

    def by_xla(x: Array, *others: Array) -> list[Array]:
        y, scale = activated(x, activation), others[-1]
        q = quantize_lib.stored(quantize_lib.quantize(y, scale, plan.dtype))
        found = [q, reference.transpose(q, plan.rows), quantize_lib.observe(y, scale)]
        return [*found, reference.sums_over_rows(y, plan.rows)] if plan.sums else found

    @jax.custom_batching.custom_vmap
    def both(x: Array, *others: Array) -> list[Array]:
        if len(others) > 1:
            return passes.run_or(plan, by_xla, others, unread=(x,))
        in_kernel = plan.compute is not None or cast_ways.chosen() == cast_ways.ONE_PASS
        return passes.run_or(plan, by_xla, (x, *others), backend="auto" if in_kernel else "xla")

    @both.def_vmap
    def both_of_batch(axis_size: int, in_batched: Sequence[bool], x: Array, *others: Array) -> Any:
        batched, scale = (in_batched[0], in_batched[-1]), others[-1]
        in_axes = [0 if has_axis else None for has_axis in batched]
        q, transposed, _, *more = jax.vmap(by_xla, in_axes, axis_size=axis_size)(x, scale)
        # One amax for all members that share a scale.
        observed, by_member = quantize_lib.observe_batch(axis_size, batched, activated(x, activation), scale)
        return [q, transposed, observed, *more], [True, True, by_member, *[True] * len(more)]

    return both
