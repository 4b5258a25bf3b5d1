"""Converts params and state of one optimizer for another one: other dtypes, other masters, with or without fp8.

The values that a job has learned do not depend on how they are stored. Under every policy a job has

    a float32 value for each param      its master, or param and remainder joined, or the param itself
    the state of the inner optimizer    made from float32 params, so its shapes and dtypes are always the same
    histories of fp8 amaxes             by layer and operand
    a loss scale and counters

and all other leaves can be computed from these. `job_leaves` finds them by path, in a state and in the tree that Orbax
returns.
"""

import math
import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.checkpoint import chain_places, fp8_history, job_leaves, placement, unsent
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.guard import argument_kinds
from jaxmp._src.numerics import casting
from jaxmp._src.step import state_arrays, state_paths
from jaxmp._src.step.policy import get_policy
from jaxmp._src.step.state_paths import StatePath
from pallas_kernels import moments

_split = jax.jit(moments.split, static_argnums=1)  # one pass, not one for each operation


def convert(
    opt_state: Any,
    params: PyTree,
    *,
    to: optax.GradientTransformation,
    policy: str | jmp.Policy,
    like: PyTree | None = None,
) -> tuple[PyTree, Any]:
    """Converts params and state of a job for `to`, to continue in another precision or with other masters.

    float32 masters stay equal bit for bit (where the params become float32, the params get these values), and so do
    moments, counts and schedules. The loss scale is kept if it is dynamic in both jobs; a static one is that of `to`.
    fp8 scales and histories are kept if both jobs have them; otherwise they start again. A param whose dtype stays the
    same stays equal bit for bit, except with split masters (`remainder_bits`): these round ties of the params away from
    zero.

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`, or of the plain inner optimizer.
      params: the model's params that belong to it.
      to: the transform to continue with: the same inner optimizer, with the same states in the same order.
      policy: the policy of `to`; gives the dtypes of the new params.
      like: params of the new model, arrays or `jax.ShapeDtypeStruct`, if their tree differs (with or without fp8
        scales). Only their structure, shapes and shardings are used; new params, masters and moments get the shardings.

    Returns:
      `(params, opt_state)`; no buffer is shared with the arguments.

    Raises:
      ValueError: a leaf that is missing, left over, of another shape or in another format, named by path.

    Warns:
      UserWarning: `to` scales the loss but the job has no loss scale to continue with; fp8 histories that start again.

    Example:
      >>> import jaxmp
      >>> params32, adam = {"w": jnp.array([1.001])}, optax.adam(1e-3)
      >>> tx = jaxmp.mixed_precision(adam, "bf16")
      >>> opt_state, params = tx.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32)
      >>> params, opt_state = convert(opt_state, params, to=jaxmp.mixed_precision(adam, "fp32"), policy="fp32")
      >>> params
      {'w': Array([1.001], dtype=float32)}
    """
    argument_kinds.check(
        "convert(opt_state, params, to=, policy=)",
        opt_state=("state", opt_state),
        params=("params", params),
        to=("optimizer", to),
        policy=("policy", policy),
    )
    policy = get_policy(policy)
    like = params if like is None else like
    saved = job_leaves.of_trees(params, opt_state, "the state to convert")
    cast = jax.eval_shape(policy.cast_to_param, jax.tree.map(_in_float32, like))
    wanted = jax.tree.map(placement.beside, cast, like)
    wanted_state = leaves_of(to, wanted)
    saved = unsent.fitted(chain_places.aligned(saved, wanted_state), wanted_state, placement.Shardings(wanted))
    new_params, new_state = assemble(saved, to, wanted)
    return state_arrays.own_buffers((new_params, new_state), foreign=(opt_state, params))


def check(saved: job_leaves.Saved, tx: optax.GradientTransformation, like: PyTree) -> Any:
    """The structure of `tx.init` for params like these; a ValueError if `saved` does not fit."""
    job_leaves.check_params(saved, like)
    structure = structure_of(tx, like)
    placement.Shardings(like).check_devices(structure)
    job_leaves.check_state(saved, state_paths.leaves(structure, like))
    return structure


def leaves_of(tx: optax.GradientTransformation, like: PyTree) -> dict[StatePath, Any]:
    """The leaves of `tx.init` for params like these, by path: their shapes and dtypes."""
    return state_paths.leaves(structure_of(tx, like), like)


def structure_of(tx: optax.GradientTransformation, like: PyTree) -> Any:
    """The structure of `tx.init` for params like these, in float32."""
    with warnings.catch_warnings(action="ignore"):
        return jax.eval_shape(tx.init, jax.tree.map(_in_float32, like))


def assemble(saved: job_leaves.Saved, tx: optax.GradientTransformation, like: PyTree) -> tuple[PyTree, Any]:
    """Params with the structure, dtypes and shardings of `like`, and the state of `tx` for them, made from `saved`."""
    structure = check(saved, tx, like)
    in_full, new_params = assemble_params(saved, like)
    paths = state_paths.of(structure, like)
    fresh = fresh_leaves(tx, in_full, {x for x in paths if x.role not in (state_paths.INNER, state_paths.MASTER)})
    scales = _loss_scales(saved, fresh, [path for path in paths if path.role == state_paths.SCALE])
    groups = fp8_history.amax_leaves(saved, tree_paths.leaves_by_path(new_params), fresh)
    full = tree_paths.leaves_by_path(in_full)
    split: dict[str, Any] = {}

    def leaf(path: StatePath, x: Any) -> Any:
        if path.role == state_paths.SCALE:
            return scales[path]
        if path.role == state_paths.FP8:
            return groups[path]
        if path.role in (state_paths.COUNTER, state_paths.FP8_COUNTER):
            keep = path in saved.state and path.names[-1] != "unscaled_fp16"
            return jnp.asarray(saved.state[path], x.dtype) if keep else fresh[path]
        if path.role == state_paths.INNER:
            return _as_dtype(saved.state[path], x)
        param = path.param
        assert param is not None
        if not path.part:
            return full[param]
        if path in saved.state:
            return jnp.asarray(saved.state[path])
        split[param], remainder = _split(full[param], x.dtype)
        return remainder

    shardings = placement.Shardings(like)
    new_state = shardings.place_state(state_paths.map_leaves(leaf, structure, like))
    new_params = tree_paths.map_with_path(lambda path, x: split.get(path, x), new_params)
    return shardings.place_params(new_params), new_state


def assemble_params(saved: job_leaves.Saved, like: PyTree) -> tuple[PyTree, PyTree]:
    """(float32 params, params in the dtypes of `like`), made from `saved`."""
    histories = fp8_history.of(saved)
    full = job_leaves.full_params(saved)

    def whole(path: str, x: Any) -> Any:
        return full[path] if path in full else fp8_history.scale_leaf(path, x, histories)

    in_full: Any = tree_paths.map_with_path(whole, like)
    return in_full, _cast(saved.params, in_full, like)


def fresh_leaves(
    tx: optax.GradientTransformation, params: PyTree, wanted: Collection[StatePath]
) -> dict[StatePath, Any]:
    """The `wanted` leaves of `tx.init(params)`; the rest is not computed."""
    paths: list[StatePath] = []

    def init(params: PyTree) -> list[Any]:
        found = state_paths.leaves(tx.init(params), params)
        paths.extend(path for path in found if path in wanted)
        return [found[path] for path in paths]

    with warnings.catch_warnings(action="ignore"):
        return dict(zip(paths, jax.jit(init)(params), strict=True))


def _in_float32(x: Any) -> Any:
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _as_dtype(x: Any, like: Any) -> Any:
    x = jnp.asarray(x)
    if x.dtype == like.dtype:  # a key of jax.random has no casts
        return x
    return casting.cast_float(x, like.dtype) if casting.is_float(like) else x.astype(like.dtype)


def _cast(saved: dict[str, Any], full: PyTree, like: PyTree) -> PyTree:
    """`full` in the dtypes of `like`; a saved leaf that has its dtype already is taken unchanged."""
    stored = (
        tree_paths.leaves_by_path(stored_kernels.store(full))
        if any(map(stored_kernels.is_stored, jax.tree.leaves(like)))
        else {}
    )
    kept = {
        path for path, x in tree_paths.leaves_by_path(like).items() if path in saved and saved[path].dtype == x.dtype
    }
    recast = {
        path for path, x in tree_paths.leaves_by_path(like).items() if stored_kernels.is_stored(x) and path not in kept
    }
    leaves_of_recast = {
        leaf for kernel, leaf in stored_kernels.pairs(tree_paths.leaves_by_path(like)).items() if kernel in recast
    }

    def cast(path: str, x: Any, wanted: Any) -> Any:
        if path in recast | leaves_of_recast:
            return stored[path]
        return jnp.asarray(saved[path]) if path in kept else casting.cast_float(x, wanted.dtype, saturate=True)

    return tree_paths.map_with_path(cast, full, like)


def _loss_scales(saved: job_leaves.Saved, start: dict[StatePath, Any], paths: list[StatePath]) -> dict[StatePath, Any]:
    """The loss scales of the new state: the saved ones if both are dynamic, else their initial values."""
    scales = {}
    for head in {path.head for path in paths}:
        mine = {path: "/".join(path.names[len(head) + 1 :]) for path in paths if path.head == head}
        kept = _kept_scale({name: start[path] for path, name in mine.items()}, head, saved)
        scales |= {path: kept[name] for path, name in mine.items()}
    return scales


def _kept_scale(start: dict[str, Any], head: tuple[str, ...], saved: job_leaves.Saved) -> dict[str, Any]:
    theirs = [path for path in saved.state if path.role == state_paths.SCALE and path.head == head]
    old = {"/".join(path.names[len(head) + 1 :]): saved.state[path] for path in theirs}
    if "hysteresis_left" not in start:  # the user's own class
        if {k: x.shape for k, x in old.items()} == {k: x.shape for k, x in start.items()}:
            return {name: jnp.asarray(old[name], x.dtype) for name, x in start.items()}
    elif not _is_dynamic(start):
        return start  # no scale, or a static one: trust tx
    elif set(old) == set(start) and (float(old["loss_scale"]) != 1.0 or _is_dynamic(old) or _at_floor(head, saved)):
        if 0.0 < float(old["loss_scale"]) < math.inf:
            return {name: jnp.asarray(old[name], x.dtype) for name, x in start.items()}
        warn(
            "loss-scale-starts-again",
            f"a loss scale must be positive and finite; {saved.what} has {float(old['loss_scale'])}. It starts again "
            f"from {float(start['loss_scale'])}.",
        )
        return start
    warn(
        "loss-scale-starts-again",
        f"{saved.what} has no loss scale of the kind that the new optimizer keeps. The scale starts from "
        f"{float(start['loss_scale'])} as in a new run, so the first steps may be skipped.",
    )
    return start


def _is_dynamic(scale: dict[str, Any]) -> bool:
    """Whether a scale has counts; they are 0 without a loss scale, and for a static one."""
    return bool(int(scale["growth_count"]) or int(scale["hysteresis_left"]))


def _at_floor(head: tuple[str, ...], saved: job_leaves.Saved) -> bool:
    """Whether a scale of 1 with counts of 0 has just fallen to its floor; else the job has no loss scale."""
    skipped, unscaled, pinned = (
        saved.state.get(StatePath((*head, name), state_paths.COUNTER))
        for name in ("skipped", "unscaled_fp16", "pinned_overflows")
    )
    in_float16 = any(x.dtype == jnp.float16 for x in saved.params.values()) and not unscaled
    return bool(skipped) and (in_float16 or bool(pinned))
