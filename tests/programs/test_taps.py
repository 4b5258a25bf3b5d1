"""The walk with hooks: which values it sees, under which paths, and that it changes no bit of what it runs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import helpers
from jaxmp import autocast
from jaxmp._src.programs import taps
from policy_steps import filled
from same_operations import assert_same_operations


def amax(path, x):
    del path
    return jnp.max(jnp.abs(x))


def itself(path, x):
    del path
    return x


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(8)(nn.LayerNorm()(x))
        return x + nn.Dense(4)(jax.nn.gelu(h)), None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, _ = Mlp(name="first")(x)
        with jax.named_scope("middle"):
            x = x * 3
        return self.head(x)

    @nn.compact
    def head(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=True)(x))


class Stack(nn.Module):
    rematted: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Mlp, policy=jax.checkpoint_policies.nothing_saveable) if self.rematted else Mlp
        x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="layers")(
            x, None
        )
        return nn.Dense(2)(x)


X = np.random.default_rng(0).standard_normal((3, 4), np.float32)


@functools.cache
def linen(model):
    params = filled(model.init, jax.random.key(1), X)["params"]

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    return params, loss_fn


def test_paths_and_values_of_linen_modules_are_those_of_capture_intermediates():
    params, loss_fn = linen(Net())

    def captured(params, x):
        _, state = Net().apply({"params": params}, x, capture_intermediates=True, mutable=["intermediates"])
        expected = state["intermediates"]
        parts = ("Dense_0", "Dense_1", "LayerNorm_0")
        values = {f"first/{name}": expected["first"][name]["__call__"][0] for name in parts}
        first = expected["first"]["__call__"][0][0]
        return values | {"Dense_0": expected["Dense_0"]["__call__"][0], "first": first, "middle": first * 3}

    def seen(params, x):
        return taps.collect(loss_fn, itself)(params, x)[1]

    names = ["Dense_0", "first", "first/Dense_0", "first/Dense_1", "first/LayerNorm_0", "middle"]
    assert sorted(jax.eval_shape(seen, params, X)) == names
    assert_same_operations(seen, captured, params, X)


def with_gradients(loss_fn):
    return jax.value_and_grad(taps.collect(loss_fn, amax), has_aux=True)


def test_gradients_are_the_same():
    params, loss_fn = linen(Net())

    def tapped(params, x):
        (loss, _), grads = with_gradients(loss_fn)(params, x)
        return loss, grads

    assert_same_operations(tapped, jax.value_and_grad(loss_fn), params, X)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("rematted", [False, True], ids=["plain", "remat"])
def test_scan_over_layers_gives_one_entry_for_each(rematted):
    """Here the taps are outputs of the loops, so that the operations are others."""
    params, loss_fn = linen(Stack(rematted))

    def amaxes(params, x):
        by_layer = []
        for i in range(3):
            x, _ = Mlp().apply({"params": jax.tree.map(lambda p, i=i: p[i], params["layers"])}, x)
            by_layer.append(amax("", x))
        return jnp.stack(by_layer)

    @jax.jit
    def run(params, x):
        return jax.value_and_grad(loss_fn)(params, x), amaxes(params, x), with_gradients(loss_fn)(params, x)

    expected, by_layer, ((loss, seen), grads) = run(params, X)
    helpers.assert_close((loss, grads), expected, rtol=1e-5, atol=1e-7)
    assert seen["layers"].shape == seen["layers/Dense_1"].shape == (3,)
    helpers.assert_close(seen["layers"], by_layer, rtol=1e-5)
    assert seen["Dense_0"].shape == ()


def test_remat_stays_remat_with_its_policy():
    def block(w, x):
        with jax.named_scope("block"):
            return checkpoint_name(jnp.sin(x @ w), "kept")

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    fn = jax.checkpoint(block, policy=policy, prevent_cse=False)
    closed = jax.make_jaxpr(taps.collect(fn, amax))(jnp.ones((4, 4)), X)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name in ("remat2", "checkpoint"))
    assert eqn.params["policy"] is policy and eqn.params["prevent_cse"] is False
    assert len(eqn.outvars) == 2


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.dense(x)))


def test_nnx_modules_have_the_paths_of_their_params_and_keep_their_state():
    def loss_fn(model, x):
        return jnp.sum(model(x) ** 2)

    graphdef, state = nnx.split(nnx.eval_shape(lambda: nnx.Sequential(*(NnxBlock(nnx.Rngs(0)) for _ in range(2)))))
    paths = [f"layers/{i}{part}" for i in range(2) for part in ("", "/dense", "/norm")]

    def run(loss_and_taps, state):
        """The loss, the gradients, the statistics after the call, and the largest number of the output."""
        model = nnx.merge(graphdef, state)
        (loss, seen), grads = nnx.value_and_grad(loss_and_taps, has_aux=True)(model, X)
        assert sorted(seen) == paths
        return loss, nnx.as_pure(grads), nnx.as_pure(nnx.state(model)), seen["layers/1"]

    def by_hand(model, x):
        y = model(x)
        return jnp.sum(y**2), dict.fromkeys(paths, amax("", y))

    assert_same_operations(functools.partial(run, taps.collect(loss_fn, amax)), functools.partial(run, by_hand), state)


def scoped(w, x):
    with jax.named_scope("outer"):
        with jax.named_scope("inner"):
            y = jnp.dot(x, w)
        jnp.sum(y)  # used by nothing
        y = jax.jit(lambda y: jax.named_scope("jitted")(jax.nn.silu)(y) + 1)(y)
    return jnp.sum(y)


def test_named_scopes_jit_and_vmap():
    w = jnp.ones((4, 2))
    over = jax.vmap(taps.collect(scoped, itself), in_axes=(None, 0))
    under = taps.collect(lambda w, x: jax.vmap(scoped, in_axes=(None, 0))(w, x), itself)
    plain = taps.collect(scoped, itself)
    (_, seen), (_, each), (_, inside) = jax.jit(lambda w, x: (plain(w, x), over(w, x), under(w, x)))(w, X)
    helpers.assert_close(seen["outer/inner"], X @ np.asarray(w), rtol=1e-6)
    helpers.assert_close(seen["outer"], np.asarray(seen["outer/jitted"]) + 1, rtol=1e-6)
    assert sorted(seen) == ["outer", "outer/inner", "outer/jitted"]
    helpers.assert_close(each, seen, rtol=1e-6)
    helpers.assert_close(inside, seen, rtol=1e-6)


def test_a_gradient_inside_is_seen_once_and_forwards():
    w = jnp.ones((4, 2))
    tapped = taps.collect(jax.value_and_grad(scoped), itself)
    assert_same_operations(lambda w: tapped(w, X)[0], lambda w: jax.value_and_grad(scoped)(w, X), w)

    def outer(fn):
        return lambda w: {k: x for k, x in fn(w, X)[1].items() if k in ("outer", "outer/inner")}

    assert_same_operations(outer(tapped), outer(taps.collect(scoped, itself)), w)


def test_branches_loops_and_own_derivatives_are_one_operation():
    @jax.custom_vjp
    def double(x):
        with jax.named_scope("hidden"):
            return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (7 * g,))

    def fn(x):
        with jax.named_scope("a"):
            x = double(x)
        with jax.named_scope("b"):
            return jax.lax.cond(x > 0, jax.named_scope("hidden")(jnp.sin), jnp.cos, x)

    tapped = taps.collect(fn, itself)
    (out, seen), grad = jax.jit(jax.value_and_grad(tapped, has_aux=True))(jnp.float32(1.0))
    assert sorted(seen) == ["a", "b"] and float(seen["a"]) == 2 and float(out) == float(seen["b"])
    assert float(grad) == pytest.approx(7 * np.cos(2.0), rel=1e-6)


def test_over_and_under_autocast():
    params, loss_fn = linen(Net())
    _, under = jax.eval_shape(taps.collect(autocast(loss_fn, jnp.bfloat16), itself), params, X)
    _, over = jax.eval_shape(autocast(taps.collect(loss_fn, itself), jnp.bfloat16), params, X)
    assert under["first/Dense_1"].dtype == over["first/Dense_1"].dtype == jnp.bfloat16
    assert sorted(under) == sorted(over)


def test_regions_reach_into_jits_that_taps_enter():
    def fn(w, x):
        with autocast(enabled=False):
            with jax.named_scope("head"):
                return jax.jit(lambda x: jax.named_call(lambda x: x @ w, name="dense")(x))(x)

    out, seen = jax.eval_shape(autocast(taps.collect(fn, itself)), jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert {x.dtype.name for x in (out, *seen.values())} == {"float32"}
