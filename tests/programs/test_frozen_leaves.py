"""Frozen leaves are found in the program of the update: in every spelling of optax, and never by mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp._src.programs import frozen_leaves

PARAMS = {"base": np.ones((2, 3), np.float32), "head": np.ones(3, np.float32)}
LABELS = {"base": "freeze", "head": "train"}
MASK = {"base": True, "head": False}
NOT_MASK = {"base": False, "head": True}


def frozen(inner, params=PARAMS):
    is_frozen = frozen_leaves.frozen_leaves(optax.with_extra_args_support(inner), params)
    return dict(zip(params, is_frozen, strict=True))


def labelled(inner=None):
    return optax.multi_transform({"train": inner or optax.adam(0.1), "freeze": optax.set_to_zero()}, LABELS)


FREEZES_BASE = {
    "multi_transform": labelled,
    "selective_transform": lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=MASK),
    "freeze": lambda: optax.chain(optax.adam(0.1), optax.freeze(MASK)),
    "masked": lambda: optax.chain(optax.masked(optax.adam(0.1), NOT_MASK), optax.masked(optax.set_to_zero(), MASK)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), labelled(), optax.scale(0.5)),
    "schedule": lambda: labelled(optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10))),
    "apply_if_finite": lambda: optax.apply_if_finite(labelled(), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda rate: labelled(optax.adam(rate)))(rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(labelled(), 2).gradient_transformation(),
    "jit": lambda: jitted(labelled()),
    "cond": lambda: optax.stateless(
        lambda updates, params: jax.lax.cond(
            updates["head"][0] > 0,
            lambda u: {"base": jnp.zeros((2, 3)), "head": u["head"]},
            lambda u: {"base": jnp.zeros((2, 3)), "head": -u["head"]},
            updates,
        )
    ),
    "negated_reshaped_zero": lambda: optax.stateless(
        lambda updates, params: {"base": -jnp.zeros(6).reshape(2, 3).astype(jnp.float32), "head": updates["head"]}
    ),
}


def jitted(inner):
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


@pytest.mark.parametrize("name", FREEZES_BASE)
def test_frozen_leaves_are_found(name):
    assert frozen(FREEZES_BASE[name]()) == {"base": True, "head": False}


def delayed():
    """The update of the step before: zero at the first step, and only there."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (state, jax.tree.map(jnp.negative, updates)),
    )


FREEZES_NOTHING = {
    "adam": lambda: optax.adam(0.1),
    "zero_learning_rate": lambda: optax.sgd(0.0),  # 0 * inf is NaN, so this is no constant; and it may be a schedule
    "schedule_from_zero": lambda: optax.sgd(optax.linear_schedule(0.0, 0.1, 10)),
    "injected_zero": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.0),
    "delayed": delayed,
    "momentum_of_zeros": lambda: optax.chain(optax.scale(0.0), optax.trace(0.9)),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "one_zero_branch": lambda: optax.stateless(
        lambda updates, params: jax.lax.cond(
            updates["head"][0] > 0, lambda u: u, lambda u: jax.tree.map(jnp.zeros_like, u), updates
        )
    ),
    "partly_zero": lambda: optax.stateless(
        lambda updates, params: {"base": jnp.zeros((2, 3)).at[0, 0].set(1.0), "head": updates["head"]}
    ),
    "zero_unless_nan": lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda u: 0.0 * u, updates)),
    "tiny_constant": lambda: optax.stateless(
        lambda updates, params: {"base": jnp.full((2, 3), 1e-30), "head": updates["head"]}
    ),
    "decay_only": lambda: optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", FREEZES_NOTHING)
def test_what_may_move_is_not_frozen(name):
    """A leaf taken for frozen by mistake would train without its master, in silence."""
    assert frozen(FREEZES_NOTHING[name]()) == {"base": False, "head": False}


def needs(name):
    def update(updates, state, params=None, **extra_args):
        return jax.tree.map(lambda u: u * extra_args[name], updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


NOT_TRACEABLE = {
    "required_keyword": lambda: optax.polyak_sgd(),
    "key_error": lambda: needs("value"),
    "unbound_axis": lambda: optax.chain(jaxmp.clip_by_global_norm(1.0, axis_name="model"), optax.adam(0.1)),
}


@pytest.mark.parametrize("name", NOT_TRACEABLE)
def test_an_update_that_cannot_be_read_freezes_nothing(name):
    """Extra arguments or axes that only the training step has: `init` works, every leaf has a master."""
    inner = NOT_TRACEABLE[name]()
    assert frozen(inner) == {"base": False, "head": False}
    state = jax.eval_shape(jaxmp.mixed_precision(inner, "bf16").init, PARAMS)
    assert len(jax.tree.leaves(optax.tree.get(state, "master_params"))) == 2


def test_an_optimizer_with_a_key_or_an_array_among_its_constants():
    """Constants of the program that are no numbers (PRNG keys) are passed over."""
    key = jax.random.key(0)
    assert frozen(optax.chain(labelled(), optax.add_noise(0.1, 0.1, key))) == {"base": False, "head": False}
    zeros = jnp.zeros((2, 3))  # closed over, and zero
    constant = optax.stateless(lambda updates, params: updates | {"base": zeros})
    assert frozen(constant) == {"base": True, "head": False}


def test_works_on_abstract_params_and_on_none():
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
    assert frozen(labelled(), abstract) == {"base": True, "head": False}
    assert frozen_leaves.frozen_leaves(optax.with_extra_args_support(optax.sgd(0.1)), {}) == []


def test_inside_jit():
    """`tx.init` under jit, as for params that are made sharded."""
    tx = jaxmp.mixed_precision(labelled(), "bf16")
    state = jax.eval_shape(tx.init, PARAMS)
    assert jax.tree.leaves(optax.tree.get(state, "master_params")["base"]) == []


def test_an_inner_optimizer_that_needs_extra_arguments_trains():
    """Nothing is known at `init`; the frozen leaf of such an optimizer has a master, and still does not move."""
    inner = optax.chain(
        needs("value"),
        optax.multi_transform({"t": optax.sgd(1.0), "f": optax.set_to_zero()}, {"base": "f", "head": "t"}),
    )
    tx = jaxmp.mixed_precision(inner, "bf16")
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)

    @jax.jit
    def step(params):
        grads = jax.tree.map(jnp.ones_like, params)
        return jaxmp.apply_gradients(tx, grads, tx.init(params), params, value=jnp.float32(0.5))[0]

    new = step(params)
    assert_moved(new["base"], params["base"])
    assert_exact(new["head"], np.full(3, 0.5, jnp.bfloat16))
