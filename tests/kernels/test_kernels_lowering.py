"""Every tree kernel is lowered for CUDA with plain jaxlib: interpret mode accepts what Mosaic rejects.

Looked at in the lowered text: how many launches there are, and that what is written is written in place; in the trace:
that a param which is only written is not read. Before jax 0.11.2 the same programs are XLA's.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import pallas_kernels
from pallas_kernels import backend as backends, by_platform, moments
from pallas_kernels.update import AdamW, Lion, Momentum, Weight, multi_tensor_update

HAS_KERNELS = backends.why_no_kernels() is None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))
LAUNCH = re.compile(r"custom_call @mosaic_gpu")
KERNEL = "mpmd_map"  # the primitive that holds the body of a Mosaic kernel


def on_one_device(f: Any) -> Any:
    """`f` in a manual region, where arrays are a device's own: the tests' eight devices are one program otherwise."""
    mesh = Mesh(np.array(jax.devices()[:1]), "data")
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def lowered(f: Any, *args: Any) -> str:
    traced = jax.jit(on_one_device(f)).trace(*args)
    inside = [names(body) for body in kernels(traced.jaxpr.jaxpr)]
    assert not any(x & {"custom_jvp_call", "custom_vjp_call"} for x in inside)  # Mosaic of jax 0.11 knows neither
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert bool(inside) == ("@mosaic_gpu" in text)
    return text


def subjaxprs(eqn: Any) -> list[Any]:
    """The jaxprs that an equation holds; of `by_platform` the one that is lowered for CUDA."""
    if eqn.primitive.name == "by_platform":
        with eqn.ctx.manager:
            way = functools.partial(by_platform._run, "cuda", **eqn.params)
            return [jax.make_jaxpr(way)(*(v.aval for v in eqn.invars)).jaxpr]
    values = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple | list) else (v,))]
    found = [getattr(x, "jaxpr", x) for x in values]
    return [x for x in found if hasattr(x, "eqns")]


def kernels(jaxpr: Any) -> Any:
    """The bodies of all kernels in a trace."""
    for eqn in jaxpr.eqns:
        for inside in subjaxprs(eqn):
            if eqn.primitive.name == KERNEL:
                yield inside
            else:
                yield from kernels(inside)


def names(jaxpr: Any) -> set[str]:
    """The names of all primitives in a jaxpr."""
    return {e.primitive.name for e in jaxpr.eqns}.union(*(names(x) for e in jaxpr.eqns for x in subjaxprs(e)))


def launches(text: str) -> int:
    """How many launches a lowered program makes: functions that are called twice count twice."""
    bodies = {m[1]: m[2] for m in re.finditer(r"func\.func (?:public |private )?@(\w+)\((.*?)\n  }", text, re.S)}

    def count(name: str) -> int:
        calls = re.findall(r"(?<!custom_)call @(\w+)\(", bodies[name])
        return len(LAUNCH.findall(bodies[name])) + sum(count(called) for called in calls)

    return count("main")


def assert_launches(text: str, count: int, name: str) -> None:
    assert launches(text) == (count if HAS_KERNELS else 0)
    assert not HAS_KERNELS or name in text


SHAPES = [(), (1,), (7,), (127,), (128,), (129,), (2047,), (2048,), (8192 + 3,), (33, 5), (0,)]
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)


def spec(shape: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def tree_of(shapes: Any) -> list[Any]:
    return [spec(shape, dtype) for shape in shapes for dtype in FLOATS]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["unscale_and_check", "gradient_norm"])
def test_reading_kernels(name):
    text = lowered(getattr(pallas_kernels, name), tree_of(SHAPES), spec((), jnp.float32))
    assert_launches(text, 1, name)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_cast_tree(dtype):
    text = lowered(lambda tree: pallas_kernels.cast_tree(tree, dtype, scale=0.5), tree_of(SHAPES))
    assert_launches(text, 1, "cast_tree")


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "shapes, count",
    [([(5,), (16, 128)] * 150, 3), ([(n,) for n in range(1, 140)], 2)],
    ids=["300 of two kinds", "139 that differ"],
)
def test_few_launches(shapes, count):
    tree = [spec(shape, jnp.bfloat16) for shape in shapes]
    text = lowered(pallas_kernels.gradient_norm, tree, spec((), jnp.float32))
    assert_launches(text, count, "gradient_norm")
    if HAS_KERNELS and count == 3:  # what looks alike is lowered once
        assert len(LAUNCH.findall(text)) == 1


# multi_tensor_update

RULES = {
    "adamw": AdamW(),
    "nadamw": AdamW(nesterov=True),
    "lion": Lion(),
    "momentum": Momentum(),
    "nesterov": Momentum(nesterov=True),
}
FORMS = {"own": (None, "float32"), "float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32")}
FORMS |= {"int16": ("bfloat16", "int16"), "int8": ("bfloat16", "int8")}


def weight(shape: Any, form: str, state: str, rule: str, grad: Any = jnp.bfloat16) -> Weight:
    param, master = FORMS[form]
    held = tuple(moments.like(shape, state, signed=signed) for signed in RULES[rule].signed)
    return Weight(spec(shape, grad), param and spec(shape, param), spec(shape, master), held, 0.1)  # type: ignore


def update(rule: str, weights: Any, scalars: Any) -> Any:
    factor, rate, taken, *own = scalars
    return multi_tensor_update(
        weights, RULES[rule], factor=factor, learning_rate=rate, step=3, scalars=own, taken=taken
    )


SCALARS = (spec((), jnp.float32), spec((), jnp.float32), spec((), jnp.bool_), spec((), jnp.float32))
SCALARS = (*SCALARS, SCALARS[0], SCALARS[0])


# Each state and rule once; the rule with two moments, of which one is unsigned, in a state of each kind.
PAIRS = [("adamw", "float32"), ("adamw", "int8"), ("adamw", "float8_e5m2"), ("lion", "bfloat16")]
PAIRS += [("momentum", "float8_e4m3fn"), ("nadamw", "int8"), ("nesterov", "float32")]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("rule", "state"), PAIRS)
def test_updates_in_every_form(rule, state):
    """All forms in one launch: whole groups, blocks, tails, scalars, nothing."""
    shapes = [(16, 256), (130,), (), (0,)] if state not in ("float32", "bfloat16") else [(2048 + 131,), (), (0,)]
    weights = [weight(s, form, state, rule, FLOATS[i % 3]) for form in FORMS for i, s in enumerate(shapes)]
    text = lowered(functools.partial(update, rule), weights, SCALARS)
    assert_launches(text, 1, "multi_tensor_update")


@pytest.mark.thorough(1)
@needs_kernels
@pytest.mark.parametrize("form", ["float16", "int8"])
def test_what_is_written_is_written_in_place(form):
    """Of the launch's results, all are aliased to the operand of the same shape and dtype."""
    weights = [weight((16, 256), form, "int8", "adamw"), weight((130,), form, "int8", "adamw")]
    text = lowered(functools.partial(update, "adamw"), weights, SCALARS)
    (call,) = [line for line in text.splitlines() if LAUNCH.search(line)]
    signature = call[call.rindex("} : (") :]
    operands, results = (re.findall(r"tensor<([^>]*)>", side) for side in signature.split("->"))
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    assert sorted(int(out) for out, _ in aliases) == list(range(len(results)))
    assert all(operands[int(operand)] == results[int(out)] for out, operand in aliases)
    states = sum(len(jax.tree.leaves(w)) - 2 for w in weights)  # but gradients and decays
    assert len(results) == states + (form == "float16")  # and the count of masters that saturate


@needs_kernels
def test_the_gradients_themselves_stay():
    text = lowered(pallas_kernels.unscale_and_check, tree_of([(300,)]), spec((), jnp.float32))
    (call,) = [line for line in text.splitlines() if LAUNCH.search(line)]
    written = {int(i) for i in re.findall(r"operand_index = (\d+)", call)}
    first = 3 + len(FLOATS)  # behind the scalars, the numbers of leaves, the place of the sums, and the gradients
    assert written == set(range(first, first + len(FLOATS) + 1))  # the new tree, and the sums


def test_nothing_is_left_to_launch():
    text = lowered(pallas_kernels.unscale_and_check, [spec((0,), jnp.float16)], spec((), jnp.float32))
    assert launches(text) == 0


# What a kernel reads


def uses(jaxpr: Any, dtype: Any) -> set[str]:
    """Names of the primitives that touch memory of this dtype, a store whose old value is used being a load."""
    found: set[str] = set()
    used = {id(v) for v in (*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars))}
    for eqn in jaxpr.eqns:
        inside = subjaxprs(eqn)
        found = found.union(*(uses(x, dtype) for x in inside))
        touched = [
            v for v in eqn.invars if "Ref" in str(getattr(v, "aval", "")) and getattr(v.aval, "dtype", None) == dtype
        ]
        if touched and not inside:
            is_store = eqn.primitive.name == "swap" and not any(id(v) in used for v in eqn.outvars)
            is_store |= getattr(eqn.params.get("mgpu_fn"), "__name__", "") == "aligned_store"
            found.add("store" if is_store else eqn.primitive.name)
    return found


@needs_kernels
@pytest.mark.parametrize("state", ["float32", "int8"])
def test_params_that_are_only_written_are_never_read(state):
    """They are the one thing here in float16; of what is read there is float32 to compare with."""
    weights = [weight(shape, "float16", state, "adamw", jnp.float32) for shape in [(16, 256), (2048 + 131,)]]
    traced = jax.jit(on_one_device(functools.partial(update, "adamw"))).trace(weights, SCALARS)
    (body,) = kernels(traced.jaxpr.jaxpr)
    assert uses(body, jnp.float16) == {"store"}
    assert uses(body, jnp.float32) > {"store"}
    assert not uses(body, jnp.bfloat16)
