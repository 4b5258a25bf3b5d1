"""Which leaves of a job are padded for the number of devices, and by how much, when saved and when restored.

`jaxmp.fsdp.pad` appends zeros to params, so the shapes of a job depend on the number of its devices. The record of a
step lists the padded params and their shapes without padding. Masters and moments follow their param. `restore` reads a
leaf in its new shape: it cuts zeros off, or appends zeros. The checksum of a leaf does not include the padding, so it
is the same in all layouts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import placement
from jaxmp._src.checkpoint.names import Leaf
from jaxmp._src.devices import shardings
from jaxmp._src.distributed import param_layout
from jaxmp._src.step.state_paths import StatePath
from pallas_kernels import moments

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Padding:
    """{path of a param: (its shape without padding, its shape)} of the params of a layout."""

    shapes: Mapping[str, tuple[Shape, Shape]]

    def whole(self, path: StatePath, shape: Shape) -> Shape:
        """The shape without padding of a leaf of params or state; `shape` if it is not padded."""
        owner, field = path.param, _field_of(path)
        if owner is None or owner not in self.shapes:
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

    def is_of_other_params(self, path: StatePath) -> bool:
        """Whether a leaf belongs to a param of another shape than that of the job; `check` allowed it."""
        return path.param in self._others

    def onto(self, leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Any]:
        """Descriptions of saved leaves in the shapes that they are read in: those of the job.

        A moment in 8 bits whose groups change keeps the shapes of the save: see `regroup`.
        """

        def resized(path: StatePath, x: Any) -> Any:
            if not self._is_resized(path):
                return x
            shape = _resized(tuple(x.shape), _field_of(path), *self._shapes[path.param or ""])
            return x if shape == tuple(x.shape) else jax.ShapeDtypeStruct(shape, x.dtype)

        return [resized(leaf.path, x) for leaf, x in zip(leaves, values, strict=True)]

    def whole(self, path: StatePath, shape: Shape) -> Shape:
        """The shape without padding of a leaf that was read in the shape of `onto`."""
        return (self._new if self._is_resized(path) else self._old).whole(path, shape)

    def of(self, path: StatePath) -> tuple[Shape, Shape] | None:
        """(the shape without padding, that of the job) for a leaf of a param whose padding changes; else None."""
        owner = path.param
        return (self._whole[owner], self._shapes[owner][1]) if owner in self._shapes else None

    def _is_resized(self, path: StatePath) -> bool:
        """Whether a leaf is read in another shape: not moments in 8 bits, along whose groups the padding changes."""
        if path.param not in self._shapes:
            return False
        before, after = self._shapes[path.param]
        return not _field_of(path) or before[-1] == after[-1]


def _without_padding(x: Any) -> tuple[Shape, Shape]:
    return tuple(x.shape), tuple(x.shape)


def _resized(shape: Shape, field: str, before: Shape, after: Shape) -> Shape:
    """The shape of a leaf that belongs to a param (`field` of a moment), where the param goes to another shape."""
    if field == "scales":
        return (*after[:-1], shape[-1]) if shape[:-1] == before[:-1] else shape
    if shape and shape[1:] == before:  # an array that holds several of its param: of each device, of the last steps
        return shape[0], *after
    return after if shape == before else shape


def _field_of(path: StatePath) -> str:
    """Which part of a moment in 8 bits a leaf is; "" for any other leaf."""
    return path.part[0] if len(path.part) == 1 and path.part[0] in moments.Quantized._fields else ""


def of_layout(layout: param_layout.Layout | None, params: PyTree, argument: str) -> Padding:
    """The shapes of params under a layout; a ValueError names the first that has not."""
    if layout is None:
        return Padding({})
    param_layout.check_is_layout(layout, argument)
    found: dict[str, tuple[Shape, Shape]] = {}

    def note(path: str, x: Any, cut: param_layout.Cut) -> None:
        param_layout.check_length(path, x, cut, cut.padded, f"with {argument}, a padded")
        found[path] = (cut.shape, tuple(x.shape))

    param_layout.map_leaves(note, params, layout)
    return Padding(found)


def inferred(params: PyTree, recorded: Padding, saved: Mapping[str, Any]) -> Padding:
    """The shapes of params of the job that restores, from the shardings that they have; `saved`: the saved params.

    A dimension that n devices cut is padded as `jaxmp.fsdp.layout_of` pads it, to the next multiple of n. Arrays must
    have zeros there; else they are those of a larger model. If no layout was recorded, the saved shapes are taken as
    those without padding, and only such zeros say that there is any.
    """
    found = {}
    for path, x in tree_paths.leaves_by_path(params).items():
        is_known, shape = path in recorded.shapes, tuple(x.shape)
        whole = recorded.shapes[path][0] if is_known else tuple(saved[path].shape) if path in saved else None
        if whole is None or len(whole) != len(shape) or (not is_known and shape == whole):
            continue
        wanted = tuple(-(-size // n) * n for size, n in zip(whole, _cuts(x), strict=True))
        is_padded = all(here in (size, there) for here, size, there in zip(shape, whole, wanted, strict=True))
        if is_padded and (shape == whole or (_is_zero_outside(x, whole) if _has_values(x) else is_known)):
            found[path] = (whole, shape)
    return Padding(found)


def _has_values(x: Any) -> bool:
    return not isinstance(x, jax.ShapeDtypeStruct) and not (isinstance(x, jax.Array) and x.is_deleted())


def _cuts(x: Any) -> list[int]:
    """Into how many parts each dimension is cut by the chosen sharding."""
    sharding = placement.chosen_sharding(x)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return [1] * len(x.shape)
    parts = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
    return [math.prod(sharding.mesh.shape[axis] for axis in shardings.axes_of([part])) for part in parts]


def _is_zero_outside(x: Any, whole: Shape) -> bool:
    def outside(x: Any) -> Any:
        is_outside = [lax.broadcasted_iota(jnp.int32, x.shape, d) >= size for d, size in enumerate(whole)]
        return jnp.any(functools.reduce(jnp.logical_or, is_outside) & (x != 0))

    return not bool(jax.jit(outside)(x))


def recorded(about: Mapping[str, Any]) -> Padding:
    """The padding that the record of a step tells of."""
    layout = about.get("layout", {})
    return Padding({path: (tuple(x["whole"]), tuple(x["padded"])) for path, x in layout.items()})
