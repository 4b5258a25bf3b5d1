"""The signature of a function that takes one more keyword than the function that it wraps."""

import inspect
from collections.abc import Callable
from typing import Any


def with_keyword(wrapper: Callable[..., Any], name: str) -> None:
    """Adds a keyword with the default None to the signature that `functools.wraps` gave to a wrapper.

    Libraries that bind arguments by the signature, such as `equinox.filter_jit`, refuse a keyword that is not there.
    """
    try:
        signature = inspect.signature(wrapper)
    except (TypeError, ValueError):  # of a function in C
        return
    if name in signature.parameters:
        return
    more = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(signature.parameters.values())
    end = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    vars(wrapper)["__signature__"] = signature.replace(parameters=[*parameters[:end], more, *parameters[end:]])
