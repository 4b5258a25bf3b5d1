"""Functions that look at dtypes in Python, before there is a jaxpr: attention kernels, and others that a user names.

autocast traces a function in float32 and chooses dtypes afterwards. A function that asks `q.dtype` while it is traced
gets float32 for an answer: cuDNN's attention refuses it, others take a slow path. So such a function is called with
16-bit arrays, in a region without autocast, and its 16-bit results become float32 again for the rest of the trace, with
the mark that their dtype is the 16-bit one (`flax_layers` uses it for layers that are one operation). In the program
that runs, a matmul's 16-bit result goes to the function as it is: XLA removes the casts to float32 and back.

`jax.nn.dot_product_attention` is called so where it is a kernel (`implementation="cudnn"`, or what jax picks for 16-bit
arrays), wherever a module holds it under its name, `from jax.nn import` included. Where it is made of matmuls and a
softmax, these run by the lists, and the products of queries and keys are float32, as jax asks (`float32_products`): the
algorithm that jax names for float16 is not on every device. Other functions, and the same one where an object holds it
(a `functools.partial` that was made before, an attribute of a layer), are wrapped by
`jaxmp.no_autocast(fn, cast_inputs=True)`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmp._src.autocast import float32_products, loop_sums, regions, stand_ins
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


class _Attention(stand_ins.StandIn):
    """`jax.nn.dot_product_attention` for functions that autocast traces."""

    def call(self, lists: CastLists, *args: Any, **kwargs: Any) -> Any:
        """The original, with 16-bit arrays where it is a kernel."""
        if _MATMUL not in lists.allow:
            return self.original(*args, **kwargs)
        given = inspect.signature(self.original).bind(*args, **kwargs)
        low = {name: _low(given.arguments[name], lists.dtype) for name in _OPERANDS if name in given.arguments}
        given.arguments |= low
        if not self._is_kernel(given):  # made of matmuls and a softmax, which run by the lists
            return self.original(*args, **kwargs)
        with regions.region(OFF.off(_ATTENTION)):
            out = self.original(*given.args, **given.kwargs)
        return _marked(out, lists.dtype)

    def _is_kernel(self, given: inspect.BoundArguments) -> bool:
        """Whether jax calls a kernel for these 16-bit arrays. What it picks is one if it has no matmul for XLA."""
        implementation = given.arguments.get("implementation")
        if implementation is not None:
            return implementation != "xla"
        closed = jax.make_jaxpr(lambda: self.original(*given.args, **given.kwargs))()
        return not any(eqn.primitive.name == _MATMUL for eqn in jaxprs.equations(closed))


_FUNCTIONS = (
    stand_ins.Function(jax.nn, _ATTENTION, _Attention),
    *float32_products.FUNCTIONS,
    *loop_sums.FUNCTIONS,
)


@contextlib.contextmanager
def tracing(lists: CastLists) -> Iterator[None]:
    """The trace of a function that will be rewritten by `lists`; it sees the dtypes that are asked for in calls."""
    with regions.tracing(lists), stand_ins.standing_in(_FUNCTIONS):
        yield
