"""Unscales a whole tree of gradients, checks that it is finite, and computes its norm, in a few launches.

    g      = f32(grad) * inv_scale
    finite = no inf or NaN in any g                   usable = |g| < 2^48 for all g
    norm   = sqrt(sum g^2)

`unscale_and_check` writes g. `gradient_norm` only reads; the pass that uses the gradients then unscales them.

Below 2^48, squares and sums of 2^30 squares are finite in float32, so no optimizer makes inf from usable gradients.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from pallas_kernels.leaves import Values
from pallas_kernels.tree import checked, over_tree

LARGEST = np.float32(2.0**48)


def unscale_and_check(
    tree: PyTree, inv_scale: Float[Array, ""], *, backend: str = "auto"
) -> tuple[PyTree, Bool[Array, ""]]:
    """Unscales gradients to float32, and checks whether all of them are finite.

    Args:
      tree: gradients; float16, bfloat16 or float32, of any shapes.
      inv_scale: float32[], 1 / loss scale.
      backend: see `pallas_kernels.backend`.

    Returns:
      The tree in float32; bool[], True if all values are finite.

    Raises:
      TypeError: leaves of another dtype, named by path.
      ValueError: a backend that cannot run.

    Example:
      >>> unscale_and_check({"w": jnp.array([8.0, jnp.inf], jnp.float16)}, jnp.float32(0.5), backend="xla")
      ({'w': Array([ 4., inf], dtype=float32)}, Array(False, dtype=bool))
    """
    leaves, treedef = checked(tree)
    out, (bad,) = over_tree(_unscale, leaves, inv_scale, (jnp.float32,), 1, "unscale_and_check", backend)
    return treedef.unflatten([x for (x,) in out]), bad == 0


def gradient_norm(
    tree: PyTree, inv_scale: Float[Array, ""], *, backend: str = "auto"
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The global norm of the unscaled gradients, and whether all of them are usable, in one pass over the tree.

    Args:
      tree: gradients; float16, bfloat16 or float32, of any shapes.
      inv_scale: float32[], 1 / loss scale.
      backend: see `pallas_kernels.backend`.

    Returns:
      The norm, float32[], summed in float32; bool[], whether each |g| is below 2^48 (and none is NaN).

    Raises:
      TypeError: leaves of another dtype, named by path.
      ValueError: a backend that cannot run.

    Example:
      >>> gradient_norm([jnp.array([6.0]), jnp.array([8.0], jnp.float16)], jnp.float32(0.5), backend="xla")
      (Array(5., dtype=float32), Array(True, dtype=bool))
    """
    leaves, _ = checked(tree)

    _, (squares, bad) = over_tree(_measure, leaves, inv_scale, (), 2, "gradient_norm", backend)
    return jnp.sqrt(squares), bad == 0


def _unscale(values: Values) -> tuple[list[Array], list[Array]]:
    g = values.reads[0].astype(jnp.float32) * values.scalars[0]
    return [g], [_is_bad(g, np.float32(np.inf))]


def _measure(values: Values) -> tuple[list[Array], list[Array]]:
    g = values.reads[0].astype(jnp.float32) * values.scalars[0]
    return [], [g * g, _is_bad(g, LARGEST)]


def _is_bad(g: Array, limit: np.float32) -> Array:
    """1.0 where |g| reaches the limit or g is NaN, else 0.0; a sum counts every NaN, but a maximum can lose one."""
    return jnp.where(jnp.abs(g) < limit, jnp.zeros_like(g), jnp.ones_like(g))
