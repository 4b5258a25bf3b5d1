"""Histories of fp8 amaxes by layer and operand, to move them from the state of one job into that of another.

A state keeps the histories of all scales of one direction in one array, in the order of the tree (see `fp8_scales`).
Another model may have other layers in fp8, or other formats. So each history is looked up by layer and operand,
`Dense_0/Fp8DotGeneral_0/lhs`. An amax is a magnitude: it does not depend on the format of the scale made from it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp._src.base.warn import warn
from jaxmp._src.checkpoint.job_leaves import Saved
from jaxmp._src.fp8 import recipes, scale_equations, scale_leaves
from jaxmp._src.numerics import float_bits
from jaxmp._src.step import state_paths
from jaxmp._src.step.state_paths import StatePath

Histories = dict[str, Float[Array, "len size"]]


def key_of(path: str) -> str:
    """Layer and operand of the scale at `path`; the format is left out."""
    head, _, name = path.rpartition("/")
    return f"{head}/{name.split('_')[1]}".lstrip("/")


def of(saved: Saved) -> Histories | None:
    """The histories in a state of `update_amax` with one recipe; {} if there are none, None for several recipes."""
    params = saved.params
    histories = [x for path, x in saved.state.items() if _is_field(path, "amax_history")]
    in_columns = columns(params, [x.shape[-1] for x in histories])
    if in_columns is None:
        return None
    found = {}
    for history, paths in zip(histories, in_columns, strict=True):
        start = 0
        for path in paths:
            stop = start + math.prod(params[path].shape)
            found[key_of(path)] = jnp.asarray(np.asarray(history, np.float32)[:, start:stop])
            start = stop
    return found


def _is_field(path: StatePath, name: str) -> bool:
    return path.role == state_paths.FP8 and path.names[-1] == name


def columns(params: Mapping[str, Any], sizes: list[int]) -> list[list[str]] | None:
    """The paths of the scales of each group, if one recipe makes groups of these sizes; else None."""
    groups: dict[bool, list[str]] = {}
    if sizes:
        for path in filter(scale_leaves.is_scale, params):
            groups.setdefault(scale_leaves.format_of(path)[0], []).append(path)
    found = list(groups.values())
    return found if [sum(math.prod(params[p].shape) for p in paths) for paths in found] == sizes else None


def scale_leaf(path: str, like: Any, histories: Histories | None) -> Float[Array, "*shape"]:
    """A new scale leaf for `path`, from the amaxes of its tensor if they are known, else a scale of 1."""
    _, dtype, holds_log2 = scale_leaves.format_of(path)
    history = (histories or {}).get(key_of(path), jnp.zeros((1, 1), jnp.float32))
    largest = jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), axis=0)
    scale = scale_equations.scale_from_amax(largest, float(jnp.finfo(dtype).max), fallback=1.0, power_of_two=holds_log2)
    leaf = float_bits.log2_of_power_of_two(scale) if holds_log2 else scale
    return leaf.reshape(like.shape) if leaf.size == math.prod(like.shape) else jnp.full(like.shape, leaf[0])


def of_length(history: Float[Array, "old n"], length: int) -> Float[Array, "length n"]:
    """The newest amaxes of a history in the last of `length` slots; slot 0 is free."""
    newest = history[max(1, history.shape[0] - length + 1) :]
    return jnp.pad(newest, [(length - newest.shape[0], 0), (0, 0)])


def group(histories: Histories, params: Mapping[str, Any], members: list[str], length: int) -> recipes.AmaxState:
    """The state of the scales at the paths `members`; a scale without a history gets one of zeros."""
    found = [_column(histories, path, params[path], length) for path in members]
    scales = [scale_leaves.scale_of(params[path], holds_log2=scale_leaves.format_of(path)[2])[0] for path in members]
    return recipes.AmaxState(jnp.concatenate([jnp.ravel(x) for x in scales]), jnp.concatenate(found, axis=1))


def amax_leaves(saved: Saved, params: Mapping[str, Any], fresh: Mapping[StatePath, Any]) -> dict[StatePath, Any]:
    """The leaves of `amax_states` of the new state, by path, with the saved histories; `fresh` is `tx.init`, by path.

    Warns:
      UserWarning: histories of several recipes that start again, because nothing says which layer they belong to.
    """
    histories, state = of(saved), saved.state
    names = [path for path in fresh if _is_field(path, "amax_history")]
    groups = {path: x for path, x in fresh.items() if path.role == state_paths.FP8}
    in_columns = columns(params, [fresh[path].shape[-1] for path in names])
    leaves, old_leaves = (
        {p: x for p, x in tree.items() if scale_leaves.is_scale(p)} for tree in (params, saved.params)
    )
    alike = list(leaves) == list(old_leaves) and all(
        name in state and state[name].shape[-1] == fresh[name].shape[-1] for name in names
    )
    unchanged = alike and all(np.array_equal(leaves[p], old_leaves[p]) for p in leaves)
    if unchanged or (alike and (in_columns is None or histories is None)):
        for name in names:
            groups[name] = of_length(jnp.asarray(state[name]), fresh[name].shape[0])
            groups[_scale_beside(name)] = jnp.asarray(state[_scale_beside(name)])
    elif in_columns is not None and histories is not None:
        for name, members in zip(names, in_columns, strict=True):
            made = group(histories, params, members, fresh[name].shape[0])
            groups[name], groups[_scale_beside(name)] = made.amax_history, made.scale
    else:
        warn(
            "fp8-histories-start-again",
            "histories of fp8 amaxes of several recipes (a dict of recipes) can only be moved between jobs with the "
            "same recipes and the same fp8 layers; these jobs differ. The histories start again; the scales are kept.",
        )
    return groups


def _scale_beside(history: StatePath) -> StatePath:
    return StatePath((*history.names[:-1], "scale"), history.role)


def _column(histories: Histories, path: str, leaf: Any, length: int) -> Float[Array, "length size"]:
    size = math.prod(leaf.shape)
    history = histories.get(key_of(path))
    if history is None or history.shape[1] != size:
        return jnp.zeros((length, size), jnp.float32)
    return of_length(history, length)
