"""Turns functions inside of `hk.transform` into functions that do not change haiku's frame.

Haiku keeps params, state and random keys in a frame, which functions change while they run. A trace inside of a frame
would leave tracers in it. So params are created outside of the trace, the function takes its random keys from a
separate sequence, and a function that changes state is refused. jaxmp does not import haiku.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax


def call(fn: Callable[..., Any], transform: Callable[..., Any], args: Any, kwargs: Any, *, what: str) -> Any:
    """`transform(fn)(*args, **kwargs)`, if needed as haiku's frame allows it.

    Args:
      fn: the function.
      transform: takes a function and returns one that traces it.
      args: positional arguments.
      kwargs: keyword arguments.
      what: the name of the transformation, for errors.

    Raises:
      ValueError: `fn` changes haiku's state.
    """
    haiku = _haiku_inside_transform()
    if haiku is None:
        return transform(fn)(*args, **kwargs)
    if haiku.running_init():
        return fn(*args, **kwargs)  # params are made as they are
    key = haiku.maybe_next_rng_key()

    def with_own_keys(*args: Any, **kwargs: Any) -> Any:
        if key is None:
            return fn(*args, **kwargs)
        with haiku.with_rng(key):
            return fn(*args, **kwargs)

    before = dict(jax.tree_util.tree_leaves_with_path(haiku.get_current_state()))
    out = transform(with_own_keys)(*args, **kwargs)
    for path, x in jax.tree_util.tree_leaves_with_path(haiku.get_current_state()):
        if before.get(path) is not x:
            raise ValueError(
                f"{what} in hk.transform must not change state; got "
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} changed. Call {what}(f.apply, ...) outside."
            )
    return out


def intercepting(interceptor: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """`hk.intercept_methods(interceptor)`, where haiku was imported."""
    haiku = sys.modules.get("haiku")
    if haiku is None or not hasattr(haiku, "intercept_methods"):
        return contextlib.nullcontext()
    return haiku.intercept_methods(interceptor)


def _haiku_inside_transform() -> Any:
    haiku = sys.modules.get("haiku")
    if haiku is None or not hasattr(haiku, "running_init"):
        return None
    try:
        haiku.running_init()
    except ValueError:  # outside of transforms
        return None
    return haiku
