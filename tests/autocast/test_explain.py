"""`explain_autocast`: the FLOPs of matmuls by dtype, those of fp8 layers, and what stays in float32 and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
from helpers import assert_moved

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
LAYER = 2 * 32**3  # FLOPs


def dense_layers(*names):
    """A model of one layer of 32 features for each name."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in names:
                x = nn.relu(nn.Dense(32, name=name)(x))
            return x

    return Net()


def test_rows_and_table():
    model = nn.Sequential([nn.Dense(32), jax.nn.softmax])
    explanation = jaxmp.explain_autocast(model.apply, jax.eval_shape(model.init, jax.random.key(0), X), X, dtype="bf16")
    (dot,) = [row for row in explanation.rows if row.name == "dot_general"]
    assert dot == ("Sequential/layers_0", "dot_general", "float32", "bfloat16", "allow", 1, LAYER)
    by_name = {row.name: row for row in explanation.rows}
    assert by_name["exp"][3:5] == ("float32", "force_fp32")
    assert by_name["sub"][3:5] == ("float32", "feeds float32")
    assert explanation.casts == 4  # x, kernel, bias, and the logits back
    table = str(explanation)
    assert "Sequential/layers_0  dot_general" in table and "% in bfloat16" in table
    assert table.endswith(f"\n{explanation.summary()}") and explanation.summary() == "matmul FLOPs: 100.0% in bfloat16"


def test_repeated_layers_are_shown_once():
    class Layer(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(32)(nn.gelu(nn.Dense(self.width)(nn.LayerNorm()(x))))

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(12):
                x = Layer(64 if i == 5 else 32, name=f"Layer_{i}")(x)
            return nn.Dense(32, name="head")(x)

    params = jax.eval_shape(Deep().init, jax.random.key(0), X)
    explanation = jaxmp.explain_autocast(Deep().apply, params, X, dtype="bf16")
    lines = str(explanation).splitlines()
    assert len(explanation.rows) > 125 and len(lines) < 60
    dots = [line.split() for line in lines if " dot_general " in line]
    assert [(d[0], d[2], d[-1]) for d in dots] == [
        ("Deep/Layer_[0-4,6-11]/Dense_[0-1]", "22", f"{22 * LAYER / 1e6:.3f}"),
        ("Deep/Layer_5/Dense_1", "1", f"{2 * LAYER / 1e6:.3f}"),
        ("Deep/Layer_5/Dense_0", "1", f"{2 * LAYER / 1e6:.3f}"),
        ("Deep/head", "1", f"{LAYER / 1e6:.3f}"),
    ]
    assert sum(int(line.split()[2]) for line in lines[1:-2]) == sum(row.count for row in explanation.rows)


def test_linen_layers_in_fp8():
    model, policy = dense_layers(*(f"Dense_{i}" for i in range(4)), "head"), jaxmp.get_policy("fp8", keep_fp32="head/*")
    params = jax.eval_shape(jaxmp.autocast(model.init, policy), jax.random.key(0), X)["params"]

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    explanation = jaxmp.explain_autocast(loss, params, X, dtype=policy)
    assert explanation.matmul_flops_by_dtype() == {"float8_e4m3fn": 3 * LAYER, "bfloat16": LAYER, "float32": LAYER}
    rows = [row for row in explanation.rows if row.runs_in == "float8_e4m3fn"]
    assert [row.module for row in rows] == [f"Net/Dense_{i}/Fp8DotGeneral_0" for i in (1, 2, 3)]
    assert {row[1:] for row in rows} == {("dot_general", "float32", "float8_e4m3fn", "fp8 layer", 1, LAYER)}
    assert explanation.float32_matmuls() == {"Net/head": "keep_fp32"}
    shares = "60.0% in float8_e4m3fn, 20.0% in bfloat16, 20.0% in float32"
    assert explanation.summary() == f"matmul FLOPs: {shares}; float32: Net/head (keep_fp32)"
    assert "Net/Dense_[1-3]/Fp8DotGeneral_0" in str(explanation)
    assert "float8_e4m3fn" not in jaxmp.explain_autocast(loss, params, X, dtype="bf16").matmul_flops_by_dtype()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (jaxmp.fp8.DelayedScaling(), "float8_e4m3fn"),
        (jaxmp.fp8.NVFP4(stochastic_rounding=False), "float4_e2m1fn"),
    ],
)
def test_nnx_layers_in_fp8(recipe, name):
    """Nothing is computed: amaxes, scales and statistics stay as they are."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(nnx.Linear(32, 32, rngs=rngs) for _ in range(4)), nnx.BatchNorm(32, rngs=rngs))
    jaxmp.nnx.to_fp8(model, recipe)
    before = nnx.as_pure(nnx.state(model))
    explanation = jaxmp.explain_autocast(lambda model, x: jnp.sum(model(x)), model, X, dtype=jnp.bfloat16)
    assert_moved(nnx.as_pure(nnx.state(model)), before)
    assert explanation.matmul_flops_by_dtype() == {"bfloat16": 2 * LAYER, name: 2 * LAYER}
    modules = [(row.module, row.runs_in) for row in explanation.rows if row.name == "dot_general"]
    in_fp8 = [(f"Sequential/{i}/dot_general", name) for i in (1, 2)]
    assert modules == [("Sequential/0", "bfloat16"), *in_fp8, ("Sequential/3", "bfloat16")]


def test_products_in_a_scan_count_each_time():
    def fn(w, x):
        dot = functools.partial(jaxmp.fp8.dot_general, recipe=jaxmp.fp8.CurrentScaling())
        return lax.scan(lambda x, w: (dot(x, w, (((1,), (0,)), ((), ()))) + x @ w, None), x, w)[0]

    shapes = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    explanation = jaxmp.explain_autocast(fn, *shapes, dtype=jnp.bfloat16)  # nothing is computed
    assert explanation.matmul_flops_by_dtype() == {"float8_e4m3fn": 3 * LAYER, "bfloat16": 3 * LAYER}
    assert [(row.count, row.flops) for row in explanation.rows if row.name == "dot_general"] == 2 * [(3, 3 * LAYER)]


@pytest.mark.parametrize("mode", ["rows", "contracted"])
def test_ragged_products_count_each_row_once(mode):
    """As many as the product of all rows with one group: in the forward pass, and for the gradient of the groups."""
    x, w, sizes = jnp.ones((12, 32)), jnp.ones((3, 32, 16)), jnp.array([5, 0, 7])

    def fn(x, w):
        return lax.ragged_dot(x, w, sizes)

    run = fn if mode == "rows" else lambda x, w: jax.grad(lambda w: jnp.sum(fn(x, w) ** 2))(w)
    explanation = jaxmp.explain_autocast(run, x, w, dtype="bf16")
    products = [row for row in explanation.rows if "ragged_dot" in row.name]
    assert {row.flops // row.count for row in products} == {2 * 12 * 32 * 16} and products


def test_the_zeros_between_pixels_do_not_count():
    x, w = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 2))

    def flops(fn):
        return sum(row.flops for row in jaxmp.explain_autocast(fn, x, w, dtype="bf16").rows if "conv" in row.name)

    assert flops(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME")) == 2 * 64 * 9 * 4 * 2
    assert flops(lambda x, w: lax.conv_transpose(x, w, (1, 1), "SAME")) == 2 * 64 * 9 * 4 * 2


def test_a_loop_that_adds_to_a_16_bit_value_is_named():
    def fn(x):
        return lax.scan(lambda c, row: (c + row, None), (x @ x)[0], x @ x)[0]

    explanation = jaxmp.explain_autocast(fn, X, dtype=jnp.bfloat16)
    assert [(r.runs_in, r.count) for r in explanation.rows if r.group == "sum over turns"] == [("float32", 1)]
    assert jax.eval_shape(jaxmp.autocast(fn, jnp.bfloat16), X).dtype == jnp.float32
    stream = lambda x: lax.scan(lambda c, row: (c + jnp.tanh(c @ X), None), x @ x, x)[0]  # noqa: E731
    assert all(r.group != "sum over turns" for r in jaxmp.explain_autocast(stream, X, dtype=jnp.bfloat16).rows)


def test_why_matmuls_are_in_float32():
    class Reasons(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32, name="kept")(x)
            x = nn.Dense(32, name="named")(x)
            with jaxmp.autocast(enabled=False):
                x = nn.Dense(32, name="off")(x)
                x = jax.jit(lambda x: jnp.matmul(x, x))(x)
            with jax.named_scope("out"):
                x = jaxmp.no_autocast(jnp.matmul)(x, x)
            with jax.named_scope("algorithm"):
                x = jnp.matmul(x, x, precision=lax.DotAlgorithmPreset.F32_F32_F32)
            with jax.named_scope("exact"):
                return jnp.matmul(x, x, precision=lax.Precision.HIGHEST)

    params = jax.eval_shape(Reasons().init, jax.random.key(0), X)
    policy = jaxmp.get_policy("bf16", keep_fp32="kept/*")
    explanation = jaxmp.explain_autocast(Reasons().apply, params, X, dtype=policy, modules={"named": jnp.float32})
    assert explanation.float32_matmuls() == {
        "Reasons/kept": "keep_fp32",
        "Reasons/named": "modules=",
        "Reasons/off": "autocast is off",
        "Reasons": "autocast is off",
        "Reasons/out": "no_autocast",
        "Reasons/algorithm": "asks for its dtype",
        "Reasons/exact": "precision=HIGHEST",
    }
    assert explanation.matmul_flops_by_dtype() == {"float32": 7 * LAYER}
    assert "Reasons/named (modules=), Reasons/off (autocast is off), " in explanation.summary()


def test_a_long_list_of_layers_is_cut():
    model = dense_layers(*"abcdefghij")
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    explanation = jaxmp.explain_autocast(model.apply, params, X, dtype=jaxmp.get_policy("bf16", keep_fp32="*"))
    assert len(explanation.float32_matmuls()) == 10 and explanation.summary().endswith("Net/h (keep_fp32), and 2 more")


@pytest.mark.parametrize(
    ("as_function", "measure"),
    [
        pytest.param(lambda model: model, True, id="model"),
        pytest.param(lambda model: model.__call__, False, id="method"),
    ],
)
def test_a_model_with_state_is_the_function(as_function, measure):
    """Its statistics and its keys stay as they are."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    before = nnx.as_pure(nnx.state(model))
    explanation = jaxmp.explain_autocast(as_function(model), X, dtype=jnp.bfloat16, measure=measure)
    assert explanation.matmul_flops_by_dtype() == {"bfloat16": LAYER}
    assert {row.module for row in explanation.rows if row.name == "dot_general"} == {"0"}
    after = nnx.as_pure(nnx.state(model))
    assert all(x is y for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))


def test_static_arguments_and_descriptions_of_arrays():
    def fn(x, flag, name, *, w):
        assert flag is True and name == "a"
        return x @ w

    w = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    (row,) = jaxmp.explain_autocast(fn, X, True, "a", w=w).rows
    assert row.name == "dot_general"


def test_the_dtype_is_given_once():
    assert jaxmp.explain_autocast(jnp.sin, X).summary() == "matmul FLOPs: none"
    assert jaxmp.explain_autocast(jnp.matmul, X, X).matmul_flops_by_dtype() == {"float16": LAYER}
    assert jaxmp.explain_autocast(jnp.matmul, X, X, policy="bf16").matmul_flops_by_dtype() == {"bfloat16": LAYER}
    with pytest.raises(ValueError, match="give dtype= or policy=, not both"):
        jaxmp.explain_autocast(jnp.matmul, X, X, dtype=jnp.float16, policy="bf16")
