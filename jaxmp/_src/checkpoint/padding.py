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
        return self._of(path, tuple(shape), {name: (padded, whole) for name, (whole, padded) in self.shapes.items()})

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {path: {"whole": list(whole), "padded": list(padded)} for path, (whole, padded) in self.shapes.items()}

    def onto(self, new: "Padding", params: Mapping[str, Any], tree: PyTree) -> PyTree:
        """A description of a saved tree, padded as `self`, in the shapes of a job that is padded as `new`."""
        changes = {}
        for path, x in params.items():
            here = new.shapes.get(path, (tuple(x.shape),) * 2)
            there = self.shapes.get(path, (here[0],) * 2)
            if here[0] == there[0] and here[1] != there[1]:  # another model is named where all leaves are compared
                changes[path] = (there[1], here[1])

        def resized(path: str, x: Any) -> Any:
            shape = self._of(path, tuple(x.shape), changes, groups=True)
            return x if shape == tuple(x.shape) else jax.ShapeDtypeStruct(shape, x.dtype)

        return tree_paths.map_with_path(resized, tree) if changes else tree

    @staticmethod
    def _of(path: str, shape: Shape, changes: Mapping[str, tuple[Shape, Shape]], *, groups: bool = False) -> Shape:
        """`shape`, with {path of a param: (shape, other shape)} applied to the leaves that belong to these params.

        With `groups` a ValueError refuses what would tear apart the groups of a moment in 8 bits.
        """
        parts = leaf_paths.essential(path).split("/")
        if parts[-1] in leaf_paths.REMAINDERS:
            parts.pop()
        found, field = _last_of(parts, changes), ""
        if found is None and parts[-1] in moments.Quantized._fields:
            *parts, field = parts
            found = _last_of(parts, changes)
        if found is None:
            return shape
        before, after = found
        if field and groups and before[-1] != after[-1]:
            raise ValueError(
                f"moments in 8 bits have a scale for each group of neighbours along the last axis, so this axis cannot "
                f"get another padding; got {before[-1]} elements saved and {after[-1]} wanted at {path}. Choose a "
                f"layout that pads another axis, or restore with the layout of the save."
            )
        if field == "scales":
            return (*after[:-1], shape[-1]) if shape[:-1] == before[:-1] else shape
        return after if shape == before else shape


def _last_of(parts: list[str], found: Mapping[str, Any]) -> Any:
    """What `found` has for the longest end of a path that is in it."""
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((found[end] for end in ends if end in found), None)


def of_layout(layout: param_layout.Layout | None, params: PyTree, argument: str) -> Padding:
    """The padding of params that have the shapes of a layout; a ValueError names the first that has not."""
    if layout is None:
        return Padding({})
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
