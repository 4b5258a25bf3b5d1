"""What an fp8 layer casts, if a kernel can compute it from results of matmuls: gelu(a), silu(a) b, dh f'(a).

In a function that is traced, each array knows the equation that made it. From the array that a layer gets, `find` goes
back through elementwise equations to results of matmuls (at most three, of the same shape), biases (vectors along the
last axis) and numbers. A kernel computes the array from these, in float32, in the pass that casts it, and rounds it to
the array's own dtype in between. If nothing else reads the array, XLA never writes it. Its derivative stays the
model's own.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jaxtyping import Array

from jaxmp._src.base import ambient, compat, vmap_rules
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import jaxprs
from pallas_kernels import passes

PRODUCT = "jaxmp.product"  # names the results of matmuls in fp8 where they are differentiated
_MOST_STEPS, _MOST_TENSORS = 48, 3  # the gradient of silu(a) b by a is of these two and of that of the result
_MOST_LOOKS = 128  # the stream of a deep net leads to its first layer
_LINEAR: dict[str, Callable[..., Any]] = {  # a sum of results is read for other reasons, too
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,  # of gradients
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}
# Of a sign, 1 or 0: rounding a result of a matmul does not change it, so the kernel chooses as the model does.
_SIGNS: dict[str, Callable[..., Any]] = {
    "gt": lambda a, zero: jnp.where(a > zero, 1.0, 0.0),
    "ge": lambda a, zero: jnp.where(a >= zero, 1.0, 0.0),
    "lt": lambda a, zero: jnp.where(a < zero, 1.0, 0.0),
    "le": lambda a, zero: jnp.where(a <= zero, 1.0, 0.0),
}


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), in what Mosaic has."""
    return np.float32(1) / (np.float32(1) + jnp.exp(-x))


_OPERATIONS: dict[str, Callable[..., Any]] = {  # what Mosaic computes on float32 tiles
    **_LINEAR,
    **_SIGNS,
    "select_n": lambda which, a, b: jnp.where(which > 0, b, a),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "logistic": sigmoid,
    "rsqrt": jax.lax.rsqrt,
    "sqrt": jax.lax.sqrt,
    "square": lambda a: a * a,
    "one_minus_square": lambda a: 1 - a * a,  # the derivative of tanh
    "integer_pow 2": lambda a: a * a,
    "integer_pow 3": lambda a: a * a * a,
}
_SAME_NUMBERS = jaxprs.HANDS_ON | {"convert_element_type"}
_CALLS = ("jit", "pjit", "custom_jvp_call")


class Function(NamedTuple):
    """An elementwise function: steps of (operation, operands), the last of which is the result.

    An operand is a constant, the number of a step, or -1 - i for argument i.
    """

    steps: tuple[tuple[str, tuple[int | float, ...]], ...]

    def __call__(self, *arguments: Array) -> Array:
        """The function of float32 arrays that broadcast against each other."""
        results: list[Any] = []
        for name, operands in self.steps:
            values = (
                np.float32(o) if isinstance(o, float) else results[o] if o >= 0 else arguments[-1 - o] for o in operands
            )
            results.append(_OPERATIONS[name](*values))
        return results[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedCast:
    """What a cast computes before it rounds: `function` of float32 arrays.

    Attributes:
      tensors: arrays of the shape of the result.
      columns: vectors along its last axis, of any shape of this size.
      function: of both, in this order.
      rounded: the dtype to which the result is rounded before the cast.
    """

    tensors: tuple[Array, ...]
    columns: tuple[Array, ...]
    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    rounded: Any = dataclasses.field(metadata={"static": True})

    def plan(self, plan: passes.Pass) -> passes.Pass:
        """The pass that computes and casts, from the pass that casts the result."""
        return plan._replace(
            name="computed_cast_transpose_amax",
            compute=self.function,
            inputs=len(self.tensors),
            vectors=len(self.columns),
            rounded=jnp.dtype(self.rounded),
        )

    def arguments(self) -> list[Array]:
        """The arguments of this pass, but for the scale."""
        columns = self.tensors[0].shape[-1]
        return [*self.tensors, *(v.reshape(columns).astype(jnp.float32) for v in self.columns)]


class _NotFound(Exception):
    """An array that no kernel can compute."""


def find(h: Array, summed: Sequence[int]) -> FusedCast | None:
    """How a kernel can compute `h`, which a layer sums over these axes; None: the layer casts `h` itself."""
    if not ambient.is_in_loss() or h.ndim < 2 or tuple(summed) != (h.ndim - 1,):
        return None
    steps: list[tuple[str, tuple[Any, ...]]] = []
    tensors: list[Array] = []
    columns: list[Array] = []
    looks: list[Any] = []
    known = ByIdentity()

    # An operand is a constant, the number of a step, or an argument: the list that holds it, and its place there.
    def argument(held: list[Array], x: Array) -> Any:
        if not any(x is y for y in held):
            held.append(x)
        if len(tensors) > _MOST_TENSORS:
            raise _NotFound
        return held, next(i for i, y in enumerate(held) if y is x)

    def operand(x: Any) -> Any:
        if (fused := known.get(x)) is None:
            looks.append(x)
            if len(looks) > _MOST_LOOKS:
                raise _NotFound
            fused = of_array(x)
            known.set(x, fused)
        return fused

    def of_array(x: Any) -> Any:
        if (constant := compat.literal_of(x)) is not None:
            return _number(constant)
        origin = compat.equation_of(x)
        if (vector := _along_columns(x, origin, h.shape)) is not None:
            return argument(columns, vector)
        if (product := _product(x, origin)) is not None:
            if product.shape != h.shape or product.dtype not in passes.DTYPES:
                raise _NotFound
            return argument(tensors, product)
        if origin is None:
            raise _NotFound
        return result(*origin, operand)

    def result(eqn: Any, place: int, operand_of: Callable[[Any], Any]) -> Any:
        """Result number `place` of an equation; of a call, only what makes this result is looked at."""
        name, params = eqn.primitive.name, eqn.params
        if name == "reduce_precision":  # autocast's rounding to bfloat16
            is_known = h.dtype == jnp.bfloat16 and (params["exponent_bits"], params["mantissa_bits"]) == (8, 7)
            name = "convert_element_type" if is_known else name
        elif name == "convert_element_type" and params["new_dtype"] not in (jnp.float32, h.dtype):
            raise _NotFound
        if name in _CALLS:
            ((jaxpr, consts, *_),) = jaxprs.functions_of(eqn)
            outer = dict(zip(jaxpr.invars, eqn.invars, strict=True))
            constants = dict(zip(jaxpr.constvars, consts, strict=True))
            makers = {v: (inner, i) for inner in jaxpr.eqns for i, v in enumerate(inner.outvars)}
            held: dict[Any, Any] = {}

            def inside(v: Any) -> Any:
                if isinstance(v, core.Literal) or v in constants:
                    return _number(v.val if isinstance(v, core.Literal) else constants[v])
                if v not in held:
                    held[v] = operand_of(outer[v]) if v in outer else result(*makers[v], inside)
                return held[v]

            return inside(jaxpr.outvars[place])
        name = f"{name} {params['y']}" if name == "integer_pow" else name
        if name not in _OPERATIONS and name not in _SAME_NUMBERS and name != "broadcast_in_dim":
            raise _NotFound
        operands = tuple([operand_of(v) for v in eqn.invars])
        if name in _SAME_NUMBERS or (name == "broadcast_in_dim" and isinstance(operands[0], float)):
            return operands[0]
        is_step = name != "broadcast_in_dim" and not (name in _SIGNS and operands[1] != 0.0)
        if not is_step or len(steps) == _MOST_STEPS or all(isinstance(o, float) for o in operands):
            raise _NotFound
        steps.append((name, operands))
        return len(steps) - 1

    try:
        operand(h)
    except _NotFound:
        return None
    if not tensors or all(name in _LINEAR for name, _ in steps):
        return None

    def placed(o: Any) -> int | float:
        return -1 - o[1] - (len(tensors) if o[0] is columns else 0) if isinstance(o, tuple) else o

    function = Function(tuple((name, tuple(map(placed, operands))) for name, operands in steps))
    return FusedCast(tuple(tensors), tuple(columns), function, jnp.dtype(h.dtype))


def _number(x: Any) -> float:
    if isinstance(x, Tracer) or np.ndim(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise _NotFound
    return float(x)


def _product(x: Any, origin: Any) -> Any:
    """The result of a matmul that `x` is, in the narrowest dtype on the way; None of another array."""
    if origin is None:
        return None
    name, params = origin[0].primitive.name, origin[0].params
    if name in ("dot_general", vmap_rules.NAME) or (name == "name" and params["name"] == PRODUCT):
        return x
    if name not in _SAME_NUMBERS and name != "reshape":
        return None
    before = origin[0].invars[0]
    earlier = _product(before, compat.equation_of(before))
    if earlier is None or (earlier.shape == x.shape and earlier.dtype.itemsize <= x.dtype.itemsize):
        return earlier
    return x


def _along_columns(x: Any, origin: Any, shape: tuple[int, ...]) -> Any:
    """The vector that `x` repeats along all axes of `shape` but the last; None if it does not."""
    if x.shape not in (shape, (*[1] * (len(shape) - 1), shape[-1])) or math.prod(shape[:-1]) == 1:
        return None
    while x.size != shape[-1]:
        if origin is None or origin[0].primitive.name not in _SAME_NUMBERS | {"broadcast_in_dim", "reshape"}:
            return None
        before = origin[0].invars[0]
        keeps_columns = before.ndim > 0 and before.shape[-1] == shape[-1]
        if origin[0].primitive.name == "broadcast_in_dim":
            keeps_columns = keeps_columns and origin[0].params["broadcast_dimensions"][-1] == x.ndim - 1
        rounds = not jnp.issubdtype(before.dtype, jnp.floating) or before.dtype.itemsize > x.dtype.itemsize
        if not keeps_columns or rounds:
            return None
        x, origin = before, compat.equation_of(before)
    return x if x.shape[-1:] == shape[-1:] and jnp.issubdtype(x.dtype, jnp.floating) else None
