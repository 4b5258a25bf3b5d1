"""Refuses, in `shard_map`, an optimizer that needs whole leaves where it gets parts of them.

`jaxmp.fsdp.gather` writes a note of which params are cut (`distributed.gathered_params`). If an update follows, this
file traces the inner optimizer once more, alone. `programs.parts` finds the results that depend on a norm, a mean or a
product of a part: a clip by a norm that is not summed over the axis, LAMB, Adafactor, Muon.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import shardings
from jaxmp._src.distributed import gathered_params
from jaxmp._src.numerics import casting
from jaxmp._src.programs import parts
from jaxmp._src.step import extra_arguments


def check(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> None:
    """Raises a ValueError for the first result that is made from all of this device's part of a cut param.

    The inner optimizer sees `params` in float32.
    """
    for axis, cut in gathered_params.cuts_of(params):
        _check_over(axis, cut, inner, updates, state, params, extra_args)


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
        results = extra_arguments.update(inner, updates, state, full, extra_args)
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
                f"{_place_of(value.equation)}, and {path} is made from it. Use a transform that takes the axis "
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


def _place_of(eqn: Any) -> str:
    """Where an equation was written: the innermost function outside of jax."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    outside = (f for f in frames if f"{os.sep}jax{os.sep}" not in f.file_name)
    found = next(outside, None)
    return "" if found is None else f" ({found.function_name} in {os.path.basename(found.file_name)})"
