"""Imports and exports the state of Megatron-LM's mixed-precision optimizer: masters, Adam's moments, the loss scale.

    {"optimizer": {"state": {0: {"step", "exp_avg", "exp_avg_sq"}, 1: ...}, "param_groups": [{"params": [0, 1]}, ...]},
     "fp32_from_fp16_params": [[master, master], [master]],          one list for each group
     "grad_scaler": {"scale": [s], "growth_tracker", "hysteresis_tracker"}}

Megatron matches leaves by position: the groups in order, and the params of each group in order. Here the user gives the
paths of these params. These functions check everything before they change anything. Where Megatron loads one part and
then fails, or ignores missing entries (fewer groups), they raise an error and load nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.checkpoint import foreign_loss_scales
from jaxmp._src.guard import state_readers
from jaxmp._src.loss_scale import dynamic
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths, masters as masters_lib, state as states, state_arrays, state_paths
from jaxmp._src.step.state_paths import StatePath

_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
Groups = Sequence[Sequence[str]]


def export_megatron(
    opt_state: Any, params: PyTree, *, groups: Groups, loss_scale: dynamic.DynamicLossScale | None = None
) -> dict[str, Any]:
    """Exports what Megatron-LM's `Float16OptimizerWithFloat16Params.state_dict()` holds: NumPy arrays, Python numbers.

    Args:
      opt_state: state of `mixed_precision` with float32 or split masters, over Adam or momentum SGD.
      params: the params that belong to it.
      groups: paths of the params by Megatron's groups, in Megatron's order.
      loss_scale: the loss scale that the optimizer was made with; None: the dict has no `grad_scaler`.

    Returns:
      The dict. Tensors have our layout (`kernel` [in, out]) and shapes. `param_groups` has no options (lr, weight
      decay): set them in Megatron.

    Raises:
      ValueError: a path that is not in the params, or is given twice.

    Example:
      >>> import jaxmp, optax
      >>> params32, policy = {"w": jnp.ones(2), "b": jnp.zeros(1)}, jaxmp.get_policy("bf16")
      >>> opt_state = jaxmp.mixed_precision(optax.adam(1e-3), policy).init(params32)
      >>> saved = export_megatron(opt_state, policy.cast_to_param(params32), groups=[["w"], ["b"]])
      >>> saved["fp32_from_fp16_params"][0][0], saved["optimizer"]["param_groups"]
      (array([1., 1.], dtype=float32), [{'params': [0]}, {'params': [1]}])
    """
    order = _order(groups, params)
    masters = tree_paths.leaves_by_path(state_readers.get_master_params(opt_state, params))
    with_master = _with_master(opt_state, params)
    per_param: dict[int, dict[str, Any]] = {i: {} for i in range(len(order))}
    for path, x in state_paths.leaves(opt_state, params).items():
        found = _moment_of(path, order)
        if found is not None:
            per_param[order.index(found[1])][found[0]] = np.asarray(x, np.float32)
    if counts := _counts(opt_state, params):
        per_param = {i: {"step": int(counts[0]), **moments} for i, moments in per_param.items()}
    numbers = iter(range(len(order)))
    megatron: dict[str, Any] = {
        "optimizer": {"state": per_param, "param_groups": [{"params": [next(numbers) for _ in g]} for g in groups]},
        "fp32_from_fp16_params": [[np.asarray(masters[p]) for p in group if p in with_master] for group in groups],
    }
    if loss_scale is not None:
        megatron["grad_scaler"] = foreign_loss_scales.export_loss_scale(opt_state, loss_scale, "megatron")
    return megatron


def import_megatron(
    state_dict: Mapping[str, Any],
    opt_state: Any,
    params: PyTree,
    *,
    groups: Groups,
    in_float32: Mapping[str, Any] | None = None,
) -> tuple[PyTree, Any]:
    """Imports the state of Megatron-LM's optimizer, to continue a Megatron job.

    Args:
      state_dict: as Megatron saves it, tensors as arrays (`tensor.numpy()`), in our layout and shapes. The older keys
        `optimizer_state_dict` and `fp32_from_fp16` are also read.
      opt_state: state of `mixed_precision` over Adam or momentum SGD, as `tx.init` makes it.
      params: the model's params, for their dtypes.
      groups: paths of the params by Megatron's groups, in Megatron's order.
      in_float32: {path: array} of the params that Megatron keeps in float32. Its optimizer has no copy of these: they
        are in the model's part of its checkpoint.

    Returns:
      `(params, opt_state)`: masters, moments, counts and the loss scale of the state dict, and params rounded from the
      masters. (Megatron itself takes the params from the model's checkpoint.)

    Raises:
      ValueError: an entry, a group or a param that is missing or left over; a shape that differs; params with different
        step counts. The error names the key or the path, and nothing was changed.

    Warns:
      UserWarning: an old key; no `grad_scaler`, or the empty one of a constant scale, although the optimizer scales the
        loss dynamically (its own scale stays); a `grad_scaler` although it does not (ignored); float32 params that are
        missing from `in_float32` (they stay as in `params`), by path; an average of the weights in `opt_state`, which
        Megatron does not save (it stays), by path.

    Example:
      >>> import jaxmp, optax
      >>> tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), {"w": jnp.ones(2, jnp.bfloat16)}
      >>> saved = export_megatron(tx.init({"w": jnp.full(2, 1.001)}), params, groups=[["w"]])
      >>> params, opt_state = import_megatron(saved, tx.init(params), params, groups=[["w"]])
      >>> jaxmp.get_master_params(opt_state, params)
      {'w': Array([1.001, 1.001], dtype=float32)}

    References:
      Megatron-LM, core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params.load_state_dict`.
    """
    order = _order(groups, params)
    optimizer = _entry(state_dict, "optimizer", "optimizer_state_dict", tells=True)
    with_master = _with_master(opt_state, params)
    masters = _masters(_entry(state_dict, "fp32_from_fp16_params", "fp32_from_fp16", tells=False), groups, with_master)
    per_param = _per_param(optimizer, groups, order)
    leaves = tree_paths.leaves_by_path(params)
    for path, master in masters.items():
        _check_shape(master, leaves[path], f"the master of {path}")
    whole = _in_float32(in_float32 or {}, leaves, masters, order)
    new_scale = _scale(state_dict, opt_state)
    _warn_of_what_stays([path for path in order if path not in masters | whole], opt_state, params)
    steps = {int(np.asarray(x["step"]).reshape(())) for x in per_param.values() if "step" in x}
    if len(steps) > 1 or (_counts(opt_state, params) and not steps):
        raise ValueError(f"all params must have the same step; Megatron's state has {sorted(steps) or 'none'}.")

    new: dict[StatePath, Any] = {}
    for path, x in state_paths.leaves(opt_state, params).items():
        if _is_count(path):
            new[path] = jnp.full(x.shape, next(iter(steps)), x.dtype)
        if (found := _moment_of(path, order)) is None:
            continue
        name, param = found
        if name not in per_param[param]:
            raise ValueError(
                f"both optimizers must have the same moments; {path} needs {name}, which is missing in Megatron's "
                f"state of {param}: it has {', '.join(per_param[param]) or 'nothing'}."
            )
        _check_shape(per_param[param][name], x, f"{name} of {param}")
        new[path] = jnp.asarray(per_param[param][name], x.dtype)

    def visit(path: StatePath, x: Any) -> Any:
        if path.role == state_paths.MASTER and path.param in masters:
            master = jnp.asarray(masters[path.param], jnp.float32)
            return masters_lib.remainder_of(master, x.dtype) if path.part else master
        return new.get(path, x)

    new_state = state_paths.map_leaves(visit, opt_state, params)
    new_state = new_state if new_scale is None else foreign_loss_scales.set_loss_scale(new_state, new_scale)

    def rounded(path: str, x: Any) -> Any:
        master = (masters | whole).get(path)
        return x if master is None else casting.saturating_cast(jnp.asarray(master, jnp.float32), x.dtype)

    return tree_paths.map_with_path(rounded, params), state_arrays.own_buffers(new_state, foreign=(opt_state, params))


def _in_float32(
    given: Mapping[str, Any], leaves: Mapping[str, Any], masters: Mapping[str, Any], order: list[str]
) -> dict[str, Any]:
    for path, x in given.items():
        if path in masters or path not in order:
            raise ValueError(
                f"in_float32= must have params of groups= without a master; {path} "
                f"{'has a master in the state' if path in masters else 'is in no group'}."
            )
        _check_shape(x, leaves[path], path)
    return dict(given)


def _warn_of_what_stays(without: list[str], opt_state: Any, params: PyTree) -> None:
    """Names the values that Megatron's optimizer has not, and that therefore stay as they are given."""
    if without:
        warn(
            "megatron-import",
            f"Megatron's optimizer has no copy of params that it keeps in float32: {', '.join(without[:4])}"
            f"{', ...' if len(without) > 4 else ''} stay as in params=. Take them from the model's part of the "
            f"checkpoint: in_float32={{path: array}}.",
        )
    averages = [path for path in state_paths.of(opt_state, params) if "ema_params" in path.words]
    if averages:
        warn(
            "megatron-import",
            f"Megatron's state has no average of the weights: {averages[0]} and the others stay as in opt_state. Start "
            f"it from the imported weights: put the state of ema_params' init in its place.",
        )


def _order(groups: Groups, params: PyTree) -> list[str]:
    order, leaves = [path for group in groups for path in group], tree_paths.leaves_by_path(params)
    for i, path in enumerate(order):
        if path not in leaves or path in order[:i]:
            why = "is given twice" if path in order[:i] else "is not a param"
            raise ValueError(
                f"groups must name each param once, by path; {path} {why}. {leaf_paths.first_paths(leaves)}"
            )
    return order


def _with_master(opt_state: Any, params: PyTree) -> set[str]:
    masters = [path.param for path in state_paths.of(opt_state, params) if path.role == state_paths.MASTER]
    return {param for param in masters if param is not None}


def _counts(opt_state: Any, params: PyTree) -> list[Any]:
    return [x for path, x in state_paths.leaves(opt_state, params).items() if _is_count(path)]


def _is_count(path: StatePath) -> bool:
    return path.param is None and path.names[-1] == "count"


def _moment_of(path: StatePath, order: list[str]) -> tuple[str, str] | None:
    """(Megatron's name, path of the param) of the moment at `path` in our state; None for another leaf."""
    for theirs, ours in _MOMENTS.items():
        if path.words[-1:] == (ours,) and path.param in order and not path.part:
            return theirs, path.param
    return None


def _entry(state_dict: Mapping[str, Any], name: str, old: str, *, tells: bool) -> Any:
    if name in state_dict:
        return state_dict[name]
    if old not in state_dict:
        raise ValueError(
            f"Megatron's state must have {name} (or {old}, the old name); got {', '.join(state_dict) or 'nothing'}."
        )
    if tells:
        warn(
            "megatron-import",
            f"this is the state of an old Megatron checkpoint: {old} is read as {name}.",
        )
    return state_dict[old]


def _masters(given: Sequence[Sequence[Any]], groups: Groups, with_master: set[str]) -> dict[str, Any]:
    wanted = [[path for path in group if path in with_master] for group in groups]
    for path in sorted(with_master - {path for group in wanted for path in group}):
        raise ValueError(f"groups must name every param that has a master; {path} is in no group.")
    if len(given) != len(wanted) or any(len(g) != len(w) for g, w in zip(given, wanted, strict=False)):
        raise ValueError(
            f"masters are matched by position: groups= has {[len(w) for w in wanted]} params with a master; Megatron's "
            f"fp32_from_fp16_params has groups of {[len(g) for g in given]}."
        )
    return {path: x for group, paths in zip(given, wanted, strict=True) for path, x in zip(paths, group, strict=True)}


def _per_param(optimizer: Mapping[str, Any], groups: Groups, order: list[str]) -> dict[str, dict[str, Any]]:
    for name in ("state", "param_groups"):
        if name not in optimizer:
            raise ValueError(f"Megatron's optimizer must have state and param_groups; {name} is missing.")
    theirs = optimizer["param_groups"]
    if [len(g["params"]) for g in theirs] != [len(g) for g in groups]:
        raise ValueError(
            f"params are matched by position: groups= has {[len(g) for g in groups]} params; Megatron's param_groups "
            f"has groups of {[len(g['params']) for g in theirs]}."
        )
    found = {}
    shared = [{"step": g["step"]} if "step" in g else {} for g in theirs for _ in g["params"]]  # apex: one per group
    for path, number, more in zip(order, (i for g in theirs for i in g["params"]), shared, strict=True):
        if number not in optimizer["state"]:
            raise ValueError(
                f"Megatron's optimizer must have a state for each param; the state of {path} ({number}) is missing."
            )
        found[path] = {**more, **optimizer["state"][number]}
    return found


def _scale(state_dict: Mapping[str, Any], opt_state: Any) -> dynamic.DynamicLossScale | None:
    found = states.find(opt_state, states.LossScaleState)
    is_dynamic = len(found) == 1 and bool(jnp.any(found[0].hysteresis_left != 0))
    if "grad_scaler" not in state_dict:
        if is_dynamic:
            warn(
                "megatron-import",
                f"Megatron's state has no grad_scaler: the loss scale stays {float(found[0].loss_scale)}. To choose "
                f"another, use jaxmp.checkpoint.set_loss_scale.",
            )
        return None
    if not state_dict["grad_scaler"]:  # a ConstantGradScaler has no state: its scale is an argument of the job
        if is_dynamic:
            warn(
                "megatron-import",
                f"Megatron's grad_scaler is empty, as that of a constant scale is: the loss scale stays "
                f"{float(found[0].loss_scale)}. For the constant, pass loss_scale= with its value.",
            )
        return None
    new = foreign_loss_scales.import_loss_scale(state_dict["grad_scaler"])
    if is_dynamic:
        return new
    warn(
        "megatron-import",
        "Megatron's state has a grad_scaler, but this optimizer has no dynamic loss scale: the grad_scaler is ignored. "
        'To go on with it, make the optimizer with loss_scale=jaxmp.DynamicLossScale.preset("megatron").',
    )
    return None


def _check_shape(got: Any, like: Any, what: str) -> None:
    if np.shape(got) != tuple(like.shape):
        raise ValueError(
            f"Megatron's state must be of this model; {what} has shape {np.shape(got)}, expected {like.shape}."
        )
