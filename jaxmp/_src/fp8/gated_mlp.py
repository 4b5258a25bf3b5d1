"""A gated MLP in fp8 as one operation: one cast of its input, and one pass between its GEMMs, forward and backward.

    a = x w_gate      b = x w_up      h = silu(a) b      y = h w_down                         (SwiGLU)

As three layers, x is cast twice, h is written in 16 bits and read again for its cast, and so are the gradients of a and
b. Here one kernel reads a and b and writes h in fp8 in both forms (`gemms`), and one reads a, b and the gradient of h
and writes the gradients of a and b in fp8 in both forms. h and these gradients are computed in float32 and rounded
once, to fp8. The forward pass keeps a and b in 16 bits and the cast tensors; under remat with `save_quantized`, it
keeps only the cast tensors.

Where no kernel can run, XLA computes the same.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import compat, vmap_rules
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.fp8 import gemms, made as made_lib, matmul, operands, padding, remat, scale_leaves, shared_scales
from jaxmp._src.fp8.block_matmul import DimensionNumbers
from jaxmp._src.fp8.first_derivatives import by_rule
from jaxmp._src.fp8.gemms import Gemm, Quantized
from jaxmp._src.fp8.matmul import Scales
from jaxmp._src.numerics import casting, quantize as quantize_lib
from pallas_kernels import backend, passes, reference


class GatedScales(NamedTuple):
    """The scale leaves of the three layers of a gated MLP.

    Example:
      >>> scales = Scales(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))
      >>> GatedScales(gate=scales, up=scales, down=scales).down.lhs.shape
      ()
    """

    gate: Scales
    up: Scales
    down: Scales


def gated_mlp(
    x: Float[Array, "... K"],
    gate: Float[Array, "K F"],
    up: Float[Array, "K F"],
    down: Float[Array, "F N"],
    *,
    recipe: Any,
    scales: tuple[Scales, Scales, Scales] | None = None,
    layer: str | None = None,
    key: Array | None = None,
) -> Float[Array, "... N"]:
    """(silu(x gate) * (x up)) down, whose nine GEMMs, forward and backward, run in fp8; see the module's docstring.

    With a recipe without state, and for widths that are no multiples of 16, it is three `dot_general`s.

    Args:
      x: bfloat16, float16 or float32.
      gate, up, down: the weights; float32 weights get float32 gradients.
      recipe: `DelayedScaling` (with `scales`), or a recipe without state.
      scales: the scale leaves of gate, up and down. Their gradients are the amaxes. x is cast with the scale of gate's
        `lhs`; its amax is the gradient of that leaf and of up's `lhs`.
      layer: a name for warnings.
      key: for stochastic rounding, as for `dot_general`.

    Returns:
      y, in the narrower dtype of x and `down`.

    Raises:
      ValueError: as `dot_general`.

    Example:
      >>> import jaxmp
      >>> x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 32)) / 32
      >>> y = gated_mlp(x, w, w, w, recipe=jaxmp.fp8.CurrentScaling())
      >>> y.shape, y.dtype.name, float(y[0, 0])  # silu(1) is 0.73, in fp8 0.75
      ((16, 32), 'bfloat16', 0.75)

    References:
      Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202); TransformerEngine's LayerNormMLP.
    """
    weights = (gate, up, down)
    scales = None if scales is None else GatedScales(*scales)
    if scales is None or len(recipe.narrow("grad")) < 2 or not recipe.has_state or _why_not_at_once(x, weights):

        def dot(x: Array, w: Array, name: str) -> Array:
            leaves = None if scales is None else getattr(scales, name)
            path = f"{layer}/{name}" if layer else name
            own = None if key is None else jax.random.fold_in(key, GatedScales._fields.index(name))
            return matmul.dot_general(x, w, last_by_first(x), recipe=recipe, scales=leaves, layer=path, key=own)

        return of_layers(dot, x, weights)
    matmul.note_use()
    axes = tuple(frozenset().union(*(compat.varying_axes(t) for t in (x, *weights))))
    leaves = [leaf for part in scales for leaf in part]
    by_own_amax = matmul.by_own_amax(leaves, layer)
    made = None
    if not by_own_amax:  # x is cast with the scale of gate
        leaves[0] = shared_scales.leaf_for(scales.gate.lhs, (recipe, None), x)
        made = made_lib.found(x, (x.ndim - 1,))
    arrays, treedef = jax.tree.flatten(made)

    def at_once(x: Array, gate: Array, up: Array, down: Array, *more: Array) -> Array:
        scales = GatedScales(*(Scales(*more[i : i + 3]) for i in (0, 3, 6)))
        into = _gemm(x, gate, x.dtype, recipe, by_own_amax=by_own_amax)
        mlp = _MLP(into, _gemm(x, down, into.out_dtype, recipe, by_own_amax=by_own_amax))
        zeros, _ = padding.zeros_for(x.shape, gate.shape, *last_by_first(x))  # rows of zeros stay zeros
        made = None if zeros or len(more) == 9 else jax.tree.unflatten(treedef, more[9:])
        y = by_rule(mlp, (padding.pad(x, zeros), gate, up, down), (scales, made))
        return padding.crop(y, zeros)

    def vmapped(size: int, args: Sequence[Array], batched: Sequence[bool]) -> tuple[Array, int]:
        args, batched = args[:13], batched[:13]  # x is cast as it is
        if not any(batched[1:]):  # a batch of x is more rows
            return vmap_rules.call(at_once, vmapped, *args), 0
        return jax.vmap(at_once, [0 if has_axis else None for has_axis in batched], axis_size=size)(*args), 0

    tensors, arrays = ([compat.as_varying(t, axes) for t in part] for part in ((x, *weights), arrays))
    return vmap_rules.call(at_once, vmapped, *tensors, *leaves, *arrays)


def _gemm(x: Array, rhs: Array, lhs_dtype: Any, recipe: Any, *, by_own_amax: bool) -> Gemm:
    return Gemm(
        contract=((x.ndim - 1,), (0,)),
        batch=((), ()),
        forward_dtype=recipe.dtype(backward=False),
        backward_dtype=recipe.dtype(backward=True),
        holds_log2=recipe.power_of_two,
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=matmul.result_dtype(x, rhs),
        by_own_amax=by_own_amax,
        recipe=recipe,
        ndims=(x.ndim, rhs.ndim),
    )


def _fprop(gemm: Gemm, lhs: Quantized, rhs: Quantized) -> Array:
    return gemms.multiplied(gemms.fprop(gemm), lhs, rhs, gemm.recipe.multiply)


def _backprop(gemm: Gemm, lhs: Quantized, rhs: Quantized, grad: Quantized) -> tuple[Array, Array]:
    """The gradients of lhs and rhs."""
    multiply = gemm.recipe.multiply
    d_lhs = gemms.multiplied(gemms.dgrad(gemm), grad, rhs, multiply)
    return d_lhs, gemms.multiplied(gemms.wgrad(gemm), lhs, grad, multiply)


def _why_not_at_once(x: Array, weights: Sequence[Array]) -> str | None:
    gate, up, down = weights
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return "gate and up differ"
    if any(shardings.is_explicit(t) for t in (x, *weights)):
        return "on a mesh with explicit axes"
    if any(side % padding.MULTIPLE for side in (*gate.shape, down.shape[1])):
        return "a width is no multiple of 16"
    if x.ndim < 2 or (not operands.is_whole(x) and math.prod(x.shape[:-1]) % padding.MULTIPLE):
        return "the rows cannot be padded"
    return None


def last_by_first(x: Array) -> DimensionNumbers:
    """The dimension numbers of x [..., K] by a weight [K, N]."""
    return (((x.ndim - 1,), (0,)), ((), ()))


def of_layers(dot: Callable[[Array, Array, str], Array], x: Array, weights: Sequence[Array]) -> Array:
    """The same by three matmuls, `dot(x, w, name of the layer)`."""
    gate, up, down = weights
    return dot(jax.nn.silu(dot(x, gate, "gate")) * dot(x, up, "up"), down, "down")


class _MLP(NamedTuple):
    """The MLP and its derivative: the matmuls of gate and up, and of down."""

    into: Gemm
    down: Gemm

    def value(self, tensors: Any, others: Any) -> Array:
        """y."""
        (x, gate, up, down), (scales, _) = tensors, others
        x_q, _ = operands.quantize(self.into, x, scales.gate.lhs, self.into.forward_dtype)
        a, b = (
            _fprop(self.into, x_q, operands.quantize_rhs(self.into, w, part.rhs, None)[0])
            for w, part in ((gate, scales.gate), (up, scales.up))
        )
        ((h_q, _),) = _computed(self.down, _GATED, (a, b), (scales.down.lhs,), self.down.forward_dtype, None)
        return _fprop(self.down, h_q, operands.quantize_rhs(self.down, down, scales.down.rhs, None)[0])

    def forward(self, tensors: Any, others: Any) -> tuple[Array, tuple[Any, ...]]:
        """y, and what the backward pass reads."""
        (x, gate, up, down), (scales, made) = tensors, others
        into, rows = self.into, x.ndim - 1
        x_q, x_amax = operands.quantize(into, x, scales.gate.lhs, into.forward_dtype, rows=rows, made=made)
        gate_q, gate_amax = operands.quantize_rhs(into, gate, scales.gate.rhs, 1)
        up_q, up_amax = operands.quantize_rhs(into, up, scales.up.rhs, 1)
        a, b = _fprop(into, x_q, gate_q), _fprop(into, x_q, up_q)
        ((h_q, h_amax),) = _computed(self.down, _GATED, (a, b), (scales.down.lhs,), self.down.forward_dtype, rows)
        down_q, down_amax = operands.quantize_rhs(self.down, down, scales.down.rhs, 1)
        y = _fprop(self.down, h_q, down_q)
        kept_x, kept_h = (operands.kept(into, "lhs", q) for q in (x_q, h_q))
        kept_gate, kept_up, kept_down = (operands.kept(into, "rhs", q) for q in (gate_q, up_q, down_q))
        amaxes = (x_amax, gate_amax, up_amax, h_amax, down_amax)
        leaves = (*(part.grad for part in scales), scales.up.lhs)
        return y, ((kept_x, kept_gate, kept_up, kept_h, kept_down), a, b, amaxes, leaves)

    def backward(self, kept: tuple[Any, ...], grad: Array) -> tuple[Any, Any]:
        """The gradients of x and the weights; the amaxes."""
        (x_q, gate_q, up_q, h_q, down_q), a, b, amaxes, (gate_leaf, up_leaf, down_leaf, up_lhs) = kept
        x_amax, gate_amax, up_amax, h_amax, down_amax = amaxes
        rows = grad.ndim - 1
        grad_q, grad_amax = operands.quantize(self.down, grad, down_leaf, self.down.backward_dtype, rows=rows)
        d_h, d_down = _backprop(self.down, h_q, down_q, grad_q)
        (a_q, a_amax), (b_q, b_amax) = _computed(
            self.into, _GATED_GRAD, (d_h, a, b), (gate_leaf, up_leaf), self.into.backward_dtype, rows
        )
        from_a, d_gate = _backprop(self.into, x_q, gate_q, a_q)
        from_b, d_up = _backprop(self.into, x_q, up_q, b_q)
        of_scales = GatedScales(
            gate=Scales(x_amax, gate_amax, a_amax),
            up=Scales(lax.convert_element_type(x_amax, up_lhs.dtype), up_amax, b_amax),
            down=Scales(h_amax, down_amax, grad_amax),
        )
        return (from_a + from_b, d_gate, d_up, d_down), (of_scales, None)


# --- one pass that computes values and casts them -----------------------------------------------------------------


class _Computation(NamedTuple):
    """Values that are computed from tensors, in float32, and cast."""

    name: str
    function: Callable[..., Any]
    inputs: int
    values: int

    def of(self, *tensors: Array) -> list[Array]:
        """The values."""
        made = self.function(*map(casting.widened, tensors))
        return list(made) if isinstance(made, tuple) else [made]


_GATED = _Computation("silu_gated", reference.silu_gated, 2, 1)
_GATED_GRAD = _Computation("silu_gated_grad", reference.silu_gated_grad, 3, 2)


def _computed(
    gemm: Gemm,
    computation: _Computation,
    tensors: Sequence[Array],
    leaves: Sequence[Array],
    dtype: Any,
    rows: int | None,
) -> list[tuple[Quantized, Array]]:
    """Each value, cast to fp8 with the scale of its leaf, and its amax in the leaf's dtype; see `operands.quantize`."""
    with jax.named_scope("jaxmp.fp8_quantize"):
        scales = [scale_leaves.scale_of(leaf, holds_log2=gemm.holds_log2) for leaf in leaves]
        factors = [scale for scale, _ in scales]
        if gemm.by_own_amax or rows is None or _why_no_kernel(computation, tensors, dtype, rows):
            values = computation.of(*tensors)
            observed = [quantize_lib.observe(value, scale) for value, scale in zip(values, factors, strict=True)]
            if gemm.by_own_amax:
                scales = [operands.scales_of(amax, dtype, holds_log2=gemm.holds_log2) for amax in observed]
            cast = [
                quantize_lib.quantize(value, scale, dtype) for value, (scale, _) in zip(values, scales, strict=True)
            ]
            found = [(quantize_lib.stored(q), None, amax) for q, amax in zip(cast, observed, strict=True)]
        else:
            flat = _both_ways(computation, jnp.dtype(dtype), rows)(*tensors, *factors)
            found = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]
        results = []
        for (values, transposed, amax), (_, inv_scale), leaf in zip(remat.named(found), scales, leaves, strict=True):
            amax = collectives.max_over(amax, tuple(compat.varying_axes(amax) - compat.varying_axes(leaf)))
            results.append((Quantized(values, inv_scale, transposed), lax.convert_element_type(amax, leaf.dtype)))
        return results


def _plan(computation: _Computation, dtype: Any, rows: int) -> passes.Pass:
    name = f"{computation.name}_cast_transpose_amax"
    return passes.Pass(name, computation.function, computation.inputs, computation.values, jnp.dtype(dtype), None, rows)


def _why_no_kernel(computation: _Computation, tensors: Sequence[Array], dtype: Any, rows: int) -> str | None:
    if any(t.dtype not in passes.DTYPES for t in tensors):
        return "of a dtype that no kernel reads"
    return backend.why_no_kernels() or passes.why_not(_plan(computation, dtype, rows), tensors)


@functools.lru_cache(maxsize=256)
def _both_ways(computation: _Computation, dtype: Any, rows: int) -> Callable[..., Any]:
    """(tensors, scales) -> for each value q, q transposed and amax; by the kernel if it can."""
    plan = _plan(computation, dtype, rows)

    def by_xla(*args: Array) -> list[Array]:
        values, scales = computation.of(*args[: computation.inputs]), args[computation.inputs :]
        found = []
        for value, scale in zip(values, scales, strict=True):
            q = quantize_lib.stored(quantize_lib.quantize(value, scale, dtype))
            found += [q, reference.transpose(q, rows), quantize_lib.observe(value, scale)]
        return found

    @jax.custom_batching.custom_vmap
    def both(*args: Array) -> list[Array]:
        return passes.run_or(plan, by_xla, args)

    @both.def_vmap
    def both_of_batch(axis_size: int, in_batched: Sequence[bool], *args: Array) -> Any:
        in_axes = [0 if batched else None for batched in in_batched]
        flat, is_batched = jax.vmap(by_xla, in_axes, axis_size=axis_size)(*args), [True] * 3 * computation.values
        tensors = [
            t if batched else jnp.broadcast_to(t, (axis_size, *t.shape))
            for t, batched in zip(args[: computation.inputs], in_batched, strict=False)
        ]
        for i, value in enumerate(computation.of(*tensors)):  # one amax for all members that share a scale
            place = computation.inputs + i
            flat[3 * i + 2], is_batched[3 * i + 2] = quantize_lib.observe_batch(
                axis_size, (True, in_batched[place]), value, args[place]
            )
        return flat, is_batched

    return both
