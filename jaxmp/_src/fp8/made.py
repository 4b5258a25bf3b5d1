"""What made an array that an fp8 layer casts, if a kernel can compute its cast from that.

    h = f(a)    or    h = f(a, b)                   gelu(a), relu(a)^2, silu(a) b
    y = (x - mean) rsqrt(var + eps) w + bias        a norm; RMSNorm has no mean
    da = dh f'(a)                                   the gradient of an activation, which the layer before casts

In a program that is traced, the equations say how the array was made: an elementwise function of up to three tensors
that are in memory anyway, of a number for each row, and of vectors along the last axis. The tensors are results of
matmuls, or those of whose rows a norm takes statistics; the numbers and vectors are whatever the model computed. So any
norm of any framework is found. A kernel computes the cast from these, in float32, and rounds to the dtype of the array
before the cast. Then nothing else reads the array, and XLA does not write it. Its derivative stays the model's own.

Without the kernel XLA writes the array, and for some functions a part of it for the derivative, and the cast reads it
again. A layer inside of `jax.vmap` casts the array itself.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jaxtyping import Array

from jaxmp._src.base import ambient, compat, vmap_rules
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import jaxprs
from pallas_kernels import passes, reference

_MOST_STEPS = 48  # one for each arithmetic operation of the kernel
_MOST_TENSORS = 3  # the gradient of silu(a) b by a is of these two and of that of the result
_MOST_VALUES = 64  # that are looked at

# The operations that Mosaic computes, on float32 tiles.
_LINEAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,  # of gradients
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}
_CURVED: dict[str, Callable[..., Any]] = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "logistic": reference.sigmoid,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "square": lambda a: a * a,
    "one_minus_square": lambda a: 1 - a * a,  # the derivative of tanh
    "integer_pow 2": lambda a: a * a,
    "integer_pow 3": lambda a: a * a * a,
}
# Of a sign, 1 or 0: rounding a result of a matmul does not change it, so the kernel chooses as the model does.
_SIGNS: dict[str, Callable[..., Any]] = {
    "gt": lambda a, zero: jnp.where(a > zero, 1.0, 0.0),
    "ge": lambda a, zero: jnp.where(a >= zero, 1.0, 0.0),
    "lt": lambda a, zero: jnp.where(a < zero, 1.0, 0.0),
    "le": lambda a, zero: jnp.where(a <= zero, 1.0, 0.0),
}
_CURVED |= _SIGNS | {"select_n": lambda which, a, b: jnp.where(which > 0, b, a)}
_OPERATIONS = _LINEAR | _CURVED
_CALLS = ("jit", "pjit", "custom_jvp_call")
_SAME_NUMBERS = jaxprs.HANDS_ON | {"convert_element_type"}
_SAME_ORDER = _SAME_NUMBERS | {"reshape", "squeeze", "broadcast_in_dim"}  # while the size stays
_PRODUCTS = ("dot_general", vmap_rules.NAME)
PRODUCT = "jaxmp.product"  # names the results of matmuls in fp8 where they are differentiated
_ROOTS = {"rsqrt", "sqrt", "pow"}

_TENSORS, _OF_ROWS, _OF_COLUMNS = range(3)  # the kinds of arguments, in their order


class Function(NamedTuple):
    """An elementwise function: steps of (operation, operands), the last of which is the result.

    An operand is a constant, the number of a step, or -1 - i for argument i.
    """

    steps: tuple[tuple[str, tuple[int | float, ...]], ...]

    def __call__(self, *arguments: Array) -> Array:
        """The function of float32 arrays that broadcast against each other."""
        results: list[Any] = []

        def value(operand: int | float) -> Any:
            if isinstance(operand, float):
                return np.float32(operand)
            return results[operand] if operand >= 0 else arguments[-1 - operand]

        for name, operands in self.steps:
            results.append(_OPERATIONS[name](*map(value, operands)))
        return results[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Made:
    """How an array was made: `function` of the others, in their order.

    Attributes:
      tensors: of the shape of the array.
      of_rows: one number for each row; of any shape of this size.
      of_columns: vectors along the last axis; of any shape of this size.
      of_products: whether all of them are results of matmuls and biases.
    """

    tensors: tuple[Array, ...]
    of_rows: tuple[Array, ...]
    of_columns: tuple[Array, ...]
    function: Function = dataclasses.field(metadata={"static": True})
    of_products: bool = dataclasses.field(metadata={"static": True})

    def plan(self, dtype: Any, rounded: Any, rows: int, *, sums: bool = False) -> passes.Pass:
        """The pass that casts the array, which has the dtype `rounded`, to the fp8 `dtype`."""
        return passes.Pass(
            name="computed_cast_transpose_amax",
            compute=self.function,
            inputs=len(self.tensors),
            values=1,
            dtype=jnp.dtype(dtype),
            wide_dtype=None,
            rows=rows,
            sums=sums,
            of_rows=len(self.of_rows),
            of_columns=len(self.of_columns),
            rounded=jnp.dtype(rounded),
        )

    def arguments(self) -> list[Array]:
        """The arguments of the pass, but for the scale."""
        *rows, columns = self.tensors[0].shape
        of_rows = [v.reshape(rows).astype(jnp.float32) for v in self.of_rows]
        return [*self.tensors, *of_rows, *(v.reshape(columns).astype(jnp.float32) for v in self.of_columns)]


def found(h: Array, summed: Sequence[int]) -> Made | None:
    """What made `h`, which a layer sums over these axes; None if the layer casts `h` itself."""
    if not ambient.is_in_loss() or h.ndim < 2 or tuple(summed) != (h.ndim - 1,):
        return None
    search = _Search(h)
    try:
        search.operand(h)
    except _NotFound:
        return None
    tensors, of_rows, of_columns = map(tuple, search.arguments)
    is_norm = any(_is_in(x, search.normalized) for x in tensors)
    is_curved = any(name in _CURVED for name, _ in search.steps)
    if not tensors or not (is_curved or (is_norm and len(tensors) == 1)):
        return None  # a sum of results is read for other reasons, too
    if of_rows and not is_norm:
        return None  # a softmax: its derivative reads the result
    return Made(tensors, of_rows, of_columns, search.function(), of_products=not is_norm)


class _NotFound(Exception):
    """A value is not what a kernel can compute."""


class _Argument(NamedTuple):
    """Argument i of a kind: its number among all arguments is not known before the end of the search."""

    kind: int
    i: int


_Operand = int | float | _Argument


class _Search:
    """The steps and arguments that make the value `h`; conversions to its dtype and float32 are no steps."""

    def __init__(self, h: Any):
        self.shape, self.dtypes = h.shape, (jnp.dtype(jnp.float32), h.dtype)
        self.normalized = _normalized(h)
        self.steps: list[tuple[str, tuple[_Operand, ...]]] = []
        self.arguments: tuple[list[Array], ...] = ([], [], [])
        self._known = ByIdentity()
        self._looked_at = 0

    def operand(self, value: Any) -> _Operand:
        """A value of the function that is traced, as an operand of a step."""
        known = self._known.get(value)
        if known is None:
            self._looked_at += 1
            if self._looked_at > 4 * _MOST_STEPS:  # the stream of a deep net leads to its first layer
                raise _NotFound
            known = self._operand(value)
            self._known.set(value, known)
        return known

    def _operand(self, value: Any) -> _Operand:
        if (constant := compat.literal_of(_origin(value, any_size=True))) is not None:
            return _number(constant)
        if (repeated := _repeated(value, self.shape)) is not None:
            return self._argument(*repeated)
        if _is_in(tensor := _stored(value), self.normalized) or (tensor := _product(value)) is not None:
            return self._argument(_TENSORS, tensor)
        made = compat.equation_of(value)
        if made is None:
            raise _NotFound
        return self._result(*made, self.operand)

    def _argument(self, kind: int, value: Any) -> _Argument:
        held = self.arguments[kind]
        if not _is_in(value, held):
            if kind == _TENSORS:
                can = value.shape == self.shape and value.dtype in passes.DTYPES and len(held) < _MOST_TENSORS
            else:
                can = jnp.issubdtype(value.dtype, jnp.floating)
            if not can:
                raise _NotFound
            held.append(value)
        return _Argument(kind, next(i for i, x in enumerate(held) if x is value))

    def _result(self, equation: Any, place: int, operand_of: Callable[[Any], _Operand]) -> _Operand:
        """Result number `place` of an equation."""
        name, params, inputs = equation.primitive.name, equation.params, equation.invars
        if name in _CALLS:
            return self._result_of_call(equation, place, operand_of)
        if name in jaxprs.HANDS_ON or (name == "convert_element_type" and params["new_dtype"] in self.dtypes):
            return operand_of(inputs[0])
        if name == "broadcast_in_dim":
            operand = operand_of(inputs[0])
            if isinstance(operand, float):
                return operand
        elif (name := _name(equation)) in _OPERATIONS:
            operands = tuple(map(operand_of, inputs))
            if name in _SIGNS and operands[1] != 0.0:
                raise _NotFound
            if len(self.steps) < _MOST_STEPS and not all(isinstance(o, float) for o in operands):
                self.steps.append((name, operands))
                return len(self.steps) - 1
        raise _NotFound

    def _result_of_call(self, equation: Any, place: int, operand_of: Callable[[Any], _Operand]) -> _Operand:
        """The same of a call: only what makes this result is looked at."""
        ((jaxpr, consts),) = jaxprs.functions_of(equation)
        given = dict(zip(jaxpr.invars, equation.invars, strict=True))
        constants = dict(zip(jaxpr.constvars, consts, strict=True))
        makers = {v: (inner, i) for inner in jaxpr.eqns for i, v in enumerate(inner.outvars)}

        @functools.cache
        def of_variable(v: Any) -> _Operand:
            if v in given:
                return operand_of(given[v])
            return _number(constants[v]) if v in constants else self._result(*makers[v], of)

        def of(v: Any) -> _Operand:
            return _number(v.val) if isinstance(v, core.Literal) else of_variable(v)

        return of(jaxpr.outvars[place])

    def function(self) -> Function:
        """What was found."""
        n = [0, *(len(held) for held in self.arguments)]

        def placed(operand: _Operand) -> int | float:
            return -1 - sum(n[: operand.kind + 1]) - operand.i if isinstance(operand, _Argument) else operand

        return Function(tuple((name, tuple(map(placed, operands))) for name, operands in self.steps))


# --- what a value is made of, by its equations ------------------------------------------------------------------------


def _name(equation: Any) -> str:
    name = equation.primitive.name
    return f"{name} {equation.params['y']}" if name == "integer_pow" else name


def _number(constant: Any) -> float:
    if isinstance(constant, Tracer) or np.ndim(constant) or not jnp.issubdtype(jnp.result_type(constant), jnp.floating):
        raise _NotFound
    return float(constant)


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(value is x for x in values)


def _source(value: Any, names: Collection[str]) -> Any:
    """What an equation of one of these names took the numbers of `value` from, without a rounding; None if none did."""
    made = compat.equation_of(value)
    if made is None or made[0].primitive.name not in names:
        return None
    source = made[0].invars[0]
    is_float = jnp.issubdtype(source.dtype, jnp.floating)
    keeps = is_float and (source.dtype == value.dtype or source.dtype.itemsize < value.dtype.itemsize)
    return source if keeps else None


def _origin(value: Any, *, any_size: bool = False) -> Any:
    """The first array with the numbers of `value` in its order."""
    while (source := _source(value, _SAME_ORDER)) is not None and (any_size or source.size == value.size):
        value = source
    return value


def _stored(value: Any) -> Any:
    """The first array that is `value`, perhaps in a narrower dtype."""
    while (source := _source(value, _SAME_NUMBERS)) is not None:
        value = source
    return value


def _product(value: Any) -> Any:
    """The result of a matmul that a value is, in the narrowest dtype that it has on the way; None of another value."""
    made = compat.equation_of(value)
    if made is None:
        return None
    equation, _ = made
    name = equation.primitive.name
    if name in _PRODUCTS or (name == "name" and equation.params["name"] == PRODUCT):
        return value
    if name not in _SAME_NUMBERS and name != "reshape":
        return None
    earlier = _product(equation.invars[0])
    if earlier is None or (earlier.shape == value.shape and earlier.dtype.itemsize <= value.dtype.itemsize):
        return earlier
    return value


def _repeated(value: Any, shape: tuple[int, ...]) -> tuple[int, Any] | None:
    """(kind, what a value repeats along the last axis of `shape`, or along all others); None if it does not."""
    axes, last = tuple(range(value.ndim)), len(shape) - 1
    if value.ndim != len(shape):
        return None
    while value.shape == shape:
        made, source = compat.equation_of(value), _source(value, _SAME_NUMBERS | {"broadcast_in_dim"})
        if made is None or source is None:
            return None
        axes, value = made[0].params.get("broadcast_dimensions", axes), source
    varies = {axis for axis, side in zip(axes, value.shape, strict=True) if side > 1}
    if varies <= {last} and value.size == shape[-1]:
        return _OF_COLUMNS, _origin(value)
    if last not in varies and value.size == math.prod(shape[:-1]):
        return _OF_ROWS, _origin(value)
    return None


def _normalized(h: Any) -> list[Any]:
    """The tensors of whose rows a norm before `h` takes statistics; none if nothing takes a root."""
    values, names, tensors = [h], set(), []
    for value in values:  # those of the shape of h, and those with one number for each row
        made = compat.equation_of(value)
        if made is None or made[0].primitive.name in _PRODUCTS or len(values) > _MOST_VALUES:
            continue
        names |= {equation.primitive.name for equation in _with_inner(made[0])}
        for x in made[0].invars:
            is_whole = x.shape == h.shape
            if is_whole and value.shape != h.shape:
                tensors.append(_measured(x, h.shape))
            elif (is_whole or x.size * h.shape[-1] == h.size) and not _is_in(x, values):
                values.append(x)
    return tensors if names & _ROOTS else []


def _with_inner(equation: Any) -> Iterator[Any]:
    yield equation
    for jaxpr, _ in jaxprs.functions_of(equation):
        yield from jaxprs.equations(jaxpr)


def _measured(value: Any, shape: tuple[int, ...]) -> Any:
    """The tensor of which `value` are the deviations from the mean, or their squares, or itself."""
    while True:
        value = _stored(value)
        made = compat.equation_of(value)
        if made is None:
            return value
        first, *others = made[0].invars
        name = _name(made[0])
        is_square = name in ("square", "integer_pow 2") or (name == "mul" and others[0] is first)
        if not is_square and not (name == "sub" and _repeated(others[0], shape) is not None):
            return value
        value = first
