"""float32 as the `dtype=` of a flax layer: no request under a policy, which keeps layers in float32 by name."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jaxmp
from helpers import assert_same_program
from matmul_dtypes import matmuls

X, Y = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
IN_FP8 = {"float8_e4m3fn": 1, "float8_e4m3fnxfloat8_e5m2": 2}  # a layer
TWO_IN_FP8 = {dtype: 2 * count for dtype, count in IN_FP8.items()}


class Net(nn.Module):
    """A block and a head, whose dtype is handed on to every layer, as Hugging Face's models and flax's examples do."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, 16, dtype=self.dtype)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(dense(name="first")(x))
        return dense(name="head")(nn.relu(dense(name="last")(nn.relu(dense(name="middle")(x)))))


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any = jnp.float32):
        layer = functools.partial(nnx.Linear, 16, 16, dtype=dtype)
        self.first, self.middle, self.last, self.head = (layer(rngs=nnx.Rngs(i)) for i in range(4))
        self.norm = nnx.LayerNorm(16, dtype=dtype, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.head(nnx.relu(self.last(nnx.relu(self.middle(self.norm(self.first(x)))))))


def policy_of(name: str, **options: Any) -> jaxmp.Policy:
    """A policy that has said which layers it keeps."""
    return jaxmp.get_policy(name, **({"keep_fp32": ()} | options))


def made(model: nn.Module) -> Any:
    """Params without a program that makes them; scales of fp8 are one."""

    def filled(path, leaf):
        is_scale = jaxmp.fp8.is_scale(path)
        return (
            jnp.zeros(()) if is_scale else jnp.asarray(np.resize([0.1, -0.2, 0.3, 0.05, -0.1], leaf.shape), jnp.float32)
        )

    shapes = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    return jax.tree_util.tree_map_with_path(filled, shapes)


def linen_step(policy: jaxmp.Policy, net: nn.Module | None = None, **options: Any) -> Any:
    """Loss and gradients of a linen model, as a function of a batch."""
    model = Net() if net is None else net
    with jaxmp.autocast(policy):
        params = made(model)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params)
    params = policy.cast_to_param(params)

    def loss(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    grad_fn = jaxmp.value_and_grad(loss, policy=policy, **options)
    return lambda x, y: grad_fn(params, x, y, opt_state=opt_state)


def nnx_step(policy: jaxmp.Policy, net: nnx.Module | None = None) -> Any:
    """The same of an nnx model."""
    model = NnxNet() if net is None else net
    if policy.recipe:
        jaxmp.nnx.to_fp8(model, policy.recipe)
    optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), policy), wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    graphdef, state = nnx.split(model)

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def step(x, y):
        model = nnx.merge(graphdef, state)
        value, grads = jaxmp.nnx.value_and_grad(loss, policy=policy)(model, x, y, opt_state=optimizer.opt_state)
        return value, nnx.as_pure(grads)

    return step


# The rule


@pytest.mark.thorough(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("step", [linen_step, nnx_step])
def test_it_runs_as_a_layer_without_a_dtype(step, policy):
    policy = policy_of(policy)
    net = Net if step is linen_step else NnxNet
    run = step(policy)
    assert_same_program(jax.jit(run)(X, Y), jax.jit(step(policy, net(None)))(X, Y))
    found, name = matmuls(run, X, Y), policy.compute_dtype.name
    assert found == ({name: 5} | TWO_IN_FP8 if policy.recipe else {name: 11})


@pytest.mark.thorough(2)
@pytest.mark.parametrize("float32", [jnp.float32, np.float32, "float32", np.dtype("float32")])
def test_every_spelling_of_float32(float32):
    assert matmuls(linen_step(policy_of("bf16"), Net(float32)), X, Y) == {"bfloat16": 11}


def test_a_16_bit_dtype_is_a_request():
    policy = policy_of("params=bfloat16,compute=float16,output=float32")
    assert matmuls(linen_step(policy, Net(jnp.bfloat16)), X, Y) == {"bfloat16": 11}
    assert matmuls(nnx_step(policy, NnxNet(jnp.bfloat16)), X, Y) == {"bfloat16": 11}


def test_batch_norm_and_cells_return_16_bits_as_without_a_dtype():
    layers = {
        "norm": (lambda dtype: nn.BatchNorm(use_running_average=False, dtype=dtype), {"mutable": ["batch_stats"]}),
        "dense": (lambda dtype: nn.Sequential([nn.Dense(16, dtype=dtype)]), {}),
    }
    for make, options in layers.values():
        variables = make(None).init(jax.random.key(0), X)
        outs = []
        for dtype in (None, jnp.float32):
            call = jaxmp.autocast(functools.partial(make(dtype).apply, **options), jnp.bfloat16, modules={})
            outs.append(jax.tree.leaves(jax.eval_shape(call, variables, X))[0].dtype)
        assert outs == [jnp.bfloat16, jnp.bfloat16]
    cell = nnx.SimpleCell(16, 16, rngs=nnx.Rngs(0))  # its dtype is never None
    out = jaxmp.autocast(lambda cell, c, x: cell(c, x), jnp.bfloat16, modules={})(cell, X, X)
    assert {x.dtype.name for x in jax.tree.leaves(out)} == {"bfloat16"}


# What stays


@pytest.mark.thorough(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-mixed", "fp8"])
@pytest.mark.parametrize("step", [linen_step, nnx_step])
def test_a_layer_whose_params_a_policy_names_computes_in_float32(step, policy):
    policy = policy_of(policy, keep_fp32="head/*")
    found, name = matmuls(step(policy), X, Y), policy.compute_dtype.name
    assert found == ({name: 2, "float32": 3} | TWO_IN_FP8 if policy.recipe else {name: 8, "float32": 3})
    net = Net(None) if step is linen_step else NnxNet(None)  # whatever its dtype
    assert matmuls(step(policy, net), X, Y) == found
    grads = jax.eval_shape(step(policy), X, Y)[1]
    assert grads["head"]["kernel"].dtype == jnp.float32
    assert grads["first"]["kernel"].dtype == policy.param_dtype


def test_only_if_all_its_params_are_named():
    assert matmuls(linen_step(policy_of("bf16", keep_fp32=("bias", "norm/scale"))), X, Y) == {"bfloat16": 11}


def test_a_module_that_holds_layers_is_one_too():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Net(name="kept")(x)
            return jnp.tanh(x @ x) + nn.Dense(16)(x)  # a matmul of its own, which has no params

    assert matmuls(linen_step(policy_of("bf16", keep_fp32="kept/*"), Outer()), X, Y) == {"float32": 11, "bfloat16": 6}


class Stack(nn.Module):
    """A block under a transformation of flax, which shows its layers a slice of their params."""

    how: str

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.Dense(16, dtype=jnp.float32, name="keep")(x)
                return nn.relu(nn.Dense(16, dtype=jnp.float32)(x)), None

        whole = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        if self.how == "vmap":
            return nn.vmap(Block, in_axes=(None, None), axis_size=2, **whole)(name="layers")(x, None)[0].sum(0)
        block = nn.scan(Block, length=3, **whole) if self.how == "scan" else nn.remat(Block)
        return block(name="layers")(x, None)[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("scan", {"float32": 3, "bfloat16": 3}),
        ("remat", {"float32": 3, "bfloat16": 4}),
        ("vmap", {"float32": 2, "bfloat16": 3}),
    ],
)
def test_under_transformations_of_flax(how, expected):
    assert matmuls(linen_step(policy_of("bf16", keep_fp32="keep/*"), Stack(how)), X, Y) == expected


@pytest.mark.parametrize("step", [linen_step, nnx_step])
def test_a_kept_layer_is_not_in_fp8(step):
    found = matmuls(step(policy_of("fp8", keep_fp32="middle/*")), X, Y)
    assert found == {"bfloat16": 5, "float32": 3} | IN_FP8


def test_a_kept_layer_of_linen_gets_no_scales():
    model = Net()
    for keep, expected in (((), True), ("middle/*", False)):
        with jaxmp.autocast(policy_of("fp8", keep_fp32=keep)):
            params = made(model)
        assert ("Fp8DotGeneral_0" in params["middle"]) == expected


def test_a_kept_batch_norm_still_returns_16_bits():
    norm = nn.BatchNorm(use_running_average=False, name="norm")
    variables = norm.init(jax.random.key(0), X)
    call = jaxmp.autocast(functools.partial(norm.apply, mutable=["batch_stats"]), policy_of("bf16", keep_fp32="*"))
    assert jax.eval_shape(call, variables, X)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("off", [jaxmp.autocast(enabled=False), jaxmp.no_autocast])
def test_a_region_and_a_function_without_autocast_hold_it(off):
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            head = nn.Dense(16, dtype=jnp.float32)
            x = nn.Dense(16)(x)
            if off is jaxmp.no_autocast:
                return jaxmp.no_autocast(head)(x)
            with off:
                return head(x)

    assert matmuls(linen_step(jaxmp.get_policy("bf16"), Head()), X, Y) == {"bfloat16": 2, "float32": 3}


def test_a_region_inside_keeps_the_layers_of_the_policy_around_it():
    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            with jaxmp.autocast(dtype=jnp.bfloat16):
                return nn.Dense(16, name="head")(nn.Dense(16, name="first")(x))

    run = linen_step(policy_of("fp16", keep_fp32="head/*"), Inside())
    assert matmuls(run, X, Y) == {"bfloat16": 2, "float32": 3}


def test_a_policy_by_name_keeps_the_layers_of_the_train_state():
    policy = jaxmp.get_policy("bf16", keep_fp32="head/*")
    params = made(Net())
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = jaxmp.linen.TrainState.create(apply_fn=Net().apply, params=params, tx=tx, policy=policy)

    def loss(params, x):
        return jnp.mean(Net().apply({"params": params}, x) ** 2)

    for given in (None, "bf16"):
        grad_fn = jaxmp.value_and_grad(loss, policy=given)
        found = matmuls(lambda x, grad_fn=grad_fn: grad_fn(state.params, x, opt_state=state), X)
        assert found == {"bfloat16": 8, "float32": 3}


# The table


def test_the_table_says_that_it_is_no_request():
    params = Net().init(jax.random.key(0), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jaxmp.autocast(Net().apply, jnp.bfloat16), params, X)  # nothing warns of it
        rows = jaxmp.explain_autocast(Net().apply, params, X, dtype=jnp.bfloat16).rows
        plain = jaxmp.explain_autocast(Net(None).apply, params, X, dtype=jnp.bfloat16).rows
    found = {row.module: row.group for row in rows if row.name == "dot_general"}
    assert found == dict.fromkeys(
        ("Net/first", "Net/middle", "Net/last", "Net/head"), "allow, dtype=float32 is no request"
    )
    assert {row.group for row in plain if row.name == "dot_general"} == {"allow"}
