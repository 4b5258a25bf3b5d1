"""The order in which a step writes, where XLA does not find the best one by itself: on a CPU, and in part on a TPU.

On a CPU, XLA overwrites donated buffers in this order, and copies none of them.

XLA for CPU computes each result of a step in a loop of its own. If an element would become inf or NaN in one of its
arrays, all of them keep it as it was, so every loop reads all old arrays of its param. Whichever is written first, the
next loop still needs its old values: XLA copies the masters and the moments, and computes all of the update in each
loop. Three parts in a row need no copy:

    flags       which elements keep their old values           reads all old arrays, writes a byte for each element
    weights     masters, then params; params without one       the same and the flags
    the rest    moments                                        their own old values, the gradient, the flags

A param beside a master is cast from the new master. A param and its remainder are two results of the same old values,
so they are one number first (`in_one_loop`).

The update is written down in each part, from old arrays behind a barrier. XLA removes what a part does not use. On
other platforms there is no barrier, so the parts are equal programs, and XLA makes them one: one pass computes all.
"""

import jax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from pallas_kernels import backend, moments


def pays(tree: PyTree) -> bool:
    """Whether a step is traced for one device, on a machine whose default device is a CPU.

    Without a trace, nothing is donated. On a mesh, a part more is a collective more.
    """
    if backend.default_platform() != "cpu" or not backend.BARRIERS_HOLD or not _is_traced(tree):
        return False
    return all(mesh.empty for mesh in backend.meshes(tree))


def is_one_pass(tree: PyTree) -> bool:
    """Whether a step is traced for a GPU, where XLA makes one pass of it, and each array is whole on its device.

    Inside `jax.shard_map` and `jax.pmap` each device has its own arrays. Under `jax.jit` on a mesh, arrays of one shape
    may be split in different ways: what joins or adds them would be a collective.
    """
    return is_for_gpu(tree) and backend.devices_of(tree) == 1


def is_for_gpu(tree: PyTree) -> bool:
    """Whether a step is traced on a machine whose default device is a GPU."""
    return backend.default_platform() in ("gpu", "cuda", "rocm") and _is_traced(tree)


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def in_one_loop(param: Array, remainder: Array) -> tuple[Array, Array]:
    """A bfloat16 param and its remainder unchanged; XLA for CPU computes both in one loop, as one number.

    In loops of their own, each would read the old values of both, and XLA would copy what the first one overwrites.
    """
    word = lax.optimization_barrier(moments.as_one_word(param, remainder))
    new, remainder = moments.from_one_word(word, remainder.dtype)
    return moments.with_derivative_of(param, new), remainder


def params_last() -> bool:
    """Whether params are made from the new weights, also in a step that is not taken: traced for a TPU.

    XLA for TPU would select between the old and the new param in a pass of its own, which computes the update again.
    """
    return backend.default_platform() == "tpu"


def alone(weight: Array) -> Array:
    """A float32 weight that is joined from two halves, or will be split; on a TPU XLA writes it to memory.

    If it were part of the step's pass, XLA would find it too dear to compute for each result, and make several passes.
    """
    return lax.optimization_barrier(weight) if backend.default_platform() == "tpu" else weight


def behind(tree: PyTree) -> PyTree:
    """`tree` unchanged; XLA for CPU reads no array of it before all are there."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return treedef.unflatten(lax.platform_dependent(*leaves, cpu=_barrier, default=_unchanged))


def _barrier(*arrays: Array) -> list[Array]:
    return list(lax.optimization_barrier(arrays))


def _unchanged(*arrays: Array) -> list[Array]:
    return list(arrays)
