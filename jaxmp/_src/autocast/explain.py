"""A table of what autocast would do with a function, and why. Nothing is run."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxmp._src.autocast import cast_lists, flax_layers, narrow_matmuls, regions, rewrite
from jaxmp._src.autocast.planner import Plan, Step
from jaxmp._src.base import tables
from jaxmp._src.programs import array_functions, jaxprs


class ExplainedOp(NamedTuple):
    """Operations of one kind in one module.

    Attributes:
      module: path of the module or named scope; "" at the top.
      name: the primitive, or the function that a list names.
      written: the dtype it was written in.
      runs_in: the dtype it would run in.
      group: the list that decided: `allow`, `force_fp32`, `widest`; `feeds float32` (only operations
        of `force_fp32` read it); or `written` (unchanged). For a matmul in fp8: its recipe. For a matmul that cannot
        run in fp8, or that the filter excludes: the reason, as `allow, not fp8: filter`.
      count: how many there are; one in a scan counts once for each iteration.
      flops: their floating-point operations together: 2 m n k for a matmul, one for each element elsewhere.
    """

    module: str
    name: str
    written: str
    runs_in: str
    group: str
    count: int
    flops: int


class Explanation(NamedTuple):
    """The result of `explain_autocast`: rows, and a table when printed.

    In the table, numbered modules with the same operations share a row, with their counts added:
    `Block_[0-47]/Dense_0`.

    Attributes:
      rows: one for each kind of operation in each module, in the order they run.
      casts: how many values would be cast.
    """

    rows: tuple[ExplainedOp, ...]
    casts: int

    def flops_by_dtype(self) -> dict[str, int]:
        """The floating-point operations in each dtype."""
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[row.runs_in] = totals.get(row.runs_in, 0) + row.flops
        return totals

    def __str__(self) -> str:
        titles = ("module", "operation", "count", "written", "runs in", "because of", "MFLOP")
        lines = [
            (r.module or "(top)", r.name, str(r.count), r.written, r.runs_in, r.group, f"{r.flops / 1e6:.3f}")
            for r in _grouped(self.rows)
        ]
        total = sum(self.flops_by_dtype().values()) or 1
        shares = ", ".join(f"{100 * n / total:.1f}% in {d}" for d, n in self.flops_by_dtype().items() if n)
        table = tables.columns([titles, *lines], "<<><<<>")
        return f"{table}\n{self.casts} casts; FLOPs: {shares or 'none'}"

    __repr__ = __str__


def explain(fn: Callable[..., Any], lists: cast_lists.CastLists, args: Any, kwargs: Any) -> Explanation:
    """What `autocast` with these lists would do with `fn(*args, **kwargs)`; arrays may be `jax.ShapeDtypeStruct`."""
    found: list[Explanation] = []

    def explained(pure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            traced = rewrite.Traced(pure, lists, args, kwargs)
            lists.modules.warn_of_idle()
            function = traced.jaxpr, traced.consts
            found.append(_explain(narrow_matmuls.plan(traced.planner, function, traced.inputs, lists)))
            with regions.region(cast_lists.OFF):
                return pure(*args, **kwargs)

        return run

    def call(*args: Any, **kwargs: Any) -> None:
        flax_layers.call(fn, explained, args, kwargs)

    def is_input(x: Any) -> bool:
        return array_functions.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)

    inputs = array_functions.Inputs(array_functions.flat_leaves((args, kwargs)), is_input)
    jax.eval_shape(lambda *values: inputs.call(call, values), *inputs.values)
    return found[0]


_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_Line = tuple[int, tuple[str, ...], ExplainedOp]  # a place in the table, the parts of a path, and the row


def _grouped(rows: Iterable[ExplainedOp]) -> list[ExplainedOp]:
    """The rows, and one row for modules that differ in a number only."""
    lines = _alike_as_one([(i, tuple(row.module.split("/")), row) for i, row in enumerate(rows)])
    return [row._replace(module="/".join(path)) for _, path, row in sorted(lines, key=lambda line: line[0])]


def _alike_as_one(lines: list[_Line]) -> list[_Line]:
    members: dict[str, list[_Line]] = {}
    for place, path, row in lines:
        members.setdefault(path[0] if path else "", []).append((place, path[1:], row))
    alike: dict[Any, list[str]] = {}
    for name, inside in members.items():
        numbered = _NUMBERED.fullmatch(name)
        around = (numbered[1], numbered[3]) if numbered else name
        operations = tuple((path, row._replace(module="")) for _, path, row in inside)
        alike.setdefault((around, operations), []).append(name)
    found = []
    for names in alike.values():
        inside, times = members[names[0]], len(names)
        if not names[0]:
            found += inside
            continue
        for place, path, row in _alike_as_one(inside):
            row = row._replace(count=times * row.count, flops=times * row.flops)
            found.append((place, (_ranges(names), *path), row))
    return found


def _ranges(names: list[str]) -> str:
    """`Block_[0-2,5]` for `Block_0`, `Block_1`, `Block_2` and `Block_5`; one name stays as it is."""
    if len(names) == 1:
        return names[0]
    parts = [re.fullmatch(_NUMBERED, name) for name in names]
    runs: list[list[int]] = []
    for number in sorted(int(part[2]) for part in parts if part):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    before, after = _NUMBERED.sub(r"\1", names[0]), _NUMBERED.sub(r"\3", names[0])
    return f"{before}[{','.join(texts)}]{after}"


def _explain(plan: Plan) -> Explanation:
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    casts = _collect(plan, "", 1, rows)
    return Explanation(tuple(ExplainedOp(*key, count, flops) for key, (count, flops) in rows.items()), casts)


def _collect(plan: Plan, outer: str, times: int, rows: dict[tuple[str, str, str, str, str], list[int]]) -> int:
    cast: set[Any] = set()
    known = dict(zip(plan.jaxpr.invars, (v.dtype for v in plan.inputs), strict=True))
    inside = 0
    for step in plan.steps:
        eqn = step.eqn
        module = "/".join(part for part in (outer, regions.scope_of(eqn)) if part)
        for atom, dtype in zip(eqn.invars, step.operands, strict=True):
            if isinstance(atom, core.Literal) or dtype not in cast_lists.FLOATS:
                continue
            if known.get(atom, atom.aval.dtype) != dtype:
                cast.add((atom, dtype))
        known |= {v: r.dtype for v, r in zip(eqn.outvars, step.results, strict=True)}
        repeats = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if step.how == "call":
            inside += sum(_collect(inner, module, repeats, rows) for inner in step.inner)
        elif step.how != "same" and _is_worth_a_row(eqn):
            _add(rows, step, module, times)
    return len(cast) + inside


def _is_worth_a_row(eqn: Any) -> bool:
    floats = [v for v in (*eqn.invars, *eqn.outvars) if getattr(v.aval, "dtype", None) in cast_lists.FLOATS]
    return bool(floats) and not (eqn.primitive.name in cast_lists.MOVES and eqn.primitive.name not in ("max", "min"))


def _add(rows: dict[tuple[str, str, str, str, str], list[int]], step: Step, module: str, times: int) -> None:
    eqn = step.eqn
    dtypes = [d.name for d in step.operands if d in cast_lists.FLOATS]
    dtypes += [r.dtype.name for r in step.results if r.dtype in cast_lists.FLOATS]
    written = [v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars) if v.aval.dtype in cast_lists.FLOATS]
    name = jaxprs.function_name(eqn)
    group = "written" if step.how == "written" and step.group == "inside" else step.group
    runs_in = dtypes[0] if dtypes else written[0]
    if callable(step.narrow):
        runs_in, group = step.narrow.dtype_name, step.narrow.reason
    elif step.narrow is not None and group == "allow":
        group = f"{group}, not fp8: {step.narrow}"
    counts = rows.setdefault((module, name, written[0], runs_in, group), [0, 0])
    counts[0] += times
    counts[1] += times * flops_of(eqn)


def flops_of(eqn: Any) -> int:
    """Floating-point operations of one equation: two for each term of a contraction, one for each element elsewhere."""
    sizes = [math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * sizes[0] * math.prod(eqn.invars[0].aval.shape[a] for a in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2 * sizes[0] * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    if eqn.primitive.name.startswith(("reduce_", "cum")):
        return math.prod(eqn.invars[0].aval.shape)
    inner = jaxprs.functions_of(eqn)
    if inner:
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        return length * sum(flops_of(e) for jaxpr, _ in inner for e in jaxpr.eqns)
    return max(sizes, default=0)
