"""Flax modules under autocast: state that a function of arrays does not have, and layers that are one operation.

A trace must not leak into the state of a module. So a call that has modules in it is made a function of arrays first:
an nnx module among the arguments is split, called as a copy, and updated with what the copy became; a method of a bound
linen module is lifted, as `nn.jit` does it.

Some layers are one operation to PyTorch, which decides the dtype it returns: batch norm computes in float32 and returns
its input's dtype, an LSTM or GRU cell returns the 16-bit dtype. In a jaxpr they are many, which cannot be told from
others. So their results are marked, by a name that `_op_plan` reads.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen, nnx
from flax.core import lift
from flax.linen import transforms
from jax.ad_checkpoint import checkpoint_name

from jaxmp._src.autocast import regions
from jaxmp._src.autocast.cast_lists import FLOATS, LOW_MARK, CastLists
from jaxmp._src.programs import module_paths

_LINEN_CELLS = (
    *(linen.LSTMCell, linen.OptimizedLSTMCell, linen.ConvLSTMCell, linen.SimpleCell, linen.GRUCell, linen.MGUCell),
)
_LINEN = (linen.BatchNorm, *_LINEN_CELLS)
_NNX = (nnx.BatchNorm, nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.SimpleCell, nnx.GRUCell)


def call(fn: Callable[..., Any], transform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `fn` through a transformation of functions of arrays, modules among its arguments included.

    Args:
      fn: the function, or a method whose first argument is a module.
      transform: takes such a function and returns one like it.
      args: positional arguments.
      kwargs: keyword arguments.

    Returns:
      What `fn` returns; nnx modules are updated in place.
    """
    fn, args, kwargs = _unbound(fn, args, kwargs)
    if args and isinstance(args[0], linen.Module) and args[0].scope is not None:
        return _call_linen(fn, transform, args[0], args[1:], kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    bound = [x for x in leaves if isinstance(x, linen.Module) and x.scope is not None]
    if bound:
        return _call_linen(lambda _, *args, **kwargs: fn(*args, **kwargs), transform, bound[0], args, kwargs)
    places = [i for i, x in enumerate(leaves) if _is_node(x)]
    if not places:
        return transform(with_hooks(fn, ()))(*args, **kwargs)
    nodes = [leaves[i] for i in places]
    graphdef, state = nnx.split(nodes)
    rest = [None if i in places else x for i, x in enumerate(leaves)]

    def pure(state: Any, rest: Any) -> Any:
        copies = nnx.merge(graphdef, state, copy=True)
        before = {path: nnx.as_pure(x) for path, x in nnx.to_flat_state(nnx.state(copies))}
        given = list(rest)
        for i, x in zip(places, copies, strict=True):
            given[i] = x
        args, kwargs = jax.tree.unflatten(treedef, given)
        out = with_hooks(fn, copies)(*args, **kwargs)
        # What a call left as it was may be of an outer trace, in which nothing can be written.
        after = nnx.to_flat_state(nnx.state(copies))
        return out, nnx.from_flat_state([(p, x) for p, x in after if before.get(p) is not nnx.as_pure(x)])

    out, after = transform(pure)(nnx.as_pure(state), rest)
    nnx.update(nodes, after)
    return out


@contextlib.contextmanager
def region(lists: CastLists, wrap: Callable[..., Any]) -> Iterator[None]:
    """A region of autocast, in which linen modules that are called by themselves run by its lists.

    Args:
      lists: the lists.
      wrap: `(fn, lists, output_dtype) -> fn`, the transformation.
    """

    def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        here = regions.current()
        idle = regions.is_tracing() or here is None or here.dtype is None
        if idle or context.module.scope is None or context.module.is_initializing() or not _is_own_method(context):
            return next_fun(*args, **kwargs)
        method = context.method_name

        def again(module: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(module, method)(*args, **kwargs)

        return wrap(again, here, None)(context.module, *args, **kwargs)

    with regions.region(lists), linen.intercept_methods(interceptor):
        yield


def _is_own_method(context: Any) -> bool:
    """Whether the class finds the method that is called by its name: not so for functions in `apply(method=fn)`."""
    found = getattr(type(context.module), context.method_name, None)
    while found is not None and found is not context.orig_method.func:
        found = getattr(found, "__wrapped__", None)
    return found is not None


def _unbound(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A function that takes the module it is bound to, and what else it holds, as arguments."""
    if isinstance(fn, functools.partial):
        return _unbound(fn.func, (*fn.args, *args), fn.keywords | kwargs)
    if isinstance(fn, (linen.Module, nnx.Module)):
        return type(fn).__call__, (fn, *args), kwargs
    if isinstance(getattr(fn, "__self__", None), (linen.Module, nnx.Module)) and hasattr(fn, "__func__"):
        return fn.__func__, (fn.__self__, *args), kwargs
    return fn, args, kwargs


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Module, nnx.Rngs, nnx.Variable, nnx.Optimizer))


def _call_linen(fn: Any, transform: Any, module: Any, args: Any, kwargs: Any) -> Any:
    if module.is_initializing():  # params are made as they are
        return fn(module, *args, **kwargs)

    def lifted(core_fn: Any, scope: Any, *args: Any, **kwargs: Any) -> Any:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                out = core_fn(scope, *args, **kwargs)
                return out, repack_fn(scope)

            return transform(pure)(variables, rngs, args, kwargs)

        packed = lift.pack(inner, (True,), (True,), (True,), name="autocast", enable_kwargs=True)
        return packed(scope, *args, **kwargs)

    def method(module: Any, *args: Any, **kwargs: Any) -> Any:
        return with_hooks(fn, ())(module, *args, **kwargs)

    return transforms.lift_direct_transform(lifted, (method,), module, *args, multi_scope=True, **kwargs)


def with_hooks(fn: Callable[..., Any], nodes: Any) -> Callable[..., Any]:
    """`fn`, with the results of some layers marked, and nnx modules named, while it runs."""

    @functools.wraps(fn)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        with linen.intercept_methods(_mark_linen), named_nnx(nodes):
            return fn(*args, **kwargs)

    return hooked


def _mark_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    with _at("/".join(module.path)) if module.scope is not None else contextlib.nullcontext():
        out = next_fun(*args, **kwargs)
        is_layer = context.method_name == "__call__" and isinstance(module, _LINEN) and module.dtype is None
        return _mark(out) if is_layer else out


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """A call of the module at `path`: its marker, and the dtype that it has by name."""
    lists = regions.current()
    with contextlib.ExitStack() as stack:
        stack.enter_context(module_paths.at(path))
        found = None if lists is None else lists.at(path)
        if found is not None and found != lists:
            stack.enter_context(regions.region(found))
        yield


def _mark(out: Any) -> Any:
    lists = regions.current()
    if lists is None or lists.dtype is None:
        return out
    return jax.tree.map(lambda x: checkpoint_name(x, LOW_MARK) if getattr(x, "dtype", None) in FLOATS else x, out)


@contextlib.contextmanager
def named_nnx(nodes: Any) -> Iterator[None]:
    """Copies of nnx modules, whose calls are named by their path as linen's are, and whose results are marked.

    Args:
      nodes: the copies, of which every module gets a class of its own as long as this lasts.
    """
    changed: dict[int, tuple[Any, type]] = {}
    try:
        for node in nodes:
            for path, module in nnx.iter_modules(node) if isinstance(node, nnx.Module) else ():
                if id(module) not in changed:
                    changed[id(module)] = module, type(module)
                    name = str(path[-1]) if path else type(module).__name__
                    object.__setattr__(module, "_jaxmp_name", (name, "/".join(map(str, path))))
                    object.__setattr__(module, "__class__", _named(type(module), _is_tree(module)))
        yield
    finally:
        for module, kind in changed.values():
            object.__setattr__(module, "__class__", kind)
            object.__delattr__(module, "_jaxmp_name")


def _is_tree(module: Any) -> bool:
    return jax.tree.structure(module) != jax.tree.structure(0)


@functools.cache
def _named(kind: type, is_tree: bool) -> type:
    """A class whose calls are named scopes; no tree to jax if `kind` is none (`pytree=False`)."""

    def named_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, path = self._jaxmp_name
        with jax.named_scope(name), _at(path):
            out = kind.__call__(self, *args, **kwargs)
            return _mark(out) if issubclass(kind, _NNX) and getattr(self, "dtype", None) is None else out

    options: dict[str, Any] = {} if is_tree else {"pytree": False}
    return type(kind.__name__, (kind,), {"__call__": named_call, "__module__": kind.__module__}, **options)
