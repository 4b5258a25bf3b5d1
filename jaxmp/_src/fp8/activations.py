"""An activation before an fp8 layer, computed in the pass that casts its result, so that no 16-bit result is stored.

    h = f(a)    or    h = f(a, b)               gelu(a), relu(a)^2, silu(a) b

An fp8 layer casts its input h. In a program that is traced, the equations say how h was made: an elementwise function
of one or two results of matmuls, which are in memory anyway, and of their biases. A kernel computes the cast from
these. It computes f in float32 and rounds to the dtype of h before the cast. The derivative is still that of h.

Without the kernel XLA writes h, and for some functions a part of f for the derivative, and the cast reads h again. An
eager function and one that jax differentiates while it traces have no equations; there the layer casts h itself.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jaxtyping import Array

from jaxmp._src.base import ambient, compat, vmap_rules
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import jaxprs
from pallas_kernels import passes, reference

_MOST_STEPS = 24  # one for each arithmetic operation of the kernel
_MOST_TENSORS = 2

# The operations that Mosaic computes, on float32 tiles.
_LINEAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}
_CURVED: dict[str, Callable[..., Any]] = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "logistic": reference.sigmoid,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "square": lambda a: a * a,
    "integer_pow 2": lambda a: a * a,
    "integer_pow 3": lambda a: a * a * a,
}
_OPERATIONS = _LINEAR | _CURVED
_CALLS = ("jit", "pjit", "custom_jvp_call")
_ANOTHER_TYPE = ("convert_element_type", "reshape")
_PRODUCTS = ("dot_general", vmap_rules.NAME)


class Function(NamedTuple):
    """An elementwise function of tensors and of vectors along their last axis, which are its arguments in this order.

    It has steps of (operation, operands); the last step is the result. An operand is a constant, the number of a step,
    or -1 - i for argument i.
    """

    n_tensors: int
    n_vectors: int
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
    """How an activation made an array: `function` of `tensors`, which have its shape, and of `vectors`."""

    tensors: tuple[Array, ...]
    vectors: tuple[Array, ...]
    function: Function = dataclasses.field(metadata={"static": True})

    of_products: ClassVar[bool] = True

    def plan(self, dtype: Any, rounded: Any, rows: int) -> passes.Pass:
        """See `made.Made`."""
        return passes.Pass(
            name="activation_cast_transpose_amax",
            compute=self.function,
            inputs=len(self.tensors),
            values=1,
            dtype=jnp.dtype(dtype),
            wide_dtype=None,
            rows=rows,
            of_columns=len(self.vectors),
            rounded=jnp.dtype(rounded),
        )

    def arguments(self) -> list[Array]:
        """See `made.Made`."""
        return [*self.tensors, *(v.astype(jnp.float32) for v in self.vectors)]


def made_by_activation(h: Array, summed: Sequence[int]) -> Made | None:
    """How an activation made `h`, which a layer sums over these axes; None if the layer casts `h` itself."""
    if not ambient.is_in_loss() or h.ndim < 2 or tuple(summed) != (h.ndim - 1,):
        return None
    search = _Search(h.shape, {jnp.dtype(jnp.float32), h.dtype})
    try:
        search.operand(h)
    except _NotFound:
        return None
    if not search.tensors or not any(name in _CURVED for name, _ in search.steps):
        return None  # a sum of results is read for other reasons, too
    return Made(tuple(search.tensors), tuple(search.vectors), search.function())


class _NotFound(Exception):
    """A value is not what a kernel can compute."""


class _Vector(NamedTuple):
    """Vector i, as an operand: its number among the arguments is not known before all tensors are."""

    i: int


_Operand = int | float | _Vector


class _Search:
    """The steps and tensors that make a value of this shape; conversions to these dtypes are no steps."""

    def __init__(self, shape: tuple[int, ...], dtypes: Collection[Any]):
        self.shape, self.dtypes = shape, dtypes
        self.steps: list[tuple[str, tuple[_Operand, ...]]] = []
        self.tensors: list[Array] = []
        self.vectors: list[Array] = []
        self._known = ByIdentity()

    def operand(self, value: Any) -> _Operand:
        """A value of the function that is traced, as an operand of a step."""
        known = self._known.get(value)
        if known is None:
            known = self._operand(value)
            self._known.set(value, known)
        return known

    def _operand(self, value: Any) -> _Operand:
        if (constant := compat.literal_of(value)) is not None:
            return _number(constant)
        made = compat.equation_of(value)
        if made is None:
            raise _NotFound
        if (vector := self._vector(value)) is not None:
            self.vectors.append(vector)
            return _Vector(len(self.vectors) - 1)
        if (product := _product(value)) is not None:
            return self._tensor(product)
        equation, place = made
        return self._results(equation, [self.operand(x) for x in equation.invars])[place]

    def _tensor(self, value: Any) -> int:
        known = [i for i, x in enumerate(self.tensors) if x is value]
        if not known:
            if value.shape != self.shape or value.dtype not in passes.DTYPES or len(self.tensors) == _MOST_TENSORS:
                raise _NotFound
            known = [len(self.tensors)]
            self.tensors.append(value)
        return -1 - known[0]

    def _vector(self, value: Any) -> Any:
        """The vector along the last axis that a value repeats along all other axes; None if it does not."""
        while value.shape != self.shape[-1:]:
            made = compat.equation_of(value)
            if made is None or not made[0].invars:
                return None
            equation, source = made[0], made[0].invars[0]
            name, last = equation.primitive.name, equation.params.get("broadcast_dimensions")
            if name == "broadcast_in_dim" and last[-1:] == (value.ndim - 1,) and source.shape[-1:] == self.shape[-1:]:
                is_same = source.size == source.shape[-1]
            else:
                is_same = (name in jaxprs.HANDS_ON or name in _ANOTHER_TYPE) and value.size == self.shape[-1]
            if not is_same:
                return None
            value = source
        return value if jnp.issubdtype(value.dtype, jnp.floating) else None

    def function(self) -> Function:
        """What was found."""
        n = len(self.tensors)

        def placed(operand: _Operand) -> int | float:
            return -1 - n - operand.i if isinstance(operand, _Vector) else operand

        steps = tuple((name, tuple(map(placed, operands))) for name, operands in self.steps)
        return Function(n, len(self.vectors), steps)

    def _results(self, equation: Any, operands: list[_Operand]) -> list[_Operand]:
        """The results of an equation, as operands."""
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            ((jaxpr, consts),) = jaxprs.functions_of(equation)
            return self._results_of(jaxpr, consts, operands)
        if name in jaxprs.HANDS_ON or (name == "convert_element_type" and params["new_dtype"] in self.dtypes):
            return operands
        if name == "broadcast_in_dim" and isinstance(operands[0], float):
            return operands[:1]
        name = f"{name} {params['y']}" if name == "integer_pow" else name
        if name not in _OPERATIONS or len(self.steps) == _MOST_STEPS or not any(isinstance(o, int) for o in operands):
            raise _NotFound
        self.steps.append((name, tuple(operands)))
        return [len(self.steps) - 1]

    def _results_of(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[_Operand]) -> list[_Operand]:
        known: dict[Any, _Operand] = dict(zip(jaxpr.invars, operands, strict=True))
        known |= {v: _number(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}

        def of(v: Any) -> _Operand:
            return _number(v.val) if isinstance(v, core.Literal) else known[v]

        for equation in jaxpr.eqns:
            known |= dict(zip(equation.outvars, self._results(equation, list(map(of, equation.invars))), strict=True))
        return [of(v) for v in jaxpr.outvars]


def _number(constant: Any) -> float:
    if isinstance(constant, Tracer) or np.ndim(constant) or not jnp.issubdtype(jnp.result_type(constant), jnp.floating):
        raise _NotFound
    return float(constant)


def _product(value: Any) -> Any:
    """The result of a matmul that a value is, in the narrowest dtype that it has on the way; None of another value."""
    made = compat.equation_of(value)
    if made is None:
        return None
    equation, _ = made
    name = equation.primitive.name
    if name in _PRODUCTS:
        return value
    if name not in jaxprs.HANDS_ON and name not in _ANOTHER_TYPE:
        return None
    earlier = _product(equation.invars[0])
    if earlier is None or (earlier.shape == value.shape and earlier.dtype.itemsize <= value.dtype.itemsize):
        return earlier
    return value
