"""Kernels that are already in fp8 when the layer gets them: stored so by the optimizer, or cast once per step.

An fp8 layer casts its kernel in every forward pass. There are two ways to save this cast:

- *stored*: the params hold fp8(w * s) instead of w. The optimizer writes it directly from the float32 master, with the
  scale s in the layer's leaf. Storage, reads and gathers of sharded params then take one byte per weight.
- *kept*: with microbatches, fp8(w * s) is computed once, before the first microbatch (TransformerEngine's
  `is_first_microbatch`).

Autodiff gives gradients the dtype of the params, and 8 bits are too few for a gradient. So while the loss is
differentiated, such a kernel holds its fp8 numbers in a wider dtype (bfloat16 if it is stored). The layer casts them
back to fp8, and XLA removes the two casts. The dtype of the layer's rhs leaf shows that the kernel holds fp8 numbers.
The gradient is that of the weight w. Other code in the loss that reads such a kernel would get w * s; jaxmp raises an
error.

A kernel belongs to the rhs leaf of a layer if it is called `kernel` and lies in the nearest level above the leaf that
has one: `Dense_0/kernel` and `Dense_0/Fp8DotGeneral_0/fp8_rhs_e4m3_log2_scale`. A kernel with two such leaves stays in
its dtype.
"""

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import scale_equations, scale_leaves
from jaxmp._src.numerics import float_bits, quantize, reductions
from jaxmp._src.programs import jaxprs, readers
from pallas_kernels import late_scales

_DTYPE = jnp.float8_e4m3fn
_LEAF = "fp8_rhs_e4m3_log2_scale"


def is_stored(x: Any) -> bool:
    """Whether a leaf is a kernel in fp8."""
    return getattr(x, "dtype", None) == _DTYPE


def pairs(tree: PyTree) -> dict[str, str]:
    """The path of the scale leaf of each kernel in an fp8 layer, by the path of the kernel.

    `tree` holds params, or `optax.MaskedNode()` in place of scale leaves.
    """
    is_unit = lambda x: tree_paths.is_box(x) or isinstance(x, optax.MaskedNode)  # noqa: E731
    units = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit)[0]
    paths = {tree_paths.path_str(path): x for path, x in units}
    # Of two products in one module, only one may read the kernel, and the paths do not say which.
    return {kernel: leaves[0] for kernel, leaves in _leaves_of_kernels(paths).items() if len(leaves) == 1}


def _leaves_of_kernels(paths: Mapping[str, Any]) -> dict[str, list[str]]:
    """The paths of the rhs leaves beside each kernel."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if path.rpartition("/")[2] != _LEAF:
            continue
        above = path.split("/")[:-1]
        levels = ["/".join([*above[:depth], "kernel"]) for depth in range(len(above), -1, -1)]
        kernel = next((k for k in levels if k in paths and not isinstance(paths[k], optax.MaskedNode)), None)
        if kernel is not None:
            found.setdefault(kernel, []).append(path)
    return found


def stored_pairs(params: PyTree) -> dict[str, str]:
    """The `pairs` whose kernel is stored in fp8."""
    by_path = tree_paths.leaves_by_path(params)
    return {kernel: leaf for kernel, leaf in pairs(params).items() if is_stored(by_path[kernel])}


def store(params: PyTree) -> PyTree:
    """`params` with the kernels of fp8 layers in float8_e4m3fn, and log2 of their scales in the rhs leaves."""
    by_path = tree_paths.leaves_by_path(params)
    new: dict[str, Any] = {}
    _warn_of_shared(by_path)
    for kernel, leaf in pairs(params).items():
        w = by_path[kernel]
        if is_stored(w):
            continue
        largest = quantize.largest_magnitude(w, keep=jnp.ndim(by_path[leaf]))
        scale = scale_equations.scale_from_amax(largest, float(jnp.finfo(_DTYPE).max), fallback=1.0)
        new[leaf] = float_bits.log2_of_power_of_two(scale)
        new[kernel] = cast(w, new[leaf])
    return tree_paths.map_with_path(lambda path, x: new.get(path, x), params)


def _warn_of_shared(paths: Mapping[str, Any]) -> None:
    """Warns of a kernel beside two products."""
    for kernel, leaves in _leaves_of_kernels(paths).items():
        if len(leaves) > 1:
            warn(
                "kernel-not-stored",
                f"fp8_weights=True stores a `kernel` with the scale of the one fp8 product beside it; got {kernel} "
                f"beside {', '.join(leaf.rpartition('/')[0] for leaf in leaves)}. It stays in its dtype, which is "
                f"right, but takes more memory. Put each weight with its product into a submodule.",
            )


def load_weights(params: PyTree, dtype: Any) -> PyTree:
    """`params` with ordinary weights in place of kernels that are stored in fp8: for layers without fp8, for export.

    Args:
      params: as `policy.cast_to_param` and `jaxmp.apply_gradients` store them.
      dtype: dtype of the weights.

    Returns:
      A tree of the same structure. (The weights in full are those of `jaxmp.get_master_params`.)

    Example:
      >>> params = {"kernel": jnp.full((2, 2), 3.0), "dot": {"fp8_rhs_e4m3_log2_scale": jnp.float32(0.0)}}
      >>> load_weights(store(params), jnp.bfloat16)["kernel"].tolist()
      [[3.0, 3.0], [3.0, 3.0]]
    """
    by_path = tree_paths.leaves_by_path(params)
    found = {kernel: leaf for kernel, leaf in pairs(params).items() if holds_fp8(by_path[kernel], by_path[leaf])}
    return tree_paths.map_with_path(
        lambda path, x: dequantized(x, by_path[found[path]], dtype) if path in found else x, params
    )


def check_reads(pullback: Any, params: PyTree) -> None:
    """Raises a ValueError for a loss that reads a kernel in fp8 as if it were the weight: outside of its layer.

    The linear part of the loss shows who reads a kernel (`programs.readers`), at no cost: `jax.vjp` has traced it. A
    layer and `load_weights` have a derivative of their own.

    Args:
      pullback: of the loss, from `jax.vjp`.
      params: as they were differentiated; see `enter`.
    """
    linear, kernels = compat.linear_jaxpr(pullback), marked_kernels(params)
    if linear is None or not kernels:
        return
    paths = list(tree_paths.leaves_by_path(params))
    inputs = jaxprs.open_jaxpr(linear)[0].invars
    nothing: readers.Marks = frozenset()
    marks = [nothing] * (len(inputs) - len(paths)) + [frozenset({p}) & kernels for p in paths]
    for path, eqn in readers.readers(linear, marks).items():
        refuse_read(f"a loss that reads argument {path} outside of an fp8 layer, in {jaxprs.name_of(eqn)}")


def refuse_read(got: str) -> NoReturn:
    """Raises a ValueError for a kernel in fp8 that is read as if it were the weight."""
    raise ValueError(
        f"a kernel in fp8 holds w * scale, which only its fp8 layer divides by the scale; got {got}. For a penalty, or "
        f"another use of the weights, take jaxmp.fp8.load_weights(params, jnp.float32). If it is the layer itself that "
        f'runs without fp8, call the model in `with jaxmp.autocast(policy):`, or pass policy="fp8" to '
        f"jaxmp.value_and_grad."
    )


def cast(w: Float[Array, "..."], leaf: Float[Array, "..."]) -> Array:
    """fp8(w * scale) with the scale of `leaf`; a stack of layers has a stack of leaves."""
    scale, _ = scale_leaves.scale_of(leaf, holds_log2=True)
    return quantize.quantize(w, _against(scale, w), _DTYPE)


def amaxes_of(masters: PyTree, params: PyTree) -> dict[str, Array]:
    """The amax of each stored kernel's master, by the path of its leaf; 0.0 for frozen kernels, which have no master.

    A stored kernel is saturated, so its own amax cannot show that the scale must fall.
    """
    leaves, weights = tree_paths.leaves_by_path(params), tree_paths.leaves_by_path(masters)
    for kernel in pairs(params):
        if kernel in weights and host_memory.is_on_host(weights[kernel]):
            raise ValueError(
                f"kernels that are stored in fp8 are written from masters on the device, because the scale needs all "
                f"elements; got the master of {kernel} in host memory. Keep masters on the device: "
                f'jaxmp.offload.put(opt_state, what=("moments",)), or leave fp8_weights=False.'
            )
    return {
        leaf: quantize.largest_magnitude(weights[kernel], keep=jnp.ndim(leaves[leaf]))
        if kernel in weights
        else jnp.zeros_like(leaves[leaf])
        for kernel, leaf in stored_pairs(params).items()
    }


def write(params: PyTree, masters: PyTree, before: PyTree | None) -> PyTree:
    """`params` with each stored kernel written again from its master, with the scale of its leaf in `params`.

    `before`: the params before the step. Their scales are the guesses of `late_scales`, as few steps change one. None:
    the cast waits for the scales.
    """
    by_path, weights, old = map(tree_paths.leaves_by_path, (params, masters, before))
    stored = {kernel: leaf for kernel, leaf in stored_pairs(params).items() if kernel in weights}
    is_single = lambda leaf: old and not leaf.ndim and not compat.varying_axes(leaf)  # noqa: E731
    single = {kernel: leaf for kernel, leaf in stored.items() if is_single(by_path[leaf])}
    new = {kernel: cast(weights[kernel], by_path[leaf]) for kernel, leaf in stored.items() if kernel not in single}
    if single:
        scales, guesses = (_scales_of([leaves[leaf] for leaf in single.values()]) for leaves in (by_path, old))
        kernels = late_scales.cast([weights[kernel] for kernel in single], scales, guesses, _DTYPE)
        new |= dict(zip(single, kernels, strict=True))
    return tree_paths.map_with_path(lambda path, x: new.get(path, x), params)


def _scales_of(leaves: list[Float[Array, ""]]) -> list[Float[Array, ""]]:
    return [scale_leaves.scale_of(leaf, holds_log2=True)[0] for leaf in reductions.out_of_one_array(leaves)]


def refuse_update(path: str) -> None:
    """Raises for the stored kernel at `path`: no update that is added gives its new value."""
    raise ValueError(
        f"kernels that are stored in fp8 cannot be moved by optax.apply_updates, only written from their masters; "
        f"got an update of {path}. Call params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params), "
        f"or use jaxmp.linen.TrainState or jaxmp.nnx.Optimizer. An optax wrapper of your own round "
        f"jaxmp.mixed_precision must hand its extra arguments on."
    )


def keep(params: PyTree) -> tuple[dict[str, Array], dict[str, Array]]:
    """(fp8 kernels by path, amaxes by the path of their leaf) of all kernels that are not stored in fp8."""
    by_path = tree_paths.leaves_by_path(params)
    kernels, amaxes = {}, {}
    for kernel, leaf in pairs(params).items():
        if not is_stored(by_path[kernel]):
            with jax.named_scope("jaxmp.fp8_quantize"):
                kernels[kernel] = quantize.stored(cast(by_path[kernel], by_path[leaf]))
                amaxes[leaf] = quantize.largest_magnitude(by_path[kernel], keep=jnp.ndim(by_path[leaf]))
    return kernels, amaxes


def enter(params: PyTree, kept: dict[str, Array]) -> PyTree:
    """`params` as they are differentiated: fp8 kernels (stored, or `kept` by path) in wider dtypes, leaves marked.

    The scale leaves come from `scale_leaves.enter`.
    """
    by_path = tree_paths.leaves_by_path(params)
    found = {kernel: leaf for kernel, leaf in pairs(params).items() if kernel in kept or is_stored(by_path[kernel])}
    marked = set(found.values())

    def typed(path: str, x: Any) -> Any:
        if path in found:
            return kept[path].astype(x.dtype) if path in kept else x.astype(jnp.bfloat16)
        return mark(x) if path in marked else x

    return tree_paths.map_with_path(typed, params)


def leave(grads: PyTree, amaxes: dict[str, Array]) -> PyTree:
    """`grads` with the amaxes of kept kernels whose layers were used. For stored kernels: 1.0 if used, else -inf."""
    return tree_paths.map_with_path(lambda path, g: jnp.where(g > 0, amaxes[path], g) if path in amaxes else g, grads)


def mark(leaf: Array) -> Array:
    """`leaf` in the dtype that says that its kernel holds fp8 numbers; integers up to 256 are exact in it."""
    narrow = compat.max_dtype_to_float32(leaf).astype(jnp.bfloat16)
    return lax.convert_element_type(narrow, compat.max_dtype(marks_fp8=True))


def is_marked(leaf: Array) -> bool:
    """Whether a layer's rhs leaf says that its kernel holds fp8 numbers."""
    return leaf.dtype == compat.max_dtype(marks_fp8=True)


def marked_kernels(params: PyTree) -> frozenset[str]:
    """Paths of the kernels that hold fp8 numbers in a wider dtype while a loss is differentiated."""
    by_path = tree_paths.leaves_by_path(params)
    return frozenset(kernel for kernel, leaf in pairs(params).items() if is_marked(by_path[leaf]))


def holds_fp8(kernel: Array, leaf: Array) -> bool:
    """Whether a kernel with this rhs leaf holds fp8 numbers."""
    return is_stored(kernel) or is_marked(leaf)


def used(leaf: Array) -> Array:
    """The gradient of a kernel's leaf if its layer ran: 1.0, in the dtype of the leaf.

    Without a mark the kernel is not differentiated, so nobody writes it again, and its scale must stay: 0.0, no amax.
    """
    number = 1.0 if is_marked(leaf) else 0.0
    numbers = compat.as_varying(jnp.full(leaf.shape, number, jnp.float32), tuple(compat.varying_axes(leaf)))
    return mark(numbers) if is_marked(leaf) else numbers.astype(leaf.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dequantized(kernel: Array, leaf: Array, dtype: Any) -> Float[Array, "..."]:
    """The weight of an fp8 kernel, for layers that do not run in fp8. Its gradient is the gradient of the weight."""
    _, inv_scale = scale_leaves.scale_of(leaf, holds_log2=True)
    return (kernel.astype(jnp.float32) * _against(inv_scale, kernel)).astype(dtype)


def _dequantized_forward(kernel: Array, leaf: Array, dtype: Any) -> Any:
    return dequantized(kernel, leaf, dtype), (kernel, leaf)


def _dequantized_backward(dtype: Any, residuals: Any, grad: Array) -> Any:
    kernel, leaf = residuals
    return grad.astype(kernel.dtype), used(leaf)


dequantized.defvjp(_dequantized_forward, _dequantized_backward)


def _against(scale: Array, w: Array) -> Array:
    """`scale`, whose axes are the first axes of w, in a shape that broadcasts against w."""
    return scale.reshape(scale.shape + (1,) * (w.ndim - scale.ndim))
