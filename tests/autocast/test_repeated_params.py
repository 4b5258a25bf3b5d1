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
    return jax.jit(jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=1.0).init)({"table": TABLE})


def gradient(model, policy, opt_state, tokens):
    """With respect to the table, of the sum of all rows that are taken."""
    params = jaxmp.get_policy(policy).cast_to_param({"table": jnp.asarray(TABLE)})
    loss_fn = lambda params, tokens: jnp.sum(model(params["table"], tokens).astype(jnp.float32))  # noqa: E731
    return jaxmp.value_and_grad(loss_fn, policy=policy)(params, tokens, opt_state=opt_state)[1]["table"]


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
    for got, x in zip(found, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.astype(jnp.float32), x.astype(jnp.float32))


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
