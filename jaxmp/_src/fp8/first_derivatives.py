"""Refuses second derivatives and forward mode of fp8 matmuls: a cast to fp8 has the derivative zero.

The first derivative has its own rule (three GEMMs in fp8), which ignores the derivative of the casts. A derivative of
this rule would differentiate the casts themselves, and the result would be exact zeros. So the tensors that a rule
casts pass through `once`, which raises an error if it is differentiated. The rule is for reverse mode only;
`in_reverse` raises an error under jax.jvp and jax.jacfwd.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

_WITHOUT_FP8 = (
    "Compute it without fp8: `with jaxmp.fp8.autocast(enabled=False)` around the model, or jax.lax.dot_general."
)


@jax.custom_jvp
def once(x: Array) -> Array:
    """`x`; an error where a derivative of a derivative is taken."""
    return x


@once.defjvp
def _refuse(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    del primals, tangents  # casts to fp8 have a derivative of zero
    raise NotImplementedError(
        f"fp8 matmuls have one derivative, by reverse mode; got a derivative of a gradient. {_WITHOUT_FP8}"
    )


def in_reverse(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The `jax.custom_vjp` function `rule` with an error of fp8's own where forward mode meets it."""

    @functools.wraps(rule)
    def call(*args: Any) -> Any:
        try:
            return rule(*args)
        except TypeError as e:
            if "forward-mode" not in str(e):
                raise
            raise NotImplementedError(
                f"fp8 matmuls have one derivative, by reverse mode; got forward mode (jax.jvp, jax.jacfwd). "
                f"{_WITHOUT_FP8}"
            ) from e

    return call
