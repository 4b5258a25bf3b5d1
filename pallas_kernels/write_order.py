"""On a CPU: a step in an order in which XLA overwrites donated buffers and copies none of them.

XLA for CPU computes each result of a step in a loop of its own. If an element would become inf or NaN in one of its
arrays, all of them keep it as it was, so every loop reads all old arrays of its param. Whichever is written first, the
next loop still needs its old values: XLA copies the masters and the moments, and computes all of the update in each
loop. Three parts in a row need no copy:

    flags       which elements keep their old values           reads all old arrays, writes a byte for each element
    weights     masters; updates of params without one         the same and the flags
    the rest    moments                                        their own old values, the gradient, the flags

The update is written down in each part, from old arrays behind a barrier. XLA removes what a part does not use. On
other platforms there is no barrier, so the parts are equal programs, and XLA makes them one: one pass computes all.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int8, PyTree

from pallas_kernels import backend

Flags = list[Int8[Array, "..."]]


def pays(tree: PyTree) -> bool:
    """Whether a step is traced for one device, on a machine whose default device is a CPU.

    Without a trace, nothing is donated. On a mesh, a part more is a collective more.
    """
    leaves = jax.tree.leaves(tree)
    is_traced = any(isinstance(x, Tracer) for x in leaves)
    if not is_traced or jax.default_backend() != "cpu" or not backend.BARRIERS_HOLD:
        return False
    return jax.sharding.get_abstract_mesh().empty and all(jax.typeof(x).sharding.mesh.empty for x in leaves)


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


def in_bytes(first: Sequence[Array], second: Sequence[Array | None]) -> Flags:
    """Two flags for each element of each param in the lowest bits of an int8; None stands for no flag set."""
    return [
        x.astype(jnp.int8) if y is None else x.astype(jnp.int8) + 2 * y.astype(jnp.int8)
        for x, y in zip(first, second, strict=True)
    ]


def first_of(flags: Flags) -> list[Bool[Array, "..."]]:
    """The first flags of `in_bytes`."""
    return [(x & 1) != 0 for x in flags]


def count(flags: Flags) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many of the first, and of the second flags are set; float32[] each. XLA for CPU counts only if any is set."""
    if not flags:
        return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.platform_dependent(flags, cpu=_count_if_any, default=_count)


def _count(flags: Flags) -> tuple[Array, Array]:
    return sums_of_pairs([(x & 1, x >> 1) for x in flags])


def sums_of_pairs(pairs: Sequence[tuple[Array, Array]]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of all first, and of all second arrays; float32[] each.

    Both are one sum of complex numbers: XLA makes two reductions part of the optimizer's pass over memory only if they
    are one operation on one array.
    """
    both = jnp.zeros((), jnp.complex64)
    for first, second in pairs:
        both += jnp.sum(lax.complex(first.astype(jnp.float32), second.astype(jnp.float32)))
    return jnp.real(both), jnp.imag(both)


def _count_if_any(flags: Flags) -> tuple[Array, Array]:
    most = functools.reduce(jnp.maximum, [jnp.max(x, initial=0) for x in flags])
    nothing = (jnp.zeros((), jnp.float32),) * 2
    return lax.cond(most > 0, lambda: _count(flags), lambda: nothing)
