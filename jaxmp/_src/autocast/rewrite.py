"""Autocast: runs a function that was written for float32 in 16 bits, where 16 bits are fast and safe.

Without autocast, a model casts by hand in a hundred places (`dtype=` of every layer, `astype` around every softmax and
loss). With autocast, a library chooses the dtype of each operation. PyTorch does so in its dispatcher. jaxmp traces the
function once, in float32, and runs the jaxpr again with casts:

    fn  --make_jaxpr-->  jaxpr  --value_uses, backwards-->  who reads each value  --interpreter, forwards-->  operations

The result is JAX again, so it composes: under and over `jit`, `grad`, `vmap`, `scan`, `remat`, `shard_map`, and with
layers that have their own derivatives. The derivative of a cast is the cast back, so each gradient has the dtype of its
param: float32 params get float32 gradients, computed by 16-bit matmuls.

Differences from torch.autocast:
- The whole function is known before it runs. Operations that feed only float32 operations run in float32, so that
  norms and softmaxes written by hand do not overflow; a weight in a loop is cast before the loop.
- A mean is a sum and a division in a jaxpr, so it returns float32 (torch: the input's dtype).
- A cast to the dtype in which a value was traced is not in the jaxpr: `x.astype(jnp.float32)` in a float32 function
  has no effect. Use `jaxmp.no_autocast`.
- A disabled region runs as it was written: float32 operations get float32 inputs (torch: the dtype that arrives).
- float16 masks saturate: `where(mask, x, -1e9)` gives -65504, not -inf.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import PyTree

from jaxmp._src.autocast import attention, cast_lists, flax_layers, reach, regions, values, weighted_matmuls
from jaxmp._src.autocast.cast_lists import FLOATS, CastLists
from jaxmp._src.autocast.interpreter import At, Interpreter
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import array_functions, haiku_frames, jaxprs

F = TypeVar("F", bound=Callable[..., Any])
# (a function as it was traced, the lists it runs by, what runs its matmuls by place)
Look = Callable[["Traced", CastLists, dict[Any, Any]], None]


class Autocast:
    """The result of `autocast` without a function: a decorator, and a region for `with`."""

    def __init__(self, lists: CastLists, output_dtype: Any = None, *, inherits: bool = False):
        self._lists = lists
        self._output_dtype = output_dtype
        self._inherits = inherits
        self._entered = threading.local()

    def __call__(self, fn: F) -> F:
        return _wrap(fn, self._lists, self._output_dtype, inherits=self._inherits)

    def __enter__(self) -> "Autocast":
        if self._output_dtype is not None:
            raise ValueError("autocast: a region has no output to cast. Use output_dtype= with a function")
        if self._lists.chooser is not None and regions.is_tracing():
            self._lists.chooser.check_region()
        lists = _inherited(self._lists, self._inherits)
        stack = contextlib.ExitStack()
        region = stack.enter_context(reach.entered(lists))
        stack.enter_context(region_of(lists))
        vars(self._entered).setdefault("regions", []).append((stack, region))
        return self

    def __exit__(self, *exception: Any) -> None:
        self.leave(exception)

    def leave(self, exception: tuple[Any, ...]) -> None:
        """Ends the region, and warns if it changed nothing."""
        stack, region = self._entered.regions.pop()
        stack.__exit__(*exception)
        if exception[0] is None:
            self._lists.modules.warn_of_idle()
            reach.warn_if_idle(region)


def autocast(
    fn: Any = None,
    dtype: Any = None,
    *,
    enabled: bool = True,
    output_dtype: Any = None,
    chooser: Any = None,
    **of_lists: Any,
) -> Any:
    """`jaxmp.autocast` for dtypes; `step.policy_regions.autocast`, which takes policies too, has the arguments.

    `of_lists` are those of `cast_lists.make_lists`; `chooser` says which matmuls run narrower (`weighted_matmuls`).
    """
    if _is_dtype(fn):  # `autocast(jnp.float16)`, as torch.autocast takes its dtype
        fn, dtype = None, fn
    lists = cast_lists.make_lists(jnp.float16 if dtype is None else dtype, **of_lists)
    is_off = not enabled or lists.dtype is None
    lists = cast_lists.OFF.off("autocast is off") if is_off else lists._replace(chooser=chooser)
    if output_dtype is not None:
        output_dtype = jnp.dtype(output_dtype)
        if not jnp.issubdtype(output_dtype, jnp.floating):
            raise ValueError(f"autocast: output_dtype must be a float dtype, got {output_dtype.name}")
    if fn is None:
        return Autocast(lists, output_dtype, inherits=dtype is None)
    if not callable(fn):
        raise TypeError(f"autocast: fn must be a function or None (decorator, `with`), got {type(fn).__name__}")
    return _wrap(fn, lists, output_dtype, inherits=dtype is None)


def region_of(lists: CastLists) -> contextlib.AbstractContextManager[None]:
    """A region that runs by `lists`, and says nothing if it reaches nothing."""
    return flax_layers.region(lists, _wrap)


def no_autocast(fn: F, *, cast_inputs: bool = False) -> F:
    """A function that autocast does not change, wherever it is called.

    With `cast_inputs` it is a function that chooses by dtypes itself: a kernel (Pallas, FFI) for 16-bit arrays, or code
    that asks `x.dtype`. Inside an autocast function it then gets 16-bit arrays, as `torch.amp.custom_fwd` with
    `cast_inputs=` passes them; a function without it sees the float32 arrays of the trace.
    Kernels of `jax.nn.dot_product_attention` are called so without this.

    Args:
      fn: the function. In an autocast function its inputs are cast back to the dtypes it was traced with.
      cast_inputs: whether float32 arrays among its arguments are cast to autocast's dtype instead. What it returns in
        that dtype counts as 16-bit after it. Where no autocast applies, nothing is cast.

    Returns:
      The function.

    Example:
      >>> dense = no_autocast(jnp.dot)
      >>> autocast(lambda x: dense(x, x))(jnp.ones((2, 2))).dtype.name
      'float32'
      >>> kernel = no_autocast(lambda x: x * 2 if x.dtype.itemsize == 2 else x / 0, cast_inputs=True)
      >>> autocast(lambda w, x: kernel(x @ w))(jnp.ones((2, 2)), jnp.ones((2, 2)))
      Array([[4., 4.],
             [4., 4.]], dtype=float16)

    References:
      torch.amp.custom_fwd (PyTorch 2.13).
    """
    run: Any = _wrap(fn, cast_lists.OFF.off("no_autocast"), None)
    run = attention.with_low_inputs(fn, run) if cast_inputs else run
    return run


def by_region(fn: F, look: Look | None = None) -> F:
    """`fn` under the lists of the region it is called in: jaxmp wraps every function that a user passes in this.

    Returns `fn` itself outside of regions, and inside an autocast function, which rewrites what it calls. `look` is
    called with what was traced.
    """
    reach.mark()
    lists = regions.current()
    return _wrap(fn, lists, None, look=look) if lists is not None and casts_here() and not regions.is_tracing() else fn


def transformed(fn: F, lists: CastLists) -> F:
    """`fn` by these lists."""
    return _wrap(fn, lists, None)


def casts_here() -> bool:
    """Whether a region casts what is called here."""
    lists = regions.current()
    return lists is not None and lists.dtype is not None


def with_float32_gradients(fn: F, params: PyTree) -> F:
    """`by_region` of a function that gets `params`, widened to float32, as its first argument.

    It computes what it computes with `params`, and the gradients of the widened params are products and sums in
    float32: no rounding to 16 bits comes before the reduction over devices. Only where a region `casts_here`. An
    autocast function around it leaves it alone.
    """
    lists = regions.current()
    assert lists is not None

    def run(widened: PyTree, *args: Any) -> Any:
        stored = ByIdentity()
        for x, p in zip(jax.tree.leaves(widened), jax.tree.leaves(params), strict=True):
            if is_float_array(x):
                stored.set(x, p.dtype)
        return _wrap(fn, lists, None, stored=stored)(widened, *args)

    return run  # pyright: ignore[reportReturnType]


def _is_dtype(fn: Any) -> bool:
    if isinstance(fn, (str, np.dtype)):
        return True
    try:
        return isinstance(fn, type(jnp.float16)) or (isinstance(fn, type) and issubclass(fn, (np.generic, float, int)))
    except TypeError:
        return False


def _inherited(lists: CastLists, dtype_too: bool) -> CastLists:
    """The lists with what they do not say from the region around: the chooser, a policy's layers, perhaps the dtype."""
    outer = regions.current()
    if outer is None or outer.dtype is None or lists.dtype is None:
        return lists
    if lists.chooser is None and not regions.is_tracing():
        lists = lists._replace(chooser=outer.chooser)
    if lists.keeps is None:
        lists = lists._replace(keeps=outer.keeps)
    return lists._replace(dtype=outer.dtype) if dtype_too else lists


def _wrap(
    fn: Any,
    lists: CastLists,
    output_dtype: Any,
    *,
    inherits: bool = False,
    stored: ByIdentity | None = None,
    look: Look | None = None,
) -> Any:
    if isinstance(fn, type):
        raise TypeError(f"autocast: decorate the __call__ of {fn.__name__} or a function that calls it, not the class")

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        reach.mark()
        here = _inherited(lists, inherits)

        def rewritten(fn: Any) -> Any:
            run = functools.partial(_rewritten, lists=here, stored=stored, look=look)
            return lambda *args, **kwargs: flax_layers.call(fn, run, args, kwargs)

        if here.dtype is None:
            out = rewritten(fn)(*args, **kwargs)
        else:
            out = haiku_frames.call(fn, rewritten, args, kwargs, what="autocast")
        around = regions.current()
        if around is None or here.modules is not around.modules:  # a region warns at its end
            here.modules.warn_of_idle()
        if output_dtype is None:
            return out
        return jax.tree.map(lambda x: x.astype(output_dtype) if is_float_array(x) else x, out)

    vars(wrapped)["is_autocast"] = lists.dtype is not None
    return wrapped


def is_autocast(fn: Any) -> bool:
    """Whether `fn` is a function that `autocast` made, perhaps jitted since."""
    return getattr(fn, "is_autocast", False) is True


def _rewritten(
    fn: Callable[..., Any], lists: CastLists, stored: ByIdentity | None, look: Look | None
) -> Callable[..., Any]:
    """A function of pytrees, traced and run with casts."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if lists.dtype is None:
            with regions.region(lists):
                return fn(*args, **kwargs)
        traced = Traced(fn, lists, args, kwargs, stored)
        narrow = {} if lists.chooser is None else weighted_matmuls.products(traced, lists)
        if look is not None:
            look(traced, lists, narrow)
        with regions.done():
            return traced.unflatten(traced.run(Interpreter(narrow=narrow), lists, traced.values))

    return wrapped


class Traced(array_functions.Traced):
    """A function as it was traced for a rewrite: in float32, and its float inputs in the dtypes they have.

    `stored` has the dtypes of params that were widened to float32, for the sake of their gradients.
    """

    def __init__(
        self, fn: Callable[..., Any], lists: CastLists, args: Any, kwargs: Any, stored: ByIdentity | None = None
    ):
        super().__init__(
            fn,
            args,
            kwargs,
            # A numpy scalar is a number to Python code, which may ask for it.
            is_input=lambda x: is_float_array(x) and not isinstance(x, np.generic),
            context=attention.tracing(lists),
            # Always in float32: with 16-bit params it must be the same function.
            as_traced=lambda aval: aval.update(dtype=np.dtype(np.float32)),
        )
        self._stored = [None if stored is None else stored.get(x) for x in self.values]
        reads: collections.Counter[Any] = collections.Counter()
        for eqn in self.jaxpr.eqns:
            # What is moved, or enters a function, may be read several times afterwards.
            times = 2 if eqn.primitive.name in cast_lists.MOVES or jaxprs.functions_of(eqn) else 1
            reads.update({v: times for v in eqn.invars if not isinstance(v, core.Literal)})
        self._often = [reads[v] > 1 for v in self.jaxpr.invars]

    def run(self, interpreter: Interpreter, lists: CastLists, arrays: Any) -> list[Any]:
        """The results of the function by these lists; a param that was widened counts as what it was."""
        inputs = []
        for x, dtype, often in zip(arrays, self._stored, self._often, strict=True):
            if dtype is not None:
                inputs.append(values.held(x, dtype, values.WEIGHTS))
            else:
                inputs.append(values.held(x) if often else values.Value(x, x.dtype, x.ndim > 0, None, True))
        return [v.read() for v in interpreter.run((self.jaxpr, self.consts), inputs, At.top(lists))]

    def tell(self, recorder: Any, lists: CastLists) -> None:
        """Tells a recorder of each equation as it would run; nothing is computed."""
        jax.eval_shape(lambda arrays: self.run(Interpreter(recorder), lists, arrays), self.values)


def is_float_array(x: Any) -> bool:
    """Whether `x` is an array that autocast may cast."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and x.dtype in FLOATS
