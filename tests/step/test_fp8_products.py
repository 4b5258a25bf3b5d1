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
from jax.sharding import PartitionSpec

import jaxmp
from helpers import assert_same_program
from matmul_dtypes import matmuls

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


def weights_of(count, width=WIDTH):
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in jax.random.split(KEY, count)]


X = jax.random.normal(jax.random.key(1), (16, WIDTH))


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

    weights = weights_of(4)
    with jax.enable_x64(True):
        x = jnp.asarray(X, jnp.float64)
        with pytest.warns(jaxmp.fp8.FallbackWarning, match="in float64 instead of fp8: cast its operands to float32"):
            found = matmuls(in_fp8(fn, filter=everywhere), weights, x)
        assert found == {FORWARD: 4, "float64": 3}
        model, policy = nn.Sequential([nn.Dense(WIDTH, name=f"dense_{i}") for i in range(4)]), "fp8"
        params = jaxmp.autocast(model.init, policy)(KEY, x)["params"]
        opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)
        loss = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        step = lambda params, x: jaxmp.value_and_grad(loss, policy=policy)(params, x, opt_state=opt_state)  # noqa: E731
        assert matmuls(step, params, x)[FORWARD] == matmuls(step, params, x.astype(jnp.float32))[FORWARD] == 2


def test_all_but_the_ends_of_a_plain_function():
    weights = weights_of(4)
    assert matmuls(in_fp8(mlp), weights, X) == {FORWARD: 2, "bfloat16": 2}
    assert matmuls(jax.grad(in_fp8(mlp)), weights, X) == {FORWARD: 2, BACKWARD: 4, "bfloat16": 5}
    assert count_fp8(in_fp8(mlp, filter=everywhere), weights, X) == (4, 8)  # XLA drops that of x


@pytest.mark.thorough(1)
@pytest.mark.parametrize("form", ["function", "decorator", "region", "jit inside", "dtype", "in a policy's loss"])
def test_each_way_to_say_it(form):
    weights = weights_of(4)
    state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16").init(weights)
    if form == "function":
        run = jax.grad(in_fp8(mlp))
    elif form == "decorator":
        run = jax.grad(jaxmp.autocast("fp8", recipe=RECIPE)(mlp))
    elif form == "dtype":
        run = jax.grad(jaxmp.autocast(mlp, jnp.bfloat16, recipe=RECIPE))
    elif form == "in a policy's loss":
        run = functools.partial(jaxmp.value_and_grad(in_fp8(mlp), policy="fp8"), opt_state=state)
    elif form == "jit inside":
        run = jax.grad(in_fp8(jax.jit(mlp)))
    else:

        def run(weights, x):
            with jaxmp.autocast("fp8", recipe=RECIPE):
                return jaxmp.value_and_grad(mlp)(weights, x, opt_state=state)

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


@pytest.mark.thorough(0)
def test_flax_layers_that_took_a_policys_recipe_have_the_word():
    with jaxmp.autocast(STATELESS):
        params = jax.jit(Net().init)(KEY, X)

    def loss(params, x):
        return jnp.mean(Net().apply(params, x) ** 2) + mlp(weights_of(4), x)

    assert matmuls(jaxmp.autocast(loss, STATELESS), params, X) == {FORWARD: 2, "bfloat16": 6}
    only = jaxmp.autocast(loss, STATELESS, filter=("Dense_0",))
    assert matmuls(only, params, X) == {FORWARD: 1, "bfloat16": 7}
    for dtype in (None, jnp.bfloat16):
        model = Net(dtype)
        plain = jax.jit(Net().init)(KEY, X)
        found = count_fp8(in_fp8(lambda p, x, model=model: jnp.mean(model.apply(p, x) ** 2)), plain, X)
        assert found == (2, 4)  # the same layers


def test_nnx_modules_and_scans():
    model = nnx.Sequential(*(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)))
    graphdef, state = nnx.split(model)
    assert count_fp8(in_fp8(lambda s, x: jnp.mean(nnx.merge(graphdef, s)(x) ** 2)), state, X) == (2, 4)

    def scanned(stacked, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(body, x, stacked)[0] ** 2)

    stacked = jnp.stack(weights_of(3))
    assert count_fp8(in_fp8(scanned), stacked, X) == (2, 2)  # forward, and again for remat
    np.testing.assert_allclose(in_fp8(scanned)(stacked, X), scanned(stacked, X), rtol=0.05)


def attention(weights, x):
    q, k, v = (x @ weights[i] for i in range(3))
    return jnp.mean((jax.nn.softmax(q @ k.T) @ v @ jnp.swapaxes(weights[3], 0, 1).astype(jnp.bfloat16)) ** 2)


def test_weights_are_moved_and_cast_and_scores_are_no_weights():
    run = in_fp8(attention, filter=everywhere)
    assert matmuls(run, weights_of(4), X) == {FORWARD: 4, "bfloat16": 2}
    rows = jaxmp.explain_autocast(attention, weights_of(4), X, dtype="fp8", recipe=RECIPE, filter=everywhere).rows
    groups = [row.group for row in rows if row.name == "dot_general"]
    assert set(groups) == {"CurrentScaling", "allow, not fp8: the function computes both operands"}


def test_embeddings_and_convolutions_are_ends():
    def loss(params, tokens):
        x = params["table"][tokens]
        for w in params["weights"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params["table"].T) ** 2)

    params = {"table": jax.random.normal(KEY, (11, WIDTH)), "weights": weights_of(2)}
    assert count_fp8(in_fp8(loss), params, jnp.arange(16) % 11) == (2, 4)


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
    experts = jax.random.normal(KEY, (2, WIDTH, WIDTH)) / 6

    def loss(weights, x):
        x = jaxmp.fp8.ragged_dot(x, experts, jnp.array([10, 6]), recipe=RECIPE)
        return mlp(weights, x)

    assert matmuls(jaxmp.autocast(loss, STATELESS), weights_of(4), X)["bfloat16"] == 4
    assert matmuls(in_fp8(loss), weights_of(4), X)["bfloat16"] == 1  # an end, but the last of the others


def test_one_jitted_function_that_is_called_for_several_layers():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def loss(weights, x):
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    found = matmuls(in_fp8(loss), weights_of(4), X)
    assert (found[FORWARD], found["bfloat16"]) == (2, 2)


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
    params = jax.jit(model.init)(KEY, tokens)

    def loss(params, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), tokens).mean()

    assert count_fp8(in_fp8(loss), params, tokens) == (8, 16)
    assert count_fp8(in_fp8(loss, filter=("block_1/*", "head")), params, tokens) == (5, 10)
    rows = jaxmp.explain_autocast(loss, params, tokens, dtype="fp8", recipe=RECIPE, filter=("*up",)).rows
    found = {row.module: row for row in rows if row.name == "dot_general" and row.module.endswith(("up", "down"))}
    assert found["block_0/up"].runs_in == FORWARD and found["block_0/up"].group == "CurrentScaling"
    assert found["block_0/down"].runs_in == "bfloat16" and found["block_0/down"].group == "allow, not fp8: filter"


def test_an_equinox_mlp_with_a_batch_under_vmap():
    model = eqx.nn.MLP(WIDTH, 8, WIDTH, depth=3, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    assert count_fp8(in_fp8(loss), arrays, X) == (2, 4)  # eqx.nn.Linear writes weight @ x: the weight on the left


def test_a_hugging_face_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2", reason="transformers has no Flax models")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2)
    with jax.numpy_rank_promotion("allow"):
        model = gpt2.FlaxGPT2LMHeadModel(config, dtype=jnp.bfloat16)
    tokens = jnp.arange(32).reshape(2, 16)

    def loss(params, tokens):
        logits = model(tokens, params=params).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    with jax.numpy_rank_promotion("allow"):
        assert count_fp8(in_fp8(loss), model.params, tokens) == (8, 16)


# The numbers


def rounded(x, dtype):
    """NumPy: `x` as bfloat16, cast with the largest power of two that keeps its amax in range, and back."""
    x = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)
    limit = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.floor(np.log2(limit / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


@pytest.mark.thorough(0)
@pytest.mark.parametrize("equation", ["mk,kn->mn", "kn,mk->mn", "bmk,bkn->bmn", "mk,ckn->mcn"])
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
    "rowwise": jaxmp.fp8.RowwiseScaling(),
    "blocks": jaxmp.fp8.BlockScaling(),
    "mxfp8": jaxmp.fp8.MXFP8(),
    "nvfp4": jaxmp.fp8.NVFP4(stochastic_rounding=False),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_without_state(name):
    weights = weights_of(3)
    run = jax.jit(jax.grad(in_fp8(mlp, RECIPES[name])))(weights, X)
    exact = jax.grad(mlp)(weights, X)
    error = np.linalg.norm(run[1] - exact[1]) / np.linalg.norm(exact[1])
    assert 0.005 < error < (0.5 if name == "nvfp4" else 0.15)
    (row,) = (
        row
        for row in jaxmp.explain_autocast(mlp, weights, X, dtype="fp8", recipe=RECIPES[name]).rows
        if row.group == type(RECIPES[name]).__name__
    )
    assert row.runs_in == ("float4_e2m1fn" if name == "nvfp4" else FORWARD)


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


@pytest.mark.thorough(0)
def test_twenty_steps_beside_bfloat16():
    weights, target = weights_of(4), jnp.roll(X, 3, axis=1) / 3

    def loss(weights, x):
        for w in weights[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ weights[-1] - target) ** 2)

    def train(policy):
        tx = jaxmp.mixed_precision(optax.adam(3e-3), policy)

        def step(carry, _):
            weights, state = carry
            value, grads = jaxmp.value_and_grad(loss, policy=policy)(weights, X, opt_state=state)
            weights, state = jaxmp.apply_gradients(tx, grads, state, weights)
            return (weights, state), value

        return jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), length=20)[1])(weights)

    narrow, wide = train(STATELESS), train("bf16-mixed")
    assert wide[-1] < 0.5 * wide[0]
    assert (narrow != wide).any()
    np.testing.assert_allclose(narrow, wide, rtol=0.1)


# With other transformations


def test_vmap_of_the_function_is_one_gemm_and_per_example_gradients_run():
    weights = weights_of(3)

    def one(weights, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) @ weights[2])

    run = jax.vmap(in_fp8(one), (None, 0))
    (shape,) = {s for s in _fp8_shapes(run, weights, X)}
    assert shape == ((16, WIDTH), (WIDTH, WIDTH))
    assert matmuls(jax.vmap(jax.grad(in_fp8(one)), (None, 0)), weights, X)[BACKWARD] == 2


def _fp8_shapes(fn, *args):
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general" and eqn.invars[0].aval.dtype == jnp.float8_e4m3fn:
                yield tuple(v.aval.shape for v in eqn.invars)
            branches = eqn.params.get("branches_platforms")
            for name, value in eqn.params.items():
                parts = value[:1] if branches is not None and name == "branches" else value
                for inner in jax.tree.leaves(parts, is_leaf=lambda x: hasattr(x, "jaxpr")):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        yield from walk(getattr(inner, "jaxpr", inner))

    yield from walk(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = weights_of(3)

    def local(weights, x):
        return jax.lax.pmean(mlp(weights, x), "d")

    run = jax.shard_map(
        jax.grad(in_fp8(local)), mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(), check_vma=check_vma,
    )  # fmt: skip
    outside = jax.grad(in_fp8(jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec(),
        check_vma=check_vma,
    )))  # fmt: skip
    exact = jax.grad(mlp)(weights, X)
    for fn in (run, outside) if check_vma else (outside,):
        assert matmuls(fn, weights, X)[FORWARD] == 1
        for got, expected in zip(jax.jit(fn)(weights, X), exact, strict=True):
            assert np.linalg.norm(got - expected) < 0.2 * np.linalg.norm(expected)


def test_a_branch_and_remat():
    def loss(weights, x):
        x = jnp.tanh(x @ weights[0])
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ weights[1]), lambda x: jnp.tanh(x @ weights[2]), x)
        return jnp.mean((jax.checkpoint(lambda w, x: x @ w)(weights[3], x)) ** 2)

    plain, jitted = in_fp8(loss, filter=everywhere), jax.jit(in_fp8(loss, filter=everywhere))
    assert matmuls(plain, weights_of(4), X)[FORWARD] == 4
    assert_same_program(jitted(weights_of(4), X), jitted(weights_of(4), X))
    np.testing.assert_allclose(jitted(weights_of(4), X), loss(weights_of(4), X), rtol=0.1)


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

    reason = "it is in a function with its own derivative: call jaxmp.fp8.dot_general there"
    with pytest.warns(UserWarning, match=reason) as caught:
        in_fp8(model, filter=everywhere)(weights_of(2), X)
        explained = jaxmp.explain_autocast(model, weights_of(2), X, dtype="fp8", recipe=RECIPE, filter=everywhere)
    assert [row.group for row in explained.rows if row.name == "dot_general"] == [f"allow, not fp8: {reason}"]
    assert not any("filter=lambda" in str(warning.message) for warning in caught)

    def between(weights, x):  # the ends are those of the rest
        return mlp(weights, own(x, weights[0])) + own(x, weights[1]).sum()

    groups = [row.group for row in jaxmp.explain_autocast(between, weights_of(4), X, dtype="fp8", recipe=RECIPE).rows]
    assert sum("the first" in group or "the last" in group for group in groups) == 2


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
        in_fp8(mlp)(weights_of(2), X)
    with pytest.warns(UserWarning, match=r"jaxmp.autocast\(filter=\): the pattern 'mlp/up' fits no layer"):
        in_fp8(mlp, filter=("mlp/up",))(weights_of(2), X)


REFUSED = {
    "delayed": (lambda: in_fp8(mlp, jaxmp.fp8.DelayedScaling()), ValueError, "must get a recipe without state"),
    "random": (lambda: in_fp8(mlp, jaxmp.fp8.NVFP4()), ValueError, r"Use NVFP4\(stochastic_rounding=False\)"),
    "no recipe": (lambda: in_fp8(mlp, "current"), TypeError, "a recipe must be one of jaxmp.fp8"),
    "float32": (lambda: jaxmp.autocast(mlp, jnp.float32, recipe=RECIPE), ValueError, 'Pass "fp8"'),
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
