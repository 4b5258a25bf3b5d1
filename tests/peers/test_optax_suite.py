"""The cases that optax's suite checks of `apply_if_finite` and `MultiSteps`, with `mixed_precision` in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

NAN = float("nan")


def takes_extra():
    """An optimizer with an argument of its own."""

    def update(updates, state, params=None, *, foo=None, **extra):
        return updates, state

    return optax.chain(optax.sgd(1.0), optax.GradientTransformationExtraArgs(lambda _: {"foo": jnp.ones(())}, update))


INNER = {"sgd": lambda: optax.sgd(1.0), "stateful": lambda: optax.sgd(1.0, momentum=0.0), "extra": takes_extra}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["eager", "jit", "pmap"])
@pytest.mark.parametrize("inner", INNER)
def test_steps_that_are_not_finite_are_rejected(inner, how):
    """optax accepts the NaN after a number of them; here the host decides, and `check_progress` raises."""
    tx = jaxmp.mixed_precision(INNER[inner](), "fp32")

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(lambda p: p * x)(params, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    run = {"eager": step, "jit": jax.jit(step)}.get(how)
    if run is None:
        over = jax.pmap(step, axis_name="i", in_axes=(None, None, 0), devices=jax.devices()[:2])
        run = lambda p, s, x: jax.tree.map(lambda a: a[0], over(p, s, jnp.full(2, x)))  # noqa: E731
    params, state = jnp.array(0.0), tx.init(jnp.array(0.0))
    seen, counts = [], []
    for x in (1.0, NAN, NAN, 1.0, NAN, NAN, NAN):
        params, state = run(params, state, jnp.float32(x))
        seen.append(float(params))
        counts.append(int(state.consecutive_skips))
    assert seen == [-1, -1, -1, -2, -2, -2, -2] and counts == [0, 1, 2, 0, 1, 2, 3]
    assert int(state.skipped_steps) == 5
    with pytest.raises(jaxmp.TrainingStuck):
        jaxmp.check_progress(state, max_consecutive_skips=3)


def test_a_nan_that_the_loss_makes_on_one_device():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp32")

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.arctanh(x) * p)(params, opt_state=state)
        return jaxmp.apply_gradients(tx, jax.lax.psum(grads, "i"), state, params)

    over = jax.pmap(step, axis_name="i", in_axes=(None, None, 0), out_axes=None, devices=jax.devices()[:2])
    params, state = jnp.array(0.0), tx.init(jnp.array(0.0))
    skipped = []
    for x in ([0.5, 0.5], [0.5, 2.0], [2.0, 2.0], [0.5, 0.5]):
        params, state = over(params, state, jnp.array(x))
        skipped.append(bool(state.skipped))
    assert skipped == [False, True, True, False] and np.isfinite(params)


def accumulating(k, inner=None, **kwargs):
    """MultiSteps inside: each microbatch is unscaled, and may be skipped alone."""
    return jaxmp.mixed_precision(optax.MultiSteps(inner or optax.sgd(1.0), k, **kwargs), "fp32")


def stepped(tx, grads, params):
    state = tx.init(params)
    update = jax.jit(lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p))
    seen = []
    for g in grads:
        params, state = update(jax.tree.map(lambda p, g=g: jnp.full_like(p, g), params), state, params)
        seen.append(jax.tree.map(np.asarray, params))
    return seen, state


def test_params_move_at_every_kth_step_and_the_loss_falls():
    k, x = 4, jnp.ones((32, 7))
    inner = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-4))
    tx = jaxmp.mixed_precision(optax.MultiSteps(inner, k), "fp32")
    params = {"w": jax.random.normal(jax.random.key(0), (7, 10)) / 7, "b": jnp.zeros((1, 10))}
    loss_fn = lambda p: jnp.sum((x @ p["w"] + p["b"]) ** 2)  # noqa: E731

    @jax.jit
    def step(params, state):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=state)
        return *jaxmp.apply_gradients(tx, grads, state, params), loss

    state, losses = tx.init(params), []
    for _ in range(5 * k + 1):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    windows = np.array(losses[: 5 * k]).reshape(5, k)
    assert (windows == windows[:, :1]).all() and (np.diff([*windows[:, 0], losses[-1]]) < 0).all()


def test_a_schedule_of_lengths():
    tx = accumulating(lambda step: jnp.where(step < 2, 1, 3))
    seen, _ = stepped(tx, [1.0] * 8, {"a": jnp.zeros([])})
    assert [float(p["a"]) for p in seen] == [-1, -2, -2, -2, -3, -3, -3, -4]


def test_the_mean_and_the_sum_of_microbatches():
    for mean, expected in ((True, -2.5), (False, -10.0)):
        seen, _ = stepped(accumulating(4, use_grad_mean=mean), [1.0, 2.0, 3.0, 4.0], {"a": jnp.zeros([])})
        assert [float(p["a"]) for p in seen] == [0, 0, 0, expected]


def test_zero_nans_inside():
    tx = accumulating(2, optax.chain(optax.zero_nans(), optax.sgd(1.0)))
    assert [float(p["a"]) for p in stepped(tx, [1.0, 3.0], {"a": jnp.zeros([])})[0]] == [0, -2]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), NAN])
@pytest.mark.parametrize("own", [False, True])
def test_microbatches_that_are_not_finite_do_not_count(bad, own):
    """With optax's own function, and without: `mixed_precision` skips them before they arrive."""
    tx = accumulating(2, **({"should_skip_update_fn": optax.skip_not_finite} if own else {}))
    seen, state = stepped(tx, [1.0, 1.0, bad, bad, 1.0, bad, 1.0], {"a": jnp.zeros([])})
    assert [float(p["a"]) for p in seen] == [0, -1, -1, -1, -1, -1, -2]
    assert int(state.skipped_steps) == 3


def test_large_updates_are_skipped_by_a_rule_of_ones_own():
    """optax's `skip_large_updates`, as `skip_if`: the step is skipped, and the scale is left alone."""
    rule = lambda grads, _: optax.skip_large_updates(grads, 0, None, 100.0)[0]  # noqa: E731
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp32", loss_scale=jaxmp.DynamicLossScale(4.0), skip_if=rule)
    seen, state = stepped(tx, [4.0, 44.0, 4.0], {"a": jnp.zeros([]), "b": jnp.zeros([])})
    assert [float(p["a"]) for p in seen] == [-1, -1, -2] and float(jaxmp.get_loss_scale(state)) == 4.0
