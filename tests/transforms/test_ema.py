"""The average of the masters: beside a NumPy rewrite in float64, and for every kind of param."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_moved

W = np.array([1.0, -2.0, 0.5], np.float32)


def run(tx, params, grads):
    """[(params, opt_state)] after each step."""
    opt_state, seen = tx.init(params), []
    for g in grads:
        params, opt_state = jaxmp.apply_gradients(
            tx, jax.tree.map(lambda p, g=g: jnp.full(p.shape, g, p.dtype), params), opt_state, params
        )
        seen.append((params, opt_state))
    return seen


@pytest.mark.parametrize("debias", [True, False], ids=["debiased", "from-the-start"])
@pytest.mark.parametrize(
    "decay", [0.0, 0.9, lambda n: jnp.minimum(0.9, (1.0 + n) / (10.0 + n))], ids=["0", "0.9", "warm"]
)
def test_it_is_the_average_of_the_weights_after_each_step(decay, debias):
    tx = optax.chain(optax.sgd(0.25), jaxmp.ema_params(decay, debias=debias))
    expected, weight = (np.zeros(3), 0.0) if debias else (W.astype(np.float64), 1.0)
    w = W.astype(np.float64)
    for n, (params, opt_state) in enumerate(run(tx, {"w": jnp.asarray(W)}, [1.0, -0.5, 2.0, 0.25])):
        w = w - 0.25 * [1.0, -0.5, 2.0, 0.25][n]
        d = min(0.9, (1 + n) / (10 + n)) if callable(decay) else decay
        expected, weight = d * expected + (1 - d) * w, d * weight + (1 - d)
        got = jaxmp.get_ema_params(opt_state, params)
        assert_close(got, {"w": (expected / weight).astype(np.float32)}, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kwargs", [{}, {"remainder_bits": 16}], ids=["whole", "split"])
def test_it_averages_masters_and_not_what_they_are_rounded_to(kwargs):
    inner = optax.chain(optax.sgd(2.0**-12), jaxmp.ema_params(0.5))
    tx, policy = jaxmp.mixed_precision(inner, "bf16", **kwargs), jaxmp.get_policy("bf16")
    plain = run(inner, {"w": jnp.asarray(W)}, [1.0, 1.0, 1.0])
    opt_state, params = tx.init({"w": jnp.asarray(W)}), policy.cast_to_param({"w": jnp.asarray(W)})
    for _ in range(3):
        params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.ones(3)}, opt_state, params)
    assert params["w"].dtype == jnp.bfloat16
    average = jaxmp.get_ema_params(opt_state, params)
    assert_exact(average, jaxmp.get_ema_params(plain[-1][1], plain[-1][0]))
    assert not np.array_equal(average["w"], np.asarray(params["w"], np.float32))


def test_fp8_scales_and_frozen_leaves_are_taken_from_the_params():
    params = {"w": jnp.ones((16, 16)), "fp8_lhs_e4m3_log2_scale": jnp.float32(3.0), "base": jnp.ones(2, jnp.int32)}
    labels = {"w": "train", "fp8_lhs_e4m3_log2_scale": "train", "base": "frozen"}
    inner = optax.multi_transform(
        {"train": optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.5)), "frozen": optax.set_to_zero()}, labels
    )
    tx = jaxmp.mixed_precision(inner, "fp32", recipe=jaxmp.fp8.DelayedScaling(amax_history_len=2))
    grads = {"w": jnp.ones((16, 16)), "fp8_lhs_e4m3_log2_scale": jnp.float32(1.0), "base": jnp.zeros(2, jnp.float32)}
    new, opt_state = jax.jit(lambda *args: jaxmp.apply_gradients(tx, *args))(grads, tx.init(params), params)
    average = jaxmp.get_ema_params(opt_state, new)
    assert_exact(average, new)


def test_updates_pass_and_the_state_keeps_its_types():
    tx, params = jaxmp.ema_params(0.9), {"w": W.astype(jnp.bfloat16)}
    state = tx.init(params)
    updates, after = jax.jit(tx.update)({"w": W}, state, params)
    assert_moved(updates, {"w": W})
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    assert state.ema_params["w"].dtype == jnp.float32


def test_a_transform_behind_it_is_an_error_where_the_average_is_read():
    """Its updates are not in the average. Also where `ema_params` is behind `mixed_precision`."""
    params, ema, sgd = {"w": jnp.ones(2)}, jaxmp.ema_params(0.5), optax.sgd(0.1)
    inside = lambda *chain: jaxmp.mixed_precision(optax.chain(*chain), "bf16")  # noqa: E731
    wrong = [
        inside(ema, sgd),
        inside(optax.chain(sgd, ema), optax.scale(0.5)),
        inside(optax.multi_transform({"a": optax.chain(ema, sgd)}, {"w": "a"})),
        optax.chain(jaxmp.mixed_precision(sgd, "bf16"), ema),
    ]
    for tx in wrong:
        with pytest.raises(ValueError, match="must be last in its chain, and inside mixed_precision"):
            jaxmp.get_ema_params(tx.init(params), params)
    for tx in (inside(sgd, ema), inside(optax.chain(sgd, ema)), inside(optax.MultiSteps(optax.chain(sgd, ema), 2))):
        assert_moved(jaxmp.get_ema_params(tx.init(params), params), params)


def test_errors():
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"decay must be >= 0 and < 1; got {decay}"):
            jaxmp.ema_params(decay)
    with pytest.raises(ValueError, match="one ema_params; got 0. Write optax.chain"):
        jaxmp.get_ema_params(optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
    with pytest.raises(ValueError, match="needs the params"):
        jaxmp.ema_params(0.9).update(jnp.ones(2), jaxmp.ema_params(0.9).init(jnp.ones(2)))


@pytest.mark.parametrize(
    ("policy", "labels"),
    [("fp32", {"body": "no", "head": "yes"}), ("bf16", {"body": {"w": "no"}, "head": {"w": "yes"}})],
    ids=["subtrees", "leaves"],
)
def test_an_average_of_one_label(policy, labels):
    """Other leaves come from the params, whether a label stands for a leaf or for a subtree."""
    params32 = {"body": {"w": np.full(4, 3.0, np.float32)}, "head": {"w": np.ones(4, np.float32)}}
    inner = {"yes": optax.chain(optax.sgd(0.5), jaxmp.ema_params(0.5)), "no": optax.set_to_zero()}
    tx = jaxmp.mixed_precision(optax.multi_transform(inner, labels), policy)
    params, state = jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)
    for _ in range(2):
        params, state = jaxmp.apply_gradients(tx, jax.tree.map(np.ones_like, params), state, params)
    average = jaxmp.get_ema_params(state, params)
    assert_close(average, {"body": params32["body"], "head": {"w": np.full(4, 1 / 6, np.float32)}})
