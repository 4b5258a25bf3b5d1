"""Cut the arguments of a loss into microbatches: which arguments hold the batch, and which rows go together."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree


def split_arguments(
    args: Sequence[Any], others: Sequence[int], accumulate_argnums: int | Sequence[int] | None, k: int
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The arguments but `others`, by position: `(the batch as k microbatches, those that are passed on whole)`.

    With k = 1 nothing is split, and all arguments are passed on whole. The arguments are those of `batch_of`.
    """
    batch = batch_of(args, others, accumulate_argnums)
    whole = {i: x for i, x in enumerate(args) if i not in others and (k == 1 or i not in batch)}
    return ({}, whole) if k == 1 else (split_microbatches(batch, k), whole)


def batch_of(
    args: Sequence[Any], others: Sequence[int], accumulate_argnums: int | Sequence[int] | None
) -> dict[int, Any]:
    """The arguments that hold the batch, by position.

    Args:
      args: all positional arguments.
      others: the positions of those that are differentiated or carried.
      accumulate_argnums: the positions of the batch; None: there is one argument beside the others.
    """
    if accumulate_argnums is None:
        chosen = tuple(i for i in range(len(args)) if i not in others)
    else:
        chosen = resolve_argnums(accumulate_argnums, len(args), "accumulate_argnums")
    return {i: args[i] for i in chosen}


def split_microbatches(tree: PyTree, k: int) -> PyTree:
    """`tree` with a new leading axis [k]: arrays cut along their first axis, PRNG keys split, scalars repeated.

    Microbatch i is the i-th block of n/k rows. If the batch lies on a mesh under jit, microbatch i holds the rows i,
    i + k, i + 2k, ... instead, so that each device has its share of every microbatch. (A block would lie on some
    devices only, and XLA would let all devices compute all of it: with k = 8 on 8 devices, eight times the work.) The
    mean is the same.

    Keys may be typed (`jax.random.key`) or raw (`jax.random.PRNGKey`, uint32[2]), if the batch has not 2 rows.

    Args:
      tree: pytree of arrays [n, ...], keys and scalars.
      k: number of microbatches; divides n.

    Returns:
      The same structure with arrays [k, n/k, ...], keys [k] and scalars [k].
    """

    def split(x: Any) -> Any:
        if is_key(x):
            return jax.random.split(x, k)
        return jnp.broadcast_to(jnp.asarray(x), (k,)) if jnp.ndim(x) == 0 else _cut(jnp.asarray(x), k)

    return jax.tree.map(split, tree)


def _cut(x: Array, k: int) -> Array:
    """[n, ...] -> [k, n/k, ...]: blocks of rows, or every k-th row if `x` lies on a mesh under jit."""
    sharding = jax.typeof(x).sharding
    n, rest, (rows, *others) = x.shape[0], x.shape[1:], tuple(sharding.spec) or (None,)

    def shaped(shape: tuple[int, ...], spec: tuple[Any, ...]) -> Array:
        if rows is None and not any(others):
            return x.reshape(shape)
        # A mesh with explicit axes needs the sharding of the result; a spec alone needs jax.set_mesh.
        return lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))

    mesh = sharding.mesh
    types = zip(mesh.axis_sizes, mesh.axis_types, strict=True) if not mesh.empty else ()
    # Whether XLA may spread arrays of this mesh over devices; under pmap and shard_map arrays are local.
    if any(size > 1 and axis_type != AxisType.Manual for size, axis_type in types):
        return shaped((n // k, k, *rest), (rows, None, *others)).swapaxes(0, 1)
    return shaped((k, n // k, *rest), (None, rows, *others))


def is_key(x: Any) -> bool:
    """Whether `x` is one PRNG key, typed or raw."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.ndim(x) == 0
    return dtype == jnp.uint32 and jnp.shape(x) == (2,)


def check_accumulate(accumulate: int) -> int:
    """`accumulate` as an int >= 1, or a ValueError."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, (int, np.integer)) or accumulate < 1:
        raise ValueError(f"accumulate must be a number of microbatches >= 1; got {accumulate!r}")
    return int(accumulate)


def resolve_argnums(argnums: int | Sequence[int], n: int, name: str) -> tuple[int, ...]:
    """`argnums` as non-negative positions among `n` positional arguments, or a ValueError that calls it `name`."""
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in wanted:
        if not -n <= i < n:
            raise ValueError(f"{name} must name positional arguments; got {i} for a call with {n} of them")
    return tuple(i % n for i in wanted)
