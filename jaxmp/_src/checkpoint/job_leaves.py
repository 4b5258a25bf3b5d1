"""The leaves of a job (params and state) by path (see `state_paths`): their kinds, and whether they fit a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step import leaf_paths, reload_masters, state_paths
from jaxmp._src.step.state_paths import StatePath
from pallas_kernels import moments

_join = jax.jit(moments.join)  # one pass, not one for each operation


CHECKPOINT = "the checkpoint"  # the name of a saved job in errors


class Saved(NamedTuple):
    """The leaves of a saved job (or of the job to convert)."""

    params: dict[str, Any]  # leaves of the model's params by path
    state: dict[StatePath, Any]  # leaves of the optimizer's state by path, wrappers removed
    what: str  # the name of the job in errors


def of_trees(params: PyTree, opt_state: Any, what: str) -> Saved:
    """The leaves of a job in memory; also of one that Orbax alone read, in dicts, where boxes are dicts too."""
    leaves = tree_paths.leaves_by_path(params)
    if state_paths.is_without_fields(opt_state) and jax.tree.leaves(opt_state):
        leaves = {"/".join(tree_paths.without_boxes(path.split("/"))): x for path, x in leaves.items()}
    return Saved(leaves, state_paths.leaves(opt_state, params), what)


def master_in_full(path: str, x: Any, master: Any) -> Any:
    """The float32 value of a param from its master, which is float32, or the remainder of a bfloat16 param."""
    if not jnp.issubdtype(master.dtype, jnp.integer):
        return jnp.asarray(master, jnp.float32)
    if x.dtype != jnp.bfloat16:
        raise ValueError(
            f"a split master is a bfloat16 param and a remainder, so the params must be bfloat16; got {x.dtype} at "
            f"{path}. Pass the params of the same step."
        )
    return _join(x, jnp.asarray(master))


def full_params(saved: Saved) -> dict[str, Any]:
    """The params in full precision by path: floats in float32, from the masters if there are any; others unchanged."""
    leaves, value = saved.params, reload_masters.in_float32(saved.params)
    masters = {path.param: x for path, x in saved.state.items() if path.role == state_paths.MASTER}

    def in_full(path: str, x: Any) -> Any:
        return master_in_full(path, x, masters[path]) if path in masters else value(path)

    return {path: in_full(path, x) for path, x in leaves.items()}


def check_params(saved: Saved, like: PyTree) -> None:
    """Raises a ValueError for the first param that only one of the two has, or that has another shape."""
    wanted = tree_paths.leaves_by_path(like)
    for path, x in wanted.items():
        if path not in saved.params:
            if scale_leaves.is_scale(path):
                continue
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in the model and not in {saved.what}. "
                f"{leaf_paths.first_paths(saved.params)}"
            )
        there, here = tuple(saved.params[path].shape), tuple(x.shape)
        if there != here:
            differ = sum(a != b for a, b in zip(there, here, strict=True)) if len(there) == len(here) else 0
            padded = " If one of them is padded (jaxmp.fsdp.pad), pass its layout= to save, or to restore."
            raise ValueError(
                f"{saved.what} must be of this model; {path} has shape {there} in {saved.what} and {here} in the model."
                f"{padded if differ == 1 else _pmap_hint(there, here)}"
            )
    for path in saved.params:
        if path not in wanted and not scale_leaves.is_scale(path):
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in {saved.what} and not in the model. "
                f"{leaf_paths.first_paths(wanted)}"
            )


def _pmap_hint(there: tuple[int, ...], here: tuple[int, ...]) -> str:
    """What to do about an axis of devices, if two shapes differ by a first axis; else nothing."""
    if here not in (there[1:], here[:1] + there):
        return ""
    return (
        " If the first axis is that of pmap's devices, take flax.jax_utils.unreplicate(...) of params and opt_state "
        "before save and restore, and replicate after."
    )


def inner_leaves(leaves: Mapping[StatePath, Any]) -> dict[StatePath, Any]:
    """The leaves of a state that are the inner optimizer's."""
    return {path: x for path, x in leaves.items() if path.role == state_paths.INNER}


def fits(x: Any, like: Any) -> bool:
    """Whether a saved leaf of a state can be continued as `like`."""
    return tuple(x.shape) == tuple(like.shape) and _may_become(x, like)


def _may_become(x: Any, like: Any) -> bool:
    floats = [jnp.issubdtype(y.dtype, jnp.floating) and jnp.dtype(y.dtype).itemsize > 1 for y in (x, like)]
    return x.dtype == like.dtype or all(floats)


def check_state(saved: Saved, wanted: Mapping[StatePath, Any]) -> None:
    """Raises a ValueError for the first leaf of the inner optimizer's state that does not fit `wanted`."""
    given, wanted = inner_leaves(saved.state), inner_leaves(wanted)
    rule = (
        f"{saved.what} must have the same inner optimizer, with the same states in the same order, and the same params"
    )
    hint = " For another optimizer or schedule on purpose, pass moments= to restore."
    hint = hint if saved.what == CHECKPOINT else ""
    for path, x in wanted.items():
        if path not in given:
            raise ValueError(
                f"{rule}; {path} is missing from its optimizer state. {leaf_paths.first_paths(given)}{hint}"
            )
        got = given[path]
        if tuple(got.shape) != tuple(x.shape):
            raise ValueError(
                f"{rule}; {path} has shape {tuple(got.shape)} there, expected {tuple(x.shape)}."
                f"{_pmap_hint(got.shape, x.shape) or hint}"
            )
        if not _may_become(got, x):
            raise ValueError(
                f"{rule}; {path} has dtype {got.dtype} there, expected {x.dtype}. Make the optimizer with the "
                f"state_dtype of the saved moments."
            )
    for path in given:
        if path not in wanted:
            first = leaf_paths.first_paths(wanted) if wanted else "The new one has no leaves."
            raise ValueError(f"{rule}; {path} is in its optimizer state and not in the new one. {first}{hint}")
