"""Runs a function with a hook that gets the results of its modules.

    fn  --make_jaxpr-->  jaxpr  --walk-->  the same JAX operations, and behind the last of a module the hook

As in autocast, the result is JAX again: it works under and over `jit`, `grad`, `vmap`, `remat`. The operations are
the same, and so are values and gradients.

Modules are named by the paths of their params (`module_paths`): linen modules, and nnx modules that are arguments;
named scopes count as modules. The walk goes into `jit`, `jax.checkpoint` (and keeps its policy) and `scan`. Each of
these counts as one operation: `cond` and `while` (which operations run is known at run time only), `shard_map`, and
functions with their own derivatives, whose rules are kept.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, PyTree

from jaxmp._src.programs import array_functions, flax_modules, jaxprs, module_paths

_ENTERED = (jaxprs.CALLS - jaxprs.WITH_OWN_DERIVATIVE) | {"scan"}

Observe = Callable[[str, Array], PyTree]


def collect(
    fn: Callable[..., Any], hook: Observe, filter: Callable[[str], bool] | None = None
) -> Callable[..., tuple[Any, dict[str, PyTree]]]:
    """`fn`, with a hook at the result of each of its modules.

        loss, stats = collect(loss_fn, lambda path, x: jnp.max(jnp.abs(x)))(params, batch)

    The output of a module is the last float array computed in it that an operation outside uses; if the module is
    called more than once, the output of its last call. Modules are linen modules, nnx modules among the arguments, and
    named scopes. A module whose call leaves no operation (dropout in evaluation) has none. Modules in `cond`, `while`,
    `shard_map` and functions with their own derivatives are not seen.

    With `jax.value_and_grad(collect(fn, hook), has_aux=True)` gradients are those of `fn`: hooks get values without
    gradients. (Differentiate the result of `collect`. In a function that computes a gradient itself, the residuals that
    a `jit` or a loop keeps for the backward pass look like its results.)

    Args:
      fn: any function of pytrees, flax modules included.
      hook: `(path, value) -> pytree of arrays`, traced once for each module; its results are collected.
      filter: which modules, by path; None for all.

    Returns:
      A function of the same arguments that returns `(result of fn, {path: result of hook})`. In a `scan` over layers,
      what is collected has a leading axis, one entry for each iteration; under `vmap` as any other result.
    """

    def observe(path: str, value: Array) -> PyTree:
        return hook(path, lax.stop_gradient(value)) if filter is None or filter(path) else None

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        collected: dict[str, PyTree] = {}

        def is_input(x: Any) -> bool:
            return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating))

        def transform(pure: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                traced = array_functions.Traced(pure, args, kwargs, is_input=is_input, context=module_paths.marking())
                results, observed = _Walk(observe).run((traced.jaxpr, traced.consts), traced.values, "")
                collected.update(observed)
                return traced.unflatten(results)

            return run

        return flax_modules.call(fn, transform, args, kwargs, flax_modules.leave_marker), collected

    return wrapped


class _Walk:
    """One run of a function.

    Args:
      observe: `(path, value) -> pytree`, called with the outputs of modules; a tree without leaves is not kept.
    """

    def __init__(self, observe: Observe):
        self.observe = observe

    def run(self, function: Any, values: Any, base: str) -> tuple[list[Any], dict[str, PyTree]]:
        """Runs a function; returns its outputs, and what was collected. `base` is the name stack around its call."""
        collected: dict[str, PyTree] = {}
        outputs = _outputs_of_modules(function[0], base)

        def equation(i: int, eqn: Any, operands: list[Any]) -> list[Any]:
            results, observed = self._equation(eqn, operands, base)
            collected.update(observed)
            for path, place in outputs.get(i, ()):
                if path not in observed:  # a module called in a loop was observed inside
                    seen = self.observe(path, results[place])
                    collected.update({path: seen} if jax.tree.leaves(seen) else {})
            return results

        return jaxprs.evaluate(function, values, equation), collected

    def _equation(self, eqn: Any, operands: list[Any], base: str) -> tuple[list[Any], dict[str, PyTree]]:
        stack = module_paths.join(base, str(eqn.source_info.name_stack))
        name = eqn.primitive.name
        if name not in _ENTERED or not _has_modules(eqn, stack):
            return jaxprs.run_as_traced(eqn, operands), {}
        with jaxprs.where(eqn):
            if name == "scan":
                return self._scan(eqn, operands, stack)
            if name in jaxprs.REMATS:
                return self._checkpoint(eqn, operands, stack)
            (inner,) = jaxprs.functions_of(eqn)
            results, observed = self.run(inner, _placed(eqn, "in", operands), stack)
            return _placed(eqn, "out", results), observed

    def _checkpoint(self, eqn: Any, operands: list[Any], stack: str) -> tuple[list[Any], dict[str, PyTree]]:
        """`jax.checkpoint`: the same equation with another function in it, which also returns what it collected."""
        (inner,) = jaxprs.functions_of(eqn)
        treedef: Any = None

        def function(*values: Any) -> list[Any]:
            nonlocal treedef
            results, observed = self.run(inner, values, stack)
            leaves, treedef = jax.tree.flatten(observed)
            return [*results, *leaves]

        closed = jax.make_jaxpr(function)(*operands)
        opened, extra = jaxprs.without_constants(eqn.params[jaxprs.body_name(eqn)], closed)
        out = eqn.primitive.bind(*extra, *operands, **(eqn.params | {jaxprs.body_name(eqn): opened}))
        n = len(eqn.outvars)
        return list(out[:n]), jax.tree.unflatten(treedef, out[n:])

    def _scan(self, eqn: Any, operands: list[Any], stack: str) -> tuple[list[Any], dict[str, PyTree]]:
        """A loop; what its body collects is stacked as its other results are."""
        params, (inner,) = eqn.params, jaxprs.functions_of(eqn)
        consts, start, scanned = inner.parts(operands)

        def body(carry: Any, rows: Any) -> Any:
            results, observed = self.run(inner, (*consts, *carry, *rows), stack)
            return tuple(results[: inner.n_carry]), (tuple(results[inner.n_carry :]), observed)

        carry, (stacked, observed) = lax.scan(
            body,
            tuple(start),
            tuple(scanned),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            _split_transpose=params.get("_split_transpose", False),
        )
        return [*carry, *stacked], observed


def _has_modules(eqn: Any, stack: str) -> bool:
    """Whether operations of modules are inside a call; else the call stays as it is."""
    if module_paths.is_backward(stack):
        return False
    return any(
        module_paths.chain(str(inner.source_info.name_stack))
        or (inner.primitive.name in _ENTERED and _has_modules(inner, stack))
        for inner in jaxprs.functions_of(eqn)[0].jaxpr.eqns
    )


def _outputs_of_modules(jaxpr: Any, base: str) -> dict[int, list[tuple[str, int]]]:
    """By equation, the modules whose last operation it is, and the number of the result that each of them returns."""
    if module_paths.is_backward(base):
        return {}
    outer = module_paths.path_of(base)
    inside: dict[str, set[int]] = {}
    used: dict[Any, set[int]] = {v: {-1} for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        stack = str(eqn.source_info.name_stack)
        if module_paths.is_backward(stack):
            continue  # it reads residuals of a module, which are not its results
        for path in module_paths.chain(stack, outer):
            inside.setdefault(path, set()).add(i)
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                used.setdefault(v, set()).add(i)
    outputs: dict[int, list[tuple[str, int]]] = {}
    for path, members in inside.items():
        results = [(i, k, v) for i in sorted(members) for k, v in enumerate(jaxpr.eqns[i].outvars)]
        leaving = [(i, k) for i, k, v in results if _is_float(v.aval) and used.get(v, members) - members]
        if leaving:
            i, place = leaving[-1]
            outputs.setdefault(i, []).append((path, place))
    # Of modules that end at the same equation, the innermost comes first.
    return {i: sorted(done, key=lambda entry: -entry[0].count("/")) for i, done in outputs.items()}


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _placed(eqn: Any, side: str, values: list[Any]) -> list[Any]:
    """Operands or results of a `jit` with the shardings that it asks for."""
    shardings = eqn.params.get(f"{side}_shardings", ())
    if not any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return list(values)
    return [
        lax.with_sharding_constraint(x, s) if isinstance(s, jax.sharding.Sharding) else x
        for x, s in zip(values, shardings, strict=True)
    ]
