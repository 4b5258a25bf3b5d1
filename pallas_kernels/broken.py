"""Which numbers of a step are broken: inf or NaN, where the old number is finite.

The element that has a broken number keeps all of its old numbers, and is counted. XLA for TPU counts first if the sum
reads the same bools as the step: it writes them to memory, and the step is a second pass over all arrays. The count
asks the same in other words (`counted_apart`), so that both are one pass.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels import backend


def is_broken(new: Float[Array, "..."], old: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Where `new` is not finite although `old` is. (Some state starts at inf, such as a best loss.)"""
    if jnp.issubdtype(new.dtype, jnp.complexfloating):
        return ~jnp.isfinite(new) & jnp.isfinite(old)
    # The functions of jnp take much longer to trace: each is a jit of its own.
    return lax.bitwise_and(lax.bitwise_not(lax.is_finite(new)), lax.is_finite(old))


def in_other_words(new: Float[Array, "..."], old: Float[Array, "..."]) -> Bool[Array, "..."]:
    """`is_broken` in words that Mosaic knows, too."""
    return ~_is_bounded(new) & _is_bounded(old)


def _is_bounded(x: Array) -> Bool[Array, "..."]:
    magnitude = jnp.abs(x)
    if jnp.finfo(magnitude.dtype).bits < 16:  # some of these formats have no inf
        magnitude = magnitude.astype(jnp.float32)
    return magnitude < jnp.inf


def counted_apart() -> bool:
    """Whether a step that is traced now counts in other words: on a machine whose default device is a TPU."""
    return backend.default_platform() == "tpu"
