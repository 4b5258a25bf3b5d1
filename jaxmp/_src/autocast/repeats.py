"""Finds the layers that a plan repeats, so that each is traced and differentiated once.

A model of 48 equal layers has 48 equal pieces in its plan. jax differentiates operation by operation, which is most of
what a trace costs; but it differentiates a jitted function once, however often it is called. So the runner makes one
function of equal pieces, which jax writes out again where it is called: the program is the same.

A piece is a range of steps. Two pieces are equal if their steps are, one by one, and read the same values of the piece
and its operands in the same places. Where a layer begins does not show in a plan; any beginning is as good that cuts
few values.

Equal programs need equal sums. Backwards, a value gets the sum of the gradients from its readers, one after the other,
the last reader first. A function of several readers sums theirs first. So a piece may hold several readers of a value
from outside only if no reader comes after them.
"""

import collections
import types
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxmp._src.autocast import regions
from jaxmp._src.autocast.cast_lists import FLOATS
from jaxmp._src.autocast.planner import WEIGHTS, Plan, Step
from jaxmp._src.programs import module_paths

_LEAST = 8  # steps: below, a call costs as much as it saves
_CANDIDATES = 8  # how many distances between equal steps, and beginnings of a piece, are tried

Read = tuple[Any, Any]  # a variable, and the dtype it is cast to; None: as it is


class Piece(NamedTuple):
    """Steps of a plan that run as one function.

    Attributes:
      steps: these steps.
      scopes: the name stack of each, without what all have in common.
      scope: what the name stacks have in common.
      inputs: what the function takes.
      wide: the weights among them whose gradients are summed in float32, each with the place of its first read.
      outputs: what it returns: all that is read after it.
      key: equal for pieces that are the same function of their inputs.
    """

    steps: tuple[Step, ...]
    scopes: tuple[str, ...]
    scope: str
    inputs: tuple[Read, ...]
    wide: tuple[tuple[int, Any], ...]
    outputs: tuple[Read, ...]
    key: Hashable


def scope_of(step: Step) -> str:
    """The name stack in which a step runs; what runs as it was written keeps its regions."""
    stack = str(step.eqn.source_info.name_stack)
    return module_paths.without_chosen(stack) if step.how == "written" else regions.scope_of(step.eqn)


def find(
    plan: Plan, consts: Sequence[Any], dtypes: dict[Any, Any], wide: Container[Any]
) -> list[tuple[int, int, Piece | None]]:
    """The steps of a plan in their order, as (first, last + 1, the piece they are); None for steps of no piece.

    `dtypes` are those that its variables have when it runs; `wide` has those inputs that have a float32 array beside
    them, for their gradients.
    """
    found: list[tuple[int, int, Piece | None]] = []
    place = 0
    if len(plan.steps) >= 2 * _LEAST:
        function = _Function(plan, consts, dtypes, wide)
        for piece, first, last in function.pieces():
            found += [(place, first, None)] if place < first else []
            found.append((first, last, piece))
            place = last
    return [*found, (place, len(plan.steps), None)]


class _Function:
    """A plan, and who reads what in it."""

    def __init__(self, plan: Plan, consts: Sequence[Any], dtypes: dict[Any, Any], wide: Container[Any]):
        self.plan = plan
        self.wide = _made_of(plan, wide)
        self.reads = [_reads(step, dtypes) for step in plan.steps]
        # Places where a value is read; the first read in another dtype casts it, and so reads the value itself.
        self.places: dict[Any, dict[Any, list[int]]] = collections.defaultdict(dict)
        for i, reads in enumerate(self.reads):
            for v, dtype in reads:
                if dtype is not None and dtype not in self.places[v]:
                    self.places[v].setdefault(None, []).append(i)
                self.places[v].setdefault(dtype, []).append(i)
        for v in plan.jaxpr.outvars:
            if not isinstance(v, core.Literal):
                self.places[v].setdefault(None, []).append(len(plan.steps))
        self.moving = _moving(plan, consts)
        labels: dict[Hashable, int] = {}
        self.labels = [labels.setdefault(_label(step, plan), len(labels)) for step in plan.steps]

    def pieces(self) -> Iterator[tuple[Piece, int, int]]:
        """Pieces that are equal to others, with their places."""
        for start, stop, period in _periods(self.labels, 0, len(self.labels)):
            yield from max(self._cuts(start, stop, period), key=len, default=[])

    def _cuts(self, start: int, stop: int, period: int) -> Iterator[list[tuple[Piece, int, int]]]:
        """The pieces of a stretch for some beginnings, those that cut few values."""
        cut = dict.fromkeys(range(start, start + period), 0)
        for i in range(start, start + period):
            for v in self.plan.steps[i].eqn.outvars:
                last = max((places[-1] for places in self.places[v].values()), default=i)
                for k in range(i + 1, min(last, i + period) + 1):
                    cut[start + (k - start) % period] += 1
        for first in sorted(cut, key=lambda k: cut[k])[:_CANDIDATES]:
            ends = range(first + period, stop + 1, period)
            made = [(self._piece(end - period, end), end - period, end) for end in ends]
            keys = collections.Counter(piece.key for piece, _, _ in made if piece is not None)
            found = [(piece, a, b) for piece, a, b in made if piece is not None and keys[piece.key] > 1]
            yield found
            if len(found) >= len(made) - 2:  # the first and the last may differ
                return

    def _piece(self, first: int, last: int) -> Piece | None:
        """The steps from `first` to `last`; None if their function would add gradients in another order."""
        steps = self.plan.steps[first:last]
        inside = {v: (i, k) for i, step in enumerate(steps) for k, v in enumerate(step.eqn.outvars)}
        inputs: dict[Read, int] = {}
        operands = [
            tuple((*inside[v], dtype) if v in inside else inputs.setdefault((v, dtype), len(inputs)) for v, dtype in r)
            for r in self.reads[first:last]
        ]
        if not all(self._adds_in_order(read, first, last) for read in inputs):
            return None
        outputs: dict[Read, tuple[int, int, Any]] = {}
        for v, place in inside.items():
            for dtype, places in self.places[v].items():
                if places[-1] >= last and (dtype is None or places[0] < last):
                    outputs[v, dtype] = (*place, dtype)
        scopes = [scope_of(step).split("/") for step in steps]
        common = _common(scopes)
        inner = tuple("/".join(scope[len(common) :]) for scope in scopes)
        places = {v: place for (v, _), place in reversed(inputs.items()) if v in self.wide}
        wide = tuple((place, v) for v, place in places.items())
        key = (tuple(self.labels[first:last]), tuple(operands), tuple(places.values()), tuple(outputs.values()), inner)
        return Piece(steps, inner, "/".join(common), tuple(inputs), wide, tuple(outputs), key)

    def _adds_in_order(self, read: Read, first: int, last: int) -> bool:
        v, dtype = read
        if v not in self.moving:
            return True
        if v in self.wide:  # each reader may return a gradient to the float32 array
            found = sorted({i for places in self.places[v].values() for i in places})
            return _count(found, first, last) == 1 or found[-1] < last
        places, of_itself = self.places[v][dtype], self.places[v][None]
        if _count(places, first, last) > 1 and places[-1] >= last:
            return False
        if dtype is None or places[0] < first:
            return True
        # The cast comes before the function now: before its other readers of the value, so at most one, the last.
        return _count(of_itself, first, last) == 1 or (_count(of_itself, first, last) == 2 and of_itself[-1] < last)


def _count(places: list[int], first: int, last: int) -> int:
    return sum(first <= place < last for place in places)


def _reads(step: Step, dtypes: dict[Any, Any]) -> list[Read]:
    """The variables a step reads, each with the dtype it is cast to."""
    pairs = zip(step.eqn.invars, step.operands, strict=True)
    return [(v, None if dtypes[v] == d else d) for v, d in pairs if not isinstance(v, core.Literal)]


def _moving(plan: Plan, consts: Sequence[Any]) -> set[Any]:
    """The floats that may have gradients."""
    moving = {v for v in plan.jaxpr.invars if getattr(v.aval, "dtype", None) in FLOATS}
    moving |= {v for v, x in zip(plan.jaxpr.constvars, consts, strict=True) if isinstance(x, Tracer)}
    for step in plan.steps:
        if any(not isinstance(v, core.Literal) and v in moving for v in step.eqn.invars):
            moving |= {v for v in step.eqn.outvars if getattr(v.aval, "dtype", None) in FLOATS}
    return moving


def _made_of(plan: Plan, wide: Container[Any]) -> set[Any]:
    """The variables that may have a float32 array beside them: `wide` inputs, and what is made of weights alone."""
    found = {v for v in plan.jaxpr.invars if v in wide}
    if found:
        pairs = ((v, x) for step in plan.steps for v, x in zip(step.eqn.outvars, step.results, strict=True))
        found |= {v for v, x in pairs if x.made_of == WEIGHTS}
    return found


def _label(step: Step, plan: Plan) -> Hashable:
    """All that a step is, without its place and the variables it reads and makes; equal to no other if unknown."""
    eqn = step.eqn
    inner = tuple((function.jaxpr, function.key) for function in step.inner)
    lists = step.lists if step.how == "call" else None
    operands = tuple((_exact(v.val), v.aval) if isinstance(v, core.Literal) else v.aval for v in eqn.invars)
    made_of = tuple(value.made_of for value in step.results)
    results = tuple((v.aval, v in plan.rounded) for v in eqn.outvars)
    params = tuple((name, _exact(x)) for name, x in sorted(eqn.params.items()))
    about = (eqn.primitive, eqn.ctx, params, operands, results)
    label = (about, step.how, step.operands, step.results, made_of, step.weights, inner, lists, step.narrow)
    try:
        hash(label)
    except TypeError:
        return object()
    return object() if eqn.effects else label


def _exact(x: Any) -> Any:
    """A parameter or a literal for comparisons: 0.0 is not -0.0, and a method of equal objects is equal."""
    if isinstance(x, (bool, int, float, complex, np.generic, np.ndarray)):
        return type(x), repr(x) if np.ndim(x) == 0 else object()
    return (x.__func__, x.__self__) if isinstance(x, types.MethodType) else x


def _periods(labels: list[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of equal pieces, one behind the other: (first, last + 1, length of a piece)."""
    if last - first < 2 * _LEAST:
        return
    before: dict[int, int] = {}
    distances: collections.Counter[int] = collections.Counter()
    for i in range(first, last):
        if labels[i] in before:
            distances[i - before[labels[i]]] += 1
        before[labels[i]] = i
    best = (0, first, 0)  # steps equal to those a period on, the first of them, the period
    for period, _ in distances.most_common(_CANDIDATES):
        start = first
        for i in range(first, last - period + 1):
            if i == last - period or labels[i] != labels[i + period]:
                if period >= _LEAST and i - start >= period:
                    best = max(best, (i - start, start, period), key=lambda found: (found[0], -found[2]))
                start = i + 1
    length, start, period = best
    if not length:
        return
    stop = start + length + period
    yield from _periods(labels, first, start)
    yield start, stop, period
    yield from _periods(labels, stop, last)


def _common(scopes: list[list[str]]) -> list[str]:
    """The parts that all name stacks begin with."""
    shortest = min(scopes, key=len)
    return next((shortest[:i] for i, part in enumerate(shortest) if any(s[i] != part for s in scopes)), shortest)
