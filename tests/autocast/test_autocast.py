"""autocast: what runs in which dtype, under and over every transformation, and what it must never change.

The dtypes of single operations beside PyTorch's are in test_autocast_ops.py, whole models in test_autocast_models.py.
"""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_within_ulps, sqnr
from same_operations import assert_same_operations

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), F32)
W = jnp.asarray(RNG.normal(size=(8, 8)) * 0.3, F32)
B = jnp.linspace(-1.0, 1.0, 8)


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype.name, tree)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ params["w"] + params["b"][None])
    return jax.nn.softmax(h @ params["w"].T)


def mlp_by_hand(params: Any, x: jax.Array) -> jax.Array:
    w, b = params["w"].astype(F16), params["b"].astype(F16)
    h = jax.nn.relu(x.astype(F16) @ w + b[None])
    return jax.nn.softmax((h @ w.T).astype(F32))


PARAMS = {"w": W, "b": B}


# ---- what a function computes


def test_equals_the_function_cast_by_hand() -> None:
    assert_same_operations(jaxmp.autocast(mlp), mlp_by_hand, PARAMS, X)


def test_gradients_equal_those_of_the_function_cast_by_hand() -> None:
    """That of the bias differs: tests/autocast/test_repeated_params.py."""

    def loss(fn: Any, w: Any, b: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(fn({"w": w, "b": b}, x) ** 2)

    auto, by_hand = (functools.partial(loss, fn) for fn in (jaxmp.autocast(mlp), mlp_by_hand))
    found = jax.eval_shape(jax.grad(auto, (0, 1, 2)), W, B, X)
    assert set(jax.tree.leaves(dtypes(found))) == {"float32"}  # as the params are
    assert_same_operations(jax.grad(auto, (0, 2)), jax.grad(by_hand, (0, 2)), W, B, X)


def count(text: str, op: str) -> int:
    return len(re.findall(rf"stablehlo\.{op} ", text))


def test_no_more_casts_than_by_hand_and_each_weight_once() -> None:
    def text(fn: Any) -> str:
        return jax.jit(jax.value_and_grad(lambda w: fn({"w": w, "b": B}, X).sum())).lower(W).as_text()

    auto, by_hand = text(jaxmp.autocast(mlp)), text(mlp_by_hand)
    assert count(auto, "dot_general") == count(by_hand, "dot_general")
    assert count(auto, "convert") <= count(by_hand, "convert")
    assert len(re.findall(r"convert .*tensor<8x8xf32>\) -> tensor<8x8xf16>", auto)) == 1  # w is used twice


@pytest.mark.parametrize("fn", [mlp, lambda p, x: lax.scan(lambda c, _: (c @ p["w"], c.sum()), x, None, 3)])
def test_float32_changes_nothing(fn: Any) -> None:
    assert_same_operations(jaxmp.autocast(fn, F32), fn, PARAMS, X)
    assert_same_operations(jaxmp.autocast(fn, F16, enabled=False), fn, PARAMS, X)


def test_output_structure_stays() -> None:
    def fn(x: jax.Array, flag: bool, name: str, nothing: None) -> Any:
        assert flag is True and name == "a" and nothing is None
        return {"y": x @ x, "n": 3, "none": None, "name": name, "count": jnp.arange(2), "pair": (x, 0.5)}

    out = jaxmp.autocast(fn)(W, True, "a", nothing=None)
    assert jax.tree.structure(out) == jax.tree.structure(fn(W, True, "a", None))
    assert out["n"] == 3 and out["name"] == "a" and out["pair"][1] == 0.5
    assert dtypes((out["y"], out["count"], out["pair"][0])) == ("float16", "int32", "float32")
    assert dtypes(jaxmp.autocast(lambda x: (x @ x, x > 0), output_dtype=F32)(W)) == ("float32", "bool")


def test_leaves_other_dtypes_alone() -> None:
    def fn(n: jax.Array, key: jax.Array, z: jax.Array) -> Any:
        return n @ n.T, jax.random.split(key), z * 2, jax.random.normal(key, (2,))

    with jax.enable_x64(True):
        n, z = jnp.arange(4, dtype=jnp.int32).reshape(2, 2), jnp.ones(2, jnp.complex64)
        assert_within_ulps(jaxmp.autocast(fn)(n, KEY, z), fn(n, KEY, z), 4)  # of normal numbers; all else is exact
        wide = jnp.ones((2, 2), jnp.float64)
        assert jaxmp.autocast(jnp.matmul)(wide, wide).dtype == jnp.float64
        assert jaxmp.autocast(jnp.matmul)(wide, jnp.ones((2, 2), F32)).dtype == jnp.float64


# ---- the lists, and what their neighbours make of them


@pytest.mark.thorough(6)
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x @ W, "float16"),
        (lambda x: x @ W + B[None], "float16"),  # a bias is a part of the matmul
        (lambda x: (x @ W) + X, "float32"),  # a residual is not
        (lambda x: (x @ W) * 2.0, "float16"),  # a number does not vote
        (lambda x: (x @ W) * jnp.sum(x), "float16"),  # nor does a scalar
        (lambda x: (x @ W) + 1e-8, "float32"),  # but float16 has no 1e-8
        (lambda x: (x @ W) * 1e6, "float32"),
        (lambda x: 1.0 / (x @ W), "float32"),
        (lambda x: (x @ W) ** 2, "float32"),
        (lambda x: jnp.exp(x @ W), "float32"),
        (lambda x: jax.nn.gelu(x @ W), "float16"),
        (lambda x: jax.nn.elu(x @ W), "float16"),
        (lambda x: jnp.where(x > 0, x @ W, 0.0), "float16"),
        (lambda x: jnp.where(x > 0, x @ W, jnp.zeros_like(x)), "float16"),
        (lambda x: jnp.zeros_like(x) + x @ W, "float32"),  # what is summed up may be long
        (lambda x: jnp.concatenate([x @ W, x]), "float32"),
        (lambda x: jax.nn.softmax(x @ W), "float32"),
        (lambda x: (x @ W).astype(BF16), "bfloat16"),  # what was asked for
        (lambda x: jnp.linalg.inv((x @ W)[:, :4]), "float32"),  # no 16-bit form: as it was written
        (lambda x: jnp.dot(x.astype(F16), W.astype(F16), preferred_element_type=F32), "float32"),
        (lambda x: jnp.einsum("i,j->ij", x[0].astype(F16), x[1].astype(F16), preferred_element_type=F32), "float32"),
        (lambda x: jnp.dot(x, W, precision=lax.DotAlgorithmPreset.F32_F32_F32), "float32"),
        (lambda x: jnp.zeros((4, 8)).at[jnp.arange(2)].add((x @ W)[:2]), "float32"),
    ],
)
def test_dtypes(fn: Any, expected: str) -> None:
    out, exact = jax.jit(lambda x: (jaxmp.autocast(fn)(x), fn(x)))(X)
    assert out.dtype.name == expected
    out, exact = np.asarray(out, np.float64), np.asarray(exact, np.float64)
    assert np.linalg.norm(out - exact) < 0.03 * np.linalg.norm(exact)


EPS = jnp.float32(1e-8)  # an array without axes, closed over below

TINY: dict[str, Any] = {
    "numpy scalar": lambda x: x + jnp.float32(1e-8),
    "closed-over array": lambda x: x + EPS,
    "broadcast": lambda x: x + jnp.broadcast_to(EPS, (8,))[None],
    "computed": lambda x: x + jnp.sqrt(EPS) * EPS / 2,
    "maximum": lambda x: jnp.maximum(x, 1e-8),
    "maximum of an array": lambda x: jnp.maximum(x, EPS),
    "clip": lambda x: jnp.clip(x, 1e-8, 1.0),
    "where": lambda x: jnp.where(x > 0, x, EPS),
    "huge maximum": lambda x: jnp.maximum(x, 1e6),
    "huge divisor": lambda x: x / 1e8 * 1e8,
    "in a scan": lambda x: lax.scan(lambda c, r: (jnp.maximum(c, EPS), r + EPS), x[0], x)[1],
    "in a while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.maximum(c[1], EPS)), (0, x))[1],
    "in a cond": lambda x: lax.cond(x[0, 0] > 9, lambda x, e: x - e, lambda x, e: x + e, x, EPS),
    "in a jit": lambda x: jax.jit(lambda x, e: jnp.maximum(x, e))(x, EPS),
    "in a rematerialized": lambda x: jax.checkpoint(lambda x: jnp.log(jnp.maximum(x, EPS)))(x),
    "in a vmap": lambda x: jax.vmap(lambda r: jnp.maximum(r, EPS))(x),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", TINY)
def test_constants_that_float16_cannot_hold_keep_their_operation_in_float32(name: str) -> None:
    """In value and gradient, where the 16-bit value is 0; bfloat16 holds all of them."""

    def fn(x: jax.Array) -> jax.Array:
        return TINY[name](x @ jnp.eye(8))

    def run(fn: Any) -> Any:
        return lambda x: (fn(x), jax.vjp(fn, x)[1](fn(x) * 0 + 1)[0]) if "while" not in name else (fn(x), x)

    x = jnp.zeros((2, 8))
    got, exact = jax.jit(lambda x: (run(jaxmp.autocast(fn))(x), run(fn)(x)))(x)
    assert got[0].dtype == F32
    assert_close(got, exact, rtol=1e-6)
    assert jax.eval_shape(jaxmp.autocast(fn, BF16), x).dtype == (F32 if "remat" in name else BF16)


@pytest.mark.parametrize(
    "constant", [lambda x: jnp.maximum(x, -1e9), lambda x: jnp.clip(x, -1e6, 1e6), lambda x: jnp.maximum(x, 1e-3)]
)
def test_bounds_that_no_value_passes_saturate(constant: Any) -> None:
    assert jax.eval_shape(jaxmp.autocast(lambda x: constant(x @ W)), X).dtype == F16


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: jnp.einsum("i,j->ij", a, b),
        lambda a, b: jnp.outer(a, b),
        lambda a, b: a[:, None] @ b[None],
        lambda a, b: jnp.einsum("bi,bj->bij", a[None], b[None])[0],
    ],
)
def test_a_product_that_sums_nothing_keeps_the_widest_dtype(product: Any) -> None:
    position, frequency = jnp.arange(512.0), 1e4 ** -jnp.linspace(0.0, 1.0, 8)
    angles = jax.jit(jaxmp.autocast(product, BF16))(position, frequency)
    assert_close(angles, np.outer(position, frequency), rtol=1e-6)
    low = jax.eval_shape(jaxmp.autocast(lambda a, b: product(a @ W, b @ W), BF16), X[0], X[1])
    assert low.dtype == BF16


WRITES: dict[str, Any] = {
    "dynamic_update_slice": lambda cache, x: lax.dynamic_update_slice(cache, x, (1, 0)),
    "set": lambda cache, x: cache.at[1:2].set(x),
    "set rows": lambda cache, x: cache.at[np.array([1])].set(x),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_buffer_keeps_its_dtype(name: str, dtype: Any) -> None:
    @functools.partial(jaxmp.autocast, dtype=dtype)
    def step(cache: jax.Array, x: jax.Array) -> Any:
        cache = WRITES[name](cache, jax.nn.softmax(x)[None])  # float32
        return cache, cache.sum()

    small = jnp.zeros((3, 8), dtype)
    cache, _ = jax.jit(lambda cache: lax.scan(step, cache, X))(small)
    assert cache.dtype == dtype and float(cache[1].sum()) > 0.9
    wide = jax.eval_shape(jaxmp.autocast(lambda x: WRITES[name](jnp.zeros((3, 8)), x @ W), dtype), X[:1])
    assert wide.dtype == F32


def test_norms_by_hand_do_not_overflow() -> None:
    def norm(x: jax.Array) -> jax.Array:
        x = x @ jnp.eye(8)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    big = jnp.full((2, 8), 3000.0)  # 9e6 is inf in float16
    assert_close(*jax.jit(lambda x: (jaxmp.autocast(norm)(x), norm(x)))(big), rtol=1e-3)


def test_softmax_runs_in_float32_from_its_first_operation() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(X > 0, x @ W, -1e30))

    def by_hand(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(X > 0, (x.astype(F16) @ W.astype(F16)).astype(F32), -1e30))

    assert_close(*jax.jit(lambda x: (jaxmp.autocast(fn)(x), by_hand(x)))(X), rtol=1e-6)


def test_gelu_of_large_values_has_a_gradient() -> None:
    # in float16 alone, the square in its derivative is inf times zero
    grad = jax.grad(lambda x: jaxmp.autocast(lambda x: jax.nn.gelu(x @ jnp.eye(8)))(x).astype(F32).sum())
    assert_close(jax.jit(grad)(jnp.full((1, 8), 300.0)), jnp.ones((1, 8)), rtol=1e-3)


def test_gelu_in_bfloat16_is_that_of_a_model_cast_by_hand() -> None:
    # its cube ends in a tanh and bfloat16 has the range of float32: nothing is kept in float32 for the backward pass
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.gelu(x @ W) @ W)

    def times(number: float, x: jax.Array) -> jax.Array:  # a number is not rounded to bfloat16
        return (number * x.astype(F32)).astype(BF16)

    def gelu(x: jax.Array) -> jax.Array:
        cdf = 0.5 * (1.0 + jnp.tanh(times(np.sqrt(2 / np.pi), x + times(0.044715, x**3))))
        return x * cdf

    def by_hand(x: jax.Array) -> jax.Array:
        w = W.astype(BF16)
        return jnp.sum((gelu(x.astype(BF16) @ w) @ w).astype(F32))

    auto = jaxmp.autocast(fn, BF16)
    assert_same_operations(jax.value_and_grad(auto), jax.value_and_grad(by_hand), X)
    assert jax.eval_shape(jaxmp.autocast(lambda x: (x @ W) ** 2, BF16), X).dtype == F32  # a power that stays one


def test_masks_saturate() -> None:
    out = jaxmp.autocast(lambda x: jnp.where(jnp.arange(8) > 3, x @ W, -1e9))(X)
    assert out.dtype == F16 and float(out[0, 0]) == -65504.0


def test_lists_can_be_changed() -> None:
    def dtype(fn: Any, **lists: Any) -> Any:
        return jax.eval_shape(jaxmp.autocast(fn, **lists), X).dtype

    assert dtype(jnp.tanh, allow=("tanh",)) == F16
    assert dtype(lambda x: jnp.tanh(x @ W), force_fp32=("tanh",)) == F32
    assert dtype(lambda x: jnp.sum(x @ W), widest=("reduce_sum",)) == F16
    assert dtype(lambda x: x @ W, force_fp32=("dot_general",)) == F32


# ---- transformations, under and over


def relu_dot(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ W)


@jax.custom_vjp
def times_seven(x: jax.Array, n: jax.Array) -> Any:
    return jnp.sin(x) @ W, n + 1


times_seven.defvjp(lambda x, n: (times_seven(x, n), x), lambda x, g: (7.0 * (g[0] @ W.T) * jnp.cos(x), None))


@jax.custom_jvp
def straight(x: jax.Array) -> jax.Array:
    return jnp.round(x @ W)


straight.defjvp(lambda p, t: (straight(*p), 3.0 * (t[0] @ W)))

FUNCTIONS: dict[str, Any] = {
    "jit": jax.jit(relu_dot),
    "vmap": jax.vmap(lambda row: jax.nn.relu(row @ W)),
    "remat": jax.checkpoint(lambda x: jnp.tanh(x @ W) @ W),
    "scan": lambda x: lax.scan(lambda c, w: (jnp.tanh(c @ w), c[0]), x, jnp.stack([W, W]))[0],
    "while": lambda x: lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] @ W, c[1] + 1), (x, 0))[0],
    "cond": lambda x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: x @ W, x),
    "custom_vjp": lambda x: times_seven(x @ W, jnp.arange(2))[0],
    "custom_jvp": lambda x: straight(x @ W),
    "nested": lambda x: lax.scan(jax.checkpoint(lambda c, _: (jax.jit(relu_dot)(c), None)), x, None, length=2)[0],
}
DTYPES = {"cond": "float32"}  # the other branch hands on float32


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_transformations(name: str) -> None:
    fn = FUNCTIONS[name]
    auto = jaxmp.autocast(fn)

    @jax.jit
    def run(x: jax.Array) -> Any:
        return fn(x), auto(x), jax.vmap(auto)(x[None])[0]

    exact, *outs = run(X)
    if name in ("jit", "custom_jvp"):  # without jit, operation by operation
        outs.append(auto(X))
    for out in outs:
        assert out.dtype.name == DTYPES.get(name, "float16")
        assert name == "custom_jvp" or sqnr(exact, out) > 45  # there a rounding may go the other way


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "while"])
def test_gradients_under_and_over(name: str) -> None:
    fn = FUNCTIONS[name]

    def loss(f: Any) -> Any:
        return lambda x: jnp.sum(f(x).astype(F32) * jnp.cos(X))

    exact, under, over = jax.jit(
        lambda x: (
            jax.grad(loss(fn))(x),
            jax.grad(loss(jaxmp.autocast(fn)))(x),
            jaxmp.autocast(jax.grad(loss(fn)))(x),
        )
    )(X)
    assert under.dtype == F32  # as x is
    for grad in (under, over):
        assert sqnr(exact, grad) > 40


def test_rules_of_custom_derivatives_are_kept() -> None:
    grad = jax.grad(lambda x: jaxmp.autocast(straight)(x).astype(F32).sum())  # round alone has none
    grad, (_, tangent) = jax.jit(lambda x: (grad(x), jax.jvp(jaxmp.autocast(straight), (x,), (jnp.ones_like(x),))))(X)
    w = np.asarray(W)
    assert_close(grad, np.broadcast_to(3 * w.sum(1), X.shape), rtol=1e-2, atol=1e-2)
    assert tangent.dtype == F16
    assert_close(np.float32(tangent), np.broadcast_to(3 * w.sum(0), X.shape), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_the_gradient_of_a_weight_that_a_loop_reads_is_summed_in_float32(dtype: Any) -> None:
    """Each of 5000 steps adds one: in 16 bits the sum stops at 256 or 2048."""

    def fn(w: jax.Array) -> jax.Array:
        return lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, jnp.ones((5000, 1, 4)))[0]

    assert_exact(jax.jit(jax.grad(jaxmp.autocast(fn, dtype)))(W[:4]), np.full((4, 8), 5000, np.float32))


def test_what_a_loop_keeps_of_a_weight_is_not_stacked() -> None:
    def fn(w: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), X, None, length=77)[0])

    text = str(jax.make_jaxpr(jax.grad(jaxmp.autocast(fn)))(W))
    assert "[77,4,8]" in text and "[77,8,8]" not in text


def test_loops_carry_what_their_body_gives() -> None:
    def fn(x: jax.Array) -> Any:
        zeros = jnp.zeros_like(x)
        (h, total), last = lax.scan(lambda c, _: ((c[0] @ W, c[1] + c[0]), c[0]), (x, zeros), None, length=3)
        swapped = lax.fori_loop(0, 3, lambda i, c: (c[1] @ W, c[0]), (x, x))
        return h, total, last, swapped

    # h is a matmul's; a sum that began in float32 stays there
    types = dtypes(jax.eval_shape(jaxmp.autocast(fn), X))
    assert types == ("float16", "float32", "float16", ("float16", "float16"))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_under_and_over(check_vma: bool) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def mapped(f: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)

    def fn(x: jax.Array) -> jax.Array:
        return lax.psum(jax.nn.relu(x @ W), "data")

    exact = (np.asarray(X @ W) > 0) @ np.asarray(W).T
    for run in (mapped(jaxmp.autocast(fn)), jaxmp.autocast(mapped(fn))):
        assert jax.eval_shape(run, X).dtype == F16
        grad = jax.jit(jax.grad(lambda x, run=run: run(x).astype(F32).sum()))(X)
        assert grad.dtype == F32
        assert sqnr(exact, grad) > 40


def test_pmap_under_and_over() -> None:
    expected = np.maximum(np.asarray(X) @ np.asarray(W), 0)[:, None]
    for run in (jax.pmap(jaxmp.autocast(relu_dot)), jax.jit(jaxmp.autocast(jax.pmap(relu_dot)))):
        out = run(X[:, None])
        assert out.dtype == F16 and sqnr(expected, out) > 55


def test_profiles_keep_their_names() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            return x @ W

    assert "attention/dot_general" in jax.jit(jaxmp.autocast(fn)).lower(X).compile().as_text()


def test_fp8_layers_take_their_input_in_16_bits() -> None:
    """As other matmuls do; the kernel is rounded once. Small whole numbers are exact in every dtype."""
    model = nn.Dense(16, dot_general_cls=jaxmp.linen.Fp8DotGeneral)
    x = jax.random.randint(KEY, (16, 16), -2, 3).astype(jnp.float32)
    params = jax.jit(model.init)(KEY, x)
    params["params"]["kernel"] = jax.random.randint(KEY, (16, 16), -2, 3).astype(jnp.float32)
    auto = jaxmp.autocast(model.apply, BF16)
    functions = [lambda v, x, f=f: (f(v, x), jax.grad(lambda v: jnp.sum(f(v, x) * x))(v)) for f in (auto, model.apply)]
    (y, grads), expected = (jax.jit(f)(params, x) for f in functions)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(auto)(params, x))
    assert_exact((y.astype(jnp.float32), grads), expected)
    tie = jnp.full((16, 16), 1 + 2**-4 + 2**-10)  # in bfloat16 without the last bit, which decides how e4m3 rounds
    ones = jax.tree.map(lambda p: jnp.ones_like(p) if p.ndim == 2 else jnp.zeros_like(p), params)
    assert {float(f(ones, tie)[0, 0]) for f in (auto, model.apply)} == {16.0, 18.0}


# ---- regions


def test_regions_in_a_function() -> None:
    def fn(x: jax.Array) -> Any:
        a = x @ W
        with jaxmp.autocast(enabled=False):
            b = a @ W  # gets float32 back, as it was written
            with jaxmp.autocast(BF16):
                c = a @ W
        return a, b, c, jaxmp.no_autocast(jnp.matmul)(a, W), jax.jit(jaxmp.autocast(jnp.matmul, BF16))(a, W)

    expected = ("float16", "float32", "bfloat16", "float32", "bfloat16")
    assert dtypes(jaxmp.autocast(fn)(X)) == expected
    assert dtypes(jax.eval_shape(jax.jit(jaxmp.autocast(fn)), X)) == expected
    assert dtypes(jax.eval_shape(fn, X)) == ("float32", "float32", "float32", "float32", "bfloat16")


def test_a_region_holds_in_what_it_calls() -> None:
    def fn(x: jax.Array) -> Any:
        with jaxmp.autocast(enabled=False):
            return lax.scan(lambda c, _: (jax.jit(relu_dot)(c), None), x @ W, None, length=2)[0]

    assert_same_operations(jaxmp.autocast(fn), fn, X)


@pytest.mark.parametrize("run", [jax.pmap, lambda f: jax.vmap(f), jax.jit])
def test_the_innermost_counts_through_transformations(run: Any) -> None:
    inner = jaxmp.autocast(jnp.matmul, BF16)
    out = jax.eval_shape(jaxmp.autocast(lambda x: run(lambda y: (inner(y, W), y @ W))(x[:, None])), X)
    assert dtypes(out) == ("bfloat16", "float16")


def test_gradients_in_a_region() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jaxmp.autocast(enabled=False):
            return jnp.sum((x @ W) ** 2)

    assert_same_operations(jaxmp.autocast(jax.grad(fn)), jax.grad(fn), X)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        self.sow("intermediates", "norm", x)
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


def test_region_reaches_linen_modules() -> None:
    variables = jax.jit(Net().init)({"params": KEY, "dropout": KEY}, X)
    variables = {k: variables[k] for k in ("params", "batch_stats")}
    run = functools.partial(Net().apply, mutable=["batch_stats", "intermediates"], rngs={"dropout": KEY})

    def in_bfloat16(variables: Any) -> Any:
        with jaxmp.autocast(dtype=BF16):
            return run(variables, X)

    def switched_off(variables: Any) -> Any:
        with jaxmp.autocast(dtype=BF16), jaxmp.autocast(enabled=False):
            return run(variables, X)

    def gradient(variables: Any) -> Any:
        with jaxmp.autocast(dtype=BF16):
            return jax.grad(lambda v: run(v, X)[0].astype(F32).sum())(variables)

    (out, state), (_, plain_state) = jax.jit(lambda v: (in_bfloat16(v), run(v, X)))(variables)
    assert out.dtype == BF16 and state["intermediates"]["norm"][0].dtype == BF16
    assert set(jax.tree.leaves(dtypes((state["batch_stats"], jax.eval_shape(gradient, variables))))) == {"float32"}
    assert_close(state["batch_stats"], plain_state["batch_stats"], rtol=1e-2, atol=1e-3)
    assert_same_operations(switched_off, lambda v: run(v, X), variables)
    assert_same_operations(in_bfloat16, lambda v: jaxmp.autocast(run, BF16)(v, X), variables)


def test_params_are_made_as_they_are() -> None:
    def plain(key: jax.Array) -> Any:
        return Net().init({"params": key, "dropout": key}, X)["params"]

    def in_float16(key: jax.Array) -> Any:
        with jaxmp.autocast(dtype=F16):
            return plain(key)

    assert_same_operations(in_float16, plain, KEY)


def test_methods_of_linen_modules() -> None:
    class Head(nn.Module):
        @jaxmp.autocast(dtype=BF16)
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            with jaxmp.autocast(enabled=False):
                y = nn.Dense(4)(x)
            return y, nn.Dense(4)(x)

    params = jax.jit(Head().init)(KEY, X)
    assert dtypes(Head().apply(params, X)) == ("float32", "bfloat16")
    assert dtypes(jax.eval_shape(jaxmp.autocast(Head().apply), params, X)) == ("float32", "bfloat16")


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        y = self.norm(self.dense(x))
        return self.out(self.drop(y)), y


@pytest.mark.thorough(0)
def test_nnx_modules_as_arguments() -> None:
    model, twin = nnx.jit(lambda: (NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(0))))()

    @nnx.jit
    def run(model: NnxNet, twin: NnxNet) -> Any:
        out = jaxmp.autocast(lambda m, x: m(x))(model, X)
        assert type(model) is NnxNet and type(model.norm) is nnx.BatchNorm and "_jaxmp_name" not in vars(model.norm)
        return out, twin(X)[0]

    out, plain = run(model, twin)
    assert dtypes(out) == ("float16", "float16")
    assert_close(np.float32(out[0]), plain, rtol=2e-2, atol=2e-2)  # the same dropout
    assert_close(nnx.as_pure(nnx.state(model)), nnx.as_pure(nnx.state(twin)), rtol=1e-2, atol=1e-3)  # state moved

    def loss_fn(model: NnxNet, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x)[0] ** 2)

    loss, grads = nnx.jit(nnx.value_and_grad(jaxmp.autocast(loss_fn)))(model, X)
    assert loss.dtype == F32 and set(jax.tree.leaves(dtypes(nnx.as_pure(grads)))) == {"float32"}


def test_methods_of_nnx_modules() -> None:
    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 4, rngs=rngs)

        @jaxmp.autocast(dtype=BF16)
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

    assert Head(nnx.Rngs(0))(X).dtype == BF16


@pytest.mark.thorough(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_region_reaches_value_and_grad(accumulate: int) -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=1024.0)
    opt_state, params = tx.init(PARAMS), jax.tree.map(lambda p: p.astype(F16), PARAMS)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(mlp(params, x) ** 2)

    def run(fn: Any, params: Any) -> Any:
        return jaxmp.value_and_grad(fn, accumulate=accumulate)(params, X, opt_state=opt_state)

    def in_region(params: Any) -> Any:
        with jaxmp.autocast(dtype=F16):
            return run(loss_fn, params)

    assert_same_operations(in_region, functools.partial(run, jaxmp.autocast(loss_fn)), params)
    jaxpr = str(jax.make_jaxpr(in_region)(params))
    assert "preferred_element_type=float16" in jaxpr and "preferred_element_type=float32" not in jaxpr


def test_region_reaches_nnx_value_and_grad() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
    opt_state = tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))
    traced = []

    def loss_fn(model: nnx.Linear, x: jax.Array) -> jax.Array:
        traced.append(model)
        return jnp.mean(model(x) ** 2)

    @nnx.jit
    def run(model: nnx.Linear) -> Any:
        with jaxmp.autocast(dtype=BF16), jax.numpy_rank_promotion("allow"):
            return jaxmp.nnx.value_and_grad(loss_fn)(model, X, opt_state=opt_state)[0]

    def by_hand(w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.mean((X.astype(BF16) @ w.astype(BF16) + b[None].astype(BF16)).astype(F32) ** 2)

    assert_close(run(model), jax.jit(by_hand)(model.kernel[...], model.bias[...]), rtol=1e-6)


# ---- explain


def test_explain() -> None:
    model = nn.Sequential([nn.Dense(16), jax.nn.softmax])
    params = jax.eval_shape(model.init, KEY, X)
    explanation = jaxmp.explain_autocast(model.apply, params, X, dtype=BF16)
    (dot,) = [row for row in explanation.rows if row.name == "dot_general"]
    assert dot == ("Sequential/layers_0", "dot_general", "float32", "bfloat16", "allow", 1, 2 * 4 * 8 * 16)
    by_name = {row.name: row for row in explanation.rows}
    assert by_name["exp"][3:5] == ("float32", "force_fp32")
    assert by_name["sub"][3:5] == ("float32", "feeds float32")
    assert explanation.casts == 4  # x, kernel, bias, and the logits back
    table = str(explanation)
    assert "Sequential/layers_0  dot_general" in table and "% in bfloat16" in table
    assert table.endswith(f"\n{explanation.summary()}") and explanation.summary() == "matmul FLOPs: 100.0% in bfloat16"


class Layer(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8)(nn.gelu(nn.Dense(self.width)(nn.LayerNorm()(x))))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(48):
            x = Layer(width=16 if i == 5 else 8)(x)
        return nn.Dense(4, name="head")(x)


@pytest.mark.thorough(0)
def test_explain_shows_repeated_layers_once() -> None:
    explanation = jaxmp.explain_autocast(Deep().apply, jax.eval_shape(Deep().init, KEY, X), X, dtype=BF16)
    lines = str(explanation).splitlines()
    assert len(explanation.rows) > 500 and len(lines) < 60
    dots = [line.split() for line in lines if " dot_general " in line]
    assert [(d[0], d[2], d[-1]) for d in dots] == [
        ("Deep/Layer_[0-4,6-47]/Dense_[0-1]", "94", f"{94 * 2 * 4 * 8 * 8 / 1e6:.3f}"),
        ("Deep/Layer_5/Dense_1", "1", f"{2 * 4 * 8 * 16 / 1e6:.3f}"),
        ("Deep/Layer_5/Dense_0", "1", f"{2 * 4 * 8 * 16 / 1e6:.3f}"),
        ("Deep/head", "1", f"{2 * 4 * 8 * 4 / 1e6:.3f}"),
    ]
    total = sum(int(line.split()[2]) for line in lines[1:-2])
    assert total == sum(row.count for row in explanation.rows)


def test_explain_counts_iterations_and_computes_nothing() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (c @ W, None), x, None, length=5)[0]

    shape = jax.ShapeDtypeStruct((1000, 8), F32)
    (row,) = [r for r in jaxmp.explain_autocast(fn, shape).rows if r.name == "dot_general"]
    assert (row.count, row.flops) == (5, 5 * 2 * 1000 * 8 * 8)


def test_explain_names_nnx_modules() -> None:
    model = NnxNet(nnx.Rngs(0))
    before = nnx.as_pure(nnx.state(model))
    rows = jaxmp.explain_autocast(lambda m, x: m(x)[0], model, X).rows
    assert {"NnxNet/dense", "NnxNet/out"} <= {r.module for r in rows if r.name == "dot_general"}
    assert_moved(jax.tree.leaves(nnx.as_pure(nnx.state(model))), jax.tree.leaves(before))


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"allow": ("dot_generall",)}, ValueError, "allow holds 'dot_generall'.*Close to it: dot_general"),
        ({"force_fp32": "exp"}, TypeError, "collection of names, got the string 'exp'"),
        ({"allow": ("exp",), "widest": ("exp",)}, ValueError, "'exp' stands in allow and in widest"),
        ({"dtype": jnp.float8_e4m3fn}, ValueError, r"float8_e4m3fn: fp8 needs scales.*docs/how-to/precision/fp8.md"),
        ({"dtype": "float64"}, ValueError, "got float64: it is wider than float32"),
        ({"dtype": jnp.int32}, ValueError, "must be float16, bfloat16 or float32 .off., got int32"),
        ({"dtype": "half"}, ValueError, "got float16|got 'half'"),
        ({"output_dtype": jnp.int32}, ValueError, "output_dtype must be a float dtype, got int32"),
    ],
)
def test_bad_arguments(arguments: Any, error: Any, message: str) -> None:
    if arguments.get("dtype") == "half":
        assert jaxmp.autocast(jnp.matmul, "half")(W, W).dtype == F16  # numpy's name of float16
        return
    with pytest.raises(error, match=message):
        jaxmp.autocast(jnp.matmul, **arguments)


def test_fn_must_be_callable() -> None:
    with pytest.raises(TypeError, match="fn must be a function or None"):
        jaxmp.autocast(3)


# ---- any function

UNARY = [
    jnp.tanh,
    jnp.exp,
    jax.nn.gelu,
    jax.nn.softmax,
    lambda x: jnp.cumsum(x, 0),
    jax.nn.relu,
    lambda x: x * x,
    lambda x: x + 1e-8,
]
UNARY += [lambda x: x.T, lambda x: jnp.sum(x, 1, keepdims=True) + x, lambda x: jnp.where(x > 0, x, -1.0), jnp.sort]
UNARY += [lambda x: jax.jit(jnp.sin)(x), lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1], lambda x: x[::-1]]
BINARY = [
    jnp.add,
    jnp.multiply,
    jnp.matmul,
    jnp.maximum,
    lambda x, y: lax.cond(x[0, 0] > y[0, 0], jnp.add, jnp.dot, x, y),
]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_random_functions_run_within_the_tolerance_of_16_bits(program: list[tuple[int, int, int]]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        values = [x, x.T * 0.5]
        for op, i, j in program:
            a, b = values[i % len(values)], values[j % len(values)]
            out = (UNARY + BINARY)[op % len(UNARY + BINARY)]
            y = out(a, b) if out in BINARY else out(a)
            values.append(y / (1.0 + jnp.max(jnp.abs(y))))  # within [-1, 1], so that no error grows
        return values[-1]

    x = jax.random.uniform(KEY, (3, 3), minval=-1.0)
    exact = jax.jit(fn)(x)
    for dtype, bits in ((F16, 10), (BF16, 7)):
        out = jax.jit(jaxmp.autocast(fn, dtype))(x)
        assert out.shape == exact.shape
        assert out.dtype in (dtype, F32)
        assert np.max(np.abs(np.asarray(out, np.float32) - np.asarray(exact))) < 30 * 2.0**-bits


def test_modules_have_dtypes_of_their_own_by_path():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Inner(name="low")(x)
            x = Inner(name="full")(x)
            return Inner(name="brain")(x)

    x = jnp.ones((2, 8))
    params = jax.eval_shape(Outer().init, jax.random.key(0), x)["params"]

    def loss_fn(params):
        return Outer().apply({"params": params}, x).sum()

    modules = {"full*": jnp.float32, "brain": jnp.bfloat16}
    rows = jaxmp.explain_autocast(loss_fn, params, dtype=jnp.float16, modules=modules).rows
    found = {row.module.split("/")[-2]: row.runs_in for row in rows if row.name == "dot_general"}
    assert found == {"low": "float16", "full": "float32", "brain": "bfloat16"}
    nested = {"full": jnp.float32, "full/Dense_0": jnp.float16}  # the inner name counts in it
    rows = jaxmp.explain_autocast(loss_fn, params, dtype=jnp.float16, modules=nested).rows
    assert {row.runs_in for row in rows if row.name == "dot_general"} == {"float16"}
    closed = jax.make_jaxpr(jax.jit(jaxmp.autocast(loss_fn, jnp.float16, modules=modules)))(params)
    dots = [
        e.invars[0].aval.dtype.name
        for e in closed.jaxpr.eqns[0].params["jaxpr"].eqns
        if e.primitive.name == "dot_general"
    ]
    assert dots == ["float16", "float32", "bfloat16"]

    class Net(nnx.Module):
        def __init__(self):
            self.low, self.full = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            return self.low(x) + self.full(x)

    rows = jaxmp.explain_autocast(Net(), x, modules={"full": jnp.float32}).rows
    assert [r.runs_in for r in rows if r.name == "dot_general"] == ["float16", "float32"]
    with pytest.raises(ValueError, match="autocast: dtype float32 is off, so modules="):
        jaxmp.autocast(loss_fn, jnp.float32, modules={"brain": jnp.bfloat16})


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: jnp.einsum("bk,bk->b", a, b),
        lambda a, b: jnp.vdot(a, b),
        lambda a, b: jax.vmap(jnp.dot)(a, b),
        lambda a, b: jnp.einsum("bk,bk->", a, b),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_sum_of_products_is_a_sum(fn, dtype):
    """Neither side has an axis of its own: `jnp.vdot(w, w)` is a sum, and 70000 and -1e5 * 0 are float32 numbers."""
    a = jnp.array([[250.0, 100.0, -1e5], [1.0, 3.0, 4.0]])
    b = jnp.array([[300.0, 7.0, 0.0], [1.0, 3.0, 4.0]])
    run = jax.jit(jaxmp.autocast(jax.value_and_grad(lambda a, b: jnp.sum(fn(a, b))), dtype))
    expected = jax.value_and_grad(lambda a, b: jnp.sum(a * b))(a, b)
    assert_close(run(a, b), expected, rtol=1e-6)


def test_a_matmul_with_one_row_is_a_matmul():
    jaxpr = jax.make_jaxpr(jaxmp.autocast(lambda q, k: jnp.einsum("bd,bkd->bk", q, k), jnp.bfloat16))(
        jnp.ones((2, 8)), jnp.ones((2, 5, 8))
    )
    assert "bf16[2,5,8]" in str(jaxpr)
