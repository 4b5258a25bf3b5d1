"""Products of 16-bit arrays that return float32: because a layer asks for it, or for a gradient that devices sum.

    y = x w           in 16 bits
    dx = g w^T        in 16 bits
    dw = x^T g        of 16-bit arrays; of a weight whose gradient is reduced in float32 it returns float32

so XLA reduces dw over devices in float32, before any rounding. For all other weights dw is rounded as y is, as a model
that is cast by hand does it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS
from jaxmp._src.autocast.values import cast
from jaxmp._src.base import compat
from jaxmp._src.numerics import casting
from pallas_kernels.by_platform import by_platform


def in_float32(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> Any:
    """A product of 16-bit operands that returns float32. Its derivative, too, multiplies 16-bit arrays in bfloat16.

    In float16 a tangent may be too large for 16 bits, as the product itself.
    """
    dtype = next(x.dtype for x in operands if x.dtype in FLOATS)
    low, wide = (params | {"preferred_element_type": d} for d in (dtype, FLOAT32))

    def tangent_of(k: int, operands: Any, tangent: Any) -> Any:
        factors = [*operands[:k], tangent, *operands[k + 1 :]]
        if dtype == jnp.bfloat16:
            return primitive.bind(*factors, **low).astype(FLOAT32)
        if primitive.name != "dot_general":  # jax transposes others for operands of one dtype
            factors = [cast(x, FLOAT32) for x in factors]
        return primitive.bind(*factors, **wide)

    return with_tangents(lambda *xs: _to_float32(functools.partial(primitive.bind, **wide), *xs), tangent_of, operands)


def with_tangents(run: Callable[..., Any], tangent_of: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """`run(*operands)`, whose tangent is the sum of `tangent_of(k, operands, tangent of k)` over its floats."""
    run = jax.custom_jvp(run)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def derivative(primals: Any, tangents: Any) -> Any:
        out = run(*primals)
        pairs = enumerate(zip(primals, tangents, strict=True))
        moving = [(k, t) for k, (x, t) in pairs if x.dtype in FLOATS and not isinstance(t, SymbolicZero)]
        parts = [tangent_of(k, primals, t) for k, t in moving]
        return out, functools.reduce(lax.add, parts) if parts else jnp.zeros_like(out)

    return run(*operands)


def with_float32_gradients(
    primitive: Any, params: dict[str, Any], operands: Sequence[Any], wide: dict[int, Any], result: Any
) -> Any:
    """A product of 16-bit operands, in `result`; the gradients of operands in `wide` are float32.

    `wide` has their float32 arrays by number, which get the gradients, and whose numbers nobody reads; None: it has
    none, and the gradient is rounded after the product.
    """
    dtype, count = operands[0].dtype, len(operands)
    params = params | ({"preferred_element_type": dtype} if "preferred_element_type" in params else {})
    others, in_wide = [i for i, x in wide.items() if x is not None], frozenset(wide)  # rules close over no array
    types = [jax.typeof(x if wide.get(i) is None else wide[i]) for i, x in enumerate(operands)]

    def product(*xs: Any) -> Any:
        if result != FLOAT32:
            return primitive.bind(*xs, **params)
        return _to_float32(functools.partial(primitive.bind, **(params | {"preferred_element_type": FLOAT32})), *xs)

    def gradient(i: int, xs: Any, g: Any) -> Any:
        rest = [x for k, x in enumerate(xs) if k != i]
        named = params | ({"preferred_element_type": FLOAT32} if i in in_wide else {})
        run = lambda g, *rest: compat.transposed(primitive, g, rest, i, types[i], named)  # noqa: E731
        return _to_float32(run, g, *rest) if i in in_wide else run(g, *rest)

    run = jax.custom_vjp(lambda *xs: product(*xs[:count]))

    def forward(*xs: Any) -> Any:
        saved = [x.value for x in xs[:count]]
        return product(*saved), (saved, [() if x.perturbed else None for x in xs])  # both hold no array

    def backward(residuals: Any, g: Any) -> Any:
        saved, moves = residuals
        gets = [i if i < 2 and i not in others else None for i in range(count)] + others
        if isinstance(g, SymbolicZero):
            return (None,) * len(gets)
        g = cast(g, dtype)
        pairs = zip(gets, moves, strict=True)
        return tuple(None if i is None or moved is None else gradient(i, saved, g) for i, moved in pairs)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*operands, *(wide[i] for i in others))


def _to_float32(product: Callable[..., Any], *operands: Any) -> Any:
    """A product of 16-bit operands that returns float32: XLA for CPU has none for some layouts, and fails."""

    def widened(_: Any, *operands: Any) -> Any:
        return product(*(cast(x, FLOAT32) for x in operands))

    return by_platform(product, *operands, cpu=widened, derivative="cpu", maps=True)


@jax.custom_jvp
def with_gradient_to(wide: Any, x: Any) -> Any:
    """16-bit `x` in float32, whose gradient goes to the float32 array `wide`, of which `x` is the rounding."""
    del wide
    return casting.widened(x)


@with_gradient_to.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return with_gradient_to(*primals), tangents[0]
