"""Regions in which a policy applies: its compute dtype, its fp8 layers, its matmul precision.

    policy          matmuls, convolutions      fp8                   float32 matmuls
    "fp16"          float16, by autocast       -                     as jax has it
    "bf16"          bfloat16                   -                     as jax has it
    "fp8"           bfloat16                   linen's layers        as jax has it
    with a recipe   as the policy says         linen's layers, and   as jax has it
    without state                              where there are none
                                               any matmul
    "fp32"          as they were written       -                     full float32
    "tf32"          as they were written       -                     TensorFloat-32

The user enters such a region with `jaxmp.autocast(policy)`, and `value_and_grad` enters it with its `policy=`. Regions
nest as in Python, and the innermost region decides about each of the three. If a policy says nothing about one of them,
it does not change it: "bf16" does not turn fp8 off.

A region with more settings by the user (other lists, dtypes of modules, a recipe, a filter) must stay in effect. So
`value_and_grad` enters only the parts of its policy that differ from the region around it: `autocast("bf16",
modules=...)` around a loss with policy="bf16" stays in effect, and so does `fp8.autocast(recipe)` around a loss with
policy="fp8". The policy of a TrainState is a default: any region around the call replaces its part.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from jaxmp._src.autocast import cast_lists, explain, regions, rewrite
from jaxmp._src.base import ambient
from jaxmp._src.fp8 import chosen_layers, linen_layers
from jaxmp._src.programs import flax_modules
from jaxmp._src.step import fp8_products
from jaxmp._src.step.policy import Policy, check_precision, get_policy, is_policy

F = TypeVar("F", bound=Callable[..., Any])


class PolicyRegion:
    """The result of `autocast` of a policy: a decorator, and a region for `with`."""

    def __init__(self, policy: Policy, lists: Any, *, enabled: bool, filter: chosen_layers.Filter):
        self._policy = policy
        self._filter = filter
        self._lists = lists  # makes the region of autocast, or the transformed function: `rewrite.autocast` of a dtype
        self._enabled = enabled
        self._entered = threading.local()

    def __call__(self, fn: F) -> F:
        run: Any = self._lists(fn)

        @functools.wraps(run)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._fp8_and_precision():
                return run(*args, **kwargs)

        return wrapped  # pyright: ignore[reportReturnType]

    def __enter__(self) -> "PolicyRegion":
        region = self._lists().__enter__()
        others = contextlib.ExitStack()
        others.enter_context(self._fp8_and_precision())
        vars(self._entered).setdefault("regions", []).append((region, others))
        return self

    def __exit__(self, *exception: Any) -> None:
        region, others = self._entered.regions.pop()
        others.__exit__(*exception)
        region.leave(exception)

    def _fp8_and_precision(self) -> contextlib.AbstractContextManager[None]:
        return _fp8_and_precision(self._policy, enabled=self._enabled, filter=self._filter, idle_only=False)


class _Options(TypedDict, total=False):
    """The keywords of `autocast`, for its overloads."""

    enabled: bool
    allow: Iterable[str]
    force_fp32: Iterable[str]
    widest: Iterable[str]
    modules: Mapping[str, Any] | None
    output_dtype: Any
    recipe: Any
    filter: chosen_layers.Filter


@overload
def autocast(fn: None = None, dtype: Any = None, **options: Unpack[_Options]) -> rewrite.Autocast: ...
@overload
def autocast(fn: str | jmp.Policy | type, dtype: Any = None, **options: Unpack[_Options]) -> rewrite.Autocast: ...
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
    recipe: Any = None,
    filter: chosen_layers.Filter = None,
) -> Any:
    """Runs a function in mixed precision, without changes to its code: `torch.autocast` for JAX.

    Matmuls and convolutions run in `dtype`. Operations that need float32 (exp, log, powers, sums, norms, softmax,
    losses) run in float32; all others in the widest dtype of their inputs. float64, complex, integers, keys and fp8 are
    not cast. Params stay float32 outside, and so do their gradients. `fn` is always traced in float32, so that it is
    the same function with 16-bit params: their gradients are 16-bit, its loss is float32. A flax module with a 16-bit
    `dtype` of its own keeps it; `dtype=float32`, the default of many models, is ignored, and `explain_autocast` says so
    in the row of such a layer. A policy keeps the layers in float32 whose params all fit its `keep_fp32`.

        step = jax.jit(jaxmp.autocast(loss_fn, jnp.bfloat16))       a transformation of a function
        @jaxmp.autocast(dtype=jnp.float16)                          a decorator; methods of linen and nnx modules too
        with jaxmp.autocast(dtype=jnp.float16): ...                 a region
        with jaxmp.autocast("fp8"): ...                             a policy in place of a dtype
        jaxmp.autocast(fn, "fp8", recipe=jaxmp.fp8.CurrentScaling())    fp8 in any function

    A policy or its name brings its compute dtype; with "fp8", linen's Dense, DenseGeneral and Einsum layers run in fp8,
    as in `jaxmp.fp8.autocast(policy.recipe)`, and get their scales where the model is initialized; with "fp32" and
    "tf32", autocast is off, and float32 matmuls have the policy's precision. `jaxmp.value_and_grad(policy=)` runs the
    loss in such a region; write the region around `model.init` and around evaluation.

    With `recipe=`, a recipe of `jaxmp.fp8` without state, matmuls with weights run in fp8 in any function: plain code,
    haiku, equinox, layers of one's own. Both operands are cast to `dtype` and then to fp8, the result is in `dtype`,
    and the gradients are products in fp8, too. A matmul has a weight if one of its operands is an input of `fn` or was
    closed over, perhaps moved and cast; products of two computed values, as in attention, run in `dtype`. Take
    derivatives outside of `fn`. A policy whose own recipe has no state does the same in a function of which none of
    flax's layers took the recipe.

    A region changes the linen and haiku modules called in it, the loss functions of `jaxmp.value_and_grad` and
    `jaxmp.nnx.value_and_grad`, and, inside an autocast function, every operation: there, operations in a
    `with autocast(enabled=False)` run as they were written. Other code, such as nnx modules and plain operations, it
    cannot reach: transform it, `autocast(model, dtype)(x)`. A region that reached nothing says so. A function that was
    jitted outside a region is traced anew in it. The innermost of nested regions counts, also with transformations in
    between.

    Args:
      fn: the function. Its arguments may be any pytrees, with static leaves and nnx modules, which are updated.
      dtype: float16 (needs loss scaling), bfloat16, or float32, which switches autocast off; or a policy, or the name
        of one (see `get_policy`). None: the dtype of the region or function around it, and float16 outside of all.
      enabled: False is the same as float32; with a policy that has a recipe, it switches fp8 off, too.
      allow: names of primitives that run in `dtype`, in addition to the lists or against them. `jaxmp.explain_autocast`
        shows the names in a function.
      force_fp32: names that run in float32.
      widest: names that run in the widest dtype of their inputs.
      modules: dtypes of flax modules by patterns of their paths, as `{"head": jnp.float32,
        "Block_3/*": jnp.bfloat16}`; the first that fits counts, and holds for what the module calls unless that is
        named itself. nnx modules have paths where they are arguments of `fn`.
      output_dtype: casts the floats that `fn` returns; None leaves each in the dtype it was computed in.
      recipe: a recipe without state (`CurrentScaling`, `RowwiseScaling`, `BlockScaling`, `MXFP8`,
        `NVFP4(stochastic_rounding=False)`), or a dict from patterns of paths to several. It replaces the policy's, also
        for flax's layers.
      filter: which matmuls run in fp8, by patterns of the paths that `jaxmp.explain_autocast` shows, or
        `(path, eqn) -> bool`. None: all but the first and the last operation with weights (embeddings and convolutions
        count), in the order in which they run; one in a loop is neither. With a policy's own recipe it chooses linen's
        layers, as in `jaxmp.fp8.autocast`.

    Returns:
      The function, with the same arguments and outputs of the same structure. Without `fn`, a decorator that is also a
      context manager.

    Raises:
      ValueError: a dtype it cannot run in (for fp8 use the policy "fp8"); an unknown name in a list; a name in two
        lists; a policy that is not known; a recipe that needs state or a key; `recipe=` without a dtype of 16 bits;
        `filter=` without a recipe.
      TypeError: `fn` is not callable; an option that only torch has.

    Warns:
      UserWarning: patterns of `modules` that fit no module which was called, when `fn` is traced, or at the end of a
        region; a region in which nothing was called that it can change; a function with `recipe=` in which nothing runs
        in fp8; a linen model of which a policy's recipe chose no layer; a function that holds no layer for a policy's
        `DelayedScaling`.

    Example:
      >>> import jax
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
      >>> w, x = jnp.ones((8, 8)), jnp.ones((2, 8))
      >>> loss, grad = jax.value_and_grad(autocast(loss_fn))(w, x)
      >>> loss.dtype.name, grad.dtype.name, autocast(jnp.dot)(x, w).dtype.name
      ('float32', 'float32', 'float16')

    References:
      torch.autocast (PyTorch 2.13); Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740).
    """
    if callable(dtype) and not isinstance(dtype, type):
        raise TypeError("the arguments are autocast(fn, dtype); got a function as dtype")
    for argument in (fn, dtype):
        if isinstance(argument, str) and not is_policy(argument):
            cast_lists.check_no_device("autocast", argument)  # torch's first argument
            check_precision(argument)
    if is_policy(fn):  # `autocast("fp8")`, as torch.autocast takes its dtype
        fn, dtype = None, fn
    options: dict[str, Any] = {"allow": allow, "force_fp32": force_fp32, "widest": widest, "modules": modules}
    options |= {"enabled": enabled, "output_dtype": output_dtype}
    dtype, options["chooser"] = _with_recipe(dtype, recipe, filter)
    if not is_policy(dtype):
        return rewrite.autocast(fn, dtype, **options)
    policy = get_policy(dtype)
    lists = functools.partial(rewrite.autocast, dtype=_dtype_of(policy), **options, keeps=_kept_by(policy))
    if fn is None:
        lists()  # checks the arguments
        return PolicyRegion(policy, lists, enabled=enabled, filter=filter)
    lists(fn)
    return PolicyRegion(policy, lists, enabled=enabled, filter=filter)(fn)


def explain_autocast(
    fn: Callable[..., Any],
    *args: Any,
    dtype: Any = None,
    policy: Any = None,
    measure: bool = False,
    grad: bool = False,
    allow: Iterable[str] = (),
    force_fp32: Iterable[str] = (),
    widest: Iterable[str] = (),
    modules: Mapping[str, Any] | None = None,
    recipe: Any = None,
    filter: chosen_layers.Filter = None,
    **kwargs: Any,
) -> explain.Explanation:
    """In which dtype `autocast(fn, dtype, ...)` would run each operation, by module, and how much error it adds.

    `print` shows the table; `.summary()` is one line: the share of each dtype in the FLOPs of matmuls, those of fp8
    layers too, and which modules stay in float32 and why. Nothing is computed, unless `measure` asks for it: then the
    function runs once, operation by operation, beside float32, and the rows are sorted by the error that each adds,

        added = mean |near - exact| / mean |exact|      near: the operation of exact operands that were rounded once

    in roundings of 16 bits. A matmul adds about one; a layer far above the others is the one to keep in float32.

    Args:
      fn: the function.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`, but not to measure.
      dtype: as for `autocast`, by default float16; a policy or its name, too.
      policy: the same by the name that other functions give it.
      measure: whether to run the function, and to measure the error of each operation.
      grad: whether to measure the gradient of the function too, by all of its float arguments: of its result, or of the
        sum of its results.
      allow: as for `autocast`.
      force_fp32: as for `autocast`.
      widest: as for `autocast`.
      modules: as for `autocast`.
      recipe: as for `autocast`; a matmul that does not run in fp8 has the reason in its row.
      filter: as for `autocast`.
      **kwargs: keyword arguments of `fn`.

    Returns:
      An `Explanation`, which prints as a table.

    Raises:
      ValueError: as `autocast`; a function that is one of autocast already; shapes in place of arrays to measure;
        `grad` without `measure`; both `dtype` and `policy`; `jax.sharding.auto_axes` or `explicit_axes` in what is
        measured.
      TypeError: `fn` is no function.

    Example:
      >>> import jax
      >>> explanation = explain_autocast(lambda x, w: jax.nn.softmax(x @ w), jnp.ones((2, 8)), jnp.ones((8, 4)))
      >>> [(row.name, row.runs_in, row.group) for row in explanation.rows][0]
      ('dot_general', 'float16', 'allow')
      >>> explanation.summary()
      'matmul FLOPs: 100.0% in float16'
      >>> near = lambda x, w: (x @ w + 1000.0) - 1000.0
      >>> worst = explain_autocast(near, jnp.full((2, 8), 0.3), jnp.ones((8, 4)), measure=True).rows[0]
      >>> worst.name, worst.added > 50
      ('sub', True)
    """
    if not callable(fn):
        raise TypeError(f"explain_autocast must get a function; got {type(fn).__name__}: a result? Give fn, *args.")
    if rewrite.is_autocast(fn):
        raise ValueError(
            "explain_autocast must get a function without autocast; got one of autocast. Pass the one before."
        )
    if grad and not measure:
        raise ValueError("explain_autocast: grad=True needs measure=True; got measure=False")
    if dtype is not None and policy is not None:
        raise ValueError(f"explain_autocast: give dtype= or policy=, not both; got {dtype!r} and {policy!r}")
    dtype = policy if dtype is None else dtype
    dtype = jnp.float16 if dtype is None else dtype
    dtype, chooser = _with_recipe(dtype, recipe, filter)
    policy = get_policy(dtype) if is_policy(dtype) else None
    keeps = None if policy is None else _kept_by(policy)
    dtype = dtype if policy is None else _dtype_of(policy)
    lists = cast_lists.make_lists(dtype, allow, force_fp32, widest, modules, keeps)
    with contextlib.nullcontext() if policy is None else _fp8_and_precision(policy, enabled=True, filter=filter):
        lists = lists._replace(chooser=chooser)
        fn, args, kwargs = flax_modules.unbound(fn, args, kwargs)  # a model whose state a trace may change
        explanation = explain.explain(fn, lists, args, kwargs)
        if measure:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs))):
                raise ValueError("explain_autocast: measure=True runs the function; got a jax.ShapeDtypeStruct")
            explanation = explain.measure(fn, lists, args, kwargs, explanation, grad=grad)
        return explanation


def _with_recipe(dtype: Any, recipe: Any, filter: chosen_layers.Filter) -> tuple[Any, Any]:
    """The dtype or policy without the recipe that `recipe=` replaces, and the chooser of matmuls in fp8."""
    policy = get_policy(dtype) if is_policy(dtype) else None
    own = None if policy is None else policy.recipe
    if recipe is None:
        if filter is not None and own is None:
            raise ValueError(f"autocast: filter= chooses matmuls for a recipe; got no recipe, and filter={filter!r}.")
        return dtype, None if own is None else fp8_products.chooser_of(own, filter, of_policy=True)
    chooser = fp8_products.chooser_of(recipe, filter)
    if policy is None:
        is_wide = dtype is not None and not isinstance(dtype, str) and jnp.dtype(dtype) == jnp.float32
    else:
        dtype, is_wide = dataclasses.replace(policy, recipe=None), not policy.computes_in_16_bits
    if is_wide:
        raise ValueError(
            f'autocast: recipe= must go with 16 bits; got float32 and {recipe!r}. Pass "fp8" or jnp.bfloat16.'
        )
    return dtype, chooser


@contextlib.contextmanager
def around_loss(policy: Policy | None, *, is_default: bool) -> Iterator[None]:
    """The region in which `value_and_grad` runs a loss; it enters what differs from the regions around it.

    Args:
      policy: None changes nothing.
      is_default: whether any region around the call replaces the policy's part: it came with a TrainState.
    """
    if policy is None:
        yield
        return
    outer, now = regions.current(), ambient.now()
    wanted = _dtype_of(policy)
    keeps_outer = outer is not None and (is_default or outer.dtype == (None if wanted == jnp.float32 else wanted))
    in_fp8 = now.fp8_layers is not None and ambient.FP8_ENABLED.value
    kept_fp8 = in_fp8 or (is_default and (now.fp8_layers is not None or not ambient.FP8_ENABLED.value))
    lists = outer if outer is not None and keeps_outer else cast_lists.make_lists(wanted)
    if lists.dtype is not None and lists.keeps is None:  # the region around has no policy, or one without keep_fp32
        lists = lists._replace(keeps=_kept_by(policy))
    if policy.recipe is not None and not kept_fp8 and lists.chooser is None and not regions.is_tracing():
        lists = lists._replace(chooser=fp8_products.chooser_of(policy.recipe, of_policy=True))
    with contextlib.ExitStack() as stack:
        if not keeps_outer or lists != outer:
            stack.enter_context(rewrite.region_of(lists))
        # value_and_grad warns if the loss of a policy multiplies nothing in fp8, so its region does not.
        stack.enter_context(_fp8_and_precision(policy, enabled=True, fp8=not kept_fp8))
        yield


@contextlib.contextmanager
def _fp8_and_precision(
    policy: Policy,
    *,
    enabled: bool,
    fp8: bool = True,
    filter: chosen_layers.Filter = None,
    idle_only: bool = True,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if enabled:
            stack.enter_context(policy.default_matmul_precision())
        if fp8 and policy.recipe is not None:
            rule = chosen_layers.Rule("jaxmp.autocast", policy.recipe, filter, _kept_by(policy))
            stack.enter_context(linen_layers.region(rule, enabled=enabled, idle_only=idle_only))
        yield


def _kept_by(policy: Policy) -> chosen_layers.KeptLayers | None:
    """The layers that a policy keeps in float32."""
    return chosen_layers.KeptLayers(policy.keep_fp32) if policy.keep_fp32 else None


def _dtype_of(policy: Policy) -> np.dtype:
    """The dtype for autocast; float32, which is off, for a policy that computes in 32 or 64 bits."""
    return policy.compute_dtype if policy.computes_in_16_bits else np.dtype(np.float32)
