"""Saves params, optimizer state and other trees as a step of Orbax, and restores them into this model and optimizer.

All state is plain arrays in NamedTuples, so Orbax alone saves it. A step has the item `state`, the tree {"params",
"opt_state", **extra} as dicts of arrays, and the item `jaxmp`, a JSON record. This file adds the target of a restore, a
comparison by name before an array is read, and a digest of each leaf.
"""

import functools
import json
import operator
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata as _metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._src.base import optional, tasks, tree_paths
from jaxmp._src.devices import digests, shardings
from jaxmp._src.distributed import param_layout
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting
from jaxmp._src.step import argument_kinds, state as states, state_arrays

_Names = tuple[str, ...]
_SAVED = "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
_SAVED += "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz complex64 complex128".split()
_VERSIONS = ("jaxmp", "jax", "flax", "optax", "orbax-checkpoint")


class Restored(NamedTuple):
    """What `restore` returns."""

    step: int
    params: PyTree
    opt_state: Any
    extra: dict[str, Any]
    fresh: tuple[str, ...]


def manager(directory: Any, **options: Any) -> Any:
    """An `orbax.checkpoint.CheckpointManager` for the steps of a directory.

    Saves run in the background, so close it at the end (`with`, `close()`): what is not yet written then is lost.

    Args:
      directory: a local path, created if missing, or a URL that Orbax reaches (`gs://bucket/run`).
      **options: of `orbax.checkpoint.CheckpointManagerOptions`: `max_to_keep=` (3 here), `save_interval_steps=`,
        `read_only=`, `enable_async_checkpointing=`.

    Example:
      >>> import tempfile
      >>> with manager(tempfile.mkdtemp()) as steps:
      ...     print(steps.latest_step())
      None
    """
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")
    path = optional.load("etils.epath", extra="checkpoint").Path(directory)
    reads = {"max_to_keep": None, "save_interval_steps": 0, "create": False}  # Orbax warns of each that it sets itself
    options = (reads if options.get("read_only") else {"max_to_keep": 3}) | options

    class Manager(ocp.CheckpointManager):
        """Orbax's manager. `why_not` says why nothing can be saved: Orbax itself would drop the step in silence."""

        def __init__(self, *args: Any, options: Any, **kwargs: Any) -> None:
            super().__init__(*args, options=options, **kwargs)
            self.reads_only = options.read_only
            self.why_not = "it is read_only" if options.read_only else ""

        def close(self) -> None:
            self.why_not = "it is closed"
            super().close()

    return Manager(
        path if "://" in str(path) else path.absolute(),
        options=ocp.CheckpointManagerOptions(**options),
        item_handlers={"state": ocp.PyTreeCheckpointHandler(), "jaxmp": ocp.JsonCheckpointHandler()},
    )


def save(
    manager: Any,
    step: int,
    *,
    params: PyTree,
    opt_state: Any,
    extra: Mapping[str, PyTree] | None = None,
    metadata: Mapping[str, Any] | None = None,
    layout: param_layout.Layout | None = None,
) -> bool:
    """Saves a step: copies the arrays, then writes in the background, so the next step may donate them.

    Args:
      manager: from `manager`.
      step: its number, larger than those of all saved steps.
      params, opt_state: of the job; arrays of any sharding. Remove the replicas of pmap before.
      extra: other trees of arrays and numbers by name: `{"batch_stats": ..., "key": ..., "epoch": 3}`.
      metadata: for the record: text, numbers, bools, None, and lists and dicts of these.
      layout: the layout that `jaxmp.fsdp.pad` padded params and state with: they are saved without padding.

    Returns:
      True if the step is saved; False if the manager's interval skips it.

    Raises:
      ValueError: before anything is written: a step that is not newer than all others; a manager that is closed or
        only reads; two leaves of one name; a leaf that was donated, or is no number; metadata that JSON changes.

    Example:
      >>> import tempfile
      >>> with manager(tempfile.mkdtemp()) as steps:
      ...     save(steps, 7, params={"w": jnp.ones(2)}, opt_state=(), metadata={"policy": "bf16"})
      True
    """
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")
    arguments = {"params": ("params", params), "opt_state": ("state", opt_state)}
    argument_kinds.check("save(manager, step, params=, opt_state=)", **arguments)
    step, extra, newest = operator.index(step), _checked_extra(extra), manager.latest_step()
    if why_not := getattr(manager, "why_not", ""):
        raise ValueError(f"a step needs a manager that writes; got one of {manager.directory}, and {why_not}.")
    if step < 0 or (newest is not None and step <= newest):  # Orbax would lose it in silence
        there = f"the newest in {manager.directory} is {newest}; delete the later ones first (manager.delete)"
        raise ValueError(f"steps must be saved in rising order, from 0 on; got {step}, and {there}.")
    about = json.loads(json.dumps(dict(metadata or {}), default=repr))
    if about != (metadata or {}):
        raise ValueError(f"metadata= must be what JSON gives back, {about!r:.80}; got {metadata!r:.80}.")
    if not manager.should_save(step):
        return False
    if layout is not None:
        params, opt_state = param_layout.trim((params, opt_state), layout)
    leaves = tree_paths.leaves_by_names({"params": params, "opt_state": opt_state, **extra})
    filed: dict[str, _Names] = {}
    for names, x in leaves.items():
        path = "/".join(names)
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"{path} was deleted, by a step that it was donated to: save what the step returned.")
        is_array = isinstance(x, jax.Array | np.ndarray | np.generic) or type(x) in (bool, int, float, complex)
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        is_saved = jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype.name in _SAVED and dtype.isnative)
        if not is_array or not is_saved:
            raise ValueError(f"leaves must be of dtypes that Orbax saves; got {x!r:.80} at {path}. Text: metadata=.")
        if 0 in np.shape(x):
            raise ValueError(f"Orbax saves no array without elements; got shape {np.shape(x)} at {path}. Leave it out.")
        if (other := filed.setdefault(".".join(names), names)) != names:  # as Orbax names its files
            two = f"{'.'.join(names)}: {'/'.join(other)} and {'/'.join(names)}"
            raise ValueError(f"leaves must differ by name, its levels joined by dots; got two {two}. Rename one.")
    arrays = {names: x if isinstance(x, jax.Array) else np.asarray(x) for names, x in leaves.items()}
    keys = {names: x for names, x in arrays.items() if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}
    arrays |= {names: jax.random.key_data(x) for names, x in keys.items()}
    record = {
        "versions": {name: _metadata.version(name) for name in _VERSIONS},
        "metadata": about,
        "digests": digests.of_leaves({".".join(names): x for names, x in arrays.items()}),
        "keys": {".".join(names): str(jax.random.key_impl(x)) for names, x in keys.items()},
        "fp8_scales": scale_leaves.paths_of(params),
        "loss_scales": _loss_scales_of(opt_state),
    }
    record["crc"] = _crc(record)
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(tree_paths.nested(arrays)), jaxmp=ocp.args.JsonSave(record))
    return manager.save(step, args=items)


def read_metadata(manager: Any, step: int | None = None) -> dict[str, Any]:
    """The `versions` and the `metadata` that were saved with a step (None: the newest).

    Example:
      >>> import tempfile
      >>> with manager(tempfile.mkdtemp()) as steps:
      ...     saved = save(steps, 7, params={"w": jnp.ones(2)}, opt_state=(), metadata={"policy": "bf16"})
      ...     read_metadata(steps)["metadata"]
      {'policy': 'bf16'}
    """
    record = _record(manager, _step_of(manager, step))
    return {name: record[name] for name in ("versions", "metadata")}


def restore(
    manager: Any,
    tx: optax.GradientTransformation | None,
    *,
    params: PyTree,
    extra: Mapping[str, PyTree] | None = None,
    step: int | None = None,
    fresh: str | Sequence[str] = (),
    layout: param_layout.Layout | None = None,
) -> Restored:
    """Restores a step into this model and this optimizer, bit for bit, on the devices of `params`.

    For another precision or other masters restore with the optimizer that saved, then call `convert`.

    Args:
      manager: from `manager`.
      tx: the optimizer that saved, apart from `fresh`; None: only the params and `extra`.
      params: arrays or `jax.ShapeDtypeStruct`s, with the dtypes and shardings that you want. Masters and moments lie as
        their params do (`jaxmp.sharding_of`). Without shardings, arrays are on the default device, and free to move.
      extra: the other trees that you want, by name, like the saved ones.
      step: None: the newest.
      fresh: path patterns (`"*lora*"`, `"head/*"`) of leaves that may be missing, left over, or of another shape. They
        are as in `params` and `extra`, where they must have values, and as `tx.init` makes them.
      layout: the layout that pads `params` (`jaxmp.fsdp.layout_of`), if the step was saved with one.

    Returns:
      A `Restored`: `step`, `params`, `opt_state` (or None), `extra`, and `fresh`, the paths that started fresh.

    Raises:
      ValueError: no such step; a leaf that is missing, left over, or of another shape or dtype, by path, before an
        array is read; a damaged file; a leaf that is not what was saved, by its digest.

    Example:
      >>> import jaxmp, tempfile
      >>> tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "fp32"), {"w": jnp.ones(2)}
      >>> with manager(tempfile.mkdtemp()) as steps:
      ...     saved = save(steps, 7, params=params, opt_state=tx.init(params), extra={"epoch": 3})
      ...     restored = restore(steps, tx, params=params, extra={"epoch": 0})
      >>> restored.step, restored.params["w"].tolist(), restored.extra
      (7, [1.0, 1.0], {'epoch': 3})
    """
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")
    optimizer = {} if tx is None else {"tx": ("optimizer", tx)}
    argument_kinds.check("restore(manager, tx, params=)", **optimizer, params=("params", params))
    extra, patterns, step = _checked_extra(extra), tree_paths.patterns_of(fresh), _step_of(manager, step)
    described = params
    if layout is not None:  # arrays, or descriptions, on their devices, without padding
        is_described = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
        put = lambda x, place: _on(x, place) if is_described(x) else jax.device_put(x, place)  # noqa: E731
        described = param_layout.trim(jax.tree.map(put, params, layout.shardings), layout)

    # What is there, and what is wanted: both by name, before an array is read.
    record = _record(manager, step)
    raw = tree_paths.leaves_by_names(_read(manager, step, lambda: manager.item_metadata(step)["state"].tree))
    if record["digests"].keys() != {".".join(names) for names in raw}:
        raise _unreadable(manager, step, "its description has other leaves than were saved")
    keys = {names: record["keys"].get(".".join(names)) for names in raw}
    like: dict[str, Any] = {"params": described, **extra}
    asked = {*like} if tx is None else {*like, "opt_state"}
    saved = {names: _on(x, None) for names, x in raw.items() if names[0] in asked}
    of_keys = {names: functools.partial(jax.random.wrap_key_data, impl=keys[names]) for names in saved if keys[names]}
    saved |= {names: jax.eval_shape(wrap, saved[names]) for names, wrap in of_keys.items()}
    wide = jax.tree.map(
        lambda x: _on(x, None, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else None), described
    )
    same_layers, missing = record["fp8_scales"] == scale_leaves.paths_of(described), []
    for start in (wide, described) if tx is not None else (described,):  # plain optax begins with either
        like |= {} if tx is None else {"opt_state": _state_like(tx, start, described)}
        wanted = tree_paths.leaves_by_names(like)
        refused, missing = _compared(saved, wanted, same_layers, patterns)
        if refused is None:
            break
    if tx is not None and not refused and record["loss_scales"] != (kinds := _loss_scales_of(like["opt_state"])):
        refused = f"opt_state has a loss scale of {record['loss_scales']} in the checkpoint and {kinds} in the job"
    if refused:
        if not refused.endswith(_FREEZE):
            refused += ". Restore with the optimizer that saved, then call jaxmp.checkpoint.convert"
        raise ValueError(f"a checkpoint must be of this model and this optimizer; {refused}.")
    owner: dict[_Names, _Names] = {}  # the param that a leaf of the optimizer's state belongs to
    if tx is not None and missing:
        by_path = {path: names for names, path in _paths("params", described).items()}
        places = {n: shardings.owner_of(path, by_path) for n, path in _paths("opt_state", like["opt_state"]).items()}
        owner = {n: by_path[path] for n, path in places.items() if path is not None}
        # A param that starts fresh has no state of before, also where a shape is the same by chance.
        missing += [n for n, param in owner.items() if param in missing and n not in missing]

    # The arrays, with the shardings that are wanted; what has none passes through NumPy, and stays free to move.
    taken = {names: _how(ocp, wanted[names], raw[names]) for names in saved if names in wanted and names not in missing}
    skipped = (ocp.PLACEHOLDER, ocp.RestoreArgs())
    item, how = (tree_paths.nested({names: taken.get(names, skipped)[i] for names in raw}) for i in range(2))
    items = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=item, restore_args=how))
    stored = tree_paths.leaves_by_names(_read(manager, step, lambda: manager.restore(step, args=items)["state"]))
    free = [n for n in taken if isinstance(stored[n], np.ndarray) and not _is_wide(stored[n])]
    arrays = {names: stored[names] for names in taken} | {names: jnp.array(stored[names]) for names in free}
    sums = digests.of_leaves({".".join(names): x for names, x in arrays.items()})
    if wrong := [name for name, x in sums.items() if x != record["digests"][name]]:
        raise _unreadable(manager, step, f"{len(wrong)} leaves are not what was saved: {', '.join(wrong[:3])}")
    arrays |= {names: wrap(arrays[names]) for names, wrap in of_keys.items() if names in arrays}
    values = {names: _as_wanted("/".join(names), wanted[names], x) for names, x in arrays.items()}

    if tx is not None and any(names[0] == "opt_state" for names in missing):
        begun = jax.tree.map(
            lambda x, s: x.astype(s.dtype), tree_paths.filled({"params": described}, values)["params"], start
        )
        with warnings.catch_warnings(action="ignore"):
            state = tree_paths.leaves_by_names({"opt_state": jax.jit(tx.init)(begun)})
        param = tree_paths.leaves_by_names({"params": begun})
        state |= _fresh_averages({n: param[owner[n]] for n in owner.keys() & missing}, state | values)
        values |= {n: jax.device_put(state[n], wanted[n].sharding) for n in missing if n in state}
    trees = tree_paths.filled(like, values)
    leaves, treedef = jax.tree.flatten((trees.pop("params"), trees.pop("opt_state", None)))
    own = iter(state_arrays.own_buffers([x for x in leaves if isinstance(x, jax.Array)], foreign=params))
    new_params, opt_state = treedef.unflatten([next(own) if isinstance(x, jax.Array) else x for x in leaves])
    if layout is not None:
        new_params = jax.device_put(param_layout.pad(new_params, layout), layout.shardings)
        if tx is not None:
            places = shardings.sharding_of(tx, new_params, layout.shardings)
            opt_state = jax.device_put(param_layout.pad(opt_state, layout), places)
    return Restored(step, new_params, opt_state, trees, tuple(map("/".join, missing)))


def _paths(name: str, tree: PyTree) -> dict[_Names, str]:
    leaves = zip(tree_paths.leaves_by_names({name: tree}), jax.tree_util.tree_leaves_with_path(tree), strict=True)
    return {names: jax.tree_util.keystr(path) for names, (path, _) in leaves}


def _fresh_averages(params: dict[_Names, Any], leaves: dict[_Names, Any]) -> dict[_Names, Any]:
    """The averages (`ema_params`) among fresh leaves, from the params that these belong to.

    All leaves share the weight of an average, and it goes on: a fresh average is a param of this weight.
    """
    averages = {}
    for names, x in params.items():
        if "ema_params" in names and casting.is_float(x):
            weight: Any = np.asarray(leaves[(*names[: names.index("ema_params")], "ema_weight")])
            averages[names] = x.astype(jnp.float32) * states.beside(weight, x)
    return averages


def _loss_scales_of(opt_state: Any) -> list[str]:
    kinds: Any = (states.LossScaleState, states.CustomLossScaleState)
    return [type(x).__name__.removesuffix("State") for x in states.find(opt_state, kinds)]


def _checked_extra(extra: Any) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None) or {"params", "opt_state"} & set(extra or ()):
        raise ValueError(f"extra= takes trees by names other than params and opt_state; got {extra!r:.80}.")
    return dict(extra or {})


def _is_wide(x: Any) -> bool:
    return jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype  # jax would shorten it, without `jax_enable_x64`


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**record, "crc": 0}, sort_keys=True).encode())


def _step_of(manager: Any, step: int | None) -> int:
    manager.wait_until_finished()
    if getattr(manager, "reads_only", False):
        manager.reload()  # another process may have saved since
    number = manager.latest_step() if step is None else operator.index(step)
    if number is None or number not in manager.all_steps():
        what = "" if step is None else f" {step}"
        raise ValueError(f"{manager.directory} has no complete step{what}; it has {manager.all_steps() or 'none'}.")
    return number


def _record(manager: Any, step: int) -> dict[str, Any]:
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")
    items = ocp.args.Composite(jaxmp=ocp.args.JsonRestore())
    record = _read(manager, step, lambda: manager.restore(step, args=items)["jaxmp"])
    if not isinstance(record, dict) or record.get("crc") != _crc(record):
        raise _unreadable(manager, step, "its record is not what jaxmp.checkpoint.save wrote")
    return record


def _read(manager: Any, step: int, read: Callable[[], Any]) -> Any:
    results, why = tasks.first_error(read)
    if why is not None:
        raise _unreadable(manager, step, why)
    return results


def _unreadable(manager: Any, step: int, why: str) -> ValueError:
    got = f"step {step} in {manager.directory} cannot be read: {why}"
    others = [n for n in manager.all_steps() if n != step]
    return ValueError(f"steps must be whole, and saved by jaxmp.checkpoint.save; {got}. Other steps there: {others}.")


def _on(x: Any, sharding: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype, sharding=sharding)


def _state_like(tx: optax.GradientTransformation, start: PyTree, params: PyTree) -> Any:
    """`tx.init(start)` as descriptions with the shardings of their params."""
    chosen = [shardings.chosen(x) for x in jax.tree.leaves(params)]
    mesh = next((s.mesh for s in chosen if isinstance(s, NamedSharding)), None)
    start = jax.tree.map(lambda x: _on(x, None), start)
    with warnings.catch_warnings(action="ignore"):
        state = jax.eval_shape(tx.init, start)
        if mesh is None:  # on one device, or free
            return jax.tree.map(lambda x: _on(x, chosen[0] if len({*chosen}) == 1 else None), state)
        everywhere = NamedSharding(mesh, PartitionSpec())
        by_param = [s if isinstance(s, NamedSharding) else everywhere for s in chosen]
        places = shardings.sharding_of(tx, start, jax.tree.structure(params).unflatten(by_param))
        return jax.tree.structure(state).unflatten(map(_on, *map(jax.tree.leaves, (state, places))))  # boxes may differ


_FREEZE = "freeze that kernel (jaxmp.fp8.freeze) in both, or after restore"


def _compared(saved: Any, wanted: Any, same_layers: bool, patterns: Sequence[str]) -> tuple[str | None, list[_Names]]:
    """(what is wrong with the first leaf that must fit, or None; the leaves of the job that start fresh)."""
    missing: list[_Names] = []
    frozen = {names[:-1] for names in {**saved, **wanted} if names[-1] == "guard"}
    for names in sorted({**saved, **wanted}, key=lambda names: (names[0] != "params", names[0] == "opt_state")):
        path, here = "/".join(names), wanted.get(names)
        why, is_dtype = _misfit(saved.get(names), here)
        if why is None and not same_layers and names[0] == "opt_state" and "amax_states" in names:
            why = "has the amaxes of other fp8 layers in the checkpoint than in the job"
        if why is None:
            continue
        if is_dtype:
            return f"{path} {why}", []
        of_array = "/".join(names[:-1] if names[-1] in tree_paths.PARTS else names)  # as a pattern names it
        if not (tree_paths.matches(path, patterns) or tree_paths.matches(of_array, patterns)):
            if {names, names[:-1]} & frozen:
                return f"{path} {why}; {_FREEZE}", []
            return f"{path} {why}; name it in fresh= if it may differ", []
        if isinstance(here, jax.ShapeDtypeStruct) and names[0] != "opt_state":
            return f"{path} starts fresh, so it needs a value, and is only described", []
        missing += [names] if here is not None else []
    return None, missing


def _misfit(saved: Any, like: Any) -> tuple[str | None, bool]:
    """(why a saved leaf cannot be restored as `like`, or None; whether it is its dtype, which fresh= never allows)."""
    if saved is None or like is None:
        return (
            f"is in the {'job and not in the checkpoint' if saved is None else 'checkpoint and not in the job'}",
            False,
        )
    dtype = like.dtype if hasattr(like, "dtype") else np.result_type(type(like))
    keys = [jnp.issubdtype(x, jax.dtypes.prng_key) for x in (saved.dtype, dtype)]
    if saved.shape != np.shape(like) and keys[0] == keys[1]:
        hint = "pass layout= of jaxmp.fsdp to save and restore; take pmap's replicas off before a save"
        return f"has shape {saved.shape} in the checkpoint and {np.shape(like)} in the job ({hint})", False
    # A number of Python is saved with 64 bits, and may come back as an array, or go the other way.
    is_number = saved.shape == () and (not hasattr(like, "dtype") or saved.dtype in (np.int64, np.float64))
    if saved.dtype == dtype or (is_number and getattr(saved.dtype, "kind", "") == getattr(dtype, "kind", None)):
        return None, False
    return f"is of dtype {saved.dtype} in the checkpoint and {dtype} in the job", True


def _how(ocp: Any, like: Any, raw: Any) -> tuple[Any, Any]:
    """How Orbax reads a leaf: into an array of jax where there is a sharding for it, else of NumPy."""
    sharding = shardings.chosen(like)
    if sharding is None or _is_wide(raw):
        return np.empty(raw.shape, raw.dtype), ocp.RestoreArgs(restore_type=np.ndarray)
    target = jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)
    return target, ocp.ArrayRestoreArgs(sharding=sharding, global_shape=raw.shape, dtype=raw.dtype)


def _as_wanted(path: str, like: Any, x: Any) -> Any:
    """A leaf in the form of `like`: a number of Python, an array of NumPy or jax."""
    if not hasattr(like, "dtype"):
        return np.asarray(x).item()
    if x.dtype != like.dtype and np.asarray(x).astype(like.dtype) != np.asarray(x):
        raise ValueError(f"numbers must fit the job; {path} is {x} in the checkpoint, and {like.dtype} in the job.")
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(x, like.dtype)[() if isinstance(like, np.generic) else ...]
    return x if x.dtype == like.dtype else jax.device_put(jnp.asarray(x, like.dtype), shardings.chosen(like))
