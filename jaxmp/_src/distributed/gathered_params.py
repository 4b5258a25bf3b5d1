"""Records which trees of params were gathered from parts, for the code that averages gradients.

A mean over devices of the gradients of cut params adds parts of different params. If jax does not check how values vary
over the mesh, nothing in the arrays shows this mistake, and a loop that was data-parallel contains such a mean. So
`jaxmp.fsdp.gather` writes a note while the loss is traced, `value_and_grad` moves the note to the trace level of the
gradients, and `jaxmp.reduce_gradients` looks for the note. `whole_leaves` looks for it too, to find optimizers
that need whole leaves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxmp._src.base import ambient, compat

_MOST = 16  # notes that are kept: those of a trace that has ended match nothing


class GatheredParams(NamedTuple):
    """Params that are cut over a mesh axis, as seen at one level of one trace.

    Attributes:
      trace: from `compat.trace_state()`.
      axis_name: the axis.
      structure, shapes: of this device's parts.
      cut: (path, as `keystr` writes it, and axis) of the params that are cut; the others are whole on each device.
      padded: (path, axis, length without padding) of those that are padded, under plain jit, where all are whole.
    """

    trace: Any
    axis_name: str
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    cut: tuple[tuple[str, int], ...]
    padded: tuple[tuple[str, int, int], ...] = ()


def note(
    params: PyTree,
    axis_name: str,
    *,
    cut: Sequence[tuple[int] | None] = (),
    padded: Sequence[tuple[int, int] | None] = (),
) -> None:
    """Says of each leaf of `params` along which axis it is cut over a bound mesh axis, or how it is padded under jit.

    `padded`: (axis, length without padding); None in both: nothing of the kind.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    cuts, lengths = (
        tuple((path, *where) for path, where in zip(paths, places, strict=False) if where is not None)
        for places in (cut, padded)
    )
    if cuts or lengths:
        shapes, structure = _shapes(params), jax.tree.structure(params)
        _keep(GatheredParams(compat.trace_state(), axis_name, structure, shapes, cuts, lengths))  # pyright: ignore


def lift(notes: ambient.Notes) -> None:
    """Repeats, where this is called, the notes that were made while a loss was differentiated."""
    here = compat.trace_state()
    for note in notes.gathered_params:
        _keep(note._replace(trace=here))


def notes_of(tree: PyTree) -> list[GatheredParams]:
    """What was noted in this trace of params like `tree`: of their parts in `shard_map`, or padded under plain jit."""
    here = (compat.trace_state(), jax.tree.structure(tree), _shapes(tree))
    notes = ambient.now().notes.gathered_params
    return [x for x in notes if (x.trace, x.structure, x.shapes) == here]


def _shapes(tree: PyTree) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape) for x in jax.tree.leaves(tree))


def _keep(new: GatheredParams) -> None:
    notes = ambient.now().notes
    others = [note for note in notes.gathered_params if note != new]
    notes.gathered_params = [*others[1 - _MOST :], new]
