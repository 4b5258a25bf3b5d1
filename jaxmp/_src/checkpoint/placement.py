"""Shardings of restored leaves: masters and moments are placed like their params."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.checkpoint import names
from jaxmp._src.devices import per_device, shardings
from jaxmp._src.step import state_paths
from jaxmp._src.step.state_paths import StatePath
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


def axis_of(path: StatePath) -> str | None:
    """The mesh axis of an array of which each device has its own (`PerDevice`); None for any other leaf."""
    return path.words[-1] if path.words[-2:-1] == ("by_axis",) else None


class Shardings:
    """Where each leaf goes: params as in `like`; a master or a moment of the same shape like its param.

    Arrays that differ from device to device (`PerDevice`) are split over their mesh axis, if it has as many devices.
    If they are those of another number of devices, they are split where they can be.
    All other leaves are replicated over the mesh of the params. Without a chosen sharding a leaf does not move.
    """

    # `shardings.sharding_of` needs the tree of `tx.init`. Here the tree may be what Orbax describes, nested dicts, so
    # leaves are found by their paths.

    def __init__(self, like: PyTree) -> None:
        self._like = like
        self._by_names = {path: (np.shape(x), chosen_sharding(x)) for path, x in names.by_names(like).items()}
        known = [s for _, s in self._by_names.values() if isinstance(s, jax.sharding.NamedSharding)]
        empty = jax.sharding.PartitionSpec()
        self.replicated = jax.sharding.NamedSharding(known[0].mesh, empty) if known else None
        single = [s for _, s in self._by_names.values() if isinstance(s, jax.sharding.SingleDeviceSharding)]
        if not known and single:
            self.replicated = single[0]

    def of_own(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        """The sharding of the leaf of `like` at this path; None: leave it where it is."""
        return self.of(StatePath(path, begins=0, ends=len(path)), shape)

    def of(self, path: StatePath, shape: tuple[int, ...]) -> Any:
        """The sharding of a leaf of params or of a state; None: leave it where it is."""
        param = None if path.begins is None else path.names[path.begins : path.ends]
        if self.replicated is not None and (axis := axis_of(path)) is not None:
            sharding = self._of_each_device(axis, param, tuple(shape))
            if sharding is not None:
                return sharding
        found = None if param is None else self._by_names.get(param)
        if found is not None and found[0] == tuple(shape):
            return self.replicated if found[1] is None else found[1]
        if found is not None and path.part and path.part[-1] in moments.Quantized._fields:
            if found[0][:-1] == tuple(shape[:-1]):
                return self._of_part_of_moment(shape, found[1])
        return self.replicated

    def _of_each_device(self, axis: str, param: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
        """The sharding of arrays that a param has by device of an axis; None: not by device."""
        mesh = getattr(self.replicated, "mesh", None)
        if mesh is None or not shape or axis not in mesh.shape:
            return None
        param_shape, sharding = (None, None) if param is None else self._by_names.get(param, (None, None))
        spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
        rest = spec if param_shape == shape[1:] and axis not in shardings.axes_of(spec) else ()
        parts = [axis, *rest, *[None] * (len(shape) - 1 - len(rest))]
        if shape[0] % mesh.shape[axis]:  # those of other devices: `unsent` takes their mean
            free = [d for d, part in enumerate(parts) if part is None and shape[d] % mesh.shape[axis] == 0]
            parts = [None, *parts[1:]]
            if free:
                parts[free[0]] = axis
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))

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

    def place_params(self, params: PyTree) -> PyTree:
        """`params` with each leaf moved to its sharding."""
        return self._place(params, names.of_tree(params))

    def place_state(self, state: Any) -> Any:
        """`state` with each leaf moved to its sharding."""
        return self._place(state, state_paths.of(state, self._like))

    def _place(self, tree: Any, paths: list[StatePath]) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        wanted = [self.of(path, x.shape) for path, x in zip(paths, leaves, strict=True)]
        moved = [
            x if sharding is None else jax.device_put(x, sharding) for x, sharding in zip(leaves, wanted, strict=True)
        ]
        return treedef.unflatten(moved)
