"""Rows of a 16-bit table: the gradient of a row that is used often is summed in float32."""

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
