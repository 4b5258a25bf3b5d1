"""Guards of `accumulate=`: it must be clear which arguments hold the batch, and the batch must be cut evenly."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.step.microbatches import batch_of, is_key

_HOW_TO_NAME_THE_BATCH = (
    "Name the arguments that hold the batch with accumulate_argnums=; all others are passed on whole."
)


def look_at_batch(
    loss_of: Callable[[dict[int, PyTree]], Any],
    args: Sequence[Any],
    others: Sequence[int],
    accumulate_argnums: int | Sequence[int] | None,
    k: int,
) -> None:
    """Raises a ValueError for a batch that is not named, or that cannot be cut into `k` microbatches.

    Args:
      loss_of: the loss as a function of the arguments that are cut, by position.
      args: all positional arguments.
      others: the positions of those that are differentiated or carried.
      accumulate_argnums: the positions of the batch; None: there is one argument beside the others.
      k: number of microbatches.
    """
    batch = batch_of(args, others, accumulate_argnums)
    if set(batch) & set(others):
        raise ValueError(
            f"accumulate_argnums must not name differentiated or carried arguments; got {tuple(batch)}, and "
            f"{tuple(others)} are differentiated or carried"
        )
    if k == 1:
        return
    if accumulate_argnums is None and len(batch) > 1:
        raise ValueError(
            f"accumulate={k} must know which arguments hold the batch; got {len(batch)} that may. Name those to cut, "
            f"accumulate_argnums={tuple(batch)} for all of them; the others are passed on whole to every microbatch "
            f"(statistics that the loss returns anew pass from one to the next by carry_argnum=)."
        )
    if not jax.tree.leaves(batch):
        raise ValueError(
            f"accumulate={k} cuts the batch into microbatches, and the batch must be among the positional arguments "
            f"(keyword arguments and those of argnums are passed on whole); got no array there. Pass the batch by "
            f"position: value_and_grad(loss_fn, accumulate={k})(params, batch, opt_state=opt_state)."
        )
    rows = _rows_of(batch, k)
    if rows == k:
        _look_at_single_rows(loss_of, batch, k)


def _rows_of(batch: dict[int, PyTree], k: int) -> int:
    """How many rows the batch has; 0 if it holds scalars and keys alone."""
    sizes: dict[str, int] = {}
    raw_keys: list[str] = []
    for key, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        path = tree_paths.path_str(key)
        if _is_list_of_numbers(x):
            raise ValueError(
                f"accumulate={k} cuts arrays; got a list of {len(x)} Python numbers at argument {path}, a tree of "
                f"scalars. Make it an array: jnp.asarray(batch)."
            )
        if is_key(x):
            raw_keys.extend([path] * (x.dtype == jnp.uint32))
        elif jnp.ndim(x):
            sizes[path] = x.shape[0]
            if x.shape[0] % k:
                raise ValueError(
                    f"accumulate={k} must divide the leading axis of the batch; got {tuple(x.shape)} at argument "
                    f"{path}. {_HOW_TO_NAME_THE_BATCH}"
                )
    if raw_keys and k == 2 and set(sizes.values()) <= {2}:
        raise ValueError(
            f"accumulate={k} splits PRNG keys and cuts rows; got uint32[2] at argument {raw_keys[0]}, which may be "
            f"a raw key or two rows. Pass a typed key (jax.random.key, jax.random.wrap_key_data), or another dtype."
        )
    found = list(sizes.items())
    for (first, n), (other, m) in itertools.pairwise(found):
        if n != m:
            raise ValueError(
                f"all parts of a batch must have the same leading axis; got {n} at argument {first} and {m} at "
                f"argument {other}. {_HOW_TO_NAME_THE_BATCH}"
            )
    return found[0][1] if found else 0


def _is_list_of_numbers(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 1 and all(isinstance(y, bool | int | float) for y in x)


def _look_at_single_rows(loss_of: Callable[[dict[int, PyTree]], Any], batch: dict[int, PyTree], k: int) -> None:
    """Raises a ValueError for microbatches of one row that would be broadcast to rows from elsewhere.

    Such a loss runs with all rows and with one, and with no number between.

    Args:
      loss_of: the loss as a function of the arguments that are cut, by position.
      batch: these arguments, not cut.
      k: the number of microbatches, and of rows.
    """
    other = 2 if k > 2 else 3
    some = lambda x: jnp.concatenate([x, x])[:other] if _is_rows(x) else x  # noqa: E731
    try:
        with warnings.catch_warnings(action="ignore"), ambient.noting():
            jax.eval_shape(loss_of, batch)
            try:
                jax.eval_shape(loss_of, jax.tree.map(some, batch))
                return
            except (TypeError, ValueError) as e:
                error = e
    except Exception:  # the loss raises it again when it is traced in earnest
        return
    raise ValueError(
        f"accumulate={k} cuts the batch, arguments {tuple(batch)}, into single rows, and all its parts must be cut "
        f"with it; got a loss that runs with {k} rows and not with {other}: an array that is closed over, or passed on "
        f"whole, has as many rows as the batch, and one row would be broadcast to it. Pass it by position, in an "
        f"argument that accumulate_argnums= names."
    ) from error


def _is_rows(x: Any) -> bool:
    return jnp.ndim(x) > 0 and not is_key(x)
