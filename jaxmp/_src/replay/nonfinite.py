"""Finds the first inf or NaN of a tree, by path and index, outside of a step.

`jaxmp.all_finite` answers inside a step whether all values are finite, with a flag on the device. If they are not, this
file finds the place. It first reduces each leaf to a flag on the devices of the leaf, without a collective, and reads
only the first leaf with a true flag further. So it reads replicas that should be equal one by one, and finds a single
device that computes wrong numbers.
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
    flags: list[tuple[str, Any, list[tuple[Any, tuple[int, ...], Any]]]] = []
    leaves = array_functions.leaves_of(tree)
    for path, x in zip(leaves.paths, leaves.values, strict=True):
        if isinstance(x, Tracer):
            raise TypeError(
                f"first_nonfinite reads values, which a traced array does not have; got {jax.typeof(x)} at {path}. "
                f"Inside jit call jaxmp.all_finite(tree), and call first_nonfinite on the results of the step."
            )
        if isinstance(x, (float, complex)):
            x = np.asarray(x)
        if array_functions.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact):
            check_alive(path, x)
            flags.append((path, x, [(part, at, _has_nonfinite(part)) for part, at in _parts(x)]))
    up = jax.device_get([[flag for *_, flag in parts] for *_, parts in flags])
    for (path, x, parts), raised in zip(flags, up, strict=True):
        found = {}  # by place: replicas have the same
        for (part, at, _), bad in zip(parts, raised, strict=True):
            if bad and at not in found:
                found[at] = _describe(part, at)
        if found:
            index, value, _ = min(found.values(), key=lambda f: f[0])
            return NonFinite(path, index, value, sum(count for *_, count in found.values()), int(np.size(x)))
    return None


def check_alive(path: str, x: Any) -> None:
    """Raises a ValueError if the array at `path` was donated."""
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ValueError(
            f"values are read from live arrays; got one at {path} that was donated or deleted. Pass what the step "
            f"returned: after a skipped step the params are unchanged, bit for bit. For a step that was taken, keep "
            f"the old params (without donation, or as a copy)."
        )


def _parts(x: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """The parts of an array on each device, with the index of their first element; an array on the host is one part."""
    if not isinstance(x, jax.Array):
        return [(np.asarray(x), (0,) * np.ndim(x))]
    parts = [(s.data, tuple(cut.start or 0 for cut in s.index)) for s in x.addressable_shards]
    return [(np.asarray(part), at) for part, at in parts] if host_memory.is_on_host(x) else parts


@jax.jit
def _flag(x: Any) -> Any:
    return jnp.any(~jnp.isfinite(as_wide(x)))


@jax.jit
def _rows(x: Any) -> Any:
    """How many values are not finite under each index of the first axis."""
    return jnp.sum(~jnp.isfinite(as_wide(x)), axis=tuple(range(1, x.ndim)), dtype=jnp.int32)


def as_wide(x: Any) -> Any:
    """`x` in float32, if its dtype is smaller."""
    if jnp.dtype(x.dtype).itemsize >= 4:
        return x
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        return x.astype(jnp.float32)  # not every small float has an isfinite


def on_host_if_small(x: Any) -> Any:
    """`x` as an array of numpy if it is small: a copy takes less time than compiling a program for its shape."""
    return np.asarray(x) if x.size <= _SMALL else x


def _has_nonfinite(x: Any) -> Any:
    if not x.size:
        return False
    x = on_host_if_small(x)
    return bool((~np.isfinite(as_wide(x))).any()) if isinstance(x, np.ndarray) else _flag(x)


def _describe(x: Any, at: tuple[int, ...]) -> tuple[tuple[int, ...], complex | float, int]:
    """(index of the first value that is not finite, the value, how many there are) of the part on one device."""
    count, row = 1, ()
    x = on_host_if_small(x)
    if isinstance(x, jax.Array) and x.ndim:  # large: only one row is read
        rows = np.asarray(_rows(x))
        count, first = int(rows.sum(dtype=np.int64)), int(np.argmax(rows > 0))
        row, x = (first,), x[first]
    values = as_wide(np.asarray(x))
    bad = ~np.isfinite(values)
    inner = np.unravel_index(int(np.argmax(bad)), values.shape) if values.ndim else ()
    index = tuple(int(i) + start for i, start in zip((*row, *inner), at, strict=True))
    return index, values[inner].item(), count if row else int(bad.sum())
