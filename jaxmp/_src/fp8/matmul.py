"""The fp8 matmul: a `dot_general` whose three GEMMs run in 8 bits, by any recipe.

For y = x w with the gradient g of y, scales s and Q(t) = fp8(clip(t * s)):

    fprop   y  = Q(x) Q(w)   / (s_x s_w)      e4m3 x e4m3, fast accumulation
    dgrad   dx = Q(g) Q(w)^T / (s_g s_w)      e5m2 (HYBRID) x e4m3, full accumulation
    wgrad   dw = Q(x)^T Q(g) / (s_x s_g)      e4m3 x e5m2 (HYBRID), full accumulation

x and w are cast once, and the backward pass keeps their fp8 copies. Casts saturate. The same pass finds the largest
magnitude of each tensor, which is the gradient of its scale leaf (see `scale_leaves`).

On CUDA the GEMM gets fp8 operands, and XLA gives it to cuBLASLt with the scale inside; "fast" and "full" accumulation
are `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM` and `ANY_F8_ANY_F8_F32`, chosen as TransformerEngine does.
Elsewhere the same fp8 numbers are multiplied in float32: exact products, another order of sums.

From top to bottom: `dot_general` checks its arguments; `_Product` is the rule for vmap, and makes matrices of what it
gets; `_matmul` with `_forward` and `_backward` is the derivative.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, compat, hardware, vmap_rules
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import activations, casts, first_derivatives, fused_casts, gemms, recipe as recipe_lib, remat
from jaxmp._src.fp8.casts import Tensor
from jaxmp._src.fp8.first_derivatives import once
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.scale_leaves import Scales as Scales
from jaxmp._src.numerics import casting, frozen_kernel

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class FallbackWarning(UserWarning):
    """A matmul that should run in fp8 runs in its inputs' own dtype; the message says why.

    Example:
      >>> import jaxmp, warnings
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", FallbackWarning)  # every fallback is an error
      ...     x, outer = jnp.ones(16), (((), ()), ((), ()))
      ...     try:
      ...         y = dot_general(x, x, outer, recipe=jaxmp.fp8.CurrentScaling())
      ...     except FallbackWarning as e:
      ...         print(e)
      this matmul runs in float32 instead of fp8: it sums over no axis [docs/warnings.md#fp8-fallback]
    """


def note_use() -> None:
    """Says that a matmul with scales is traced here, in fp8 or not: `value_and_grad` warns of a loss without one."""
    ambient.now().notes.fp8_matmuls += 1


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
    bias: Float[Array, "..."] | None = None,
    layer: str | None = None,
    key: Array | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` whose GEMMs, forward and backward, run in fp8; see the module's docstring.

    Sides of a GEMM that are no multiples of 16 are padded with zeros inside. Under `jax.vmap` over lhs alone, the batch
    joins the rows of lhs: it is one GEMM, also backward, with one amax for each tensor.

    Args:
      lhs, rhs: float arrays; any batch and contracting dimensions.
      dimension_numbers: as for `jax.lax.dot_general`.
      recipe: `DelayedScaling` (with `scales`), or a recipe without state.
      scales: the layer's scale leaves. Their gradients are the amaxes of lhs, rhs and the gradient of the result.
      preferred_element_type: dtype of the result; default: the narrower of the two inputs' (a float32 weight does not
        widen bfloat16 activations).
      out_sharding: how the result lies on a mesh with explicit axes, as for `jax.lax.dot_general`.
      activation: "gelu", "gelu_exact" or "silu" (`fp8/activations.py`): lhs goes through it first. With
        `DelayedScaling` f(lhs) is computed in float32 and rounded once, to fp8; on a GPU (but for "gelu_exact") it is
        not written to memory in any other dtype. By other recipes it is rounded to the dtype of lhs in between.
      bias: added to the product; of the shape of the axes of rhs that are neither summed over nor batch axes. With
        `DelayedScaling` its gradient is summed in float32, in the pass that casts the gradient of the result.
      layer: a name for warnings.
      key: a key of `jax.random` for the stochastic rounding of gradients; other recipes need none.

    Returns:
      The product. The gradients of lhs and rhs have the inputs' dtypes: float32 for a float32 weight, straight from the
      GEMM's accumulator.

    Raises:
      TypeError: operands that are no floats, or whose shapes do not fit; no recipe.
      ValueError: a recipe with state without scales, or scales for a recipe without state; an unknown activation; a
        bias of another shape; a gradient that is rounded at random without a key.

    Warns:
      FallbackWarning: no axis is contracted (an outer product); the product then runs in the result's dtype.

    Example:
      >>> import jaxmp
      >>> x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 48), jnp.bfloat16)
      >>> y = dot_general(x, w, (((1,), (0,)), ((), ())), recipe=jaxmp.fp8.CurrentScaling())
      >>> y.shape, y.dtype.name, float(y[0, 0])
      ((16, 48), 'bfloat16', 32.0)

    References:
      Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv 2209.05433); TransformerEngine's Linear.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    contract, batch = (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch))
    recipe_lib.check(recipe)
    rhs = jnp.asarray(rhs) if frozen_kernel.is_frozen(rhs) else rhs
    _check_operands(lhs, rhs, contract, batch)
    out_dtype = jnp.dtype(preferred_element_type or result_dtype(lhs, rhs))
    note_use()
    if bias is not None:
        _check_bias(bias, rhs, contract[1] + batch[1])
    reason = None if contract[0] else "it sums over no axis"
    dgrad_dtype = lhs.dtype if reason else traced_for(lhs.dtype)
    lhs, fused = lhs.astype(dgrad_dtype), None
    if activation is not None:
        activations.check(activation)
        lhs, fused = activations.activated(lhs, activation, is_cast_next=not reason and scales is not None)
    if reason:
        warn_of_fallback(out_dtype, reason, layer)
        out = plain_dot_general(lhs, rhs, dimension_numbers, preferred_element_type, out_sharding)
        return out if bias is None else plus(out, bias)
    check_scales(recipe, scales)
    own_amax = by_own_amax(scales or (), layer)
    if activation is None and scales is not None and not own_amax and not batch[0]:
        fused = fused_casts.find(lhs, contract[0])
    axes = tuple(compat.varying_axes(lhs) | compat.varying_axes(rhs))  # both gradients vary over all of them
    # The pass that casts the gradient of the result also sums it, for the gradient of the bias.
    sums_bias = scales is not None and not batch[0] and bias is not None and bias.ndim > 0
    sums_bias = sums_bias and not any(shardings.is_explicit(x) for x in (lhs, rhs, bias) if x is not None)
    seed = None if key is None or not recipe.rounds_at_random else jax.random.bits(key, (2,), jnp.uint32)
    operands = (lhs, rhs, bias if sums_bias else None, None if own_amax else fused)
    lhs, rhs, summed, fused = jax.tree.map(lambda x: compat.as_varying(x, axes), operands)
    gemm = Gemm(
        recipe=recipe,
        contract=contract,
        batch=batch,
        ndims=(lhs.ndim, rhs.ndim),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=traced_for(out_dtype),
        dgrad_dtype=dgrad_dtype,
        bias_dtype=None if summed is None else summed.dtype,
        out_sharding=out_sharding,
        by_own_amax=own_amax,
        capability=hardware.capability(),
    )
    arrays, treedef = jax.tree.flatten((lhs, rhs, scales, summed, seed, fused))
    out = _Product(gemm, treedef).call(*arrays).astype(out_dtype)
    return out if bias is None else plus(out, bias if summed is None else lax.stop_gradient(summed))


def plus(out: Array, bias: Array) -> Array:
    """`out` with a bias of its last axes, in the dtype of `out`."""
    return out + jnp.reshape(bias, (1,) * (out.ndim - bias.ndim) + bias.shape).astype(out.dtype)


def _check_operands(lhs: Array, rhs: Array, contract: Any, batch: Any) -> None:
    """Raises a TypeError for operands that are no floats, or that do not fit: zeros are added to them later."""
    if not all([casting.is_float(x) for x in (lhs, rhs)]):
        raise TypeError(f"an fp8 matmul takes floats of 16 bits or more; got {lhs.dtype} and {rhs.dtype}. Cast them.")
    sides = [[x.shape[i : i + 1] for i in axes] for x, axes in zip((lhs, rhs) * 2, (*contract, *batch), strict=True)]
    if sides[0] != sides[1] or sides[2] != sides[3] or () in sides[0] + sides[2]:
        raise TypeError(
            f"lhs and rhs must have equal sizes on summed and batch axes; got {lhs.shape} and {rhs.shape}, with the "
            f"dimension numbers {(contract, batch)}."
        )


def _check_bias(bias: Array, rhs: Array, taken: Sequence[int]) -> None:
    free = tuple(rhs.shape[i] for i in range(rhs.ndim) if i not in taken)
    if bias.shape != free:
        raise ValueError(
            f"a bias must have the shape of the axes of rhs that are not summed over, {free}; got {bias.shape}. "
            f"Reshape it, or add it to the result."
        )


def check_scales(recipe: Any, scales: Scales | None) -> None:
    """Raises a ValueError unless a recipe with state has scales, and another has none."""
    if recipe.has_state != (scales is not None):
        raise ValueError(
            f"a recipe with delayed scaling needs scales=, one without state takes none; got {type(recipe).__name__} "
            f"and scales={'given' if scales is not None else 'None'}."
        )


# --- the rule for vmap, and matrices ----------------------------------------------------------------------------------


class _Product(NamedTuple):
    """A product as a function of the leaves of (lhs, rhs, scales, bias, seed, fused), whose structure is `treedef`.

    The bias is not added; but its gradient is what it would be.
    """

    gemm: Gemm
    treedef: Any
    members: tuple[tuple[bool, ...], ...] = ()  # for each vmap around, the outermost last: the arguments with its axis

    def call(self, *arrays: Array) -> Array:
        """The product, with the rule of `vmapped`."""
        return vmap_rules.call(self, self.vmapped, *arrays)

    def flops(self, lhs: tuple[int, ...], out: tuple[int, ...]) -> int:
        """The FLOPs of the forward product of these shapes, without padding."""
        around = sum(level[0] for level in self.members)  # axes of lhs
        return 2 * math.prod(out) * math.prod(lhs[around + i] for i in self.gemm.contract[0])

    def vmapped(self, size: int, arrays: Sequence[Array], batched: Sequence[bool]) -> tuple[Array, int]:
        """The rule for vmap: a batch of lhs alone becomes rows of lhs: one GEMM, one amax, also backward.

        Of several members with operands of their own, each has its product. lhs is then cast as it is.
        """
        *operands, fused = jax.tree.unflatten(self.treedef, arrays)
        if fused is not None:
            leaves, treedef = jax.tree.flatten((*operands, None))
            return self._replace(treedef=treedef).vmapped(size, leaves, batched[: len(leaves)])
        if any(batched[1:]) or self.gemm.out_sharding is not None:
            return self._replace(members=(*self.members, tuple(batched))).call(*arrays), 0
        around = sum(level[0] for level in self.members)  # axes of lhs
        product = self.with_rows().call(jnp.moveaxis(arrays[0], 0, around), *arrays[1:])
        return product, len(self.members) + len(self.gemm.batch[0])

    def with_rows(self, **changes: Any) -> "_Product":
        """The product of an lhs with one more axis, the first one."""
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = self.gemm.contract, self.gemm.batch
        contract = (tuple([i + 1 for i in lhs_contract]), rhs_contract)
        batch = (tuple([i + 1 for i in lhs_batch]), rhs_batch)
        return self._replace(gemm=self.gemm._replace(contract=contract, batch=batch, **changes))

    def __call__(self, *arrays: Array) -> Array:
        """The product without the rule."""
        run: Any = lambda *arrays: self.of_tensors(*jax.tree.unflatten(self.treedef, arrays))  # noqa: E731
        for level in self.members:
            run = jax.vmap(run, [0 if has_axis else None for has_axis in level])
        return run(*arrays)

    def of_tensors(self, lhs: Array, rhs: Array, *others: Any) -> Array:
        """The product for one member; a vector becomes a matrix, so that there is an axis to pad."""
        gemm, n_batch, n_summed = self.gemm, len(self.gemm.batch[0]), len(self.gemm.contract[0])
        if lhs.ndim == n_batch + n_summed:
            product = self.with_rows(out_sharding=_with_axis(gemm.out_sharding, n_batch))
            return jnp.squeeze(product.of_tensors(jnp.expand_dims(lhs, 0), rhs, *others), n_batch)
        if rhs.ndim == n_batch + n_summed:
            last = lhs.ndim - n_summed
            product = self._replace(gemm=gemm._replace(out_sharding=_with_axis(gemm.out_sharding, last)))
            return jnp.squeeze(product.of_tensors(lhs, jnp.expand_dims(rhs, rhs.ndim), *others), last)
        if gemm.recipe.folds_axes:
            return _of_three_axes(gemm, lhs, rhs, *others)
        if casts.is_whole(lhs) and casts.is_whole(rhs):
            lhs_zeros, rhs_zeros = gemms.zeros_for(lhs.shape, rhs.shape, gemm.contract, gemm.batch)
            gemm = gemm._replace(lhs_zeros=lhs_zeros, rhs_zeros=rhs_zeros)
        lhs_sharding, rhs_sharding = _explicit_shardings(lhs, rhs)
        gemm = gemm._replace(ndims=(lhs.ndim, rhs.ndim), lhs_sharding=lhs_sharding, rhs_sharding=rhs_sharding)
        return first_derivatives.in_reverse(_matmul)(gemm, lhs, rhs, *others)


def _of_three_axes(gemm: Gemm, lhs: Array, rhs: Array, scales: None, bias: None, seed: Any, fused: None) -> Array:
    """The product of lhs as [B, M, K] and rhs as [B, K, N]: several axes of a kind count as one, in their order."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = gemm.contract, gemm.batch
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_contract, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_contract, *rhs_batch)]
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]
    three = gemm._replace(contract=((2,), (1,)), batch=((0,), (0,)), ndims=(3, 3), out_sharding=None)

    def folded(x: Array, *groups: Sequence[int]) -> Array:
        order = [i for group in groups for i in group]
        return jnp.transpose(x, order).reshape([math.prod(x.shape[i] for i in group) for group in groups])

    def run(lhs: Array, rhs: Array, seed: Any) -> Array:
        lhs, rhs = folded(lhs, lhs_batch, lhs_free, lhs_contract), folded(rhs, rhs_batch, rhs_contract, rhs_free)
        return first_derivatives.in_reverse(_matmul)(three, lhs, rhs, scales, bias, seed, fused).reshape(shape)

    if not shardings.is_explicit(lhs) and not shardings.is_explicit(rhs):
        return run(lhs, rhs, seed)
    numbers = (gemm.contract, gemm.batch)
    plain = functools.partial(lax.dot_general, dimension_numbers=numbers, out_sharding=gemm.out_sharding)
    sharding: Any = jax.eval_shape(plain, lhs, rhs).sharding
    left_to_xla: Any = jax.sharding.auto_axes(run, out_sharding=sharding)
    return left_to_xla(lhs, rhs, seed)


# --- the derivative ---------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(gemm: Gemm, lhs: Array, rhs: Array, scales: Scales | None, bias: Any, seed: Any, fused: Any) -> Array:
    """y = x w, where nothing is differentiated."""
    lhs_leaf, rhs_leaf, _ = scales or (None, None, None)
    x = gemm.recipe.cast(gemm, Tensor("lhs", lhs, lhs_leaf), ("fprop",))
    w = gemm.recipe.cast(gemm, Tensor("rhs", rhs, rhs_leaf), ("fprop",))
    return gemms.multiplied(gemms.fprop(gemm), x.of["fprop"], w.of["fprop"], gemm.recipe.multiply)


# Traced once for each kind of layer, and written out in each: a deep model has many layers of one kind.
@functools.partial(jax.jit, static_argnums=0, inline=compat.WRITTEN_OUT)
def _forward(
    gemm: Gemm, lhs: Array, rhs: Array, scales: Scales | None, bias: Any, seed: Any, fused: Any
) -> tuple[Array, Any]:
    """y, and each operand as the backward pass reads it."""
    recipe, (lhs_leaf, rhs_leaf, grad_leaf) = gemm.recipe, scales or (None, None, None)
    lhs, rhs = once(lhs), once(rhs)
    x = recipe.cast(gemm, Tensor("lhs", lhs, lhs_leaf, fused), recipe.narrow("lhs"))
    w = recipe.cast(gemm, Tensor("rhs", rhs, rhs_leaf), recipe.narrow("rhs"))
    y = gemms.multiplied(gemms.fprop(gemm), x.of["fprop"], w.of["fprop"], recipe.multiply)
    kept_x = x.of["wgrad"] if recipe.wgrad is None else lhs
    kept_w = w.of["dgrad"] if recipe.dgrad is None else rhs
    residuals = remat.packed((kept_x, kept_w, x.amax, w.amax, grad_leaf, seed))
    return checkpoint_name(y, fused_casts.PRODUCT), residuals


def _backward(gemm: Gemm, residuals: Any, grad: Array) -> tuple[Any, ...]:
    """dx and dw; the amaxes, and the gradient of a bias."""
    summed = gemms.dgrad(gemm).contract[0]
    fused = fused_casts.find(grad, summed) if gemm.recipe.has_state and not gemm.batch[0] else None
    *gradients, d_bias = _gradients(gemm, residuals, grad, fused)
    seed = residuals[-1]
    return *gradients, d_bias, None if seed is None else np.zeros(seed.shape, jax.dtypes.float0), None


@functools.partial(jax.jit, static_argnums=0, inline=compat.WRITTEN_OUT)
def _gradients(gemm: Gemm, residuals: Any, grad: Array, fused: Any) -> tuple[Any, ...]:
    recipe, grad = gemm.recipe, once(grad)
    x, w, lhs_amax, rhs_amax, leaf, seed = remat.unpacked(residuals)
    dgrad, wgrad = gemms.dgrad(gemm), gemms.wgrad(gemm)
    if narrow := recipe.narrow("grad"):
        g = recipe.cast(gemm, Tensor("grad", grad, leaf, fused, seed), narrow)
    else:
        g = casts.no_cast(gemm, grad, leaf)
    if recipe.dgrad is None:
        dx = gemms.multiplied(dgrad, g.of["dgrad"], w, recipe.multiply)
    else:
        dx = gemms.in_bfloat16(dgrad, grad, w)
    if recipe.wgrad is None:
        dw = gemms.multiplied(wgrad, x, g.of["wgrad"], recipe.multiply)
    else:
        dw = gemms.in_bfloat16(wgrad, x, grad)
    amaxes = None if g.amax is None else Scales(lhs_amax, rhs_amax, g.amax)
    d_bias = None if g.sums is None else g.sums.astype(gemm.bias_dtype)
    return checkpoint_name(dx, fused_casts.PRODUCT).astype(gemm.lhs_dtype), dw, amaxes, d_bias


_matmul.defvjp(_forward, _backward)


# --- in which dtype, and whether in fp8 -------------------------------------------------------------------------------


def warn_of_layer(layer: str, reason: str) -> None:
    """Warns that a layer, by its path, never runs in fp8."""
    warn("fp8-fallback", f"the layer {layer} does not run in fp8: {reason}.", FallbackWarning)


def warn_of_fallback(dtype: Any, reason: str, layer: str | None) -> None:
    """Warns that a matmul (of a layer) runs in `dtype` instead of fp8."""
    where = f" (layer {layer})" if layer else ""
    warn(
        "fp8-fallback",
        f"this matmul{where} runs in {traced_for(dtype)} instead of fp8: {reason}",
        FallbackWarning,
    )


def by_own_amax(leaves: Sequence[Array], layer: str | None) -> bool:
    """Whether a layer casts each tensor with the scale of its own amax, not with those of its leaves.

    This is so during a calibration, and where a loss of `value_and_grad` calls a layer whose scales it does not
    differentiate: nothing updates these scales, and the loss scale does not shift them. Such a layer is noted.
    """
    if not leaves:
        return False
    unmoved = ambient.is_in_loss() and any(leaf.dtype != compat.max_dtype() for leaf in leaves)
    if unmoved:
        ambient.now().notes.unmoved_scales[layer or "a layer"] = None
    return unmoved or ambient.FP8_CALIBRATING.value


def traced_for(dtype: Any) -> Any:
    """The dtype in which a matmul traced in `dtype` will run: autocast traces in float32 and casts afterwards."""
    lists, is_tracing = ambient.AUTOCAST.value
    lists = lists if is_tracing and dtype == jnp.float32 else None
    return dtype if lists is None or lists.dtype is None else jnp.dtype(lists.dtype)


def _with_axis(sharding: Any, axis: int) -> Any:
    """The sharding of a result that has one more axis, which is not split; None and a PartitionSpec, too."""
    if sharding is None:
        return None
    spec = getattr(sharding, "spec", sharding)
    longer = PartitionSpec(*(*spec, *[None] * (axis - len(spec)))[:axis], None, *spec[axis:])
    return longer if spec is sharding else NamedSharding(sharding.mesh, longer)


def _explicit_shardings(*operands: Array) -> list[NamedSharding | None]:
    """The shardings on a mesh with explicit axes: a GEMM over a split dimension needs one for its result.

    An operand that was not put on the mesh of another is on all of its devices.
    """
    of_operands = [jax.typeof(x).sharding if shardings.is_explicit(x) else None for x in operands]
    mesh = next((sharding.mesh for sharding in of_operands if sharding is not None), None)
    if mesh is None:
        return of_operands
    whole = (NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)) for x in operands)
    return [w if own is None else own for own, w in zip(of_operands, whole, strict=True)]


def plain_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    preferred_element_type: Any,
    out_sharding: Any = None,
) -> Array:
    """The product without fp8: both operands and the result in one dtype."""
    dtype = preferred_element_type or result_dtype(lhs, rhs)
    return lax.dot_general(
        lhs.astype(dtype),
        rhs.astype(dtype),
        dimension_numbers,
        preferred_element_type=preferred_element_type,  # autocast takes a dtype that is named for a request
        out_sharding=out_sharding,
    )


def result_dtype(lhs: Array, rhs: Array) -> Any:
    """The narrower dtype, lhs's if both are equally wide: a float32 weight does not widen bfloat16 activations."""
    return lhs.dtype if lhs.dtype.itemsize <= rhs.dtype.itemsize else rhs.dtype
