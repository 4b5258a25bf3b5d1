"""Finds, describes and reads what Orbax wrote, without the structure of the saved tree.

Orbax describes a saved tree as nested dicts and lists with a shape and a dtype for each array, and it can also read the
tree in this form. So a checkpoint can be compared with a job before any array is read.
"""

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from jaxmp._src.base import optional
from jaxmp._src.checkpoint import leaf_sums, names, padding, placement, places, writer
from jaxmp._src.checkpoint.names import Leaf
from jaxmp._src.step.state_paths import StatePath

STATE, ABOUT = "state", "jaxmp"  # items of a step
CHECKSUMS = "checksums"  # in the record: {key: checksum} of the leaves
EMPTY = "empty"  # in the record: {key: shape} of the arrays without elements, of keys of jax.random that of their bits
KEYS = "keys"  # in the record: {key: name of the generator} of the keys of jax.random
_DIGEST = "record_checksum"


def package() -> Any:
    """`orbax.checkpoint`; an ImportError that names the extra if it is not installed."""
    return optional.load("orbax.checkpoint", extra="checkpoint")


def check_manager(manager: Any, step: Any) -> None:
    """Raises a TypeError unless these are a manager and the number of a step."""
    if not is_manager(manager) or not isinstance(step, int | np.integer) or isinstance(step, bool):
        got = [f"{type(x).__name__} as {name}" for name, x in (("manager", manager), ("step", step))]
        raise TypeError(
            f"the arguments are save(manager, step, params=, opt_state=), with the number of the step; got "
            f"{', '.join(got)}. jaxmp.checkpoint.manager(directory) makes a manager; keep it for the whole run."
        )


def number_of(step: Any) -> Any:
    """A step as an int, where it is a scalar of jax or NumPy, such as `state.step`; else as it is."""
    is_scalar = isinstance(step, jax.Array | np.ndarray) and not isinstance(step, Tracer) and step.ndim == 0
    return int(step) if is_scalar and jnp.issubdtype(step.dtype, jnp.integer) else step


def is_manager(x: Any) -> bool:
    """Whether `x` is an Orbax `CheckpointManager`."""
    return hasattr(x, "latest_step") and hasattr(x, "save")


def find(source: Any, step: int | None) -> tuple[int | None, pathlib.Path]:
    """(step, its folder) in a manager, in a directory of steps, or at the path of a step or tree.

    `step=None` is the newest complete step, or the path itself. A save that is running ends first.
    """
    if not is_manager(source):
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"the first argument must be a manager of checkpoints, or a path; got {type(source).__name__}. The "
                f"order is restore(manager, tx, params=)."
            )
        folder = places.folder(source)
        if step is None and not (folder / "_METADATA").exists() and tree_in(folder) == folder:
            # Orbax renames a step when it is complete: before, its name is no number.
            step = max((int(x.name) for x in places.steps_in(folder)), default=None)
            if step is None and folder.is_dir() and all(map(_is_no_step, folder.iterdir())):
                raise ValueError(
                    f"there is no complete checkpoint in {folder}: nothing was saved there, or no save has ended. Pass "
                    f"the directory that the manager of the run was made with."
                )
        if step is not None:
            folder = folder / str(step)
        if not folder.is_dir():
            raise ValueError(f"a checkpoint must be a folder that Orbax wrote; there is no folder at {folder}.")
        return step, folder
    source.wait_until_finished()
    found = source.latest_step() if step is None else step
    there = ", ".join(map(str, source.all_steps())) or "none"
    if found is None or found not in source.all_steps():
        raise ValueError(
            f"there is no complete checkpoint{'' if step is None else f' of step {step}'} in {source.directory}; "
            f"complete steps: {there}."
        )
    folder = places.folder(source.directory) / str(found)
    if not folder.is_dir():
        raise ValueError(
            f"the folder of a step must be called by its number; there is no {folder}. With a step format of your own, "
            f"pass the path of the step instead of the manager."
        )
    return found, folder


def _is_no_step(path: pathlib.Path) -> bool:
    """Whether this lies beside steps: a lock, or a step that is being written, or was when its process was killed."""
    return path.name.startswith(".") or path.name.endswith(writer.UNFINISHED)


def check_newer(manager: Any, step: int) -> None:
    """Raises a ValueError unless `step` is newer than all steps that are saved or being saved."""
    # Orbax silently skips an older step, and `restore` still takes the newest one: after a rollback to an earlier step,
    # the steps trained since then would be lost. With `force=True` Orbax writes it, and from then on it is the newest.
    newest = manager.latest_step()
    if newest is None or step > newest:
        return
    later = sorted(n for n in manager.all_steps() if n >= step)
    calls = ", ".join(f"manager.delete({n})" for n in later[:4]) + (", ..." if len(later) > 4 else "")
    raise ValueError(
        f"steps must be saved in rising order; got {step}, and the newest step in {manager.directory} is {newest}. To "
        f"continue from an earlier step, delete the later ones first ({calls}), or save into a new directory."
    )


def tree_in(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the tree inside the folder of a step: our item, Orbax's single item, or the folder itself."""
    return next((folder / item for item in (STATE, "default") if (folder / item).exists()), folder)


def without_empty(leaves: Sequence[Leaf], values: Sequence[Any]) -> tuple[list[Any], dict[str, list[int]]]:
    """(`values` with one element in place of each array that has none, which Orbax cannot save; {key: its shape})."""
    shapes: dict[str, list[int]] = {}

    def stored(leaf: Leaf, x: Any) -> Any:
        if not _is_empty(x):
            return x
        x = jax.random.key_data(x) if is_key(x) else x
        shapes[leaf.key] = list(x.shape)
        return np.zeros((1,) * x.ndim, x.dtype)

    return [stored(leaf, x) for leaf, x in zip(leaves, values, strict=True)], shapes


def keys_of(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, str]:
    """{key: the name of its generator} of the keys of jax.random among leaves."""
    return {leaf.key: str(jax.random.key_impl(x)) for leaf, x in zip(leaves, values, strict=True) if is_key(x)}


def with_keys(leaves: Sequence[Leaf], values: Sequence[Any], about: Mapping[str, Any]) -> list[Any]:
    """Arrays or descriptions with keys in place of their bits; Orbax describes keys by these."""
    generators = about.get(KEYS, {})

    def key(leaf: Leaf, x: Any) -> Any:
        name = generators.get(leaf.key)
        if name is None or is_key(x):
            return x
        wrap = functools.partial(jax.random.wrap_key_data, impl=name)
        return wrap(x) if isinstance(x, jax.Array) else jax.eval_shape(wrap, jax.ShapeDtypeStruct(x.shape, x.dtype))

    return [key(leaf, x) for leaf, x in zip(leaves, values, strict=True)]


def as_key(x: Any, like: Any) -> Any:
    """The key with the bits `x`, of the generator of the key `like`; a key as it is."""
    if is_key(x):
        return x
    names: list[Any] = []

    def look(key: Any) -> None:
        names.append(jax.random.key_impl(key))

    jax.eval_shape(look, like)  # jax reads it from no description
    return jax.random.wrap_key_data(x, impl=names[0])


def is_key(x: Any) -> bool:
    """Whether `x` is, or describes, an array of keys of jax.random."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_number(described: Any) -> bool:
    """Whether Orbax describes a number of Python."""
    return isinstance(described, package().metadata.ScalarMetadata)


def zero_of(described: Any) -> Any:
    """0 as the kind of number that Orbax describes."""
    return jnp.dtype(described.dtype).type(0).item()


def _is_empty(x: Any) -> bool:
    return 0 in getattr(x, "shape", ())


class Described(NamedTuple):
    """A saved tree, of which no array is read.

    Attributes:
      tree: dicts and lists with a description (shape, dtype) in place of each array.
      leaves: what each leaf is, in the order of the leaves of `tree`.
      trees: the names of the trees of a job.
    """

    tree: Any
    leaves: list[Leaf]
    trees: list[str]

    def by_tree(self, values: Sequence[Any]) -> dict[str, dict[StatePath, Any]]:
        """{name of a tree: {path in it: value}} of values in the order of the leaves."""
        found: dict[str, dict[StatePath, Any]] = {name: {} for name in self.trees}
        for leaf, x in zip(self.leaves, values, strict=True):
            found[leaf.tree][leaf.path] = x
        return found


def check_is_job(there: Described, folder: pathlib.Path) -> None:
    """Raises a ValueError unless a saved tree has params."""
    if "params" in there.trees:
        return
    is_dict = isinstance(there.tree, Mapping)
    got = f"a dict with {', '.join(there.trees)}" if is_dict else f"a {type(there.tree).__name__}"
    raise ValueError(
        f'a job must be saved as {{"params": ..., "opt_state": ...}} or as a pair of these; {folder} has {got}. '
        f"Restore it with Orbax, then call jaxmp.checkpoint.convert."
    )


def described(folder: pathlib.Path, about: Mapping[str, Any]) -> Described:
    """What Orbax says of a saved tree; reads no array. `about`: the record."""
    names.check_format(about)
    found = _read_by_orbax(lambda: package().StandardCheckpointHandler().metadata(_epath(folder)), folder)
    tree = getattr(found, "tree", found)
    if tree is None:
        raise _unreadable(folder, "no description of a tree")
    try:
        leaves = names.of_saved(tree, about)
    except ValueError as e:
        raise _unreadable(folder, e) from e
    empty = about.get(EMPTY, {})

    def with_shape(leaf: Leaf, x: Any) -> Any:
        shape = empty.get(leaf.key)
        return x if shape is None else jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    found, treedef = jax.tree.flatten(tree)
    return Described(treedef.unflatten(map(with_shape, leaves, found)), leaves, names.trees_of(tree, about))


def write_record(about: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a step with its own checksum; a ValueError names what JSON cannot hold."""
    _check_json("", about)
    plain: dict[str, Any] = json.loads(json.dumps(about))
    return plain | {_DIGEST: _digest(plain)}


def record(folder: pathlib.Path) -> dict[str, Any]:
    """The saved JSON record; {} if the step was saved without one."""
    if not folder.exists():
        if _lists_record(folder.parent):
            raise _unreadable(folder, "the record is missing")
        return {}
    ocp = package()
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            found = reader.restore(folder)
    except Exception as e:
        raise _unreadable(folder, e) from e
    if not isinstance(found, dict):
        raise _unreadable(folder, f"the record is a {type(found).__name__}, not a dict")
    digest = found.pop(_DIGEST, None)
    if digest != _digest(found) and (digest is not None or CHECKSUMS in found):
        raise _unreadable(folder, "the record is not as it was written")
    return found


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _lists_record(folder: pathlib.Path) -> bool:
    """Whether Orbax's description of a step says that it was saved with a record."""
    try:
        return f'"{ABOUT}"' in (folder / "_CHECKPOINT_METADATA").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _check_json(path: str, x: Any) -> None:
    if isinstance(x, Mapping):
        for name, value in x.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"names in a record must be text, because JSON turns others into text; got {name!r} "
                    f"({type(name).__name__}) at {path or 'the top'}. Write {str(name)!r}."
                )
            _check_json(f"{path}/{name}".lstrip("/"), value)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            _check_json(f"{path}/{i}", value)
    elif not isinstance(x, str | bool | int | float | None) or isinstance(x, np.generic):
        raise ValueError(
            f"a record must have values that JSON can hold: text, numbers, bools, None, lists and dicts of these; got "
            f"{type(x).__name__} at {path}. Put arrays into extra=, or convert the value (float(x), x.tolist())."
        )


def _epath(folder: pathlib.Path) -> Any:
    return optional.load("etils.epath", extra="checkpoint").Path(folder)


def _read_by_orbax(read: Callable[[], Any], folder: pathlib.Path) -> Any:
    """`read()`; where Orbax cannot, one error in place of the pages that it raises and logs."""
    with _without_errors_of_tasks():
        try:
            return read()
        except Exception as e:
            why = _first_line(e)
        gc.collect()
    raise _unreadable(folder, why)


@contextlib.contextmanager
def _without_errors_of_tasks() -> Iterator[None]:
    """Orbax reads each leaf in a task; asyncio logs the error of each that nobody asked for, when the task is freed."""
    log = logging.getLogger("asyncio")
    log.addFilter(_is_of_no_task)
    try:
        yield
    finally:
        log.removeFilter(_is_of_no_task)


def _is_of_no_task(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Task exception was never retrieved")


def _unreadable(folder: pathlib.Path, why: Any) -> ValueError:
    return ValueError(
        f"a checkpoint must be complete and written by Orbax; {folder} cannot be read: it is damaged, incomplete, or "
        f"no checkpoint.{_others(folder)} ({_first_line(why)})"
    )


def _changed(folder: pathlib.Path, paths: Sequence[str]) -> ValueError:
    first = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return ValueError(
        f"a checkpoint must be read as it was saved; the files in {folder} are damaged: the checksum in the record is "
        f"another one for {len(paths)} of the leaves ({first}).{_others(folder)}"
    )


def _first_line(why: Any) -> str:
    return str(why).splitlines()[0][:300] if str(why) else type(why).__name__


def _others(folder: pathlib.Path) -> str:
    """Which other steps there are beside the item of a damaged step, and the newest of them that is whole."""
    if folder.name not in (STATE, ABOUT):
        return ""
    beside = [x for x in places.steps_in(folder.parent.parent) if x != folder.parent]
    if not beside:
        return " There are no other steps."
    named = f" Other steps there: {', '.join(x.name for x in beside)} (step=)"
    if jax.process_count() > 1:  # the others may have read their part, and do not look
        return f"{named}; in a single process this error names the newest whole one."
    whole = next((x for x in reversed(beside) if is_whole(x)), None)
    return f"{named}; " + (f"the newest whole one is {whole.name}." if whole else "none of them is whole.")


def is_whole(folder: pathlib.Path) -> bool:
    """Whether all leaves of a step can be read, and are what was saved as far as the record says."""
    try:
        about = record(folder / ABOUT)
        recorded, padded = about.get(CHECKSUMS), padding.recorded(about)
        state = tree_in(folder)
        there = described(state, about)
        if recorded is None:
            return True
        keys = [leaf.key for leaf in there.leaves]
        if recorded.keys() != {*keys}:
            return False
        return all(_checksum(state, there, i, padded) == recorded[key] for i, key in enumerate(keys))
    except ValueError:
        return False


def _checksum(state: pathlib.Path, there: Described, number: int, padded: padding.Padding) -> str | None:
    """The checksum of the leaf of this number on disk; None if it cannot be read."""
    ocp = package()
    described, treedef = jax.tree.flatten(there.tree)
    only = treedef.unflatten([0 if i == number else ocp.PLACEHOLDER for i in range(len(described))])
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there.tree)
    with _without_errors_of_tasks():
        try:
            with ocp.PyTreeCheckpointer() as reader:
                found = reader.restore(state, args=ocp.args.PyTreeRestore(item=only, restore_args=how))
            x, like = jax.tree.leaves(found)[number], described[number]
            x = np.zeros(like.shape, x.dtype) if _is_empty(like) else x
            path = there.leaves[number].path
            return next(iter(leaf_sums.of_leaves({"x": x}, lambda _, shape: padded.whole(path, shape)).values()))
        except Exception:  # whatever Orbax says of a damaged file
            pass
        gc.collect()
    return None


def read(
    reader: Any,
    folder: pathlib.Path,
    there: Described,
    values: Sequence[Any],
    params: PyTree,
    extra: Mapping[str, PyTree],
    checksums: Mapping[str, str] | None,
    change: padding.Change,
) -> list[Any]:
    """The saved leaves in the shapes and dtypes of `values`, each with the sharding that the job wants.

    Where a shape in `values` is not the saved one, zeros are cut off or appended; `change` says what is padding then.
    Arrays of 64 bits are NumPy arrays (without x64, jax would shorten them), and numbers are Python numbers.
    """
    shardings = placement.Shardings(params)
    others = {name: placement.Shardings(like) for name, like in extra.items()}
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(leaf: Leaf, x: Any) -> Any:
        if is_number(x):
            return zero_of(x)
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            return np.empty(x.shape, x.dtype)
        if leaf.tree in others:
            sharding = others[leaf.tree].of_own(leaf.path.names, x.shape)
        else:
            sharding = shardings.of(leaf.path, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or shardings.replicated or default)

    wanted = list(map(target, there.leaves, values))
    stored = [np.zeros((1,) * x.ndim, x.dtype) if _is_empty(x) else x for x in wanted]
    tree = jax.tree.structure(there.tree).unflatten(stored)
    found = jax.tree.leaves(_read_by_orbax(lambda: reader.restore(folder, tree, strict=False), folder))
    found = [_empty(like) if _is_empty(like) else x for like, x in zip(wanted, found, strict=True)]
    if checksums is not None:
        by_key = {leaf.key: (leaf, x) for leaf, x in zip(there.leaves, found, strict=True)}
        sums = leaf_sums.of_leaves(
            {key: x for key, (_, x) in by_key.items()}, lambda key, shape: change.whole(by_key[key][0].path, shape)
        )
        if changed := leaf_sums.differing(sums, checksums):
            raise _changed(folder, [str(by_key[key][0]) if key in by_key else key for key in changed])
    placed = shardings.replicated is not None or any(other.replicated is not None for other in others.values())
    return found if placed else list(map(_uncommitted, found))


def _empty(like: Any) -> Any:
    """The array without elements that `like` describes; an array of NumPy is one."""
    return like if isinstance(like, np.ndarray) else jnp.zeros(like.shape, like.dtype, device=like.sharding)


def _uncommitted(x: Any) -> Any:
    """`x` as an uncommitted array on the default device."""
    if not isinstance(x, jax.Array):
        return x
    if is_key(x):
        return jax.random.wrap_key_data(jnp.array(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.array(np.asarray(x))
