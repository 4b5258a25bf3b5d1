"""Which leaves of a job are padded for the number of devices, and by how much, when saved and when restored.

`jaxmp.fsdp.pad` appends zeros to params, so the shapes of a job depend on the number of its devices. The record of a
step lists the padded params and their shapes without padding. Masters and moments are found by the end of their path,
as everywhere. `restore` reads a leaf in its new shape: it cuts zeros off, or appends zeros. The checksum of a leaf does
not include the padding, so it is the same in all layouts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
    """{path of a param: (its shape without padding, its shape)} of the params of a layout."""

    shapes: Mapping[str, tuple[Shape, Shape]]

    def whole(self, path: str, shape: Shape) -> Shape:
        """The shape without padding of a leaf of params or state; `shape` if it is not padded."""
        owner, field = _owner_of(path, self.shapes)
        if owner is None:
            return tuple(shape)
        whole, padded = self.shapes[owner]
        return _resized(tuple(shape), field, padded, whole)

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {path: {"whole": list(whole), "padded": list(padded)} for path, (whole, padded) in self.shapes.items()}


class Change:
    """From the padding of a save to that of the job that restores it; for the params of both, arrays or shapes."""

    def __init__(self, old: Padding, new: Padding, saved: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        self._old, self._new = old, new
        self._names = {**saved, **params}  # a leaf belongs to the param with the longest name, changed or not
        self._shapes: dict[str, tuple[Shape, Shape]] = {}
        self._whole: dict[str, Shape] = {}
        self._others: dict[str, tuple[tuple[Shape, Shape], tuple[Shape, Shape]]] = {}
        for path in params.keys() & saved.keys():
            there = old.shapes.get(path) or _without_padding(saved[path])
            here = new.shapes.get(path) or _without_padding(params[path])
            if here[0] == there[0] and here[1] != there[1]:  # another model is named where all leaves are compared
                self._shapes[path], self._whole[path] = (there[1], here[1]), here[0]
            is_known = path in old.shapes and path in new.shapes
            if here[0] != there[0] and (is_known or here[1] == there[1]):  # not there: it sees the padded shapes only
                self._others[path] = there, here

    @property
    def is_empty(self) -> bool:
        """Whether no param has another padding."""
        return not self._shapes

    def check(self, patterns: Sequence[str]) -> None:
        """Raises a ValueError for a param of another shape without padding than the saved one, unless named."""
        for path in sorted(self._others):
            if tree_paths.matches(path, patterns):
                continue
            if path in self._old.shapes and path in self._new.shapes:
                there, here = (whole for whole, _ in self._others[path])
                raise ValueError(
                    f"the checkpoint must be of this model; {path} has shape {there} in the checkpoint and {here} in "
                    f"the model, both without padding. To start this leaf fresh, name it in partial=."
                )
            there, here = (
                f"{whole}" if whole == padded else f"{whole}, padded to {padded},"
                for whole, padded in self._others[path]
            )
            raise ValueError(
                f"the checkpoint must be of this model; {path} has shape {there} in the checkpoint and {here} in the "
                f"model. If both are padded (jaxmp.fsdp.pad), pass the layout= to save and to restore; a step that was "
                f"saved without it is restored without it, with params of the same padding."
            )

    def without_other_params(self, tree: PyTree) -> PyTree:
        """A saved tree without the leaves of params of another shape than those of the job; `check` allowed them."""
        if not self._others:
            return tree
        return tree_paths.map_with_path(lambda path, x: None if self._owner(path)[0] in self._others else x, tree)

    def onto(self, tree: PyTree) -> PyTree:
        """A description of the saved tree in the shapes that it is read in: those of the job.

        A moment in 8 bits whose groups change keeps the shapes of the save: see `regroup`.
        """

        def resized(path: str, x: Any) -> Any:
            owner, field = self._owner(path)
            if owner is None or not self._is_resized(owner, field):
                return x
            shape = _resized(tuple(x.shape), field, *self._shapes[owner])
            return x if shape == tuple(x.shape) else jax.ShapeDtypeStruct(shape, x.dtype)

        return tree_paths.map_with_path(resized, tree) if self._shapes else tree

    def whole(self, path: str, shape: Shape) -> Shape:
        """The shape without padding of a leaf that was read in the shape of `onto`."""
        return (self._new if self._is_resized(*self._owner(path)) else self._old).whole(path, shape)

    def of(self, path: str) -> tuple[Shape, Shape] | None:
        """(the shape without padding, that of the job) for a leaf of a param whose padding changes; else None."""
        owner, _ = self._owner(path)
        return (self._whole[owner], self._shapes[owner][1]) if owner in self._shapes else None

    def _owner(self, path: str) -> tuple[str | None, str]:
        return _owner_of(path, self._names)

    def _is_resized(self, owner: str | None, field: str) -> bool:
        """Whether a leaf is read in another shape: not moments in 8 bits, along whose groups the padding changes."""
        if owner not in self._shapes:
            return False
        before, after = self._shapes[owner]
        return not field or before[-1] == after[-1]


def _without_padding(x: Any) -> tuple[Shape, Shape]:
    return tuple(x.shape), tuple(x.shape)


def _resized(shape: Shape, field: str, before: Shape, after: Shape) -> Shape:
    """The shape of a leaf that belongs to a param (`field` of a moment), where the param goes to another shape."""
    if field == "scales":
        return (*after[:-1], shape[-1]) if shape[:-1] == before[:-1] else shape
    if shape and shape[1:] == before:  # an array that holds several of its param: of each device, of the last steps
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
    """The shapes of params under a layout; a ValueError names the first that has not."""
    if layout is None:
        return Padding({})
    param_layout.check_is_layout(layout, argument)
    found: dict[str, tuple[Shape, Shape]] = {}

    def note(path: str, x: Any, cut: param_layout.Cut) -> None:
        param_layout.check_length(path, x, cut, cut.padded, f"with {argument}, a padded")
        # Those without padding too: what ends as the name of a padded one may be theirs.
        found[leaf_paths.plain(path)] = (cut.shape, tuple(x.shape))

    param_layout.map_leaves(note, params, layout)
    return Padding(found)


def recorded(about: Mapping[str, Any]) -> Padding:
    """The padding that the record of a step tells of."""
    layout = about.get("layout", {})
    return Padding({path: (tuple(x["whole"]), tuple(x["padded"])) for path, x in layout.items()})
