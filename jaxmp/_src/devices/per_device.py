"""Arrays in an optimizer's state that differ between the devices of a mesh axis."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class PerDevice(NamedTuple):
    """Arrays with a leading axis of devices, cut over the mesh axis that they are filed under.

    In `jax.shard_map` a device sees its own part, with a leading axis of length one. `jaxmp.sharding_of` gives the
    specs. If an array belongs to a param, its other axes are those of the param, and are split in the same way.

    Attributes:
      by_axis: {name of a mesh axis: tree of arrays [devices, ...]}.
    """

    by_axis: dict[str, Any]


def axis_of(path: Sequence[Any]) -> str | None:
    """The mesh axis of an array inside a `PerDevice`, from its path of `jax.tree_util`; None for any other array."""
    names = [getattr(key, "name", None) for key in path]
    return path[names.index("by_axis") + 1].key if "by_axis" in names else None
