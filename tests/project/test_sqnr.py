"""benchmarks/sqnr.py: its two models, its measures, and the page with its stored results; here with one block."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import sqnr
from benchmarks.lib import tables
from helpers import assert_close

KEY = jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def one_block():
    """Models of one block compile faster than those of six."""
    shapes = {name: shape for name, shape in sqnr.SHAPES.items() if name[-1] not in "12345"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqnr, "BLOCKS", 1)
        patch.setattr(sqnr, "SHAPES", shapes)
        yield


@pytest.fixture
def gradients():
    return gradients_params_batch()


@functools.cache
def gradients_params_batch():
    """Gradients of the plain and the unit-scaled model before training; the params and the batch."""

    @jax.jit
    def init():
        a, b = jax.random.normal(KEY, (sqnr.FEATURES, 64)) / 8, jax.random.normal(KEY, (64, sqnr.CLASSES))
        params = {name: sqnr.make_params(KEY, unit=name == "unit") for name in ("plain", "unit")}
        return params, sqnr.make_batch({"a": a, "b": b}, KEY)

    params, batch = init()
    plain = sqnr.gradients_of(sqnr.plain_loss, params["plain"], batch)
    return plain, sqnr.gradients_of(sqnr.unit_loss, params["unit"], batch), params, batch


def rms(x):
    return float(jnp.sqrt(jnp.mean(x**2)))


@pytest.mark.thorough(0)
def test_probes_have_the_gradients_of_the_outputs_of_matmuls(gradients):
    """The gradient of the logits is (softmax - label) / rows."""
    plain, _, params, (x, y) = gradients

    @jax.jit
    def loss(offset):
        probes = {name: jnp.zeros((sqnr.ROWS, shape[1])) for name, shape in sqnr.SHAPES.items()}
        return sqnr.plain_loss(params["plain"], probes | {"out": offset}, x, y)

    assert set(plain) == set(sqnr.SHAPES)
    assert_close(plain["out"].sum(axis=-1), jnp.zeros(sqnr.ROWS), atol=1e-7)
    assert bool((jnp.take_along_axis(plain["out"], y[:, None], axis=-1) < 0).all())
    offset = jnp.zeros((sqnr.ROWS, sqnr.CLASSES)).at[0, y[0]].set(0.25)
    difference = (loss(offset) - loss(-offset)) / 0.5
    assert_close(plain["out"][0, y[0]], difference, rtol=1e-2)


def test_gradients_of_the_unit_scaled_model_are_of_size_1(gradients):
    plain, unit, _, _ = gradients
    assert all(0.5 < rms(g) < 1.5 for g in unit.values())
    assert all(rms(g) < 1e-3 for g in plain.values())


def test_propagated_scales_are_near_the_gradients(gradients):
    plain, _, _, _ = gradients
    for name, scale in sqnr.propagated_scales(plain).items():
        assert np.log2(scale) % 1 == 0
        assert 1 / 8 < rms(plain[name]) / scale < 8, name


def test_measures():
    x = np.array([3.0, 4.0, 0.0])
    assert round(sqnr.sqnr(x, x + np.array([0.3, 0.4, 0.0])), 6) == 20.0  # a tenth of the amplitude
    assert sqnr.sqnr(x, x) == 300.0 and sqnr.sqnr(x, x + np.inf) == -300.0
    assert sqnr.lost(x, np.array([0.0, 4.0, 0.0])) == pytest.approx(1 / 3)


def test_casts_round_and_fp8_saturates():
    x, scale = jnp.array([1.1, 1e6]), jnp.float32(4.0)
    assert sqnr.through(x, scale, jnp.float8_e4m3fn).tolist() == [1.125, 112.0]
    assert sqnr.through(x, scale, jnp.float16).tolist() == [float(np.float16(1.1)), np.inf]


def test_the_page_has_the_stored_results():
    begin, end = tables.markers("sqnr")
    text = sqnr.BENCHMARK.page.read_text().split(begin)[1].split(end)[0]
    assert text.strip().startswith(sqnr.render(json.loads(sqnr.BENCHMARK.results.read_text())))
