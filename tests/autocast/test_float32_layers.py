"""float32 as the `dtype=` of a flax layer: ignored under a policy, which keeps layers in float32 by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jaxmp
from matmul_dtypes import matmuls
from policy_steps import filled, linen_step, nnx_step
from same_operations import assert_same_operations

X, Y = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
F32, BF16 = jnp.float32, jnp.bfloat16
IN_FP8 = {"float8_e4m3fn": 1, "float8_e4m3fnxfloat8_e5m2": 2}  # a layer
TWO_IN_FP8 = {dtype: 2 * count for dtype, count in IN_FP8.items()}


class Net(nn.Module):
    """A block and a head, whose dtype is handed on to every layer, as Hugging Face's models and flax's examples do."""

    dtype: Any = F32

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, 16, dtype=self.dtype)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(dense(name="first")(x))
        return dense(name="head")(nn.relu(dense(name="last")(nn.relu(dense(name="middle")(x)))))


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any = F32):
        layer = functools.partial(nnx.Linear, 16, 16, dtype=dtype)
        self.first, self.middle, self.last, self.head = (layer(rngs=nnx.Rngs(i)) for i in range(4))
        self.norm = nnx.LayerNorm(16, dtype=dtype, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.head(nnx.relu(self.last(nnx.relu(self.middle(self.norm(self.first(x)))))))


def step_of(model: Any, policy: Any, **options: Any) -> Any:
    """Params, and a function from them to loss and gradients, under a policy that has said which layers it keeps."""
    policy = jaxmp.get_policy(policy, **({"keep_fp32": ()} | options))
    make_step = linen_step if isinstance(model, nn.Module) else nnx_step
    params, _, step = make_step(model, policy, lambda y: jnp.mean((y - Y) ** 2), X)
    return params, step


# The eleven products of a model with four layers, forward and backward; and where the head is kept in float32.
EXPECTED = {
    "bf16": ({"bfloat16": 11}, {"bfloat16": 8, "float32": 3}),
    "bf16-mixed": ({"bfloat16": 11}, {"bfloat16": 8, "float32": 3}),
    "fp16": ({"float16": 11}, {"float16": 8, "float32": 3}),
    "fp8": ({"bfloat16": 5} | TWO_IN_FP8, {"bfloat16": 2, "float32": 3} | TWO_IN_FP8),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("net", "policy"), [(Net, "bf16-mixed"), (NnxNet, "bf16"), (NnxNet, "fp16"), (Net, "fp8"), (NnxNet, "fp8")]
)
def test_it_runs_as_a_layer_without_a_dtype_unless_a_policy_names_its_params(net, policy):
    everywhere, head_kept = EXPECTED[policy]
    params, step = step_of(net(), policy)
    assert matmuls(step, params) == everywhere
    assert_same_operations(step, step_of(net(None), policy)[1], params)
    for dtype in (F32, None):
        params, step = step_of(net(dtype), policy, keep_fp32="head/*")
        assert matmuls(step, params) == head_kept
        grads = jax.eval_shape(step, params)[1]
        assert grads["head"]["kernel"].dtype == F32
        assert grads["first"]["kernel"].dtype == jaxmp.get_policy(policy, keep_fp32=()).param_dtype


class Around(nn.Module):
    """A module that holds layers, and has a matmul of its own, without params."""

    @nn.compact
    def __call__(self, x):
        x = Net(name="kept")(x)
        return jnp.tanh(x @ x) + nn.Dense(16)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(16, dtype=F32, name="keep")(x)
        return nn.relu(nn.Dense(16, dtype=F32)(x)), None


class Stack(nn.Module):
    """A block under a transformation of flax, which shows its layers a slice of their params."""

    how: str

    @nn.compact
    def __call__(self, x):
        whole = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        if self.how == "vmap":
            return nn.vmap(Block, in_axes=(None, None), axis_size=2, **whole)(name="layers")(x, None)[0].sum(0)
        block = nn.scan(Block, length=3, **whole) if self.how == "scan" else nn.remat(Block)
        return block(name="layers")(x, None)[0]


class Wrapped(nn.Module):
    """Two layers; the call of the second is `call(head, x)`."""

    call: Any

    @nn.compact
    def __call__(self, x):
        return self.call(nn.Dense(16, dtype=F32, name="head"), nn.Dense(16, name="first")(x))


def switched_off(head, x):
    with jaxmp.autocast(enabled=False):
        return head(x)


def in_bfloat16(head, x):
    with jaxmp.autocast(dtype=BF16):
        return head(x)


@pytest.mark.thorough(6)
@pytest.mark.parametrize(
    ("model", "policy", "keep_fp32", "expected"),
    [
        pytest.param(lambda: Net(np.float32), "bf16", (), {"bfloat16": 11}, id="NumPy's float32"),
        pytest.param(lambda: Net("float32"), "bf16", (), {"bfloat16": 11}, id="float32 by name"),
        pytest.param(Net, "bf16", ("bias", "norm/scale"), {"bfloat16": 11}, id="not all params of a layer"),
        pytest.param(Around, "bf16", "kept/*", {"float32": 11, "bfloat16": 6}, id="a module that holds layers"),
        pytest.param(lambda: Stack("scan"), "bf16", "keep/*", {"float32": 3, "bfloat16": 3}, id="in a scan"),
        pytest.param(lambda: Stack("remat"), "bf16", "keep/*", {"float32": 3, "bfloat16": 4}, id="in a remat"),
        pytest.param(lambda: Stack("vmap"), "bf16", "keep/*", {"float32": 2, "bfloat16": 3}, id="in a vmap"),
        pytest.param(Net, "fp8", "middle/*", {"bfloat16": 5, "float32": 3} | IN_FP8, id="not in fp8"),
        pytest.param(NnxNet, "fp8", "middle/*", {"bfloat16": 5, "float32": 3} | IN_FP8, id="not in fp8, nnx"),
        pytest.param(lambda: Wrapped(switched_off), "bf16", (), {"bfloat16": 2, "float32": 3}, id="switched off"),
        pytest.param(
            lambda: Wrapped(lambda head, x: jaxmp.no_autocast(head)(x)),
            *("bf16", (), {"bfloat16": 2, "float32": 3}),
            id="no_autocast",
        ),
        pytest.param(
            lambda: Wrapped(in_bfloat16), "fp16", "head/*", {"float16": 2, "float32": 3}, id="kept in a region inside"
        ),
    ],
)
def test_which_products_run_in_which_dtype(model, policy, keep_fp32, expected):
    params, step = step_of(model(), policy, keep_fp32=keep_fp32)
    assert matmuls(step, params) == expected
    if model is Net and policy == "fp8":
        assert ["Fp8DotGeneral_0" in params[name] for name in ("middle", "last")] == [False, True]


def test_batch_norm_and_cells_return_16_bits_as_without_a_dtype():
    norm = functools.partial(nn.BatchNorm, use_running_average=False, name="norm")
    variables = filled(norm().init, jax.random.key(0), X)
    kept = jaxmp.get_policy("bf16", keep_fp32="*")
    for dtype, lists in ((None, BF16), (F32, BF16), (None, kept)):  # a BatchNorm computes in float32 anyway
        call = jaxmp.autocast(functools.partial(norm(dtype=dtype).apply, mutable=["batch_stats"]), lists)
        assert jax.eval_shape(call, variables, X)[0].dtype == BF16
    cell = nnx.SimpleCell(16, 16, rngs=nnx.Rngs(0))  # its dtype is never None
    out = jaxmp.autocast(lambda cell, c, x: cell(c, x), BF16, modules={})(cell, X, X)
    assert {x.dtype.name for x in jax.tree.leaves(out)} == {"bfloat16"}


@pytest.mark.parametrize("policy", [None, "bf16"])
def test_a_policy_by_name_keeps_the_layers_of_the_train_state(policy):
    of_state = jaxmp.get_policy("bf16", keep_fp32="head/*")
    params = filled(Net().init, jax.random.key(0), X)["params"]
    tx = jaxmp.mixed_precision(optax.sgd(0.1), of_state)
    state = jaxmp.linen.TrainState.create(apply_fn=Net().apply, params=params, tx=tx, policy=of_state)
    grad_fn = jaxmp.value_and_grad(lambda params, x: jnp.mean(Net().apply({"params": params}, x) ** 2), policy=policy)
    assert matmuls(lambda x: grad_fn(state.params, x, opt_state=state), X) == {"bfloat16": 8, "float32": 3}


def test_the_table_says_that_it_is_no_request():
    params = filled(Net().init, jax.random.key(0), X)
    jax.eval_shape(jaxmp.autocast(Net().apply, BF16), params, X)  # nothing warns of it
    rows, plain = (jaxmp.explain_autocast(net.apply, params, X, dtype=BF16).rows for net in (Net(), Net(None)))
    layers = ("Net/first", "Net/middle", "Net/last", "Net/head")
    groups = {row.module: row.group for row in rows if row.name == "dot_general"}
    assert groups == dict.fromkeys(layers, "allow, dtype=float32 is ignored")
    assert {row.group for row in plain if row.name == "dot_general"} == {"allow"}
