"""`explain_autocast`: the FLOPs of matmuls by dtype, those of fp8 layers, and what stays in float32 and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
LAYER = 2 * 32**3  # FLOPs


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(32, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def test_linen_layers_in_fp8():
    policy = jaxmp.get_policy("fp8", keep_fp32="head/*")
    with jaxmp.autocast(policy):
        params = Net().init(jax.random.key(0), X)["params"]

    def loss(params, x):
        return jnp.mean(Net().apply({"params": params}, x) ** 2)

    found = jaxmp.explain_autocast(loss, params, X, dtype=policy)
    assert found.matmul_flops_by_dtype() == {"float8_e4m3fn": 3 * LAYER, "bfloat16": LAYER, "float32": LAYER}
    rows = [row for row in found.rows if row.runs_in == "float8_e4m3fn"]
    assert [row.module for row in rows] == [f"Net/Dense_{i}/Fp8DotGeneral_0" for i in (1, 2, 3)]
    assert {row[1:] for row in rows} == {("dot_general", "float32", "float8_e4m3fn", "fp8 layer", 1, LAYER)}
    assert found.float32_matmuls() == {"Net/head": "keep_fp32"}
    shares = "60.0% in float8_e4m3fn, 20.0% in bfloat16, 20.0% in float32"
    assert found.summary() == f"matmul FLOPs: {shares}; float32: Net/head (keep_fp32)"
    assert "Net/Dense_[1-3]/Fp8DotGeneral_0" in str(found)
    assert "float8_e4m3fn" not in jaxmp.explain_autocast(loss, params, X, dtype="bf16").matmul_flops_by_dtype()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (jaxmp.fp8.DelayedScaling(), "float8_e4m3fn"),
        (jaxmp.fp8.CurrentScaling(), "float8_e4m3fn"),
        (jaxmp.fp8.MXFP8(), "float8_e4m3fn"),
        (jaxmp.fp8.NVFP4(stochastic_rounding=False), "float4_e2m1fn"),
    ],
)
def test_nnx_layers_in_fp8(recipe, name):
    model = NnxNet()
    jaxmp.nnx.to_fp8(model, recipe)
    found = jaxmp.explain_autocast(lambda model, x: jnp.sum(model(x)), model, X, dtype=jnp.bfloat16)
    assert found.matmul_flops_by_dtype() == {"bfloat16": 2 * LAYER, name: 2 * LAYER}
    modules = [row.module for row in found.rows if row.runs_in == name]
    assert modules == ["NnxNet/1/dot_general", "NnxNet/2/dot_general"]


def test_products_in_a_scan_count_each_time():
    def fn(w, x):
        dot = functools.partial(jaxmp.fp8.dot_general, recipe=jaxmp.fp8.CurrentScaling())
        return lax.scan(lambda x, w: (dot(x, w, (((1,), (0,)), ((), ()))) + x @ w, None), x, w)[0]

    found = jaxmp.explain_autocast(fn, np.stack([X] * 3), X, dtype=jnp.bfloat16)
    assert found.matmul_flops_by_dtype() == {"float8_e4m3fn": 3 * LAYER, "bfloat16": 3 * LAYER}


def test_a_loop_that_adds_to_a_16_bit_value_is_named():
    def fn(x):
        return lax.scan(lambda c, row: (c + row, None), (x @ x)[0], x @ x)[0]

    found = jaxmp.explain_autocast(fn, X, dtype=jnp.bfloat16)
    assert [(r.runs_in, r.count) for r in found.rows if r.group == "sum over turns"] == [("float32", 1)]
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
                return jnp.matmul(x, x, precision=lax.DotAlgorithmPreset.F32_F32_F32)

    params = Reasons().init(jax.random.key(0), X)
    policy = jaxmp.get_policy("bf16", keep_fp32="kept/*")
    found = jaxmp.explain_autocast(Reasons().apply, params, X, dtype=policy, modules={"named": jnp.float32})
    assert found.float32_matmuls() == {
        "Reasons/kept": "keep_fp32",
        "Reasons/named": "modules=",
        "Reasons/off": "autocast is off",
        "Reasons": "autocast is off",
        "Reasons/out": "no_autocast",
        "Reasons/algorithm": "asks for its dtype",
    }
    assert found.matmul_flops_by_dtype() == {"float32": 6 * LAYER}
    assert "Reasons/named (modules=), Reasons/off (autocast is off), " in found.summary()


def test_a_long_list_of_layers_is_cut():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(10):
                x = nn.Dense(32, name="abcdefghij"[i])(x)
            return x

    params = jax.eval_shape(Deep().init, jax.random.key(0), X)
    found = jaxmp.explain_autocast(Deep().apply, params, X, dtype=jaxmp.get_policy("bf16", keep_fp32="*"))
    assert len(found.float32_matmuls()) == 10 and found.summary().endswith("Deep/h (keep_fp32), and 2 more")


def test_a_function_without_matmuls():
    assert jaxmp.explain_autocast(jnp.sin, X).summary() == "matmul FLOPs: none"
