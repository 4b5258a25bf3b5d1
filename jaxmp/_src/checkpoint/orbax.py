"""Finds, describes and reads what Orbax wrote, without the structure of the saved tree.

Orbax describes a saved tree as nested dicts and lists with a shape and a dtype for each array, and it can also read the
tree in this form. So a checkpoint can be compared with a job before any array is read.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import optional, tree_paths
from jaxmp._src.checkpoint import placement

STATE, ABOUT = "state", "jaxmp"  # items of a step


def package() -> Any:
    """`orbax.checkpoint`; an ImportError that names the extra if it is not installed."""
    return optional.load("orbax.checkpoint", extra="checkpoint")


def find(source: Any, step: int | None) -> tuple[int | None, pathlib.Path]:
    """(step, its folder) in a manager or at a path; `step=None` is the newest one of a manager, or the path itself."""
    if not hasattr(source, "latest_step"):
        folder = pathlib.Path(source).absolute()
        if step is not None:
            folder = folder / str(step)
        if not folder.is_dir():
            raise ValueError(f"a checkpoint must be a folder that Orbax wrote; there is no folder at {folder}.")
        return step, folder
    found = source.latest_step() if step is None else step
    there = ", ".join(map(str, source.all_steps())) or "none"
    if found is None or found not in source.all_steps():
        raise ValueError(
            f"there is no complete checkpoint{'' if step is None else f' of step {step}'} in {source.directory}; "
            f"complete steps: {there}."
        )
    folder = pathlib.Path(source.directory) / str(found)
    if not folder.is_dir():
        raise ValueError(
            f"the folder of a step must be called by its number; there is no {folder}. With a step format of your own, "
            f"pass the path of the step instead of the manager."
        )
    return found, folder


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


def described(folder: pathlib.Path) -> Any:
    """The saved tree with a description (shape, dtype) in place of each array; reads no array."""
    try:
        found = package().StandardCheckpointHandler().metadata(_epath(folder))
        tree = getattr(found, "tree", found)
    except Exception as e:
        raise _unreadable(folder, e) from e
    if tree is None:
        raise _unreadable(folder, "no description of a tree")
    return tree


def record(folder: pathlib.Path) -> dict[str, Any]:
    """The saved JSON record; {} if there is none."""
    if not folder.exists():
        return {}
    ocp = package()
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            found = reader.restore(folder)
    except Exception as e:
        raise _unreadable(folder, e) from e
    if not isinstance(found, dict):
        raise _unreadable(folder, f"the record is a {type(found).__name__}, not a dict")
    return found


def _epath(folder: pathlib.Path) -> Any:
    return optional.load("etils.epath", extra="checkpoint").Path(folder)


def _unreadable(folder: pathlib.Path, why: Any) -> ValueError:
    is_item = folder.name in (STATE, ABOUT)
    steps = [x.name for x in folder.parent.parent.iterdir() if x.name.isdigit()] if is_item else []
    others = [name for name in steps if name != folder.parent.name]
    also = f" Other steps there: {', '.join(sorted(others, key=int))} (step=)." if others else ""
    return ValueError(
        f"a checkpoint must be complete and written by Orbax; {folder} cannot be read: it is damaged, incomplete, or "
        f"no checkpoint.{also} ({str(why).splitlines()[0][:300] if str(why) else type(why).__name__})"
    )


def parts(tree: Any, folder: pathlib.Path) -> dict[str, Any]:
    """A saved tree as a dict with `params` and, if it was saved, `opt_state`."""
    if isinstance(tree, list | tuple) and len(tree) == 2:
        return dict(zip(("params", "opt_state"), tree, strict=True))
    if isinstance(tree, Mapping) and "params" in tree:
        return dict(tree)
    got = f"a dict with {', '.join(map(str, tree))}" if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
    raise ValueError(
        f'a job must be saved as {{"params": ..., "opt_state": ...}} or as a pair of these; {folder} has {got}. '
        f"Restore it with Orbax, then call jaxmp.checkpoint.convert."
    )


def read(reader: Any, folder: pathlib.Path, tree: Any, params: PyTree, extra: Mapping[str, PyTree]) -> Any:
    """The saved tree in its saved structure and dtypes, each leaf with the sharding that the job wants."""
    shardings = placement.Shardings(params)
    others = {name: placement.Shardings(like) for name, like in extra.items()}
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: str, x: Any) -> Any:
        head, _, rest = path.partition("/")
        sharding = others[head].of(rest or "<root>", x.shape) if head in others else shardings.of(path, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or shardings.replicated or default)

    try:
        found = reader.restore(folder, tree_paths.map_with_path(target, tree))
    except Exception as e:
        raise _unreadable(folder, e) from e
    placed = shardings.replicated is not None or any(other.replicated is not None for other in others.values())
    return found if placed else jax.tree.map(_uncommitted, found)


def _uncommitted(x: Any) -> Any:
    """`x` as an uncommitted array on the default device."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.array(np.asarray(x))
