"""The matmuls of a traced function, by the dtypes of their operands."""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax


def matmuls(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """`matmuls_in` the trace of a function."""
    return matmuls_in(jax.make_jaxpr(fn)(*args))


def matmuls_in(closed: Any) -> dict[str, int]:
    """How many matmuls and convolutions there are of each pair of dtypes, forward and backward, written once each.

    Emulation of fp8 (the branch of a `lax.platform_dependent` for other devices) does not count.
    """
    return _counted(closed, lambda eqn, times: 1)


def matmul_flops(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """The floating-point operations of these matmuls, those of a loop as often as it runs: 2 m n k for each."""

    def flops(eqn: Any, times: int) -> int:
        rhs, out = eqn.invars[1].aval, eqn.outvars[0].aval
        if eqn.primitive.name == "dot_general":
            summed = math.prod(rhs.shape[i] for i in eqn.params["dimension_numbers"][0][1])
        else:
            summed = rhs.size // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * times * out.size * summed

    return _counted(jax.make_jaxpr(fn)(*args), flops)


def _counted(closed: Any, count: Callable[[Any, int], int]) -> dict[str, int]:
    """Sums over the matmuls of each pair of dtypes; `count` gets an equation and how often it runs."""
    found: collections.Counter = collections.Counter()

    def walk(jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found["x".join(sorted({v.aval.dtype.name for v in eqn.invars}))] += count(eqn, times)
            params = dict(eqn.params)
            if params.get("branches_platforms") is not None:
                params["branches"] = params["branches"][:1]
            for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner), times * params.get("length", 1))

    walk(closed.jaxpr, 1)
    return dict(found)
