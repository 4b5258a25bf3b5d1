"""autocast where functions, regions and modules meet jax in unusual ways; each case went wrong once."""

import functools
import gc
import threading
import weakref
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import jaxmp
from helpers import assert_close, assert_exact, assert_same_program, assert_within_ulps
from same_operations import assert_same_operations

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), F32)
W = jnp.asarray(RNG.normal(size=(8, 8)) * 0.3, F32)


def test_scatter_by_a_function_of_the_user_keeps_it() -> None:
    rows = np.array([0, 2])
    out = jax.jit(jaxmp.autocast(lambda x: x.at[rows].apply(jnp.sin)))(X)
    expected = np.array(X)
    expected[rows] = np.sin(expected[rows])
    assert_close(out, expected, rtol=1e-5)


def test_numbers_come_back_as_arrays() -> None:
    out = jaxmp.autocast(lambda x: (jnp.float32(3.0), jnp.int32(2), x @ W))(X)
    assert all(isinstance(x, jax.Array) for x in out)
    assert [x.dtype.name for x in out] == ["float32", "int32", "float16"]
    assert (out[0], out[1]) == (3.0, 2)


def test_a_function_inside_may_return_a_number() -> None:
    fn = jax.jit(lambda x: (x @ W, 1.0))
    product, one = jaxmp.autocast(lambda x: fn(x))(X)
    assert product.dtype == F16 and one == 1.0


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_numbers_and_bools_go_through_nested_functions(around: Any) -> None:
    fn = around(lambda x, flag: (x @ W, flag, True, 2.5, 3))
    for run in (jaxmp.autocast(lambda x: fn(x, True)), jax.jit(jaxmp.autocast(lambda x: fn(x, True)))):
        product, *others = run(X)
        assert product.dtype == F16
        assert [(x.dtype.name, x.item()) for x in others] == [
            ("bool", True), ("bool", True), ("float32", 2.5), ("int32", 3)
        ]  # fmt: skip


def test_interpolation_which_is_a_high_primitive() -> None:
    xs = jnp.linspace(-3.0, 3.0, 10)
    expected = np.interp(np.asarray(X), np.asarray(xs), np.asarray(xs) ** 3)
    assert_close(jax.jit(jaxmp.autocast(jnp.interp))(X, xs, xs**3), np.float32(expected), rtol=1e-4, atol=1e-5)


def test_branches_for_other_platforms_are_not_compiled() -> None:
    def kernel(x: jax.Array) -> jax.Array:  # no CPU has it
        return pl.pallas_call(lambda i, o: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def fn(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, tpu=lambda x: kernel(x) @ W, default=lambda x: x @ W)

    assert_within_ulps(jax.jit(jaxmp.autocast(fn))(X), jaxmp.autocast(jnp.matmul)(X, W), 1)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axes", [1, 2])
def test_a_while_loop_under_vmap_goes_on_in_the_rows_whose_test_holds(axes: int) -> None:
    def grow(x: jax.Array, end: jax.Array) -> Any:
        return lax.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, x))

    for _ in range(axes):
        grow = jax.vmap(grow)
    ends = np.arange(4, dtype=np.int32).reshape((4, 1)[:axes])
    rows = X.reshape(*ends.shape, 8)
    auto = jaxmp.autocast(grow)
    (count, out), (_, exact), tangent = jax.jit(
        lambda x: (auto(x, ends), grow(x, ends), jax.jvp(lambda x: auto(x, ends)[1], (x,), (x,))[1])
    )(rows)
    assert_exact(count, ends)
    assert out.dtype == tangent.dtype == F16
    assert_close(np.float32(out), exact, rtol=2e-2, atol=5e-3)
    assert np.isfinite(tangent).all()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["exp1", "expi", "hyp1f1", "polar"])
def test_functions_of_scipy_with_such_loops(name: str) -> None:
    x = np.linspace(0.5, 3.0, 4, dtype=np.float32)
    m = np.eye(3, dtype=np.float32) + 0.1 * RNG.normal(size=(2, 3, 3)).astype(np.float32)
    special, linalg = jax.scipy.special, jax.scipy.linalg
    fn, args = {
        "exp1": (special.exp1, (x,)),
        "expi": (special.expi, (x,)),
        "hyp1f1": (lambda x: special.hyp1f1(1.5, 2.5, x), (x,)),
        "polar": (jax.vmap(lambda m: linalg.polar(m, method="qdwh")[0]), (m,)),
    }[name]
    assert_close(*jax.jit(lambda *args: (jaxmp.autocast(fn)(*args), fn(*args)))(*args), rtol=1e-5, atol=1e-5)


# ---- called without jit


def many_operations(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jax.nn.softmax(jnp.tanh(x @ w) + x)
    return lax.scan(lambda c, r: (c + jax.nn.gelu(r @ w), c), x[0], x)[0]


fn_of_constants = jax.jit(lambda x: many_operations(x, W))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "call",
    [
        lambda fn: jaxmp.autocast(fn, BF16)(X, W),
        lambda fn: jaxmp.autocast(lambda x: fn(x, W) + fn(2 * x, W), BF16)(X),
        lambda fn: jaxmp.autocast(fn_of_constants, BF16)(X),
    ],
    ids=["call", "inside", "closure"],
)
def test_a_jitted_function_is_compiled_once(call: Any) -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **about: Any) -> None:
        compiled.extend([event] if "backend_compile" in event else [])

    fn = jax.jit(many_operations)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first = call(fn)
        assert compiled
        compiled.clear()
        assert_same_program(call(fn), first)
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# ---- regions, and what jit keeps of them


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_a_jitted_autocast_is_the_innermost_wherever_it_was_traced_first(first: str) -> None:
    inner = jax.jit(jaxmp.autocast(jnp.matmul, BF16))
    calls = [lambda: inner(X, W), lambda: jaxmp.autocast(lambda x: inner(x, W))(X)]
    for call in calls if first == "outside" else calls[::-1]:
        assert jax.eval_shape(call).dtype == BF16


def test_a_jitted_region_holds_wherever_it_was_traced_first() -> None:
    model = nn.Dense(8)
    params = jax.jit(model.init)(KEY, X)

    @jax.jit
    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(dtype=BF16):
            return model.apply(params, x)

    assert jaxmp.autocast(lambda x: fn(x))(X).dtype == BF16
    assert fn(X).dtype == BF16


def test_an_autocast_in_a_derivative_rule_is_the_innermost() -> None:
    @jax.custom_vjp
    def fn(x: jax.Array) -> jax.Array:
        return x @ W

    def backward(_: None, g: jax.Array) -> Any:
        return (jaxmp.autocast(lambda g: g @ W.T, BF16)(g),)

    fn.defvjp(lambda x: (fn(x), None), backward)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jaxmp.autocast(fn)(x).astype(F32).sum()))(X)
    seen = [e.outvars[0].aval.dtype.name for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert seen == ["bfloat16"]  # nothing else is left of the function


def test_threads_may_share_a_region() -> None:
    region, entered, left, errors = jaxmp.autocast(dtype=BF16), threading.Barrier(2), threading.Event(), []
    with region:  # reaches something: the threads, in which nothing runs, do not warn (filters are not theirs alone)
        nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))

    def work(waits: bool) -> None:
        try:
            with region:
                entered.wait(5)
                if waits:
                    left.wait(5)
            left.set()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i == 0,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("over", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_rule_with_symbolic_zeros_gets_arrays(over: Any) -> None:
    """What is not differentiated has a zero for its derivative."""
    product_jvp = jax.custom_jvp(lambda x, w: x @ w)

    def jvp(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        return product_jvp(x, w), 3 * (dx @ w) + x @ dw

    product_jvp.defjvp(jvp, symbolic_zeros=True)
    product_vjp = jax.custom_vjp(lambda x, w: x @ w)

    def forward(x: Any, w: Any) -> Any:
        return product_vjp(x.value, w.value), (x.value, w.value)

    product_vjp.defvjp(forward, lambda kept, g: (3 * (g @ kept[1].T), kept[0].T @ g), symbolic_zeros=True)
    for product in (product_jvp, product_vjp):
        grad = jax.jit(jax.grad(lambda x, f=product: jnp.sum(jaxmp.autocast(over(f))(x, W).astype(F32) * X)))(X)
        assert grad.dtype == F32
        assert_close(grad, 3 * X @ W.T, rtol=2e-2, atol=2e-2)


# ---- modules


def test_region_reaches_recurrent_modules_and_methods_given_as_functions() -> None:
    model, x = nn.RNN(nn.LSTMCell(4)), X[None]
    variables = jax.jit(model.init)(KEY, x)

    def in_region(variables: Any, method: Any = None) -> jax.Array:
        with jaxmp.autocast(dtype=BF16):
            return model.apply(variables, x, method=method)

    out, exact = jax.jit(lambda v: (in_region(v), model.apply(v, x)))(variables)
    assert out.dtype == BF16
    assert_close(np.float32(out), exact, rtol=5e-2, atol=2e-2)
    assert_same_operations(in_region, functools.partial(in_region, method=lambda m, x: m(x)), variables)


class Outer(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(4)
        if self.how == "second argument":
            return jaxmp.autocast(lambda x, m: m(x))(x, dense)
        return jaxmp.autocast(dense if self.how == "module" else dense.__call__)(x)


@pytest.mark.parametrize("how", ["module", "method", "second argument"])
def test_bound_linen_modules(how: str) -> None:
    model = Outer(how)
    variables = jax.eval_shape(model.init, KEY, X)
    assert jax.eval_shape(model.apply, variables, X).dtype == F16


@pytest.mark.parametrize("how", ["module", "method", "partial"])
def test_nnx_modules_as_the_function(how: str) -> None:
    model, twin = (nnx.BatchNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))

    @nnx.jit
    def run(model: nnx.BatchNorm, twin: nnx.BatchNorm) -> Any:
        fn = {"module": model, "method": model.__call__, "partial": functools.partial(lambda m, x: m(x), model)}[how]
        return jaxmp.autocast(fn)(X), twin(X)

    out, expected = run(model, twin)
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


def test_explain_takes_static_arguments() -> None:
    def fn(x: jax.Array, flag: bool, name: str, *, w: jax.Array) -> Any:
        assert flag is True and name == "a"
        return x @ w

    (row,) = jaxmp.explain_autocast(
        fn, np.ones((2, 8), np.float32), True, "a", w=jax.ShapeDtypeStruct((8, 4), F32)
    ).rows
    assert row.name == "dot_general"


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("lists", [F16, BF16], ids=["in float16", "in bfloat16"])
def test_a_rounding_that_the_code_makes_stays(lists: Any, dtype: Any) -> None:
    """Of an input, of what is made of one, and in a region without autocast."""

    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(enabled=False):
            off = x.astype(dtype).astype(F32)
        return off - x, x.T.astype(dtype).astype(F32) * 1.0, x - lax.reduce_precision(x, 5, 2)

    run = jaxmp.autocast(fn, lists)
    rounded = X.astype(dtype).astype(F32)
    for off, moved, reduced in (run(X), jax.jit(run)(X)):
        assert_exact(off, rounded - X)
        assert_exact(moved, rounded.T)
        assert_exact(reduced, X - lax.reduce_precision(X, 5, 2))


def test_products_of_integers_are_integers() -> None:
    n = jnp.arange(64, dtype=jnp.int32).reshape(8, 8) + 4000
    small = n.astype(jnp.int8)

    def fn(n: jax.Array, small: jax.Array) -> Any:
        wide = lax.dot(small, small, preferred_element_type=jnp.int32)
        image = lax.conv_general_dilated(
            small[None, None], small[None, None], (1, 1), "SAME", preferred_element_type=jnp.int32
        )
        return (
            n @ n,
            jnp.vdot(n, n) % 7,
            n[:, :2] @ n[:2],
            wide,
            image,
            lax.dot(small, small, preferred_element_type=F32),
        )

    for run in (jaxmp.autocast(fn, BF16), jax.jit(jaxmp.autocast(fn, F16))):
        out = run(n, small)
        assert dtypes_of(out) == dtypes_of(fn(n, small))
        for got, expected in zip(out, fn(n, small), strict=True):
            assert_exact(got, expected)


def dtypes_of(tree: Any) -> list[str]:
    return [x.dtype.name for x in tree]


def test_numpy_scalars_are_numbers() -> None:
    def fn(x: jax.Array, s: Any) -> jax.Array:
        return x @ x * (s if s > 1 else 1)

    out = jaxmp.autocast(fn)(jnp.eye(8), np.float32(2.0))
    assert out.dtype == jnp.float16 and float(out[0, 0]) == 2.0


def test_nnx_state_of_an_outer_trace_is_read() -> None:
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    graphdef, params, stats = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, stats: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, params, stats, copy=True)(x, use_running_average=True) ** 2)

    for enabled in (True, False):
        grad = jax.grad(lambda p, e=enabled: jaxmp.autocast(loss, enabled=e)(p, stats, jnp.ones((2, 4))))
        assert jax.tree.leaves(jax.eval_shape(grad, params))[0].dtype == jnp.float32


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_params_are_params_of_the_same_function(dtype: Any) -> None:
    def loss(w: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jax.nn.gelu(w[labels] @ w) @ w.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    w = W.astype(dtype)
    auto = jaxmp.autocast(loss, dtype)
    (value, grad), wide = jax.jit(lambda w, n: (jax.value_and_grad(auto)(w, n), auto(w.astype(F32), n)))(
        w, jnp.arange(8)
    )
    assert value.dtype == wide.dtype == jnp.float32 and grad.dtype == dtype
    np.testing.assert_allclose(value, wide, rtol=2e-2)


def test_a_region_without_dtype_has_the_one_around_it() -> None:
    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(enabled=False), jaxmp.autocast(jnp.float16):
            c = x @ x
        with jaxmp.autocast(force_fp32=("tanh",)):
            return x @ x, jnp.tanh(x @ x), jaxmp.autocast(jnp.matmul)(x, x), c

    x = jnp.eye(8)
    dtypes = [y.dtype.name for y in jax.eval_shape(jaxmp.autocast(fn, jnp.bfloat16), x)]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "float16"]
    assert jax.eval_shape(jaxmp.autocast(jnp.matmul), x, x).dtype == jnp.float16  # outside of all
    assert jax.eval_shape(jaxmp.autocast(jnp.matmul, "bf16"), x, x).dtype == jnp.bfloat16


def test_what_cannot_be_autocast() -> None:
    with pytest.raises(TypeError, match="decorate the __call__ of Dense"):
        jaxmp.autocast(dtype=jnp.float16)(nn.Dense)
    with pytest.raises(ValueError, match="a region has no output to cast"), jaxmp.autocast(output_dtype=jnp.float32):
        pass
    for decorator in (jaxmp.auto_fp16, jaxmp.force_fp32):
        with pytest.raises(TypeError, match=r"Write @jaxmp\.\w+\(\)"):
            decorator(lambda x: x)


# Regions as text


def test_a_region_is_read_in_a_function_that_was_traced_for_another_rewrite() -> None:
    """`jax.jit` caches what it traced, regions included."""
    w = jnp.ones((8, 8))

    @jax.jit
    def inner(x: jax.Array) -> Any:
        with jaxmp.autocast(dtype=jnp.float16, modules={"head": jnp.float32}):
            y = x @ w
            with jaxmp.autocast(enabled=False):
                return y @ w, y

    for fn in (lambda x: inner(x), lambda x: inner(2 * x)):
        out, y = jaxmp.autocast(fn, jnp.bfloat16)(w)
        assert (out.dtype, y.dtype) == (jnp.float32, jnp.float16)


def by_rows(each: Any) -> Any:
    """Sums of `each(row, label)` over the rows, as loops write it: each row's loss is a scalar."""
    zero = jnp.zeros(())

    def scan(logits: Any, labels: Any) -> Any:
        return lax.scan(lambda total, row: (total + each(*row), None), zero, (logits, labels))[0]

    def fori(logits: Any, labels: Any) -> Any:
        return lax.fori_loop(0, len(labels), lambda i, total: total + each(logits[i], labels[i]), zero)

    def unrolled(logits: Any, labels: Any) -> Any:
        total = zero
        for i in range(len(labels)):
            total = total + each(logits[i], labels[i])
        return total

    return {
        "scan": scan,
        "fori": fori,
        "unrolled": unrolled,
        "map": lambda x, y: jnp.sum(lax.map(lambda r: each(*r), (x, y))),
    }


@pytest.mark.thorough(2)
@pytest.mark.parametrize("loop", ["scan", "fori", "unrolled", "map"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_scalars_of_float32_are_not_taken_to_16_bits_by_a_number_of_an_array(dtype: Any, loop: str) -> None:
    """Cross-entropies of single rows of saturated logits, and their sum, which ended at 0.039 and not 0.063."""
    x, w = (np.float32(RNG.normal(size=shape) * scale) for shape, scale in (((16, 20), 1), ((20, 7), 6)))
    labels = jnp.asarray(np.argmax(x @ w, -1))

    def fn(x: Any, w: Any) -> Any:
        return by_rows(lambda row, label: jax.nn.logsumexp(row) - row[label])[loop](x @ w, labels)

    logits = np.asarray(jnp.asarray(x, dtype) @ jnp.asarray(w, dtype), np.float64)
    expected = np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1)) + logits.max(-1)
    out = jax.jit(jaxmp.autocast(fn, dtype))(x, w)
    assert out.dtype == F32
    np.testing.assert_allclose(out, np.sum(expected - logits[np.arange(16), labels]), atol=2e-4)


def test_constants_among_scalars_of_16_bits_leave_them() -> None:
    """A number that is written, or a scalar array of one, does not widen the logit of one class."""

    def fn(x: Any) -> Any:
        y = (x @ W)[0, 0]
        return y * 2.0 + jnp.float32(0.5), jnp.maximum(y, 0.0)

    text = str(jax.make_jaxpr(jaxmp.autocast(fn, F16))(X))
    assert all(f"f16[] = {name}" in text for name in ("mul", "add", "max"))


def newton(x, stops_by):
    """The square root of a product, until it is right or for ten turns. (Without one inside, it would be float32.)"""
    y = x @ jnp.ones((8, 8))
    turn = lambda z: 0.5 * (z + y / z) + z @ jnp.zeros((8, 8))  # noqa: E731
    if stops_by == "the number":
        return jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, turn(c[1])), (0, y))[1]
    if stops_by == "a token":
        body = lambda c: (jnp.where(c[0] > 9, c[0], c[0] + 1), turn(c[1]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] != 10, body, (0, y))[1]
    far = lambda z: jnp.abs(z * z / y - 1) > 1e-6  # noqa: E731
    if stops_by == "a comparison":
        return jax.lax.while_loop(lambda z: jnp.any(far(z)), turn, y)
    body = lambda c: (far(turn(c[1])) & c[0], turn(c[1]))  # noqa: E731
    if stops_by == "bools of the body":
        return jax.lax.while_loop(lambda c: jnp.any(c[0]), body, (y > 0, y))[1]
    flags = lambda c: (body(c[1:])[0], *jax.jit(body)(c[1:]))  # noqa: E731
    return jax.lax.while_loop(lambda c: jnp.any(c[0]), flags, (y > 0, y > 0, y))[2]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "stops_by, dtype",
    {
        "the number": "bfloat16",
        "a token": "bfloat16",
        "a comparison": "float32",
        "bools of the body": "float32",
        "bools of a function": "float32",
    }.items(),
)
def test_a_loop_that_goes_on_until_floats_converge_carries_float32(stops_by, dtype):
    """In 16 bits it would not come nearer than 2^-9, and go on for ever, or stop at another place."""
    x = np.random.default_rng(0).uniform(0.5, 1.5, (8, 8)).astype(np.float32)
    fn = functools.partial(newton, stops_by=stops_by)
    (loop,) = (eqn for eqn in jax.make_jaxpr(jaxmp.autocast(fn, jnp.bfloat16))(x).eqns if eqn.primitive.name == "while")
    assert {v.aval.dtype.name for v in loop.outvars} - {"int32", "bool"} == {dtype}
    if dtype == "float32":
        found = jax.jit(jaxmp.autocast(fn, jnp.bfloat16))(x)
        np.testing.assert_allclose(found[:, :1], np.sqrt(x.sum(axis=1, keepdims=True)), rtol=2**-8)


NUMBERS: dict[str, Any] = {"bool": True, "int": 3, "float": 2.5}
CALLS: dict[str, Any] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "in a scan": lambda f: lambda x, n: lax.scan(lambda c, y: (c, f(y, n)), 0, x[None])[1][0],
    "in a vmap": lambda f: lambda x, n: jax.vmap(f, (0, None))(x, n),
}


@pytest.mark.thorough(6)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_python_as_an_operand_of_a_call(number: str, call: str) -> None:
    n = NUMBERS[number]

    def choose(x: Any, n: Any) -> Any:
        return lax.cond(n > 0, lambda: x * n, lambda: x)

    def fn(x: Any) -> Any:
        return CALLS[call](jax.jit(choose))(x @ W, n)

    def loss(fn: Any) -> Any:
        return jax.value_and_grad(lambda x: fn(x).astype(F32).sum())

    out, grad = jax.jit(loss(jaxmp.autocast(fn, BF16)))(X)
    expected, expected_grad = jax.jit(loss(fn))(X)
    assert_close(out, expected, rtol=2**-6)
    assert_close(grad, expected_grad, rtol=2**-6)


def test_a_literal_as_the_result_of_a_call() -> None:
    def fn(x: Any) -> Any:
        y, a, b, n = jax.jit(lambda x: (x @ x, 1.5, True, 3))(x)
        return jnp.where(b, y * a, y) * n

    out = jaxmp.autocast(fn, BF16)(jnp.eye(8))
    assert out.dtype == BF16
    assert_exact(out, 4.5 * jnp.eye(8, dtype=BF16))


CLOSURES: dict[str, Any] = {
    "jit": lambda w: jax.jit(lambda x: many_operations(x, w)),
    "jit in jit": lambda w: jax.jit(lambda x: jax.jit(lambda x: many_operations(x, w))(x) + many_operations(x, W)),
    "remat": lambda w: jax.checkpoint(lambda x: many_operations(x, w)),
    "jit in a derivative": lambda w: jax.jit(lambda x: jax.nn.relu(many_operations(jax.nn.silu(x), w))),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("closure", CLOSURES)
def test_nothing_holds_the_arrays_of_a_function_that_is_gone(closure: str) -> None:
    w = W + 1
    arrays = weakref.ref(w)
    fn = CLOSURES[closure](w)
    auto = jaxmp.autocast(lambda x: fn(x), BF16)
    auto(X)
    jax.grad(lambda x: auto(x).astype(F32).sum())(X)
    del w, fn, auto
    gc.collect()
    assert arrays() is None
