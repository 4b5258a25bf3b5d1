"""The sum of squares of an array, and whether all of it is finite: on a GPU two parts of one sum.

A step needs both for every gradient: the norm for clipping, the flag for the decision to skip. XLA for GPU computes two
sums of one array in one pass over memory. But on a large array, each sum needs a separate launch at the end, which adds
the results of the blocks. One sum of complex numbers needs a single launch for both. Different code asks for the norm
and for the flag, each by its own function below. Both functions write the same sum, and XLA computes equal sums once.
If only one of them is needed, the other costs no time, because the pass is limited by memory.

On CPU and TPU this is no faster, so XLA gets two ordinary sums there. XLA for CPU needs a loop of its own for the flags
of each array, and one to join them. The sum of squares is there for the norm, or costs less than that: if it is finite,
so are all numbers, and only if it is not, the program looks at each.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Complex64, Float

from pallas_kernels import write_order


def sum_of_squares(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The sum of the squares of a float32 array, in float32."""
    return jnp.real(_both(x)) if _is_one_sum(x) else jnp.sum(x * x)


def any_nonfinite(arrays: Sequence[Array], again: Callable[[], Sequence[Array]] | None = None) -> Bool[Array, ""]:
    """Whether one of several float or complex arrays holds inf or NaN.

    Args:
      arrays: of any shapes.
      again: makes the same arrays, for the branch that looks at each number. What a branch takes is written to memory
        first, so it should take what is there already.
    """
    if not write_order.pays(arrays) or any(jnp.result_type(x) != jnp.float32 for x in arrays):
        return _any(map(_has_nonfinite, arrays))
    arrays = lax.stop_gradient(arrays)
    squares = sum((sum_of_squares(x) for x in arrays), start=jnp.zeros((), jnp.float32))
    look = lambda: _any(map(_has_nonfinite, lax.stop_gradient(again() if again else arrays)))  # noqa: E731
    return lax.cond(jnp.isfinite(squares), lambda: jnp.zeros((), bool), look)


def _any(found: Iterable[Bool[Array, ""]]) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_or, found, jnp.zeros((), bool))


def _has_nonfinite(x: Array) -> Bool[Array, ""]:
    return jnp.imag(_both(x)) > 0 if _is_one_sum(x) else jnp.any(~jnp.isfinite(x))


def _is_one_sum(x: Array) -> bool:
    return jnp.result_type(x) == jnp.float32 and write_order.is_for_gpu(x)


def _both(x: Float[Array, "..."]) -> Complex64[Array, ""]:
    """(sum of squares, number of elements that are not finite) as one complex number."""
    return jnp.sum(lax.complex(x * x, (~jnp.isfinite(x)).astype(jnp.float32)))
