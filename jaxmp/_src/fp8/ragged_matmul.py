"""The fp8 matmul of a mixture of experts: `ragged_dot`, whose rows belong to experts in contiguous groups.

For y = x w with x [M, K], experts w [G, K, N], and e(m) the expert of row m:

    fprop   y[m]  = Q(x)[m] Q(w)[e(m)]                      / (s_x s_w)
    dgrad   dx[m] = Q(g)[m] Q(w)[e(m)]^T                    / (s_g s_w)
    wgrad   dw[e] = sum over its rows m of Q(x)[m]^T Q(g)[m]  / (s_x s_g)

As in `matmul`, each tensor has one scale and one amax. A row after the last group belongs to no expert: its result and
gradient are zero, and no amax includes it. An expert without rows has a gradient of zero.

Each row is multiplied by its own expert only, in all three products (`pallas_kernels.grouped`): in fp8 on an NVIDIA
Hopper GPU; elsewhere the same fp8 numbers are multiplied in bfloat16, which holds them exactly, and summed in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmp._src.base import compat
from jaxmp._src.fp8 import matmul, recipe as recipe_lib, remat
from jaxmp._src.fp8.casts import Tensor
from jaxmp._src.fp8.first_derivatives import in_reverse, once
from jaxmp._src.fp8.gemms import Gemm, Quantized
from jaxmp._src.fp8.matmul import Scales
from pallas_kernels import backend, grouped


def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Int[Array, "g"],
    *,
    recipe: Any,
    scales: Scales | None = None,
    preferred_element_type: Any = None,
) -> Float[Array, "m n"]:
    """`jax.lax.ragged_dot` whose products, forward and backward, run in fp8; see the module's docstring.

    Args:
      lhs: rows, sorted by expert.
      rhs: the experts' weights.
      group_sizes: how many rows each expert has; the sum is at most m.
      recipe: `DelayedScaling` (with `scales`) or `CurrentScaling` (without).
      scales: the layer's scale leaves. Their gradients are the amaxes of lhs, rhs and the gradient of the result.
      preferred_element_type: dtype of the result; default: the narrower of the two inputs'.

    Returns:
      The product; the gradients of lhs and rhs have the inputs' dtypes. All sizes run in fp8 (zeros are added inside).
      Under plain jit, rows that are split over devices stay split, and the experts are gathered. Experts that are
      split over devices need `jax.shard_map`.

    Warns:
      FallbackWarning: the GPU of this machine is no Hopper, or this jax has no kernels for it. The operands are rounded
        to fp8 as always, and multiplied in bfloat16.

    Raises:
      ValueError: a recipe with state without scales, or scales for a recipe without state; a recipe of blocks; shapes
        that do not fit.

    Example:
      >>> import jaxmp
      >>> x, experts, sizes = jnp.ones((5, 20)), jnp.ones((3, 20, 4)), jnp.array([2, 0, 3])
      >>> ragged_dot(x, experts, sizes, recipe=jaxmp.fp8.CurrentScaling()).shape
      (5, 4)
    """
    fits = lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[1] and group_sizes.shape == rhs.shape[:1]
    if not fits:
        raise ValueError(
            f"ragged_dot takes lhs [m, k], rhs [g, k, n] and group_sizes [g]; got {lhs.shape}, {rhs.shape} and "
            f"{group_sizes.shape}"
        )
    recipe_lib.check(recipe)
    if not recipe.has_one_scale:
        raise ValueError(f"ragged_dot takes DelayedScaling() or CurrentScaling(); got {recipe!r}")
    if len(recipe.narrow("grad")) < 2:
        raise ValueError(f"ragged_dot computes all three products in fp8; got {recipe!r}. Leave dgrad= and wgrad= out.")
    matmul.check_scales(recipe, scales)
    matmul.note_use()
    axes = tuple(compat.varying_axes(lhs) | compat.varying_axes(rhs) | compat.varying_axes(group_sizes))
    lhs, rhs, group_sizes = (compat.as_varying(x, axes) for x in (lhs, rhs, group_sizes))
    if backend.oldest_gpu() is not None and (reason := grouped.why_not() or backend.why_not_here((lhs, rhs))):
        matmul.warn_of_fallback(jnp.dtype(jnp.bfloat16), f"{reason}.", None)
    gemm = Gemm(
        recipe=recipe,
        contract=((1,), (1,)),
        batch=((), (0,)),
        ndims=(2, 3),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=jnp.dtype(preferred_element_type or matmul.result_dtype(lhs, rhs)),
        dgrad_dtype=lhs.dtype,
        by_own_amax=matmul.by_own_amax(scales or (), None),
    )
    return in_reverse(_ragged_dot)(gemm, lhs, rhs, group_sizes, scales)


def plain_ragged_dot(lhs: Array, rhs: Array, group_sizes: Array, preferred_element_type: Any) -> Array:
    """The product without fp8: both operands and the result in one dtype."""
    dtype = preferred_element_type or matmul.result_dtype(lhs, rhs)
    return lax.ragged_dot(
        lhs.astype(dtype), rhs.astype(dtype), group_sizes, preferred_element_type=preferred_element_type
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(gemm: Gemm, lhs: Array, rhs: Array, group_sizes: Array, scales: Scales | None) -> Array:
    return _forward(gemm, lhs, rhs, group_sizes, scales)[0]


def _forward(gemm: Gemm, lhs: Array, rhs: Array, group_sizes: Array, scales: Scales | None) -> tuple[Array, Any]:
    lhs_leaf, rhs_leaf, grad_leaf = scales or (None, None, None)
    lhs, rhs = once(_in_groups(lhs, group_sizes)), once(rhs)
    x = gemm.recipe.cast(gemm, Tensor("lhs", lhs, lhs_leaf), ("fprop", "wgrad"))
    w = gemm.recipe.cast(gemm, Tensor("rhs", rhs, rhs_leaf), ("fprop", "dgrad"))
    x_q, w_q = x.of["fprop"], w.of["fprop"]
    with jax.named_scope("jaxmp.fp8_fprop"):
        y = _product(grouped.by_expert, x_q, w_q, group_sizes, gemm.out_dtype)
    return y, (remat.packed((x_q, w_q)), group_sizes, x.amax, w.amax, grad_leaf)


def _backward(gemm: Gemm, residuals: Any, grad: Array) -> tuple[Any, ...]:
    quantized, group_sizes, lhs_amax, rhs_amax, leaf = residuals
    x_q, w_q = remat.unpacked(quantized)
    g = gemm.recipe.cast(gemm, Tensor("grad", once(_in_groups(grad, group_sizes)), leaf), ("dgrad", "wgrad"))
    g_q = g.of["dgrad"]
    with jax.named_scope("jaxmp.fp8_dgrad"):
        dx = _product(grouped.by_expert, g_q, w_q, group_sizes, gemm.lhs_dtype, transposed=True)
    with jax.named_scope("jaxmp.fp8_wgrad"):
        dw = _product(grouped.per_expert, x_q, g_q, group_sizes, gemm.rhs_dtype)
    no_gradient = np.zeros(group_sizes.shape, jax.dtypes.float0)
    return dx, dw, no_gradient, None if g.amax is None else Scales(lhs_amax, rhs_amax, g.amax)


_ragged_dot.defvjp(_forward, _backward)


def _in_groups(x: Array, group_sizes: Array) -> Array:
    """`x` with zeros in the rows that belong to no expert."""
    belongs = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(jnp.expand_dims(belongs, 1), x, jnp.zeros((), x.dtype))


def _product(f: Any, a: Quantized, b: Quantized, group_sizes: Array, dtype: Any, **more: Any) -> Array:
    """One product of fp8 operands, unscaled, in `dtype`."""
    return f(a.values, b.values, group_sizes, a.inv_scale * b.inv_scale, dtype, **more)
