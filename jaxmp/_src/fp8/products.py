"""The one derivative of a matmul in low precision: three products, by any recipe.

For y = x w with the gradient g of y, each tensor is an operand of two products:

    fprop   y  = x w
    dgrad   dx = g w^T
    wgrad   dw = x^T g

A recipe casts each tensor for the products that read it (`Recipe.cast`) and multiplies (`Recipe.multiply`). The forward
pass keeps what the backward pass multiplies. The gradient of a scale leaf is the amax of its tensor.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxmp._src.fp8 import gemms, made as made_lib, operands
from jaxmp._src.fp8.first_derivatives import by_rule
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.made import Made
from jaxmp._src.fp8.scale_leaves import Scales


def matmul(
    gemm: Gemm,
    lhs: Array,
    rhs: Array,
    *,
    scales: Scales | None = None,
    bias: Array | None = None,
    made: Made | None = None,
    seed: Array | None = None,
) -> Array:
    """The matmul `gemm` by its recipe.

    Args:
      gemm: what is multiplied, and how.
      lhs, rhs: the operands, in their own dtypes.
      scales: the leaves of a recipe with state.
      bias: is not added, but its gradient is that of a bias of the last axes of the result.
      made: how a norm or an activation made lhs, if one did.
      seed: uint32[2], for a recipe that rounds gradients at random.
    """
    return by_rule(_Matmul(gemm), (lhs, rhs), (scales, bias, made, seed))


class _Matmul(NamedTuple):
    gemm: Gemm

    def value(self, tensors: Any, others: Any) -> Array:
        """y."""
        (lhs, rhs), (scales, *_) = tensors, others
        gemm, recipe = self.gemm, self.gemm.recipe
        x = recipe.cast(gemm, "lhs", lhs, ("fprop",), leaf=getattr(scales, "lhs", None))
        w = recipe.cast(gemm, "rhs", rhs, ("fprop",), leaf=getattr(scales, "rhs", None))
        return gemms.multiplied(gemms.fprop(gemm), x.of["fprop"], w.of["fprop"], recipe.multiply)

    def forward(self, tensors: Any, others: Any) -> tuple[Array, tuple[Any, ...]]:
        """y, and each operand as the backward pass reads it."""
        (lhs, rhs), (scales, _, made, seed) = tensors, others
        gemm, recipe = self.gemm, self.gemm.recipe
        lhs_leaf, rhs_leaf = getattr(scales, "lhs", None), getattr(scales, "rhs", None)
        x = recipe.cast(gemm, "lhs", lhs, recipe.narrow("lhs"), leaf=lhs_leaf, made=made)
        w = recipe.cast(gemm, "rhs", rhs, recipe.narrow("rhs"), leaf=rhs_leaf)
        out = gemms.multiplied(gemms.fprop(gemm), x.of["fprop"], w.of["fprop"], recipe.multiply)
        out = checkpoint_name(out, made_lib.PRODUCT)
        before = None if gemm.activation is None else lhs
        kept_x = x.of["wgrad"] if recipe.wgrad is None else lhs
        kept_w = w.of["dgrad"] if recipe.dgrad is None else (rhs, rhs_leaf)
        return out, (kept_x, kept_w, x.amax, w.amax, getattr(scales, "grad", None), before, seed)

    def backward(self, kept: tuple[Any, ...], grad: Array) -> tuple[Any, Any]:
        """dx and dw; the amaxes, the gradient of a bias."""
        x, w, lhs_amax, rhs_amax, leaf, before, seed = kept
        gemm, recipe = self.gemm, self.gemm.recipe
        narrow = recipe.narrow("grad")
        if narrow:
            has_kernel = recipe.has_state and not gemm.batch[0]
            made = made_lib.found(grad, gemms.dgrad(gemm).contract[0]) if has_kernel else None
            g = recipe.cast(gemm, "grad", grad, narrow, leaf=leaf, made=made, seed=seed)
        else:
            g = operands.not_cast(gemm, grad, leaf)
        if recipe.dgrad is None:
            d_lhs = gemms.multiplied(gemms.dgrad(gemm), g.of["dgrad"], w, recipe.multiply)
        else:
            d_lhs = gemms.in_bfloat16(gemms.dgrad(gemm), grad, operands.in_bfloat16(*w))
        if recipe.wgrad is None:
            d_rhs = gemms.multiplied(gemms.wgrad(gemm), x, g.of["wgrad"], recipe.multiply)
        else:
            wide = x if gemm.activation is None else operands.activated(x, gemm.activation)
            d_rhs = gemms.in_bfloat16(gemms.wgrad(gemm), wide, grad)
        if gemm.activation is not None:
            with jax.named_scope(f"jaxmp.fp8_{gemm.activation}_grad"):
                d_lhs = operands.activation_gradient(d_lhs, before, gemm.activation)
        d_lhs = checkpoint_name(d_lhs, made_lib.PRODUCT)
        d_bias = None if g.sums is None else g.sums.astype(gemm.bias_dtype)
        amaxes = None if g.amax is None else Scales(lhs_amax, rhs_amax, g.amax)
        no_gradient = None if seed is None else np.zeros(seed.shape, jax.dtypes.float0)
        return (d_lhs, d_rhs), (amaxes, d_bias, None, no_gradient)
