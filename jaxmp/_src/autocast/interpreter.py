"""Runs a function that was traced in float32 again, with casts: one pass over its jaxpr.

    fn  --make_jaxpr, float32-->  jaxpr  --find_uses, backwards-->  who reads each value
                                         --run, forwards-->         JAX operations with casts

For each equation `choose` names the dtype; the operands are cast to it, and the primitive is bound again. The results
are ordinary JAX values: they can be differentiated, batched, compiled and traced for another autocast.

`jit` is written out. `checkpoint`, `scan`, `while`, `cond` and `shard_map` are called again with a function that runs
their body; a derivative rule is traced in float32 and run like a function (`derivative_rules`).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core, source_info_util

from jaxmp._src.autocast import cast_lists, choices, derivative_rules, loop_sums, products, regions, values
from jaxmp._src.autocast.biases import find_biases
from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS, LOW, CastLists
from jaxmp._src.autocast.choices import Choice
from jaxmp._src.autocast.value_uses import Uses, find_uses
from jaxmp._src.autocast.values import CONSTANTS, DATA, WEIGHTS, Value, cast, result
from jaxmp._src.base import compat, vmap_rules
from jaxmp._src.numerics import frozen_kernel
from jaxmp._src.programs import compiled, jaxprs, module_paths

Place = tuple[int, ...]  # of an equation: its number, of the function in it, of the equation in that function, ...


class At(NamedTuple):
    """Where an equation is.

    Attributes:
      place: the numbers that lead to it.
      stack: its whole name stack.
      lists: the lists that hold there.
      times: how often it runs.
      in_loop: whether it is in a loop.
      own_derivative: whether it is in a function with a derivative rule of its own.
    """

    place: Place
    stack: str
    lists: CastLists
    times: int = 1
    in_loop: bool = False
    own_derivative: bool = False

    @classmethod
    def top(cls, lists: CastLists) -> "At":
        """A whole function, which is called here."""
        return cls((), "", lists._replace(highest_asks=not jaxprs.default_is_highest()))

    def function(self, k: int) -> "At":
        """In function `k` of the equation."""
        return self._replace(place=(*self.place, k))


class Interpreter:
    """Runs functions.

    Args:
      recorder: told of each equation: `(eqn, operands, choice, results, at)`. An equation in a loop or a branch may be
        told of twice, from the same place.
      narrow: by place, what runs a matmul in place of its primitive (`weighted_matmuls.Product`).
    """

    def __init__(self, recorder: Any = None, narrow: dict[Place, Any] | None = None):
        self.recorder = recorder
        self.narrow = narrow or {}

    def run(self, function: Any, inputs: Sequence[Value], at: At, uses: Uses | None = None) -> list[Value]:
        """The results of a function, which is a jaxpr and its constants."""
        uses = uses or find_uses(function[0], find_biases(function[0], at.lists))

        def equation(i: int, eqn: Any, operands: list[Value]) -> list[Value]:
            stack = str(eqn.source_info.name_stack)
            scope = regions.scope_of(stack)
            here = at._replace(place=(*at.place, i), stack=module_paths.join(at.stack, stack), lists=uses.lists[i])
            # Casts, too, have the name of the layer that reads their result, and the line of code it comes from.
            line = source_info_util.user_context(eqn.source_info.traceback)
            with jax.named_scope(scope) if scope else contextlib.nullcontext(), line, eqn.ctx.manager:
                return self._equation(i, eqn, operands, here, uses)

        return jaxprs.evaluate(function, inputs, equation, values.constant, values.number)

    def _equation(self, i: int, eqn: Any, operands: list[Value], at: At, uses: Uses) -> list[Value]:
        name, group, functions = eqn.primitive.name, uses.groups[i], ()
        if name in jaxprs.JITS and eqn.params["name"] == frozen_kernel.WIDENED:
            if eqn.outvars and jaxprs.any_fp8(jaxprs.dtypes_of(eqn.invars)):  # else nobody reads it
                return [_frozen_kernel(eqn, operands)]
        if name in jaxprs.WITH_FUNCTIONS and i in uses.inner and not choices.has_other_floats(eqn):
            functions = jaxprs.functions_of(eqn)
        if functions and group != "force_fp32" and _changes(functions, at.lists):
            results = self._call(eqn, group, functions, operands, at, uses.inner[i])
        else:
            choice = choices.WRITTEN
            if functions and group is not None:
                choice = choice._replace(group="force_fp32")
            elif name not in jaxprs.WITH_FUNCTIONS:
                choice = choices.choose(i, eqn, operands, at.lists, uses)
            results = self._operation(eqn, operands, choice, at)
            if self.recorder is not None:
                self.recorder(eqn, operands, choice, results, at)
            if choice.how == "same":
                return results
            made_of = max((v.made_of for v in operands), default=CONSTANTS)
            if any(v.origin for v in operands):
                arrays = [v for v in operands if v.dtype in FLOATS and np.ndim(v.array) > 0]
                for k, v in enumerate(results):
                    run, parts = self._origin_after(k, eqn, operands, choice, at)
                    if arrays and all(v.origin for v in arrays):
                        v.origin = run, parts
                    elif name in ("mul", "div"):  # whose derivative reads the kernel
                        v.array = jax.checkpoint(run)(*parts)
            for v in results:
                v.made_of = made_of
                v.is_cast_down = choice.how in ("low", "once") or FLOAT32 in (choice.dtype, *choice.scalars)
        for v in results:
            v.keeps_rounding = v.keeps_rounding or (v.is_low and not v.is_held_wide and i not in uses.read_alike)
        return results

    def _operation(self, eqn: Any, operands: list[Value], choice: Choice, at: At) -> list[Value]:
        """An equation without functions, or one that runs as it was written."""
        name, how = eqn.primitive.name, choice.how
        if how == "same":
            return operands
        if how == "low":
            (x,) = operands
            return [Value(x.array if x.is_held_wide else x.read(choice.dtype), choice.dtype, x.votes)]
        if how == "again":
            fun, rule = eqn.params["fun"], eqn.params["rule"]
            return [result(vmap_rules.call(fun, rule, *(v.read() for v in operands)))]
        if name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS and (choice.group == "allow" or how == "written"):
            return [self._matmul(eqn, operands, choice, at)]
        if how == "written":
            return _as_written(eqn, operands)
        if how == "each":
            moves_nothing = name in ("pvary", "pcast", "pbroadcast", "mesh_cast")
            before = contextlib.nullcontext()
            if name == "reshard":  # perhaps from a mesh with axes of another type: it is cast there
                before = jax.sharding.use_abstract_mesh(jax.typeof(operands[0].array).sharding.mesh)
            with before:
                arrays = [v.array if moves_nothing else v.read() for v in operands]
            outputs = _bind(eqn, arrays, None)
            return [v.holds(x, const=None) for x, v in zip(outputs, operands, strict=True)]
        dtype = choice.dtype
        is_low = dtype in LOW
        is_input = name in cast_lists.MOVES and all(v.is_input for v in operands)
        repeated = [k for k, v in enumerate(operands) if _is_repeated(eqn, k) and v.dtype in FLOATS and v.const is None]
        is_held = is_input and any(v.is_held_wide or (v.is_float32 and v.made_of == WEIGHTS) for v in operands)
        if how == "once":
            outputs = _rounded_once(eqn, operands, choice)
        elif is_low and repeated:
            inputs = [(v, k in repeated and v.is_float32, choice.operand(k, v)) for k, v in enumerate(operands)]
            outputs = [_repeated(eqn, [v.array if is_wide else v.read(d) for v, is_wide, d in inputs], repeated, dtype)]
        elif is_low and is_held and name not in cast_lists.INTO_BUFFER:
            outputs = _bind(eqn, [v.read(FLOAT32) for v in operands], FLOAT32)  # an input, moved: held in float32, too
        else:
            outputs = _bind(eqn, [v.read(choice.operand(k, v)) for k, v in enumerate(operands)], dtype)
        const = values.folded(eqn, [v.const for v in operands])
        results = []
        for x, out in zip(outputs, eqn.outvars, strict=True):
            if out.aval.dtype not in FLOATS or choice.result is None:
                results.append(Value(x, out.aval.dtype, out.aval.ndim > 0))
                continue
            v = Value(x, choice.result, out.aval.ndim > 0, const, is_input, home=choice.home, summed=choice.summed)
            if name in cast_lists.BEFORE_CAST and len(operands) == 1:
                # A broadcast scalar does not vote. A full array of one number does, except where values are picked.
                v.const = operands[0].const
                v.votes = operands[0].votes or v.const is not None
            if not (is_input and v.is_held_wide):
                v.array = cast(x, choice.result)
            results.append(v)
        return results

    def _origin_after(self, k: int, eqn: Any, operands: list[Value], choice: Choice, at: At) -> Any:
        """`Value.origin` of result `k` of an equation whose arrays are all frozen kernels: moved, cast, cut, scaled."""
        widened = [v.origin and v.origin[0] for v in operands]

        def run(*parts: Any) -> Any:
            arrays = [x if fn is None else fn(*x) for fn, x in zip(widened, parts, strict=True)]
            values = [v.holds(x) for v, x in zip(operands, arrays, strict=True)]
            return self._operation(eqn, values, choice, at)[k].array

        return run, tuple(v.origin[1] if v.origin else v.array for v in operands)

    def _matmul(self, eqn: Any, operands: list[Value], choice: Choice, at: At) -> Value:
        """A matmul or convolution, of 16-bit operands or as it was written."""
        made_of = [v.made_of for v in operands[:2]]
        weights = {k: v.array if v.is_float32 else None for k, v in enumerate(operands[:2]) if v.made_of == WEIGHTS}
        if choice.how == "written":
            arrays, dtype = [v.read(a.aval.dtype) for v, a in zip(operands, eqn.invars, strict=True)], None
            result_dtype, is_low = eqn.outvars[0].aval.dtype, arrays[0].dtype in LOW
        else:
            arrays, dtype = [v.read(choice.dtype) for v in operands], choice.dtype
            result_dtype, is_low = choice.result, True

        def multiplied(arrays: list[Any]) -> Any:
            if (product := self.narrow.get(at.place)) is not None:
                return cast(product(*arrays, result_dtype, eqn.params), result_dtype)
            if weights and DATA in made_of and is_low:
                return products.with_float32_gradients(eqn.primitive, eqn.params, arrays, weights, result_dtype)
            if choice.how == "product":
                return products.in_float32(eqn.primitive, eqn.params, arrays)
            if choice.how == "written":
                return jaxprs.run_as_traced(jaxprs.without_scope(eqn), arrays)[0]
            return _bind(eqn, arrays, dtype)[0]

        origins = {k: v.origin for k, v in enumerate(operands[:2]) if v.origin}
        if not origins:
            return Value(multiplied(arrays), result_dtype, eqn.outvars[0].aval.ndim > 0)
        dtypes, parts = [x.dtype for x in arrays], {k: parts for k, (_, parts) in origins.items()}
        activations = [None if k in origins else x for k, x in enumerate(arrays)]

        def of_parts(activations: list[Any], parts: dict[int, Any]) -> Any:
            kernels = {k: cast(widened(*parts[k]), dtypes[k]) for k, (widened, _) in origins.items()}
            return multiplied([kernels.get(k, x) for k, x in enumerate(activations)])

        x = jax.checkpoint(of_parts)(activations, parts)  # the backward pass widens them again, and keeps no copy
        return Value(x, result_dtype, eqn.outvars[0].aval.ndim > 0)

    # Operations with functions inside.

    def _call(
        self, eqn: Any, group: str | None, functions: Any, operands: list[Value], at: At, uses: Any
    ) -> list[Value]:
        name = eqn.primitive.name
        if group is not None:  # a function that a list names: its parts follow the dtypes of its inputs
            dtype = at.lists.dtype if group == "allow" else choices.widest(eqn, operands)
            scalars = choices.scalars_to_keep(operands, dtype)
            choice = Choice("bind", group, dtype, dtype, scalars)
            pairs = [(v, choice.operand(k, v)) for k, v in enumerate(operands)]
            operands = [v if d in (None, v.dtype) else v.holds(v.read(d), dtype=d, const=None) for v, d in pairs]
            at = at._replace(lists=at.lists.inside(group))
        elif at.lists.dtype is None:
            pairs = [(v, getattr(a.aval, "dtype", None)) for v, a in zip(operands, eqn.invars, strict=True)]
            operands = [v.holds(v.read(d), dtype=d, const=None) for v, d in pairs]
        uses = uses or (None,) * len(functions)
        if name in jaxprs.JITS | {"closed_call", "core_call"}:
            return self._jit(eqn, functions[0], operands, at.function(0), uses[0])
        if name in jaxprs.WITH_OWN_DERIVATIVE:
            if self.recorder is not None:
                self.recorder(eqn, operands, Choice("call", "inside"), [], at)
            rule = derivative_rules.custom_jvp if name == "custom_jvp_call" else derivative_rules.custom_vjp
            results = rule(self, eqn, functions[0], operands, at._replace(own_derivative=True), uses[0])
        elif name in jaxprs.REMATS:
            results = self._checkpoint(eqn, functions[0], operands, at, uses[0])
        else:
            results = getattr(self, f"_{name}")(eqn, functions, operands, at, uses)
        made_of = max((v.made_of for v in operands), default=CONSTANTS)
        return [result(x, made_of) for x in results]

    def _jit(self, eqn: Any, function: Any, operands: list[Value], at: At, uses: Any) -> list[Value]:
        if not compat.is_in_program() and not any(isinstance(v.array, Tracer) for v in operands):
            run, arrays = self.function(function, operands, at, uses)  # a program of its own, as without autocast
            return list(map(result, compiled.once(run)(arrays)))
        out = self.run(function, _constrained(operands, eqn.params.get("in_shardings")), at, uses)
        return _constrained(out, eqn.params.get("out_shardings"))

    def function(
        self, function: Any, inputs: Sequence[Value], at: At, uses: Any, dtypes: Any = None, *, whole: bool = False
    ) -> tuple[Callable[..., list[Any]], Any]:
        """(a function in an equation as one of the arrays of `inputs`, these arrays).

        The results come in `dtypes`, by default in those that they count as.
        """
        arrays, inside = _entering(inputs, whole=whole)

        def run(arrays: Any) -> list[Any]:
            return _arrays(self.run(function, inside(arrays), at, uses), dtypes)

        return run, arrays

    def _checkpoint(self, eqn: Any, function: Any, operands: list[Value], at: At, uses: Any) -> list[Any]:
        run, arrays = self.function(function, operands, at.function(0), uses)
        return jax.checkpoint(run, **{k: eqn.params[k] for k in ("prevent_cse", "policy")})(arrays)

    def _cond(self, eqn: Any, functions: Any, operands: list[Value], at: At, uses: Any) -> list[Any]:
        pairs = enumerate(zip(functions, uses, strict=True))
        branches = [(f, f.inputs(operands), at.function(k), u) for k, (f, u) in pairs]
        shapes = [jax.eval_shape(*self.function(*branch)) for branch in branches]
        dtypes = [choices.join(x.dtype for x in alike) for alike in zip(*shapes, strict=True)]
        runs, (arrays, *_) = zip(*(self.function(*branch, dtypes) for branch in branches), strict=True)
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            return lax.switch(operands[0].array, runs, arrays)
        # `lax.platform_dependent`: a branch need not compile on others than its own
        by_platform = {p: run for run, names in zip(runs, platforms, strict=True) for p in names or ("default",)}
        return lax.platform_dependent(arrays, **by_platform)

    def _carried(self, eqn: Any, operands: list[Value], body: Any, at: At) -> list[Value]:
        """What a loop carries: in float32 what it adds to in each turn."""
        carry = loop_sums.carried(operands, body)
        if self.recorder is not None and any(v.dtype != x.dtype for v, x in zip(carry, operands, strict=True)):
            self.recorder(eqn, [], Choice("loop", "sum over turns"), carry, at)
        return carry

    def _while(self, eqn: Any, functions: Any, operands: list[Value], at: At, uses: Any) -> list[Any]:
        (test, body), at = functions, at._replace(in_loop=True)
        of_test, _, _ = test.parts(operands)
        consts, carry, _ = body.parts(operands)
        carry = self._carried(eqn, carry, body, at)
        if loop_sums.stops_by_floats(test, body):
            carry = [v.holds(v.array, dtype=FLOAT32) if v.dtype in FLOATS else v for v in carry]

        def advance(carry: Any, dtypes: Any = None) -> tuple[Any, ...]:
            inside = [*map(_again, consts), *(result(x) for x in carry)]
            return tuple(_arrays(self.run(body, inside, at.function(1), uses[1]), dtypes))

        def holds(carry: Any) -> Any:
            inside = [*map(_again, of_test), *map(result, carry)]
            return self.run(test, inside, at.function(0), uses[0])[0].array

        dtypes = _settled(carry, advance)
        start = tuple(_arrays(carry, dtypes))
        if not test.jaxpr.outvars[0].aval.ndim:
            return list(lax.while_loop(holds, lambda c: advance(c, dtypes), start))

        def advance_rows(state: Any) -> Any:
            going_on, old = state
            new = tuple(jaxprs.rows_going_on(going_on, list(advance(old, dtypes)), list(old)))
            return holds(new), new

        return list(lax.while_loop(lambda state: jnp.any(state[0]), advance_rows, (holds(start), start))[1])

    def _scan(self, eqn: Any, functions: Any, operands: list[Value], at: At, uses: Any) -> list[Any]:
        params, (function,) = eqn.params, functions
        consts, carry, rows = function.parts(operands)
        carry, m = self._carried(eqn, carry, function, at), function.n_carry
        at = at.function(0)._replace(in_loop=True, times=at.times * params["length"])
        scanned, entered = _entering(rows)
        # What every turn reads enters in float32, so its gradient is summed in float32. What the body hands on as it is
        # is read from outside, too.
        consts = list(map(_in_float32, consts))
        read = {k: _in_float32(carry[k]) for k in loop_sums.passed(function)}

        def turn(arrays: Any, rows: Any, dtypes: Any = None) -> Any:
            before = [_again(read[k]) if k in read else result(x) for k, x in enumerate(arrays)]
            inside = [*map(_again, consts), *before, *entered(rows)]
            for v, inner in zip(inside, function.jaxpr.invars, strict=True):
                v.votes = inner.aval.ndim > 0
            new = _arrays(self.run(function, inside, at, uses[0]), dtypes)
            return tuple(x if k in read else new[k] for k, x in enumerate(arrays)), tuple(new[m:])

        def first(arrays: Any) -> Any:
            return turn(arrays, jax.tree.map(lambda x: lax.index_in_dim(x, 0, keepdims=False), scanned))[0]

        dtypes = _settled(carry, first) if params["length"] else [v.dtype for v in carry]
        out, stacked = lax.scan(
            lambda arrays, rows: turn(arrays, rows, [*dtypes, *[None] * (len(eqn.outvars) - m)]),
            tuple(_arrays(carry, dtypes)),
            scanned,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            _split_transpose=params.get("_split_transpose", False),
        )
        return [*out, *stacked]

    def _shard_map(self, eqn: Any, functions: Any, operands: list[Value], at: At, uses: Any) -> list[Any]:
        params = eqn.params
        run, (arrays, wide) = self.function(functions[0], operands, at.function(0), uses[0], whole=True)
        specs = list(params["in_specs"])
        mapped = jax.shard_map(
            lambda arrays, wide: tuple(run((arrays, wide))),
            mesh=params["mesh"],
            in_specs=(specs, {k: specs[k] for k in wide}),
            out_specs=params["out_specs"],
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )
        return list(mapped(arrays, wide))


def _entering(inputs: Sequence[Value], *, whole: bool = False) -> tuple[Any, Callable[[Any], list[Value]]]:
    """(the arrays of values that enter a function, what makes values of them there).

    A 16-bit input enters in 16 bits. If devices sum its gradient, its float32 array enters, too: nobody reads its
    numbers, but it gets the gradient. `whole` does so for all that is made of such inputs.
    """
    wide = {k: v.read(FLOAT32) for k, v in enumerate(inputs) if v.sums_in_float32 and (whole or v.is_held_wide)}
    known = [(v.holds(None), v.is_held_wide) for v in inputs]  # rules of derivatives close over no array

    def inside(rows: Any) -> list[Value]:
        arrays, wide = rows
        values = []
        for k, ((v, is_held_wide), x) in enumerate(zip(known, arrays, strict=True)):
            if k in wide:
                x = products.with_gradient_to(wide[k], x)
            elif is_held_wide:
                x = lax.convert_element_type(x, FLOAT32)
            values.append(v.holds(x))
        return values

    return ([v.read() for v in inputs], wide), inside


def _arrays(values: Sequence[Value], dtypes: Any = None) -> list[Any]:
    """The arrays of values in these dtypes, by default in those that they count as."""
    return [jnp.asarray(v.read(d)) for v, d in zip(values, dtypes or [None] * len(values), strict=True)]


def _in_float32(v: Value) -> Value:
    """A 16-bit value, held in float32."""
    return v.holds(v.read(FLOAT32) if v.is_low else v.array)


def _again(v: Value) -> Value:
    """A value in a function that reads it from outside: its casts are made there."""
    return v.holds(v.array)


def _settled(carry: list[Value], advance: Callable[[Any], Any]) -> list[Any]:
    """The dtypes that a loop carries: those that its body returns after some turns, or the widest."""
    dtypes = [v.dtype for v in carry]
    for turn in range(3 * len(dtypes) + 4):
        after = [x.dtype for x in jax.eval_shape(advance, tuple(_arrays(carry, dtypes)))]
        if turn > len(dtypes) + 1:
            after = [choices.join(pair) for pair in zip(after, dtypes, strict=True)]
        if after == dtypes:
            return dtypes
        dtypes = after
    raise AssertionError("joining dtypes only widens them")  # float16, bfloat16, float32: two steps at most


def _changes(functions: Any, lists: CastLists) -> bool:
    """Whether autocast can change a function in an equation: it has floats, or where autocast is off, a region."""
    equations = (eqn for f in functions for eqn in jaxprs.equations(f.jaxpr))
    if lists.dtype is None:
        return any(regions.is_marked(eqn) for eqn in equations)
    return any(v.aval.dtype in FLOATS for eqn in equations for v in eqn.invars if hasattr(v.aval, "dtype"))


def _constrained(values: list[Value], shardings: Any) -> list[Value]:
    """Values with the shardings that a `jit` gives them."""
    constrained = list(values)
    for k, sharding in enumerate(shardings or ()):
        if isinstance(sharding, jax.sharding.Sharding):
            constrained[k] = values[k].holds(lax.with_sharding_constraint(jnp.asarray(values[k].array), sharding))
    return constrained


def _as_written(eqn: Any, operands: list[Value]) -> list[Value]:
    """An equation in the dtypes that it was traced with."""
    name = eqn.primitive.name
    if name == "convert_element_type" and operands[0].is_float32 and (dtype := eqn.params["new_dtype"]) in FLOATS:
        (x,) = operands
        if x.is_held_wide and dtype == FLOAT32:
            return [x.holds(x.array, dtype=dtype)]
        if x.made_of == WEIGHTS and x.dtype == FLOAT32 and dtype != FLOAT32:  # devices sum its gradient in float32
            return [x.holds(products.with_gradient_to(x.array, cast(x.array, dtype)), dtype=dtype)]
    arrays = [v.read(getattr(a.aval, "dtype", None)) for v, a in zip(operands, eqn.invars, strict=True)]
    if name in _SIMPLE:
        outputs = eqn.primitive.bind(*arrays, **eqn.params)
        outputs = outputs if eqn.primitive.multiple_results else [outputs]
    else:
        outputs = jaxprs.run_as_traced(jaxprs.without_scope(eqn), arrays)
    out = list(map(result, outputs))
    if name == "convert_element_type":
        out[0].is_input, out[0].const = operands[0].is_input, values.folded(eqn, [operands[0].const])
    return out


_SIMPLE = cast_lists.ALLOW | cast_lists.FORCE_FP32 | cast_lists.WIDEST | jaxprs.ELEMENTWISE | {"iota"}


def _bind(eqn: Any, operands: Sequence[Any], dtype: Any) -> list[Any]:
    """The primitive again, for operands of another dtype."""
    if eqn.primitive.name in jaxprs.SCATTERS:
        return [jaxprs.scattered(eqn, operands)]
    params = dict(eqn.params)
    is_exact = cast_lists.is_short(eqn) or cast_lists.only_sums(eqn)
    if is_exact and dtype == FLOAT32 and params["precision"] is None:  # else a GPU and a TPU round the operands
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    is_named = params.get("preferred_element_type") is not None
    if dtype in FLOATS and (is_named or ("preferred_element_type" in params and dtype == FLOAT32)):
        params["preferred_element_type"] = dtype
    outputs = eqn.primitive.bind(*operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _rounded_once(eqn: Any, operands: list[Value], choice: Choice) -> list[Any]:
    """Arithmetic of 16-bit arrays with float32 scalars, and sums of 16-bit numbers: in float32, the result rounded."""
    name, has_number = eqn.primitive.name, any(isinstance(v, core.Literal) for v in eqn.invars)
    is_linear = (  # its derivative reads none of the arrays
        name in ("add", "sub", "add_any", "scatter-add", "scatter-sub")
        or eqn.outvars[0].aval.dtype not in FLOATS
        or (name in ("mul", "div") and has_number)
    )
    low = [choice.operand(k, v) for k, v in enumerate(operands)]

    def run(*arrays: Any) -> Any:
        pairs = zip(operands, arrays, strict=True)
        wide = [
            values.widened(v.holds(x)) if v.keeps_rounding and x.dtype != FLOAT32 else cast(x, FLOAT32)
            for v, x in pairs
        ]
        return cast(_bind(eqn, wide, FLOAT32)[0], choice.result)

    if is_linear:
        return [run(*(v.array if v.is_held_wide else v.read(d) for v, d in zip(operands, low, strict=True)))]
    # A derivative would keep the widened arrays. The checkpoint keeps them in 16 bits, and widens them again.
    return [jax.checkpoint(run)(*(v.read(d) for v, d in zip(operands, low, strict=True)))]


def _frozen_kernel(eqn: Any, operands: list[Value]) -> Value:
    """What `FrozenKernel` makes of its parts."""

    def widened(*parts: Any) -> Any:
        return jaxprs.run_as_traced(jaxprs.without_scope(eqn), list(parts))[0]

    parts = tuple(v.array for v in operands)
    array = widened(*parts)
    kernel = Value(array, array.dtype, is_input=True)  # a weight
    kernel.origin = widened, parts
    return kernel


def _is_repeated(eqn: Any, k: int) -> bool:
    """Whether an equation may use elements of operand `k` several times: rows of a table, a bias, a factor."""
    name, atom = eqn.primitive.name, eqn.invars[k]
    if name == "gather":
        return k == 0
    if name not in ("broadcast_in_dim", "tile", "add", "sub", "mul") or isinstance(atom, core.Literal):
        return False
    return atom.aval.size < eqn.outvars[0].aval.size


def _repeated(eqn: Any, arrays: list[Any], repeated: list[int], dtype: Any) -> Any:
    """An operation in 16 bits that repeats an operand. Its gradient is summed in float32: in bfloat16, 256 + 1 is 256.

    Operands of float32 are cast first, and get a float32 gradient.
    """

    def run(*xs: Any) -> Any:
        return eqn.primitive.bind(*(cast(x, dtype) for x in xs), **eqn.params)

    def tangent_of(k: int, operands: Any, tangent: Any) -> Any:
        within = FLOAT32 if k in repeated else dtype
        factors = [cast(x, within) for x in operands]
        bind = lambda x: eqn.primitive.bind(*factors[:k], x, *factors[k + 1 :], **eqn.params)  # noqa: E731
        return cast(jax.jvp(bind, (factors[k],), (cast(tangent, within),))[1], dtype)

    return products.with_tangents(run, tangent_of, arrays)
