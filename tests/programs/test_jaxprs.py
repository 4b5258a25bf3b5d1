"""The vocabulary of primitives: jaxprs are read alike by everything that walks through them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from helpers import assert_within_ulps
from jaxmp._src.programs import frozen_leaves, jaxprs, windows

X = jnp.ones((4, 4))


@jax.custom_jvp
def zero_like(x):
    return 0.0 * jnp.ones_like(x)


zero_like.defjvp(lambda primals, tangents: (zero_like(*primals), tangents[0]))


@jax.custom_vjp
def double(x):
    return 2.0 * x


double.defvjp(lambda x: (double(x), None), lambda _, g: (2.0 * g,))


def equations(fn, *args):
    return jax.make_jaxpr(fn)(*args).eqns


CALLS = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": double,
}
CONTROL_FLOW = {
    "cond": lambda x: lax.cond(True, jnp.sin, jnp.cos, x),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 0, jnp.sin, x),
    "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", CALLS | CONTROL_FLOW)
def test_a_program_is_run_again(name):
    fn = (CALLS | CONTROL_FLOW)[name]
    program, seen = jax.make_jaxpr(lambda x: fn(x) + np.float32(1))(X), []

    def equation(i, eqn, operands):
        seen.append((i, eqn.primitive.name))
        return jaxprs.run_as_traced(eqn, operands)

    for frees in (False, True):
        (y,) = jaxprs.evaluate(jaxprs.open_jaxpr(program), [X], equation, frees=frees)
        assert_within_ulps(y, fn(X) + 1, 2)
    assert seen == [(i, eqn.primitive.name) for i, eqn in enumerate(program.jaxpr.eqns)] * 2
    names = jaxprs.evaluate(
        jaxprs.open_jaxpr(program),
        ["x"],
        lambda i, eqn, operands: [f"{eqn.primitive.name}({', '.join(operands)})"] * len(eqn.outvars),
        lambda x, aval: "constant",
        lambda x, aval: "number",
    )
    assert names == [n for n in names if n.startswith("add(") and ("number" in n or "constant" in n)]


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.add, (X, X), True),
        (lambda x: lax.clamp(0.0, x, 1.0), (X,), True),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,), True),
        (lambda x: lax.bitcast_convert_type(x, jnp.int16), (X,), False),
        (lambda x: lax.bitcast_convert_type(x, jnp.int16), (X[0, 0],), False),
        (lambda x: lax.optimization_barrier((x, x)), (X,), True),
        (lambda x: lax.optimization_barrier((x, x[0])), (X,), False),
        (jnp.dot, (X, X), False),
    ],
    ids=["add", "clamp", "bitcast", "narrower", "scalar bits", "barrier", "shapes", "dot"],
)
def test_elementwise_is_said_of_equations_and_not_of_names(fn, args, expected):
    assert jaxprs.is_elementwise(equations(fn, *args)[-1]) is expected


# Where tables differed


@pytest.mark.parametrize(
    "zero", [zero_like, jnp.zeros_like, jax.checkpoint(jnp.zeros_like)], ids=["custom", "", "remat"]
)
def test_frozen_leaves_are_followed_through_every_call(zero):
    def update(updates, state, params=None):
        moved = {"a": updates["a"], "b": checkpoint_name(zero(updates["b"])[::-1], "update")}
        return moved, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    assert frozen_leaves.frozen_leaves(tx, {"a": X, "b": X}) == [False, True]


def test_windows_write_out_jits_and_leave_calls_with_rules_of_their_own():
    """A gradient through `windows.run` is the one that the rule gives."""

    def step(x):
        return [jax.jit(lambda x: double(x) + jax.checkpoint(jnp.sin)(x))(x)], None

    np.testing.assert_allclose(windows.run(step, X, window_bytes=8)[0][0], step(X)[0][0], rtol=1e-6)
    grad = jax.grad(lambda x: jnp.sum(windows.run(step, x, window_bytes=8)[0][0]))(X)
    np.testing.assert_allclose(grad, 2.0 + jnp.cos(X), rtol=1e-6)


def test_all_elementwise_operations_are_asked_element_by_element():
    """erf_inv is one, as exp is: inf of 1 counts as made of finite numbers, beside NaN of an infinite constant."""
    bad = jaxmp.monitor.first_bad_op(lambda x: jax.scipy.special.erfinv(x + jnp.array([0.0, jnp.inf])), jnp.ones(2))
    assert (bad.primitive, bad.note) == ("erf_inv", "")
