"""Which params an optimizer never moves, found by reading the program of its update.

A frozen leaf (`optax.set_to_zero` under a label, as LoRA fine-tuning has for the base weights) needs no float32
master. Nothing in optax's API says which leaves are frozen, but the update itself does: traced to a jaxpr, the update
of a frozen leaf is the constant zero. We follow that constant through the program: through shapes, casts, selections
and calls, both branches of a cond included. What cannot be followed counts as trained.
"""

from typing import Any

import jax
import jax.extend.core
import numpy as np
import optax
from jaxtyping import PyTree

_KEEP_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy", "copy_p", "squeeze", "transpose"}
_ALL_ZERO = {
    "select_n": 1,
    "concatenate": 0,
    "add": 0,
    "sub": 0,
    "add_any": 0,
}  # from which operand on all must be zero


def frozen_leaves(inner: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """For each leaf of `params` (in the order of `jax.tree.leaves`), whether `inner` always updates it by zero.

    Args:
      inner: the optimizer. If its update asks for extra arguments it cannot be read, and nothing counts as frozen.
      params: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      A list of bools.

    Example:
      >>> labels = {"a": "train", "b": "freeze"}
      >>> tx = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, labels)
      >>> frozen_leaves(optax.with_extra_args_support(tx), {"a": np.ones(2), "b": np.ones(2)})
      [False, True]
    """
    leaves = jax.tree.leaves(params)
    if not leaves:
        return []

    def update(grads: PyTree, params: PyTree) -> list[Any]:
        updates, _ = inner.update(grads, inner.init(params), params)
        return jax.tree.leaves(updates)

    try:
        program = jax.make_jaxpr(update)(params, params)
    except TypeError:  # a keyword that only the training loop can give, such as `value`
        return [False] * len(leaves)
    outputs = _zero_outputs(program.jaxpr, program.consts, [False] * len(program.jaxpr.invars))
    return outputs if len(outputs) == len(leaves) else [False] * len(leaves)


def _zero_outputs(jaxpr: Any, consts: Any, zero_inputs: list[bool]) -> list[bool]:
    """Which outputs of `jaxpr` are zero whatever the inputs, given which inputs are."""
    zeros = {v for v, is_zero in zip(jaxpr.invars, zero_inputs, strict=True) if is_zero}
    zeros |= {v for v, c in zip(jaxpr.constvars, consts, strict=False) if _is_zero_constant(c)}

    def is_zero(v: Any) -> bool:
        return _is_zero_constant(v.val) if isinstance(v, jax.extend.core.Literal) else v in zeros

    for eqn in jaxpr.eqns:
        operands = [is_zero(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in _KEEP_ZERO:
            results = [operands[0]]
        elif name in _ALL_ZERO:
            results = [all(operands[_ALL_ZERO[name] :])]
        else:
            results = _zero_results_of_call(eqn, operands)
        zeros |= {v for v, r in zip(eqn.outvars, results, strict=False) if r}
    return [is_zero(v) for v in jaxpr.outvars]


def _zero_results_of_call(eqn: Any, operands: list[bool]) -> list[bool]:
    if "branches" in eqn.params:  # cond: zero in every branch
        branches = [_zero_outputs(b.jaxpr, b.consts, operands[1:]) for b in eqn.params["branches"]]
        return [all(results) for results in zip(*branches, strict=True)]
    called = (
        eqn.params.get("jaxpr") if eqn.primitive.name in ("pjit", "jit", "closed_call", "remat", "checkpoint") else None
    )
    if called is None:
        return [False] * len(eqn.outvars)
    return _zero_outputs(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)


def _is_zero_constant(x: Any) -> bool:
    return isinstance(x, (int, float, np.ndarray, np.generic, jax.Array)) and not np.any(np.asarray(x))
