"""Imports the fp8 state of flax's own layers, `_overwrite_with_gradient`, as scale leaves and amax histories.

For each of the three tensors of a layer, flax keeps a scale s and a history of amaxes in a collection beside the
params. s is the scale of the last step, and flax divides by it before the cast. Each step computes its own scale from
the history:

    flax   h = [newest, oldest, ..., second newest]     s' = max(h) / fp8_max                     q = x / s'
    ours   h = [free, oldest, ..., newest]              leaf = log2(1 / s'), rounded down         q = x * 2^leaf

So this file computes the leaf from the history. With a scaled loss, flax's amaxes are those of scaled gradients, and
ours are those of unscaled gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.checkpoint import fp8_history
from jaxmp._src.fp8 import scale_equations, scale_leaves
from jaxmp._src.numerics import float_bits
from jaxmp._src.step import state as states, state_arrays

_OPERANDS = {"input": "lhs", "kernel": "rhs", "output_grad": "grad"}


def import_flax_fp8(
    collection: PyTree, params: PyTree, opt_state: Any, *, loss_scale: float = 1.0
) -> tuple[PyTree, Any]:
    """Imports scales and histories of flax's fp8 layers (`flax.linen.fp8_ops`) into params and state.

    Args:
      collection: `variables["_overwrite_with_gradient"]` of the flax model.
      params: the params of the same model with our layers: the weights, and new scale leaves.
      opt_state: state of `mixed_precision` for these params, with a `DelayedScaling` recipe.
      loss_scale: the loss scale of the flax job when it recorded the amaxes of gradients; 1 without loss scaling.

    Returns:
      `(params, opt_state)`. Histories are cut to the recipe's length and keep the newest amaxes.

    Raises:
      ValueError: a layer that only one of the two has, named by path; a state without fp8 scales, or with several
        recipes.

    Example:
      >>> import jaxmp, optax
      >>> one = {"fp8_lhs_e4m3_log2_scale": 0.0, "fp8_rhs_e4m3_log2_scale": 0.0, "fp8_grad_e5m2_log2_scale": 0.0}
      >>> params = {"Dense_0": {"kernel": jnp.ones((16, 16)), "Fp8DotGeneral_0": jax.tree.map(jnp.float32, one)}}
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8")
      >>> names = ("input", "kernel", "output_grad")
      >>> op = {f"{n}_scale": jnp.ones(1) for n in names} | {f"{n}_amax_history": jnp.full(8, 3.0) for n in names}
      >>> params, opt_state = import_flax_fp8({"Dense_0": {"Fp8DotGeneralOp_0": op}}, params, tx.init(params))
      >>> float(params["Dense_0"]["Fp8DotGeneral_0"]["fp8_lhs_e4m3_log2_scale"])
      7.0
    """
    found = states.find(opt_state, states.Fp8State)
    leaves = tree_paths.leaves_by_path(params)
    columns = fp8_history.columns(leaves, [x.scale.shape[-1] for x in found[0].amax_states]) if found else None
    if columns is None or len(found) != 1:
        raise ValueError(
            f"opt_state must have the fp8 state of one delayed-scaling recipe; got {len(found)} fp8 states in "
            f"opt_state{', of several recipes' if found else ''}. Make it with "
            f"jaxmp.mixed_precision(inner, policy, recipe=jaxmp.fp8.DelayedScaling()).init(params)."
        )
    theirs = _operands(collection)
    ours = {path: _layer_and_operand(path) for path in leaves if scale_leaves.is_scale(path)}
    for path, key in ours.items():
        if key not in theirs:
            raise ValueError(
                f"both models must have the same layers in fp8; {path} is not in the collection, which has "
                f"{', '.join(dict.fromkeys(layer for layer, _ in theirs))}. Choose layers with filter=."
            )
    for layer, operand in theirs:
        if (layer, operand) not in ours.values():
            raise ValueError(
                f"both models must have the same layers in fp8; {layer} has no scale leaves in the params."
            )
    histories, moved = {}, {}
    for path, key in ours.items():
        scale, history = theirs[key]
        is_gradient, dtype, holds_log2 = scale_leaves.format_of(path)
        history = history / np.float32(loss_scale) if is_gradient else history
        last = 1.0 / scale * (np.float32(loss_scale) if is_gradient else np.float32(1.0))
        if holds_log2:
            last = scale_equations.scale_from_amax(1.0 / last, 1.0, fallback=1.0)  # rounded down to a power of two
        new = scale_equations.scale_from_amax(
            jnp.max(history, axis=0), float(jnp.finfo(dtype).max), fallback=last, power_of_two=holds_log2
        )
        leaf = float_bits.log2_of_power_of_two(new) if holds_log2 else new
        histories[fp8_history.key_of(path)] = jnp.roll(history, -1, axis=0).at[0].set(0.0)[:, None]
        moved[path] = leaf.reshape(leaves[path].shape)
    params = tree_paths.map_with_path(lambda path, x: moved.get(path, x), params)
    leaves |= moved

    def visit(node: Any) -> Any:
        if not isinstance(node, states.Fp8State):
            return node
        groups = [
            fp8_history.group(histories, leaves, members, old.amax_history.shape[0])
            for members, old in zip(columns, node.amax_states, strict=True)
        ]
        return node._replace(amax_states=tuple(groups))

    new_state = jax.tree.map(visit, opt_state, is_leaf=lambda x: isinstance(x, states.Fp8State))
    return params, state_arrays.own_buffers(new_state, foreign=(params, opt_state))


def _layer_and_operand(path: str) -> tuple[str, str]:
    layer, _, operand = fp8_history.key_of(path).rpartition("/")
    return layer.rpartition("/")[0], operand


def _operands(collection: PyTree) -> dict[tuple[str, str], tuple[Array, Array]]:
    """{(layer, operand): (scale float32[], history float32[len])}"""
    leaves, found = tree_paths.leaves_by_path(collection), {}
    for path, scale in leaves.items():
        op, _, name = path.rpartition("/")
        if not name.endswith("_scale") or name.removesuffix("_scale") not in _OPERANDS:
            continue
        name = name.removesuffix("_scale")
        history = leaves.get(f"{op}/{name}_amax_history".lstrip("/"))
        if history is None:
            raise ValueError(f"each scale must have a history beside it; {op}/{name}_amax_history is missing.")
        if jnp.size(scale) != 1 or history.ndim != 1:
            raise ValueError(
                f"the state must be that of single layers, not of a stack (nn.scan); got a history of shape "
                f"{history.shape} at {op}/{name}_amax_history. Unstack it."
            )
        scale, history = (compat.max_dtype_to_float32(jnp.asarray(x)) for x in (scale, history))
        found[op.rpartition("/")[0], _OPERANDS[name]] = scale.reshape(()), history
    if not found:
        raise ValueError(
            f"the collection must have leaves such as <layer>/<op>/input_scale; got none among "
            f'{", ".join(leaves) or "{}"}. Pass variables["_overwrite_with_gradient"].'
        )
    return found
