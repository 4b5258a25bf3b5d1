"""The sum of squares of an array, and whether all of it is finite: on a GPU two parts of one sum.

A step needs both of every gradient: the norm clips, the flag decides. XLA for GPU makes one pass over memory of two
sums of one array, but on a large array each ends in a launch of its own, which adds what the blocks have found. As one
sum of complex numbers both end in one launch. The norm and the flag are asked for in different places, each by its own
function below; these write down the same sum, and XLA computes equal sums once. Who asks for one of them pays nothing
for the other: the pass is bound by memory.

XLA for CPU and TPU gains nothing by it, and gets the two as they are.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Complex64, Float

from pallas_kernels import write_order


def sum_of_squares(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The sum of the squares of a float32 array, in float32."""
    return jnp.real(_both(x)) if _is_one_sum(x) else jnp.sum(x * x)


def any_nonfinite(x: Array) -> Bool[Array, ""]:
    """Whether a float or complex array holds inf or NaN."""
    return jnp.imag(_both(x)) > 0 if _is_one_sum(x) else jnp.any(~jnp.isfinite(x))


def _is_one_sum(x: Array) -> bool:
    return jnp.result_type(x) == jnp.float32 and write_order.is_for_gpu(x)


def _both(x: Float[Array, "..."]) -> Complex64[Array, ""]:
    """(sum of squares, number of elements that are not finite) as one complex number."""
    return jnp.sum(lax.complex(x * x, (~jnp.isfinite(x)).astype(jnp.float32)))
