"""Functions that look at dtypes in Python, before there is a jaxpr: attention kernels, and others that a user names.

autocast traces a function in float32 and chooses dtypes afterwards. A function that asks `q.dtype` while it is traced
gets float32 for an answer: cuDNN's attention refuses it, others take a slow path. So such a function is called with
16-bit arrays, in a region without autocast, and its 16-bit results become float32 again for the rest of the trace, with
the mark that their dtype is the 16-bit one (`flax_layers` uses it for layers that are one operation). In the program
that runs, a matmul's 16-bit result goes to the function as it is: XLA removes the casts to float32 and back.

`jax.nn.dot_product_attention` is called so where it is a kernel (`implementation="cudnn"`, or what jax picks for 16-bit
arrays), wherever a module holds it under its name, `from jax.nn import` included. Where it is made of matmuls and a
softmax, these run by the lists: the algorithm that jax names for float16 is not on every device. Other functions, and
the same one where an object holds it (a `functools.partial` that was made before, an attribute of a layer), are wrapped
by `jaxmp.no_autocast(fn, cast_inputs=True)`.
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


@contextlib.contextmanager
def tracing(lists: CastLists) -> Iterator[None]:
    """The trace of a function that will be rewritten by `lists`; attention in it sees 16-bit arrays."""
    with regions.tracing(lists), _attention_replaced():
        yield


def _low(tree: Any, dtype: Any) -> Any:
    """`tree` with its float32 arrays in `dtype`; modules and numbers stay as they are."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if _is_float32_array(x) else x, tree, is_leaf=array_functions.is_module
    )


def _is_float32_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and x.dtype == jnp.float32


def _marked(tree: Any, dtype: Any) -> Any:
    """`tree` with its arrays of `dtype` in float32, marked as what they are."""
    return jax.tree.map(
        lambda x: checkpoint_name(x.astype(jnp.float32), LOW_MARK) if getattr(x, "dtype", None) == dtype else x, tree
    )


_ATTENTION = "dot_product_attention"
_OPERANDS = ("query", "key", "value", "bias")  # cuDNN's kernel adds a bias of the dtype of the others
_MATMUL = "dot_general"
_LOCK = threading.Lock()


class _Attention:
    """`jax.nn.dot_product_attention` for functions that autocast traces; elsewhere it is the original.

    It stands in place of the original in every module that holds it under its name, while a trace of any thread runs.
    """

    def __init__(self, original: Callable[..., Any]):
        functools.update_wrapper(self, original)
        self._original = original
        self._signature = inspect.signature(original)
        self._traces = 0
        modules = list(sys.modules.values())
        self._holders = [m for m in modules if getattr(m, "__dict__", {}).get(_ATTENTION) is original]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the original."""
        lists = regions.current()
        if not regions.is_tracing() or lists is None or lists.dtype is None or _MATMUL not in lists.allow:
            return self._original(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs)
        low = {name: _low(given.arguments[name], lists.dtype) for name in _OPERANDS if name in given.arguments}
        given.arguments |= low
        if not self._is_kernel(given):  # made of matmuls and a softmax, which run by the lists
            return self._original(*args, **kwargs)
        with regions.region(OFF.off(_ATTENTION)):
            out = self._original(*given.args, **given.kwargs)
        return _marked(out, lists.dtype)

    def _is_kernel(self, given: inspect.BoundArguments) -> bool:
        """Whether jax calls a kernel for these 16-bit arrays. What it picks is one if it has no matmul for XLA."""
        implementation = given.arguments.get("implementation")
        if implementation is not None:
            return implementation != "xla"
        closed = jax.make_jaxpr(lambda: self._original(*given.args, **given.kwargs))()
        return not any(eqn.primitive.name == _MATMUL for eqn in jaxprs.equations(closed))

    def enter(self) -> None:
        """A trace begins."""
        self._traces += 1
        if self._traces == 1:
            self._put(self)

    def leave(self) -> None:
        """A trace ends."""
        self._traces -= 1
        if not self._traces:
            self._put(self._original)

    def _put(self, attention: Callable[..., Any]) -> None:
        for module in self._holders:
            setattr(module, _ATTENTION, attention)


@contextlib.contextmanager
def _attention_replaced() -> Iterator[None]:
    with _LOCK:
        current = jax.nn.dot_product_attention
        attention = current if isinstance(current, _Attention) else _Attention(current)
        attention.enter()
    try:
        yield
    finally:
        with _LOCK:
            attention.leave()
