"""Layers that a function repeats are run once, and the program stays the same."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
import regimes
from jaxmp._src.autocast import plan_runner
from jaxmp._src.programs import jaxprs

LAYERS = 12


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def block(w, x):
    h = jax.nn.gelu(norm(x) @ w)
    return x + jax.nn.softmax(h) * jnp.sqrt(jnp.abs(h) + 1)


def model(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = block(w, x)
    return jnp.mean(x * x)


def weights_and_rows(layers=LAYERS):
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) / 3 for _ in range(layers)]
    return weights, jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)


def gradients(fn=model):
    return jax.value_and_grad(jaxmp.autocast(fn, jnp.bfloat16))


def reduced(fn, policy="bf16-mixed"):
    """Gradients of weights that are reduced in float32."""
    policy = jaxmp.get_policy(policy, reduce_dtype="float32")
    scaling = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=None).init({})

    def gradients(weights, x):
        return jaxmp.value_and_grad(fn, policy=policy)(policy.cast_to_param(weights), x, opt_state=scaling)

    return gradients


def tied(weights, x):
    """Layers whose weights are moved, shared, handed to functions, and read by several layers."""
    table, (first, *others) = jnp.concatenate(weights[:2]), weights
    x = x + table[jnp.arange(4)]
    for i, w in enumerate(others):
        with jax.named_scope(f"block_{i}"):
            h = jax.jit(lambda w, x: block(w, block(w.T, jnp.tanh(x))))(w, x + w[:1])
            x = block(w.T, h) + x @ first + jax.checkpoint(block)(w * 2.0, h)
    return jnp.mean((x @ table.T) ** 2) + jnp.mean(x @ first)


def operations(fn, *args):
    """How often each operation runs in a program; without what nothing reads."""
    closed = jax.make_jaxpr(fn)(*args)
    return live_operations(closed.jaxpr, closed.jaxpr.outvars)


def live_operations(jaxpr, wanted):
    wanted, found = {v for v in wanted if not hasattr(v, "val")}, collections.Counter()
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        wanted |= {v for v in eqn.invars if not hasattr(v, "val")}
        inner = jaxprs.functions_of(eqn)
        if inner:
            (function, _), *_ = inner
            read = [v for v, out in zip(function.outvars, eqn.outvars, strict=True) if out in wanted]
            found += live_operations(function, read)
        else:
            found[eqn.primitive.name, tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))] += 1
    return found


@pytest.fixture
def steps_run(monkeypatch):
    """A list that grows with every step that a runner runs."""
    found = []
    run = plan_runner.PlanRunner._run_step

    def noted(self, step, *args, **kwargs):
        found.append(step)
        return run(self, step, *args, **kwargs)

    monkeypatch.setattr(plan_runner.PlanRunner, "_run_step", noted)
    return found


def without_pieces(monkeypatch):
    monkeypatch.setattr(plan_runner, "_MANY", 10**9)


TRANSFORMS = {
    "autocast": jaxmp.autocast,
    "gradients": gradients,
    "vmap": lambda f: lambda w, x: jax.vmap(gradients(f), (None, 0))(w, x[None]),
    "reduced": reduced,
    "reduced, 16 bits": lambda f: reduced(f, "bf16"),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize("fn", [model, tied])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_program_is_the_same_as_without_pieces(transform, fn, monkeypatch):
    args = weights_and_rows(4)
    program = operations(TRANSFORMS[transform](fn), *args)
    with monkeypatch.context() as patch:
        without_pieces(patch)
        assert program == operations(TRANSFORMS[transform](fn), *args)


@pytest.mark.parametrize("transform", [gradients, reduced])
def test_equal_layers_run_once(transform, steps_run, monkeypatch):
    jax.make_jaxpr(transform(model))(*weights_and_rows())
    with_pieces = len(steps_run)
    steps_run.clear()
    without_pieces(monkeypatch)
    jax.make_jaxpr(transform(model))(*weights_and_rows())
    assert with_pieces < len(steps_run) / 3


def test_equal_layers_in_fp8_run_once(steps_run):
    """Their names differ, also where a chooser of operations reads the paths of modules."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))

    class Layers(nn.Module):
        n: int

        @nn.compact
        def __call__(self, x):
            for _ in range(self.n):
                x = Layer()(x)
            return jnp.mean(x**2)

    def steps_of(n):
        x, policy, module = jax.ShapeDtypeStruct((16, 16), jnp.float32), jaxmp.get_policy("fp8"), Layers(n)
        params = jax.eval_shape(jaxmp.autocast(module.init, "fp8"), jax.random.key(0), x)
        scaling = jax.eval_shape(jaxmp.mixed_precision(optax.sgd(0.1), policy).init, params)

        def gradients(params, x, opt_state):
            return jaxmp.value_and_grad(module.apply, policy=policy)(params, x, opt_state=opt_state)

        steps_run.clear()
        jax.eval_shape(gradients, params, x, scaling)
        return len(steps_run)

    assert steps_of(24) < steps_of(12) + 12


def test_layers_with_other_numbers_are_no_equal_pieces():
    def signed(weights, x):
        for i, w in enumerate(weights):
            h = norm(x) @ w
            x = x + jax.nn.softmax(h) * jnp.exp(-jnp.abs(h)) * jnp.where(h > 0, h, 0.0 if i % 2 else -0.0)
        return x.sum()

    weights, x = weights_and_rows()
    zeros = [
        str(np.asarray(v.val))
        for e in jaxprs.equations(jax.make_jaxpr(gradients(signed))(weights, x))
        for v in e.invars
        if hasattr(v, "val") and np.ndim(v.val) == 0 and float(v.val) == 0
    ]
    assert {"0.0", "-0.0"} <= set(zeros)


def test_layers_with_derivatives_of_their_own_keep_them():
    def scaled(factor):
        @jax.custom_vjp
        def same(x):
            return x * 1.0

        same.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * factor,))
        return same

    def loss(weights, x):
        for i, w in enumerate(weights):
            x = norm(x + scaled(2.0 if i % 2 else 3.0)(jnp.tanh(x @ w) * jnp.exp(-jnp.abs(x @ w))))
        return jnp.mean(x * jnp.arange(8.0)[None])

    weights, x = weights_and_rows()
    factors = {
        float(v.val)
        for e in jaxprs.equations(jax.make_jaxpr(gradients(loss))(weights, x))
        for v in e.invars
        if hasattr(v, "val") and np.ndim(v.val) == 0
    }
    assert {2.0, 3.0} <= factors


def test_eager_loop_compiles_nothing_after_its_first_step():
    weights, x = weights_and_rows(4)
    step = gradients()
    step(weights, x)
    events = regimes.compile_events()
    events.clear()  # those of other tests
    step(weights, x)
    assert [e for e in events if "backend_compile" in e] == []
