"""The values of a function that runs under autocast: an array, the dtype it counts as, and what is known of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS, LOW
from jaxmp._src.numerics import casting
from jaxmp._src.programs import jaxprs

# What a value is made of: the largest of these among the operands of the operation that made it.
CONSTANTS, WEIGHTS, DATA = range(3)


class Value:
    """A value of a function.

    Attributes:
      array: what is held. An input of 16 bits is held in float32: whoever reads it in 16 bits reads the same number,
        and all of its gradients are added up in float32.
      dtype: the dtype that it counts as.
      votes: whether it counts among the operands of an operation in the widest dtype: scalars do not.
      const: the number that all its elements are, if known.
      is_input: whether it is an input of the function or a constant, moved or cast; no operation computes it.
      made_of: `WEIGHTS` if it is made of those inputs alone whose gradients devices sum in float32.
      home: the 16-bit dtype it had before a power made it float32; a bounded function returns to it.
      summed: of a sum over windows, moved or not, the 16-bit dtype of what was added: its average returns to it.
      is_cast_down: whether it was computed in float32, and then cast.
      keeps_rounding: whether it is of 16 bits and several operations read it, not all of them in float32. Each must see
        the same number, so a cast to float32 keeps the rounding, also where XLA would compute with more precision.
      origin: of a frozen kernel, moved or not: (what makes `array` of its parts, these), for a backward pass.
    """

    _KNOWN = ("dtype", "votes", "const", "is_input", "made_of", "home", "summed", "is_cast_down", "keeps_rounding")
    __slots__ = ("_casts", "array", "origin", *_KNOWN)

    def __init__(
        self,
        array: Any,
        dtype: Any,
        votes: bool = True,
        const: float | None = None,
        is_input: bool = False,
        made_of: int = DATA,
        home: Any = None,
        summed: Any = None,
        is_cast_down: bool = False,
        keeps_rounding: bool = False,
    ):
        self.array, self.dtype, self.votes, self.const, self.is_input = array, dtype, votes, const, is_input
        self.made_of, self.home, self.summed = made_of, home, summed
        self.is_cast_down, self.keeps_rounding = is_cast_down, keeps_rounding
        self._casts: dict[Any, Any] | None = None
        self.origin: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    def read(self, dtype: Any = None) -> Any:
        """The array in a dtype of autocast, by default in the one that it counts as.

        It is cast to each once, but an input that is held in float32 for each reader: so their gradients meet there.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in FLOATS or self.dtype not in FLOATS or self.array.dtype == dtype:
            return self.array
        if self.is_held_wide:
            return _cast(self, dtype)
        self._casts = {} if self._casts is None else self._casts
        if dtype not in self._casts:
            self._casts[dtype] = _cast(self, dtype)
        return self._casts[dtype]

    def holds(self, array: Any, **others: Any) -> "Value":
        """A value that is known alike and holds another array."""
        return Value(array, **({name: getattr(self, name) for name in self._KNOWN} | others))

    @property
    def is_low(self) -> bool:
        """Whether it counts as 16 bits and is no known number."""
        return self.dtype in LOW and self.const is None

    @property
    def is_float32(self) -> bool:
        """Whether a float32 array is held."""
        return getattr(self.array, "dtype", None) == FLOAT32

    @property
    def sums_in_float32(self) -> bool:
        """Whether it is of 16 bits, and devices sum its gradient in float32."""
        return self.is_low and self.made_of == WEIGHTS

    @property
    def is_held_wide(self) -> bool:
        """Whether it counts as 16 bits and is held in float32."""
        return self.dtype in LOW and self.is_float32


def result(x: Any, made_of: int = DATA) -> Value:
    """What a function computed, as it is."""
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return Value(x, x.dtype, np.ndim(x) > 0, made_of=made_of)


def held(x: Any, dtype: Any = None, made_of: int = DATA) -> Value:
    """An input that counts as `dtype`, by default as its own."""
    dtype = x.dtype if dtype is None else dtype
    array = lax.convert_element_type(x, FLOAT32) if dtype in FLOATS and x.dtype in FLOATS else x
    return Value(array, dtype, np.ndim(x) > 0, None, True, made_of)


def constant(x: Any, aval: Any = None) -> Value:
    """An array that a function closes over; a scalar is a number, unless it is traced."""
    del aval
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
    value = held(x)
    is_known = value.dtype in FLOATS and not np.ndim(x) and not isinstance(x, Tracer)
    if is_known and (not isinstance(x, jax.Array) or x.is_fully_addressable):
        value.const = float(x)
    return value


def number(x: Any, aval: Any) -> Value:
    """A number in a jaxpr; it may be one of Python."""
    x = np.asarray(x, aval.dtype)[()]
    is_number = aval.dtype in FLOATS and np.ndim(x) == 0
    return Value(x, aval.dtype, False, float(x) if is_number else None, True, CONSTANTS)


def cast(x: Any, dtype: Any) -> Any:
    """An array in another of autocast's dtypes."""
    return lax.convert_element_type(x, dtype) if x.dtype != dtype and x.dtype in FLOATS and dtype in FLOATS else x


def _cast(v: Value, dtype: Any) -> Any:
    x, limit = v.array, float(jnp.finfo(dtype).max)
    if not isinstance(x, jax.Array) and np.ndim(x) == 0:  # a literal
        number = float(x)
        return np.asarray(np.clip(number, -limit, limit) if np.isfinite(number) else number).astype(dtype)[()]
    if v.const is not None and np.isfinite(v.const) and abs(v.const) > limit:
        return jnp.full_like(x, np.clip(v.const, -limit, limit), dtype)
    return widened(v) if dtype == FLOAT32 and v.keeps_rounding else lax.convert_element_type(x, dtype)


def widened(v: Value) -> Any:
    """A 16-bit array in float32, rounded for all of its readers."""
    if v.array.dtype == jnp.float16 and v.is_cast_down:  # `reduce_precision` would flush its subnormals
        return lax.convert_element_type(lax.optimization_barrier(v.array), FLOAT32)
    return casting.widened(v.array)  # XLA computes in float16 what is of it, but often not what is of bfloat16


def fits(dtype: Any, number: float | None) -> bool:
    """Whether a number is in the normal range of a dtype; 0, inf and NaN always are, and what is not known."""
    if number is None or number == 0 or dtype == FLOAT32 or not np.isfinite(number):
        return True
    limits = jnp.finfo(dtype)
    return float(limits.tiny) <= abs(number) <= float(limits.max)


def is_exact(number: float | None, dtype: Any) -> bool:
    """Whether a dtype has a number without a rounding; one that is not known it may not have."""
    if number is None or not np.isfinite(number):
        return number is not None
    return bool(abs(number) <= float(jnp.finfo(dtype).max)) and float(np.asarray(number).astype(dtype)) == number


_SAME = jaxprs.REARRANGES | jaxprs.HANDS_ON | {"broadcast_in_dim", "stop_gradient"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs},
    **{"max": np.maximum, "min": np.minimum, "sqrt": np.sqrt, "square": np.square, "exp": np.exp, "log": np.log},
    **{"pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "convert_element_type": np.positive},
}


def folded(eqn: Any, consts: list[float | None]) -> float | None:
    """The number that an equation makes of numbers alone, such as `jnp.sqrt(1e-12)`; None if it is not known."""
    if not consts or None in consts or len(eqn.outvars) != 1 or eqn.outvars[0].aval.dtype not in FLOATS:
        return None
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name in _SAME:
        return consts[0]
    with np.errstate(all="ignore"):
        constants = [np.asarray(c).astype(dtype) for c in consts]
        if name == "integer_pow":
            return float(np.power(constants[0], np.asarray(eqn.params["y"], dtype)))
        return float(_FUNCTIONS[name](*constants)) if name in _FUNCTIONS else None
