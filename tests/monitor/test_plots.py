"""What the pictures show is what was recorded; how they look is for eyes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_within_ulps
from jaxmp import monitor
from jaxmp._src.monitor.step_stats import Fp8Stats, StepStats

ROWS = [{"step": i, "loss": 4.0 - i, "loss_scale": 8.0 if i < 3 else 4.0, "skipped": float(i == 2)} for i in range(4)]


@functools.cache
def measured():
    """Three (step, sample) of two gradients, and a step that was not sampled.

    Magnitudes are 2^-20 to 2^-13 under a scale of 2^10; step 20 has one that is not finite.
    """
    params = {"a": jnp.ones(8, jnp.float16), "b": jnp.ones(4)}
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=2.0**10).init(params)
    measure = jax.jit(lambda grads, when: monitor.step_stats(grads, opt_state, params, when=when))
    magnitudes = (2.0 ** (np.arange(8.0) - 10)).astype(np.float16)
    values = [
        ({"a": magnitudes, "b": np.full(4, b, np.float32)}, when) for b, when in ((0.5, 1), (np.inf, 1), (0.5, 0))
    ]
    whole, overflowed, unsampled = (jax.device_get(measure(grads, bool(when))) for grads, when in values)
    return [(0, whole), (10, whole), (20, overflowed)], unsampled


def samples():
    return measured()[0]


def ys(line):
    return np.asarray(line.get_ydata(), np.float64)


def test_loss_and_scale():
    above, below = monitor.plot_loss_and_scale(ROWS).axes
    assert_exact(ys(above.lines[0]), np.array([4.0, 3, 2, 1]))
    assert_exact(ys(below.lines[0]), np.array([8.0, 8, 8, 4]))
    skipped = next(line for line in below.lines if line.get_label() == "skipped")
    assert (skipped.get_xdata().tolist(), skipped.get_ydata().tolist()) == ([2], [8])
    assert below.get_yscale() == "log"


def test_several_runs_differ_in_their_dashes():
    above, _ = monitor.plot_loss_and_scale({"fp32": ROWS, "fp16": ROWS, "bf16": ROWS}).axes
    curves = [line for line in above.lines if line.get_label() in ("fp32", "fp16", "bf16")]
    assert len({line.get_linestyle() for line in curves}) == 3


def test_a_smoothed_loss_leaves_out_what_is_not_finite():
    rows = [{"step": i, "loss": np.nan if i == 1 else float(i)} for i in range(4)]
    above, _ = monitor.plot_loss_and_scale(rows, smooth=2).axes
    assert_exact(ys(above.lines[0]), np.array([0, 0, 2, 2.5]))


@pytest.mark.thorough(0)
def test_exponents_before_and_after_scaling():
    above, below = monitor.plot_exponents(samples()[0][1], names=["a"]).axes
    unscaled, scaled = above.lines
    assert "2^10" in scaled.get_label()
    peak = lambda line: line.get_xdata()[line.get_ydata() > 0]  # noqa: E731
    assert_exact(peak(scaled), np.arange(-10, -2) + 0.5)
    assert_exact(peak(unscaled), np.arange(-20, -12) + 0.5)
    assert [t.get_text() for t in below.get_yticklabels()] == ["e5m2", "e4m3", "fp16", "bf16"]
    starts = sorted(
        (p.get_x(), p.get_x() + p.get_width()) for p in below.patches if p.get_y() < 2.5 and p.get_y() > 1.5
    )
    np.testing.assert_allclose(starts, [(-24, -14), (-14, np.log2(65504))])


def test_layers():
    axes = monitor.plot_layers(samples()).axes[0]
    values = axes.images[0].get_array()
    assert_within_ulps(np.asarray(values[0], np.float64), np.full(3, -3.0), 2)  # logarithms
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b"]
    assert axes.lines[0].get_xdata().tolist() == [2] and axes.lines[0].get_ydata().tolist() == [1]
    share = monitor.plot_layers(samples(), what="underflow/e4m3").axes[0].images[0].get_array()
    np.testing.assert_allclose(share[0], 100 / 8)  # 2^-10 is half of e4m3's smallest number


FP8 = [
    (i, StepStats(*(None, None, None), Fp8Stats({"d/fp8_lhs": a}, {"d/fp8_lhs": 64.0}, {"d/fp8_lhs": a > 7}), {}, 1.0))
    for i, a in enumerate((1.0, 2.0, 8.0))
]


def test_fp8():
    above, below = monitor.plot_fp8(FP8).axes
    assert_exact(ys(above.lines[0]), np.array([1.0, 2, 8]))
    assert above.lines[1].get_xdata().tolist() == [2]
    assert_exact(ys(below.lines[0]), np.full(3, 64.0))


def test_what_was_not_looked_at_is_not_drawn():
    tensor_stats = jax.jit(monitor.tensor_stats, static_argnames="histogram")
    off, (_, seen), nothing = measured()[1], samples()[0], monitor.Monitor()
    other = seen._replace(grads=tensor_stats({"c": np.ones(2, np.float32)}))
    for draw, message in (
        (lambda: monitor.plot_exponents(off), "the step must be sampled; got one where"),
        (lambda: monitor.plot_exponents(tensor_stats({"a": np.ones(2, "f4")}, histogram=False)), "histogram=True"),
        (lambda: monitor.plot_exponents(seen, names=[]), "must have a float tensor; got none to draw"),
        (lambda: monitor.plot_exponents(seen, names=["c"]), "names must be of tensors; got 'c'. There are a, b"),
        (lambda: monitor.plot_layers([(0, off)]), "samples must have grads; got none"),
        (lambda: monitor.plot_layers([*samples(), (30, other)]), "all samples must have the same grads; got different"),
        (lambda: monitor.plot_layers(samples(), what="underflow/fp12"), "got 'underflow/fp12', 'grads'"),
        (lambda: monitor.plot_layers(samples(), of="activations"), "samples must have activations; got none"),
        (lambda: monitor.plot_layers(nothing), "Pass stats= of step_stats"),
        (lambda: monitor.plot_loss_and_scale(nothing), "Call Monitor.update"),
        (lambda: monitor.plot_fp8(samples()), "samples must have fp8 tensors with delayed scaling; got none"),
        (lambda: monitor.plot_fp8(FP8, paths=["x"]), "paths must name sampled fp8 tensors; got 'x'. There are d/fp8_l"),
    ):
        with pytest.raises(ValueError, match=message):
            draw()
    with pytest.raises(TypeError, match=r"got Monitor. Pass monitor.samples\[-1\]\[1\]"):
        monitor.plot_exponents(nothing)  # pyright: ignore[reportArgumentType]
