"""Transforms before `mixed_precision` in a chain: those that look at the size of scaled gradients are warned of."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jaxmp

LOOKS = "it must not look at their size"
PARAMS = {"a": jnp.ones((4, 3), jnp.float16), "b": jnp.ones(3, jnp.float16)}
GRADS = jax.tree.map(lambda p: p * 8, PARAMS)


def chained(head, **kwargs):
    return optax.chain(head, jaxmp.mixed_precision(optax.sgd(0.1), "fp16", **kwargs))


WRONG = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "clip": optax.clip(1.0),
    "jaxmp.clip_by_global_norm": jaxmp.clip_by_global_norm(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.01),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "decay": optax.add_decayed_weights(0.1),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "adam": optax.scale_by_adam(),
    "momentum": optax.trace(0.9),
    "normalize": optax.normalize_by_update_norm(),
    "sign": optax.scale_by_sign(),
    "behind others": optax.chain(optax.zero_nans(), optax.scale(0.5), optax.clip_by_global_norm(1.0)),
    "some params": optax.masked(optax.clip_by_global_norm(1.0), {"a": False, "b": True}),
}
RIGHT = {
    "identity": optax.identity(),
    "scale": optax.scale(0.5),
    "schedule": optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10)),
    "zero_nans": optax.zero_nans(),
    "frozen": optax.masked(optax.set_to_zero(), {"a": False, "b": True}),
    "centralize": optax.centralize(),
    "mean of devices": jaxmp.reduce_gradients(),
    "cast": optax.stateless(lambda grads, _: jax.tree.map(lambda g: g.astype(jnp.float32), grads)),
    "relu": optax.stateless(lambda g, _: jax.tree.map(jax.nn.relu, g)),
    "largest only": optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: jnp.where(jnp.abs(g) >= jnp.max(jnp.abs(g)), g, 0), grads)
    ),
    "by its norm": optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / jnp.sqrt(jnp.sum(g * g)) * g, grads)),
    "in a loop": optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: jax.lax.map(lambda x: x + 0 * jnp.tanh(x), g), grads)
    ),
}


@contextlib.contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def step(tx, jitted=True):
    run = lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p)  # noqa: E731
    return (jax.jit(run) if jitted else run)(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", WRONG)
def test_what_looks_at_the_size_is_warned_of_once(name):
    tx = chained(WRONG[name])
    with pytest.warns(UserWarning, match=LOOKS) as caught:
        step(tx, jitted=name != "clip")
    assert [LOOKS in str(w.message) for w in caught] == [True]
    assert ("at a." in str(caught[0].message)) == (name != "some params")
    with silence():
        step(tx)
        step(tx, jitted=False)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", RIGHT)
def test_what_only_scales_is_not(name):
    with silence():
        step(chained(RIGHT[name]))
        step(chained(RIGHT[name]), jitted=False)


@pytest.mark.thorough(0)
def test_the_warned_of_chain_depends_on_the_scale_and_the_others_do_not():
    """What the verdicts mean, by running: a factor in the gradients and in the scale changes a step, or does not."""
    for found, heads in ((True, WRONG), (False, RIGHT)):
        for name, head in heads.items():
            if name in ("noise", "in a loop", "momentum"):  # momentum is wrong where the scale changes between steps
                continue
            moved = []
            for scale in (4.0, 1024.0):
                tx = chained(head, loss_scale=scale)
                grads = jax.tree.map(lambda p, s=scale: jnp.linspace(-2.0, 3.0, p.size).reshape(p.shape) * s, PARAMS)
                with warnings.catch_warnings(action="ignore"):
                    state = tx.init(PARAMS)
                    for _ in range(2):
                        params, state = jaxmp.apply_gradients(tx, grads, state, PARAMS)
                moved.append(jaxmp.get_master_params(state, params))
            same = all(np.allclose(a, b, atol=2e-4) for a, b in zip(*map(jax.tree.leaves, moved), strict=True))
            assert same != found, name


@pytest.mark.thorough(0)
def test_it_is_silent_without_a_scale_and_inside():
    clip = optax.clip_by_global_norm(1.0)
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    with silence():
        for tx in (
            optax.chain(clip, jaxmp.mixed_precision(optax.sgd(0.1), "bf16")),
            jaxmp.mixed_precision(optax.chain(clip, optax.sgd(0.1)), "bf16", loss_scale=8.0),
            optax.MultiSteps(
                jaxmp.mixed_precision(optax.sgd(0.1), "bf16", loss_scale=8.0),
                2,
                should_skip_update_fn=optax.skip_not_finite,
            ).gradient_transformation(),
        ):
            jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), tx.init(params), params)


def test_train_states_and_nnx_say_it_too():
    tx = chained(optax.clip_by_global_norm(1.0), loss_scale=128.0)
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=jax.tree.map(jnp.float32, PARAMS), tx=tx, policy="fp16")
    with pytest.warns(UserWarning, match=LOOKS):
        jax.jit(lambda s: s.apply_gradients(grads=GRADS))(state)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = chained(optax.clip(1.0))
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp16")
    with pytest.warns(UserWarning, match=LOOKS):
        optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))


def test_over_devices():
    for head, wrong in ((jaxmp.reduce_gradients("data"), False), (optax.clip(1.0), True)):
        tx = optax.chain(head, chained(optax.identity()))
        run = lambda s, tx=tx: jaxmp.apply_gradients(tx, GRADS, s, PARAMS)  # noqa: E731
        over = jax.pmap(lambda s, _, run=run: run(s), axis_name="data", in_axes=(None, 0), out_axes=None)
        with pytest.warns(UserWarning, match=LOOKS) if wrong else silence():
            over(tx.init(PARAMS), np.zeros(2))


def plain_step(tx, dtype=jnp.float16):
    """One step by tx.update, as flax's own TrainState makes it, after jaxmp.value_and_grad."""

    def run(params, opt_state):
        loss, grads = jaxmp.value_and_grad(
            lambda p: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(p))
        )(params, opt_state=opt_state)
        return loss, tx.update(grads, opt_state, params)

    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    return jax.jit(run)(params, tx.init(PARAMS))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["clip_by_global_norm", "decay", "adam", "behind others"])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_tx_update_warns_of_what_its_chain_has_before_it(name, scale):
    tx = chained(WRONG[name]) if scale is None else chained(WRONG[name], loss_scale=scale)
    with pytest.warns(UserWarning, match=LOOKS) as caught:
        plain_step(tx)
    assert [LOOKS in str(w.message) for w in caught] == [True]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["identity", "zero_nans", "schedule", "frozen", "mean of devices"])
def test_tx_update_is_silent_where_nothing_looks(name):
    with silence():
        plain_step(chained(RIGHT[name]))


def test_tx_update_is_silent_without_a_scale_and_inside():
    clip = optax.clip_by_global_norm(1.0)
    with silence():
        plain_step(optax.chain(clip, jaxmp.mixed_precision(optax.sgd(0.1), "bf16")), jnp.bfloat16)
        plain_step(jaxmp.mixed_precision(optax.chain(clip, optax.sgd(0.1)), "fp16"))
        tx = chained(clip)
        jaxmp.value_and_grad(lambda p: jnp.sum(p["a"].astype(jnp.float32) ** 2))(
            PARAMS, opt_state=tx.init(PARAMS)
        )  # no update


@pytest.mark.thorough(1)
@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_states_and_optimizers_of_flax_are_warned(module):
    tx = chained(optax.clip_by_global_norm(1.0))
    if module == "linen":
        state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

        def run(state):
            grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["a"].astype(jnp.float32) ** 2))(
                state.params, opt_state=state
            )[1]
            return state.apply_gradients(grads=grads)

        args = (state,)
    else:
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float16)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def run(model, optimizer):
            loss = lambda m: jnp.sum(m(jnp.ones((2, 4), jnp.float16)).astype(jnp.float32))  # noqa: E731
            optimizer.update(model, jaxmp.nnx.value_and_grad(loss)(model, opt_state=optimizer.opt_state)[1])

        args = (model, optimizer)
    with pytest.warns(UserWarning, match=LOOKS):
        (nnx.jit if module == "nnx" else jax.jit)(run)(*args)
