"""Refuses second derivatives and forward mode of fp8 matmuls: a cast to fp8 has the derivative zero.

The first derivative has its own rule (three GEMMs in fp8), which ignores the derivative of the casts. A derivative of
this rule would differentiate the casts themselves, and the result would be exact zeros. So the tensors that a rule
casts pass through `once`, which raises an error if it is differentiated. The rule is for reverse mode only;
`in_reverse` raises an error under jax.jvp and jax.jacfwd.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jaxtyping import Array, PyTree

from jaxmp._src.fp8 import remat

_WITHOUT_FP8 = (
    "Compute that term without fp8: put `with jaxmp.fp8.autocast(enabled=False)` around the model's call in it; the "
    "layers then run in their inputs' dtype."
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


class Rule(Protocol):
    """A function of tensors that are cast, and of other arguments, with its own derivative. Hashable."""

    def value(self, tensors: Any, others: Any) -> Array:
        """The result where nothing is differentiated."""
        ...

    def forward(self, tensors: Any, others: Any) -> tuple[Array, PyTree]:
        """The result, and the arrays that `backward` needs."""
        ...

    def backward(self, kept: PyTree, grad: Array) -> tuple[PyTree, PyTree]:
        """The gradients of the tensors and of the others; None: no gradient."""
        ...


def by_rule(rule: Rule, tensors: Any, others: Any) -> Array:
    """The value of `rule`, differentiated by it: in reverse, and once."""
    return in_reverse(_run)(rule, tensors, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(rule: Rule, tensors: Any, others: Any) -> Array:
    return rule.value(tensors, others)


def _forward(rule: Rule, tensors: Any, others: Any) -> tuple[Array, PyTree]:
    out, kept = rule.forward(tuple(once(t) for t in tensors), others)
    return out, remat.packed(kept)


def _backward(rule: Rule, kept: PyTree, grad: Array) -> tuple[PyTree, PyTree]:
    return rule.backward(remat.unpacked(kept), once(grad))


_run.defvjp(_forward, _backward)
