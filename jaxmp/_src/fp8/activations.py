"""Activations in front of an fp8 matmul: computed in float32, and rounded once, by its cast.

"gelu"         x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2      jax.nn.gelu's default
"gelu_exact"   x (1 + erf(x / sqrt(2))) / 2                         by XLA everywhere: Mosaic has no erf
"silu"         x / (1 + exp(-x))
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp._src.fp8 import first_derivatives, fused_casts
from jaxmp._src.numerics import casting

_SQRT_2_OVER_PI = np.float32(np.sqrt(2 / np.pi))
_CUBIC = np.float32(0.044715)
_SQRT_HALF = np.float32(np.sqrt(0.5))
_INV_SQRT_2_PI = np.float32(1 / np.sqrt(2 * np.pi))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, the default of `jax.nn.gelu`."""
    return np.float32(0.5) * x * (np.float32(1) + jnp.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * (x * x * x))))


def gelu_grad(grad: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`grad` times the derivative of `gelu` at x."""
    t = jnp.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * (x * x * x)))
    slope = _SQRT_2_OVER_PI * (np.float32(1) + np.float32(3) * _CUBIC * (x * x))
    half = np.float32(0.5)
    return grad * (half * (np.float32(1) + t) + half * x * ((np.float32(1) - t * t) * slope))


def gelu_exact(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x (1 + erf(x / sqrt(2))) / 2, as `jax.nn.gelu(approximate=False)`."""
    return np.float32(0.5) * x * (np.float32(1) + lax.erf(x * _SQRT_HALF))


def gelu_exact_grad(grad: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`grad` times the derivative of `gelu_exact` at x."""
    cdf = np.float32(0.5) * (np.float32(1) + lax.erf(x * _SQRT_HALF))
    return grad * (cdf + x * (_INV_SQRT_2_PI * jnp.exp(np.float32(-0.5) * (x * x))))


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x sigmoid(x), as `jax.nn.silu`."""
    return x * fused_casts.sigmoid(x)


def silu_grad(grad: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`grad` times the derivative of `silu` at x."""
    s = fused_casts.sigmoid(x)
    return grad * (s + x * s * (np.float32(1) - s))


_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # the function, and its gradient
    "gelu": (gelu, gelu_grad),
    "gelu_exact": (gelu_exact, gelu_exact_grad),
    "silu": (silu, silu_grad),
}


def check(activation: str) -> None:
    """Raises a ValueError for an unknown activation."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, _ACTIVATIONS))}; got {activation!r}")


def activated(x: Array, activation: str, *, is_cast_next: bool) -> tuple[Array, fused_casts.FusedCast | None]:
    """(f(x), what a kernel computes it from): in float32 where the cast comes next, else in the dtype of x."""
    y = first_derivatives.in_reverse(_activation)(x, activation)
    if not is_cast_next:
        return y.astype(x.dtype), None
    reads_x = x.dtype != jnp.float64 and activation != "gelu_exact"
    return y, fused_casts.FusedCast((x,), (), _ACTIVATIONS[activation][0], y.dtype) if reads_x else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))  # so that x alone is kept, and in its own dtype
def _activation(x: Array, activation: str) -> Array:
    return _ACTIVATIONS[activation][0](casting.widened(x))


def _activation_backward(activation: str, x: Array, g: Array) -> tuple[Array]:
    with jax.named_scope(f"jaxmp.fp8_{activation}_grad"):
        return (_ACTIVATIONS[activation][1](casting.widened(g), casting.widened(x)).astype(x.dtype),)


_activation.defvjp(lambda x, activation: (_activation(x, activation), x), _activation_backward)
