"""Guards of `autocast` and `explain_autocast`: torch's options, and arguments in another order."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jaxmp._src.autocast import cast_lists, rewrite
from jaxmp._src.step import policy_regions
from jaxmp._src.step.policy import check_precision, is_policy

F = TypeVar("F", bound=Callable[..., Any])


def _guarded_autocast(autocast: F) -> F:
    @functools.wraps(autocast)
    def wrapped(fn: Any = None, dtype: Any = None, **options: Any) -> Any:
        _check_no_torch_options(options)
        if callable(dtype) and not isinstance(dtype, type):
            raise TypeError("the arguments are autocast(fn, dtype); got a function as dtype")
        for given in (fn, dtype):
            if isinstance(given, str) and not is_policy(given):
                cast_lists.check_no_device("autocast", given)
                check_precision(given)
        return autocast(fn, dtype, **options)

    return wrapped  # pyright: ignore[reportReturnType]


def _guarded_explain(explain: F) -> F:
    @functools.wraps(explain)
    def wrapped(fn: Any, *args: Any, **options: Any) -> Any:
        if not callable(fn):
            raise TypeError(
                f"explain_autocast takes a function and its arguments, explain_autocast(fn, *args), and calls it; got "
                f"{type(fn).__name__}: a result?"
            )
        if rewrite.is_autocast(fn):
            raise ValueError(
                "explain_autocast takes the function as it is written, and says what autocast would do with it; got "
                "one of autocast. Give the function from before, and the arguments of autocast: explain_autocast(fn, "
                "*args, dtype=...)."
            )
        return explain(fn, *args, **options)

    return wrapped  # pyright: ignore[reportReturnType]


autocast = _guarded_autocast(policy_regions.autocast)
explain_autocast = _guarded_explain(policy_regions.explain_autocast)


def _check_no_torch_options(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in ("device_type", "device"):
            cast_lists.check_no_device("autocast", value)
            raise TypeError(f"autocast takes no device: JAX knows where its arrays are; got {name}={value!r}.")
        if name == "cache_enabled":
            raise TypeError(
                f"autocast has no cache to switch: it casts each value once to each dtype; got {name}={value!r}. "
                f"Leave it out."
            )
