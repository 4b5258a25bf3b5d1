"""Arrays in host memory: whether an array is in the memory of the device or of the host, and how to move it.

The memory is part of an array's type in JAX, `float32<host>[16]`, and all operands of a computation must be in the same
memory. `device_put` moves an array to the other memory. It also works inside `jax.jit`: XLA turns it into a copy that
runs at the same time as the computation. Host memory here is pinned, so that the device can copy from it directly. This
file never computes in host memory: XLA would run this on the CPU, slowly.
"""

from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths

_HOST_KIND = "pinned_host"


def is_on_host(x: Any) -> bool:
    """Whether `x` is an array or a tracer in host memory."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def first_on_host(tree: PyTree) -> str | None:
    """The path of the first leaf in host memory, or None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return next((tree_paths.path_str(path) for path, x in leaves if is_on_host(x)), None)


def check_on_device(state: PyTree) -> None:
    """Raises a ValueError if a leaf of the state is in host memory: only a streamed update can read it there."""
    if any(map(is_on_host, jax.tree.leaves(state))):
        raise ValueError(
            f"state in host memory needs apply_gradients with mixed_precision(stream_updates(inner), policy); got "
            f"{first_on_host(state)}."
        )


def to_device(tree: PyTree) -> PyTree:
    """`tree` with all its arrays in device memory; arrays that are there already do not change."""
    return jax.tree.map(lambda x: _copied_in(x) if is_on_host(x) else x, tree)


def to_host(x: Array) -> Array:
    """`x` in pinned host memory, with the same sharding."""
    if isinstance(x, Tracer):
        return _put(x, jax.memory.Space.Host)
    for device in x.sharding.device_set:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if _HOST_KIND not in kinds and device.process_index == jax.process_index():
            raise ValueError(
                f"offloading needs memory of kind {_HOST_KIND!r}; {device} has "
                f"{', '.join(map(repr, kinds)) or 'none'}. Keep the state on this device."
            )
    return jax.device_put(x, x.sharding.with_memory_kind(_HOST_KIND))


def as_before(new: Array, old: Array) -> Array:
    """`new`, moved to the memory of `old`."""
    return to_host(new) if is_on_host(old) else new


def _copied_in(x: Array) -> Array:
    moved = _put(x, jax.memory.Space.Device)
    # Without the barrier, XLA for GPUs may move a reshape of the copy in front of the copy, where it cannot run.
    return lax.optimization_barrier(moved) if isinstance(x, Tracer) else moved


def _put(x: Array, space: Any) -> Array:
    try:
        return jax.device_put(x, space)
    except ValueError as e:
        if "shard_map" not in str(e):
            raise
        raise ValueError(
            f"in shard_map, arrays enter or leave host memory only under jit; got {jax.typeof(x)}. Write "
            f"jax.jit(jax.shard_map(...))."
        ) from e
