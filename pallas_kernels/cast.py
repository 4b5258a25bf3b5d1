"""Masters to the model's params: a whole tree cast to a narrower dtype in a few launches."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from pallas_kernels.leaves import Values
from pallas_kernels.tree import checked, over_tree


def cast_tree(tree: PyTree, dtype: Any, *, scale: Float[Array, ""] | float = 1.0, backend: str = "auto") -> PyTree:
    """Every float leaf in `dtype`, rounded to nearest even, saturated at its largest finite value; NaN stays NaN.

        x -> dtype(clip(x * scale))

    Args:
      tree: masters; float16, bfloat16 or float32.
      dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
      scale: float32[], multiplies before the cast.
      backend: see `backend`.

    Returns:
      The tree in `dtype`.

    Raises:
      TypeError: leaves of another dtype, named by path.
      ValueError: another `dtype`; a backend that cannot serve.

    Example:
      >>> cast_tree({"w": jnp.array([1e6, 0.5])}, jnp.float16, backend="xla")
      {'w': Array([6.55e+04, 5.00e-01], dtype=float16)}
    """
    name = jnp.dtype(dtype).name
    if name not in ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(f"dtype must be float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; got {name}")
    leaves, treedef = checked(tree)
    f = functools.partial(_cast, name)
    out, _ = over_tree(f, leaves, scale, (jnp.dtype(dtype),), 0, "cast_tree", backend)
    return treedef.unflatten([x for (x,) in out])


def _cast(name: str, values: Values) -> tuple[list[Array], list[Array]]:
    x = values.reads[0].astype(jnp.float32) * values.scalars[0]
    limit = float(jnp.finfo(name).max)
    return [jnp.clip(x, -limit, limit).astype(name)], []
