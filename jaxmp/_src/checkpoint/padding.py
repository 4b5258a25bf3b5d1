"""Which leaves of a job are padded for the number of devices, and by how much, on both sides of a checkpoint.

`jaxmp.fsdp.pad` appends zeros to params, so the shapes of a job depend on the number of its devices. The record of a
step says which params are padded and what they are without; masters and moments are found by the end of their path, as
everywhere. A leaf is read in its new shape: zeros are cut off, or appended. Its checksum is that of the part that is no
padding, so it is the same in all layouts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.distributed import param_layout
from jaxmp._src.step import leaf_paths
from pallas_kernels import moments

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Padding:
    """{path of a param: (its shape without padding, its shape)} of the params that are padded."""

    shapes: Mapping[str, tuple[Shape, Shape]]

    def whole(self, path: str, shape: Shape) -> Shape:
        """The shape without padding of a leaf of params or state; `shape` if it is not padded."""
        return _resized(path, tuple(shape), {name: (padded, whole) for name, (whole, padded) in self.shapes.items()})

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {path: {"whole": list(whole), "padded": list(padded)} for path, (whole, padded) in self.shapes.items()}


class Change:
    """From the padding of a save to that of the job that restores it."""

    def __init__(self, old: Padding, new: Padding, params: Mapping[str, Any]) -> None:
        self._old, self._new = old, new
        self._shapes: dict[str, tuple[Shape, Shape]] = {}
        self._whole: dict[str, Shape] = {}
        for path, x in params.items():
            here = new.shapes.get(path, (tuple(x.shape),) * 2)
            there = old.shapes.get(path, (here[0],) * 2)
            if here[0] == there[0] and here[1] != there[1]:  # another model is named where all leaves are compared
                self._shapes[path], self._whole[path] = (there[1], here[1]), here[0]

    @property
    def is_empty(self) -> bool:
        """Whether no param has another padding."""
        return not self._shapes

    def onto(self, tree: PyTree) -> PyTree:
        """A description of the saved tree in the shapes that it is read in: those of the job.

        A moment in 8 bits whose groups change keeps the shapes of the save: see `regroup`.
        """

        def resized(path: str, x: Any) -> Any:
            shape = tuple(x.shape) if self._keeps(path) else _resized(path, tuple(x.shape), self._shapes)
            return x if shape == tuple(x.shape) else jax.ShapeDtypeStruct(shape, x.dtype)

        return tree_paths.map_with_path(resized, tree) if self._shapes else tree

    def whole(self, path: str, shape: Shape) -> Shape:
        """The shape without padding of a leaf that was read in the shape of `onto`."""
        return (self._old if self._keeps(path) else self._new).whole(path, shape)

    def of(self, path: str) -> tuple[Shape, Shape] | None:
        """(the shape without padding, that of the job) for a leaf of a param whose padding changes; else None."""
        owner, _ = _owner_of(path, self._shapes)
        return None if owner is None else (self._whole[owner], self._shapes[owner][1])

    def _keeps(self, path: str) -> bool:
        """Whether a leaf is a part of a moment in 8 bits, along whose groups the padding changes."""
        owner, field = _owner_of(path, self._shapes)
        if owner is None or not field:
            return False
        before, after = self._shapes[owner]
        return before[-1] != after[-1]


def _resized(path: str, shape: Shape, changes: Mapping[str, tuple[Shape, Shape]]) -> Shape:
    """`shape`, with {path of a param: (shape, other shape)} applied to the leaves that belong to these params."""
    owner, field = _owner_of(path, changes)
    if owner is None:
        return shape
    before, after = changes[owner]
    if field == "scales":
        return (*after[:-1], shape[-1]) if shape[:-1] == before[:-1] else shape
    if shape[1:] == before:  # an array that holds several of its param: those of each device, or of the last steps
        return shape[0], *after
    return after if shape == before else shape


def _owner_of(path: str, params: Mapping[str, Any]) -> tuple[str | None, str]:
    """(the param that a leaf of params or state belongs to, which part of a moment in 8 bits the leaf is, or "")."""
    parts = leaf_paths.essential(path).split("/")
    if parts[-1] in leaf_paths.REMAINDERS:
        parts.pop()
    owner = _end_of(parts, params)
    if owner is None and parts[-1] in moments.Quantized._fields:
        return _end_of(parts[:-1], params), parts[-1]
    return owner, ""


def _end_of(parts: list[str], found: Mapping[str, Any]) -> str | None:
    """The longest end of a path that is in `found`."""
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in found), None)


def of_layout(layout: param_layout.Layout | None, params: PyTree, argument: str) -> Padding:
    """The padding of params that have the shapes of a layout; a ValueError names the first that has not."""
    if layout is None:
        return Padding({})
    param_layout.check_is_layout(layout, argument)
    found: dict[str, tuple[Shape, Shape]] = {}

    def note(path: str, x: Any, cut: param_layout.Cut) -> None:
        param_layout.check_length(path, x, cut, cut.padded, f"with {argument}, a padded")
        if cut.dim is not None and cut.padded != cut.size:
            found[leaf_paths.plain(path)] = (cut.shape, tuple(x.shape))

    param_layout.map_leaves(note, params, layout)
    return Padding(found)


def recorded(about: Mapping[str, Any]) -> Padding:
    """The padding that the record of a step tells of."""
    layout = about.get("layout", {})
    return Padding({path: (tuple(x["whole"]), tuple(x["padded"])) for path, x in layout.items()})
