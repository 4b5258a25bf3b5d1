"""Runs a function with hooks: one hook gets the results of its modules, another may change its matmuls.

    fn  --make_jaxpr-->  jaxpr  --walk-->  the same JAX operations, and at some of them a hook

As in autocast, the result is JAX again: it works under and over `jit`, `grad`, `vmap`, `remat`. The operations are
the same, and so are values and gradients.

Modules are named by the paths of their params (`module_paths`): linen modules, and nnx modules that are arguments;
named scopes count as modules. The walk goes into `jit`, `jax.checkpoint` (and keeps its policy) and `scan`. Each of
these counts as one operation: `cond` and `while` (which operations run is known at run time only), `shard_map`, and
functions with their own derivatives, whose rules are kept.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, PyTree

from jaxmp._src.programs import array_functions, flax_modules, jaxprs, module_paths

_ENTERED = (jaxprs.CALLS - jaxprs.WITH_OWN_DERIVATIVE) | {"scan"}
# Operations that a param may go through before a matmul, as their first operand.
_MOVES = jaxprs.REARRANGES | jaxprs.HANDS_ON
_MOVES |= {"convert_element_type", "reduce_precision", "broadcast_in_dim", "slice", "dynamic_slice"}


class Site(NamedTuple):
    """A matmul or convolution of a function.

    Attributes:
      key: its place; the same each time the function is traced for the same arguments.
      path: the innermost module or scope; "" outside of all.
      module: the innermost flax module, "" for the root; None outside of all.
      eqn: its equation.
      origins: for each operand that is an argument, perhaps moved and cast, the position of the argument and the path
        in it; else None.
    """

    key: tuple[int, ...]
    path: str
    module: str | None
    eqn: Any
    origins: tuple[str | None, ...]


Observe = Callable[[str, Array], PyTree]
Replace = Callable[[Site, Callable[..., Array], list[Any]], Array]


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
        return _call(fn, _Walk(observe, None), args, kwargs)

    return wrapped


def replace_matmuls(fn: Callable[..., Any], hook: Replace) -> Callable[..., Any]:
    """`fn`, with another computation in place of its matmuls and convolutions.

    Args:
      fn: any function of pytrees, flax modules included.
      hook: `(site, run, operands) -> result`; `run(*operands)` is the operation as it was written. The result has the
        shape and dtype of the operation's own.

    Returns:
      The function, with the same arguments and results.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, _Walk(None, hook), args, kwargs)[0]

    return wrapped


def _call(fn: Callable[..., Any], walk: "_Walk", args: Any, kwargs: Any) -> tuple[Any, dict[str, PyTree]]:
    collected: dict[str, PyTree] = {}

    def transform(pure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            traced = array_functions.Traced(pure, args, kwargs, is_input=_is_input, context=module_paths.marking())
            results, found = walk.run(traced.jaxpr, traced.consts, traced.values, traced.paths, "", ())
            collected.update(found)
            return traced.unflatten(results)

        return run

    return flax_modules.call(fn, transform, args, kwargs, flax_modules.leave_marker), collected


def _is_input(x: Any) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating))


class _Walk:
    """One run of a function with hooks.

    Args:
      observe: `(path, value) -> pytree`, called with the outputs of modules; a tree without leaves is not kept.
      replace: called in place of matmuls; see `replace_matmuls`.
    """

    def __init__(self, observe: Observe | None, replace: Replace | None):
        self.observe, self.replace = observe, replace

    def run(
        self, jaxpr: Any, consts: Any, values: Any, origins: Any, base: str, key: tuple[int, ...]
    ) -> tuple[list[Any], dict[str, PyTree]]:
        """Runs a function; returns its outputs, and what was collected.

        `origins` are the paths of the inputs that are arguments of `fn`, `base` is the name stack that the function is
        called under, `key` the place of the call.
        """
        held = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        known: dict[Any, str | None] = dict(zip(jaxpr.invars, origins, strict=True))
        collected: dict[str, PyTree] = {}
        outputs = _outputs_of_modules(jaxpr, base) if self.observe else {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else held[atom]

        def origin(atom: Any) -> str | None:
            return None if isinstance(atom, core.Literal) else known.get(atom)

        for i, eqn in enumerate(jaxpr.eqns):
            operands, names = [read(v) for v in eqn.invars], tuple(map(origin, eqn.invars))
            results, found = self._equation(eqn, operands, names, base, (*key, i))
            held |= dict(zip(eqn.outvars, results, strict=True))
            if eqn.primitive.name in _MOVES:
                known[eqn.outvars[0]] = names[0]
            collected |= found
            for path, var in outputs.get(i, ()):
                if self.observe and path not in found:  # a module called in a loop was observed inside
                    seen = self.observe(path, held[var])
                    collected |= {path: seen} if jax.tree.leaves(seen) else {}
        return [read(v) for v in jaxpr.outvars], collected

    def _equation(
        self, eqn: Any, operands: list[Any], origins: Any, base: str, key: tuple[int, ...]
    ) -> tuple[list[Any], dict[str, PyTree]]:
        stack = module_paths.join(base, str(eqn.source_info.name_stack))
        name = eqn.primitive.name
        if name in _ENTERED and self._has_hooks(eqn, stack):
            jaxpr, consts = jaxprs.functions_of(eqn)[0]
            with jaxprs.where(eqn):
                if name == "scan":
                    return self._scan(eqn, operands, origins, stack, key)
                if name in jaxprs.REMATS:
                    return self._checkpoint(eqn, operands, origins, stack, key)
                results, found = self.run(jaxpr, consts, _placed(eqn, "in", operands), origins, stack, key)
                return _placed(eqn, "out", results), found
        if name in jaxprs.MATMULS and self.replace is not None:
            site = Site(key, module_paths.path_of(stack), module_paths.module_of(stack), eqn, origins)
            return [self.replace(site, lambda *given: jaxprs.run_as_traced(eqn, list(given))[0], operands)], {}
        return jaxprs.run_as_traced(eqn, operands), {}

    def _has_hooks(self, eqn: Any, stack: str) -> bool:
        """Whether a hook is called inside a call; else the call stays as it is."""
        if self.observe and module_paths.is_backward(stack):
            return False
        for inner in jaxprs.functions_of(eqn)[0][0].eqns:
            if self.replace and inner.primitive.name in jaxprs.MATMULS:
                return True
            if self.observe and module_paths.chain(str(inner.source_info.name_stack)):
                return True
            if inner.primitive.name in _ENTERED and self._has_hooks(inner, stack):
                return True
        return False

    def _checkpoint(
        self, eqn: Any, operands: list[Any], origins: Any, stack: str, key: tuple[int, ...]
    ) -> tuple[list[Any], dict[str, PyTree]]:
        """`jax.checkpoint`: the same equation with another function in it, which also returns what it collected."""
        jaxpr, consts = jaxprs.functions_of(eqn)[0]
        treedef: Any = None

        def function(*values: Any) -> list[Any]:
            nonlocal treedef
            results, found = self.run(jaxpr, consts, values, origins, stack, key)
            leaves, treedef = jax.tree.flatten(found)
            return [*results, *leaves]

        closed = jax.make_jaxpr(function)(*operands)
        opened, extra = jaxprs.without_constants(eqn.params[jaxprs.body_name(eqn)], closed)
        out = eqn.primitive.bind(*extra, *operands, **(eqn.params | {jaxprs.body_name(eqn): opened}))
        n = len(eqn.outvars)
        return list(out[:n]), jax.tree.unflatten(treedef, out[n:])

    def _scan(
        self, eqn: Any, operands: list[Any], origins: Any, stack: str, key: tuple[int, ...]
    ) -> tuple[list[Any], dict[str, PyTree]]:
        """A loop; what its body collects is stacked as its other results are."""
        params = eqn.params
        jaxpr, closed = jaxprs.functions_of(eqn)[0]
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        first = n_consts + n_carry
        inside = (*origins[:n_consts], *(None,) * n_carry, *origins[first:])

        def body(carry: Any, scanned: Any) -> Any:
            results, found = self.run(jaxpr, closed, (*operands[:n_consts], *carry, *scanned), inside, stack, key)
            return tuple(results[:n_carry]), (tuple(results[n_carry:]), found)

        carry, (stacked, found) = lax.scan(
            body,
            tuple(operands[n_consts:first]),
            tuple(operands[first:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            _split_transpose=params.get("_split_transpose", False),
        )
        return [*carry, *stacked], found


def _outputs_of_modules(jaxpr: Any, base: str) -> dict[int, list[tuple[str, Any]]]:
    """By equation, the modules whose last operation it is, and the result that each of them returns."""
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
    found: dict[int, list[tuple[str, Any]]] = {}
    for path, members in inside.items():
        made = [(i, v) for i in sorted(members) for v in jaxpr.eqns[i].outvars]
        leaving = [(i, v) for i, v in made if _is_float(v.aval) and used.get(v, members) - members]
        if leaving:
            i, var = leaving[-1]
            found.setdefault(i, []).append((path, var))
    # Of modules that end at the same equation, the innermost comes first.
    return {i: sorted(done, key=lambda entry: -entry[0].count("/")) for i, done in found.items()}


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
