"""What Orbax has written: found, described and read without knowing how it was nested.

Orbax describes a saved tree as nested dicts and lists, with a shape and a dtype for each array, and reads it in that
form. So a checkpoint can be looked at, and compared with a job, before any array is read.
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
    """`orbax.checkpoint`.

    Raises:
      ImportError: it is not installed; names the extra.
    """
    return optional.load("orbax.checkpoint", extra="checkpoint")


def find(source: Any, step: int | None) -> tuple[int | None, pathlib.Path]:
    """(step, its folder) in a manager or at a path; None for the newest step of a manager, and of a path."""
    if not hasattr(source, "latest_step"):
        folder = pathlib.Path(source).absolute()
        if step is not None:
            folder = folder / str(step)
        if not folder.is_dir():
            raise ValueError(f"a checkpoint is a folder that Orbax wrote; there is none at {folder}.")
        return step, folder
    found = source.latest_step() if step is None else step
    there = ", ".join(map(str, source.all_steps())) or "none"
    if found is None or found not in source.all_steps():
        raise ValueError(
            f"there is no finished checkpoint{'' if step is None else f' of step {step}'} in {source.directory}; "
            f"finished steps: {there}."
        )
    folder = pathlib.Path(source.directory) / str(found)
    if not folder.is_dir():
        raise ValueError(
            f"steps are looked for under their plain number; {folder} is not there. With a step format of your own, "
            f"pass the path of the step in place of the manager."
        )
    return found, folder


def check_newer(manager: Any, step: int) -> None:
    """Raises a ValueError unless `step` is newer than all that are there or on their way.

    Orbax passes over another one without a word, and the newest stays what `restore` takes: after a roll back to an
    earlier step the steps trained since would be lost. With `force=True` it writes an older one, and from then on takes
    that for the newest.
    """
    newest = manager.latest_step()
    if newest is None or step > newest:
        return
    later = sorted(n for n in manager.all_steps() if n >= step)
    calls = ", ".join(f"manager.delete({n})" for n in later[:4]) + (", ..." if len(later) > 4 else "")
    raise ValueError(
        f"steps are saved in rising order; got {step}, and the newest of {manager.directory} is {newest}. To go on "
        f"from an earlier step, delete the later ones first ({calls}), or save into a new directory."
    )


def tree_in(folder: pathlib.Path) -> pathlib.Path:
    """Where the tree of params and state lies in the folder of a step: ours, Orbax's single item, or right there."""
    return next((folder / item for item in (STATE, "default") if (folder / item).exists()), folder)


def described(folder: pathlib.Path) -> Any:
    """The saved tree with a description (shape, dtype) in the place of each array; no array is read."""
    try:
        found = package().StandardCheckpointHandler().metadata(_epath(folder))
        tree = getattr(found, "tree", found)
    except Exception as e:
        raise _unreadable(folder, e) from e
    if tree is None:
        raise _unreadable(folder, "no description of a tree")
    return tree


def record(folder: pathlib.Path) -> dict[str, Any]:
    """What was saved as JSON; {} where nothing was."""
    if not folder.exists():
        return {}
    ocp = package()
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            found = reader.restore(folder)
    except Exception as e:
        raise _unreadable(folder, e) from e
    if not isinstance(found, dict):
        raise _unreadable(folder, f"a {type(found).__name__} in the place of the record")
    return found


def _epath(folder: pathlib.Path) -> Any:
    return optional.load("etils.epath", extra="checkpoint").Path(folder)


def _unreadable(folder: pathlib.Path, why: Any) -> ValueError:
    is_item = folder.name in (STATE, ABOUT)
    steps = [x.name for x in folder.parent.parent.iterdir() if x.name.isdigit()] if is_item else []
    others = [name for name in steps if name != folder.parent.name]
    also = f" Other steps there: {', '.join(sorted(others, key=int))} (step=)." if others else ""
    return ValueError(
        f"a checkpoint must be what Orbax wrote, whole; {folder} cannot be read: it is damaged, cut off or something "
        f"else.{also} ({str(why).splitlines()[0][:300] if str(why) else type(why).__name__})"
    )


def parts(tree: Any, folder: pathlib.Path) -> dict[str, Any]:
    """A saved tree as a dict with `params` and, if there is one, `opt_state`."""
    if isinstance(tree, list | tuple) and len(tree) == 2:
        return dict(zip(("params", "opt_state"), tree, strict=True))
    if isinstance(tree, Mapping) and "params" in tree:
        return dict(tree)
    got = f"a dict with {', '.join(map(str, tree))}" if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
    raise ValueError(
        f'a job is saved as {{"params": ..., "opt_state": ...}} or as a pair of them; {folder} holds {got}. Restore it '
        f"with Orbax, and take it over with jaxmp.checkpoint.convert."
    )


def read(reader: Any, folder: pathlib.Path, tree: Any, params: PyTree, extra: Mapping[str, PyTree]) -> Any:
    """The saved tree, as it was saved, each leaf where it is to go."""
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
    """`x` on the default device, free to follow others."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.array(np.asarray(x))
