"""`explain_autocast(measure=True)`: the layer that has to stay in float32 is among the worst rows."""

import functools
import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

F16 = jnp.float16
X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)  # all arrays have this shape: fewer programs
ROUNDINGS = 4  # of an operation of a healthy model


def window_mean(h: Any) -> Any:
    """In float16 the sum of 32 * 4000 is beyond 65504."""
    return h - jnp.sum((4000 + h).astype(F16), -1, keepdims=True) / 32


def sharp_softmax(h: Any) -> Any:
    """Logits around 1e5, which no 16-bit dtype tells apart."""
    return jax.nn.softmax(h @ jnp.eye(32) + jnp.full((1, 32), 1e5))


def exponent(h: Any) -> Any:
    """A rounding of 12 h is a factor of the exponential."""
    return jnp.exp((h @ jnp.eye(32)) * 12.0)


@jaxmp.no_autocast
def carry(h: Any) -> Any:
    """A sum in 16 bits, over many turns."""
    steps = jnp.full((400,), 0.01, F16)
    return h + lax.scan(lambda c, x: (c + x, None), h[:, :1].astype(F16) * 0 + F16(8), steps)[0]


@jaxmp.no_autocast
def norm(h: Any) -> Any:
    """Squares in float16, of activations of 300."""
    h = (h * 300).astype(F16)
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True, dtype=F16) + F16(1e-3))


def variance(h: Any) -> Any:
    """E[x^2] - E[x]^2."""
    y = h @ jnp.eye(32) + jnp.full((1, 32), 60.0)
    return h + (jnp.mean(y * y, -1, keepdims=True) - jnp.mean(y, -1, keepdims=True) ** 2)


FAULTS = (window_mean, sharp_softmax, exponent, carry, norm, variance)


def nothing(h: Any) -> Any:
    return h


def forward(x: Any, planted: Any, first: Any, second: Any, third: Any, last: Any, norm: Any, last_norm: Any) -> Any:
    """The model of every framework, whose first, second and third layers are of 32 features."""
    x = jax.nn.gelu(first(x))
    x = norm(x + second(x))
    return last(last_norm(jax.nn.silu(third(planted(x)))))


def of_linen(fault: Any) -> Any:
    class Planted(nn.Module):
        @nn.compact
        def __call__(self, h):
            return fault(h)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = (nn.Dense(32) for _ in range(4))
            return forward(x, Planted(name="planted"), *layers, nn.LayerNorm(), nn.LayerNorm())

    return Net().apply, (jax.jit(Net().init)(jax.random.key(0), X), X)


def of_equinox(fault: Any) -> Any:
    class Net(eqx.Module):
        layers: Any
        norms: Any

        def __call__(self, x):
            return forward(x, fault, *map(jax.vmap, self.layers), *map(jax.vmap, self.norms))

    keys = jax.random.split(jax.random.key(0), 4)
    layers = [eqx.nn.Linear(32, 32, key=key) for key in keys]
    return lambda model, x: model(x), (Net(layers, [eqx.nn.LayerNorm(32) for _ in range(2)]), X)


FRAMEWORKS = {"linen": of_linen, "equinox": of_equinox}
PLANTED = list(zip(FAULTS, itertools.cycle(FRAMEWORKS)))


def worst(fault: Any, framework: str, **options: Any) -> Any:
    model, arguments = FRAMEWORKS[framework](fault)
    loss = lambda *args: -jnp.mean(jax.nn.log_softmax(model(*args))[:, 0])  # noqa: E731
    policy = "fp16" if fault in (window_mean, norm) else "bf16"
    return jaxmp.explain_autocast(loss, *arguments, policy=policy, measure=True, **options)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("fault", "framework"), PLANTED, ids=[f"{fault.__name__}, {name}" for fault, name in PLANTED])
def test_the_planted_layer_is_among_the_worst(fault, framework):
    """By the name of its module; a function has its own name where there is no module."""
    rows = worst(fault, framework).rows
    name = fault.__name__ if framework == "equinox" else "planted"
    assert any(name in row.module for row in rows[:3]), rows[:3]
    assert rows[0].added > ROUNDINGS


@pytest.mark.thorough(1)
@pytest.mark.parametrize("grad", [False, True])
def test_a_healthy_model_adds_a_few_roundings(grad):
    explanation = worst(nothing, "linen", grad=grad)
    assert 0 < explanation.rows[0].added <= ROUNDINGS, explanation.rows[0]
    assert any(row.group == "gradient" for row in explanation.rows) == grad
    table = str(explanation).splitlines()
    assert table[0].split() == ["module", "operation", "runs", "in", "because", "of", "MFLOP", "error", "added"]
    assert table[-1] == explanation.summary()


def test_errors_are_those_of_the_program():
    """Of a matmul by numbers that bfloat16 has not: in roundings, beside float64."""
    x, w = X, np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    rows = jaxmp.explain_autocast(jnp.matmul, x, w, policy="bf16", measure=True).rows
    (row,) = (r for r in rows if r.name == "dot_general")
    low = np.asarray(jax.jit(jaxmp.autocast(jnp.matmul, jnp.bfloat16))(x, w), np.float64)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    scale = max(np.abs(exact).mean(), np.sqrt(32) * np.abs(x).mean() * np.abs(w).mean())
    assert row.error == pytest.approx(np.abs(low - exact).mean() / scale * 2**8, rel=1e-3)
    assert (row.name, row.runs_in, row.group, row.count) == ("dot_general", "bfloat16", "allow", 1)
    assert row.added == pytest.approx(row.error, rel=1e-3)  # its operands are exact


def test_a_layer_that_is_kept_adds_nothing():
    """What the table is for: with the layer in float32 the row is gone."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            far = nn.Dense(32, name="far", bias_init=nn.initializers.constant(300.0))(x)
            return nn.Dense(32)(far - 300.0)

    params = jax.jit(Net().init)(jax.random.key(0), X)
    before, after = (
        jaxmp.explain_autocast(Net().apply, params, X, policy=jaxmp.get_policy("bf16", keep_fp32=keep), measure=True)
        for keep in ((), "far/*")
    )
    assert before.rows[0].name == "sub" and before.rows[0].added > 20
    assert after.rows[0].added <= ROUNDINGS


def test_loops_branches_and_rules_are_gone_through():
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def fn(x, w):
        x = lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, None, length=3)[0]
        fixed = lax.stop_gradient((x, w))
        x = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ fixed[1]), (0, fixed[0]))[1] + x
        x = lax.cond(x[0, 0] > 99, jnp.exp, jnp.tanh, x)
        return jnp.sum(rule(jax.checkpoint(lambda x: x @ w)(x)) + lax.fori_loop(0, 2, lambda i, c: c * 0.5, x))

    w = np.eye(32, dtype=np.float32) * 0.7
    rows = jaxmp.explain_autocast(fn, X, w, policy="bf16", measure=True, grad=True).rows
    names = {row.name for row in rows}
    assert {"scan", "while", "dot_general", "sin", "cos", "tanh"} <= names, names
    assert max(row.count for row in rows if row.name == "dot_general") >= 6
    assert rows[0].added < 10


def test_the_rows_are_those_of_the_function():
    """Of several results, of 16 bits too, without an operation of the measurement."""
    fn = lambda x, w: (x @ w, jax.nn.softmax(x @ w), jnp.arange(3))  # noqa: E731
    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    rows = jaxmp.explain_autocast(fn, X, w, policy="fp16", measure=True, grad=True).rows
    assert not any("explain.py" in row.module for row in rows)
    assert sum(row.count for row in rows if row.name == "dot_general") == 6  # two products


def test_errors_name_what_is_missing():
    with pytest.raises(ValueError, match="needs measure=True"):
        jaxmp.explain_autocast(jnp.sin, X, grad=True)
    with pytest.raises(ValueError, match="got a jax.ShapeDtypeStruct"):
        jaxmp.explain_autocast(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32), measure=True)


def test_matmuls_in_fp8_are_measured():
    """A number inside of a function that depends on the platform has a dtype, and is no array."""
    dot = functools.partial(jaxmp.fp8.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    product = lambda w, x: dot(x, w, recipe=jaxmp.fp8.CurrentScaling()).sum()  # noqa: E731
    rows = jaxmp.explain_autocast(product, X / 6, X, measure=True, grad=True).rows
    assert any(row.error > 0 for row in rows)
