"""Where the leaves of a job go: what is made for a param lies where the param does."""

from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import job_leaves


def sharding_of(x: Any) -> Any:
    """Where an array lies or an abstract one is to lie; None if nobody has said so."""
    if isinstance(x, jax.Array) and not x.committed:
        return None
    return getattr(x, "sharding", None)


def beside(x: Any, other: Any) -> jax.ShapeDtypeStruct:
    """An abstract `x` that is to lie where `other` does."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(other))


class Shardings:
    """Where leaves go: params where `like` has them, what is made for one (same end of path, same shape) beside it.

    All else goes to every device of their mesh. Where nobody has said so, it stays where it is.
    """

    def __init__(self, like: PyTree) -> None:
        leaves = job_leaves.plain_leaves(like)
        self._by_path = {path: (tuple(x.shape), sharding_of(x)) for path, x in leaves.items()}
        known = [s for _, s in self._by_path.values() if isinstance(s, jax.sharding.NamedSharding)]
        empty = jax.sharding.PartitionSpec()
        self.replicated = jax.sharding.NamedSharding(known[0].mesh, empty) if known else None
        single = [s for _, s in self._by_path.values() if isinstance(s, jax.sharding.SingleDeviceSharding)]
        if not known and single:
            self.replicated = single[0]

    def of(self, path: str, shape: tuple[int, ...]) -> Any:
        """The sharding of the leaf at `path` of params or of a state; None: wherever it is."""
        parts = job_leaves.essential(path).split("/")
        if parts[-1] in job_leaves.REMAINDERS:
            parts.pop()
        for start in range(len(parts)):
            found = self._by_path.get("/".join(parts[start:]))
            if found is not None and found[0] == tuple(shape):
                return self.replicated if found[1] is None else found[1]
        return self.replicated

    def place(self, tree: PyTree) -> PyTree:
        """The leaves of params or of a state, each moved to where it belongs."""

        def moved(path: str, x: Any) -> Any:
            sharding = self.of(path, x.shape)
            return x if sharding is None else jax.device_put(x, sharding)

        return tree_paths.map_with_path(moved, tree)
