"""The step on one page: the optimizer runs once, what it changes is kept or left as a whole, on every platform."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_within_ulps, compilations

PARAMS32 = {"w": np.full((32, 32), 2.0, np.float32), "b": np.full(64, 2.0, np.float32)}


def started(inner, policy="fp16", **kwargs):
    """(tx, params, state)."""
    tx = jaxmp.mixed_precision(inner, policy, **kwargs)
    return tx, jaxmp.get_policy(policy).cast_to_param(PARAMS32), jax.jit(tx.init)(PARAMS32)


def gradients(params, state, value=0.25):
    scale = jaxmp.get_loss_scale(state)
    return jax.tree.map(lambda p: np.full(p.shape, value * np.asarray(scale)).astype(p.dtype), params)


def step_of(tx):
    return lambda grads, state, params, **extra: jaxmp.apply_gradients(tx, grads, state, params, **extra)


# The optimizer runs once


@pytest.mark.parametrize(("policy", "jitted"), [("fp16", True), ("fp32", False)])
def test_a_callback_is_called_once_in_a_taken_step_and_never_in_a_skipped_one(policy, jitted):
    """A step is skipped by an overflow, or by `skip_if`."""
    calls = []

    def update(updates, params):
        del params
        jax.debug.callback(lambda: calls.append(1))
        return updates

    inner = optax.chain(optax.stateless(update), optax.sgd(0.1))
    tx, params, state = started(inner, policy, skip_if=lambda grads, metrics: grads["b"][0] > 0.5)
    step = jax.jit(step_of(tx)) if jitted else step_of(tx)
    counts = []
    for value in (0.25, np.inf, 0.75, 0.25):
        params, state = jax.block_until_ready(step(gradients(params, state, value), state, params))
        jax.effects_barrier()
        counts.append(len(calls))
    assert counts == [1, 1, 1, 2]


def test_a_line_search_asks_for_the_loss_as_often_as_by_hand():
    calls = []

    def value_fn(params):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sum(params["w"] ** 2)

    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4))
    tx, params, state = started(inner, "fp32")

    def by_hand(state, params):
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = inner.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    def ours(state, params):
        value, grad = jax.value_and_grad(value_fn)(params)
        return jaxmp.apply_gradients(tx, grad, state, params, value=value, grad=grad, value_fn=value_fn)

    def counted(step, state):
        calls.clear()
        result = jax.block_until_ready(jax.jit(step)(state, params))[0]
        jax.effects_barrier()
        return result, len(calls)

    (expected, by_hand_calls), (got, our_calls) = counted(by_hand, inner.init(params)), counted(ours, state)
    assert our_calls == by_hand_calls
    assert_within_ulps(got, expected, 64)


def test_an_optimizer_that_stashes_a_traced_value_works():
    stash = []

    def update(updates, params):
        del params
        stash.append(updates["b"] * 2)
        return updates | {"b": stash.pop()}

    tx, params, state = started(optax.chain(optax.stateless(update), optax.sgd(0.5)), "fp32")
    params, _ = jax.jit(step_of(tx))(gradients(params, state), state, params)
    assert_exact(params["b"], np.full(64, 1.75, np.float32))


# What it changes is kept or left as a whole


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_an_average_and_its_weight_belong_together(policy):
    tx, params, state = started(optax.chain(optax.sgd(0.0), jaxmp.ema_params(0.5)), policy)
    step = jax.jit(step_of(tx))
    for value in (0.25, np.inf, np.nan, 0.25):
        params, state = step(gradients(params, state, value), state, params)
        assert_exact(jaxmp.get_ema_params(state, params), jax.tree.map(jnp.asarray, PARAMS32))


def test_the_state_of_what_comes_before_is_kept_in_a_skipped_step():
    tx, params, state = started(optax.sgd(0.1), "fp32", before=optax.trace(0.5))
    params, state = jaxmp.apply_gradients(tx, gradients(params, state), state, params)
    kept = jax.tree.map(np.asarray, state.before_state)
    _, state = jaxmp.apply_gradients(tx, gradients(params, state, np.nan), state, params)
    assert_exact(state.before_state, kept)


def test_keep_if_skipped_after_a_trial_of_the_same_state():
    tx, params, state = started(optax.sgd(0.1), "fp32")
    _, state = jaxmp.apply_gradients(tx, gradients(params, state, np.inf), state, params)
    jaxmp.apply_gradients(tx, gradients(params, state), state, params)  # a trial, thrown away
    kept = jaxmp.keep_if_skipped(state, {"a": jnp.ones(1)}, {"a": jnp.zeros(1)})
    assert_exact(kept, {"a": np.zeros(1, np.float32)})


# On every platform


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("options", "looped"),
    [
        ({}, False),
        ({}, True),
        ({"policy": "bf16", "remainder_bits": 16}, False),
        ({"policy": "bf16", "remainder_bits": 8}, False),
    ],
)
def test_one_traced_step_is_a_branch_on_a_cpu_and_selects_elsewhere(options, looped):
    tx, params, state = started(optax.adamw(1e-3), **options)

    def steps(grads, state, params):
        if not looped:
            return jaxmp.apply_gradients(tx, grads, state, params)
        body = lambda carry, _: (jaxmp.apply_gradients(tx, grads, carry[1], carry[0]), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), None, length=2)[0]

    traced = jax.jit(steps).trace(gradients(params, state), state, params)
    branches = {p: traced.lower(lowering_platforms=(p,)).as_text().count("stablehlo.case") for p in ("cuda", "tpu")}
    assert branches == {"cuda": 0, "tpu": 0}
    assert traced.lower(lowering_platforms=("cpu",)).as_text().count("stablehlo.case") >= 1


# Before jax 0.11, XLA for CPU drops `lax.optimization_barrier` too early: what must come first may come last.
@pytest.mark.thorough(2)
@pytest.mark.parametrize("policy", ["fp32", *["fp16"] * (jax.__version_info__ >= (0, 11))])
@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(1e-3),
        optax.rmsprop(1e-3),
        optax.amsgrad(1e-3),
        optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.9)),
        jaxmp.fused_adamw(1e-3),
    ],
    ids=["adamw", "rmsprop", "amsgrad", "ema_params", "fused"],
)
def test_no_donated_array_is_copied(inner, policy):
    tx, params, state = started(inner, policy)
    step = lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p)[::-1]  # noqa: E731
    assert not copies_of_leaves(step, gradients(params, state), state, params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "inner", [optax.lion(1e-3), optax.contrib.schedule_free_adamw(1e-3)], ids=["lion", "schedule_free"]
)
def test_no_more_is_copied_than_by_hand(inner):
    """A moment from which both the params and its next value are made: XLA for CPU copies it by hand, too."""
    tx, params, state = started(inner, "fp32")

    def by_hand(grads, state, params):
        def move(state, params):
            updates, state = inner.update(grads, state, params)
            return state, optax.apply_updates(params, updates)

        taken = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        return jax.lax.cond(taken, move, lambda *old: old, state, params)

    step = lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p)[::-1]  # noqa: E731
    grads = gradients(params, state)
    others = copies_of_leaves(by_hand, grads, inner.init(params), params)
    assert len(copies_of_leaves(step, grads, state, params)) <= len(others)


def copies_of_leaves(step, grads, state, params):
    """The sizes of the copies of more than 1 KiB in a step that is compiled with params and state donated."""
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(grads, state, params).compile()
    dims = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", compiled.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in dims]
    return [size for size in sizes if size > 256]


@pytest.mark.thorough(0)
def test_a_step_without_jit_compiles_nothing_at_its_second_call():
    tx, params, state = started(optax.sgd(1e-3))
    run = {
        "step": lambda grads: jaxmp.apply_gradients(tx, grads, state, params),
        "grad": jax.grad(lambda grads: jnp.sum(jaxmp.apply_gradients(tx, grads, state, params)[0]["w"].astype("f4"))),
        "vmap": jax.vmap(lambda grads: jaxmp.apply_gradients(tx, grads, state, params)[0]),
    }
    for name, f in run.items():
        grads = gradients(params, state)
        grads = jax.tree.map(lambda g: jnp.stack([g, g]), grads) if name == "vmap" else jax.tree.map(jnp.asarray, grads)
        f(grads)
        with compilations() as compiled:
            f(grads)
        assert not compiled, name


def test_meta_gradients_go_through_taken_and_skipped_steps():
    tx, params, state = started(optax.sgd(1.0), "fp32")

    def moved(factor, value):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, value * factor), params)
        return jnp.sum(jaxmp.apply_gradients(tx, grads, state, params)[0]["b"])

    f = jax.jit(jax.grad(moved))
    assert_exact(f(1.0, 1.0), np.float32(-64.0))
    assert_exact(f(1.0, jnp.float32(2.0**60)), np.float32(0.0))
