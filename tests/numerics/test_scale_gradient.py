"""`scale_gradient`: the identity forward, a factor backward, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved
from regimes import AXIS, DEVICES, mesh_of

F16, F32 = jnp.float16, jnp.float32
# Small multiples of 1/4: all sums and products below are exact in float32, in whatever order XLA makes them.
X = (np.arange(12, dtype=np.float32).reshape(4, 3) - 5) / 4
W = (np.arange(9, dtype=np.float32).reshape(3, 3) - 4) / 4


def block(w, x, s=None):
    if s is not None:
        w, x = jaxmp.scale_gradient((w, x), 1 / s)
    y = (x @ w) ** 2
    return y if s is None else jaxmp.scale_gradient(y, s)


def loss(f):
    return lambda w, x: jnp.sum(f(w, x).astype(F32) ** 2)


@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda d: jnp.dtype(d).name)
def test_forward_is_the_identity_and_backward_the_factor(dtype):
    x = jnp.asarray(X, dtype)
    y, back = jax.vjp(lambda x: jaxmp.scale_gradient(x, 0.3), x)
    assert_moved(y, x)
    (got,) = back(x)
    assert_exact(got, jnp.asarray(np.asarray(x, np.float32) * np.float32(0.3)).astype(dtype))  # rounded once


def test_an_overflow_is_inf_and_an_underflow_of_the_factor_is_not_one_of_the_product():
    back = jax.vjp(lambda x: jaxmp.scale_gradient(x, 2.0**20), jnp.zeros(3, F16))[1]
    assert_exact(back(jnp.array([1.0, -1.0, 2.0**-24], F16))[0], jnp.array([jnp.inf, -jnp.inf, 2.0**-4], F16))
    back = jax.vjp(lambda x: jaxmp.scale_gradient(x, 2.0**-30), jnp.zeros(1, F16))[1]  # 0 in float16
    assert_exact(back(jnp.array([2.0**10], F16))[0], jnp.array([2.0**-20], F16))


WRAPPED = {
    "plain": lambda f: f,
    "vmap": lambda f: lambda w, x: jax.vmap(lambda row: f(w, row[None])[0])(x),
    "scan": lambda f: lambda w, x: jax.lax.map(lambda row: f(w, row[None])[0], x),
    "remat": jax.checkpoint,
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_pair_of_powers_of_two_round_a_block_changes_no_bit(wrap):
    """A number, and a traced one."""

    def scaled(s):
        return jax.grad(loss(wrap(lambda w, x: block(w, x, s))), (0, 1))

    run = jax.jit(lambda w, x, s: (scaled(1024.0)(w, x), scaled(s)(w, x), jax.grad(loss(wrap(block)), (0, 1))(w, x)))
    by_number, by_traced, plain = run(W, X, 1024.0)
    assert_exact(by_number, plain)
    assert_exact(by_traced, plain)


def test_all_else_in_the_tree_is_left_alone():
    key = jax.random.key(0)
    tree = {"w": jnp.ones(2, F16), "n": jnp.arange(3), "key": key, "flag": True, "x": 1.5, "none": None}
    same = jaxmp.scale_gradient(tree, 4.0)
    assert same["n"] is tree["n"] and same["key"] is key and same["flag"] is True and same["x"] == 1.5
    grads = jax.grad(lambda t: jnp.sum(jaxmp.scale_gradient(t, 4.0)["w"]), allow_int=True)(
        {"w": tree["w"], "n": tree["n"]}
    )
    assert_exact(grads["w"], jnp.full(2, 4.0, F16))


def test_no_gradient_flows_to_the_factor():
    got = jax.grad(lambda s: jnp.sum(jaxmp.scale_gradient(jnp.ones(2), s)))(jnp.float32(2.0))
    assert_exact(got, jnp.float32(0.0))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_it_works_where_axes_are_bound(how):
    x = jnp.asarray(np.tile(X, (DEVICES, 1)), F16)
    w, s = jnp.asarray(np.sign(W), F16), jnp.float32(256.0)  # all sums and products are exact in float16, too

    def step(w, x, s):
        w = jax.lax.pcast(w, AXIS, to="varying") if how == "shard_map" else w
        grads = jax.grad(loss(lambda w, x: block(w, x, s)), (0, 1))(w, x)
        return jax.lax.psum(grads[0].astype(F32), AXIS), grads[1]

    expected = jax.jit(jax.grad(loss(block), (0, 1)))(w, jnp.asarray(X, F16))
    if how == "pmap":
        mapped = jax.pmap(step, AXIS, in_axes=(None, 0, None), devices=jax.devices()[:DEVICES])
        dw, dx = mapped(w, x.reshape(DEVICES, 4, 3), s)
        dw, dx = dw[0], dx.reshape(-1, 3)
    else:
        spread = jax.shard_map(
            step, mesh=mesh_of(), in_specs=(P(), P(AXIS), P()), out_specs=(P(), P(AXIS)), check_vma=how == "shard_map"
        )
        dw, dx = jax.jit(spread)(w, x, s)
    assert_exact(np.asarray(dw), np.asarray(expected[0], np.float32) * DEVICES)
    assert_exact(np.asarray(dx), np.tile(np.asarray(expected[1]), (DEVICES, 1)))


def test_errors_say_the_rule_and_the_fix():
    with pytest.raises(ValueError, match="by a finite number; got s=inf. To stop a gradient use jax.lax.stop_gradient"):
        jaxmp.scale_gradient(jnp.ones(1), float("inf"))
    with pytest.raises(ValueError, match=r"by one number; got s of shape \(2,\)."):
        jaxmp.scale_gradient(jnp.ones(2), jnp.ones(2))
