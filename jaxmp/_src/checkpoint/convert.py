"""Converts params and state of one optimizer for another: other dtypes, other masters, with or without fp8.

Under every policy a job has a float32 value for each param (its master; param and remainder joined; or the param), the
state of the inner optimizer (made from float32 params, so its leaves are always the same), a loss scale, counts, and
fp8 histories. All else is made from these.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting
from jaxmp._src.step import argument_kinds, state as states, state_arrays
from jaxmp._src.step.policy import get_policy
from jaxmp._src.step.state import StepState
from pallas_kernels import moments

_split = jax.jit(moments.split, static_argnums=1)


def convert(
    opt_state: Any,
    params: PyTree,
    *,
    to: optax.GradientTransformation,
    policy: str | jmp.Policy,
    like: PyTree | None = None,
) -> tuple[PyTree, Any]:
    """Converts params and state of a job for `to`, to continue in another precision or with other masters.

    float32 values, moments, averages and counts stay equal bit for bit (a moment of fewer bits is rounded). A param
    whose dtype stays keeps its bits; those of new split masters (`remainder_bits`) round ties away from zero. The loss
    scale is kept with its counts if `to` has a dynamic one; its rule is that of `to`. fp8 histories are kept if both
    jobs have the same fp8 layers and recipes.

    Args:
      opt_state: state of `mixed_precision` or `keep_master_params`, or of the plain inner optimizer.
      params: the params that belong to it.
      to: the transform to continue with, around the same inner optimizer; or that optimizer itself.
      policy: the policy of `to`, for the dtypes of the new params.
      like: params of the new model, arrays or `jax.ShapeDtypeStruct`s, if its tree differs, by fp8 scales alone. New
        scales are taken from it; those that are only described start at 1.

    Returns:
      `(params, opt_state)`; no buffer is shared with the arguments, and none is in host memory (call
      `jaxmp.offload.put` again). It warns of a loss scale, or fp8 histories, that start again.

    Raises:
      ValueError: a leaf that is missing, left over, or of another shape or kind, by path.

    Example:
      >>> import jaxmp
      >>> params32, adam = {"w": jnp.array([1.001])}, optax.adam(1e-3)
      >>> opt_state = jaxmp.mixed_precision(adam, "bf16").init(params32)
      >>> params = jaxmp.get_policy("bf16").cast_to_param(params32)
      >>> convert(opt_state, params, to=jaxmp.mixed_precision(adam, "fp32"), policy="fp32")[0]
      {'w': Array([1.001], dtype=float32)}
    """
    arguments = {"opt_state": ("state", opt_state), "params": ("params", params)}
    arguments |= {"to": ("optimizer", to), "policy": ("policy", policy)}
    argument_kinds.check("convert(opt_state, params, to=, policy=)", **arguments)
    opt_state, params = host_memory.to_device((nnx.as_pure(opt_state), params))
    policy, old = get_policy(policy), tree_paths.leaves_by_path(params)
    full = states.get_master_params(opt_state, params)
    if wrong := tree_paths.first_of_other_shape(full, params):
        raise ValueError(f"params and opt_state are of one job; {wrong[0]} has {wrong[2]}, its master {wrong[1]}.")
    full = full if like is None else _moved("params", full, like)
    with warnings.catch_warnings(action="ignore"):
        fresh, halves = split_exactly(to.init(full), tree_paths.leaves_by_path(full))

    cast = policy.cast_to_param(full)
    same = {path for path, x in tree_paths.leaves_by_path(cast).items() if path in old and old[path].dtype == x.dtype}
    new_params = tree_paths.map_with_path(lambda path, x: halves.get(path, old[path] if path in same else x), cast)

    before, after = states.find(opt_state, StepState), states.find(fresh, StepState)
    if before and after and len(before) != len(after):
        raise ValueError(f"both jobs must have as many mixed_precision; got {len(before)} and {len(after)}.")
    inner = lambda state: states.map_steps(lambda step: step.optimizer_state, state)  # noqa: E731
    left = iter(jax.tree.leaves(_moved("opt_state", inner(opt_state), inner(fresh))))
    same_layers, olds = scale_leaves.paths_of(params) == scale_leaves.paths_of(full), iter(before)

    def continued(x: Any) -> Any:
        if not isinstance(x, StepState):
            return next(left)
        x = x._replace(optimizer_state=jax.tree.map(lambda _: next(left), x.optimizer_state))
        return _continued(next(olds, None), x, same_layers=same_layers)

    new_state = jax.tree.map(continued, fresh, is_leaf=lambda x: isinstance(x, StepState))
    return state_arrays.own_buffers((new_params, new_state), foreign=(opt_state, params, like))


def _moved(tree: str, old: PyTree, like: PyTree) -> PyTree:
    """`given` in the structure and, of a state, the dtypes of `like`; fp8 scales may be new or left over."""
    leaves, wanted = tree_paths.leaves_by_path(old), tree_paths.leaves_by_path(like)
    for path in {**wanted, **leaves}:
        here, there = (x[path].shape if path in x else "missing" for x in (leaves, wanted))
        if here != there and not (scale_leaves.is_scale(path) and "missing" in (here, there)):
            got = f"{path} in {tree} is {here} in the old job and {there} in the new one"
            raise ValueError(f"both jobs must have the same model and inner optimizer, its states in order; {got}.")

    def take(path: str, x: Any) -> Any:
        if path not in leaves:
            return scale_leaves.started(path, x)
        leaf = leaves[path]
        if tree == "params" or leaf.dtype == x.dtype:
            return jnp.asarray(leaf)
        if [casting.is_float(y) or y.dtype.kind for y in (leaf, x)] not in ([True, True], ["i", "i"]):
            raise ValueError(f"{path} in {tree} is {leaf.dtype} in the old job and {x.dtype} in the new one.")
        return jnp.asarray(leaf).astype(x.dtype)

    return tree_paths.map_with_path(take, like)


def split_exactly(state: Any, full: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`state` with remainders, and the bfloat16 params, that join to `full`: ties of params round away from zero."""
    halves: dict[str, Any] = {}

    def remainder(path: str, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            return x
        owner = path.rpartition("/")[0] or "<root>"  # behind it comes the field, `remainder16`
        halves[owner], low = _split(full[owner], x.dtype)
        return low

    split = lambda step: step._replace(master_params=tree_paths.map_with_path(remainder, step.master_params))  # noqa: E731
    return states.map_steps(split, state), halves


def _continued(old: StepState | None, new: StepState, *, same_layers: bool) -> StepState:
    """`new` with the loss scale, the counts and the fp8 histories of `old` (None: the old job was plain optax)."""
    if old is None:  # no loss scale is lost
        return new
    counts = {name: getattr(old, name) for name in (*states.COUNTED, "rounding_count") if name != "unscaled_fp16"}
    counts = {name: x for name, x in counts.items() if x is not None and getattr(new, name) is not None}
    has_histories = jax.tree.leaves(new.fp8_scales) and jax.tree.leaves(old.fp8_scales)
    if has_histories and same_layers and _alike(old.fp8_scales, new.fp8_scales):
        counts["fp8_scales"] = old.fp8_scales
    elif has_histories:
        message = (
            "the jobs differ in fp8 layers or recipes: amax histories start again; jaxmp.fp8.calibrate fills them."
        )
        warn("fp8-histories-start-again", message)
    if jax.tree.leaves(old.before_state) and jax.tree.leaves(new.before_state):
        counts["before_state"] = _moved("before_state", old.before_state, new.before_state)
    return new._replace(scaling=_scaling(old.scaling, new.scaling), **counts)


def _scaling(old: Any, new: Any) -> Any:
    """The old loss scale, if the new one moves and is of its class (a dynamic one goes on from a number)."""
    if type(new) not in (states.LossScaleState, states.CustomLossScaleState):
        return new
    is_scale = not isinstance(old, states.NoLossScaleState) and isinstance(old, type(new)) and _alike(old, new)
    if is_scale and 0 < float(old.loss_scale) < np.inf:
        return type(new)(*old)
    start = f"the scale starts from {float(new.loss_scale)}"
    message = f"the old job has no loss scale of this kind that is positive and finite; {start}."
    warn("loss-scale-starts-again", message)
    return new


def _alike(old: Any, new: Any) -> bool:
    """Whether two trees have leaves of the same shapes and dtypes."""
    kinds = [[(jnp.shape(x), x.dtype) for x in jax.tree.leaves(tree)] for tree in (old, new)]
    return kinds[0] == kinds[1]
