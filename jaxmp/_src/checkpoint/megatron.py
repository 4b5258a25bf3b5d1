"""Imports the state of Megatron-LM's mixed-precision optimizer: masters, Adam's moments, the loss scale.

{"optimizer": {"state": {0: {"step", "exp_avg", "exp_avg_sq"}, 1: ...}, "param_groups": [{"params": [0, 1]}, ...]},
 "fp32_from_fp16_params": [[master, master], [master]],          one list for each group
 "grad_scaler": {"scale": [s], "growth_tracker", "hysteresis_tracker"}}
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.checkpoint import convert, loss_scales
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths, state as states, state_arrays

_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}


def import_megatron(
    state_dict: Mapping[str, Any],
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[PyTree, Any]:
    """Makes params and state from `Float16OptimizerWithFloat16Params.state_dict()` (core/optimizer/optimizer.py).

    Args:
      state_dict: tensors as arrays (`tensor.numpy()`), in our layout and shapes; old keys are read too.
      tx: `mixed_precision` over Adam or momentum SGD.
      params: the model's params, for their dtypes, and for the values of those that Megatron keeps in float32.
      groups: paths of the params by Megatron's groups, in its order. None: each is found by its shape, if all differ.

    Returns:
      `(params, opt_state)`: the masters, moments, counts and loss scale that were saved, params rounded from masters.
      It warns of an old key, of a `grad_scaler` that is missing or not used, and of values that Megatron has not; what
      is missing, left over or of another shape is a ValueError.

    Example:
      >>> import jaxmp
      >>> tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), {"w": jnp.ones(1)}
      >>> state = {0: {"step": 7, "exp_avg": np.ones(1), "exp_avg_sq": np.ones(1)}}
      >>> saved = {"optimizer": {"state": state, "param_groups": [{"params": [0]}]}}
      >>> params, opt_state = import_megatron(saved | {"fp32_from_fp16_params": [[np.float32([1.25])]]}, tx, params)
      >>> jaxmp.get_master_params(opt_state, params)["w"].tolist()
      [1.25]
    """
    if "optimizer" not in state_dict:
        warn("megatron-import", "this is an old Megatron checkpoint: optimizer_state_dict is read as optimizer.")
    optimizer = _entry(state_dict, "optimizer", "optimizer_state_dict")
    masters = _entry(state_dict, "fp32_from_fp16_params", "fp32_from_fp16")
    numbers = [list(group["params"]) for group in _entry(optimizer, "param_groups")]
    leaves, each = tree_paths.leaves_by_path(params), _entry(optimizer, "state")
    if {*each} != {n for group in numbers for n in group}:
        raise ValueError(f"Megatron's state must be that of its param_groups; got {[*each]} for the params {numbers}.")
    if groups is None:
        by_shape: Any = {np.shape(x): path for path, x in leaves.items()}
        shapes = {n: next((np.shape(x) for k, x in each[n].items() if k in _MOMENTS.values()), None) for n in each}
        if len(by_shape) < len(leaves) or not {*shapes.values()} <= {*by_shape}:
            raise ValueError("without groups=, each param must be found by its shape; give the paths by groups.")
        groups = [[by_shape[shapes[n]] for n in group] for group in numbers]
    order = [path for group in groups for path in group]
    with warnings.catch_warnings(action="ignore"):  # the masters come from Megatron
        steps = states.with_masters(jax.eval_shape(tx.init, params))
    paths = [path for step in steps for path, _ in jax.tree_util.tree_leaves_with_path(step.master_params)]
    with_master = {leaf_paths.param_of(path) for path in paths}
    wrong = [path for path in order if path not in leaves or order.count(path) > 1] + sorted(with_master - {*order})
    if wrong:
        got = f"{wrong[0]} is not a param, or there {order.count(wrong[0])} times. {leaf_paths.first_paths(leaves)}"
        raise ValueError(f"groups must name each param once, by path, and all that have a master; {got}")
    wanted = [[path for path in group if path in with_master] for group in groups]
    for name, ours, theirs in (("param_groups", groups, numbers), ("fp32_from_fp16_params", wanted, masters)):
        if [*map(len, ours)] != [*map(len, theirs)]:  # Megatron would ignore groups that are missing
            got = f"{[*map(len, ours)]}, and {[*map(len, theirs)]} in Megatron's"
            raise ValueError(f"{name} is matched by position, so groups must have as many params; got {got}.")
    pairs = zip((path for group in wanted for path in group), (x for group in masters for x in group), strict=True)
    weights = {path: jnp.asarray(_fitting("the master", path, x, leaves[path]), jnp.float32) for path, x in pairs}
    # The Adam of apex has one step for a group.
    shared = [{"step": g["step"]} if "step" in g else {} for g in optimizer["param_groups"] for _ in g["params"]]
    numbered = zip(order, (n for group in numbers for n in group), shared, strict=True)
    per_param = {path: {**more, **_entry(each, number)} for path, number, more in numbered}
    counts = {int(np.asarray(x["step"]).item()) for x in per_param.values() if "step" in x}

    def filled(node: Any) -> Any:
        if hasattr(node, "_fields"):
            return node._replace(**{name: of_field(name, x) for name, x in zip(node._fields, node, strict=True)})
        if isinstance(node, dict):
            return {name: filled(x) for name, x in node.items()}
        return type(node)(map(filled, node)) if isinstance(node, tuple | list) else node

    def of_field(field: str, x: Any) -> Any:
        if field == "count":
            if len(counts) != 1:
                raise ValueError(f"all params must have the same step; Megatron's have {sorted(counts) or 'none'}.")
            return jnp.full(x.shape, max(counts), x.dtype)
        if field not in _MOMENTS:
            return filled(x)
        name = _MOMENTS[field]
        saved = lambda path, x: _fitting(name, path, _entry(per_param.get(path, {}), name), x)  # noqa: E731
        return tree_paths.map_with_path(lambda path, x: jnp.asarray(saved(path, x), x.dtype), x)

    full = tree_paths.map_with_path(lambda path, x: weights.get(path, x), params)
    opt_state, halves = convert.split_exactly(tx.init(full), weights)
    opt_state = states.map_steps(lambda step: step._replace(optimizer_state=filled(step.optimizer_state)), opt_state)
    if own := [path for path in order if path not in weights]:
        names = ", ".join(own[:4]) + (" and more" if own[4:] else "")
        warn("megatron-import", f"Megatron's optimizer has no master of {names}: the values are those of params.")
    if states.find(opt_state, states.EmaParamsState):
        warn("megatron-import", "Megatron's optimizer has no averages (ema_params): they start as tx.init makes them.")
    scale, old = state_dict.get("grad_scaler"), states.find(opt_state, states.LossScaleState)
    moves = len(old) == 1 and type(old[0]) is states.LossScaleState
    if scale and not moves:
        warn("megatron-import", "Megatron's grad_scaler is not used: this optimizer has no dynamic loss scale.")
    elif scale:
        opt_state = loss_scales.set_loss_scale(opt_state, loss_scales.import_loss_scale(scale))
    elif moves:  # that of a constant scale is empty
        warn("megatron-import", f"Megatron's grad_scaler is missing or empty: the scale stays {old[0].loss_scale}.")
    rounded = {path: casting.saturating_cast(x, leaves[path].dtype) for path, x in weights.items()} | halves
    new_params = tree_paths.map_with_path(lambda path, x: rounded.get(path, x), params)
    return new_params, state_arrays.own_buffers(opt_state, foreign=params)


def _entry(saved: Mapping[Any, Any], name: Any, old: Any = None) -> Any:
    if name not in saved and old not in saved:
        raise ValueError(f"Megatron's state must have {name}{f' (or {old})' if old else ''}; got {[*saved]}.")
    return saved[name if name in saved else old]


def _fitting(what: str, path: str, x: Any, like: Any) -> Any:
    if np.shape(x) != like.shape:
        raise ValueError(f"shapes must be ours; {what} of {path} has {np.shape(x)}, expected {like.shape}.")
    return x
