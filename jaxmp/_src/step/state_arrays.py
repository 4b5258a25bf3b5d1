"""The buffers of a state: each array in its own, so that a step may donate it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base.by_identity import ByIdentity


def own_buffers(state: PyTree, foreign: PyTree) -> PyTree:
    """`state` with each array in its own buffer, which no other array of `state` or `foreign` shares.

    Donation deletes a buffer after the step. An array that appears twice in the state cannot be donated, and an array
    that the caller's params share would be deleted under the caller. A NumPy array can change under the state: it is
    copied too.
    """
    seen = ByIdentity()

    def own(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            return jnp.array(x)
        if not isinstance(x, jax.Array):
            return x
        if seen.get(x):
            return jnp.copy(x)
        seen.set(x, True)
        return x

    for x in jax.tree.leaves(foreign):
        if isinstance(x, jax.Array):
            seen.set(x, True)
    return jax.tree.map(own, state)
