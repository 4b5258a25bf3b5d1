"""Params and state of one optimizer as another one keeps them: other dtypes, other masters, with fp8 or without.

What a job has learned does not hang on how it is stored. Whatever the policy, there is

    a float32 value for each param      its master, or param and remainder joined, or the param itself
    the state of the inner optimizer    made from float32 params, so always of the same shapes and dtypes
    histories of fp8 amaxes             by layer and operand
    a loss scale and counters

and everything else is made of these. They are found by path (see `_saved`), in states and in what Orbax returns alike.
"""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import fp8_history, job_leaves, placement
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import buffers, state, states, write_masters
from jaxmp._src.step.policy import get_policy
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
    """Params and state of a job as `to` keeps them: to go on in another precision, or with masters of another kind.

    float32 masters stay bit for bit (as the params, where those become float32), and so do moments, counts and
    schedules. A loss scale is kept where both jobs have one that moves; a static one is that of `to`. fp8 scales and
    histories are kept where both have them and start anew where there were none. A param whose dtype does not change
    stays bit for bit, but where split masters (`remainder_bits`) say otherwise: their params are rounded half up.

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`, or of the plain inner optimizer.
      params: the model's params that go with it.
      to: the transform to go on with, over the same inner optimizer, at the same place of its chain.
      policy: the policy that `to` was made with: the dtypes of the new params.
      like: params of the new model, arrays or `jax.ShapeDtypeStruct`, where their tree is another one: with fp8 scales
        or without. Shardings that they have are those of the new params, masters and moments. Only their structure,
        shapes and shardings count.

    Returns:
      `(params, opt_state)`, in buffers of their own.

    Raises:
      ValueError: a leaf that is missing, left over, of another shape or in another format, named by path.

    Warns:
      UserWarning: `to` scales the loss and there is no loss scale to go on with; histories of fp8 that start anew.

    Example:
      >>> import jaxmp
      >>> params32, adam = {"w": jnp.array([1.001])}, optax.adam(1e-3)
      >>> tx = jaxmp.mixed_precision(adam, "bf16")
      >>> opt_state, params = tx.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32)
      >>> params, opt_state = convert(opt_state, params, to=jaxmp.mixed_precision(adam, "fp32"), policy="fp32")
      >>> params
      {'w': Array([1.001], dtype=float32)}
    """
    policy = get_policy(policy)
    like = params if like is None else like
    saved = job_leaves.Saved(
        job_leaves.plain_leaves(params), job_leaves.essential_leaves(opt_state), "the state to convert"
    )
    cast = jax.eval_shape(policy.cast_to_param, jax.tree.map(_in_float32, like))
    new_params, new_state = assemble(saved, to, jax.tree.map(placement.beside, cast, like))
    return buffers.own_buffers((new_params, new_state), foreign=(opt_state, params))


def reload_master_params(opt_state: Any, params: PyTree) -> Any:
    """Masters made anew from the model's params, after only these were loaded; all else of the state stays.

    Megatron-LM's `reload_model_params`. Without it the next step would write the old masters over what was loaded.

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`.
      params: the params as they were loaded: float32 (masters then have them in full) or as the policy casts them.

    Returns:
      `opt_state` with new masters, each in a buffer of its own.

    Raises:
      ValueError: a param that is missing or of another shape, named by path; no masters in `opt_state`.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
      >>> opt_state = tx.init({"w": jnp.zeros(1)})
      >>> loaded = {"w": jnp.ones(1, jnp.bfloat16)}
      >>> jaxmp.get_master_params(reload_master_params(opt_state, loaded), loaded)
      {'w': Array([1.], dtype=float32)}

    References:
      Megatron-LM, core/optimizer/optimizer.py, `reload_model_params`.
    """
    if not state.find(opt_state, states.MasterState):
        raise ValueError("masters are reloaded into a state that keeps them; got one without a MasterState.")
    full = job_leaves.full_params(job_leaves.Saved(job_leaves.plain_leaves(params), {}, "params"))

    def reload(path: str, master: Array) -> Array:
        path, kind = job_leaves.param_of(path)
        if path not in full:
            raise ValueError(
                f"each master is reloaded from its param; {path} is not in the params. {job_leaves.has(full)}"
            )
        if full[path].shape != master.shape:
            raise ValueError(
                f"params must have the shapes of the masters; got {full[path].shape} at {path}, expected "
                f"{master.shape}."
            )
        new = full[path]
        return new if kind is None else write_masters.remainder_of(new, master.dtype)

    def visit(node: Any) -> Any:
        if not isinstance(node, states.MasterState):
            return node
        return node._replace(master_params=tree_paths.map_with_path(reload, node.master_params))

    reloaded = jax.tree.map(visit, opt_state, is_leaf=lambda x: isinstance(x, states.MasterState))
    return buffers.own_buffers(reloaded, foreign=(opt_state, params))


def check(saved: job_leaves.Saved, tx: optax.GradientTransformation, like: PyTree) -> Any:
    """The structure of the state of `tx` for params like these; a ValueError if what is there does not fit."""
    job_leaves.check_params(saved, like)
    with warnings.catch_warnings(action="ignore"):
        structure = jax.eval_shape(tx.init, jax.tree.map(_in_float32, like))
    job_leaves.check_state(saved, structure)
    return structure


def assemble(saved: job_leaves.Saved, tx: optax.GradientTransformation, like: PyTree) -> tuple[PyTree, Any]:
    """Params as `like` has them (structure, dtypes, shardings) and the state of `tx` for them, from what is there."""
    structure = check(saved, tx, like)
    in_full, new_params = assemble_params(saved, like)
    parts = job_leaves.special_parts(list(job_leaves.essential_leaves(structure)))
    fresh = _fresh(tx, in_full, {path for path, part in parts.items() if part != "master"})
    scales = _loss_scales(saved, fresh, [path for path, part in parts.items() if part == "scale"])
    groups = fp8_history.moved(saved, job_leaves.plain_leaves(new_params), fresh)
    full = job_leaves.plain_leaves(in_full)
    split: dict[str, Any] = {}

    def leaf(path: str, x: Any) -> Any:
        path = job_leaves.essential(path)
        part = parts.get(path)
        if part == "scale":
            return scales[path]
        if part == "fp8":
            return groups[path]
        if part in ("counter", "fp8_counter"):
            keep = path in saved.state and not path.endswith("unscaled_fp16")
            return jnp.asarray(saved.state[path], x.dtype) if keep else fresh[path]
        if part != "master":
            return _of_inner(saved.state[path], x)
        param, kind = job_leaves.param_of(f"/{path}".partition("/master_params/")[2])
        if kind is None:
            return full[param]
        if path in saved.state:
            return jnp.asarray(saved.state[path])
        split[param], remainder = _split(full[param], x.dtype)
        return remainder

    shardings = placement.Shardings(like)
    new_state = shardings.place(tree_paths.map_with_path(leaf, structure))
    new_params = tree_paths.map_with_path(lambda path, x: split.get(job_leaves.plain(path), x), new_params)
    return shardings.place(new_params), new_state


def assemble_params(saved: job_leaves.Saved, like: PyTree) -> tuple[PyTree, PyTree]:
    """(float32 params, params in the dtypes of `like`), from what is there."""
    histories = fp8_history.of(saved)
    full = job_leaves.full_params(saved)

    def whole(path: str, x: Any) -> Any:
        path = job_leaves.plain(path)
        return full[path] if path in full else fp8_history.start(path, x, histories)

    in_full: Any = tree_paths.map_with_path(whole, like)
    return in_full, _cast(saved.params, in_full, like)


def _fresh(tx: optax.GradientTransformation, params: PyTree, wanted: set[str]) -> dict[str, Any]:
    """Some leaves of the state that `tx` starts from; the rest is not computed."""

    def init(params: PyTree) -> dict[str, Any]:
        return {path: x for path, x in job_leaves.essential_leaves(tx.init(params)).items() if path in wanted}

    with warnings.catch_warnings(action="ignore"):
        return jax.jit(init)(params)


def _in_float32(x: Any) -> Any:
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _of_inner(x: Any, like: Any) -> Any:
    x = jnp.asarray(x)
    return casting.cast_float(x, like.dtype) if casting.is_float(like) else x.astype(like.dtype)


def _cast(saved: dict[str, Any], full: PyTree, like: PyTree) -> PyTree:
    """`full` in the dtypes of `like`; what is stored in its dtype already is taken as it is."""
    stored = (
        job_leaves.plain_leaves(stored_kernels.store(full))
        if any(map(stored_kernels.is_stored, jax.tree.leaves(like)))
        else {}
    )
    kept = {path for path, x in job_leaves.plain_leaves(like).items() if path in saved and saved[path].dtype == x.dtype}
    recast = {
        path for path, x in job_leaves.plain_leaves(like).items() if stored_kernels.is_stored(x) and path not in kept
    }
    leaves_of_recast = {
        leaf for kernel, leaf in stored_kernels.pairs(job_leaves.plain_leaves(like)).items() if kernel in recast
    }

    def cast(path: str, x: Any, wanted: Any) -> Any:
        path = job_leaves.plain(path)
        if path in recast | leaves_of_recast:
            return stored[path]
        return jnp.asarray(saved[path]) if path in kept else casting.cast_float(x, wanted.dtype, saturate=True)

    return tree_paths.map_with_path(cast, full, like)


def _loss_scales(saved: job_leaves.Saved, start: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The loss scales of the new state: what was there where both move, else what they start from."""
    scales = {}
    for group in {path.rpartition("scaling/")[0] for path in paths}:
        mine = [path for path in paths if path.rpartition("scaling/")[0] == group]
        kept = _kept_scale({p.rpartition("scaling/")[2]: start[p] for p in mine}, group, saved)
        scales |= {path: kept[path.rpartition("scaling/")[2]] for path in mine}
    return scales


def _kept_scale(start: dict[str, Any], group: str, saved: job_leaves.Saved) -> dict[str, Any]:
    head = f"{group}scaling/"
    old = {path.removeprefix(head): x for path, x in saved.state.items() if path.startswith(head)}
    if "hysteresis_left" not in start:  # a class of the user's own
        if {k: x.shape for k, x in old.items()} == {k: x.shape for k, x in start.items()}:
            return {name: jnp.asarray(old[name], x.dtype) for name, x in start.items()}
    elif not _moves(start):
        return start  # no scale, or a static one, which is what tx says
    elif set(old) == set(start) and (float(old["loss_scale"]) != 1.0 or _moves(old) or _at_floor(group, saved)):
        if 0.0 < float(old["loss_scale"]) < math.inf:
            return {name: jnp.asarray(old[name], x.dtype) for name, x in start.items()}
        warnings.warn(
            f"a loss scale must be positive and finite; {saved.what} has {float(old['loss_scale'])}. It starts anew "
            f"from {float(start['loss_scale'])}.",
            stacklevel=4,
        )
        return start
    warnings.warn(
        f"{saved.what} has no loss scale of the kind that the new optimizer keeps: it starts from "
        f"{float(start['loss_scale'])}, as a new run does, and may skip its first steps.",
        stacklevel=4,
    )
    return start


def _moves(scale: dict[str, Any]) -> bool:
    """Whether a scale has counts; without a scaler, and with a static one, they are 0."""
    return bool(int(scale["growth_count"]) or int(scale["hysteresis_left"]))


def _at_floor(group: str, saved: job_leaves.Saved) -> bool:
    """Whether a scale of 1 with counts of 0 is one that has just fallen to its floor, and not that of no scaler."""
    skipped, unscaled, pinned = (
        saved.state.get(f"{group}{n}") for n in ("skipped", "unscaled_fp16", "pinned_overflows")
    )
    in_float16 = any(x.dtype == jnp.float16 for x in saved.params.values()) and not unscaled
    return bool(skipped) and (in_float16 or bool(pinned))
