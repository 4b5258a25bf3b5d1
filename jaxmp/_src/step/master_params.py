"""Master params: the optimizer updates float32 params, the model holds rounded copies.

A 16-bit weight of 1.0 cannot change by 1e-4: the next bfloat16 is 1.0078. So the optimizer keeps a float32 *master*
of each 16-bit param, updates the master, and rounds it to the param of the model:

    m' = m + inner.update(g, s, m)          p' = round(m')

A float32 param is its own master: no copy, the same inner transform. A frozen param (its update is always zero) has
no master. The inner optimizer is initialized from float32 params too, so its moments are float32 for any model.

An optax transform returns an *update*, which the caller adds to the params. For a 16-bit param this update is
f32(round(m')) - f32(p), in float32: `optax.apply_updates` adds in float32, and the sum is round(m') exactly (except
when a weight just below a power of two changes sign and shrinks 8000-fold in one step; the next step repairs it).
`jaxmp.apply_gradients` writes round(m') without this detour.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.programs import frozen_leaves
from jaxmp._src.step import (
    boxed_state,
    in_place,
    kept_elements,
    read_state,
    state_arrays,
    whole_leaves,
    write_masters,
)
from jaxmp._src.step.in_place import as_transformation
from jaxmp._src.step.policy import Policy, get_policy
from jaxmp._src.step.state_tuples import MasterState
from pallas_kernels import reference


def keep_master_params(
    inner: optax.GradientTransformation, policy: str | jmp.Policy, *, remainder_bits: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that it updates float32 masters of 16-bit params.

    Args:
      inner: any optax transform.
      policy: which params have 16 bits: `param_dtype`, except those that `keep_fp32` names.
      remainder_bits: None keeps float32 masters. 16 keeps two bytes for each bfloat16 param: the difference between
        its float32 master and the param. 8 keeps one byte, for a master of 24 bits, which every update rounds
        stochastically (see `pallas_kernels.moments`).
        Only `jaxmp.apply_gradients` can write such params.

    Returns:
      A transform with `MasterState`. `init(params)` takes the params in float32 (better: the masters then keep the
      exact initial values) or as the policy casts them. `update(grads, state, params)` takes float32 gradients and the
      params as the policy casts them.

    Raises:
      TypeError: a param is neither a float array nor frozen (named by path).
      ValueError: at `update`, a param has another dtype than the policy gives it; grads and params do not match;
        `params` is missing; `remainder_bits` with params that are not bfloat16, or with `optax.apply_updates`.

    Warns:
      UserWarning: at `init`, patterns of `keep_fp32` that fit no param.

    Example:
      >>> tx = keep_master_params(optax.sgd(1.0), "bf16")
      >>> params32 = {"w": jnp.array([1.0])}
      >>> opt_state, params = tx.init(params32), get_policy("bf16").cast_to_param(params32)
      >>> for _ in range(4):  # each step is too small for bfloat16, together they are not
      ...     updates, opt_state = tx.update({"w": jnp.array([-0.002])}, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params["w"][0]), round(float(opt_state.master_params["w"][0]), 4)
      (1.0078125, 1.008)
    """
    policy = get_policy(policy)
    inner = as_transformation(inner)
    remainder = write_masters.remainder_dtype(remainder_bits, policy)

    def init_fn(params: PyTree) -> MasterState:
        _warn_of_idle_patterns(policy, params)
        scale_leaves.refuse(path for path, _ in tree_paths.boxed_leaves(params)[0])
        full = casting.cast_floats(params, jnp.float32)
        masters = _make_masters(inner, policy, params, full)
        inner_state = tree_paths.with_boxes_inside(inner.init(_view(full, masters)))
        if remainder is not None:
            masters = _split_masters(policy, params, masters, remainder)
        count = jnp.zeros((), jnp.int32) if remainder == jnp.int8 else None
        return state_arrays.own_buffers(MasterState(masters, inner_state, count), foreign=params)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        destination: in_place.Destination | None = None,
        as_made: bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, MasterState]:
        if params is None:
            raise ValueError("master params need the params; got params=None. Call tx.update(grads, opt_state, params)")
        if as_made:
            full = casting.cast_floats(params, jnp.float32)
            whole_leaves.check(inner, updates, state.master_inner, full, extra_args)
            moves, inner_state = boxed_state.update(inner, updates, state.master_inner, full, extra_args)
            return moves, state._replace(master_inner=inner_state)
        if remainder is not None:
            raise ValueError(
                "params with split masters (remainder_bits=) must be written together with them; got tx.update. Call "
                "params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params), and put mixed_precision "
                "around the whole optimizer, not inside optax.multi_transform, masked or MultiSteps."
            )
        _check_grads(updates, params)
        _check_dtypes(inner, policy, params, state.master_params)
        if destination is None:
            _refuse_stored_kernels(policy, params, state.master_params)
        write_masters.check_masters(state.master_params, params, None)
        view = _view(params, state.master_params)
        with tree_paths.explained_by_shapes(updates, params):  # shapes may differ: one gradient for each example
            whole_leaves.check(inner, updates, state.master_inner, view, extra_args)
            moves, inner_state = boxed_state.update(inner, updates, state.master_inner, view, extra_args)
        tree_paths.check_same_shapes(moves, params, "grads", "params")
        with jax.named_scope("jaxmp.update_masters"):
            units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
            masters = treedef.flatten_up_to(state.master_params)
            weights = jax.tree.map(write_masters.moved, view, moves)
            if not kept_elements.is_guarded(extra_args):
                nothing = kept_elements.no_updates(moves)
                moves, weights, inner_state = kept_elements.keep_together(
                    params, (moves, weights, inner_state), (nothing, view, state.master_inner)
                )
            parts = zip(units, masters, treedef.flatten_up_to(moves), treedef.flatten_up_to(weights), strict=True)
            is_read = destination is None  # apply_gradients writes params from their masters
            pairs = [_step(*part, is_read=is_read) for part in parts]
        new_updates = treedef.unflatten([update for update, _ in pairs])
        new_masters = treedef.unflatten([master for _, master in pairs])
        if destination is not None:
            destination.note(new_updates)
        return new_updates, state._replace(master_params=new_masters, master_inner=inner_state)

    def write_fn(
        grads: PyTree, state: Any, params: PyTree, step: in_place.Step, **extra_args: Any
    ) -> tuple[PyTree, MasterState, in_place.Counts]:
        if isinstance(params, optax.LookaheadParams):
            raise ValueError(
                "optax.lookahead has gradients for one of its two copies of the params only, and split masters are "
                "written for all; got remainder_bits= with it. Leave remainder_bits=None."
            )
        _check_grads(grads, params)
        _check_dtypes(inner, policy, params, state.master_params)
        write_masters.check_masters(state.master_params, params, remainder)
        whole_leaves.check(inner, grads, state.master_inner, params, extra_args)
        with tree_paths.explained_by_shapes(grads, params):
            return write_masters.write(inner, grads, state, params, step, extra_args)

    if remainder is None and not isinstance(inner, in_place.InPlace):
        return optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return in_place.in_place_of(init_fn, update_fn, write_fn, inner)


def model_param(master: PyTree, dtype: Any) -> PyTree:
    """The model's copy of a master: rounded to nearest even, saturated at the largest finite value of `dtype`."""
    return jax.tree.map(lambda m: reference.cast_by_selects(m, dtype), master)


def _check_grads(grads: PyTree, params: PyTree) -> None:
    """Raises a ValueError for gradients of other leaves than the params, or of shapes that would be repeated."""
    if isinstance(params, optax.LookaheadParams):  # the loss has the fast params only
        params = params.fast
    tree_paths.check_same_structure(grads, params, "grads", "params")
    tree_paths.check_no_broadcast(grads, params)


def _warn_of_idle_patterns(policy: Policy, params: PyTree) -> None:
    parts = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in parts):
        return  # inside optax.masked or multi_transform: the pattern may be for the other params
    paths = [path for path, _ in tree_paths.boxed_leaves(params)[0]]
    tree_paths.warn_of_idle("keep_fp32", policy.keep_fp32, paths, of="param")


def _make_masters(inner: Any, policy: Policy, params: PyTree, full: PyTree) -> PyTree:
    units, treedef = tree_paths.boxed_leaves(params)
    full_units = treedef.flatten_up_to(full)
    frozen = (
        frozen_leaves.frozen_leaves(inner, full) if len(jax.tree.leaves(params)) == len(units) else [False] * len(units)
    )
    dtype_of = _param_dtypes(policy, params)
    masters = []
    for (path, unit), full_unit, is_frozen in zip(units, full_units, frozen, strict=True):
        for x in jax.tree.leaves(unit):
            if not is_frozen and not casting.is_float(x):
                raise TypeError(
                    f"an optimizer updates float params; got {getattr(x, 'dtype', type(x).__name__)} at {path}. Call "
                    f"tx.init with float32 params, before they are cast to fp8; keep such leaves outside params, or "
                    f"freeze them with optax.multi_transform and optax.set_to_zero."
                )
        # jax leaves out selections between arrays without elements, so the program does not show which are frozen.
        is_empty = all(casting.is_float(x) and x.size == 0 for x in jax.tree.leaves(unit))
        needs_master = dtype_of(path).itemsize <= 2 and (is_empty or not is_frozen)
        masters.append(full_unit if needs_master else optax.MaskedNode())
    return treedef.unflatten(masters)


def _split_masters(policy: Policy, params: PyTree, masters: PyTree, dtype: Any) -> PyTree:
    """`masters` with a remainder in place of each master of a bfloat16 param."""
    units, treedef = tree_paths.boxed_leaves(params)
    dtype_of = _param_dtypes(policy, params)
    short = [
        jax.tree.map(lambda m: write_masters.boxed_remainder(m, dtype), master)
        if dtype_of(path) == jnp.bfloat16
        else master
        for (path, _), master in zip(units, treedef.flatten_up_to(masters), strict=True)
    ]
    return tree_paths.with_boxes_inside(treedef.unflatten(short))


def _view(params: PyTree, masters: PyTree) -> PyTree:
    """The params that the inner optimizer sees: the master, if there is one, else the param."""
    units, treedef = jax.tree.flatten(params, is_leaf=tree_paths.is_box)
    pairs = zip(units, treedef.flatten_up_to(masters), strict=True)
    return treedef.unflatten([p if isinstance(m, optax.MaskedNode) else m for p, m in pairs])


def _param_dtypes(policy: Policy, params: PyTree) -> Callable[[str], Any]:
    """Function from a path of this tree to the dtype in which the policy stores the param."""
    stored = stored_kernels.pairs(params) if policy.fp8_weights else {}
    return lambda path: jnp.dtype(jnp.float8_e4m3fn) if path in stored else policy.param_dtype_of(path)


def _step(param: PyTree, master: PyTree, move: PyTree, weight: PyTree, *, is_read: bool) -> tuple[PyTree, PyTree]:
    """(update of the param, new master) for one leaf or box. `is_read`: whether anybody adds the update."""
    if isinstance(master, optax.MaskedNode):
        return jax.tree.map(_kept, param, move), master
    if not is_read:
        return jax.tree.map(lambda w: jnp.full_like(w, -0.0), weight), weight
    return jax.tree.map(_update_to, param, weight), weight


def _kept(param: Any, move: Array) -> Array:
    """The update of a float32 param; -0.0 for a frozen 16-bit param, which keeps every bit."""
    return jnp.full_like(move, -0.0) if casting.is_low_precision(param.dtype) else move


def _update_to(param: Array, master: Array) -> Array:
    """The float32 update whose sum with `param` is the rounded master; -0.0 where they are equal."""
    if stored_kernels.is_stored(param):  # apply_gradients writes it
        return jnp.full_like(master, -0.0)
    update = casting.round_to(master, param.dtype) - param.astype(jnp.float32)
    return jnp.where(update == 0, -0.0, update)


def _refuse_stored_kernels(policy: Policy, params: PyTree, masters: PyTree) -> None:
    """Raises if a trained kernel is stored in fp8: no update that is added gives its new value."""
    units, treedef = tree_paths.boxed_leaves(params)
    dtype_of = _param_dtypes(policy, params)
    for (path, _), master in zip(units, treedef.flatten_up_to(masters), strict=True):
        if not isinstance(master, optax.MaskedNode) and dtype_of(path) == jnp.float8_e4m3fn:
            stored_kernels.refuse_update(path)


def _check_dtypes(inner: Any, policy: Policy, params: PyTree, masters: PyTree) -> None:
    units, treedef = tree_paths.boxed_leaves(params)
    suspects = []
    dtype_of = _param_dtypes(policy, params)
    by_unit = read_state.masters_by_unit(treedef, masters, params)
    for i, ((path, unit), master) in enumerate(zip(units, by_unit, strict=True)):
        expected = dtype_of(path)
        for x in jax.tree.leaves(unit):
            if not isinstance(master, optax.MaskedNode) and x.dtype != expected:
                raise ValueError(
                    f"params at update must have the dtypes of the policy; got {x.dtype} at {path}, not {expected}. "
                    f"After opt_state = tx.init(params32), train params = policy.cast_to_param(params32); with jaxmp's "
                    f"TrainState.create and nnx.Optimizer, pass policy=, the one that tx was made with."
                )
            if casting.is_low_precision(x.dtype) and not casting.is_low_precision(expected):
                suspects.append((i, path, x.dtype))
    frozen = frozen_leaves.frozen_leaves(inner, params) if suspects else []
    for i, path, dtype in suspects:
        if not frozen[i]:
            raise ValueError(
                f"a 16-bit param that is trained needs a policy that gives it a master; got {dtype} at {path}, where "
                f"the policy says {policy.param_dtype_of(path)}. Train policy.cast_to_param(params32), choose a 16-bit "
                f"policy, or freeze the leaf with optax.set_to_zero."
            )
