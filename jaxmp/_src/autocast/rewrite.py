"""Autocast: a function that was written for float32, run in 16 bits where that is fast and safe.

A model casts by hand in a hundred places (`dtype=` of every layer, `astype` round every softmax and loss), or in none
if something looks at each operation as it comes by and chooses the dtype for it. PyTorch does that in its dispatcher.
JAX traces: the function is traced once as it is, in float32, and the jaxpr is run anew with casts put in

    fn  --make_jaxpr-->  jaxpr  --_op_uses, _op_plan-->  a dtype for each operation  --_op_emit-->  JAX operations

What comes out is JAX again, so it composes: under and over `jit`, `grad`, `vmap`, `scan`, `remat`, `shard_map`, and
with layers that have derivatives of their own. Gradients have the dtypes of what they are gradients of, as a cast's
derivative is the cast back: float32 params get float32 gradients, computed by 16-bit matmuls.

Where we differ from torch.autocast:
- The whole function is seen before it runs. What feeds float32 operations only runs in float32, so that norms and
  softmaxes written by hand do not overflow; a weight in a loop is cast before the loop.
- A mean is a sum and a division in a jaxpr, so it gives float32 (torch: the input's dtype).
- A cast to the dtype a value was traced in leaves no trace: `x.astype(jnp.float32)` in a float32 function asks for
  nothing. `jaxmp.no_autocast` does.
- A disabled region runs as it was written: float32 operations get float32 back (torch hands them what comes).
- float16 masks saturate: `where(mask, x, -1e9)` gives -65504, not -inf.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.autocast import calls, cast_lists, emit, flax_layers, planner, regions
from jaxmp._src.autocast.cast_lists import FLOATS, CastLists
from jaxmp._src.programs import array_functions

F = TypeVar("F", bound=Callable[..., Any])


class Autocast:
    """What `autocast` returns where it is given no function: a decorator, and a region for `with`."""

    def __init__(self, lists: CastLists, output_dtype: Any = None, *, inherits: bool = False):
        self._lists = lists
        self._output_dtype = output_dtype
        self._inherits = inherits
        self._entered = threading.local()

    def __call__(self, fn: F) -> F:
        return _wrap(fn, self._lists, self._output_dtype, inherits=self._inherits)

    def __enter__(self) -> "Autocast":
        if self._output_dtype is not None:
            raise ValueError("autocast: a region has no output to cast; output_dtype= is for functions")
        region = flax_layers.region(_inherited(self._lists) if self._inherits else self._lists, _wrap)
        region.__enter__()
        vars(self._entered).setdefault("regions", []).append(region)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.regions.pop().__exit__(*exception)


class _Options(TypedDict, total=False):
    """The keywords of `autocast`, for its overloads."""

    enabled: bool
    allow: Iterable[str]
    force_fp32: Iterable[str]
    widest: Iterable[str]
    modules: Mapping[str, Any] | None
    output_dtype: Any


@overload
def autocast(fn: None = None, dtype: Any = None, **options: Unpack[_Options]) -> Autocast: ...
@overload
def autocast(fn: F, dtype: Any = None, **options: Unpack[_Options]) -> F: ...
def autocast(
    fn: Any = None,
    dtype: Any = None,
    *,
    enabled: bool = True,
    allow: Iterable[str] = (),
    force_fp32: Iterable[str] = (),
    widest: Iterable[str] = (),
    modules: Mapping[str, Any] | None = None,
    output_dtype: Any = None,
) -> Any:
    """Runs a function in mixed precision, as it is: `torch.autocast` for JAX.

    Matmuls and convolutions run in `dtype`; what needs float32 (exp, log, powers, sums, norms, softmax, losses) in
    float32; the rest in the widest dtype of its inputs. float64, complex, integers, keys and fp8 are left alone.
    Params stay float32 outside, and so do their gradients. `fn` is traced in float32 whatever it is given, so that
    with 16-bit params it is the same function: their gradients are 16-bit, its loss is float32.

        step = jax.jit(jaxmp.autocast(loss_fn, jnp.bfloat16))       a transformation of a function
        @jaxmp.autocast(dtype=jnp.float16)                          a decorator; methods of linen and nnx modules too
        with jaxmp.autocast(dtype=jnp.float16): ...                 a region

    As a region it reaches the linen modules called in it, the loss functions of `jaxmp.value_and_grad` and
    `jaxmp.nnx.value_and_grad`, and, inside of an autocast function, every operation: `with autocast(enabled=False)`
    there runs as it was written. What was jitted outside of a region is traced anew in it. Of nested ones the innermost
    counts, whatever transformations lie between.

    Args:
      fn: the function. Its arguments may be any pytrees, with static leaves and nnx modules, which are updated.
      dtype: float16 (needs loss scaling), bfloat16, or float32, which switches autocast off. None for that of the
        region or function around it, and float16 outside of all.
      enabled: False is the same as float32.
      allow: names of primitives that run in `dtype` besides, or in spite of, the lists. `jaxmp.explain_autocast` gives
        the names in a function.
      force_fp32: names that run in float32.
      widest: names that run in the widest dtype of their inputs.
      modules: dtypes of flax modules by globs over their paths, as `{"head": jnp.float32, "Block_3/*": jnp.bfloat16}`;
        the first that fits counts, and holds for what the module calls unless that is named itself. nnx modules have
        paths where they are arguments of `fn`. `jaxmp.suggest_policy` finds out which modules need it.
      output_dtype: casts the floats that `fn` returns; None leaves each in the dtype it was computed in.

    Returns:
      The function, with the same arguments and outputs of the same structure. Without `fn`, a decorator that is a
      context manager as well.

    Raises:
      ValueError: a dtype it cannot run in (fp8: `jaxmp.fp8.autocast` does); an unknown name in a list, or one in two.
      TypeError: `fn` is not callable.

    Example:
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
      >>> w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
      >>> loss, grad = jax.value_and_grad(autocast(loss_fn))(w, x)
      >>> loss.dtype.name, grad.dtype.name, autocast(jnp.dot)(x, w).dtype.name
      ('float32', 'float32', 'float16')

    References:
      torch.autocast (PyTorch 2.13); Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740).
    """
    if _is_dtype(fn):  # `autocast(jnp.float16)`, as torch.autocast takes its dtype
        fn, dtype = None, fn
    lists = cast_lists.make_lists(jnp.float16 if dtype is None else dtype, allow, force_fp32, widest, modules)
    if not enabled:
        lists = cast_lists.OFF
    if output_dtype is not None:
        output_dtype = jnp.dtype(output_dtype)
        if not jnp.issubdtype(output_dtype, jnp.floating):
            raise ValueError(f"autocast: output_dtype must be a float dtype, got {output_dtype.name}")
    if fn is None:
        return Autocast(lists, output_dtype, inherits=dtype is None)
    if not callable(fn):
        raise TypeError(f"autocast: fn must be a function or None (decorator, `with`), got {type(fn).__name__}")
    return _wrap(fn, lists, output_dtype, inherits=dtype is None)


def no_autocast(fn: F) -> F:
    """A function that autocast leaves as it was written, wherever it is called.

    Args:
      fn: the function. In an autocast function it gets back the dtypes it was traced with.

    Returns:
      The function.

    Example:
      >>> dense = no_autocast(jnp.dot)
      >>> autocast(lambda x: dense(x, x))(jnp.ones((2, 2))).dtype.name
      'float32'
    """
    return _wrap(fn, cast_lists.OFF, None)


def by_region(fn: F) -> F:
    """`fn` under the lists of the region it is called in: what functions that are handed to jaxmp go through.

    Args:
      fn: the function.

    Returns:
      `fn` itself where there is no region, or where an autocast function that is being traced will see to it.
    """
    lists = regions.current()
    return fn if lists is None or lists.dtype is None or regions.is_tracing() else _wrap(fn, lists, None)


def _is_dtype(fn: Any) -> bool:
    if isinstance(fn, (str, np.dtype)):
        return True
    try:
        return isinstance(fn, type(jnp.float16)) or (isinstance(fn, type) and issubclass(fn, (np.generic, float, int)))
    except TypeError:
        return False


def _inherited(lists: CastLists) -> CastLists:
    """The lists with the dtype of the region or function that they are used in, if it has one."""
    outer = regions.current()
    return lists if outer is None or outer.dtype is None or lists.dtype is None else lists._replace(dtype=outer.dtype)


def _wrap(fn: Any, lists: CastLists, output_dtype: Any, *, inherits: bool = False) -> Any:
    if isinstance(fn, type):
        raise TypeError(f"autocast: decorate the __call__ of {fn.__name__}, or a function that calls it, not the class")

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        here = _inherited(lists) if inherits else lists
        out = flax_layers.call(fn, lambda pure: _rewritten(pure, here), args, kwargs)
        if output_dtype is None:
            return out
        return jax.tree.map(lambda x: x.astype(output_dtype) if is_float_array(x) else x, out)

    return wrapped


def _rewritten(fn: Callable[..., Any], lists: CastLists) -> Callable[..., Any]:
    """A function of pytrees, traced, planned and run anew."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if lists.dtype is None:
            with regions.region(lists):
                return fn(*args, **kwargs)
        traced = Traced(fn, lists, args, kwargs)
        plan = traced.planner.plan((traced.jaxpr, traced.consts), traced.inputs, lists)
        with regions.rewritten():
            emitter = emit.Emitter(traced.planner, calls.CALLS)
            return traced.unflatten(emitter.run(plan, traced.consts, traced.values))

    return wrapped


class Traced(array_functions.Traced):
    """A function as it was traced for a rewrite: in float32, and its float inputs in the dtypes they have."""

    def __init__(self, fn: Callable[..., Any], lists: CastLists, args: Any, kwargs: Any):
        super().__init__(
            fn,
            args,
            kwargs,
            # A numpy scalar is a number to Python code, which may ask for it.
            is_input=lambda x: is_float_array(x) and not isinstance(x, np.generic),
            context=regions.tracing(lists),
            # In float32, whatever comes: a function of 16-bit params is no other function.
            as_traced=lambda aval: aval.update(dtype=np.dtype(np.float32)),
        )
        self.inputs = tuple(planner.value_of(aval) for aval in self.avals)
        self.planner = planner.Planner()


def is_float_array(x: Any) -> bool:
    """Whether `x` is an array that autocast may cast."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and x.dtype in FLOATS
