"""Which 16-bit values must be rounded in the program, so that all readers of a value see the same number.

    y = (x @ w + b) in bfloat16        logsumexp(float32(y)) - y[label]

XLA computes the sum in float32. It then removes the cast to bfloat16 and back before the logsumexp, because it may
compute with more precision (`xla_allow_excess_precision`), but it keeps the cast before a reader in 16 bits. So one
program uses two versions of y, and a cross-entropy of saturated logits is negative by half a unit of their last place.

If all readers cast a value to float32, either version is right. If some do not, autocast inserts a rounding that XLA
does not remove. XLA fuses it with its neighbours.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._src.autocast.cast_lists import FLOATS
from jaxmp._src.base import vmap_rules
from jaxmp._src.numerics import casting
from jaxmp._src.programs import jaxprs

_LOW, _WIDE = "in 16 bits", "in float32"
_BOTH = frozenset({_LOW, _WIDE})
_INLINED = jaxprs.CALLS | {"shard_map"}  # XLA sees through these


def find(jaxpr: Any, steps: list[Any]) -> tuple[tuple[frozenset[str], ...], frozenset[Any]]:
    """How each input of a planned function is read, and the variables read both in 16 bits and in float32."""
    readers: dict[Any, frozenset[str]] = {v: frozenset({_LOW}) for v in jaxpr.outvars if not _is_literal(v)}
    rounded = set()
    for step in reversed(steps):
        hands_on = step.how == "same" and step.operands[0] is None
        for k, (v, result) in enumerate(zip(step.eqn.outvars, step.results, strict=True)):
            if not hands_on and _is_low(result.dtype) and readers.get(v) == _BOTH:
                rounded |= {v} if result.dtype != jnp.float16 or _is_cast_down(step, k) else set()
        for i, atom in enumerate(step.eqn.invars):
            if not _is_literal(atom):
                readers[atom] = readers.get(atom, frozenset()) | _readers_of_operand(step, i, readers)
    return tuple(readers.get(v, frozenset()) for v in jaxpr.invars), frozenset(rounded)


def _readers_of_operand(step: Any, i: int, readers: dict[Any, frozenset[str]]) -> frozenset[str]:
    eqn, dtype = step.eqn, step.operands[i]
    if vmap_rules.is_unread(eqn, i):
        return frozenset()
    if dtype == jnp.float32:
        return frozenset({_WIDE})
    if step.how == "same":
        return readers.get(eqn.outvars[0], frozenset())
    if step.how == "once" and dtype is None:  # widened where it is read, and where a derivative computes it anew
        return _BOTH
    if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.float32:
        return frozenset({_WIDE})
    inner = step.inner[0].readers[i] if step.how == "call" and eqn.primitive.name in _INLINED else frozenset()
    buffered = not inner or eqn.primitive.name in jaxprs.REMATS  # what is computed anew reads the value from memory
    return inner | {_LOW} if buffered else inner


def _is_cast_down(step: Any, k: int) -> bool:
    """Whether result `k` is computed in float32 and then cast. (XLA computes in float16, but often not in bfloat16.)"""
    if step.how == "call" and step.eqn.primitive.name in _INLINED:
        result = step.inner[0].jaxpr.outvars[k]
        for inner in step.inner[0].steps:
            if result in inner.eqn.outvars:
                return _is_cast_down(inner, inner.eqn.outvars.index(result))
    return step.how in ("same", "once") or jnp.float32 in step.operands


def rounded(x: Any) -> Any:
    """A 16-bit array whose rounding XLA cannot remove."""
    if x.dtype == jnp.float16:  # `reduce_precision` would flush its subnormals
        return lax.optimization_barrier(x)
    return casting.widened(x).astype(x.dtype)


def _is_low(dtype: Any) -> bool:
    return dtype in FLOATS and dtype != jnp.float32


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)
