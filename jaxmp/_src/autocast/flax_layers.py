"""Flax layers under autocast: dtypes of modules, by path or their own, layers that are one operation, and regions.

A module with a 16-bit `dtype` of its own keeps it, as if `modules` named it. dtype=float32, the
default of many models, is ignored: the module runs by the lists, unless the policy keeps it.

PyTorch treats some layers as one operation and decides the dtype that they return: batch norm computes in float32 and
returns its input's dtype, an LSTM or GRU cell and a layer in fp8 return the 16-bit dtype. In a jaxpr, such a layer is
many ordinary operations. So autocast marks its result with a name that `choices` reads.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmp._src.autocast import reach, regions
from jaxmp._src.autocast.cast_lists import FLOATS, LOW, LOW_MARK, OFF, CastLists, asks_for_float32
from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.programs import flax_modules, haiku_frames, module_paths

_ONE_OPERATION = (
    *(linen.BatchNorm, linen.LSTMCell, linen.OptimizedLSTMCell, linen.ConvLSTMCell, linen.SimpleCell, linen.GRUCell),
    *(linen.MGUCell, nnx.BatchNorm, nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.SimpleCell, nnx.GRUCell),
)


def call(fn: Callable[..., Any], transform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`flax_modules.call`, in which each module runs by the lists for its path."""
    return flax_modules.call(fn, transform, args, kwargs, _by_path)


def with_modules(fn: Callable[..., Any], modules: Iterable[Any]) -> Callable[..., Any]:
    """`fn`, in which these nnx modules run by the lists for their paths, where it is traced for a rewrite.

    For functions of arrays that put a module together and call `fn` with it; `call` does this for modules that are
    arguments.
    """
    return flax_modules.with_hook(fn, modules, _by_path) if regions.is_tracing() else fn


def _by_path(call: flax_modules.ModuleCall) -> Any:
    lists = regions.current()
    layer_lists = None if lists is None else _lists_for(call, lists)
    # Whoever chooses operations names them by the paths of their modules.
    is_chosen = lists is not None and lists.chooser is not None
    marker = module_paths.marker(call.path, "chosen") if is_chosen else contextlib.nullcontext()
    with marker, contextlib.nullcontext() if layer_lists is None or layer_lists == lists else _region_of(layer_lists):
        out = call.run()
        if call.method != "__call__" or not (isinstance(call.module, _ONE_OPERATION) or _is_in_fp8(call.module)):
            return out
        if _dtype_of(call.module) in LOW or layer_lists is None or layer_lists.dtype is None:
            return out
        if asks_for_float32(getattr(call.module, "preferred_element_type", None)):  # of a layer in fp8
            return out
        return jax.tree.map(lambda x: checkpoint_name(x, LOW_MARK) if getattr(x, "dtype", None) in FLOATS else x, out)


def _is_in_fp8(module: Any) -> bool:
    """Whether a layer was turned to fp8: it, or the rule by which it promotes its operands, says so."""
    return any(getattr(x, "is_in_fp8", False) for x in (module, getattr(module, "promote_dtype", None)))


def _lists_for(call: flax_modules.ModuleCall, lists: CastLists) -> CastLists:
    if isinstance(call.module, linen.Module) and call.module.is_initializing():
        return OFF  # params are made as they are
    if lists.modules.first(call.path) is not None:
        return lists.at(call.path)
    if lists.dtype is None:
        return lists
    if asks_for_float32(getattr(call.module, "preferred_element_type", None)):
        lists = lists._replace(float32_products="all")
    own_dtype = _dtype_of(call.module)
    if own_dtype in LOW and not isinstance(call.module, _ALWAYS_WITH_DTYPE):
        return lists._replace(dtype=own_dtype, because="")
    if not isinstance(call.module, _IN_FLOAT32_BY_THE_LISTS) and _is_kept(call, lists):
        return lists.off(_KEPT)
    return lists._replace(because=_IGNORED if own_dtype == jnp.float32 else "")


def _is_kept(call: flax_modules.ModuleCall, lists: CastLists) -> bool:
    """Whether the policy of `lists` names every param of the called module and of those below it."""
    module: Any = call.module
    if lists.keeps is None:
        return False
    if isinstance(module, linen.Module):
        params = module.variables.get("params", {})
    else:
        params = nnx.as_pure(nnx.state(module, nnx.Param)) if isinstance(module, nnx.Module) else {}
    paths = (tree_paths.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return lists.keeps(call.path, paths)


_KEPT = "keep_fp32"
_IGNORED = "dtype=float32 is ignored"
_IN_FLOAT32_BY_THE_LISTS = (linen.BatchNorm, nnx.BatchNorm)  # and their result is that of one operation


@contextlib.contextmanager
def _region_of(lists: CastLists) -> Iterator[None]:
    """A region in a function that is traced; a layer that the policy keeps is not in fp8 either."""
    is_kept = lists.because == _KEPT
    with regions.region(lists), ambient.FP8_ENABLED(False) if is_kept else contextlib.nullcontext():
        yield


_ALWAYS_WITH_DTYPE = (nnx.Embed, nnx.SimpleCell)  # theirs is never None: nobody chose it


def _dtype_of(module: Any) -> np.dtype | None:
    """The `dtype` of a module, if it is one of autocast's."""
    try:
        own_dtype = jnp.dtype(module.dtype)
    except (AttributeError, TypeError):
        return None
    return own_dtype if own_dtype in FLOATS and module.dtype is not None else None


@contextlib.contextmanager
def region(lists: CastLists, wrap: Callable[..., Any]) -> Iterator[None]:
    """A region of autocast; linen and haiku modules that are called in it run by its lists.

    `wrap(fn, lists, output_dtype)` is the transformation.
    """

    def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        reach.mark()
        here = regions.current()
        idle = regions.is_tracing() or here is None or here.dtype is None
        if idle or context.module.scope is None or context.module.is_initializing() or not _is_own_method(context):
            return next_fun(*args, **kwargs)
        method = context.method_name

        def again(module: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(module, method)(*args, **kwargs)

        return wrap(again, here, None)(context.module, *args, **kwargs)

    def haiku_method(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        reach.mark()
        here = regions.current()
        idle = regions.is_tracing() or here is None or here.dtype is None or context.method_name == "__init__"
        return (next_fun if idle else wrap(next_fun, here, None))(*args, **kwargs)

    with regions.region(lists), linen.intercept_methods(interceptor), haiku_frames.intercepting(haiku_method):
        yield


def _is_own_method(context: Any) -> bool:
    """Whether the class finds the called method by its name: not so for functions in `apply(method=fn)`."""
    method = getattr(type(context.module), context.method_name, None)
    while method is not None and method is not context.orig_method.func:
        method = getattr(method, "__wrapped__", None)
    return method is not None
