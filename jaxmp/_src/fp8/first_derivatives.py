"""Second derivatives of fp8 matmuls are refused: a cast to fp8 is a staircase, whose derivative is zero.

The first derivative has a rule of its own (three GEMMs in fp8), which looks through the casts. A derivative of that
rule would meet the casts themselves, and come out as exact zeros. So the tensors that a rule casts go through `once`.
"""

import jax
from jaxtyping import Array


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
        "fp8 layer. Compute that term without fp8: put `with jaxmp.fp8.autocast(enabled=False)` around the model's "
        "call in it; the layers then run in their inputs' dtype."
    )
