"""Arithmetic of 16-bit arrays with float32 scalars: in float32 in each element, with the result rounded once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.optimize import minimize
from test_sums import in_turn

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
    "broadcast": lambda x: x / jnp.full_like(x, l1(x)),
    "elu": lambda x: jax.nn.elu(x * 2.0**-10, l1(x)),
    "scatter": lambda x: x.at[:3].mul(1 / l1(x)),
}
AROUND: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "nested jit": (F16, lambda f: jax.jit(lambda x: jax.jit(f)(x))),
    "remat": (BF16, jax.checkpoint),
    "scan": (F16, lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0]),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, [F16, BF16]), ids=CASES)
def test_a_computed_scalar_takes_part_in_float32(case: str, dtype: Any) -> None:
    x = LARGE.astype(dtype)
    out = jax.jit(jaxmp.autocast(CASES[case], dtype))(x)
    assert out.dtype == dtype
    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(CASES[case])(x.astype(np.float64)))
    assert expected.dtype == np.float64
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    unit = np.maximum(np.abs(expected) * float(jnp.finfo(dtype).eps), tiny)
    wide = jnp.finfo(F32).eps * 200 / float(jnp.finfo(dtype).eps)  # of the sum
    ulps = (1.02 if case in ("mul", "elu") else 0.51) + wide  # these round a product before
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= ulps * unit)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("dtype", "around"), AROUND.values(), ids=AROUND)
def test_inside_and_outside_of_transformations(dtype: Any, around: Any) -> None:
    def normalized(x: Any) -> Any:
        return x * 3000 / l1(x * 8)

    def output_and_gradient(fn: Any) -> Any:
        def run(x: Any) -> Any:
            out, pull_back = jax.vjp(fn, x)
            return out, pull_back(jnp.ones_like(out))[0]

        return run

    inside, outside = jaxmp.autocast(around(normalized), dtype), around(jaxmp.autocast(normalized, dtype))
    runs = (output_and_gradient(inside), output_and_gradient(outside), lambda x: (jax.vmap(inside)(x[None])[0], x))
    x = LARGE.astype(dtype)
    exact = 375 * x.astype(np.float64) / np.sum(np.abs(x.astype(np.float64)))
    for out, grad in jax.jit(lambda x: [run(x) for run in runs])(x):
        assert out.dtype == grad.dtype == dtype
        assert_close(np.asarray(out, np.float32), exact.astype(np.float32), rtol=2e-2, atol=1e-6)
        assert np.isfinite(np.asarray(grad, np.float32)).all()


@both_dtypes
def test_the_gradient_of_a_scalar_is_summed_in_float32(dtype: Any) -> None:
    fn = jaxmp.autocast(lambda x, t: jnp.sum(x * jnp.exp(t)), dtype)
    assert_exact(jax.jit(jax.grad(fn, 1))(np.ones(4096, dtype), np.float32(0.0)), np.float32(4096))


@both_dtypes
def test_constants_take_part_in_float32(dtype: Any) -> None:
    x = LARGE[:64].astype(dtype)
    wide, sqrt = x.astype(np.float32), np.sqrt(np.float32(0.1))
    out = jax.jit(jaxmp.autocast(lambda x: [x * 0.1, 0.3 - x, x / 0.7, x * jnp.sqrt(0.1)], dtype))(x)
    exact = [wide * np.float32(0.1), np.float32(0.3) - wide, wide / np.float32(0.7), wide * sqrt]
    assert_exact(out, [y.astype(dtype) for y in exact])


def test_a_number_that_16_bits_hold_exactly_casts_nothing() -> None:
    fn = jaxmp.autocast(lambda x: 2 * x + 0.5, BF16)
    assert "convert_element_type" not in str(jax.make_jaxpr(fn)(jnp.ones(4, BF16)))


@both_dtypes
def test_a_comparison_with_a_scalar_is_exact(dtype: Any) -> None:
    x, t = np.asarray([1.0, 2.0, 3.0], dtype), np.float32(2 + 2**-20)
    fn = jaxmp.autocast(lambda x, t: (x < t * 1, x * 20000 < t * 35000), dtype)
    near, far = jax.jit(fn)(x, t)
    assert near.tolist() == [True, True, False]
    assert dtype == BF16 or far.tolist() == [True, True, True]


def test_a_scalar_added_to_a_matmul_is_not_rounded() -> None:
    run = jax.jit(jaxmp.autocast(lambda x, b: (x @ W) - b * b, F16))
    assert_exact(run(np.full((2, 8), 300.0 * 100, np.float32), np.float32(300.0)), np.full((2, 8), -30000, F16))


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


def test_a_solver_in_float16_stays_finite() -> None:
    quartic = lambda x: jnp.sum((x - 3) ** 4) + jnp.sum(x) ** 2  # noqa: E731

    @jax.jit
    def run(x: Any) -> Any:
        return quartic(jaxmp.autocast(lambda x: minimize(quartic, x, method="BFGS").x, F16)(x)), quartic(x)

    for seed in range(2):
        after, before = run(np.random.default_rng(seed).normal(size=4).astype(np.float32) * 2)
        assert after < before
