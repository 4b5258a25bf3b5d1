"""One function with a way of its own for some platforms, chosen when the program is lowered, not when it is traced.

    by_platform(f, *args, cpu=way)          way(f, *args) in a program for a CPU, f(*args) in any other

The same traced program then serves every platform: `jax.export`, and compilation for a GPU on a machine without one.
`lax.platform_dependent` is a conditional inside a scan (jax#28594), and traces all of its branches. Here `f` is traced
once, and a way only for the platform that it is for.

A way computes what `f` computes, or `f` and a choice; with a way for "default", `f` may have the types only. Under
`jax.vmap` the way of `default` runs, or with `maps` each way, mapped; a derivative goes through the way that
`derivative` names.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as inside_a_jit  # pyright: ignore
from jax.interpreters import ad, batching, mlir

_ITSELF = "itself"  # the function, in place of the way of a platform
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Way = Callable[..., Any]  # (f, *args) -> what f returns

_p = core.Primitive("by_platform")
_p.multiple_results = True


def by_platform(
    f: Callable[..., Any],
    *args: Any,
    derivative: str = "default",
    partitions: bool = False,
    alone: bool = False,
    maps: bool = False,
    **ways: Way,
) -> Any:
    """`f(*args)`, by the way of the platform that the program is lowered for.

    Args:
      f: a function of trees of arrays; with a way for "default", its results are read for their types only.
      *args: its arguments.
      derivative: the name of the way that is differentiated.
      partitions: whether a way calls `custom_partitioning`. jax tells a lowering its devices only if it finds that
        primitive in the program, and a way is traced later.
      alone: whether the ways of platforms take whole arrays only: in a program for several devices, outside of
        `jax.shard_map`, the way of "default" runs.
      maps: whether `jax.vmap` maps each way, so that every platform keeps its own.
      **ways: by the name of a platform, or "default" for the others, a function `(f, *args)` that returns arrays of the
        same types as `f(*args)`, and closes over no traced array (`f` may). Without one, `f` itself.

    Returns:
      What the way returns.
    """
    leaves, treedef = jax.tree.flatten(args)
    if not any(isinstance(x, Tracer) for x in leaves) and not inside_a_jit():
        return _way(ways, _place_of(leaves, alone))(f, *args)
    out_tree: Any = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        out, out_tree = jax.tree.flatten(f(*treedef.unflatten(leaves)))
        return out

    traced = jax.make_jaxpr(flat)(*leaves)

    def on_leaves(way: Way) -> Way:
        def run(f: Callable[..., list[Any]], *leaves: Any) -> list[Any]:
            whole = lambda *args: out_tree.unflatten(f(*jax.tree.leaves(args)))  # noqa: E731
            return jax.tree.leaves(way(whole, *treedef.unflatten(leaves)))

        return run

    flat_ways = _Ways({name: on_leaves(way) for name, way in sorted(ways.items())}, derivative, alone, maps)
    jaxpr, n, hint = with_operands(traced.jaxpr), len(traced.consts), _partitioned() if partitions else None
    return out_tree.unflatten(_p.bind(*traced.consts, *leaves, jaxpr=jaxpr, n=n, ways=flat_ways, hint=hint))


def with_operands(jaxpr: Any) -> Any:
    """A jaxpr without constants, which takes them as its first operands: it keeps no array and no tracer."""
    operands = [*jaxpr.constvars, *jaxpr.invars]
    about = jaxpr.debug_info
    about = core.DebugInfo(about.traced_for, about.func_src_info, ("",) * len(operands), ("",) * len(jaxpr.outvars))
    return core.Jaxpr((), operands, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, about, jaxpr.is_high)


@functools.cache
def _partitioned() -> Any:
    """A program with `custom_partitioning` in it."""
    from jax.experimental.custom_partitioning import custom_partitioning

    split = custom_partitioning(lambda x: x)
    split.def_partition(partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="->")
    return jax.make_jaxpr(split)(jax.ShapeDtypeStruct((), "float32"))


def written(arrays: Any, *, platform: str = "cpu") -> Any:
    """A tree of arrays, each of which XLA for a platform computes once for all that is made from it.

    XLA for CPU computes each result in a loop of its own, and what several results need in each of these loops. LLVM
    forms an FMA in one loop and not in another, so a master and its param, or the halves of a split master, could come
    from two different roundings of one weight.

    XLA for TPU joins the halves of a split master and its moments in one pass over memory if the weight is one array
    before them: 28 bytes of HBM per param, and 46 without.
    """
    ways: dict[str, Any] = {platform: lambda _, x: jax.tree.map(jax.lax.optimization_barrier, x)}
    return by_platform(lambda x: x, arrays, **ways)


@dataclasses.dataclass(frozen=True, eq=False)
class _Ways:
    """The ways of an equation; its text names the platforms only."""

    by_name: dict[str, Way]
    derivative: str
    alone: bool
    maps: bool

    def __repr__(self) -> str:
        return f"({', '.join(self.by_name)})"


def _way(ways: dict[str, Way], name: str) -> Way:
    return ways.get(name) or ways.get("default") or _plainly


def _plainly(f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


def _place_of(leaves: Sequence[Any], alone: bool) -> str:
    """The name of the way for arrays that are no tracers: that of the platform they lie on."""
    for x in leaves:
        if isinstance(x, jax.Array):
            if alone and len(x.sharding.device_set) > 1:
                return "default"
            platform = next(iter(x.sharding.device_set)).platform
            return "cuda" if platform == "gpu" else platform
    return default_platform()


def way_here(eqn: Any) -> Callable[..., list[Any]]:
    """What an equation of `by_platform` computes on the default device, as a function of its operands."""
    return functools.partial(_run, default_platform(), **eqn.params)


def default_platform() -> str:
    """The platform of the default device, by the names that programs are lowered for."""
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _run(name: str, *operands: Any, jaxpr: Any, n: int, ways: _Ways, hint: Any = None) -> list[Any]:
    """The results by one way, from the operands of the equation."""
    del hint
    consts, leaves = operands[:n], operands[n:]

    def f(*leaves: Any) -> list[Any]:
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*consts, *leaves)  # pyright: ignore

    return list((_plainly if name == _ITSELF else _way(ways.by_name, name))(f, *leaves))


@_p.def_impl
def _(*operands: Any, **params: Any) -> list[Any]:
    return _run(_place_of(operands, params["ways"].alone), *operands, **params)


@_p.def_effectful_abstract_eval
def _(*avals: Any, jaxpr: Any, n: int, ways: _Ways, hint: Any) -> Any:
    del avals, n, ways, hint
    return [v.aval for v in jaxpr.outvars], jaxpr.effects


def _lowering(name: str) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        devices = getattr(ctx.module_context.axis_context, "num_devices", 1)  # not set inside of `jax.shard_map`
        way = "default" if params["ways"].alone and devices > 1 else name
        return mlir.lower_fun(lambda *xs: _run(way, *xs, **params), multiple_results=True)(ctx, *operands)

    return rule


mlir.register_lowering(_p, _lowering("default"))
for _name in PLATFORMS:
    mlir.register_lowering(_p, _lowering(_name), platform=_name)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*moved: Any) -> list[Any]:
        operands = list(primals)
        for i, x in zip(moving, moved, strict=True):
            operands[i] = x
        return _run(params["ways"].derivative, *operands, **params)

    arguments = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(of_moving, *arguments)


def _transposed(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """A linear function, in a derivative rule that jax transposes: the transpose of the way of the derivative."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def of_linear(*moving: Any) -> list[Any]:
        values = list(operands)
        for i, x in zip(linear, moving, strict=True):
            values[i] = x
        return _run(params["ways"].derivative, *values, **params)

    zeros = [ad.instantiate_zeros(ad.Zero(operands[i].aval)) for i in linear]
    cotangents_of_linear = iter(jax.vjp(of_linear, *zeros)[1](list(map(ad.instantiate_zeros, cotangents))))
    return [next(cotangents_of_linear) if i in linear else None for i in range(len(operands))]


def _batched(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    names: dict[str, Any] = {"axis_name": axis.name} if isinstance(axis.name, str) else {}
    names |= {} if axis.spmd_name is None else {"spmd_axis_name": axis.spmd_name}

    def mapped(name: str) -> Way:
        run = lambda *xs: _run(name, *xs, **params)  # noqa: E731
        return jax.vmap(run, in_axes=tuple(dims), axis_size=axis.size, **names)

    ways: _Ways = params["ways"]
    if ways.maps:
        by_name: dict[str, Any] = {name: lambda _, *xs, name=name: mapped(name)(*xs) for name in ways.by_name}
        options: dict[str, Any] = {"derivative": ways.derivative, "alone": ways.alone, "maps": True}
        outputs = by_platform(mapped(_ITSELF), *operands, partitions=params["hint"] is not None, **options, **by_name)
    else:
        outputs = mapped("default")(*operands)
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_p] = _jvp
ad.primitive_transposes[_p] = _transposed
batching.fancy_primitive_batchers[_p] = _batched
