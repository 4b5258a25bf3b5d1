"""What is said, while a step is traced, of a loss that does not compute as its params or its policy say."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import helpers
import jaxmp
from matmul_dtypes import matmuls
from policy_steps import filled
from regimes import mesh_of

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
W = {"a": X / 4, "b": X.T / 4}
NOTHING_LOW = "no matmul or convolution of the loss runs in 16 bits or fp8"


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


@functools.cache
def made(policy: str, **options: Any) -> tuple[Any, Any]:
    return jaxmp.get_policy(policy).cast_to_param(W), jaxmp.mixed_precision(optax.sgd(0.1), policy, **options).init(W)


def said(fn: Any, *args: Any) -> list[str]:
    """The warnings while a function is traced."""
    return helpers.said(jax.make_jaxpr(fn), *args)


def step(loss: Any = loss_fn, of: str = "bf16", **options: Any) -> Any:
    """The gradients of a loss for the params of a policy, as a function of a batch."""
    params, opt_state = made(of)
    return lambda x: jaxmp.value_and_grad(loss, **options)(params, x, opt_state=opt_state)


def step_of(model: Any, x: Any, policy: Any = "fp8", **options: Any) -> Any:
    """The gradients of a model of linen under a policy, as a function of a batch."""
    params = filled(jaxmp.autocast(model.init, policy), jax.random.key(0), x)["params"]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)
    loss = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
    return lambda x: jaxmp.value_and_grad(loss, policy=policy, **options)(params, x, opt_state=opt_state)


# 16-bit params, and nothing in 16 bits


def scanned(params, x):
    return jnp.mean(lax.scan(lambda h, _: (jnp.tanh(h @ params["a"]), None), x, None, length=3)[0])


def branched(params, x):
    return lax.cond(jnp.sum(x) > 0, lambda: loss_fn(params, x), lambda: jnp.mean(x @ params["a"]))


@jax.custom_vjp
def product(x, w):
    return x @ w.astype(x.dtype)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)), lambda saved, g: (g @ saved[1].astype(g.dtype).T, (saved[0].T @ g))
)


def with_own_rule(params, x):
    w = params["b"].astype(jnp.float32)
    return jnp.mean(product(x, params["a"].astype(jnp.float32)) @ w)


def convolution(params, x):
    kernel = params["a"].reshape(2, 2, 8, 8).astype(x.dtype)
    return jnp.mean(
        lax.conv_general_dilated(x.reshape(2, 4, 4, 8), kernel, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    )


NAIVE = {
    "plain": loss_fn,
    "jit": jax.jit(loss_fn),
    "remat": jax.checkpoint(loss_fn),
    "scan": scanned,
    "cond": branched,
    "custom_vjp": with_own_rule,
    "vmap": lambda params, x: jnp.mean(jax.vmap(lambda row: row @ params["a"])(x)),
    "convolution": convolution,
    "16 bits beside it": lambda params, x: loss_fn(params, x) + jnp.mean(params["b"] * params["a"]),
}


CASES = [(kind, "bf16") for kind in NAIVE] + [("plain", "fp16")]


@pytest.mark.thorough(5)
@pytest.mark.parametrize(("kind", "of"), CASES)
def test_it_is_said_once(kind, of):
    (message,) = said(step(NAIVE[kind], of), X)
    assert message.startswith(f"the params are {jaxmp.get_policy(of).param_dtype.name}, but {NOTHING_LOW}")
    assert "policy=" in message and "opt_state=state" in message and "opt_state=optimizer" in message


def test_it_is_said_once_in_every_regime():
    local = lambda x: lax.pmean(step()(x), "data")  # noqa: E731
    spread = functools.partial(jax.shard_map, local, mesh=mesh_of(), in_specs=P("data"), out_specs=P())
    regimes = {
        "microbatches": step(accumulate=4),
        "shard_map": spread(),
        "unchecked": spread(check_vma=False),
        "scan over steps": lambda x: lax.scan(lambda c, x: (c, step()(x)[0]), 0.0, x[None]),
        "vmap": jax.vmap(lambda row: step()(row[None])),
    }
    for name, fn in regimes.items():
        assert [NOTHING_LOW in message for message in said(fn, X)] == [True], name
    run = jax.jit(step())
    with pytest.warns(UserWarning, match=NOTHING_LOW):
        run(X)
    run(X)  # warnings are errors


def test_it_is_said_of_nnx():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), wrt=nnx.Param, policy="bf16")
    grad_fn = jaxmp.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))
    (message,) = said(lambda x: grad_fn(model, x, opt_state=optimizer.opt_state)[0], X)
    assert NOTHING_LOW in message


def test_an_opt_state_that_left_its_train_state_brings_no_policy():
    """After a jit of its own it is a plain one: that is said, and not guessed."""
    model = nn.Dense(16)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
    params = filled(model.init, jax.random.key(0), X)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy="bf16")

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    def run(params, opt_state):
        return jaxmp.value_and_grad(loss)(params, X, opt_state=opt_state)

    assert not said(lambda state: run(state.params, state.opt_state), state)
    assert not said(lambda state: run(state.params, state), state)
    (message,) = said(run, state.params, state.opt_state)
    assert NOTHING_LOW in message


# A policy of float32 params, given to the optimizer only


@pytest.mark.parametrize("of", ["16-mixed", "mixed_bfloat16", "params=float32,compute=float16,output=float32"])
def test_a_policy_that_only_the_optimizer_knows(of):
    for kind in ("plain", "scan"):
        (message,) = said(step(NAIVE[kind], of), X)
        assert message.startswith("the policy of the optimizer computes in 16 bits") and NOTHING_LOW in message
        assert "policy=..." in message and 'policy="fp32"' in message
    passed = lambda params, opt_state: jaxmp.value_and_grad(loss_fn)(params, X, opt_state=opt_state)  # noqa: E731
    assert len(said(passed, W, made(of)[1])) == 1  # the state says it as an argument, too
    steps = lambda params, s: lax.scan(lambda s, _: (s, passed(params, s)[0]), s, None, length=2)  # noqa: E731
    assert len(said(steps, W, made(of)[1])) == 1


def test_a_chain_around_it_and_a_step_before_say_so_too():
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "16-mixed", before=jaxmp.reduce_gradients())
    step_before = jax.jit(lambda grads, state, params: jaxmp.apply_gradients(tx, grads, state, params)[1])
    opt_state = jax.device_put(jax.device_get(step_before(W, tx.init(W), W)))
    assert len(said(lambda x: jaxmp.value_and_grad(loss_fn)(W, x, opt_state=opt_state), X)) == 1
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    run = nnx.jit(lambda m, o: jaxmp.nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(m, opt_state=o.opt_state)[0])
    with pytest.warns(UserWarning, match="the policy of the optimizer computes in 16 bits"):
        run(model, optimizer)


def test_silence_where_the_loss_keeps_to_the_policy_of_the_optimizer():
    for loss in (in_float16, region_inside):
        assert said(step(loss, "16-mixed"), X) == []
    for policy in ("16-mixed", "fp32"):
        assert said(step(of="16-mixed", policy=policy), X) == []
    with jaxmp.autocast(jnp.float16):
        assert said(step(of="16-mixed"), X) == []
    with jaxmp.autocast(enabled=False):
        assert said(step(of="16-mixed"), X) == []
    assert said(step(lambda params, x: jnp.mean(params["a"] * x), "16-mixed"), X) == []  # no matmul at all


# Silence


def in_16_bits(params, x):
    return jnp.mean((x.astype(params["a"].dtype) @ params["a"]).astype(jnp.float32) ** 2)


def own_rule_in_16_bits(params, x):
    return jnp.mean(product(x.astype(params["a"].dtype), params["a"]).astype(jnp.float32)) + jnp.mean(x @ x)


def region_inside(params, x):
    return jaxmp.autocast(loss_fn, jnp.bfloat16)(params, x)


SILENT = {
    "16 bits": in_16_bits,
    "one of two": lambda params, x: in_16_bits(params, x) + jnp.mean(x @ params["b"]),
    "remat": jax.checkpoint(in_16_bits),
    "scan": lambda params, x: lax.scan(lambda s, x: (s + in_16_bits(params, x), None), 0.0, x[None])[0],
    "rule": own_rule_in_16_bits,
    "autocast inside": region_inside,
    "no matmul": lambda params, x: jnp.mean(params["a"] * x),
    "a vector": lambda params, x: jnp.mean(x @ params["a"][0]),
    "a norm": lambda params, x: jnp.vdot(params["a"], params["a"].astype(jnp.float32)),
    "not of the params": lambda params, x: jnp.mean(x @ x) * jnp.mean(params["a"]).astype(jnp.float32),
    "fp8": lambda params, x: jnp.mean(
        jaxmp.fp8.einsum("ij,jk->ik", x, params["a"], recipe=jaxmp.fp8.CurrentScaling()).astype(jnp.float32)
    ),
}


@pytest.mark.parametrize("kind", SILENT)
def test_silence(kind):
    assert said(step(SILENT[kind]), X) == []


def test_silence_of_short_products_where_autocast_is_said():
    """It keeps them in float32 itself."""
    short = lambda params, x: jnp.mean(x[:, :4] @ params["a"][:4])  # noqa: E731
    assert NOTHING_LOW in said(step(short), X)[0]
    assert said(step(short, policy="bf16"), X) == []
    with jaxmp.autocast(jnp.bfloat16):
        assert said(step(short, accumulate=2, accumulate_argnums=(1,)), X) == []


def test_silence_where_float32_is_what_was_asked_for():
    assert said(step(policy="params=bfloat16,compute=float32,output=float32"), X) == []
    assert said(step(of="fp32"), X) == []
    with jaxmp.autocast(enabled=False):
        assert said(step(), X) == []
    with jaxmp.autocast(jnp.bfloat16):
        assert said(step(), X) == []


# A policy that is not kept


@pytest.mark.parametrize("name", ["bf16", "16-mixed"])
def test_a_policy_of_which_nothing_computes_in_16_bits(name):
    policy = jaxmp.get_policy(name, keep_fp32="*")
    (message,) = said(step_of(nn.Dense(16), X, policy), X)
    assert f"the policy says {policy.compute_dtype.name}, but {NOTHING_LOW}" in message and "keep_fp32" in message


def test_a_policy_that_says_fp8_where_nothing_runs_in_fp8():
    run = step(of="bf16-mixed", policy="fp8")
    (message,) = said(run, X)
    assert "the policy says fp8, but no matmul of the loss runs in fp8" in message
    assert 'with jaxmp.autocast("fp8")' in message and "to_fp8" in message


# float16 without a loss scale


def in_float16(params, x):
    return jnp.mean((x.astype(jnp.float16) @ params["a"].astype(jnp.float16)).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    ("policy", "scale", "count"),
    [("fp8", None, 1), (None, None, 1), ("fp8", 1024.0, 0), (None, jaxmp.DynamicLossScale(), 0)],
)
def test_float16_modules_under_fp8(policy, scale, count):
    model = nn.Sequential([nn.Dense(16, dtype=jnp.float16) for _ in range(3)])
    params = filled(jaxmp.autocast(model.init, "fp8"), jax.random.key(0), X)["params"]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", loss_scale=scale).init(params)

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    def run(x):
        with jaxmp.autocast("fp8"):
            return jaxmp.value_and_grad(loss, policy=policy)(params, x, opt_state=opt_state)

    messages = said(run, X)
    assert len(messages) == count
    assert all("matmuls run in float16, and there is no loss scale" in m for m in messages)


@pytest.mark.parametrize("of", ["bf16", "fp32", "bf16-mixed"])
def test_float16_matmuls_without_a_loss_scale(of):
    (message,) = said(step(in_float16, of), X)
    assert message.startswith("matmuls run in float16, and there is no loss scale: gradients below 6e-8 become zero")
    assert 'jaxmp.mixed_precision(tx, "fp16")' in message


@pytest.mark.parametrize("of", ["fp16", "16-mixed"])
def test_silence_with_a_loss_scale(of):
    assert said(step(in_float16, of, policy=of), X) == []


# Little of the loss in fp8


class Cnn(nn.Module):
    """Of its matmul FLOPs 2 * 12544 * 256 run in fp8 for each picture: 17 %."""

    features: int = 64

    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(self.features // 2, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(self.features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


PICTURES = jnp.ones((2, 28, 28, 1))  # products in fp8 are padded to 16 rows, which do not count


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("recipe", "accumulate"),
    [(jaxmp.fp8.DelayedScaling(), 2), (jaxmp.fp8.CurrentScaling(), 1)],
    ids=["delayed", "current"],
)
def test_a_cnn_is_told_the_share_of_fp8(recipe, accumulate):
    policy = dataclasses.replace(jaxmp.get_policy("fp8"), recipe=recipe)
    (message,) = set(said(step_of(Cnn(), PICTURES, policy, accumulate=accumulate), PICTURES))
    share = "17% of the FLOPs of the loss's matmuls and convolutions run in it; the rest (83% are of convolutions)"
    assert share in message and "#little-in-fp8" in message
    shapes = jax.eval_shape(Cnn().init, jax.random.key(0), PICTURES)
    explained = jaxmp.explain_autocast(Cnn().apply, shapes, PICTURES)
    convolutions = sum(row.flops for row in explained.rows if row.name.startswith("conv"))
    assert round(100 * convolutions / sum(explained.matmul_flops_by_dtype().values())) == 83


def test_a_model_of_matmuls_is_not_told():
    model = nn.Sequential([nn.Dense(64) for _ in range(4)])
    assert said(step_of(model, jnp.ones((16, 64))), jnp.ones((16, 64))) == []


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(Scanned, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layer()(x, None)[0]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64)(x), None


def test_scanned_layers_are_looked_at_inside_another_autocast():
    """There the scan stands as it was written, with its scales among its first operands."""
    policy = jaxmp.get_policy("fp8")
    params = filled(jaxmp.autocast(Stack().init, policy), jax.random.key(0), jnp.ones((16, 64)))["params"]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)
    loss = jaxmp.autocast(lambda params, x: jnp.mean(Stack().apply({"params": params}, x) ** 2), "bf16")
    step = jax.jit(lambda x: jaxmp.value_and_grad(loss, policy=policy)(params, x, opt_state=opt_state)[0])
    assert said(step, jnp.ones((16, 64))) == []
    rows = jaxmp.explain_autocast(lambda x: loss(params, x), jnp.ones((16, 64)), dtype="fp8").rows
    (row,) = [row for row in rows if row.name == "dot_general"]
    assert (row.written, row.runs_in, row.count, row.flops) == ("float32", "float8_e4m3fn", 2, 2 * 2 * 16 * 64 * 64)


# Losses with gradients inside


@pytest.mark.parametrize(("of", "inner"), [("bf16", "jaxmp"), ("16-mixed", "jax"), ("bf16-mixed", "jaxmp")])
def test_a_step_in_the_loss_runs_in_the_policy(of, inner):
    """The inner loss is traced in float32 and cast with all the rest, so nothing is said of it."""
    params, opt_state = made(of, loss_scale=1.0)

    def after_a_step(params, x):
        if inner == "jax":
            grads = jax.grad(loss_fn)(params, x)
        else:
            grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)[1]
        return loss_fn(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x)

    def run(x):
        return jaxmp.value_and_grad(after_a_step, policy=of)(params, x, opt_state=opt_state)[0]

    assert said(run, X) == []
    assert "float32" not in matmuls(run, X)


# Networks that another loss trains


@pytest.mark.parametrize("enabled", [True, False])
def test_a_critic_in_the_loss_of_an_actor(enabled):
    """Its scales belong to its own loss: the warning says how to run it in 16 bits, and that way is silent."""
    model = nn.Sequential([nn.Dense(32) for _ in range(5)])
    x = jnp.ones((16, 32))
    actor = critic = filled(jaxmp.autocast(model.init, "fp8"), jax.random.key(0), x)["params"]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp8").init(actor)

    def loss(params, critic, x):
        action = model.apply({"params": params}, x)
        if enabled:
            return -jnp.mean(model.apply({"params": critic}, action))
        with jaxmp.fp8.autocast(enabled=False):
            return -jnp.mean(model.apply({"params": critic}, action))

    def run(critic, x):
        return jaxmp.value_and_grad(loss, policy="fp8")(actor, critic, x, opt_state=opt_state)

    messages = said(run, critic, x)
    assert len(messages) == enabled
    if enabled:
        assert "those of layers_1, layers_2, layers_3 are closed over" in messages[0]
        assert "a critic, a discriminator, a teacher" in messages[0]
        assert "`with jaxmp.fp8.autocast(enabled=False):`" in messages[0]
    else:
        assert matmuls(run, critic, x)["bfloat16"] > 3 and "float32" not in matmuls(run, critic, x)
