"""Code that looks at dtypes in Python, before there is a jaxpr: jax's attention, and functions that a user names.

autocast traces a function in float32 and chooses dtypes afterwards. A function that asks `q.dtype` while it is traced
gets float32 for an answer: cuDNN's attention refuses it, others take a slow path. So such a function is called with
16-bit arrays, in a region without autocast, and its 16-bit results become float32 again for the rest of the trace, with
the mark that their dtype is the 16-bit one. In the program that runs, a matmul's 16-bit result goes to the function as
it is: XLA removes the casts to float32 and back.

While any function is traced, `jax.nn.dot_product_attention` is replaced by one that does so, wherever a module holds it
under its name. Where an object holds it (a `functools.partial` that was made before, an attribute of a layer), and for
all other functions, `jaxmp.no_autocast(fn, cast_inputs=True)` does it.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmp._src.autocast import regions
from jaxmp._src.autocast.cast_lists import LOW_MARK, OFF, CastLists
from jaxmp._src.programs import array_functions, jaxprs

_NAME = "dot_product_attention"
_MATMUL = "dot_general"
_OPERANDS = ("query", "key", "value", "bias")  # cuDNN's kernel adds a bias of the dtype of the others


def with_low_inputs(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose float32 arrays are cast to autocast's dtype before `run`, which is `fn` without autocast."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        lists = regions.current()
        if lists is None or lists.dtype is None:
            return run(*args, **kwargs)
        args, kwargs = _low((args, kwargs), lists.dtype)
        out = run(*args, **kwargs)
        return _marked(out, lists.dtype) if regions.is_tracing() else out

    return wrapped


def _low(tree: Any, dtype: Any) -> Any:
    """`tree` with its float32 arrays in `dtype`; modules and numbers stay as they are."""

    def low(x: Any) -> Any:
        is_wide = isinstance(x, (jax.Array, np.ndarray)) and x.dtype == jnp.float32
        return jnp.asarray(x, dtype) if is_wide else x

    return jax.tree.map(low, tree, is_leaf=array_functions.is_module)


def _marked(tree: Any, dtype: Any) -> Any:
    """`tree` with its arrays of `dtype` in float32, marked as what they are."""
    return jax.tree.map(
        lambda x: checkpoint_name(x.astype(jnp.float32), LOW_MARK) if getattr(x, "dtype", None) == dtype else x, tree
    )


def _attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jax's attention in a function that is traced: of 16-bit arrays, if a kernel computes it.

    Where it is made of matmuls and a softmax, these run by the lists, and its logits return float32, as jax asks.
    """
    lists = regions.current()
    if not regions.is_tracing() or lists is None or lists.dtype is None or _MATMUL not in lists.allow:
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments |= {k: _low(call.arguments[k], lists.dtype) for k in _OPERANDS if k in call.arguments}
    implementation = call.arguments.get("implementation")
    is_kernel = implementation not in (None, "xla")
    if implementation is None:  # what jax picks for 16-bit arrays is a kernel if it has no matmul for XLA
        closed = jax.make_jaxpr(lambda: original(*call.args, **call.kwargs))()
        is_kernel = not any(eqn.primitive.name == _MATMUL for eqn in jaxprs.equations(closed))
    if not is_kernel:
        with regions.region(lists._replace(float32_products="read")):
            return original(*args, **kwargs)
    with regions.region(OFF.off(_NAME)):
        out = original(*call.args, **call.kwargs)
    return _marked(out, lists.dtype)


class _Traces:
    """How many traces run, and where jax's function is to be put back after the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.replaced: list[tuple[Any, Any]] = []


_TRACES = _Traces()


@contextlib.contextmanager
def tracing(lists: CastLists) -> Iterator[None]:
    """The trace of a function that will run by `lists`."""
    with _TRACES.lock:
        _TRACES.count += 1
        if _TRACES.count == 1:
            original = jax.nn.dot_product_attention
            stand_in = functools.wraps(original)(functools.partial(_attend, original))
            holders = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(_NAME) is original]
            _TRACES.replaced = [(module, original) for module in holders]
            for module in holders:
                setattr(module, _NAME, stand_in)
    try:
        with regions.tracing(lists):
            yield
    finally:
        with _TRACES.lock:
            _TRACES.count -= 1
            if not _TRACES.count:
                for module, original in _TRACES.replaced:
                    setattr(module, _NAME, original)
