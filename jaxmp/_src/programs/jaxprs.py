"""Reads and builds jaxprs: names of primitives, the functions inside an equation, equations as functions.

Equations that call, branch or loop hold further jaxprs. `functions_of` returns all of them, whatever name the primitive
gives to the parameter, and which operands they get. Other files take the names of primitives from the tables here.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_kernels.by_platform import with_operands

# A call of a function with the equation's own operands: what is true of a call is true inside.
JITS = frozenset({"jit", "pjit"})  # can be written out in place: nothing but the name is lost
REMATS = frozenset({"remat2", "checkpoint"})  # have a policy for the backward pass
WITH_OWN_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call"})
BY_PLATFORM = "by_platform"  # of pallas_kernels; holds what its ways compute
CALLS = JITS | REMATS | WITH_OWN_DERIVATIVE | {"closed_call", "core_call"}
LOOPS = frozenset({"scan", "while"})
CONTROL_FLOW = LOOPS | {"cond"}
WITH_FUNCTIONS = CALLS | CONTROL_FLOW | {"shard_map"}

MATMULS = frozenset({"dot_general", "conv_general_dilated"})
RAGGED_MATMULS = frozenset({"ragged_dot", "ragged_dot_general"})

# Each element of the result is computed from the same element of the operands; no parameter names a shape.
# `is_elementwise` asks this of an equation: some of these also take operands of other shapes.
ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy cos div eq erf erf_inv exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not optimization_barrier or pow rem "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square sub tan tanh xor "
    "bitcast_convert_type device_put stop_gradient reduce_precision".split()
)

# These hold a jaxpr of their update, which was traced for one dtype.
SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}

# Data movement: the result has every element of the operand once, ...
REARRANGES = frozenset({"reshape", "squeeze", "transpose", "rev", "copy", "copy_p"})  # ... perhaps in another place
HANDS_ON = frozenset(  # ... unchanged: the equation says something about the value
    {"name", "sharding_constraint", "pvary", "pcast", "mesh_cast", "reshard"}
)


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of the result comes from the same element of the operands, or from scalars."""
    if eqn.primitive.name not in ELEMENTWISE:
        return False
    shape = eqn.outvars[0].aval.shape
    operands = {v.aval.shape for v in eqn.invars}
    return shape in operands and operands <= {shape, ()} and {v.aval.shape for v in eqn.outvars} == {shape}


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def name_of(eqn: Any) -> str:
    """The name of an equation's primitive; in the linear part that `jax.vjp` holds, jax wraps those of calls."""
    return eqn.primitive.name.removeprefix("vjp_node[").removesuffix("]")


class Inner(NamedTuple):
    """A function inside an equation, and how the equation calls it.

    The inputs of a loop are constants of all turns, what it carries from turn to turn, and rows of what is scanned; the
    first results of its body are what it carries.

    Attributes:
      jaxpr: the function, open.
      consts: its constants.
      first: the number of the operand of the equation that is its first input.
      n_consts: the number of inputs that are equal in all calls.
      n_carry: the number of inputs that come from the turn before.
      skipped: the number of operands between its constants and the others.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    first: int = 0
    n_consts: int = 0
    n_carry: int = 0
    skipped: int = 0

    def inputs(self, operands: Sequence[Any]) -> list[Any]:
        """Those of the operands of the equation that the function gets; of a loop in the first turn, rows whole."""
        constants = operands[self.first : self.first + self.n_consts]
        return [*constants, *operands[self.first + self.n_consts + self.skipped :]]

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The same in three: constants, what is carried, and what is scanned."""
        inputs, n, m = self.inputs(operands), self.n_consts, self.n_consts + self.n_carry
        return inputs[:n], inputs[n:m], inputs[m:]


def functions_of(eqn: Any) -> tuple[Inner, ...]:
    """The functions inside an equation that calls, branches or loops; else `()`.

    The bodies of reductions, scatters and kernels do not count.
    """
    name, params = name_of(eqn), eqn.params
    if name == "cond":
        return tuple(_inner(branch, first=1, n_consts=len(eqn.invars) - 1) for branch in params["branches"])
    if name == "while":
        a, b = params["cond_nconsts"], params["body_nconsts"]
        m = len(eqn.invars) - a - b
        test = _inner(params["cond_jaxpr"], n_consts=a, n_carry=m, skipped=b)
        return test, _inner(params["body_jaxpr"], first=a, n_consts=b, n_carry=m)
    if name == "scan":
        # Shapes tell, because the parameters differ between versions: an array that is scanned over has one more axis.
        body = _inner(params["jaxpr"])
        stacked = sum(o.aval.ndim > i.aval.ndim for o, i in zip(eqn.outvars, body.jaxpr.outvars, strict=True))
        scanned = sum(o.aval.ndim > i.aval.ndim for o, i in zip(eqn.invars, body.jaxpr.invars, strict=True))
        m = len(eqn.outvars) - stacked
        return (body._replace(n_consts=len(eqn.invars) - scanned - m, n_carry=m),)
    if name in CALLS or name == "shard_map":
        return (_inner(params[body_name(eqn)], n_consts=len(eqn.invars)),)
    if name == BY_PLATFORM:
        return (_inner(params["jaxpr"], n_consts=len(eqn.invars)),)
    return ()


def _inner(jaxpr: Any, **call: int) -> Inner:
    return Inner(*open_jaxpr(jaxpr), **call)


def evaluate(
    function: Sequence[Any],
    inputs: Sequence[Any],
    equation: Callable[[int, Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda x, aval: x,
    number: Callable[[Any, Any], Any] | None = None,
    *,
    frees: bool = False,
) -> list[Any]:
    """The values of a function's results: arrays, or whatever is known of them.

    Args:
      function: a jaxpr and its constants, such as an `Inner`.
      inputs: the values of its inputs.
      equation: `(number, equation, values of its operands) -> values of its results`; it runs it again, looks at it, or
        computes something else.
      constant: `(x, type) -> value` of a constant.
      number: the same of a number in the program, by default as of a constant.
      frees: whether a value is dropped after its last reader.
    """
    jaxpr, consts = function[:2]
    known = {v: constant(x, v.aval) for v, x in zip(jaxpr.constvars, consts, strict=True)}
    known |= zip(jaxpr.invars, inputs, strict=True)
    variables = lambda atoms: [v for v in atoms if not isinstance(v, core.Literal)]  # noqa: E731
    last: dict[Any, int] = {}  # the last reader of each value
    if frees:
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in (*eqn.outvars, *variables(eqn.invars))}
        last |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))

    def value_of(atom: Any) -> Any:
        return (number or constant)(atom.val, atom.aval) if isinstance(atom, core.Literal) else known[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        known.update(zip(eqn.outvars, equation(i, eqn, [value_of(v) for v in eqn.invars]), strict=True))
        for v in (*variables(eqn.invars), *eqn.outvars) if frees else ():
            if last[v] == i:
                known.pop(v, None)
    return [value_of(v) for v in jaxpr.outvars]


def equations(jaxpr: Any, seen: set[core.Jaxpr] | None = None) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs inside of it, those of rules and kernels too; each jaxpr once."""
    seen = set() if seen is None else seen
    jaxpr, _ = open_jaxpr(jaxpr)
    if jaxpr is None or jaxpr in seen:
        return
    seen.add(jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, (tuple, list)) else (param,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner, seen)


def dtypes_of(values: Sequence[Any]) -> list[Any]:
    """The dtypes of the variables and literals that have one."""
    return [d for v in values if (d := getattr(v.aval, "dtype", None)) is not None]


def reads_fp8(jaxpr: Any) -> bool:
    """Whether an equation of a jaxpr, or of one inside of it, reads an array in fp8."""
    return any_fp8({d for eqn in equations(jaxpr) for d in dtypes_of(eqn.invars)})


def any_fp8(dtypes: Iterable[Any]) -> bool:
    """Whether one of these dtypes is a float of 8 bits."""
    return any(d.name.startswith("float8") for d in dtypes)  # numpy makes the name anew each time: look at few


def body_name(eqn: Any) -> str:
    """The parameter that holds the function of an equation with one function."""
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def function_name(eqn: Any) -> str:
    """The name of the function that an equation calls, or the name of the primitive."""
    return str(eqn.params.get("name", eqn.primitive.name))


def source_of(eqn: Any) -> tuple[str, str]:
    """The name and the file of the function that an equation calls; empty if it calls none or they are not known."""
    if eqn.primitive.name not in CALLS:
        return "", ""
    name, _, place = open_jaxpr(eqn.params[body_name(eqn)])[0].debug_info.func_src_info.partition(" at ")
    return name, place.rpartition(":")[0]


def is_highest(precision: Any) -> bool:
    """Whether a `precision=` of a product or a layer asks for the highest one, `"float32"` too, of an operand."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (lax.Precision.HIGHEST, "highest", "float32") for p in precisions)


def default_is_highest() -> bool:
    """Whether `jax.default_matmul_precision` asks for the highest one here."""
    return is_highest(jax.config.jax_default_matmul_precision)


def rows_going_on(holds: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """The values that a `while` carries after an iteration: `new` in rows whose test held, else `old`.

    `jax.vmap` gives the test of a `while` leading axes, one bool for each row; every value has these axes first.
    """
    if not jnp.ndim(holds):
        return list(new)
    return [
        lax.select(lax.broadcast_in_dim(holds, jnp.shape(a), range(jnp.ndim(holds))), a, b)
        for a, b in zip(new, old, strict=True)
    ]


def run_as_traced(eqn: Any, operands: list[Any]) -> list[Any]:
    """The results of an equation as it was traced, with its derivative rules, for all of its operands."""
    values = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, core.Literal)}
    about = core.DebugInfo("autocast", eqn.primitive.name, ("",) * len(values), ("",) * len(eqn.outvars))
    jaxpr = core.Jaxpr((), list(values), eqn.outvars, [eqn], eqn.effects, about)
    return list(core.jaxpr_as_fun(_closed(jaxpr, ()))(*values.values()))


def jaxpr_as_function(jaxpr: Any, consts: Any) -> Any:
    """A jaxpr with its constants, as a function that returns the list of its results."""
    return core.jaxpr_as_fun(_closed(jaxpr, consts))


def as_program(eqns: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Equations in their order as one function: (function, the variables it takes, the variables it returns)."""
    outputs = list(dict.fromkeys(v for eqn in eqns for v in eqn.outvars))
    used = (v for eqn in eqns for v in eqn.invars if not isinstance(v, core.Literal))
    inside = set(outputs)
    operands = list(dict.fromkeys(v for v in used if v not in inside))
    names = ("",) * len(operands), ("",) * len(outputs)
    about = core.DebugInfo("windows", "program", *names)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    jaxpr = core.Jaxpr((), operands, outputs, eqns, effects, about)
    return core.jaxpr_as_fun(_closed(jaxpr, ())), operands, outputs


def _closed(jaxpr: Any, consts: Any) -> Any:
    return jax.extend.core.ClosedJaxpr(jaxpr, consts)  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def where(eqn: Any, scope: str | None = None) -> Iterator[None]:
    """The name stack of an equation (or `scope` in its place) and contexts such as `compute_on`, as it was traced."""
    scope = str(eqn.source_info.name_stack) if scope is None else scope
    with jax.named_scope(scope) if scope else contextlib.nullcontext(), eqn.ctx.manager:
        yield


def scattered(eqn: Any, operands: Sequence[Any]) -> Any:
    """A scatter again, for operands of another dtype than it was traced for."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return SCATTERS[eqn.primitive.name](*operands, **{name: eqn.params[name] for name in names})


def without_scope(eqn: Any) -> Any:
    """An equation without its name stack; it knows its place in the source."""
    source = eqn.source_info
    return eqn.replace(source_info=source.replace(name_stack=type(source.name_stack)()))


def without_constants(like: Any, closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr that takes its constants as its first operands, closed or open as `like` is; and these constants."""
    jaxpr, consts = open_jaxpr(closed)
    opened = with_operands(jaxpr) if consts else jaxpr
    return (_closed(opened, ()) if hasattr(like, "consts") else opened), consts


def place_of(eqn: Any) -> str:
    """Where an equation was written: the innermost function outside of jax."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    outside = (f for f in frames if f"{os.sep}jax{os.sep}" not in f.file_name)
    place = next(outside, None)
    return "" if place is None else f" ({place.function_name} in {os.path.basename(place.file_name)})"


def flops_of(eqn: Any) -> int:
    """Floating-point operations of one equation: two for each term of a contraction, one for each element elsewhere."""
    sizes = [math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * sizes[0] * math.prod(eqn.invars[0].aval.shape[a] for a in contracted)
    if eqn.primitive.name in RAGGED_MATMULS:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
        columns = {*range(len(rhs))} - {*contracted, *batch, *numbers.rhs_group_dimensions}
        return 2 * math.prod(lhs) * math.prod(rhs[a] for a in columns)  # each row has one group
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        spread = math.prod(eqn.params["lhs_dilation"])  # so many numbers, all but one of them zeros, stand for one
        return 2 * sizes[0] * math.prod(kernel) // (kernel[numbers.rhs_spec[0]] * spread)
    if eqn.primitive.name.startswith(("reduce_", "cum")):
        return math.prod(eqn.invars[0].aval.shape)
    inner = functions_of(eqn)
    if inner:
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        return length * sum(flops_of(e) for f in inner for e in f.jaxpr.eqns)
    return max(sizes, default=0)
