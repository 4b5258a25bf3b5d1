"""A table of what autocast would do with a function, and why. Nothing is run."""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._src.autocast import cast_lists, flax_layers, narrow_matmuls, regions, rewrite
from jaxmp._src.autocast.planner import Plan, Step
from jaxmp._src.base import tables, vmap_rules
from jaxmp._src.programs import array_functions, jaxprs


class ExplainedOp(NamedTuple):
    """Operations of one kind in one module.

    Attributes:
      module: path of the module or named scope; "" at the top.
      name: the primitive, or the function that a list names.
      written: the dtype it was written in.
      runs_in: the dtype it would run in.
      group: the list that decided: `allow`, `force_fp32`, `widest`; `feeds float32` (only operations
        of `force_fp32` read it); or `written` (unchanged), with the reason, as `written: keep_fp32`. For a matmul in
        fp8: its recipe, or `fp8 layer`. For a matmul that cannot run in fp8, or that the filter excludes: the reason,
        as `allow, not fp8: filter`.
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
    `Block_[0-47]/Dense_0`. Its last line is `summary()`.

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

    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """The floating-point operations of matmuls and convolutions in each dtype, the largest number first."""
        totals = self._replace(rows=tuple(filter(_is_matmul, self.rows))).flops_by_dtype()
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def float32_matmuls(self) -> dict[str, str]:
        """The modules with a matmul in float32, and why: `{"Net/head": "keep_fp32"}`."""
        return {
            row.module: row.group.removeprefix("written: ")
            for row in self.rows
            if row.runs_in == "float32" and _is_matmul(row)
        }

    def summary(self) -> str:
        """One line: the shares of dtypes in the FLOPs of matmuls, and which modules stay in float32 and why."""
        rows = _grouped(row for row in self.rows if row.runs_in == "float32" and _is_matmul(row))
        kept = dict.fromkeys(f"{row.module or '(top)'} ({row.group.removeprefix('written: ')})" for row in rows)
        more = [f"and {len(kept) - _SHOWN} more"] if len(kept) > _SHOWN else []
        where = f"; float32: {', '.join([*list(kept)[:_SHOWN], *more])}" if kept else ""
        return f"matmul FLOPs: {_shares(self.matmul_flops_by_dtype())}{where}"

    def __str__(self) -> str:
        titles = ("module", "operation", "count", "written", "runs in", "because of", "MFLOP")
        lines = [
            (r.module or "(top)", r.name, str(r.count), r.written, r.runs_in, r.group, f"{r.flops / 1e6:.3f}")
            for r in _grouped(self.rows)
        ]
        table = tables.columns([titles, *lines], "<<><<<>")
        return f"{table}\n{self.casts} casts; FLOPs: {_shares(self.flops_by_dtype())}\n{self.summary()}"

    __repr__ = __str__


_SHOWN = 8  # modules in a summary


def _shares(flops: dict[str, int]) -> str:
    total = sum(flops.values())
    return ", ".join(f"{100 * n / total:.1f}% in {dtype}" for dtype, n in flops.items() if n) or "none"


def _is_matmul(row: ExplainedOp) -> bool:
    return row.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS


def explain(fn: Callable[..., Any], lists: cast_lists.CastLists, args: Any, kwargs: Any) -> Explanation:
    """What `autocast` with these lists would do with `fn(*args, **kwargs)`; arrays may be `jax.ShapeDtypeStruct`."""
    found: list[Explanation] = []

    def explained(pure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            traced = rewrite.Traced(pure, lists, args, kwargs)
            lists.modules.warn_of_idle()
            function = traced.jaxpr, traced.consts
            here = cast_lists.at_call(lists)
            found.append(_explain(narrow_matmuls.plan(traced.planner, function, traced.inputs, here)))
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
        module = _without_repeats("/".join(part for part in (outer, regions.scope_of(eqn)) if part))
        for atom, dtype in zip(eqn.invars, step.operands, strict=True):
            if isinstance(atom, core.Literal) or dtype not in cast_lists.FLOATS:
                continue
            if known.get(atom, atom.aval.dtype) != dtype:
                cast.add((atom, dtype))
        known |= {v: r.dtype for v, r in zip(eqn.outvars, step.results, strict=True)}
        repeats = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if step.how == "call":
            inside += sum(_collect(inner, module, repeats, rows) for inner in step.inner)
        elif step.how in ("written", "again") and (matmuls := _matmuls_inside(eqn, module, times)):
            _add_parts(rows, step, module, times, matmuls)
        elif step.how != "same" and _is_worth_a_row(eqn):
            _add(rows, step, module, times)
    return len(cast) + inside


def _is_worth_a_row(eqn: Any) -> bool:
    floats = [v for v in (*eqn.invars, *eqn.outvars) if getattr(v.aval, "dtype", None) in cast_lists.FLOATS]
    return bool(floats) and not (eqn.primitive.name in cast_lists.MOVES and eqn.primitive.name not in ("max", "min"))


def _add(
    rows: dict[tuple[str, str, str, str, str], list[int]], step: Step, module: str, times: int, less: int = 0
) -> None:
    eqn = step.eqn
    dtypes = [d.name for d in step.operands if d in cast_lists.FLOATS]
    dtypes += [r.dtype.name for r in step.results if r.dtype in cast_lists.FLOATS]
    written = [v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars) if v.aval.dtype in cast_lists.FLOATS]
    name = jaxprs.function_name(eqn)
    group = _group_of(step, eqn)
    runs_in = dtypes[0] if dtypes else written[0]
    if callable(step.narrow):
        runs_in, group = step.narrow.dtype_name, step.narrow.reason
    elif step.narrow is not None and group == "allow":
        group = f"{group}, not fp8: {step.narrow}"
    counts = rows.setdefault((module, name, written[0], runs_in, group), [0, 0])
    counts[0] += times
    counts[1] += times * flops_of(eqn) - less


def _group_of(step: Step, eqn: Any) -> str:
    """The list that decided about an equation of a step, or of a function in it, with the reason where none did."""
    if step.how not in ("written", "again"):
        return step.group
    if step.group not in ("written", "inside"):  # a list that names a function
        return step.group
    reason = step.lists.because
    if step.lists.dtype is not None and eqn.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        reason = "precision=HIGHEST" if jaxprs.is_highest(eqn.params["precision"]) else "asks for its dtype"
    return f"written: {reason}" if reason else "written"


class _Matmul(NamedTuple):
    """A matmul in a function that runs as it was written.

    Attributes:
      module: its module or named scope.
      eqn: the equation.
      times: how often it runs.
      narrow: the dtype below 16 bits in which it multiplies, or None.
    """

    module: str
    eqn: Any
    times: int
    narrow: str | None


def _matmuls_inside(eqn: Any, module: str, times: int) -> list[_Matmul]:
    """The matmuls of the functions in an equation, at any depth; of a choice by platform, those for a GPU."""
    narrow, functions = None, jaxprs.functions_of(eqn)
    if eqn.primitive.name == vmap_rules.NAME:
        functions = (jaxprs.open_jaxpr(eqn.params["body"]),)
    if eqn.primitive.name in (vmap_rules.NAME, "custom_vjp_call"):
        narrow = _narrow_dtype(functions)
    if eqn.params.get("branches_platforms") is not None:
        functions = functions[:1]
    repeats = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    found = []
    for jaxpr, _ in functions:
        for inner in jaxpr.eqns:
            here = "/".join(part for part in (module, regions.scope_of(inner)) if part)
            if inner.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
                found.append(_Matmul(here, inner, repeats, None))
            found += _matmuls_inside(inner, here, repeats)
    return [x._replace(narrow=narrow) for x in found] if narrow else found


def _narrow_dtype(functions: Any) -> str | None:
    """The dtype below 16 bits in which functions hold operands: the narrowest that they cast to, and none of scales."""
    casts = (e for jaxpr, _ in functions for e in jaxprs.equations(jaxpr) if e.primitive.name == "convert_element_type")
    dtypes = {e.params["new_dtype"] for e in casts} - {np.dtype(jnp.float8_e8m0fnu)}
    narrow = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 16]
    return min(narrow, key=lambda d: (jnp.finfo(d).bits, d.name)).name if narrow else None


def _add_parts(
    rows: dict[tuple[str, str, str, str, str], list[int]], step: Step, module: str, times: int, matmuls: list[_Matmul]
) -> None:
    """A row for each matmul in a function, and one for the rest of it, which for a product in fp8 are casts."""
    for x in matmuls:
        operands = (step.eqn if x.narrow else x.eqn).invars[:2]
        written = max((v.aval.dtype for v in operands), key=lambda d: d.itemsize).name
        group = "fp8 layer" if x.narrow else _group_of(step, x.eqn)
        path = module if x.narrow else x.module
        counts = rows.setdefault((path, x.eqn.primitive.name, written, x.narrow or written, group), [0, 0])
        counts[0] += x.times
        counts[1] += x.times * flops_of(x.eqn)
    if not any(x.narrow for x in matmuls):
        _add(rows, step, module, times, less=sum(x.times * flops_of(x.eqn) for x in matmuls))


def _without_repeats(path: str) -> str:
    """A path; that of an fp8 layer, which linen calls in a scope of its own name, with this name once."""
    return "/".join(name for name, _ in itertools.groupby(path.split("/"))) if "/Fp8" in path else path


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
