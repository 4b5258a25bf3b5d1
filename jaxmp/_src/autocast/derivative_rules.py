"""Functions with a derivative rule of their own (`jax.custom_jvp`, `jax.custom_vjp`), and their rules.

A rule expects the dtypes in which its function was written. So it is traced once more in these, and run like any
function, by the dtypes that arrive. A rule with `symbolic_zeros=True` gets arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.autocast import attention, values
from jaxmp._src.autocast.biases import find_biases
from jaxmp._src.autocast.cast_lists import FLOAT32, FLOATS, CastLists
from jaxmp._src.autocast.value_uses import find_uses
from jaxmp._src.autocast.values import WEIGHTS, Value, cast
from jaxmp._src.programs import jaxprs
from jaxmp._src.programs.array_functions import with_values


def custom_jvp(interpreter: Any, eqn: Any, function: Any, operands: list[Value], at: Any, uses: Any) -> list[Any]:
    """The results of a `jax.custom_jvp`, with its rule."""
    if any(v.made_of == WEIGHTS for v in operands):  # devices sum gradients: the rule's transpose has their products
        return custom_vjp(interpreter, eqn, function, operands, at, uses)
    run, (arrays, _) = interpreter.function(function, operands, at.function(0), uses)
    closed, floats = arrays[: eqn.params["num_consts"]], _moving(eqn)
    call = jax.custom_jvp(lambda *xs: tuple(run(([*closed, *xs], {}))))

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        def along(primals: Any, tangents: Any) -> Any:
            fn = lambda *xs: _split(eqn, with_values(primals, floats, xs))[0]  # noqa: E731
            return jax.jvp(fn, [primals[k] for k in floats], tangents)[1]

        out, traced = call(*primals), [v.aval.dtype for v in eqn.invars]
        arguments = [[*closed, *primals], [tangents[k - len(closed)] for k in floats]]
        moved = iter(_run_rule(along, arguments, [*traced, *(traced[k] for k in floats)], at.lists)[0])
        pairs = zip(out, eqn.outvars, strict=True)
        zeros = lambda x: np.zeros(np.shape(x), jax.dtypes.float0)  # noqa: E731
        return out, tuple(cast(next(moved), x.dtype) if v.aval.dtype in FLOATS else zeros(x) for x, v in pairs)

    return list(call(*arrays[len(closed) :]))


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """What the backward pass needs: arrays, and the static part that puts them together."""

    def __init__(self, arrays: Any, static: Any):
        self.arrays, self.static = arrays, static

    def tree_flatten(self) -> Any:
        return tuple(self.arrays), self.static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "_Residuals":
        return cls(list(arrays), static)


def custom_vjp(interpreter: Any, eqn: Any, function: Any, operands: list[Value], at: Any, uses: Any) -> list[Any]:
    """The results of a `jax.custom_vjp`, with its rule."""
    run, (arrays, wide) = interpreter.function(function, operands, at.function(0), uses)
    closed, floats = arrays[: eqn.params["num_consts"]], _moving(eqn)
    wide = {k: x for k, x in wide.items() if k in floats}
    call = jax.custom_vjp(lambda arrays, wide: tuple(run(([*closed, *arrays], wide))))
    dtypes = [x.dtype for x in jax.eval_shape(run, (arrays, wide))]

    def forward(arrays: Any, wide: Any) -> Any:
        del wide

        def pulled(arrays: Any) -> Any:
            fn = lambda *xs: _split(eqn, with_values(arrays, floats, xs))  # noqa: E731
            out, pull, rest = jax.vjp(fn, *(arrays[k] for k in floats), has_aux=True)
            return out, rest, pull

        (out, rest, pull), shapes = _run_rule(
            pulled, [[*closed, *arrays]], [v.aval.dtype for v in eqn.invars], at.lists
        )
        leaves, treedef = jax.tree.flatten(pull)
        out, rest = iter(out), iter(rest)
        results = [next(out if v.aval.dtype in FLOATS else rest) for v in eqn.outvars]
        static = treedef, tuple(x.dtype for x in jax.tree.leaves(shapes[2]))
        return tuple(map(cast, results, dtypes)), _Residuals(leaves, static)

    def backward(residuals: Any, cotangents: Any) -> Any:
        treedef, traced = residuals.static
        outputs = _floats(eqn.outvars)
        arguments = [residuals.arrays, [cotangents[k] for k in outputs]]
        traced = [*traced, *(eqn.outvars[k].aval.dtype for k in outputs)]
        pulled = lambda leaves, cotangents: jax.tree.unflatten(treedef, leaves)(cotangents)  # noqa: E731
        cotangents_of_operands, _ = _run_rule(
            pulled, arguments, traced, at.lists, tuple(operands[k].made_of == WEIGHTS for k in floats)
        )
        grads: list[Any] = [None] * len(arrays)
        of_wide: dict[int, Any] = dict.fromkeys(wide)
        for k, g in zip(floats, cotangents_of_operands, strict=True):
            if k in wide:
                of_wide[k] = cast(g, FLOAT32)
            else:
                grads[k] = cast(g, arrays[k].dtype)
        return grads[len(closed) :], of_wide

    call.defvjp(forward, backward)
    return list(call(arrays[len(closed) :], wide))


def _moving(eqn: Any) -> list[int]:
    """The operands with derivatives: floats that the function does not close over."""
    return [k for k in _floats(eqn.invars) if k >= eqn.params["num_consts"]]


def _floats(variables: Sequence[Any]) -> list[int]:
    return [k for k, v in enumerate(variables) if v.aval.dtype in FLOATS]


def _split(eqn: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The float results of an equation as it was traced, and its other results."""
    out = list(zip(jaxprs.run_as_traced(eqn, list(operands)), eqn.outvars, strict=True))
    return [x for x, v in out if v.aval.dtype in FLOATS], [x for x, v in out if v.aval.dtype not in FLOATS]


def _run_rule(
    rule: Callable[..., Any], arguments: Any, traced: Sequence[Any], lists: CastLists, sums: tuple[bool, ...] = ()
) -> tuple[Any, Any]:
    """Traces a rule in the dtypes it was written for, and runs it in those that arrive.

    `traced` are the dtypes of the leaves of `arguments` there; `sums` says which results are gradients that devices sum
    in float32. Returns the results, and the shapes and dtypes that the rule returned when it was traced.
    """
    from jaxmp._src.autocast.interpreter import At, Interpreter  # each calls the other

    leaves, treedef = jax.tree.flatten(arguments)
    avals = [jax.typeof(x).update(dtype=d) for x, d in zip(leaves, traced, strict=True)]
    with attention.tracing(lists):  # an autocast in the rule is the innermost
        flat = lambda *leaves: rule(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
    function, uses = jaxprs.open_jaxpr(closed), None
    if any(sums):
        lists = lists._replace(float32_products="read")
        uses = find_uses(function[0], find_biases(function[0], lists), sums)
    out = Interpreter().run(function, list(map(values.result, leaves)), At((), "", lists), uses)
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(v.read()) for v in out]), shapes
