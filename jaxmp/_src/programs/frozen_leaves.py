"""Finds the params that an optimizer never changes, from the program of its update.

A frozen leaf (`optax.set_to_zero` under a label, as LoRA fine-tuning has for the base weights) needs no float32 master.
Nothing in optax's API says which leaves are frozen, but the update itself shows it: traced to a jaxpr, the update of a
frozen leaf is the constant zero for all gradients, states and params. This file follows that constant through the
program: through shapes, casts, selections, products with finite values, calls, and both branches of a cond. A leaf
whose update cannot be followed counts as trained: it then has a master that it does not need.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core
from jaxtyping import PyTree

from jaxmp._src.programs import jaxprs

_MOVES = jaxprs.REARRANGES | jaxprs.HANDS_ON | {"broadcast_in_dim", "convert_element_type"}
_KEEP_ZERO = _MOVES | {"neg"}
# The result is zero if all operands from this one on are.
_ALL_ZERO = {"select_n": 1, "concatenate": 0, "add": 0, "sub": 0, "add_any": 0}


def frozen_leaves(inner: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each leaf of `params` (in the order of `jax.tree.leaves`), whether `inner` always updates it by zero.

    Args:
      inner: the optimizer. If its update cannot be traced here (it asks for extra arguments, or for an axis that only
        the training step binds), nothing counts as frozen.
      params: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      A list of bools.
    """
    leaves = jax.tree.leaves(params)
    if not leaves:
        return []

    def update(grads: PyTree, state: Any, params: PyTree) -> list[Any]:
        return jax.tree.leaves(inner.update(grads, state, params)[0])

    try:
        state = jax.eval_shape(inner.init, params)
        program = jax.make_jaxpr(update)(params, state, params)
    except Exception:  # the optimizer raises the same error, with its reason, at the first real update
        return [False] * len(leaves)
    outputs = _zero_outputs(program.jaxpr, program.consts, [False] * len(program.jaxpr.invars))
    return outputs if len(outputs) == len(leaves) else [False] * len(leaves)


def _zero_outputs(jaxpr: Any, consts: Any, zero_inputs: list[bool]) -> list[bool]:
    """Which outputs of `jaxpr` are always zero, given which inputs are."""
    zeros = {v for v, is_zero in zip(jaxpr.invars, zero_inputs, strict=True) if is_zero}
    zeros |= {v for v, c in zip(jaxpr.constvars, consts, strict=False) if _is_zero_constant(c)}
    finite: set[Any] = set()  # floats that were made from bools and integers

    def is_zero(v: Any) -> bool:
        return _is_zero_constant(v.val) if isinstance(v, core.Literal) else v in zeros

    def is_finite(v: Any) -> bool:
        if isinstance(v, core.Literal):
            return bool(np.all(np.isfinite(v.val)))
        return v in finite or not jnp.issubdtype(v.aval.dtype, jnp.inexact)

    for eqn in jaxpr.eqns:
        operands = [is_zero(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in _KEEP_ZERO:
            results = [operands[0]]
        elif name in _ALL_ZERO:
            results = [all(operands[_ALL_ZERO[name] :])]
        elif name == "mul":  # 0 * NaN is NaN
            a, b = eqn.invars
            results = [(operands[0] and is_finite(b)) or (operands[1] and is_finite(a))]
        else:
            results = _zero_results_of_call(eqn, operands)
        zeros |= {v for v, r in zip(eqn.outvars, results, strict=False) if r}
        if name in _MOVES and is_finite(eqn.invars[0]):
            finite |= set(eqn.outvars)
    return [is_zero(v) for v in jaxpr.outvars]


def _zero_results_of_call(eqn: Any, operands: list[bool]) -> list[bool]:
    if eqn.primitive.name != "cond" and eqn.primitive.name not in jaxprs.CALLS:
        return [False] * len(eqn.outvars)
    found = [_zero_outputs(f.jaxpr, f.consts, f.inputs(operands)) for f in jaxprs.functions_of(eqn)]
    return [all(results) for results in zip(*found, strict=True)]  # of a cond: zero in every branch


def _is_zero_constant(x: Any) -> bool:
    if isinstance(x, Tracer):
        return False
    if isinstance(x, jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.number) or not x.is_fully_addressable:
            return False
    elif not isinstance(x, (int, float, np.ndarray, np.generic)):
        return False
    return not np.any(np.asarray(x))
