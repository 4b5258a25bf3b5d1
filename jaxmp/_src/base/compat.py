"""Everything that differs between supported jax versions, and nothing else.

We support jax 0.10.2 to the newest version. Every other file uses the names below and public jax names only.
`pallas_kernels.backend` holds what `pallas_kernels` needs too.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax.core import Tracer
from jax.interpreters import ad
from jaxtyping import Array

from pallas_kernels import backend
from pallas_kernels.backend import varying_axes as varying_axes


def manual_axes() -> tuple[str, ...]:
    """Names of the mesh axes that `jax.pmap` and `jax.shard_map` bind where this is called; `()` outside."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def as_varying(x: Array, axes: Iterable[str]) -> Array:
    """`x`, typed as varying over those of `axes` that a mesh binds; jax has no such type for the axes of `jax.vmap`."""
    manual = manual_axes()
    return backend.as_varying(x, [axis for axis in axes if axis in manual])


def is_tracked(axis: str) -> bool:
    """Whether jax tracks which arrays vary over a bound axis: inside `jax.shard_map(check_vma=True)`.

    There, an array without the axis in its `varying_axes` is equal on all devices of the axis. Elsewhere it may vary.
    """
    return axis in varying_axes(jax.lax.axis_index(axis))


def trace_state() -> Any:
    """A value that is equal only at the same level of the same trace: inside a branch or a loop it differs."""
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


# `jax.jit(inline=)`: the function is written out where it is called, so that a jaxpr does not show it.
WRITTEN_OUT: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

_same = jax.jit(lambda x: x, inline=WRITTEN_OUT)
_ZERO = np.zeros((), np.bool_)


def is_in_program() -> bool:
    """Whether a program is being traced where this is called, which writes operations down."""
    return isinstance(_same(_ZERO), Tracer)


def is_input(tracer: Any) -> bool:
    """Whether a tracer is known to be an input of the function that is traced, and no result in it."""
    return getattr(tracer, "parent", tracer) is None


def of_all_rows(x: Any) -> Any:
    """The array of all rows of which `jax.vmap` shows one; another value as it is."""
    while hasattr(x, "batch_dim"):
        x = x.val
    return x


def equation_of(tracer: Any) -> tuple[Any, int] | None:
    """The equation that made a tracer in the function that is traced, with the place of the result; None: not known.

    Its `invars` are tracers, too. Of a tracer that is differentiated it is the equation of its value.
    """
    while hasattr(tracer, "primal"):
        tracer = tracer.primal
    equation = getattr(tracer, "parent", None)
    places = [i for i, v in enumerate(getattr(equation, "outvars", ())) if v is getattr(tracer, "val", None)]
    return (equation, places[0]) if places else None


def literal_of(tracer: Any) -> Any:
    """The number that a tracer stands for, or None."""
    value = getattr(tracer, "val", None)
    return value.val if isinstance(value, jax.extend.core.Literal) else None


def closed_over(x: Any) -> Any:
    """The number, array or tracer of outside that a tracer stands for in the function that is traced; else itself."""
    while (outside := getattr(x, "get_const", lambda: None)()) is not None:
        x = outside
    return x


def transposed(primitive: Any, g: Array, others: Any, i: int, aval: Any, params: Any) -> Array:
    """The gradient of operand `i` of a product that is linear in it, by jax's own rule, with the type `aval`.

    `others` are the other operands, `params` those of the product that the rule binds: they may name another
    `preferred_element_type` than the dtype of `g`.
    """
    operands = (*others[:i], ad.UndefinedPrimal(aval), *others[i:])
    return ad.instantiate_zeros(ad.primitive_transposes[primitive](g, *operands, **params)[i])


def max_dtype() -> Any:
    """A float32 dtype whose values autodiff combines by MAX instead of adding them, with -inf as its zero.

    An extended dtype, like the dtype of keys; `lax.convert_element_type` converts it to and from float32. It is
    flax's: outside of a program, an array of such a dtype needs a class that jax does not show.
    """
    return fp8_ops.fp8_meta_dtype_wrapper(jnp.dtype(jnp.float32))


def max_dtype_to_float32(x: Array) -> Array:
    """`x` in float32, from `max_dtype` or from any float."""
    return jax.lax.convert_element_type(x, jnp.float32)


def linear_jaxpr(pullback: Any) -> Any:
    """The linear part of a function as `jax.vjp` holds it in the pullback it returned; None where it shows none."""
    return getattr(pullback, "jaxpr", None)
