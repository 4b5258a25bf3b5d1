"""Which trees of params are cut over an axis here: noted where they are gathered, asked where gradients are averaged.

A mean over devices of the gradients of cut params adds parts of different params. Nothing in the arrays says so where
jax does not check how values vary, and a loop that was data-parallel has that mean in it. So `jaxmp.fsdp.gather` leaves
a note at the level of the trace at which the gradients come out, and `jaxmp.reduce_gradients` looks for one.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxmp._src.base import compat, regions

_MOST = 16  # notes that are kept: those of a trace that has ended match none


class _Note(NamedTuple):
    trace: Any
    axis_name: str
    structure: Any
    shapes: tuple[tuple[int, ...], ...]


_NOTES: list[_Note] = []
_INSIDE: contextvars.ContextVar[list[_Note] | None] = contextvars.ContextVar("jaxmp_cut_params", default=None)


def note(params: PyTree, axis_name: str) -> None:
    """Says that `params` are parts, cut over a bound axis."""
    shapes = tuple(tuple(x.shape) for x in jax.tree.leaves(params))
    _keep(_Note(compat.trace_state(), axis_name, jax.tree.structure(params), shapes))


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Notes that are made inside, where a loss is differentiated, hold where its gradients come out as well."""
    inside: list[_Note] = []
    with regions.region(_INSIDE, inside):
        yield
    here = compat.trace_state()
    for found in inside:
        _keep(found._replace(trace=here))


def check_mean(grads: PyTree, axes: tuple[str, ...]) -> None:
    """Raises a ValueError if these are gradients of params that are cut over one of `axes`."""
    here = compat.trace_state()
    shapes = tuple(tuple(x.shape) for x in jax.tree.leaves(grads))
    for found in _NOTES:
        is_cut = found.axis_name in axes and found.shapes == shapes and found.structure == jax.tree.structure(grads)
        if is_cut and found.trace == here:
            raise ValueError(
                f"gradients of params that are cut over {found.axis_name!r} must not be averaged over it: the parts of "
                f"different devices are different params. Call jaxmp.fsdp.reduce_gradients(grads, layout) in place of "
                f"this, and name other data axes: jaxmp.reduce_gradients('data')."
            )


def _keep(new: _Note) -> None:
    outer = _INSIDE.get()
    if outer is not None:
        outer.append(new)
    _NOTES.append(new)
    del _NOTES[:-_MOST]
