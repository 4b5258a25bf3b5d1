"""`when(taken, move, *old)`: `move(*old)` if a step is taken, else `old`. The only way in which a step is skipped."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from pallas_kernels.backend import as_varying, varying_axes
from pallas_kernels.by_platform import by_platform


def when(
    taken: Bool[Array, ""],
    move: Callable[..., Any],
    *old: Any,
    choose: Callable[..., Any] | None = None,
    branches: bool = True,
) -> Any:
    """`move(*old)` if `taken`, else `old`: everything that a skipped step must leave as it was.

    In a program for a CPU it is a branch: a skip computes and copies nothing, and every loop writes in place. For a GPU
    or TPU it is a select: there a branch reads 16-bit params once more (32.0 for 30.0 bytes per param on H100), gathers
    sharded ones, and waits for the host. Where `taken` is known, it is a Python `if`.

    Args:
      taken: bool[].
      move: `(*old) -> new`, a tree like each of `old`; traced once.
      *old: trees of arrays. A Python float stands for an array of this number, of the type that `move` returns; where
        the step is known to be skipped, nobody knows this type, and the float itself comes back.
      choose: `(taken, new, old) -> trees`, for the select, where it can do with fewer reads than one `jnp.where` for
        each array.
      branches: whether a program for a CPU branches; False: it selects, too.

    Returns:
      The trees, in the dtypes of `old`; of one argument the tree itself.
    """
    is_taken = known(taken)
    if is_taken is None:
        new = _traced(taken, move, old, choose or chosen, branches)
    else:
        new = _moved(move, old, old) if is_taken else old
    return new[0] if len(old) == 1 else new


def chosen(taken: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """`new` if `taken`, else `old`, by one select for each array."""
    return jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, old)


def known(flag: Any) -> bool | None:
    """The value of a flag; None while it is traced."""
    try:
        return bool(flag)
    except jax.errors.ConcretizationTypeError:
        return None


def in_dtype_of(new: Any, old: Any) -> Array:
    """`new` in the dtype of `old`, strongly typed."""
    new, dtype = jnp.asarray(new), jnp.asarray(old).dtype
    is_same = new.dtype == dtype and not jax.typeof(new).weak_type  # arrays of PRNG keys have no attribute for it
    return new if is_same else lax.convert_element_type(new, dtype)


def _moved(move: Callable[..., Any], arguments: Sequence[Any], old: Sequence[Any]) -> tuple[Any, ...]:
    """What `move` makes of `given`, in the dtypes of `old`."""
    new = move(*arguments)
    typed = lambda n, o: jnp.asarray(n) if isinstance(o, float) else in_dtype_of(n, o)  # noqa: E731
    return jax.tree.map(typed, (new,) if len(old) == 1 else tuple(new), tuple(old))


def _traced(
    taken: Array, move: Callable[..., Any], old: tuple[Any, ...], choose: Callable[..., Any], branches: bool
) -> Any:
    types: list[Any] = []  # (type, axes over which it varies in `jax.shard_map`) of each result

    def typed(taken: Array, *arrays: Any) -> Any:
        leaves, treedef = jax.tree.flatten(_moved(move, arrays, old))
        axes = [
            varying_axes(n) | varying_axes(o) | varying_axes(taken)
            for n, o in zip(leaves, jax.tree.leaves(arrays), strict=True)
        ]
        types[:] = [(jax.typeof(n), own) for n, own in zip(leaves, axes, strict=True)]
        return treedef.unflatten([as_varying(n, own) for n, own in zip(leaves, axes, strict=True)])

    def stay(*arrays: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arrays)
        return treedef.unflatten([_typed(o, *of_result) for o, of_result in zip(leaves, types, strict=True)])

    def branch(f: Callable[..., Any], taken: Array, *arrays: Any) -> Any:
        return lax.cond(taken, lambda *arrays: f(taken, *arrays), stay, *arrays)

    def select(f: Callable[..., Any], taken: Array, *arrays: Any) -> Any:
        return choose(taken, f(taken, *arrays), arrays)

    name = "cpu" if branches else "branch"
    ways: dict[str, Any] = {name: branch, "default": select}
    return by_platform(typed, taken, *old, derivative=name, **ways)


def _typed(x: Any, kind: Any, axes: frozenset[str]) -> Array:
    x = jnp.asarray(x)
    if x.shape != kind.shape or x.dtype != kind.dtype:
        is_explicit = jax.sharding.AxisType.Explicit in kind.sharding.mesh.axis_types
        x = lax.full(kind.shape, x, kind.dtype, sharding=kind.sharding if is_explicit else None)
    return as_varying(x, axes)
