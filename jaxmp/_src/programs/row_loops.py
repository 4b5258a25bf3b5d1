"""Runs a part of a program that is elementwise in large arrays, a few rows at a time.

The params of a stack of layers are one array, [layers, ...], and so are its moments: for `windows` that is one window,
as large as the model. If all computation is elementwise, as in Adam and most optimizers, a loop can process the rows
one after the other: it slices them out of host memory, computes, and writes them back to the same place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._src.devices import host_memory
from jaxmp._src.programs import jaxprs
from pallas_kernels.by_platform import by_platform


class Rows(NamedTuple):
    """An elementwise part of a program, and sums over all of its elements.

    Attributes:
      eqns: its equations, in order.
      wide: variables with rows that it reads.
      whole: scalars that it reads.
      summed: for each target None, or the variable with rows whose sum it is.
    """

    eqns: list[Any]
    wide: list[Any]
    whole: list[Any]
    summed: list[Any]


def find(jaxpr: Any, makers: dict[Any, int], targets: list[Any], held: dict[Any, Any], late: set[Any]) -> Rows | None:
    """How to compute `targets` by rows, or None.

    Args:
      jaxpr: a program without calls.
      makers: the number of the equation that computes each variable.
      targets: variables of one shape [n, ...], the first of them and all others; or sums of such variables.
      held: variables that have values.
      late: variables that depend on arrays which are not copied in yet.
    """
    shape = targets[0].aval.shape
    summed = [_summed(jaxpr, makers, v) if v.aval.shape != shape else None for v in targets]
    made = [v if of is None else of for v, of in zip(targets, summed, strict=True)]
    if not shape or any(v.aval.shape != shape for v in made):
        return None
    todo, wide, whole = set(), {}, {}
    open_ = list(made)
    while open_:
        v = open_.pop()
        if v.aval.shape == ():
            if v in late and v not in held:
                return None
            whole[v] = None
        elif v.aval.shape != shape:
            return None
        elif v in held:
            wide[v] = None
        elif _is_elementwise(jaxpr.eqns[makers[v]]):
            if makers[v] not in todo:
                todo.add(makers[v])
                operands = jaxpr.eqns[makers[v]].invars
                open_ += [x for x in operands if not isinstance(x, core.Literal)]
        elif v in late:
            return None
        else:
            wide[v] = None
    return Rows([jaxpr.eqns[i] for i in sorted(todo)], list(wide), list(whole), summed)


def _summed(jaxpr: Any, makers: dict[Any, int], v: Any) -> Any:
    """The variable whose elements `v` sums up; `v` itself if it is no such sum."""
    if v not in makers or v.aval.shape != ():
        return v
    eqn = jaxpr.eqns[makers[v]]
    is_sum = eqn.primitive.name == "reduce_sum" and not isinstance(eqn.invars[0], core.Literal)
    return eqn.invars[0] if is_sum else v


def run(rows: Rows, targets: list[Any], into: list[Any], held: dict[Any, Any], count: int) -> list[Any]:
    """The values of `targets`, `count` rows at a time.

    Args:
      rows: from `find`; `held` has all variables that it reads.
      targets: variables.
      into: for each target that is no sum the variable whose array it replaces; of the same shape, dtype and memory.
      held: values of variables.
      count: a divisor of the number of rows.
    """
    shape = targets[0].aval.shape
    others = {v: held[v] for v in rows.wide if v not in into}
    whole = {v: held[v] for v in rows.whole}

    arrays_made = [v for v, of in zip(targets, rows.summed, strict=True) if of is None]
    sums_of = [of for of in rows.summed if of is not None]

    def turn(i: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        replaced, sums = carry

        def cut(x: Any) -> Any:
            return lax.dynamic_slice_in_dim(x, i * count, count)

        before = dict(zip(into, replaced, strict=True))
        known = whole | {v: cut(before.get(v, others.get(v))) for v in rows.wide}
        for eqn in rows.eqns:
            operands = [v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim":
                results = [jnp.broadcast_to(operands[0], (count, *shape[1:]))]
            else:
                results = _bound(eqn, operands)
            known |= dict(zip(eqn.outvars, results, strict=True))
        new = [known[v] for v in arrays_made]
        sums = [total + jnp.sum(known[v]) for total, v in zip(sums, sums_of, strict=True)]
        return [lax.dynamic_update_slice_in_dim(x, n, i * count, 0) for x, n in zip(replaced, new, strict=True)], sums

    zeros = [jnp.zeros((), v.aval.dtype) for v in sums_of]
    arrays, sums = lax.fori_loop(0, shape[0] // count, turn, ([held[v] for v in into], zeros))
    made, totals = iter(arrays), iter(sums)
    return [next(made) if of is None else next(totals) for of in rows.summed]


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` that is not above `most`, at least 1."""
    return max((i for i in range(1, n + 1) if n % i == 0 and i <= most), default=1)


def _bound(eqn: Any, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name == "device_put":  # one array, to the other memory
        (x,) = operands
        on_host = eqn.outvars[0].aval.memory_space == jax.memory.Space.Host
        return [host_memory.to_host(x) if on_host else host_memory.to_device(x)]
    if eqn.primitive.name == jaxprs.BY_PLATFORM:  # its function names the shape of all rows
        return by_platform(lambda x: [x], *operands, **eqn.params["ways"].by_name)
    results = eqn.primitive.bind(*operands, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _is_elementwise(eqn: Any) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.invars[0].aval.shape == ()
    if eqn.primitive.name == jaxprs.BY_PLATFORM:  # one array as it came, as in `written`
        return len(eqn.invars) == 1 and eqn.params["jaxpr"].outvars == eqn.params["jaxpr"].invars
    return jaxprs.is_elementwise(eqn)
