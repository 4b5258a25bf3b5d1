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
from matmul_dtypes import matmuls

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
    """The dtypes that jax's attention is called with."""
    found, original = [], jax.nn.dot_product_attention

    @functools.wraps(original)
    def spy(query, key, value, bias=None, mask=None, **kwargs):
        found.append(tuple(None if x is None else x.dtype for x in (query, key, value, bias)))
        return original(query, key, value, bias, mask, **{name: x for name, x in kwargs.items() if x is not None})

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    return found


def heads_of(x):
    q, k, v = jnp.split(x.reshape(*x.shape[:2], 12, 8), 3, axis=2)
    return q, k, v


def plain(w, x, attention=None, **options):
    return (attention or jax.nn.dot_product_attention)(*heads_of(x @ w), **options).reshape(x.shape)


class Linen(nn.Module):
    """Layers around attention, of which fp8 takes all but the first and the last."""

    options: Any = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        y = jax.nn.dot_product_attention(*heads_of(dense(96)(dense(32)(x))), **dict(self.options or ()))
        return dense(32)(dense(32)(y.reshape(x.shape)))


class Nnx(nnx.Module):
    def __init__(self, options: Any = ()):
        self.layers = nnx.List([nnx.Linear(32, n, rngs=nnx.Rngs(n)) for n in (32, 96, 32, 32)])
        self.options = options

    def __call__(self, x):
        first, qkv, out, last = self.layers
        return last(out(jax.nn.dot_product_attention(*heads_of(qkv(first(x))), **dict(self.options)).reshape(x.shape)))


FLASH = (("implementation", "cudnn"), ("is_causal", True))


def of_function(policy: jaxmp.Policy, attention: Any) -> Any:
    """Loss and gradients of a plain function under a policy, as a function of a batch."""
    loss = lambda w, x: jnp.mean(plain(w, x, attention, **dict(FLASH)) ** 2)  # noqa: E731
    if policy.recipe is not None:  # scales are for layers
        run = jax.value_and_grad(jaxmp.autocast(loss, policy, recipe=jaxmp.fp8.CurrentScaling(), filter="*"))
        return lambda x: run(jnp.asarray(W), x)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(jnp.asarray(W))
    params = policy.cast_to_param(jnp.asarray(W))
    return lambda x: jaxmp.value_and_grad(loss, policy=policy)(params, x, opt_state=opt_state)


def of_linen(policy: jaxmp.Policy) -> Any:
    model = Linen(FLASH)
    with jaxmp.autocast(policy):
        params = jax.jit(Linen().init)(jax.random.key(0), X)["params"]
    opt_state, low = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(params), policy.cast_to_param(params)
    grad_fn = jaxmp.value_and_grad(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), policy=policy)
    return lambda x: grad_fn(low, x, opt_state=opt_state)


def of_nnx(policy: jaxmp.Policy) -> Any:
    model = Nnx(FLASH)
    if policy.recipe is not None:
        jaxmp.nnx.to_fp8(model, policy.recipe)
    optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), policy), wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    graphdef, state = nnx.split(model)
    grad_fn = jaxmp.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), policy=policy)

    def step(x):
        loss, grads = grad_fn(nnx.merge(graphdef, state), x, opt_state=optimizer.opt_state)
        return loss, nnx.as_pure(grads)

    return step


STEPS = {
    "function": functools.partial(of_function, attention=None),
    "imported by name": functools.partial(of_function, attention=lambda *a, **k: dot_product_attention(*a, **k)),
    "linen": of_linen,
    "nnx": of_nnx,
}


def lowered(fn: Any, *args: Any) -> str:
    """The program for an NVIDIA GPU."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    return re.findall(r"custom_call @(__cudnn\$\w+)", text)


# cuDNN's attention


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-mixed", "fp8"])
def test_flash_attention_runs_under_every_policy(cudnn, policy, kind):
    policy = jaxmp.get_policy(policy, keep_fp32=())
    text = lowered(STEPS[kind](policy), X)
    assert kernels(text) == [FORWARD, BACKWARD]
    name = {"bfloat16": "bf16", "float16": "f16"}[policy.compute_dtype.name]
    (operands,) = re.findall(rf"custom_call @{re.escape(FORWARD)}\(.*?\) .*? : \((.*?)\)", text)
    assert set(re.findall(r"tensor<(?:\d+x)+(\w+)>", operands)) == {name}


REGIMES = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "grad inside": lambda fn: lambda w, x: jax.grad(lambda w: fn(w, x).sum())(w),
    "scan": lambda fn: lambda w, x: lax.scan(lambda s, x: (s, fn(w, x)), 0, x[None])[1],
    "cond": lambda fn: lambda w, x: lax.cond(x[0, 0, 0] > 0, fn, lambda w, x: x, w, x),
    "shard_map": lambda fn: jax.shard_map(
        fn,
        mesh=jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(P(), P("i")),
        out_specs=P("i"),
    ),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("regime", REGIMES)
def test_under_transformations_inside(cudnn, regime):
    fn = REGIMES[regime](functools.partial(plain, **dict(FLASH)))
    found = jax.make_jaxpr(jaxmp.autocast(fn, jnp.bfloat16))(jnp.asarray(W), X)
    assert re.search(r"bf16\[.*\] = dot_product_attention_\w+", str(found)) or regime == "shard_map"
    assert "bf16" in str(found) and "dot_product_attention" in str(found)


def test_a_bias_has_the_dtype_of_the_query(cudnn, seen):
    fn = functools.partial(plain, bias=jnp.zeros((1, 4, 8, 8)), implementation="cudnn")
    jax.eval_shape(jaxmp.autocast(fn, jnp.bfloat16), W, X)
    assert seen == [(BF16,) * 4]


# What it is called with


def test_a_kernel_gets_what_it_would_by_hand(cudnn, seen):
    params = jax.eval_shape(Linen().init, jax.random.key(0), X)
    seen.clear()
    fn = functools.partial(plain, **dict(FLASH))
    for dtype in (BF16, F16):
        jax.eval_shape(jaxmp.autocast(fn, dtype), W, X)
        jax.eval_shape(jaxmp.autocast(fn, dtype), W.astype(dtype), X)  # 16-bit params are traced in float32, too
        with jaxmp.autocast(dtype=dtype):
            jax.eval_shape(Linen(FLASH, dtype=None).apply, params, X)
    assert [dtypes[:3] for dtypes in seen] == [(BF16,) * 3] * 3 + [(F16,) * 3] * 3


def test_without_an_implementation_jax_picks_the_one_for_16_bits(cudnn, monkeypatch):
    """As a later jax may: today it picks XLA's."""
    original = jax.nn.dot_product_attention

    def dot_product_attention(query, key, value, bias=None, mask=None, *, implementation=None, is_causal=False):
        if implementation is None and query.dtype.itemsize == 2:
            implementation = "cudnn"
        return original(query, key, value, bias, mask, implementation=implementation, is_causal=is_causal)

    assert kernels(lowered(jaxmp.autocast(plain, BF16), W, X)) == []
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    for options, expected in (({}, [FORWARD]), ({"implementation": "xla"}, [])):
        assert kernels(lowered(jaxmp.autocast(functools.partial(plain, **options), BF16), W, X)) == expected
    attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))  # flax's function calls jax's
    assert kernels(lowered(jaxmp.autocast(lambda x: attention(x), F16), X)) == [FORWARD]


def test_it_stays_in_float32_where_autocast_does_not_apply(seen):
    def off(w, x):
        with jaxmp.autocast(enabled=False):
            return plain(w, x)

    params = Linen().init(jax.random.key(0), X)
    seen.clear()
    for run, args in (
        (jaxmp.autocast(off, BF16), (W, X)),
        (jaxmp.autocast(jaxmp.no_autocast(plain), BF16), (W, X)),
        (jaxmp.autocast(plain, F32), (W, X)),
        (jaxmp.autocast(plain, BF16, force_fp32=("dot_general",)), (W, X)),
        (jaxmp.autocast(Linen().apply, BF16, modules={"*": jnp.float32}), (params, X)),
        (jaxmp.autocast(Linen().apply, jaxmp.get_policy("bf16", keep_fp32="*")), (params, X)),
        (plain, (W, X)),
    ):
        jax.eval_shape(lambda *args, run=run: run(*args), *args)  # jax keeps the trace of `plain` of another test
        assert seen.pop()[:3] == (F32,) * 3 and not seen


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_without_a_kernel_its_matmuls_run_by_the_lists(dtype):
    assert matmuls(jaxmp.autocast(plain, dtype), W, X) == {dtype.name: 3}
    out = jax.jit(jaxmp.autocast(plain, dtype))(W, X)  # the algorithm that jax names for float16 is not on a CPU
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(F32), jax.jit(plain)(W, X), atol=0.05)


def test_it_is_the_function_called_by_hand(monkeypatch):
    """The same program, but for casts to float32 and back, which XLA removes."""

    @jax.custom_vjp
    def kernel(q, k, v):
        return q * 2 + k - v

    kernel.defvjp(lambda q, k, v: (kernel(q, k, v), None), lambda _, g: (g * 2, g, -g))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, key, value: kernel(query, key, value))

    def by_hand(w, x):
        q, k, v = heads_of(x.astype(BF16) @ w.astype(BF16))
        return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)

    run, hand = (jax.jit(fn) for fn in (jaxmp.autocast(plain, BF16), by_hand))
    out = run(jnp.asarray(W), X)
    assert out.dtype == BF16
    assert_same_program(out, hand(jnp.asarray(W), X))
    loss = lambda fn: lambda w, x: jnp.sum(fn(w, x).astype(F32) ** 2)  # noqa: E731
    grads, expected = (jax.jit(jax.grad(loss(fn)))(jnp.asarray(W), X) for fn in (jaxmp.autocast(plain, BF16), by_hand))
    assert grads.dtype == F32
    assert_same_program(grads, expected)


def test_what_follows_is_traced_as_usual(cudnn):
    def fn(w, x):
        y = plain(w, x, **dict(FLASH))
        assert y.dtype == F32  # as all of this function
        return x @ w[:, :32] + y

    assert jax.eval_shape(jaxmp.autocast(fn, BF16), W, X).dtype == BF16


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
        return plain(w, x, **dict(FLASH))

    original = jax.nn.dot_product_attention
    thread = threading.Thread(target=lambda: jax.eval_shape(jaxmp.autocast(waits, BF16), W, X))
    thread.start()
    assert inside.wait(60)
    jax.eval_shape(functools.partial(plain, scale=1.0), W, X)  # no autocast here
    jax.eval_shape(jaxmp.autocast(functools.partial(plain, **dict(FLASH)), F16), W, X)
    done.set()
    thread.join()
    assert [dtypes[0] for dtypes in seen] == [F32, F16, BF16]
    assert jax.nn.dot_product_attention is original


# Functions that a user names


def doubled_in_16_bits(x):
    """A Pallas kernel for 16-bit arrays."""
    assert x.dtype.itemsize == 2

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@jax.custom_vjp
def doubled(x):
    return doubled_in_16_bits(x)


doubled.defvjp(lambda x: (doubled_in_16_bits(x), None), lambda _, g: (doubled_in_16_bits(g),))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("params", [F32, BF16])
def test_a_kernel_for_16_bits(dtype, params):
    kernel = jaxmp.no_autocast(doubled, cast_inputs=True)

    def fn(w, x):
        return jnp.sum(kernel(x @ w) ** 2)

    def by_hand(w, x):
        return jnp.sum(doubled(x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2)

    w = jnp.asarray(W, params)
    for run in (jaxmp.autocast(fn, dtype), jax.jit(jaxmp.autocast(jax.jit(fn), dtype))):
        grads = jax.jit(jax.grad(run))(w, X)
        expected = jax.jit(jax.grad(by_hand))(w, X)
        assert grads.dtype == params
        np.testing.assert_allclose(np.asarray(grads, F32), np.asarray(expected, F32), rtol=2e-2, atol=0.5)


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

    y, total = jax.eval_shape(jaxmp.autocast(fn, F16), X)
    assert (y.dtype, total.dtype) == (F16, F32)
    y, total = jax.eval_shape(fn, X)  # without autocast: as it is
    assert (y.dtype, total.dtype) == (F32, F32)
    with jaxmp.autocast(dtype=BF16):
        y, _ = jax.eval_shape(fn, X)
        jax.eval_shape(nn.Dense(2).init, jax.random.key(0), X)
    assert y.dtype == BF16
    assert dtypes == [(F16, bool), (F32, bool), (BF16, bool)]


def test_a_function_in_an_object_is_wrapped_by_hand(cudnn):
    held = functools.partial(dot_product_attention, **dict(FLASH))
    with pytest.raises(NotImplementedError, match="got float32"):
        jax.eval_shape(jaxmp.autocast(lambda w, x: plain(w, x, held), BF16), W, X)
    wrapped = jaxmp.no_autocast(held, cast_inputs=True)
    assert jax.eval_shape(jaxmp.autocast(lambda w, x: plain(w, x, wrapped), BF16), W, X).dtype == BF16
