"""Checks a loss before its arguments are cut into microbatches: which hold the batch, and which keys it uses.

With `accumulate=` and no names, every argument that is not differentiated is cut. A vector of class weights that is as
long as the batch would be cut too, and the loss would be wrong without an error. The shapes do not show this, but the
loss does: rows of a batch belong together, so a loss cannot be traced with twice as many rows of only one argument, or
of only one array in it. If the trace succeeds, it is not clear whether to cut this argument or array, and the caller
must say so.

For the same reason an array that is passed on whole (a keyword argument, one that is not named) and has as many rows as
the batch must not be labels: with microbatches of one row they would be broadcast, and the loss would be wrong. It is
refused if the loss can be traced with twice as many rows of it and of the batch, but not of the batch alone. Rows that
the loss closes over, differentiates or carries cannot be doubled; with microbatches of one row the loss must run with
other numbers of rows, and with more rows the error of their shapes is explained.

The same trace shows whether a `uint32[2]` is a PRNG key, and whether the loss draws random numbers from a key that all
microbatches share (a dropout key that the loss closes over): each microbatch would have the same mask.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.programs import jaxprs
from jaxmp._src.step.microbatches import is_key


@contextlib.contextmanager
def checked(
    seen: set[Any],
    given: PyTree,
    loss_fn: Callable[[dict[int, PyTree], PyTree, dict[Any, PyTree]], Any],
    batch: dict[int, PyTree],
    carry: PyTree,
    whole: dict[Any, PyTree],
    k: int,
    *,
    named: bool,
) -> Iterator[None]:
    """A block that runs the microbatches: `check` before it, and an explained error if they have too few rows.

    `check` is left out if `seen` holds a call with the structure, shapes and dtypes of `given`: outside of `jax.jit`
    each step would trace the loss anew, to find the same. The other arguments are those of `check`.
    """
    if k == 1:
        yield
        return
    _check_once(seen, given, loss_fn, batch, carry, whole, k, named=named)
    try:
        yield
    except (TypeError, ValueError) as e:
        of_batch = lambda batch, carry: loss_fn(batch, carry, whole)  # noqa: E731
        n = _rows_of(batch)
        if _traced(of_batch, batch, carry) is not None and not _runs_with(n // k, of_batch, batch, carry):
            raise _rows_from_elsewhere(batch, k, n // k) from e
        raise


def _check_once(seen: set[Any], given: PyTree, *args: Any, **kwargs: Any) -> None:
    leaves, treedef = jax.tree.flatten(given)
    key: Any = treedef, tuple((x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves)
    try:
        if key in seen:
            return
    except TypeError:  # something in it has no hash
        key = None
    check(*args, **kwargs)
    if key is not None:
        seen.add(key)


def check(
    loss_fn: Callable[[dict[int, PyTree], PyTree, dict[Any, PyTree]], Any],
    batch: dict[int, PyTree],
    carry: PyTree,
    whole: dict[Any, PyTree],
    k: int,
    *,
    named: bool,
) -> None:
    """Raises for arguments that may hold the batch or not, and warns of a key that all microbatches share.

    Args:
      loss_fn: the loss as a function of `batch`, `carry` and `whole`; it closes over all others.
      batch: the arguments to cut, by position, not cut yet.
      carry: what is passed from microbatch to microbatch.
      whole: the arguments that every microbatch gets whole, by position or name.
      k: the number of microbatches.
      named: whether the caller named them.

    Raises:
      ValueError: see the module's docstring.

    Warns:
      UserWarning: a key that all microbatches share.
    """
    of_batch = lambda batch, carry: loss_fn(batch, carry, whole)  # noqa: E731
    program = _traced(of_batch, batch, carry)
    if program is None:  # the loss raises the same error when it is traced in earnest
        return
    jaxpr, _ = jaxprs.open_jaxpr(program)
    inputs = dict(zip(_paths(batch), jaxpr.invars, strict=False))
    for path, v in inputs.items():
        if v.aval.dtype == jnp.uint32 and v.aval.shape == (2,) and not _is_wrapped(jaxpr, v):
            raise ValueError(
                f"accumulate={k} splits PRNG keys; got uint32[2] at argument {path}, which the loss does not use as a "
                f"key. Pass it in an argument that accumulate_argnums= does not name; those are passed on whole."
            )
    if not named:
        _check_rows_go_together(of_batch, batch, carry, k, jaxpr)
    _check_whole_are_no_rows(loss_fn, batch, carry, whole, k)
    _check_one_row_is_not_repeated(of_batch, batch, carry, k)
    rows = {v.aval.shape[0] for v in inputs.values() if v.aval.shape and not _is_key_type(v.aval)}
    repeated = {v for v in inputs.values() if not v.aval.shape and not _is_key_type(v.aval)}
    consts = {v: _From(from_input=True, varies=False) for v in jaxpr.constvars}
    drawn = _draws(jaxpr, consts | {v: _From(from_input=True, varies=v not in repeated) for v in jaxpr.invars})
    if any(shape and shape[0] in rows for shape in drawn):
        warn(
            "same-random-numbers",
            f"with accumulate={k} every microbatch draws the same random numbers: the loss draws from a PRNG key that "
            f"it closes over, that is passed on whole, or that it makes of a scalar (a step). Pass the key as an "
            f"argument of the loss that holds the batch (one that accumulate_argnums= names); there it is split into "
            f"{k}.",
        )


def _check_rows_go_together(loss_fn: Any, batch: dict[int, PyTree], carry: PyTree, k: int, jaxpr: Any) -> None:
    """Raises if the loss can be traced with twice as many rows of one argument only, or of one array only."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, core.Literal)}
    used = dict(zip(_paths(batch), (v in read for v in jaxpr.invars), strict=False))
    arrays = [
        (i, path)
        for i, tree in batch.items()
        for path, x in _leaves(tree)
        if _is_rows(x) and used[f"{i}/{path}" if path else str(i)]
    ]
    if len(arrays) < 2:
        return
    cut = list(dict.fromkeys(i for i, _ in arrays))
    for i in cut if len(cut) > 1 else ():
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]) if _is_rows(x) else x, batch[i])
        if _traced(loss_fn, batch | {i: twice}, carry) is not None:
            shape = next(jnp.shape(x) for _, x in _leaves(batch[i]) if _is_rows(x))
            others = tuple(j for j in batch if j != i)
            raise ValueError(
                f"accumulate={k} must know which arguments hold the batch; got argument {i}, of shape {shape}, which "
                f"the loss takes cut and whole. Name the batch: accumulate_argnums={tuple(batch)} to cut argument {i} "
                f"too, or {others} to pass it on whole to every microbatch."
            )
    for i, path in arrays:
        twice = tree_paths.map_with_path(lambda p, x, at=path: jnp.concatenate([x, x]) if p == at else x, batch[i])
        if path and _traced(loss_fn, batch | {i: twice}, carry) is not None:
            shape = next(jnp.shape(x) for p, x in _leaves(batch[i]) if p == path)
            raise ValueError(
                f"accumulate={k} must know which arrays hold the batch; got argument {i}/{path}, of shape {shape}, "
                f"which the loss takes cut and whole. To cut it too, name the batch: accumulate_argnums={tuple(batch)}."
                f" To pass it on whole to every microbatch, pass it in an argument of its own, not named there."
            )


def _check_whole_are_no_rows(loss_fn: Any, batch: dict[int, PyTree], carry: PyTree, whole: dict, k: int) -> None:
    """Raises if an argument that is passed on whole has rows that go with those of the batch."""
    rows = {jnp.shape(x)[0] for x in jax.tree.leaves(batch) if _is_rows(x)}

    def twice(x: Any) -> Any:
        return jnp.concatenate([x, x]) if _is_rows(x) and jnp.shape(x)[0] in rows else x

    found = [name for name, tree in whole.items() if any(twice(x) is not x for x in jax.tree.leaves(tree))]
    larger = jax.tree.map(twice, batch)
    if not found or _traced(lambda batch, carry: loss_fn(batch, carry, whole), larger, carry) is not None:
        return
    for name in found:
        others = whole | {name: jax.tree.map(twice, whole[name])}
        if _traced(lambda batch, carry, others=others: loss_fn(batch, carry, others), larger, carry) is not None:
            raise ValueError(
                f"accumulate={k} cuts the batch, and all its parts must be cut with it; got argument {name!r}, of as "
                f"many rows as the batch, which is passed on whole. "
                + (
                    "Pass it by position."
                    if isinstance(name, str)
                    else f"Name it too: accumulate_argnums={(*batch, name)}."
                )
            )


def _check_one_row_is_not_repeated(loss_fn: Any, batch: dict[int, PyTree], carry: PyTree, k: int) -> None:
    """Raises if microbatches of one row would be broadcast to rows that the loss has from elsewhere.

    Such a loss runs with all rows and with one, and with no number between.
    """
    n = _rows_of(batch)
    other = 2 if n > 2 else 3
    if n == k and not _runs_with(other, loss_fn, batch, carry):
        raise _rows_from_elsewhere(batch, k, other)


def _rows_from_elsewhere(batch: dict[int, PyTree], k: int, other: int) -> ValueError:
    return ValueError(
        f"accumulate={k} cuts the batch, arguments {tuple(batch)}, and all its parts must be cut with it; got a loss "
        f"that runs with {_rows_of(batch)} rows and not with {other}: it closes over, differentiates or carries an "
        f"array with as many rows as the batch, which microbatches would not fit, or to which one row is broadcast. "
        f"Pass this array as an argument that is cut. Rows can be differentiated (argnums) only without accumulate=."
    )


def _rows_of(batch: dict[int, PyTree]) -> int:
    return next((jnp.shape(x)[0] for x in jax.tree.leaves(batch) if _is_rows(x)), 0)


def _runs_with(n: int, loss_fn: Any, batch: dict[int, PyTree], carry: PyTree) -> bool:
    """Whether the loss can be traced with n rows of the batch, at most twice as many as it has."""
    some = lambda x: jnp.concatenate([x, x])[:n] if _is_rows(x) else x  # noqa: E731
    return _traced(loss_fn, jax.tree.map(some, batch), carry) is not None


def _traced(loss_fn: Any, batch: dict[int, PyTree], carry: PyTree) -> Any:
    """The program of the loss, or None if it cannot be traced with these arguments."""
    try:
        with warnings.catch_warnings(action="ignore"), ambient.noting():
            return jax.make_jaxpr(loss_fn)(batch, carry)
    except Exception:
        return None


def _paths(batch: dict[int, PyTree]) -> list[str]:
    return [tree_paths.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [("" if not path else tree_paths.path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _is_rows(x: Any) -> bool:
    return jnp.ndim(x) > 0 and not is_key(x)


def _is_key_type(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


# --- what a program draws --------------------------------------------------------------------------------------------


class _From(NamedTuple):
    """Where a value comes from."""

    from_input: bool  # not from literals alone
    varies: bool  # from the batch


_NOWHERE = _From(from_input=False, varies=False)


def _draws(jaxpr: Any, known: dict[Any, _From]) -> list[tuple[int, ...]]:
    """The shapes of random bits that are drawn from a key which is an input and does not vary."""
    found, _ = _followed(jaxpr, known)
    return found


def _followed(jaxpr: Any, known: dict[Any, _From]) -> tuple[list[tuple[int, ...]], list[_From]]:
    def of(v: Any) -> _From:
        return _NOWHERE if isinstance(v, core.Literal) else known.get(v, _NOWHERE)

    found: list[tuple[int, ...]] = []
    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        together = _From(any(x.from_input for x in operands), any(x.varies for x in operands))
        results = [together] * len(eqn.outvars)
        if eqn.primitive.name == "random_bits" and together.from_input and not together.varies:
            found.append(eqn.outvars[0].aval.shape)
        if eqn.primitive.name in jaxprs.CALLS:
            ((inner, _),) = jaxprs.functions_of(eqn)
            drawn, results = _followed(inner, dict(zip(inner.invars, operands, strict=False)))
            found += drawn
        known |= dict(zip(eqn.outvars, results, strict=False))
    return found, [of(v) for v in jaxpr.outvars]


def _is_wrapped(jaxpr: Any, v: Any) -> bool:
    """Whether a program makes a typed key of its input `v`."""
    names = {v}
    for eqn in jaxpr.eqns:
        operands = [i for i, x in enumerate(eqn.invars) if not isinstance(x, core.Literal) and x in names]
        if not operands:
            continue
        name = eqn.primitive.name
        if name == "random_wrap":
            return True
        if name in jaxprs.REARRANGES | jaxprs.HANDS_ON:
            names |= set(eqn.outvars)
        for inner, _ in jaxprs.functions_of(eqn):
            # the operands of a call and of a loop are the last inputs of its function
            shift = len(inner.invars) - len(eqn.invars)
            if any(0 <= i + shift and _is_wrapped(inner, inner.invars[i + shift]) for i in operands):
                return True
    return False
