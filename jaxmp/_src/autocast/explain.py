"""A table of what autocast would do with a function, and why. Nothing is run."""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType

from jaxmp._src.autocast import cast_lists, flax_layers, regions, rewrite, weighted_matmuls
from jaxmp._src.autocast.cast_lists import FLOATS, CastLists
from jaxmp._src.autocast.choices import Choice
from jaxmp._src.autocast.interpreter import At, Place
from jaxmp._src.autocast.measure import Measurement, functions_of
from jaxmp._src.autocast.values import Value
from jaxmp._src.base import tables, vmap_rules
from jaxmp._src.programs import array_functions, jaxprs


class ExplainedOp(NamedTuple):
    """Operations of one kind in one module.

    Attributes:
      module: path of the module or named scope; "" at the top.
      name: the primitive, or the function that a list names.
      written: the dtype it was written in.
      runs_in: the dtype it would run in.
      group: the list that decided: `allow`, `force_fp32`, `widest`; `feeds float32` (only operations of `force_fp32`
        read it); `sum over turns` of a loop that adds to a 16-bit value, which it carries in float32; or `written`
        (unchanged), with the reason, as `written: keep_fp32`. For a matmul in fp8: its recipe, or `fp8 layer`. For a
        matmul that cannot run in fp8, or that the filter excludes: the reason, as `allow, not fp8: filter`.
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


class MeasuredOp(NamedTuple):
    """An `ExplainedOp` that was measured: how far its results are from those of float32.

    Both numbers are means over the elements, relative to the mean of what float32 computes, in roundings: half a unit
    in the last place of the 16-bit dtype. inf: infinite or NaN where float32 is not.

    Attributes:
      module, name, written, runs_in, group, count, flops: as in an `ExplainedOp`; a part of the gradient has the group
        `gradient`.
      error: how far the result is off, with all that came before; None if it was not measured.
      added: what the operation itself makes of the rounding of its operands, and of its own.
    """

    module: str
    name: str
    written: str
    runs_in: str
    group: str
    count: int
    flops: int
    error: float | None = None
    added: float | None = None


class Explanation(NamedTuple):
    """The result of `explain_autocast`: rows, and a table when printed.

    In the table, numbered modules with the same operations share a row, with their counts added:
    `Block_[0-47]/Dense_0`. Its last line is `summary()`.

    Attributes:
      rows: one for each kind of operation in each module, in the order they run; if they were measured `MeasuredOp`,
        those that add the largest error first.
      casts: how many values would be cast.
      plan: if the rows were measured, the rows as they are without that: the FLOPs are theirs.
    """

    rows: tuple[Any, ...]
    casts: int
    plan: tuple[ExplainedOp, ...] = ()

    def _planned(self) -> tuple[ExplainedOp, ...]:
        return self.plan or self.rows

    def flops_by_dtype(self) -> dict[str, int]:
        """The floating-point operations in each dtype."""
        totals: dict[str, int] = {}
        for row in self._planned():
            totals[row.runs_in] = totals.get(row.runs_in, 0) + row.flops
        return totals

    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """The floating-point operations of matmuls and convolutions in each dtype, the largest number first."""
        totals = Explanation(tuple(filter(_is_matmul, self._planned())), 0).flops_by_dtype()
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def float32_matmuls(self) -> dict[str, str]:
        """The modules with a matmul in float32, and why: `{"Net/head": "keep_fp32"}`."""
        return {
            row.module: row.group.removeprefix("written: ")
            for row in self._planned()
            if row.runs_in == "float32" and _is_matmul(row)
        }

    def summary(self) -> str:
        """One line: the shares of dtypes in the FLOPs of matmuls, and which modules stay in float32 and why."""
        rows = _grouped(row for row in self._planned() if row.runs_in == "float32" and _is_matmul(row))
        modules = dict.fromkeys(f"{row.module or '(top)'} ({row.group.removeprefix('written: ')})" for row in rows)
        more = [f"and {len(modules) - _SHOWN} more"] if len(modules) > _SHOWN else []
        where = f"; float32: {', '.join([*list(modules)[:_SHOWN], *more])}" if modules else ""
        return f"matmul FLOPs: {_shares(self.matmul_flops_by_dtype())}{where}"

    def __str__(self) -> str:
        if self.plan:
            return f"{self._measured()}\n{self.summary()}"
        titles = ("module", "operation", "count", "written", "runs in", "because of", "MFLOP")
        lines = [
            (r.module or "(top)", r.name, str(r.count), r.written, r.runs_in, r.group, f"{r.flops / 1e6:.3f}")
            for r in _grouped(self.rows)
        ]
        table = tables.columns([titles, *lines], "<<><<<>")
        return f"{table}\n{self.casts} casts; FLOPs: {_shares(self.flops_by_dtype())}\n{self.summary()}"

    __repr__ = __str__

    def _measured(self) -> str:
        titles = ("module", "operation", "runs in", "because of", "MFLOP", "error", "added")
        text = lambda x: "" if x is None else f"{x:.1f}"  # noqa: E731
        lines = [
            (r.module or "(top)", r.name, r.runs_in, r.group, f"{r.flops / 1e6:.3f}", text(r.error), text(r.added))
            for r in self.rows[:_WORST]
            if isinstance(r, MeasuredOp)
        ]
        more = f"... and {len(self.rows) - _WORST} rows that add less\n" if len(self.rows) > _WORST else ""
        table = tables.columns([titles, *lines], "<<<<>>>")
        return f"{table}\n{more}errors in roundings of 16 bits, the worst first"


_WORST = 40  # rows of a measured table
_SHOWN = 8  # modules in a summary


def _shares(flops: dict[str, int]) -> str:
    total = sum(flops.values())
    return ", ".join(f"{100 * n / total:.1f}% in {dtype}" for dtype, n in flops.items() if n) or "none"


def _is_matmul(row: ExplainedOp) -> bool:
    return row.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS


def plan(traced: rewrite.Traced, lists: CastLists, narrow: dict[Place, Any]) -> Explanation:
    """What a traced function does by these lists; `narrow` says what runs its matmuls below 16 bits, or why none."""
    rows = _Rows(narrow)
    traced.tell(rows.record, lists)
    return rows.explanation()


def explain(fn: Callable[..., Any], lists: cast_lists.CastLists, args: Any, kwargs: Any) -> Explanation:
    """What `autocast` with these lists would do with `fn(*args, **kwargs)`; arrays may be `jax.ShapeDtypeStruct`."""
    explanations: list[Explanation] = []

    def explained(pure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            traced = rewrite.Traced(pure, lists, args, kwargs)
            lists.modules.warn_of_idle()
            explanations.append(plan(traced, lists, weighted_matmuls.choices(traced, lists) if lists.chooser else {}))
            with regions.region(cast_lists.OFF):
                return pure(*args, **kwargs)

        return run

    def call(*args: Any, **kwargs: Any) -> None:
        flax_layers.call(fn, explained, args, kwargs)

    def is_input(x: Any) -> bool:
        return array_functions.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)

    inputs = array_functions.Inputs(array_functions.flat_leaves((args, kwargs)), is_input)
    jax.eval_shape(lambda *values: inputs.call(call, values), *inputs.values)
    return explanations[0]


def measure(
    fn: Callable[..., Any], lists: cast_lists.CastLists, args: Any, kwargs: Any, explanation: Explanation, *, grad: bool
) -> Explanation:
    """`found` with what each operation of `fn`, and with `grad` of its gradient, rounds when it runs by these lists."""
    run = rewrite.transformed(fn, lists)
    inputs = array_functions.Inputs(array_functions.flat_leaves((args, kwargs)))
    arrays = [jnp.asarray(x) for x in inputs.values]
    moving = [k for k, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def outputs(*arrays: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(inputs.call(run, arrays)) if array_functions.is_array(x)]

    def gradient(scale: float) -> Callable[..., Any]:
        """That of the sum of all float results, times a scale, without a sum that the function has not."""

        def floats_of(*floats: Any) -> list[Any]:
            out = outputs(*array_functions.with_values(arrays, moving, floats))
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.floating)]

        def run(*floats: Any) -> Any:
            out, pull = jax.vjp(floats_of, *floats)
            return pull([jnp.full_like(x, min(scale, float(jnp.finfo(x.dtype).max))) for x in out])

        return run

    program, operands = outputs, arrays
    if grad:  # scaled as float16 needs it, by the largest scale that does not overflow
        operands = [arrays[k] for k in moving]
        scales = (2.0**16, 2.0**12, 2.0**8, 2.0**4) if lists.dtype == jnp.float16 else ()
        finite = lambda scale: all(jnp.isfinite(x).all() for x in jax.jit(gradient(scale))(*operands))  # noqa: E731
        program = gradient(next(filter(finite, scales), 1.0))
    closed = jax.make_jaxpr(program)(*operands)
    results = (v.aval for eqn in jaxprs.equations(closed) for v in eqn.outvars if hasattr(v.aval, "sharding"))
    types = {kind for aval in results for kind in aval.sharding.mesh.axis_types}
    if {AxisType.Auto, AxisType.Explicit} <= types:  # one by one, operations run on arrays of one kind
        raise ValueError(
            "measure=True needs mesh axes that keep their types; got a call of jax.sharding.auto_axes or "
            "explicit_axes. Measure the function inside."
        )
    measurement = Measurement(lists.dtype or jnp.bfloat16)
    measurement.run(closed, operands)
    known = {(row.module, row.name): row for row in reversed(explanation.rows)}
    rows = []
    for x in measurement.rows():
        same = None if x.in_gradient else known.get((x.module, x.name)) or known.get(("", x.name))
        other = "cast" if x.name == "convert_element_type" else "gradient" if grad else "written"
        group = "gradient" if x.in_gradient else other if same is None else same.group
        written = x.dtype if same is None else same.written
        rows.append(MeasuredOp(x.module, x.name, written, x.dtype, group, x.count, x.flops, x.error, x.added))
    seen = {(row.module, row.name) for row in rows} | {("", row.name) for row in rows}
    # In a program for several devices operations are not measured.
    rest = [MeasuredOp(*row[:7], None, None) for row in explanation.rows if (row.module, row.name) not in seen]  # pyright: ignore
    return Explanation((*rows, *rest), explanation.casts, explanation.rows)


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
    merged = []
    for names in alike.values():
        inside, times = members[names[0]], len(names)
        if not names[0]:
            merged += inside
            continue
        for place, path, row in _alike_as_one(inside):
            row = row._replace(count=times * row.count, flops=times * row.flops)
            merged.append((place, (_ranges(names), *path), row))
    return merged


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


class _Rows:
    """The rows of a table, as a function runs; one equation is told of once from each place."""

    def __init__(self, narrow: dict[Place, Any]):
        self._narrow = narrow
        self._seen: set[Place] = set()
        self._casts: set[Any] = set()
        self._rows: dict[tuple[str, str, str, str, str], list[int]] = {}

    def explanation(self) -> Explanation:
        """What was recorded."""
        rows = tuple(ExplainedOp(*key, count, flops) for key, (count, flops) in self._rows.items())
        return Explanation(rows, len(self._casts))

    def record(self, eqn: Any, operands: list[Value], choice: Choice, results: list[Value], at: At) -> None:
        """Records one equation."""
        if at.place in self._seen or choice.how == "call":
            return
        self._seen.add(at.place)
        if choice.how == "loop":  # its carry begins in 16 bits
            key = regions.scope_of(at.stack), eqn.primitive.name, "float32", "float32", choice.group
            self._count(key, at.times, 0)
            return
        for k, (atom, v) in enumerate(zip(eqn.invars, operands, strict=True)):
            dtype = atom.aval.dtype if choice.how == "written" else choice.operand(k, v)
            if not isinstance(atom, core.Literal) and dtype in FLOATS and v.dtype in FLOATS and v.dtype != dtype:
                self._casts.add((at.place[:-1], atom, dtype))
        module = _without_repeats(regions.scope_of(at.stack))
        matmuls = _matmuls_inside(eqn, module, at.times) if choice.how in ("written", "again") else []
        if matmuls:
            self._add_parts(eqn, choice, at, module, matmuls)
        elif choice.how != "same" and _is_worth_a_row(eqn):
            self._add(eqn, operands, choice, results, at, module)

    def _add(self, eqn: Any, operands: Any, choice: Choice, results: Any, at: At, module: str, less: int = 0) -> None:
        written = [v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars) if v.aval.dtype in FLOATS]
        group, runs_in = _group_of(eqn, choice, at.lists), written[0]
        if choice.how != "written":
            dtypes = (*(choice.operand(k, v) for k, v in enumerate(operands)), *(v.dtype for v in results))
            runs_in = next((d.name for d in dtypes if d in FLOATS), runs_in)
        narrow = self._narrow.get(at.place)
        if narrow is not None and not isinstance(narrow, str):
            runs_in, group = narrow.dtype_name, narrow.reason
        elif narrow is not None and group == "allow":
            group = f"{group}, not fp8: {narrow}"
        self._count(
            (module, jaxprs.function_name(eqn), written[0], runs_in, group),
            at.times,
            at.times * jaxprs.flops_of(eqn) - less,
        )

    def _add_parts(self, eqn: Any, choice: Choice, at: At, module: str, matmuls: "list[_Matmul]") -> None:
        """A row for each matmul in a function, and one for the rest of it, which for a product in fp8 are casts."""
        for x in matmuls:
            inner = x.product
            dtypes = [v.aval.dtype for v in inner.invars if v.aval.dtype in FLOATS][:2]
            dtypes = dtypes or [v.aval.dtype for v in inner.invars[:2]]  # integers, float64
            written = max(dtypes, key=lambda d: d.itemsize).name
            group = "fp8 layer" if x.narrow else _group_of(x.eqn, choice, at.lists)
            path = module if x.narrow else x.module
            flops = jaxprs.flops_of(x.eqn)
            is_alone = sum(other.product is inner for other in matmuls) == 1
            if x.narrow and is_alone and hasattr(inner.params.get("fun"), "flops"):  # inside, it may be padded
                flops = inner.params["fun"].flops(inner.invars[0].aval.shape, inner.outvars[0].aval.shape)
            self._count((path, x.eqn.primitive.name, written, x.narrow or written, group), x.times, x.times * flops)
        if not any(x.narrow for x in matmuls):
            self._add(eqn, [], choice, [], at, module, less=sum(x.times * jaxprs.flops_of(x.eqn) for x in matmuls))

    def _count(self, key: tuple[str, str, str, str, str], times: int, flops: int) -> None:
        counts = self._rows.setdefault(key, [0, 0])
        counts[0] += times
        counts[1] += flops


def _is_worth_a_row(eqn: Any) -> bool:
    floats = [v for v in (*eqn.invars, *eqn.outvars) if getattr(v.aval, "dtype", None) in FLOATS]
    return bool(floats) and not (eqn.primitive.name in cast_lists.MOVES and eqn.primitive.name not in ("max", "min"))


def _group_of(eqn: Any, choice: Choice, lists: CastLists) -> str:
    """The list that decided about an equation, or about one in a function, with the reason where none did."""
    is_matmul = eqn.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS
    if choice.how not in ("written", "again"):
        return f"{choice.group}, {lists.because}" if lists.because and is_matmul else choice.group
    if choice.group != "written":  # a list that names a function
        return choice.group
    reason = lists.because
    if lists.dtype is not None and is_matmul:
        reason = "precision=HIGHEST" if jaxprs.is_highest(eqn.params["precision"]) else "asks for its dtype"
    return f"written: {reason}" if reason else "written"


class _Matmul(NamedTuple):
    """A matmul in a function that runs as it was written.

    Attributes:
      module: its module or named scope.
      eqn: the equation.
      times: how often it runs.
      narrow: the dtype below 16 bits in which it multiplies, or None.
      product: the equation whose operands it multiplies: itself, or that of the fp8 product that it is in.
    """

    module: str
    eqn: Any
    times: int
    narrow: str | None
    product: Any


def _matmuls_inside(eqn: Any, module: str, times: int) -> list[_Matmul]:
    """The matmuls of the functions in an equation, at any depth; of a choice by platform, those for a GPU."""
    narrow, functions = None, functions_of(eqn)
    if eqn.primitive.name in (vmap_rules.NAME, "custom_vjp_call"):
        narrow = _narrow_dtype(functions)
    if eqn.params.get("branches_platforms") is not None:
        functions = functions[:1]
    repeats = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    matmuls = []
    for function in functions:
        for inner in function.jaxpr.eqns:
            here = "/".join(part for part in (module, regions.scope_of(str(inner.source_info.name_stack))) if part)
            if inner.primitive.name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
                matmuls.append(_Matmul(here, inner, repeats, None, inner))
            matmuls += _matmuls_inside(inner, here, repeats)
    return [x._replace(narrow=narrow, product=eqn) for x in matmuls] if narrow else matmuls


def _narrow_dtype(functions: Any) -> str | None:
    """The dtype below 16 bits in which functions hold operands: the narrowest that they cast to, and none of scales."""
    casts = (e for f in functions for e in jaxprs.equations(f.jaxpr) if e.primitive.name == "convert_element_type")
    dtypes = {e.params["new_dtype"] for e in casts} - {np.dtype(jnp.float8_e8m0fnu)}
    narrow = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 16]
    return min(narrow, key=lambda d: (jnp.finfo(d).bits, d.name)).name if narrow else None


def _without_repeats(path: str) -> str:
    """A path; that of an fp8 layer, which linen calls in a scope of its own name, with this name once."""
    return "/".join(name for name, _ in itertools.groupby(path.split("/"))) if "/Fp8" in path else path
