"""The arrays of a state from step to step: their buffers, their dtypes, and the choice between new and old."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxmp._src.numerics import casting


def own_buffers(state: PyTree, foreign: PyTree) -> PyTree:
    """`state` with each array in its own buffer, which no other array of `state` or `foreign` shares.

    Donation deletes a buffer after the step. An array that appears twice in the state cannot be donated, and an array
    that the caller's params share would be deleted under the caller. A NumPy array can change under the state: it is
    copied too.
    """
    seen = {id(x) for x in jax.tree.leaves(foreign)}

    def own(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            return jnp.array(x)
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, state)


def in_dtype_of(new: Any, old: Any) -> Any:
    """`new` in the dtype of `old`, strongly typed."""
    new = jnp.asarray(new)
    return casting.strongly_typed(new) if new.dtype == old.dtype else jax.lax.convert_element_type(new, old.dtype)


def select(taken: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """`new` if the step is taken, else `old`; in the dtypes of `old`."""
    return jax.tree.map(lambda n, o: jnp.where(taken, jnp.asarray(n, jnp.asarray(o).dtype), o), new, old)
