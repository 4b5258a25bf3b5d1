"""Arrays in an optimizer's state of which each device of a mesh axis has its own."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class PerDevice(NamedTuple):
    """Arrays with a leading axis of devices, cut over the mesh axis that they are filed under.

    In `jax.shard_map` a device sees its own part, with a leading axis of length one. `jaxmp.sharding_of` gives the
    specs. Where an array belongs to a param, the other axes are those of the param, and are cut as the param is.

    Attributes:
      by_axis: {name of a mesh axis: tree of arrays [devices, ...]}.
    """

    by_axis: dict[str, Any]


def is_per_device(x: Any) -> bool:
    """Whether `x` is a `PerDevice`."""
    return isinstance(x, PerDevice)


def is_inside(path: Iterable[Any]) -> bool:
    """Whether a path of `jax.tree_util` leads into a `PerDevice`."""
    return any(getattr(key, "name", None) == "by_axis" for key in path)
