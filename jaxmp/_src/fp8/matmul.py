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

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, compat, vmap_rules
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import (
    block_matmul,
    made as made_lib,
    operands,
    padding,
    products,
    shared_scales,
    stored_kernels,
    told,
)
from jaxmp._src.fp8.block_matmul import DimensionNumbers
from jaxmp._src.fp8.gemms import Gemm
from jaxmp._src.fp8.operands import quantize_by_itself as quantize_by_itself, quantize_rhs as quantize_rhs
from jaxmp._src.fp8.scale_leaves import Scales as Scales
from pallas_kernels.activation import check_activation


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
      activation: "gelu", "gelu_exact" or "silu" (`pallas_kernels.activation`): lhs goes through it first. With
        `DelayedScaling` f(lhs) is computed in float32 and rounded once, to fp8; on a GPU (but for "gelu_exact") it is
        not written to memory in any other dtype. By other recipes it is rounded to the dtype of lhs in between.
      bias: added to the product; of the shape of the axes of rhs that are not summed over. With `DelayedScaling` its
        gradient is summed in float32, in the pass that casts the gradient of the result.
      layer: a name for warnings.
      key: a key of `jax.random` for the stochastic rounding of gradients; other recipes need none.

    Returns:
      The product. The gradients of lhs and rhs have the inputs' dtypes: float32 for a float32 weight, straight from the
      GEMM's accumulator.

    Raises:
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
    out_dtype = jnp.dtype(preferred_element_type or result_dtype(lhs, rhs))
    note_use()
    if bias is not None:
        _check_bias(bias, rhs, (rhs_contract, rhs_batch))
    reason = None if lhs_contract else "it sums over no axis"
    if activation is not None:
        check_activation(activation)
        if reason or scales is None:  # not fused: rounded to the dtype of lhs, as in a network
            lhs, activation = operands.activated(lhs, activation).astype(lhs.dtype), None
    if reason:
        warn_of_fallback(out_dtype, reason, layer)
        out = plain_dot_general(lhs, rhs, dimension_numbers, preferred_element_type, out_sharding, scales=scales)
        return out if bias is None else plus(out, bias)
    check_scales(recipe, scales)
    lhs, run_dtype = _as_run(lhs), traced_for(out_dtype)
    own_amax = by_own_amax(scales or (), layer)
    made = None
    if scales is not None and not own_amax:
        scales = scales._replace(lhs=shared_scales.leaf_for(scales.lhs, (recipe, activation), lhs))
        made = made_lib.found(lhs, lhs_contract) if activation is None and not lhs_batch else None
    axes = tuple(compat.varying_axes(lhs) | compat.varying_axes(rhs))  # both gradients vary over all of them
    lhs, rhs = compat.as_varying(lhs, axes), compat.as_varying(rhs, axes)
    contract, batch = (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch))
    product = _Product(recipe, contract, batch, run_dtype, out_sharding, activation, own_amax)
    seeds = [] if key is None or not recipe.rounds_at_random else [block_matmul.seed_of(key)]
    given = [lhs, rhs, *(scales or seeds)]
    jax_sums = scales is None or lhs_batch or bias is None or not bias.ndim or _on_explicit_axes(lhs, rhs, bias)
    if bias is not None and not jax_sums:
        given.append(compat.as_varying(bias, axes))
        bias = lax.stop_gradient(given[-1])
    if made is not None:
        arrays, treedef = jax.tree.flatten(made)
        product = product._replace(made=treedef)
        given += [compat.as_varying(x, axes) for x in arrays]
    out = product.call(*given).astype(out_dtype)
    return out if bias is None else plus(out, bias)


def plus(out: Array, bias: Array) -> Array:
    """`out` with a bias of its last axes, in the dtype of `out`."""
    return out + jnp.reshape(bias, (1,) * (out.ndim - bias.ndim) + bias.shape).astype(out.dtype)


def _check_bias(bias: Array, rhs: Array, taken: Any) -> None:
    contract, batch = taken
    free = tuple(rhs.shape[i] for i in range(rhs.ndim) if i not in (*contract, *batch))
    if bias.shape != free:
        raise ValueError(
            f"a bias has the shape of the axes of rhs that are not summed over, {free}; got {bias.shape}, with an rhs "
            f"of shape {rhs.shape}. Reshape it, or add it to the result."
        )


def _on_explicit_axes(*arrays: Array) -> bool:
    return any(shardings.is_explicit(x) for x in arrays)


def check_scales(recipe: Any, scales: Scales | None) -> None:
    """Raises a ValueError unless a recipe with state has scales, and another has none."""
    if recipe.has_state != (scales is not None):
        raise ValueError(
            f"a recipe with delayed scaling needs scales=, one without state takes none; got {type(recipe).__name__} "
            f"and scales={'given' if scales is not None else 'None'}."
        )


class _Product(NamedTuple):
    """The static part of a product in fp8, as a function of (lhs, rhs, scale leaves or a seed, if any, a bias, if any).

    The bias is not added; but its gradient is what it would be. The arrays of a `made.Made` of lhs come last.
    """

    recipe: Any
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    out_dtype: Any
    out_sharding: Any
    activation: str | None
    by_own_amax: bool
    made: Any = None  # the structure of this `Made`
    members: tuple[tuple[bool, ...], ...] = ()  # for each vmap around, the outermost last: the arguments with its axis

    def call(self, *args: Array) -> Array:
        """The product, with the rule of `vmapped`."""
        return vmap_rules.call(self, self.vmapped, *args)

    def vmapped(self, size: int, args: Sequence[Array], batched: Sequence[bool]) -> tuple[Array, int]:
        """The rule for vmap: a batch of lhs alone becomes rows of lhs."""
        if self.made is not None:  # lhs is cast as it is
            n = len(args) - self.made.num_leaves
            return self._replace(made=None).vmapped(size, args[:n], batched[:n])
        lhs, *others = args
        if any(batched[1:]) or self.out_sharding is not None:
            return self._replace(members=(*self.members, tuple(batched))).call(*args), 0
        around = sum(level[0] for level in self.members)  # axes of lhs
        product = self._with_rows().call(jnp.moveaxis(lhs, 0, around), *others)
        return product, len(self.members) + len(self.batch[0])

    def _with_rows(self) -> "_Product":
        """The product of an lhs with one more axis, the first one."""
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = self.contract, self.batch
        return self._replace(
            contract=(tuple(i + 1 for i in lhs_contract), rhs_contract),
            batch=(tuple(i + 1 for i in lhs_batch), rhs_batch),
        )

    def __call__(self, *args: Array) -> Array:
        """The product without the rule."""
        run: Any = self._of_matrix
        for level in self.members:
            run = jax.vmap(run, [0 if has_axis else None for has_axis in level])
        return run(*args)

    def _of_matrix(self, lhs: Array, rhs: Array, *more: Array) -> Array:
        """The product for one member; a vector becomes a matrix, so that there is an axis to pad."""
        n_batch, n_summed = len(self.batch[0]), len(self.contract[0])
        if lhs.ndim == n_batch + n_summed:
            product = self._with_rows()._replace(out_sharding=_with_axis(self.out_sharding, n_batch))
            return jnp.squeeze(product._of_matrix(jnp.expand_dims(lhs, 0), rhs, *more), n_batch)
        if rhs.ndim == n_batch + n_summed:
            last = lhs.ndim - n_summed
            product = self._replace(out_sharding=_with_axis(self.out_sharding, last))
            return jnp.squeeze(product._of_matrices(lhs, jnp.expand_dims(rhs, rhs.ndim), *more), last)
        return self._of_matrices(lhs, rhs, *more)

    def _of_matrices(self, lhs: Array, rhs: Array, *more: Array) -> Array:
        if self.recipe.folds_axes:
            seed = more[0] if more else None
            given = {"out_dtype": self.out_dtype, "out_sharding": self.out_sharding, "seed": seed}
            return block_matmul.dot_general(lhs, rhs, (self.contract, self.batch), recipe=self.recipe, **given)
        zeros: tuple[padding.Zeros, padding.Zeros] = (), ()
        if operands.is_whole(lhs) and operands.is_whole(rhs):
            zeros = padding.zeros_for(lhs.shape, rhs.shape, self.contract, self.batch)
        made = None
        if self.made is not None:
            n = len(more) - self.made.num_leaves
            made, more = jax.tree.unflatten(self.made, more[n:]), more[:n]
        lhs_sharding, rhs_sharding = _explicit_shardings(lhs, rhs)
        gemm = Gemm(
            contract=self.contract,
            batch=self.batch,
            forward_dtype=self.recipe.dtype(backward=False),
            backward_dtype=self.recipe.dtype(backward=True),
            holds_log2=self.recipe.power_of_two,
            lhs_dtype=lhs.dtype,
            rhs_dtype=rhs.dtype,
            out_dtype=self.out_dtype,
            lhs_sharding=lhs_sharding,
            rhs_sharding=rhs_sharding,
            out_sharding=self.out_sharding,
            activation=self.activation,
            lhs_zeros=zeros[0],
            rhs_zeros=zeros[1],
            by_own_amax=self.by_own_amax,
            recipe=self.recipe,
            ndims=(lhs.ndim, rhs.ndim),
        )
        scales, bias = (Scales(*more[:3]), more[3] if len(more) == 4 else None) if more else (None, None)
        gemm = gemm._replace(bias_dtype=None if bias is None else bias.dtype)
        return products.matmul(gemm, lhs, rhs, scales=scales, bias=bias, made=made)


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
    unmoved = ambient.is_in_loss() and any(leaf.dtype not in _MAX_DTYPES for leaf in leaves)
    if unmoved:
        ambient.now().notes.unmoved_scales[layer or "a layer"] = None
    return unmoved or ambient.FP8_CALIBRATING.value


_MAX_DTYPES = (compat.max_dtype(), compat.max_dtype(marks_fp8=True))


def traced_for(dtype: Any) -> Any:
    """The dtype in which a matmul traced in `dtype` will run: autocast traces in float32 and casts afterwards."""
    lists, is_tracing = ambient.AUTOCAST.value
    lists = lists if is_tracing and dtype == jnp.float32 else None
    return dtype if lists is None or lists.dtype is None else jnp.dtype(lists.dtype)


def _as_run(x: Array) -> Array:
    """`x` in the dtype in which a matmul that reads it will run."""
    dtype = traced_for(x.dtype)
    converted = x if dtype == x.dtype else x.astype(dtype)
    told.note_converted(x, converted)
    return converted


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
    found = [jax.typeof(x).sharding if shardings.is_explicit(x) else None for x in operands]
    mesh = next((sharding.mesh for sharding in found if sharding is not None), None)
    if mesh is None:
        return found
    whole = (NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)) for x in operands)
    return [w if own is None else own for own, w in zip(found, whole, strict=True)]


def plain_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    preferred_element_type: Any,
    out_sharding: Any = None,
    *,
    scales: Scales | None = None,
) -> Array:
    """The product without fp8: both operands and the result in one dtype."""
    dtype = preferred_element_type or result_dtype(lhs, rhs)
    if scales is not None and stored_kernels.holds_fp8(rhs, scales.rhs):
        rhs = stored_kernels.dequantized(rhs, scales.rhs, dtype)
    return lax.dot_general(
        lhs.astype(dtype),
        rhs.astype(dtype),
        dimension_numbers,
        preferred_element_type=preferred_element_type,  # autocast takes a dtype that is named for a request
        out_sharding=out_sharding,
    )


def result_dtype(lhs: Array, rhs: Array) -> Any:
    """The narrower dtype, lhs's if both are equally wide: a float32 weight does not widen bfloat16 activations.

    A weight in fp8 counts as bfloat16.
    """
    rhs_dtype = jnp.dtype(jnp.bfloat16) if stored_kernels.is_stored(rhs) else rhs.dtype
    return lhs.dtype if lhs.dtype.itemsize <= rhs_dtype.itemsize else rhs_dtype
