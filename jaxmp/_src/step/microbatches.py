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

    With k = 1 nothing is split, and all arguments are passed on whole. The arguments are those of `batch_of`.
    """
    batch = batch_of(args, others, accumulate_argnums, k)
    whole = {i: x for i, x in enumerate(args) if i not in others and (k == 1 or i not in batch)}
    return ({}, whole) if k == 1 else (split_microbatches(batch, k), whole)


def batch_of(
    args: Sequence[Any], others: Sequence[int], accumulate_argnums: int | Sequence[int] | None, k: int
) -> dict[int, Any]:
    """The arguments that hold the batch, by position.

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
            f"are differentiated or carried"
        )
    if k > 1 and accumulate_argnums is None and len(chosen) > 1:
        raise ValueError(
            f"accumulate={k} must know which arguments hold the batch; got {len(chosen)} that may. Name those to cut, "
            f"accumulate_argnums={chosen} for all of them; the others are passed on whole to every microbatch "
            f"(statistics that the loss returns anew pass from one to the next by carry_argnum=)."
        )
    batch = {i: args[i] for i in chosen}
    if k > 1 and not jax.tree.leaves(batch):
        raise ValueError(
            f"accumulate={k} cuts the batch into microbatches, and the batch must be among the positional arguments "
            f"(keyword arguments and those of argnums are passed on whole); got no array there. Pass the batch by "
            f"position: value_and_grad(loss_fn, accumulate={k})(params, batch, opt_state=opt_state)."
        )
    return batch


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

    Raises:
      ValueError: k does not divide a leading axis, or leading axes differ; a list of numbers, or a uint32[2] that may
        be a key or two rows: named by path.
    """
    sizes: dict[str, int] = {}
    raw_keys: list[str] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_list_of_numbers):
        if _is_list_of_numbers(x):
            raise ValueError(
                f"accumulate={k} cuts arrays; got a list of {len(x)} Python numbers at argument "
                f"{tree_paths.path_str(path)}, a tree of scalars. Make it an array: jnp.asarray(batch)."
            )

    def split(path: str, x: Any) -> Any:
        if is_key(x):
            raw_keys.extend([path] * (x.dtype == jnp.uint32))
            return jax.random.split(x, k)
        if jnp.ndim(x) == 0:
            return jnp.broadcast_to(jnp.asarray(x), (k,))
        sizes[path] = x.shape[0]
        if x.shape[0] % k:
            raise ValueError(
                f"accumulate={k} must divide the leading axis of the batch; got {tuple(x.shape)} at argument {path}. "
                f"{_HOW_TO_NAME_THE_BATCH}"
            )
        return _cut(jnp.asarray(x), k)

    out = tree_paths.map_with_path(split, tree)
    if raw_keys and k == 2 and set(sizes.values()) <= {2}:
        raise ValueError(
            f"accumulate={k} splits PRNG keys and cuts rows; got uint32[2] at argument {raw_keys[0]}, which may be "
            f"a raw key or two rows. Pass a typed key (jax.random.key, jax.random.wrap_key_data), or another dtype."
        )
    if len(set(sizes.values())) > 1:
        (first, n), (other, m) = next(
            ((a, b) for a, b in zip(sizes.items(), list(sizes.items())[1:], strict=False) if a[1] != b[1])
        )
        raise ValueError(
            f"all parts of a batch must have the same leading axis; got {n} at argument {first} and {m} at argument "
            f"{other}. {_HOW_TO_NAME_THE_BATCH}"
        )
    return out


def _is_list_of_numbers(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 1 and all(isinstance(y, bool | int | float) for y in x)


def _cut(x: Array, k: int) -> Array:
    """[n, ...] -> [k, n/k, ...]: blocks of rows, or every k-th row if `x` lies on a mesh under jit."""
    sharding = jax.typeof(x).sharding
    n, rest = x.shape[0], x.shape[1:]
    if not _lies_on_mesh(sharding.mesh):
        return x.reshape(k, n // k, *rest)
    spec = tuple(sharding.spec)
    if any(axis is not None for axis in spec):  # a mesh with explicit axes needs the sharding of the result
        cut = NamedSharding(sharding.mesh, PartitionSpec(spec[0], None, *spec[1:]))  # a spec alone needs jax.set_mesh
        x = lax.reshape(x, (n // k, k, *rest), out_sharding=cut)
    else:
        x = x.reshape(n // k, k, *rest)
    return x.swapaxes(0, 1)


def _lies_on_mesh(mesh: Any) -> bool:
    """Whether XLA may spread arrays of this mesh over devices; under pmap and shard_map arrays are local."""
    types = zip(mesh.axis_sizes, mesh.axis_types, strict=True) if not mesh.empty else ()
    return any(size > 1 and axis_type != AxisType.Manual for size, axis_type in types)


_HOW_TO_NAME_THE_BATCH = (
    "Name the arguments that hold the batch with accumulate_argnums=; all others are passed on whole."
)


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
