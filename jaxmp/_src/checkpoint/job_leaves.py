"""What there is of a job, by path: the leaves of its params and of its optimizer's state.

Trees differ by what they are wrapped in: a chain round an optimizer, boxes round arrays, and the nested dicts that
Orbax makes of all of it. Their paths do so in a few known levels only, which are left out here. So Adam's `0/mu/w` is
the same leaf in a plain optax state, under `mixed_precision(..., "fp16")` and with fp8 round it.
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
from jaxmp._src.step import states
from pallas_kernels import moments

_BOX = frozenset({"value"})
_WRAPPERS = _BOX | {"guarded", "fp8_scales", "fp8_rest", "master_inner"}
_UNSCALE = ("skipped", "skipped_steps", "consecutive_skips", "pinned_overflows", "saturated_params", "unscaled_fp16")
_FP8_COUNTERS = ("saturated_tensors", "unused_tensors")
REMAINDERS = ("remainder16", "remainder8")
_join = jax.jit(moments.join)  # one pass, not one for each operation


class Saved(NamedTuple):
    """What is there of a job.

    Attributes:
      params: leaves of the model's params by path.
      state: leaves of the optimizer's state by path, wrappers left out.
      what: what it is called in errors ("the checkpoint").
    """

    params: dict[str, Any]
    state: dict[str, Any]
    what: str


def plain_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, boxes taken off, also where Orbax has made a dict of a box."""
    return _shortened(tree, _BOX)


def essential_leaves(opt_state: Any) -> dict[str, Any]:
    """The leaves of an optimizer's state by path, the wrappers of a chain left out."""
    return _shortened(nnx.as_pure(opt_state), _WRAPPERS)


def _shortened(tree: Any, without: frozenset[str]) -> dict[str, Any]:
    leaves = tree_paths.leaves_by_path(tree)
    short = {essential(path, without): x for path, x in leaves.items()}
    return short if len(short) == len(leaves) else leaves


def essential(path: str, without: frozenset[str] = _WRAPPERS) -> str:
    """A path without the levels that say how a chain is wrapped."""
    return "/".join(part for part in path.split("/") if part not in without)


def plain(path: str) -> str:
    """A path without the boxes."""
    return essential(path, _BOX)


def param_of(path: str) -> tuple[str, str | None]:
    """(path of the param, None or the kind of remainder) of a master's path in its tree."""
    path = plain(path)
    head, _, last = path.rpartition("/")
    return (head, last) if last in REMAINDERS else (path, None)


def has(leaves: Mapping[str, Any]) -> str:
    """What is there, for the end of a message."""
    return f"There are {', '.join(list(leaves)[:4])}{', ...' if len(leaves) > 4 else ''}."


def full_params(saved: Saved) -> dict[str, Any]:
    """What the params stand for, by path: floats in float32 (masters where there are any), all else as it is."""
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
                    f"split masters are whole only together with their bfloat16 params; got {x.dtype} at {path}. Pass "
                    f"the params of the same step."
                )
            return _join(x, jnp.asarray(master))
        if master is not None:
            return jnp.asarray(master, jnp.float32)
        if stored_kernels.is_stored(x) and path in stored:
            return stored_kernels.dequantized(x, leaves[stored[path]], jnp.float32)
        return casting.cast_float(jnp.asarray(x), jnp.float32)

    return {path: in_full(path, x) for path, x in leaves.items()}


def check_params(saved: Saved, like: PyTree) -> None:
    """Raises a ValueError that names the first param that the two do not share, or share in another shape."""
    wanted = plain_leaves(like)
    for path, x in wanted.items():
        if path not in saved.params:
            if scale_leaves.is_scale(path):
                continue
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in the model and not in {saved.what}. "
                f"{has(saved.params)}"
            )
        if tuple(saved.params[path].shape) != tuple(x.shape):
            raise ValueError(
                f"{saved.what} must be of this model; {path} has shape {tuple(saved.params[path].shape)} in "
                f"{saved.what} and {tuple(x.shape)} in the model."
            )
    for path in saved.params:
        if path not in wanted and not scale_leaves.is_scale(path):
            raise ValueError(
                f"{saved.what} must be of this model; {path} is in {saved.what} and not in the model. {has(wanted)}"
            )


def special_parts(paths: list[str]) -> dict[str, str]:
    """The parts of a state that are not the inner optimizer's: by path, what they belong to."""
    known, parts = set(paths), {}
    for path in paths:
        if "/master_params/" in f"/{path}":
            parts[path] = "master"
        head, found, _ = f"/{path}".rpartition("/amax_states/")
        if found:
            parts[path] = "fp8"
            parts |= {f"{head}/{name}".lstrip("/"): "fp8_counter" for name in _FP8_COUNTERS}
        head, found, rest = f"/{path}".rpartition("/scaling/")
        if found and rest.split("/")[0] in (*states.LossScaleState._fields, *states.CustomLossScaleState._fields):
            parts[path] = "scale"
            parts |= {f"{head}/{name}".lstrip("/"): "counter" for name in _UNSCALE}
    return {path: part for path, part in parts.items() if path in known}


def _of_inner(leaves: Mapping[str, Any]) -> dict[str, Any]:
    special = special_parts(list(leaves))
    return {path: x for path, x in leaves.items() if path not in special}


def check_state(saved: Saved, structure: Any) -> None:
    """Raises a ValueError that names the first leaf of the inner optimizer's state that is not that of `structure`."""
    given, wanted = (_of_inner(leaves) for leaves in (saved.state, essential_leaves(structure)))
    rule = f"{saved.what} must be of the same inner optimizer, at the same place of its chain, and of the same params"
    for path, x in wanted.items():
        if path not in given:
            raise ValueError(f"{rule}; {path} is missing from its optimizer state. {has(given)}")
        got = given[path]
        if tuple(got.shape) != tuple(x.shape):
            raise ValueError(f"{rule}; {path} has shape {tuple(got.shape)} there, expected {tuple(x.shape)}.")
        floats = [jnp.issubdtype(y.dtype, jnp.floating) and jnp.dtype(y.dtype).itemsize > 1 for y in (got, x)]
        if got.dtype != x.dtype and not all(floats):
            raise ValueError(
                f"{rule}; {path} has dtype {got.dtype} there, expected {x.dtype}. Moments of another state_dtype are "
                f"restored into an optimizer with that state_dtype."
            )
    for path in given:
        if path not in wanted:
            raise ValueError(f"{rule}; {path} is in its optimizer state and has no place in the new one. {has(wanted)}")
