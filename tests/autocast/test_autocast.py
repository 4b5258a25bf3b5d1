"""autocast: what runs in which dtype, under and over every transformation, and what it must never change.

The dtypes of single operations beside PyTorch's are in test_autocast_ops.py, whole models in test_autocast_models.py.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmp
from helpers import assert_close, assert_exact, assert_within_ulps, sqnr
from matmul_dtypes import matmuls
from same_operations import assert_same_operations

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), F32)
W = jnp.asarray(RNG.normal(size=(8, 8)) * 0.3, F32)
B = jnp.linspace(-1.0, 1.0, 8)
PARAMS = {"w": W, "b": B}


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype.name, tree)


def mlp(params, x):
    h = jax.nn.relu(x @ params["w"] + params["b"][None])
    return jax.nn.softmax(h @ params["w"].T)


def mlp_by_hand(params, x):
    w, b = params["w"].astype(F16), params["b"].astype(F16)
    h = jax.nn.relu(x.astype(F16) @ w + b[None])
    return jax.nn.softmax((h @ w.T).astype(F32))


def in_region(fn, dtype):
    def run(*args):
        with jaxmp.autocast(dtype=dtype):
            return fn(*args)

    return run


def switched_off(fn):
    def run(*args):
        with jaxmp.autocast(enabled=False):
            return fn(*args)

    return run


# ---- what a function computes


def gradients(fn):
    """By the weight and the input. That by the bias is another sum: tests/autocast/test_repeated_params.py."""
    return jax.grad(lambda w, x, b: jnp.sum(fn({"w": w, "b": b}, x) ** 2), (0, 1))


def in_a_loop(params, x):
    return lax.scan(lambda c, _: (jax.jit(jnp.tanh)(c @ params["w"]), c.sum()), x, None, 3)


@pytest.mark.parametrize(
    ("fn", "expected", "args"),
    [
        pytest.param(jaxmp.autocast(mlp), mlp_by_hand, (PARAMS, X), id="cast by hand"),
        pytest.param(gradients(jaxmp.autocast(mlp)), gradients(mlp_by_hand), (W, X, B), id="cast by hand, gradients"),
        pytest.param(jaxmp.autocast(in_a_loop, F32), in_a_loop, (PARAMS, X), id="float32, in a loop"),
        pytest.param(jaxmp.autocast(in_a_loop, enabled=False), in_a_loop, (PARAMS, X), id="off, in a loop"),
        pytest.param(jaxmp.autocast(switched_off(in_a_loop)), in_a_loop, (PARAMS, X), id="in a region that is off"),
        pytest.param(
            jaxmp.autocast(gradients(switched_off(mlp))), gradients(mlp), (W, X, B), id="the gradient of such a region"
        ),
    ],
)
def test_it_is_the_same_function(fn, expected, args):
    assert_same_operations(fn, expected, *args)


def test_no_more_casts_than_by_hand_and_each_weight_once():
    def text(fn):
        return jax.jit(jax.value_and_grad(lambda w: fn({"w": w, "b": B}, X).sum())).lower(W).as_text()

    auto, by_hand = text(jaxmp.autocast(mlp)), text(mlp_by_hand)
    assert auto.count("stablehlo.convert ") <= by_hand.count("stablehlo.convert ")
    assert len(re.findall(r"convert .*tensor<8x8xf32>\) -> tensor<8x8xf16>", auto)) == 1  # w is used twice


def test_output_structure_stays():
    def fn(x, flag, name, nothing):
        assert flag is True and name == "a" and nothing is None
        return {"y": x @ x, "n": 3, "none": None, "name": name, "count": jnp.arange(2), "pair": (x, 0.5)}

    out = jaxmp.autocast(fn)(W, True, "a", nothing=None)
    assert jax.tree.structure(out) == jax.tree.structure(fn(W, True, "a", None))
    assert out["n"] == 3 and out["name"] == "a" and out["pair"][1] == 0.5
    assert dtypes((out["y"], out["count"], out["pair"][0])) == ("float16", "int32", "float32")
    assert dtypes(jaxmp.autocast(lambda x: (x @ x, x > 0), output_dtype=F32)(W)) == ("float32", "bool")


def test_leaves_other_dtypes_alone():
    def fn(n, key, z):
        return n @ n.T, jax.random.split(key), z * 2, jax.random.normal(key, (2,))

    with jax.enable_x64(True):
        args = np.arange(4, dtype=np.int32).reshape(2, 2), KEY, np.ones(2, np.complex64)
        out, exact = jax.jit(lambda *args: (jaxmp.autocast(fn)(*args), fn(*args)))(*args)
        assert_within_ulps(out, exact, 4)  # of normal numbers; all else is exact
        wide, narrow = np.ones((2, 2)), np.ones((2, 2), np.float32)
        for other in (wide, narrow):
            assert jax.eval_shape(jaxmp.autocast(jnp.matmul), wide, other).dtype == jnp.float64


# ---- the lists, and what their neighbours make of them


W16 = jnp.asarray(np.asarray(W, F16))  # without XLA, which has no float16 on CPUs without F16C
outer = functools.partial(jnp.einsum, "i,j->ij", preferred_element_type=F32)
F32_ALGORITHM = lax.DotAlgorithmPreset.F32_F32_F32


DTYPES = {
    "a matmul with one row": (lambda x: jnp.einsum("bd,bkd->bk", x, jnp.stack([x] * 5, 1)), F16),
    "a bias is a part of the matmul": (lambda x: x @ W + B[None], F16),
    "a residual is not": (lambda x: (x @ W) + X, F32),
    "what is summed up may be long": (lambda x: jnp.zeros_like(x) + x @ W, F32),
    "a scalar does not vote": (lambda x: (x @ W) * jnp.sum(x), F16),
    "float16 has no 1e-8": (lambda x: (x @ W) + 1e-8, F32),
    "two bounds that no value passes": (lambda x: jnp.clip(x @ W, -1e6, 1e6), F16),
    "where, of zeros": (lambda x: jnp.where(x > 0, x @ W, jnp.zeros_like(x)), F16),
    "a tanh of a power": (lambda x: jax.nn.gelu(x @ W), F16),
    "what was asked for": (lambda x: (x @ W).astype(BF16), BF16),
    "what has no 16-bit form": (lambda x: jnp.linalg.inv((x @ W)[:, :4]), F32),
    "asks for float32": (lambda x: jnp.dot(x.astype(F16), W16, preferred_element_type=F32), F32),
    "an outer product that asks for it": (lambda x: outer(x[0].astype(F16), x[1].astype(F16)), F32),
    "an algorithm": (lambda x: jnp.dot(x, W, precision=F32_ALGORITHM), F32),
    "a scatter that adds": (lambda x: jnp.zeros((4, 8)).at[jnp.arange(2)].add((x @ W)[:2]), F32),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    fn, dtype = DTYPES[name]
    assert jax.eval_shape(jaxmp.autocast(fn), X).dtype == dtype


def test_numbers_of_these():
    run = jax.jit(lambda x: {name: (jaxmp.autocast(fn)(x), fn(x)) for name, (fn, _) in DTYPES.items()})
    for name, pair in run(X).items():
        out, exact = (np.asarray(y, np.float64) for y in pair)
        assert np.linalg.norm(out - exact) < 0.03 * np.linalg.norm(exact), name


EPS = jnp.float32(1e-8)  # an array without axes, closed over below

TINY = {
    "closed-over array": lambda x: x + EPS,
    "computed": lambda x: x + jnp.sqrt(EPS) * EPS / 2,
    "maximum": lambda x: jnp.maximum(x, 1e-8),
    "clip": lambda x: jnp.clip(x, 1e-8, 1.0),
    "where": lambda x: jnp.where(x > 0, x, EPS),
    "huge divisor": lambda x: x / 1e8 * 1e8,
    "in a scan": lambda x: lax.scan(lambda c, r: (jnp.maximum(c, EPS), r + EPS), x[0], x)[1],
    "in a while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.maximum(c[1], EPS)), (0, x))[1],
    "in a cond": lambda x: lax.cond(x[0, 0] > 9, lambda x, e: x - e, lambda x, e: x + e, x, EPS),
    "in a jit": lambda x: jax.jit(lambda x, e: jnp.maximum(x, e))(x, EPS),
    "in a rematerialized": lambda x: jax.checkpoint(lambda x: jnp.log(jnp.maximum(x, EPS)))(x),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", TINY)
def test_constants_that_float16_cannot_hold_keep_their_operation_in_float32(name):
    """In value and gradient, where the 16-bit value is 0; bfloat16 holds all of them."""

    def fn(x):
        return TINY[name](x @ jnp.eye(8))

    def run(fn):
        return lambda x: (fn(x), jax.vjp(fn, x)[1](fn(x) * 0 + 1)[0]) if "while" not in name else (fn(x), x)

    x = jnp.zeros((2, 8))
    got, exact = jax.jit(lambda x: (run(jaxmp.autocast(fn))(x), run(fn)(x)))(x)
    assert got[0].dtype == F32
    assert_close(got, exact, rtol=1e-6)
    assert jax.eval_shape(jaxmp.autocast(fn, BF16), x).dtype == (F32 if "remat" in name else BF16)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        pytest.param(jnp.vdot, BF16, id="vdot"),
        pytest.param(jax.vmap(jnp.dot), F16, id="vmap of dot"),
        pytest.param(functools.partial(jnp.einsum, "bk,bk->"), F16, id="einsum of all"),
    ],
)
def test_a_sum_of_products_is_a_sum(fn, dtype):
    """Neither side has an axis of its own: `jnp.vdot(w, w)` is a sum, and 70000 and -1e5 * 0 are float32 numbers."""
    a = np.float32([[250.0, 100.0, -1e5, 3.0, 3.0], [1.0, 3.0, 4.0, 257.0, 1.0]])
    b = np.float32([[300.0, 7.0, 0.0, 5.0, 5.0], [1.0, 3.0, 4.0, 257.0, 1.0]])
    run = jax.jit(jaxmp.autocast(jax.value_and_grad(lambda a, b: jnp.sum(fn(a, b))), dtype))
    assert_close(run(a, b), (np.sum(a * b, dtype=np.float64).astype(np.float32), b), rtol=1e-6)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda cache, x: lax.dynamic_update_slice(cache, x, (1, 0)), id="dynamic_update_slice"),
        pytest.param(lambda cache, x: cache.at[1:2].set(x), id="set"),
        pytest.param(lambda cache, x: cache.at[np.array([1])].set(x), id="set rows"),
    ],
)
def test_a_buffer_keeps_its_dtype(write):
    @jaxmp.autocast
    def step(cache, x):
        cache = write(cache, jax.nn.softmax(x)[None])  # float32
        return cache, cache.sum()

    cache, _ = jax.jit(lambda: lax.scan(step, jnp.zeros((3, 8), F16), X))()
    assert cache.dtype == F16 and np.asarray(cache)[1].sum() > 0.9
    wide = jax.eval_shape(jaxmp.autocast(lambda x: write(jnp.zeros((3, 8)), x @ W)), X[:1])
    assert wide.dtype == F32


def norm(x):
    x = x @ jnp.eye(8)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("fn", "expected", "x", "rtol"),
    [
        pytest.param(norm, norm, jnp.full((2, 8), 3000.0), 1e-3, id="the squares of a norm, 9e6, are float32"),
        pytest.param(
            lambda x: jax.nn.softmax(jnp.where(X > 0, x @ W, -1e30)),
            lambda x: jax.nn.softmax(jnp.where(X > 0, (x.astype(F16) @ W16).astype(F32), -1e30)),
            X,
            1e-6,
            id="a softmax is float32 from its first operation",
        ),
        pytest.param(
            jax.grad(lambda x: jnp.sum(jax.nn.gelu(x @ jnp.eye(8)).astype(F32))),  # of a square: inf times zero
            lambda x: jnp.ones_like(x, F16),
            jnp.full((1, 8), 300.0),
            1e-3,
            id="GELU of large values has a gradient",
        ),
        pytest.param(
            lambda x: jnp.where(jnp.arange(8) > 3, x @ W, -1e9)[:, :4],
            lambda x: jnp.full((4, 4), -65504, F16),
            X,
            0.0,
            id="a mask saturates",
        ),
    ],
)
def test_numbers_beyond_float16(fn, expected, x, rtol):
    assert_close(*jax.jit(lambda x: (jaxmp.autocast(fn)(x), expected(x)))(x), rtol=rtol)


def test_gelu_in_bfloat16_is_that_of_a_model_cast_by_hand():
    """bfloat16 has the range of float32, and the cube ends in a tanh: the backward pass keeps nothing in float32."""

    def times(number, x):  # a number is not rounded to bfloat16
        return (number * x.astype(F32)).astype(BF16)

    def by_hand(x):
        w = W.astype(BF16)
        h = x.astype(BF16) @ w
        cdf = 0.5 * (1.0 + jnp.tanh(times(np.sqrt(2 / np.pi), h + times(0.044715, h**3))))
        return jnp.sum(((h * cdf) @ w).astype(F32))

    auto = jaxmp.autocast(lambda x: jnp.sum(jax.nn.gelu(x @ W) @ W), BF16)
    assert_same_operations(jax.value_and_grad(auto), jax.value_and_grad(by_hand), X)
    assert jax.eval_shape(jaxmp.autocast(lambda x: (x @ W) ** 2, BF16), X).dtype == F32  # a power that stays one


@pytest.mark.parametrize(
    ("fn", "lists", "expected"),
    [
        (jnp.tanh, {"allow": ("tanh",)}, F16),
        (lambda x: jnp.tanh(x @ W), {"force_fp32": ("tanh",)}, F32),
        (lambda x: jnp.sum(x @ W), {"widest": ("reduce_sum",)}, F16),
        (lambda x: x @ W, {"force_fp32": ("dot_general",)}, F32),
    ],
)
def test_lists_can_be_changed(fn, lists, expected):
    assert jax.eval_shape(jaxmp.autocast(fn, "half", **lists), X).dtype == expected  # NumPy's name of float16


# ---- transformations, under and over


def relu_dot(x):
    return jax.nn.relu(x @ W)


@jax.custom_vjp
def times_seven(x, n):
    return jnp.sin(x) @ W, n + 1


times_seven.defvjp(lambda x, n: (times_seven(x, n), x), lambda x, g: (7.0 * (g[0] @ W.T) * jnp.cos(x), None))


@jax.custom_jvp
def straight(x):
    return jnp.round(x @ W)


straight.defjvp(lambda p, t: (straight(*p), 3.0 * (t[0] @ W)))

FUNCTIONS = {
    "vmap": jax.vmap(lambda row: jax.nn.relu(row @ W)),
    "remat": jax.checkpoint(lambda x: jnp.tanh(x @ W) @ W),
    "scan": lambda x: lax.scan(lambda c, w: (jnp.tanh(c @ w), c[0]), x, jnp.stack([W, W]))[0],
    "while": lambda x: lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] @ W, c[1] + 1), (x, 0))[0],
    "cond": lambda x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: x @ W, x),
    "custom_vjp": lambda x: times_seven(x @ W, jnp.arange(2))[0],
    "custom_jvp": lambda x: straight(x @ W),
    "nested": lambda x: lax.scan(jax.checkpoint(lambda c, _: (jax.jit(relu_dot)(c), None)), x, None, length=2)[0],
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_and_over_transformations(name):
    fn, auto = FUNCTIONS[name], jaxmp.autocast(FUNCTIONS[name])
    exact, *outs = jax.jit(lambda x: (fn(x), auto(x), jax.vmap(auto)(x[None])[0]))(X)
    if name == "custom_jvp":  # without jit, operation by operation
        outs.append(auto(X))
    for out in outs:
        assert out.dtype == (F32 if name == "cond" else F16)  # the other branch hands on float32
        assert name == "custom_jvp" or sqnr(exact, out) > 45  # there a rounding may go the other way
    if name == "while":
        return  # it has no gradient

    def grad(f):
        return jax.grad(lambda x: jnp.sum(f(x).astype(F32) * jnp.cos(X)))

    exact, under, over = jax.jit(lambda x: (grad(fn)(x), grad(auto)(x), jaxmp.autocast(grad(fn))(x)))(X)
    assert under.dtype == F32  # as x is
    assert sqnr(exact, under) > 40 and sqnr(exact, over) > 40


def test_what_a_loop_keeps_of_a_weight_is_not_stacked():
    def fn(w):
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), X, None, length=77)[0])

    text = str(jax.make_jaxpr(jax.grad(jaxmp.autocast(fn)))(W))
    assert "[77,4,8]" in text and "[77,8,8]" not in text


def test_loops_carry_what_their_body_gives():
    def fn(x):
        zeros = jnp.zeros_like(x)
        (h, total), last = lax.scan(lambda c, _: ((c[0] @ W, c[1] + c[0]), c[0]), (x, zeros), None, length=3)
        swapped = lax.fori_loop(0, 3, lambda i, c: (c[1] @ W, c[0]), (x, x))
        reversible = lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + c[0] @ W), (x @ W, x @ W))
        return h, total, last, swapped, reversible

    # h is a matmul's; a sum that began in float32 stays there
    types = dtypes(jax.eval_shape(jaxmp.autocast(fn), X))
    assert types == ("float16", "float32", "float16", ("float16", "float16"), ("float16", "float16"))


def test_profiles_keep_their_names():
    fn = jaxmp.autocast(jax.named_scope("attention")(lambda x: x @ W))
    assert "attention/dot_general" in jax.jit(fn).lower(X).compile().as_text()


def test_fp8_layers_take_their_input_in_16_bits():
    """As other matmuls do; the kernel is rounded once. Small whole numbers are exact in every dtype."""
    model, rng = nn.Dense(16, dot_general_cls=jaxmp.linen.Fp8DotGeneral), np.random.default_rng(0)
    x, kernel = rng.integers(-2, 3, (2, 16, 16)).astype(np.float32)
    params = jax.jit(model.init)(KEY, x)
    params["params"]["kernel"] = kernel
    auto = jaxmp.autocast(model.apply, BF16)
    tie = np.full((16, 16), 1 + 2**-4 + 2**-10, np.float32)  # in bfloat16 without the last bit: e4m3 rounds it down

    def run(fn, params, x, tie):
        ones = jax.tree.map(lambda p: jnp.ones_like(p) if p.ndim == 2 else jnp.zeros_like(p), params)
        grads = jax.grad(lambda params: jnp.sum(fn(params, x) * x))(params)
        return (fn(params, x).astype(jnp.float32), grads), fn(ones, tie)[0, 0]

    (low_precision, low), (expected, high) = jax.jit(lambda *args: (run(auto, *args), run(model.apply, *args)))(
        params, x, tie
    )
    assert "f8_e4m3fn" in str(jax.make_jaxpr(auto)(params, x))
    assert_exact(low_precision, expected)
    assert {float(low), float(high)} == {16.0, 18.0}


# ---- regions


def test_regions_in_a_function():
    def fn(x):
        a = x @ W
        with jaxmp.autocast(enabled=False):
            b = a @ W  # gets float32 back, as it was written
            with jaxmp.autocast(BF16):
                c = a @ W
        return a, b, c, jaxmp.no_autocast(jnp.matmul)(a, W), jax.jit(jaxmp.autocast(jnp.matmul, BF16))(a, W)

    expected = ("float16", "float32", "bfloat16", "float32", "bfloat16")
    assert dtypes(jax.eval_shape(jaxmp.autocast(fn), X)) == expected
    assert dtypes(jax.eval_shape(fn, X)) == ("float32", "float32", "float32", "float32", "bfloat16")


@pytest.mark.parametrize("run", [jax.pmap, jax.vmap, jax.jit], ids=["pmap", "vmap", "jit"])
def test_the_innermost_counts_through_transformations(run):
    inner = jaxmp.autocast(jnp.matmul, BF16)
    out = jax.eval_shape(jaxmp.autocast(lambda x: run(lambda y: (inner(y, W), y @ W))(x[:, None])), X)
    assert dtypes(out) == ("bfloat16", "float16")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        self.sow("intermediates", "norm", x)
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


def test_region_reaches_linen_modules():
    def run(variables):
        return Net().apply(variables, X, mutable=["batch_stats", "intermediates"], rngs={"dropout": KEY})

    low = in_region(run, BF16)
    variables = jax.eval_shape(Net().init, {"params": KEY, "dropout": KEY}, X)
    out, state = jax.eval_shape(low, variables)
    assert out.dtype == BF16 and state["intermediates"]["norm"][0].dtype == BF16
    gradient = in_region(jax.grad(lambda v: run(v)[0].astype(F32).sum()), BF16)
    assert set(jax.tree.leaves(dtypes((state["batch_stats"], jax.eval_shape(gradient, variables))))) == {"float32"}
    assert_same_operations(in_region(switched_off(run), BF16), run, variables)
    assert_same_operations(low, jaxmp.autocast(run, BF16), variables)


def test_methods_of_modules():
    class Head(nn.Module):
        @jaxmp.autocast(dtype=BF16)
        @nn.compact
        def __call__(self, x):
            with jaxmp.autocast(enabled=False):
                y = nn.Dense(4)(x)
            return y, nn.Dense(4)(x)

    params = jax.eval_shape(Head().init, KEY, X)
    for apply in (Head().apply, jaxmp.autocast(Head().apply)):
        assert dtypes(jax.eval_shape(apply, params, X)) == ("float32", "bfloat16")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_region_reaches_value_and_grad(accumulate):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=1024.0)
    opt_state, params = tx.init(PARAMS), jax.tree.map(lambda p: p.astype(F16), PARAMS)

    def loss_fn(params, x):
        return jnp.mean(mlp(params, x) ** 2)

    def run(fn, params):
        return jaxmp.value_and_grad(fn, accumulate=accumulate)(params, X, opt_state=opt_state)

    reached = in_region(functools.partial(run, loss_fn), F16)
    assert_same_operations(reached, functools.partial(run, jaxmp.autocast(loss_fn)), params)
    jaxpr = str(jax.make_jaxpr(reached)(params))
    assert "preferred_element_type=float16" in jaxpr and "preferred_element_type=float32" not in jaxpr


def test_region_reaches_nnx_value_and_grad():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
    opt_state = tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))

    @nnx.jit
    def run(model):
        with jaxmp.autocast(dtype=BF16), jax.numpy_rank_promotion("allow"):
            loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
            return jaxmp.nnx.value_and_grad(loss_fn)(model, X, opt_state=opt_state)[0]

    def by_hand(w, b):
        return jnp.mean((X.astype(BF16) @ w.astype(BF16) + b[None].astype(BF16)).astype(F32) ** 2)

    assert_close(run(model), jax.jit(by_hand)(model.kernel[...], model.bias[...]), rtol=1e-6)


def test_modules_have_dtypes_of_their_own_by_path():
    model = nn.Sequential([nn.Sequential([nn.Dense(8)]) for _ in range(3)])
    params = jax.eval_shape(model.init, KEY, X)

    def loss_fn(params):
        return model.apply(params, X).sum()

    def runs_in(fn, *args, **options):
        rows = jaxmp.explain_autocast(fn, *args, dtype=F16, **options).rows
        return [row.runs_in for row in rows if row.name == "dot_general"]

    modules = {"layers_1*": F32, "layers_2": BF16}
    assert runs_in(loss_fn, params, modules=modules) == ["float16", "float32", "bfloat16"]
    counts = matmuls(jax.jit(jaxmp.autocast(loss_fn, F16, modules=modules)), params)
    assert counts == {"float16": 1, "float32": 1, "bfloat16": 1}
    nested = {"layers_1": F32, "layers_1/layers_0": F16}  # the inner name counts in it
    assert runs_in(loss_fn, params, modules=nested) == ["float16"] * 3
    of_nnx = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)))
    assert runs_in(of_nnx, X, modules={"layers/1": F32}) == ["float16", "float32"]
    with pytest.raises(ValueError, match="autocast: dtype must be 16-bit beside modules="):
        jaxmp.autocast(loss_fn, F32, modules=modules)


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"allow": ("dot_generall",)},
            ValueError,
            "allow must hold names .*; got 'dot_generall'. Close to it: dot_general",
        ),
        ({"force_fp32": "exp"}, TypeError, "collection of names; got the string 'exp'"),
        ({"allow": ("exp",), "widest": ("exp",)}, ValueError, "'exp' stands in allow and in widest"),
        ({"dtype": jnp.float8_e4m3fn}, ValueError, r"got float8_e4m3fn. For fp8 use jaxmp.fp8.autocast"),
        ({"dtype": "float64"}, ValueError, "dtype must be float16, bfloat16 or float32 .off.; got float64"),
        ({"dtype": jnp.int32}, ValueError, "must be float16, bfloat16 or float32 .off.; got int32"),
        ({"output_dtype": jnp.int32}, ValueError, "output_dtype must be a float dtype, got int32"),
        ({"fn": 3}, TypeError, "fn must be a function or None"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        jaxmp.autocast(**{"fn": jnp.matmul} | arguments)
