"""Casts a whole tree to a narrower dtype in a few launches: masters to the model's params."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from pallas_kernels import reference
from pallas_kernels.leaves import Values
from pallas_kernels.tree import checked, over_tree


def cast_tree(tree: PyTree, dtype: Any, *, scale: Float[Array, ""] | float = 1.0, backend: str = "auto") -> PyTree:
    """Casts every leaf to `dtype`: rounds to nearest even, saturates at the largest finite value, keeps NaN.

        x -> dtype(clip(x * scale))

    Args:
      tree: arrays, such as masters; float16, bfloat16 or float32.
      dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
      scale: float32[], multiplies before the cast.
      backend: see `pallas_kernels.backend`.

    Returns:
      The tree in `dtype`.

    Raises:
      TypeError: leaves of another dtype, named by path.
      ValueError: another `dtype`; a backend that cannot run.

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
    return [narrowed(name, values.reads[0].astype(jnp.float32) * values.scalars[0])], []


def narrowed(name: str, x: Float[Array, "..."]) -> Array:
    """`reference.saturating_cast` of a block or of one number in a kernel."""
    is_scalar_fp8 = x.ndim == 0 and name.startswith("float8")
    return _scalar_fp8(name, x) if is_scalar_fp8 else reference.saturating_cast(x, name)


def _scalar_fp8(name: str, x: Float[Array, ""]) -> Array:
    """`reference.saturating_cast` of one float32, by its bits, because Mosaic only converts whole vectors."""
    info = jnp.finfo(name)
    x = jnp.clip(x, -float(info.max), float(info.max))
    bits = lax.bitcast_convert_type(x, jnp.int32)
    least = np.int32((127 + int(info.minexp)) << 23)
    exponent = jnp.maximum(bits & np.int32(0x7F800000), least)
    per_spacing = lax.bitcast_convert_type(np.int32(254 << 23) - exponent, jnp.float32) * np.float32(2.0**info.nmant)
    t = jnp.abs(x) * per_spacing  # exact: in [0, 2^(nmant + 1))
    whole = t.astype(jnp.int32)
    rest = t - whole.astype(jnp.float32)
    up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    code = jnp.where(up, whole + 1, whole) + lax.shift_right_logical(exponent - least, np.int32(23 - info.nmant))
    code = jnp.where(x == x, code, np.int32(0x7F)) | (lax.shift_right_logical(bits, np.int32(24)) & np.int32(0x80))
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(name))
