"""Finds the params that an optimizer never changes, from the program of its update.

A frozen leaf (`optax.set_to_zero` under a label, as LoRA fine-tuning has for the base weights) needs no float32 master.
Nothing in optax's API says which leaves are frozen, but the update itself shows it: traced to a jaxpr, the update of a
frozen leaf is the constant zero for all gradients, states and params. This file follows that constant through the
program: through shapes, casts, selections, products with finite values, calls, and both branches of a cond. A leaf
whose update cannot be followed counts as trained: it then has a master that it does not need.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
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
    known = [_Known(False, not jnp.issubdtype(x.dtype, jnp.inexact)) for x in program.in_avals]  # pyright: ignore
    outputs = jaxprs.evaluate(jaxprs.open_jaxpr(program), known, _known_results, _known_constant, _known_number)
    return [x.is_zero for x in outputs] if len(outputs) == len(leaves) else [False] * len(leaves)


class _Known(NamedTuple):
    """What is known of a value; a float that was made from bools and integers is finite."""

    is_zero: bool
    is_finite: bool


def _known_results(_: int, eqn: Any, operands: list[_Known]) -> list[_Known]:
    name, zeros = eqn.primitive.name, [False] * len(eqn.outvars)
    if name in _KEEP_ZERO:
        zeros = [operands[0].is_zero]
    elif name in _ALL_ZERO:
        zeros = [all(x.is_zero for x in operands[_ALL_ZERO[name] :])]
    elif name == "mul":  # 0 * NaN is NaN
        a, b = operands
        zeros = [(a.is_zero and b.is_finite) or (b.is_zero and a.is_finite)]
    elif name == "cond" or name in jaxprs.CALLS:
        functions = jaxprs.functions_of(eqn)
        known = [
            jaxprs.evaluate(f, f.inputs(operands), _known_results, _known_constant, _known_number) for f in functions
        ]
        zeros = [all(x.is_zero for x in results) for results in zip(*known, strict=True)]  # of a cond: in every branch
    stays = name in _MOVES and operands[0].is_finite
    pairs = zip(zeros, eqn.outvars, strict=True)
    return [_Known(zero, stays or not jnp.issubdtype(v.aval.dtype, jnp.inexact)) for zero, v in pairs]


def _known_constant(x: Any, aval: Any) -> _Known:
    return _Known(_is_zero_constant(x), not jnp.issubdtype(aval.dtype, jnp.inexact))


def _known_number(x: Any, aval: Any) -> _Known:
    del aval
    return _Known(_is_zero_constant(x), bool(np.all(np.isfinite(x))))


def _is_zero_constant(x: Any) -> bool:
    if isinstance(x, Tracer):
        return False
    if isinstance(x, jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.number) or not x.is_fully_addressable:
            return False
    elif not isinstance(x, (int, float, np.ndarray, np.generic)):
        return False
    return not np.any(np.asarray(x))
