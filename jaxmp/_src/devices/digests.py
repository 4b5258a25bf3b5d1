"""Digests of arrays: 32 bits that depend on all bits of an array, and not on the devices that it lies on."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from jaxmp._src.devices import host_memory


def of_leaves(leaves: Mapping[str, Any]) -> dict[str, int]:
    """The digests of arrays of jax or NumPy by name; all processes of a job call it."""
    is_wide = lambda x: isinstance(x, np.ndarray) and x.dtype.itemsize >= 8  # jax without x64 would shorten it  # noqa: E731
    digests = {name: _digest(tuple(_words(x)) if is_wide(x) else x) for name, x in leaves.items()}
    return {name: int(x) for name, x in jax.device_get(digests).items()}


@jax.jit
def _digest(x: Any) -> UInt32[Array, ""]:
    """The sum over the elements of a hash of (place, bits), modulo 2^32.

    At one place, different bits have different hashes. So a change of one element always changes the digest, and any
    other change does but for one in 2^32. A sum of integers does not depend on its order, so not on the sharding.
    """
    total = jnp.uint32(0)
    for part, bits in enumerate(x if isinstance(x, tuple) else _words(host_memory.to_device(x))):
        place = jnp.uint32(part)
        for d, n in enumerate(bits.shape):
            place = place * np.uint32(n % 2**32) + lax.broadcasted_iota(jnp.uint32, bits.shape, d)
        total += jnp.sum(_mixed(bits ^ _mixed(place + np.uint32(0x9E3779B9))), dtype=jnp.uint32)
    return total


def _words(x: Any) -> list[Any]:
    """The bits of an array of jax or NumPy, as arrays of uint32 of its shape: one, or two for elements of 64 bits."""
    if x.dtype.kind == "c":
        return [*_words(x.real), *_words(x.imag)]
    if jnp.issubdtype(x.dtype, jnp.floating):
        dtype = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        x = lax.bitcast_convert_type(x, dtype) if isinstance(x, jax.Array) else np.ascontiguousarray(x).view(dtype)
    halves = [x >> 32, x] if x.dtype.itemsize == 8 else [x]
    return [half.astype(np.uint32) for half in halves]


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finalizer of MurmurHash3 (Appleby 2011), which is one to one."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
