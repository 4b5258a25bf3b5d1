"""How the arrays of a leaf are seen if groups of neighbours along the last axis share a number (`Leaf.group`).

    (rows, columns)  ->  (rows, groups, neighbours)

XLA for TPU stores a matrix in tiles of 8 rows and 128 columns, also the last two axes of this view, so it would move
every array. Seen tile by tile, arrays are where they were, and neighbours of a group are in the same row of tiles:

    (rows, columns)  ->  (rows / 8, groups, tiles of a group, 8, 128)

The arithmetic is between two barriers. Without them XLA would do it on (rows, columns), and write the number of each
group to memory once for each neighbour.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from pallas_kernels import backend
from pallas_kernels.by_platform import by_platform

_ROWS, _COLUMNS = 8, 128  # of a tile


class View(NamedTuple):
    """The view of a leaf of this shape; its smaller arrays have an element for each group."""

    shape: tuple[int, ...]
    group: int
    in_tiles: bool

    def of_array(self, x: Array) -> Array:
        """The view of one array; what has an element for each group broadcasts against the others."""
        is_whole = x.shape == self.shape
        if self.group == 1:
            return x
        if not self.in_tiles:
            return x.reshape(*self.shape[:-1], -1, self.group) if is_whole else x[..., None]
        *more, rows, columns = self.shape
        tiles = (self.group // _COLUMNS, _COLUMNS) if is_whole else (1, 1)
        return jnp.moveaxis(x.reshape(*more, rows // _ROWS, _ROWS, columns // self.group, *tiles), -4, -2)

    def of_tree(self, arrays: PyTree) -> PyTree:
        """The views of all arrays of a tree."""
        views = jax.tree.map(self.of_array, arrays)
        return lax.optimization_barrier(views) if self.in_tiles else views

    def undone(self, views: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The arrays of these shapes from their views."""
        if self.in_tiles:
            views = [jnp.moveaxis(x, -2, -4) for x in lax.optimization_barrier(list(views))]
        return [x.reshape(shape) for x, shape in zip(views, shapes, strict=True)]

    def group_max(self, x: Array) -> Array:
        """The maximum over each group; it broadcasts against `x`."""
        return jnp.max(x, axis=(-3, -1) if self.in_tiles else -1, keepdims=True)


def seen(f: Callable[..., Any], shape: tuple[int, ...], group: int, *arrays: PyTree) -> Any:
    """`f(view, *arrays)` with the view of a leaf of this shape that moves nothing on the platform of the program.

    If devices share the arrays under `jax.jit`, each must have whole tiles, whichever axes are split.
    """
    plain = functools.partial(f, View(shape, group, in_tiles=False))
    rows = shape[-2] if len(shape) > 1 else 1
    if group % _COLUMNS or rows % (_ROWS * backend.devices_of(arrays)):
        return plain(*arrays)
    return by_platform(plain, *arrays, tpu=lambda _, *arrays: f(View(shape, group, in_tiles=True), *arrays))
