"""Saves a job as an Orbax checkpoint with a JSON record, and restores it into this model and this optimizer.

`restore` reads Orbax's description of the tree first, compares it with the job, then reads the arrays and calls
`convert.assemble`. The face `jaxmp.checkpoint` explains the format.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import metadata as _metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.checkpoint import (
    chain_places,
    convert as convert_lib,
    job_leaves,
    leaf_sums,
    names,
    orbax,
    padding,
    partial as partial_lib,
    placement,
    places,
    regroup,
    unsent,
    writer,
)
from jaxmp._src.distributed import param_layout
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.guard import argument_kinds
from jaxmp._src.step import leaf_paths
from jaxmp._src.step.policy import get_policy
from jaxmp._src.step.state_paths import StatePath


class _Restored(NamedTuple):
    step: int | None
    params: PyTree
    opt_state: Any
    extra: dict[str, Any]


class Restored(_Restored):
    """What `restore` returns: the tuple `(step, params, opt_state, extra)`, and a report.

    Attributes:
      step: the saved step; None if a single tree was restored from its path.
      params: the model's params.
      opt_state: the optimizer's state; None if no `tx` was given.
      extra: the other requested trees, by name.
      report: with `partial=` or `moments=`, the paths of leaves that are `fresh` and `left_over`, and the states that
        have `moved` in the chain.

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

    report: partial_lib.Report = partial_lib.Report()


def manager(directory: Any, *, max_to_keep: int | None = 3, save_interval_steps: int = 1, **options: Any) -> Any:
    """Makes an `orbax.checkpoint.CheckpointManager` for a directory of steps, for `save`, `restore` and Orbax itself.

    Args:
      directory: the directory of the steps; created if missing. Relative paths start at the working directory. Or a
        URL, `file:///...` or `gs://...`: this needs what Orbax needs there, and has no lock.
      max_to_keep: how many of the newest steps to keep; None: all.
      save_interval_steps: `save` saves steps that are multiples of it, and skips the others.
      **options: options of `orbax.checkpoint.CheckpointManagerOptions`, such as `keep_period=`, `read_only=`, or
        `enable_async_checkpointing=False`.

    Returns:
      The manager. Call its `close()` (or leave its `with`) at the end: it waits for saves that are still running, and
      raises their errors. If nothing closes it, the end of the program does.

    Raises:
      ImportError: Orbax is not installed; names the extra.
      ValueError: a URL that cannot be reached; names its scheme.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, manager(directory) as steps:
      ...     print(steps.latest_step())
      None
    """
    ocp = orbax.package()
    chosen = {"max_to_keep": max_to_keep, "save_interval_steps": save_interval_steps}
    if options.get("read_only"):  # Orbax warns of each of these that it sets itself
        chosen = {"max_to_keep": None, "save_interval_steps": 0, "create": False}
    place = places.folder(directory)
    if places.is_local(place):
        chosen |= {"temporary_path_class": writer.durable_path()}
        chosen |= {} if options.get("read_only") else {"todelete_subdir": writer.DELETED}
    chosen |= options
    handlers = {orbax.STATE: ocp.StandardCheckpointHandler(), orbax.ABOUT: ocp.JsonCheckpointHandler()}
    with places.explained(place):
        place.exists()
        return writer.manager_class()(place, options=ocp.CheckpointManagerOptions(**chosen), item_handlers=handlers)


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
    layout: param_layout.Layout | None = None,
    force: bool = False,
) -> bool:
    """Saves a step. With a manager of `manager()` it returns after it copied the arrays, and writes in the background.

    Args:
      manager: an Orbax `CheckpointManager`.
      step: the number of the step, larger than all saved steps.
      params: the model's params. Remove the replicas of pmap before (`flax.jax_utils.unreplicate`).
      opt_state: state of the optimizer.
      extra: other trees of arrays and numbers by name, such as `{"batch_stats": ..., "key": ..., "epoch": 3}`.
      policy, loss_scale, recipe: those of the optimizer, for the record; see `read_metadata`.
      metadata: more for the record: text, numbers, bools, None, lists and dicts of these.
      layout: the layout that `params` and `opt_state` are padded with (`jaxmp.fsdp.pad`), for the record: so a restore
        on another number of devices knows what is padding.
      force: save the step even if the manager's interval would skip it.

    Returns:
      True if the step is saved; False if the manager's interval skips it.

    Raises:
      ValueError: a name in `extra` that is already used; names that nothing can tell apart; a leaf that is no array and
        no number, or was deleted (donated), or metadata that JSON cannot hold, by path; a manager that is closed, or
        that only reads; another process that saves into this directory; a step that is not newer than all saved steps.
        To continue from an earlier step, delete the later ones first, with `manager.delete(step)`. All of these are
        raised before anything is written.

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
    step = orbax.number_of(step)
    orbax.check_manager(manager, step)
    given = {"params": ("params", params), "opt_state": ("state", opt_state)}
    argument_kinds.check("save(manager, step, params=, opt_state=)", **given)
    check_extra(extra)
    taken = [name for name in (extra or {}) if name in ("params", "opt_state")]
    if taken:
        raise ValueError(f"names in extra must not be params or opt_state; got a tree called {taken[0]!r}. Rename it.")
    orbax.check_newer(manager, step)
    if hasattr(manager, "hold"):
        manager.hold()
    job = {"params": params, "opt_state": opt_state, **(extra or {})}
    leaves, values = names.of_job(job), jax.tree.leaves(job)
    for leaf, x in zip(leaves, values, strict=True):
        leaf_sums.check_leaf(str(leaf), x)
    about = _described(policy, loss_scale, recipe) | {"metadata": dict(metadata or {})}
    # The order of the histories in opt_state. Orbax turns all keys into strings, and these may sort differently.
    about["fp8_scales"] = [path for path in tree_paths.leaves_by_path(params) if scale_leaves.is_scale(path)]
    if not force and not manager.should_save(step):
        return False
    padded = padding.of_layout(layout, params, "layout=")
    about |= {"layout": padded.as_json(), names.FORMAT: names.NEWEST, names.LEAVES: names.as_json(leaves)}
    tree, about[names.ESCAPED] = names.for_orbax(job)
    stored, empty = orbax.without_empty(leaves, values)
    about |= {name: x for name, x in ((orbax.EMPTY, empty), (orbax.KEYS, orbax.keys_of(leaves, values))) if x}
    orbax.write_record(about)  # what JSON cannot hold is found before the leaves are summed
    by_key = {leaf.key: (leaf, x) for leaf, x in zip(leaves, values, strict=True)}
    sums = leaf_sums.of_leaves(
        {key: x for key, (_, x) in by_key.items()}, lambda key, shape: padded.whole(by_key[key][0].path, shape)
    )
    about = orbax.write_record(about | {orbax.CHECKSUMS: sums})
    stored = names.in_order_of(tree, leaves, stored, escaped=about[names.ESCAPED])
    items = {
        orbax.STATE: ocp.args.StandardSave(jax.tree.unflatten(jax.tree.structure(tree), stored)),
        orbax.ABOUT: ocp.args.JsonSave(about),
    }
    return manager.save(step, args=ocp.args.Composite(**items), force=force)


def _described(policy: str | jmp.Policy | None, loss_scale: Any, recipe: Any) -> dict[str, Any]:
    """The part of the record about policy, loss scale, recipe (None: the policy's) and versions."""
    about: dict[str, Any] = {"versions": {name: _metadata.version(name) for name in _RECORDED}}
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


_RECORDED = ("jaxmp", "jax", "flax", "optax")


def _as_json(recipe: Any) -> Any:
    if isinstance(recipe, Mapping):
        return {str(pattern): _as_json(part) for pattern, part in recipe.items()}
    names = [field.name for field in dataclasses.fields(recipe)] if dataclasses.is_dataclass(recipe) else []
    fields = {name: getattr(recipe, name) for name in names}
    plain = {k: x if isinstance(x, str | int | float | bool | None) else repr(x) for k, x in fields.items()}
    return {"recipe": type(recipe).__name__, **plain}


def read_metadata(source: Any, *, step: int | None = None) -> dict[str, Any]:
    """Reads the record of a checkpoint that `save` wrote: `format`, `versions`, `policy`, `recipe`, `metadata`.

    Args:
      source: an Orbax `CheckpointManager`, its directory, or the path of one step.
      step: which step; default: the newest.

    Returns:
      A dict; {} if the checkpoint was written by Orbax alone. `jaxmp.get_policy(d["policy"], keep_fp32=d["keep_fp32"])`
      gives the policy.

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
    about = orbax.record(folder / orbax.ABOUT)
    return {name: x for name, x in about.items() if name not in _FOR_RESTORE}


_FOR_RESTORE = (orbax.CHECKSUMS, orbax.EMPTY, orbax.KEYS, names.LEAVES, names.ESCAPED)


def restore(
    source: Any,
    tx: optax.GradientTransformation | None,
    *,
    params: PyTree,
    extra: Mapping[str, PyTree] | None = None,
    step: int | None = None,
    layout: param_layout.Layout | None = None,
    partial: str | Sequence[str] = (),
    moments: str = partial_lib.SAME,
) -> Restored:
    """Restores params and optimizer state of a checkpoint into *this* model and *this* optimizer.

    The checkpoint may come from another mesh, another policy, other masters, with or without fp8, or from the plain
    inner optimizer: `restore` converts it by the rules of `convert`. A checkpoint of the same optimizer is restored bit
    for bit.

    Args:
      source: an Orbax `CheckpointManager`, or its directory, or the path of one step or of one tree that Orbax saved: a
        dict with `params` and `opt_state` (also a TrainState), or a pair of these.
      tx: the optimizer to continue with; None: only the params (from the masters if there are any).
      params: the model's params, arrays or `jax.ShapeDtypeStruct`, with the dtypes and shardings that you want. Masters
        and moments get the sharding of their param. Without shardings, all arrays are restored uncommitted on the
        default device.
      extra: other trees to restore, by name: trees like the saved ones, with all of their leaves. Numbers of Python and
        arrays of NumPy come back as such, with all of their bits.
      step: which step; default: the newest complete one.
      layout: the layout that `params` are padded with. It is needed only where their shardings do not say it: if they
        have none, or if the checkpoint was saved without a layout and `params` are no arrays, in which zeros show what
        is padding.
      partial: path patterns of leaves that may be missing from the checkpoint, left over in it, or of another shape:
        `"*lora*"`, `"head"`, `"ema_*"`. A missing param, and a missing leaf of `extra`, is as given, so `params` must
        have an array there, not its shape; a missing leaf of the state is as from `tx.init`. All others must be there.
        With patterns, states that stand elsewhere in the chain of the optimizer are found by the names of their leaves.
        `Restored.report` lists all of it.
      moments: what of the wrapped optimizer's state is continued, for another optimizer or schedule on purpose.
        `"same"`: all of it, and the optimizer must be the same one, apart from `partial`. `"fit"`: each state of the
        chain all of whose leaves are in the checkpoint, by names and shapes; other states start as in `tx.init`. So
        Lion continues with Adam's `mu`: both are averages of gradients. `"reset"`: nothing.
        Masters, loss scale and fp8 histories are always continued. `Restored.report` lists what is fresh.

    Returns:
      A `Restored`.

    Raises:
      ValueError: no checkpoint, or files of another format; incomplete or missing files; a leaf that is missing, left
        over, of another shape or in another format, named by path (all leaves are compared before any array is read); a
        leaf that is not what was saved, by its checksum: this error names the newest step that is whole.

    Warns:
      UserWarning: `tx` scales the loss and the checkpoint has no loss scale; fp8 histories that start again; a pattern
        of `partial` that fits no leaf; moments in 8 bits that are rounded, because their groups of neighbours are
        larger under `layout`.

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
    optimizer = {} if tx is None else {"tx": ("optimizer", tx)}
    argument_kinds.check("restore(manager, tx, params=)", **optimizer, params=("params", params))
    check_extra(extra)
    wanted, patterns = dict(extra or {}), tree_paths.patterns_of(partial)
    if moments not in partial_lib.MOMENTS:
        raise ValueError(f"moments= is {', '.join(map(repr, partial_lib.MOMENTS))}; got {moments!r}.")
    new = padding.of_layout(layout, params, "layout=")
    step, folder = orbax.find(source, step)
    about = orbax.record(folder / orbax.ABOUT)
    order, checksums = about.get("fp8_scales"), about.get(orbax.CHECKSUMS)
    folder = orbax.tree_in(folder)
    ocp = orbax.package()
    found = orbax.described(folder, about)
    orbax.check_is_job(found, folder)
    values = jax.tree.leaves(found.tree)
    there, here = found.by_tree(values)["params"], tree_paths.leaves_by_path(params)
    old = padding.recorded(about)
    there = {str(path): x for path, x in there.items()}
    new = padding.inferred(params, old, there) if layout is None else new
    change = padding.Change(old, new, there, here)
    change.check(patterns)
    like_state = {} if tx is None else convert_lib.leaves_of(tx, params)

    def parts_of(values: Sequence[Any]) -> dict[str, dict[StatePath, Any]]:
        by_tree = found.by_tree(orbax.with_keys(found.leaves, values, about))
        return {
            name: {path: x for path, x in tree.items() if not change.is_of_other_params(path)}
            for name, tree in by_tree.items()
        }

    with ocp.StandardCheckpointer() as reader:
        values = change.onto(found.leaves, values)
        parts = parts_of(values)
        saved, _ = _saved_of(parts, params, order, like_state, change)
        if tx is not None and "opt_state" not in parts:
            raise ValueError(
                f"a job continues from params and opt_state; the checkpoint at {folder} has only "
                f"{', '.join(parts)}. To start from the weights alone, pass tx=None and call tx.init(params)."
            )
        if patterns:
            of_extra = [
                _at(name, path)
                for name, like in wanted.items()
                for tree in (names.by_names(like), _by_names(parts, name))
                for path in tree
            ]
            paths = dict.fromkeys(map(str, [*saved.params, *saved.state, *here, *like_state, *of_extra]))
            tree_paths.warn_of_idle("restore(partial=)", patterns, paths, of="leaf")
        completed, _ = _completed(saved, tx, params, patterns, moments, are_shapes=True)
        if tx is None:
            job_leaves.check_params(completed, params)
        else:
            convert_lib.check(completed, tx, params)
        for name, like in wanted.items():
            _check_extra(name, like, parts, patterns)
        values = orbax.read(reader, folder, found, values, params, wanted, checksums, change)
    parts = parts_of(values)
    saved, rounded = _saved_of(parts, params, order, like_state, change)
    if rounded:
        warn(
            "moments-rounded-again",
            f"moments in 8 bits keep their numbers if the padding of this layout keeps their groups of neighbours; "
            f"{len(rounded)} of them {'is' if len(rounded) == 1 else 'are'} rounded to the codes of larger groups "
            f"({', '.join(rounded[:3])}{', ...' if len(rounded) > 3 else ''}). A layout that pads another axis avoids "
            f"it.",
        )
    saved, report = _completed(saved, tx, params, patterns, moments)
    opt_state = None
    if tx is None:
        params = placement.Shardings(params).place_params(convert_lib.assemble_params(saved, params)[1])
    else:
        params, opt_state = convert_lib.assemble(saved, tx, params)
    others = {name: _fill(like, _by_names(parts, name)) for name, like in wanted.items()}
    fresh = [path for name, like in wanted.items() for path in _missing(name, like, parts)]
    left = [path for name, like in wanted.items() for path in _left_over(name, like, parts)]
    restored = Restored(step, params, opt_state, others)
    restored.report = report._replace(fresh=(*report.fresh, *fresh), left_over=(*report.left_over, *left))
    return restored


def check_extra(extra: Any) -> None:
    """Raises a TypeError for trees without names, a ValueError for leaves that are neither arrays nor numbers."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(
            f"extra= takes trees by name, such as {{'batch_stats': ..., 'epoch': 3}}; got {type(extra).__name__}. Give "
            f"each tree a name."
        )
    for path, x in jax.tree_util.tree_leaves_with_path(dict(extra or {})):
        leaf_sums.check_leaf(tree_paths.path_str(path), x)


def _completed(
    saved: job_leaves.Saved, tx: Any, like: PyTree, patterns: Sequence[str], moments: str, *, are_shapes: bool = False
) -> tuple[job_leaves.Saved, partial_lib.Report]:
    """`saved` with the leaves that may be missing, and without those that may be left over."""
    if not patterns and moments == partial_lib.SAME:
        return saved, partial_lib.Report()
    saved, fresh, left = partial_lib.complete_params(saved, like, patterns)
    if tx is None:
        return saved, partial_lib.Report(tuple(fresh), tuple(left))
    leaves = convert_lib.leaves_of(tx, like)

    def fresh_state(paths: set[StatePath]) -> Mapping[StatePath, Any]:
        if are_shapes:
            return {path: x for path, x in leaves.items() if path in paths}
        return convert_lib.fresh_leaves(tx, convert_lib.assemble_params(saved, like)[0], paths)

    saved, of_state = partial_lib.complete_state(saved, leaves, patterns, moments, fresh, fresh_state)
    return saved, of_state._replace(fresh=(*fresh, *of_state.fresh), left_over=(*left, *of_state.left_over))


def _saved_of(
    parts: Mapping[str, Mapping[StatePath, Any]],
    like: PyTree,
    order: Sequence[str] | None,
    like_state: Mapping[StatePath, Any],
    change: padding.Change,
) -> tuple[job_leaves.Saved, list[str]]:
    """The saved leaves in the form of this job, and the moments that were rounded for it.

    The fp8 scales are in the order of their histories: as recorded, else as in `like`.
    """
    leaves = {str(path): x for path, x in parts["params"].items()}
    scales = [
        path for path in (order or tree_paths.leaves_by_path(like)) if path in leaves and scale_leaves.is_scale(path)
    ]
    leaves = {path: leaves[path] for path in scales} | leaves
    saved = job_leaves.Saved(leaves, dict(parts.get("opt_state", {})), job_leaves.CHECKPOINT)
    if not like_state:
        return saved, []
    saved = unsent.fitted(chain_places.aligned(saved, like_state), like_state, placement.Shardings(like))
    return (saved, []) if change.is_empty else regroup.fitted(saved, like_state, change)


def descriptions(source: Any, step: int | None) -> dict[str, PyTree]:
    """The trees of a checkpoint as `restore(extra=)` takes them: shapes, and numbers of Python."""

    def like(x: Any) -> Any:
        return orbax.zero_of(x) if orbax.is_number(x) else jax.ShapeDtypeStruct(x.shape, x.dtype)

    _, folder = orbax.find(source, step)
    about, folder = orbax.record(folder / orbax.ABOUT), orbax.tree_in(folder)
    found = orbax.described(folder, about)
    orbax.check_is_job(found, folder)
    values = orbax.with_keys(found.leaves, jax.tree.leaves(found.tree), about)
    return names.trees(found.tree, found.leaves, list(map(like, values)), about)


_Names = tuple[str, ...]


def _by_names(parts: Mapping[str, Mapping[StatePath, Any]], name: str) -> dict[_Names, Any]:
    return {path.names: x for path, x in parts.get(name, {}).items()}


def _missing(name: str, like: PyTree, parts: Mapping[str, Mapping[StatePath, Any]]) -> list[str]:
    """The leaves of a tree of `extra` that the checkpoint has not, by path."""
    there = _by_names(parts, name)
    return [_at(name, path) for path in names.by_names(like) if path not in there]


def _left_over(name: str, like: PyTree, parts: Mapping[str, Mapping[StatePath, Any]]) -> list[str]:
    """The leaves of a tree of `extra` that only the checkpoint has, by path."""
    here = names.by_names(like)
    return [_at(name, path) for path in _by_names(parts, name) if path not in here]


def _at(name: str, path: _Names) -> str:
    return "/".join((name, *path))


def _check_extra(
    name: str, like: PyTree, parts: Mapping[str, Mapping[StatePath, Any]], patterns: Sequence[str]
) -> None:
    if name not in parts and not all(tree_paths.matches(at, patterns) for at in _missing(name, like, parts)):
        raise ValueError(f"the checkpoint must have every tree of extra=; {name!r} is not among {', '.join(parts)}.")
    there = _by_names(parts, name)
    for path, x in names.by_names(like).items():
        at = _at(name, path)
        if path not in there and tree_paths.matches(at, patterns):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"a leaf that starts fresh needs a value; {at} is not in the checkpoint, and extra= has only its "
                    f"shape. Pass an array or a number for it."
                )
            continue
        if path not in there:
            raise ValueError(
                f"the checkpoint must have every leaf of extra=; {at} is missing. "
                f"{leaf_paths.first_paths({_at(name, other): x for other, x in there.items()})}"
            )
        shape, dtype = tuple(there[path].shape), there[path].dtype
        if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
            if shape or np.result_type(type(x)).kind != dtype.kind:
                raise ValueError(
                    f"the trees of extra= must have the saved numbers; {at} is {dtype}{list(shape)}, expected a number "
                    f"of Python ({type(x).__name__})."
                )
            continue
        if _may_hold_number(x, there[path]):
            continue
        if orbax.is_key(x) and not orbax.is_key(there[path]):  # Orbax alone describes keys by their bits
            x = jax.eval_shape(jax.random.key_data, x)
        if shape != tuple(x.shape) or dtype != x.dtype:
            raise ValueError(
                f"the trees of extra= must have the saved shapes and dtypes; {at} is {dtype}{list(shape)}, expected "
                f"{x.dtype}{list(x.shape)}."
            )
    for at in _left_over(name, like, parts):
        if not tree_paths.matches(at, patterns):
            raise ValueError(
                f"the trees of extra= must have every leaf that was saved; {at} is in the checkpoint and not in the "
                f"job, where it would be lost. Give the job what it had at the save, or name the leaf in partial=."
            )


def _may_hold_number(like: Any, saved: Any) -> bool:
    """Whether an array without axes is wanted for a saved number of Python: the count of steps of a TrainState."""
    kinds = (jnp.integer, jnp.floating, jnp.bool_) if orbax.is_number(saved) and not like.shape else ()
    return any(jnp.issubdtype(like.dtype, kind) and jnp.issubdtype(saved.dtype, kind) for kind in kinds)


def _fill(like: PyTree, leaves: Mapping[_Names, Any]) -> PyTree:
    """The tree `like` with the saved leaves; numbers are as they are in `like`, keys are made from their saved bits."""

    def take(path: _Names, x: Any) -> Any:
        found = leaves.get(path)
        if found is None:  # it may be missing
            return x
        if isinstance(x, np.ndarray | np.generic):
            return np.asarray(found, x.dtype)[()] if isinstance(x, np.generic) else np.asarray(found, x.dtype)
        if not hasattr(x, "dtype"):
            return np.asarray(found).item()
        if not isinstance(found, jax.Array):
            return found if isinstance(found, np.ndarray) else jnp.asarray(found, x.dtype)
        return orbax.as_key(found, x) if orbax.is_key(x) else found

    found, treedef = jax.tree.flatten(like)
    return treedef.unflatten([take(path.names, x) for path, x in zip(names.of_tree(like), found, strict=True)])
