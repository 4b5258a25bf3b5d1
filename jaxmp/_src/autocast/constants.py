"""Numbers that a function computes from constants alone, such as `jnp.sqrt(1e-12)`: known before anything runs.

A plan checks whether a 16-bit dtype can hold a number. The number need not be a literal: it may be the result of a few
operations on scalars, because JAX traces them like all operations.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.programs import jaxprs

_SAME = jaxprs.REARRANGES | jaxprs.HANDS_ON | {"broadcast_in_dim", "stop_gradient"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs},
    **{"max": np.maximum, "min": np.minimum, "sqrt": np.sqrt, "square": np.square, "exp": np.exp, "log": np.log},
    **{"pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "convert_element_type": np.positive},
}


def result(eqn: Any, consts: list[float | None]) -> float | None:
    """The number that all elements of an equation's result are, if its operands are constants; else None."""
    if not consts or None in consts or len(eqn.outvars) != 1 or not _is_float(eqn.outvars[0].aval):
        return None
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name in _SAME:
        return consts[0]
    with np.errstate(all="ignore"):
        given = [np.asarray(c).astype(dtype) for c in consts]
        if name == "integer_pow":
            return float(np.power(given[0], np.asarray(eqn.params["y"], dtype)))
        return float(_FUNCTIONS[name](*given)) if name in _FUNCTIONS else None


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.floating)
