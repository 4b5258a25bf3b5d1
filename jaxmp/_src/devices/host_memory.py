"""Where an array lies: in the device's own memory, or in pinned memory of the host that the device copies from.

JAX writes the memory into an array's type, `float32<host>[16]`, and a computation takes operands of one memory only.
What moves an array is a `device_put` to the other, inside of `jax.jit` too, where XLA turns it into a copy that runs
beside the computation. Nothing here computes in host memory: XLA would do that on the CPU, slowly.
"""

from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths

_HOST_KIND = "pinned_host"


def is_on_host(x: Any) -> bool:
    """Whether `x`, an array or a tracer, lies in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def first_on_host(tree: PyTree) -> str | None:
    """The path of the first leaf that lies in host memory, or None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return next((tree_paths.path_str(path) for path, x in leaves if _is_array_on_host(x)), None)


def check_on_device(state: PyTree) -> None:
    """Raises a ValueError if a part of the state lies in host memory, where this optimizer cannot reach it."""
    path = first_on_host(state)
    if path is not None:
        raise ValueError(
            f"state in host memory is streamed by jaxmp.apply_gradients, with the optimizer wrapped as "
            f"jaxmp.mixed_precision(jaxmp.offload.stream_updates(inner), policy); got {path} in host memory and "
            f"another way to update it: an optimizer that is not wrapped, a fused one, tx.update, or a transform "
            f"inside optax.multi_transform, masked or MultiSteps. Wrap it, or keep the state on the device "
            f"(jaxmp.offload.to_device)."
        )


def to_device(tree: PyTree) -> PyTree:
    """`tree` with every array of it in device memory; those that are there already stay as they are."""

    def copied_in(x: Any) -> Any:
        if not _is_array_on_host(x):
            return x
        moved = _moved(x, jax.memory.Space.Device)
        # Without this XLA for GPUs may move a reshape of what was copied to before the copy, where it cannot run.
        return lax.optimization_barrier(moved) if isinstance(x, Tracer) else moved

    return jax.tree.map(copied_in, tree)


def to_host(x: Array) -> Array:
    """An array in pinned host memory, sharded as it was."""
    if isinstance(x, Tracer):
        return _moved(x, jax.memory.Space.Host)
    _check_devices(x)
    return jax.device_put(x, x.sharding.with_memory_kind(_HOST_KIND))


def as_before(new: Array, old: Array) -> Array:
    """`new` in the memory that `old` lies in."""
    return to_host(new) if is_on_host(old) else new


def _is_array_on_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_on_host(x)


def _moved(x: Array, space: Any) -> Array:
    try:
        return jax.device_put(x, space)
    except ValueError as e:
        if "shard_map" not in str(e):
            raise
        raise ValueError(
            "inside shard_map arrays move between host and device memory under jax.jit only; got a shard_map that runs "
            f"operation by operation, with {jax.typeof(x)}. Call it as jax.jit(jax.shard_map(...))."
        ) from e


def _check_devices(x: Array) -> None:
    for device in x.sharding.device_set:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if _HOST_KIND not in kinds and device.process_index == jax.process_index():
            raise ValueError(
                f"offloading keeps arrays in memory of kind {_HOST_KIND!r}, which the device must be able to address; "
                f"{device} has {', '.join(map(repr, kinds)) or 'none'}. Keep the state on this device."
            )
