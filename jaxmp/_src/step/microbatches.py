"""Cut the arguments of a loss into microbatches: which arguments hold the batch, and which rows go together."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths


def split_arguments(
    args: Sequence[Any], others: Sequence[int], accumulate_argnums: int | Sequence[int] | None, k: int
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The arguments but `others`, by position: `(the batch as k microbatches, those that are passed on whole)`.

    With k = 1 nothing is split, and all arguments are passed on whole.

    Args:
      args: all positional arguments.
      others: the positions of those that are differentiated or carried.
      accumulate_argnums: the positions of the batch; None: there is one argument beside the others.
      k: number of microbatches.
    """
    if accumulate_argnums is None:
        chosen = tuple(i for i in range(len(args)) if i not in others)
    else:
        chosen = resolve_argnums(accumulate_argnums, len(args), "accumulate_argnums")
    if set(chosen) & set(others):
        raise ValueError(
            f"accumulate_argnums must not name differentiated or carried arguments; got {chosen}, and {tuple(others)} "
            f"are."
        )
    if k == 1:
        return {}, {i: x for i, x in enumerate(args) if i not in others}
    if accumulate_argnums is None and len(chosen) > 1:
        raise ValueError(
            f"accumulate={k} must know which arguments hold the batch; got {len(chosen)} that may. Pass "
            f"accumulate_argnums={chosen} or fewer."
        )
    batch = {i: args[i] for i in chosen}
    check_batch(batch, k)
    return split_microbatches(batch, k), {i: x for i, x in enumerate(args) if i not in (*others, *chosen)}


def check_batch(batch: dict[int, PyTree], k: int) -> None:
    """Raises a ValueError for a batch, by argument, that cannot be cut into `k` microbatches of equal rows."""
    is_list = lambda x: isinstance(x, list) and len(x) > 1 and all(isinstance(y, bool | int | float) for y in x)  # noqa: E731
    leaves = [(tree_paths.path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_list)]
    if not leaves:
        raise ValueError(
            f"accumulate={k} must get the batch by position; got no array there. Call value_and_grad(...)(params, "
            f"batch, opt_state=...)."
        )
    rows: dict[str, int] = {}
    for path, x in leaves:
        if is_list(x):
            raise ValueError(
                f"a batch must hold arrays; got a list of {len(x)} numbers at argument {path}. Pass jnp.asarray(batch)."
            )
        if is_key(x) or not jnp.ndim(x):
            continue
        rows[path] = x.shape[0]
        if x.shape[0] % k:
            raise ValueError(
                f"accumulate={k} must divide the leading axis of the batch; got {tuple(x.shape)} at argument {path}. "
                f"{_NAME_IT}"
            )
    if len(set(rows.values())) > 1:
        got = ", ".join(f"{n} at argument {path}" for path, n in rows.items())
        raise ValueError(f"all parts of a batch must have the same leading axis; got {got}. {_NAME_IT}")
    keys = [path for path, x in leaves if is_key(x) and x.dtype == jnp.uint32]
    if keys and k == 2 and set(rows.values()) <= {2}:  # a raw key, or two rows of numbers
        raise ValueError(
            f"keys must be typed in a batch of two rows; got uint32[2] at argument {keys[0]}. Use jax.random.key."
        )


_NAME_IT = "Name the arguments to cut: accumulate_argnums=."


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
