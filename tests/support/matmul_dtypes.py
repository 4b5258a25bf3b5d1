"""The matmuls of a traced function, by the dtypes of their operands."""

import collections
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
    found: collections.Counter = collections.Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found["x".join(sorted({v.aval.dtype.name for v in eqn.invars}))] += 1
            params = dict(eqn.params)
            if params.get("branches_platforms") is not None:
                params["branches"] = params["branches"][:1]
            for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(closed.jaxpr)
    return dict(found)
