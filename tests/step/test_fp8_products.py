"""fp8 in functions of any kind, by `jaxmp.autocast(recipe=)` and by policies whose recipe has no state."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.programs import jaxprs
from matmul_dtypes import matmuls
from policy_steps import filled
from regimes import mesh_of

RECIPE = jaxmp.fp8.CurrentScaling()
STATELESS = dataclasses.replace(jaxmp.get_policy("fp8"), recipe=RECIPE)
FORWARD, BACKWARD = "float8_e4m3fn", "float8_e4m3fnxfloat8_e5m2"
KEY = jax.random.key(0)
WIDTH = 32


def everywhere(path, eqn):
    return True


def in_fp8(fn, recipe=RECIPE, **options):
    return jaxmp.autocast(fn, "fp8", recipe=recipe, **options)


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def weights_of(count):
    return list(np.random.default_rng(0).normal(size=(count, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5)


X = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)


def count_fp8(fn, *args):
    """(forward GEMMs, backward GEMMs) in fp8 of the gradient of a function."""
    found = matmuls(jax.grad(fn), *args)
    return found.get(FORWARD, 0), found.get(BACKWARD, 0)


# Which matmuls


def test_matmuls_in_float64_are_named():
    """Not left in silence, beside others in fp8; a policy runs flax's layers in fp8 whatever their inputs are."""

    def fn(weights, x):
        y = mlp(weights, x.astype(jnp.float32))
        return y + mlp([w.astype(jnp.float64) for w in weights[:3]], x)

    weights, x = weights_of(4), X.astype(np.float64)
    with jax.enable_x64(True):
        with pytest.warns(jaxmp.fp8.FallbackWarning, match="in float64 instead of fp8: cast its operands to float32"):
            assert matmuls(in_fp8(fn, filter=everywhere), weights, x) == {FORWARD: 4, "float64": 3}
        params = filled(jaxmp.autocast(Net().init, "fp8"), KEY, x)["params"]
        opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp8").init(params)
        loss = lambda params, x: jnp.mean(Net().apply({"params": params}, x) ** 2)  # noqa: E731
        step = lambda params, x: jaxmp.value_and_grad(loss, policy="fp8")(params, x, opt_state=opt_state)  # noqa: E731
        assert matmuls(step, params, x)[FORWARD] == matmuls(step, params, X)[FORWARD] == 2


def test_all_but_the_ends_of_a_plain_function():
    weights = weights_of(4)
    assert matmuls(in_fp8(mlp), weights, X) == {FORWARD: 2, "bfloat16": 2}
    assert matmuls(jax.grad(in_fp8(mlp)), weights, X) == {FORWARD: 2, BACKWARD: 4, "bfloat16": 5}
    assert count_fp8(in_fp8(mlp, filter=everywhere), weights, X) == (4, 8)  # XLA drops that of x
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))  # one function for several layers

    def jitted_layers(weights, x):
        return jnp.mean(functools.reduce(layer, weights, x) ** 2)

    assert matmuls(in_fp8(jitted_layers), weights, X) == {FORWARD: 2, "bfloat16": 2}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("form", ["decorator", "region", "jit inside", "dtype", "in a policy's loss"])
def test_each_way_to_say_it(form):
    weights = weights_of(4)
    state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16").init(weights)

    def in_a_region(weights, x):
        with jaxmp.autocast("fp8", recipe=RECIPE):
            return jaxmp.value_and_grad(mlp)(weights, x, opt_state=state)

    run = {
        "decorator": jax.grad(jaxmp.autocast("fp8", recipe=RECIPE)(mlp)),
        "region": in_a_region,
        "jit inside": jax.grad(in_fp8(jax.jit(mlp))),
        "dtype": jax.grad(jaxmp.autocast(mlp, jnp.bfloat16, recipe=RECIPE)),
        "in a policy's loss": functools.partial(jaxmp.value_and_grad(in_fp8(mlp), policy="fp8"), opt_state=state),
    }[form]
    assert matmuls(run, weights, X) == {FORWARD: 2, BACKWARD: 4, "bfloat16": 5}


def test_a_policy_without_state_in_a_loss_without_layers():
    weights = weights_of(4)
    state = jaxmp.mixed_precision(optax.sgd(0.1), STATELESS).init(weights)

    def run(weights, x, accumulate=1):
        return jaxmp.value_and_grad(mlp, policy=STATELESS, accumulate=accumulate)(weights, x, opt_state=state)

    assert matmuls(run, weights, X) == {FORWARD: 2, BACKWARD: 4, "bfloat16": 5}
    assert matmuls(functools.partial(run, accumulate=2), weights, X)[BACKWARD] == 4
    with jaxmp.autocast("bf16", modules={"*": jnp.bfloat16}):  # more precise: it stays, and the recipe comes in
        assert matmuls(run, weights, X)[FORWARD] == 2


class Net(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype)(x))
        return x


def test_flax_layers_that_took_a_policys_recipe_have_the_word():
    plain = filled(Net().init, KEY, X)
    with jaxmp.autocast(STATELESS):
        params = filled(Net().init, KEY, X)

    def loss(params, x):
        return jnp.mean(Net().apply(params, x) ** 2) + mlp(weights_of(4), x)

    assert matmuls(jaxmp.autocast(loss, STATELESS), params, X) == {FORWARD: 2, "bfloat16": 6}
    only = jaxmp.autocast(loss, STATELESS, filter=("Dense_0",))
    assert matmuls(only, params, X) == {FORWARD: 1, "bfloat16": 7}
    for dtype in (None, jnp.bfloat16):
        model = Net(dtype)
        of_model = in_fp8(lambda p, x, model=model: jnp.mean(model.apply(p, x) ** 2))
        assert count_fp8(of_model, plain, X) == (2, 4)  # the same layers


def test_nnx_modules_and_scans():
    model = nnx.Sequential(*(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)))
    graphdef, state = nnx.split(model)
    assert count_fp8(in_fp8(lambda s, x: jnp.mean(nnx.merge(graphdef, s)(x) ** 2)), state, X) == (2, 4)

    def scanned(stacked, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(body, x, stacked)[0] ** 2)

    stacked = np.stack(weights_of(3))
    assert count_fp8(in_fp8(scanned), stacked, X) == (2, 2)  # forward, and again for remat
    np.testing.assert_allclose(jax.jit(in_fp8(scanned))(stacked, X), jax.jit(scanned)(stacked, X), rtol=0.05)


def attention(weights, x):
    q, k, v = (x @ weights[i] for i in range(3))
    return jnp.mean((jax.nn.softmax(q @ k.T) @ v @ jnp.swapaxes(weights[3], 0, 1).astype(jnp.bfloat16)) ** 2)


def test_weights_are_moved_and_cast_and_scores_are_no_weights():
    run = in_fp8(attention, filter=everywhere)
    assert matmuls(run, weights_of(4), X) == {FORWARD: 4, "bfloat16": 2}
    rows = jaxmp.explain_autocast(attention, weights_of(4), X, dtype="fp8", recipe=RECIPE, filter=everywhere).rows
    groups = [row.group for row in rows if row.name == "dot_general"]
    assert set(groups) == {"CurrentScaling", "allow, not fp8: the function computes both operands"}


def test_embeddings_are_ends():
    def loss(params, tokens):
        x = params["table"][tokens]
        for w in params["weights"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params["table"].T) ** 2)

    params = {"table": jnp.ones((11, WIDTH)), "weights": weights_of(2)}
    assert count_fp8(in_fp8(loss), params, np.arange(16) % 11) == (2, 4)


def test_what_does_not_run_in_fp8_inside_a_function():
    def loss(weights, x):
        with jaxmp.fp8.autocast(enabled=False):
            x = jnp.tanh(x @ weights[0])
            with jaxmp.fp8.autocast(RECIPE):
                x = jnp.tanh(x @ weights[1])
        with jaxmp.autocast(enabled=False):
            x = jnp.tanh(x @ weights[2])
        with jaxmp.autocast(jnp.bfloat16):  # says nothing about fp8
            return jnp.mean((x @ weights[3]) ** 2)

    assert matmuls(in_fp8(loss, filter=everywhere), weights_of(4), X) == {FORWARD: 2, "float32": 1, "bfloat16": 1}

    @jax.custom_vjp
    def own(x, w):
        return x @ w

    own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))

    def with_rule(weights, x):
        return mlp(weights[:3], own(x, weights[3]))

    assert matmuls(jax.grad(in_fp8(with_rule, filter=everywhere)), weights_of(4), X)[FORWARD] == 3


def test_layers_of_experts_have_the_word():
    experts = np.stack(weights_of(2))

    def loss(weights, x):
        x = jaxmp.fp8.ragged_dot(x, experts, jnp.array([10, 6]), recipe=RECIPE)
        return mlp(weights, x)

    assert matmuls(jaxmp.autocast(loss, STATELESS), weights_of(4), X)["bfloat16"] == 4
    assert matmuls(in_fp8(loss), weights_of(4), X)["bfloat16"] == 1  # an end, but the last of the others


# Whose models


class Block(hk.Module):
    def __call__(self, x):
        q, k, v = jnp.split(hk.Linear(3 * WIDTH, name="qkv")(x), 3, axis=-1)
        x = x + hk.Linear(WIDTH, name="out")(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / WIDTH**0.5) @ v)
        return x + hk.Linear(WIDTH, name="down")(jax.nn.gelu(hk.Linear(2 * WIDTH, name="up")(x)))


@pytest.mark.thorough(0)
def test_a_haiku_transformer():
    def forward(tokens):
        x = hk.Embed(11, WIDTH)(tokens)
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return hk.Linear(11, name="head")(x)

    model, tokens = hk.without_apply_rng(hk.transform(forward)), jnp.arange(32).reshape(2, 16) % 11
    params = filled(model.init, KEY, tokens)

    def loss(params, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens).mean()

    assert count_fp8(in_fp8(loss), params, tokens) == (8, 16)
    assert matmuls(in_fp8(loss, filter=("block_1/*", "head")), params, tokens)[FORWARD] == 5
    rows = jaxmp.explain_autocast(loss, params, tokens, dtype="fp8", recipe=RECIPE, filter=("*up",)).rows
    by_path = {row.module: (row.runs_in, row.group) for row in rows if row.name == "dot_general"}
    assert by_path["block_0/up"] == (FORWARD, "CurrentScaling")
    assert by_path["block_0/down"] == ("bfloat16", "allow, not fp8: filter")


def test_an_equinox_mlp_with_a_batch_under_vmap():
    model = eqx.nn.MLP(WIDTH, 8, WIDTH, depth=3, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    assert count_fp8(in_fp8(loss), arrays, X) == (2, 4)  # eqx.nn.Linear writes weight @ x: the weight on the left


# The numbers


def rounded(x, dtype):
    """NumPy: `x` as bfloat16, cast with the largest power of two that keeps its amax in range, and back."""
    x = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)
    limit = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.floor(np.log2(limit / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


@pytest.mark.thorough(0)
@pytest.mark.parametrize("equation", ["kn,mk->mn", "bmk,bkn->bmn", "mk,ckn->mcn"])
def test_products_and_gradients_beside_numpy(equation):
    sizes = dict(zip("bcmkn", (3, 2, 10, 24, 17), strict=True))
    (left, right), result = equation.partition("->")[0].split(","), equation.partition("->")[2]
    a, b, g = (
        jax.random.normal(key, [sizes[c] for c in axes], jnp.float32)
        for key, axes in zip(jax.random.split(KEY, 3), (left, right, result), strict=True)
    )
    run = in_fp8(
        lambda a, b: jnp.einsum(equation, jnp.sin(a) if "m" in left else a, jnp.sin(b) if "m" in right else b),
        filter=everywhere,
    )
    y, pullback = jax.jit(lambda a, b: jax.vjp(run, a, b))(a, b)
    x_is_left = "m" in left
    x, w = (jnp.sin(a), b) if x_is_left else (jnp.sin(b), a)
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    x8, w8, g8 = rounded(x, e4m3), rounded(w, e4m3), rounded(g, e5m2)
    x_axes, w_axes = (left, right) if x_is_left else (right, left)
    assert y.dtype == jnp.bfloat16 and matmuls(run, a, b) == {FORWARD: 1}
    close(y, np.einsum(f"{x_axes},{w_axes}->{result}", x8, w8))
    dw = pullback(g.astype(jnp.bfloat16))[1 if x_is_left else 0]
    assert dw.dtype == jnp.float32
    close(dw, np.einsum(f"{x_axes},{result}->{w_axes}", x8, g8))


def close(got, expected):
    """Within half a bfloat16 ulp, and what float32 sums and jnp.sin beside NumPy's rounding move."""
    got = np.asarray(got, np.float64)
    assert np.abs(got - expected).max() <= 2**-8 * np.abs(expected).max()
    assert np.linalg.norm(got - expected) <= 2**-8 * np.linalg.norm(expected)


RECIPES = {
    "rowwise": (jaxmp.fp8.RowwiseScaling(), FORWARD),
    "blocks": (jaxmp.fp8.BlockScaling(), FORWARD),
    "mxfp8": (jaxmp.fp8.MXFP8(), FORWARD),
    "nvfp4": (jaxmp.fp8.NVFP4(stochastic_rounding=False), "float4_e2m1fn"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_without_state(name):
    recipe, dtype = RECIPES[name]
    rows = jaxmp.explain_autocast(mlp, weights_of(3), X, dtype="fp8", recipe=recipe).rows
    assert [row.runs_in for row in rows if row.group == type(recipe).__name__] == [dtype]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("name", "most"), [("mxfp8", 0.15), ("nvfp4", 0.5)])
def test_the_gradient_by_a_recipe_in_blocks(name, most):
    weights = weights_of(3)
    narrow = jax.jit(jax.grad(in_fp8(mlp, RECIPES[name][0])))(weights, X)[1]
    exact = jax.jit(jax.grad(mlp))(weights, X)[1]
    assert 0.005 < np.linalg.norm(narrow - exact) / np.linalg.norm(exact) < most


def test_recipes_by_path():
    def loss(weights, x):
        for name, w in zip("abcd", weights, strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    recipe = {"b": RECIPE, "*": jaxmp.fp8.NVFP4(stochastic_rounding=False)}
    rows = jaxmp.explain_autocast(loss, weights_of(4), X, dtype="fp8", recipe=recipe).rows
    assert {row.module: row.runs_in for row in rows if row.name == "dot_general"} == {
        "a": "bfloat16", "b": FORWARD, "c": "float4_e2m1fn", "d": "bfloat16",
    }  # fmt: skip


# With other transformations


def test_vmap_of_the_function_is_one_gemm_and_per_example_gradients_run():
    def one(weights, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) @ weights[2])

    jaxpr = jax.make_jaxpr(jax.vmap(in_fp8(one), (None, 0)))(weights_of(3), X).jaxpr
    gemms = {
        tuple(v.aval.shape for v in eqn.invars)
        for eqn in jaxprs.equations(jaxpr)
        if eqn.primitive.name == "dot_general" and eqn.invars[0].aval.dtype == jnp.float8_e4m3fn
    }
    assert gemms == {((16, WIDTH), (WIDTH, WIDTH))}
    assert matmuls(jax.vmap(jax.grad(in_fp8(one)), (None, 0)), weights_of(3), X)[BACKWARD] == 2


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    weights = weights_of(3)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    spread = functools.partial(jax.shard_map, mesh=mesh_of(devices=2), **specs, check_vma=check_vma)

    def local(weights, x):
        return jax.lax.pmean(mlp(weights, x), "data")

    inside, outside = spread(jax.grad(in_fp8(local))), jax.grad(in_fp8(spread(local)))
    exact = jax.jit(jax.grad(mlp))(weights, X)
    for fn in (inside, outside) if check_vma else (outside,):
        assert matmuls(fn, weights, X)[FORWARD] == 1
        for got, expected in zip(jax.jit(fn)(weights, X), exact, strict=True):
            assert np.linalg.norm(got - expected) < 0.2 * np.linalg.norm(expected)


def test_a_branch_and_remat():
    def loss(weights, x):
        x = jnp.tanh(x @ weights[0])
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ weights[1]), lambda x: jnp.tanh(x @ weights[2]), x)
        return jnp.mean((jax.checkpoint(lambda w, x: x @ w)(weights[3], x)) ** 2)

    run = in_fp8(loss, filter=everywhere)
    assert matmuls(run, weights_of(4), X)[FORWARD] == 4
    np.testing.assert_allclose(jax.jit(run)(weights_of(4), X), jax.jit(loss)(weights_of(4), X), rtol=0.1)


# What is refused or said


def test_a_policys_delayed_scaling_names_the_modules_way():
    with pytest.warns(UserWarning, match="needs state that this function does not hold") as caught:
        assert matmuls(jaxmp.autocast(mlp, "fp8"), weights_of(4), X) == {"bfloat16": 4}
    (message,) = (str(w.message) for w in caught)
    assert "none of its 4 matmuls" in message and "jaxmp.nnx.to_fp8(model)" in message
    assert 'jaxmp.autocast(fn, "fp8", recipe=jaxmp.fp8.CurrentScaling())' in message


def test_a_derivative_inside_the_function():
    with pytest.warns(UserWarning, match="take it outside of autocast"):
        assert matmuls(in_fp8(jax.grad(mlp)), weights_of(4), X) == {"bfloat16": 11}


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_function_with_its_own_derivative(kind):
    """Rows and the warning name it, and the warning does not advise a filter, which cannot help."""
    if kind == "custom_vjp":
        own = jax.custom_vjp(lambda x, w: jax.jit(jnp.matmul)(x, w))
        own.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    else:
        own = jax.custom_jvp(lambda x, w: jax.jit(jnp.matmul)(x, w))
        own.defjvp(lambda dx, y, x, w: dx @ w, lambda dw, y, x, w: x @ dw)

    def model(weights, x):
        return own(jnp.tanh(own(x, weights[0])), weights[1])

    def groups(fn, weights, **options):
        rows = jaxmp.explain_autocast(fn, weights, X, dtype="fp8", recipe=RECIPE, **options).rows
        return [row.group for row in rows if row.name == "dot_general"]

    reason = "it is in a function with its own derivative: call jaxmp.fp8.dot_general there"
    with pytest.warns(UserWarning, match=reason) as caught:
        jax.eval_shape(in_fp8(model, filter=everywhere), weights_of(2), X)
        assert groups(model, weights_of(2), filter=everywhere) == [f"allow, not fp8: {reason}"]
    assert not any("filter=lambda" in str(warning.message) for warning in caught)

    def between(weights, x):  # the ends are those of the rest
        return mlp(weights, own(x, weights[0])) + own(x, weights[1]).sum()

    assert sum("the first" in group or "the last" in group for group in groups(between, weights_of(4))) == 2


def test_fp8_products_in_a_function_with_its_own_derivative():
    """What the reason of its rows advises: they run in fp8, and nothing warns."""

    def product(x, w):
        return jaxmp.fp8.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=RECIPE)

    own = jax.custom_vjp(lambda x, w: product(x, w))
    own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda res, g: (product(g, res[1].T), product(res[0].T, g)))
    model = in_fp8(lambda weights, x: jnp.mean(own(x, weights[0]) ** 2), filter=everywhere)
    assert matmuls(jax.grad(model), weights_of(1), X) == {FORWARD: 3}


def test_a_function_in_which_nothing_runs_in_fp8():
    with pytest.warns(UserWarning, match="the first operation with weights.*the last operation with weights"):
        jax.eval_shape(in_fp8(mlp), weights_of(2), X)
    with pytest.warns(UserWarning, match=r"jaxmp.autocast\(filter=\): the pattern 'mlp/up' fits no layer"):
        jax.eval_shape(in_fp8(mlp, filter=("mlp/up",)), weights_of(2), X)


REFUSED = {
    "delayed": (lambda: in_fp8(mlp, jaxmp.fp8.DelayedScaling()), ValueError, "must get a recipe without state"),
    "random": (lambda: in_fp8(mlp, jaxmp.fp8.NVFP4()), ValueError, r"Use NVFP4\(stochastic_rounding=False\)"),
    "no recipe": (lambda: in_fp8(mlp, "current"), TypeError, "a recipe must be one of jaxmp.fp8"),
    "fp32": (lambda: jaxmp.autocast(mlp, "fp32", recipe=RECIPE), ValueError, 'Pass "fp8"'),
    "filter alone": (lambda: jaxmp.autocast(mlp, "bf16", filter=("*",)), ValueError, "got no recipe"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


def test_a_region_in_a_function_that_is_traced():
    def loss(weights, x):
        with jaxmp.autocast("fp8", recipe=RECIPE):
            return mlp(weights, x)

    with pytest.raises(ValueError, match="must not be in a function under autocast"):
        jaxmp.autocast(loss, "bf16")(weights_of(4), X)
