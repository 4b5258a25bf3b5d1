"""The leaves of a job (params and state) by path (see `leaf_paths`): their kinds, and whether they fit a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step import leaf_paths, reload_masters, state as states
from pallas_kernels import moments

_COUNTED = (*states.COUNTED, "kept_elements")  # the last one is in old checkpoints only
_FP8_COUNTERS = ("saturated_tensors", "unused_tensors", "lost_gradients")
# By the field that holds special leaves: the counts beside it.
BESIDE = {"scaling": _COUNTED, "master_params": ("rounding_count",), "amax_states": _FP8_COUNTERS}
_OF_EACH_DEVICE = (
    " Each device of an axis has its own: make the transform with devices= of the save, or restore with "
    'partial="*unsent*", and what was not sent yet starts from zero.'
)
_join = jax.jit(moments.join)  # one pass, not one for each operation


class Saved(NamedTuple):
    """The leaves of a saved job (or of the job to convert)."""

    params: dict[str, Any]  # leaves of the model's params by path
    state: dict[str, Any]  # leaves of the optimizer's state by path, wrappers removed
    what: str  # the name of the job in errors ("the checkpoint")


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
    masters = {}
    for path, x in saved.state.items():
        _, found, rest = f"/{path}".partition("/master_params/")
        if found:
            masters[leaf_paths.param_of(rest)[0]] = x

    def in_full(path: str, x: Any) -> Any:
        return master_in_full(path, x, masters[path]) if path in masters else value(path)

    return {path: in_full(path, x) for path, x in leaves.items()}


def check_params(saved: Saved, like: PyTree) -> None:
    """Raises a ValueError for the first param that only one of the two has, or that has another shape."""
    wanted = leaf_paths.plain_leaves(like)
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
            *states.LossScaleState._fields,
            *states.CustomLossScaleState._fields,
        ):
            parts[path] = "scale"
            parts |= {f"{head}/{name}".lstrip("/"): "counter" for name in _COUNTED}
    return {path: part for path, part in parts.items() if path in known}


def inner_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a state that are the inner optimizer's."""
    special = special_parts(list(leaves))
    return {path: x for path, x in leaves.items() if path not in special}


def check_state(saved: Saved, structure: Any) -> None:
    """Raises a ValueError for the first leaf of the inner optimizer's state that does not fit `structure`."""
    given, wanted = (inner_leaves(leaves) for leaves in (saved.state, leaf_paths.essential_leaves(structure)))
    rule = (
        f"{saved.what} must have the same inner optimizer, with the same states in the same order, and the same params"
    )
    for path, x in wanted.items():
        if path not in given:
            raise ValueError(f"{rule}; {path} is missing from its optimizer state. {leaf_paths.first_paths(given)}")
        got = given[path]
        if tuple(got.shape) != tuple(x.shape):
            raise ValueError(
                f"{rule}; {path} has shape {tuple(got.shape)} there, expected {tuple(x.shape)}."
                f"{_OF_EACH_DEVICE if '/by_axis/' in path else _pmap_hint(got.shape, x.shape)}"
            )
        floats = [jnp.issubdtype(y.dtype, jnp.floating) and jnp.dtype(y.dtype).itemsize > 1 for y in (got, x)]
        if got.dtype != x.dtype and not all(floats):
            raise ValueError(
                f"{rule}; {path} has dtype {got.dtype} there, expected {x.dtype}. Make the optimizer with the "
                f"state_dtype of the saved moments."
            )
    for path in given:
        if path not in wanted:
            first = leaf_paths.first_paths(wanted) if wanted else "The new one has no leaves."
            raise ValueError(f"{rule}; {path} is in its optimizer state and not in the new one. {first}")
