"""Checkpoints: params and optimizer state, saved with Orbax and restored on another mesh or in another precision.

All state of this library is plain arrays, so Orbax alone saves and restores it, and what is saved here is an ordinary
Orbax checkpoint: a step has the item `state`, a tree {"params", "opt_state", ...}, and the item `jaxmp`, a small JSON
that says what it was made with. This file adds what Orbax cannot know:

-   A checkpoint of a run with other dtypes, other masters, fp8 or none, is converted as it is read (`convert`).
-   Everything is compared with the model and the optimizer before an array is read; the first leaf that does not fit is
    named. A job goes on with all of its state or not at all.

Saving is atomic and, by default, in the background: Orbax writes into a folder with another name and renames it when
all is there. A process that dies while it saves leaves the last finished checkpoint behind as the newest. What is
saved is the state of the moment: the arrays are copied before `save` returns, and may be donated then.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from importlib import metadata as _metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import convert as convert_lib, job_leaves, orbax, placement
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step.policy import get_policy


class Restored(NamedTuple):
    """What `restore` returns.

    Attributes:
      step: the step that was saved; None if a single tree was restored from its path.
      params: the model's params.
      opt_state: the optimizer's state; None where no `tx` was given.
      extra: the other trees that were asked for, by name.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxmp, optax
      >>> tx, params = jaxmp.mixed_precision(optax.sgd(0.1), "fp32"), {"w": jnp.ones(2)}
      >>> with manager(tempfile.mkdtemp()) as steps:
      ...     saved = save(steps, 7, params=params, opt_state=tx.init(params))
      ...     steps.wait_until_finished()
      ...     restored = restore(steps, None, params=params)
      >>> restored.step, restored.params["w"].tolist(), restored.opt_state
      (7, [1.0, 1.0], None)
    """

    step: int | None
    params: PyTree
    opt_state: Any
    extra: dict[str, Any]


def manager(directory: Any, *, max_to_keep: int | None = 3, save_interval_steps: int = 1, **options: Any) -> Any:
    """An `orbax.checkpoint.CheckpointManager` for a directory of steps: for `save`, `restore`, and all that Orbax does.

    Args:
      directory: where the steps lie; made if it is not there. Relative paths are taken from the working directory.
      max_to_keep: how many of the newest to keep; None: all.
      save_interval_steps: `save` saves steps that are multiples of it and passes over others.
      **options: of `orbax.checkpoint.CheckpointManagerOptions`, such as `keep_period=`, `read_only=`, or
        `enable_async_checkpointing=False`.

    Returns:
      The manager. Call its `close()` (or leave its `with`) at the end: it waits for what is still being written.

    Raises:
      ImportError: Orbax is not installed; names the extra.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, manager(directory) as steps:
      ...     print(steps.latest_step())
      None
    """
    ocp = orbax.package()
    chosen = {"max_to_keep": max_to_keep, "save_interval_steps": save_interval_steps, **options}
    handlers = {orbax.STATE: ocp.StandardCheckpointHandler(), orbax.ABOUT: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(
        pathlib.Path(directory).absolute(), options=ocp.CheckpointManagerOptions(**chosen), item_handlers=handlers
    )


def save(
    manager: Any,
    step: int,
    *,
    params: PyTree,
    opt_state: Any,
    extra: Mapping[str, PyTree] | None = None,
    policy: str | jmp.Policy | None = None,
    loss_scale: Any = None,
    recipe: Any = None,
    metadata: Mapping[str, Any] | None = None,
    force: bool = False,
) -> bool:
    """Saves a step. With a manager of `manager()` it returns when the arrays are copied, and writes in the background.

    Args:
      manager: an Orbax `CheckpointManager`.
      step: the number of the step, larger than all that are there.
      params: the model's params. Copies for pmap are taken off before (`flax.jax_utils.unreplicate`).
      opt_state: state of the optimizer.
      extra: other trees of arrays by name, such as `{"batch_stats": ..., "key": ...}`.
      policy, loss_scale, recipe: what the optimizer was made with, for the record; see `read_metadata`.
      metadata: more for the record, whatever JSON holds.
      force: save whatever the manager's interval says.

    Returns:
      Whether the step is being saved; False where the manager's interval passes over it.

    Raises:
      ValueError: `extra` with a name that is taken; a step that is there, or older than the newest. To go on from an
        earlier step delete the later ones first, with `manager.delete(step)`.

    Example:
      >>> import jaxmp, tempfile
      >>> tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "fp32"), {"w": jnp.ones(2)}
      >>> with tempfile.TemporaryDirectory() as directory, jaxmp.checkpoint.manager(directory) as steps:
      ...     save(steps, 7, params=params, opt_state=tx.init(params), policy="fp32")
      ...     steps.wait_until_finished()
      ...     restore(steps, tx, params=params).step
      True
      7
    """
    ocp = orbax.package()
    taken = [name for name in (extra or {}) if name in ("params", "opt_state")]
    if taken:
        raise ValueError(f"extra holds trees beside params and opt_state; got one called {taken[0]!r}. Rename it.")
    orbax.check_newer(manager, step)
    tree = {"params": params, "opt_state": opt_state, **(extra or {})}
    about = describe(policy=policy, loss_scale=loss_scale, recipe=recipe) | {"metadata": dict(metadata or {})}
    # The order of the histories in opt_state: of keys that are no strings Orbax makes strings, which sort in another.
    about["fp8_scales"] = [path for path in job_leaves.plain_leaves(params) if scale_leaves.is_scale(path)]
    items = {orbax.STATE: ocp.args.StandardSave(tree), orbax.ABOUT: ocp.args.JsonSave(about)}
    return manager.save(step, args=ocp.args.Composite(**items), force=force)


def describe(*, policy: str | jmp.Policy | None = None, loss_scale: Any = None, recipe: Any = None) -> dict[str, Any]:
    """What a checkpoint says about how it was made: values that JSON holds.

    Example:
      >>> describe(policy="fp16")["policy"]
      'params=float16,compute=float16,output=float32'
    """
    about: dict[str, Any] = {"versions": {name: _metadata.version(name) for name in ("jax", "flax", "optax")}}
    if policy is not None:
        policy = get_policy(policy)
        dtypes = {part: jnp.dtype(getattr(policy, f"{part}_dtype")).name for part in ("param", "compute", "output")}
        about["policy"] = "params={param},compute={compute},output={output}".format(**dtypes)
        about["keep_fp32"], about["fp8_weights"] = list(policy.keep_fp32), policy.fp8_weights
        recipe = policy.recipe if recipe is None else recipe
    if loss_scale is not None:
        about["loss_scale"] = repr(loss_scale)
    if recipe is not None:
        about["recipe"] = _as_json(recipe)
    return about


def _as_json(recipe: Any) -> Any:
    if isinstance(recipe, Mapping):
        return {str(pattern): _as_json(part) for pattern, part in recipe.items()}
    names = [field.name for field in dataclasses.fields(recipe)] if dataclasses.is_dataclass(recipe) else []
    fields = {name: getattr(recipe, name) for name in names}
    plain = {k: x if isinstance(x, str | int | float | bool | None) else repr(x) for k, x in fields.items()}
    return {"recipe": type(recipe).__name__, **plain}


def read_metadata(source: Any, *, step: int | None = None) -> dict[str, Any]:
    """What a checkpoint that `save` wrote says about itself: `policy`, `keep_fp32`, `recipe`, versions and the like.

    Args:
      source: an Orbax `CheckpointManager`, or the path of one step.
      step: which step; the newest by default.

    Returns:
      A dict; {} where Orbax was used directly. `jaxmp.get_policy(d["policy"], keep_fp32=d["keep_fp32"])` is the policy.

    Raises:
      ValueError: no such step; a damaged record.

    Example:
      >>> import jaxmp, tempfile
      >>> with tempfile.TemporaryDirectory() as directory, jaxmp.checkpoint.manager(directory) as steps:
      ...     _ = save(steps, 1, params={"w": jnp.ones(2)}, opt_state=(), policy="bf16", metadata={"run": "a"})
      ...     steps.wait_until_finished()
      ...     about = read_metadata(steps)
      >>> about["policy"], about["metadata"]
      ('params=bfloat16,compute=bfloat16,output=float32', {'run': 'a'})
    """
    _, folder = orbax.find(source, step)
    return orbax.record(folder / orbax.ABOUT)


def restore(
    source: Any,
    tx: optax.GradientTransformation | None,
    *,
    params: PyTree,
    extra: Mapping[str, PyTree] | None = None,
    step: int | None = None,
) -> Restored:
    """Params and optimizer state of a checkpoint, as *this* model and *this* optimizer keep them.

    What was saved may come from another mesh, another policy, with other masters, with fp8 or without, from the plain
    inner optimizer; it is converted as `convert` says. What was saved by the same optimizer comes back bit for bit.

    Args:
      source: an Orbax `CheckpointManager`, or the path of one step or of one tree that Orbax saved: a dict with
        `params` and `opt_state` (a TrainState is one, too), or a pair of them.
      tx: the optimizer to go on with; None: only the params (from the masters, where there are any).
      params: the model's params, arrays or `jax.ShapeDtypeStruct`, in the dtypes and with the shardings that they are
        to have. Masters and moments get the sharding of their param. Without shardings all is restored as
        uncommitted arrays on the default device.
      extra: what else to restore, trees like those that were saved, by name.
      step: which step; the newest finished one by default.

    Returns:
      A `Restored`.

    Raises:
      ValueError: nothing there, or something else; files cut off or missing; a leaf that is missing, left over, of
        another shape or in another format, named by path. Nothing is read before all is compared.

    Warns:
      UserWarning: `tx` scales the loss and the checkpoint has no loss scale; fp8 histories that start anew.

    Example:
      >>> import jaxmp, tempfile
      >>> params32, adam = {"w": jnp.array([1.001])}, optax.adam(1e-3)
      >>> bf16, fp32 = jaxmp.mixed_precision(adam, "bf16"), jaxmp.mixed_precision(adam, "fp32")
      >>> params = jaxmp.get_policy("bf16").cast_to_param(params32)
      >>> with tempfile.TemporaryDirectory() as directory, jaxmp.checkpoint.manager(directory) as steps:
      ...     _ = save(steps, 0, params=params, opt_state=bf16.init(params32))
      ...     steps.wait_until_finished()
      ...     restore(steps, fp32, params=params32).params
      {'w': Array([1.001], dtype=float32)}
    """
    step, folder = orbax.find(source, step)
    order = read_metadata(folder).get("fp8_scales")
    folder = orbax.tree_in(folder)
    ocp = orbax.package()
    wanted = dict(extra or {})
    with ocp.StandardCheckpointer() as reader:
        tree = orbax.described(folder)
        parts = orbax.parts(tree, folder)
        saved = _saved_of(parts, params, order)
        if tx is None:
            job_leaves.check_params(saved, params)
        else:
            if "opt_state" not in parts:
                raise ValueError(
                    f"a job goes on from params and opt_state; the checkpoint at {folder} has only "
                    f"{', '.join(parts)}. For a start with loaded weights pass tx=None, and call tx.init(params)."
                )
            convert_lib.check(saved, tx, params)
        for name, like in wanted.items():
            _check_extra(name, like, parts)
        parts = orbax.parts(orbax.read(reader, folder, tree, params, wanted), folder)
    saved = _saved_of(parts, params, order)
    opt_state = None
    if tx is None:
        params = placement.Shardings(params).place(convert_lib.assemble_params(saved, params)[1])
    else:
        params, opt_state = convert_lib.assemble(saved, tx, params)
    found = {name: _like(like, job_leaves.plain_leaves(parts[name])) for name, like in wanted.items()}
    return Restored(step, params, opt_state, found)


def _saved_of(parts: Mapping[str, Any], like: PyTree, order: Sequence[str] | None) -> job_leaves.Saved:
    """What was saved; its fp8 scales in the order in which its histories stand: as recorded, or as in `like`."""
    leaves = job_leaves.plain_leaves(parts["params"])
    scales = [
        path for path in (order or job_leaves.plain_leaves(like)) if path in leaves and scale_leaves.is_scale(path)
    ]
    leaves = {path: leaves[path] for path in scales} | leaves
    return job_leaves.Saved(leaves, job_leaves.essential_leaves(parts.get("opt_state", ())), "the checkpoint")


def _check_extra(name: str, like: PyTree, parts: Mapping[str, Any]) -> None:
    if name not in parts:
        raise ValueError(f"the checkpoint must have what is asked for; {name!r} is not among {', '.join(parts)}.")
    there = job_leaves.plain_leaves(parts[name])
    for path, x in job_leaves.plain_leaves(like).items():
        at = name if path == "<root>" else f"{name}/{path}"
        if path not in there:
            raise ValueError(f"the checkpoint must have what is asked for; {at} is missing. {job_leaves.has(there)}")
        shape, dtype = there[path].shape, there[path].dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # saved as its bits
            continue
        if tuple(shape) != tuple(x.shape) or dtype != x.dtype:
            raise ValueError(
                f"the checkpoint must have what is asked for; {at} is {dtype}{list(shape)}, expected "
                f"{x.dtype}{list(x.shape)}."
            )


def _like(like: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    def take(path: str, x: Any) -> Any:
        found = leaves[job_leaves.plain(path)]
        raw = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not jnp.issubdtype(found.dtype, jax.dtypes.prng_key)
        return jax.random.wrap_key_data(found) if raw else found

    return tree_paths.map_with_path(take, like)
