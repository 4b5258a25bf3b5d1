"""Sums of squares and flags of arrays, also as the one sum that a GPU computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from helpers import assert_close, assert_exact
from jaxmp._src.numerics import reductions
from platforms import ways_of

LIMIT = np.float32(2.0**48)
CASES = {
    "ordinary": np.linspace(-2, 3, 1001, dtype=np.float32),
    "just usable": np.full(10, -np.nextafter(LIMIT, np.float32(0)), np.float32),
    "too large": np.array([1, -LIMIT, 2], np.float32),
    "squares overflow": np.full(10, 1e20, np.float32),
    "inf": np.array([1, np.inf, -2], np.float32),
    "both infinities": np.array([-np.inf, np.inf], np.float32),
    "NaN": np.array([[1, 2], [np.nan, 3]], np.float32),
    "subnormal": np.array([1e-42, 1e-45], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(3),
}


def both():
    """A function of an array, made anew: what a step asks for in different places."""

    def f(x):
        (squares,) = reductions.sums_of_squares([x])
        return squares, reductions.any_unusable([x])

    return jax.jit(f)


@pytest.mark.thorough(4)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_both_are_numpys(platform, case):
    x = CASES[case]
    with ways_of(platform):
        squares, flag = both()(x)
    assert (squares.dtype, flag.dtype) == (jnp.float32, jnp.bool_)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(squares, np.sum(np.square(x, dtype=np.float64)).astype(np.float32), rtol=1e-5)
    assert bool(flag) == (not (np.abs(x) < LIMIT).all())


def test_flags_of_other_dtypes():
    is_nonfinite = jax.jit(lambda x: reductions.any_nonfinite([x]))
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64):
        x = np.ones(5, dtype)
        assert not is_nonfinite(x)
        x[2] = np.inf
        assert is_nonfinite(x)


def test_on_a_gpu_the_norm_and_the_flag_of_a_gradient_are_one_sum():
    with ways_of("cuda"):
        text = both().lower(jnp.ones(8)).compile().as_text()
    assert text.count(" reduce(") == 1
    lowered = both().trace(jnp.ones(8)).lower
    assert "complex" in lowered(lowering_platforms=("cuda",)).as_text()
    assert "complex" in lowered(lowering_platforms=("rocm",)).as_text()
    assert "complex" not in lowered(lowering_platforms=("cpu",)).as_text()
    assert "complex" not in lowered(lowering_platforms=("tpu",)).as_text()


def test_the_sum_of_squares_has_a_gradient_on_a_gpu():
    with ways_of("cuda"):
        slope = jax.jit(jax.grad(lambda x: reductions.sums_of_squares([x])[0]))(jnp.array([1.0, -3.0]))
    assert_exact(slope, jnp.array([2.0, -6.0]))


@pytest.mark.thorough(5)
@pytest.mark.parametrize(("platform", "dtype"), [("cpu", jnp.float16), ("tpu", jnp.float32), ("cuda", jnp.bfloat16)])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_magnitude_is_numpys(platform, dtype, case):
    with np.errstate(over="ignore"):
        x = np.asarray(CASES[case]).astype(dtype)
        expected = np.abs(x.astype(np.float32) * np.float32(0.7)).max(initial=0)
    with ways_of(platform):
        bad, largest = jax.jit(lambda x: reductions.unusable_and_largest([x, x * 0], jnp.float32(0.7)))(x)
    assert (bad.dtype, largest.dtype) == (jnp.bool_, jnp.float32)
    assert bool(bad) == (not expected < LIMIT)
    if platform == "cuda":
        assert largest == -1
    else:
        smallest = np.finfo(np.float32).tiny  # below it XLA for CPU rounds products to zero
        assert_close(largest, np.float32(expected if expected < np.inf else np.inf), atol=smallest)


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("count", "size"), [(17, 1), (1, 2**14 - 1), (17, 2**14), (1, 2**14 + 1), (3, 2**14 + 1), (17, 3 * 5 * 7 * 211)]
)
def test_no_number_is_overlooked(size, count):
    """Arrays are joined with others of their size, or cut into parts that are; the last part may overlap."""
    find = jax.jit(lambda xs: reductions.unusable_and_largest(xs, None))
    xs = [np.full(size, -0.25, np.float16) for _ in range(count)]
    for i, at in {(0, 0), (count // 2, size // 2), (count - 1, size - 1), (count - 1, size - size // 16)}:
        changed = list(xs)
        changed[i] = xs[i].copy()
        changed[i][min(at, size - 1)] = -3
        assert_exact(find(changed), (np.bool_(False), np.float32(3)))
        changed[i][min(at, size - 1)] = np.nan
        assert_exact(find(changed), (np.bool_(True), np.float32(np.inf)))


def test_on_a_cpu_a_few_arrays_or_parts_are_joined():
    """Where no devices share them: sixteen of one size in a loop, all small ones in one more, then what these found."""
    flag = jax.jit(lambda *xs: reductions.any_unusable(xs))
    shapes = [(64, 64)] * 17 + [(4, 9), (2**15,), (3,), ()]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    text = flag.lower(*arrays).as_text("hlo")
    assert text.count(" reduce(") == 2 + 1 + 1 + 1
    assert text.count(" slice(") >= 16  # of the large one
    for i in (0, 7, 16, 17, 18, 19, 20):
        xs = [x.copy() for x in arrays]
        xs[i].reshape(-1)[-1] = np.nan
        assert flag(*xs)
    assert not flag(*arrays)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.device_put(arrays[:17], NamedSharding(mesh, P("d")))
    assert flag.lower(*split).as_text("hlo").count(" reduce(") == 17
    assert not flag(*split)


def test_flags_inside_transformations_of_the_step():
    """A flag has no derivative."""
    x = jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [jnp.nan, 1.0], [1e20, -1e20]])
    for test, expected in (
        (reductions.any_nonfinite, [False, True, True, False]),
        (reductions.any_unusable, [False, True, True, True]),
    ):
        flags = jax.jit(jax.vmap(lambda x: test([x])))(x)  # noqa: B023
        np.testing.assert_array_equal(flags, expected)
        slope = jax.jit(jax.grad(lambda x: jnp.where(test([x]), 0.0, jnp.sum(x * x))))  # noqa: B023
        assert_exact(slope(jnp.array([1.0, -3.0])), jnp.array([2.0, -6.0]))
