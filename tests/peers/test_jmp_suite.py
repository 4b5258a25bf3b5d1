"""The cases that jmp's suite checks of its loss scales, with jaxmp's; where a rule differs, the test says how."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._src.loss_scale import static


def dynamic(scale, period=2000, factor=2.0, floor=1.0):
    """jmp's rule: it falls at the first overflow, by the factor by which it grows."""
    return jaxmp.DynamicLossScale(
        scale, growth_interval=period, growth_factor=factor, backoff_factor=1 / factor, hysteresis=1, min_scale=floor
    )


@pytest.mark.parametrize("scale", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("make", [static.StaticLossScale, dynamic])
def test_scale_and_unscale(make, scale):
    scaler = make(scale)
    tree = {"a": jnp.array(1.0)}
    scaled = scaler.scale(tree)
    assert float(scaled["a"]) == scale
    np.testing.assert_allclose(scaler.unscale(scaled)["a"], 1.0, rtol=2**-23)


def test_no_scale_returns_what_it_got():
    scaler = static.NoOpLossScale()
    tree = {"a": jnp.ones([])}
    assert scaler.scale(tree)["a"] is tree["a"] and float(scaler.unscale(tree)["a"]) == 1.0
    assert jax.tree.leaves(scaler) == []


def test_a_scale_is_a_tree_of_its_moving_parts():
    """jmp: the scale and the counter. Ours has the hysteresis that is left too, and a static scale is an argument."""
    scaler = dynamic(jnp.ones([]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynamic(2.0**15)
    again = jax.tree.map(lambda x: x, scaler)
    assert [float(x) for x in jax.tree.leaves(again)] == [1.0, 0.0, 1.0]
    assert jax.tree.structure(again) == jax.tree.structure(scaler)


@pytest.mark.parametrize(("period", "factor"), [(20, 2.0), (30, 3.0)])
def test_it_grows_after_a_period_of_finite_steps(period, factor):
    scaler, adjust = dynamic(10.0, period, factor), jax.jit(lambda s: s.adjust(jnp.bool_(True)))
    for i in range(1, period):
        scaler = adjust(scaler)
        assert (float(scaler.loss_scale), int(scaler.growth_count)) == (10.0, i)
    scaler = adjust(scaler)
    assert (float(scaler.loss_scale), int(scaler.growth_count)) == (10 * factor, 0)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("period", "factor", "floor"), [(20, 2.0, 1.0), (30, 3.0, 1.0), (20, 2.0, 0.3125), (30, 3.0, 0.37), (5, 2.0, None)]
)
def test_it_falls_at_every_overflow_to_its_floor(period, factor, floor):
    """jmp's floor of 0 is ours of None; `get_loss_scale` of a job takes jmp's 0 as well (test_protocol.py)."""
    scaler, adjust = dynamic(10.0, period, factor, floor), jax.jit(lambda s: s.adjust(jnp.bool_(False)))
    for i in range(100):
        scaler = adjust(scaler)
        expected = max(floor or 0.0, 10.0 / factor ** (i + 1))
        np.testing.assert_allclose(scaler.loss_scale, expected, rtol=1e-5)
        assert int(scaler.growth_count) == 0


def test_integers_are_made_floats():
    """jmp warns of an integer scale, which would truncate; ours is always float32."""
    for scaler in (dynamic(1), dynamic(np.int32(8), floor=2), static.StaticLossScale(np.int32(8))):
        assert scaler.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_all_finite(bad):
    bad, good = jnp.array(bad, jnp.float32), jnp.ones([])
    for tree in ({}, None, {"a": good, "b": good}, {"n": jnp.arange(3)}):
        assert bool(jaxmp.all_finite(tree))
    for tree in ({"a": bad}, {"a": good, "b": bad}, {"a": bad, "b": good}):
        assert not bool(jaxmp.all_finite(tree))


def test_select_tree():
    """The selection of a step: `keep_if_skipped`, with the state of the update in place of a bool."""
    a, b = {"a": jnp.ones([]), "b": jnp.zeros([])}, {"a": jnp.zeros([]), "b": jnp.ones([])}
    tx, p = jaxmp.mixed_precision(optax.sgd(1.0), "fp32"), jnp.ones(1)
    for g, expected in ((1.0, a), (np.nan, b)):
        _, state = tx.update(jnp.full(1, g), tx.init(p), p)
        assert jaxmp.keep_if_skipped(state, None, None) is None
        found = jaxmp.keep_if_skipped(state, a, b)
        assert {k: float(x) for k, x in found.items()} == {k: float(x) for k, x in expected.items()}
