"""An activation and the cast of its result in one pass, forward and backward, without storing the activation.

    forward     v = f(x)                        q = fp8(clip(v * scale)),  q.T,  amax = max |v|
    backward    dx = g f'(x)                    dx in the dtype of x, and q, q.T, amax of it

XLA does not fuse an activation into a cast that also needs an amax: it writes f(x) in 16 or 32 bits and reads it again.
Here the activation is computed in float32 and rounded once, to fp8. A network that first rounds it to bfloat16 has a
little more noise.

    "gelu"         x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2      jax.nn.gelu's default
    "gelu_exact"   x (1 + erf(x / sqrt(2))) / 2                         by XLA everywhere: Mosaic has no erf
    "silu"         x / (1 + exp(-x))
    silu_gated     silu(a) b                                            SwiGLU; two tensors in, two gradients
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import passes, reference

ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # the function, and its gradient
    "gelu": (reference.gelu, reference.gelu_grad),
    "gelu_exact": (reference.gelu_exact, reference.gelu_exact_grad),
    "silu": (reference.silu, reference.silu_grad),
}
UNMET = {"gelu_exact": "Mosaic GPU has no erf"}


def activation_cast_transpose_amax(
    x: Float[Array, "M N"], scale: Float[Array, ""], dtype: Any, *, activation: str, backend: str = "auto"
) -> tuple[Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """fp8(clip(f(x) * scale)), its transpose, and max |f(x)|, in one read of x.

    Args:
      x: [M, N] float32, bfloat16 or float16.
      scale: float32[], multiplies before the cast.
      dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      activation: "gelu", "gelu_exact" or "silu".
      backend: see `pallas_kernels.backend`.

    Returns:
      (q [M, N], q.T [N, M], amax float32[]), those of `cast_transpose_amax` for f(x) in float32.

    Raises:
      TypeError, ValueError: as for `cast_transpose_amax`; an unknown activation.

    Example:
      >>> x = jnp.array([[0.0, 96.0]])
      >>> q, _, amax = activation_cast_transpose_amax(x, jnp.float32(2.0), jnp.float8_e4m3fn, activation="gelu")
      >>> q.tolist(), float(amax)
      ([[0.0, 192.0]], 96.0)
    """
    (found,) = _run("activation", activation, [x], [scale], dtype, None, backend)
    return found.q, found.q_t, found.amax


def activation_grad_cast_transpose_amax(
    grad: Float[Array, "M N"],
    x: Float[Array, "M N"],
    scale: Float[Array, ""],
    dtype: Any,
    *,
    activation: str,
    backend: str = "auto",
) -> tuple[Float[Array, "M N"], Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """dx = grad f'(x) in x's dtype, and its cast, transpose and amax, in one read of both.

    Args:
      grad: [M, N], the gradient of f(x).
      x, scale, dtype, activation, backend: as for `activation_cast_transpose_amax`; the scale is that of dx.

    Returns:
      (dx [M, N], q [M, N], q.T [N, M], amax float32[]); q and amax are computed from dx in float32.

    Raises:
      TypeError, ValueError: as for `activation_cast_transpose_amax`.

    Example:
      >>> one = jnp.ones((1, 2))
      >>> dx, q, _, _ = activation_grad_cast_transpose_amax(
      ...     one, 0 * one, jnp.float32(2.0), jnp.float8_e5m2, activation="silu")
      >>> dx.tolist(), q.tolist()
      ([[0.5, 0.5]], [[1.0, 1.0]])
    """
    (found,) = _run("activation_grad", activation, [grad, x], [scale], dtype, jnp.asarray(x).dtype, backend)
    return found.wide, found.q, found.q_t, found.amax


def silu_gated_cast_transpose_amax(
    a: Float[Array, "M N"], b: Float[Array, "M N"], scale: Float[Array, ""], dtype: Any, *, backend: str = "auto"
) -> tuple[Float[Array, "M N"], Float[Array, "N M"], Float[Array, ""]]:
    """fp8(clip(silu(a) b * scale)), its transpose, and max |silu(a) b|, in one read of a and b.

    Args:
      a, b: [M, N] each, float32, bfloat16 or float16.
      scale, dtype, backend: as for `activation_cast_transpose_amax`.

    Returns:
      (q [M, N], q.T [N, M], amax float32[]).

    Raises:
      TypeError, ValueError: as for `cast_transpose_amax`.

    Example:
      >>> q, _, _ = silu_gated_cast_transpose_amax(
      ...     jnp.array([[96.0]]), jnp.array([[2.0]]), jnp.float32(1.0), jnp.float8_e4m3fn)
      >>> q.tolist()
      [[192.0]]
    """
    (found,) = _run("silu_gated", None, [a, b], [scale], dtype, None, backend)
    return found.q, found.q_t, found.amax


def silu_gated_grad_cast_transpose_amax(
    grad: Float[Array, "M N"],
    a: Float[Array, "M N"],
    b: Float[Array, "M N"],
    scales: tuple[Float[Array, ""], Float[Array, ""]],
    dtype: Any,
    *,
    backend: str = "auto",
) -> tuple[tuple[Array, Array, Array, Array], tuple[Array, Array, Array, Array]]:
    """The gradients of a and b of silu(a) b, and their casts, transposes and amaxes, in one read of all three.

    Args:
      grad: [M, N], the gradient of silu(a) b.
      a, b, dtype, backend: as for `silu_gated_cast_transpose_amax`.
      scales: float32[] each, for the gradients of a and b.

    Returns:
      (da, q, q.T, amax) and (db, q, q.T, amax); da and db in the dtype of a.

    Raises:
      TypeError, ValueError: as for `cast_transpose_amax`.

    Example:
      >>> one = jnp.ones((1, 1))
      >>> (da, *_), (db, *_) = silu_gated_grad_cast_transpose_amax(
      ...     one, 0 * one, 5 * one, (jnp.float32(1.0), jnp.float32(1.0)), jnp.float8_e5m2)
      >>> da.tolist(), db.tolist()
      ([[2.5]], [[0.0]])
    """
    both = _run("silu_gated_grad", None, [grad, a, b], list(scales), dtype, jnp.asarray(a).dtype, backend)
    first, second = [(value.wide, value.q, value.q_t, value.amax) for value in both]
    return first, second  # pyright: ignore[reportReturnType]


def _run(
    what: str, activation: str | None, arrays: Any, scales: Any, dtype: Any, wide_dtype: Any, backend: str
) -> list[Any]:
    arrays, scales = [jnp.asarray(x) for x in arrays], [jnp.asarray(scale) for scale in scales]
    if activation is None:
        compute = reference.silu_gated_grad if what == "silu_gated_grad" else reference.silu_gated
        name = f"{what}_cast_transpose_amax"
    else:
        check_activation(activation)
        compute = ACTIVATIONS[activation][what == "activation_grad"]
        name = f"{compute.__name__}_cast_transpose_amax"
    passes.check(name, arrays, scales, dtype)
    unmet = UNMET.get(activation or "")
    plan = passes.Pass(name, compute, len(arrays), len(scales), jnp.dtype(dtype), wide_dtype, 1, unmet)
    return passes.run(plan, arrays, scales, backend)


def check_activation(activation: str) -> None:
    """Raises a ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")
