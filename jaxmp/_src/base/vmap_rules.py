"""A function whose rule for `jax.vmap` acts before the function is differentiated.

`jax.custom_vjp` differentiates first: vmap batches its forward and backward functions separately, and computes one
gradient for each member of the batch, also for a weight that all members share; these gradients are summed afterwards.
`jax.custom_batching` cannot be differentiated in reverse mode. So this file has its own primitive: vmap calls the rule,
which returns another call, and this call is differentiated as a whole. The derivative is that of the function, which
may be a `jax.custom_vjp`.

    call(fun, rule, *args)      fun(*args), and under vmap what `rule(axis_size, args, batched)` returns

The rule gets batched arguments with their batch axis first, and returns the result and the position of its batch axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Rule = Callable[[int, Sequence[Array], Sequence[bool]], tuple[Array, int]]


def call(fun: Callable[..., Array], rule: Rule, *args: Array) -> Array:
    """`fun(*args)`, one array of arrays, with a rule for vmap; see the module's docstring. `fun` is hashable."""
    return _call.bind(*args, body=_body(fun, [jax.typeof(x) for x in args]), fun=fun, rule=rule)


def _body(fun: Callable[..., Array], avals: Sequence[Any]) -> Any:
    return _jitted(fun).trace(*avals).jaxpr


@functools.lru_cache(maxsize=512)
def _jitted(fun: Callable[..., Array]) -> Any:
    """`fun` as a function of which jax keeps the trace for each shape."""
    return jax.jit(lambda *args: fun(*args))


NAME = "call_with_vmap_rule"
_call = Primitive(NAME)


@_call.def_impl
def _run(*args: Array, body: Any, **_: Any) -> Array:
    return jaxpr_as_fun(body)(*args)[0]


@_call.def_abstract_eval
def _abstract(*args: Any, body: Any, **_: Any) -> Any:
    del args
    return body.out_avals[0]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, fun: Any, **_: Any) -> tuple[Array, Any]:
    moving = [i for i, x in enumerate(primals) if not jax.numpy.issubdtype(x.dtype, jax.numpy.integer)]

    def of_floats(*values: Array) -> Array:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return fun(*operands)

    return jax.jvp(of_floats, [primals[i] for i in moving], [ad.instantiate_zeros(tangents[i]) for i in moving])


def _batch(args: Sequence[Array], axes: Sequence[int | None], *, rule: Rule, **_: Any) -> tuple[Array, int]:
    batched = [axis is not None for axis in axes]
    first = [x if axis is None else jax.numpy.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]
    size = next(x.shape[0] for x, is_batched in zip(first, batched, strict=True) if is_batched)
    return rule(size, first, batched)


ad.primitive_jvps[_call] = _jvp
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=False))
