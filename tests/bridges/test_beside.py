"""What a loop keeps beside the optimizer: averages, targets, second states; and what is said where it reads 16 bits."""

from typing import Any

import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import jaxmp
from helpers import assert_exact, said
from policy_steps import nothing_read

F32 = np.float32
PARAMS32 = {
    "kernel": np.random.default_rng(0).normal(size=(8, 4)).astype(F32),
    "norm": {"scale": np.ones(4, F32)},
}
X = np.random.default_rng(1).normal(size=(16, 8)).astype(F32)


def loss_fn(params, x):
    return jnp.mean((x @ params["kernel"] * params["norm"]["scale"][None] - 1) ** 2)


def state_of(policy="bf16", tx=None, cls=jaxmp.linen.TrainState, params=PARAMS32, **kwargs):
    return cls.create(apply_fn=None, params=params, tx=optax.adam(1e-2) if tx is None else tx, policy=policy, **kwargs)


def grads_of(state):
    return jaxmp.value_and_grad(loss_fn)(state.params, X, opt_state=state)[1]


@jax.jit
def step(state):
    return state.apply_gradients(grads=grads_of(state))


# The float32 weights


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("policy", "bits"), [("bf16", None), ("bf16", 16), ("16-mixed", None)], ids=str)
def test_master_params_of_a_train_state(policy, bits):
    policy = jaxmp.get_policy(policy, keep_fp32=("norm/*",))
    state = state_of(policy, jaxmp.mixed_precision(optax.adam(1e-2), policy, remainder_bits=bits))
    assert_exact(state.master_params, PARAMS32)
    state = step(step(state))
    assert_exact(state.master_params, jaxmp.get_master_params(state.opt_state, state.params))
    assert {x.dtype for x in jax.tree.leaves(state.master_params)} == {np.dtype(F32)}
    assert np.any(np.asarray(state.master_params["kernel"]) != PARAMS32["kernel"])
    assert_exact(state.policy.cast_to_param(state.master_params), state.params)


def test_master_params_without_a_policy():
    assert_exact(state_of(None).master_params, PARAMS32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "16-mixed"])
def test_master_params_of_an_nnx_optimizer(policy):
    net = Net(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(net, nnx.Param))
    optimizer = jaxmp.nnx.Optimizer(net, optax.adam(1e-2), policy=jaxmp.get_policy(policy, keep_fp32=("norm/*",)))
    assert_exact(optimizer.master_params(net), before)

    @nnx.jit
    def nnx_step(net, optimizer, x):
        grad_fn = jaxmp.nnx.value_and_grad(lambda net, x: jnp.mean((net(x) - 1) ** 2))
        optimizer.update(net, grad_fn(net, x, opt_state=optimizer)[1])
        return optimizer.master_params(net)

    masters = nnx_step(net, optimizer, X)
    assert_exact(masters, optimizer.master_params(net))
    assert_exact(masters, jaxmp.get_master_params(nnx.as_pure(optimizer.opt_state), nnx.state(net, nnx.Param)))
    other = nnx.clone(net)
    nnx.update(other, masters)
    assert other.linear.kernel[...].dtype == F32


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "bf16-mixed"])
def test_a_second_state_starts_from_the_float32_weights(policy):
    first = step(state_of(policy))
    assert said(lambda: state_of(policy, params=first.master_params)) == []
    assert_exact(state_of(policy, params=first.master_params).master_params, first.master_params)
    messages = said(lambda: state_of("bf16", params=first.params))
    assert len(messages) == (policy == "bf16") and all("state.master_params" in m for m in messages)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_params_that_begin_with_16_bits_are_told_once(policy):
    rounded = jaxmp.get_policy("bf16").cast_to_param(PARAMS32)
    (message,) = said(lambda: state_of(policy, params=rounded))
    assert "got 2 in 16 bits, the first at kernel" in message and "#masters-from-16-bits" in message
    model = nn.Dense(4, param_dtype=jnp.bfloat16)
    (message,) = said(lambda: state_of(policy, params=jax.jit(model.init)(jax.random.key(0), X)["params"]))
    assert "the first at bias" in message
    net = nnx.Linear(8, 4, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    (message,) = said(lambda: jaxmp.nnx.Optimizer(net, optax.adam(1e-2), policy=policy))
    assert "got 2 in 16 bits" in message
    assert said(lambda: state_of(policy, params=jaxmp.get_policy("fp32").cast_to_param(rounded))) == []


def test_a_frozen_base_in_16_bits_is_not_told():
    params = PARAMS32 | {"kernel": PARAMS32["kernel"].astype(jnp.bfloat16)}
    labels = {"kernel": "frozen", "norm": {"scale": "trained"}}
    tx = optax.multi_transform({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)
    assert said(lambda: state_of("bf16-mixed", tx=tx, params=params)) == []


class WithFields(jaxmp.linen.TrainState):
    """A subclass with fields of these names, as in flax's own examples."""

    metrics: Any
    master_params: Any = None


def test_fields_of_a_subclass_replace_what_a_state_reads():
    state = state_of(cls=WithFields, metrics={"loss": np.zeros((), F32)})
    new = jax.jit(lambda state: state.apply_gradients(grads=grads_of(state), metrics={"loss": jnp.ones(())}))(state)
    assert float(new.metrics["loss"]) == 1 and new.master_params is None and float(new.loss_scale) == 1
    with pytest.raises(TypeError, match="metrics"):
        state_of(cls=WithFields)


# One policy


@pytest.mark.parametrize(
    ("own", "other", "field"),
    [
        ("bf16", "fp16", "param_dtype=float16"),
        ("bf16", "bf16-mixed", "param_dtype=float32"),
        ("16-mixed", "bf16-mixed", "compute_dtype=bfloat16"),
        ("fp32", "tf32", "matmul_precision=tensorfloat32"),
        ("bf16-mixed", "fp8", "recipe=DelayedScaling"),
        ("bf16-mixed", jaxmp.get_policy("bf16-mixed", reduce_dtype=None), "reduce_dtype=None"),
        ("bf16", jaxmp.get_policy("bf16", keep_fp32=("norm/*",)), "keep_fp32=('norm/*',)"),
    ],
)
def test_another_policy_in_the_call_is_refused(own, other, field):
    state = state_of(own)
    for holder in (state, state.opt_state):
        with pytest.raises(ValueError, match=r"policy= must be that of the state; got ") as e:
            jaxmp.value_and_grad(loss_fn, policy=other)(state.params, X, opt_state=holder)
        assert field in str(e.value) and "Leave out policy=" in str(e.value)


def test_the_same_policy_in_the_call_is_taken():
    state = state_of(jaxmp.get_policy("bf16", keep_fp32=("norm/*",)))

    def program(**options):
        grad_fn = jaxmp.value_and_grad(loss_fn, **options)
        return str(jax.make_jaxpr(lambda state: grad_fn(state.params, X, opt_state=state))(state))

    for policy in ("bf16", state.policy, jaxmp.get_policy("bf16", keep_fp32=("norm/*",))):
        assert program(policy=policy) == program()


def test_an_nnx_optimizer_refuses_another_policy():
    net = Net(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(net, optax.adam(1e-2), policy="bf16")
    with pytest.raises(ValueError, match="policy= must be that of the state"):
        jaxmp.nnx.value_and_grad(lambda net: jnp.mean(net(X)), policy="fp16")(net, opt_state=optimizer)


# Other libraries, other states


@pytest.mark.parametrize("scale", [DynamicScale, DynamicScale()], ids=["class", "object"])
def test_the_scale_of_flax_is_to_be_imported(scale):
    message = r"no DynamicScale of flax; got one. Pass jaxmp.checkpoint.import_loss_scale"
    with pytest.raises(TypeError, match=message):
        state_of("fp16", loss_scale=scale)


def test_updates_that_make_params_float32_are_told_at_the_next_step():
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bf16")
    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(PARAMS32), tx.init(PARAMS32)

    @jax.jit
    def by_equinox(params, opt_state):
        grads = jaxmp.value_and_grad(loss_fn, policy="bf16")(params, X, opt_state=opt_state)[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state

    after = by_equinox(params, opt_state)
    message = r"got float32 at kernel, not bfloat16.*optax.apply_updates: eqx.apply_updates"
    with pytest.raises(ValueError, match=message):
        by_equinox(*after)


def test_a_state_of_another_policy_is_told():
    """Restored by flax, which takes any tree; put into `replace`; or cast by an autocast around the whole step."""
    state, other = state_of("bf16"), state_of("bf16-mixed")
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(other))
    with pytest.raises(ValueError, match="a param and its master must come from one opt_state; got dict as the master"):
        step(restored)
    with pytest.raises(TypeError, match="a TrainState keeps the policy that create gave it; got 'fp16'"):
        state.replace(policy="fp16")
    with pytest.raises(ValueError, match="jaxmp.autocast is around the whole step.*around the loss alone"):
        jax.jit(jaxmp.autocast(step, "bf16"))(state)


def test_a_number_of_python_is_no_param():
    with pytest.raises(TypeError, match=r"float arrays; got float at log_alpha. Write jnp.float32\(...\)."):
        jaxmp.mixed_precision(optax.adam(1e-2), "bf16").init({"log_alpha": 0.5})


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "bf16-mixed"])
def test_one_loss_for_two_states_is_no_mistake(policy):
    """Its policy is that of the state it got; the other state has the same one, and no loss scale."""
    a, b = (state_of(policy, params={name: PARAMS32}) for name in ("first", "second"))

    def loss(p, q):
        return loss_fn(p["first"], X) + loss_fn(q["second"], X)

    def joint(a, b):
        _, (ga, gb) = jaxmp.value_and_grad(loss, argnums=(0, 1))(a.params, b.params, opt_state=a)
        gb = jax.tree.map(lambda g: 0.5 * g, gb)
        return a.apply_gradients(grads=ga), b.apply_gradients(grads=gb)

    def plain(b):
        return b.apply_gradients(grads=jax.grad(lambda q: loss_fn(q["second"], X))(b.params))

    with nothing_read():
        assert said(jax.eval_shape, joint, a, b) == []
    with nothing_read():
        assert "no loss took it from there" in "".join(said(jax.eval_shape, plain, b))


INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3)


@pytest.mark.parametrize(
    ("inner", "name", "where", "fix"),
    [
        (INJECTED, "hyperparams", "opt_state.optimizer_state.hyperparams", "optax.tree.set"),
        (
            optax.chain(optax.clip(1.0), INJECTED),
            "hyperparams",
            "opt_state.optimizer_state[1].hyperparams",
            "optax.tree.set",
        ),
        (optax.contrib.schedule_free_adamw(1e-3), "z", "opt_state.optimizer_state.z", "get_master_params"),
    ],
    ids=["alone", "in a chain", "schedule-free"],
)
def test_fields_of_the_optimizer_inside_are_named(inner, name, where, fix):
    state = state_of(tx=inner)
    with pytest.raises(AttributeError) as e:
        getattr(state.opt_state, name)
    assert where in str(e.value) and fix in str(e.value)
    assert eval(where, {"opt_state": state.opt_state}) is not None
    with pytest.raises(AttributeError, match="object has no attribute 'other'"):
        _ = state.opt_state.other
