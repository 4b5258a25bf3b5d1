"""Turns functions that call flax modules into functions of arrays; adds hooks around the calls of these modules.

A trace must not leak into the state of a module. So a call with modules is first turned into a function of arrays: an
nnx module among the arguments is split, called as a copy, and updated with the state of the copy afterwards; a method
of a bound linen module is lifted, as in `nn.jit`.

While such a function runs, a hook runs around each call of a linen module, or of an nnx module among the arguments. The
hook gets the path of the module's params.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen, nnx
from flax.core import lift
from flax.linen import transforms

from jaxmp._src.programs import module_paths
from jaxmp._src.programs.array_functions import flat_leaves, is_module, with_values


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
      module: the module.
      path: the path of its params, `Block_0/Dense_1`; "" for the root.
      method: the name of the method.
      run: makes the call and returns its result.
    """

    module: Any
    path: str
    method: str
    run: Callable[[], Any]


Hook = Callable[[ModuleCall], Any]  # returns the result of the call


def leave_marker(call: ModuleCall) -> Any:
    """The hook that leaves the path of the module in the name stack; trace inside of `module_paths.marking()`."""
    with module_paths.marker(call.path):
        return call.run()


def named(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, in which the operations of flax modules carry the paths of the modules."""

    def function(*args: Any, **kwargs: Any) -> Any:
        nodes = filter(is_module, jax.tree.leaves((args, kwargs), is_leaf=is_module))
        with module_paths.marking():
            return with_hook(fn, nodes, leave_marker)(*args, **kwargs)

    return function


def call(fn: Callable[..., Any], transform: Callable[..., Any], args: Any, kwargs: Any, hook: Hook) -> Any:
    """Calls `fn` through a transformation of functions of arrays, modules among its arguments included.

    Args:
      fn: the function, or a method whose first argument is a module.
      transform: takes a function of pytrees of arrays and returns one like it.
      args: positional arguments.
      kwargs: keyword arguments.
      hook: stands around each call of a module.

    Returns:
      The result of `fn`; nnx modules are updated in place.
    """
    fn, args, kwargs = unbound(fn, args, kwargs)
    if args and isinstance(args[0], linen.Module) and args[0].scope is not None:
        return _call_linen(fn, transform, args[0], args[1:], kwargs, hook)
    leaves = flat_leaves((args, kwargs), _changes_in_place)
    bound = [x for x in leaves.values if isinstance(x, linen.Module) and x.scope is not None]
    if bound:
        return _call_linen(lambda _, *args, **kwargs: fn(*args, **kwargs), transform, bound[0], args, kwargs, hook)
    places = [i for i, x in enumerate(leaves.values) if _changes_in_place(x)]
    if not places:
        return transform(with_hook(fn, (), hook))(*args, **kwargs)
    nodes = [leaves.values[i] for i in places]
    graphdef, state = nnx.split(nodes)
    rest = with_values(leaves.values, places, [None] * len(places))

    def pure(state: Any, rest: Any) -> Any:
        copies = nnx.merge(graphdef, state, copy=True)
        before = {path: jax.tree.leaves(x) for path, x in nnx.to_flat_state(nnx.state(copies))}
        args, kwargs = leaves.rebuild(with_values(rest, places, copies))
        out = with_hook(fn, copies, hook)(*args, **kwargs)
        # A variable that the call did not change may belong to an outer trace, where it must not be written.
        after = nnx.to_flat_state(nnx.state(copies))
        return out, nnx.from_flat_state([(p, x) for p, x in after if not _are_same(before.get(p), jax.tree.leaves(x))])

    out, after = transform(pure)(nnx.as_pure(state), rest)
    nnx.update(nodes, after)
    return out


def _are_same(old: list[Any] | None, new: list[Any]) -> bool:
    return old is not None and len(old) == len(new) and all(x is y for x, y in zip(old, new, strict=True))


def _changes_in_place(x: Any) -> bool:
    return is_module(x) or isinstance(x, nnx.Variable)


def unbound(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A function that takes the module it is bound to, and the arguments of a partial, as arguments."""
    if isinstance(fn, functools.partial):
        return unbound(fn.func, (*fn.args, *args), fn.keywords | kwargs)
    if is_module(fn) or isinstance(fn, linen.Module):
        return type(fn).__call__, (fn, *args), kwargs
    owner = getattr(fn, "__self__", None)
    if (is_module(owner) or isinstance(owner, linen.Module)) and hasattr(fn, "__func__"):
        return fn.__func__, (owner, *args), kwargs
    return fn, args, kwargs


def _call_linen(fn: Any, transform: Any, module: Any, args: Any, kwargs: Any, hook: Hook) -> Any:
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
        return with_hook(fn, (), hook)(module, *args, **kwargs)

    return transforms.lift_direct_transform(lifted, (method,), module, *args, multi_scope=True, **kwargs)


def with_hook(fn: Callable[..., Any], nodes: Any, hook: Hook) -> Callable[..., Any]:
    """`fn`, with a hook around the calls of linen modules and of the nnx modules in `nodes` while it runs."""

    def around_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        return hook(ModuleCall(module, path, context.method_name, lambda: next_fun(*args, **kwargs)))

    @functools.wraps(fn)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        with linen.intercept_methods(around_linen), _hooked_nnx(nodes, hook):
            return fn(*args, **kwargs)

    return hooked


@contextlib.contextmanager
def _hooked_nnx(nodes: Any, hook: Hook) -> Iterator[None]:
    """Gives each module in `nodes` a class of its own, whose calls have the hook and a named scope as linen's have."""
    changed: dict[int, tuple[Any, type, Any]] = {}
    try:
        for node in nodes:
            for path, module in nnx.iter_modules(node) if is_module(node) else ():
                if id(module) not in changed:
                    kind, before = type(module), vars(module).get("_jaxmp_call")  # of a transformation around this one
                    changed[id(module)] = module, kind, before
                    name, hooks = before or (str(path[-1]) if path else kind.__name__, ())
                    object.__setattr__(module, "_jaxmp_call", (name, (("/".join(map(str, path)), hook), *hooks)))
                    if before is None:
                        is_tree = jax.tree.structure(module) != jax.tree.structure(0)
                        object.__setattr__(module, "__class__", _hooked_class(kind, is_tree))
        yield
    finally:
        for module, kind, before in changed.values():
            object.__setattr__(module, "__class__", kind)
            object.__delattr__(module, "_jaxmp_call")
            if before is not None:
                object.__setattr__(module, "_jaxmp_call", before)


@functools.cache
def _hooked_class(kind: type, is_tree: bool) -> type:
    """A class whose calls are hooked; like `kind` it is no tree to jax if `kind` was made with `pytree=False`."""

    def hooked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, hooks = self._jaxmp_call

        def run(hooks: Any) -> Any:
            if not hooks:
                return kind.__call__(self, *args, **kwargs)
            (path, hook), *others = hooks
            return hook(ModuleCall(self, path, "__call__", lambda: run(others)))

        with jax.named_scope(name):
            return run(hooks)

    options: dict[str, Any] = {} if is_tree else {"pytree": False}
    return type(kind.__name__, (kind,), {"__call__": hooked_call, "__module__": kind.__module__}, **options)
