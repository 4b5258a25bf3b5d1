"""Leaves of params and optimizer state by path, wrappers removed.

The same leaf has different paths in different trees: transforms wrap an optimizer, boxes wrap arrays, and Orbax turns
all of it into nested dicts. The paths differ only in a few known levels, and this file removes these levels. So Adam's
`0/mu/w` is the same leaf in a plain optax state, under `mixed_precision(..., "fp16")` and with fp8.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import state_tuples
from pallas_kernels import moments

_BOX = frozenset({"value"})
_WRAPPERS = _BOX | {"guarded", "fp8_scales", "fp8_rest", "master_inner"}
_UNSCALE = (
    "skipped",
    "skipped_steps",
    "consecutive_skips",
    "pinned_overflows",
    "saturated_params",
    "kept_elements",
    "unscaled_fp16",
)
_FP8_COUNTERS = ("saturated_tensors", "unused_tensors", "lost_gradients")
REMAINDERS = ("remainder16", "remainder8")
_join = jax.jit(moments.join)  # one pass, not one for each operation


class Saved(NamedTuple):
    """The leaves of a saved job (or of the job to convert)."""

    params: dict[str, Any]  # leaves of the model's params by path
    state: dict[str, Any]  # leaves of the optimizer's state by path, wrappers removed
    what: str  # the name of the job in errors ("the checkpoint")


def plain_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, boxes removed (also a box that Orbax turned into a dict)."""
    return _shortened(tree, _BOX)


def essential_leaves(opt_state: Any) -> dict[str, Any]:
    """The leaves of an optimizer's state by path, wrappers of transforms removed."""
    return _shortened(nnx.as_pure(opt_state), _WRAPPERS)


def _shortened(tree: Any, without: frozenset[str]) -> dict[str, Any]:
    leaves = tree_paths.leaves_by_path(tree)
    short = {essential(path, without): x for path, x in leaves.items()}
    return short if len(short) == len(leaves) else leaves


def essential(path: str, without: frozenset[str] = _WRAPPERS) -> str:
    """A path without the levels of wrappers."""
    return "/".join(part for part in path.split("/") if part not in without)


def plain(path: str) -> str:
    """A path without the levels of boxes."""
    return essential(path, _BOX)


def param_of(path: str) -> tuple[str, str | None]:
    """(path of the param, kind of remainder or None), from the path of a master in its tree."""
    path = plain(path)
    head, _, last = path.rpartition("/")
    return (head, last) if last in REMAINDERS else (path, None)


def first_paths(leaves: Mapping[str, Any]) -> str:
    """The first paths of `leaves` as a sentence, for the end of an error."""
    return f"There are {', '.join(list(leaves)[:4])}{', ...' if len(leaves) > 4 else ''}."


def full_params(saved: Saved) -> dict[str, Any]:
    """The params in full precision by path: floats in float32, from the masters if there are any; others unchanged."""
    leaves = saved.params
    stored = stored_kernels.pairs(leaves) if any(map(stored_kernels.is_stored, leaves.values())) else {}
    masters = {}
    for path, x in saved.state.items():
        _, found, rest = f"/{path}".partition("/master_params/")
        if found:
            param, kind = param_of(rest)
            masters[param] = (x, kind)

    def in_full(path: str, x: Any) -> Any:
        master, kind = masters.get(path, (None, None))
        if kind is not None:
            if x.dtype != jnp.bfloat16:
                raise ValueError(
                    f"a split master is a bfloat16 param and a remainder, so the params must be bfloat16; got "
                    f"{x.dtype} at {path}. Pass the params of the same step."
                )
            return _join(x, jnp.asarray(master))
        if master is not None:
            return jnp.asarray(master, jnp.float32)
        if stored_kernels.is_stored(x) and path in stored:
            return stored_kernels.dequantized(x, leaves[stored[path]], jnp.float32)
        return casting.cast_float(jnp.asarray(x), jnp.float32)

    return {path: in_full(path, x) for path, x in leaves.items()}


def check_params(saved: Saved, like: PyTree) -> None:
    """Raises a ValueError for the first param that only one of the two has, or that has another shape."""
    wanted = plain_leaves(like)
    for path, x in wanted.items():
        if path not in saved.params:
            if scale_leaves.is_scale(path):
                continue
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in the model and not in {saved.what}. "
                f"{first_paths(saved.params)}"
            )
        if tuple(saved.params[path].shape) != tuple(x.shape):
            raise ValueError(
                f"{saved.what} must be of this model; {path} has shape {tuple(saved.params[path].shape)} in "
                f"{saved.what} and {tuple(x.shape)} in the model."
            )
    for path in saved.params:
        if path not in wanted and not scale_leaves.is_scale(path):
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in {saved.what} and not in the model. "
                f"{first_paths(wanted)}"
            )


def special_parts(paths: list[str]) -> dict[str, str]:
    """{path: part} of the leaves that are not the inner optimizer's: master, fp8, fp8_counter, scale or counter."""
    known, parts = set(paths), {}
    for path in paths:
        if "/master_params/" in f"/{path}":
            parts[path] = "master"
            head = f"/{path}".partition("/master_params/")[0]
            parts[f"{head}/rounding_count".lstrip("/")] = "counter"
        head, found, _ = f"/{path}".rpartition("/amax_states/")
        if found:
            parts[path] = "fp8"
            parts |= {f"{head}/{name}".lstrip("/"): "fp8_counter" for name in _FP8_COUNTERS}
        head, found, rest = f"/{path}".rpartition("/scaling/")
        if found and rest.split("/")[0] in (
            *state_tuples.LossScaleState._fields,
            *state_tuples.CustomLossScaleState._fields,
        ):
            parts[path] = "scale"
            parts |= {f"{head}/{name}".lstrip("/"): "counter" for name in _UNSCALE}
    return {path: part for path, part in parts.items() if path in known}


def _inner_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    special = special_parts(list(leaves))
    return {path: x for path, x in leaves.items() if path not in special}


def check_state(saved: Saved, structure: Any) -> None:
    """Raises a ValueError for the first leaf of the inner optimizer's state that does not fit `structure`."""
    given, wanted = (_inner_leaves(leaves) for leaves in (saved.state, essential_leaves(structure)))
    rule = f"{saved.what} must have the same inner optimizer, at the same place in the chain, and the same params"
    for path, x in wanted.items():
        if path not in given:
            raise ValueError(f"{rule}; {path} is missing from its optimizer state. {first_paths(given)}")
        got = given[path]
        if tuple(got.shape) != tuple(x.shape):
            raise ValueError(f"{rule}; {path} has shape {tuple(got.shape)} there, expected {tuple(x.shape)}.")
        floats = [jnp.issubdtype(y.dtype, jnp.floating) and jnp.dtype(y.dtype).itemsize > 1 for y in (got, x)]
        if got.dtype != x.dtype and not all(floats):
            raise ValueError(
                f"{rule}; {path} has dtype {got.dtype} there, expected {x.dtype}. Make the optimizer with the "
                f"state_dtype of the saved moments."
            )
    for path in given:
        if path not in wanted:
            raise ValueError(f"{rule}; {path} is in its optimizer state and not in the new one. {first_paths(wanted)}")
