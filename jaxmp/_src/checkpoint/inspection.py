"""Lists what a directory of steps holds, and what is damaged: `python -m jaxmp checkpoint`."""

from typing import Any

from jaxmp._src.base import tables
from jaxmp._src.base.progress import Progress
from jaxmp._src.checkpoint import orbax, places, writer


def report(directory: Any, step: int | None = None) -> tuple[str, bool]:
    """Two tables as text, of the steps and of the leaves of one step; and whether all that was read is whole.

    Args:
      directory: a directory of steps, or the folder of one step.
      step: the step to look at; default: all of them, with the leaves of the newest.

    Raises:
      ValueError: no such folder, or no such step; no steps in it, or nothing that Orbax wrote.
    """
    if not str(directory):
        raise ValueError("a checkpoint must be named by its folder; got an empty path.")
    folder = places.folder(directory)
    steps = places.steps_in(folder) if step is None else []
    if not steps:
        _, folder = orbax.find(directory, step)
        steps = [folder]
    if not any(map(orbax.is_by_orbax, steps)):
        raise ValueError(
            f"a checkpoint must be a folder that Orbax wrote, or a directory of such folders; {directory} is neither."
        )
    rows = [("step", "leaves", "MiB", "policy", "state")]
    newest: list[orbax.Examined] = []
    whole = True
    with Progress("reading checkpoints") as line:
        for one in steps:
            line.say(f"step {one.name}, {len(rows)} of {len(steps)}")
            try:
                policy = orbax.record(one / orbax.ABOUT).get("policy", "not recorded")
                newest = list(orbax.examined(one))
                state = _state(newest)
            except ValueError as e:
                policy, newest, state = "", [], f"DAMAGED: {e}"
            whole = whole and not state.startswith("DAMAGED")
            size = sum(leaf.nbytes for leaf in newest) / 2**20
            rows.append((one.name, str(len(newest)), f"{size:.1f}", policy, state))
    names = {None: "no checksum", True: "whole", False: "DAMAGED"}
    leaves = [("leaf", "dtype", "shape", "bytes", "state")]
    leaves += [(x.path, x.dtype, str(list(x.shape)), str(x.nbytes), names[x.whole]) for x in newest]
    unfinished = sorted(x.name for x in folder.glob(f"*{writer.UNFINISHED}"))
    parts = [tables.columns(rows)]
    if unfinished:
        parts.append(f"unfinished, or being written: {', '.join(unfinished)}")
    if newest:
        parts.append(f"step {steps[-1].name}:\n{tables.columns(leaves)}")
    return "\n\n".join(parts), whole


def _state(leaves: list[orbax.Examined]) -> str:
    damaged = [leaf.path for leaf in leaves if leaf.whole is False]
    if damaged:
        more = ", ..." if len(damaged) > 3 else ""
        return f"DAMAGED: {len(damaged)} of {len(leaves)} leaves ({', '.join(damaged[:3])}{more})"
    return "no checksums" if any(leaf.whole is None for leaf in leaves) else "whole"
