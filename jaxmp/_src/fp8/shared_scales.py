"""Lets layers of one loss that get the same array cast it with the same scale.

q, k and v read one input, and so do gate and up. Each layer has a scale leaf of its own and records the amax of the
array there. The amaxes are equal, so the scales are equal too, but XLA cannot know that, and casts the array once for
each layer. So the later layers use the scale leaf of the first layer. Then their casts are the same expression, and XLA
computes it once, with its transposed copy. The amax still goes to the leaf of each layer, so params, histories and
checkpoints are the same as without sharing.

The same array means the same object at the same level of a trace. `Notes` of `value_and_grad` hold weak references to
these objects, so no trace outlives its function, and two losses share nothing.
"""

import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, compat


def leaf_for(leaf: Float[Array, ""], alike: Hashable, *arrays: Array) -> Float[Array, ""]:
    """The leaf whose scale casts what a layer computes from `arrays`: that of the first layer in this loss, or `leaf`.

    `alike` says how the layer makes its tensor and its scale; layers share only if it is equal, and their arrays and
    leaves are of one type. The amax of the returned leaf is also that of `leaf`.
    """
    if not ambient.is_in_loss():
        return leaf
    casts = ambient.now().notes.casts
    sources = tuple(before_conversion(x) for x in arrays)
    how = (alike, [x.dtype for x in arrays], jax.typeof(leaf), compat.trace_state())
    key = tuple(id(x) for x in sources)
    for known, first, its_how in casts.get(key, ()):
        shared = first()
        if shared is not None and how == its_how and all(a() is b for a, b in zip(known, sources, strict=True)):
            return leaf if shared is leaf else _of_first(shared, leaf)
    casts.setdefault(key, []).append((tuple(weakref.ref(x) for x in sources), weakref.ref(leaf), how))
    return leaf


def note_converted(x: Any, converted: Any) -> None:
    """Notes that a layer converted `x` to its dtype: what two layers convert alike is the same array for `leaf_for`."""
    if ambient.is_in_loss() and converted is not x and isinstance(x, jax.Array):
        ambient.now().notes.converted[id(converted)] = weakref.ref(converted), weakref.ref(x)


def before_conversion(x: Array) -> Array:
    """What `x` was converted from by a layer, or `x` itself."""
    noted = ambient.now().notes.converted.get(id(x))
    found = None if noted is None or noted[0]() is not x else noted[1]()
    return x if found is None else found


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
