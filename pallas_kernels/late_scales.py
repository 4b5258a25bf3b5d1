"""Casts arrays to fp8 with scales that are known late, and seldom differ from guesses that are known early.

    q = fp8(clip(x * guess))        where x is made
    q = fp8(clip(x * scale))        again and in place, but only if a scale differs from its guess

A cast that waits for its scale waits for the amax that the scale is made from. So XLA cannot find this amax and cast in
one pass over memory; with guesses it can. They change the time, and no bit of the result.

The second cast is a kernel with a flag (`multi_tensor`): if the flag is false, no array is read or written. (A branch
of XLA for GPU copies the arrays.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import backend as backends, meshes, multi_tensor, reference
from pallas_kernels.cast import narrowed
from pallas_kernels.leaves import Leaf, Values


def cast(
    arrays: Sequence[Float[Array, "..."]],
    scales: Sequence[Float[Array, ""]],
    guesses: Sequence[Float[Array, ""]],
    dtype: Any,
    *,
    backend: str = "auto",
) -> list[Array]:
    """fp8(clip(x * scale)) of each array with its scale, rounded to nearest even; NaN stays NaN.

    Args:
      arrays: float32.
      scales: float32[] for each array.
      guesses: float32[] for each array, as it was before. The result does not depend on it.
      dtype: an fp8 dtype.
      backend: see `pallas_kernels.backend`; "xla" casts once, with `scales`.

    Returns:
      The arrays in `dtype`.

    Raises:
      ValueError: a backend that cannot run.

    Example:
      >>> x, scale, guess = jnp.array([3.0, 400.0]), jnp.float32(2.0), jnp.float32(1.0)
      >>> [q.tolist() for q in cast([x], [scale], [guess], jnp.float8_e4m3fn, backend="xla")]
      [[6.0, 448.0]]
    """

    def kernel(arrays: list[Array], scales: list[Array], guesses: list[Array], interpret: Any) -> list[Array]:
        # Without the barrier, XLA computes guesses and scales in one launch, and the first cast waits for both.
        guesses = lax.optimization_barrier(guesses)
        made = plain(arrays, guesses)
        filled = [i for i, x in enumerate(arrays) if x.size]
        numbers: Any = [(scale,) for scale in scales]
        with jax.named_scope("cast_late"):  # custom_partitioning loses the name of the kernel
            again = meshes.apply(
                functools.partial(_cast, jnp.dtype(dtype).name),
                [Leaf(reads=(arrays[i],), writes=(made[i],), numbers=numbers[i]) for i in filled],
                [],
                name="cast_late",
                when=jnp.any(jnp.stack(scales) != jnp.stack(guesses)),
                levels=multi_tensor.READ_LEVELS,  # large blocks: in most steps they only start
                interpret=interpret,
            )
        for i, (q,) in zip(filled, again.leaves, strict=True):
            made[i] = q
        return made

    def plain(arrays: list[Array], scales: list[Array], guesses: Any = None) -> list[Array]:
        del guesses
        return [reference.saturating_cast(x * scale, dtype) for x, scale in zip(arrays, scales, strict=True)]

    unmet = None if any(x.size for x in arrays) else "there are no elements"
    if any(map(backends.varying_axes, arrays)):
        unmet = (
            "arrays that vary over axes of a checked jax.shard_map cannot be written in place (pass check_vma=False)"
        )
    return backends.run(backend, kernel, plain, list(arrays), list(scales), list(guesses), unmet=unmet)


def _cast(name: str, values: Values) -> tuple[list[Array], list[Array]]:
    return [narrowed(name, values.reads[0] * values.numbers[0])], []
