"""Refuses, in `shard_map`, an optimizer that needs whole leaves where it gets parts of them; warns of padded leaves.

`jaxmp.fsdp.gather` writes a note of which params are cut (`distributed.gathered_params`). If an update follows, this
file traces the inner optimizer once more, alone. `programs.parts` finds the results that depend on a norm, a mean or a
product of a part: a clip by a norm that is not summed over the axis, LAMB, Adafactor, Muon.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import shardings
from jaxmp._src.distributed import gathered_params
from jaxmp._src.numerics import casting
from jaxmp._src.programs import jaxprs, parts
from jaxmp._src.step import inner_update

_MUCH_PADDING = 0.01  # share of a leaf; less changes a mean less than bfloat16 shows


def check(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> None:
    """Raises a ValueError for the first result that is made from all of this device's part of a cut param.

    Under plain jit it warns of results that count padding. The inner optimizer sees `params` in float32.
    """
    for axis, cut in gathered_params.cuts_of(params):
        _check_over(axis, cut, inner, updates, state, params, extra_args)
    lengths = {keystr(path): jnp.shape(x) for path, x in tree_leaves_with_path(params)}
    padding = {
        path: (axis, length)
        for path, (axis, length) in gathered_params.paddings_of(params).items()
        if length < (1 - _MUCH_PADDING) * lengths[path][axis]
    }
    if padding and any(isinstance(x, Tracer) for x in jax.tree.leaves(updates)):
        _warn_of_padding(padding, inner, updates, params, extra_args)


def _warn_of_padding(
    padding: Mapping[str, tuple[int, int]], inner: Any, updates: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> None:
    """Warns of an optimizer that computes with the sizes of leaves, as a mean does, where these count padding.

    Its programs for padded leaves and for leaves without padding then hold different numbers.
    """

    def program(tree: PyTree, *, trims: bool) -> Any:
        def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            dims = list(jnp.shape(x))
            axis, length = padding.get(keystr(path), (0, None))
            if trims and length is not None:
                dims[axis] = length
            return jax.ShapeDtypeStruct(tuple(dims), jnp.result_type(x))

        grads = jax.tree_util.tree_map_with_path(shape, updates)
        full = casting.cast_floats(jax.tree_util.tree_map_with_path(shape, tree), jnp.float32)

        def run(grads: PyTree, state: Any, full: PyTree) -> Any:
            return inner_update.update(inner, grads, state, full, extra_args)

        return jax.make_jaxpr(run)(grads, jax.eval_shape(inner.init, full), full)

    try:
        with warnings.catch_warnings(action="ignore"):
            found = parts.first_other_number(program(params, trims=False), program(params, trims=True))
    except Exception:  # what the update needs is not known here
        return
    if found is None:
        return
    path, x = next((path, x) for path, x in tree_leaves_with_path(params) if keystr(path) in padding)
    axis, length = padding[keystr(path)]
    warn(
        "padding-counts",
        f"an optimizer must not count padding as elements of a leaf; got "
        f"{found.primitive.name}{jaxprs.place_of(found)}, which depends on the sizes of leaves as a mean does, and "
        f"{tree_paths.path_str(path)}, of which {length} of {jnp.shape(x)[axis]} along axis {axis} are no padding: its "
        f"updates differ from those of one device. Use an elementwise optimizer; or a layout that does not pad this "
        f"leaf: a size that the number of devices divides, or a larger min_size= of jaxmp.fsdp.layout_of.",
    )


def _check_over(
    axis: str,
    cut: Mapping[str, int],
    inner: Any,
    updates: PyTree,
    state: Any,
    params: PyTree,
    extra_args: dict[str, Any],
) -> None:
    shapes = {keystr(path): jnp.shape(x) for path, x in tree_leaves_with_path(params)}
    paths: list[str] = []

    def run(updates: PyTree, state: Any, params: PyTree) -> list[Any]:
        full = casting.cast_floats(params, jnp.float32)
        results = inner_update.update(inner, updates, state, full, extra_args)
        leaves = tree_leaves_with_path(results)
        paths.extend(tree_paths.path_str(path[1:]) for path, _ in leaves)
        return [x for _, x in leaves]

    try:
        with warnings.catch_warnings(action="ignore"):
            program = jax.make_jaxpr(run)(updates, state, params)
    except Exception as e:
        _check_fits_parts(axis, cut, state, shapes, e)
        return  # the update itself says what is wrong

    def value_of(path: Any, x: Any) -> parts.Value:
        owner = shardings.owner_of(keystr(path), shapes)
        if owner is None or owner not in cut or not jnp.ndim(x):
            return parts.Value(parts.WHOLE)
        return parts.Value(parts.PART, cut[owner] if jnp.shape(x) == shapes[owner] else None)

    inputs = [value_of(path, x) for tree in (updates, state, params) for path, x in tree_leaves_with_path(tree)]
    for path, value in zip(paths, parts.values(program, inputs, axis), strict=True):
        if value.kind == parts.LOCAL:
            raise ValueError(
                f"in shard_map an optimizer gets this device's part of each param that is cut over {axis!r}, so it "
                f"must be elementwise, or reduce over {axis!r}; got {value.cause}"
                f"{jaxprs.place_of(value.equation)}, and {path} is made from it. Use a transform that takes the axis "
                f"(jaxmp.clip_by_global_norm(..., axis_name={axis!r}, replicated=layout.whole)), or plain jax.jit with "
                f"layout.shardings, where XLA sees whole leaves."
            )


def _check_fits_parts(axis: str, cut: Mapping[str, int], state: Any, shapes: Any, error: Exception) -> None:
    """Raises a ValueError, in place of `error`, if an update fails with state of rows and columns of whole leaves."""
    for path, x in tree_leaves_with_path(state):
        owner = shardings.owner_of(keystr(path), shapes)
        if owner in cut and jnp.size(x) > 1 and jnp.shape(x) != shapes[owner]:
            raise ValueError(
                f"in shard_map an optimizer gets this device's part of each param that is cut over {axis!r}, and its "
                f"state must be cut in the same way; got {tree_paths.path_str(path)} of shape {jnp.shape(x)} in the "
                f"optimizer's state for a part of shape {shapes[owner]}: rows and columns of the whole leaf. Use plain "
                f"jax.jit with layout.shardings, where XLA sees whole leaves, or an elementwise optimizer."
            ) from error
