"""Guards of fp8 scales: they are those of the recipe that moves them, and so is their state; readers get numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.fp8.recipe import has_state
from jaxmp._src.step import scales
from jaxmp._src.step.state import Fp8State


@functools.wraps(scales.get_scales)
def get_scales(params: PyTree) -> dict[str, Float[Array, "..."]]:
    _check_numbers(params, "get_scales", "params")
    return scales.get_scales(params)


@functools.wraps(scales.get_amaxes)
def get_amaxes(grads: PyTree) -> dict[str, Float[Array, "..."]]:
    _check_numbers(grads, "get_amaxes", "grads")
    return scales.get_amaxes(grads)


def _check_numbers(tree: PyTree, reader: str, of: str) -> None:
    for path, x in tree_paths.leaves_by_path(tree).items():
        if isinstance(x, jax.ShapeDtypeStruct) and scale_leaves.is_scale(path):
            raise TypeError(
                f"{reader} reads numbers; got a shape and a dtype without numbers (a jax.ShapeDtypeStruct, as "
                f"jax.eval_shape returns) at {path}. Pass {of} that were computed; for names, shapes and dtypes call "
                f"jax.eval_shape(jaxmp.fp8.{reader}, {of})."
            )


def check(recipe: scales.Recipe, params: PyTree, state: Any = None) -> None:
    """Raises a ValueError unless `params` are scale leaves of this recipe, and `state`, if it is given, is theirs."""
    leaves = tree_paths.boxed_leaves(params)[0]
    if not leaves:
        raise ValueError(
            "a recipe with delayed scaling needs layers that hold fp8 scales; got params without any. In linen, "
            'params = jaxmp.autocast(model.init, "fp8")(key, x)["params"], or layers with '
            "dot_general_cls=jaxmp.linen.Fp8DotGeneral; in nnx, jaxmp.nnx.to_fp8(model, filter=...) first. These leave "
            "out the first and the last layer with weights, or what filter= does not match. If the layers have a "
            "recipe without state, pass it here too: recipe = jaxmp.fp8.CurrentScaling(); "
            "jaxmp.mixed_precision(optimizer, policy, recipe=recipe). Layers that are not flax's own hold no scales: "
            'for them take the policy "bf16-mixed", and the loss jaxmp.autocast(loss_fn, "fp8", '
            "recipe=jaxmp.fp8.CurrentScaling()). If the scales lie beside frozen weights, put mixed_precision around "
            "optax.multi_transform or masked, not inside; for nnx, add them to the filter: "
            "wrt=nnx.Any(nnx.LoRAParam, jaxmp.nnx.Fp8Scale)."
        )
    recipes = scale_leaves.recipes_of(recipe)
    for path, _ in leaves:
        _check_format(path, recipes[scale_leaves.pattern_for(recipes, path, "fp8 scale")])
    if state is not None:
        _check_state(scales.groups_of(recipe, params), state, params)


def _check_format(path: str, recipe: Any) -> None:
    if not has_state(recipe):
        raise ValueError(
            f"{path} belongs to a layer with delayed scaling, but the recipe for it is {recipe!r}. Give the layer and "
            f"mixed_precision the same recipe."
        )
    backward, dtype, holds_log2 = scale_leaves.format_of(path)
    expected = recipe.dtype(backward=backward)
    if jnp.dtype(dtype) != jnp.dtype(expected) or holds_log2 != recipe.power_of_two:
        kind = {True: "powers of two", False: "any scale"}
        raise ValueError(
            f"the recipe must be the one that the layer was built with; the leaf {path} holds {kind[holds_log2]} for "
            f"{jnp.dtype(dtype)}, the recipe says {kind[recipe.power_of_two]} for {jnp.dtype(expected)}. Give the "
            f"layer and mixed_precision the same recipe."
        )


def _check_state(groups: list[Any], state: Fp8State, params: PyTree) -> None:
    sizes = [jnp.size(x) for x in jax.tree.leaves(params)]
    expected = [sum(sizes[i] for i in group.indices) for group in groups]
    got = [jnp.size(amax_state.scale) for amax_state in state.amax_states]
    if got != expected:
        raise ValueError(
            f"the state must be of this recipe and these params; it holds groups of {got} fp8 scales, the params "
            f"{expected}. Make it with tx.init(params), or restore the one that was saved with them."
        )
    for group, amax_state in zip(groups, state.amax_states, strict=True):
        length = amax_state.amax_history.shape[0]
        if length != group.recipe.amax_history_len:
            raise ValueError(
                f"the amax history must have the recipe's length, {group.recipe.amax_history_len}; got {length}, "
                f"perhaps from a checkpoint. Call opt_state = jaxmp.fp8.resize_history(opt_state, recipe) once."
            )
