"""Sums of squares and flags of arrays, also as the one sum that a GPU computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_exact
from jaxmp._src.numerics import reductions
from pallas_kernels import backend

CASES = {
    "ordinary": np.linspace(-2, 3, 1001, dtype=np.float32),
    "squares overflow": np.full(10, 1e20, np.float32),
    "inf": np.array([1, np.inf, -2], np.float32),
    "both infinities": np.array([-np.inf, np.inf], np.float32),
    "NaN": np.array([[1, 2], [np.nan, 3]], np.float32),
    "subnormal": np.array([1e-42, 1e-45], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(3),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_both_are_numpys(monkeypatch, platform, case):
    monkeypatch.setattr(backend, "default_platform", lambda: platform)
    x = CASES[case]
    squares, flag = jax.jit(lambda x: (reductions.sum_of_squares(x), reductions.any_nonfinite([x])))(x)
    assert (squares.dtype, flag.dtype) == (jnp.float32, jnp.bool_)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(squares, np.sum(np.square(x, dtype=np.float64)).astype(np.float32), rtol=1e-5)
    assert bool(flag) == (not np.isfinite(x).all())


def test_flags_of_other_dtypes(monkeypatch):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    found = jax.jit(lambda x: reductions.any_nonfinite([x]))
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64):
        x = jnp.ones(5, dtype)
        assert not found(x) and found(x.at[2].set(jnp.asarray(np.inf, dtype)))


def test_on_a_gpu_the_norm_and_the_flag_of_a_gradient_are_one_sum(monkeypatch):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    both = jax.jit(lambda x: (reductions.sum_of_squares(x), reductions.any_nonfinite([x])))
    text = both.lower(jnp.ones(8)).compile().as_text()
    assert text.count(" reduce(") == 1


def test_the_sum_of_squares_has_a_gradient_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    slope = jax.jit(jax.grad(reductions.sum_of_squares))
    assert_exact(slope(jnp.array([1.0, -3.0])), jnp.array([2.0, -6.0]))


@pytest.mark.skipif(not backend.BARRIERS_HOLD, reason="before jax 0.11 the step on a CPU has no order of its own")
def test_on_a_cpu_the_flag_is_read_from_the_sum_of_the_norm():
    """The loop over flags lies in a branch, for sums that are not finite."""
    both = jax.jit(lambda x: (reductions.sum_of_squares(x), reductions.any_nonfinite([x])))
    program = jax.make_jaxpr(both)(jnp.ones(8))
    assert "cond" in str(program)
    text = both.lower(jnp.ones(8)).compile().as_text()
    assert "pred[8]" not in text[text.index("ENTRY") :] and "conditional(" in text


def test_flags_inside_transformations_of_the_step():
    """Under vmap both branches run; a flag has no derivative."""
    x = jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [jnp.nan, 1.0], [1e20, -1e20]])
    flags = jax.jit(jax.vmap(lambda x: reductions.any_nonfinite([x])))(x)
    np.testing.assert_array_equal(flags, [False, True, True, False])
    slope = jax.jit(jax.grad(lambda x: jnp.where(reductions.any_nonfinite([x]), 0.0, jnp.sum(x * x))))
    assert_exact(slope(jnp.array([1.0, -3.0])), jnp.array([2.0, -6.0]))
