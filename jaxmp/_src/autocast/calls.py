"""Operations with functions inside, run by their plans: calls, branches, loops, functions with their own derivatives.

The derivative rules of `jax.custom_jvp` and `jax.custom_vjp` are kept. A rule expects the dtypes in which the function
was written. So autocast traces the rule once more in these dtypes, plans it like any function, and runs it in the
dtypes that arrive. If a rule asks for it (`symbolic_zeros=True`), autocast tells it which inputs are differentiated.

Weights whose gradients are summed in float32 may have a float32 array beside the 16-bit one, which enters the function,
too (`plan_runner`).
"""

import functools
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from jaxmp._src.autocast import dtype_readers, value_uses
from jaxmp._src.autocast.cast_lists import FLOATS
from jaxmp._src.autocast.plan_runner import PlanRunner, cast
from jaxmp._src.autocast.planner import FLOAT32, WEIGHTS, Plan, Planner, Step, Value, value_of_array
from jaxmp._src.programs import array_functions, jaxprs

_FEW = 8  # equations: a call of so few is written out, which is cheaper than a trace of its own
_SMALL = 2**20  # bytes: arrays that a function closes over and that may be kept with its program


_Beside = dict[int, Any]  # float32 arrays, by the operands beside which they enter


def _call(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    """`jax.jit` and `jax.checkpoint`: the same equation with another function in it."""
    eqn, plan = step.eqn, step.inner[0]
    _, consts = jaxprs.functions_of(eqn)[0]
    name, is_remat = jaxprs.body_name(eqn), eqn.primitive.name in jaxprs.REMATS
    if not is_remat and len(plan.steps) <= _FEW and not _has_shardings(eqn):
        return runner.run(plan, consts, operands)
    program = _program(runner, eqn.params[name], plan, consts)
    alone = PlanRunner(Planner(), runner.calls)  # holds nothing of the functions around
    program = program.trace(lambda values, wide: alone.run(plan, consts, values, wide), operands, wide)
    if not is_remat and _is_small(jaxprs.open_jaxpr(program)[1]):
        return list(eqn.primitive.bind(*operands, **(eqn.params | {name: program})))
    jaxpr, extra = jaxprs.without_constants(eqn.params[name], program)
    if extra and not is_remat:  # a jit has shardings for each of its operands, and none for these
        return runner.run(plan, consts, operands)
    return list(eqn.primitive.bind(*extra, *operands, *wide.values(), **(eqn.params | {name: jaxpr})))


class _Program:
    """A planned function, jitted. What it runs is handed over for each trace, and not kept."""

    def __init__(self) -> None:
        here = threading.local()
        self._here = here
        self._jitted = jax.jit(lambda *args: here.function(*args))

    def trace(self, function: Any, operands: list[Any], wide: _Beside) -> Any:
        """The jaxpr of a function of both; every function handed over to one program must be the same."""
        self._here.function = function
        try:
            return self._jitted.trace(operands, wide).jaxpr
        finally:
            del self._here.function


def _program(runner: PlanRunner, jaxpr: Any, plan: Plan, consts: Any) -> _Program:
    """The function of a plan, jitted: the same object at every call, so that jax traces and compiles it once.

    One that closes over large arrays is kept as long as its runner, to leave their memory to the user. Any other is
    kept as long as jax keeps the user's function.
    """
    if not _is_small(consts):
        return runner.programs.setdefault(id(plan), (_Program(), plan))[0]
    kept = _kept(weakref.ref(jaxpr), plan.key)
    return kept.setdefault("program", _Program())


@functools.lru_cache(maxsize=128)
def _kept(jaxpr: weakref.ref, key: Any) -> dict[str, Any]:
    """What is kept for a jitted function and one plan of it, from call to call; it is emptied with the function."""
    del key
    kept: dict[str, Any] = {}
    weakref.finalize(jaxpr(), kept.clear).atexit = False
    return kept


def _is_small(consts: Any) -> bool:
    if any(isinstance(x, Tracer) for x in consts):
        return False
    return sum(getattr(x, "nbytes", 0) for x in consts) <= _SMALL


def _has_shardings(eqn: Any) -> bool:
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)


def _closed_call(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    del wide
    return runner.run(step.inner[0], jaxprs.functions_of(step.eqn)[0][1], operands)


def _cond(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    functions = jaxprs.functions_of(step.eqn)
    wide = {i - 1: x for i, x in wide.items()}  # a branch does not get the index

    def branch(plan: Plan, consts: Any) -> Any:
        return lambda wide, *values: _cast_all(runner.run(plan, consts, values, wide), step.results)

    branches = [branch(plan, consts) for plan, (_, consts) in zip(step.inner, functions, strict=True)]
    platforms = step.eqn.params.get("branches_platforms")
    if platforms is not None:  # `lax.platform_dependent`: a branch need not compile on others than its own
        by_platform = {p: b for b, names in zip(branches, platforms, strict=True) for p in names or ("default",)}
        return list(lax.platform_dependent(wide, *operands[1:], **by_platform))
    return list(lax.switch(operands[0], branches, wide, *operands[1:]))


def _while(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    del wide
    params, (test, body) = step.eqn.params, step.inner
    (_, test_closed), (_, body_closed) = jaxprs.functions_of(step.eqn)
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test_consts, body_consts = operands[:first], operands[first:second]

    def holds(carry: Any) -> Any:
        return runner.run(test, test_closed, (*test_consts, *carry))[0]

    def advance(carry: Any) -> Any:
        return _cast_all(runner.run(body, body_closed, (*body_consts, *carry)), step.results)

    carry = tuple(operands[second:])
    if not test.jaxpr.outvars[0].aval.ndim:
        return list(lax.while_loop(holds, lambda carry: tuple(advance(carry)), carry))

    def advance_rows(state: Any) -> Any:
        going_on, old = state
        new = tuple(jaxprs.rows_going_on(going_on, advance(old), old))
        return holds(new), new

    return list(lax.while_loop(lambda state: jnp.any(state[0]), advance_rows, (holds(carry), carry))[1])


def _scan(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    params, plan = step.eqn.params, step.inner[0]
    _, closed = jaxprs.functions_of(step.eqn)[0]
    n_consts, n_carry = jaxprs.scan_counts(step.eqn)
    consts = operands[:n_consts]
    enters = step.operands[n_consts : n_consts + n_carry]
    is_passed = [dtype == FLOAT32 != v.dtype for dtype, v in zip(enters, step.results[:n_carry], strict=True)]

    def body(carry: Any, scanned_and_wide: Any) -> Any:
        scanned, wide = scanned_and_wide
        out = _cast_all(runner.run(plan, closed, (*consts, *carry, *scanned), wide), step.results)
        # What the body passes on is what came, in float32, and not what it cast: jax then reads it as a constant.
        new = [old if same else x for same, old, x in zip(is_passed, carry, out[:n_carry], strict=True)]
        return tuple(new), tuple(out[n_carry:])

    carry, stacked = lax.scan(
        body,
        tuple(operands[n_consts : n_consts + n_carry]),
        (tuple(operands[n_consts + n_carry :]), wide),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return _cast_all([*carry, *stacked], step.results)


def _shard_map(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    params, plan = step.eqn.params, step.inner[0]
    _, consts = jaxprs.functions_of(step.eqn)[0]

    def function(wide: Any, *values: Any) -> Any:
        return tuple(runner.run(plan, consts, values, wide))

    specs = tuple(params["in_specs"])
    run = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=({i: specs[i] for i in wide}, *specs),
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return list(run(wide, *operands))


def _custom_jvp(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    eqn, plan = step.eqn, step.inner[0]
    if _summed(step, operands):  # by the transpose of the rule, which has products to look for
        return _custom_vjp(runner, step, operands, wide)
    _, consts = jaxprs.functions_of(eqn)[0]
    closed = operands[: eqn.params["num_consts"]]
    floats = [i for i, v in enumerate(eqn.invars) if v.aval.dtype in FLOATS and i >= len(closed)]

    @jax.custom_jvp
    def function(*values: Any) -> Any:
        return tuple(_cast_all(runner.run(plan, consts, (*closed, *values)), step.results))

    @functools.partial(function.defjvp, symbolic_zeros=_has_symbolic_zeros(eqn))
    def rule(primals: Any, tangents: Any) -> Any:
        places = [i for i in floats if not isinstance(tangents[i - len(closed)], SymbolicZero)]

        def as_traced(values: Any, moving: Any) -> Any:
            at = tuple(values[i] for i in places)
            return jax.jvp(_of_floats(eqn, values, places), at, tuple(moving), has_aux=True)

        traced = [v.aval.dtype for v in eqn.invars]
        moving = [tangents[i - len(closed)] for i in places]
        dtypes = (traced, [traced[i] for i in places])
        (out, out_moving, rest), _ = _rerun(runner, step, as_traced, ((*closed, *primals), moving), dtypes)
        is_float = [v.dtype in FLOATS for v in step.results]
        out, out_moving, rest = iter(out), iter(out_moving), iter(rest)
        primals_out = [next(out) if f else next(rest) for f in is_float]
        tangents_out = [
            cast(next(out_moving), v.dtype) if f else np.zeros(jnp.shape(x), jax.dtypes.float0)
            for f, v, x in zip(is_float, step.results, primals_out, strict=True)
        ]
        return tuple(_cast_all(primals_out, step.results)), tuple(tangents_out)

    return list(function(*operands[len(closed) :]))


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """The residuals of a function: arrays, and the static part that puts them together."""

    def __init__(self, arrays: Any, static: Any):
        self.arrays, self.static = arrays, static

    def tree_flatten(self) -> Any:
        return tuple(self.arrays), self.static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "_Residuals":
        return cls(list(arrays), static)


def _summed(step: Step, operands: list[Any]) -> set[int]:
    """The weights that come in float32: the products of their gradients return it."""
    inputs = enumerate(zip(step.inner[0].inputs, operands, strict=True))
    return {i for i, (value, x) in inputs if value.made_of == WEIGHTS and x.dtype == FLOAT32}


def _custom_vjp(runner: PlanRunner, step: Step, operands: list[Any], wide: _Beside) -> list[Any]:
    del wide
    eqn, plan = step.eqn, step.inner[0]
    _, consts = jaxprs.functions_of(eqn)[0]
    closed = operands[: eqn.params["num_consts"]]
    floats = [i for i, v in enumerate(eqn.invars) if v.aval.dtype in FLOATS and i >= len(closed)]
    float_outputs = [i for i, v in enumerate(step.results) if v.dtype in FLOATS]

    @jax.custom_vjp
    def function(*values: Any) -> Any:
        return tuple(_cast_all(runner.run(plan, consts, (*closed, *values)), step.results))

    summed = _summed(step, operands)
    has_symbolic_zeros = _has_symbolic_zeros(eqn)
    pulled_back = _linearized if has_symbolic_zeros else _with_pull_back

    def forward(*values: Any) -> Any:
        places = floats
        if has_symbolic_zeros:
            places = [i for i in floats if values[i - len(closed)].perturbed]
            values = tuple(v.value for v in values)

        def as_traced(values: Any) -> Any:
            return pulled_back(_of_floats(eqn, values, places), [values[i] for i in places])

        traced = [v.aval.dtype for v in eqn.invars]
        (out, pull_back, rest), shapes = _rerun(runner, step, as_traced, ((*closed, *values),), (traced,))
        arrays, treedef = jax.tree.flatten(pull_back)
        dtypes = tuple(s.dtype for s in jax.tree.leaves(shapes[1]))
        out, rest = iter(out), iter(rest)
        results = [next(out) if v.dtype in FLOATS else next(rest) for v in step.results]
        return tuple(_cast_all(results, step.results)), _Residuals(arrays, (treedef, dtypes, tuple(places)))

    def backward(residuals: Any, cotangents: Any) -> Any:
        treedef, dtypes, places = residuals.static
        nonzero = [k for k, i in enumerate(float_outputs) if not isinstance(cotangents[i], SymbolicZero)]

        def as_traced(arrays: Any, cotangents: Any) -> Any:
            pull_back = jax.tree.unflatten(treedef, arrays)
            if not has_symbolic_zeros:
                return pull_back(list(cotangents))
            moving = [jax.ShapeDtypeStruct(eqn.invars[i].aval.shape, eqn.invars[i].aval.dtype) for i in places]
            return _transposed(pull_back, nonzero, moving)(list(cotangents))

        given = [cotangents[float_outputs[k]] for k in nonzero]
        traced = [eqn.outvars[float_outputs[k]].aval.dtype for k in nonzero]
        sums = tuple(i in summed for i in places)
        moving, _ = _rerun(runner, step, as_traced, (residuals.arrays, given), (dtypes, traced), sums)
        grads: list[Any] = [None] * len(eqn.invars)
        for i, grad in zip(places, moving, strict=True):
            grads[i] = cast(grad, operands[i].dtype)
        return tuple(grads[len(closed) :])

    function.defvjp(forward, backward, symbolic_zeros=has_symbolic_zeros)
    return list(function(*operands[len(closed) :]))


def _has_symbolic_zeros(eqn: Any) -> bool:
    return bool(eqn.params.get("symbolic_zeros", False))


def _with_pull_back(function: Any, at: list[Any]) -> Any:
    """The results of a function with auxiliary ones, as (results, function of cotangents, auxiliary results)."""
    return jax.vjp(function, *at, has_aux=True)


def _linearized(function: Any, at: list[Any]) -> Any:
    """The same with a linear function of tangents; its transpose can be told which cotangents are zero."""
    out, linear, rest = jax.linearize(function, *at, has_aux=True)
    jaxpr, consts = jaxprs.open_jaxpr(jax.make_jaxpr(linear)(*at))
    return out, _Residuals(consts, jaxpr), rest


def _transposed(linear: _Residuals, outputs: list[int], moving: list[Any]) -> Any:
    """From cotangents of some outputs of a linear function, those of its inputs; other outputs have none."""
    run = jaxprs.jaxpr_as_function(linear.static, linear.arrays)
    return jax.linear_transpose(lambda *tangents: [run(*tangents)[k] for k in outputs], *moving)


def _of_floats(eqn: Any, values: Any, floats: list[int]) -> Any:
    """An equation as it was traced, as a function of some of its floats: (its float results, its other results)."""

    def function(*moving: Any) -> Any:
        given = array_functions.with_values(values, floats, moving)
        out = list(zip(jaxprs.run_as_traced(eqn, given), eqn.outvars, strict=True))
        return [x for x, v in out if v.aval.dtype in FLOATS], [x for x, v in out if v.aval.dtype not in FLOATS]

    return function


def _rerun(
    runner: PlanRunner, step: Step, rule: Any, arguments: Any, dtypes: Any, sums: tuple[bool, ...] = ()
) -> tuple[Any, Any]:
    """Runs a derivative rule that was written for other dtypes, by a plan for the dtypes that arrive.

    `rule` is a function of lists of arrays, `arguments` are these lists, `dtypes` the dtypes it was written for.
    `sums` says which results are gradients that devices sum in float32. Returns the results, and the shapes and dtypes
    that the rule as written would return.
    """
    leaves, treedef = jax.tree.flatten(tuple(map(list, arguments)))
    avals = [
        jax.typeof(x).update(dtype=d) for x, d in zip(leaves, jax.tree.leaves(tuple(map(list, dtypes))), strict=True)
    ]

    def flat(*values: Any) -> Any:
        return rule(*jax.tree.unflatten(treedef, values))

    with dtype_readers.tracing(step.lists):  # an autocast in the rule is the innermost
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    lists = step.lists._replace(narrow=frozenset())  # these were chosen for another function
    uses = None
    if any(sums):
        lists = lists._replace(float32_products="read")
        uses = value_uses.find_uses(jaxpr, lists, sums)
    plan = runner.planner.plan((jaxpr, consts), tuple(map(value_of_array, leaves)), lists, uses)
    return jax.tree.unflatten(jax.tree.structure(shapes), runner.run(plan, consts, leaves)), shapes


def _cast_all(values: Any, results: tuple[Value, ...]) -> list[Any]:
    return [cast(x, v.dtype) for x, v in zip(values, results, strict=True)]


CALLS = {
    **dict.fromkeys(jaxprs.JITS | jaxprs.REMATS, _call),
    "closed_call": _closed_call,
    "core_call": _closed_call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
