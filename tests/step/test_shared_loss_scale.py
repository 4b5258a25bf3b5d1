"""Several optimizers under one loss scale: torch.amp's rule, in the worked example of two heads on one trunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from policy_steps import nothing_read
from regimes import guarded

POLICY = jaxmp.get_policy("fp16")
PARAMS32 = {
    "trunk": np.float32([[0.5, -0.25], [1.0, 0.125]]),
    "head_a": np.float32([1.0, -1.0]),
    "head_b": np.float32([0.5, 2.0]),
}
PARTS = tuple(PARAMS32)
SHARED = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(64.0, growth_interval=2, hysteresis=1))
TX = jaxmp.mixed_precision(optax.adam(0.01), POLICY, loss_scale=1.0)  # its own scale is not used


def head_loss(trunk, head, x, blow_up):
    """mean(((x @ trunk) @ head)^2); a large `blow_up` makes the gradient of this head, and nothing else, overflow."""
    outputs = x @ trunk @ head  # [n, 2] @ [2, 2] @ [2] -> [n]
    return jnp.mean(outputs.astype(jnp.float32) ** 2) + blow_up * jnp.sum(head.astype(jnp.float32))


def step(params, states, scale_state, x, blow_up_a, blow_up_b):
    """One step: both losses are scaled by one scale; three optimizers; the scale moves once, at the end."""

    def loss_a(trunk, head):
        return head_loss(trunk, head, x, blow_up_a)

    def loss_b(trunk, head):
        return head_loss(trunk, head, x, blow_up_b)

    differentiate = functools.partial(jaxmp.value_and_grad, argnums=(0, 1))
    loss, (trunk_a, head_a) = differentiate(loss_a)(params["trunk"], params["head_a"], opt_state=scale_state)
    other, (trunk_b, head_b) = differentiate(loss_b)(params["trunk"], params["head_b"], opt_state=scale_state)
    grads = {"trunk": trunk_a.astype(jnp.float32) + trunk_b, "head_a": head_a, "head_b": head_b}
    params, states = dict(params), dict(states)
    for part in PARTS:
        params[part], states[part], scale_state = SHARED.apply_gradients(
            TX, grads[part], states[part], params[part], scale_state
        )
    return params, states, SHARED.update(scale_state), loss + other


def start():
    params32 = jax.tree.map(jnp.asarray, PARAMS32)
    return POLICY.cast_to_param(params32), {part: TX.init(params32[part]) for part in PARTS}, SHARED.init()


X = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float16)
CLEAN, OVERFLOW = jnp.float32(0.0), jnp.float32(1e30)


def skips(states):
    return {part: int(states[part].skipped_steps) for part in PARTS}


# (overflow of head a, of head b) -> which optimizers stand still; the scale falls by the union
OVERFLOWS = {
    "none": (CLEAN, CLEAN, set()),
    "a": (OVERFLOW, CLEAN, {"head_a"}),
    "b": (CLEAN, OVERFLOW, {"head_b"}),
    "both": (OVERFLOW, OVERFLOW, {"head_a", "head_b"}),
}


@pytest.fixture(scope="module")
def jitted():
    return jax.jit(step)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_each_optimizer_skips_on_its_own_flag_and_the_scale_moves_once(jitted, overflow):
    blow_up_a, blow_up_b, standing = OVERFLOWS[overflow]
    params, states, scale_state = start()
    params, states, scale_state, _ = jitted(params, states, scale_state, X, CLEAN, CLEAN)
    new, new_states, new_scale, _ = jitted(params, states, scale_state, X, blow_up_a, blow_up_b)
    for part in PARTS:
        if part in standing:
            assert_moved(new[part], params[part])
            assert_moved(guarded(new_states[part]), guarded(states[part]))
        else:
            assert not np.array_equal(new[part], params[part]), part
            assert int(optax.tree.get(new_states[part], "count")) == 2
    assert skips(new_states) == {part: int(part in standing) for part in PARTS}
    assert_close(jaxmp.get_loss_scale(new_scale), 32.0 if standing else 128.0)  # one move, also with two overflows
    assert_exact(new_scale.all_grads_finite, jnp.array(True))  # forgotten for the next step
    for part in PARTS:  # the optimizers' own scale is not used
        assert_close(jaxmp.get_loss_scale(new_states[part]), 1.0)


def test_the_trunk_gets_both_losses_unscaled_by_the_shared_scale():
    """What the trunk's optimizer sees is the float32 gradient of the sum of both losses."""
    trunk32, heads = PARAMS32["trunk"], (PARAMS32["head_a"], PARAMS32["head_b"])
    probe = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))
    tx = jaxmp.mixed_precision(probe, POLICY, loss_scale=1.0)

    def losses(trunk):
        x = X.astype(trunk.dtype)
        return sum(head_loss(trunk, head.astype(trunk.dtype), x, CLEAN) for head in heads)

    @jax.jit
    def step(trunk, state, scale_state):
        loss, grads = jaxmp.value_and_grad(losses)(trunk, opt_state=scale_state)
        return loss, SHARED.apply_gradients(tx, grads, state, trunk, scale_state)[1].optimizer_state

    loss, seen = step(POLICY.cast_to_param(trunk32), tx.init(trunk32), SHARED.init())
    expected_loss, expected = jax.jit(jax.value_and_grad(losses))(trunk32)
    assert_close(seen, expected, rtol=5e-3)
    assert_close(loss, expected_loss, rtol=2e-3)


def test_without_a_mean_each_flag_is_still_common():
    """Gradients that were not reduced: one device's overflow skips on all, by the flags alone."""
    devices = jax.devices()[:2]

    @functools.partial(jax.pmap, axis_name="data", devices=devices, in_axes=(0, None, None, None))
    def apply(grads, state, params, scale_state):
        params, state, scale_state = SHARED.apply_gradients(TX, grads, state, params, scale_state)
        return params, state, SHARED.update(scale_state)

    params, states, scale_state = start()
    grads = jnp.stack([jnp.ones(2, jnp.float16), jnp.array([jnp.inf, 1], jnp.float16)])
    new, state, scale_state = apply(grads, states["head_a"], params["head_a"], scale_state)
    assert np.asarray(state.skipped).tolist() == [True, True]
    assert_moved(new, jnp.stack([params["head_a"]] * 2))
    assert_exact(jaxmp.get_loss_scale(scale_state), jnp.full(2, 32.0))


def test_state_is_plain_stable_and_donatable():
    shared = jaxmp.shared_loss_scale()
    update = jax.jit(shared.update, donate_argnums=0)
    for _ in range(2):
        scale_state = shared.init()
        before = jax.tree.map(jax.typeof, scale_state)
        for _ in range(2):
            scale_state = update(scale_state)
        assert jax.tree.map(jax.typeof, scale_state) == before
    assert_close(jaxmp.get_loss_scale(scale_state), 65536.0)


def test_extra_arguments_reach_each_optimizer():
    tx = jaxmp.mixed_precision(optax.polyak_sgd(max_learning_rate=1.0), "fp32")
    params = jnp.array([1.0])
    params, _, _ = SHARED.apply_gradients(
        tx, jnp.array([64.0]), tx.init(params), params, SHARED.init(), value=jnp.float32(0.25)
    )
    assert_close(params, jnp.array([0.75]))


def a_step(params, state, scale_state, x, scaled=True, old=None):
    def loss_fn(params):
        return jnp.mean((x @ params.astype(x.dtype)).astype(jnp.float32) ** 2)

    if scaled:
        _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=scale_state if old is None else old)
    else:
        grads = jax.grad(loss_fn)(params)
    params, state, scale_state = SHARED.apply_gradients(TX, grads, state, params, scale_state)
    return params, state, SHARED.update(scale_state)


def test_gradients_that_were_not_scaled_by_the_shared_scale_are_named():
    params, tx_state = POLICY.cast_to_param(jnp.asarray(PARAMS32["trunk"])), TX.init(jnp.asarray(PARAMS32["trunk"]))

    def twice(params, state, scale_state, x, **options):
        params, state, new = a_step(params, state, scale_state, x)
        return a_step(params, state, new, x, **options)

    def stale(params, state, scale_state, x):
        return twice(params, state, scale_state, x, old=scale_state)

    arguments = params, tx_state, SHARED.init(), X
    with nothing_read():
        jax.make_jaxpr(twice)(*arguments)
    with nothing_read(), pytest.raises(jaxmp.UnreadLossScale, match="nobody read"):
        jax.make_jaxpr(lambda *args: a_step(*args, scaled=False))(*arguments)
    with nothing_read(), pytest.raises(jaxmp.UnreadLossScale, match="another opt_state of the update"):
        jax.make_jaxpr(stale)(*arguments)
    with (
        nothing_read(),
        pytest.raises(jaxmp.UnreadLossScale, match="opt_state of the update|an earlier update"),
    ):
        jax.make_jaxpr(lambda *args: twice(*args, old=tx_state))(*arguments)


def test_a_loss_that_was_not_told_the_policy_of_float32_params_is_named():
    params, x = jnp.asarray(PARAMS32["trunk"]), np.ones((4, 2), np.float32)

    def loss_fn(params):
        return jnp.mean((x @ params) ** 2)

    with pytest.warns(UserWarning, match=r"a shared loss scale is for them\), but no matmul.*policy=\.\.\."):
        jax.make_jaxpr(lambda p: jaxmp.value_and_grad(loss_fn)(p, opt_state=SHARED.init()))(params)
    for policy in ("16-mixed", "fp32"):
        jax.make_jaxpr(lambda p, n=policy: jaxmp.value_and_grad(loss_fn, policy=n)(p, opt_state=SHARED.init()))(params)
