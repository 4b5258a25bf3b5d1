"""Masters: where they exist, what they start from, and that the model's params are their rounding at every step."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
both_policies = pytest.mark.parametrize("policy", ["fp16", "bf16"])


def rounded(master, policy):
    """The model's copy, by NumPy: nearest even, saturated at the largest finite value."""
    largest = float(ml_dtypes.finfo(DTYPES[policy]).max)
    return np.clip(np.asarray(master), -largest, largest).astype(DTYPES[policy])


def masters_in(state):
    return optax.tree.get(state, "master_params")


def is_masked(x):
    return isinstance(x, optax.MaskedNode)


# ---------------------------------------------------------------------------------------------------------------------
# which leaves have a master, and what it starts from


@both_policies
def test_masters_keep_the_float32_initial_values(policy):
    params32 = {"w": jnp.array([1.0001, -0.0, 3e-5], jnp.float32)}
    state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params32)
    assert_moved(masters_in(state), params32)
    params = jaxmp.get_policy(policy).cast_to_param(params32)
    assert_moved(jaxmp.get_master_params(state, params), params32)
    assert not np.array_equal(params["w"].astype(jnp.float32), params32["w"])  # there was something to keep


@both_policies
def test_masters_start_from_16_bit_params(policy):
    params = {"w": jnp.array([1.0001, -0.0, 3e-5], jaxmp.get_policy(policy).param_dtype)}
    state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)
    assert_exact(masters_in(state), {"w": params["w"].astype(jnp.float32)})


def test_only_16_bit_leaves_have_a_master_and_moments_are_float32():
    policy = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))
    params32 = {"dense": jnp.ones((2, 3)), "norm": jnp.ones(3)}
    state = jaxmp.mixed_precision(optax.adam(1e-3), policy).init(params32)
    assert_moved(masters_in(state), {"dense": params32["dense"], "norm": optax.MaskedNode()})
    for moments in ("mu", "nu"):
        assert_exact(optax.tree.get(state, moments), jax.tree.map(jnp.zeros_like, params32))


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
def test_float32_policies_keep_no_master(policy):
    state = jaxmp.mixed_precision(optax.adam(1e-3), policy).init({"w": jnp.ones(2)})
    assert is_masked(masters_in(state)["w"])


def test_a_pattern_that_matches_no_param_warns_once():
    params = {"LayerNorm_0": {"scale": jnp.ones(1)}, "Dense_0": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}}
    policy = jaxmp.get_policy("fp16", keep_fp32=("*nrom*", "*bias", "biass"))
    with pytest.warns(UserWarning) as record:
        jaxmp.mixed_precision(optax.sgd(1.0), policy).init(params)
    assert [str(w.message) for w in record] == [
        f"keep_fp32: the pattern {pattern} Paths here: 'Dense_0/bias', 'Dense_0/kernel', 'LayerNorm_0/scale'. "
        f"[docs/warnings.md#pattern-fits-nothing]"
        for pattern in ("'*nrom*' fits no param.", "'biass' fits no param. Close to it: 'bias'.")
    ]
    assert record[0].filename == __file__  # it points at the call of init


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.masked(tx, {"w": True, "norm": False}),
        lambda tx: optax.multi_transform({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "norm": "b"}),
    ],
    ids=["masked", "multi_transform"],
)
def test_a_pattern_may_be_meant_for_params_that_this_optimizer_does_not_see(wrap):
    tx = jaxmp.mixed_precision(optax.sgd(1.0), jaxmp.get_policy("fp16", keep_fp32=("norm",)))
    tx.init({})  # a device may hold no params
    wrap(tx).init({"w": jnp.ones(1), "norm": jnp.ones(1)})


def test_a_float32_leaf_goes_through_the_same_unscale_clip_and_update():
    """What a kept leaf does equals what it does in a float32 run that sees the same gradients."""
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(0.5))
    params32 = {"dense": jnp.array([1.0, 2.0]), "norm": jnp.array([1.0, 1.0])}
    grads = {"dense": jnp.array([3.0, 0.0]), "norm": jnp.array([0.0, 4.0])}  # norm 5
    plain, _ = inner.update(grads, inner.init(params32), params32)
    policy = jaxmp.get_policy("fp16", keep_fp32=("norm",))
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=8.0)
    params = policy.cast_to_param(params32)
    scaled = {"dense": (grads["dense"] * 8).astype(jnp.float16), "norm": grads["norm"] * 8}
    new, state = jaxmp.apply_gradients(tx, scaled, tx.init(params32), params)
    assert_close(new["norm"], params32["norm"] + plain["norm"])
    assert_close(masters_in(state)["dense"], params32["dense"] + plain["dense"])
    assert_close(jaxmp.get_metrics(state)["grad_norm"], 5.0)
    overflow, after = jaxmp.apply_gradients(tx, scaled | {"norm": jnp.array([0.0, jnp.inf])}, state, new)
    assert bool(after.skipped)  # an overflow in a kept leaf is an overflow
    assert_moved(overflow, new)


# a user's own frozen leaves, as optax spells them


def labels(params):
    return {name: "train" if name.startswith("lora") else "freeze" for name in params}


FREEZERS = {
    "multi_transform": lambda inner: optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels),
    "selective_transform": lambda inner: optax.selective_transform(
        inner, freeze_mask={"base": True, "lora_a": False, "lora_b": False}
    ),
    "freeze": lambda inner: optax.chain(inner, optax.freeze({"base": True, "lora_a": False, "lora_b": False})),
    "MultiSteps": lambda inner: optax.MultiSteps(FREEZERS["multi_transform"](inner), 2),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("freezer", FREEZERS)
@both_policies
def test_frozen_leaves_have_no_master_and_never_change(freezer, policy):
    """LoRA: the base weights are frozen, and most of the memory."""
    tx = jaxmp.mixed_precision(FREEZERS[freezer](optax.adam(0.1)), policy, loss_scale=2.0)
    params32 = {"base": jnp.array([0.1, -0.0, 7.0]), "lora_a": jnp.ones(2), "lora_b": jnp.zeros(2)}
    state, params = tx.init(params32), jaxmp.get_policy(policy).cast_to_param(params32)
    assert is_masked(masters_in(state)["base"])
    grads = jax.tree.map(jnp.ones_like, params)
    new = params
    for _ in range(2):
        updates, state = tx.update(grads, state, new)
        by_updates = optax.apply_updates(new, updates)
        new = by_updates
    assert_moved(new["base"], params["base"])
    assert float(new["lora_b"][0]) < 0
    assert_exact(jaxmp.get_master_params(state, new)["base"], params["base"].astype(jnp.float32))
    assert_exact(new["lora_a"], jnp.asarray(rounded(masters_in(state)["lora_a"], policy)))


def test_lora_on_integer_base_weights():
    """A frozen leaf may be no float at all, such as a quantized base weight."""
    tx = jaxmp.mixed_precision(FREEZERS["multi_transform"](optax.sgd(1.0)), "bf16")
    params = {"base": jnp.arange(3, dtype=jnp.int8), "lora_a": jnp.ones(2), "lora_b": jnp.zeros(2)}
    state = tx.init(params)
    assert is_masked(masters_in(state)["base"])
    assert_moved(masters_in(state)["lora_a"], params["lora_a"])


def test_lora_trains():
    """The whole loop on a linear map of rank 1: only the adapters move, and they learn."""
    policy = jaxmp.get_policy("fp16")
    tx = jaxmp.mixed_precision(FREEZERS["multi_transform"](optax.adam(0.03)), policy)
    rng = np.random.default_rng(0)
    params32 = {
        "base": jnp.asarray(rng.standard_normal((4, 4)), jnp.float32),
        "lora_a": jnp.asarray(rng.standard_normal((4, 1)), jnp.float32),
        "lora_b": jnp.zeros((1, 4)),
    }
    target = params32["base"] + 0.3 * jnp.asarray(
        rng.standard_normal((4, 1)) @ rng.standard_normal((1, 4)), jnp.float32
    )

    def loss_fn(params):
        weights = params["base"] + params["lora_a"] @ params["lora_b"]
        return jnp.mean((weights.astype(jnp.float32) - target) ** 2)

    @jax.jit
    def step(params, state):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=state)
        return *jaxmp.apply_gradients(tx, grads, state, params), loss

    state, params = tx.init(params32), policy.cast_to_param(params32)
    base = params["base"]
    losses = []
    for _ in range(100):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.05 * losses[0]
    assert_moved(params["base"], base)


def test_boxes_carry_over_to_masters():
    """`nn.Partitioned` keeps its names round the master, and paths of `keep_fp32` do not see the box."""
    policy = jaxmp.get_policy("fp16", keep_fp32=("norm",))
    params32 = {
        "w": nn.Partitioned(jnp.ones((2, 2)), names=("data", None)),
        "norm": nn.Partitioned(jnp.ones(2), (None,)),
    }
    tx = jaxmp.mixed_precision(optax.adam(1e-3), policy, loss_scale=1.0)
    state, params = tx.init(params32), policy.cast_to_param(params32)
    master = masters_in(state)["w"]
    assert isinstance(master, nn.Partitioned) and master.names == ("data", None)
    assert is_masked(masters_in(state)["norm"])
    assert nn.get_partition_spec(state).master_params["w"] == P("data", None)
    new, state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), state, params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert_exact(new["w"].value, jnp.asarray(rounded(masters_in(state)["w"].value, "fp16")))
    assert_moved(jaxmp.get_master_params(state, new), {"w": masters_in(state)["w"], "norm": new["norm"]})


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32"])
def test_masters_never_alias_the_params(policy):
    """Donating the params, or deleting them, leaves the state whole."""
    tx = jaxmp.mixed_precision(optax.adam(1e-3), policy)
    for params in ({"w": jnp.ones(2)}, {"w": jnp.ones(2, jaxmp.get_policy(policy).param_dtype)}):
        state = tx.init(params)
        jax.tree.map(lambda x: x.delete(), params)
        assert not any(x.is_deleted() for x in jax.tree.leaves(state))
        jax.block_until_ready(jax.tree.map(lambda x: x + 0 if x.dtype != bool else x, state))


# ---------------------------------------------------------------------------------------------------------------------
# params are the rounding of masters, bit for bit


def random_floats(rng, n):
    """float32 over the whole range that matters: log-uniform magnitudes, both signs, zeros."""
    x = np.exp2(rng.uniform(-30, 15, n)) * rng.choice([-1.0, 1.0], n)
    x[:: n // 50] = 0.0
    return x.astype(np.float32)


@functools.cache
def sgd_steps(policy):
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy, loss_scale=None if policy == "bf16" else 1.0)

    def by_updates(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    return tx, jax.jit(by_updates), jax.jit(functools.partial(jaxmp.apply_gradients, tx))


@pytest.mark.thorough(1)
@both_policies
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_apply_updates_lands_on_the_rounded_master(policy, compiled):
    """Random params with random moves of up to 1000-fold shrinking; optax's own `apply_updates`, bit for bit."""
    tx, by_updates, _ = sgd_steps(policy)
    rng = np.random.default_rng(1)
    old = random_floats(rng, 20_000)
    shrink = np.exp2(-rng.uniform(0, 10, old.size)) * rng.choice([-1, 1], old.size)
    wanted = np.where(rng.random(old.size) < 0.5, old * shrink, old + old * rng.uniform(-1e-3, 1e-3, old.size))
    state = tx.init({"w": jnp.asarray(old)})
    params = {"w": jnp.asarray(rounded(old, policy))}
    grads = {"w": jnp.asarray((old - wanted).astype(np.float32))}
    with jax.disable_jit(not compiled):
        new, state, updates = by_updates(grads, state, params)
    assert updates["w"].dtype == jnp.float32
    expected = rounded(masters_in(state)["w"], policy)
    assert new["w"].dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(new["w"], np.float32), expected.astype(np.float32))  # values; zeros below
    nonzero = expected != 0
    assert_exact(np.asarray(new["w"])[nonzero], expected[nonzero])


def test_updates_cast_to_16_bits_would_not_land_there():
    """The peers' way, which shows that the test above can fail: hand the update over in bfloat16."""
    rng = np.random.default_rng(1)
    old = random_floats(rng, 20_000)
    master = (old * np.exp2(-rng.uniform(0, 10, old.size))).astype(np.float32)
    param = jnp.asarray(rounded(old, "bf16"))
    update = jnp.asarray(master) - param.astype(jnp.float32)
    landed = optax.apply_updates(param, update.astype(jnp.bfloat16))
    assert np.mean(np.asarray(landed) != rounded(master, "bf16")) > 0.05


@pytest.mark.thorough(1)
@both_policies
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_apply_gradients_is_exact_always(policy, compiled):
    """Any move whatever: from 1e4 to 1e-9, through zero, to -0.0 and to inf."""
    tx, _, apply = sgd_steps(policy)
    rng = np.random.default_rng(2)
    old, wanted = random_floats(rng, 20_000), random_floats(rng, 20_000)
    wanted[1::50] = -0.0
    state = tx.init({"w": jnp.asarray(old)})
    grads = {"w": jnp.asarray(old - wanted)}
    with jax.disable_jit(not compiled):
        new, state = apply(grads, state, {"w": jnp.asarray(rounded(old, policy))})
    assert_exact(new["w"], rounded(masters_in(state)["w"], policy))
    np.testing.assert_array_equal(np.asarray(masters_in(state)["w"]), old - (old - wanted))


@pytest.mark.thorough(1)
@both_policies
def test_a_huge_shrink_is_repaired_by_the_next_step(policy):
    """The one case in which a float32 update cannot land: p + update rounds in float32 before it rounds to 16 bits.

    The master is just below 16384 (its spacing 2^-10) and its param just there, where float32 is spaced by 2^-9; it
    goes to a small value on the other side of zero.
    """
    tx, by_updates, apply = sgd_steps(policy)
    wanted = np.arange(-199, 0, 2, dtype=np.float32) * 2.0**-10
    old = np.full_like(wanted, 16383.0)
    state, params = tx.init({"w": jnp.asarray(old)}), {"w": jnp.asarray(rounded(old, policy))}
    grads = {"w": jnp.asarray(old - wanted)}
    exact, _ = apply(grads, state, params)
    landed, state, _ = by_updates(grads, state, params)
    assert_exact(masters_in(state)["w"], wanted)
    expected = rounded(wanted, policy)
    assert_exact(exact["w"], expected)
    missed = np.asarray(landed["w"]) != expected
    assert missed.any()  # the data contain the case
    np.testing.assert_allclose(np.asarray(landed["w"], np.float64), np.float64(expected), rtol=0, atol=2.0**-10)
    repaired, state, _ = by_updates({"w": jnp.zeros(old.shape)}, state, landed)
    assert_exact(repaired["w"], expected)


def test_a_param_that_stands_stays_bit_for_bit():
    """A step whose move is lost in the rounding: -0.0 stays -0.0, since the update is -0.0."""
    tx, by_updates, apply = sgd_steps("bf16")
    params = {"w": jnp.array([-0.0, 0.0, 1.0, -3.5], jnp.bfloat16)}
    state = tx.init(params)
    grads = {"w": jnp.array([0.0, 0.0, 1e-4, 1e-4])}
    new, _, updates = by_updates(grads, state, params)
    assert_moved(new, params)
    assert_exact(updates, {"w": jnp.full(4, -0.0)})
    assert_moved(apply(grads, state, params)[0], params)


# ---------------------------------------------------------------------------------------------------------------------
# what masters are for


def test_bfloat16_moves_at_learning_rate_1e_3():
    """optax on bfloat16 params stands still for ever; masters collect what is too small for the param."""
    params = plain_params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx, plain = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), optax.adam(1e-3)
    state, plain_state = tx.init(params), plain.init(params)
    grads = {"w": jnp.ones(3, jnp.bfloat16)}
    for _ in range(20):
        params, state = jaxmp.apply_gradients(tx, grads, state, params)
        updates, plain_state = plain.update(grads, plain_state, plain_params)
        plain_params = optax.apply_updates(plain_params, updates)
    assert_moved(plain_params, {"w": jnp.ones(3, jnp.bfloat16)})  # the peer
    assert_close(masters_in(state), {"w": jnp.full(3, 0.98)}, atol=1e-5)
    assert_exact(params, {"w": jnp.full(3, 0.98, jnp.bfloat16)})


def test_the_epsilon_of_adam_survives():
    """On fp16 params optax's nu underflows and eps = 1e-8 is 0: the update is -inf. In float32 it is -lr."""
    params = {"w": jnp.ones(1, jnp.float16)}
    grads = {"w": jnp.full(1, 1e-5, jnp.float16)}
    plain = optax.adam(1e-3)
    updates, _ = plain.update(grads, plain.init(params), params)
    assert not np.isfinite(np.asarray(updates["w"])).any()  # the peer
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "fp16", loss_scale=1.0)
    updates, state = tx.update(grads, tx.init(params), params)
    assert_close(masters_in(state), {"w": jnp.full(1, 0.999)}, atol=2e-6)
    assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32
    assert_close(optax.tree.get(state, "nu"), {"w": jnp.full(1, 1e-13)}, rtol=0.05)


def test_a_master_beyond_float16_saturates_and_is_counted():
    """Masters of 70000: the model gets 65504 (a plain cast gives inf), the metrics tell, and the way back is open."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=1.0)
    params = {"w": jnp.array([60000.0, -60000.0, 1.0], jnp.float16)}
    state = tx.init(params)
    away = {"w": jnp.array([-10000.0, 10000.0, 0.0], jnp.float16)}
    params, state = jaxmp.apply_gradients(tx, away, state, params)
    assert_exact(params, {"w": jnp.array([65504.0, -65504.0, 1.0], jnp.float16)})
    assert_close(masters_in(state), {"w": jnp.array([70000.0, -70000.0, 1.0])})
    standing = {"w": jnp.zeros(3, jnp.float16)}
    updates, counted = tx.update(standing, state, params)
    assert_close(jaxmp.get_metrics(counted)["saturated_params"], 2.0)
    assert_moved(optax.apply_updates(params, updates), params)
    back = jax.tree.map(jnp.negative, away)
    params, state = jaxmp.apply_gradients(tx, back, state, params)
    assert_exact(params, {"w": jnp.array([60000.0, -60000.0, 1.0], jnp.float16)})
    assert_close(jaxmp.get_metrics(jaxmp.apply_gradients(tx, standing, state, params)[1])["saturated_params"], 0.0)


def test_initial_values_beyond_float16_saturate_too():
    policy = jaxmp.get_policy("fp16")
    params32 = {"w": jnp.array([1e6, -1e6])}
    state = jaxmp.mixed_precision(optax.sgd(1.0), policy).init(params32)
    assert_exact(policy.cast_to_param(params32), {"w": jnp.array([65504.0, -65504.0], jnp.float16)})
    assert_moved(masters_in(state), params32)


def test_moments_are_float32_for_every_policy():
    for policy in ("fp16", "bf16", "fp32"):
        params = jaxmp.get_policy(policy).cast_to_param({"w": jnp.ones(2)})
        state = jaxmp.mixed_precision(optax.adam(1e-3), policy).init(params)
        for moments in ("mu", "nu"):
            assert_exact(optax.tree.get(state, moments), {"w": jnp.zeros(2)})


def test_init_under_jit_and_eval_shape():
    """Big models are initialized under jit; the state has the same structure and types."""
    tx = jaxmp.mixed_precision(optax.adam(1e-3), jaxmp.get_policy("fp16", keep_fp32=("b",)))
    params32 = {"w": jnp.array([1.5, -0.0]), "b": jnp.ones(1)}
    state = tx.init(params32)
    assert_moved(jax.jit(tx.init)(params32), state)
    abstract = jax.eval_shape(tx.init, params32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params32)) == jax.tree.map(jax.typeof, state)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.adam(1.0)], ids=["sgd", "adam"])
def test_gradients_of_other_shapes_are_named(policy, inner):
    tx = jaxmp.keep_master_params(inner, policy)
    params = {"a": jnp.ones(2), "b": {"w": jnp.ones((4, 2))}}
    cast = jaxmp.get_policy(policy).cast_to_param(params)
    grads = {"a": jnp.ones(2), "b": {"w": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"same shapes; got \(2, 2\) and \(4, 2\) at b/w.*jaxmp.fsdp.reduce_gradients"):
        tx.update(grads, tx.init(params), cast)


def test_gradients_that_would_broadcast_are_named():
    tx = jaxmp.keep_master_params(optax.sgd(1.0), "bf16")
    params = {"w": jnp.ones((1, 2), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"same shapes; got \(3, 2\) and \(1, 2\) at w"):
        tx.update({"w": jnp.ones((3, 2))}, tx.init(params), params)


# Derivatives through steps: meta-learning, hyperparameters


RATE, MOMENTUM, ROUNDS = 0.25, 0.5, 3
THROUGH = {
    "fp32": ("fp32", None, lambda tx: tx),
    "bf16": ("bf16", None, lambda tx: tx),
    "fp16": ("fp16", None, lambda tx: tx),
    "16 bits of remainder": ("bf16", 16, lambda tx: tx),
    "8 bits of remainder": ("bf16", 8, lambda tx: tx),
    "bfloat16 moments": ("fp32", None, lambda tx: jaxmp.compress_moments(tx, jnp.bfloat16)),
    "no masters": ("bf16", None, lambda tx: optax.chain(tx, jaxmp.stochastic_round_updates(seed=0))),
    "no masters, float16": ("fp16", None, lambda tx: optax.chain(tx, jaxmp.stochastic_round_updates(seed=0))),
}


def after_training(target, name, *, state_dtype=None):
    """The mean weight after some steps towards `target`."""
    policy, bits, around = THROUGH[name]
    policy, inner = jaxmp.get_policy(policy), around(optax.sgd(RATE, momentum=MOMENTUM))
    if state_dtype is not None:
        inner = jaxmp.compress_moments(inner, state_dtype)
    if "no masters" in name:
        tx = jaxmp.unscale_and_skip(inner, 8.0)
    else:
        tx = jaxmp.mixed_precision(inner, policy, remainder_bits=bits, loss_scale=8.0)
    params32 = {"w": jnp.zeros((16, 256))}
    params, state = policy.cast_to_param(params32), tx.init(params32)

    def loss_fn(params, target):
        return 0.5 * jnp.sum((params["w"].astype(jnp.float32) - target) ** 2)

    for _ in range(ROUNDS):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, target, opt_state=state)
        params, state = jaxmp.apply_gradients(tx, grads, state, params)
    return jnp.mean(params["w"].astype(jnp.float32))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", THROUGH)
def test_the_derivative_through_steps_is_that_of_unrounded_steps(name):
    """d w / d target of w -= rate * m, m = momentum * m + (w - target), in float64."""
    weight = moment = 0.0
    for _ in range(ROUNDS):
        moment = MOMENTUM * moment + (weight - 1.0)
        weight -= RATE * moment
    found = jax.jit(jax.value_and_grad(lambda target: after_training(target, name)))(1.0)
    assert_close(found, (jnp.float32(weight), jnp.float32(weight)), rtol=2.0**-6)  # the steps are linear


def test_a_derivative_through_moments_in_8_bits_is_refused():
    with pytest.raises(TypeError, match=r"no derivative; got one through several steps.*stop_gradient"):
        jax.eval_shape(jax.grad(lambda target: after_training(target, "fp32", state_dtype=jnp.int8)), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# a state that was made for other params


W2 = {"body": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "head": np.ones((3, 2), np.float32)}


def quadratic(params, x):
    return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - 1) ** 2)


def trained(tx, policy, params, state, steps=20):
    @jax.jit
    def step(params, state):
        _, grads = jaxmp.value_and_grad(quadratic, policy=policy)(params, jnp.ones((8, 4)), opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def frozen_body(is_frozen):
    return optax.chain(optax.adam(1e-2), optax.masked(optax.set_to_zero(), {"body": is_frozen, "head": False}))


OLD_AND_NEW = {
    "16-bit params": ((optax.adam(1e-2), "bf16-mixed"), (optax.adam(1e-2), "bf16")),
    "16-bit params from float32": ((optax.adam(1e-2), "fp32"), (optax.adam(1e-2), "bf16")),
    "float16": ((optax.adam(1e-2), "16-mixed"), (optax.adam(1e-2), "fp16")),
    "keep_fp32": (
        (optax.adam(1e-2), jaxmp.get_policy("bf16", keep_fp32=("head",))),
        (optax.adam(1e-2), jaxmp.get_policy("bf16")),
    ),
    "frozen before": ((frozen_body(True), "bf16"), (frozen_body(False), "bf16")),
}


@pytest.mark.parametrize("name", OLD_AND_NEW)
@pytest.mark.parametrize("by_update", [False, True])
def test_16_bit_params_that_are_trained_need_masters(name, by_update):
    """Without, they would stand still; `convert`, which the error names, goes on."""
    (old_inner, old), (inner, policy) = OLD_AND_NEW[name]
    before = jaxmp.mixed_precision(old_inner, old)
    params, state = trained(before, old, jaxmp.get_policy(old).cast_to_param(W2), before.init(W2), steps=3)
    tx = jaxmp.mixed_precision(inner, policy)
    cast = jaxmp.get_policy(policy).cast_to_param(params)
    with pytest.raises(ValueError, match=r"must have masters in opt_state; got none for .*jaxmp.checkpoint.convert"):
        if by_update:
            tx.update(jax.tree.map(jnp.zeros_like, cast), state, cast)
        else:
            trained(tx, policy, cast, state)
    params, state = jaxmp.checkpoint.convert(state, params, to=tx, policy=policy)
    start = jaxmp.get_master_params(state, params)
    params, state = trained(tx, policy, params, state)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), start, jaxmp.get_master_params(state, params))
    assert min(moved.values()) > 0.05, moved


@pytest.mark.parametrize("under", ["jit", "vmap", "shard_map", "shard_map without check_vma", "eager"])
def test_frozen_16_bit_params_need_none(under):
    tx = jaxmp.mixed_precision(frozen_body(True), "bf16")
    params, state = jaxmp.get_policy("bf16").cast_to_param(W2), tx.init(W2)

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(quadratic, policy="bf16")(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    x, run = jnp.ones((8, 4)), step
    if under == "jit":
        run = jax.jit(step)
    elif under == "vmap":
        run, x = jax.vmap(step, in_axes=(None, None, 0)), jnp.ones((2, 8, 4))
    elif under.startswith("shard_map"):
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
        spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), check_vma=under[9:] == "")
        run = jax.jit(spread(lambda *args: jax.tree.map(lambda x: x[None], step(*args)), out_specs=P("data")))
    params, _ = run(params, state, x)
    body, head = (np.asarray(params[name], np.float32) for name in ("body", "head"))
    assert np.all(body == rounded(W2["body"], "bf16").astype(np.float32)) and np.any(head != 1)


@pytest.mark.parametrize(
    ("old", "new", "told"), [("bf16", "fp16", "NoLossScale, and tx has LossScale"), ("fp16", "bf16", "got LossScale")]
)
def test_a_state_with_another_loss_scale_is_named(old, new, told):
    state, tx = jaxmp.mixed_precision(optax.sgd(0.1), old).init(W2), jaxmp.mixed_precision(optax.sgd(0.1), new)
    params = jaxmp.get_policy(new).cast_to_param(W2)
    with pytest.raises(ValueError, match=rf"opt_state must be that of tx; .*{told}.*jaxmp.checkpoint.convert"):
        tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
