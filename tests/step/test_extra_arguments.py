"""Extra arguments reach the transforms that take them, and a misspelt one is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxmp
from regimes import BatchNormState, guarded

PARAMS = {"w": np.array([1.0, 2.0], np.float32)}


def sam(**kwargs):
    return contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), **kwargs)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("policy", "place"), [("bf16", "alone"), ("fp32", "in a chain"), ("bf16", "8 bits")])
def test_a_transform_with_a_fixed_list_of_arguments(policy, place):
    """SAM takes none of jaxmp's own; its two alternating steps are those of plain optax on float32 params."""
    inner = {
        "alone": sam,
        "in a chain": lambda: optax.chain(jaxmp.clip_by_global_norm(10.0), sam()),
        "8 bits": lambda: jaxmp.compress_moments(contrib.sam(optax.sgd(0.1, 0.9), optax.sgd(0.05)), jnp.bfloat16),
    }[place]()
    tx = jaxmp.mixed_precision(inner, policy)
    step = jax.jit(lambda g, state, params: jaxmp.apply_gradients(tx, g, state, params))
    plain = jax.jit(lambda g, state, params: jaxmp.apply_gradients(inner, g, state, params))
    expected, plain_state = PARAMS, inner.init(PARAMS)
    params, state = jaxmp.get_policy(policy).cast_to_param(PARAMS), tx.init(PARAMS)
    for i in range(4):
        g = {"w": np.array([0.5, -0.25], np.float32) * (i + 1)}
        params, state = step(g, state, params)
        expected, plain_state = plain(g, plain_state, expected)
    np.testing.assert_allclose(jaxmp.get_master_params(state, params)["w"], expected["w"], rtol=1e-6)


def test_an_argument_of_the_users_reaches_it():
    def grad_fn(params, i):
        del i
        return jax.tree.map(jnp.ones_like, params)

    tx = jaxmp.mixed_precision(sam(opaque_mode=True), "fp32")
    params, _ = jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS), PARAMS, grad_fn=grad_fn)
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1, rtol=1e-6)


def test_its_own_error_is_not_hidden():
    def update(updates, state, params=None, *, needed, **extra_args):
        del params, needed, extra_args
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = jaxmp.mixed_precision(inner, "fp32")
    with pytest.raises(TypeError, match="needed"):
        jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS), PARAMS)


def new_state(tx):
    return BatchNormState.create(apply_fn=None, params=PARAMS, tx=tx, batch_stats=jnp.zeros(2))


def reads_by_name(name):
    def update(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda u: u * extra_args[name], updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_arguments_that_are_taken_or_customary():
    """By name, by a string, by a function of the user's own that takes any; `value` may go to any optimizer."""
    plateau = optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau())
    cases = [
        (plateau, {"value": jnp.float32(1.0)}),
        (optax.adam(0.1), {"value": jnp.float32(1.0)}),
        (optax.chain(reads_by_name("factor"), optax.sgd(0.1)), {"factor": 2.0}),
        (optax.MultiSteps(optax.sgd(0.1), 2), {"value": jnp.float32(1.0)}),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), {"value": jnp.float32(1.0)}),
    ]
    stats = np.ones(2, np.float32)
    for inner, extra in cases:
        tx = jaxmp.mixed_precision(inner, "fp32")
        state = new_state(tx)
        jax.eval_shape(
            lambda g, s, tx=tx, x=extra: jaxmp.apply_gradients(tx, g, s, PARAMS, **x), PARAMS, state.opt_state
        )
        jax.eval_shape(lambda s, g, x=extra: s.apply_gradients(grads=g, batch_stats=stats, **x), state, PARAMS)


def bf16(inner):
    return jaxmp.mixed_precision(inner, "bf16")


def takes_all(seen):
    def update(updates, state, params=None, *, value=None, grad=None, value_fn=None, **extra_args):
        del params, extra_args
        seen.append((value is not None, grad is not None, value_fn is not None))
        return jax.tree.map(lambda u: -u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    "make",
    [
        lambda tx: bf16(optax.MultiSteps(tx, 1)),
        lambda tx: bf16(optax.MultiSteps(tx, 1).gradient_transformation()),
        lambda tx: bf16(optax.MultiSteps(optax.chain(optax.identity(), tx), 1)),
        lambda tx: bf16(jaxmp.float32_moments(optax.MultiSteps(tx, 1))),
        lambda tx: bf16(jaxmp.compress_moments(optax.MultiSteps(optax.chain(optax.trace(0.9), tx), 1), jnp.bfloat16)),
    ],
    ids=["inside", "inside, transform", "of a chain", "in float32_moments", "in compress_moments"],
)
def test_they_reach_an_optimizer_below_multisteps(make):
    seen = []
    tx, params = make(takes_all(seen)), {"w": jnp.ones(2, jnp.bfloat16)}
    extra = {"value": jnp.float32(1.0), "grad": params, "value_fn": lambda p: jnp.sum(p["w"])}

    def run(grads, params):
        return jaxmp.apply_gradients(tx, grads, tx.init(params), params, **extra)[0]

    assert jax.eval_shape(run, params, params)["w"].dtype == jnp.bfloat16
    assert (True, True, True) in seen


# --- NumPy params, and derivatives of a step --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_init_copies_numpy_params(policy):
    """A master that shares its buffer with the caller's array would change with it."""
    mine = {"w": np.ones(3, np.float32)}
    tx = jaxmp.mixed_precision(optax.adam(0.1), policy)
    state = tx.init(mine)
    mine["w"][:] = 7.0
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert not any(np.any(np.asarray(x) == 7.0) for x in jax.tree.leaves(guarded(state)))


@pytest.mark.thorough(0)
def test_the_derivative_through_an_update_is_that_of_a_step():
    """Rounding is straight through; d/d(rate) of sum(p'^2) = -2 sum(p' g). That of `apply_gradients`: of masters."""
    params, g = {"w": np.float16([1.0, 2.0])}, np.float32([0.5, -0.25])

    def after(rate):
        tx = jaxmp.mixed_precision(optax.sgd(rate), "fp16", loss_scale=2.0)
        updates, _ = tx.update({"w": 2 * g}, tx.init({"w": np.float32([1.0, 2.0])}), params)
        return jnp.sum(optax.apply_updates(params, updates)["w"].astype(jnp.float32) ** 2)

    exact = -2 * np.sum((np.array([1.0, 2.0]) - 0.1 * g) * g)
    np.testing.assert_allclose(jax.jit(jax.grad(after))(jnp.float32(0.1)), exact, rtol=0.1)


def test_unscale_and_skip_alone_refuses_fp8_scales():
    """Adam would train log2 scales as weights. Frozen ones are fine."""
    name = "fp8_lhs_e4m3_log2_scale"
    params = {"layer": {"w": jnp.ones(2), name: jnp.zeros(())}}
    with pytest.raises(ValueError, match=f"fp8 scales are moved by a recipe.*got layer/{name} in the params"):
        jaxmp.unscale_and_skip(optax.adam(0.1)).init(params)
    labels = {"layer": {"w": "train", name: "freeze"}}
    frozen = optax.multi_transform({"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, labels)
    jaxmp.unscale_and_skip(frozen).init(params)
