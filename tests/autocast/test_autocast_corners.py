"""autocast where functions, regions and modules meet jax in unusual ways; each case went wrong once."""

import concurrent.futures
import functools
import gc
import threading
import weakref
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_same_program, assert_within_ulps, compilations
from same_operations import assert_same_operations

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), F32)
W = jnp.asarray(RNG.normal(size=(8, 8)) * 0.3, F32)


def dtypes_of(tree: Any) -> list[str]:
    return [x.dtype.name for x in jax.tree.leaves(tree)]


# ---- functions whose parts are no usual operations


def test_branches_for_other_platforms_are_not_compiled() -> None:
    def kernel(x: jax.Array) -> jax.Array:  # no CPU has it
        return pl.pallas_call(lambda i, o: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def fn(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, tpu=lambda x: kernel(x) @ W, default=lambda x: x @ W)

    assert_within_ulps(*jax.jit(lambda x: (jaxmp.autocast(fn)(x), jaxmp.autocast(jnp.matmul)(x, W)))(X), 1)


def test_products_of_integers_are_integers() -> None:
    n = np.arange(64, dtype=np.int32).reshape(8, 8) + 4000

    def fn(n: jax.Array, small: jax.Array) -> Any:
        to_int = {"preferred_element_type": jnp.int32}
        conv = lax.conv(small[None, None], small[None, None], (1, 1), "SAME", **to_int)
        to_float = lax.dot(small, small, preferred_element_type=F32)
        return n @ n, jnp.vdot(n, n) % 7, n[:, :2] @ n[:2], lax.dot(small, small, **to_int), to_float, conv

    functions = (fn, jaxmp.autocast(fn, BF16), jaxmp.autocast(fn, F16))
    exact, *outs = jax.jit(lambda *args: [f(*args) for f in functions])(n, n.astype(np.int8))
    for out in outs:
        assert_exact(out, exact)


@pytest.mark.parametrize(("lists", "dtype"), [(F16, F16), (F16, BF16), (BF16, F16)], ids=["own", "wider", "narrower"])
def test_a_rounding_that_the_code_makes_stays(lists: Any, dtype: Any) -> None:
    """Of an input, of what is made of one, and in a region without autocast."""

    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(enabled=False):
            off = x.astype(dtype).astype(F32)
        return off - x, x.T.astype(dtype).astype(F32) * 1.0, x - lax.reduce_precision(x, 5, 2)

    x = np.asarray(X)
    rounded = x.astype(dtype).astype(F32)
    assert_exact(
        jax.jit(jaxmp.autocast(fn, lists))(X), (rounded - x, rounded.T, x - x.astype(jnp.float8_e5m2).astype(F32))
    )


# ---- numbers of Python


def plain(f: Any) -> Any:
    return f


def remat_in_jit(f: Any) -> Any:
    return jax.jit(jax.checkpoint(f))


@pytest.mark.parametrize("around", [plain, jax.jit, remat_in_jit], ids=["plain", "jit", "remat in jit"])
def test_numbers_are_results_and_operands(around: Any) -> None:
    def fn(x: Any, factor: Any) -> Any:
        y, *others = around(lambda x, flag: (x @ x, flag, True, 2.5, 3, jnp.float32(3.0), jnp.int32(2)))(x, True)
        return jnp.where(others[1], y * others[2], y) * others[3] * (factor if factor > 1 else 1), others

    def auto(x: Any) -> Any:
        return jaxmp.autocast(fn, BF16)(x, np.float32(2.0))  # a scalar of NumPy is a number, too

    for product, others in (auto(jnp.eye(8)), jax.jit(auto)(jnp.eye(8))):
        assert_exact(product, 15 * jnp.eye(8, dtype=BF16))
        assert_exact(others, [True, True, 2.5, 3, 3.0, 2])
        assert all(isinstance(x, jax.Array) for x in others[-2 if around is plain else 0 :])


@pytest.mark.parametrize(
    ("number", "call"),
    [
        pytest.param(True, jax.jit, id="bool, jit"),
        pytest.param(3, jax.checkpoint, id="int, remat"),
        pytest.param(
            2.5, lambda f: lambda x, n: lax.scan(lambda c, y: (c, f(y, n)), 0, x[None])[1][0], id="float, scan"
        ),
        pytest.param(2.5, lambda f: lambda x, n: jax.vmap(f, (0, None))(x, n), id="float, vmap"),
    ],
)
def test_a_number_of_python_as_an_operand_of_a_call(number: Any, call: Any) -> None:
    choose = call(jax.jit(lambda x, n: lax.cond(n > 0, lambda: x * n, lambda: x)))

    def total(x: Any) -> Any:
        return choose(x @ W, number).astype(F32).sum()

    auto = jax.value_and_grad(jaxmp.autocast(total, BF16))
    assert_close(*jax.jit(lambda x: (auto(x), jax.value_and_grad(total)(x)))(X), rtol=2**-6)


def test_constants_among_scalars_of_16_bits_leave_them() -> None:
    """A number that is written, or a scalar array of one, does not widen the logit of one class."""

    def fn(x: Any) -> Any:
        y = (x @ W)[0, 0]
        return y * 2.0 + jnp.float32(0.5), jnp.maximum(y, 0.0)

    text = str(jax.make_jaxpr(jaxmp.autocast(fn, F16))(X))
    assert all(f"f16[] = {name}" in text for name in ("mul", "add", "max"))


# ---- loops


def test_a_while_loop_under_vmap_goes_on_in_the_rows_whose_test_holds() -> None:
    @jax.vmap
    @jax.vmap
    def grow(x: jax.Array, end: jax.Array) -> Any:
        return lax.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, x))

    ends, rows, auto = np.arange(4, dtype=np.int32).reshape(4, 1), X[:, None], jaxmp.autocast(grow)
    (count, out), (_, exact), tangent = jax.jit(
        lambda x: (auto(x, ends), grow(x, ends), jax.jvp(lambda x: auto(x, ends)[1], (x,), (x,))[1])
    )(rows)
    assert_exact(count, ends)
    assert out.dtype == tangent.dtype == F16
    assert_close(np.float32(out), exact, rtol=2e-2, atol=5e-3)
    assert np.isfinite(tangent).all()


def row_loss(row: Any, label: Any) -> Any:
    return jax.nn.logsumexp(row) - row[label]


SUMS_OF_ROWS: dict[str, Any] = {
    "scan": (BF16, lambda x, n: lax.scan(lambda c, r: (c + row_loss(*r), None), 0.0, (x, n))[0]),
    "map": (F16, lambda x, n: jnp.sum(lax.map(lambda r: row_loss(*r), (x, n)))),
    "unrolled": (BF16, lambda x, n: functools.reduce(jnp.add, map(row_loss, x, n), jnp.zeros(()))),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("dtype", "sums"), SUMS_OF_ROWS.values(), ids=SUMS_OF_ROWS)
def test_scalars_of_float32_are_not_taken_to_16_bits_by_a_number_of_an_array(dtype: Any, sums: Any) -> None:
    """Cross-entropies of single rows of saturated logits, and their sum, which ended at 0.039 and not 0.063."""
    x, w = (np.float32(RNG.normal(size=shape) * scale) for shape, scale in (((16, 20), 1), ((20, 7), 6)))
    labels = np.argmax(x @ w, -1)
    logits = np.float32(x.astype(dtype)) @ np.float32(w.astype(dtype))
    logits = logits.astype(dtype).astype(np.float64)
    expected = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
    out = jax.jit(jaxmp.autocast(lambda x, w: sums(x @ w, labels), dtype))(x, w)
    assert_close(out, np.float32(np.sum(expected - logits[np.arange(16), labels])), atol=2e-4)


def turn(z: Any, y: Any) -> Any:
    """One of Newton's steps to the square root of y. (Without a product inside, the loop would be float32.)"""
    return 0.5 * (z + y / z) + z @ jnp.zeros((8, 8))


def is_far(z: Any, y: Any) -> Any:
    return jnp.abs(z * z / y - 1) > 1e-6


def flag_and_turn(flag: Any, z: Any, y: Any) -> Any:
    return is_far(turn(z, y), y) & flag, turn(z, y)


def flags_of_a_function(flags: Any, z: Any, y: Any) -> Any:
    flag, new = jax.jit(flag_and_turn)(flags[1], z, y)
    return (flag_and_turn(flags[1], z, y)[0], flag), new


ONES = np.ones((8, 8), bool)
# The dtype of what the loop carries, when it goes on, its body, and what it starts from beside y.
STOPS: dict[str, Any] = {
    "the number": ("bfloat16", lambda a, z, y: a < 10, lambda a, z, y: (a + 1, turn(z, y)), 0),
    "a comparison": ("float32", lambda a, z, y: jnp.any(is_far(z, y)), lambda a, z, y: (a, turn(z, y)), 0),
    "bools of the body": ("float32", lambda a, z, y: jnp.any(a), flag_and_turn, ONES),
    "bools of a function": ("float32", lambda a, z, y: jnp.any(a[0]), flags_of_a_function, (ONES, ONES)),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("dtype", "goes_on", "body", "start"), STOPS.values(), ids=STOPS)
def test_a_loop_that_goes_on_until_floats_converge_carries_float32(dtype, goes_on, body, start) -> None:
    """In 16 bits it would not come nearer than 2^-9, and go on for ever, or stop at another place."""

    def root(x: Any) -> Any:
        y = x @ jnp.ones((8, 8))
        return lax.while_loop(lambda c: goes_on(*c, y), lambda c: body(*c, y), (start, y))[1]

    x = np.random.default_rng(0).uniform(0.5, 1.5, (8, 8)).astype(np.float32)
    auto = jaxmp.autocast(root, BF16)
    (loop,) = (eqn for eqn in jax.make_jaxpr(auto)(x).eqns if eqn.primitive.name == "while")
    assert {v.aval.dtype.name for v in loop.outvars} - {"int32", "bool"} == {dtype}
    if dtype == "float32":
        np.testing.assert_allclose(jax.jit(auto)(x)[:, :1], np.sqrt(x.sum(axis=1, keepdims=True)), rtol=2**-8)


# ---- called without jit, and what is kept


def many_operations(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.nn.softmax(jnp.tanh(x @ w) + x)
    return lax.scan(lambda c, r: (c + jnp.tanh(r @ w), c), x[0], x)[0]


fn_of_constants = jax.jit(lambda x: many_operations(x, W))


HOW_CALLED: dict[str, Any] = {
    "call": lambda fn: jaxmp.autocast(fn, BF16)(X, W),
    "inside": lambda fn: jaxmp.autocast(lambda x: fn(x, W) + fn(2 * x, W), BF16)(X),
    "closure": lambda fn: jaxmp.autocast(fn_of_constants, BF16)(X),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("call", HOW_CALLED.values(), ids=HOW_CALLED)
def test_a_jitted_function_is_compiled_once(call: Any) -> None:
    fn = jax.jit(many_operations)
    with compilations() as first:
        out = call(fn)
    with compilations() as second:
        assert_same_program(call(fn), out)
    assert first and not second


CLOSURES: dict[str, Any] = {
    "jit": lambda w: jax.jit(lambda x: many_operations(x, w)),
    "remat": lambda w: jax.checkpoint(lambda x: many_operations(x, w)),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("closure", CLOSURES.values(), ids=CLOSURES)
def test_nothing_holds_the_arrays_of_a_function_that_is_gone(closure: Any) -> None:
    w = W + 1
    arrays = weakref.ref(w)
    fn = closure(w)
    auto = jaxmp.autocast(lambda x: fn(x), BF16)
    auto(X)
    jax.grad(lambda x: auto(x).astype(F32).sum())(X)
    del w, fn, auto
    gc.collect()
    assert arrays() is None


# ---- regions and rules


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_a_jitted_autocast_and_region_hold_wherever_they_were_traced_first(first: str) -> None:
    model = nn.Dense(8)
    params = jax.jit(model.init)(KEY, X)

    @jax.jit
    def region(x: jax.Array) -> Any:
        with jaxmp.autocast(dtype=BF16):
            return model.apply(params, x)

    for inner in (jax.jit(jaxmp.autocast(lambda x: x @ W, BF16)), region):
        calls = [lambda f=inner: f(X), lambda f=inner: jaxmp.autocast(lambda x: f(x))(X)]
        for call in calls if first == "outside" else calls[::-1]:
            assert jax.eval_shape(call).dtype == BF16


def test_a_region_is_read_in_a_function_that_was_traced_for_another_rewrite() -> None:
    """`jax.jit` caches what it traced, regions included."""
    w = jnp.ones((8, 8))

    @jax.jit
    def inner(x: jax.Array) -> Any:
        with jaxmp.autocast(dtype=F16, modules={"head": F32}):
            y = x @ w
            with jaxmp.autocast(enabled=False):
                return y @ w, y

    for fn in (lambda x: inner(x), lambda x: inner(2 * x)):
        assert dtypes_of(jax.eval_shape(jaxmp.autocast(fn, BF16), w)) == ["float32", "float16"]


def test_a_region_without_dtype_has_the_one_around_it() -> None:
    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(enabled=False), jaxmp.autocast(F16):
            c = x @ x
        with jaxmp.autocast(force_fp32=("tanh",)):
            return x @ x, jnp.tanh(x @ x), jaxmp.autocast(jnp.matmul)(x, x), c

    x = jnp.eye(8)
    inside = jax.eval_shape(jaxmp.autocast(fn, BF16), x)
    assert dtypes_of(inside) == ["bfloat16", "float32", "bfloat16", "float16"]
    assert jax.eval_shape(jaxmp.autocast(jnp.matmul), x, x).dtype == F16  # outside of all
    assert jax.eval_shape(jaxmp.autocast(jnp.matmul, "bf16"), x, x).dtype == BF16


def test_an_autocast_in_a_derivative_rule_is_the_innermost() -> None:
    fn = jax.custom_vjp(lambda x: x @ W)
    fn.defvjp(lambda x: (fn(x), None), lambda _, g: (jaxmp.autocast(lambda g: g @ W.T, BF16)(g),))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jaxmp.autocast(fn)(x).astype(F32).sum()))(X)
    seen = [e.outvars[0].aval.dtype.name for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert seen == ["bfloat16"]  # nothing else is left of the function


@pytest.mark.parametrize("over", [plain, remat_in_jit], ids=["plain", "remat in jit"])
def test_a_rule_with_symbolic_zeros_gets_arrays(over: Any) -> None:
    """What is not differentiated has a zero for its derivative."""
    product_jvp, product_vjp = jax.custom_jvp(lambda x, w: x @ w), jax.custom_vjp(lambda x, w: x @ w)

    def jvp(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        return product_jvp(x, w), 3 * (dx @ w) + x @ dw

    def forward(x: Any, w: Any) -> Any:
        return product_vjp(x.value, w.value), (x.value, w.value)

    product_jvp.defjvp(jvp, symbolic_zeros=True)
    product_vjp.defvjp(forward, lambda kept, g: (3 * (g @ kept[1].T), kept[0].T @ g), symbolic_zeros=True)
    for product in (product_jvp, product_vjp):
        grad = jax.jit(jax.grad(lambda x, f=product: jnp.sum(jaxmp.autocast(over(f))(x, W).astype(F32) * X)))(X)
        assert_close(grad, 3 * X @ W.T, rtol=2e-2, atol=2e-2)


def test_threads_may_share_a_region() -> None:
    region, entered, left = jaxmp.autocast(dtype=BF16), threading.Barrier(2), threading.Event()
    with region:  # reaches something: the threads, in which nothing runs, do not warn (filters are not theirs alone)
        nn.Dense(2).init(KEY, jnp.ones((1, 2)))

    def work(waits: bool) -> None:
        with region:
            entered.wait(5)
            if waits:
                left.wait(5)
        left.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (True, False)))  # raises what a thread raised


def test_what_cannot_be_autocast() -> None:
    with pytest.raises(TypeError, match="decorate the __call__ of Dense"):
        jaxmp.autocast(dtype=F16)(nn.Dense)
    with pytest.raises(ValueError, match="a region has no output to cast"), jaxmp.autocast(output_dtype=F32):
        pass
    for decorator in (jaxmp.auto_fp16, jaxmp.force_fp32):
        with pytest.raises(TypeError, match=r"Write @jaxmp\.\w+\(\)"):
            decorator(lambda x: x)


# ---- modules


def test_region_reaches_recurrent_modules_and_methods_given_as_functions() -> None:
    model, x = nn.RNN(nn.LSTMCell(4)), X[None]
    variables = jax.eval_shape(model.init, KEY, x)

    def in_region(variables: Any, method: Any = None) -> jax.Array:
        with jaxmp.autocast(dtype=BF16):
            return model.apply(variables, x, method=method)

    assert jax.eval_shape(in_region, variables).dtype == BF16
    by_function = functools.partial(model.apply, method=lambda m, x: m(x))
    assert_same_operations(in_region, lambda v: jaxmp.autocast(by_function, BF16)(v, x), variables)
    assert_same_operations(in_region, functools.partial(in_region, method=lambda m, x: m(x)), variables)


class Outer(nn.Module):
    call: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(nn.Dense(4), x)


BOUND: dict[str, Any] = {
    "module": lambda module, x: jaxmp.autocast(module)(x),
    "method": lambda module, x: jaxmp.autocast(module.__call__)(x),
    "second argument": lambda module, x: jaxmp.autocast(lambda x, m: m(x))(x, module),
    "partial": lambda module, x: jaxmp.autocast(functools.partial(lambda m, x: m(x), module))(x),
}


@pytest.mark.parametrize("call", BOUND.values(), ids=BOUND)
def test_bound_modules(call: Any) -> None:
    variables = jax.eval_shape(Outer(call).init, KEY, X)
    assert jax.eval_shape(Outer(call).apply, variables, X).dtype == F16
    model, twin = (nnx.BatchNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))
    out, expected = nnx.jit(lambda model, twin: (call(model, X), twin(X)))(model, twin)
    assert_close(np.float32(out), expected, rtol=1e-2, atol=1e-2)
    assert_close(model.mean[...], twin.mean[...], rtol=1e-5)  # updated


class NoTree(nnx.Module, pytree=False):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def test_nnx_modules_that_are_no_trees() -> None:
    model = NoTree(nnx.Rngs(0))
    assert jaxmp.autocast(nnx.jit(lambda m, x: m(x)))(model, X).dtype == F16
    assert type(model) is NoTree


@pytest.mark.parametrize("enabled", [True, False])
def test_nnx_state_of_an_outer_trace_is_read(enabled: bool) -> None:
    graphdef, params, stats = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, stats: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, params, stats, copy=True)(x, use_running_average=True) ** 2)

    grad = jax.grad(lambda p: jaxmp.autocast(loss, enabled=enabled)(p, stats, jnp.ones((2, 4))))
    assert jax.tree.leaves(jax.eval_shape(grad, params))[0].dtype == F32


# ---- meshes whose axes change their types


def chain(x: Any) -> Any:
    return jnp.tanh(x @ x) @ x


BODIES: dict[str, Any] = {
    "products": (F32, chain),
    "jit": (BF16, jax.jit(chain)),
    "remat": (F32, jax.checkpoint(chain)),
    "scan": (BF16, lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, 2)[0]),
    "cond": (F32, lambda x: lax.cond(x[0, 0] < 9, chain, jnp.exp, x)),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("params", "body"), BODIES.values(), ids=BODIES)
def test_auto_axes_in_a_mesh_with_explicit_axes(params: Any, body: Any) -> None:
    """As without a mesh: 16-bit values enter and leave in 16 bits."""
    x = np.asarray(W).astype(params)

    def value_and_grad(inside: Any) -> Any:
        def loss(x: Any) -> Any:
            y = inside(x @ x)
            return jnp.sum((jnp.exp(y) @ x).astype(F32)), y

        return jax.jit(jax.value_and_grad(jaxmp.autocast(loss, BF16), has_aux=True))(x)

    (expected, y), grad = value_and_grad(body)
    with jax.set_mesh(regimes.mesh_of(AxisType.Explicit)):
        on_mesh = value_and_grad(jax.sharding.auto_axes(body, out_sharding=jax.P(regimes.AXIS, None)))
        text = str(jax.make_jaxpr(jaxmp.autocast(lambda x: jax.sharding.reshard(x @ x, jax.P(regimes.AXIS)), BF16))(x))
    assert (on_mesh[0][1].dtype, on_mesh[1].dtype) == (y.dtype, grad.dtype)
    on_mesh, alone = (jax.tree.map(np.float32, tree) for tree in (on_mesh, ((expected, y), grad)))
    assert_close(on_mesh, alone, rtol=2e-2, atol=2e-2)
    assert f"bf16[8@{regimes.AXIS},8] = reshard" in text  # half the bytes move


def test_explain_of_auto_axes() -> None:
    x = jnp.eye(8)
    with jax.set_mesh(regimes.mesh_of(AxisType.Explicit)):
        fn = jax.sharding.auto_axes(chain, out_sharding=jax.P(regimes.AXIS, None))
        assert jaxmp.explain_autocast(fn, x, dtype=BF16).summary() == "matmul FLOPs: 100.0% in bfloat16"
        with pytest.raises(ValueError, match="axes that keep their types; got a call of jax.sharding.auto_axes"):
            jaxmp.explain_autocast(fn, x, dtype=BF16, measure=True)
