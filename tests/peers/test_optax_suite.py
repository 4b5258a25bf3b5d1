"""What optax's suite checks of `MultiSteps`, inside of `mixed_precision`; what breaks in optax is in test_peers.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

NAN = float("nan")


def accumulating(k, inner=None, **kwargs):
    """MultiSteps inside: each microbatch is unscaled, and may be skipped alone."""
    return jaxmp.mixed_precision(optax.MultiSteps(inner or optax.sgd(1.0), k, **kwargs), "fp32")


def stepped(tx, grads):
    """A param that starts at 0 after each of the gradients, and the last state."""

    def step(carry, g):
        params, state = jaxmp.apply_gradients(tx, g, *carry[::-1])
        return (params, state), params

    p = np.float32(0.0)
    (_, state), params = jax.jit(lambda g: jax.lax.scan(step, (p, tx.init(p)), g))(np.float32(grads))
    return params.tolist(), state


def test_schedules_means_sums_and_zeroed_nans_of_microbatches():
    tx = accumulating(lambda step: jnp.where(step < 2, 1, 3))
    assert stepped(tx, [1.0] * 8)[0] == [-1, -2, -2, -2, -3, -3, -3, -4]
    for mean, expected in ((True, -2.5), (False, -10.0)):
        assert stepped(accumulating(4, use_grad_mean=mean), [1.0, 2.0, 3.0, 4.0])[0] == [0, 0, 0, expected]
    assert stepped(accumulating(2, optax.chain(optax.zero_nans(), optax.sgd(1.0))), [1.0, 3.0])[0] == [0, -2]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("bad", "own"), [(float("inf"), False), (NAN, False), (-float("inf"), True), (NAN, True)])
def test_microbatches_that_are_not_finite_do_not_count(bad, own):
    """With optax's own function, and without: `mixed_precision` skips them before they arrive."""
    tx = accumulating(2, **({"should_skip_update_fn": optax.skip_not_finite} if own else {}))
    params, state = stepped(tx, [1.0, 1.0, bad, bad, 1.0, bad, 1.0])
    assert params == [0, -1, -1, -1, -1, -1, -2]
    assert int(state.skipped_steps) == 3


def test_large_updates_are_skipped_by_a_rule_of_ones_own():
    """optax's `skip_large_updates`, as `skip_if`: the step is skipped, and the scale is left alone."""
    rule = lambda grads, _: optax.skip_large_updates(grads, 0, None, 100.0)[0]  # noqa: E731
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp32", loss_scale=jaxmp.DynamicLossScale(4.0), skip_if=rule)
    params, state = stepped(tx, [4.0, 44.0, 4.0])
    assert params == [-1, -1, -2] and float(jaxmp.get_loss_scale(state)) == 4.0
