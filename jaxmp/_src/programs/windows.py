"""Runs a function of arrays in host memory, a few arrays at a time.

An optimizer is one function of all its params and moments. If these are in host memory and XLA compiles the function
unchanged, XLA may copy all of them to the device first; on GPUs it does so, to hide the time of copying. So this file
traces the function to a jaxpr and cuts it into windows:

    window 0:  copy in its arrays -> compute its results -> copy them out
    window 1:  the same, at the same time: one window comes in while the one before it goes out
    window k:  may not begin before window k - 2 has gone out        (an `optimization_barrier` says so)

A window holds the results of some params and everything that only they need. Other results that can be computed from
the arrays copied in so far (the moments of those params, a step count) are computed in it too. So every array is copied
in once and out once. If a function needs all of its arrays for one result (for example, a norm over all Adam updates),
all of them are on the device: the result is right, but no memory is saved.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.devices import host_memory
from jaxmp._src.numerics import reductions
from jaxmp._src.programs import jaxprs

_IN_FLIGHT = 2


class Window(NamedTuple):
    """Results that are computed together.

    Attributes:
      inputs: which inputs of the function are copied in for it.
      results: which results of the function are computed.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]


def run(
    f: Callable[..., tuple[list[PyTree], PyTree]],
    *args: PyTree,
    window_bytes: int,
) -> tuple[list[PyTree], PyTree]:
    """`f(*args)`, window by window.

    Args:
      f: returns (parts, rest): a part for each param, in the order in which they are to be computed, and all other
        results. It copies its arguments to the device (`host_memory.to_device`) and its results to their place.
      *args: pytrees of arrays.
      window_bytes: how much is copied in from host memory for one window; a part that needs more has its own window.

    Returns:
      The result of `f`.
    """
    leaves, treedef = jax.tree.flatten(args)
    structure: Any = None
    widths: list[int] = []

    def flat(*leaves: Any) -> list[Any]:
        nonlocal structure
        parts, rest = f(*treedef.unflatten(leaves))
        widths.extend(len(jax.tree.leaves(part)) for part in parts)
        results, structure = jax.tree.flatten((parts, rest))
        return results

    avals = [jax.typeof(x) for x in leaves]
    traced = jax.make_jaxpr(flat)(*avals)
    jaxpr, consts = jaxprs.open_jaxpr(jax.make_jaxpr(lambda *leaves: _inlined(traced, leaves))(*avals))
    starts = [sum(widths[:i]) for i in range(len(widths) + 1)]
    parts = [tuple(range(a, b)) for a, b in itertools.pairwise(starts)]
    sizes = [x.size * x.dtype.itemsize if host_memory.is_on_host(x) else 0 for x in leaves]
    windows = plan(jaxpr, sizes, parts, window_bytes)
    held = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, leaves, strict=True))
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    results: list[Any] = [None] * len(jaxpr.outvars)
    gone_out: list[list[Any]] = []
    for number, window in enumerate(windows):
        if number >= _IN_FLIGHT and window.inputs:
            wanted = [jaxpr.invars[i] for i in window.inputs]
            waited, _ = lax.optimization_barrier(([held[v] for v in wanted], gone_out[number - _IN_FLIGHT]))
            held |= dict(zip(wanted, waited, strict=True))
        _compute(jaxpr, makers, [jaxpr.outvars[i] for i in window.results], held)
        for i in window.results:
            atom = jaxpr.outvars[i]
            results[i] = atom.val if isinstance(atom, core.Literal) else held[atom]
        # Results that stay on the device too: else XLA computes them last and keeps their operands until then.
        gone_out.append([results[i] for i in window.results])
    return jax.tree.unflatten(structure, results)


def plan(jaxpr: Any, sizes: list[int], parts: list[tuple[int, ...]], window_bytes: int) -> list[Window]:
    """The windows of a function; each result is in one of them.

    Args:
      jaxpr: the function.
      sizes: bytes to copy in for each input; 0 if it is on the device.
      parts: which results belong together, in order; all others are computed as soon as their inputs are there.
      window_bytes: as for `run`.
    """
    known = _dependencies(jaxpr, sizes)
    needs = [0 if isinstance(v, core.Literal) else known.get(v, 0) for v in jaxpr.outvars]
    others = [i for i in range(len(jaxpr.outvars)) if not any(i in part for part in parts)]
    windows: list[Window] = []
    copied = 0  # the inputs that were copied in, as bits, as in `needs`
    opened, results = 0, []
    for number, part in enumerate(parts):
        for i in part:
            opened |= needs[i] & ~copied
        results += part
        following = 0
        if number + 1 < len(parts):
            for i in parts[number + 1]:
                following |= needs[i] & ~copied & ~opened
        if number + 1 == len(parts) or _total(sizes, opened) + _total(sizes, following) > window_bytes:
            copied |= opened
            results += [i for i in others if not needs[i] & ~copied]
            others = [i for i in others if needs[i] & ~copied]
            windows.append(Window(_bits(opened), tuple(results)))
            opened, results = 0, []
    if others:
        left = 0
        for i in others:
            left |= needs[i] & ~copied
        windows.append(Window(_bits(left), tuple(others)))
    return windows


def _inlined(closed: Any, values: Any) -> list[Any]:
    """The results of a program, traced without the calls in it.

    Functions over whole trees are often jitted (`optax.tree.bias_correction`), and a call needs all its operands.
    """

    def results(_: int, eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name in jaxprs.JITS:  # other calls have rules for derivatives, which writing out would lose
            return _inlined(eqn.params[jaxprs.body_name(eqn)], operands)
        return jaxprs.run_as_traced(eqn, operands)

    return jaxprs.evaluate(jaxprs.open_jaxpr(closed), values, results)


def _dependencies(jaxpr: Any, sizes: list[int]) -> dict[Any, int]:
    """For each variable the inputs with a size that it is computed from, as the bits of an integer."""
    known = {v: 1 << i for i, v in enumerate(jaxpr.invars) if sizes[i]}
    for eqn in jaxpr.eqns:
        bits = 0
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                bits |= known.get(v, 0)
        if bits:
            known |= dict.fromkeys(eqn.outvars, bits)
    return known


def _bits(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(number.bit_length()) if number >> i & 1)


def _total(sizes: list[int], bits: int) -> int:
    return sum(sizes[i] for i in _bits(bits))


def _compute(jaxpr: Any, makers: dict[Any, int], wanted: list[Any], held: dict[Any, Any]) -> None:
    """Puts the values of `wanted`, and of everything they depend on, into `held`."""
    todo: set[int] = set()
    open_ = [v for v in wanted if not isinstance(v, core.Literal) and v not in held]
    while open_:
        number = makers[open_.pop()]
        if number in todo:
            continue
        todo.add(number)
        operands = jaxpr.eqns[number].invars
        open_ += [v for v in operands if not isinstance(v, core.Literal) and v not in held]
    eqns = [jaxpr.eqns[i] for i in sorted(todo)]
    run_eqns, operands, outputs = jaxprs.as_program(eqns)
    held |= dict(zip(outputs, run_eqns(*(held[v] for v in operands)), strict=True))


def unusable_and_largest(grads: PyTree, inv_scale: Any) -> tuple[Bool[Array, ""], Float[Array, ""]]:
    """`reductions.unusable_and_largest` of gradients in host memory; a few are on the device at a time."""

    def look(leaves: list[Any]) -> tuple[list[Any], None]:
        return [reductions.unusable_and_largest([g], inv_scale) for g in host_memory.to_device(leaves)], None

    flag, _ = run(look, jax.tree.leaves(grads), window_bytes=2**28)
    bad, largest = zip(*flag, strict=True)
    return functools.reduce(jnp.logical_or, bad), functools.reduce(jnp.maximum, largest)
