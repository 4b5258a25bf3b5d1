"""Unscales a whole tree of gradients, checks that it is finite, and computes its norm, in a few launches.

    g      = f32(grad) * inv_scale
    finite = no inf or NaN in any g
    norm   = sqrt(sum g^2)

`unscale_and_check` writes g. `gradient_norm` only reads; the pass that uses the gradients then unscales them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from pallas_kernels import write_order
from pallas_kernels.leaves import Values
from pallas_kernels.tree import checked, over_tree


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
    """The global norm of the unscaled gradients, and whether all of them are finite, in one pass over the tree.

    Args:
      tree: gradients; float16, bfloat16 or float32, of any shapes.
      inv_scale: float32[], 1 / loss scale.
      backend: see `pallas_kernels.backend`.

    Returns:
      The norm, float32[], summed in float32 (it can be inf although all gradients are finite); bool[].

    Raises:
      TypeError: leaves of another dtype, named by path.
      ValueError: a backend that cannot run.

    Example:
      >>> gradient_norm([jnp.array([6.0]), jnp.array([8.0], jnp.float16)], jnp.float32(0.5), backend="xla")
      (Array(5., dtype=float32), Array(True, dtype=bool))
    """
    leaves, _ = checked(tree)

    def measured(leaves: list[Array]) -> tuple[Array, Array]:
        _, (squares, bad) = over_tree(_measure, leaves, inv_scale, (), 2, "gradient_norm", backend)
        return squares, bad == 0

    if backend in ("auto", "xla") and write_order.pays(leaves):
        # XLA for CPU computes each sum in a loop of its own. If the squares are finite, so are the gradients.
        squares = _squares_on_cpu(leaves, inv_scale)
        look = lambda leaves: measured(leaves)[1]  # noqa: E731
        finite = lax.cond(jnp.isfinite(squares), lambda _: jnp.ones((), bool), look, lax.stop_gradient(leaves))
        return jnp.sqrt(squares), finite
    squares, finite = measured(leaves)
    return jnp.sqrt(squares), finite


def _unscale(values: Values) -> tuple[list[Array], list[Array]]:
    g = values.reads[0].astype(jnp.float32) * values.scalars[0]
    return [g], [_is_bad(g)]


def _squares_on_cpu(leaves: list[Array], inv_scale: Float[Array, ""]) -> Float[Array, ""]:
    total = jnp.zeros((), jnp.float32)
    for x in leaves:
        g = x.astype(jnp.float32) * inv_scale
        # Its loop over sums converts float16 element by element; a loop before it converts vectors.
        g = lax.optimization_barrier(g) if x.dtype == jnp.float16 else g
        total += jnp.sum(g * g)
    return total


def _measure(values: Values) -> tuple[list[Array], list[Array]]:
    g = values.reads[0].astype(jnp.float32) * values.scalars[0]
    return [], [g * g, _is_bad(g)]


def _is_bad(g: Array) -> Array:
    """1.0 where g is inf or NaN, else 0.0; a sum of these counts every NaN, but a maximum can lose one."""
    return jnp.where(jnp.abs(g) < jnp.inf, jnp.zeros_like(g), jnp.ones_like(g))
