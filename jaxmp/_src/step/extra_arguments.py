"""The extra arguments of an update: passes jaxmp's own to transforms that take them, and checks the user's.

`optax.chain` passes all extra arguments to every transform in it that takes extra arguments at all, and drops them for
the others. So a transform with a fixed list of extra arguments (`optax.contrib.sam`) fails on an argument that it does
not know, and a misspelt argument is ignored without an error. A transform is a pair of closures. This file finds the
arguments that it takes from the functions that its `update` holds.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import optax
from jaxtyping import PyTree

OWN = ("destination", "grads_finite", "loss_scale", "next_loss_scale", "as_made")
# What optax's own transforms take. A loop may pass them to any optimizer.
_CUSTOMARY = ("value", "value_fn", "grad", "grad_fn", "obj_fn", "loss", "losses", "hvp")
_OF_EVERY_STATE = ("apply_fn", "params", "tx", "opt_state")  # never passed to a step
_PACKAGES = ("optax", "jaxmp", "flax", "jax")


def update(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> tuple[PyTree, Any]:
    """`inner.update` with those of jaxmp's own extra arguments that it takes, and with all others."""
    while True:
        try:
            return inner.update(updates, state, params, **extra_args)
        except TypeError as e:
            refused = [n for n in OWN if n in extra_args and _is_refused(n, str(e))]
            if not refused:
                raise
            extra_args = {name: x for name, x in extra_args.items() if name not in refused}


def _is_refused(name: str, error: str) -> bool:
    """Whether an error says that a function, or the `value_fn` of optax's line searches, does not take `name`."""
    return f"unexpected keyword argument '{name}'" in error or (
        "not consumed by `value_fn`" in error and f"'{name}'" in error
    )


def check(tx: Any, names: Iterable[str], *, fields: Iterable[str] = ()) -> None:
    """Raises a TypeError for an extra argument that no transform in `tx` can read, or that optax drops before it.

    Args:
      tx: an optax transform.
      names: of the arguments that a user passed.
      fields: names that the caller would have taken itself, for the hint.
    """
    names = tuple(names)
    if names:
        _check_none_is_dropped(tx, names)
    unknown = [name for name in names if name not in _CUSTOMARY]
    if not unknown:
        return
    fields = [name for name in fields if name not in _OF_EVERY_STATE]
    known, keywords, closed = set(), set(), True
    for f in _functions_of(tx.update):
        parameters = inspect.signature(f).parameters.values()
        known |= {p.name for p in parameters} | _strings(f.__code__)
        keywords |= _keywords(f)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        closed &= not takes_any or (f.__module__ or "").partition(".")[0] in _PACKAGES
    candidates = [*fields, *sorted(keywords - {"as_made", "destination"}), *_CUSTOMARY]
    for name in unknown:
        close = difflib.get_close_matches(name, candidates, n=1)
        if name in known or not (closed or close):  # a function of the user's own may read any name
            continue
        nobody = "which no transform of tx takes" + (" and which is no field of this state" if fields else "")
        hint = f"Did you mean {close[0]}=?" if close else "Leave it out."
        raise TypeError(f"an argument of apply_gradients must be taken by someone; got {name}=, {nobody}. {hint}")


def _check_none_is_dropped(tx: Any, names: Sequence[str]) -> None:
    """Raises a TypeError for an argument that a transform in `optax.MultiSteps` takes, and that never arrives there."""
    for f in _functions_of(tx.update):
        if not f.__qualname__.startswith("with_extra_args_support."):  # optax's: "so that it ignores extra args"
            continue
        update = getattr(inspect.getclosurevars(f).nonlocals.get("tx"), "update", None)
        if not isinstance(getattr(update, "__self__", None), optax.MultiSteps):
            continue
        taken: set[str] = set()
        for g in _functions_of(update):  # jaxmp's own functions pass these on by their names
            taken |= _keywords(g) | (set() if g.__module__.startswith("jaxmp.") else _strings(g.__code__))
        if name := next((name for name in names if name in taken), None):
            raise TypeError(
                f"an argument of apply_gradients must arrive where it is taken; got {name}=, which optax drops before "
                f"an optax.MultiSteps that is inside of another of its transforms. Write "
                f"optax.GradientTransformationExtraArgs(steps.init, steps.update) in place of steps = "
                f"optax.MultiSteps(...)."
            )


def _keywords(f: types.FunctionType) -> set[str]:
    """The keyword-only arguments of a function."""
    parameters = inspect.signature(f).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and not p.name.startswith("_")}


def _functions_of(f: Any) -> Iterator[types.FunctionType]:
    """`f` and all functions that it holds: in its closure, in containers and methods there."""
    seen: set[int] = set()
    open_ = [f]
    while open_:
        x = open_.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            yield x
            open_ += [cell.cell_contents for cell in x.__closure__ or () if _is_full(cell)]
            open_ += [x.__wrapped__] if hasattr(x, "__wrapped__") else []
        elif isinstance(x, types.MethodType):
            open_ += [x.__func__, *getattr(x.__self__, "__dict__", {}).values()]
        elif isinstance(x, functools.partial):
            open_ += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, dict):
            open_ += x.values()
        elif isinstance(x, list | tuple):
            open_ += x
        elif hasattr(x, "__wrapped__"):  # jax.jit
            open_.append(x.__wrapped__)
        elif callable(x) and isinstance(x.__call__, types.MethodType):
            open_.append(x.__call__)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the cell is empty
        return False


def _strings(code: types.CodeType) -> set[str]:
    found = {c for c in code.co_consts if isinstance(c, str)}
    for c in code.co_consts:
        found |= _strings(c) if isinstance(c, types.CodeType) else set()
    return found
