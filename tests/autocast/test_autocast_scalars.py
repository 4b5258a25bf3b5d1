"""Arithmetic of 16-bit arrays with float32 scalars: in float32 in each element, with the result rounded once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.optimize import minimize

import jaxmp
from helpers import assert_close, assert_exact
from matmul_dtypes import matmuls

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
RNG = np.random.default_rng(0)
LARGE = RNG.choice([-1, 1], 65_536) * RNG.uniform(1, 8, 65_536).astype(np.float32)  # sums to more than 65504
W = np.eye(8, dtype=np.float32) * 2
both_dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])


def l1(x: Any) -> Any:
    return jnp.sum(jnp.abs(x))


# `x` is large; the exact result is one that 16 bits hold. It is computed in float64.
CASES: dict[str, Callable[..., Any]] = {
    "div": lambda x: x / l1(x),
    "mul": lambda x: 1e-2 * x * l1(x),
    "mul by an exp": lambda x: x * 2.0**-6 * jnp.exp(1.5 * jnp.max(x)),
    "div by squares": lambda x: x / jnp.sum(x * x),
    "broadcast": lambda x: x / jnp.full_like(x, l1(x)),
    "elu": lambda x: jax.nn.elu(x * 2.0**-10, l1(x)),
    "scatter": lambda x: x.at[:3].mul(1 / l1(x)),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "op by op": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "nested jit": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
}


@pytest.mark.thorough(4)
@both_dtypes
@pytest.mark.parametrize("case", CASES)
def test_a_computed_scalar_takes_part_in_float32(case: str, dtype: Any) -> None:
    x = jnp.asarray(LARGE, dtype)
    out = jaxmp.autocast(CASES[case], dtype)(x)
    assert out.dtype == dtype
    with jax.enable_x64(True):
        expected = np.asarray(CASES[case](jnp.asarray(np.asarray(x, np.float64))))
    assert expected.dtype == np.float64
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    unit = np.maximum(np.abs(expected) * float(jnp.finfo(dtype).eps), tiny)
    wide = jnp.finfo(F32).eps * 200 / float(jnp.finfo(dtype).eps)  # of the sum
    ulps = (1.02 if case in ("mul", "elu") else 0.51) + wide  # these round a product before
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= ulps * unit)


@pytest.mark.thorough(1)
@both_dtypes
@pytest.mark.parametrize("around", AROUND)
def test_inside_and_outside_of_transformations(around: str, dtype: Any) -> None:
    def normalized(x: Any) -> Any:
        return x * 3000 / l1(x * 8)

    def assert_normalized(out: Any) -> None:
        assert out.dtype == dtype
        assert_close(out.astype(F32), exact.astype(np.float32), rtol=2e-2, atol=1e-6)

    x = jnp.asarray(LARGE, dtype)
    exact = 375 * np.asarray(x, np.float64) / np.sum(np.abs(np.asarray(x, np.float64)))
    for fn in (jaxmp.autocast(AROUND[around](normalized), dtype), AROUND[around](jaxmp.autocast(normalized, dtype))):
        out, pull_back = jax.vjp(fn, x)
        assert_normalized(out)
        (grad,) = pull_back(jnp.ones_like(out))
        assert grad.dtype == dtype
        assert np.isfinite(np.asarray(grad, np.float32)).all()
    assert_normalized(jax.vmap(jaxmp.autocast(AROUND[around](normalized), dtype))(jnp.stack([x, x]))[1])


@both_dtypes
def test_the_gradient_of_a_scalar_is_summed_in_float32(dtype: Any) -> None:
    fn = jaxmp.autocast(lambda x, t: jnp.sum(x * jnp.exp(t)), dtype)
    assert_exact(jax.grad(fn, 1)(jnp.ones(4096, dtype), jnp.float32(0.0)), np.float32(4096))


@pytest.mark.thorough(1)
@both_dtypes
def test_constants_take_part_in_float32(dtype: Any) -> None:
    x = jnp.asarray(LARGE[:64], dtype)
    wide = np.asarray(x, np.float32)
    for fn, exact in (
        (lambda x: x * 0.1, wide * np.float32(0.1)),
        (lambda x: 0.3 - x, np.float32(0.3) - wide),
        (lambda x: x / 0.7, wide / np.float32(0.7)),
        (lambda x: x * jnp.sqrt(0.1), wide * np.sqrt(np.float32(0.1))),
    ):
        assert_exact(jaxmp.autocast(fn, dtype)(x), jnp.asarray(exact).astype(dtype))


def test_a_number_that_16_bits_hold_exactly_casts_nothing() -> None:
    fn = jaxmp.autocast(lambda x: 2 * x + 0.5, BF16)
    assert "convert_element_type" not in str(jax.make_jaxpr(fn)(jnp.ones(4, BF16)))


@both_dtypes
def test_a_comparison_with_a_scalar_is_exact(dtype: Any) -> None:
    x, t = jnp.asarray([1.0, 2.0, 3.0], dtype), jnp.float32(2 + 2**-20)
    assert jaxmp.autocast(lambda x, t: x < t * 1, dtype)(x, t).tolist() == [True, True, False]
    assert jaxmp.autocast(lambda x, t: x * 20000 < t * 35000, F16)(x.astype(F16), t).tolist() == [True, True, True]


def test_a_scalar_added_to_a_matmul_is_not_rounded() -> None:
    out = jaxmp.autocast(lambda x, b: (x @ W) - b * b, F16)(jnp.full((2, 8), 300.0 * 100), jnp.float32(300.0))
    assert_exact(out, jnp.full((2, 8), -30000, F16))


@both_dtypes
def test_matmuls_around_stay_in_16_bits_and_nothing_is_kept_in_float32(dtype: Any) -> None:
    def layers(x: Any, t: Any) -> Any:
        for _ in range(3):
            x = (x @ W) / l1(x)
            x = x * jnp.exp(t) + 0.1
        return x

    fn = jaxmp.autocast(layers, dtype)
    x, t = jnp.ones((16, 8), dtype), jnp.float32(0.5)
    assert set(matmuls(jax.grad(lambda x, t: fn(x, t).astype(F32).sum(), (0, 1)), x, t)) == {jnp.dtype(dtype).name}
    _, pull_back = jax.vjp(jaxmp.autocast(lambda x, t: x * jnp.exp(t), dtype), x, t)
    assert [a.dtype for a in jax.tree.leaves(pull_back) if a.size == x.size] == [dtype]


OBJECTIVES: dict[str, Callable[[Any], Any]] = {
    "quartic": lambda x: jnp.sum((x - 3) ** 4) + jnp.sum(x) ** 2,
    "logistic": lambda x: jnp.sum(jnp.logaddexp(0.0, -x * jnp.arange(1, 5))) + 0.1 * jnp.sum(x**2),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_solver_in_float16_stays_finite(objective: str) -> None:
    f = OBJECTIVES[objective]
    solve = jax.jit(jaxmp.autocast(lambda x: minimize(f, x, method="BFGS").x, F16))
    for seed in range(6):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=4) * 2, F32)
        assert f(solve(x)) < f(x)
