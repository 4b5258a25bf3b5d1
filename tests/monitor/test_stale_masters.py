"""Params that are not their masters are seen in every step, sampled or not, in every way to run a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.monitor import Monitor, step_stats
from regimes import AXIS, mesh_of

W = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
TX = jaxmp.mixed_precision(optax.adam(1e-2), "bf16")


def stats_of(params, opt_state, i, when=True):
    """The statistics of step i; one step of ten is sampled."""
    grads = jax.tree.map(jnp.ones_like, params)
    return step_stats(grads, opt_state, params, when=when and i % 10 == 0, histogram=False)


@functools.cache
def start(tx=TX):
    params32 = {"w": jnp.asarray(W), "b": jnp.zeros(3), "s": jnp.ones(()), "kept": jnp.ones(4)}
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    return params | {"kept": params32["kept"]}, jax.jit(tx.init)(params32)


def by_hand(params):
    return params | {"w": jnp.asarray(np.asarray(params["w"]) * params["w"].dtype.type(0.5))}


def findings(*stats):
    monitor = Monitor(warn=False)
    for i, one in enumerate(stats):
        monitor.update(10 + i, {}, stats=one)
    monitor.finish()
    return {(f.kind, f.path, f.step) for f in monitor.findings}


HOW = ["jit", "pmap", "pmap-stacked", "shard_map", "shard_map-unchecked", "parts", "fsdp"]


@functools.cache
def compiled(how):
    """`(params, opt_state, i) -> stats`, of params that each device holds, or that are split over the devices."""
    mesh = mesh_of()
    if how.startswith("pmap"):
        axes = {"in_axes": (0, None, None, None), "out_axes": 0 if how == "pmap-stacked" else None}
        mapped = jax.pmap(lambda _, *args: stats_of(*args), AXIS, devices=jax.devices()[:4], **axes)
        return functools.partial(mapped, jnp.zeros(4))
    if how in ("jit", "fsdp"):
        return jax.jit(stats_of)
    check_vma = how != "shard_map-unchecked"
    cut = lambda tree: jax.tree.map(lambda x: P(AXIS) if jnp.ndim(x) == 2 else P(), tree)  # noqa: E731
    specs = (cut(start()[0]), cut(start()[1]), P()) if how == "parts" else P()

    mapped = jax.shard_map(stats_of, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    return jax.jit(mapped)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("how", HOW)
def test_a_param_that_was_changed_between_two_samples(how):
    params, opt_state = start()
    changed = by_hand(params)
    if how == "fsdp":
        mesh = mesh_of()
        put = lambda x: jax.device_put(x, NamedSharding(mesh, P(AXIS) if jnp.ndim(x) == 2 else P()))  # noqa: E731
        params, changed, opt_state = jax.tree.map(put, (params, changed, opt_state))
    run = compiled(how)
    before, bad, after = (run(p, opt_state, i) for p, i in ((params, 10), (changed, 11), (params, 12)))
    assert set(before.stale_masters) == {"w", "b", "s"}
    assert not np.any(bad.grads.sampled)
    assert findings(before, bad, after) == {("stale_master", "params/w", 11)}
    if how == "fsdp":  # a few values go over the wire, no array
        text = jax.jit(stats_of).lower(changed, opt_state, 11).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text


def test_a_step_that_is_off_holds_nothing():
    text = jax.jit(lambda *args: stats_of(*args, when=False)).lower(*start(), 1).as_text()
    assert stats_of(*start(), 1, when=False) is None and "gather" not in text


def test_split_masters_and_none_have_nothing_to_say():
    split = jaxmp.mixed_precision(optax.adam(1e-2), "bf16", remainder_bits=16)
    params, opt_state = start(split)
    params = params | {"kept": params["kept"].astype(jnp.bfloat16)}
    assert jax.eval_shape(stats_of, by_hand(params), opt_state, 11).stale_masters == {}
    assert jax.eval_shape(stats_of, params, optax.adam(1e-2).init(params), 11).stale_masters == {}


def test_one_value_of_a_small_param_is_rounding():
    params, opt_state = start()
    stats = compiled("jit")(params | {"b": params["b"].at[1].set(1)}, opt_state, 11)
    assert float(stats.stale_masters["b"]) > 0.3 and not findings(stats)


@pytest.mark.thorough(0)
def test_with_nnx():
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param, policy="bf16")
    jaxmp.nnx.cast_to_param(model, "bf16")
    model.kernel[...] = np.asarray(model.kernel[...]) * model.kernel.dtype.type(0.5)
    run = nnx.jit(lambda model, optimizer, i: stats_of(nnx.state(model, nnx.Param), optimizer.opt_state, i))
    assert findings(run(model, optimizer, 11)) == {("stale_master", "params/kernel", 10)}
