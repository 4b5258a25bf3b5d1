"""Shardings of restored leaves: masters and moments are placed like their params."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import per_device, shardings
from jaxmp._src.step import leaf_paths
from pallas_kernels import moments


def chosen_sharding(x: Any) -> Any:
    """The sharding of an array or of a `jax.ShapeDtypeStruct`; None if the user chose none (an uncommitted array)."""
    if isinstance(x, jax.Array) and not x.committed:
        return None
    return getattr(x, "sharding", None)


def put(x: Any, sharding: Any) -> Any:
    """An array of this process, the same in all of them, in a sharding that may reach over processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def beside(x: Any, other: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `x` with the sharding of `other`."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chosen_sharding(other))


class Shardings:
    """Where each leaf goes: params as in `like`; a master or a moment (same end of path, same shape) like its param.

    Arrays that differ from device to device (`PerDevice`) are split over their mesh axis, if it has as many devices.
    All other leaves are replicated over the mesh of the params. Without a chosen sharding a leaf does not move.
    """

    # `shardings.sharding_of` needs the tree of `tx.init`. Here the tree may be what Orbax describes, nested dicts, so
    # leaves are found by their shortened paths.

    def __init__(self, like: PyTree) -> None:
        leaves = leaf_paths.plain_leaves(like)
        self._by_path = {path: (np.shape(x), chosen_sharding(x)) for path, x in leaves.items()}
        known = [s for _, s in self._by_path.values() if isinstance(s, jax.sharding.NamedSharding)]
        empty = jax.sharding.PartitionSpec()
        self.replicated = jax.sharding.NamedSharding(known[0].mesh, empty) if known else None
        single = [s for _, s in self._by_path.values() if isinstance(s, jax.sharding.SingleDeviceSharding)]
        if not known and single:
            self.replicated = single[0]

    def of(self, path: str, shape: tuple[int, ...]) -> Any:
        """The sharding of the leaf at `path` of params or of a state; None: leave it where it is."""
        parts = leaf_paths.essential(path).split("/")
        if parts[-1] in leaf_paths.REMAINDERS:
            parts.pop()
        if self.replicated is not None and "by_axis" in parts[:-1]:
            sharding = self._of_each_device(parts[parts.index("by_axis") + 1 :], tuple(shape))
            if sharding is not None:
                return sharding
        for start in range(len(parts)):
            found = self._by_path.get("/".join(parts[start:]))
            if found is not None and found[0] == tuple(shape):
                return self.replicated if found[1] is None else found[1]
            if parts[-1] in moments.Quantized._fields:
                found = self._by_path.get("/".join(parts[start:-1]))
                if found is not None and found[0][:-1] == tuple(shape[:-1]):
                    return self._of_part_of_moment(shape, found[1])
        return self.replicated

    def _of_each_device(self, parts: list[str], shape: tuple[int, ...]) -> Any:
        """The sharding of arrays that `parts`, an axis and the path of a param, have by device; None: not by device."""
        axis, mesh = parts[0], getattr(self.replicated, "mesh", None)
        if mesh is None or not shape or mesh.shape.get(axis) != shape[0]:
            return None
        param_shape, sharding = self._by_path.get("/".join(parts[1:]), (None, None))
        spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
        rest = spec if param_shape == shape[1:] and axis not in shardings.axes_of(spec) else ()
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis, *rest))

    def check_devices(self, structure: Any) -> None:
        """Raises a ValueError for a state of `tx.init` that is for another number of devices than the mesh has."""
        mesh = getattr(self.replicated, "mesh", None)
        for path, x in jax.tree_util.tree_leaves_with_path(structure):
            axis = per_device.axis_of(path)
            if axis is not None and mesh is not None and axis in mesh.shape:
                shardings.check_devices(path, x, mesh)

    def _of_part_of_moment(self, shape: tuple[int, ...], sharding: Any) -> Any:
        """The sharding of the codes or the scales of a moment in 8 bits, from that of its param."""
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return self.replicated if sharding is None else sharding
        # Codes that are read in the shape of another layout may have an axis that these devices cannot cut.
        spec = shardings.spec_of_scales(tuple(shape), sharding)
        return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    def place(self, tree: PyTree) -> PyTree:
        """`tree` (params or a state) with each leaf moved to its sharding."""

        def moved(path: str, x: Any) -> Any:
            sharding = self.of(path, x.shape)
            return x if sharding is None else jax.device_put(x, sharding)

        return tree_paths.map_with_path(moved, tree)
