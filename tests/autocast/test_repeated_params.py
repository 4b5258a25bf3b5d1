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
from flax import nnx

import jaxmp
import regimes
from helpers import assert_moved, assert_within_ulps

ROWS, WIDTH, TIMES = 4, 8, 3000
TOKENS = np.repeat(np.array([2, 1], np.int32), [TIMES, 8]).reshape(-1, 4)
OFTEN = np.zeros((ROWS, WIDTH), np.float32)
OFTEN[1:3] = np.array([8, TIMES])[:, None]
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def take(table, tokens):
    return jnp.take(table, tokens, axis=0)


def embed(table, tokens):
    return nn.Embed(ROWS, WIDTH).apply({"params": {"embedding": table}}, tokens)


def embed_nnx(table, tokens):
    model = nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(0))
    model.embedding[...] = table
    return model(tokens)


def for_each_example(table, tokens):
    return jax.vmap(embed, (None, 0))(table, tokens)


def under_remat(table, tokens):
    return jax.checkpoint(embed)(table, tokens)


def cast_by_the_model(table, tokens):
    return nn.Embed(ROWS, WIDTH, dtype=jnp.bfloat16).apply({"params": {"embedding": table}}, tokens)


MODELS = (take, embed, embed_nnx, for_each_example, under_remat, cast_by_the_model)


@functools.cache
def state(policy):
    """On the host: an array that is made under a mesh keeps it, for tests without one too."""
    return jax.device_get(jax.jit(jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=1.0).init)({"table": TABLE}))


def gradient(model, policy, opt_state, tokens):
    """With respect to the table, of the sum of all rows that are taken."""
    params = jaxmp.get_policy(policy).cast_to_param({"table": jnp.asarray(TABLE)})
    loss_fn = lambda params, tokens: jnp.sum(model(params["table"], tokens).astype(jnp.float32))  # noqa: E731
    return jaxmp.value_and_grad(loss_fn, policy=policy)(params, tokens, opt_state=opt_state)[1]["table"]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-mixed"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_row_that_is_used_often_gets_the_whole_sum(model, policy):
    found = jax.jit(functools.partial(gradient, model, policy))(state(policy), TOKENS)
    assert found.dtype == jaxmp.get_policy(policy).param_dtype
    np.testing.assert_allclose(found.astype(jnp.float32), OFTEN, rtol=2**-8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_and_in_microbatches(check_vma):
    spec = jax.sharding.PartitionSpec
    opt_state = state("bf16")
    tokens = TOKENS[: len(TOKENS) // (2 * regimes.DEVICES) * (2 * regimes.DEVICES)]

    def mean(tokens):
        params = {"table": jnp.asarray(TABLE, jnp.bfloat16)}
        loss_fn = lambda params, tokens: jnp.sum(embed(params["table"], tokens).astype(jnp.float32))  # noqa: E731
        compute = jaxmp.value_and_grad(loss_fn, policy="bf16", accumulate=2)
        found = compute(params, tokens, opt_state=opt_state)[1]["table"].astype(jnp.float32)
        return jax.lax.pmean(found, regimes.AXIS) if not check_vma else found

    mesh = jax.make_mesh((regimes.DEVICES,), (regimes.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(mean, mesh=mesh, in_specs=spec(regimes.AXIS), out_specs=spec(), check_vma=check_vma)
    if check_vma:
        run = jax.shard_map(
            lambda tokens: jax.lax.pmean(mean(tokens), regimes.AXIS),
            mesh=mesh,
            in_specs=spec(regimes.AXIS),
            out_specs=spec(),
        )
    expected = np.stack([(tokens == i).sum() for i in range(ROWS)]) / 2 / regimes.DEVICES
    np.testing.assert_allclose(jax.jit(run)(tokens)[:, 0], expected, rtol=2**-7)


def test_rows_and_their_tangents_are_as_they_were():
    table, tangent = (jnp.asarray(x, jnp.bfloat16) for x in (TABLE, TABLE[::-1].copy()))
    fn = lambda table: take(table, TOKENS[:3])  # noqa: E731
    found = jax.jvp(jaxmp.autocast(fn, jnp.bfloat16), (table,), (tangent,))
    expected = jax.jvp(fn, (table,), (tangent,))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert_moved(found, expected)


# ---- biases and factors: (rows, positions, width) plus or times (width,)

INPUTS = np.ones((25, 120, WIDTH), np.float32)


def wide(bias, x):
    return bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def dense(bias, x):
    return nn.Dense(WIDTH).apply({"params": {"kernel": jnp.eye(WIDTH), "bias": bias}}, x)


def dense_nnx(bias, x):
    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    layer.bias[...] = bias
    return layer(x)


def dense_of_16_bits(bias, x):
    layer = nn.Dense(WIDTH, dtype=jnp.bfloat16)
    return layer.apply({"params": {"kernel": jnp.eye(WIDTH), "bias": bias}}, x)


def by_hand(bias, x):
    return x @ jnp.eye(WIDTH) + wide(bias, x)


def subtracted(bias, x):
    return x @ jnp.eye(WIDTH) - wide(bias, x)


def repeated_by_hand(bias, x):
    return x @ jnp.eye(WIDTH) + jnp.broadcast_to(bias, x.shape)


def factor(bias, x):
    return (x @ jnp.eye(WIDTH)) * wide(bias, x)


def of_each_example(bias, x):
    return jax.vmap(jax.vmap(by_hand, (None, 0)), (None, 0))(bias, x)


def rematerialized(bias, x):
    return jax.checkpoint(by_hand)(bias, x)


def layers_in_a_loop(bias, x):
    return jax.lax.scan(lambda x, bias: (by_hand(bias, x), None), x, jnp.stack([bias, bias]))[0] / 2


def chosen(bias, x):
    return jax.lax.cond(x[0, 0, 0] > 0, by_hand, subtracted, bias, x)


LAYERS = (
    dense, dense_nnx, dense_of_16_bits, by_hand, subtracted, repeated_by_hand, factor, of_each_example, rematerialized,
    layers_in_a_loop, chosen,
)  # fmt: skip


@pytest.mark.thorough(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-mixed"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_bias_gets_the_whole_sum(layer, policy):
    policy = jaxmp.get_policy(policy)
    opt_state = state(policy)
    loss_fn = lambda bias, x: jnp.sum(layer(bias, x).astype(jnp.float32))  # noqa: E731
    compute = jaxmp.value_and_grad(loss_fn, policy=policy)
    bias = jnp.ones(WIDTH, policy.param_dtype)
    found = jax.jit(compute)(bias, INPUTS, opt_state=opt_state)[1]
    assert found.dtype == policy.param_dtype
    expected = np.full(WIDTH, (-1 if layer is subtracted else 1) * np.prod(INPUTS.shape[:-1]))
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_types", ["Auto", "Explicit"])
def test_a_bias_on_a_mesh(axis_types):
    mesh = jax.make_mesh((regimes.DEVICES,), (regimes.AXIS,), axis_types=(jax.sharding.AxisType[axis_types],))
    x = INPUTS[: len(INPUTS) // regimes.DEVICES * regimes.DEVICES]
    with jax.set_mesh(mesh):
        parts = jax.device_put(x, jax.NamedSharding(mesh, jax.P(regimes.AXIS)))
        bias = jax.device_put(jnp.ones(WIDTH, jnp.bfloat16), jax.NamedSharding(mesh, jax.P()))
        loss_fn = lambda bias, x: jnp.sum(by_hand(bias, x).astype(jnp.float32))  # noqa: E731
        found = jax.jit(jaxmp.value_and_grad(loss_fn, policy="bf16"))(bias, parts, opt_state=state("bf16"))[1]
    np.testing.assert_allclose(found.astype(jnp.float32), np.prod(x.shape[:-1]), rtol=2**-8)


def test_second_derivatives_of_a_factor():
    loss_fn = jaxmp.autocast(
        lambda s, x: jnp.sum(((x @ jnp.eye(WIDTH)) * s[None, None]).astype(jnp.float32) ** 2), jnp.bfloat16
    )
    found = jax.jit(jax.hessian(loss_fn))(jnp.ones(WIDTH), INPUTS)
    np.testing.assert_allclose(found, 2 * np.prod(INPUTS.shape[:-1]) * np.eye(WIDTH), rtol=2**-8)


# ---- weights that every iteration of a loop reads

TURNS = 3000


def recurrent(w, x):
    """A weight, a bias and a factor of each of many turns, in the dtype that autocast gives them."""
    turn = lambda h, x: (jnp.zeros_like(h), (x @ w["w"] + wide(w["b"], x)) * w["s"])  # noqa: E731
    return jax.lax.scan(turn, jnp.zeros(WIDTH, x.dtype), x)[1]


def in_16_bits(w, x):
    """The same with nothing for autocast to change."""
    return recurrent(w, x.astype(w["w"].dtype))


def under_remat_in_a_loop(w, x):
    return jax.lax.scan(
        lambda _, x: (None, jax.checkpoint(lambda w: x @ w["w"] * w["s"] + wide(w["b"], x))(w)), None, x
    )[1]


def in_two_loops(w, x):
    parts = x.reshape(10, -1, 1, WIDTH)
    return jax.lax.scan(lambda _, x: (None, recurrent(w, x)), None, parts)[1]


def of_a_slice(w, x):
    w = jax.tree.map(lambda p: jnp.stack([p, p])[1], w)
    return recurrent(w, x)


LOOPS = (recurrent, in_16_bits, under_remat_in_a_loop, in_two_loops, of_a_slice)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_weight_of_a_loop_gets_the_whole_sum(loop, policy):
    policy = jaxmp.get_policy(policy)
    loss_fn = lambda w, x: jnp.sum(loop(w, x).astype(jnp.float32))  # noqa: E731
    compute = jaxmp.value_and_grad(loss_fn, policy=policy)
    w = {"w": jnp.eye(WIDTH), "b": jnp.zeros(WIDTH), "s": jnp.ones(())}
    x = np.ones((TURNS, 1, WIDTH), np.float32)
    found = jax.jit(compute)(policy.cast_to_param(w), x, opt_state=state(policy))[1]
    expected = {"w": np.full((WIDTH, WIDTH), TURNS), "b": np.full(WIDTH, TURNS), "s": np.float32(TURNS * WIDTH)}
    for name, value in expected.items():
        assert found[name].dtype == policy.param_dtype
        np.testing.assert_allclose(found[name].astype(jnp.float32), value, rtol=2**-8, err_msg=name)


def test_a_loop_over_16_bit_weights_computes_what_it_did():
    """Values and second derivatives; inside, products are of 16-bit numbers and nothing else is wider."""
    w = {"w": jnp.asarray(TABLE.T @ TABLE, jnp.bfloat16), "b": jnp.ones(WIDTH, jnp.bfloat16), "s": jnp.bfloat16(0.5)}
    x = np.ones((3, 1, WIDTH), jnp.bfloat16)
    fn = jaxmp.autocast(recurrent, jnp.bfloat16)
    assert_within_ulps(jax.jit(fn)(w, x), jax.jit(recurrent)(w, x), 2)  # three roundings to bfloat16
    tangents = jax.tree.map(jnp.ones_like, w)
    loss_fn = lambda w, fn: jnp.sum(fn(w, x).astype(jnp.float32) ** 2)  # noqa: E731
    found, expected = (
        jax.jit(lambda w, t, fn=fn: jax.jvp(jax.grad(lambda w: loss_fn(w, fn)), (w,), (t,))[1])(w, tangents)
        for fn in (fn, recurrent)
    )
    for name, value in expected.items():
        got, value = (np.asarray(y).astype(np.float32) for y in (found[name], value))
        np.testing.assert_allclose(got, value, rtol=2**-4, atol=2**-5 * np.abs(value).max())
