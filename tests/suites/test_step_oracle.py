"""A sample of the steps that `make oracle` compares with NumPy, and that a wrong step would be seen."""

import functools

import jax
import numpy as np
import pytest

import step_campaign
from step_campaign import WORLDS


@pytest.mark.thorough(0)
@pytest.mark.parametrize("index", range(len(WORLDS)), ids=map("-".join, WORLDS))
def test_every_number_of_a_step_is_the_oracles(index):
    done = step_campaign.run(index, 25, seed=7)
    assert sum(done.values()) == 25 and done["taken"] > 10


@functools.cache
def one_step():
    """A world, what it held before and after a step, and the gradients."""
    world, rng = step_campaign.world_of(WORLDS.index(("pmap", "fp16", "adamw"))), np.random.default_rng(5)
    before = world.read(world.first)
    grads = step_campaign.draw(rng, world.dtypes, injured=False)
    after = world.read(world.step(world.first, world.regime.shard(grads))[0])
    assert step_campaign.check(world, before, after, grads) == "taken"
    return world, before, after, grads


def changed(leaf, name, factor):
    """`after` with the numbers of a leaf multiplied by `factor`."""
    _, _, after, _ = one_step()
    x = after.leaves[leaf][name] * np.float32(factor)
    return after._replace(leaves=after.leaves | {leaf: after.leaves[leaf] | {name: x}})


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["master", "mu", "nu"])
def test_a_wrong_number_is_seen(name):
    world, before, _, grads = one_step()
    with pytest.raises(AssertionError, match=rf"^vector: (?s:.*){name}: "):
        step_campaign.check(world, before, changed("vector", name, 1 + 2.0**-16), grads)


def test_an_element_that_stayed_or_was_rounded_wrongly_is_seen():
    world, before, after, grads = one_step()
    with pytest.raises(AssertionError, match="^w: element"):
        step_campaign.check(world, before, after._replace(leaves=after.leaves | {"w": before.leaves["w"]}), grads)
    param = np.nextafter(after.params["vector"], np.float16(9), dtype=np.float16)
    with pytest.raises(AssertionError, match="^vector: params"):
        step_campaign.check(world, before, after._replace(params=after.params | {"vector": param}), grads)


def test_a_wrong_decision_or_scale_is_seen():
    world, before, after, grads = one_step()
    of_scale = "the scale's state"
    wrong = {"skipped": (True, "skipped is"), "growth_count": (5, of_scale), "loss_scale": (3.0, of_scale)}
    for name, (value, message) in wrong.items():
        with pytest.raises(AssertionError, match=message):
            step_campaign.check(world, before, after._replace(metrics=after.metrics | {name: value}), grads)


def test_a_device_that_differs_is_seen(monkeypatch):
    world, *_ = one_step()
    copies = world.regime.copies(world.first)
    copies[1] = jax.tree.map(lambda x: x + np.ones((), x.dtype), copies[1])
    monkeypatch.setattr(world.regime, "copies", lambda state: copies)
    with pytest.raises(AssertionError, match="devices differ"):
        world.read(world.first)
