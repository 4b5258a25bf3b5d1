"""Arguments in the wrong place: each call says what stands where, and in which order they come."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp

X = jnp.ones((16, 16))
PARAMS = {"w": jnp.ones((16, 4))}
TX = jaxmp.mixed_precision(optax.sgd(0.1), "16-mixed")
STATE = TX.init(PARAMS)
WIDE_TX = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


GRADIENTS = jaxmp.value_and_grad(loss_fn, policy="16-mixed")
IN_BF16 = jaxmp.autocast(loss_fn, jnp.bfloat16)
FP8_TX = jaxmp.mixed_precision(optax.sgd(0.1), "fp8")
FP8_PARAMS = {"kernel": PARAMS["w"], "dot": {"fp8_rhs_e4m3_log2_scale": jnp.float32(0.0)}}


def grads(state=STATE):
    return GRADIENTS(PARAMS, X, opt_state=state)[1]


def train_state(tx=TX, policy="16-mixed"):
    return jaxmp.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx, policy=policy)


def optimizer(tx=TX, policy="16-mixed"):
    return jaxmp.nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, policy=policy)


CALLS = {
    "apply: params and grads": (lambda: jaxmp.apply_gradients(TX, PARAMS, STATE, grads()), "gradients .* as params"),
    "apply: grads and opt_state": (
        lambda: jaxmp.apply_gradients(TX, STATE, grads(), PARAMS),
        "optimizer's state as grads, the gradients of value_and_grad as opt_state",
    ),
    "apply: params and grads, traced": (
        lambda: jax.eval_shape(lambda s: jaxmp.apply_gradients(TX, PARAMS, s, grads(s)), STATE),
        "got the gradients of value_and_grad as params",
    ),
    "apply: params as opt_state": (
        lambda: jaxmp.apply_gradients(TX, grads(), PARAMS, PARAMS),
        "opt_state must be that of tx.init; got dict. Call",
    ),
    "update: params and grads": (
        lambda: jax.eval_shape(lambda s: TX.update(PARAMS, s, grads(s)), STATE),
        "got gradients as params. Swap them",
    ),
    "get_master_params: params first": (
        lambda: jaxmp.get_master_params(PARAMS, STATE),
        "got an opt_state as params",
    ),
    "keep_if_skipped: opt_state last": (
        lambda: jaxmp.keep_if_skipped({"a": jnp.ones(2)}, {"a": jnp.zeros(2)}, STATE),
        r"keep_if_skipped\(opt_state, new, old\) must get .*; got dict without any",
    ),
    "apply: tx last": (lambda: jaxmp.apply_gradients(grads(), STATE, PARAMS, TX), "an optimizer as params"),
    "apply: a TrainState": (
        lambda: jaxmp.apply_gradients(TX, grads(), train_state(), PARAMS),
        "TrainState .* as opt_state. Its parts are state.params",
    ),
    "gradients: opt_state by position": (lambda: GRADIENTS(PARAMS, X, STATE), "an optimizer's state as argument 2"),
    "gradients: a TrainState": (lambda: GRADIENTS(train_state(), X, opt_state=STATE), "a TrainState .* as argument 0"),
    "gradients: tx": (lambda: GRADIENTS(PARAMS, X, opt_state=TX), "an optimizer as opt_state"),
    "gradients: one call": (lambda: jaxmp.value_and_grad(loss_fn, PARAMS, X), "argnums must be .*; got dict"),
    "gradients, nnx": (
        lambda: jaxmp.nnx.value_and_grad(lambda m, x: jnp.mean(m(x)))(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), X, STATE),
        r"\(model, \*batch, opt_state=...\); got an optimizer's state as argument 2",
    ),
    "restore_if_skipped: opt_state last": (
        lambda: jaxmp.nnx.restore_if_skipped(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.State({}), STATE),
        r"restore_if_skipped\(opt_state, model, before\); got an optimizer's state as before",
    ),
    "calibrate: params first": (
        lambda: jaxmp.fp8.calibrate(FP8_PARAMS, loss_fn, X, tx=FP8_TX, opt_state=FP8_TX.init(FP8_PARAMS)),
        "a function as params",
    ),
    "calibrate: tx and opt_state": (
        lambda: jaxmp.fp8.calibrate(loss_fn, FP8_PARAMS, X, tx=FP8_TX.init(FP8_PARAMS), opt_state=FP8_TX),
        "an optimizer's state as tx, an optimizer as opt_state",
    ),
    "calibrate: params and opt_state": (
        lambda: jaxmp.fp8.calibrate(loss_fn, FP8_TX.init(FP8_PARAMS), X, tx=FP8_TX, opt_state=FP8_PARAMS),
        r"calibrate\(loss_fn, params, \*batch.*; got an optimizer's state as params",
    ),
    "calibrate: params twice": (
        lambda: jaxmp.fp8.calibrate(loss_fn, FP8_PARAMS, X, tx=FP8_TX, opt_state=FP8_PARAMS),
        "calibrate must get the state of an optimizer",
    ),
    "calibrate, nnx: the loss first": (  # as jaxmp.fp8.calibrate begins
        lambda: optimizer().calibrate(lambda m, x: jnp.mean(m(x)), nnx.Linear(2, 2, rngs=nnx.Rngs(0)), X),
        r"the arguments are optimizer.calibrate\(model, loss_fn, \*batch\); got Linear as loss_fn",
    ),
    "calibrate: the batch first": (
        lambda: jaxmp.fp8.calibrate(loss_fn, X, FP8_PARAMS, tx=FP8_TX, opt_state=FP8_TX.init(FP8_PARAMS)),
        "must hold fp8 scales; got none. Pass argnums=",
    ),
    "create: tx and policy": (lambda: train_state("bf16", TX), r"a policy \('bf16'\) as tx, an optimizer as policy"),
    "create: another policy": (lambda: train_state(policy="bf16"), "param_dtype=bfloat16 in policy and float32"),
    "create: other patterns": (
        lambda: train_state(policy=jaxmp.get_policy("16-mixed", keep_fp32="w")),
        r"keep_fp32=\('w',\) in policy and \(\)",
    ),
    "create: fp32, scaled": (lambda: train_state(policy="fp32"), "compute_dtype=float32 in policy and float16"),
    "create: bf16-mixed, of fp32": (lambda: train_state(WIDE_TX, "bf16-mixed"), "compute_dtype=bfloat16 in policy"),
    "create: in a chain": (
        lambda: train_state(optax.chain(jaxmp.reduce_gradients(None), TX), "fp32"),
        "must stand once around an optimizer",
    ),
    "Optimizer: another policy": (lambda: optimizer(policy="bf16"), "param_dtype=bfloat16 in policy and float32"),
    "mixed_precision": (
        lambda: jaxmp.mixed_precision("bf16", optax.sgd(0.1)),
        r"got an optimizer. The order is mixed_precision\(inner, policy\)",
    ),
    "create: a dtype": (
        lambda: train_state(policy=jnp.bfloat16),
        "the dtype bfloat16. Use 'bf16' or 'bf16-mixed'",
    ),
    "autocast": (lambda: jaxmp.autocast("fp8", loss_fn), r"autocast\(fn, dtype\); got a function as dtype"),
    "explain: a result": (lambda: jaxmp.explain_autocast(loss_fn(PARAMS, X), X), "got ArrayImpl: a result"),
    "explain: autocast": (lambda: jaxmp.explain_autocast(IN_BF16, PARAMS, X), "got one of autocast"),
    "explain: autocast of a policy, jitted": (
        lambda: jaxmp.explain_autocast(jax.jit(jaxmp.autocast(loss_fn, "bf16")), PARAMS, X),
        "got one of autocast",
    ),
    "accumulate: a list": (
        lambda: jaxmp.value_and_grad(lambda p, x: loss_fn(p, jnp.asarray(x)), accumulate=2)(
            PARAMS, [[1.0] * 16] * 4, opt_state=STATE
        ),
        "a list of 16 numbers at argument 1/0.*jnp.asarray",
    ),
}


VALUE_ERRORS = {
    "get_master_params: params first", "calibrate: the batch first", "create: another policy", "create: other patterns",
    "create: fp32, scaled", "create: bf16-mixed, of fp32", "create: in a chain", "Optimizer: another policy",
    "explain: autocast", "explain: autocast of a policy, jitted", "accumulate: a list",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_the_wrong_place_are_named(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError if name in VALUE_ERRORS else TypeError, match=message):
        call()


@pytest.mark.parametrize(("make", "policy"), [(train_state, "bf16"), (optimizer, "fp32"), (train_state, "16-mixed")])
def test_a_policy_may_have_any_loss_scale(make, policy):
    """Whether the user scales says nothing about the policy. Names of equal policies are equal."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=8.0)
    holder = make(tx, jaxmp.get_policy(policy))
    assert holder.tx is tx and jaxmp.get_loss_scale(holder.opt_state) == 8.0


def test_what_looks_odd_but_is_meant_is_taken():
    """A loss that reads a state, several params, a module that can be called."""
    with_state = jaxmp.value_and_grad(lambda p, s, x: loss_fn(p, x) + jaxmp.get_loss_scale(s), policy="16-mixed")
    jax.eval_shape(lambda p, s: with_state(p, s, X, opt_state=s), PARAMS, STATE)
    pair = jaxmp.value_and_grad(lambda p, q, x: loss_fn(p, x) + loss_fn(q, x), argnums=[0, 1], policy="16-mixed")
    jax.eval_shape(lambda p, s: pair(p, p, X, opt_state=s), PARAMS, train_state())
    scaled = jaxmp.value_and_grad(lambda p, b: loss_fn(p, b[0]) * b[1][0], policy="16-mixed", accumulate=2)
    jax.eval_shape(lambda p, s: scaled(p, (X, (0.5, 2.0)), opt_state=s), PARAMS, STATE)
    model = nn.Dense(4)
    assert jaxmp.explain_autocast(model.apply, jax.eval_shape(model.init, jax.random.key(0), X), X).rows
