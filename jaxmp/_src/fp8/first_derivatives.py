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
    "Compute that term without fp8: put `with jaxmp.fp8.autocast(enabled=False)` around the model's call in it; the "
    "layers then run in their inputs' dtype. In place of jaxmp.fp8.dot_general call jax.lax.dot_general there."
)


@jax.custom_jvp
def once(x: Array) -> Array:
    """`x`; an error where a derivative of a derivative is taken."""
    return x


@once.defjvp
def _refuse(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    del primals, tangents
    raise NotImplementedError(
        "fp8 matmuls have first derivatives by reverse mode, and no second ones: casts to fp8 have a derivative of "
        "zero. Got a derivative of a gradient (a gradient penalty, a Hessian or its product with a vector) through an "
        f"fp8 layer. {_WITHOUT_FP8}"
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
                "fp8 matmuls are differentiated by reverse mode (jax.grad, jax.vjp, jax.jacrev) only; got forward mode "
                f"(jax.jvp, jax.jacfwd) through an fp8 layer. Use reverse mode. {_WITHOUT_FP8}"
            ) from e

    return call
