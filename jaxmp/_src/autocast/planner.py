"""The plan of a rewrite: the dtype in which every operation of a function will run, computed without running it.

The planner walks through a jaxpr once, forwards, with a dtype for each value. The lists (`cast_lists`) give each
operation its group, its neighbours (`value_uses`) may change the group, and the group determines the dtype from the
dtypes of the operands:

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
from jax.core import Tracer
from jax.extend import core

from jaxmp._src.autocast import cast_lists, constants, loop_sums, regions, roundings, value_uses
from jaxmp._src.autocast.cast_lists import FLOATS, CastLists
from jaxmp._src.autocast.value_uses import Uses
from jaxmp._src.base import vmap_rules
from jaxmp._src.programs import jaxprs

FLOAT32 = np.dtype(np.float32)

# What a value is made of: the largest of these among the operands of the operation that made it.
CONSTANTS, WEIGHTS, DATA = range(3)


class Value(NamedTuple):
    """What the plan knows about a value.

    Attributes:
      dtype: the dtype it has in the rewritten function.
      votes: whether it counts among the inputs of an operation in the widest dtype.
      const: the number that all its elements are equal to, if known.
      home: the 16-bit dtype it had before a power made it float32; a bounded function casts it back.
      computed: whether an operation of the function computes it; an input, moved or not, is not.
      made_of: `WEIGHTS` if it is made of those inputs alone whose gradients are reduced in float32.
      product: whether it is a product of 16-bit operands that was asked for in float32, moved or not.
      summed: of a sum over windows, moved or not, the 16-bit dtype of what was added: its average returns to it.
    """

    dtype: Any
    votes: bool = True
    const: float | None = None
    home: Any = None
    computed: bool = False
    made_of: int = DATA
    product: bool = False
    summed: Any = None


class Step(NamedTuple):
    """How one equation runs.

    Attributes:
      eqn: the equation as traced.
      how: `"bind"`: in new dtypes; `"once"`: 16-bit operands are widened and the result is rounded, as with a float32
        scalar or in a sum; `"written"`: in those it was traced with; `"same"`: returns its operand; `"repeat"`: repeats
        a 16-bit operand, a bias or rows of a table, whose gradient is summed in float32; `"multiply"`: multiplies
        data with a weight, whose gradient is a product in float32; `"product"`: multiplies in 16 bits and returns
        float32; `"again"`: its function is traced in the dtypes that arrive; `"call"`: it has functions inside, with a
        plan each.
      group: the group that decided, for people to read.
      operands: the dtype each operand is cast to; None leaves it.
      results: its results.
      inner: plans of the functions inside.
      lists: the lists that are used here, and inside.
      narrow: the product that runs in place of a matmul, or why none does (`narrow_matmuls`).
      weights: the operands that may come in float32, in which their gradients are summed.
    """

    eqn: Any
    how: str
    group: str
    operands: tuple[Any, ...]
    results: tuple[Value, ...]
    inner: tuple["Plan", ...]
    lists: CastLists
    narrow: Any = None
    weights: tuple[int, ...] = ()


class Plan(NamedTuple):
    """How a function runs.

    Attributes:
      jaxpr: the function as traced.
      steps: one for each equation.
      inputs: its inputs.
      outputs: its outputs.
      changed: whether anything differs from the function as it was traced.
      readers: for each input, how it is read (`roundings`).
      rounded: variables whose rounding to 16 bits must happen, because they are read both in 16 bits and in float32.
      key: what the plan depends on, beside the function.
    """

    jaxpr: Any
    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    changed: bool
    readers: tuple[frozenset[str], ...]
    rounded: frozenset[Any]
    key: Any


def value_of(aval: Any) -> Value:
    """An input as it was traced."""
    return Value(aval.dtype if hasattr(aval, "dtype") else None, votes=getattr(aval, "ndim", 0) > 0)


def value_of_array(x: Any, aval: Any = None) -> Value:
    """An array that is there when the function is planned; a scalar is a constant unless it is traced."""
    value = value_of(jax.typeof(x) if aval is None else aval)
    if value.dtype not in FLOATS or np.ndim(x) or isinstance(x, Tracer):
        return value
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return value
    return value._replace(const=float(x))


class Planner:
    """Plans of one function and of those inside it, each made once."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Plan, Any]] = {}

    def plan(
        self, function: tuple[Any, Any], inputs: tuple[Value, ...], lists: CastLists, uses: Uses | None = None
    ) -> Plan:
        """The plan of a function (a jaxpr and its constants) for inputs of certain dtypes.

        `uses` are given where the caller knows more about the results than the jaxpr shows.
        """
        key = (id(function[0]), inputs, lists, id(uses) if uses else None)
        if key not in self._made:  # the objects are kept, so that no id is used twice
            found = uses or value_uses.find_uses(function[0], lists, (False,) * len(function[0].outvars))
            self._made[key] = self._make(function, inputs, lists, found), (function, uses)
        return self._made[key][0]

    def _make(self, function: tuple[Any, Any], inputs: tuple[Value, ...], lists: CastLists, uses: Uses) -> Plan:
        jaxpr, consts = function
        values = {v: value_of_array(x, v.aval) for v, x in zip(jaxpr.constvars, consts, strict=True)}
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def look_up(atom: Any) -> Value:
            return _literal(atom) if isinstance(atom, core.Literal) else values[atom]

        steps = []
        narrow = {place[0]: x for place, x in lists.narrow if len(place) == 1}
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [look_up(v) for v in eqn.invars]
            step = self._step(i, eqn, operands, regions.lists_of(eqn, lists).within(i), uses)
            step = _of_weights(_of_repeats(step, operands)._replace(narrow=narrow.get(i)), operands)
            if (const := constants.result(eqn, [v.const for v in operands])) is not None:
                step = step._replace(results=(step.results[0]._replace(const=const),))
            made_of = max((v.made_of for v in operands), default=CONSTANTS)
            step = step._replace(results=tuple(v._replace(made_of=made_of) for v in step.results))
            values |= dict(zip(eqn.outvars, step.results, strict=True))
            steps.append(step)
        traced = [getattr(v.aval, "dtype", None) for v in jaxpr.invars]
        changed = any(v.dtype != t for v, t in zip(inputs, traced, strict=True))
        changed = changed or any(_is_change(step) for step in steps)
        readers, rounded = roundings.find(jaxpr, steps)
        outputs = tuple(look_up(v) for v in jaxpr.outvars)
        key = (inputs, lists, uses.wide_outputs, uses.inputs)
        return Plan(jaxpr, tuple(steps), inputs, outputs, changed, readers, rounded, key)

    def _step(self, i: int, eqn: Any, operands: list[Value], lists: CastLists, uses: Uses) -> Step:
        if cast_lists.is_no_cast(eqn) or (
            operands and operands[0].dtype == lists.dtype and cast_lists.is_cast_to(eqn, lists.dtype)
        ):
            return Step(eqn, "same", "widest", (None,), (operands[0],), (), lists)
        if lists.dtype is not None and (
            cast_lists.is_mark(eqn)
            or (cast_lists.is_widening(eqn) and i in uses.low and operands[0].dtype == lists.dtype)
        ):
            result = Value(lists.dtype, operands[0].votes, computed=True)
            return Step(eqn, "same", "allow", (lists.dtype,), (result,), (), lists)
        if eqn.primitive.name == vmap_rules.NAME:
            return _again(eqn, operands, lists)
        functions = jaxprs.functions_of(eqn)
        group = cast_lists.group_of(eqn, lists)
        if cast_lists.is_linear_algebra(eqn):
            return written(eqn, lists)
        if functions and not _has_other_floats(eqn):
            return self._call(eqn, operands, lists, group, functions, uses.inner.get(i))
        if functions or group is None or _has_other_floats(eqn) or cast_lists.is_custom_scatter(eqn):
            return _with_origin(written(eqn, lists), operands)
        if i in uses.biased and _all_hold(lists.dtype, operands):
            group = "allow"
        if group == "force_fp32" and eqn.primitive.name in cast_lists.POWERS and i in uses.tamed:
            group = "widest" if jnp.finfo(lists.dtype).maxexp == jnp.finfo(FLOAT32).maxexp else group
        if group in ("allow", "widest") and _is_as_written(eqn):
            return written(eqn, lists)
        is_read = lists.float32_products == "read" and group == "allow" and i in uses.wide
        if is_read or cast_lists.returns_float32(eqn, lists):
            if group == "allow" and not any(v.product for v in operands):
                return _product(eqn, operands, lists)
            group = "force_fp32"  # a product that sums nothing, or the second of an einsum of three operands
        if eqn.primitive.name in cast_lists.EACH_ITS_OWN and group == "widest":
            return _each_its_own(eqn, operands, lists)
        if group == "force_fp32" or (group == "widest" and _is_reciprocal(eqn)):
            dtype, group = FLOAT32, "force_fp32"
        elif group == "allow" or (
            i in uses.low and eqn.primitive.name in cast_lists.BEFORE_CAST and _all_hold(lists.dtype, operands)
        ):
            dtype = lists.dtype
        elif i in uses.wide and not _takes_from_input(eqn, operands):
            operands = [v._replace(home=FLOAT32) for v in operands]  # float32 until a float32 operation reads it
            dtype, group = FLOAT32, "feeds float32"
        elif eqn.primitive.name in cast_lists.INTO_BUFFER:
            dtype = operands[0].dtype
        elif (dtype := _averaged(eqn, operands)) is not None:
            casts = _casts(operands, FLOAT32, frozenset())
            return Step(eqn, "bind", group, casts, (Value(dtype, computed=True),), (), lists)
        else:
            dtype = _widest(eqn, operands)
        return _in_dtype(eqn, operands, dtype, group, lists)

    def _call(
        self, eqn: Any, operands: list[Value], lists: CastLists, group: str | None, functions: Any, uses: Any
    ) -> Step:
        if group is not None:  # a function that a list names
            if group == "force_fp32":
                return written(eqn, lists, group)
            dtype = lists.dtype if group == "allow" else _widest(eqn, operands)
            cast = _casts(operands, dtype, keep=_scalars_to_keep(operands, dtype))
            operands = [
                v if c is None else v._replace(dtype=c, const=None) for v, c in zip(operands, cast, strict=True)
            ]
            lists, uses = lists.inside(group), None
        elif lists.dtype is None:
            operands = [
                value_of(v.aval)._replace(computed=o.computed, made_of=o.made_of)
                for v, o in zip(eqn.invars, operands, strict=True)
            ]
        uses = uses or (None,) * len(functions)
        plan_call = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(eqn.primitive.name, self._inside)
        casts, inner, results = plan_call(eqn, operands, lists, functions, uses)
        widened = eqn.primitive.name == "scan" and any(
            _is_low(v) and dtype == FLOAT32 for v, dtype in zip(operands, casts, strict=True)
        )
        if not widened and not any(p.changed for p in inner):
            step = written(eqn, lists, group or "written")
            origins = [v._replace(computed=result.computed) for v, result in zip(step.results, results, strict=True)]
            return step._replace(results=tuple(origins), inner=tuple(inner))
        return Step(eqn, "call", group or "inside", tuple(casts), tuple(results), tuple(inner), lists)

    def _inside(self, eqn: Any, operands: list[Value], lists: CastLists, functions: Any, uses: Any) -> Any:
        low = _low_inputs(uses[0], lists, len(operands))
        given = tuple(_cast_early(v, u) for v, u in zip(operands, low, strict=True))
        if uses[0] is not None and eqn.primitive.name in jaxprs.JITS:  # one cast for the readers inside and outside
            wide = uses[0].wide_inputs
            given = tuple(
                v._replace(dtype=FLOAT32) if w and v.computed and v.dtype in FLOATS else v
                for v, w in zip(given, wide, strict=True)
            )
        plan = self.plan(functions[0], given, lists.within(0), uses[0])
        return [v.dtype for v in given], [plan], plan.outputs

    def _cond(self, eqn: Any, operands: list[Value], lists: CastLists, functions: Any, uses: Any) -> Any:
        given = tuple(operands)
        pairs = enumerate(zip(functions, uses, strict=True))
        plans = [self.plan(f, given[1:], lists.within(k), u) for k, (f, u) in pairs]
        results = [_join(values) for values in zip(*(p.outputs for p in plans), strict=True)]
        return [v.dtype for v in given], plans, results

    def _while(self, eqn: Any, operands: list[Value], lists: CastLists, functions: Any, uses: Any) -> Any:
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        cond_consts, consts = operands[:first], operands[first:second]
        carry = _carried(operands[second:], functions[1][0], eqn.params["body_nconsts"])
        if _stops_by_floats(functions[0][0], functions[1][0], first, len(carry)):
            carry = [v._replace(dtype=FLOAT32) if v.dtype in FLOATS else v for v in carry]

        def body(carry: list[Value]) -> Plan:
            return self.plan(functions[1], (*consts, *carry), lists.within(1), uses[1])

        carry = _settle(carry, lambda c: body(c).outputs)
        plans = [self.plan(functions[0], (*cond_consts, *carry), lists.within(0), uses[0]), body(carry)]
        results = [v._replace(computed=True) for v in carry]
        return [v.dtype for v in (*cond_consts, *consts, *carry)], plans, results

    def _scan(self, eqn: Any, operands: list[Value], lists: CastLists, functions: Any, uses: Any) -> Any:
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        # What every iteration reads is cast inside: the gradient of a weight is then summed in float32.
        given = [
            v._replace(votes=inner.aval.ndim > 0) for v, inner in zip(operands, functions[0][0].invars, strict=True)
        ]
        consts, scanned = given[:n_consts], given[n_consts + n_carry :]
        carry = _carried(given[n_consts : n_consts + n_carry], functions[0][0], n_consts)

        def body(carry: list[Value]) -> Plan:
            return self.plan(functions[0], (*consts, *carry, *scanned), lists.within(0), uses[0])

        carry = _settle(carry, lambda c: body(c).outputs[:n_carry])
        plan = body(carry)
        results = [*carry, *(v._replace(votes=True, const=None) for v in plan.outputs[n_carry:])]
        results = [v._replace(computed=True) for v in results]
        # What every iteration reads in 16 bits enters in float32, and the body casts it back: so does its gradient.
        passed = loop_sums.passed(functions[0][0], n_consts, n_carry) if any(map(_is_low, carry)) else ()
        reads = [*([True] * n_consts), *(i in passed for i in range(n_carry)), *([False] * len(scanned))]
        pairs = zip((*consts, *carry, *scanned), reads, strict=True)
        return [FLOAT32 if read and _is_low(v) else v.dtype for v, read in pairs], [plan], results


def _carried(values: list[Value], body: Any, first: int) -> list[Value]:
    """The first values of what a loop carries, inputs of `body` from `first` on: in float32 those that are sums."""
    added = loop_sums.find(body, first, len(values)) if any(map(_is_low, values)) else ()
    return [
        v._replace(const=None, made_of=DATA, summed=None, dtype=FLOAT32 if i in added and _is_low(v) else v.dtype)
        for i, v in enumerate(values)
    ]


def _stops_by_floats(test: Any, body: Any, n_consts: int, n_carry: int) -> bool:
    """Whether a `while` compares floats to know when to stop: it computes until they converge, so it needs float32.

    Bools that the test reads are followed to where the body makes them. (The test of a token is no such comparison.)
    """
    seen: set[int] = set()

    def follow(jaxpr: Any, outputs: list[Any], first: int) -> bool:
        wanted = {v for v in outputs if not isinstance(v, core.Literal)}
        for eqn in reversed(jaxpr.eqns):
            if not wanted & set(eqn.outvars):
                continue
            floats = [v for v in eqn.invars if getattr(v.aval, "dtype", None) in FLOATS]
            if floats and eqn.primitive.name in _COMPARISONS:
                return True
            for function, _ in jaxprs.functions_of(eqn) if eqn.primitive.name in jaxprs.CALLS else ():
                if follow(function, list(filter(_is_bool, function.outvars)), len(function.invars)):
                    return True
            wanted |= {v for v in eqn.invars if not isinstance(v, core.Literal) and _is_bool(v)}
        carried = [i for i, v in enumerate(jaxpr.invars[first:]) if v in wanted and i not in seen]
        seen.update(carried)
        return bool(carried) and follow(body, [body.outvars[i] for i in carried], len(body.invars) - n_carry)

    return follow(test, list(test.outvars), n_consts)


def _is_bool(v: Any) -> bool:
    return getattr(v.aval, "dtype", None) == np.bool_


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def written(eqn: Any, lists: CastLists, group: str = "written") -> Step:
    """An equation in the dtypes it was traced with."""
    results = tuple(value_of(v.aval)._replace(computed=True) for v in eqn.outvars)
    casts = tuple(getattr(v.aval, "dtype", None) for v in eqn.invars)
    return Step(eqn, "written", group, casts, results, (), lists)


def _again(eqn: Any, operands: list[Value], lists: CastLists) -> Step:
    """A function with a rule for vmap: it is traced anew, in the dtypes that arrive."""
    arrives = [v.aval.update(dtype=o.dtype) for v, o in zip(eqn.invars, operands, strict=True)]
    result = value_of(vmap_rules.result(eqn.params["fun"], arrives))._replace(computed=True)
    return Step(eqn, "again", "written", tuple(o.dtype for o in operands), (result,), (), lists)


def _with_origin(step: Step, operands: list[Value]) -> Step:
    """A cast that was written in the function keeps whether its operand is computed."""
    if step.eqn.primitive.name != "convert_element_type":
        return step
    return step._replace(results=(step.results[0]._replace(computed=operands[0].computed),))


def _of_repeats(step: Step, operands: list[Value]) -> Step:
    """An operation that uses elements of a 16-bit operand several times: an embedding's rows, a bias, a scale."""
    is_low = step.results and step.results[0].dtype in FLOATS and step.results[0].dtype != FLOAT32
    if step.how not in ("bind", "written") or not is_low:
        return step
    repeated = [i for i, v in enumerate(operands) if is_repeated(step.eqn, i) and v.dtype in FLOATS and v.const is None]
    weights = tuple(i for i in repeated if _is_weight(operands[i]))
    return step._replace(how="repeat", weights=weights) if repeated else step


def _of_weights(step: Step, operands: list[Value]) -> Step:
    """A product in 16 bits of data and a weight."""
    is_matmul = step.eqn.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS
    if not is_matmul or step.how not in ("bind", "written", "product") or callable(step.narrow):
        return step
    weights = tuple(i for i, v in enumerate(operands[:2]) if _is_weight(v) and operands[1 - i].made_of == DATA)
    is_low = step.results[0].dtype in FLOATS and step.results[0].dtype != FLOAT32
    is_product = is_low or step.how == "product"
    return step._replace(how="multiply", weights=weights) if weights and is_product else step


def _is_weight(v: Value) -> bool:
    return v.dtype in FLOATS and v.made_of == WEIGHTS and v.const is None


def _is_low(v: Value) -> bool:
    return v.dtype in FLOATS and v.dtype != FLOAT32 and v.const is None


def is_repeated(eqn: Any, i: int) -> bool:
    """Whether an equation may use elements of operand `i` several times."""
    name = eqn.primitive.name
    if name == "gather":
        return i == 0
    if name not in ("broadcast_in_dim", "tile", "add", "sub", "mul") or isinstance(eqn.invars[i], core.Literal):
        return False
    return eqn.invars[i].aval.size < eqn.outvars[0].aval.size


def _literal(literal: Any) -> Value:
    number = literal.val
    is_float = literal.aval.dtype in FLOATS
    const = float(number) if is_float and np.ndim(number) == 0 else None
    return Value(literal.aval.dtype, votes=False, const=const, made_of=CONSTANTS)


def _is_change(step: Step) -> bool:
    if step.how == "written":
        return False
    return (
        step.how in ("call", "repeat", "multiply", "product")
        or callable(step.narrow)
        or any(
            cast is not None and cast != v.aval.dtype for cast, v in zip(step.operands, step.eqn.invars, strict=True)
        )
    )


def _has_other_floats(eqn: Any) -> bool:
    """Whether an operand or result is a float that autocast does not cast: float64, complex, fp8.

    A function with its own derivative also has scales of fp8, whose dtype is their own: their gradients are its rule's.
    """
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name in jaxprs.WITH_OWN_DERIVATIVE and any(_is_scale_dtype(d) for d in dtypes):
        return True
    return any(d not in FLOATS and (d is None or jnp.issubdtype(d, jnp.inexact)) for d in dtypes)


def _is_scale_dtype(dtype: Any) -> bool:
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _is_as_written(eqn: Any) -> bool:
    """Whether a matmul asks for float32 of operands that the code itself put in 16 bits."""
    return cast_lists.returns_float32(eqn, cast_lists.OFF)


def _averaged(eqn: Any, operands: list[Value]) -> Any:
    """The 16-bit dtype of the average of a sum over windows: a division by their sizes, a product with numbers."""
    if eqn.primitive.name not in ("mul", "div"):
        return None
    numbers = [v.made_of == CONSTANTS or not v.votes for v in operands]
    if eqn.primitive.name == "mul" and numbers[0]:
        operands, numbers = operands[::-1], numbers[::-1]
    return operands[0].summed if numbers[1] else None


def _takes_from_input(eqn: Any, operands: list[Value]) -> bool:
    """Whether an equation takes a part of inputs that are 16-bit: rows of a table of params."""
    moved = [v for v in operands if v.dtype in FLOATS and v.dtype != FLOAT32]
    return eqn.primitive.name in cast_lists.PARTS and bool(moved) and not any(v.computed for v in moved)


def _is_reciprocal(eqn: Any) -> bool:
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] < 0
    return eqn.primitive.name == "div" and isinstance(eqn.invars[0], core.Literal)


def _widest(eqn: Any, operands: list[Value]) -> Any:
    """The widest dtype among the inputs that vote."""
    floats = [v for v in operands if v.dtype in FLOATS]
    if not floats:
        return None
    moves = eqn.primitive.name in cast_lists.MOVES
    is_scalar = all(getattr(v.aval, "ndim", 0) == 0 for v in eqn.invars)
    given = [v for v in floats if not ((moves or is_scalar) and v.const is not None)]
    voting = (given if is_scalar else [v for v in given if v.votes]) or floats
    dtype = np.dtype(jnp.result_type(*(v.dtype for v in voting)))
    if not moves:
        return dtype if _all_hold(dtype, floats) else FLOAT32
    known = [v.const for v in operands]
    return dtype if all(c is None or _can_be_picked(eqn, i, c, dtype) for i, c in enumerate(known)) else FLOAT32


def _all_hold(dtype: Any, operands: list[Value]) -> bool:
    return dtype == FLOAT32 or all(holds(dtype, v.const) for v in operands if v.const is not None)


def _can_be_picked(eqn: Any, i: int, const: float, dtype: Any) -> bool:
    """Whether the constant at operand `i` of an operation that picks values may be rounded to `dtype` or saturate."""
    if holds(dtype, const):
        return True
    if abs(const) < 1:  # too small
        return False
    name = eqn.primitive.name
    bound = {"max": "lower", "min": "upper"}.get(name) or ({0: "lower", 2: "upper"}.get(i) if name == "clamp" else None)
    return bound is None or (const < 0) == (bound == "lower")  # a bound that no value passes


def holds(dtype: Any, number: float) -> bool:
    """Whether a number is in the normal range of a dtype; 0, inf and NaN always are."""
    limits = jnp.finfo(dtype)
    return number == 0 or not np.isfinite(number) or float(limits.tiny) <= abs(number) <= float(limits.max)


def _in_dtype(eqn: Any, operands: list[Value], dtype: Any, group: str, lists: CastLists) -> Step:
    kept = _scalars_to_keep(operands, dtype) if cast_lists.takes_scalars(eqn) else frozenset()
    casts = _casts(operands, dtype, keep=kept)
    home = _home(eqn.primitive.name, operands, dtype)
    if group == "widest" and eqn.primitive.name in cast_lists.BOUNDED and home is not None:
        result, home = home, None
    else:
        result = dtype
    computed = eqn.primitive.name not in cast_lists.MOVES or any(v.computed for v in operands)
    summed = _summed(eqn, operands, group) if dtype == FLOAT32 else None
    results: list[Value] = []
    for out in eqn.outvars:
        if out.aval.dtype not in FLOATS or dtype is None:
            results.append(value_of(out.aval))
        elif eqn.primitive.name in cast_lists.BEFORE_CAST and len(operands) == 1:
            # A broadcast scalar does not vote. A full array of one number votes, except where values are only picked.
            const = operands[0].const
            votes, product = operands[0].votes or const is not None, operands[0].product
            results.append(Value(result, votes, const, home, computed, product=product, summed=summed))
        else:
            results.append(Value(result, out.aval.ndim > 0, None, home, computed, summed=summed))
    if result in FLOATS and result != FLOAT32 and cast_lists.rounds_once(eqn):
        return Step(eqn, "once", group, (None,) * len(casts), tuple(results), (), lists)
    return Step(eqn, "once" if kept else "bind", group, casts, tuple(results), (), lists)


def _summed(eqn: Any, operands: list[Value], group: str) -> Any:
    """Of a float32 sum over windows, moved or not, and of what feeds one: the 16-bit dtype that it would have."""
    name = eqn.primitive.name
    is_sum, is_moved = name == "reduce_window_sum", name in cast_lists.BEFORE_CAST and len(operands) == 1
    if not (is_sum or is_moved or group == "feeds float32"):
        return None
    dtype = _widest(eqn, [v._replace(dtype=v.summed or v.dtype) for v in operands])
    return None if dtype == FLOAT32 else dtype


def _product(eqn: Any, operands: list[Value], lists: CastLists) -> Step:
    """A product of operands in 16 bits that returns float32."""
    results = tuple(Value(FLOAT32, v.aval.ndim > 0, computed=True, product=True) for v in eqn.outvars)
    return Step(eqn, "product", "allow", _casts(operands, lists.dtype, frozenset()), results, (), lists)


def _casts(operands: list[Value], dtype: Any, keep: frozenset[int]) -> tuple[Any, ...]:
    """`dtype` for each float operand, but float32 for the scalars to keep."""
    kinds = enumerate(operands)
    return tuple((FLOAT32 if i in keep else dtype) if v.dtype in FLOATS else None for i, v in kinds)


def _scalars_to_keep(operands: list[Value], dtype: Any) -> frozenset[int]:
    """The operands that stay float32 in arithmetic of `dtype`: scalars, except numbers that `dtype` has exactly."""
    if dtype not in FLOATS or dtype == FLOAT32:
        return frozenset()
    kinds = enumerate(operands)
    return frozenset(i for i, v in kinds if not v.votes and v.dtype == FLOAT32 and not _is_exact(v.const, dtype))


def _is_exact(number: float | None, dtype: Any) -> bool:
    if number is None or not np.isfinite(number):
        return number is not None
    return bool(abs(number) <= float(jnp.finfo(dtype).max)) and float(np.asarray(number).astype(dtype)) == number


def _home(name: str, operands: list[Value], dtype: Any) -> Any:
    """The 16-bit dtype that a float32 result had, if only a power made it float32."""
    if dtype != FLOAT32:
        return None
    voting = [v for v in operands if v.dtype in FLOATS and v.votes]
    if name in cast_lists.FORCE_FP32 - cast_lists.POWERS:
        return None
    homes = {v.home or v.dtype for v in voting}
    return homes.pop() if len(homes) == 1 and FLOAT32 not in homes else None


def _each_its_own(eqn: Any, operands: list[Value], lists: CastLists) -> Step:
    if len(operands) != len(eqn.outvars):
        return written(eqn, lists)
    results = tuple(v._replace(const=None) for v in operands)
    return Step(eqn, "bind", "widest", (None,) * len(operands), results, (), lists)


def _low_inputs(uses: Uses | None, lists: CastLists, count: int) -> list[Any]:
    return [lists.dtype if uses is not None and uses.low_inputs[i] else None for i in range(count)]


def _cast_early(value: Value, dtype: Any) -> Value:
    return value._replace(dtype=dtype) if value.dtype in FLOATS and dtype and _all_hold(dtype, [value]) else value


def _join(values: tuple[Value, ...]) -> Value:
    first = values[0]
    if first.dtype not in FLOATS:
        return first._replace(const=None)
    computed = any(v.computed for v in values)
    return Value(np.dtype(jnp.result_type(*(v.dtype for v in values))), any(v.votes for v in values), computed=computed)


def _settle(carry: list[Value], step: Any) -> list[Value]:
    """The dtypes that a loop carries: those its body returns after some rounds, or the widest if they never settle."""
    for widen in (False, True):
        for _ in range(len(carry) + 2):
            after = [
                v._replace(dtype=out.dtype, computed=v.computed or out.computed) if v.dtype in FLOATS else v
                for v, out in zip(carry, step(carry), strict=True)
            ]
            if widen:
                after = [_join(pair)._replace(votes=pair[0].votes) for pair in zip(carry, after, strict=True)]
            if after == carry:
                return carry
            carry = after
    raise AssertionError("joining dtypes only widens them")  # float16, bfloat16, float32: two steps at most
