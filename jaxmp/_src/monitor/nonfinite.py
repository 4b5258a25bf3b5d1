"""Finds the first inf or NaN of a tree, by path and index, outside of a step.

Each part of a leaf is reduced to a number on its own device, without a collective, and only the first leaf that is bad
is read. So replicas that should be equal are looked at one by one, and one device that computes wrong numbers is found.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp._src.devices import host_memory
from jaxmp._src.programs import array_functions

_SMALL = 1 << 12  # elements


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first value of a tree that is not finite.

    Attributes:
      path: of the first leaf in tree order that holds inf or NaN.
      index: of its first such element, in row-major order.
      value: that element.
      count: how many elements of the leaf are inf or NaN.
      size: how many elements it has.

    Example:
      >>> print(NonFinite("dense/kernel", (0, 2), float("inf"), 1, 6))
      dense/kernel[0, 2] is inf; 1 of 6 values are not finite
    """

    path: str
    index: tuple[int, ...]
    value: complex | float
    count: int
    size: int

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.path}{at} is {self.value}; {self.count} of {self.size} values are not finite"


def first_nonfinite(tree: Any) -> NonFinite | None:
    """The path and the index of the first inf or NaN in `tree`; None if there is none.

    A function of the host: call it on the results of a step (gradients, params, a batch), not inside `jax.jit`.

    Args:
      tree: pytree of arrays of any float dtype, fp8 included, on any devices; nnx modules too. Integers, bools and
        keys are ignored. If other processes hold parts of an array, only this process's part is read.

    Returns:
      A `NonFinite`, with `path`, `index`, `value`, `count` and `size`, or None.

    Raises:
      TypeError: a leaf is traced, so it has no values yet; names its path.
      ValueError: a leaf was donated or deleted; names its path.

    Example:
      >>> first_nonfinite({"a": jnp.ones(3), "b": {"c": jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]])}})
      NonFinite(path='b/c', index=(1, 0), value=inf, count=2, size=4)
      >>> first_nonfinite({"a": jnp.ones(3)}) is None
      True
    """
    bad_leaves: list[tuple[str, Any, list[tuple[Any, tuple[int, ...], Any]]]] = []
    leaves = array_functions.leaves_of(tree)
    for path, x in zip(leaves.paths, leaves.values, strict=True):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            shape = f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
            raise TypeError(f"leaves must have values; got a traced {shape} at {path}. In jit use jaxmp.all_finite.")
        x = np.asarray(x) if isinstance(x, (float, complex)) else x
        if not (array_functions.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)):
            continue
        if isinstance(x, jax.Array) and x.is_deleted():
            # after a skipped step, what it returned is unchanged, bit for bit
            raise ValueError(
                f"leaves must be live; got a donated or deleted array at {path}. Pass results of the step."
            )
        parts = [(x, (0,) * np.ndim(x))]  # with the index of the first element of each
        if isinstance(x, jax.Array):
            parts = [(s.data, tuple(cut.start or 0 for cut in s.index)) for s in x.addressable_shards]
        if not isinstance(x, jax.Array) or host_memory.is_on_host(x):
            parts = [(np.asarray(part), at) for part, at in parts]
        bad_leaves.append((path, x, [(part, at, severity(part)) for part, at in parts]))
    severities = jax.device_get([[severity for *_, severity in parts] for *_, parts in bad_leaves])
    for (path, x, parts), severity_of in zip(bad_leaves, severities, strict=True):
        bad = {at: part for (part, at, _), is_bad in zip(parts, severity_of, strict=True) if is_bad}  # once of replicas
        if bad:
            each = [first_of(path, part, start=at) for at, part in bad.items()]
            first = min(each, key=lambda one: one.index)
            return dataclasses.replace(first, count=sum(one.count for one in each), size=int(np.size(x)))
    return None


def first_of(path: str, x: Any, bad: Any = None, start: tuple[int, ...] | None = None) -> NonFinite:
    """The first element of `x` that is not finite, or that `bad` marks; `start` is the index of its first element."""
    values = as_wide(np.asarray(x))
    bad = ~np.isfinite(values) if bad is None else np.asarray(bad)
    index = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.ndim else ()
    moved = tuple(int(i) + at for i, at in zip(index, start or (0,) * bad.ndim, strict=True))
    return NonFinite(path, moved, values[index].item(), int(bad.sum()), bad.size)


def severity(x: Any) -> Any:
    """2 if a float array holds NaN, 1 if it holds inf, else 0; for a large array on a device, an array on it."""
    if not (jnp.issubdtype(x.dtype, jnp.inexact) and x.size):
        return 0
    if isinstance(x, jax.Array) and x.size > _SMALL:
        return _severity(x)
    wide = as_wide(np.asarray(x))  # a copy takes less time than compiling a program for the shape
    return 2 if np.isnan(wide).any() else int(not np.isfinite(wide).all())


@jax.jit
def _severity(x: Any) -> Any:
    wide = as_wide(x)
    return jnp.where(jnp.any(jnp.isnan(wide)), 2, jnp.where(jnp.all(jnp.isfinite(wide)), 0, 1))


def as_wide(x: Any) -> Any:
    """`x` in float32, if its dtype is smaller: not every small float has an isfinite."""
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        return x.astype(jnp.float32) if jnp.dtype(x.dtype).itemsize < 4 else x
