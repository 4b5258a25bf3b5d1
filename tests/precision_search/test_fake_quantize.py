"""Roundings of a matmul forwards and backwards, and what is measured of its tensors, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import helpers
import jaxmp
from jaxmp._src.fp8.recipes import CurrentScaling
from jaxmp._src.precision_search import fake_quantize, format_noise

DTYPES = {
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
RNG = np.random.default_rng(0)


def oracle(x, name, loss_scale=1.0):
    """`x` rounded to a format, in float64."""
    x, dtype = np.asarray(x, np.float64), DTYPES[name]
    scale = loss_scale if name == "fp16" else 1.0
    if name.startswith("e"):
        limit, largest = float(ml_dtypes.finfo(dtype).max), np.max(np.abs(x))
        scale = 2.0 ** np.floor(np.log2(limit / largest)) if largest else 1.0
    with np.errstate(over="ignore"):
        return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def edges(name):
    info = ml_dtypes.finfo(DTYPES[name])
    values = [float(v) for v in (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)]
    return [s * v * f for s in (1, -1) for v in values for f in (0.5, 0.50001, 1.0, 1.3, 1.5, 1 + 2**-9)]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_the_cast(name):
    numbers = [*RNG.standard_normal(100), *np.exp2(RNG.uniform(-30, 14, 100)), 0.0, -0.0, 65519.9, 65520.0, -70000.0]
    x = np.asarray([*numbers, *(edges(name) if name in ("fp16", "e4m3", "e5m2") else [])], np.float32)
    rounded = jax.jit(fake_quantize.rounded)(x, fake_quantize.grid(name))
    helpers.assert_exact(rounded, jnp.asarray(oracle(x, name), jnp.float32))


def test_loss_scale_shifts_the_range_of_float16():
    x = np.asarray([1e-9, 3e-5, 1.0], np.float32)
    rounded = jax.jit(fake_quantize.rounded)(x, fake_quantize.grid("fp16", loss_scale=2.0**15))
    helpers.assert_exact(rounded, jnp.asarray(oracle(x, "fp16", 2.0**15), jnp.float32))
    assert float(rounded[0]) == 0.0 or abs(float(rounded[0]) / 1e-9 - 1) < 0.01


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_scale_is_that_of_current_scaling(name):
    amaxes = np.asarray([1.0, 447.9, 448.0, 448.1, 57344.0, 57345.0, 3e-20, 0.0, 1e30, np.inf], np.float32)
    scales = [float(fake_quantize.scale_of(jnp.asarray(a), fake_quantize.grid(name))) for a in amaxes]
    assert scales == CurrentScaling().scale(jnp.asarray(amaxes), backward=name == "e5m2").tolist()


def dense(x, w, g):
    with jax.named_scope("dense"):
        return jnp.sum((x @ w) * g)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("format", "roles"),
    [
        ("bf16", ("bf16", "bf16", "bf16", "bf16")),
        ("fp16", ("fp16", "fp16", "fp16", "fp16")),
        ("fp8", ("e4m3", "bf16", "e5m2", "bf16")),
        (("e5m2", "fp32"), ("e5m2", "bf16", "fp32", "fp32")),
    ],
    ids=["bf16", "fp16", "fp8", "pair"],
)
def test_matmul_forwards_and_backwards(format, roles):
    operand, result, cotangent, gradient = roles
    x, w, g = (RNG.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 3), (4, 3)))
    g = g * 1e-3
    fn = jaxmp.fake_quantize(dense, {"dense": format}, loss_scale=1024.0)
    loss, (dx, dw) = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(x, w, g)
    xq, wq, gq = oracle(x, operand), oracle(w, operand), oracle(g, cotangent, 1024.0)
    helpers.assert_close(loss, np.float32(np.sum(oracle(xq @ wq, result) * g)), rtol=1e-5)
    for exact, found in ((gq @ wq.T, dx), (xq.T @ gq, dw)):
        expected = oracle(exact, gradient, 1024.0)
        # The sum is taken in another order: an element may fall to the other side of a tie.
        assert np.mean(np.abs(found - expected) <= 1e-6 * np.abs(expected)) > 0.9
        np.testing.assert_allclose(found, expected, rtol=2.0**-7)


def test_modules_are_chosen_by_path_and_can_be_switched_off():
    def two(x, w):
        with jax.named_scope("a"):
            y = x @ w
        with jax.named_scope("b"):
            return y + x @ w

    x, w = np.full((1, 1), 1.1, np.float32), np.ones((1, 1), np.float32)
    for rules, expected in (
        ({"a": "off"}, 1.1),
        ({"a": "off", "*": "fp16"}, np.float16(1.1)),
        ({"*": "off"}, 0.0),
        ({"b": "e5m2"}, np.float32(1.1) + 1.0),
    ):
        assert float(jax.jit(jaxmp.fake_quantize(two, rules))(x, w)[0, 0]) == np.float32(expected)
    grads = jax.jit(jax.grad(lambda w: jaxmp.fake_quantize(two, {"a": "off"})(x, w)[0, 0]))(w)
    assert float(grads[0, 0]) == np.float32(1.1)


def test_float32_is_the_function_itself_and_overflow_of_float16_is_seen():
    x, w = RNG.standard_normal((4, 8)).astype(np.float32), RNG.standard_normal((8, 3)).astype(np.float32)
    g = np.ones((4, 3), np.float32)
    same = jax.jit(jax.value_and_grad(jaxmp.fake_quantize(dense, {"dense": "fp32"})))(x, w, g)
    operands = np.float32(np.sum(np.abs(x) @ np.abs(w))), g @ np.abs(w).T
    helpers.assert_within_ulps(same, jax.jit(jax.value_and_grad(dense))(x, w, g), 4, of=operands)
    assert not np.isfinite(jax.jit(jaxmp.fake_quantize(dense, {"dense": "fp16"}))(x * 1e5, w, g))
    assert np.isfinite(jax.jit(jaxmp.fake_quantize(dense, {"dense": "fp8"}))(x * 1e5, w, g))


def test_convolutions_scans_remat_and_vmap():
    def conv(x, k):
        with jax.named_scope("conv"):
            return jax.lax.conv(x, k, (1, 1), "SAME")

    x, k = np.full((1, 1, 2, 2), 1.1, np.float32), np.ones((1, 1, 1, 1), np.float32)
    assert float(jax.jit(jaxmp.fake_quantize(conv, {"conv": "fp8"}))(x, k)[0, 0, 0, 0]) == 1.125

    def looped(w, x):
        body = jax.checkpoint(jax.named_scope("layer")(lambda x, w: (jnp.tanh(x @ w), None)))
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    ws, xs = RNG.standard_normal((3, 4, 4)).astype(np.float32), RNG.standard_normal((5, 2, 4)).astype(np.float32)
    found = jax.jit(jax.vmap(jax.grad(jaxmp.fake_quantize(looped, {"layer": "bf16"})), (None, 0)))(ws, xs)
    exact = jax.jit(jax.vmap(jax.grad(looped), (None, 0)))(ws, xs)
    assert 30 < helpers.sqnr(exact, found) < 60


def test_errors_name_the_rule_and_the_paths():
    with pytest.raises(ValueError, match="a format is one of 'fp32', .*; got 'int8'"):
        jaxmp.fake_quantize(dense, {"dense": "int8"})
    for scale in (1000.0, 0.0, -2.0, np.inf, 2.0**127):
        with pytest.raises(ValueError, match="loss_scale must be a power of two"):
            jaxmp.fake_quantize(dense, {"dense": "fp16"}, loss_scale=scale)
    with pytest.raises(
        ValueError, match="the pattern 'dens' fits no module with a matmul. Close to it: 'dense'. Paths here"
    ):
        jaxmp.fake_quantize(dense, {"dens": "fp8"})(*(np.ones((2, 2), np.float32),) * 3)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_noise_against_numpy(backward):
    tensors = [RNG.standard_normal((16, 8)) * s for s in (1.0, 3e-7, 2e4)]
    tensors[1][0, :4] = 0.0
    total = sum(
        format_noise.measure(jnp.asarray(t, jnp.float32), jnp.float32(64.0), backward=backward) for t in tensors
    )
    for name, noise in format_noise.read(np.asarray(total)).items():
        fmt = {"fp8": "e5m2" if backward else "e4m3"}.get(name, name)
        pairs = []
        for t in tensors:
            t = t.astype(np.float32).astype(np.float64)
            pairs.append((t, oracle(t, fmt, 64.0 if backward else 1.0)))
        ratios = [np.sum((q - t) ** 2) / np.sum(t**2) for t, q in pairs]
        if np.isfinite(ratios).all():
            np.testing.assert_allclose(noise.sqnr, -10 * np.log10(np.mean(ratios)), atol=1e-3)
        else:
            assert noise.sqnr == -np.inf
        t, q = (np.concatenate([p[i].ravel() for p in pairs]) for i in (0, 1))
        assert noise.overflow == pytest.approx(np.mean(np.isinf(q)))
        assert noise.underflow == pytest.approx(np.mean(q[t != 0] == 0))
    if backward:
        exponents = np.floor(np.log2(np.abs([t for t in np.concatenate([t.ravel() for t in tensors]) if t])))
        counts = format_noise.exponents(np.asarray(total))
        assert {int(e): int(n) for e, n in zip(*np.unique(exponents, return_counts=True), strict=True)} == {
            i - 127: int(n) for i, n in enumerate(counts) if n
        }
