"""The fp8 matmul: `dot_general` and `einsum` whose three GEMMs run in 8 bits.

For y = x w with the gradient g of y, scales s and Q(t) = fp8(clip(t * s)):

    fprop   y  = Q(x) Q(w)   / (s_x s_w)      e4m3 x e4m3, fast accumulation
    dgrad   dx = Q(g) Q(w)^T / (s_g s_w)      e5m2 (HYBRID) x e4m3, full accumulation
    wgrad   dw = Q(x)^T Q(g) / (s_x s_g)      e4m3 x e5m2 (HYBRID), full accumulation

x and w are cast once, and the backward pass keeps their fp8 copies. Casts saturate. The same pass finds the largest
magnitude of each tensor, which is the gradient of its scale leaf (see `scale_leaves`).

On CUDA the GEMM gets fp8 operands, and XLA gives it to cuBLASLt with the scale inside; "fast" and "full" accumulation
are `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM` and `ANY_F8_ANY_F8_F32`, chosen as TransformerEngine does.
Elsewhere the same fp8 numbers are multiplied in float32: exact products, another order of sums.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, compat
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import block_matmul, gemms, operands, recipes, remat, scale_leaves, stored_kernels
from jaxmp._src.fp8.block_matmul import DimensionNumbers
from jaxmp._src.fp8.first_derivatives import once
from jaxmp._src.fp8.gemms import Gemm, Quantized
from jaxmp._src.numerics import float_bits
from jaxmp._src.numerics.quantize import largest_magnitude, quantize, stored
from pallas_kernels.activation import check_activation

MULTIPLE = 16  # of each side of an fp8 GEMM, for cuBLASLt


class FallbackWarning(UserWarning):
    """A matmul that should run in fp8 runs in its inputs' own dtype; the message says why.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", FallbackWarning)  # every fallback is an error
      ...     x, matmul = jnp.ones((7, 7)), (((1,), (0,)), ((), ()))
      ...     try:
      ...         y = dot_general(x, x, matmul, recipe=recipes.CurrentScaling())
      ...     except FallbackWarning as e:
      ...         "multiple" in str(e)
      True
    """


def note_use() -> None:
    """Says that a matmul with scales is traced here, in fp8 or not: `value_and_grad` warns of a loss without one."""
    ambient.now().notes.fp8_matmuls += 1


class Scales(NamedTuple):
    """The scale leaves of one layer: float32[] each, as `jaxmp.fp8.is_scale` names them.

    Example:
      >>> import jax.numpy as jnp
      >>> Scales(lhs=jnp.zeros(()), rhs=jnp.ones(()), grad=jnp.zeros(())).rhs.dtype.name  # log2 of a scale of 2
      'float32'
    """

    lhs: Array
    rhs: Array
    grad: Array


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Any,
    scales: Scales | None = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    activation: str | None = None,
    layer: str | None = None,
    key: Array | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` whose GEMMs, forward and backward, run in fp8; see the module's docstring.

    Args:
      lhs, rhs: float arrays; any batch and contracting dimensions.
      dimension_numbers: as for `jax.lax.dot_general`.
      recipe: `DelayedScaling` (with `scales`), or a recipe without state.
      scales: the layer's scale leaves. Their gradients are the amaxes of lhs, rhs and the gradient of the result.
      preferred_element_type: dtype of the result; default: the narrower of the two inputs' (a float32 weight does not
        widen bfloat16 activations).
      out_sharding: how the result lies on a mesh with explicit axes, as for `jax.lax.dot_general`.
      activation: "gelu", "gelu_exact" or "silu" (`pallas_kernels.activation`): lhs goes through it first. With
        `DelayedScaling` f(lhs) is computed in float32 and rounded once, to fp8; on a GPU (but for "gelu_exact") it is
        not written to memory in any other dtype. By other recipes it is rounded to the dtype of lhs in between.
      layer: a name for warnings.
      key: a key of `jax.random` for the stochastic rounding of gradients; only `NVFP4` needs one.

    Returns:
      The product. The gradients of lhs and rhs have the inputs' dtypes: float32 for a float32 weight, straight from the
      GEMM's accumulator.

    Raises:
      ValueError: a recipe with state without scales, or scales for a recipe without state; an unknown activation; a
        gradient by `NVFP4()` without a key.

    Warns:
      FallbackWarning: a side of a GEMM is no multiple of 16; the product then runs in the result's dtype.

    Example:
      >>> x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 48), jnp.bfloat16)
      >>> y = dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipes.CurrentScaling())
      >>> y.shape, y.dtype.name, float(y[0, 0])
      ((16, 48), 'bfloat16', 32.0)

    References:
      Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv 2209.05433); TransformerEngine's Linear.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    out_dtype = jnp.dtype(preferred_element_type or result_dtype(lhs, rhs))
    note_use()
    reason = why_not_fp8(lhs.shape, rhs.shape, dimension_numbers)
    if activation is not None:
        check_activation(activation)
        if reason or scales is None:  # not fused: rounded to the dtype of lhs, as in a network
            lhs, activation = operands.activated(lhs, activation).astype(lhs.dtype), None
    if reason:
        where = f" (layer {layer})" if layer else ""
        warnings.warn(
            f"this matmul{where} runs in {traced_for(out_dtype)} instead of fp8: {reason}",
            FallbackWarning,
            stacklevel=3,
        )
        return plain_dot_general(lhs, rhs, dimension_numbers, out_dtype, out_sharding, scales=scales)
    stateful = isinstance(recipe, recipes.DelayedScaling)
    if stateful != (scales is not None):
        raise ValueError(
            f"a recipe with delayed scaling needs scales=, one without state takes none; got {type(recipe).__name__} "
            f"and scales={'given' if scales is not None else 'None'}."
        )
    axes = tuple(compat.varying_axes(lhs) | compat.varying_axes(rhs))  # both gradients vary over all of them
    lhs, rhs = compat.as_varying(lhs, axes), compat.as_varying(rhs, axes)
    if isinstance(recipe, block_matmul.Recipe):
        return block_matmul.dot_general(
            lhs, rhs, dimension_numbers, recipe=recipe, out_dtype=out_dtype, out_sharding=out_sharding, key=key
        )
    gemm = Gemm(
        contract=(tuple(lhs_contract), tuple(rhs_contract)),
        batch=(tuple(lhs_batch), tuple(rhs_batch)),
        forward_dtype=recipe.dtype(backward=False),
        backward_dtype=recipe.dtype(backward=True),
        holds_log2=recipe.power_of_two,
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=out_dtype,
        lhs_spec=_explicit_spec(lhs),
        rhs_spec=_explicit_spec(rhs),
        out_sharding=out_sharding,
        activation=activation,
        by_own_amax=by_own_amax(scales or (), layer),
    )
    if scales is None:
        return _current_dot(gemm, recipe, lhs, rhs)
    return _delayed_dot(gemm, lhs, rhs, *scales)


def by_own_amax(leaves: Sequence[Array], layer: str | None) -> bool:
    """Whether a layer casts each tensor with the scale of its own amax, not with those of its leaves.

    So it is in a calibration, and where a loss of `value_and_grad` calls a layer whose scales it does not
    differentiate: nothing moves them, and the loss scale does not shift them. Such a layer is noted.
    """
    if not leaves:
        return False
    unmoved = ambient.is_in_loss() and any(leaf.dtype not in _MAX_DTYPES for leaf in leaves)
    if unmoved:
        ambient.now().notes.unmoved_scales[layer or "a layer"] = None
    return unmoved or ambient.now().fp8_calibrating


_MAX_DTYPES = (compat.max_dtype(), compat.max_dtype(marks_fp8=True))


def traced_for(dtype: Any) -> Any:
    """The dtype in which a matmul traced in `dtype` will run: autocast traces in float32 and casts afterwards."""
    now = ambient.now()
    lists = now.autocast_lists if now.autocast_tracing and dtype == jnp.float32 else None
    return dtype if lists is None or lists.dtype is None else jnp.dtype(lists.dtype)


def why_not_fp8(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dimension_numbers: DimensionNumbers
) -> str | None:
    """Why a matmul of these shapes cannot run in fp8; None if it can.

    Example:
      >>> why_not_fp8((32, 20), (20, 64), (((1,), (0,)), ((), ())))
      'each side of an fp8 GEMM must be a multiple of 16; got K=20 (M=32, K=20, N=64)'
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    sides = {
        "M": math.prod(d for i, d in enumerate(lhs_shape) if i not in (*lhs_contract, *lhs_batch)),
        "K": math.prod(lhs_shape[i] for i in lhs_contract),
        "N": math.prod(d for i, d in enumerate(rhs_shape) if i not in (*rhs_contract, *rhs_batch)),
    }
    odd = [f"{name}={size}" for name, size in sides.items() if size % MULTIPLE or not size]
    if not odd:
        return None
    every = ", ".join(f"{name}={size}" for name, size in sides.items())
    return f"each side of an fp8 GEMM must be a multiple of {MULTIPLE}; got {', '.join(odd)} ({every})"


# --- delayed scaling: the scales come with the params ------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delayed_dot(gemm: Gemm, lhs: Array, rhs: Array, lhs_leaf: Array, rhs_leaf: Array, grad_leaf: Array) -> Array:
    del grad_leaf
    lhs_q, _ = operands.quantize(gemm, lhs, lhs_leaf, gemm.forward_dtype, activation=gemm.activation)
    rhs_q, _ = quantize_rhs(gemm, rhs, rhs_leaf, None)
    return gemms.fprop(gemm, lhs_q, rhs_q)


def _delayed_forward(
    gemm: Gemm, lhs: Array, rhs: Array, lhs_leaf: Array, rhs_leaf: Array, grad_leaf: Array
) -> tuple[Array, Any]:
    lhs, rhs = once(lhs), once(rhs)
    lhs_rows, rhs_rows = _rows(gemm, lhs, rhs)
    lhs_q, lhs_amax = operands.quantize(
        gemm, lhs, lhs_leaf, gemm.forward_dtype, rows=lhs_rows, activation=gemm.activation
    )
    rhs_q, rhs_amax = quantize_rhs(gemm, rhs, rhs_leaf, rhs_rows)
    before = None if gemm.activation is None else lhs
    out = gemms.fprop(gemm, lhs_q, rhs_q)
    return out, (remat.packed(gemms.kept(gemm, lhs_q, rhs_q)), lhs_amax, rhs_amax, grad_leaf, before)


def _delayed_backward(gemm: Gemm, residuals: Any, grad: Array) -> tuple[Array, ...]:
    quantized, lhs_amax, rhs_amax, grad_leaf, before = residuals
    lhs_q, rhs_q = remat.unpacked(quantized)
    grad = once(grad)
    rows, _ = _rows(gemm, lhs_q, rhs_q)
    grad_q, grad_amax = operands.quantize(gemm, grad, grad_leaf, gemm.backward_dtype, rows=rows)
    d_lhs, d_rhs = gemms.backprop(gemm, lhs_q, rhs_q, grad_q)
    if gemm.activation is not None:
        with jax.named_scope(f"jaxmp.fp8_{gemm.activation}_grad"):
            d_lhs = operands.activation_gradient(d_lhs, before, gemm.activation)
    return d_lhs, d_rhs, lhs_amax, rhs_amax, grad_amax


_delayed_dot.defvjp(_delayed_forward, _delayed_backward)


def _rows(gemm: Gemm, lhs: Any, rhs: Any) -> tuple[int | None, int | None]:
    """How many axes of lhs and rhs are rows; None for a tensor that is not needed transposed."""
    summed = len(gemm.contract[0])
    specs = (gemm.lhs_spec, gemm.rhs_spec, gemm.out_sharding)
    on_explicit_axes = any(spec is not None for spec in specs)
    if on_explicit_axes or not gemms.is_of_matrices((lhs.ndim, rhs.ndim), gemm.contract, gemm.batch):
        return None, None
    return lhs.ndim - summed, summed if gemm.rhs_starts else rhs.ndim - summed


def quantize_rhs(gemm: Gemm, rhs: Array, leaf: Array, rows: int | None) -> tuple[Quantized, Array]:
    """The weight in fp8: cast here, or already stored in fp8."""
    if not stored_kernels.holds_fp8(rhs, leaf):
        rows = rows if operands.is_whole(rhs) else None
        return operands.quantize(gemm, rhs, leaf, gemm.forward_dtype, rows=rows)
    _, inv_scale = scale_leaves.scale_of(leaf, holds_log2=True)
    return Quantized(stored(rhs.astype(gemm.forward_dtype)), inv_scale), stored_kernels.used(leaf)


# --- current scaling: each tensor's scale comes from itself ------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _current_dot(gemm: Gemm, recipe: Any, lhs: Array, rhs: Array) -> Array:
    lhs_q = _quantize_by_itself(recipe, lhs, gemm.forward_dtype, backward=False)
    return gemms.fprop(gemm, lhs_q, _quantize_by_itself(recipe, rhs, gemm.forward_dtype, backward=False))


def _current_forward(gemm: Gemm, recipe: Any, lhs: Array, rhs: Array) -> tuple[Array, Any]:
    lhs, rhs = once(lhs), once(rhs)
    lhs_q = _quantize_by_itself(recipe, lhs, gemm.forward_dtype, backward=False)
    rhs_q = _quantize_by_itself(recipe, rhs, gemm.forward_dtype, backward=False)
    return gemms.fprop(gemm, lhs_q, rhs_q), remat.packed((lhs_q, rhs_q))


def _current_backward(gemm: Gemm, recipe: Any, residuals: Any, grad: Array) -> tuple[Array, Array]:
    grad_q = _quantize_by_itself(recipe, once(grad), gemm.backward_dtype, backward=True)
    lhs_q, rhs_q = remat.unpacked(residuals)
    return gemms.backprop(gemm, lhs_q, rhs_q, grad_q)


_current_dot.defvjp(_current_forward, _current_backward)


def _quantize_by_itself(recipe: Any, x: Array, dtype: Any, *, backward: bool) -> Quantized:
    with jax.named_scope("jaxmp.fp8_quantize"):
        largest = largest_magnitude(x)
        scale = recipe.scale(largest, backward=backward)
        if recipe.power_of_two:
            scale = float_bits.power_of_two(
                jnp.clip(float_bits.log2_of_power_of_two(scale), np.float32(-63), np.float32(63))
            )
        values = stored(quantize(x, scale, dtype))
        # The cast makes inf finite, so the overflow must show here.
        inv_scale = jnp.where(largest < jnp.inf, float_bits.reciprocal(scale), jnp.nan)
        return Quantized(*remat.named((values, inv_scale)))


def _explicit_spec(x: Array) -> tuple[Any, ...] | None:
    """The PartitionSpec of `x` on a mesh with explicit axes: a GEMM over a split dimension needs one for its result."""
    return tuple(jax.typeof(x).sharding.spec) if shardings.is_explicit(x) else None


def plain_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    dtype: Any,
    out_sharding: Any = None,
    *,
    scales: Scales | None = None,
) -> Array:
    """The product without fp8: both operands and the result in `dtype`."""
    if scales is not None and stored_kernels.holds_fp8(rhs, scales.rhs):
        rhs = stored_kernels.dequantized(rhs, scales.rhs, dtype)
    return lax.dot_general(
        lhs.astype(dtype), rhs.astype(dtype), dimension_numbers, preferred_element_type=dtype, out_sharding=out_sharding
    )


def result_dtype(lhs: Array, rhs: Array) -> Any:
    """The narrower dtype, lhs's if both are equally wide: a float32 weight does not widen bfloat16 activations.

    A weight in fp8 counts as bfloat16.
    """
    rhs_dtype = jnp.dtype(jnp.bfloat16) if stored_kernels.is_stored(rhs) else rhs.dtype
    return lhs.dtype if lhs.dtype.itemsize <= rhs_dtype.itemsize else rhs_dtype
