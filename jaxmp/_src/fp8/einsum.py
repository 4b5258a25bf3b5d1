"""einsum of two operands as one `dot_general`: attention's projections and experts use einsum."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.fp8.matmul import Scales, dot_general

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum_by(dot_general: Callable[..., Array], subscripts: str, lhs: Array, rhs: Array) -> Float[Array, "..."]:
    """`jnp.einsum(subscripts, lhs, rhs)` by a `dot_general(lhs, rhs, dimension_numbers)`.

    The equation is explicit; each label comes once in an operand, and is in the result or in both operands. "..."
    stands for leading batch axes of both operands or of one. Raises a ValueError for other equations.
    """
    lhs_labels, rhs_labels, result = _parse(subscripts, lhs.ndim, rhs.ndim)
    shared = [name for name in lhs_labels if name in rhs_labels]
    batch = [name for name in shared if name in result]
    contract = [name for name in shared if name not in result]

    def positions(labels: str, names: list[str]) -> tuple[int, ...]:
        return tuple(labels.index(name) for name in names)

    out = dot_general(
        lhs,
        rhs,
        (
            (positions(lhs_labels, contract), positions(rhs_labels, contract)),
            (positions(lhs_labels, batch), positions(rhs_labels, batch)),
        ),
    )
    order = batch + [x for x in lhs_labels if x not in shared] + [x for x in rhs_labels if x not in shared]
    return jnp.transpose(out, [order.index(name) for name in result])


def why_not_one_gemm(subscripts: str, lhs_ndim: int, rhs_ndim: int) -> str | None:
    """Why an equation for operands of so many axes is no single GEMM; None if it is one.

    Example:
      >>> why_not_one_gemm("bk,k->b", 2, 1)
      >>> why_not_one_gemm("bk,k->bk", 2, 1)
      "an fp8 einsum is one GEMM: it sums over no axis; got 'bk,k->bk'"
    """
    try:
        lhs, rhs, result = _parse(subscripts, lhs_ndim, rhs_ndim)
    except ValueError as e:
        return str(e)
    return None if set(lhs) & set(rhs) - set(result) else str(_error(subscripts, "it sums over no axis"))


def _parse(subscripts: str, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """Labels of lhs, rhs and the result, one letter per axis."""
    text = subscripts.replace(" ", "")
    operands, arrow, result = text.partition("->")
    names = operands.split(",")
    if not arrow or len(names) != 2:
        raise _error(subscripts, "it needs two operands and '->'")
    unused = [x for x in _LETTERS if x not in text]
    widths = [ndim - len(name.replace("...", "")) for name, ndim in zip(names, (lhs_ndim, rhs_ndim), strict=True)]
    if any(width < 0 or (width and "..." not in name) for name, width in zip(names, widths, strict=True)):
        raise _error(subscripts, f"it does not fit operands of {lhs_ndim} and {rhs_ndim} axes")
    stars = "".join(unused[: max(widths)])
    lhs, rhs = (name.replace("...", stars[len(stars) - width :]) for name, width in zip(names, widths, strict=True))
    result = result.replace("...", stars)
    for labels in (lhs, rhs, result):
        if len(set(labels)) != len(labels):
            raise _error(subscripts, "a label may come once in each operand")
    for name in lhs + rhs:
        if name not in result and not (name in lhs and name in rhs):
            raise _error(subscripts, f"the label {name!r} is in one operand only and not in the result: sum it first")
    if unknown := set(result) - set(lhs + rhs):
        raise _error(subscripts, f"the result has labels of no operand: {sorted(unknown)}")
    return lhs, rhs, result


def _error(subscripts: str, reason: Any) -> ValueError:
    return ValueError(f"an fp8 einsum is one GEMM: {reason}; got {subscripts!r}")


def einsum(
    subscripts: str,
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    *,
    recipe: Any,
    scales: Scales | None = None,
    preferred_element_type: Any = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands as one fp8 `dot_general`.

    Args:
      subscripts: an explicit equation: each label once per operand, and in the result or in both operands. "..."
        stands for leading batch axes.
      lhs, rhs, recipe, scales, preferred_element_type: as for `dot_general`.

    Returns:
      The result, axes in the order of the equation.

    Raises:
      ValueError: an equation that is not one GEMM.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> x, w = jnp.ones((2, 16, 16)), jnp.ones((16, 4, 16))
      >>> einsum("btd,dhk->bthk", x, w, recipe=jaxmp.fp8.CurrentScaling()).shape
      (2, 16, 4, 16)
    """

    dot = functools.partial(dot_general, recipe=recipe, scales=scales, preferred_element_type=preferred_element_type)
    return einsum_by(dot, subscripts, lhs, rhs)
