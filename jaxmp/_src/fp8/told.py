"""What the layers of a loss tell each other of an array: which of them cast it.

A layer gets an array, and cannot see who else does. So it tells the `Notes` of the loss, for this very array at this
level of a trace. Nothing here keeps an array alive.

An explicit operation for several kernels would do without, but only in models that are written with it. In a
plain model the notes save what no other part of the program can: MiB beside the GEMMs, forward and backward, compiled
for H100, with the note and without it:

    casts            q, k and v, 4096x4096, of one bfloat16 [8192, 4096]                  992    1248
                     gate and up of a gated MLP, 4096 to 14336, as three layers          3953    4081
                     a `GatedMLP`, 4096 wide, and a Dense layer of one input             1280    1408
                     gate and up of 8 experts, 1024x1024                                  552     576
    converted_from   q, k and v of a float32 input, by policy, without a dtype           1824    2080
"""

import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any

import jax
from jaxtyping import Array

from jaxmp._src.base import ambient


@dataclasses.dataclass
class Told:
    """Of one array.

    Attributes:
      converted_from: the array that a layer converted to its dtype.
      casts: for each layer that casts it first in its way: how, the other arrays that it reads, its scale leaf.
    """

    converted_from: weakref.ref | None = None
    casts: list[tuple[Hashable, tuple[weakref.ref, ...], weakref.ref]] = dataclasses.field(default_factory=list)


def found(x: Array) -> Told | None:
    """What was told of `x` in this loss, if anything."""
    return ambient.now().notes.arrays.get(x)


def of(x: Array) -> Told:
    """What was told of `x` in this loss, to add to."""
    told = found(x)
    if told is None:
        told = Told()
        ambient.now().notes.arrays.set(x, told)
    return told


def note_converted(x: Any, converted: Any) -> None:
    """Tells that a layer converted `x` to its dtype: what two layers convert alike is one array for them."""
    if ambient.is_in_loss() and converted is not x and isinstance(x, jax.Array):
        of(converted).converted_from = weakref.ref(x)


def before_conversion(x: Array) -> Array:
    """What `x` was converted from by a layer, or `x` itself."""
    told = found(x)
    source = None if told is None or told.converted_from is None else told.converted_from()
    return x if source is None else source
