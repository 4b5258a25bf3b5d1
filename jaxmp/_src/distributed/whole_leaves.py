"""Refuses, in `shard_map`, an optimizer that needs whole leaves where it gets parts of them; warns of padded leaves.

`jaxmp.fsdp.gather` writes a note of which params are cut (`gathered_params`). If an update follows, the inner optimizer
is traced once more, alone. `programs.parts` finds the results that depend on a norm, a mean or a product of a part: a
clip by a norm that is not summed over the axis, LAMB, Adafactor, Muon. (The types of their states do not tell: that of
`optax.clip_by_global_norm` is that of `optax.clip`.)
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import shardings
from jaxmp._src.distributed import gathered_params
from jaxmp._src.numerics import casting
from jaxmp._src.programs import jaxprs, parts

_MUCH_PADDING = 0.01  # share of a leaf; less changes a mean less than bfloat16 shows


def check(
    update: Callable[[PyTree, Any, PyTree], Any],
    init: Callable[[PyTree], Any],
    grads: PyTree,
    state: Any,
    params: PyTree,
) -> None:
    """Raises a ValueError for the first result that is made from all of this device's part of a cut param.

    Under plain jit it warns of results that count padding.

    Args:
      update: of the inner optimizer, `(grads, state, float32 params) -> (updates, state)`.
      init: of the inner optimizer.
      grads, state, params: as the step got them.
    """
    in_float32 = lambda grads, state, params: update(grads, state, casting.cast_floats(params, jnp.float32))  # noqa: E731
    notes = gathered_params.notes_of(params)
    for note in notes:
        if note.cut:
            _check_cut(note.axis_name, dict(note.cut), in_float32, grads, state, params)
    lengths = {keystr(path): jnp.shape(x) for path, x in tree_leaves_with_path(params)}
    padding = {
        path: (axis, length)
        for note in notes
        for path, axis, length in note.padded
        if length < (1 - _MUCH_PADDING) * lengths[path][axis]
    }
    if padding and any(isinstance(x, Tracer) for x in jax.tree.leaves(grads)):
        _warn_of_padding(padding, in_float32, init, grads, params)


def _check_cut(
    axis: str, cut: Mapping[str, int], update: Callable[..., Any], grads: PyTree, state: Any, params: PyTree
) -> None:
    shapes = {keystr(path): jnp.shape(x) for path, x in tree_leaves_with_path(params)}
    paths: list[str] = []

    def results(grads: PyTree, state: Any, params: PyTree) -> list[Any]:
        leaves = tree_leaves_with_path(update(grads, state, params))
        paths.extend(tree_paths.path_str(path[1:]) for path, _ in leaves)
        return [x for _, x in leaves]

    try:
        with warnings.catch_warnings(action="ignore"):
            program = jax.make_jaxpr(results)(grads, state, params)
    except Exception as error:
        for path, x in tree_leaves_with_path(state):  # state of rows and columns of whole leaves fails first
            owner = shardings.owner_of(keystr(path), shapes)
            if owner is not None and owner in cut and jnp.size(x) > 1 and jnp.shape(x) != shapes[owner]:
                raise ValueError(
                    f"in shard_map an optimizer's state must be cut over {axis!r} as the params are; got "
                    f"{tree_paths.path_str(path)} of shape {jnp.shape(x)} for a part of shape {shapes[owner]}. Use "
                    f"plain jax.jit with layout.shardings, or an elementwise optimizer."
                ) from error
        return  # the update itself says what is wrong

    def value_of(path: Any, x: Any) -> parts.Value:
        owner = shardings.owner_of(keystr(path), shapes)
        if owner is None or owner not in cut or not jnp.ndim(x):
            return parts.Value(parts.WHOLE)
        return parts.Value(parts.PART, cut[owner] if jnp.shape(x) == shapes[owner] else None)

    inputs = [value_of(path, x) for tree in (grads, state, params) for path, x in tree_leaves_with_path(tree)]
    for path, value in zip(paths, parts.values(program, inputs, axis), strict=True):
        if value.kind == parts.LOCAL:
            raise ValueError(
                f"an optimizer of params that are cut over {axis!r} must be elementwise, or reduce over {axis!r}; got "
                f"{value.cause}{jaxprs.place_of(value.equation)}, and {path} is made from it. Use plain "
                f"jax.jit with layout.shardings; for a clip jaxmp.clip_by_global_norm(..., axis_name={axis!r}, "
                f"replicated=layout.whole)."
            )


def _warn_of_padding(
    padding: Mapping[str, tuple[int, int]],
    update: Callable[..., Any],
    init: Callable[[PyTree], Any],
    grads: PyTree,
    params: PyTree,
) -> None:
    """Warns of an optimizer that computes with the sizes of leaves, as a mean does, where these count padding.

    Its programs for padded leaves and for leaves without padding then hold different numbers.
    """

    def program(*, trims: bool) -> Any:
        def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            dims = list(jnp.shape(x))
            axis, length = padding.get(keystr(path), (0, None))
            if trims and length is not None:
                dims[axis] = length
            return jax.ShapeDtypeStruct(tuple(dims), jnp.result_type(x))

        full = casting.cast_floats(tree_map_with_path(shape, params), jnp.float32)
        return jax.make_jaxpr(update)(tree_map_with_path(shape, grads), jax.eval_shape(init, full), full)

    try:
        with warnings.catch_warnings(action="ignore"):
            reader = parts.first_other_number(program(trims=False), program(trims=True))
    except Exception:  # what the update needs is not known here
        return
    if reader is None:
        return
    path, x = next((path, x) for path, x in tree_leaves_with_path(params) if keystr(path) in padding)
    axis, length = padding[keystr(path)]
    warn(
        "padding-counts",
        f"an optimizer must not count padding; got {reader.primitive.name}{jaxprs.place_of(reader)}, which depends on "
        f"sizes of leaves as a mean does, and {tree_paths.path_str(path)}, of which {length} of {jnp.shape(x)[axis]} "
        f"along axis {axis} are no padding. Use an elementwise optimizer, or a larger min_size= of "
        f"jaxmp.fsdp.layout_of.",
    )
