"""The dtype that one operation runs in: what its list says, corrected by who uses its result and by its operands.

    allow        every float operand is cast to `dtype`
    force_fp32   every float operand is cast to float32
    widest       to the widest among the operands that *vote*
    None         back to what the operation was traced with

As in PyTorch, scalars do not vote, so they do not affect the result dtype: literals, scalar arrays, and scalars that
were broadcast. But they are not rounded to it: arithmetic of 16-bit arrays with a float32 scalar runs in float32 in
each element, and only its result is rounded (`once`). So `h / sum(abs(h))` is right although float16 cannot hold the
sum. If all operands are scalar arrays, all of them vote except constants (so the logit of one class does not
change a float32 logsumexp to 16 bits). But a constant that `dtype` cannot hold (1e-8 or 1e6 in float16) makes an
operation float32. If the operation only selects values, a constant that is too large saturates (`where(mask, x,
-1e9)`), unless it is the result everywhere (`max(x, 1e6)`). A write into a buffer runs in the dtype of the buffer.

float64, complex, integers, keys and fp8 are never cast, and an operation on float64, complex or fp8 values runs as it
was written.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._src.autocast import cast_lists
from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS, LOW, CastLists
from jaxmp._src.autocast.value_uses import Uses
from jaxmp._src.autocast.values import CONSTANTS, Value, fits, is_exact
from jaxmp._src.base import vmap_rules
from jaxmp._src.programs import jaxprs


class Choice(NamedTuple):
    """How one equation runs.

    Attributes:
      how: `"bind"`: in `dtype`; `"once"`: 16-bit operands are widened and the result is rounded, as with a float32
        scalar or in a sum; `"product"`: multiplies in 16 bits and returns float32; `"written"`: in the dtypes it was
        traced with; `"same"`: returns its operand; `"low"`: casts it; `"each"`: each operand has a dtype of its own;
        `"again"`: its function is traced in the dtypes that arrive.
      group: the group that decided, for people to read.
      dtype: of the float operands; None: their own.
      result: of the float results.
      scalars: the operands that stay float32.
      home, summed: of the results (`Value`).
    """

    how: str
    group: str
    dtype: Any = None
    result: Any = None
    scalars: frozenset[int] = frozenset()
    home: Any = None
    summed: Any = None

    def operand(self, k: int, v: Value) -> Any:
        """The dtype in which operand `k` is read."""
        return (FLOAT32 if k in self.scalars else self.dtype) if v.dtype in FLOATS else None


WRITTEN = Choice("written", "written")


def choose(i: int, eqn: Any, operands: list[Value], lists: CastLists, uses: Uses) -> Choice:
    """How equation `i` of a function, one without functions inside, runs."""
    name = eqn.primitive.name
    is_low = bool(operands) and operands[0].dtype == lists.dtype
    cast = cast_lists.kind_of_cast(eqn, lists.dtype)
    if cast == "same" or (is_low and cast == "low"):
        return Choice("same", "widest")
    if lists.dtype is None:
        return WRITTEN
    if cast == "mark" or (is_low and i in uses.low and cast == "wide"):
        return Choice("low", "allow", lists.dtype, lists.dtype)
    if name == vmap_rules.NAME:
        return Choice("again", "written")
    group = uses.groups[i]
    is_of_floats = any(v.dtype in FLOATS for v in operands)  # not so of a matmul of integers
    if group is None or not is_of_floats or has_other_floats(eqn) or cast_lists.is_custom_scatter(eqn):
        return WRITTEN
    if i in uses.biased and all(fits(lists.dtype, v.const) for v in operands):
        group = "allow"
    has_range = jnp.finfo(lists.dtype).maxexp == jnp.finfo(FLOAT32).maxexp
    if group == "force_fp32" and name in cast_lists.POWERS and i in uses.tamed and has_range:
        group = "widest"
    if group in ("allow", "widest") and cast_lists.returns_float32(eqn, cast_lists.OFF):
        return WRITTEN  # the code put the operands in 16 bits itself, and asks for float32
    is_read = lists.float32_products == "read" and group == "allow" and i in uses.wide
    if is_read or cast_lists.returns_float32(eqn, lists):
        if group == "allow":
            return Choice("product", "allow", lists.dtype, FLOAT32)
        group = "force_fp32"  # a product that sums nothing
    if name in cast_lists.EACH_ITS_OWN and group == "widest":
        return Choice("each", "widest") if len(operands) == len(eqn.outvars) else WRITTEN
    is_reciprocal = (name == "integer_pow" and eqn.params["y"] < 0) or (
        name == "div" and isinstance(eqn.invars[0], core.Literal)
    )
    if group == "force_fp32" or (group == "widest" and is_reciprocal):
        return _in_dtype(eqn, operands, FLOAT32, "force_fp32")
    is_moved_low = i in uses.low and name in cast_lists.BEFORE_CAST
    if group == "allow" or (is_moved_low and all(fits(lists.dtype, v.const) for v in operands)):
        return _in_dtype(eqn, operands, lists.dtype, group)
    low = [v for v in operands if v.dtype in LOW]
    takes_rows = name in cast_lists.PARTS and bool(low) and all(v.is_input for v in low)  # of a table of 16-bit params
    if i in uses.wide and not takes_rows:
        return _in_dtype(eqn, operands, FLOAT32, "feeds float32")
    if name in cast_lists.INTO_BUFFER:
        return _in_dtype(eqn, operands, operands[0].dtype, group)
    if (average := _averaged(eqn, operands)) is not None:
        return Choice("bind", group, FLOAT32, average)
    return _in_dtype(eqn, operands, widest(eqn, operands), group)


def _in_dtype(eqn: Any, operands: list[Value], dtype: Any, group: str) -> Choice:
    name = eqn.primitive.name
    scalars = scalars_to_keep(operands, dtype) if cast_lists.takes_scalars(eqn) else frozenset()
    home = None if group == "feeds float32" else _home(name, operands, dtype)
    if group == "widest" and name in cast_lists.BOUNDED and home is not None:
        return Choice("bind", group, dtype, home)
    summed = _summed(eqn, operands, group) if dtype == FLOAT32 else None
    once = scalars or (dtype in LOW and cast_lists.rounds_once(eqn))
    return Choice("once" if once else "bind", group, dtype, dtype, scalars, home, summed)


def has_other_floats(eqn: Any) -> bool:
    """Whether an operand or result is a float that autocast does not cast: float64, complex, fp8.

    A function with its own derivative also has scales of fp8, whose dtype is their own: their gradients are its rule's.
    """
    dtypes: set[Any] = {getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)} - FLOATS
    if eqn.primitive.name in jaxprs.WITH_FUNCTIONS - jaxprs.WITH_OWN_DERIVATIVE:  # what reads fp8 inside is as written
        dtypes = {d for d in dtypes if d is None or not jaxprs.any_fp8([d])}
    if None in dtypes or any(jnp.issubdtype(d, jnp.inexact) for d in dtypes):
        return True
    if eqn.primitive.name not in jaxprs.WITH_OWN_DERIVATIVE:
        return False
    own = [d for d in dtypes if jnp.issubdtype(d, jax.dtypes.extended)]
    return any(not jnp.issubdtype(d, jax.dtypes.prng_key) for d in own)


def widest(eqn: Any, operands: list[Value]) -> Any:
    """The widest dtype among the operands that vote."""
    floats = [v for v in operands if v.dtype in FLOATS]
    if not floats:
        return None
    moves = eqn.primitive.name in cast_lists.MOVES
    is_scalar = all(getattr(v.aval, "ndim", 0) == 0 for v in eqn.invars)
    known = [v for v in floats if not ((moves or is_scalar) and v.const is not None)]
    voting = (known if is_scalar else [v for v in known if v.votes]) or floats
    dtype = join(v.dtype for v in voting)
    if not moves:
        return dtype if all(fits(dtype, v.const) for v in floats) else FLOAT32
    return dtype if all(_may_be_picked(eqn, k, v.const, dtype) for k, v in enumerate(operands)) else FLOAT32


def join(dtypes: Any) -> Any:
    """The dtype that holds all of these; the first of others than autocast's."""
    distinct = set(dtypes)
    if len(distinct) == 1:
        return distinct.pop()
    return FLOAT32 if distinct.issubset(FLOATS) else np.dtype(jnp.result_type(*distinct))


def _may_be_picked(eqn: Any, k: int, const: float | None, dtype: Any) -> bool:
    """Whether the constant at operand `k` of an operation that picks values may be rounded to `dtype` or saturate."""
    if const is None or fits(dtype, const):
        return True
    name = eqn.primitive.name
    bound = {"max": "lower", "min": "upper"}.get(name) or ({0: "lower", 2: "upper"}.get(k) if name == "clamp" else None)
    is_passed = bound is None or (const < 0) == (bound == "lower")  # no value passes such a bound
    return abs(const) >= 1 and is_passed


def scalars_to_keep(operands: list[Value], dtype: Any) -> frozenset[int]:
    """The operands that stay float32 in arithmetic of `dtype`: scalars, except numbers that `dtype` has exactly."""
    if dtype not in LOW:
        return frozenset()
    scalars = (k for k, v in enumerate(operands) if not v.votes and v.dtype == FLOAT32)
    return frozenset(k for k in scalars if not is_exact(operands[k].const, dtype))


def _home(name: str, operands: list[Value], dtype: Any) -> Any:
    """The 16-bit dtype that a float32 result had, if only a power made it float32."""
    if dtype != FLOAT32 or name in cast_lists.FORCE_FP32 - cast_lists.POWERS:
        return None
    homes = {v.home or v.dtype for v in operands if v.dtype in FLOATS and v.votes}
    return homes.pop() if len(homes) == 1 and FLOAT32 not in homes else None


def _summed(eqn: Any, operands: list[Value], group: str) -> Any:
    """Of a float32 sum over windows, moved or not, and of what feeds one: the 16-bit dtype that it would have."""
    name = eqn.primitive.name
    is_moved = name in cast_lists.BEFORE_CAST and len(operands) == 1
    if not (name == "reduce_window_sum" or is_moved or group == "feeds float32"):
        return None
    dtype = widest(eqn, [v.holds(v.array, dtype=v.summed or v.dtype) for v in operands])
    return None if dtype == FLOAT32 else dtype


def _averaged(eqn: Any, operands: list[Value]) -> Any:
    """The 16-bit dtype of the average of a sum over windows: a division by their sizes, a product with numbers."""
    if eqn.primitive.name not in ("mul", "div"):
        return None
    numbers = [v.made_of == CONSTANTS or not v.votes for v in operands]
    if eqn.primitive.name == "mul" and numbers[0]:
        operands, numbers = operands[::-1], numbers[::-1]
    return operands[0].summed if numbers[1] else None
