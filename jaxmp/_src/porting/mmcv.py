"""mmcv's decorators: they say which methods of a model run in float16, and which in float32.

    class Detector(nn.Module):
        @jaxmp.auto_fp16(apply_to=("image",), out_fp32=True)     runs under autocast; casts `image` to float16
        @nn.compact
        def __call__(self, image, boxes): ...

        @jaxmp.force_fp32(apply_to=("scores",))                  runs without autocast; casts `scores` to float32
        def loss(self, scores, labels): ...

Both call `jaxmp.autocast` or `jaxmp.no_autocast`, as mmcv's call torch.autocast. As in mmcv, the attribute
`fp16_enabled` of a module turns its decorators on and off. Without this attribute they are on (in mmcv: off).

References:
  mmcv 1.7, mmcv/runner/fp16_utils.py.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxmp._src.autocast import cast_lists, rewrite
from jaxmp._src.programs import array_functions

F = TypeVar("F", bound=Callable[..., Any])


def auto_fp16(
    apply_to: Iterable[str] | None = None, *, out_fp32: bool = False, dtype: Any = jnp.float16
) -> Callable[[F], F]:
    """Decorator: the function runs under autocast, and chosen arguments are cast to 16 bits. mmcv's `auto_fp16`.

    Args:
      apply_to: names of the arguments whose float32 arrays are cast; None for all. Default values are not cast.
      out_fp32: whether arrays of `dtype` that the function returns are cast to float32.
      dtype: float16 or bfloat16.

    Returns:
      A decorator, for functions and for methods of linen and nnx modules.

    Raises:
      ValueError: `apply_to` has a name that is not an argument of the function.
      TypeError: the decorator is written without parentheses.

    Example:
      >>> @auto_fp16(apply_to=("x",))
      ... def dense(x, w):
      ...     return x @ w, x, w
      >>> [array.dtype.name for array in dense(jnp.ones((8, 8)), jnp.ones((8, 8)))]
      ['float16', 'float16', 'float32']

    References:
      mmcv 1.7, `mmcv.runner.auto_fp16`.
    """
    dtype = cast_lists.check_dtype(dtype)
    if callable(apply_to):
        raise TypeError("auto_fp16 takes names of arguments; got a function. Write @jaxmp.auto_fp16()")

    def decorate(fn: F) -> F:
        run = rewrite.autocast(fn, dtype, output_dtype=None)
        casts = (jnp.float32, dtype)
        return _with_casts("auto_fp16", fn, run, apply_to, casts, casts[::-1] if out_fp32 else None)

    return decorate


def force_fp32(apply_to: Iterable[str] | None = None, *, out_fp16: bool = False) -> Callable[[F], F]:
    """Decorator: the function runs without autocast, and chosen arguments are cast to float32. mmcv's `force_fp32`.

    Args:
      apply_to: names of the arguments whose float16 arrays are cast; None for all. As in mmcv, bfloat16 is not cast.
      out_fp16: whether float32 arrays that the function returns are cast to float16.

    Returns:
      A decorator, for functions and for methods of linen and nnx modules.

    Raises:
      ValueError: `apply_to` has a name that is not an argument of the function.
      TypeError: the decorator is written without parentheses.

    Example:
      >>> @force_fp32(apply_to=("logits",))
      ... def loss(logits):
      ...     return jnp.mean(logits @ logits)
      >>> rewrite.autocast(loss)(jnp.ones((8, 8), jnp.float16)).dtype.name
      'float32'

    References:
      mmcv 1.7, `mmcv.runner.force_fp32`.
    """

    if callable(apply_to):
        raise TypeError("force_fp32 takes names of arguments; got a function. Write @jaxmp.force_fp32()")

    def decorate(fn: F) -> F:
        run = rewrite.no_autocast(fn)
        casts = (jnp.float16, jnp.float32)
        return _with_casts("force_fp32", fn, run, apply_to, casts, casts[::-1] if out_fp16 else None)

    return decorate


def _with_casts(decorator: str, fn: Any, run: Any, apply_to: Any, casts_in: Any, casts_out: Any) -> Any:
    # `casts_in`, `casts_out`: (from dtype, to dtype) for arguments and results; None casts nothing.
    signature = inspect.signature(fn)
    if isinstance(apply_to, str):
        raise ValueError(
            f"{decorator}: apply_to takes several names; got the string {apply_to!r}. Write ({apply_to!r},)."
        )
    unknown = [a for a in apply_to or () if a not in signature.parameters]
    if unknown:
        raise ValueError(
            f"{decorator}: apply_to must name arguments of {fn.__qualname__}, {list(signature.parameters)}; got "
            f"{unknown}."
        )
    chosen = set(signature.parameters if apply_to is None else apply_to)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if args and not getattr(args[0], "fp16_enabled", True):
            return fn(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for argument in chosen & bound.arguments.keys():
            bound.arguments[argument] = _cast_arrays(bound.arguments[argument], *casts_in)
        out = run(*bound.args, **bound.kwargs)
        return out if casts_out is None else _cast_arrays(out, *casts_out)

    return wrapped


def _cast_arrays(tree: Any, before: Any, after: Any) -> Any:
    """`tree` with arrays of dtype `before` cast to `after`. Modules stay as they are."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, after) if rewrite.is_float_array(x) and x.dtype == before else x,
        tree,
        is_leaf=array_functions.is_module,
    )
