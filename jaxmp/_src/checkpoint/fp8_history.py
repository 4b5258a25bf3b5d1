"""Histories of fp8 amaxes by layer and operand, to move them from one job's state into another's.

A state keeps the histories of all its scales in one array for each direction, in the order of the tree (see `delayed`).
Another model has other layers in fp8, or other formats, so here each is looked up by what it belongs to,
`Dense_0/Fp8DotGeneral_0/lhs`. An amax is a magnitude: it does not hang on the format of the scale that is made of it.
"""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp._src.checkpoint.job_leaves import Saved
from jaxmp._src.fp8 import recipes, scale_leaves
from jaxmp._src.numerics import float_bits

_GROUP = re.compile(r"(?:(.*)/)?amax_states/(\d+)/(scale|amax_history)")
Histories = dict[str, Float[Array, "len size"]]


def key_of(path: str) -> str:
    """What the scale at `path` belongs to, whatever its format."""
    head, _, name = path.rpartition("/")
    return f"{head}/{name.split('_')[1]}".lstrip("/")


def of(saved: Saved) -> Histories | None:
    """The histories in a state of `update_amax` of one recipe; {} if it has none, None if it is of several."""
    params = saved.params
    histories = [x for path, x in saved.state.items() if _is(path, "amax_history")]
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


def _is(path: str, name: str) -> bool:
    found = _GROUP.fullmatch(path)
    return found is not None and found.group(3) == name


def columns(params: Mapping[str, Any], sizes: list[int]) -> list[list[str]] | None:
    """The paths of the scales of each group if a single recipe made groups of these sizes, else None."""
    groups: dict[bool, list[str]] = {}
    if sizes:
        for path in filter(scale_leaves.is_scale, params):
            groups.setdefault(scale_leaves.format_of(path)[0], []).append(path)
    found = list(groups.values())
    return found if [sum(math.prod(params[p].shape) for p in paths) for paths in found] == sizes else None


def start(path: str, like: Any, histories: Histories | None) -> Float[Array, "*shape"]:
    """The scale leaf at `path` that a job goes on with, made of the amaxes of its tensor where these are known."""
    _, dtype, holds_log2 = scale_leaves.format_of(path)
    history = (histories or {}).get(key_of(path), jnp.zeros((1, 1), jnp.float32))
    largest = jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), axis=0)
    scale = recipes.scale_from_amax(largest, float(jnp.finfo(dtype).max), fallback=1.0, power_of_two=holds_log2)
    leaf = float_bits.log2_of_power_of_two(scale) if holds_log2 else scale
    return leaf.reshape(like.shape) if leaf.size == math.prod(like.shape) else jnp.full(like.shape, leaf[0])


def of_length(history: Float[Array, "old n"], length: int) -> Float[Array, "length n"]:
    """A history with the newest amaxes in the last of `length` slots, and slot 0 free."""
    newest = history[max(1, history.shape[0] - length + 1) :]
    return jnp.pad(newest, [(length - newest.shape[0], 0), (0, 0)])


def group(histories: Histories, params: Mapping[str, Any], members: list[str], length: int) -> recipes.AmaxState:
    """The state of the scales at the paths `members`, with the histories that there are."""
    found = [_column(histories, path, params[path], length) for path in members]
    scales = [scale_leaves.scale_of(params[path], holds_log2=scale_leaves.format_of(path)[2])[0] for path in members]
    return recipes.AmaxState(jnp.concatenate([jnp.ravel(x) for x in scales]), jnp.concatenate(found, axis=1))


def moved(saved: Saved, params: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a new state's `amax_states`, by path, with the histories that there are.

    Args:
      saved: what there is of the old job.
      params: the new params by path.
      fresh: the new state as a new run starts, by path.

    Warns:
      UserWarning: histories that start anew, as nobody knows what they belong to.
    """
    histories, state = of(saved), saved.state
    names = [path for path in fresh if _is(path, "amax_history")]
    groups = {path: x for path, x in fresh.items() if _GROUP.fullmatch(path)}
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
        warnings.warn(
            "histories of fp8 amaxes that several recipes (a dict of them) keep are moved between jobs with the same "
            "recipes and fp8 layers only: they start anew. The scales themselves are kept.",
            stacklevel=5,
        )
    return groups


def _scale_beside(history: str) -> str:
    return history.removesuffix("amax_history") + "scale"


def _column(histories: Histories, path: str, leaf: Any, length: int) -> Float[Array, "length size"]:
    size = math.prod(leaf.shape)
    history = histories.get(key_of(path))
    if history is None or history.shape[1] != size:
        return jnp.zeros((length, size), jnp.float32)
    return of_length(history, length)
