"""Compares two functions by their operations instead of by their results.

Two programs that do the same operations on the same values compute the same function. XLA may fuse them differently, so
their results can still differ in the last bits: a test that compares such bits fails on some machines. This comparison
does not depend on the machine, holds for all inputs, and compiles nothing.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Their body belongs to the caller: `f(x)` and `jax.jit(f)(x)` do the same operations.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
# They hand their arguments on.
IDENTITIES = ("stop_gradient", "optimization_barrier")
# Params that change no value: names, and rules of derivatives that were not used.
IGNORED = (
    "name",
    "jvp_jaxpr_fun",
    "fwd_jaxpr_thunk",
    "bwd",
    "debug_info",
    "resource_env",
    "linear",
    "_split_transpose",
)


def assert_same_operations(f: Callable[..., Any], g: Callable[..., Any], *args: Any) -> None:
    """Both functions return trees of the same structure, and each leaf is the result of the same operations."""
    (ops_f, tree_f), (ops_g, tree_g) = operations(f, *args), operations(g, *args)
    assert tree_f == tree_g
    differ = [jax.tree_util.keystr(path) for (path, a), (_, b) in zip(ops_f, ops_g, strict=True) if a != b]
    assert not differ, f"other operations lead to the outputs {differ}"


def operations(f: Callable[..., Any], *args: Any) -> tuple[list[tuple[Any, str]], Any]:
    """A digest of the operations behind each output, with its path; and the structure of the outputs."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    inputs = [f"argument {i} {v.aval.str_short()}" for i, v in enumerate(closed.jaxpr.invars)]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shape)]
    found = _outputs(closed.jaxpr, [_constant(c) for c in closed.consts], inputs)
    return list(zip(paths, found, strict=True)), jax.tree.structure(shape)


def _outputs(jaxpr: Any, consts: list[str], inputs: list[str]) -> list[str]:
    known: dict[Any, str] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> str:
        return _constant(atom.val, atom.aval.dtype) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        ins = [read(x) for x in eqn.invars]
        name = eqn.primitive.name
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in CALLS and body is not None:
            outs = _outputs(body.jaxpr, [_constant(c) for c in body.consts], ins)
        elif name in IDENTITIES:
            outs = ins
        else:
            params = {k: _param(v) for k, v in sorted(eqn.params.items()) if k not in IGNORED}
            types = [v.aval.str_short() for v in eqn.outvars]
            outs = [_digest(name, params, ins, types, i) for i in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _param(value: Any) -> Any:
    """A param of an operation as text; functions inside it by their operations."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):  # one class in newer versions of jax
        consts, jaxpr = getattr(value, "consts", ()), getattr(value, "jaxpr", value)
        known = [_constant(c) for c in consts] or [f"constant {i}" for i in range(len(jaxpr.constvars))]
        return _outputs(jaxpr, known, [f"argument {i} {v.aval.str_short()}" for i, v in enumerate(jaxpr.invars)])
    if isinstance(value, tuple | list):
        return [_param(x) for x in value]
    return repr(value)


def _constant(value: Any, dtype: Any = None) -> str:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value, dtype)
    return _digest(str(array.dtype), array.shape, array.tobytes())


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
