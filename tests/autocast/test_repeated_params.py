"""16-bit params whose elements are used often, rows of a table and biases: their gradients are summed in float32.

The plain sum of 16-bit numbers ends at 256 in bfloat16, because 256 + 1 is 256 there. XLA for CPU makes that sum for
inputs of three axes; the transpose of a gather adds in the dtype of the table on every device.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_sums import in_turn

import jaxmp
import regimes
from helpers import assert_close, assert_moved, assert_within_ulps

ROWS, WIDTH, TIMES = 4, 8, 3000
EYE = np.eye(WIDTH, dtype=np.float32)


def gradient(fn, policy, params, x, **options):
    """With respect to float32 params, which the policy casts, of the sum of all that `fn` returns."""
    params = {"param": jax.tree.map(jnp.asarray, params)}
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=1.0).init(params)
    loss_fn = lambda params, x: jnp.sum(fn(params["param"], x).astype(jnp.float32))  # noqa: E731
    grad_fn = jaxmp.value_and_grad(loss_fn, policy=policy, **options)
    return grad_fn(jaxmp.get_policy(policy).cast_to_param(params), x, opt_state=opt_state)[1]["param"]


# A table, tokens, and how often each row is taken.
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
TOKENS = np.repeat(np.array([2, 1], np.int32), [TIMES, 8]).reshape(-1, 4)
OF_ROWS = (TABLE, TOKENS, np.broadcast_to(np.float32([[0], [8], [TIMES], [0]]), TABLE.shape))


def take(table, tokens):
    return jnp.take(table, tokens, axis=0)


def embed(table, tokens, dtype=None):
    return nn.Embed(ROWS, WIDTH, dtype=dtype).apply({"params": {"embedding": table}}, tokens)


# A bias or factor [width] of arrays [rows, positions, width], of which all elements are one.
INPUTS = np.ones((25, 120, WIDTH), np.float32)
OF_BIAS = (np.ones(WIDTH, np.float32), INPUTS, np.full(WIDTH, TIMES, np.float32))


def wide(bias, x):
    return bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def layer(bias, x):
    return x @ EYE + wide(bias, x)


def dense(bias, x, dtype=None):
    return nn.Dense(WIDTH, dtype=dtype).apply({"params": {"kernel": EYE, "bias": bias}}, x)


def layers_in_a_loop(bias, x):
    return jax.lax.scan(lambda x, bias: (layer(bias, x), None), x, jnp.stack([bias, bias]))[0] / 2


# A weight, a bias and a factor that every turn of a loop reads.
OF_LOOP = (
    {"w": EYE, "b": np.zeros(WIDTH, np.float32), "s": np.float32(1)},
    np.ones((TIMES, 1, WIDTH), np.float32),
    {"w": np.full_like(EYE, TIMES), "b": np.full(WIDTH, TIMES, np.float32), "s": np.float32(TIMES * WIDTH)},
)


def turn(w, x):
    return (x @ w["w"] + wide(w["b"], x)) * w["s"]


def recurrent(w, x):
    return jax.lax.scan(lambda h, x: (jnp.zeros_like(h), turn(w, x)), jnp.zeros(WIDTH, x.dtype), x)[1]


def remat_in_a_loop(w, x):
    return jax.lax.scan(lambda _, x: (None, jax.checkpoint(turn)(w, x)), None, x)[1]


def in_two_loops(w, x):
    return jax.lax.scan(lambda _, x: (None, recurrent(w, x)), None, x.reshape(10, -1, 1, WIDTH))[1]


# A weight with many readers, of which the last has a gradient of 256.
READERS = np.ones((9, 1, WIDTH), np.float32)
READERS[-1] = 256
OF_READERS = (EYE, READERS, np.full_like(EYE, 264))


def read_in_turn(w, x):
    return jnp.stack([row @ w for row in x])


USED_OFTEN = {
    "rows, taken": (take, OF_ROWS),
    "rows for each example, under remat": (jax.vmap(jax.checkpoint(embed), (None, 0)), OF_ROWS),
    "rows that a model casts": (lambda table, tokens: embed(table, tokens, jnp.bfloat16), OF_ROWS),
    "a bias of a layer of 16 bits": (lambda bias, x: dense(bias, x, jnp.bfloat16), OF_BIAS),
    "a bias, subtracted": (lambda bias, x: -(x @ EYE - wide(bias, x)), OF_BIAS),
    "a bias, repeated": (lambda bias, x: x @ EYE + jnp.broadcast_to(bias, x.shape), OF_BIAS),
    "a factor": (lambda scale, x: x @ EYE * wide(scale, x), OF_BIAS),
    "a bias for each example": (jax.vmap(jax.vmap(layer, (None, 0)), (None, 0)), OF_BIAS),
    "a bias under remat": (jax.checkpoint(layer), OF_BIAS),
    "a bias of layers in a loop": (layers_in_a_loop, OF_BIAS),
    "a bias in a branch": (
        lambda bias, x: jax.lax.cond(x[0, 0, 0] > 0, layer, lambda bias, x: x @ EYE - wide(bias, x), bias, x),
        OF_BIAS,
    ),
    "many readers in a function": (jax.jit(read_in_turn), OF_READERS),
    "many readers of what is moved": (lambda w, x: read_in_turn(w.T, x), OF_READERS),
    "weights of a loop": (recurrent, OF_LOOP),
    "weights of a loop in 16 bits": (lambda w, x: recurrent(w, x.astype(w["w"].dtype)), OF_LOOP),
    "weights of a loop, under remat": (remat_in_a_loop, OF_LOOP),
    "weights of two loops": (in_two_loops, OF_LOOP),
    "slices of weights": (lambda w, x: recurrent(jax.tree.map(lambda p: jnp.stack([p, p])[1], w), x), OF_LOOP),
}


@pytest.mark.thorough(5)
@pytest.mark.parametrize(("name", "policy"), in_turn(USED_OFTEN, ["bf16", "fp16", "bf16-mixed"]), ids=USED_OFTEN)
def test_what_is_used_often_gets_the_whole_sum(name, policy):
    fn, (params, x, expected) = USED_OFTEN[name]
    grads = jax.device_get(jax.jit(functools.partial(gradient, fn, policy))(params, x))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jaxmp.get_policy(policy).param_dtype}
    assert_close(jax.tree.map(lambda g: g.astype(np.float32), grads), expected, rtol=2**-8)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_and_in_microbatches(check_vma):
    tokens = TOKENS[: len(TOKENS) // (2 * regimes.DEVICES) * (2 * regimes.DEVICES)]

    def mean(tokens):
        grad = gradient(embed, "bf16", TABLE, tokens, accumulate=2).astype(jnp.float32)
        return jax.lax.pmean(grad, regimes.AXIS)

    specs = {"in_specs": jax.P(regimes.AXIS), "out_specs": jax.P(), "check_vma": check_vma}
    grad = jax.jit(jax.shard_map(mean, mesh=regimes.mesh_of(), **specs))(tokens)
    expected = np.stack([(tokens == i).sum() for i in range(ROWS)]) / 2 / regimes.DEVICES
    np.testing.assert_allclose(grad[:, 0], expected, rtol=2**-7)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_bias_on_a_mesh(axis_type):
    mesh = regimes.mesh_of(jax.sharding.AxisType[axis_type])
    x = INPUTS[: len(INPUTS) // regimes.DEVICES * regimes.DEVICES]
    with jax.set_mesh(mesh):
        parts = jax.device_put(x, jax.NamedSharding(mesh, jax.P(regimes.AXIS)))
        bias = jax.device_put(OF_BIAS[0], jax.NamedSharding(mesh, jax.P()))
        grad = jax.jit(functools.partial(gradient, layer, "bf16"))(bias, parts)
    np.testing.assert_allclose(grad.astype(jnp.float32), np.prod(x.shape[:-1]), rtol=2**-8)


def test_rows_and_their_tangents_are_as_they_were():
    table, tangent = (jnp.asarray(x, jnp.bfloat16) for x in (TABLE, TABLE[::-1].copy()))
    fn = lambda table: take(table, TOKENS[:3])  # noqa: E731
    rows, expected = (jax.jvp(f, (table,), (tangent,)) for f in (jaxmp.autocast(fn, jnp.bfloat16), fn))
    assert {x.dtype for x in rows} == {jnp.dtype(jnp.bfloat16)}
    assert_moved(rows, expected)


def test_second_derivatives_of_a_factor():
    fn = lambda s: jnp.sum((INPUTS @ EYE * s[None, None]).astype(jnp.float32) ** 2)  # noqa: E731
    hessian = jax.jit(jax.hessian(jaxmp.autocast(fn, jnp.bfloat16)))(jnp.ones(WIDTH))
    assert_close(hessian, 2 * TIMES * EYE, rtol=2**-8)


def test_a_loop_over_16_bit_weights_computes_what_it_did():
    """Values and second derivatives; inside, products are of 16-bit numbers and nothing else is wider."""
    w = {"w": jnp.asarray(TABLE.T @ TABLE, jnp.bfloat16), "b": jnp.ones(WIDTH, jnp.bfloat16), "s": jnp.bfloat16(0.5)}
    x, tangents = np.ones((3, 1, WIDTH), jnp.bfloat16), jax.tree.map(jnp.ones_like, w)

    def values_and_second_derivatives(fn):
        grad = jax.grad(lambda w: jnp.sum(fn(w, x).astype(jnp.float32) ** 2))
        second = jax.jit(lambda w: jax.jvp(grad, (w,), (tangents,))[1])(w)
        return jax.jit(fn)(w, x), jax.tree.map(lambda y: np.asarray(y).astype(np.float32), second)

    (values, second), (expected_values, expected) = map(
        values_and_second_derivatives, (jaxmp.autocast(recurrent, jnp.bfloat16), recurrent)
    )
    assert_within_ulps(values, expected_values, 2)  # three roundings to bfloat16
    for name, value in expected.items():
        np.testing.assert_allclose(second[name], value, rtol=2**-4, atol=2**-5 * np.abs(value).max())
