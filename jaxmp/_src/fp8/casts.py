"""The casts of a tensor to fp8: with the scale of a leaf, or with the scale of its own amax.

On an NVIDIA GPU a kernel reads each tensor once, writes it in fp8 in both forms, which the GEMMs read (`gemms`), and
finds its amax. Where nothing in memory holds the tensor but a kernel can compute it (`fused_casts`), the kernel reads
what it is computed from. The gradient of a bias is the sum over the rows of a tensor that is cast: the same kernel sums
it. Elsewhere, for other shapes, on meshes with explicit axes and under vmap, XLA casts and transposes; the numbers are
the same. The kernel always writes both forms, so it runs only where a derivative is taken: without a gradient, no GEMM
reads the transposed form.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp._src.base import compat
from jaxmp._src.devices import collectives
from jaxmp._src.fp8 import cast_ways, gemms, remat, scale_equations, scale_leaves
from jaxmp._src.fp8.fused_casts import FusedCast
from jaxmp._src.fp8.gemms import Gemm, Quantized
from jaxmp._src.numerics import casting, float_bits, quantize as quantize_lib
from pallas_kernels import backend, passes, reference

Role = Literal["lhs", "rhs", "grad"]


class Tensor(NamedTuple):
    """What is cast.

    Attributes:
      role: "lhs", "rhs", or "grad", the gradient of the result.
      x: the tensor in its own dtype.
      leaf: its scale leaf; None without state.
      fused: what a kernel can compute lhs or the gradient from.
      seed: uint32[2] for the gradient of a recipe that rounds at random.
    """

    role: Role
    x: Array
    leaf: Array | None = None
    fused: FusedCast | None = None
    seed: Array | None = None


class Cast(NamedTuple):
    """A tensor that was cast for the products that read it.

    Attributes:
      of: by the name of the product, the operand that `Recipe.multiply` takes.
      amax: of the tensor, in the dtype of its scale leaf; None without a leaf.
      sums: of a gradient whose layer has a bias: float32 sums over the rows; else None.
    """

    of: dict[str, Any]
    amax: Array | None = None
    sums: Array | None = None


def by_leaf(gemm: Gemm, tensor: Tensor, products: Sequence[str]) -> Cast:
    """A tensor with the scale of its leaf, or with that of its own amax if the gemm says so; the amax goes to the leaf.

    It is also written transposed if two products read it, if a kernel can do that. With zeros to add no kernel runs:
    it would read the tensor from memory once more.
    """
    role, x, leaf, fused, _ = tensor
    assert leaf is not None
    dtype, zeros = gemm.recipe.dtype(backward=role == "grad"), gemm.zeros(role)
    summed = gemm.ndims[0] - len(gemm.contract[0]) if role == "grad" and gemm.bias_dtype is not None else None
    rows = gemm.rows(role) if len(products) == 2 and not (zeros or gemm.by_own_amax) else None
    # A split weight (FSDP) is gathered before the matmul: once, if it has one form only.
    rows = None if role == "rhs" and not is_whole(x) else rows
    holds_log2 = gemm.recipe.power_of_two
    with jax.named_scope("jaxmp.fp8_quantize"):
        scale, inv_scale = scale_leaves.scale_of(leaf, holds_log2=holds_log2)
        in_kernel = summed is not None and summed == rows
        plan = passes.Pass("cast_transpose_amax", None, 1, jnp.dtype(dtype), rows or 0, sums=in_kernel)
        sums = None
        if rows is None or x.dtype not in passes.DTYPES or backend.why_no_kernels() or passes.why_not(plan, (x,)):
            y = casting.widened(gemms.pad(x, zeros))
            amax = quantize_lib.observe(y, scale)
            if gemm.by_own_amax:
                scale, inv_scale = _scales_of(amax, dtype, holds_log2=holds_log2)
            values, transposed = quantize_lib.stored(quantize_lib.quantize(y, scale, dtype)), None
        else:
            others = [] if fused is None else fused.arguments()
            both_forms = _both_forms(plan if fused is None else fused.plan(plan))
            values, transposed, amax, *of_kernel = both_forms(x, *others, scale)
            sums = of_kernel[0] if of_kernel else None
        if summed is not None and sums is None:
            sums = reference.sums_over_rows(casting.widened(x), summed)
        values, transposed, amax = remat.named((values, transposed, amax))
        # A leaf that all devices share gets the MAX here if a shard_map is differentiated from outside.
        amax = collectives.max_over(amax, tuple(compat.varying_axes(amax) - compat.varying_axes(leaf)))
    whole = Quantized(values, inv_scale, transposed)
    saved = whole if role == "grad" else _saved(gemm, role, whole)
    of = {name: whole if name == "fprop" else saved for name in products}
    return Cast(of, lax.convert_element_type(amax, leaf.dtype), sums)


def by_own_amax(gemm: Gemm, tensor: Tensor) -> Quantized:
    """A tensor with the scale that the recipe of the gemm makes from its amax."""
    recipe, backward = gemm.recipe, tensor.role == "grad"
    x = casting.widened(gemms.pad(tensor.x, gemm.zeros(tensor.role)))
    with jax.named_scope("jaxmp.fp8_quantize"):
        amax = quantize_lib.largest_magnitude(x)
        scale, dtype = recipe.scale(amax, backward=backward), recipe.dtype(backward=backward)
        if recipe.power_of_two:
            scale, _ = scale_leaves.scale_of(float_bits.log2_of_power_of_two(scale), holds_log2=True)
        values = quantize_lib.stored(quantize_lib.quantize(x, scale, dtype))
        # The cast makes finite what is too large, so the overflow must show here.
        fits = ~scale_equations.saturates(amax, scale, float(jnp.finfo(dtype).max)) & (amax < jnp.inf)
        inv_scale = jnp.where(fits, float_bits.reciprocal(scale), jnp.nan)
        return Quantized(*remat.named((values, inv_scale)))


def no_cast(gemm: Gemm, grad: Array, leaf: Array | None) -> Cast:
    """A gradient that no product reads in a narrow dtype: its leaf was not used."""
    amax = None
    if leaf is not None:
        amax = lax.convert_element_type(jnp.full(leaf.shape, -jnp.inf, jnp.float32), leaf.dtype)
    summed = gemm.ndims[0] - len(gemm.contract[0])
    return Cast({}, amax, None if gemm.bias_dtype is None else reference.sums_over_rows(casting.widened(grad), summed))


def is_whole(x: Array) -> bool:
    """Whether `x` lies on one device as far as a trace can tell, or is a device's own (in shard_map and pmap)."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return mesh is None or mesh.empty or mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names)


def _scales_of(amax: Array, dtype: Any, *, holds_log2: bool) -> tuple[Array, Array]:
    """(scale, 1 / scale) of a tensor with this amax, as a leaf with this scale would give them."""
    limit = float(jnp.finfo(dtype).max)
    scale = scale_equations.scale_from_amax(amax, limit, fallback=1.0, power_of_two=holds_log2)
    leaf = float_bits.log2_of_power_of_two(scale) if holds_log2 else scale
    return scale_leaves.scale_of(leaf, holds_log2=holds_log2)


def _saved(gemm: Gemm, role: str, q: Quantized) -> Quantized:
    """lhs or rhs only in the form that the backward pass reads."""
    if role == "rhs" and gemm.rhs_starts:
        return q._replace(transposed=None)
    return q if q.transposed is None else q._replace(values=None)


@functools.lru_cache(maxsize=256)
def _both_forms(plan: passes.Pass) -> Callable[..., Any]:
    """(x, scale) -> (q, q transposed, amax, perhaps the sums over rows), by the kernel of `plan` if it can.

    What x is computed from lies between x and the scale: the kernel reads it in place of x.
    """

    def by_xla(x: Array, *others: Array) -> list[Array]:
        y, scale = casting.widened(x), others[-1]
        q = quantize_lib.stored(quantize_lib.quantize(y, scale, plan.dtype))
        results = [q, reference.transpose(q, plan.rows), quantize_lib.observe(y, scale)]
        return [*results, reference.sums_over_rows(y, plan.rows)] if plan.sums else results

    @jax.custom_batching.custom_vmap
    def both(x: Array, *others: Array) -> list[Array]:
        if plan.compute is not None:
            return passes.run_or(plan, by_xla, others, unread=(x,))
        in_one_pass = cast_ways.chosen() == cast_ways.ONE_PASS
        return passes.run_or(plan, by_xla, (x, *others), backend="auto" if in_one_pass else "xla")

    @both.def_vmap
    def both_of_batch(axis_size: int, in_batched: Sequence[bool], x: Array, *others: Array) -> Any:
        batched, scale = (in_batched[0], in_batched[-1]), others[-1]
        in_axes = [0 if has_axis else None for has_axis in batched]
        q, transposed, _, *more = jax.vmap(by_xla, in_axes, axis_size=axis_size)(x, scale)
        # One amax for all members that share a scale.
        amax, by_member = quantize_lib.observe_batch(axis_size, batched, casting.widened(x), scale)
        return [q, transposed, amax, *more], [True, True, by_member, *[True] * len(more)]

    return both
