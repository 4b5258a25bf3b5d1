"""Describes an operation that made inf or NaN of finite numbers: its place, its operands, how far it overflowed.

For each operation, a jaxpr keeps the traceback of its Python code and a name stack. flax writes the names of its
modules into the name stack, and autodiff marks operations of the backward pass. The operation is run again with its
narrow floats in float32, to find the result that it would have with more range.
"""

import dataclasses
import linecache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._src.base import warn
from jaxmp._src.monitor import nonfinite
from jaxmp._src.programs import module_paths

_DTYPES = ("preferred_element_type", "new_dtype")  # parameters of primitives that name a result's dtype


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an operation.

    Attributes:
      dtype: its dtype.
      shape: its shape.
      amax: its largest finite magnitude; NaN if there is none.
      finite: whether all of it is finite.

    Example:
      >>> print(Operand("float16", (2, 3), 6e4, True))
      float16[2,3], amax 60000
    """

    dtype: str
    shape: tuple[int, ...]
    amax: float
    finite: bool

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if not np.isnan(self.amax):
            text += f", amax {self.amax:.6g}"
        return text if self.finite else f"{text}, and inf or NaN"


@dataclasses.dataclass(frozen=True)
class BadOp:
    """An operation whose result is not finite although its operands are.

    Attributes:
      primitive: jax's name of it; "argument" if an argument itself is not finite, and `module` is its path; "constant"
        for a result that no operation computes, and `module` is its number.
      module: path of the flax module, the same as of its params (`block_1/Dense_0`), or of the named scope; "" at the
        top.
      backward: whether it belongs to the backward pass.
      source: the line of the user's code, as `file:line (function)`; "" if there is none.
      iterations: the iteration of each loop around it, outermost first.
      operands: its operands.
      dtype: dtype of the result.
      shape: shape of the result.
      first: its first bad element, as from `first_nonfinite`: `index`, `value`, `count`, `size`.
      limit: the largest finite number of the dtype.
      float32_amax: the largest magnitude of the result with operands and result in float32, perhaps inf or NaN; None
        if it was float32 already, or cannot run in float32.
      note: a remark, or "".

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> found = jaxmp.monitor.first_bad_op(lambda x: jnp.sum(x * x), jnp.full(2, 300.0, jnp.float16))
      >>> found.primitive, found.dtype, found.first.index, found.float32_amax
      ('mul', 'float16', (0,), 90000.0)
    """

    primitive: str
    module: str
    backward: bool
    source: str
    iterations: tuple[int, ...]
    operands: tuple[Operand, ...]
    dtype: str
    shape: tuple[int, ...]
    first: nonfinite.NonFinite
    limit: float
    float32_amax: float | None
    note: str = ""

    def where(self) -> str:
        """The operation in a few words."""
        if self.primitive in ("argument", "constant"):
            return f"{self.primitive} {self.first}"
        way = "backward" if self.backward else "forward"
        loops = "".join(f", iteration {i}" for i in self.iterations)
        return f"{self.primitive} in {self.module or '(top)'} ({way}{loops})"

    @property
    def code(self) -> str:
        """The text of the line at `source`; "" if it cannot be read."""
        file, _, rest = self.source.rpartition(":")
        number = rest.split(" ")[0]
        return linecache.getline(file, int(number)).strip() if number.isdigit() else ""

    def __str__(self) -> str:
        if self.primitive in ("argument", "constant"):
            return self.where()
        index = f"[{', '.join(map(str, self.first.index))}]" if self.first.index else ""
        lines = [self.where(), *([f"  at {self.source}"] if self.source else [])]
        lines += [f"    {self.code}"] if self.code else []
        lines += [f"  takes {x}" for x in self.operands]
        lines.append(
            f"  gives {self.dtype}[{','.join(map(str, self.shape))}], {self.first.value} first at {index or '[]'}, "
            f"{self.first.count} of {self.first.size} values not finite"
        )
        if self.float32_amax is not None and np.isfinite(self.float32_amax):
            times = self.float32_amax / self.limit
            lines.append(
                f"  in float32 its largest is {self.float32_amax:.6g}; {self.dtype} ends at {self.limit:.6g}"
                + (f" ({times:.3g} times beyond)" if times >= 1.01 else "")
            )
        elif self.float32_amax is not None:
            lines.append(f"  in float32 it gives {self.float32_amax} too: the range of {self.dtype} is not the cause")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def describe(
    eqn: Any, operands: list[Any], results: list[Any], which: int, outer: "Place", bad: Any, note: str = ""
) -> BadOp:
    """Describes an equation in the jaxpr at `outer`: result number `which` is not finite in the elements `bad`."""
    result, place = results[which], outer.inside(eqn)
    module = module_paths.path_of(place.stack)
    return BadOp(
        primitive=eqn.primitive.name,
        module=module,
        backward=module_paths.is_backward(place.stack),
        source=place.source,
        iterations=place.iterations,
        operands=tuple(_operand(x) for x in operands),
        dtype=str(result.dtype),
        shape=tuple(result.shape),
        first=nonfinite.first_of(module, result, bad),
        limit=float(jnp.finfo(result.dtype).max),
        float32_amax=_float32_amax(eqn, operands, which),
        note=note,
    )


def of_value(kind: str, x: Any, bad: nonfinite.NonFinite) -> BadOp:
    """An argument, or a constant that the function returns, that is not finite itself."""
    limit = float(jnp.finfo(x.dtype).max)
    return BadOp(kind, bad.path, False, "", (), (), str(x.dtype), tuple(np.shape(x)), bad, limit, None)


class Place(NamedTuple):
    """The place of a function: the whole one, or one inside.

    Attributes:
      stack: the name stacks of the equations around it.
      source: the innermost of their lines in the user's code.
      iterations: of the loops around it.
    """

    stack: str = ""
    source: str = ""
    iterations: tuple[int, ...] = ()

    def inside(self, eqn: Any) -> "Place":
        """The place of an equation, or of the function inside it."""
        stack = module_paths.join(self.stack, str(eqn.source_info.name_stack))
        traceback, others = eqn.source_info.traceback, warn.folders_between()
        frames = (f for f in (traceback.frames if traceback else ()) if not f.file_name.startswith(others))
        line = next((f"{f.file_name}:{f.line_num} ({f.function_name})" for f in frames), self.source)
        return Place(stack, line, self.iterations)

    def turn(self, iteration: int) -> "Place":
        """The place of the body of the loop here, in an iteration."""
        return self._replace(iterations=(*self.iterations, iteration))


def _operand(x: Any) -> Operand:
    if not (jnp.issubdtype(x.dtype, jnp.number) and x.size):
        return Operand(str(x.dtype), tuple(x.shape), float("nan"), True)
    magnitude = np.abs(nonfinite.as_wide(np.asarray(x)))
    finite = np.isfinite(magnitude)
    amax = float(np.max(magnitude, where=finite, initial=0)) if finite.any() else float("nan")
    return Operand(str(x.dtype), tuple(x.shape), amax, bool(finite.all()))


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _float32_amax(eqn: Any, operands: list[Any], which: int) -> float | None:
    if not _is_narrow(eqn.outvars[which].aval.dtype):
        return None
    wide = [x.astype(jnp.float32) if _is_narrow(x.dtype) else x for x in operands]
    if eqn.primitive.name == "reduce_precision":
        return float(np.max(np.abs(np.asarray(wide[0]))))
    params = {
        name: np.dtype(np.float32) if name in _DTYPES and x is not None and _is_narrow(x) else x
        for name, x in eqn.params.items()
    }
    try:
        result = eqn.primitive.bind(*wide, **params)
    except Exception:  # the primitive names its dtype in another way: this number is not known then
        return None
    result = result[which] if eqn.primitive.multiple_results else result
    return float(np.max(np.abs(np.asarray(result))))  # NaN stays NaN
