"""Shardings of restored leaves: masters and moments are placed like their params."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import shardings
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
        for start in range(len(parts)):
            found = self._by_path.get("/".join(parts[start:]))
            if found is not None and found[0] == tuple(shape):
                return self.replicated if found[1] is None else found[1]
            if parts[-1] in moments.Quantized._fields:
                found = self._by_path.get("/".join(parts[start:-1]))
                if found is not None and found[0][:-1] == tuple(shape[:-1]):
                    return self._of_part_of_moment(shape, found[1])
        return self.replicated

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
