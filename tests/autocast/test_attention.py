"""Functions that look at dtypes while autocast traces them: attention kernels, Pallas, and code that asks `.dtype`."""

import functools
import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.nn import dot_product_attention  # as many models hold it
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from helpers import assert_same_program
from policy_steps import linen_step

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
X = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(32, 96)).astype(np.float32) / 6
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN's attention, which asks for a device when it is traced, on a machine without one."""
    names = jax.nn.dot_product_attention.__globals__["cudnn_dot_product_attention"].__globals__
    monkeypatch.setitem(names, "check_cudnn_version", lambda: 91000)
    monkeypatch.setitem(names, "check_compute_capability", lambda capability: True)


@pytest.fixture
def seen(monkeypatch):
    """The dtypes of the arrays of each call of jax's attention."""
    dtypes, original = [], jax.nn.dot_product_attention

    @functools.wraps(original)
    def spy(query, key, value, bias=None, mask=None, **kwargs):
        dtypes.append({x.dtype for x in (query, key, value, bias) if x is not None})
        return original(query, key, value, bias, mask, **{name: x for name, x in kwargs.items() if x is not None})

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    return dtypes


def attention_of(**options):
    """jax's attention, looked up where it is called, as most models do."""
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def by_name(q, k, v):
    return dot_product_attention(q, k, v, **FLASH)


FLASH = {"implementation": "cudnn", "is_causal": True}
by_default, flash = attention_of(), attention_of(**FLASH)


def heads_of(x):
    return jnp.split(x.reshape(*x.shape[:2], 12, 8), 3, axis=2)


def plain(w, x, attention=by_default):
    y = attention(*heads_of(x @ w))
    assert y.dtype == F32  # what follows is traced as usual
    return y.reshape(x.shape)


plain_flash = functools.partial(plain, attention=flash)


class Linen(nn.Module):
    """Layers around attention, of which fp8 takes all but the first and the last."""

    attention: Any
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        return dense(32)(dense(32)(self.attention(*heads_of(dense(96)(dense(32)(x)))).reshape(x.shape)))


INIT = Linen(by_default).init  # one that any machine can trace


def mean_square(y):
    return jnp.mean(y**2)


def function_step(policy, attention):
    """Loss and gradients of a plain function under a policy, as a function of its weights."""
    loss = lambda w, x: mean_square(plain(w, x, attention))  # noqa: E731
    if policy.recipe is not None:  # scales are for layers
        run = jax.value_and_grad(jaxmp.autocast(loss, policy, recipe=jaxmp.fp8.CurrentScaling(), filter="*"))
        return jnp.asarray(W), None, lambda w: run(w, X)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(jnp.asarray(W))
    grad_fn = jaxmp.value_and_grad(loss, policy=policy)
    return jnp.asarray(W), opt_state, lambda w: grad_fn(policy.cast_to_param(w), X, opt_state=opt_state)


def kernels(fn: Any, *args: Any) -> tuple[list[str], str]:
    """cuDNN's kernels in the program for an NVIDIA GPU, and its text."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(__cudnn\$\w+)", text), text


# cuDNN's attention


STEPS = {
    "function": lambda policy: function_step(policy, flash),
    "imported by name": lambda policy: function_step(policy, by_name),
    "linen": lambda policy: linen_step(Linen(flash), policy, mean_square, X, init=INIT),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("step", "policy"),
    [
        *(("function", "bf16"), ("function", "fp8"), ("imported by name", "fp16")),
        *(("linen", "bf16-mixed"), ("linen", "fp8")),
    ],
)
def test_flash_attention_runs_under_every_policy(cudnn, step, policy):
    policy = jaxmp.get_policy(policy, keep_fp32=())
    params, _, run = STEPS[step](policy)
    names, text = kernels(run, params)
    assert names == [FORWARD, BACKWARD]
    (operands,) = re.findall(rf"custom_call @{re.escape(FORWARD)}\(.*?\) .*? : \((.*?)\)", text)
    name = {"bfloat16": "bf16", "float16": "f16"}[policy.compute_dtype.name]
    assert set(re.findall(r"tensor<(?:\d+x)+(\w+)>", operands)) == {name}


def sharded(fn):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "over",
    [
        pytest.param(jax.jit, id="jit"),
        pytest.param(jax.checkpoint, id="remat"),
        pytest.param(lambda fn: lambda w, x: jax.grad(lambda w: fn(w, x).sum())(w), id="grad inside"),
        pytest.param(lambda fn: lambda w, x: lax.scan(lambda s, x: (s, fn(w, x)), 0, x[None])[1], id="scan"),
        pytest.param(lambda fn: lambda w, x: lax.cond(x[0, 0, 0] > 0, fn, lambda w, x: x, w, x), id="cond"),
        pytest.param(sharded, id="shard_map"),
    ],
)
def test_under_transformations_inside(cudnn, over):
    text = str(jax.make_jaxpr(jaxmp.autocast(over(plain_flash), BF16))(W, X))
    assert re.search(r"bf16\[[^\]]*\]\S* = dot_product_attention_\w+", text), text


# What it is called with


with_bias = attention_of(bias=np.zeros((1, 4, 8, 8), np.float32), implementation="cudnn")


def switched_off(w, x):
    with jaxmp.autocast(enabled=False):
        return plain(w, x)


def in_a_region(params, x):
    with jaxmp.autocast(dtype=BF16):
        return Linen(flash, dtype=None).apply(params, x)


PARAMS = jax.eval_shape(INIT, jax.random.key(0), X)
KEEPS_ALL = jaxmp.get_policy("bf16", keep_fp32="*")


@pytest.mark.parametrize(
    ("fn", "weights", "dtype"),
    [
        pytest.param(jaxmp.autocast(plain_flash, BF16), W, BF16, id="bfloat16"),
        pytest.param(jaxmp.autocast(plain_flash, F16), W, F16, id="float16"),
        # 16-bit params are traced in float32, too
        pytest.param(jaxmp.autocast(plain_flash, BF16), W.astype(BF16), BF16, id="bfloat16 params"),
        pytest.param(in_a_region, PARAMS, BF16, id="a region"),
        pytest.param(jaxmp.autocast(functools.partial(plain, attention=with_bias), BF16), W, BF16, id="with a bias"),
        # where autocast does not apply
        pytest.param(jaxmp.autocast(switched_off, BF16), W, F32, id="switched off"),
        pytest.param(jaxmp.autocast(jaxmp.no_autocast(plain), BF16), W, F32, id="no_autocast"),
        pytest.param(jaxmp.autocast(plain, F32), W, F32, id="autocast to float32"),
        pytest.param(jaxmp.autocast(plain, BF16, force_fp32=("dot_general",)), W, F32, id="matmuls in float32"),
        pytest.param(jaxmp.autocast(Linen(by_default).apply, BF16, modules={"*": F32}), PARAMS, F32, id="modules="),
        pytest.param(jaxmp.autocast(Linen(by_default).apply, KEEPS_ALL), PARAMS, F32, id="keep_fp32"),
        pytest.param(plain, W, F32, id="no autocast"),
    ],
)
def test_what_it_gets_and_what_follows_are_as_in_code_cast_by_hand(cudnn, seen, fn, weights, dtype):
    out = jax.eval_shape(lambda *args: fn(*args), weights, X)  # a new function: jax keeps the traces of those it knows
    assert seen == [{dtype}] and out.dtype == dtype


def test_without_an_implementation_jax_picks_the_one_for_16_bits(cudnn, monkeypatch):
    """As a later jax may: today it picks XLA's."""
    original = jax.nn.dot_product_attention

    def picks_cudnn(query, key, value, bias=None, mask=None, *, implementation=None, is_causal=False):
        if implementation is None and query.dtype.itemsize == 2:
            implementation = "cudnn"
        return original(query, key, value, bias, mask, implementation=implementation, is_causal=is_causal)

    assert kernels(jaxmp.autocast(plain, BF16), W, X)[0] == []
    monkeypatch.setattr(jax.nn, "dot_product_attention", picks_cudnn)
    for attention, expected in ((by_default, [FORWARD]), (attention_of(implementation="xla"), [])):
        fn = functools.partial(plain, attention=attention)
        assert kernels(jaxmp.autocast(fn, BF16), W, X)[0] == expected
    layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))  # flax's function calls jax's
    assert kernels(jaxmp.autocast(lambda x: layer(x), F16), X)[0] == [FORWARD]


def test_it_is_the_function_called_by_hand(monkeypatch):
    """The same program, but for casts to float32 and back, which XLA removes."""
    kernel = jax.custom_vjp(lambda q, k, v: q * 2 + k - v)
    kernel.defvjp(lambda q, k, v: (kernel(q, k, v), None), lambda _, g: (g * 2, g, -g))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, key, value: kernel(query, key, value))

    def by_hand(w, x):
        return jax.nn.dot_product_attention(*heads_of(x.astype(BF16) @ w.astype(BF16))).reshape(x.shape)

    def out_and_gradient(fn):
        return jax.jit(lambda w: (fn(w, X), jax.grad(lambda w: jnp.sum(fn(w, X).astype(F32) ** 2))(w)))(W)

    out, grad = out_and_gradient(jaxmp.autocast(plain, BF16))
    assert (out.dtype, grad.dtype) == (BF16, F32)
    assert_same_program((out, grad), out_and_gradient(by_hand))


def test_jax_has_its_function_back_afterwards():
    def refused(w, x):
        raise ValueError("no")

    original = jax.nn.dot_product_attention
    assert dot_product_attention is original
    nested = jaxmp.autocast(lambda w, x: jaxmp.autocast(plain, F16)(w, x) + plain(w, x), BF16)
    jax.eval_shape(nested, W, X)
    with pytest.raises(ValueError, match="no"):
        jaxmp.autocast(refused, BF16)(W, X)
    assert jax.nn.dot_product_attention is original and dot_product_attention is original


def test_traces_of_several_threads(cudnn, seen):
    inside, done = threading.Event(), threading.Event()

    def waits(w, x):
        inside.set()
        assert done.wait(60)
        return plain_flash(w, x)

    original = jax.nn.dot_product_attention
    thread = threading.Thread(target=lambda: jax.eval_shape(jaxmp.autocast(waits, BF16), W, X))
    thread.start()
    assert inside.wait(60)
    jax.eval_shape(lambda w, x: plain(w, x), W, X)  # no autocast here
    jax.eval_shape(jaxmp.autocast(plain_flash, F16), W, X)
    done.set()
    thread.join()
    assert seen == [{F32}, {F16}, {BF16}]
    assert jax.nn.dot_product_attention is original


# Functions that a user names


def doubled_in_16_bits(x):
    """A Pallas kernel for 16-bit arrays."""
    assert x.dtype.itemsize == 2

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled = jax.custom_vjp(doubled_in_16_bits)
doubled.defvjp(lambda x: (doubled_in_16_bits(x), None), lambda _, g: (doubled_in_16_bits(g),))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("dtype", "params"), [(F16, F32), (BF16, BF16)])
def test_a_kernel_for_16_bits(dtype, params):
    kernel = jaxmp.no_autocast(doubled, cast_inputs=True)
    fn = lambda w, x: jnp.sum(kernel(x @ w) ** 2)  # noqa: E731
    by_hand = lambda w, x: jnp.sum(doubled(x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2)  # noqa: E731
    runs = (by_hand, jaxmp.autocast(fn, dtype), jax.jit(jaxmp.autocast(jax.jit(fn), dtype)))
    expected, *grads = jax.jit(lambda w: [jax.grad(run)(w, X) for run in runs])(W.astype(params))
    for grad in grads:
        assert grad.dtype == params
        np.testing.assert_allclose(np.asarray(grad, F32), np.asarray(expected, F32), rtol=2e-2, atol=0.5)


def test_what_it_returns():
    dtypes = []

    @functools.partial(jaxmp.no_autocast, cast_inputs=True)
    def kernel(x, factor, mask, *, name):
        dtypes.append((x.dtype, mask.dtype))
        return x * factor, jnp.sum(x.astype(F32)), mask, name

    def fn(x):
        y, total, mask, name = kernel(x, 2.0, x > 0, name="kernel")
        assert name == "kernel" and total.dtype == F32 and mask.dtype == bool
        return y, total

    with jaxmp.autocast(dtype=BF16):
        in_region = jax.eval_shape(fn, X)
        jax.eval_shape(nn.Dense(2).init, jax.random.key(0), X)  # the region reaches something
    outs = (jax.eval_shape(jaxmp.autocast(fn, F16), X), jax.eval_shape(lambda x: fn(x), X), in_region)
    assert [(y.dtype, total.dtype) for y, total in outs] == [(F16, F32), (F32, F32), (BF16, F32)]
    assert dtypes == [(BF16, bool), (F16, bool), (F32, bool)]


def test_a_function_in_an_object_is_wrapped_by_hand(cudnn):
    held = functools.partial(dot_product_attention, **FLASH)
    with pytest.raises(NotImplementedError, match="got float32"):
        jax.eval_shape(jaxmp.autocast(lambda w, x: plain(w, x, held), BF16), W, X)
    wrapped = jaxmp.no_autocast(held, cast_inputs=True)
    assert jax.eval_shape(jaxmp.autocast(lambda w, x: plain(w, x, wrapped), BF16), W, X).dtype == BF16
