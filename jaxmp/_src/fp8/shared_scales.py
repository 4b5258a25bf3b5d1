"""Lets layers of one loss that get the same array cast it with the same scale.

q, k and v read one input, and so do gate and up. Each layer has a scale leaf of its own and records the amax of the
array there. The amaxes are equal, so the scales are equal too, but XLA cannot know that, and casts the array once for
each layer. So the later layers use the scale leaf of the first layer. Then their casts are the same expression, and XLA
computes it once, with its transposed copy. The amax still goes to the leaf of each layer, so params, histories and
checkpoints are the same as without sharing.

The same array means the same object at the same level of a trace (`told`), in one loss: two losses share nothing.
"""

import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, compat
from jaxmp._src.fp8 import told


def leaf_for(leaf: Float[Array, ""], alike: Hashable, *arrays: Array) -> Float[Array, ""]:
    """The leaf whose scale casts what a layer computes from `arrays`: that of the first layer in this loss, or `leaf`.

    `alike` says how the layer makes its tensor and its scale; layers share only if it is equal, and their arrays and
    leaves are of one type. The amax of the returned leaf is also that of `leaf`.
    """
    if not ambient.is_in_loss():
        return leaf
    first, *others = (told.before_conversion(x) for x in arrays)
    how = (alike, tuple(x.dtype for x in arrays), jax.typeof(leaf), compat.trace_state())
    casts = told.of(first).casts
    for its_how, its_others, its_leaf in casts:
        shared = its_leaf()
        if shared is not None and how == its_how and all(a() is b for a, b in zip(its_others, others, strict=True)):
            return leaf if shared is leaf else _of_first(shared, leaf)
    casts.append((how, tuple(weakref.ref(x) for x in others), weakref.ref(leaf)))
    return leaf


@jax.custom_vjp
def _of_first(first: Array, own: Array) -> Array:
    """`first`; the amax goes to both leaves."""
    return _chosen(first, own)


def _forward(first: Array, own: Array) -> tuple[Array, tuple[Array, Array]]:
    return _chosen(first, own), (first, own)


def _backward(leaves: tuple[Array, Array], amax: Array) -> tuple[Array, Array]:
    return _amaxes(amax, *leaves)


_of_first.defvjp(_forward, _backward)


@jax.custom_batching.custom_vmap
def _chosen(first: Array, own: Array) -> Array:
    """`first`; but `own` under a vmap that gives each member a leaf of the one layer, and one leaf of the other."""
    del own
    return first


@_chosen.def_vmap
def _chosen_in_batch(axis_size: int, in_batched: Any, first: Array, own: Array) -> tuple[Array, bool]:
    del axis_size
    first_batched, own_batched = in_batched
    return (_chosen(first, own), True) if first_batched == own_batched else (own, own_batched)


@jax.custom_batching.custom_vmap
def _amaxes(amax: Array, first: Array, own: Array) -> tuple[Array, Array]:
    """The amaxes of both leaves, given that of the one `_chosen`."""
    del first, own
    return amax, amax


@_amaxes.def_vmap
def _amaxes_in_batch(axis_size: int, in_batched: Any, amax: Array, first: Array, own: Array) -> Any:
    del axis_size
    amax_batched, first_batched, own_batched = in_batched
    if first_batched == own_batched:
        return _amaxes(amax, first, own), (amax_batched, amax_batched)
    unused = lax.convert_element_type(jnp.full(first.shape, -jnp.inf, jnp.float32), first.dtype)
    return (unused, amax), (first_batched, amax_batched)
