"""Guards of `autocast` and `explain_autocast`: torch's options, arguments in another order, `reduce_dtype`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxmp._src.autocast import cast_lists, rewrite
from jaxmp._src.base.warn import warn
from jaxmp._src.step import policy_regions
from jaxmp._src.step.policy import Policy, check_precision, get_policy, is_policy

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
        made = autocast(fn, dtype, **options)
        named: Any = next((x for x in (fn, dtype) if is_policy(x)), None)
        policy = None if named is None else get_policy(named)
        if policy is not None and policy.says_reduce_dtype and policy.reduce_dtype is not None:
            return _Told(made, policy) if isinstance(made, policy_regions.PolicyRegion) else _told(made, policy)
        return made

    return wrapped  # pyright: ignore[reportReturnType]


class _Told:
    """A region of a policy with `reduce_dtype`; a function that it decorates tells of derivatives."""

    def __init__(self, region: policy_regions.PolicyRegion, policy: Policy):
        self._region, self._policy = region, policy

    def __call__(self, fn: F) -> F:
        return _told(self._region(fn), self._policy)

    def __enter__(self) -> policy_regions.PolicyRegion:
        return self._region.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._region.__exit__(*exception)


def _told(fn: F, policy: Policy) -> F:
    """An autocast function that warns where a derivative is taken of it."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        warn(
            "reduce-dtype-without-effect",
            f"reduce_dtype is for jaxmp.value_and_grad, which knows which arrays are weights; got a derivative of "
            f"jaxmp.autocast(fn, policy), which makes gradients in {policy.compute_dtype}. Take it of the function as "
            f"it is written: jaxmp.value_and_grad(fn, policy=policy). Or leave reduce_dtype out.",
        )
        return primals[0], tangents[0]

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: same(x) if rewrite.is_float_array(x) else x, fn(*args, **kwargs))

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
