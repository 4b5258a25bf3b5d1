"""Saves a whole job in one call: a linen TrainState, or an nnx model with its optimizer and other objects with state.

`save` and `restore` take params and `opt_state`. A job has more state: the count of steps, BatchNorm's statistics, the
keys of Dropout. This file splits a job into params, state and a tree `job` with the rest, and joins them again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import frozen, orbax, partial as partial_lib, save_restore
from jaxmp._src.distributed import param_layout
from jaxmp._src.fp8 import scale_leaves

_REST = "job"  # the tree of `extra` with what is neither params nor state


class RestoredJob(NamedTuple):
    """What `restore_job` returns.

    Attributes:
      step: the step that was restored (of the path of a tree: the count of its TrainState); None if there was none yet,
        and all is as given.
      job: the TrainState, or the modules of nnx, which are also changed in place.
      extra: the other trees and numbers, by name.
      report: with `partial=`, as in `Restored`.

    Example:
      >>> RestoredJob(None, "as given", {"position": 0}).extra
      {'position': 0}
    """

    step: int | None
    job: Any
    extra: dict[str, Any]
    report: partial_lib.Report = partial_lib.Report()


class _Parts(NamedTuple):
    """A job, taken apart."""

    tx: Any
    params: PyTree
    opt_state: Any
    rest: dict[str, Any]
    policy: Any
    put: Callable[[save_restore.Restored, Any], Any]  # (what was restored, the rest) -> the job
    has_frozen: bool = False  # whether `rest` has leaves of a model


def save_job(
    manager: Any,
    step: int,
    job: Any,
    *,
    extra: Mapping[str, PyTree] | None = None,
    layout: param_layout.Layout | None = None,
    metadata: Mapping[str, Any] | None = None,
    force: bool = False,
) -> bool:
    """Saves all of a job as a step: params, optimizer, count of steps, statistics, keys. See `restore_job`.

    It returns when the arrays are copied, and writes in the background. If a save fails there, the next call of
    `save_job`, `restore_job` or `close` of the manager raises its error.

    Args:
      manager: a manager of `jaxmp.checkpoint.manager`, one for the whole run.
      step: the number of the step, larger than all saved steps. (Take the loop's, which also counts skipped steps.)
      job: a linen TrainState, flax's, jaxmp's or a subclass with more fields; or, of nnx, `(model, optimizer)`, and
        behind these other objects with state, such as `nnx.Rngs`: `(model, optimizer, rngs)`.
      extra: other trees and numbers to save, by name: `{"position": 3000}` of the data, the state of a data loader.
      layout: the layout that the params are padded with, if they are.
      metadata, force: as for `save`.

    Returns:
      True if the step is saved; False if the manager's interval skips it.

    Raises:
      TypeError: a job of another kind.
      ValueError: as `save`.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxmp, optax
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), policy="bf16")
      >>> with save_restore.manager(tempfile.mkdtemp()) as steps:
      ...     save_job(steps, 0, (model, optimizer), extra={"position": 32})
      ...     restore_job(steps, (model, optimizer), extra={"position": 0}).extra
      True
      {'position': 32}
    """
    parts = _parts_of(job)
    return save_restore.save(
        manager,
        step,
        params=parts.params,
        opt_state=parts.opt_state,
        extra=_with_rest(extra, parts.rest),
        policy=parts.policy,
        layout=layout,
        metadata=metadata,
        force=force,
    )


def restore_job(
    source: Any,
    job: Any,
    *,
    extra: Mapping[str, PyTree] | None = None,
    step: int | None = None,
    layout: param_layout.Layout | None = None,
    partial: str | Sequence[str] = (),
    moments: str = partial_lib.SAME,
) -> RestoredJob:
    """Restores what `save_job` saved, or a TrainState that Orbax saved, into a new job.

    If nothing was saved yet, the job stays as given.

        with jaxmp.checkpoint.manager(directory) as steps:
            last, state, extra, _ = jaxmp.checkpoint.restore_job(steps, state, extra={"position": 0})
            for i in range(0 if last is None else last + 1, 1000):
                state = train_step(state, batch_of(i))
                jaxmp.checkpoint.save_job(steps, i, state, extra={"position": i})

    The new job may run on other devices or in another precision, and may differ in the leaves that `partial` names: see
    `restore`. Frozen params of a module (`wrt=nnx.LoRAParam`) are cast to the dtypes of the new job.

    Args:
      source: a manager, or its directory.
      job: as for `save_job`, made as at the start of a run. Modules of nnx are changed in place.
      extra: the trees and numbers to restore, by name, like the saved ones; {} for none. None: all that were saved, as
        dicts and lists of arrays and numbers.
      step: which step, which must be there; default: the newest, if there is one.
      layout, partial, moments: as for `restore`. Leaves of the job beside params and state are called
        `job/batch_stats/...`, `job/model/...`.

    Returns:
      A `RestoredJob`.

    Raises:
      TypeError: a job of another kind.
      ValueError: as `restore`; a leaf that only the job or only the checkpoint has, by path.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxmp, optax
      >>> tx, params = jaxmp.mixed_precision(optax.sgd(0.1), "fp32"), {"w": jnp.ones(2)}
      >>> state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> with save_restore.manager(tempfile.mkdtemp()) as steps:
      ...     before = restore_job(steps, state).step
      ...     saved = save_job(steps, 4, state)
      ...     restore_job(steps, state).step
      4
    """
    parts = _parts_of(job)
    if step is None and orbax.is_manager(source):
        source.wait_until_finished()
        if source.latest_step() is None:
            return RestoredJob(None, job, dict(extra or {}))
    saved, rest = save_restore.descriptions(source, step), parts.rest
    is_flat = _REST not in saved and rest.keys() <= saved.keys()  # a TrainState that Orbax saved
    if rest and _REST not in saved and not is_flat and not tree_paths.patterns_of(partial):
        raise ValueError(
            f"a job is restored from what save_job saved, or from a TrainState that Orbax saved; this checkpoint has "
            f"{', '.join(sorted({*saved, 'opt_state'}))}, and not the {', '.join(sorted(rest.keys() - saved.keys()))} "
            f"of the job. jaxmp.checkpoint.restore takes params and opt_state alone; with partial={f'{_REST}/*'!r} the "
            f"rest stays as in the job."
        )
    if extra is None:
        taken = ("params", _REST, *(rest if is_flat else ()))
        extra = _full({name: tree for name, tree in saved.items() if name not in taken})
        if is_flat and rest and extra and not tree_paths.patterns_of(partial):
            raise ValueError(
                f"left over: the TrainState in the checkpoint has {', '.join(sorted(extra))}, and the job has not. "
                f"Give the job these fields, or name them to get them beside it: extra={{{sorted(extra)[0]!r}: ...}}."
            )
    if parts.has_frozen:
        model = tree_paths.leaves_by_path(saved.get(_REST, {}).get("model", {}))
        _check_weights(rest["model"], model, tree_paths.leaves_by_path(saved.get("params", {})))
        patterns = tree_paths.patterns_of(partial)
        like = frozen.as_saved(f"{_REST}/model", rest["model"], parts.params, model, patterns)
        rest = rest | {"model": like}
    restored = save_restore.restore(
        source,
        parts.tx,
        params=parts.params,
        extra={**extra, **rest} if is_flat else _with_rest(extra, rest),
        step=step,
        layout=layout,
        partial=partial,
        moments=moments,
    )
    found = dict(restored.extra)
    of_job = {name: found.pop(name) for name in rest} if is_flat else found.pop(_REST, {})
    # The path of a tree has no number of a step: a TrainState counts its own.
    count = of_job.get("step")
    number = int(count) if restored.step is None and count is not None and not np.ndim(count) else restored.step
    return RestoredJob(number, parts.put(restored, of_job), found, restored.report)


def _check_weights(frozen: PyTree, saved: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Raises a ValueError for weights that are `trained` in the checkpoint, and `frozen` in the model."""
    here = [path for path in tree_paths.leaves_by_path(frozen) if not scale_leaves.is_scale(path)]
    twice = [path for path in here if path in trained and path not in saved]
    if twice:
        raise ValueError(
            f"weights of the checkpoint must come into the model; got {', '.join(twice[:3])}"
            f"{', ...' if len(twice) > 3 else ''}, trained in the checkpoint, and values that this optimizer does not "
            f"train in the job: they would keep their fresh values. Restore into a job whose optimizer has the wrt= of "
            f'the checkpoint (nnx.Param), with partial="*lora*" if it has no adapters, then make the optimizer of this '
            f"one (nnx.LoRAParam)."
        )


def _with_rest(extra: Mapping[str, PyTree] | None, rest: dict[str, Any]) -> dict[str, Any]:
    save_restore.check_extra(extra)
    if extra is not None and _REST in extra:
        raise ValueError(f"the name {_REST!r} in extra is that of the job itself; got a tree of this name. Rename it.")
    return {**(extra or {}), **({_REST: rest} if rest else {})}


def _parts_of(job: Any) -> _Parts:
    if isinstance(job, tuple | list) and len(job) >= 2 and isinstance(job[1], nnx.Optimizer):
        return _of_modules(job)
    if all(hasattr(job, name) for name in ("params", "opt_state", "tx", "replace")) and dataclasses.is_dataclass(job):
        return _of_train_state(job)
    got = ", ".join(type(x).__name__ for x in job) if isinstance(job, tuple | list) else type(job).__name__
    raise TypeError(
        f"a job is a TrainState of linen, or (model, optimizer) of nnx with an nnx.Optimizer and, behind it, other "
        f"objects with state; got {got}. For params and a state of optax use jaxmp.checkpoint.save and restore."
    )


def _of_train_state(state: Any) -> _Parts:
    names = [x.name for x in dataclasses.fields(state) if x.metadata.get("pytree_node", True)]
    rest = {name: getattr(state, name) for name in names if name not in ("params", "opt_state")}

    def put(restored: save_restore.Restored, found: Any) -> Any:
        return state.replace(params=restored.params, opt_state=restored.opt_state, **found)

    return _Parts(state.tx, state.params, state.opt_state, _full(rest), getattr(state, "policy", None), put)


def _of_modules(job: Sequence[Any]) -> _Parts:
    model, optimizer, *others = job
    parts = [nnx.state(model, nnx.Not(optimizer.wrt)), *map(nnx.state, others)]
    names = ["model", *(f"{i}" for i in range(2, len(job)))]
    rest = {name: nnx.as_pure(x) for name, x in zip(names, parts, strict=True)} | {"step": optimizer.step[...]}

    def put(restored: save_restore.Restored, found: Any) -> Any:
        params = restored.params
        if "model" in found:
            cast, params = frozen.in_dtypes(found["model"], params, rest["model"])
            found = found | {"model": cast}
        nnx.update(model, params)
        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        variables = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
        for variable, value in zip(variables, jax.tree.leaves(restored.opt_state), strict=True):
            variable.set_value(value)
        optimizer.step.set_value(found["step"])
        for name, module in zip(names, (model, *others), strict=True):
            if name in found:
                nnx.update(module, found[name])
        return job

    policy, opt_state = getattr(optimizer, "policy", None), nnx.as_pure(optimizer.opt_state)
    params, kept = nnx.state(model, optimizer.wrt), _full(rest)
    return _Parts(optimizer.tx, params, opt_state, kept, policy, put, has_frozen="model" in kept)


def _full(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The trees that have leaves."""
    return {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}
