"""Masters: where they exist, what they start from, and that the model's params are their rounding at every step."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
import step_oracle
from helpers import assert_close, assert_exact, assert_moved
from regimes import mesh_of

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
both_policies = pytest.mark.parametrize("policy", ["fp16", "bf16"])


def rounded(master, policy):
    """The model's copy, by NumPy."""
    return step_oracle.rounded(master, DTYPES[policy])


def masters_in(state):
    return optax.tree.get(state, "master_params")


def is_masked(x):
    return isinstance(x, optax.MaskedNode)


# which leaves have a master, and what it starts from


@both_policies
def test_masters_keep_the_float32_initial_values(policy):
    """Of float32 params all bits, of 16-bit params theirs, and none for params that stay float32."""
    params32, cast = {"w": np.float32([1.0001, -0.0, 3e-5])}, jaxmp.get_policy(policy).cast_to_param
    tx, params = jaxmp.mixed_precision(optax.sgd(0.1), policy), cast(params32)
    state = tx.init(params32)
    assert_moved(masters_in(state), params32)
    assert_moved(jaxmp.get_master_params(state, params), params32)
    assert not np.array_equal(params["w"].astype(jnp.float32), params32["w"])  # there was something to keep
    assert_exact(masters_in(tx.init(params)), {"w": params["w"].astype(jnp.float32)})


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
def test_frozen_leaves_have_no_master_and_never_change(freezer):
    """LoRA: the base weights are frozen, and most of the memory."""
    policy = "bf16" if freezer == "freeze" else "fp16"
    tx = jaxmp.mixed_precision(FREEZERS[freezer](optax.adam(0.1)), policy, loss_scale=2.0)
    params32 = {"base": np.float32([0.1, -0.0, 7.0]), "lora_a": np.ones(2, np.float32), "lora_b": np.zeros(2, "f4")}
    state, params = tx.init(params32), jaxmp.get_policy(policy).cast_to_param(params32)
    assert is_masked(masters_in(state)["base"])
    new, update = params, jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, new)
        new = optax.apply_updates(new, updates)
    assert_moved(new["base"], params["base"])
    assert float(new["lora_b"][0]) < 0
    assert_exact(jaxmp.get_master_params(state, new)["base"], params["base"].astype(jnp.float32))
    assert_exact(new["lora_a"], jnp.asarray(rounded(masters_in(state)["lora_a"], policy)))


def test_a_frozen_base_may_be_of_integers():
    tx = jaxmp.mixed_precision(FREEZERS["multi_transform"](optax.sgd(1.0)), "fp16", loss_scale=1.0)
    params32 = {"base": np.int8([[1, -2]]), "lora_a": np.ones(2, np.float32)}
    state, params = tx.init(params32), jaxmp.get_policy("fp16").cast_to_param(params32)
    assert is_masked(masters_in(state)["base"])
    grads = {"base": jnp.zeros((1, 2)), "lora_a": jnp.ones(2, jnp.float16)}
    new, _ = jaxmp.apply_gradients(tx, grads, state, params)
    assert_moved(new["base"], params32["base"])
    assert_exact(new["lora_a"], np.zeros(2, np.float16))


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


@both_policies
def test_apply_updates_lands_on_the_rounded_master(policy):
    """Random params with random moves of up to 1000-fold shrinking; optax's own `apply_updates`, bit for bit."""
    tx, by_updates, _ = sgd_steps(policy)
    rng = np.random.default_rng(1)
    old = random_floats(rng, 20_000)
    shrink = np.exp2(-rng.uniform(0, 10, old.size)) * rng.choice([-1, 1], old.size)
    wanted = np.where(rng.random(old.size) < 0.5, old * shrink, old + old * rng.uniform(-1e-3, 1e-3, old.size))
    state = tx.init({"w": jnp.asarray(old)})
    params = {"w": jnp.asarray(rounded(old, policy))}
    grads = {"w": jnp.asarray((old - wanted).astype(np.float32))}
    new, state, updates = by_updates(grads, state, params)
    assert updates["w"].dtype == jnp.float32
    expected = rounded(masters_in(state)["w"], policy)
    assert new["w"].dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(new["w"], np.float32), expected.astype(np.float32))  # values; zeros below
    nonzero = expected != 0
    assert_exact(np.asarray(new["w"])[nonzero], expected[nonzero])
    if policy == "bf16":  # the peers' way, an update in bfloat16, shows that this test can fail
        landed = params["w"] + updates["w"].astype(ml_dtypes.bfloat16)
        assert np.mean(np.asarray(landed) != expected) > 0.05


@both_policies
def test_apply_gradients_is_exact_always(policy):
    """Any move whatever: from 1e4 to 1e-9, through zero, to -0.0 and to inf."""
    tx, _, apply = sgd_steps(policy)
    rng = np.random.default_rng(2)
    old, wanted = random_floats(rng, 20_000), random_floats(rng, 20_000)
    wanted[1::50] = -0.0
    state = tx.init({"w": jnp.asarray(old)})
    grads = {"w": jnp.asarray(old - wanted)}
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


# what masters are for


def test_bfloat16_moves_at_learning_rate_1e_3():
    """optax on bfloat16 params stands still for ever; masters collect what is too small for the param."""
    params, plain = {"w": jnp.ones(3, jnp.bfloat16)}, optax.adam(1e-3)

    def steps(tx):
        step = lambda carry, _: (jaxmp.apply_gradients(tx, params, carry[1], carry[0]), None)  # noqa: E731
        return jax.jit(lambda state: jax.lax.scan(step, (params, state), length=20)[0])(tx.init(params))

    new, state = steps(jaxmp.mixed_precision(plain, "bf16"))
    assert_close(masters_in(state), {"w": jnp.full(3, 0.98)}, atol=1e-5)
    assert_exact(new, {"w": jnp.full(3, 0.98, jnp.bfloat16)})
    assert_moved(steps(plain)[0], params)  # the peer


def test_the_epsilon_of_adam_survives():
    """On fp16 params optax's nu underflows and eps = 1e-8 is 0: the update is -inf. In float32 it is -lr."""
    params, grads, plain = {"w": np.ones(1, np.float16)}, {"w": np.float16([1e-5])}, optax.adam(1e-3)
    updates, _ = jax.jit(plain.update)(grads, plain.init(params), params)
    assert not np.isfinite(np.asarray(updates["w"])).any()  # the peer
    tx = jaxmp.mixed_precision(plain, "fp16", loss_scale=1.0)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_close(masters_in(state), {"w": jnp.full(1, 0.999)}, atol=2e-6)
    assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32
    assert_close(optax.tree.get(state, "nu"), {"w": jnp.full(1, 1e-13)}, rtol=0.05)


def test_a_master_beyond_float16_saturates_and_is_counted():
    """Masters of 70000: the model gets 65504 (a plain cast gives inf), the metrics tell, and the way back is open."""
    tx, by_updates, apply = sgd_steps("fp16")
    params = {"w": np.float16([60000.0, -60000.0, 1.0])}
    state = tx.init({"w": np.float32([60000.0, -60000.0, 1.0])})
    away, standing = {"w": np.float16([-10000.0, 10000.0, 0.0])}, {"w": np.zeros(3, np.float16)}
    params, state = apply(away, state, params)
    assert_exact(params, {"w": np.float16([65504.0, -65504.0, 1.0])})
    assert_close(masters_in(state), {"w": np.float32([70000.0, -70000.0, 1.0])})
    assert_exact(jaxmp.get_policy("fp16").cast_to_param({"w": np.float32([1e6])}), {"w": np.float16([65504.0])})
    landed, counted, _ = by_updates(standing, state, params)
    assert_close(jaxmp.get_metrics(counted)["saturated_params"], 2.0)
    assert_moved(landed, params)
    params, state = apply({"w": -away["w"]}, state, params)
    assert_exact(params, {"w": np.float16([60000.0, -60000.0, 1.0])})
    assert_close(jaxmp.get_metrics(apply(standing, state, params)[1])["saturated_params"], 0.0)


def test_moments_are_float32_for_every_policy():
    """Big models are initialized under jit or eval_shape: to the same structure and types."""
    for policy in ("fp16", "bf16", "fp32"):
        params = jaxmp.get_policy(policy, keep_fp32=("b",)).cast_to_param({"w": jnp.ones(2), "b": jnp.ones(2)})
        init = jaxmp.mixed_precision(optax.adam(1e-3), jaxmp.get_policy(policy, keep_fp32=("b",))).init
        state, compiled, shapes = init(params), jax.jit(init)(params), jax.eval_shape(init, params)
        for moments in ("mu", "nu"):
            assert_exact(optax.tree.get(state, moments), {"w": jnp.zeros(2), "b": jnp.zeros(2)})
        assert is_masked(masters_in(state)["w"]) == (policy == "fp32") and is_masked(masters_in(state)["b"])
        assert_moved(compiled, state)
        assert jax.tree.map(jax.typeof, compiled) == jax.tree.map(jax.typeof, state)
        as_tuple = lambda x: (x.shape, x.dtype)  # noqa: E731
        assert jax.tree.map(as_tuple, shapes) == jax.tree.map(as_tuple, state)


# Derivatives through steps: meta-learning, hyperparameters


RATE, MOMENTUM, ROUNDS = 0.25, 0.5, 3
THROUGH = {  # policy, bits of remainders, what stands around the optimizer
    "fp32": ("fp32", None, lambda tx: tx),
    "fp16": ("fp16", None, lambda tx: tx),
    "16 bits of remainder": ("bf16", 16, lambda tx: tx),
    "8 bits of remainder": ("bf16", 8, lambda tx: tx),
    "bfloat16 moments": ("fp32", None, lambda tx: jaxmp.compress_moments(tx, jnp.bfloat16)),
    "no masters": ("bf16", None, lambda tx: optax.chain(tx, jaxmp.stochastic_round_updates(seed=0))),
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
    derivative = jax.jit(jax.value_and_grad(lambda target: after_training(target, name)))(1.0)
    assert_close(derivative, (jnp.float32(weight), jnp.float32(weight)), rtol=2.0**-6)  # the steps are linear


def test_a_derivative_through_moments_in_8_bits_is_refused():
    with pytest.raises(TypeError, match=r"no derivative; got one through several steps.*stop_gradient"):
        jax.eval_shape(jax.grad(lambda target: after_training(target, "fp32", state_dtype=jnp.int8)), 1.0)


# a state that was made for other params


W2 = {"body": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "head": np.ones((3, 2), np.float32)}


def quadratic(params, x):
    return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - 1) ** 2)


def trained(tx, policy, params, state, steps=20):
    def step(carry, _):
        params, state = carry
        _, grads = jaxmp.value_and_grad(quadratic, policy=policy)(params, jnp.ones((8, 4)), opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params), None

    return jax.jit(lambda *carry: jax.lax.scan(step, carry, length=steps)[0])(params, state)


def frozen_body(is_frozen):
    return optax.chain(optax.adam(1e-2), optax.masked(optax.set_to_zero(), {"body": is_frozen, "head": False}))


OLD_AND_NEW = {
    "16-bit params": ((optax.adam(1e-2), "bf16-mixed"), (optax.adam(1e-2), "bf16")),
    "float16": ((optax.adam(1e-2), "16-mixed"), (optax.adam(1e-2), "fp16")),
    "keep_fp32": (
        (optax.adam(1e-2), jaxmp.get_policy("bf16", keep_fp32=("head",))),
        (optax.adam(1e-2), jaxmp.get_policy("bf16")),
    ),
    "frozen before": ((frozen_body(True), "bf16"), (frozen_body(False), "bf16")),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", OLD_AND_NEW)
def test_16_bit_params_that_are_trained_need_masters(name):
    """Without, they would stand still; `convert`, which the error names, goes on."""
    (old_inner, old), (inner, policy) = OLD_AND_NEW[name]
    params, state = jaxmp.get_policy(old).cast_to_param(W2), jaxmp.mixed_precision(old_inner, old).init(W2)
    tx = jaxmp.mixed_precision(inner, policy)
    cast = jaxmp.get_policy(policy).cast_to_param(params)
    missing = r"must have masters in opt_state; got none for .*jaxmp.checkpoint.convert"
    with pytest.raises(ValueError, match=missing):
        tx.update(jax.tree.map(jnp.zeros_like, cast), state, cast)
    with pytest.raises(ValueError, match=missing):
        trained(tx, policy, cast, state)
    params, state = jaxmp.checkpoint.convert(state, params, to=tx, policy=policy)
    start = jaxmp.get_master_params(state, params)
    params, state = trained(tx, policy, params, state)
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), start, jaxmp.get_master_params(state, params))
    assert min(moved.values()) > 0.05, moved


@pytest.mark.thorough(1)
@pytest.mark.parametrize("under", ["jit", "vmap", "shard_map", "shard_map without check_vma"])
def test_frozen_16_bit_params_need_none(under):
    tx = jaxmp.mixed_precision(frozen_body(True), "bf16")
    params, state = jaxmp.get_policy("bf16").cast_to_param(W2), tx.init(W2)

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(quadratic, policy="bf16")(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    run = jax.vmap(step, in_axes=(None, None, 0)) if under == "vmap" else step
    if under.startswith("shard_map"):
        stacked = lambda *args: jax.tree.map(lambda x: x[None], step(*args))  # noqa: E731
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data")}
        run = jax.shard_map(stacked, mesh=mesh_of(devices=2), **specs, check_vma=under == "shard_map")
    params, _ = jax.jit(run)(params, state, np.ones((2, 8, 4) if under == "vmap" else (8, 4), np.float32))
    body, head = (np.asarray(params[name], np.float32) for name in ("body", "head"))
    assert np.all(body == rounded(W2["body"], "bf16").astype(np.float32)) and np.any(head != 1)


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [("bf16", "fp16", "NoLossScale, and tx has LossScale"), ("fp16", "bf16", "got LossScale")],
)
def test_a_state_with_another_loss_scale_is_named(old, new, difference):
    state, tx = jaxmp.mixed_precision(optax.sgd(0.1), old).init(W2), jaxmp.mixed_precision(optax.sgd(0.1), new)
    params = jaxmp.get_policy(new).cast_to_param(W2)
    with pytest.raises(ValueError, match=rf"opt_state must be that of tx; .*{difference}.*jaxmp.checkpoint.convert"):
        tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
